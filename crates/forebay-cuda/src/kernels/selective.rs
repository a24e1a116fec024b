//! Recurrent layers of Mamba, whose steps, keys and queries are products of what the convolution gives.

use forebay_ops::DeltaRule;

use super::delta::{Delta, DeltaRuns, delta_module, takes_delta};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const THREADS: usize = 256;
const NORM_THREADS: u32 = 128;
/// Numbers of a state that a thread keeps: `selective.cu`.
const NUMBERS: usize = 16;

/// Compressed steps, keys and queries of every row, and the norms of these parts.
#[derive(Clone, Copy)]
pub struct CompressedParts {
    /// `[rows, rank + 2 * key_dim]`
    pub all: DevicePtr<f32>,
    pub rank: usize,
    pub key_dim: usize,
    /// Weights of the norms of the three parts, or null.
    pub norms: [DevicePtr<f32>; 3],
    pub epsilon: f32,
    /// Receives the compressed steps `[rows, rank]`.
    pub steps: DevicePtr<f32>,
}

impl Gpu {
    /// Computes the convolution of the values of [`DeltaRule::Mamba`] and its activation, [`Delta::mixed`]. Reads and writes the part of
    /// the states that belongs to it.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the shape is not supported or a buffer is too small.
    pub fn mix_values(&self, delta: &Delta, runs: &DeltaRuns) -> Result<(), CudaError> {
        let shape = &delta.shape;
        assert!(takes_delta(shape) && shape.rule == DeltaRule::Mamba, "{shape:?}");
        let (values, rows) = (shape.value_width(), runs.rows);
        let grid = (values.div_ceil(THREADS) as u32, rows as u32, 1);
        let kernel = self.kernel(delta_module(shape), "mix_values")?;
        Launch::new(kernel, grid, (THREADS as u32, 1, 1))
            .products(rows, [delta.v])
            .int(values)
            .int(shape.convolution)
            .ptr(delta.convolution, shape.convolution * values)
            .optional(delta.convolution_bias, values)
            .ptr(runs.words, runs.count * DeltaRuns::WORDS)
            .int(runs.count)
            .int(runs.first_row)
            .ptr(delta.states.floats, delta.states.count * shape.state_floats())
            .u64(shape.state_floats() as u64)
            .ptr(delta.mixed, rows * values)
            .run(self)
    }

    /// Norms compressed steps, keys and queries in place, and copies the steps.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small.
    pub fn norm_compressed(&self, parts: &CompressedParts, rows: usize) -> Result<(), CudaError> {
        let CompressedParts { all, rank, key_dim, norms, epsilon, steps } = *parts;
        let kernel = self.kernel("selective", "norm_compressed")?;
        let [of_steps, of_keys, of_queries] = norms;
        Launch::new(kernel, (3, rows as u32, 1), (NORM_THREADS, 1, 1))
            .ptr(all, rows * (rank + 2 * key_dim))
            .int(rank)
            .int(key_dim)
            .optional(of_steps, rank)
            .optional(of_keys, key_dim)
            .optional(of_queries, key_dim)
            .float(epsilon)
            .ptr(steps, rows * rank)
            .run(self)
    }

    /// Takes the steps of [`DeltaRule::Mamba`] over the rows of the runs, from [`Delta::mixed`] and the products to the gated outputs.
    /// [`Delta::a`] has the steps of all values.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the shape is not supported or a buffer is too small.
    pub fn selective_scan(&self, delta: &Delta, runs: &DeltaRuns) -> Result<(), CudaError> {
        let shape = &delta.shape;
        assert!(takes_delta(shape) && shape.rule == DeltaRule::Mamba, "{shape:?}");
        let (values, rows, key_dim) = (shape.value_width(), runs.rows, shape.key_dim);
        let parts = key_dim.div_ceil(NUMBERS).next_power_of_two();
        let grid = ((values * parts).div_ceil(THREADS) as u32, runs.count as u32, 1);
        let kernel = self.kernel(delta_module(shape), "selective_scan")?;
        Launch::new(kernel, grid, (THREADS as u32, 1, 1))
            .ptr(delta.mixed, rows * values)
            .products(rows, [delta.a, delta.k, delta.q, delta.z])
            .int(values)
            .int(key_dim)
            .int(parts)
            .ptr(delta.decay, values * key_dim)
            .ptr(delta.step, values)
            .optional(delta.skip, values)
            .ptr(runs.words, runs.count * DeltaRuns::WORDS)
            .int(runs.first_row)
            .ptr(delta.states.floats, delta.states.count * shape.state_floats())
            .u64(shape.state_floats() as u64)
            .u64(shape.tail_floats() as u64)
            .ptr(delta.out, rows * values)
            .run(self)
    }
}
