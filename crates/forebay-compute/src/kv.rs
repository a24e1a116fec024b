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

/// The dimensions of a [`KvCache`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvShape {
    pub layers: usize,
    pub kv_heads: usize,
    /// Elements of a key.
    pub head_dim_k: usize,
    /// Elements of a value.
    pub head_dim_v: usize,
    /// Positions that fit.
    pub context: usize,
}

impl KvShape {
    /// Bytes that a cache of this shape reserves, or `None` when that is no 64-bit number. Rows
    /// are padded to eight elements.
    pub fn bytes(&self, kind: KvType) -> Option<u64> {
        let row = padded(self.head_dim_k)?.checked_add(padded(self.head_dim_v)?)?;
        [self.kv_heads, self.context, kind.bytes()]
            .into_iter()
            .try_fold((self.layers as u64).checked_mul(row as u64)?, |bytes, factor| {
                bytes.checked_mul(factor as u64)
            })
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
    shape: KvShape,
    kind: KvType,
    layers: Vec<Layer>,
}

struct Layer {
    keys: Plane,
    values: Plane,
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
    /// Reserves a cache for `shape`.
    ///
    /// # Errors
    /// [`ComputeError::CacheTooLarge`] when the system refuses the memory.
    pub fn new(shape: KvShape, kind: KvType) -> Result<KvCache, ComputeError> {
        let bytes = shape.bytes(kind);
        let refused = || ComputeError::CacheTooLarge { bytes };
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(refused());
        }
        let plane = |dim: usize| {
            let stride = padded(dim)?;
            let len = shape.kv_heads.checked_mul(shape.context)?.checked_mul(stride)?;
            let rows = match kind {
                KvType::F16 => Rows::F16(Buffer::zeroed(len)?),
                KvType::F32 => Rows::F32(Buffer::zeroed(len)?),
            };
            Some(Plane { rows, dim, stride })
        };
        let layer = || {
            Some(Layer { keys: plane(shape.head_dim_k)?, values: plane(shape.head_dim_v)?, len: 0 })
        };
        let mut layers = Vec::new();
        layers.try_reserve_exact(shape.layers).map_err(|_| refused())?;
        for _ in 0..shape.layers {
            layers.push(layer().ok_or_else(refused)?);
        }
        Ok(KvCache { shape, kind, layers })
    }

    /// The dimensions that the cache was made for.
    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// What elements are stored as.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        self.shape.bytes(self.kind).unwrap_or(u64::MAX)
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
    /// behind. `k` is `[tokens, kv_heads, head_dim_k]`, `v` `[tokens, kv_heads, head_dim_v]`.
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
        let KvShape { kv_heads, head_dim_k, head_dim_v, context, .. } = self.shape;
        let row = (kv_heads * head_dim_k).max(1);
        let tokens = k.len() / row;
        assert!(k.len() == tokens * kv_heads * head_dim_k, "append: k is no whole token");
        assert!(v.len() == tokens * kv_heads * head_dim_v, "append: v does not fit k");
        let layer = &mut self.layers[layer];
        assert!(position <= layer.len, "append: a gap before position {position}");
        let end = position.saturating_add(tokens);
        if end > context {
            return Err(ComputeError::ContextFull { first: position, end, context });
        }
        layer.keys.write(cpu, kv_heads, context, position, k);
        layer.values.write(cpu, kv_heads, context, position, v);
        layer.len = end;
        Ok(())
    }

    /// Positions `0..context` of one head's keys, rows of [`KvCache::key_stride`] elements.
    pub(crate) fn keys(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        self.layers[layer].keys.head(kv_head, self.shape.context)
    }

    /// Positions `0..context` of one head's values, rows of [`KvCache::value_stride`] elements.
    pub(crate) fn values(&self, layer: usize, kv_head: usize) -> HeadRows<'_> {
        self.layers[layer].values.head(kv_head, self.shape.context)
    }

    pub(crate) fn key_stride(&self) -> usize {
        self.shape.head_dim_k.next_multiple_of(LANES)
    }

    pub(crate) fn value_stride(&self) -> usize {
        self.shape.head_dim_v.next_multiple_of(LANES)
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
        KvShape { layers: 2, kv_heads: 3, head_dim_k: 20, head_dim_v: 8, context: 10 };

    #[test]
    fn rows_land_by_head_and_position_rounded_to_the_kind() {
        for cpu in cpus() {
            for kind in [KvType::F16, KvType::F32] {
                let mut cache = KvCache::new(SHAPE, kind).unwrap();
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
    fn the_context_is_a_hard_end_and_truncation_moves_back() {
        let cpu = &cpus()[0];
        let mut cache = KvCache::new(SHAPE, KvType::F16).unwrap();
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
            KvShape { layers: usize::MAX, context: 0, ..SHAPE },
            KvShape { kv_heads: 1 << 30, context: 1 << 30, ..SHAPE },
        ] {
            assert!(KvCache::new(shape, KvType::F32).is_err(), "{shape:?}");
        }
    }
}
