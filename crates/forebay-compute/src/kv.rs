//! The key/value cache of one sequence.

use half::f16;

use crate::buffer::{Buffer, Plain};
use crate::cpu::Cpu;
use crate::error::ComputeError;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// What one element of the cache is stored as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvType {
    F16,
    F32,
}

impl KvType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F16 => size_of::<f16>(),
            KvType::F32 => size_of::<f32>(),
        }
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
}

impl KvShape {
    /// Bytes that a layer of this shape reserves, or `None` when that is no 64-bit number. Rows
    /// are padded to eight elements.
    pub fn bytes(&self, kind: KvType) -> Option<u64> {
        let values = if self.values_in_keys { 0 } else { padded(self.head_dim_v)? };
        let row = padded(self.head_dim_k)?.checked_add(values)?;
        [self.kv_heads, self.context, kind.bytes()]
            .into_iter()
            .try_fold(row as u64, |bytes, factor| bytes.checked_mul(factor as u64))
    }
}

/// Rows are padded with zeroes to whole vectors, so that no kernel needs a tail.
fn padded(dim: usize) -> Option<usize> {
    dim.checked_next_multiple_of(LANES)
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
    /// Positions written.
    len: usize,
}

/// `[kv_heads, context, stride]`.
struct Plane {
    rows: Rows,
    /// Elements of a row that hold data.
    dim: usize,
    /// Elements from one row to the next.
    stride: usize,
}

enum Rows {
    F16(Buffer<u16>),
    F32(Buffer<f32>),
}

/// The rows of one head, in the cache's element type.
#[derive(Clone, Copy)]
pub(crate) enum HeadRows<'a> {
    F16(&'a [u16]),
    F32(&'a [f32]),
}

impl KvCache {
    /// Reserves a cache with a layer for each of `shapes`.
    ///
    /// # Errors
    /// [`ComputeError::CacheTooLarge`] when the system refuses the memory.
    ///
    /// # Panics
    /// When values that lie in their keys are longer than these.
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

    /// Forgets every position from `len` on.
    pub fn truncate(&mut self, len: usize) {
        for layer in &mut self.layers {
            layer.len = layer.len.min(len);
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
    /// When there is no such layer, `k` and `v` are not those shapes, or the run would leave a
    /// gap behind the positions that the layer holds.
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
        layer.keys.write(cpu, kv_heads, context, position, k);
        if let Some(values) = &mut layer.values {
            values.write(cpu, kv_heads, context, position, v);
        }
        layer.len = end;
        Ok(())
    }

    /// Positions `0..context` of one head's keys, rows of [`KvCache::key_stride`] elements.
    pub(crate) fn keys(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        let layer = &self.layers[layer];
        layer.keys.head(kv_head, layer.shape.context)
    }

    /// Positions `0..context` of one head's values, rows of [`KvCache::value_stride`] elements.
    pub(crate) fn values(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        let layer = &self.layers[layer];
        layer.values.as_ref().unwrap_or(&layer.keys).head(kv_head, layer.shape.context)
    }

    /// Elements from one key to the next.
    pub(crate) fn key_stride(&self, layer: usize) -> usize {
        self.layers[layer].keys.stride
    }

    /// Elements from one value to the next.
    pub(crate) fn value_stride(&self, layer: usize) -> usize {
        let layer = &self.layers[layer];
        layer.values.as_ref().unwrap_or(&layer.keys).stride
    }

    /// Elements of a value, in whole vectors: those behind its end are not wanted, and lie in the
    /// cache.
    pub(crate) fn value_width(&self, layer: usize) -> usize {
        self.layers[layer].shape.head_dim_v.next_multiple_of(LANES)
    }
}

/// Bytes of all layers, or `None` when that is no 64-bit number.
fn sum_of_bytes<'a>(mut shapes: impl Iterator<Item = &'a KvShape>, kind: KvType) -> Option<u64> {
    shapes.try_fold(0_u64, |sum, shape| sum.checked_add(shape.bytes(kind)?))
}

impl Layer {
    /// `None` when the system refuses the memory.
    fn new(shape: KvShape, kind: KvType) -> Option<Layer> {
        let KvShape { head_dim_k, head_dim_v, .. } = shape;
        assert!(!shape.values_in_keys || head_dim_v <= head_dim_k, "{shape:?}: values are longer");
        let plane = |dim: usize| {
            let stride = padded(dim)?;
            let len = shape.kv_heads.checked_mul(shape.context)?.checked_mul(stride)?;
            let rows = match kind {
                KvType::F16 => Rows::F16(Buffer::zeroed(len)?),
                KvType::F32 => Rows::F32(Buffer::zeroed(len)?),
            };
            Some(Plane { rows, dim, stride })
        };
        let values = if shape.values_in_keys { None } else { Some(plane(head_dim_v)?) };
        Some(Layer { shape, keys: plane(head_dim_k)?, values, len: 0 })
    }
}

impl Plane {
    fn head(&self, head: usize, context: usize) -> HeadRows<'_> {
        let len = context * self.stride;
        match &self.rows {
            Rows::F16(rows) => HeadRows::F16(&rows.as_slice()[head * len..][..len]),
            Rows::F32(rows) => HeadRows::F32(&rows.as_slice()[head * len..][..len]),
        }
    }

    /// Writes `x` `[tokens, heads, dim]` at `position`.
    fn write(&mut self, cpu: &Cpu, heads: usize, context: usize, position: usize, x: &[f32]) {
        if x.is_empty() {
            return;
        }
        for (at, row) in x.chunks_exact(self.dim).enumerate() {
            let (token, head) = (at / heads, at % heads);
            let first = (head * context + position + token) * self.stride;
            match &mut self.rows {
                Rows::F32(rows) => {
                    rows.as_mut_slice()[first..][..self.dim].copy_from_slice(row);
                }
                Rows::F16(rows) => {
                    let out = &mut rows.as_mut_slice()[first..][..self.stride];
                    dispatch(cpu, Narrow { row, out });
                }
            }
        }
    }
}

/// Rounds a row to half precision, padding included.
struct Narrow<'a> {
    row: &'a [f32],
    out: &'a mut [u16],
}

impl Kernel for Narrow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (row, rest) = self.row.as_chunks::<LANES>();
        let out = self.out.as_chunks_mut::<LANES>().0;
        for (x, out) in row.iter().zip(&mut *out) {
            simd.store_f16(simd.load(x), out);
        }
        if !rest.is_empty() {
            let mut last = [0.0; LANES];
            last[..rest.len()].copy_from_slice(rest);
            simd.store_f16(simd.load(&last), &mut out[row.len()]);
        }
    }
}

/// An element type of the cache, as kernels read it.
pub(crate) trait Element: Plain {
    /// Eight elements, widened.
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[f32; LANES]) -> S::V {
        simd.load(from)
    }
}

impl Element for u16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[u16; LANES]) -> S::V {
        simd.load_f16(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cpus, random};

    const SHAPE: KvShape =
        KvShape { kv_heads: 3, head_dim_k: 20, head_dim_v: 8, values_in_keys: false, context: 10 };

    #[test]
    fn rows_land_by_head_and_position_rounded_to_the_kind() {
        for cpu in cpus() {
            for kind in [KvType::F16, KvType::F32] {
                let mut cache = KvCache::new(&[SHAPE; 2], kind).unwrap();
                assert_eq!(cache.bytes(), (2 * 3 * 10 * (24 + 8) * kind.bytes()) as u64);
                let (k, v) = (random(1, 4 * 3 * 20), random(2, 4 * 3 * 8));
                cache.append(&cpu, 1, 0, &k[..60], &v[..24]).unwrap();
                cache.append(&cpu, 1, 1, &k[60..], &v[24..]).unwrap();
                assert_eq!((cache.len(), cache.layer_len(1)), (0, 4));
                for (token, head) in (0..4).flat_map(|t| (0..3).map(move |h| (t, h))) {
                    let k = &k[(token * 3 + head) * 20..][..20];
                    match cache.keys(1, head) {
                        HeadRows::F32(rows) => {
                            assert_eq!(rows[token * 24..][..20], *k);
                            assert_eq!(rows[token * 24 + 20..][..4], [0.0; 4]);
                        }
                        HeadRows::F16(rows) => {
                            let bits = |x: &f32| f16::from_f32(*x).to_bits();
                            let expected: Vec<u16> = k.iter().map(bits).collect();
                            assert_eq!(rows[token * 24..][..20], expected);
                            assert_eq!(rows[token * 24 + 20..][..4], [0; 4]);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn values_that_lie_in_their_keys_take_no_memory() {
        for cpu in cpus() {
            let shape = KvShape { kv_heads: 1, values_in_keys: true, ..SHAPE };
            let mut cache = KvCache::new(&[shape, SHAPE], KvType::F32).unwrap();
            assert_eq!(cache.bytes(), (4 * 10 * (24 + 3 * (24 + 8))) as u64);
            let k = random(1, 4 * 20);
            cache.append(&cpu, 0, 0, &k, &[]).unwrap();
            assert_eq!((cache.value_stride(0), cache.value_width(0)), (24, 8));
            let HeadRows::F32(values) = cache.values(0, 0) else { panic!("stored as f32") };
            for (row, k) in values.chunks(24).zip(k.chunks(20)) {
                assert_eq!(row[..8], k[..8]);
            }
        }
    }

    #[test]
    fn the_context_is_a_hard_end_and_truncation_moves_back() {
        let cpu = &cpus()[0];
        let mut cache = KvCache::new(&[SHAPE; 2], KvType::F16).unwrap();
        let (k, v) = (random(1, 10 * 60), random(2, 10 * 24));
        for layer in 0..2 {
            cache.append(cpu, layer, 0, &k, &v).unwrap();
        }
        let full = cache.append(cpu, 0, 10, &k[..60], &v[..24]);
        assert_eq!(full, Err(ComputeError::ContextFull { first: 10, end: 11, context: 10 }));
        assert_eq!(cache.len(), 10);
        cache.truncate(4);
        assert_eq!(cache.len(), 4);
        cache.append(cpu, 0, 4, &k[..60], &v[..24]).unwrap();
        assert_eq!((cache.layer_len(0), cache.len()), (5, 4));
    }

    #[test]
    fn absurd_shapes_are_errors() {
        for shape in [
            KvShape { context: usize::MAX, ..SHAPE },
            KvShape { head_dim_k: usize::MAX, ..SHAPE },
            KvShape { kv_heads: 1 << 30, context: 1 << 30, ..SHAPE },
        ] {
            assert!(KvCache::new(&[SHAPE, shape], KvType::F32).is_err(), "{shape:?}");
        }
    }
}
