//! The tier on disk, and requests whose blocks are read from it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_compute::kv_rounding::{self as rounding, RoundingError};
use forebay_kv::{BlockHash, BlockKey, DiskStatistics, DiskStore, Fetch, Fetched, Link};
use forebay_ops::KV_BLOCK;

use super::KvTiers;

/// A block that no request has used twice is written if it ends a prefix of at least so many positions, which take a while to
/// compute.
const LONG_PREFIX: usize = 1024;

/// Time without an arrival after which a fetch ends with what it has.
const STALL: Duration = Duration::from_secs(2);

/// Blocks that are copied to host memory between two passes.
const ARRIVALS_AT_A_TIME: usize = 32;

/// Type of keys and values in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvDiskType {
    /// That of the cache. Blocks come back as they were.
    #[default]
    AsCached,
    /// f16 is rounded to q8_0, which is 0.53 times as large. What comes back differs a little, so answers depend on what was
    /// found.
    Q8_0,
}

impl KvDiskType {
    /// Returns the bytes on disk of a block of `bytes` bytes.
    fn stored_bytes(self, bytes: usize) -> usize {
        match self {
            KvDiskType::AsCached => bytes,
            KvDiskType::Q8_0 => rounding::rounded_bytes(bytes),
        }
    }

    /// Makes a block in memory of one that was read. Returns false if that has another length.
    fn restore(self, block: &[u8], to: &mut [u8]) -> bool {
        match self {
            KvDiskType::Q8_0 => rounding::unround(block, to),
            KvDiskType::AsCached if block.len() == to.len() => {
                to.copy_from_slice(block);
                true
            }
            KvDiskType::AsCached => false,
        }
    }
}

/// A folder on disk for [`Engine::set_kv_disk`](crate::Engine::set_kv_disk).
#[derive(Debug, Clone)]
pub struct KvDisk {
    pub store: Arc<DiskStore>,
    pub ty: KvDiskType,
}

/// A store on disk, and how this engine uses it.
#[derive(Debug, Clone)]
pub struct DiskTier {
    pub store: Arc<DiskStore>,
    /// Tag of the model.
    pub model: u64,
    pub ty: KvDiskType,
    /// The group of states of recurrent layers, which are never rounded.
    pub states: Option<u32>,
}

/// What was given to be written.
#[derive(Debug, Clone, Copy, Default)]
pub struct Given {
    pub bytes: u64,
    pub rounding: RoundingError,
}

impl DiskTier {
    /// Returns true if a block that leaves host memory is worth a write.
    pub fn earns_write(&self, key: BlockKey, link: Link, uses: u64) -> bool {
        uses > 0
            || (link.index as usize + 1) * KV_BLOCK >= LONG_PREFIX
            || self.store.has_followers(key.hash)
    }

    /// Returns the type of what a block holds on disk.
    fn type_of(&self, key: BlockKey) -> KvDiskType {
        if self.states == Some(key.group) { KvDiskType::AsCached } else { self.ty }
    }

    pub fn has(&self, key: BlockKey) -> bool {
        self.store.len_of(key).is_some()
    }

    /// Gives a block to be written. Returns nothing if it is not written.
    pub fn write(&self, key: BlockKey, link: Link, bytes: &[u8], waits: Duration) -> Given {
        let (store, model, ty) = (&self.store, self.model, self.type_of(key));
        let (len, mut rounding) = (ty.stored_bytes(bytes.len()), RoundingError::default());
        let is_written = match ty {
            KvDiskType::AsCached => store.write(key, link, model, bytes, waits),
            // Only a block that is written is rounded.
            KvDiskType::Q8_0 => store.write_with(key, link, model, len, waits, |to| {
                rounding::round(bytes, to).map(|error| rounding = error).is_some()
            }),
        };
        if is_written { Given { bytes: len as u64, rounding } } else { Given::default() }
    }

    pub fn flush(&self, limit: Duration) {
        if !self.store.flush(limit) {
            tracing::warn!("not all KV blocks were written to the disk in time");
        }
    }

    /// Returns the rate at which blocks come, once enough were read.
    pub fn bytes_per_second(&self) -> Option<f64> {
        self.store.measured_bytes_per_second()
    }

    pub fn statistics(&self) -> DiskStatistics {
        self.store.statistics()
    }
}

/// Blocks on their way from the disk to host memory, for one request.
pub struct Fetching {
    disk: DiskTier,
    fetch: Fetch,
    links: HashMap<BlockKey, Link>,
    /// Blocks in host memory that are leased until the request begins.
    leased: Vec<BlockHash>,
    /// Blocks from the disk.
    indices: Vec<u32>,
    is_whole: bool,
    started: Instant,
    /// When the last block came.
    last: Instant,
    /// Time after which computing the positions again would have been sooner.
    limit: Duration,
}

impl Fetching {
    /// Begins to read blocks.
    pub fn begin(disk: &DiskTier, keys: Vec<(BlockKey, Link)>, limit: Duration) -> Fetching {
        let fetch = disk.store.fetch(keys.iter().map(|(key, _)| *key));
        let now = Instant::now();
        Fetching {
            disk: disk.clone(),
            fetch,
            links: keys.into_iter().collect(),
            leased: Vec::new(),
            indices: Vec::new(),
            is_whole: true,
            started: now,
            last: now,
            limit,
        }
    }

    /// Keeps a block in host memory until the request begins.
    pub fn lease(&mut self, tiers: &mut KvTiers, hash: BlockHash) {
        tiers.lease(hash);
        self.leased.push(hash);
    }

    /// Returns the time from the beginning to the last arrival, in seconds.
    pub fn seconds(&self) -> f64 {
        self.last.duration_since(self.started).as_secs_f64()
    }

    /// Returns the number of the first `blocks` blocks of the request that came from the disk.
    pub fn read_blocks(&self, blocks: usize) -> usize {
        let mut indices: Vec<u32> = self.indices.clone();
        indices.sort_unstable();
        indices.dedup();
        indices.iter().filter(|index| (**index as usize) < blocks).count()
    }

    /// Returns true if nothing more will come.
    pub fn has_ended(&self) -> bool {
        self.fetch.left() == 0 || !self.is_whole
    }

    /// Copies blocks that have arrived to host memory. Waits for the first one up to `wait`. Returns true if nothing more will
    /// come.
    pub fn advance(&mut self, tiers: &mut KvTiers, wait: Duration) -> bool {
        let mut wait = wait;
        for _ in 0..ARRIVALS_AT_A_TIME {
            if self.has_ended() {
                return true;
            }
            let Some(Fetched { key, block }) = self.fetch.next_within(wait) else {
                if self.last.elapsed() > STALL || self.started.elapsed() > self.limit {
                    tracing::debug!("a fetch of KV blocks ended early: {} left", self.fetch.left());
                    self.is_whole = false;
                    return true;
                }
                return false;
            };
            self.last = Instant::now();
            wait = Duration::ZERO;
            let link = self.links[&key];
            if tiers.has(key) {
                // It came from a pool meanwhile.
                self.lease(tiers, key.hash);
                continue;
            }
            let slot = tiers.take(key.group as usize).ok().flatten();
            match (block, slot) {
                (Ok(block), Some(slot))
                    if self.disk.type_of(key).restore(&block, tiers.slot_bytes_mut(&slot)) =>
                {
                    tiers.note_read(block.len());
                    tiers.insert(key, link, slot, 1);
                    self.lease(tiers, key.hash);
                    self.indices.push(link.index);
                }
                (_, slot) => {
                    slot.into_iter().for_each(|slot| tiers.release(slot));
                    self.is_whole = false;
                }
            }
        }
        self.has_ended()
    }

    /// Ends the leases.
    pub fn end(self, tiers: &mut KvTiers) {
        tiers.note_fetch(self.is_whole);
        self.leased.into_iter().for_each(|hash| tiers.end_lease(hash));
    }
}
