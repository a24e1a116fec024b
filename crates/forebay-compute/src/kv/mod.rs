//! The key/value cache: blocks of positions, which sequences take from pools.
//!
//! A block holds the keys and values of [`KV_BLOCK`] positions for all layers of a group. A sequence has a table for each
//! group: entry `position / KV_BLOCK` is the number of the block that holds the position. The caller decides which
//! sequence has which blocks. Block 0 of every pool is never written; its number stands for "no block".

mod rows;
#[cfg(test)]
pub(crate) mod tests;

use forebay_ops::{KV_BLOCK, KvType};
pub(crate) use rows::{HeadRows, Read, widen, with_rows};

use self::rows::{BLOCK, Elements};
use crate::attention::CHUNK;
use crate::cpu::Cpu;
use crate::error::ComputeError;
use crate::simd::LANES;

/// Returns the size in bytes of one row of `dim` elements, padded to whole vectors or blocks.
/// Returns `None` if that does not fit 64 bits.
pub(crate) fn row_bytes(kind: KvType, dim: usize) -> Option<u64> {
    let stride = padded(kind, dim)? as u64;
    match kind {
        KvType::F16 => stride.checked_mul(2),
        KvType::F32 => stride.checked_mul(4),
        KvType::Q8_0 => (stride / BLOCK as u64).checked_mul(34),
        KvType::Q4_0 => (stride / BLOCK as u64).checked_mul(18),
    }
}

/// Returns the number of elements from one row to the next. Rows are padded so that no kernel
/// needs a tail.
fn padded(kind: KvType, dim: usize) -> Option<usize> {
    dim.checked_next_multiple_of(match kind {
        KvType::F16 | KvType::F32 => LANES,
        KvType::Q8_0 | KvType::Q4_0 => BLOCK,
    })
}

/// Form of the keys and values of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    pub kv_heads: usize,
    /// Number of elements in a key.
    pub head_dim_k: usize,
    /// Number of elements in a value.
    pub head_dim_v: usize,
    /// True if a value is the first `head_dim_v` elements of its key, so that nothing is stored
    /// twice. DeepSeek's latent rows, which all query heads share, are stored this way.
    pub values_in_keys: bool,
}

impl KvShape {
    /// Returns the number of bytes that a layer of this shape takes in every block, or `None` if
    /// that does not fit 64 bits.
    pub fn block_bytes(&self, kind: KvType) -> Option<u64> {
        let values = if self.values_in_keys { 0 } else { row_bytes(kind, self.head_dim_v)? };
        let row = row_bytes(kind, self.head_dim_k)?.checked_add(values)?;
        row.checked_mul(self.kv_heads as u64)?.checked_mul(KV_BLOCK as u64)
    }
}

/// Returns the number of positions that a layer with a `window` must keep when up to `batch` tokens
/// are appended at once. All of them are in the cache before the first one looks back. The result
/// is never more than `context`.
pub fn rows_for_window(window: usize, batch: usize, context: usize) -> usize {
    let rows = window.saturating_add(batch.max(1) - 1).checked_next_multiple_of(CHUNK);
    rows.map_or(context, |rows| rows.min(context))
}

/// One layer of a [`KvCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvLayer {
    pub shape: KvShape,
    /// Number of the layer's group, from 0 on.
    pub group: usize,
    /// Number of consecutive positions that a row stands for, a divisor or a multiple of [`KV_BLOCK`]. It is 1 for keys and
    /// values of positions, and more for compressed entries. A row is in the block of its last position.
    pub span: usize,
}

impl KvLayer {
    /// Returns a layer with a row for each position.
    pub fn new(shape: KvShape, group: usize) -> KvLayer {
        KvLayer { shape, group, span: 1 }
    }

    /// Returns the number of bytes that the layer takes in every block, or `None` if that does not fit 64 bits.
    pub fn block_bytes(&self, kind: KvType) -> Option<u64> {
        let positions = self.shape.block_bytes(kind)?;
        Some(positions / KV_BLOCK as u64 * rows_of_block(self.span) as u64)
    }
}

/// Returns the number of rows of a block if each stands for `span` positions.
fn rows_of_block(span: usize) -> usize {
    (KV_BLOCK / span.max(1)).max(1)
}

/// Pools of blocks of keys and values, one pool for each group of layers.
///
/// Memory is reserved at creation, and the system supplies it when positions are first written.
/// Each key/value head of a layer is one run of rows in a block: [`KV_BLOCK`] rows, or fewer if a row stands for several positions.
pub struct KvCache {
    kind: KvType,
    layers: Vec<Layer>,
    groups: Vec<Group>,
}

struct Layer {
    shape: KvShape,
    group: usize,
    span: usize,
    keys: Plane,
    /// The plane of the keys if the values are part of them.
    values: Plane,
}

/// The keys or the values of a layer within a block: `[kv_heads, rows, stride]`.
#[derive(Clone, Copy)]
struct Plane {
    /// First element in the block.
    first: usize,
    rows: usize,
    /// Number of elements of a row that hold data.
    dim: usize,
    /// Number of elements from one row to the next.
    stride: usize,
}

struct Group {
    /// `[blocks, block elements]`
    elements: Elements,
    block_elements: usize,
    block_bytes: u64,
    blocks: usize,
}

impl KvCache {
    /// Reserves the blocks of all groups. `blocks` is the number of blocks of each group, with block 0.
    ///
    /// # Errors
    /// Returns [`ComputeError::CacheTooLarge`] if the system refuses the memory.
    ///
    /// # Panics
    /// Panics if a layer's group has no entry in `blocks`, if values that are part of their keys are longer than the keys, or if a
    /// span neither divides [`KV_BLOCK`] nor is a multiple of it.
    pub fn new(
        layers: &[KvLayer],
        blocks: &[usize],
        kind: KvType,
    ) -> Result<KvCache, ComputeError> {
        let bytes = KvCache::bytes_of(layers, blocks, kind);
        let refused = || ComputeError::CacheTooLarge { bytes };
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(refused());
        }
        let mut block_elements = vec![0; blocks.len()];
        let layers: Vec<Layer> = layers
            .iter()
            .map(|layer| Layer::new(layer, kind, &mut block_elements[layer.group]))
            .collect();
        let groups = blocks.iter().zip(block_elements).map(|(&blocks, block_elements)| {
            let elements = Elements::zeroed(kind, blocks.checked_mul(block_elements)?)?;
            let block_bytes = row_bytes(kind, block_elements)?;
            Some(Group { elements, block_elements, block_bytes, blocks })
        });
        let groups = groups.collect::<Option<Vec<Group>>>().ok_or_else(refused)?;
        Ok(KvCache { kind, layers, groups })
    }

    /// Returns the bytes that [`KvCache::new`] reserves, or `None` if they do not fit 64 bits.
    pub fn bytes_of(layers: &[KvLayer], blocks: &[usize], kind: KvType) -> Option<u64> {
        layers.iter().try_fold(0_u64, |sum, layer| {
            let bytes = layer.block_bytes(kind)?;
            sum.checked_add(bytes.checked_mul(blocks[layer.group] as u64)?)
        })
    }

    /// Returns the dimensions of `layer`.
    ///
    /// # Panics
    /// Panics if there is no such layer.
    pub fn shape(&self, layer: usize) -> &KvShape {
        &self.layers[layer].shape
    }

    /// Returns the group of `layer`.
    ///
    /// # Panics
    /// Panics if there is no such layer.
    pub fn group(&self, layer: usize) -> usize {
        self.layers[layer].group
    }

    /// Returns the number of positions that a row of `layer` stands for.
    ///
    /// # Panics
    /// Panics if there is no such layer.
    pub fn span(&self, layer: usize) -> usize {
        self.layers[layer].span
    }

    /// Returns the number of rows of `layer` in a block.
    pub(crate) fn rows_of_block(&self, layer: usize) -> usize {
        self.layers[layer].keys.rows
    }

    /// Returns the index in a table and the row in the block of row number `row` of a sequence.
    #[inline]
    pub(crate) fn place(&self, layer: usize, row: usize) -> (usize, usize) {
        let span = self.layers[layer].span;
        let last = (row + 1) * span - 1;
        (last / KV_BLOCK, last % KV_BLOCK / span)
    }

    /// Returns the storage type of the elements.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Returns the number of blocks of `group`, with block 0.
    ///
    /// # Panics
    /// Panics if there is no such group.
    pub fn blocks(&self, group: usize) -> usize {
        self.groups[group].blocks
    }

    /// Returns the number of bytes of a block of `group`.
    ///
    /// # Panics
    /// Panics if there is no such group.
    pub fn block_bytes(&self, group: usize) -> u64 {
        self.groups[group].block_bytes
    }

    /// Returns the number of bytes reserved.
    pub fn bytes(&self) -> u64 {
        self.groups.iter().map(|group| group.block_bytes * group.blocks as u64).sum()
    }

    /// Writes a run of tokens at `position`, `position + 1`, ... of `layer`, in the blocks of `table`. `k` is `[tokens,
    /// kv_heads, head_dim_k]`. `v` is `[tokens, kv_heads, head_dim_v]`, or empty if the values are part of the keys. If a row stands
    /// for several positions, each token is a row, and `position` is the last one of the first row.
    ///
    /// # Panics
    /// Panics if there is no such layer, if `k` and `v` do not have those shapes, or if `table` has no block for a
    /// position.
    pub fn write(
        &mut self,
        cpu: &Cpu,
        layer: usize,
        table: &[u32],
        position: usize,
        k: &[f32],
        v: &[f32],
    ) {
        let KvCache { layers, groups, .. } = self;
        let layer = &layers[layer];
        let KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys } = layer.shape;
        let row = (kv_heads * head_dim_k).max(1);
        let tokens = k.len() / row;
        assert!(k.len() == tokens * kv_heads * head_dim_k, "write: k is no whole token");
        let value_row = if values_in_keys { 0 } else { kv_heads * head_dim_v };
        assert!(v.len() == tokens * value_row, "write: v does not fit k");
        let group = &mut groups[layer.group];
        for token in 0..tokens {
            let position = position + token * layer.span;
            let block = table[position / KV_BLOCK] as usize;
            assert!((1..group.blocks).contains(&block), "write: position {position} has no block");
            let first = block * group.block_elements;
            let at = position % KV_BLOCK / layer.span;
            let k = &k[token * row..][..row];
            layer.keys.write(cpu, &mut group.elements, first, at, k);
            let v = &v[token * value_row..][..value_row];
            if !v.is_empty() {
                layer.values.write(cpu, &mut group.elements, first, at, v);
            }
        }
    }

    /// Copies the content of block `from` to block `to` of a group.
    ///
    /// # Panics
    /// Panics if there are no such blocks, or `to` is 0.
    pub fn copy_block(&mut self, group: usize, from: u32, to: u32) {
        let Group { elements, block_elements, blocks, .. } = &mut self.groups[group];
        let (from, to) = (from as usize, to as usize);
        assert!(to != 0 && from.max(to) < *blocks, "copy_block: {from} to {to} of {blocks}");
        elements.copy(from * *block_elements, to * *block_elements, *block_elements);
    }

    /// Copies the content of a block to `bytes`.
    ///
    /// # Panics
    /// Panics if there is no such block, or `bytes` is not [`KvCache::block_bytes`] long.
    pub fn save_block(&self, group: usize, block: u32, bytes: &mut [u8]) {
        let Group { elements, block_elements, block_bytes, .. } = &self.groups[group];
        assert_eq!(bytes.len() as u64, *block_bytes, "save_block: {block}");
        elements.save(block as usize * block_elements, *block_elements, bytes);
    }

    /// Replaces the content of a block by that of [`KvCache::save_block`].
    ///
    /// # Panics
    /// Panics if there is no such block, `block` is 0, or `bytes` is not [`KvCache::block_bytes`] long.
    pub fn restore_block(&mut self, group: usize, block: u32, bytes: &[u8]) {
        let Group { elements, block_elements, block_bytes, .. } = &mut self.groups[group];
        assert!(block != 0 && bytes.len() as u64 == *block_bytes, "restore_block: {block}");
        elements.restore(block as usize * *block_elements, *block_elements, bytes);
    }

    /// Returns one stored key, widened, as `head_dim_k` elements. `position` is the last one that it stands for.
    ///
    /// # Panics
    /// Panics if there is no such layer, head or row.
    pub fn key(
        &self,
        cpu: &Cpu,
        layer: usize,
        table: &[u32],
        kv_head: usize,
        position: usize,
    ) -> Vec<f32> {
        let rows = self.keys(layer, table[position / KV_BLOCK], kv_head);
        let Plane { dim, stride, .. } = self.layers[layer].keys;
        read_row(cpu, rows, position % KV_BLOCK / self.layers[layer].span, stride, dim)
    }

    /// Returns one stored value, widened, as `head_dim_v` elements.
    ///
    /// # Panics
    /// Panics if there is no such layer, head or row.
    pub fn value(
        &self,
        cpu: &Cpu,
        layer: usize,
        table: &[u32],
        kv_head: usize,
        position: usize,
    ) -> Vec<f32> {
        let rows = self.values(layer, table[position / KV_BLOCK], kv_head);
        let stride = self.layers[layer].values.stride;
        read_row(cpu, rows, position % KV_BLOCK, stride, self.layers[layer].shape.head_dim_v)
    }

    /// Returns the rows of one head's keys in a block, [`KvCache::key_stride`] elements each.
    #[inline]
    pub(crate) fn keys(&self, layer: usize, block: u32, kv_head: usize) -> HeadRows<'_> {
        let layer = &self.layers[layer];
        self.groups[layer.group].rows(layer.keys, block, kv_head)
    }

    /// Returns the rows of one head's values in a block, [`KvCache::value_stride`] elements each.
    #[inline]
    pub(crate) fn values(&self, layer: usize, block: u32, kv_head: usize) -> HeadRows<'_> {
        let layer = &self.layers[layer];
        self.groups[layer.group].rows(layer.values, block, kv_head)
    }

    /// Returns the number of elements from one key to the next.
    pub(crate) fn key_stride(&self, layer: usize) -> usize {
        self.layers[layer].keys.stride
    }

    /// Returns the number of elements from one value to the next.
    pub(crate) fn value_stride(&self, layer: usize) -> usize {
        self.layers[layer].values.stride
    }

    /// Returns the number of elements of a value, rounded up to whole vectors. The extra elements
    /// are in the cache but not used.
    pub(crate) fn value_width(&self, layer: usize) -> usize {
        self.layers[layer].shape.head_dim_v.next_multiple_of(LANES)
    }
}

fn read_row(cpu: &Cpu, rows: HeadRows<'_>, row: usize, stride: usize, dim: usize) -> Vec<f32> {
    let mut out = vec![0.0; stride];
    widen(cpu, rows, row * stride, &mut out);
    out.truncate(dim);
    out
}

impl Group {
    #[inline]
    fn rows(&self, plane: Plane, block: u32, kv_head: usize) -> HeadRows<'_> {
        let rows = plane.rows * plane.stride;
        self.elements
            .rows(block as usize * self.block_elements + plane.first + kv_head * rows, rows)
    }
}

impl Layer {
    /// Lays the layer out behind the first `*end` elements of a block, which it moves.
    fn new(layer: &KvLayer, kind: KvType, end: &mut usize) -> Layer {
        let KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys } = layer.shape;
        assert!(!values_in_keys || head_dim_v <= head_dim_k, "{layer:?}: values are longer");
        let span = layer.span;
        let fits = span > 0 && (KV_BLOCK.is_multiple_of(span) || span.is_multiple_of(KV_BLOCK));
        assert!(fits, "{layer:?}: rows that no blocks hold");
        let rows = rows_of_block(span);
        let mut plane = |dim: usize| {
            let stride = padded(kind, dim).expect("the bytes were counted");
            let first = *end;
            *end += kv_heads * rows * stride;
            Plane { first, rows, dim, stride }
        };
        let keys = plane(head_dim_k);
        let values = if values_in_keys { keys } else { plane(head_dim_v) };
        Layer { shape: layer.shape, group: layer.group, span, keys, values }
    }
}

impl Plane {
    /// Writes `x` `[heads, dim]` in row `row` of the block that begins at element `block`.
    fn write(self, cpu: &Cpu, elements: &mut Elements, block: usize, row: usize, x: &[f32]) {
        for (head, x) in x.chunks_exact(self.dim).enumerate() {
            let first = block + self.first + (head * self.rows + row) * self.stride;
            elements.write(cpu, first, self.stride, x);
        }
    }
}
