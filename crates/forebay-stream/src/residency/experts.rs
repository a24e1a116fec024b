//! The experts of one layer's batch: hits at once, misses as they arrive, in waves when they are more than fit.
//!
//! Who stays after the batch depends on its lookups only, so it is decided as soon as they are known. A miss
//! that will stay goes to its slot for good; the others pass through: their slot is free again when their lease ends.

use forebay_store::{BlockLayout, Priority, ReadError};

use super::{Place, READS_MAX, Residency};
use crate::blocks::{BlockId, ExpertIndex, LayerIndex};
use crate::error::StreamError;
use crate::slots::{Lease, Purpose, ReadInFlight, Slot, SlotIndex};

/// State of the experts.
pub(super) struct ExpertBlocks {
    /// Layouts and places of all experts, layers one after the other.
    pub layouts: Vec<BlockLayout>,
    pub places: Vec<Place>,
    pub pool_of_layer: Vec<u32>,
    pub pools: Vec<Pool>,
    /// Slots that hold, or will hold, experts that nobody has asked for yet; oldest first.
    pub prefetched: Vec<SlotIndex>,
}

/// The slots of one size class.
pub(super) struct Pool {
    first: SlotIndex,
    end: SlotIndex,
    free: Vec<SlotIndex>,
    /// Slots whose block need not stay but may still be leased.
    leaving: Vec<SlotIndex>,
}

impl Pool {
    pub fn new(slots: Vec<SlotIndex>) -> Pool {
        let first = slots.first().copied().unwrap_or(0);
        let end = slots.last().map_or(first, |last| last + 1);
        Pool { first, end, leaving: Vec::with_capacity(slots.len()), free: slots }
    }

    pub fn owns(&self, slot: SlotIndex) -> bool {
        (self.first..self.end).contains(&slot)
    }

    /// A slot that nothing holds.
    pub fn take_free(&mut self, slots: &[Slot]) -> Option<SlotIndex> {
        let unleased = |&slot: &SlotIndex| !slots[slot as usize].is_leased();
        self.free.pop().or_else(|| {
            let position = self.leaving.iter().position(unleased)?;
            Some(self.leaving.swap_remove(position))
        })
    }
}

/// The batch that is open, if any. All lists are reused.
pub(super) struct Batch {
    layer: Option<LayerIndex>,
    hits: Vec<(ExpertIndex, Lease)>,
    /// Misses whose read has not started, last first.
    pending: Vec<ExpertIndex>,
    /// Misses on their way.
    in_flight: usize,
    arrived: Vec<ExpertIndex>,
    pub evicted: Vec<(LayerIndex, ExpertIndex)>,
    /// The first of its reads that failed.
    pub failure: Option<StreamError>,
}

impl Batch {
    pub fn with_room_for(experts: u32) -> Batch {
        let room = experts as usize;
        Batch {
            layer: None,
            hits: Vec::with_capacity(room),
            pending: Vec::with_capacity(room),
            in_flight: 0,
            arrived: Vec::with_capacity(room),
            evicted: Vec::with_capacity(2 * room),
            failure: None,
        }
    }

    /// Whether it is open for `layer`.
    pub fn is_of(&self, layer: LayerIndex) -> bool {
        self.layer == Some(layer)
    }
}

impl Residency {
    /// Begins the batch of a layer: counts the lookups, leases the hits and starts the reads of misses as slots allow. The
    /// experts must be distinct; a later one counts as used later. An unfinished batch is ended first.
    ///
    /// # Errors
    /// [`StreamError::NoSuchBlock`], [`StreamError::ExpertNamedTwice`]; errors of the engine.
    pub fn begin_experts(
        &mut self,
        layer: LayerIndex,
        experts: &[ExpertIndex],
    ) -> Result<(), StreamError> {
        self.check_experts(layer, experts)?;
        self.end_experts();
        self.poll()?;
        self.batch.failure = None;
        self.batch.layer = Some(layer);
        for &expert in experts {
            if self.cache.lookup(layer, expert) {
                self.take_hit(layer, expert);
            } else {
                self.batch.pending.push(expert);
            }
        }
        let (hits, misses) = (self.batch.hits.len(), self.batch.pending.len());
        tracing::trace!(layer = layer.0, hits, misses, "lookup");
        self.batch.pending.reverse();
        self.claim_prefetched(layer);
        self.retain(layer, experts);
        self.start_misses(layer);
        self.read_dense_ahead();
        Ok(())
    }

    /// Appends leases to `out`: at first all hits, if there are any; then each time what has arrived since, waiting for at
    /// least one. `false`: nothing is left, and nothing was appended. Dropping the leases of a wave makes room for the next.
    ///
    /// # Errors
    /// [`StreamError::Read`] with the block's name when a read failed for good; that ends the batch.
    /// [`StreamError::LeasesHoldAllSlots`] when the next wave has no room.
    pub fn next_experts(
        &mut self,
        out: &mut Vec<(ExpertIndex, Lease)>,
    ) -> Result<bool, StreamError> {
        let layer = self.batch.layer.ok_or(StreamError::NoBatch)?;
        if !self.batch.hits.is_empty() {
            out.append(&mut self.batch.hits);
            return Ok(true);
        }
        let outcome = self.next_arrivals(layer, out);
        if outcome.is_err() {
            self.end_experts();
        }
        outcome
    }

    /// Whether [`Residency::next_experts`] has something to give without waiting; reads go on as with [`Residency::progress`].
    ///
    /// # Errors
    /// Errors of the engine.
    pub fn experts_are_ready(&mut self) -> Result<bool, StreamError> {
        self.progress()?;
        Ok(!self.batch.hits.is_empty() || !self.batch.arrived.is_empty())
    }

    /// Ends the batch. What has not arrived by now is given up.
    pub fn end_experts(&mut self) {
        let Some(layer) = self.batch.layer.take() else { return };
        self.batch.hits.clear();
        while let Some(expert) = self.batch.arrived.pop() {
            self.let_pass(layer, expert);
        }
        // What was to stay but never came is not resident.
        while let Some(expert) = self.batch.pending.pop() {
            self.cache.forget(layer, expert);
        }
        if self.batch.in_flight > 0 {
            self.give_up_reads(layer);
        }
        self.drop_prefetches(layer);
    }

    fn next_arrivals(
        &mut self,
        layer: LayerIndex,
        out: &mut Vec<(ExpertIndex, Lease)>,
    ) -> Result<bool, StreamError> {
        self.poll()?;
        loop {
            if let Some(failure) = self.batch.failure.take() {
                return Err(failure);
            }
            self.start_misses(layer);
            self.read_dense_ahead();
            if !self.batch.arrived.is_empty() {
                self.hand_out(layer, out);
                return Ok(true);
            }
            if self.batch.in_flight == 0 && self.batch.pending.is_empty() {
                return Ok(false);
            }
            if self.engine.in_flight() == 0 {
                return Err(self.nothing_to_wait_for(layer));
            }
            let reads = self.batch.in_flight;
            let _span = tracing::trace_span!("expert_wait", layer = layer.0, reads).entered();
            self.wait()?;
        }
    }

    /// No read is under way that could bring the batch on.
    fn nothing_to_wait_for(&mut self, layer: LayerIndex) -> StreamError {
        if let Some(&expert) = self.batch.pending.last() {
            return StreamError::LeasesHoldAllSlots { block: BlockId::Expert(layer, expert) };
        }
        // Rather no answer than an endless wait.
        let why = "the read engine has lost a read".to_owned();
        self.stopped = Some(why.clone());
        StreamError::Stopped { why }
    }

    fn hand_out(&mut self, layer: LayerIndex, out: &mut Vec<(ExpertIndex, Lease)>) {
        // Taken out while the slots are looked at; put back for its capacity.
        let mut arrived = std::mem::take(&mut self.batch.arrived);
        for expert in arrived.drain(..) {
            let block = BlockId::Expert(layer, expert);
            if let Place::Present(slot) = *self.place(block) {
                out.push((expert, self.slots[slot as usize].lease(slot, block)));
            }
            self.let_pass(layer, expert);
        }
        self.batch.arrived = arrived;
    }

    /// An expert that does not stay leaves its slot when its lease ends.
    fn let_pass(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if self.cache.is_resident(layer, expert) {
            return;
        }
        let place = self.place(BlockId::Expert(layer, expert));
        if let Place::Present(slot) = *place {
            *place = Place::Absent;
            self.free_slot(layer, slot);
        }
    }

    fn take_hit(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let block = BlockId::Expert(layer, expert);
        match *self.place(block) {
            Place::Present(slot) => {
                let lease = self.slots[slot as usize].lease(slot, block);
                self.batch.hits.push((expert, lease));
            }
            // A resident expert is present, except while it is preloaded; then it is waited for like a miss.
            Place::Reading(_) | Place::Absent => self.batch.pending.push(expert),
        }
    }

    /// Decides who stays, and lets the others go.
    fn retain(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) {
        let mut evicted = std::mem::take(&mut self.batch.evicted);
        self.cache.retain(layer, experts, &mut evicted);
        for (of, expert) in evicted.drain(..) {
            tracing::trace!(layer = of.0, expert = expert.0, "evict");
            self.let_go(of, expert);
        }
        self.batch.evicted = evicted;
    }

    /// An expert does not stay any more. What has arrived for the batch passes when it is handed out.
    pub(super) fn let_go(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if !(self.batch.is_of(layer) && self.batch.arrived.contains(&expert)) {
            self.let_pass(layer, expert);
        }
    }

    /// Claims the misses that are here or on their way already, before others can take their slots.
    fn claim_prefetched(&mut self, layer: LayerIndex) {
        let mut pending = std::mem::take(&mut self.batch.pending);
        pending.retain(|&expert| match *self.place(BlockId::Expert(layer, expert)) {
            Place::Present(slot) => {
                self.use_prefetched(slot);
                self.batch.arrived.push(expert);
                false
            }
            Place::Reading(slot) => {
                self.use_prefetched(slot);
                self.demand_read(slot);
                self.batch.in_flight += 1;
                false
            }
            Place::Absent => true,
        });
        self.batch.pending = pending;
    }

    /// Starts the reads of the open batch's misses whose slots have become free meanwhile.
    pub(super) fn start_freed(&mut self) {
        if let Some(layer) = self.batch.layer {
            self.start_misses(layer);
        }
    }

    /// Starts the reads of pending misses, as far as there are slots.
    fn start_misses(&mut self, layer: LayerIndex) {
        while let Some(&expert) = self.batch.pending.last() {
            if self.engine.in_flight() >= READS_MAX {
                return;
            }
            let block = BlockId::Expert(layer, expert);
            if *self.place(block) != Place::Absent {
                // Prefetched since the batch began.
                self.claim_prefetched(layer);
                continue;
            }
            let Some(slot) = self.take_slot(layer) else { return };
            self.start_read(block, slot, Purpose::Demand, Priority::Demand);
            self.batch.in_flight += 1;
            self.batch.pending.pop();
        }
    }

    /// A slot for an expert of `layer`, if need be one that prefetching holds.
    pub(super) fn take_slot(&mut self, layer: LayerIndex) -> Option<SlotIndex> {
        let pool = self.experts.pool_of_layer[layer.0 as usize] as usize;
        let free = self.experts.pools[pool].take_free(&self.slots);
        free.or_else(|| self.reclaim_prefetched(pool))
    }

    /// Gives a slot back, at once or when its last lease ends.
    pub(super) fn free_slot(&mut self, layer: LayerIndex, slot: SlotIndex) {
        let pool = self.experts.pool_of_layer[layer.0 as usize] as usize;
        let pool = &mut self.experts.pools[pool];
        if self.slots[slot as usize].is_leased() {
            pool.leaving.push(slot);
        } else {
            pool.free.push(slot);
        }
    }

    pub(super) fn expert_arrived(
        &mut self,
        layer: LayerIndex,
        expert: ExpertIndex,
        slot: SlotIndex,
        purpose: Purpose,
    ) {
        match purpose {
            Purpose::Demand if self.batch.is_of(layer) => {
                self.batch.in_flight -= 1;
                self.batch.arrived.push(expert);
            }
            // Preloaded, or prefetched: it waits where it is.
            Purpose::Demand | Purpose::Ahead => {}
            Purpose::Nobody => {
                self.vacate(slot);
                self.free_slot(layer, slot);
            }
        }
    }

    pub(super) fn expert_failed(
        &mut self,
        layer: LayerIndex,
        expert: ExpertIndex,
        slot: SlotIndex,
        read: &ReadInFlight,
        error: &ReadError,
    ) {
        if self.slots[slot as usize].has_buffer() {
            self.free_slot(layer, slot);
        }
        let cancelled = matches!(error, ReadError::Cancelled { .. });
        if read.purpose == Purpose::Demand && self.batch.is_of(layer) {
            self.batch.in_flight -= 1;
            if cancelled {
                // It had been given up before somebody asked for it after all.
                self.batch.pending.push(expert);
                return;
            }
        }
        if let Some(position) = self.experts.prefetched.iter().position(|&other| other == slot) {
            self.experts.prefetched.swap_remove(position);
            self.totals.prefetch.wasted += 1;
        }
        self.cache.forget(layer, expert);
    }

    /// Cancels the reads of a layer's experts that somebody waited for, as a batch that has ended early.
    pub(super) fn give_up_reads(&mut self, layer: LayerIndex) {
        let pool = self.experts.pool_of_layer[layer.0 as usize] as usize;
        let slots = self.experts.pools.get(pool).map_or(0..0, |pool| pool.first..pool.end);
        for slot in slots {
            let Slot { read: Some(read), block, .. } = &self.slots[slot as usize] else { continue };
            let Some(BlockId::Expert(of, expert)) = *block else { continue };
            if of == layer && read.purpose == Purpose::Demand {
                self.abandon_read(slot);
                self.cache.forget(layer, expert);
            }
        }
        self.batch.in_flight = 0;
    }

    pub(super) fn check_experts(
        &self,
        layer: LayerIndex,
        experts: &[ExpertIndex],
    ) -> Result<(), StreamError> {
        let known = self.cache.experts(layer);
        let mut ascending = true;
        for (index, &expert) in experts.iter().enumerate() {
            if expert.0 >= known {
                return Err(StreamError::NoSuchBlock { block: BlockId::Expert(layer, expert) });
            }
            // Ascending lists, the usual ones, are checked in one step for each expert.
            ascending &= index == 0 || experts[index - 1] < expert;
            if !ascending && experts[..index].contains(&expert) {
                return Err(StreamError::ExpertNamedTwice { layer: layer.0, expert: expert.0 });
            }
        }
        Ok(())
    }
}
