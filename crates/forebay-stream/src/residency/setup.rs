//! Setup: carving the arena into slots, and loading the blocks that always stay in memory.

use std::time::Instant;

use forebay_store::{
    Arena, Block, BlockLayout, FileSet, IoStatistics, LoadItem, LoadOptions, LoadStatistics,
    Loaded, Loader, Priority, ReadEngine, SLOT_ALIGNMENT,
};

use super::dense::DenseBlocks;
use super::experts::{Batch, ExpertBlocks, Pool};
use super::{Place, READS_MAX, Residency, Window};
use crate::blocks::{BlockId, ExpertIndex, LayerIndex, ModelBlocks};
use crate::cache::{CacheShape, CacheState};
use crate::error::StreamError;
use crate::plan::MemoryPlan;
use crate::slots::{Purpose, Slot, SlotIndex};
use crate::statistics::{TokenLog, Totals};

impl Residency {
    /// Carves the slots of `plan` from `arena`, which must have at least `plan.arena_bytes` free. Reads nothing yet.
    ///
    /// # Errors
    /// Returns [`StreamError::PlanMismatch`] if the plan was made for other blocks, or an error of the arena.
    pub fn new(
        blocks: &ModelBlocks,
        plan: MemoryPlan,
        files: &FileSet,
        arena: &Arena,
        engine: Box<dyn ReadEngine>,
    ) -> Result<Residency, StreamError> {
        check(blocks, &plan, files)?;
        let mut slots = Vec::new();
        let mut carve = |bytes: u64, count: usize| -> Result<Vec<SlotIndex>, StreamError> {
            let first = slots.len() as SlotIndex;
            for _ in 0..count {
                slots.push(Slot::new(arena.carve(bytes as usize)?));
            }
            Ok((first..slots.len() as SlotIndex).collect())
        };
        let mut ram_slots = vec![None; plan.dense.pinned.len()];
        for (index, ram_slot) in
            ram_slots.iter_mut().enumerate().filter(|(i, _)| plan.dense.pinned[*i])
        {
            *ram_slot = carve(plan.dense.slot_bytes[index], 1)?.pop();
        }
        let ring = carve(plan.dense.ring_slot_bytes, plan.dense.ring_slots)?;
        let mut pools = Vec::with_capacity(plan.pools.len());
        for pool in &plan.pools {
            pools.push(Pool::new(carve(pool.slot_bytes, pool.slots() as usize)?));
        }
        let planned = |block: &Block| files.plan_block(block, SLOT_ALIGNMENT);
        let cache = CacheState::new(plan.policy, &CacheShape::from_plan(&plan));
        let experts = ExpertBlocks {
            layouts: blocks.experts.iter().flatten().map(planned).collect(),
            places: vec![Place::Absent; cache.entries()],
            pool_of_layer: pool_of_layer(&plan),
            pools,
            prefetched: Vec::with_capacity(cache.entries()),
            handed_over: vec![false; cache.entries()],
        };
        let dense = DenseBlocks::new(blocks.dense.iter().map(planned).collect(), ram_slots, ring);
        let window = Window {
            since: Instant::now(),
            totals: Totals::default(),
            io: IoStatistics::default(),
        };
        Ok(Residency {
            batch: Batch::with_room_for(plan.experts_per_layer.iter().copied().max().unwrap_or(0)),
            plan,
            cache,
            engine,
            slots,
            dense,
            experts,
            completions: Vec::with_capacity(2 * READS_MAX),
            failure: None,
            stopped: None,
            reads_started: 0,
            occupied_bytes: 0,
            occupied_bytes_max: 0,
            totals: Totals::default(),
            log: TokenLog::new(),
            window,
        })
    }

    /// Reads every block that has a slot of its own: the pinned dense blocks, and all experts of pools that hold all of
    /// their experts. Calls `progress` with the bytes loaded so far and the total.
    ///
    /// # Errors
    /// Returns the error of the first read that failed.
    pub fn preload(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), StreamError> {
        let preloaded = self.try_preload(progress);
        if preloaded.is_err() {
            // Otherwise completions of reads in flight would be counted as the next batch's.
            let layers = 0..self.plan.experts_per_layer.len() as u32;
            layers.for_each(|layer| self.give_up_reads(LayerIndex(layer)));
        }
        preloaded
    }

    fn try_preload(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), StreamError> {
        let wanted = self.blocks_to_preload();
        let total = wanted.iter().map(|&block| self.layout(block).wanted_bytes()).sum();
        let mut done = 0;
        let (mut next, mut first_open) = (0, 0);
        progress(0, total);
        // Blocks arrive mostly in order, so progress is counted up to the oldest missing block.
        while let Some(&oldest) = wanted.get(first_open) {
            if let Place::Present(_) = *self.place(oldest) {
                done += self.layout(oldest).wanted_bytes();
                first_open += 1;
                next = next.max(first_open);
                progress(done, total);
                continue;
            }
            self.preload_block(oldest)?;
            next = next.max(first_open + 1);
            while next < wanted.len() && self.engine.in_flight() < READS_MAX {
                self.preload_block(wanted[next])?;
                next += 1;
            }
            self.wait()?;
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Loads the same blocks as [`Residency::preload`], but takes file ranges in the page cache from there. Copy
    /// threads do this while the engine reads the rest, and other threads make the memory resident. No read may be in
    /// flight.
    ///
    /// # Errors
    /// Returns the same errors as [`Residency::preload`].
    pub fn preload_with_copies(
        &mut self,
        files: &FileSet,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<LoadStatistics, StreamError> {
        let mut slots = Vec::new();
        let mut items = Vec::new();
        for block in self.blocks_to_preload() {
            if *self.place(block) != Place::Absent {
                continue;
            }
            let slot = self.slot_for_preload(block)?;
            let (layout, label) = (self.layout(block).clone(), block.label());
            let into = &mut self.slots[slot as usize];
            let buffer = into.take_buffer();
            into.block = Some(block);
            self.occupied_bytes += into.bytes;
            *self.place(block) = Place::Present(slot);
            slots.push((block, slot));
            items.push(LoadItem { label, layout, buffer });
        }
        self.occupied_bytes_max = self.occupied_bytes_max.max(self.occupied_bytes);
        // Blocks are read directly into their slots, because this engine knows the arena.
        let ring = &mut Vec::new();
        let loader = Loader { engine: self.engine.as_mut(), files, options, ring };
        let (loaded, statistics) = loader.load(items, progress).inspect_err(|error| {
            self.stopped = Some(error.to_string());
        })?;
        for ((block, slot), loaded) in slots.into_iter().zip(loaded) {
            self.take_loaded(block, slot, loaded);
        }
        match self.failure.take() {
            Some(failure) => Err(failure),
            None => Ok(statistics),
        }
    }

    /// Returns the slot in which a block will stay.
    fn slot_for_preload(&mut self, block: BlockId) -> Result<SlotIndex, StreamError> {
        let slot = match block {
            BlockId::Dense(index) => self.dense.ram_slots[index as usize],
            BlockId::Expert(layer, expert) => {
                self.cache.preload(layer, expert);
                self.take_slot(layer)
            }
        };
        slot.ok_or(StreamError::LeasesHoldAllSlots { block })
    }

    /// Takes in the result of one block of a preload.
    fn take_loaded(&mut self, block: BlockId, slot: SlotIndex, loaded: Loaded) {
        let lost = loaded.buffer.is_none();
        self.slots[slot as usize].put_buffer(loaded.buffer);
        match loaded.result {
            Ok(done) => {
                self.totals.bytes_read += done.bytes_read;
                match block {
                    BlockId::Dense(_) => self.totals.dense_blocks_read += 1,
                    BlockId::Expert(..) => self.totals.experts_read += 1,
                }
            }
            Err(error) => {
                if lost {
                    self.stopped = Some(error.to_string());
                }
                self.vacate(slot);
                if let (BlockId::Expert(layer, _), false) = (block, lost) {
                    self.free_slot(layer, slot);
                }
                self.report(block, Purpose::Demand, error);
            }
        }
    }

    fn blocks_to_preload(&self) -> Vec<BlockId> {
        let pinned =
            self.dense.ram_slots.iter().enumerate().filter(|(_, ram_slot)| ram_slot.is_some());
        let mut wanted: Vec<BlockId> = pinned.map(|(i, _)| BlockId::Dense(i as u32)).collect();
        for pool in self.plan.pools.iter().filter(|pool| pool.transient_slots == 0) {
            for &layer in &pool.layers {
                let experts = self.plan.experts_per_layer[layer as usize];
                let block = |expert| BlockId::Expert(LayerIndex(layer), ExpertIndex(expert));
                wanted.extend((0..experts).map(block));
            }
        }
        wanted
    }

    /// Starts the read of a block, unless it is present or already being read.
    fn preload_block(&mut self, block: BlockId) -> Result<(), StreamError> {
        if let BlockId::Expert(layer, expert) = block {
            self.cache.preload(layer, expert);
        }
        let slot = match *self.place(block) {
            Place::Present(slot) | Place::Reading(slot) => {
                self.use_prefetched(slot);
                self.demand_read(slot);
                return Ok(());
            }
            Place::Absent => match block {
                BlockId::Dense(index) => self.dense.ram_slots[index as usize],
                BlockId::Expert(layer, _) => self.take_slot(layer),
            },
        };
        let slot = slot.ok_or(StreamError::LeasesHoldAllSlots { block })?;
        self.start_read(block, slot, Purpose::Demand, Priority::Load);
        Ok(())
    }
}

fn layout(block: &Block) -> BlockLayout {
    BlockLayout::plan_block(block, SLOT_ALIGNMENT)
}

fn pool_of_layer(plan: &MemoryPlan) -> Vec<u32> {
    let mut of = vec![0; plan.experts_per_layer.len()];
    for (index, pool) in plan.pools.iter().enumerate() {
        for &layer in &pool.layers {
            of[layer as usize] = index as u32;
        }
    }
    of
}

/// Checks that the plan was made for these blocks. Otherwise bytes could be read into slots that are too small.
fn check(blocks: &ModelBlocks, plan: &MemoryPlan, files: &FileSet) -> Result<(), StreamError> {
    let mismatch = |why: String| Err(StreamError::PlanMismatch { why });
    if files.alignment() > SLOT_ALIGNMENT {
        return mismatch(format!("the files need reads aligned to {} bytes", files.alignment()));
    }
    let dense: Vec<u64> = blocks.dense.iter().map(|b| layout(b).slot_bytes as u64).collect();
    if dense != plan.dense.slot_bytes {
        return mismatch("the dense blocks have other sizes".to_owned());
    }
    let counts: Vec<u32> = blocks.experts.iter().map(|layer| layer.len() as u32).collect();
    if counts != plan.experts_per_layer {
        return mismatch("the layers have other numbers of experts".to_owned());
    }
    let pools = pool_of_layer(plan);
    for (layer, experts) in blocks.experts.iter().enumerate().filter(|(_, e)| !e.is_empty()) {
        let largest = experts.iter().map(|block| layout(block).slot_bytes as u64).max();
        let pool = plan.pools.get(pools[layer] as usize);
        if pool.is_none_or(|pool| largest > Some(pool.slot_bytes)) {
            return mismatch(format!("the experts of layer {layer} do not fit their slots"));
        }
    }
    let all = blocks.dense.iter().chain(blocks.experts.iter().flatten());
    for (number, block) in all.enumerate() {
        if files.plan_block(block, SLOT_ALIGNMENT).slot_bytes > layout(block).slot_bytes {
            return mismatch(format!(
                "what has one checksum is larger than block {number}; pack the model again"
            ));
        }
    }
    Ok(())
}
