//! Residual streams beside each other, which blocks read and write with weights that depend on the streams themselves.
//!
//! A row of the residual stream is `[streams, width]`. Three rules are known. Manifold-constrained hyper-connections (Xie et al.
//! 2026, "mHC") mix the streams with a matrix whose rows and columns sum to 1; independent ones (Hy4) have no matrix. Gated
//! residuals (Qwen4) read every element with a gate of its own, and leave the streams as they are. A bank (Kimi K3) keeps
//! earlier states of one stream. Alternating updates (Gemma 3n) compute one stream, and predict and correct the others.

mod bank;
mod coefficients;
mod gated;
mod mixed;
mod predicted;
#[cfg(test)]
mod tests;

use crate::cpu::Cpu;
use crate::simd::{LANES, Simd};

pub use predicted::StreamPrediction;

/// Most streams of a row.
pub const STREAMS_MAX: usize = 16;

/// Shape of a row of residual streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamShape {
    pub count: usize,
    /// Number of elements of each stream.
    pub width: usize,
}

impl StreamShape {
    /// Returns the number of elements of a row.
    pub fn row(&self) -> usize {
        self.count * self.width
    }

    /// Returns the number of coefficients of a row that a block reads, writes and mixes: a factor of each stream for the input of
    /// the block, a factor of each stream for the output, and a matrix `[streams before, streams after]`.
    pub fn coefficients(&self) -> usize {
        self.count * (2 + self.count)
    }

    /// Returns the number of coefficients of a row whose streams are not mixed: a factor of each for the input of the block and one
    /// for the output.
    pub fn factors(&self) -> usize {
        2 * self.count
    }

    /// Returns the rows of `x`.
    fn rows_of(&self, x: &[f32]) -> usize {
        assert!((1..=STREAMS_MAX).contains(&self.count) && self.width > 0, "{self:?}");
        assert!(x.len().is_multiple_of(self.row()), "streams: no whole rows");
        x.len() / self.row()
    }
}

impl Cpu {
    /// Copies the first stream of every row of `x` to the other streams.
    ///
    /// # Panics
    /// Panics if `x` is no whole number of rows.
    pub fn spread_streams(&self, x: &mut [f32], shape: StreamShape) {
        shape.rows_of(x);
        for row in x.chunks_exact_mut(shape.row()) {
            for stream in 1..shape.count {
                row.copy_within(..shape.width, stream * shape.width);
            }
        }
    }
}

/// Returns up to [`LANES`] elements from `at` on. Missing ones are 0.
#[inline(always)]
fn load<S: Simd>(simd: S, from: &[f32], at: usize) -> S::V {
    match from[at..].first_chunk() {
        Some(chunk) => simd.load(chunk),
        None => {
            let mut last = [0.0; LANES];
            last[..from.len() - at].copy_from_slice(&from[at..]);
            simd.load(&last)
        }
    }
}

/// Writes as many lanes as there are elements from `at` on.
#[inline(always)]
fn store<S: Simd>(simd: S, v: S::V, to: &mut [f32], at: usize) {
    match to[at..].first_chunk_mut() {
        Some(chunk) => simd.store(v, chunk),
        None => {
            let mut last = [0.0; LANES];
            simd.store(v, &mut last);
            let rest = &mut to[at..];
            rest.copy_from_slice(&last[..rest.len()]);
        }
    }
}
