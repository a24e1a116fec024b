//! Embeddings of n-grams that layers add to the residual streams.

use super::delta::{DeltaRuns, DeltaStates};
use super::elementwise::THREADS;
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Inputs and buffers of a layer that adds embeddings of n-grams to the rows of a pass. `forebay_compute::NGramShape`
/// describes the sizes.
#[derive(Clone, Copy)]
pub struct NGramRows {
    pub streams: usize,
    pub hidden: usize,
    pub taps: usize,
    pub gap: usize,
    /// Residual streams `[rows, streams, hidden]`.
    pub x: DevicePtr<f32>,
    /// Keys `[rows, streams, hidden]`, which become gated values.
    pub keys: DevicePtr<f32>,
    /// Values `[rows, hidden]`.
    pub values: DevicePtr<f32>,
    /// Inputs of the convolution `[rows, streams, hidden]`.
    pub inputs: DevicePtr<f32>,
    /// Weights of norms `[streams, hidden]`.
    pub key_norm: DevicePtr<f32>,
    pub stream_norm: DevicePtr<f32>,
    pub convolution_norm: DevicePtr<f32>,
    /// Weights of the convolution `[taps, streams, hidden]`.
    pub convolution: DevicePtr<f32>,
    pub epsilon: f32,
    pub states: DeltaStates,
}

impl NGramRows {
    fn channels(&self) -> usize {
        self.streams * self.hidden
    }

    fn state_floats(&self) -> usize {
        (self.taps - 1) * self.gap * self.channels()
    }
}

impl Gpu {
    /// Gates values by the agreement of keys and streams, mixes the last tokens with a convolution, and adds both to the streams.
    /// Reads and writes the states of the runs. A state that is written must not be read in the same call.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn add_ngrams(&self, of: &NGramRows, runs: &DeltaRuns) -> Result<(), CudaError> {
        let (rows, channels) = (runs.rows, of.channels());
        let kernel = self.kernel("ngrams", "gate_ngrams")?;
        let threads = (THREADS as u32, 1, 1);
        Launch::new(kernel, (of.streams as u32, rows as u32, 1), threads)
            .ptr(of.keys, rows * channels)
            .ptr(of.values, rows * of.hidden)
            .ptr(of.x, rows * channels)
            .ptr(of.key_norm, channels)
            .ptr(of.stream_norm, channels)
            .ptr(of.convolution_norm, channels)
            .ptr(of.inputs, rows * channels)
            .int(of.hidden)
            .float(of.epsilon)
            .run(self)?;
        let kernel = self.kernel("ngrams", "add_ngrams")?;
        let grid = (channels.div_ceil(THREADS) as u32, rows as u32, 1);
        Launch::new(kernel, grid, threads)
            .ptr(of.x, rows * channels)
            .ptr(of.keys, rows * channels)
            .ptr(of.inputs, rows * channels)
            .ptr(of.convolution, of.taps * channels)
            .int(channels)
            .int(of.taps)
            .int(of.gap)
            .ptr(runs.words, runs.count * DeltaRuns::WORDS)
            .int(runs.count)
            .int(runs.first_row)
            .ptr(of.states.floats, of.states.count * of.state_floats())
            .u64(of.state_floats() as u64)
            .run(self)
    }
}
