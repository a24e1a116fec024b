//! A bank of earlier states of the residual stream (Kimi K3): blocks read a mixture of the state and of those in the bank.
//!
//! The first stream of a row is the state, and the others are the bank.

use super::mixed::Collapse;
use super::{STREAMS_MAX, StreamShape, load};
use crate::cpu::Cpu;
use crate::ops::{row_scale, share};
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Writes a mixture of the first `seen` streams of every row of `x` to `out` `[rows, width]`. The weights are the softmax of
    /// the products of `scores` `[width]` with the streams, each stream divided by its root mean square.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together, or if no stream or more than there are would be seen.
    pub fn mix_bank(
        &self,
        x: &[f32],
        shape: StreamShape,
        seen: usize,
        (scores, epsilon): (&[f32], f32),
        out: &mut [f32],
    ) {
        let rows = shape.rows_of(x);
        assert_eq!((out.len(), scores.len()), (rows * shape.width, shape.width), "mix_bank");
        assert!((1..=shape.count).contains(&seen), "mix_bank: {seen} of {shape:?}");
        let share = share(x.len(), shape.row()) / shape.count;
        self.pool.for_each_chunk_mut(out, share.max(shape.width), |_, start, out| {
            for (row, out) in out.chunks_exact_mut(shape.width).enumerate() {
                let first = (start / shape.width + row) * shape.row();
                let x = &x[first..][..seen * shape.width];
                let mut weights = [0.0; STREAMS_MAX];
                for (weight, x) in weights.iter_mut().zip(x.chunks_exact(shape.width)) {
                    *weight = dispatch(self, Dot { x, y: scores }) * row_scale(self, x, epsilon);
                }
                let weights = &mut weights[..seen];
                softmax(weights);
                dispatch(self, Collapse { x, factors: weights, out });
            }
        });
    }

    /// Adds a block's output to the first stream of every row of `x`. If a `place` is given, the first stream moves to the stream of
    /// this number, and the output replaces it.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together, or if the place is no other stream.
    pub fn add_to_bank(
        &self,
        x: &mut [f32],
        shape: StreamShape,
        place: Option<usize>,
        added: &[f32],
    ) {
        let (rows, width) = (shape.rows_of(x), shape.width);
        assert_eq!(added.len(), rows * width, "add_to_bank: {rows} rows");
        let fits = place.is_none_or(|place| (1..shape.count).contains(&place));
        assert!(fits, "add_to_bank: {place:?} of {shape:?}");
        let share = share(x.len(), shape.row());
        self.pool.for_each_chunk_mut(x, share, |_, start, x| {
            for (row, x) in x.chunks_exact_mut(shape.row()).enumerate() {
                let added = &added[(start / shape.row() + row) * width..][..width];
                match place {
                    None => x[..width].iter_mut().zip(added).for_each(|(x, added)| *x += added),
                    Some(place) => {
                        x.copy_within(..width, place * width);
                        x[..width].copy_from_slice(added);
                    }
                }
            }
        });
    }
}

/// Replaces scores by weights that sum to 1.
fn softmax(scores: &mut [f32]) {
    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    scores.iter_mut().for_each(|score| *score = (*score - largest).exp());
    let sum: f32 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
}

struct Dot<'a> {
    x: &'a [f32],
    y: &'a [f32],
}

impl Kernel for Dot<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        let mut sum = simd.splat(0.0);
        for at in (0..self.x.len()).step_by(LANES) {
            sum = simd.mul_add(load(simd, self.x, at), load(simd, self.y, at), sum);
        }
        simd.sum(sum)
    }
}
