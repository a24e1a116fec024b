//! Kernels of the scores by which rows choose keys.

use forebay_ops::KV_BLOCK;

use super::prompt::{KEY_BLOCK, STRIP, score_block};
use crate::simd::{Kernel, LANES, Simd};

/// Copies the largest products `[pools, strips, STRIP]` of the heads to scores `[heads, share]`.
pub(super) fn take_heads(
    from: &[f32],
    strips: usize,
    share: usize,
    count: usize,
    scores: &mut [f32],
) {
    for (head, scores) in scores.chunks_exact_mut(share).enumerate() {
        let from = from.chunks_exact(strips * STRIP);
        for (score, from) in scores[..count].iter_mut().zip(from) {
            // Adding 0 turns -0 into 0, so both are equal.
            *score = from[head] + 0.0;
        }
    }
}

/// Writes queries as `[strips, stride, STRIP]`. Absent heads and padding are 0.
pub(super) fn transpose(heads: &[f32], dim: usize, stride: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (head, query) in heads.chunks_exact(dim).enumerate() {
        let strip = &mut out[head / STRIP * stride * STRIP..][..stride * STRIP];
        for (x, column) in query.iter().zip(strip.chunks_exact_mut(STRIP)) {
            column[head % STRIP] = *x;
        }
    }
}

/// Scores of a row with the first keys of one block.
pub(super) struct Score<'a> {
    /// `[strips, key stride, STRIP]`
    pub queries: &'a [f32],
    /// `[strips, STRIP]`
    pub weights: &'a [f32],
    /// `[KV_BLOCK, key stride]`
    pub keys: &'a [f32],
    pub scores: &'a mut [f32],
}

impl Kernel for Score<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let stride = self.keys.len() / KV_BLOCK;
        let zero = simd.splat(0.0);
        let blocks = self.keys.chunks_exact(KEY_BLOCK * stride);
        for (keys, scores) in blocks.zip(self.scores.chunks_mut(KEY_BLOCK)) {
            let mut sums = [zero; KEY_BLOCK];
            let strips = self.queries.chunks_exact(stride * STRIP);
            for (queries, weights) in strips.zip(self.weights.as_chunks::<STRIP>().0) {
                let mut dots = [0.0; KEY_BLOCK * STRIP];
                score_block(simd, queries, keys, &mut dots);
                let weights = weights.as_chunks::<LANES>().0;
                for (sum, dots) in sums.iter_mut().zip(dots.as_chunks::<STRIP>().0) {
                    for (weight, dots) in weights.iter().zip(dots.as_chunks::<LANES>().0) {
                        let positive = simd.max(simd.load(dots), zero);
                        *sum = simd.mul_add(simd.load(weight), positive, *sum);
                    }
                }
            }
            for (score, sum) in scores.iter_mut().zip(sums) {
                let sum = simd.sum(sum);
                // Adding 0 turns -0 into 0, so both are equal. NaN comes last.
                *score = if sum.is_nan() { f32::NEG_INFINITY } else { sum + 0.0 };
            }
        }
    }
}

/// Largest products of a row's heads with the keys of one block, pool by pool.
pub(super) struct Largest<'a> {
    /// `[strips, key stride, STRIP]`
    pub queries: &'a [f32],
    /// `[KV_BLOCK, key stride]`
    pub keys: &'a [f32],
    /// Position of the first key, counted from the first pool of `largest`.
    pub at: usize,
    /// Number of positions of a pool.
    pub length: usize,
    /// Largest products so far `[pools, strips, STRIP]`.
    pub largest: &'a mut [f32],
}

impl Kernel for Largest<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let stride = self.keys.len() / KV_BLOCK;
        let strips = self.queries.len() / (stride * STRIP);
        let blocks = self.keys.chunks_exact(KEY_BLOCK * stride);
        for (block, keys) in blocks.enumerate() {
            for (strip, queries) in self.queries.chunks_exact(stride * STRIP).enumerate() {
                let mut dots = [0.0; KEY_BLOCK * STRIP];
                score_block(simd, queries, keys, &mut dots);
                for (key, dots) in dots.as_chunks::<STRIP>().0.iter().enumerate() {
                    let pool = (self.at + block * KEY_BLOCK + key) / self.length;
                    let first = (pool * strips + strip) * STRIP;
                    // The last block may reach beyond the pools of the share.
                    let Some(largest) = self.largest.get_mut(first..first + STRIP) else { return };
                    let pairs = largest.as_chunks_mut::<LANES>().0.iter_mut();
                    for (largest, dots) in pairs.zip(dots.as_chunks::<LANES>().0) {
                        // `max` returns its second argument if either is NaN, so NaN is never the largest.
                        simd.store(simd.max(simd.load(dots), simd.load(largest)), largest);
                    }
                }
            }
        }
    }
}
