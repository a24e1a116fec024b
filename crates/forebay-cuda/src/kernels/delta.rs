//! Recurrent layers.

use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

const THREADS: usize = 256;
/// The most threads of a block that takes the steps of long runs: `delta.cu`.
const SCAN_THREADS: usize = 128;
/// Rows for each run from which kernels for long runs are faster. They are three instead of one.
const LONG_RUN: usize = 4;

/// Stands for the empty state in [`DeltaRuns`].
pub const NO_STATE: u32 = u32::MAX;

/// How a token changes the state of a head, and how the head's output is normed and gated. `forebay_compute::DeltaRule` says
/// what each one does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaRule {
    GatedDelta,
    KimiDelta,
    Mamba2,
    Mamba,
    Lightning,
    ShortConvolution,
}

impl DeltaRule {
    /// Returns true if values are added to a state, and a kernel of its own norms and gates the outputs.
    fn adds(self) -> bool {
        matches!(self, DeltaRule::Mamba2 | DeltaRule::Lightning)
    }
}

/// Shape of a recurrent layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaShape {
    pub rule: DeltaRule,
    pub key_heads: usize,
    /// A multiple of `key_heads`.
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Number of tokens that the convolution sees.
    pub convolution: usize,
    /// True if value head `j` uses key head `j % key_heads`, otherwise consecutive value heads share one.
    pub tiled: bool,
    /// Number of elements of the output that are normed together: `value_dim`, or with [`DeltaRule::Mamba2`] those of several
    /// heads, or 0 if outputs are not normed. Not read with [`DeltaRule::Mamba`].
    pub norm_width: usize,
    /// True if the sigmoid of `z` gates the output, and not `silu(z)`. Read with [`DeltaRule::GatedDelta`], [`DeltaRule::KimiDelta`]
    /// and [`DeltaRule::Lightning`] only.
    pub sigmoid_gate: bool,
    /// Logarithm of the fastest decay, with [`DeltaRule::KimiDelta`]; 0 if there is none.
    pub decay_bound: f32,
    /// Factor of the share of replacement, with [`DeltaRule::GatedDelta`]; 1 with other rules.
    pub share_scale: f32,
}

impl DeltaShape {
    /// Returns the number of channels of the convolution.
    pub fn channels(&self) -> usize {
        match self.rule {
            DeltaRule::Mamba => self.value_width(),
            _ => 2 * self.key_heads * self.key_dim + self.value_width(),
        }
    }

    /// Returns the number of elements of a token's output.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of factors by which a head's state decays.
    pub fn decay_width(&self) -> usize {
        match self.rule {
            DeltaRule::KimiDelta | DeltaRule::Mamba => self.key_dim,
            DeltaRule::GatedDelta
            | DeltaRule::Mamba2
            | DeltaRule::Lightning
            | DeltaRule::ShortConvolution => 1,
        }
    }

    /// Returns the number of [`Delta::step`].
    fn steps(&self) -> usize {
        if self.rule == DeltaRule::Lightning { 0 } else { self.value_heads * self.decay_width() }
    }

    /// Returns the number of weights of the norm of the outputs.
    pub fn norm_weights(&self) -> usize {
        match self.rule {
            DeltaRule::GatedDelta | DeltaRule::KimiDelta => self.value_dim,
            DeltaRule::Lightning => self.value_width(),
            DeltaRule::Mamba2 if self.norm_width > 0 => self.value_width(),
            DeltaRule::Mamba2 | DeltaRule::Mamba | DeltaRule::ShortConvolution => 0,
        }
    }

    /// Returns the number of floats of a state: the last inputs of the convolution, then the state matrices.
    pub fn state_floats(&self) -> usize {
        self.tail_floats() + self.value_width() * self.key_dim
    }

    /// Returns true if the kernels take this shape.
    pub fn is_supported(&self) -> bool {
        if self.rule == DeltaRule::ShortConvolution {
            return self.key_dim == 0 && self.value_width() > 0 && self.convolution >= 2;
        }
        if self.rule == DeltaRule::Mamba {
            let one_head = (self.key_heads, self.value_heads) == (1, 1);
            let fits = (1..=KEY_DIM_MAX).contains(&self.key_dim) && self.value_dim > 0;
            return one_head && fits && self.convolution >= 2;
        }
        let Some((capacity, threads_max)) = self.kernel() else { return false };
        let norms = match (self.rule, self.norm_width) {
            (DeltaRule::Mamba2, 0) => true,
            (DeltaRule::Mamba2, width) => self.value_width().is_multiple_of(width),
            (DeltaRule::Lightning, width) => width == self.value_width(),
            (_, width) => width == self.value_dim,
        };
        let threads = self.value_dim * capacity / ROW_ELEMENTS;
        self.key_dim.is_multiple_of(4)
            && threads <= threads_max
            && threads.is_multiple_of(32)
            && self.convolution >= if self.rule == DeltaRule::Lightning { 1 } else { 2 }
            && self.key_heads > 0
            && norms
            && self.value_heads.is_multiple_of(self.key_heads)
    }

    /// Returns the module of this shape.
    ///
    /// # Panics
    /// Panics if the shape is not supported.
    pub fn module(&self) -> &'static str {
        match self.kernel() {
            Some(_) if self.rule == DeltaRule::Mamba => "selective",
            Some((64, _)) => "delta_64",
            Some((128, _)) => "delta_128",
            Some((256, _)) => "delta_256",
            _ => panic!("no kernel for {self:?}"),
        }
    }

    /// Returns the threads for the state matrix of a value head.
    fn threads(&self) -> usize {
        let (capacity, _) = self.kernel().expect("the shape is supported");
        self.value_dim * capacity / ROW_ELEMENTS
    }

    /// Returns the kernel of this rule that does a part of the steps.
    fn entry(&self, part: &'static str) -> &'static str {
        match (self.rule, part) {
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

    pub(super) fn tail_floats(&self) -> usize {
        (self.convolution - 1) * self.channels()
    }

    /// Returns the capacity of the kernel for elements of a key, and the most threads of its block.
    fn kernel(&self) -> Option<(usize, usize)> {
        let kernels = [(64, 512), (128, 512), (256, 1024)];
        kernels.into_iter().find(|(capacity, _)| self.key_dim <= *capacity)
    }
}

/// Most elements of a key.
const KEY_DIM_MAX: usize = 256;

/// Number of elements of a row of the state matrix that a thread keeps.
const ROW_ELEMENTS: usize = 32;

/// Columns of a product that belong to the heads: the first one of the first key head, and the distance to the next key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadColumns {
    pub first: usize,
    pub step: usize,
}

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
        assert!(shape.is_supported() && shape.rule != DeltaRule::Mamba, "{shape:?}");
        let DeltaShape { rule, key_heads, value_heads, key_dim, value_dim, convolution, .. } =
            *shape;
        let (channels, rows) = (shape.channels(), runs.rows);
        let states = delta.states.count * shape.state_floats();
        let grid = (channels.div_ceil(THREADS) as u32, rows as u32, 1);
        let threads = (THREADS as u32, 1, 1);
        if rule == DeltaRule::ShortConvolution {
            let kernel = self.kernel(shape.module(), "short_convolution")?;
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
        Launch::new(self.kernel(shape.module(), "delta_convolve")?, grid, threads)
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
            self.delta_steps(delta, runs, grid, shape.threads(), "steps")?.run(self)?;
        }
        if !rule.adds() {
            return Ok(());
        }
        // The norm covers several heads, which are in different blocks of the kernel before.
        let has_norm = shape.norm_width > 0;
        let width = if has_norm { shape.norm_width } else { value_dim };
        let norm = if has_norm { delta.norm } else { DevicePtr::null() };
        let grid = ((shape.value_width() / width) as u32, rows as u32, 1);
        let kernel = self.kernel(shape.module(), "norm_groups")?;
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
        let keys = if rule.adds() { 0 } else { 2 * key_heads };
        let warps = SCAN_THREADS / 32;
        let of_warps = (SCAN_THREADS as u32, 1, 1);
        // Lightning attention has nothing to prepare.
        if rule != DeltaRule::Lightning {
            let grid = ((keys + decays.div_ceil(32)).div_ceil(warps) as u32, rows as u32, 1);
            let kernel = self.kernel(shape.module(), shape.entry("prepare"))?;
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
        let of_head = shape.threads();
        let fits = |threads: &usize| of_head.is_multiple_of(*threads);
        let threads = (32..=SCAN_THREADS).rev().step_by(32).find(fits).expect("32 threads fit");
        let grid = [(value_heads * of_head / threads) as u32, runs.count as u32];
        self.delta_steps(delta, runs, grid, threads, "scan")?.int(value_heads).run(self)?;
        if rule.adds() {
            return Ok(());
        }
        let grid = (value_heads.div_ceil(warps) as u32, rows as u32, 1);
        let kernel = self.kernel(shape.module(), "delta_finish")?;
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
        let kernel = self.kernel(shape.module(), shape.entry(kind))?;
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
