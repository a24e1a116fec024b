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

/// What the cache is stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    F16,
    F32,
    /// A half-precision scale for every 32 elements of a row, the largest divided by 127, and a
    /// byte for each.
    Q8_0,
    /// The same with four bits: the scale is the element farthest from 0 divided by -8, codes are
    /// 0 to 15 and stand for -8 to 7, as in GGUF's blocks of the name.
    Q4_0,
}

impl KvType {
    /// Bytes of one row of `dim` elements, which is padded to whole vectors or blocks, or `None`
    /// when that is no 64-bit number.
    fn row_bytes(self, dim: usize) -> Option<u64> {
        let stride = self.padded(dim)? as u64;
        match self {
            KvType::F16 => stride.checked_mul(2),
            KvType::F32 => stride.checked_mul(4),
            KvType::Q8_0 => (stride / BLOCK as u64).checked_mul(34),
            KvType::Q4_0 => (stride / BLOCK as u64).checked_mul(18),
        }
    }

    /// Elements from one row to the next, so that no kernel needs a tail.
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
    /// Elements of a key.
    pub head_dim_k: usize,
    /// Elements of a value.
    pub head_dim_v: usize,
    /// A value is the first `head_dim_v` elements of its key, so that nothing is stored twice:
    /// DeepSeek's latent rows, which all query heads share.
    pub values_in_keys: bool,
    /// Positions that fit.
    pub context: usize,
    /// A token sees itself and the `window - 1` positions before it; `None`: all before it.
    pub window: Option<usize>,
    /// Rows that are kept, position `p` in row `p % rows`: `context` where nothing is forgotten,
    /// else [`KvShape::rows_for_window`].
    pub rows: usize,
}

impl KvShape {
    /// Rows that a layer with a `window` needs when up to `batch` tokens are appended at once,
    /// which are all there before the first of them looks back. Never more than `context`.
    pub fn rows_for_window(window: usize, batch: usize, context: usize) -> usize {
        // Chunks of attention begin at multiples of their length: none may lie across the end.
        let rows = window.saturating_add(batch.max(1) - 1).checked_next_multiple_of(CHUNK);
        rows.map_or(context, |rows| rows.min(context))
    }

    /// The largest position, at most `len`, from which computing may go on after positions below
    /// `written` were: `len` itself, or 0, all anew, where a token there would look back on a row
    /// that a later position has taken.
    pub fn resumable(&self, written: usize, len: usize) -> usize {
        resumable(self.window, self.rows, written, len)
    }

    /// Bytes that a layer of this shape reserves, or `None` when that is no 64-bit number.
    pub fn bytes(&self, kind: KvType) -> Option<u64> {
        let values = if self.values_in_keys { 0 } else { kind.row_bytes(self.head_dim_v)? };
        let row = kind.row_bytes(self.head_dim_k)?.checked_add(values)?;
        [self.kv_heads, self.rows]
            .into_iter()
            .try_fold(row, |bytes, factor| bytes.checked_mul(factor as u64))
    }
}

/// [`KvShape::resumable`] of a layer that keeps `rows` positions, for any cache that is one.
pub fn resumable(window: Option<usize>, rows: usize, written: usize, len: usize) -> usize {
    let oldest = window.map_or(0, |window| (len + 1).saturating_sub(window));
    if written.saturating_sub(rows) <= oldest { len } else { 0 }
}

/// Keys and values of every position seen so far, for every layer.
///
/// Memory is reserved at creation and supplied by the system as positions are first written. Each
/// key/value head of a layer is one run of rows, which attention reads from front to back.
pub struct KvCache {
    kind: KvType,
    layers: Vec<Layer>,
}

struct Layer {
    shape: KvShape,
    keys: Plane,
    /// `None` where values lie in the keys.
    values: Option<Plane>,
    /// Positions that count.
    len: usize,
    /// Positions below this were written since the cache was last empty: their rows are taken.
    written: usize,
}

impl KvCache {
    /// Reserves a cache with a layer for each of `shapes`.
    ///
    /// # Errors
    /// [`ComputeError::CacheTooLarge`] when the system refuses the memory.
    ///
    /// # Panics
    /// When values that lie in their keys are longer than these, or rows are fewer than positions
    /// and no window says so.
    pub fn new(shapes: &[KvShape], kind: KvType) -> Result<KvCache, ComputeError> {
        let bytes = sum_of_bytes(shapes.iter(), kind);
        let refused = || ComputeError::CacheTooLarge { bytes };
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(refused());
        }
        let layers = shapes.iter().map(|shape| Layer::new(*shape, kind).ok_or_else(refused));
        Ok(KvCache { kind, layers: layers.collect::<Result<_, _>>()? })
    }

    /// The dimensions of `layer`.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn shape(&self, layer: usize) -> &KvShape {
        &self.layers[layer].shape
    }

    /// Positions that fit every layer.
    pub fn context(&self) -> usize {
        self.layers.iter().map(|layer| layer.shape.context).min().unwrap_or(0)
    }

    /// What elements are stored as.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        let shapes = self.layers.iter().map(|layer| &layer.shape);
        sum_of_bytes(shapes, self.kind).expect("counted when it was reserved")
    }

    /// Positions that every layer holds.
    pub fn len(&self) -> usize {
        self.layers.iter().map(|layer| layer.len).min().unwrap_or(0)
    }

    /// Whether some layer holds no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Positions that `layer` holds.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer_len(&self, layer: usize) -> usize {
        self.layers[layer].len
    }

    /// The largest position, at most `len`, from which computing may go on: `len` itself, or 0
    /// where a layer with a window has forgotten what a token there would see.
    pub fn resumable(&self, len: usize) -> usize {
        let of = |layer: &Layer| layer.shape.resumable(layer.written, len);
        self.layers.iter().map(of).min().unwrap_or(0)
    }

    /// Forgets every position from `len` on.
    ///
    /// # Panics
    /// When computing cannot go on there ([`KvCache::resumable`]).
    pub fn truncate(&mut self, len: usize) {
        assert_eq!(self.resumable(len), len, "truncate: a window before {len} is gone");
        for layer in &mut self.layers {
            layer.len = layer.len.min(len);
            if len == 0 {
                layer.written = 0;
            }
        }
    }

    /// Writes a run of tokens at `position`, `position + 1`, ... of `layer`, and forgets what lay
    /// behind. `k` is `[tokens, kv_heads, head_dim_k]`, `v` `[tokens, kv_heads, head_dim_v]`, or
    /// empty where values lie in the keys.
    ///
    /// # Errors
    /// [`ComputeError::ContextFull`] when the run does not fit.
    ///
    /// # Panics
    /// When there is no such layer, `k` and `v` are not those shapes, the run would leave a gap
    /// behind the positions that the layer holds, or the layer has a window and too few rows to
    /// hold the run beside it, or has forgotten what the run would see.
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

    /// One key as it is stored, `head_dim_k` elements, widened.
    ///
    /// # Panics
    /// When there is no such layer, head or row.
    pub fn key(&self, cpu: &Cpu, layer: usize, kv_head: usize, position: usize) -> Vec<f32> {
        self.layers[layer].keys.read(cpu, kv_head, position)
    }

    /// One value as it is stored, `head_dim_v` elements, widened.
    ///
    /// # Panics
    /// When there is no such layer, head or row.
    pub fn value(&self, cpu: &Cpu, layer: usize, kv_head: usize, position: usize) -> Vec<f32> {
        let layer = &self.layers[layer];
        let mut value = layer.value_plane().read(cpu, kv_head, position);
        value.truncate(layer.shape.head_dim_v);
        value
    }

    /// All rows of one head's keys, [`KvCache::key_stride`] elements each.
    pub(crate) fn keys(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        self.layers[layer].keys.head(kv_head)
    }

    /// All rows of one head's values, [`KvCache::value_stride`] elements each.
    pub(crate) fn values(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        self.layers[layer].value_plane().head(kv_head)
    }

    /// Elements from one key to the next.
    pub(crate) fn key_stride(&self, layer: usize) -> usize {
        self.layers[layer].keys.stride()
    }

    /// Elements from one value to the next.
    pub(crate) fn value_stride(&self, layer: usize) -> usize {
        self.layers[layer].value_plane().stride()
    }

    /// Elements of a value, in whole vectors: those behind its end are not wanted, and lie in the
    /// cache.
    pub(crate) fn value_width(&self, layer: usize) -> usize {
        self.layers[layer].shape.head_dim_v.next_multiple_of(LANES)
    }
}

impl KvShape {
    /// Panics unless a run of so many tokens finds rows beside the window that its first one sees.
    pub(crate) fn check_run(&self, tokens: usize) {
        let fits = match self.window {
            Some(window) => (window - 1).saturating_add(tokens) <= self.rows,
            None => false,
        };
        assert!(self.rows >= self.context || fits, "{tokens} tokens at once in {self:?}");
    }
}

/// Bytes of all layers, or `None` when that is no 64-bit number.
fn sum_of_bytes<'a>(mut shapes: impl Iterator<Item = &'a KvShape>, kind: KvType) -> Option<u64> {
    shapes.try_fold(0_u64, |sum, shape| sum.checked_add(shape.bytes(kind)?))
}

impl Layer {
    /// `None` when the system refuses the memory.
    fn new(shape: KvShape, kind: KvType) -> Option<Layer> {
        let KvShape { head_dim_k, head_dim_v, rows, context, window, .. } = shape;
        assert!(!shape.values_in_keys || head_dim_v <= head_dim_k, "{shape:?}: values are longer");
        assert!(window != Some(0), "{shape:?}: a window of 0 sees nothing");
        // Rows that wrap lie in whole chunks, and hold what tokens see.
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
