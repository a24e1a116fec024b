//! Layout of the paged KV cache. Layers with the same window and shape form a group. A group has a pool of blocks, and a table for
//! every sequence that finds the sequence's blocks in the pool.
//!
//! If VRAM is short, the last blocks of the layers that see all positions are in pinned host memory. Kernels for generated tokens
//! read them there. A prompt has many rows that read the same blocks, so a copy of the layer's blocks in VRAM comes first.

use std::ops::Range;

use forebay_cuda::{
    CudaError, DeviceKvLayer, DevicePtr, Gpu, HostWords, KvElsewhere, KvLayerShape, KvPool,
    KvTables,
};
use forebay_ops::KV_BLOCK;

use super::kv_size::KvSize;
use super::layout::LayoutBuilder;
use crate::arch::{self, Architecture, KvInVram, STATES_PER_SEQUENCE};
use crate::backend;
use crate::sharing::ALIGNMENT;

/// Offsets of all pools and tables.
#[derive(Debug)]
pub struct KvLayout {
    pub layout: LayoutBuilder,
    pub groups: Vec<KvGroup>,
    /// Shape of the layers with each of [`Architecture::attentions`].
    pub shapes: Vec<KvLayerShape>,
    /// Layers may share keys and values. Recurrent layers have none.
    layers: Vec<Option<KvLayerLayout>>,
    /// The layers' compressed entries, which are in other groups.
    entries: Vec<Option<KvLayerLayout>>,
    /// Offset and bytes of every layer in a block, by group.
    parts: Vec<Vec<(u64, u64)>>,
    /// Offset of the states of sequences, `[parts, states, floats]`, and number of floats of each part
    /// ([`Architecture::state_parts`]).
    states: u64,
    state_parts: Vec<usize>,
    /// Offset of the tables, `[groups, sequences, table stride]`.
    tables: u64,
    sequences: usize,
    context: usize,
    /// Length of a table.
    table_stride: usize,
    /// Offset of the memory for copies of one layer's blocks in host memory.
    copies: u64,
    /// Bytes of VRAM without room for anything else ([`KvLayout::with_room_for`]).
    needed: u64,
}

/// Layers that see as many positions as each other and have the same shape.
#[derive(Debug, Clone, Copy)]
pub struct KvGroup {
    pub window: Option<usize>,
    /// Number of blocks of the pool, which begins with the null block.
    pub blocks: usize,
    /// Number of blocks in VRAM. The others are in host memory.
    pub in_vram: usize,
    pub block_bytes: u64,
    /// Bytes of the largest layer in a block.
    largest_layer: u64,
    /// Offset of the pool.
    pool: u64,
}

/// Where a layer's keys and values are, or its compressed entries.
#[derive(Debug, Clone, Copy)]
pub struct KvLayerLayout {
    pub group: usize,
    /// Offset of the keys in a block of the group, and the bytes of the layer.
    offset: u64,
    bytes: u64,
    shape: KvLayerShape,
    /// Shapes of what follows the keys and values: the keys of an indexer, or projections from which entries are computed.
    beside: [Option<KvLayerShape>; 2],
}

impl KvLayerLayout {
    /// Returns the bytes of keys and values and of the first `count` of what follows them.
    fn bytes_before(&self, count: usize) -> u64 {
        let beside = self.beside[..count].iter().flatten();
        self.shape.block_bytes() + beside.map(KvLayerShape::block_bytes).sum::<u64>()
    }
}

/// Where a block is.
pub enum BlockPlace {
    /// Offset in VRAM.
    Vram(u64),
    /// Number of the block among those in host memory.
    Host(usize),
}

impl KvGroup {
    /// Returns the group as the decoder sees it.
    pub fn described(&self) -> backend::KvGroup {
        let KvGroup { window, blocks, in_vram, block_bytes, .. } = *self;
        backend::KvGroup { window, blocks, on_device: in_vram, block_bytes }
    }

    /// Returns the number of blocks in host memory.
    pub fn in_host_memory(&self) -> usize {
        self.blocks - self.in_vram
    }
}

impl KvLayout {
    /// Lays out the KV cache for passes of up to `batch` rows.
    pub fn new(size: &KvSize, architecture: &Architecture, batch: usize) -> KvLayout {
        let KvSize { sequences, context, .. } = *size;
        let shapes: Vec<KvLayerShape> =
            architecture.attentions.iter().map(|of| size.shape(of)).collect();
        let of_layers = architecture.kv_groups();
        let blocks = architecture.kv_blocks(batch, size.capacity());
        let group = |(of, blocks): (&arch::KvGroup, usize)| KvGroup {
            window: of.window,
            blocks,
            in_vram: blocks,
            block_bytes: 0,
            largest_layer: 0,
            pool: 0,
        };
        let mut groups: Vec<KvGroup> = of_layers.iter().zip(blocks).map(group).collect();
        let mut place = |of: arch::KvGroup, shape, beside| {
            let group = of_layers.iter().position(|group| *group == of)?;
            let of = &mut groups[group];
            let (offset, bytes) = (of.block_bytes, 0);
            let mut layer = KvLayerLayout { group, offset, bytes, shape, beside };
            layer.bytes = layer.bytes_before(layer.beside.len());
            of.block_bytes += layer.bytes;
            of.largest_layer = of.largest_layer.max(layer.bytes);
            Some(layer)
        };
        let own: Vec<Option<KvLayerLayout>> = (0..architecture.layers.len())
            .map(|layer| {
                let of = architecture.kv_group(layer)?;
                let shape = shapes[architecture.layers[layer].attention];
                // Layers of a group have room for the same, even if some have no indexer.
                let beside = match size.entry_shapes(architecture.attention_of(layer)) {
                    Some(of_entries) => of_entries.projections,
                    None => [size.index_shape(&architecture.attentions[of.attention]), None],
                };
                place(of, shape, beside)
            })
            .collect();
        let entries: Vec<Option<KvLayerLayout>> = (0..architecture.layers.len())
            .map(|layer| {
                let of = architecture.entry_group(layer)?;
                let shapes = size.entry_shapes(architecture.attention_of(layer))?;
                place(of, shapes.entries, [shapes.keys, None])
            })
            .collect();
        let mut parts = vec![Vec::new(); groups.len()];
        for of in own.iter().chain(&entries).flatten() {
            parts[of.group].push((of.offset, of.bytes));
        }
        let layers = (0..own.len()).map(|layer| own[architecture.keys_of(layer)]).collect();
        let table_stride = shapes.first().map_or(0, KvLayerShape::table_stride);
        let table_bytes = 4 * (groups.len() * sequences * table_stride) as u64;
        let state_bytes = architecture.states_bytes(sequences);
        if let KvInVram::Bytes(vram_bytes) = size.in_vram {
            // Every piece begins at a multiple of the alignment.
            let others = table_bytes + state_bytes + ALIGNMENT * (groups.len() as u64 + 3);
            move_out(&mut groups, vram_bytes.saturating_sub(others));
        }
        let mut layout = LayoutBuilder::default();
        for group in &mut groups {
            group.pool = layout.take(group.in_vram as u64 * group.block_bytes);
        }
        let tables = layout.take(table_bytes);
        let states = layout.take(state_bytes);
        let copied = |of: &KvGroup| of.in_host_memory() as u64 * of.largest_layer;
        let copies = layout.take(groups.iter().map(copied).max().unwrap_or(0));
        let needed = layout.bytes();
        KvLayout {
            layout,
            groups,
            shapes,
            layers,
            entries,
            parts,
            states,
            state_parts: architecture.state_parts().collect(),
            tables,
            sequences,
            context,
            table_stride,
            copies,
            needed,
        }
    }

    /// Returns where a layer's keys and values are.
    pub fn keys_of(&self, layer: usize) -> KvLayerLayout {
        self.layers[layer].expect("the layer keeps keys and values")
    }

    /// Returns where a layer's compressed entries are, if it has such.
    pub fn entries_of(&self, layer: usize) -> Option<KvLayerLayout> {
        self.entries[layer]
    }

    /// Returns the bytes of a state.
    pub fn state_bytes(&self) -> usize {
        4 * self.state_parts.iter().sum::<usize>()
    }

    /// Returns the offset and the bytes of each part of a state.
    pub fn parts_of_state(&self, place: usize) -> impl Iterator<Item = (u64, usize)> {
        assert!(place < STATES_PER_SEQUENCE * self.sequences, "state {place}");
        self.state_parts.iter().enumerate().map(move |(part, floats)| {
            let bytes = 4 * floats;
            (self.states(part) + (place * bytes) as u64, bytes)
        })
    }

    /// Returns the offset of the states of a part.
    pub fn states(&self, part: usize) -> u64 {
        let before: usize = self.state_parts[..part].iter().sum();
        self.states + 4 * (STATES_PER_SEQUENCE * self.sequences * before) as u64
    }

    /// Returns the bytes of VRAM that the pools, tables and copies need.
    pub fn bytes_min(&self) -> u64 {
        self.needed
    }

    /// Returns the number of bytes of the blocks in host memory.
    pub fn host_bytes(&self) -> u64 {
        self.groups.iter().map(|group| group.in_host_memory() as u64 * group.block_bytes).sum()
    }

    /// Returns where a block is.
    pub fn block(&self, group: usize, block: u32) -> BlockPlace {
        let of = &self.groups[group];
        assert!((block as usize) < of.blocks, "block {block} of {}", of.blocks);
        match (block as usize).checked_sub(of.in_vram) {
            None => BlockPlace::Vram(of.pool + u64::from(block) * of.block_bytes),
            Some(outside) => BlockPlace::Host(outside),
        }
    }

    /// Returns the parts of a block in host memory, one for each layer: the offset there, and the bytes of the block. `outside` counts
    /// the blocks in host memory.
    pub fn host_parts(
        &self,
        group: usize,
        outside: usize,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        let blocks = self.groups[group].in_host_memory() as u64;
        self.parts[group].iter().map(move |&(offset, bytes)| {
            let at = blocks * offset + outside as u64 * bytes;
            (at as usize, offset as usize..(offset + bytes) as usize)
        })
    }

    /// Returns the shape of a layer that keeps keys and values.
    pub fn shape_of(&self, layer: usize) -> &KvLayerShape {
        &self.layers[layer].as_ref().expect("the layer keeps keys and values").shape
    }

    /// Returns the most positions of one sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Returns the offset in host memory of a layer's part of these blocks, the offset in VRAM for a copy, and the number of
    /// bytes. `blocks` counts the blocks in host memory.
    pub fn copy_of(&self, of: KvLayerLayout, blocks: Range<usize>) -> (u64, u64, u64) {
        let KvLayerLayout { group, offset, bytes, .. } = of;
        let from = self.groups[group].in_host_memory() as u64 * offset;
        let first = blocks.start as u64 * bytes;
        (from + first, self.copies + first, blocks.len() as u64 * bytes)
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

    /// Returns the cache of a layer, in the memory that begins at `memory`. Blocks outside of it are in `host` memory, or the
    /// copies of these blocks are read if there is none.
    pub fn layer(
        &self,
        memory: DevicePtr<u8>,
        host: Option<DevicePtr<u8>>,
        of: KvLayerLayout,
    ) -> DeviceKvLayer {
        let KvLayerLayout { group: index, offset, bytes, shape, .. } = of;
        let group = &self.groups[index];
        let blocks = group.in_host_memory();
        let elsewhere = (blocks > 0).then(|| KvElsewhere {
            memory: match host {
                Some(host) => host.offset(blocks * offset as usize),
                None => memory.offset(self.copies as usize),
            },
            blocks,
            block_bytes: bytes as usize,
            offset: 0,
        });
        let pool = KvPool {
            memory: memory.offset(group.pool as usize),
            blocks: group.in_vram,
            block_bytes: group.block_bytes as usize,
        };
        let (stride, count) = (self.table_stride, self.sequences);
        let numbers = memory.offset(self.tables as usize + 4 * index * count * stride).cast();
        let tables = KvTables { blocks: numbers, stride, count };
        DeviceKvLayer { shape, pool, tables, offset: offset as usize, elsewhere }
    }

    /// Returns the cache of the keys of a layer's indexer. `layer` is that of its keys and values ([`KvLayout::layer`]).
    pub fn index_layer(&self, layer: usize, of: &DeviceKvLayer) -> Option<DeviceKvLayer> {
        self.beside(self.keys_of(layer), of, 0)
    }

    /// Returns number `at` of the caches that follow a layer's keys and values, or its entries. `of` is the cache of these.
    pub fn beside(
        &self,
        place: KvLayerLayout,
        of: &DeviceKvLayer,
        at: usize,
    ) -> Option<DeviceKvLayer> {
        let before = place.bytes_before(at) as usize;
        place.beside[at].map(|shape| DeviceKvLayer {
            shape,
            offset: of.offset + before,
            elsewhere: of.elsewhere.map(|of| KvElsewhere { offset: of.offset + before, ..of }),
            ..*of
        })
    }

    /// Clears the null blocks and the tables. The memory must not be a workspace any more.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn clear(&self, gpu: &Gpu, memory: DevicePtr<u8>) -> Result<(), CudaError> {
        for group in &self.groups {
            gpu.fill(memory.offset(group.pool as usize), 0, group.block_bytes as usize)?;
        }
        let words = self.groups.len() * self.sequences * self.table_stride;
        gpu.fill(memory.offset(self.tables as usize), 0, 4 * words)
    }
}

/// Moves as many blocks of a group without a window to host memory as need be, so that the pools and the copies of one layer
/// take at most `bytes` of VRAM, if that is possible. The null block stays. If several groups have no window, it is the one that
/// gains most.
fn move_out(groups: &mut [KvGroup], bytes: u64) {
    let all: u64 = groups.iter().map(|group| group.blocks as u64 * group.block_bytes).sum();
    // A block that moves out needs room for the copy of one layer. A group of one layer gains nothing.
    let gained = |group: &KvGroup| group.block_bytes - group.largest_layer;
    let whole = groups.iter_mut().filter(|group| group.window.is_none());
    let Some(group) = whole.max_by_key(|group| gained(group)) else { return };
    let gained = gained(group);
    if all > bytes && gained > 0 {
        let outside = usize::try_from((all - bytes).div_ceil(gained)).unwrap_or(usize::MAX);
        group.in_vram = group.blocks - outside.min(group.blocks - 1);
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
    pub fn new(gpu: &Gpu, kv: &KvLayout) -> Result<TableMirror, CudaError> {
        let (sequences, stride) = (kv.sequences, kv.table_stride);
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

    /// Returns the runs of blocks in host memory that a table names for its first `positions` positions, counted from the first
    /// such block. Runs with few blocks between them are one.
    pub fn in_host_memory(
        &self,
        group: usize,
        of: &KvGroup,
        tables: impl Iterator<Item = (usize, usize)>,
    ) -> Vec<Range<usize>> {
        /// Copying so many blocks takes about as long as starting another copy.
        const BETWEEN: usize = 8;
        let mut blocks = Vec::new();
        for (table, positions) in tables {
            let mut numbers = vec![0_u32; positions.div_ceil(KV_BLOCK)];
            self.words.read((group * self.sequences + table) * self.stride, &mut numbers);
            blocks.extend(
                numbers.iter().filter_map(|block| (*block as usize).checked_sub(of.in_vram)),
            );
        }
        blocks.sort_unstable();
        let runs = blocks.chunk_by(|a, b| b - a <= BETWEEN);
        runs.map(|run| run[0]..run[run.len() - 1] + 1).collect()
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
