//! Selection of the largest logit, or the few largest, for the sampler.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of candidates that one block reads; the same as in the kernel.
const SLICE: usize = 2048;
const THREADS: u32 = 512;
/// Largest `k` of a selection.
pub const TOP_K_MAX: usize = 256;

/// A selection of the `k` largest of each row of `[rows, vocabulary]`, with `k` from 1 to 256.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    pub rows: usize,
    pub vocabulary: usize,
    pub k: usize,
}

impl TopK {
    /// Returns the number of words of scratch memory.
    pub fn scratch_words(&self) -> usize {
        let first = self.kept(self.vocabulary);
        first + self.kept(first / self.rows.max(1))
    }

    /// Returns the number of candidates that a pass over rows of `count` leaves, for all rows together.
    fn kept(&self, count: usize) -> usize {
        self.rows * count.div_ceil(SLICE) * self.k
    }

    fn check(&self) {
        assert!((1..=TOP_K_MAX).contains(&self.k), "the {} largest", self.k);
        assert!(self.vocabulary > 0 && self.rows < 65_536, "{self:?}");
    }
}

impl Gpu {
    /// Writes the `k` largest logits of each row and their ids, both `[rows, k]`, largest first. Of equal logits, the
    /// one with the lower id comes first. NaN is not a candidate; a row with fewer candidates is filled up with id
    /// `u32::MAX` and NaN. `scratch` has [`TopK::scratch_words`] words.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if `k` is 0 or above 256.
    pub fn top_k(
        &self,
        what: &TopK,
        logits: DevicePtr<f32>,
        scratch: DevicePtr<u64>,
        ids: DevicePtr<u32>,
        values: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        what.check();
        scratch.check(what.scratch_words());
        let kernel = self.kernel("top_k", if what.k == 1 { "argmax" } else { "top_k" })?;
        self.passes(what, logits, scratch, |grid, logits, before, after, count| {
            let launch = Launch::new(kernel, grid, (THREADS, 1, 1))
                .optional(logits, what.rows * count)
                .optional(before, what.rows * count)
                .ptr(after, what.kept(count))
                .ptr(ids, what.rows * what.k)
                .ptr(values, what.rows * what.k)
                .int(count);
            // The kernel for the largest alone does not sort and has no argument `k`.
            let launch = if what.k == 1 { launch } else { launch.int(what.k) };
            launch.run(self)
        })
    }

    /// Calls `pass` until one slice was left. Its arguments are the grid, the logits (first pass only), the candidates
    /// of the previous pass, the buffer for the new candidates, and the number of inputs in a row.
    fn passes(
        &self,
        what: &TopK,
        logits: DevicePtr<f32>,
        scratch: DevicePtr<u64>,
        pass: impl Fn(
            (u32, u32, u32),
            DevicePtr<f32>,
            DevicePtr<u64>,
            DevicePtr<u64>,
            usize,
        ) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let (mut logits, mut count) = (logits, what.vocabulary);
        let mut before = DevicePtr::null();
        let (mut after, mut other) = (scratch, scratch.offset(what.kept(count)));
        loop {
            let slices = count.div_ceil(SLICE);
            pass((slices as u32, what.rows as u32, 1), logits, before, after, count)?;
            if slices == 1 {
                return Ok(());
            }
            logits = DevicePtr::null();
            count = slices * what.k;
            before = after;
            std::mem::swap(&mut after, &mut other);
        }
    }
}
