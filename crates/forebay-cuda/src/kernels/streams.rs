//! Residual streams beside each other.

use forebay_ops::StreamMixing;

use super::elementwise::{THREADS, blocks};
use super::norm::aligned;
use super::{Added, FiniteFlag};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of threads of the largest block.
const THREADS_MAX: usize = 1024;

/// Number of residual streams for which there are kernels; the same as in these.
pub const STREAMS: usize = 4;
/// Number of coefficients of a row of mixed streams.
const COEFFICIENTS: usize = STREAMS * (2 + STREAMS);
/// Number of factors of a row of streams that are not mixed.
const FACTORS: usize = 2 * STREAMS;

/// Rows of residual streams `[rows, STREAMS, width]`. `x` is aligned to 16 bytes.
#[derive(Clone, Copy)]
pub struct StreamRows {
    pub x: DevicePtr<f32>,
    pub rows: usize,
    /// Number of elements of a stream, a multiple of 4.
    pub width: usize,
}

/// The factors of streams.
#[derive(Clone, Copy)]
pub enum StreamFactors {
    /// All factors are the same, so that the sum is the mean.
    Mean,
    Mixed(MixedProducts),
}

/// Products that become coefficients.
#[derive(Clone, Copy)]
pub struct MixedProducts {
    /// Products `[rows, count]`. If there are more than the factors of the inputs, the coefficients of the rows replace them.
    pub products: DevicePtr<f32>,
    pub count: usize,
    pub mixing: StreamMixing<DevicePtr<f32>>,
}

/// Coefficients with which an output is added to streams.
#[derive(Clone, Copy)]
pub enum StreamCoefficients {
    /// Those that [`MixedProducts::products`] became.
    Mixed(DevicePtr<f32>),
    /// One factor for each stream `[rows, STREAMS]`. The streams are not mixed.
    Gated(DevicePtr<f32>),
    /// The same behind as many factors for inputs, as [`MixedProducts::products`] became.
    Independent(DevicePtr<f32>),
}

fn check_aligned(pointers: &[DevicePtr<f32>]) {
    assert!(aligned(pointers), "kernels of streams read 16 bytes at once");
}

impl StreamRows {
    fn count(&self) -> usize {
        assert!(self.width > 0 && self.width.is_multiple_of(4), "streams of {}", self.width);
        check_aligned(&[self.x]);
        self.rows * STREAMS * self.width
    }

    /// Returns the grid of kernels whose threads compute four elements of every stream.
    fn grid(&self) -> (u32, u32, u32) {
        (self.rows as u32, blocks(self.width / 4), 1)
    }
}

impl Gpu {
    /// Copies rows `[rows, width]` to every stream.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn spread_streams(&self, from: DevicePtr<f32>, to: &StreamRows) -> Result<(), CudaError> {
        check_aligned(&[from]);
        let kernel = self.kernel("streams", "spread_streams")?;
        Launch::new(kernel, to.grid(), (THREADS as u32, 1, 1))
            .ptr(from, to.rows * to.width)
            .ptr(to.x, to.count())
            .int(to.width)
            .run(self)
    }

    /// Adds the output of a block to streams, which mixed coefficients mix. `flag`, if given, records rows that are not finite.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if there is nothing to add, if experts' outputs are incomplete or have another width, or if a buffer is too
    /// small or not aligned.
    pub fn add_to_streams(
        &self,
        to: &StreamRows,
        added: Added,
        coefficients: StreamCoefficients,
        flag: Option<FiniteFlag>,
    ) -> Result<(), CudaError> {
        assert!(!matches!(added, Added::Nothing), "nothing is added to streams");
        let (add, experts) = added.parts(to.width);
        let flag = flag.unwrap_or(FiniteFlag::none());
        let (coefficients, count) = match coefficients {
            StreamCoefficients::Mixed(of) => (of, COEFFICIENTS),
            StreamCoefficients::Gated(of) => (of, STREAMS),
            StreamCoefficients::Independent(of) => (of, FACTORS),
        };
        check_aligned(&[add, experts.parts, experts.bias, coefficients]);
        let kernel =
            if experts.bias.is_null() { "add_to_streams" } else { "add_to_streams_biased" };
        let kernel = self.kernel("streams", kernel)?;
        Launch::new(kernel, to.grid(), (THREADS as u32, 1, 1))
            .ptr(to.x, to.count())
            .added((add, experts), to.rows)
            .ptr(coefficients, to.rows * count)
            .int(count)
            .int(to.width)
            .optional(flag.flag, 1)
            .int(flag.first_tag)
            .run(self)
    }

    /// Writes the sum of the streams of every row, each times a factor, to `out` `[rows, width]`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned, or if there are no such coefficients.
    pub fn collapse_streams(
        &self,
        from: &StreamRows,
        factors: StreamFactors,
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        check_aligned(&[out]);
        // The order of a row's sum depends on the number of threads, so it follows from the width alone.
        let threads = (from.width / 4).next_power_of_two().clamp(32, THREADS_MAX) as u32;
        let kernel = self.kernel("streams", "collapse_streams")?;
        let null = DevicePtr::null();
        let none = StreamMixing {
            scales: null,
            base: null,
            iterations: 0,
            epsilon: 0.0,
            outputs: (0.0, 0.0),
            norm_epsilon: 0.0,
        };
        let of = match factors {
            StreamFactors::Mean => MixedProducts { products: null, count: 0, mixing: none },
            StreamFactors::Mixed(of) => {
                let known = [STREAMS, FACTORS, COEFFICIENTS].contains(&of.count);
                assert!(known, "{} products", of.count);
                of
            }
        };
        let scales = (of.count / STREAMS).min(3);
        let rule = of.mixing;
        Launch::new(kernel, (from.rows as u32, 1, 1), (threads, 1, 1))
            .ptr(from.x, from.count())
            .optional(of.products, from.rows * of.count)
            .int(of.count)
            .optional(rule.scales, scales)
            .optional(rule.base, of.count)
            .int(rule.iterations)
            .float(rule.epsilon)
            .float(rule.outputs.0)
            .float(rule.outputs.1)
            .float(rule.norm_epsilon)
            .ptr(out, from.rows * from.width)
            .int(from.width)
            .run(self)
    }

    /// Norms every stream with its part of `weight` `[STREAMS, width]` and writes them to `out`, which has the shape of the
    /// streams.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn norm_streams(
        &self,
        from: &StreamRows,
        (weight, epsilon): (DevicePtr<f32>, f32),
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        check_aligned(&[weight, out]);
        let threads = (from.width / 4).next_power_of_two().clamp(32, THREADS) as u32;
        let grid = (from.rows as u32, STREAMS as u32, 1);
        Launch::new(self.kernel("streams", "norm_streams")?, grid, (threads, 1, 1))
            .ptr(from.x, from.count())
            .ptr(weight, STREAMS * from.width)
            .float(epsilon)
            .ptr(out, from.count())
            .int(from.width)
            .run(self)
    }

    /// Computes `silu(x / STREAMS)` of the `count` elements of `low`, and twice the logistic function of the factors
    /// `[rows, STREAMS]` divided by their number, if there are factors.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn activate_streams(
        &self,
        (low, count): (DevicePtr<f32>, usize),
        factors: Option<DevicePtr<f32>>,
        rows: usize,
    ) -> Result<(), CudaError> {
        let factor_count = rows * STREAMS;
        let grid = (blocks(count.max(factor_count)), 1, 1);
        Launch::new(self.kernel("streams", "activate_streams")?, grid, (THREADS as u32, 1, 1))
            .ptr(low, count)
            .int(count)
            .optional(factors.unwrap_or(DevicePtr::null()), factor_count)
            .int(factor_count)
            .run(self)
    }

    /// Writes the mean of the streams of every row, each element times the logistic function of its gate, to `out`
    /// `[rows, width]`. `gates` has the shape of the streams.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn collapse_gated_streams(
        &self,
        from: &StreamRows,
        gates: DevicePtr<f32>,
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        check_aligned(&[gates, out]);
        let kernel = self.kernel("streams", "collapse_gated_streams")?;
        Launch::new(kernel, from.grid(), (THREADS as u32, 1, 1))
            .ptr(from.x, from.count())
            .ptr(gates, from.count())
            .ptr(out, from.rows * from.width)
            .int(from.width)
            .run(self)
    }
}
