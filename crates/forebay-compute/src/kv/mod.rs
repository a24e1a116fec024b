//! The key/value cache of one sequence.

mod rows;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use rows::{HeadRows, Read, Widen, with_rows};

use self::rows::{BLOCK, Plane};
use crate::attention::CHUNK;
use crate::cpu::Cpu;
use crate::error::ComputeError;
use crate::simd::LANES;

/// Storage type of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    F16,
    F32,
    /// One byte per element, and a half-precision scale for every 32 elements of a row: their
    /// largest magnitude divided by 127.
    Q8_0,
    /// Four bits per element, with a scale for every 32 elements: the element farthest from 0
    /// divided by -8. Codes are 0 to 15 and stand for -8 to 7, as in GGUF's blocks of the same
    /// name.
    Q4_0,
}

impl KvType {
    /// Returns the size in bytes of one row of `dim` elements, padded to whole vectors or blocks.
    /// Returns `None` if that does not fit 64 bits.
    fn row_bytes(self, dim: usize) -> Option<u64> {
        let stride = self.padded(dim)? as u64;
        match self {
            KvType::F16 => stride.checked_mul(2),
            KvType::F32 => stride.checked_mul(4),
            KvType::Q8_0 => (stride / BLOCK as u64).checked_mul(34),
            KvType::Q4_0 => (stride / BLOCK as u64).checked_mul(18),
        }
    }

    /// Returns the number of elements from one row to the next. Rows are padded so that no kernel
    /// needs a tail.
    fn padded(self, dim: usize) -> Option<usize> {
        dim.checked_next_multiple_of(match self {
            KvType::F16 | KvType::F32 => LANES,
            KvType::Q8_0 | KvType::Q4_0 => BLOCK,
        })
    }
}

/// The dimensions of one layer of a [`KvCache`].
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
    /// Number of positions that fit.
    pub context: usize,
    /// Number of positions that a token sees: itself and the `window - 1` before it. `None` means
    /// all positions before it.
    pub window: Option<usize>,
    /// Number of rows that are kept, with position `p` in row `p % rows`. It is `context` if
    /// nothing is forgotten, else [`KvShape::rows_for_window`].
    pub rows: usize,
}

impl KvShape {
    /// Returns the number of rows that a layer with a `window` needs when up to `batch` tokens are
    /// appended at once. All of them are in the cache before the first one looks back. The result
    /// is never more than `context`.
    pub fn rows_for_window(window: usize, batch: usize, context: usize) -> usize {
        // Chunks of attention begin at multiples of their length, and none may wrap around the end
        // of the rows.
        let rows = window.saturating_add(batch.max(1) - 1).checked_next_multiple_of(CHUNK);
        rows.map_or(context, |rows| rows.min(context))
    }

    /// Returns the largest position, at most `len`, from which computation can resume after the
    /// positions below `written` were computed. This is `len`, or 0 if a token at `len` would see a
    /// row that a later position has overwritten.
    pub fn resumable(&self, written: usize, len: usize) -> usize {
        resumable(self.window, self.rows, written, len)
    }

    /// Returns the number of bytes that a layer of this shape reserves, or `None` if that does not
    /// fit 64 bits.
    pub fn bytes(&self, kind: KvType) -> Option<u64> {
        let values = if self.values_in_keys { 0 } else { kind.row_bytes(self.head_dim_v)? };
        let row = kind.row_bytes(self.head_dim_k)?.checked_add(values)?;
        [self.kv_heads, self.rows]
            .into_iter()
            .try_fold(row, |bytes, factor| bytes.checked_mul(factor as u64))
    }
}

/// Does the same as [`KvShape::resumable`] for any cache of a layer that keeps `rows` positions.
pub fn resumable(window: Option<usize>, rows: usize, written: usize, len: usize) -> usize {
    let oldest = window.map_or(0, |window| (len + 1).saturating_sub(window));
    if written.saturating_sub(rows) <= oldest { len } else { 0 }
}

/// Keys and values of every position seen so far, for every layer.
///
/// Memory is reserved at creation, and the system supplies it when positions are first written.
/// Each key/value head of a layer is one run of rows, which attention reads from front to back.
pub struct KvCache {
    kind: KvType,
    layers: Vec<Layer>,
}

struct Layer {
    shape: KvShape,
    keys: Plane,
    /// `None` if the values are part of the keys.
    values: Option<Plane>,
    /// Number of positions that are valid.
    len: usize,
    /// End of the positions that were written since the cache was last empty. Their rows may hold
    /// newer positions.
    written: usize,
}

impl KvCache {
    /// Reserves a cache with one layer for each of `shapes`.
    ///
    /// # Errors
    /// Returns [`ComputeError::CacheTooLarge`] if the system refuses the memory.
    ///
    /// # Panics
    /// Panics if a shape is not valid:
    ///
    /// - Values that are part of their keys are longer than the keys.
    /// - The window is 0.
    /// - There are fewer rows than positions, and the layer has no window or the rows are not whole
    ///   chunks of attention.
    /// - There are more rows than positions.
    pub fn new(shapes: &[KvShape], kind: KvType) -> Result<KvCache, ComputeError> {
        let bytes = sum_of_bytes(shapes.iter(), kind);
        let refused = || ComputeError::CacheTooLarge { bytes };
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(refused());
        }
        let layers = shapes.iter().map(|shape| Layer::new(*shape, kind).ok_or_else(refused));
        Ok(KvCache { kind, layers: layers.collect::<Result<_, _>>()? })
    }

    /// Returns the dimensions of `layer`.
    ///
    /// # Panics
    /// Panics if there is no such layer.
    pub fn shape(&self, layer: usize) -> &KvShape {
        &self.layers[layer].shape
    }

    /// Returns the number of positions that fit every layer.
    pub fn context(&self) -> usize {
        self.layers.iter().map(|layer| layer.shape.context).min().unwrap_or(0)
    }

    /// Returns the storage type of the elements.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Returns the number of bytes reserved.
    pub fn bytes(&self) -> u64 {
        let shapes = self.layers.iter().map(|layer| &layer.shape);
        sum_of_bytes(shapes, self.kind).expect("counted when it was reserved")
    }

    /// Returns the number of positions that every layer holds.
    pub fn len(&self) -> usize {
        self.layers.iter().map(|layer| layer.len).min().unwrap_or(0)
    }

    /// Returns true if some layer holds no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of positions that `layer` holds.
    ///
    /// # Panics
    /// Panics if there is no such layer.
    pub fn layer_len(&self, layer: usize) -> usize {
        self.layers[layer].len
    }

    /// Returns the largest position, at most `len`, from which computation can resume. This is
    /// `len`, or 0 if a layer with a window has forgotten positions that a token there would see.
    pub fn resumable(&self, len: usize) -> usize {
        let of = |layer: &Layer| layer.shape.resumable(layer.written, len);
        self.layers.iter().map(of).min().unwrap_or(0)
    }

    /// Forgets every position from `len` on.
    ///
    /// # Panics
    /// Panics if computation cannot resume at `len` ([`KvCache::resumable`]).
    pub fn truncate(&mut self, len: usize) {
        assert_eq!(self.resumable(len), len, "truncate: a window before {len} is gone");
        for layer in &mut self.layers {
            layer.len = layer.len.min(len);
            if len == 0 {
                layer.written = 0;
            }
        }
    }

    /// Writes a run of tokens at `position`, `position + 1`, ... of `layer` and forgets all
    /// positions after the run. `k` is `[tokens, kv_heads, head_dim_k]`. `v` is `[tokens, kv_heads,
    /// head_dim_v]`, or empty if the values are part of the keys.
    ///
    /// # Errors
    /// Returns [`ComputeError::ContextFull`] if the run does not fit.
    ///
    /// # Panics
    /// Panics in these cases:
    ///
    /// - There is no such layer, or `k` and `v` do not have those shapes.
    /// - The run would leave a gap after the positions that the layer holds.
    /// - The layer has a window and too few rows to hold the run beside it.
    /// - The layer has forgotten positions that the run would see.
    pub fn append(
        &mut self,
        cpu: &Cpu,
        layer: usize,
        position: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<(), ComputeError> {
        let layer = &mut self.layers[layer];
        let KvShape { kv_heads, head_dim_k, head_dim_v, context, .. } = layer.shape;
        let row = (kv_heads * head_dim_k).max(1);
        let tokens = k.len() / row;
        assert!(k.len() == tokens * kv_heads * head_dim_k, "append: k is no whole token");
        let value_row = if layer.values.is_some() { kv_heads * head_dim_v } else { 0 };
        assert!(v.len() == tokens * value_row, "append: v does not fit k");
        assert!(position <= layer.len, "append: a gap before position {position}");
        let end = position.saturating_add(tokens);
        if end > context {
            return Err(ComputeError::ContextFull { first: position, end, context });
        }
        assert_eq!(
            layer.shape.resumable(layer.written, position),
            position,
            "append: a window before {position} is gone"
        );
        layer.shape.check_run(tokens);
        layer.keys.write(cpu, kv_heads, position, k);
        if let Some(values) = &mut layer.values {
            values.write(cpu, kv_heads, position, v);
        }
        layer.len = end;
        layer.written = if position == 0 { end } else { layer.written.max(end) };
        Ok(())
    }

    /// Returns one stored key, widened, as `head_dim_k` elements.
    ///
    /// # Panics
    /// Panics if there is no such layer, head or row.
    pub fn key(&self, cpu: &Cpu, layer: usize, kv_head: usize, position: usize) -> Vec<f32> {
        self.layers[layer].keys.read(cpu, kv_head, position)
    }

    /// Returns one stored value, widened, as `head_dim_v` elements.
    ///
    /// # Panics
    /// Panics if there is no such layer, head or row.
    pub fn value(&self, cpu: &Cpu, layer: usize, kv_head: usize, position: usize) -> Vec<f32> {
        let layer = &self.layers[layer];
        let mut value = layer.value_plane().read(cpu, kv_head, position);
        value.truncate(layer.shape.head_dim_v);
        value
    }

    /// Returns all rows of one head's keys, [`KvCache::key_stride`] elements each.
    pub(crate) fn keys(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        self.layers[layer].keys.head(kv_head)
    }

    /// Returns all rows of one head's values, [`KvCache::value_stride`] elements each.
    pub(crate) fn values(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        self.layers[layer].value_plane().head(kv_head)
    }

    /// Returns the number of elements from one key to the next.
    pub(crate) fn key_stride(&self, layer: usize) -> usize {
        self.layers[layer].keys.stride()
    }

    /// Returns the number of elements from one value to the next.
    pub(crate) fn value_stride(&self, layer: usize) -> usize {
        self.layers[layer].value_plane().stride()
    }

    /// Returns the number of elements of a value, rounded up to whole vectors. The extra elements
    /// are in the cache but not used.
    pub(crate) fn value_width(&self, layer: usize) -> usize {
        self.layers[layer].shape.head_dim_v.next_multiple_of(LANES)
    }
}

impl KvShape {
    /// Panics if the rows cannot hold a run of `tokens` and the window that its first token sees.
    pub(crate) fn check_run(&self, tokens: usize) {
        let fits = match self.window {
            Some(window) => (window - 1).saturating_add(tokens) <= self.rows,
            None => false,
        };
        assert!(self.rows >= self.context || fits, "{tokens} tokens at once in {self:?}");
    }
}

/// Returns the number of bytes of all layers, or `None` if that does not fit 64 bits.
fn sum_of_bytes<'a>(mut shapes: impl Iterator<Item = &'a KvShape>, kind: KvType) -> Option<u64> {
    shapes.try_fold(0_u64, |sum, shape| sum.checked_add(shape.bytes(kind)?))
}

impl Layer {
    /// Reserves a layer. Returns `None` if the system refuses the memory.
    fn new(shape: KvShape, kind: KvType) -> Option<Layer> {
        let KvShape { head_dim_k, head_dim_v, rows, context, window, .. } = shape;
        assert!(!shape.values_in_keys || head_dim_v <= head_dim_k, "{shape:?}: values are longer");
        assert!(window != Some(0), "{shape:?}: a window of 0 sees nothing");
        // Rows that wrap around must be whole chunks, and there must be a window.
        let wraps = rows > 0 && rows.is_multiple_of(CHUNK) && window.is_some();
        assert!(rows == context || rows < context && wraps, "{shape:?}: rows do not fit");
        let plane = |dim: usize| Plane::new(kind, shape.kv_heads, rows, dim);
        let values = if shape.values_in_keys { None } else { Some(plane(head_dim_v)?) };
        Some(Layer { shape, keys: plane(head_dim_k)?, values, len: 0, written: 0 })
    }

    fn value_plane(&self) -> &Plane {
        self.values.as_ref().unwrap_or(&self.keys)
    }
}
