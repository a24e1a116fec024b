//! Biases, soft caps, the sum of the experts' outputs, a look for values that are not finite, and some words from the host.

use std::ops::Range;

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu, HostWords};

pub(super) const THREADS: usize = 256;
/// Blocks that a grid's second dimension may have.
pub(super) const GRID_Y_MAX: usize = 65_535;

/// Where kernels report rows with values that are not finite: the smallest `first_tag + row` stays there.
#[derive(Clone, Copy)]
pub struct FiniteFlag {
    /// One word, `u32::MAX` while all is well.
    pub flag: DevicePtr<u32>,
    /// Below 2^31, and so that no tag reaches it.
    pub first_tag: usize,
}

impl FiniteFlag {
    pub(crate) fn none() -> FiniteFlag {
        FiniteFlag { flag: DevicePtr::null(), first_tag: 0 }
    }
}

/// What the experts of every token gave, and how it adds up: the sum over j, in order, of
/// `weights[t, j] * (parts[row_of_pair[t, j]] + bias[ids[t, j]])`, and then `shared[t]`.
#[derive(Clone, Copy)]
pub struct ExpertOutputs {
    /// Outputs `[pairs, width]` in the order computed.
    pub parts: DevicePtr<f32>,
    /// `[tokens, k]`
    pub weights: DevicePtr<f32>,
    /// Which row of `parts` is whose `[tokens, k]`.
    pub row_of_pair: DevicePtr<u32>,
    /// The experts' biases `[experts, width]`; null: they have none.
    pub bias: DevicePtr<f32>,
    /// Chosen experts `[tokens, k]`; only looked at where there are biases.
    pub ids: DevicePtr<u32>,
    /// Outputs of a shared expert `[tokens, width]`; null: there is none.
    pub shared: DevicePtr<f32>,
    pub width: usize,
    pub k: usize,
}

impl ExpertOutputs {
    pub(super) fn none(width: usize) -> ExpertOutputs {
        let (none, none_of) = (DevicePtr::null(), DevicePtr::null());
        ExpertOutputs {
            parts: none,
            weights: none,
            row_of_pair: none_of,
            bias: none,
            ids: none_of,
            shared: none,
            width,
            k: 0,
        }
    }
}

/// Blocks for `count` threads.
pub(super) fn blocks(count: usize) -> u32 {
    u32::try_from(count.div_ceil(THREADS)).expect("a grid fits 32 bits")
}

impl Gpu {
    /// `x [rows, width] += bias [width]`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small.
    pub fn add_bias_rows(
        &self,
        x: DevicePtr<f32>,
        bias: DevicePtr<f32>,
        rows: usize,
        width: usize,
    ) -> Result<(), CudaError> {
        let grid = (blocks(width), rows.min(GRID_Y_MAX) as u32, 1);
        Launch::new(self.kernel("elementwise", "add_bias_rows")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .ptr(bias, width)
            .int(width)
            .int(rows)
            .run(self)
    }

    /// Copies `words` of pinned memory to the device by a kernel. Unlike [`Gpu::queue_upload`], it does not wait for copies of
    /// other streams: the engine that copies to the device works them off one after the other.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When the range is empty or beyond the end, or `to` is too small.
    pub fn read_words(
        &self,
        from: &HostWords,
        words: Range<usize>,
        to: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        // The last word is asked for, too, so that the whole range is known to be there.
        let (first, count) = (from.device(words.start), words.len());
        let _ = from.device(words.end - 1);
        let grid = (blocks(count), 1, 1);
        Launch::new(self.kernel("elementwise", "copy_words")?, grid, (THREADS as u32, 1, 1))
            .ptr(first, count)
            .ptr(to, count)
            .int(count)
            .run(self)
    }

    /// `x = cap * tanh(x / cap)` for `x [rows, width]`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When `x` is too small.
    pub fn softcap(
        &self,
        x: DevicePtr<f32>,
        rows: usize,
        width: usize,
        cap: f32,
    ) -> Result<(), CudaError> {
        let grid = (blocks(rows * width), 1, 1);
        Launch::new(self.kernel("elementwise", "softcap")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .u64((rows * width) as u64)
            .float(cap)
            .run(self)
    }

    /// Looks for rows of `x [rows, width]` with values that are not finite.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// With more than 65,535 rows, or when a buffer is too small.
    pub fn check_finite(
        &self,
        x: DevicePtr<f32>,
        rows: usize,
        width: usize,
        flag: FiniteFlag,
    ) -> Result<(), CudaError> {
        assert!(rows <= GRID_Y_MAX, "check_finite: {rows} rows");
        // Every thread looks at a few elements, so that a row of logits takes no longer than its way from memory.
        let grid = (blocks(width.div_ceil(8)), rows as u32, 1);
        Launch::new(self.kernel("elementwise", "check_finite")?, grid, (THREADS as u32, 1, 1))
            .ptr(x, rows * width)
            .int(width)
            .ptr(flag.flag, 1)
            .int(flag.first_tag)
            .run(self)
    }
}
