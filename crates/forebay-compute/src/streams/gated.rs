//! Gated residuals: every element of the streams has a gate of its own.

use super::{StreamShape, load, store};
use crate::cpu::Cpu;
use crate::ops::{row_scale, share, times_logistic};
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Divides every stream of the rows of `x` by its root mean square, multiplies it by its part of `weight`
    /// `[streams, width]`, and writes it to `out`.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn norm_streams(
        &self,
        x: &[f32],
        shape: StreamShape,
        weight: &[f32],
        epsilon: f32,
        out: &mut [f32],
    ) {
        shape.rows_of(x);
        assert_eq!((x.len(), weight.len()), (out.len(), shape.row()), "norm_streams");
        let share = share(x.len(), shape.row());
        self.pool.for_each_chunk_mut(out, share, |_, start, out| {
            let x = &x[start..][..out.len()];
            let weights = weight.chunks_exact(shape.width).cycle();
            let streams = out.chunks_exact_mut(shape.width).zip(x.chunks_exact(shape.width));
            for ((out, x), weight) in streams.zip(weights) {
                let scale = row_scale(self, x, epsilon);
                for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                    *out = x * scale * w;
                }
            }
        });
    }

    /// Computes `silu(x / streams)` element by element.
    pub fn activate_stream_gates(&self, x: &mut [f32], streams: usize) {
        let share = share(x.len(), LANES);
        let factor = 1.0 / streams as f32;
        self.pool.for_each_chunk_mut(x, share, |_, _, x| dispatch(self, Activate { x, factor }));
    }

    /// Writes the mean over the streams of every row of `x`, each element times the logistic function of its gate, to `out`
    /// `[rows, width]`. `gates` has the shape of `x`.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn collapse_gated_streams(
        &self,
        x: &[f32],
        shape: StreamShape,
        gates: &[f32],
        out: &mut [f32],
    ) {
        let rows = shape.rows_of(x);
        assert_eq!((x.len(), out.len()), (gates.len(), rows * shape.width), "{shape:?}");
        let share = share(x.len(), shape.row()) / shape.count;
        self.pool.for_each_chunk_mut(out, share.max(shape.width), |_, start, out| {
            for (row, out) in out.chunks_exact_mut(shape.width).enumerate() {
                let first = (start / shape.width + row) * shape.row();
                let (x, gates) = (&x[first..][..shape.row()], &gates[first..][..shape.row()]);
                dispatch(self, Collapse { x, gates, out });
            }
        });
    }
}

struct Activate<'a> {
    x: &'a mut [f32],
    factor: f32,
}

impl Kernel for Activate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let factor = simd.splat(self.factor);
        let of = |x: S::V| {
            let x = simd.mul(x, factor);
            times_logistic(simd, x, x)
        };
        for at in (0..self.x.len()).step_by(LANES) {
            store(simd, of(load(simd, self.x, at)), self.x, at);
        }
    }
}

struct Collapse<'a> {
    x: &'a [f32],
    gates: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Collapse<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.out.len();
        let factor = simd.splat(width as f32 / self.x.len() as f32);
        for at in (0..width).step_by(LANES) {
            let mut sum = simd.splat(0.0);
            for (x, gates) in self.x.chunks_exact(width).zip(self.gates.chunks_exact(width)) {
                let (x, gates) = (load(simd, x, at), load(simd, gates, at));
                sum = simd.add(sum, times_logistic(simd, x, gates));
            }
            store(simd, simd.mul(sum, factor), self.out, at);
        }
    }
}
