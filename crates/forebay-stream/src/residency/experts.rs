//! The experts of one layer's batch. Hits are leased at once and misses as they arrive, in several chunks if they do
//! not all fit.
//!
//! Which experts are kept after the batch depends only on the lookups, so this is decided as soon as they are known. A
//! miss that will be kept goes to its final slot. The slot of any other miss is free again when its lease ends.

use std::collections::VecDeque;

use forebay_store::{BlockLayout, Priority, ReadError};

use super::{Place, READS_MAX, Residency};
use crate::blocks::{BlockId, ExpertIndex, LayerIndex};
use crate::error::StreamError;
use crate::slots::{Lease, Purpose, ReadInFlight, Slot, SlotIndex};

/// State of the experts.
pub(super) struct ExpertBlocks {
    /// Layouts and places of all experts, ordered by layer.
    pub layouts: Vec<BlockLayout>,
    pub places: Vec<Place>,
    pub pool_of_layer: Vec<u32>,
    pub pools: Vec<Pool>,
    /// Slots with prefetched experts that no batch has looked up yet, arrived or being read; oldest first.
    pub prefetched: Vec<SlotIndex>,
    /// True for experts that another tier holds, by their number. The cache does not count them as resident.
    pub handed_over: Vec<bool>,
}

impl ExpertBlocks {
    /// Returns the number of the pool that holds a layer's experts.
    pub fn pool_of(&self, layer: LayerIndex) -> usize {
        self.pool_of_layer[layer.0 as usize] as usize
    }
}

/// The slots of one size class.
pub(super) struct Pool {
    first: SlotIndex,
    end: SlotIndex,
    free: Vec<SlotIndex>,
    /// Slots whose expert has been evicted but may still be leased.
    leaving: Vec<SlotIndex>,
    /// Slots with a copy of an expert that another tier holds, oldest first. They are as good as free.
    copies: VecDeque<SlotIndex>,
}

impl Pool {
    pub fn new(slots: Vec<SlotIndex>) -> Pool {
        let first = slots.first().copied().unwrap_or(0);
        let end = slots.last().map_or(first, |last| last + 1);
        let (leaving, copies) =
            (Vec::with_capacity(slots.len()), VecDeque::with_capacity(slots.len()));
        Pool { first, end, leaving, copies, free: slots }
    }

    pub fn owns(&self, slot: SlotIndex) -> bool {
        (self.first..self.end).contains(&slot)
    }

    /// Takes a slot that neither the cache nor a lease holds. Copies of what another tier holds go last, and first those that it
    /// has held for longest: it is unlikely to evict them soon.
    pub fn take_free(&mut self, slots: &[Slot]) -> Option<SlotIndex> {
        let unleased = |&slot: &SlotIndex| !slots[slot as usize].is_leased();
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if let Some(position) = self.leaving.iter().position(unleased) {
            return Some(self.leaving.swap_remove(position));
        }
        let position = self.copies.iter().position(unleased)?;
        self.copies.remove(position)
    }

    /// Removes a slot from those with copies. Returns false if it is none.
    pub fn remove_copy(&mut self, slot: SlotIndex) -> bool {
        let position = self.copies.iter().position(|&other| other == slot);
        position.is_some_and(|position| self.copies.remove(position).is_some())
    }
}

/// The open batch, if any. All lists are reused from batch to batch.
pub(super) struct Batch {
    layer: Option<LayerIndex>,
    hits: Vec<(ExpertIndex, Lease)>,
    /// Misses whose read has not started, last first.
    pending: Vec<ExpertIndex>,
    /// Number of misses that are being read.
    in_flight: usize,
    arrived: Vec<ExpertIndex>,
    pub evicted: Vec<(LayerIndex, ExpertIndex)>,
    /// First failure of one of the batch's reads.
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

    /// Returns true if the batch is open for `layer`.
    pub fn is_of(&self, layer: LayerIndex) -> bool {
        self.layer == Some(layer)
    }
}

impl Residency {
    /// Begins the batch of a layer: counts the lookups, leases the hits, and starts reads of misses as slots allow. The
    /// experts must be distinct, and later ones count as used later. An unfinished batch is ended first.
    ///
    /// # Errors
    /// Returns [`StreamError::NoSuchBlock`], [`StreamError::ExpertNamedTwice`], or an error of the read engine.
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
            let has_copy = self.take_over(layer, expert);
            if self.cache.lookup(layer, expert) || has_copy {
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

    /// Appends leases to `out`. The first call appends all hits, if there are any; each later call appends the misses
    /// that have arrived since, and waits for at least one. Returns `false` if nothing is left; nothing was appended
    /// then. When the caller drops the leases of one chunk, their slots become free for the next.
    ///
    /// # Errors
    /// Returns [`StreamError::Read`] with the block's name if a read failed for good. This ends the batch.
    /// Returns [`StreamError::LeasesHoldAllSlots`] if the next chunk has no free slot.
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

    /// Returns true if [`Residency::next_experts`] would not have to wait. Also continues reads, as
    /// [`Residency::progress`] does.
    ///
    /// # Errors
    /// Returns an error if the read engine fails.
    pub fn experts_are_ready(&mut self) -> Result<bool, StreamError> {
        self.progress()?;
        Ok(!self.batch.hits.is_empty() || !self.batch.arrived.is_empty())
    }

    /// Ends the batch. Reads that have not finished are cancelled.
    pub fn end_experts(&mut self) {
        let Some(layer) = self.batch.layer.take() else { return };
        self.batch.hits.clear();
        while let Some(expert) = self.batch.arrived.pop() {
            self.let_pass(layer, expert);
        }
        // The reads of these experts never started, so they are not resident, even if they were to be kept.
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

    /// Returns the error for a batch that cannot proceed because no read is in flight.
    fn nothing_to_wait_for(&mut self, layer: LayerIndex) -> StreamError {
        if let Some(&expert) = self.batch.pending.last() {
            return StreamError::LeasesHoldAllSlots { block: BlockId::Expert(layer, expert) };
        }
        // Stop rather than wait forever.
        let why = "the read engine has lost a read".to_owned();
        self.stopped = Some(why.clone());
        StreamError::Stopped { why }
    }

    fn hand_out(&mut self, layer: LayerIndex, out: &mut Vec<(ExpertIndex, Lease)>) {
        // The list is moved out because the loop borrows `self`, and moved back to keep its capacity.
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

    /// Frees the slot of an expert that the cache does not keep; if it is leased, when the last lease ends. An expert that another
    /// tier holds stays in the slot until something else needs it.
    fn let_pass(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if self.cache.is_resident(layer, expert) {
            return;
        }
        let is_elsewhere = self.experts.handed_over[self.cache.entry(layer, expert)];
        let place = self.place(BlockId::Expert(layer, expert));
        let Place::Present(slot) = *place else { return };
        if is_elsewhere {
            self.pool_mut(layer).copies.push_back(slot);
            return;
        }
        *place = Place::Absent;
        self.free_slot(layer, slot);
    }

    /// Records that no other tier holds an expert any more. Returns true if RAM has a copy, whose slot then is no longer as good as
    /// free.
    pub(super) fn take_over(&mut self, layer: LayerIndex, expert: ExpertIndex) -> bool {
        let entry = self.cache.entry(layer, expert);
        let was_elsewhere = std::mem::take(&mut self.experts.handed_over[entry]);
        match self.experts.places[entry] {
            Place::Present(slot) if was_elsewhere => self.pool_mut(layer).remove_copy(slot),
            _ => false,
        }
    }

    fn pool_mut(&mut self, layer: LayerIndex) -> &mut Pool {
        let pool = self.experts.pool_of(layer);
        &mut self.experts.pools[pool]
    }

    fn take_hit(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        let block = BlockId::Expert(layer, expert);
        match *self.place(block) {
            Place::Present(slot) => {
                let lease = self.slots[slot as usize].lease(slot, block);
                self.batch.hits.push((expert, lease));
            }
            // A resident expert is always present, except during a preload. It is then treated like a miss.
            Place::Reading(_) | Place::Absent => self.batch.pending.push(expert),
        }
    }

    /// Decides which experts are kept, and frees the slots of evicted ones.
    fn retain(&mut self, layer: LayerIndex, experts: &[ExpertIndex]) {
        let mut evicted = std::mem::take(&mut self.batch.evicted);
        self.cache.retain(layer, experts, &mut evicted);
        for (of, expert) in evicted.drain(..) {
            tracing::trace!(layer = of.0, expert = expert.0, "evict");
            self.let_go(of, expert);
        }
        self.batch.evicted = evicted;
    }

    /// Frees the slot of an evicted expert. If it has arrived for the open batch, the slot is freed after the lease is
    /// handed out.
    pub(super) fn let_go(&mut self, layer: LayerIndex, expert: ExpertIndex) {
        if !(self.batch.is_of(layer) && self.batch.arrived.contains(&expert)) {
            self.let_pass(layer, expert);
        }
    }

    /// Claims misses that are already prefetched or being read, before other reads can take their slots.
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

    /// Starts reads of the open batch's misses into slots that have become free.
    pub(super) fn start_freed(&mut self) {
        if let Some(layer) = self.batch.layer {
            self.start_misses(layer);
        }
    }

    /// Starts reads of pending misses while there are free slots.
    fn start_misses(&mut self, layer: LayerIndex) {
        while let Some(&expert) = self.batch.pending.last() {
            if self.engine.in_flight() >= READS_MAX {
                return;
            }
            let block = BlockId::Expert(layer, expert);
            if *self.place(block) != Place::Absent {
                // A prefetch of this expert started after the batch began.
                self.claim_prefetched(layer);
                continue;
            }
            let Some(slot) = self.take_slot(layer) else { return };
            self.start_read(block, slot, Purpose::Demand, Priority::Demand);
            self.batch.in_flight += 1;
            self.batch.pending.pop();
        }
    }

    /// Takes a slot for an expert of `layer`. If no slot is free, takes one from a prefetched expert.
    pub(super) fn take_slot(&mut self, layer: LayerIndex) -> Option<SlotIndex> {
        let pool = self.experts.pool_of(layer);
        let free = self.experts.pools[pool].take_free(&self.slots);
        free.or_else(|| self.reclaim_prefetched(pool))
    }

    /// Returns a slot to its pool. A leased slot is reused only after its last lease ends.
    pub(super) fn free_slot(&mut self, layer: LayerIndex, slot: SlotIndex) {
        let is_leased = self.slots[slot as usize].is_leased();
        let pool = self.pool_mut(layer);
        if is_leased { &mut pool.leaving } else { &mut pool.free }.push(slot);
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
            // The expert was preloaded or prefetched: it stays in its slot until a batch uses it.
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
                // The read was cancelled, and then the batch requested the same expert.
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

    /// Cancels the demanded reads of a layer's experts, for example after its batch has ended early.
    pub(super) fn give_up_reads(&mut self, layer: LayerIndex) {
        let pool = self.experts.pool_of(layer);
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
            // Ascending lists, the usual case, take one comparison for each expert.
            ascending &= index == 0 || experts[index - 1] < expert;
            if !ascending && experts[..index].contains(&expert) {
                return Err(StreamError::ExpertNamedTwice { layer: layer.0, expert: expert.0 });
            }
        }
        Ok(())
    }
}
