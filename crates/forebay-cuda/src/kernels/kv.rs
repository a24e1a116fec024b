//! The paged KV cache on the device: the layout of blocks, and the tables that find them.

use forebay_ops::{KV_BLOCK, KvType};

use super::PassRows;
use crate::DevicePtr;
use crate::launch::Launch;

/// The length of a table is a multiple of this, because kernels look up several blocks with one load.
const TABLE_MULTIPLE: usize = 4;

/// Dimensions of one layer's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayerShape {
    pub element: KvType,
    pub kv_heads: usize,
    /// Number of elements of a key.
    pub dim_k: usize,
    /// Number of elements of a value.
    pub dim_v: usize,
    /// True if a value is the first `dim_v` elements of its key, so that nothing is stored twice. DeepSeek's latent
    /// rows, which all query heads share, are stored so.
    pub values_in_keys: bool,
    /// True if rows see chosen positions only. Other kernels compute such rows.
    pub chosen: bool,
    /// True if scores have biases by the distance of the key.
    pub biased: bool,
    /// Maximum number of positions of a sequence.
    pub context: usize,
    /// Number of positions that a row stands for: 1, or more for compressed entries. A row is in the block of its last position.
    pub span: usize,
}

impl KvLayerShape {
    /// Returns the shape of a layer that stores keys and values of these lengths, a row for each position. Rows see all
    /// positions.
    pub const fn new(
        element: KvType,
        kv_heads: usize,
        (dim_k, dim_v): (usize, usize),
        context: usize,
    ) -> KvLayerShape {
        KvLayerShape {
            element,
            kv_heads,
            dim_k,
            dim_v,
            values_in_keys: false,
            chosen: false,
            biased: false,
            context,
            span: 1,
        }
    }

    /// Returns the number of blocks of a sequence that keeps all of its positions.
    pub fn blocks(&self) -> usize {
        self.context.div_ceil(KV_BLOCK)
    }

    /// Returns the number of blocks for a layer whose tokens see themselves and the `window - 1` positions before. A
    /// position's block is then used again for later positions. Up to `batch` tokens are written at once, before the
    /// first of them looks back, and they may begin anywhere in a block. Never returns more than
    /// [`KvLayerShape::blocks`].
    pub fn blocks_for_window(&self, window: usize, batch: usize) -> usize {
        let positions = window.saturating_add(batch.max(1) - 1);
        // Two positions side by side may lie in two blocks.
        let blocks = (positions.saturating_add(KV_BLOCK - 2)) / KV_BLOCK + 1;
        blocks.min(self.blocks())
    }

    /// Returns the length of a sequence's table, with padding.
    pub fn table_stride(&self) -> usize {
        self.blocks().next_multiple_of(TABLE_MULTIPLE)
    }

    /// Returns the number of bytes of the layer's keys in a block.
    pub fn key_bytes(&self) -> u64 {
        self.plane_bytes(self.dim_k)
    }

    /// Returns the number of bytes of the layer's values in a block, which is 0 if values lie in the keys.
    pub fn value_bytes(&self) -> u64 {
        if self.values_in_keys { 0 } else { self.plane_bytes(self.dim_v) }
    }

    /// Returns the number of bytes of the layer in a block.
    pub fn block_bytes(&self) -> u64 {
        self.key_bytes() + self.value_bytes()
    }

    fn plane_bytes(&self, dim: usize) -> u64 {
        let rows = (self.kv_heads * (KV_BLOCK / self.span).max(1)) as u64;
        let dim = dim as u64;
        let bytes = rows
            * match self.element {
                KvType::F16 => 2 * dim.next_multiple_of(8),
                KvType::F32 => 4 * dim.next_multiple_of(8),
                // The scales are stored behind all rows of the plane.
                KvType::Q8_0 => 34 * dim.div_ceil(32),
                KvType::Q4_0 => 18 * dim.div_ceil(32),
            };
        // Few rows of quantised entries end anywhere, but planes begin at multiples of 16 bytes.
        bytes.next_multiple_of(16)
    }
}

/// A pool of blocks for the layers of a group, which are alike. A block holds the keys and values of all these layers.
///
/// Block 0 is the null block, to which tables point where a sequence has no block. The caller fills it with zeroes, and
/// no kernel writes to it. The initial contents of the other blocks do not matter, because no row counts that was not
/// written.
#[derive(Clone, Copy)]
pub struct KvPool {
    /// Memory of the blocks, aligned to 16 bytes.
    pub memory: DevicePtr<u8>,
    /// Number of blocks, including the null block.
    pub blocks: usize,
    /// Number of bytes from one block to the next.
    pub block_bytes: usize,
}

/// The tables of all sequences for the layers of a group `[count, stride]`. Entry n of a table is the number of the
/// block that holds positions `16n .. 16n + 16`. The entries of a layer with a window repeat.
#[derive(Clone, Copy)]
pub struct KvTables {
    /// Block numbers, aligned to 16 bytes.
    pub blocks: DevicePtr<u32>,
    /// [`KvLayerShape::table_stride`] of the group's layers.
    pub stride: usize,
    pub count: usize,
}

/// One layer's cache.
#[derive(Clone, Copy)]
pub struct DeviceKvLayer {
    pub shape: KvLayerShape,
    pub pool: KvPool,
    pub tables: KvTables,
    /// Offset of the layer's keys in a block; its values follow.
    pub offset: usize,
    /// The layer's keys and values in the blocks behind those of the pool: one block after the other.
    pub elsewhere: Option<KvElsewhere>,
}

/// Blocks of one layer that are not in the memory of their pool but in pinned host memory, or in a copy of that memory.
#[derive(Clone, Copy)]
pub struct KvElsewhere {
    /// Memory of the blocks, aligned to 16 bytes.
    pub memory: DevicePtr<u8>,
    /// Number of blocks. The first one has the number that follows the pool's last.
    pub blocks: usize,
    /// Number of bytes from one block to the next: those of the layer.
    pub block_bytes: usize,
    /// Offset of the keys in a block; the values follow.
    pub offset: usize,
}

impl DeviceKvLayer {
    /// Returns the keys and the values of the null block, from which kernels find those of the others. They are the same if
    /// values lie in the keys.
    fn planes(&self) -> [DevicePtr<u8>; 2] {
        let keys = self.pool.memory.offset(self.offset);
        let values = if self.shape.values_in_keys { 0 } else { self.shape.key_bytes() as usize };
        [keys, keys.offset(values)]
    }

    /// Returns the number of blocks in the pool, the bytes of a block elsewhere, and the distance from block 0 of the pool to where
    /// block 0 would be elsewhere. It is the same for keys and values.
    fn places_elsewhere(&self) -> [u64; 3] {
        let Some(of) = self.elsewhere else { return [u64::from(u32::MAX), 0, 0] };
        let (own, bytes) = (self.pool.blocks as u64, of.block_bytes as u64);
        of.memory.check(of.blocks * of.block_bytes);
        let first = of.memory.address() + of.offset as u64;
        let distance = first.wrapping_sub(self.planes()[0].address()).wrapping_sub(own * bytes);
        [own, bytes, distance]
    }

    pub(crate) fn check(&self) {
        let DeviceKvLayer { shape, pool, tables, .. } = self;
        assert!(shape.kv_heads > 0 && shape.dim_k > 0 && shape.dim_v > 0, "{shape:?} is empty");
        assert!(
            !shape.values_in_keys || shape.dim_v <= shape.dim_k,
            "{shape:?}: values are longer"
        );
        // Kernels count positions in 32 bits, and round their number up to a power of two.
        assert!((1..1 << 30).contains(&shape.context), "{shape:?} has too many positions");
        let aligned = pool.memory.address().is_multiple_of(16)
            && self.offset.is_multiple_of(16)
            && pool.block_bytes.is_multiple_of(16)
            && tables.blocks.address().is_multiple_of(16);
        assert!(aligned, "blocks, planes and tables begin at multiples of 16 bytes");
        let span = shape.span;
        let in_blocks =
            span > 0 && (KV_BLOCK.is_multiple_of(span) || span.is_multiple_of(KV_BLOCK));
        assert!(in_blocks && (span == 1 || shape.kv_heads == 1), "{shape:?} has other rows");
        assert!(pool.block_bytes < 1 << 32, "blocks of {} bytes", pool.block_bytes);
        if let Some(elsewhere) = self.elsewhere {
            let aligned = elsewhere.memory.address().is_multiple_of(16)
                && elsewhere.block_bytes.is_multiple_of(16)
                && elsewhere.offset.is_multiple_of(16);
            assert!(aligned, "blocks begin at multiples of 16 bytes");
            let end = elsewhere.offset + shape.block_bytes() as usize;
            assert!(end <= elsewhere.block_bytes, "a layer's block ends at {end}");
        }
        let end = self.offset + shape.block_bytes() as usize;
        assert!(end <= pool.block_bytes, "a layer's block ends at {end} of {}", pool.block_bytes);
        assert_eq!(tables.stride, shape.table_stride(), "the tables of {shape:?}");
    }
}

impl Launch {
    /// Passes a layer's cache and where the rows of a pass belong in it, as `KV_PARAMETERS` of the kernels.
    pub(super) fn cache(self, layer: &DeviceKvLayer, rows: &PassRows) -> Launch {
        let DeviceKvLayer { pool, tables, offset, .. } = *layer;
        let [keys, values] = layer.planes();
        let behind_keys = pool.blocks * pool.block_bytes - offset;
        let behind_values = behind_keys - (values.address() - keys.address()) as usize;
        self.ptr(keys, behind_keys)
            .ptr(values, behind_values)
            .places(layer)
            .ptr(tables.blocks, tables.count * tables.stride)
            .int(tables.stride)
            .ptr(rows.tables, rows.count)
            .ptr(rows.positions, rows.count)
    }

    /// Passes a layer whose rows stand for several positions, as `SPANNED_PARAMETERS` of the kernels, or none.
    pub(super) fn spanned(self, layer: Option<&DeviceKvLayer>) -> Launch {
        let Some(layer) = layer else {
            return self.null().u64(0).u64(u64::from(u32::MAX)).u64(0).u64(0).null().int(0);
        };
        let DeviceKvLayer { pool, tables, .. } = *layer;
        let [plane, _] = layer.planes();
        let behind = pool.blocks * pool.block_bytes - layer.offset;
        self.ptr(plane, behind)
            .places(layer)
            .ptr(tables.blocks, tables.count * tables.stride)
            .int(layer.shape.span)
    }

    /// Passes the bytes of a block, and where blocks are that are not in the pool.
    fn places(self, layer: &DeviceKvLayer) -> Launch {
        let [own, bytes_elsewhere, distance] = layer.places_elsewhere();
        self.u64(layer.pool.block_bytes as u64).u64(own).u64(bytes_elsewhere).u64(distance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(element: KvType) -> KvLayerShape {
        KvLayerShape::new(element, 3, (80, 20), 10)
    }

    #[test]
    fn rows_are_padded_and_scales_counted() {
        let rows = 3 * 16;
        assert_eq!(shape(KvType::F16).key_bytes(), rows * 160);
        assert_eq!(shape(KvType::F16).value_bytes(), rows * 48);
        assert_eq!(shape(KvType::F32).value_bytes(), rows * 96);
        assert_eq!(shape(KvType::Q8_0).key_bytes(), rows * (96 + 6));
        assert_eq!(shape(KvType::Q8_0).value_bytes(), rows * (32 + 2));
        assert_eq!(shape(KvType::Q4_0).key_bytes(), rows * (48 + 6));
        assert_eq!(shape(KvType::Q4_0).block_bytes(), rows * (48 + 6 + 16 + 2));
        let latent = KvLayerShape { values_in_keys: true, ..shape(KvType::F16) };
        assert_eq!((latent.key_bytes(), latent.value_bytes()), (rows * 160, 0));
        for element in [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0] {
            for dim in 1..70 {
                let of = KvLayerShape { kv_heads: 1, dim_k: dim, ..shape(element) };
                assert!(of.key_bytes().is_multiple_of(16), "{of:?}");
            }
        }
    }

    #[test]
    fn a_window_has_blocks_for_itself_and_a_batch_beside_it() {
        let blocks = |window, batch, context| {
            KvLayerShape { context, ..shape(KvType::F16) }.blocks_for_window(window, batch)
        };
        assert_eq!((blocks(1, 1, 1000), blocks(2, 1, 1000), blocks(18, 1, 1000)), (1, 2, 3));
        assert_eq!((blocks(128, 512, 131_072), blocks(usize::MAX, 2, 500)), (41, 32));
        for (window, batch) in [(1, 1), (5, 3), (16, 16), (17, 1), (100, 31)] {
            // A first token at any position sees no block that the last one's replaces.
            let ring = blocks(window, batch, 1 << 20);
            let replaced = (200..300).any(|first: usize| {
                (first + batch - 1) / KV_BLOCK >= (first + 1 - window) / KV_BLOCK + ring
            });
            assert!(!replaced, "{window} {batch}");
        }
    }

    #[test]
    fn tables_have_whole_loads() {
        let strides = [1, 16, 17, 64, 65, 1000]
            .map(|context| KvLayerShape { context, ..shape(KvType::F16) }.table_stride());
        assert_eq!(strides, [4, 4, 4, 4, 8, 64]);
    }
}
