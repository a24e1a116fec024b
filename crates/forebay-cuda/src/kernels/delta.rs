//! Recurrent layers.

use forebay_ops::{DeltaRule, DeltaShape, HeadColumns};

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const THREADS: usize = 256;
/// The most threads of a block that takes the steps of long runs: `delta.cu`.
const SCAN_THREADS: usize = 128;
/// Rows for each run from which kernels for long runs are faster. They are three instead of one.
const LONG_RUN: usize = 4;

/// Stands for the empty state in [`DeltaRuns`].
pub const NO_STATE: u32 = u32::MAX;

/// Returns true if values are added to a state, and a kernel of its own norms and gates the outputs.
fn adds(rule: DeltaRule) -> bool {
    matches!(rule, DeltaRule::Mamba2 | DeltaRule::Lightning)
}

/// Returns true if the kernels take this shape.
pub fn takes_delta(shape: &DeltaShape) -> bool {
    if shape.rule == DeltaRule::ShortConvolution {
        return shape.key_dim == 0 && shape.value_width() > 0 && shape.convolution >= 2;
    }
    if shape.rule == DeltaRule::Mamba {
        let one_head = (shape.key_heads, shape.value_heads) == (1, 1);
        let fits = (1..=KEY_DIM_MAX).contains(&shape.key_dim) && shape.value_dim > 0;
        return one_head && fits && shape.convolution >= 2;
    }
    let Some((capacity, threads_max)) = kernel_of(shape) else { return false };
    let norms = match (shape.rule, shape.norm_width) {
        (DeltaRule::Mamba2, 0) => true,
        (DeltaRule::Mamba2, width) => shape.value_width().is_multiple_of(width),
        (DeltaRule::Lightning, width) => width == shape.value_width(),
        (_, width) => width == shape.value_dim,
    };
    let threads = shape.value_dim * capacity / ROW_ELEMENTS;
    shape.key_dim.is_multiple_of(4)
        && threads <= threads_max
        && threads.is_multiple_of(32)
        && shape.convolution >= if shape.rule == DeltaRule::Lightning { 1 } else { 2 }
        && shape.key_heads > 0
        && norms
        && shape.value_heads.is_multiple_of(shape.key_heads)
}

/// Returns the module of this shape.
///
/// # Panics
/// Panics if the shape is not supported.
pub fn delta_module(shape: &DeltaShape) -> &'static str {
    match kernel_of(shape) {
        Some(_) if shape.rule == DeltaRule::Mamba => "selective",
        Some((64, _)) => "delta_64",
        Some((128, _)) => "delta_128",
        Some((256, _)) => "delta_256",
        _ => panic!("no kernel for {shape:?}"),
    }
}

/// Returns the threads for the state matrix of a value head.
fn head_threads(shape: &DeltaShape) -> usize {
    let (capacity, _) = kernel_of(shape).expect("the shape is supported");
    shape.value_dim * capacity / ROW_ELEMENTS
}

/// Returns the kernel of this rule that does a part of the steps.
fn entry(rule: DeltaRule, part: &'static str) -> &'static str {
    match (rule, part) {
        (DeltaRule::GatedDelta, "steps") => "delta_steps",
        (DeltaRule::GatedDelta, "scan") => "delta_scan",
        (DeltaRule::GatedDelta, _) => "delta_prepare",
        (DeltaRule::KimiDelta, "steps") => "kimi_steps",
        (DeltaRule::KimiDelta, "scan") => "kimi_scan",
        (DeltaRule::KimiDelta, _) => "kimi_prepare",
        (DeltaRule::Lightning, "steps") => "lightning_steps",
        (DeltaRule::Lightning, _) => "lightning_scan",
        (_, "steps") => "mamba2_steps",
        (_, "scan") => "mamba2_scan",
        _ => "mamba2_prepare",
    }
}

/// Returns the capacity of the kernel for elements of a key, and the most threads of its block.
fn kernel_of(shape: &DeltaShape) -> Option<(usize, usize)> {
    let kernels = [(64, 512), (128, 512), (256, 1024)];
    kernels.into_iter().find(|(capacity, _)| shape.key_dim <= *capacity)
}

/// Most elements of a key.
const KEY_DIM_MAX: usize = 256;

/// Number of elements of a row of the state matrix that a thread keeps.
const ROW_ELEMENTS: usize = 32;

/// A product `[rows, row]`, and which of its columns are used.
#[derive(Clone, Copy)]
pub struct ProductColumns {
    pub values: DevicePtr<f32>,
    pub row: usize,
    pub columns: HeadColumns,
}

impl Launch {
    /// Passes products of `rows` rows and their columns.
    pub(super) fn products<const N: usize>(
        self,
        rows: usize,
        products: [ProductColumns; N],
    ) -> Launch {
        products.into_iter().fold(self, |launch, of| {
            let launch = launch.ptr(of.values, rows * of.row).int(of.row);
            launch.int(of.columns.first).int(of.columns.step)
        })
    }
}

/// Runs of consecutive rows of one sequence.
#[derive(Clone, Copy)]
pub struct DeltaRuns {
    /// Four words for each run: the first row in the pass, the number of rows, which may be 0, the number of the state
    /// before them ([`NO_STATE`] if it is empty), and the number of the state after them.
    pub words: DevicePtr<u32>,
    pub count: usize,
    /// Row of the pass with which the buffers begin.
    pub first_row: usize,
    /// Number of rows in the buffers.
    pub rows: usize,
}

impl DeltaRuns {
    /// Number of words of a run.
    pub const WORDS: usize = 4;
}

/// A layer's states `[states, state_floats]`.
#[derive(Clone, Copy)]
pub struct DeltaStates {
    pub floats: DevicePtr<f32>,
    pub count: usize,
}

/// The projections of a layer's input, and the layer's vectors.
#[derive(Clone, Copy)]
pub struct Delta {
    pub shape: DeltaShape,
    pub q: ProductColumns,
    pub k: ProductColumns,
    pub v: ProductColumns,
    /// Gate of the output.
    pub z: ProductColumns,
    /// Share of replacement. Not read with [`DeltaRule::Mamba2`] and [`DeltaRule::Lightning`]. Kernels of other rules may write to it.
    pub b: ProductColumns,
    /// Steps of decay, [`DeltaShape::decay_width`] for each value head. Not read with [`DeltaRule::Lightning`]. Kernels of other rules
    /// may write to it.
    pub a: ProductColumns,
    /// `[convolution, channels]`
    pub convolution: DevicePtr<f32>,
    /// `[channels]`, or null.
    pub convolution_bias: DevicePtr<f32>,
    /// `[value_heads]`, or with [`DeltaRule::Mamba`] `[values, key_dim]`. With [`DeltaRule::Lightning`], logarithms of the decays.
    pub decay: DevicePtr<f32>,
    /// `[value_heads, decay_width]`, or with [`DeltaRule::Mamba`] `[values]`. Nothing with [`DeltaRule::Lightning`].
    pub step: DevicePtr<f32>,
    /// Factor `[value_heads]` of the values that are added to the output, or null. Only for [`DeltaRule::Mamba2`], and for
    /// [`DeltaRule::Mamba`] with one for each value.
    pub skip: DevicePtr<f32>,
    /// [`DeltaShape::norm_weights`] floats.
    pub norm: DevicePtr<f32>,
    pub epsilon: f32,
    pub states: DeltaStates,
    /// Output of the convolution `[rows, channels]`.
    pub mixed: DevicePtr<f32>,
    /// `[rows, value_heads, value_dim]`
    pub out: DevicePtr<f32>,
}

impl Gpu {
    /// Computes a recurrent layer from the projections of its input to the normed and gated outputs of its heads. Reads and
    /// writes the states of the runs. A state that is written must not be read in the same call.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if the shape is not supported or a buffer is too small, or with [`DeltaRule::Mamba`], which takes several calls.
    pub fn gated_delta(&self, delta: &Delta, runs: &DeltaRuns) -> Result<(), CudaError> {
        let shape = &delta.shape;
        assert!(takes_delta(shape) && shape.rule != DeltaRule::Mamba, "{shape:?}");
        let DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, convolution, .. } =
            *shape;
        let (channels, rows) = (shape.channels(), runs.rows);
        let states = delta.states.count * shape.state_floats();
        let grid = (channels.div_ceil(THREADS) as u32, rows as u32, 1);
        let threads = (THREADS as u32, 1, 1);
        if rule == DeltaRule::ShortConvolution {
            let kernel = self.kernel(delta_module(shape), "short_convolution")?;
            return Launch::new(kernel, grid, threads)
                .products(rows, [delta.b, delta.v, delta.z])
                .int(channels)
                .int(convolution)
                .ptr(delta.convolution, convolution * channels)
                .optional(delta.convolution_bias, channels)
                .ptr(runs.words, runs.count * DeltaRuns::WORDS)
                .int(runs.count)
                .int(runs.first_row)
                .ptr(delta.states.floats, states)
                .u64(shape.state_floats() as u64)
                .ptr(delta.out, rows * channels)
                .run(self);
        }
        Launch::new(self.kernel(delta_module(shape), "delta_convolve")?, grid, threads)
            .products(rows, [delta.q, delta.k, delta.v])
            .int(key_heads)
            .int(key_dim)
            .int(value_heads / key_heads * value_dim)
            .int(convolution)
            .ptr(delta.convolution, convolution * channels)
            .optional(delta.convolution_bias, channels)
            .ptr(runs.words, runs.count * DeltaRuns::WORDS)
            .int(runs.count)
            .int(runs.first_row)
            .ptr(delta.states.floats, states)
            .u64(shape.state_floats() as u64)
            .ptr(delta.mixed, rows * channels)
            .run(self)?;
        // Both ways give the same bits.
        if rows >= LONG_RUN * runs.count {
            self.steps_of_long_runs(delta, runs)?;
        } else {
            let grid = [value_heads as u32, runs.count as u32];
            self.delta_steps(delta, runs, grid, head_threads(shape), "steps")?.run(self)?;
        }
        if !adds(rule) {
            return Ok(());
        }
        // The norm covers several heads, which are in different blocks of the kernel before.
        let has_norm = shape.norm_width > 0;
        let width = if has_norm { shape.norm_width } else { value_dim };
        let norm = if has_norm { delta.norm } else { DevicePtr::null() };
        let grid = ((shape.value_width() / width) as u32, rows as u32, 1);
        let kernel = self.kernel(delta_module(shape), "norm_groups")?;
        Launch::new(kernel, grid, threads)
            .products(rows, [delta.z])
            .int(value_heads / key_heads * value_dim)
            .int(width)
            .optional(norm, shape.norm_weights())
            .float(delta.epsilon)
            .int(usize::from(rule == DeltaRule::Lightning))
            .ptr(delta.out, rows * shape.value_width())
            .run(self)
    }

    /// Computes the steps of runs of many tokens: prepares all tokens, takes their steps, and finishes their outputs.
    fn steps_of_long_runs(&self, delta: &Delta, runs: &DeltaRuns) -> Result<(), CudaError> {
        let shape = &delta.shape;
        let DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, .. } = *shape;
        let (channels, rows) = (shape.channels(), runs.rows);
        let decays = value_heads * shape.decay_width();
        let keys = if adds(rule) { 0 } else { 2 * key_heads };
        let warps = SCAN_THREADS / 32;
        let of_warps = (SCAN_THREADS as u32, 1, 1);
        // Lightning attention has nothing to prepare.
        if rule != DeltaRule::Lightning {
            let grid = ((keys + decays.div_ceil(32)).div_ceil(warps) as u32, rows as u32, 1);
            let kernel = self.kernel(delta_module(shape), entry(shape.rule, "prepare"))?;
            Launch::new(kernel, grid, of_warps)
                .ptr(delta.mixed, rows * channels)
                .int(key_heads)
                .int(key_dim)
                .int(value_heads)
                .int(value_dim)
                .products(rows, [delta.b, delta.a])
                .ptr(delta.decay, value_heads)
                .ptr(delta.step, decays)
                .float(shape.decay_bound)
                .float(shape.share_scale)
                .run(self)?;
        }
        // Blocks have whole warps, and all of a head's blocks as many rows.
        let of_head = head_threads(shape);
        let fits = |threads: &usize| of_head.is_multiple_of(*threads);
        let threads = (32..=SCAN_THREADS).rev().step_by(32).find(fits).expect("32 threads fit");
        let grid = [(value_heads * of_head / threads) as u32, runs.count as u32];
        self.delta_steps(delta, runs, grid, threads, "scan")?.int(value_heads).run(self)?;
        if adds(rule) {
            return Ok(());
        }
        let grid = (value_heads.div_ceil(warps) as u32, rows as u32, 1);
        let kernel = self.kernel(delta_module(shape), "delta_finish")?;
        Launch::new(kernel, grid, of_warps)
            .int(key_heads)
            .int(value_heads)
            .int(value_dim)
            .int(usize::from(shape.sigmoid_gate))
            .products(rows, [delta.z])
            .ptr(delta.norm, shape.norm_weights())
            .float(delta.epsilon)
            .ptr(delta.out, rows * shape.value_width())
            .run(self)
    }

    /// Returns the launch of a kernel that takes the steps of states, of kind `kind`.
    fn delta_steps(
        &self,
        delta: &Delta,
        runs: &DeltaRuns,
        [along_heads, along_runs]: [u32; 2],
        threads: usize,
        kind: &'static str,
    ) -> Result<Launch, CudaError> {
        let shape = &delta.shape;
        let rows = runs.rows;
        let kernel = self.kernel(delta_module(shape), entry(shape.rule, kind))?;
        Ok(Launch::new(kernel, (along_heads, along_runs, 1), (threads as u32, 1, 1))
            .ptr(delta.mixed, rows * shape.channels())
            .int(shape.key_heads)
            .int(shape.key_dim)
            .int(shape.value_dim)
            .int(usize::from(shape.tiled))
            .int(usize::from(shape.sigmoid_gate))
            .products(rows, [delta.z, delta.b, delta.a])
            .ptr(delta.decay, shape.value_heads)
            .ptr(delta.step, shape.steps())
            .optional(delta.skip, shape.value_heads)
            .ptr(delta.norm, shape.norm_weights())
            .float(delta.epsilon)
            .float(shape.decay_bound)
            .float(shape.share_scale)
            .ptr(runs.words, runs.count * DeltaRuns::WORDS)
            .int(runs.first_row)
            .ptr(delta.states.floats, delta.states.count * shape.state_floats())
            .u64(shape.state_floats() as u64)
            .u64(shape.tail_floats() as u64)
            .ptr(delta.out, rows * shape.value_width()))
    }
}
