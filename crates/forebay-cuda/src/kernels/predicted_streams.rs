//! Residual streams of which layers compute one (alternating updates), and sparse activations.

use super::norm::aligned;
use super::{FiniteFlag, STREAMS, StreamRows};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of threads of the largest block.
const THREADS_MAX: usize = 1024;

/// Module of the kernels of streams.
const STREAMS_MODULE: &str = "predicted_streams";

/// Weights of a prediction or a correction of streams.
#[derive(Clone, Copy)]
pub struct StreamPrediction {
    /// Number of the stream that layers compute.
    pub active: usize,
    /// Matrix `[STREAMS, width]`. The hyperbolic tangents of its products with a row, divided by its root mean square, are numbers of
    /// the row.
    pub router: DevicePtr<f32>,
    /// Matrix that turns these numbers into coefficients: `[STREAMS * STREAMS, STREAMS]` for a prediction, `[STREAMS, STREAMS]` for a
    /// correction.
    pub coefficients: DevicePtr<f32>,
    /// Number that is added to the mean square of a row.
    pub epsilon: f32,
}

/// Returns the threads of a block for a row of so many elements. The order of the row's sums depends on them, so they follow from the
/// width alone.
fn threads(width: usize) -> (u32, u32, u32) {
    ((width / 4).next_power_of_two().clamp(32, THREADS_MAX) as u32, 1, 1)
}

impl StreamRows {
    /// Returns the number of elements of all rows.
    fn elements(&self, others: &[DevicePtr<f32>]) -> usize {
        assert!(self.width > 0 && self.width.is_multiple_of(4), "streams of {}", self.width);
        let all = aligned(&[self.x]) && aligned(others);
        assert!(all, "kernels of streams read 16 bytes at once");
        self.rows * STREAMS * self.width
    }

    fn launch(&self, gpu: &Gpu, kernel: &'static str) -> Result<Launch, CudaError> {
        let kernel = gpu.kernel(STREAMS_MODULE, kernel)?;
        Ok(Launch::new(kernel, (self.rows as u32, 1, 1), threads(self.width)))
    }
}

impl Gpu {
    /// Multiplies every stream but the first one of the rows by a number, so that its root mean square becomes that of the first.
    /// Streams with a mean square below 1e-5 stay smaller.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn match_streams(&self, of: &StreamRows) -> Result<(), CudaError> {
        of.launch(self, "match_streams")?.ptr(of.x, of.elements(&[])).int(of.width).run(self)
    }

    /// Adds to every stream of the rows a sum of all streams, whose factors are coefficients of the active stream. Writes the active
    /// stream to `out` `[rows, width]`, too.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned, or if there is no such stream.
    pub fn predict_streams(
        &self,
        rows: &StreamRows,
        of: &StreamPrediction,
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        assert!(of.active < STREAMS, "stream {}", of.active);
        rows.launch(self, "predict_streams")?
            .ptr(rows.x, rows.elements(&[of.router, out]))
            .ptr(of.router, STREAMS * rows.width)
            .ptr(of.coefficients, STREAMS * STREAMS * STREAMS)
            .int(of.active)
            .float(of.epsilon)
            .ptr(out, rows.rows * rows.width)
            .int(rows.width)
            .run(self)
    }

    /// Adds to every stream of the rows the difference of `activated` `[rows, width]` and the active stream, times one more than the
    /// stream's coefficient. Writes the new active stream, times `scale` `[width]` if that is not null, to `out` `[rows, width]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned, or if there is no such stream.
    pub fn correct_streams(
        &self,
        rows: &StreamRows,
        activated: DevicePtr<f32>,
        of: &StreamPrediction,
        (scale, out): (DevicePtr<f32>, DevicePtr<f32>),
    ) -> Result<(), CudaError> {
        assert!(of.active < STREAMS, "stream {}", of.active);
        rows.launch(self, "correct_streams")?
            .ptr(rows.x, rows.elements(&[activated, of.router, scale, out]))
            .ptr(activated, rows.rows * rows.width)
            .ptr(of.router, STREAMS * rows.width)
            .ptr(of.coefficients, STREAMS * STREAMS)
            .int(of.active)
            .float(of.epsilon)
            .optional(scale, rows.width)
            .ptr(out, rows.rows * rows.width)
            .int(rows.width)
            .run(self)
    }

    /// Adds `added` `[rows, width]` to every stream but the first one of the rows. `flag` records rows that are not finite.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn add_to_other_streams(
        &self,
        rows: &StreamRows,
        added: DevicePtr<f32>,
        flag: FiniteFlag,
    ) -> Result<(), CudaError> {
        rows.launch(self, "add_to_other_streams")?
            .ptr(rows.x, rows.elements(&[added]))
            .ptr(added, rows.rows * rows.width)
            .int(rows.width)
            .optional(flag.flag, 1)
            .int(flag.first_tag)
            .run(self)
    }

    /// Copies stream `stream` of the rows to `out` `[rows, width]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned, or if there is no such stream.
    pub fn take_stream(
        &self,
        rows: &StreamRows,
        stream: usize,
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        self.copy_one_stream(rows, (stream, false), out)
    }

    /// Copies `from` `[rows, width]` to stream `stream` of the rows.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned, or if there is no such stream.
    pub fn put_stream(
        &self,
        from: DevicePtr<f32>,
        rows: &StreamRows,
        stream: usize,
    ) -> Result<(), CudaError> {
        self.copy_one_stream(rows, (stream, true), from)
    }

    fn copy_one_stream(
        &self,
        rows: &StreamRows,
        (stream, puts): (usize, bool),
        other: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        assert!(stream < STREAMS, "stream {stream}");
        rows.launch(self, "copy_stream")?
            .ptr(rows.x, rows.elements(&[other]))
            .ptr(other, rows.rows * rows.width)
            .int(stream)
            .int(usize::from(puts))
            .int(rows.width)
            .run(self)
    }

    /// Subtracts from the values of every row of `x` `[rows, width]` the row's mean and `deviations` times its standard deviation,
    /// and sets those that become negative to 0.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the buffer is too small or rows are empty.
    pub fn cut_rows(
        &self,
        x: DevicePtr<f32>,
        rows: usize,
        width: usize,
        deviations: f32,
    ) -> Result<(), CudaError> {
        assert!(width > 0, "rows are empty");
        let kernel = self.kernel("cut", "cut_rows")?;
        Launch::new(kernel, (rows as u32, 1, 1), threads(width))
            .ptr(x, rows * width)
            .int(width)
            .float(deviations)
            .run(self)
    }
}
