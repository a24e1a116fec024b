//! Tiers of the KV cache below the pools of a device: host memory, and a folder on disk.
//!
//! A block that a pool evicts is copied to host memory. A block that host memory evicts is written to the disk, if it has earned
//! that. A new request is looked up in all tiers. What it can use goes back the same way: from the disk to host memory, and from
//! there to a pool.
//!
//! Blocks of suspended sequences are kept in the same memory, by leases.

mod disk;
mod folder;
mod host_slots;

use std::ops::Range;
use std::time::{Duration, Instant};

use forebay_compute::kv_rounding::RoundingError;
use forebay_kv::{BlockHash, BlockKey, Evicted, Link, RamIndex};
use forebay_model::{Backend, HostMemory, HostReserver, ModelError};
use forebay_ops::KV_BLOCK;
use serde::Serialize;

use self::disk::Given;
pub use self::disk::{DiskTier, Fetching, KvDisk, KvDiskType};
pub use self::folder::{KvFolder, KvFolderError, KvFolderNote, OpenedKvFolder, kv_secret};
pub use self::host_slots::HostSlot;
use self::host_slots::{HostSlots, Share};
use crate::kv::{BlockId, GroupConfig, LostBlock};

/// The KV blocks outside the pools, and what moved them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct KvTierStatistics {
    /// Blocks in host memory.
    pub ram_blocks: u64,
    /// Bytes of host memory that are reserved, and that may be.
    pub ram_bytes: u64,
    pub ram_bytes_max: u64,
    /// Blocks that pools lost and that host memory took.
    pub ram_saved_blocks: u64,
    /// Blocks that were copied from host memory to a pool for a new request.
    pub ram_restored_blocks: u64,
    pub ram_evicted_blocks: u64,
    /// Positions of new requests that were in the device's pools, that came from host memory, and from the disk.
    pub pool_positions: u64,
    pub ram_positions: u64,
    pub disk_positions: u64,
    /// Estimated time that computing these positions again would have taken, less the time that they took.
    pub saved_seconds: f64,
    /// Requests for which blocks were read from the disk, and of these those that did not get all of them.
    pub fetches: u64,
    pub fetches_cut: u64,
    /// Bytes of blocks that this engine read from the disk and gave to be written there.
    pub disk_read_bytes: u64,
    pub disk_written_bytes: u64,
    /// Root mean square of the errors of the blocks that were rounded for the disk, as a share of that of their values. 0 without
    /// [`KvDiskType::Q8_0`].
    pub disk_rounding_error: f64,
    /// The store on disk, which other engines may use too.
    pub disk: Option<forebay_kv::DiskStatistics>,
}

/// The tiers below the pools.
pub struct KvTiers {
    slots: HostSlots,
    index: RamIndex,
    disk: Option<DiskTier>,
    /// True if blocks that pools lose are kept.
    keeps: bool,
    /// True if memory could not be reserved. Blocks that pools lose are not kept then.
    is_short: bool,
    statistics: KvTierStatistics,
    rounding: RoundingError,
    // A buffer that is reused.
    evicted: Vec<Evicted>,
}

impl KvTiers {
    /// Creates tiers with up to `ram_bytes` of host memory for the blocks of layer groups, and for `states` of recurrent layers,
    /// whose group is behind the others.
    pub fn new(
        reserver: HostReserver,
        groups: &[GroupConfig],
        states: Option<GroupConfig>,
        ram_bytes: u64,
    ) -> KvTiers {
        let share = |of: &GroupConfig| {
            let whole = Share::UNIT / KV_BLOCK;
            // At the end of a turn, the blocks that one window touches are kept, and a few for a turn that ends differently.
            let window = of.window.map(|window| window.div_ceil(KV_BLOCK) + 3);
            Share { block_bytes: of.block_bytes, blocks: window.map_or(whole, |of| of.min(whole)) }
        };
        let mut shares: Vec<Share> = groups.iter().map(share).collect();
        // States get as much as blocks, and a turn keeps at least one.
        let together: usize = shares.iter().map(|of| of.block_bytes * of.blocks).sum();
        shares.extend(states.map(|GroupConfig { block_bytes, .. }| Share {
            block_bytes,
            blocks: (together / block_bytes.max(1)).max(1),
        }));
        let windows = groups.iter().chain(&states).map(|of| of.window.is_some());
        KvTiers {
            slots: HostSlots::new(reserver, &shares, ram_bytes),
            index: RamIndex::new(windows),
            disk: None,
            keeps: false,
            is_short: false,
            statistics: KvTierStatistics::default(),
            rounding: RoundingError::default(),
            evicted: Vec::new(),
        }
    }

    /// Says whether blocks that pools lose are kept.
    pub fn keep(&mut self, keeps: bool) {
        self.keeps = keeps;
    }

    /// Adds a tier on disk.
    pub fn set_disk(&mut self, disk: DiskTier) {
        self.disk = Some(disk);
    }

    pub fn disk(&self) -> Option<&DiskTier> {
        self.disk.as_ref()
    }

    /// Returns true if host memory has a block.
    pub fn has(&self, key: BlockKey) -> bool {
        self.index.find(key).is_some()
    }

    /// Returns the number of blocks of a group that host memory has room for.
    pub fn room(&self, group: usize) -> usize {
        self.slots.total(group)
    }

    /// Returns the memory of a block in host memory, and where the block is there.
    pub fn place(&self, key: BlockKey) -> Option<(&dyn HostMemory, Range<usize>)> {
        let slot = self.index.find(key)?;
        Some(self.slots.place(&HostSlot { group: key.group as usize, slot }))
    }

    /// Keeps a block in host memory until [`KvTiers::end_lease`].
    pub fn lease(&mut self, hash: BlockHash) {
        self.index.lease(hash);
    }

    pub fn end_lease(&mut self, hash: BlockHash) {
        self.index.end_lease(hash);
    }

    /// Notes that a new request uses a block, which is now in a pool, too.
    pub fn note_restored(&mut self, hash: BlockHash) {
        self.index.note_use(hash);
        self.index.lower(hash);
        self.statistics.ram_restored_blocks += 1;
    }

    /// Notes that a new request uses what host memory has of a block, and that no pool has it.
    pub fn note_use(&mut self, hash: BlockHash) {
        self.index.note_use(hash);
    }

    /// Takes a slot, if necessary that of another block. Returns `None` if all are leased, or if there are none.
    ///
    /// # Errors
    /// Returns an error if memory cannot be reserved.
    pub fn take(&mut self, group: usize) -> Result<Option<HostSlot>, ModelError> {
        loop {
            if let Some(slot) = self.slots.take(group)? {
                return Ok(Some(slot));
            }
            let mut evicted = std::mem::take(&mut self.evicted);
            let found = self.index.evict(group, &mut evicted);
            for Evicted { key, link, slot, uses } in evicted.drain(..) {
                let slot = HostSlot { group: key.group as usize, slot };
                if let Some(disk) = &self.disk
                    && disk.earns_write(key, link, uses)
                {
                    let given = disk.write(key, link, self.slots.bytes(&slot), Duration::ZERO);
                    self.note_given(given);
                }
                self.slots.release(slot);
                self.statistics.ram_evicted_blocks += 1;
            }
            self.evicted = evicted;
            if !found {
                return Ok(None);
            }
        }
    }

    /// Copies a block of a pool to a slot. Gives the slot back if that fails.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn copy_to(
        &mut self,
        slot: HostSlot,
        backend: &mut dyn Backend,
        block: BlockId,
    ) -> Result<(), ModelError> {
        let bytes = self.slots.bytes_mut(&slot);
        let copied = backend.save_block(slot.group, block.index() as u32, bytes);
        if copied.is_err() {
            self.release(slot);
        }
        copied
    }

    /// Gives back a slot whose block the index does not know.
    pub fn release(&mut self, slot: HostSlot) {
        self.slots.release(slot);
    }

    /// Returns the memory of a slot, and where the slot is there.
    pub fn slot_place(&self, slot: &HostSlot) -> (&dyn HostMemory, Range<usize>) {
        self.slots.place(slot)
    }

    pub fn slot_bytes_mut(&mut self, slot: &HostSlot) -> &mut [u8] {
        self.slots.bytes_mut(slot)
    }

    /// Adds a block whose bytes are in a slot.
    pub fn insert(&mut self, key: BlockKey, link: Link, slot: HostSlot, uses: u64) {
        self.index.insert(key, link, slot.slot, uses);
    }

    /// Copies a block that a pool has lost, unless host memory has it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn save_lost(
        &mut self,
        backend: &mut dyn Backend,
        lost: &LostBlock,
    ) -> Result<(), ModelError> {
        let key = lost.key();
        if !self.keeps || self.is_short {
            return Ok(());
        }
        if self.has(key) {
            self.index.raise(key.hash);
            return Ok(());
        }
        let slot = match self.take(lost.group) {
            Ok(Some(slot)) => slot,
            Ok(None) => return Ok(()),
            Err(error) => {
                tracing::warn!("KV blocks are not kept in RAM: {error}");
                self.is_short = true;
                return Ok(());
            }
        };
        self.copy_to(slot, backend, lost.block)?;
        self.insert(key, lost.link, slot, lost.uses);
        self.statistics.ram_saved_blocks += 1;
        Ok(())
    }

    /// Writes blocks in host memory and in `pools` to the disk: all, or those that have earned it. Ends after `limit` at the
    /// latest.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn write(
        &mut self,
        backend: &mut dyn Backend,
        pools: &[LostBlock],
        everything: bool,
        limit: Duration,
    ) -> Result<(), ModelError> {
        let until = Instant::now() + limit;
        let left = || until.saturating_duration_since(Instant::now());
        let Some(disk) = self.disk.clone() else { return Ok(()) };
        // The engine computes nothing meanwhile.
        disk.store.share_disk(false);
        // From the end of each prefix to its start, because a block earns its write by those behind it.
        for Evicted { key, link, slot, uses } in self.index.in_order().into_iter().rev() {
            if !left().is_zero() && (everything || disk.earns_write(key, link, uses)) {
                let slot = HostSlot { group: key.group as usize, slot };
                let given = disk.write(key, link, self.slots.bytes(&slot), left());
                self.note_given(given);
            }
        }
        let mut bytes = Vec::new();
        for lost in pools.iter().rev() {
            let (key, link) = (lost.key(), lost.link);
            let is_wanted = everything || disk.earns_write(key, link, lost.uses);
            if left().is_zero() || self.has(key) || !is_wanted || disk.has(key) {
                continue;
            }
            bytes.resize(lost.bytes, 0);
            backend.save_block(lost.group, lost.block.index() as u32, &mut bytes)?;
            self.note_given(disk.write(key, link, &bytes, left()));
        }
        if everything {
            disk.flush(left());
        }
        Ok(())
    }

    /// Notes where the positions of a new request came from that need not be computed.
    pub fn note_positions(
        &mut self,
        from_pool: usize,
        from_ram: usize,
        from_disk: usize,
        saved_seconds: f64,
    ) {
        self.statistics.pool_positions += from_pool as u64;
        self.statistics.ram_positions += from_ram as u64;
        self.statistics.disk_positions += from_disk as u64;
        self.statistics.saved_seconds += saved_seconds;
    }

    fn note_given(&mut self, given: Given) {
        self.statistics.disk_written_bytes += given.bytes;
        self.rounding.add(given.rounding);
    }

    pub(super) fn note_read(&mut self, bytes: usize) {
        self.statistics.disk_read_bytes += bytes as u64;
    }

    fn note_fetch(&mut self, is_whole: bool) {
        self.statistics.fetches += 1;
        self.statistics.fetches_cut += u64::from(!is_whole);
    }

    pub fn statistics(&self) -> KvTierStatistics {
        KvTierStatistics {
            ram_blocks: self.index.statistics().blocks,
            ram_bytes: self.slots.reserved_bytes(),
            ram_bytes_max: self.slots.bytes_max(),
            disk_rounding_error: self.rounding.relative(),
            disk: self.disk.as_ref().map(DiskTier::statistics),
            ..self.statistics
        }
    }
}
