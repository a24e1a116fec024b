//! State of all blocks: absent, being read, resident or leased. Only this module calls a read engine.
//!
//! Every read goes into a slot that nothing else uses, and a block can be leased only after its read succeeded. Bytes
//! of a failed, short or cancelled read are therefore never used in a computation.

mod dense;
mod experts;
mod prefetch;
mod returns;
mod setup;

use std::time::Instant;

use forebay_store::{BlockLayout, BlockRead, Completion, Priority, ReadEngine, ReadError};

use crate::blocks::BlockId;
use crate::cache::{CacheState, LayerUses};
use crate::error::StreamError;
use crate::plan::MemoryPlan;
use crate::slots::{Lease, Purpose, ReadInFlight, Slot, SlotIndex};
use crate::statistics::{IoCounters, PeakBytes, StreamStatistics, TokenLog, TokenRecord, Totals};

use dense::DenseBlocks;
use experts::{Batch, ExpertBlocks};
pub use returns::Returning;

/// Location of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Absent,
    /// The block is being read into this slot.
    Reading(SlotIndex),
    Present(SlotIndex),
}

/// Most blocks in flight. The engine has its own, finer limit on requests.
const READS_MAX: usize = 64;

/// State of every block of a model. Reads blocks into the arena's slots and hands out leases.
pub struct Residency {
    plan: MemoryPlan,
    cache: CacheState,
    engine: Box<dyn ReadEngine>,
    slots: Vec<Slot>,
    dense: DenseBlocks,
    experts: ExpertBlocks,
    batch: Batch,
    /// Buffer for completions, reused from call to call.
    completions: Vec<Completion>,
    /// First failure of a demanded read that does not belong to the open batch.
    failure: Option<StreamError>,
    /// Reason why nothing can be read any more.
    stopped: Option<String>,
    reads_started: u64,
    occupied_bytes: u64,
    occupied_bytes_max: u64,
    totals: Totals,
    log: TokenLog,
    window: Window,
}

/// Starting point of the statistics.
struct Window {
    since: Instant,
    totals: Totals,
    io: forebay_store::IoStatistics,
}

impl Residency {
    /// Returns the memory plan.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Returns a description of the read path in use.
    pub fn engine_info(&self) -> forebay_store::EngineInfo {
        self.engine.describe()
    }

    /// Returns the bytes of part `part` of a leased block. They are the bytes on disk, or the result of the relayout if
    /// the block has one. They do not move while the lease lives.
    ///
    /// # Panics
    /// Panics if the lease belongs to another residency, or the block has no such part.
    pub fn bytes<'lease>(&self, lease: &'lease Lease, part: usize) -> &'lease [u8] {
        &lease.slot_bytes()[self.range(lease, part)]
    }

    /// Returns the byte range of part `part` in the slot of a leased block.
    ///
    /// # Panics
    /// Panics as [`Residency::bytes`] does.
    pub fn range(&self, lease: &Lease, part: usize) -> std::ops::Range<usize> {
        self.held(lease)[part].clone()
    }

    /// Returns the byte ranges of all parts in the slot of a leased block.
    fn held(&self, lease: &Lease) -> &[std::ops::Range<usize>] {
        let slot = &self.slots[lease.slot as usize];
        assert!(slot.gave(lease), "the lease of {} belongs to another residency", lease.block());
        &self.layout(lease.block()).held
    }

    /// Returns the byte ranges of an expert's parts in the slot of its block. Experts without a gate have two parts, and the last
    /// range is empty.
    ///
    /// # Panics
    /// Panics if the lease belongs to another residency.
    pub fn expert_ranges(&self, lease: &Lease) -> [std::ops::Range<usize>; 3] {
        expert_parts(self.held(lease))
    }

    /// Returns an expert's parts ([`Residency::expert_ranges`]).
    ///
    /// # Panics
    /// Panics if the lease belongs to another residency.
    pub fn expert_bytes<'lease>(&self, lease: &'lease Lease) -> [&'lease [u8]; 3] {
        self.expert_ranges(lease).map(|range| &lease.slot_bytes()[range])
    }

    /// Submits queued reads and takes in completed ones, without waiting. This includes misses of the open batch for
    /// which dropped leases have made room. Callers use it between or beside computations.
    ///
    /// # Errors
    /// Returns an error if the read engine fails.
    pub fn progress(&mut self) -> Result<(), StreamError> {
        self.start_freed();
        if self.engine.in_flight() == 0 {
            return Ok(());
        }
        self.poll()
    }

    /// Returns the memory of all slots that no read is writing to, whatever it contains. Used to measure memory
    /// bandwidth.
    pub fn slot_memory(&self) -> impl Iterator<Item = &[u8]> {
        self.slots.iter().filter_map(Slot::memory)
    }

    /// Returns the number of parts of a block.
    pub fn parts(&self, lease: &Lease) -> usize {
        self.layout(lease.block()).held.len()
    }

    /// Ends a generated token. Counts since the previous end are attributed to it.
    pub fn end_token(&mut self) {
        let now = self.totals();
        self.log.end_token(&now);
    }

    /// Ends the processing of `tokens` prompt tokens.
    pub fn end_prompt(&mut self, tokens: usize) {
        let now = self.totals();
        self.log.end_prompt(tokens as u64, &now);
    }

    /// Returns records of generated tokens, oldest first. After more than 4096 tokens, one record sums up several.
    pub fn token_records(&self) -> &[TokenRecord] {
        self.log.records()
    }

    /// Restarts the counters, for instance after a warm-up. Peaks and `max_resident_per_layer` are kept.
    pub fn reset_statistics(&mut self) {
        let now = self.totals();
        self.log.reset(&now);
        self.window =
            Window { since: Instant::now(), totals: now, io: self.engine.io_statistics() };
    }

    /// Returns the counters since the start or the last reset.
    pub fn statistics(&self) -> StreamStatistics {
        let (now, from) = (self.totals(), &self.window.totals);
        let mut cache = crate::cache::CacheCounters::default();
        cache.add_between(&from.cache, &now.cache);
        let elapsed = self.window.since.elapsed().as_secs_f64();
        StreamStatistics {
            policy: self.plan.policy,
            lookups: cache.lookups,
            hits: cache.hits,
            misses: cache.misses(),
            hit_rate: cache.hit_rate(),
            evictions: cache.evictions,
            experts_read: now.experts_read - from.experts_read,
            dense_blocks_read: now.dense_blocks_read - from.dense_blocks_read,
            bytes_read: now.bytes_read - from.bytes_read,
            wait_seconds: (now.wait_nanoseconds - from.wait_nanoseconds) as f64 * 1e-9,
            prompt_tokens: self.log.prompt_tokens,
            generated_tokens: self.log.generated_tokens(),
            faulted_experts_per_token: self.log.faulted_experts(),
            max_resident_per_layer: self.cache.resident_max().max().unwrap_or(0),
            peak_bytes: PeakBytes {
                host_reserved: self.plan.arena_bytes,
                host_occupied: self.occupied_bytes_max,
            },
            prefetch: now.prefetch.since(&from.prefetch),
            io: IoCounters::between(&self.window.io, &self.engine.io_statistics(), elapsed),
        }
    }

    /// Returns the uses of all experts in RAM since the start, by layer.
    pub fn expert_uses(&self) -> Vec<LayerUses> {
        self.cache.uses()
    }

    /// Returns the number of experts that were in memory and that were not, and the bytes read, since the start of the counted
    /// time. This is cheaper than [`Residency::statistics`].
    pub fn hits_misses_and_bytes(&self) -> [u64; 3] {
        let (now, from) = (self.totals(), &self.window.totals);
        let hits = now.cache.hits - from.cache.hits;
        let misses = now.cache.misses() - from.cache.misses();
        [hits, misses, now.bytes_read - from.bytes_read]
    }

    /// Returns the seconds that the computation waited for blocks since the start of the counted time.
    pub fn wait_seconds(&self) -> f64 {
        let waited = self.totals.wait_nanoseconds - self.window.totals.wait_nanoseconds;
        waited as f64 * 1e-9
    }

    fn totals(&self) -> Totals {
        Totals { cache: self.cache.counters(), ..self.totals }
    }

    fn layout(&self, block: BlockId) -> &BlockLayout {
        match block {
            BlockId::Dense(index) => &self.dense.layouts[index as usize],
            BlockId::Expert(layer, expert) => {
                &self.experts.layouts[self.cache.entry(layer, expert)]
            }
        }
    }

    fn place(&mut self, block: BlockId) -> &mut Place {
        match block {
            BlockId::Dense(index) => &mut self.dense.places[index as usize],
            BlockId::Expert(layer, expert) => {
                &mut self.experts.places[self.cache.entry(layer, expert)]
            }
        }
    }

    /// Starts the read of a block into an idle slot.
    fn start_read(
        &mut self,
        block: BlockId,
        slot: SlotIndex,
        purpose: Purpose,
        priority: Priority,
    ) {
        self.vacate(slot);
        let layout = self.layout(block).clone();
        self.reads_started += 1;
        let id = self.reads_started << 32 | u64::from(slot);
        let into = &mut self.slots[slot as usize];
        let buffer = into.take_buffer();
        into.block = Some(block);
        into.read = Some(ReadInFlight { id, purpose });
        self.occupied_bytes += into.bytes;
        self.occupied_bytes_max = self.occupied_bytes_max.max(self.occupied_bytes);
        *self.place(block) = Place::Reading(slot);
        self.engine.queue(BlockRead { id, label: block.label(), layout, buffer, priority });
    }

    /// Removes the block from a slot that no read is writing to.
    fn vacate(&mut self, slot: SlotIndex) {
        let Some(block) = self.slots[slot as usize].block.take() else { return };
        self.occupied_bytes -= self.slots[slot as usize].bytes;
        // The block may have been read into another slot while a lease held it here.
        let place = self.place(block);
        if matches!(*place, Place::Present(at) | Place::Reading(at) if at == slot) {
            *place = Place::Absent;
        }
    }

    /// Marks a read in flight as demanded, and raises its priority.
    fn demand_read(&mut self, slot: SlotIndex) {
        if let Some(read) = &mut self.slots[slot as usize].read {
            read.purpose = Purpose::Demand;
            self.engine.promote(read.id);
        }
    }

    /// Cancels a read in flight. Its completion frees the slot.
    fn abandon_read(&mut self, slot: SlotIndex) {
        if let Some(read) = &mut self.slots[slot as usize].read {
            read.purpose = Purpose::Nobody;
            self.engine.cancel(read.id);
        }
    }

    /// Takes in completed reads without waiting.
    fn poll(&mut self) -> Result<(), StreamError> {
        self.check_running()?;
        let polled = self.engine.poll(&mut self.completions);
        self.settle(polled)
    }

    /// Waits until at least one read has finished.
    fn wait(&mut self) -> Result<(), StreamError> {
        self.check_running()?;
        let start = Instant::now();
        let waited = self.engine.wait(&mut self.completions);
        self.totals.wait_nanoseconds += start.elapsed().as_nanos() as u64;
        self.settle(waited)
    }

    fn settle(
        &mut self,
        outcome: Result<(), forebay_store::StoreError>,
    ) -> Result<(), StreamError> {
        while let Some(completion) = self.completions.pop() {
            self.complete(completion);
        }
        outcome.map_err(|error| {
            let error = StreamError::from(error);
            if !matches!(error, StreamError::Interrupted) {
                self.stopped = Some(error.to_string());
            }
            error
        })
    }

    fn complete(&mut self, completion: Completion) {
        let slot = completion.id as SlotIndex;
        let at = &mut self.slots[slot as usize];
        let Some((read, block)) = at.read.take_if(|read| read.id == completion.id).zip(at.block)
        else {
            return;
        };
        let lost = completion.buffer.is_none();
        at.put_buffer(completion.buffer);
        match completion.result {
            Ok(done) => {
                self.totals.bytes_read += done.bytes_read;
                *self.place(block) = Place::Present(slot);
                match block {
                    BlockId::Dense(_) => self.totals.dense_blocks_read += 1,
                    BlockId::Expert(layer, expert) => {
                        self.totals.experts_read += 1;
                        self.expert_arrived(layer, expert, slot, read.purpose);
                    }
                }
            }
            Err(error) => {
                self.vacate(slot);
                if lost {
                    self.stopped = Some(error.to_string());
                }
                if let BlockId::Expert(layer, expert) = block {
                    self.expert_failed(layer, expert, slot, &read, &error);
                }
                self.report(block, read.purpose, error);
            }
        }
    }

    fn report(&mut self, block: BlockId, purpose: Purpose, error: ReadError) {
        match (purpose, &error) {
            (_, ReadError::Cancelled { .. }) | (Purpose::Nobody, _) => {}
            (Purpose::Ahead, _) => {
                tracing::warn!("{block} could not be read ahead, it will be tried again: {error}");
            }
            (Purpose::Demand, _) => {
                let of_batch =
                    matches!(block, BlockId::Expert(layer, _) if self.batch.is_of(layer));
                let failure = if of_batch { &mut self.batch.failure } else { &mut self.failure };
                failure.get_or_insert(StreamError::Read { block, cause: error });
            }
        }
    }

    fn check_running(&self) -> Result<(), StreamError> {
        match &self.stopped {
            Some(why) => Err(StreamError::Stopped { why: why.clone() }),
            None => Ok(()),
        }
    }
}

/// Returns the byte ranges of an expert's parts. Experts without a gate have two, and the last range is empty.
fn expert_parts(held: &[std::ops::Range<usize>]) -> [std::ops::Range<usize>; 3] {
    [0, 1, 2].map(|part| held.get(part).cloned().unwrap_or_default())
}
