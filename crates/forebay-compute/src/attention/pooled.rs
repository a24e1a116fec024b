//! Keys of pools of consecutive positions, made of the keys of these positions.

use std::ops::Range;

use crate::cpu::Cpu;
use crate::kv::KvCache;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// How the keys of a pool's positions become one key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KeyPool<'a> {
    /// Layer of the cache with the keys, which has one key/value head. A row is a key, and then its gates if there are any.
    pub layer: usize,
    /// Number of positions of a pool.
    pub length: usize,
    /// Number of elements of a key.
    pub dim: usize,
    /// Numbers `[length, dim]` that are added to the gates, if keys have gates. An element of the pool's key is then the average
    /// of that element of the keys, weighted by the softmax of the gates over the positions. Without gates it is the mean.
    pub gate_bias: Option<&'a [f32]>,
}

impl Cpu {
    /// Computes the keys `[pools, dim]` of pools, all positions of which are in the cache.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together, or if a table has no entry for a position of the pools.
    pub fn pool_keys(
        &self,
        cache: &KvCache,
        what: &KeyPool<'_>,
        table: &[u32],
        pools: Range<usize>,
        out: &mut [f32],
    ) {
        let KeyPool { layer, length, dim, gate_bias } = *what;
        let parts = 1 + usize::from(gate_bias.is_some());
        assert_eq!(cache.shape(layer).head_dim_k, parts * dim, "pool_keys: {what:?}");
        assert!(dim.is_multiple_of(LANES) && length > 0, "pool_keys: {what:?}");
        assert!(gate_bias.is_none_or(|bias| bias.len() == length * dim), "pool_keys: bias");
        assert_eq!(out.len(), pools.len() * dim, "pool_keys: out is not [pools, dim]");
        let stride = cache.key_stride(layer);
        self.pool.for_each_chunk_mut(out, dim, |worker, at, out| {
            for (index, out) in out.chunks_exact_mut(dim).enumerate() {
                let first = (pools.start + at / dim + index) * length;
                let mut scratch = self.worker_scratch(worker);
                let rows = scratch.floats(length * stride);
                let of = |block| cache.keys(layer, block, 0);
                self.gather_rows(first..first + length, table, [stride; 2], of, rows);
                let Some(bias) = gate_bias else {
                    dispatch(self, Mean { rows, stride, out });
                    continue;
                };
                for (row, bias) in rows.chunks_exact_mut(stride).zip(bias.chunks_exact(dim)) {
                    row[dim..].iter_mut().zip(bias).for_each(|(gate, bias)| *gate += bias);
                }
                dispatch(self, GatedMean { rows, stride, out });
            }
        });
    }
}

/// The mean of rows.
struct Mean<'a> {
    /// `[positions, stride]`, of which the first `out.len()` elements are used.
    rows: &'a [f32],
    stride: usize,
    out: &'a mut [f32],
}

impl Kernel for Mean<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let count = simd.splat((self.rows.len() / self.stride) as f32);
        for (vector, out) in self.out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut sum = simd.splat(0.0);
            for row in self.rows.chunks_exact(self.stride) {
                sum = simd.add(sum, load(simd, row, vector * LANES));
            }
            simd.store(simd.div(sum, count), out);
        }
    }
}

/// A mean of values, weighted for every element by the softmax of the gates over the positions.
pub(super) struct GatedMean<'a> {
    /// `[positions, stride]`: `out.len()` values, then as many gates.
    pub rows: &'a [f32],
    pub stride: usize,
    pub out: &'a mut [f32],
}

impl Kernel for GatedMean<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let dim = self.out.len();
        let rows = || self.rows.chunks_exact(self.stride);
        for (vector, out) in self.out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let first = vector * LANES;
            let mut largest = simd.splat(f32::MIN);
            for row in rows() {
                largest = simd.max(load(simd, row, dim + first), largest);
            }
            let (mut weights, mut sum) = (simd.splat(0.0), simd.splat(0.0));
            for row in rows() {
                let weight = simd.exp(simd.sub(load(simd, row, dim + first), largest));
                weights = simd.add(weights, weight);
                sum = simd.mul_add(weight, load(simd, row, first), sum);
            }
            simd.store(simd.div(sum, weights), out);
        }
    }
}

/// Returns the vector of `row` from element `at` on.
#[inline(always)]
fn load<S: Simd>(simd: S, row: &[f32], at: usize) -> S::V {
    simd.load(row[at..].first_chunk().expect("rows are whole vectors"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{KvLayer, KvShape};
    use crate::testing::{cpus, random};
    use forebay_ops::KvType;

    #[test]
    fn pools_are_means_or_averages_by_gates() {
        const DIM: usize = 24;
        for cpu in cpus() {
            for (gated, length) in [(false, 4), (true, 4), (true, 3), (false, 1)] {
                let width = if gated { 2 * DIM } else { DIM };
                let shape = KvShape {
                    kv_heads: 1,
                    head_dim_k: width,
                    head_dim_v: width,
                    values_in_keys: true,
                };
                let layers = [KvLayer::new(shape, 0)];
                let mut cache = KvCache::new(&layers, &[5], KvType::F32).unwrap();
                let table = [3, 1, 4, 2];
                let rows = random(2, 60 * width);
                cache.write(&cpu, 0, &table, 0, &rows, &[]);
                let bias = random(4, length * DIM);
                let gate_bias = gated.then_some(&bias[..]);
                let what = KeyPool { layer: 0, length, dim: DIM, gate_bias };
                let mut out = vec![0.0; 9 * DIM];
                cpu.pool_keys(&cache, &what, &table, 5..14, &mut out);
                for (at, out) in out.iter().enumerate() {
                    let (pool, element) = (5 + at / DIM, at % DIM);
                    let positions = || pool * length..(pool + 1) * length;
                    let key = |position: usize| f64::from(rows[position * width + element]);
                    let weight = |position: usize| match gated {
                        true => f64::from(
                            rows[position * width + DIM + element]
                                + bias[position % length * DIM + element],
                        )
                        .exp(),
                        false => 1.0,
                    };
                    let sum: f64 = positions().map(|at| weight(at) * key(at)).sum();
                    let exact = sum / positions().map(weight).sum::<f64>();
                    assert!(
                        (exact - f64::from(*out)).abs() < 1e-6,
                        "{gated} {length}: {out} {exact}"
                    );
                }
                // A pool does not depend on those beside it.
                let mut alone = vec![0.0; DIM];
                cpu.pool_keys(&cache, &what, &table, 9..10, &mut alone);
                assert_eq!(alone, out[4 * DIM..5 * DIM]);
            }
        }
    }
}
