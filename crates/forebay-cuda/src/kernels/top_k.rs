//! Selection of the largest logit, or the few largest, for the sampler.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of candidates that one block reads; the same as in the kernel.
const SLICE: usize = 2048;
const THREADS: u32 = 512;
const THREADS_OF_CHANGES: u32 = 128;
/// Largest `k` of a selection.
pub const TOP_K_MAX: usize = 256;

/// A selection of the `k` largest of each row of `[rows, vocabulary]`, with `k` from 1 to 256.
#[derive(Clone, Copy, Debug)]
pub struct TopK {
    pub rows: usize,
    pub vocabulary: usize,
    pub k: usize,
}

/// Buffers of a selection.
#[derive(Clone, Copy)]
pub struct TopKBuffers {
    /// `[rows, vocabulary]`
    pub logits: DevicePtr<f32>,
    /// [`TopK::scratch_words`] words.
    pub scratch: DevicePtr<u64>,
    /// `[rows, k]`
    pub ids: DevicePtr<u32>,
    /// `[rows, k]`
    pub values: DevicePtr<f32>,
}

/// How the logits of every row of a selection are changed and which of them may be selected.
#[derive(Clone, Copy)]
pub struct Selections {
    /// Four words for every row ([`Selections::row`]), then the masks and changes to which these point.
    pub words: DevicePtr<u32>,
    /// Number of words.
    pub count: usize,
    /// `[rows]`: for rows with a divisor, the sum of `exp((logit - largest) / divisor)` over all tokens that may be
    /// selected. Other rows are not written.
    pub totals: DevicePtr<f32>,
    /// True if a row has a divisor. Otherwise `totals` may be left unwritten.
    pub has_totals: bool,
    /// True if a row has changes.
    pub has_changes: bool,
}

impl Selections {
    /// Returns the words of a row. `mask` is the index of the first word of its mask, of `vocabulary / 32` words, rounded
    /// up; 0 if every token may be selected. `changes` is the index of the first of its `change_count` changes, of four words
    /// each: an id, a divisor of positive logits and factor of others, what is subtracted, what is added. `divisor` is that of
    /// the total, and 0 if no total is wanted.
    pub fn row(mask: usize, changes: usize, change_count: usize, divisor: f32) -> [u32; 4] {
        [mask as u32, changes as u32, change_count as u32, divisor.to_bits()]
    }
}

impl TopK {
    /// Returns the number of words of scratch memory.
    pub fn scratch_words(&self) -> usize {
        let first = self.kept(self.vocabulary);
        first + self.kept(first / self.rows.max(1)) + self.parts()
    }

    /// Returns the number of slices of all rows of logits.
    fn parts(&self) -> usize {
        self.rows * self.vocabulary.div_ceil(SLICE)
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
    /// `u32::MAX` and NaN. Selections change the logits in place before.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if `k` is 0 or above 256.
    pub fn top_k(
        &self,
        what: &TopK,
        buffers: &TopKBuffers,
        selections: Option<&Selections>,
    ) -> Result<(), CudaError> {
        what.check();
        let TopKBuffers { logits, scratch, ids, values } = *buffers;
        scratch.check(what.scratch_words());
        if let Some(selections) = selections.filter(|selections| selections.has_changes) {
            self.change_logits(what, logits, selections)?;
        }
        let is_argmax = what.k == 1 && selections.is_none_or(|selections| !selections.has_totals);
        let kernel = self.kernel("top_k", if is_argmax { "argmax" } else { "top_k" })?;
        let parts = scratch.offset(what.scratch_words() - what.parts());
        self.passes(what, logits, scratch, |grid, logits, before, after, count| {
            let launch = Launch::new(kernel, grid, (THREADS, 1, 1))
                .optional(logits, what.rows * count)
                .optional(before, what.rows * count)
                .ptr(after, what.kept(count))
                .ptr(ids, what.rows * what.k)
                .ptr(values, what.rows * what.k);
            let launch = match selections {
                Some(selections) => launch.ptr(selections.words, selections.count),
                None => launch.null(),
            };
            // The kernel for the largest alone does not sort and has no total and no argument `k`.
            if is_argmax {
                return launch.int(count).run(self);
            }
            let launch = launch.ptr(parts, what.parts());
            let launch = match selections {
                Some(selections) => launch.ptr(selections.totals, what.rows),
                None => launch.null(),
            };
            launch.int(count).int(what.k).int(what.vocabulary.div_ceil(SLICE)).run(self)
        })
    }

    fn change_logits(
        &self,
        what: &TopK,
        logits: DevicePtr<f32>,
        selections: &Selections,
    ) -> Result<(), CudaError> {
        let kernel = self.kernel("top_k", "change_logits")?;
        Launch::new(kernel, (what.rows as u32, 1, 1), (THREADS_OF_CHANGES, 1, 1))
            .ptr(logits, what.rows * what.vocabulary)
            .ptr(selections.words, selections.count)
            .int(what.vocabulary)
            .run(self)
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
