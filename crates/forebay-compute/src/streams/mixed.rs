//! Sums of streams with coefficients.

use super::{STREAMS_MAX, StreamShape, load, store};
use crate::cpu::Cpu;
use crate::ops::share;
use crate::simd::{Kernel, LANES, Simd, dispatch};

impl Cpu {
    /// Writes the sum of the streams of every row of `x`, each times a factor, to `out` `[rows, width]`. The factors are the first
    /// ones of every row of `coefficients`.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn collapse_streams(
        &self,
        x: &[f32],
        shape: StreamShape,
        coefficients: &[f32],
        out: &mut [f32],
    ) {
        let rows = shape.rows_of(x);
        assert_eq!(out.len(), rows * shape.width, "collapse_streams: {rows} rows");
        if rows == 0 {
            return;
        }
        let of_row = coefficients.len() / rows;
        assert!(of_row >= shape.count && coefficients.len() == rows * of_row, "collapse_streams");
        let share = share(x.len(), shape.row()) / shape.count;
        self.pool.for_each_chunk_mut(out, share.max(shape.width), |_, start, out| {
            for (row, out) in out.chunks_exact_mut(shape.width).enumerate() {
                let row = start / shape.width + row;
                let x = &x[row * shape.row()..][..shape.row()];
                let factors = &coefficients[row * of_row..][..shape.count];
                dispatch(self, Collapse { x, factors, out });
            }
        });
    }

    /// Adds a block's output to the streams of every row of `x`. Stream `k` becomes the output times a factor, plus the sum over
    /// the streams before, each times an element of column `k` of a matrix. The factors and the matrix are the last ones of every
    /// row of `coefficients` ([`StreamShape::coefficients`]). If there is no matrix, the streams are not mixed: the coefficients are
    /// the factors, or those for the input come before them ([`StreamShape::factors`]).
    ///
    /// # Panics
    /// Panics if the lengths do not fit together.
    pub fn add_to_streams(
        &self,
        x: &mut [f32],
        shape: StreamShape,
        coefficients: &[f32],
        added: &[f32],
    ) {
        let rows = shape.rows_of(x);
        assert_eq!(added.len(), rows * shape.width, "add_to_streams: {rows} rows");
        if rows == 0 {
            return;
        }
        let of_row = coefficients.len() / rows;
        let known = [shape.count, shape.factors(), shape.coefficients()].contains(&of_row);
        assert!(known && coefficients.len() == rows * of_row, "add_to_streams: {rows} rows");
        let is_mixed = of_row == shape.coefficients();
        let share = share(x.len(), shape.row());
        self.pool.for_each_chunk_mut(x, share, |_, start, x| {
            for (row, x) in x.chunks_exact_mut(shape.row()).enumerate() {
                let row = start / shape.row() + row;
                let added = &added[row * shape.width..][..shape.width];
                let own = &coefficients[row * of_row..][..of_row];
                match is_mixed {
                    false => {
                        let factors = &own[of_row - shape.count..];
                        dispatch(self, Inject { x, factors, added });
                    }
                    true => {
                        let (factors, matrix) = own[shape.count..].split_at(shape.count);
                        dispatch(self, Mix { x, factors, matrix, added });
                    }
                }
            }
        });
    }
}

/// The sum of streams `x` `[streams, width]`, each times its factor, to `out` `[width]`.
pub(super) struct Collapse<'a> {
    pub(super) x: &'a [f32],
    pub(super) factors: &'a [f32],
    pub(super) out: &'a mut [f32],
}

impl Kernel for Collapse<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.out.len();
        for at in (0..width).step_by(LANES) {
            let mut sum = simd.splat(0.0);
            for (x, factor) in self.x.chunks_exact(width).zip(self.factors) {
                sum = simd.mul_add(load(simd, x, at), simd.splat(*factor), sum);
            }
            store(simd, sum, self.out, at);
        }
    }
}

struct Inject<'a> {
    x: &'a mut [f32],
    factors: &'a [f32],
    added: &'a [f32],
}

impl Kernel for Inject<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let width = self.added.len();
        for (x, factor) in self.x.chunks_exact_mut(width).zip(self.factors) {
            let factor = simd.splat(*factor);
            for at in (0..width).step_by(LANES) {
                let sum = simd.mul_add(load(simd, self.added, at), factor, load(simd, x, at));
                store(simd, sum, x, at);
            }
        }
    }
}

struct Mix<'a> {
    x: &'a mut [f32],
    factors: &'a [f32],
    matrix: &'a [f32],
    added: &'a [f32],
}

impl Kernel for Mix<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (width, streams) = (self.added.len(), self.factors.len());
        for at in (0..width).step_by(LANES) {
            let added = load(simd, self.added, at);
            let mut before = [added; STREAMS_MAX];
            for (before, x) in before.iter_mut().zip(self.x.chunks_exact(width)) {
                *before = load(simd, x, at);
            }
            for (after, x) in self.x.chunks_exact_mut(width).enumerate() {
                let mut sum = simd.mul(added, simd.splat(self.factors[after]));
                for (from, before) in before[..streams].iter().enumerate() {
                    let factor = simd.splat(self.matrix[from * streams + after]);
                    sum = simd.mul_add(*before, factor, sum);
                }
                store(simd, sum, x, at);
            }
        }
    }
}
