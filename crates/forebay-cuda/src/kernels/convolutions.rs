//! Short convolutions over the tokens of a sequence that are added to their inputs.

use super::delta::{DeltaRuns, DeltaStates};
use super::elementwise::THREADS;
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// A convolution of every channel by itself, over the rows of a pass. `forebay_compute::ShortConvolution` is the same on the CPU.
#[derive(Clone, Copy)]
pub struct RowConvolution {
    /// Rows `[rows, channels]`.
    pub x: DevicePtr<f32>,
    /// Memory for a copy of the rows.
    pub inputs: DevicePtr<f32>,
    /// Weights `[taps, channels]`. Those of the token itself come last.
    pub weights: DevicePtr<f32>,
    pub channels: usize,
    pub taps: usize,
    /// States of `state_floats` floats each, of which this convolution has `(taps - 1) * channels` from `first_float` on.
    pub states: DeltaStates,
    pub state_floats: usize,
    pub first_float: usize,
}

impl Gpu {
    /// Adds to every row the convolution of the rows of its sequence up to it. Reads and writes the states of the runs. A state that is
    /// written must not be read in the same call.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if the states have no room for the inputs.
    pub fn add_convolution(&self, of: &RowConvolution, runs: &DeltaRuns) -> Result<(), CudaError> {
        let (rows, channels) = (runs.rows, of.channels);
        let kept = (of.taps - 1) * channels;
        assert!(of.first_float + kept <= of.state_floats, "states of a convolution");
        self.copy(of.x.cast(), of.inputs.cast(), 4 * rows * channels)?;
        let grid = (channels.div_ceil(THREADS) as u32, rows as u32, 1);
        let kernel = self.kernel("convolutions", "add_convolution")?;
        Launch::new(kernel, grid, (THREADS as u32, 1, 1))
            .ptr(of.x, rows * channels)
            .ptr(of.inputs, rows * channels)
            .ptr(of.weights, of.taps * channels)
            .int(channels)
            .int(of.taps)
            .ptr(runs.words, runs.count * DeltaRuns::WORDS)
            .int(runs.count)
            .int(runs.first_row)
            .ptr(
                of.states.floats.offset(of.first_float),
                of.states.count * of.state_floats - of.first_float,
            )
            .u64(of.state_floats as u64)
            .run(self)
    }
}
