//! Layout of the paged KV cache. Layers with the same window form a group. A group has a pool of blocks, and a table for
//! every sequence that finds the sequence's blocks in the pool.

use forebay_cuda::{CudaError, DevicePtr, Gpu, HostWords, KvLayer, KvLayerShape, KvPool, KvTables};

use super::layout::{KvSize, LayoutBuilder};
use crate::arch::Architecture;
use crate::backend;

/// Offsets of all pools and tables.
#[derive(Debug)]
pub struct KvLayout {
    pub layout: LayoutBuilder,
    pub groups: Vec<KvGroup>,
    layers: Vec<KvLayerLayout>,
    /// Offset of the tables, `[groups, sequences, table stride]`.
    tables: u64,
    sequences: usize,
}

/// Layers that see as many positions as each other.
#[derive(Debug, Clone, Copy)]
pub struct KvGroup {
    pub window: Option<usize>,
    /// Number of blocks of the pool, which begins with the null block.
    pub blocks: usize,
    pub block_bytes: u64,
    /// Offset of the pool.
    pool: u64,
}

/// Where a layer's keys and values are.
#[derive(Debug, Clone, Copy)]
struct KvLayerLayout {
    group: usize,
    /// Offset of the keys in a block of the group.
    offset: u64,
}

impl KvGroup {
    /// Returns the group as the decoder sees it.
    pub fn described(&self) -> backend::KvGroup {
        let KvGroup { window, blocks, block_bytes, .. } = *self;
        backend::KvGroup { window, blocks, block_bytes }
    }

    /// Returns the offset of a block.
    pub fn block(&self, block: u32) -> u64 {
        self.pool + u64::from(block) * self.block_bytes
    }
}

impl KvLayout {
    /// Lays out the KV cache for passes of up to `batch` rows.
    pub fn new(size: &KvSize, architecture: &Architecture, batch: usize) -> KvLayout {
        let KvSize { shape, sequences, .. } = size;
        let windows = architecture.kv_windows();
        let blocks = architecture.kv_blocks(batch, size.capacity());
        let group = |(&window, blocks)| KvGroup { window, blocks, block_bytes: 0, pool: 0 };
        let mut groups: Vec<KvGroup> = windows.iter().zip(blocks).map(group).collect();
        let places = architecture.layers.iter().map(|layer| {
            let group = windows.iter().position(|window| *window == layer.window);
            let group = group.expect("every window is listed");
            let offset = groups[group].block_bytes;
            groups[group].block_bytes += shape.block_bytes();
            KvLayerLayout { group, offset }
        });
        let layers = places.collect();
        let mut layout = LayoutBuilder::default();
        for group in &mut groups {
            group.pool = layout.take(group.blocks as u64 * group.block_bytes);
        }
        let words = groups.len() * sequences * shape.table_stride();
        let tables = layout.take(4 * words as u64);
        KvLayout { layout, groups, layers, tables, sequences: *sequences }
    }

    /// Makes the cache at least `bytes` large, because the relayout of weights uses its memory before the first
    /// token.
    pub fn with_room_for(mut self, bytes: u64) -> KvLayout {
        self.layout.reach(bytes);
        self
    }

    /// Returns the number of sequences that have tables.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Returns the cache of a layer, in the memory that begins at `memory`.
    pub fn layer(&self, memory: DevicePtr<u8>, shape: &KvLayerShape, layer: usize) -> KvLayer {
        let KvLayerLayout { group: index, offset } = self.layers[layer];
        let group = &self.groups[index];
        let pool = KvPool {
            memory: memory.offset(group.pool as usize),
            blocks: group.blocks,
            block_bytes: group.block_bytes as usize,
        };
        let words = index * self.sequences * shape.table_stride();
        let blocks = memory.offset(self.tables as usize + 4 * words).cast();
        let tables = KvTables { blocks, stride: shape.table_stride(), count: self.sequences };
        KvLayer { shape: *shape, pool, tables, offset: offset as usize }
    }

    /// Clears the null blocks and the tables. The memory must not be a workspace any more.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn clear(
        &self,
        gpu: &Gpu,
        memory: DevicePtr<u8>,
        shape: &KvLayerShape,
    ) -> Result<(), CudaError> {
        for group in &self.groups {
            gpu.fill(memory.offset(group.pool as usize), 0, group.block_bytes as usize)?;
        }
        let words = self.groups.len() * self.sequences * shape.table_stride();
        gpu.fill(memory.offset(self.tables as usize), 0, 4 * words)
    }
}

/// Copy of all tables in pinned memory, with the entries that the device does not have yet.
pub struct TableMirror {
    words: HostWords,
    /// Changed entries.
    changed: Vec<usize>,
    sequences: usize,
    stride: usize,
}

impl TableMirror {
    /// Creates the copy of tables without blocks.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn new(gpu: &Gpu, kv: &KvLayout, shape: &KvLayerShape) -> Result<TableMirror, CudaError> {
        let (sequences, stride) = (kv.sequences, shape.table_stride());
        let count = kv.groups.len() * sequences * stride;
        let mut words = gpu.host_words(count)?;
        words.write(0, &vec![0_u32; count]);
        Ok(TableMirror { words, changed: Vec::new(), sequences, stride })
    }

    /// Changes an entry. No queued work may still read the tables.
    ///
    /// # Panics
    /// Panics if there is no such entry.
    pub fn set(&mut self, table: usize, group: usize, index: usize, block: u32) {
        assert!(table < self.sequences && index < self.stride, "entry {index} of table {table}");
        let at = (group * self.sequences + table) * self.stride + index;
        self.words.write(at, &[block]);
        self.changed.push(at);
    }

    /// Queues the changes. A kernel makes them, because a copy would wait behind copies of weights.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn queue(
        &mut self,
        gpu: &Gpu,
        kv: &KvLayout,
        memory: DevicePtr<u8>,
    ) -> Result<(), CudaError> {
        self.changed.sort_unstable();
        for run in self.changed.chunk_by(|a, b| b - a <= 1) {
            let words = run[0]..run[run.len() - 1] + 1;
            let to = memory.offset(kv.tables as usize + 4 * words.start).cast();
            gpu.read_words(&self.words, words, to)?;
        }
        self.changed.clear();
        Ok(())
    }
}
