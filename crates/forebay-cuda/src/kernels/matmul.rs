//! Products of many tokens: on tensor cores, or in f32 where that is asked for.

use forebay_format::TensorType;

use super::weights::{modules_of, weight_alignment};
use crate::launch::Launch;
use crate::{AddressTable, CudaError, DevicePtr, Gpu};

/// Rows that a block on tensor cores computes.
const ROWS: usize = 128;
/// Rows and tokens of a block of the exact kernel.
const EXACT_SIZE: usize = 64;

/// How activations meet a weight type on tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NarrowForm {
    /// Halves with a power of two for every row.
    Half,
    /// Two halves whose sum is the number, with a power of two for every row.
    HalfPair,
    /// Two bfloats whose sum is the number.
    BfloatPair,
}

/// The form for weights of type `ty` with `cols` columns; `None` where tensor cores do not help and [`Gpu::matmul`] takes
/// f32: F32 and F64 weights, and rows that are not whole times 16 bytes of activations.
pub fn narrow_form(ty: TensorType, cols: usize) -> Option<NarrowForm> {
    match ty {
        TensorType::F32 | TensorType::F64 => None,
        _ if !cols.is_multiple_of(8) => None,
        TensorType::F16 => Some(NarrowForm::HalfPair),
        TensorType::BF16 => Some(NarrowForm::BfloatPair),
        _ => Some(NarrowForm::Half),
    }
}

/// Activations `[rows, cols]` as 16-bit numbers.
#[derive(Clone, Copy)]
pub struct NarrowActivations {
    /// `[rows, cols]`, aligned to 16 bytes.
    pub high: DevicePtr<u16>,
    /// `[rows, cols]`, aligned to 16 bytes; not used by [`NarrowForm::Half`].
    pub low: DevicePtr<u16>,
    /// `[rows]`; not used by [`NarrowForm::BfloatPair`].
    pub scales: DevicePtr<f32>,
}

/// Activations for [`Gpu::matmul`].
#[derive(Clone, Copy)]
pub enum MatmulInput {
    /// In the form that [`narrow_form`] says.
    Narrow(NarrowActivations),
    /// `[rows, cols]`, for products in f32: any type, any shape, slow.
    Float(DevicePtr<f32>),
}

/// Which rows are multiplied with which weights.
#[derive(Clone, Copy)]
pub enum MatmulWeights {
    /// Row `t` of the output is row `t` of `x` times the matrix, for `tokens` rows.
    Dense { data: DevicePtr<u8>, tokens: usize },
    /// Entries `starts[e] .. starts[e + 1]` are multiplied with expert `e`.
    Experts {
        /// The address of each expert's slot; 0 leaves an expert's outputs as they are.
        slots: AddressTable,
        experts: usize,
        /// Of the matrix in the slot.
        offset: u64,
        /// `[experts + 1]`, the last is at most `entries`.
        starts: DevicePtr<u32>,
        /// Entry `i` reads row `token_rows[i]` of `x`; row `i` if null.
        token_rows: DevicePtr<u32>,
        /// Entry `i` writes row `out_rows[i]`; row `i` if null.
        out_rows: DevicePtr<u32>,
        /// Most entries that there can be.
        entries: usize,
    },
}

/// One product: `out[t, r] = sum over c of x[t, c] * w[r, c]`.
#[derive(Clone, Copy)]
pub struct MatmulJob {
    pub ty: TensorType,
    pub weights: MatmulWeights,
    /// Of one matrix.
    pub rows: usize,
    pub cols: usize,
    pub x: MatmulInput,
    /// `[tokens or entries, rows]`.
    pub out: DevicePtr<f32>,
}

impl Gpu {
    /// Makes 16-bit numbers of `x [rows, cols]`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small.
    pub fn narrow(
        &self,
        form: NarrowForm,
        x: DevicePtr<f32>,
        out: NarrowActivations,
        rows: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        if form == NarrowForm::BfloatPair {
            let count = rows * cols;
            let grid = (count.div_ceil(256) as u32, 1, 1);
            let kernel = self.kernel("narrow", "narrow_bfloat")?;
            let launch = Launch::new(kernel, grid, (256, 1, 1));
            let launch = launch.ptr(x, count).ptr(out.high, count).ptr(out.low, count);
            return launch.u64(count as u64).run(self);
        }
        let low = if form == NarrowForm::Half { DevicePtr::null() } else { out.low };
        let kernel = self.kernel("narrow", "narrow_half")?;
        let values = rows * cols;
        let launch = Launch::new(kernel, (rows as u32, 1, 1), (256, 1, 1)).ptr(x, values);
        let launch = launch.ptr(out.high, values).optional(low, values);
        launch.ptr(out.scales, rows).int(cols).run(self)
    }

    /// Multiplies. The order of sums depends on the columns alone, so a row's result does not depend on the others.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small, a part does not lie in its slot, columns are not whole blocks, a matrix or its place in a slot is not aligned, or activations come as 16-bit
    /// numbers where [`narrow_form`] has no form.
    pub fn matmul(&self, job: &MatmulJob) -> Result<(), CudaError> {
        let (ty, cols) = (job.ty, job.cols);
        let row_bytes = ty.row_bytes(cols as u64);
        let row_bytes = row_bytes.unwrap_or_else(|| panic!("{cols} columns of {ty}"));
        let address = match job.weights {
            MatmulWeights::Dense { data, .. } => data.address(),
            MatmulWeights::Experts { offset, .. } => offset,
        };
        assert!(address.is_multiple_of(weight_alignment(ty) as u64), "{ty} is not aligned");
        let modules = modules_of(ty);
        // Rows of `x` that are known to be read, and those of the output.
        let (x_rows, out_rows) = match job.weights {
            MatmulWeights::Dense { tokens, .. } => (tokens, tokens),
            MatmulWeights::Experts { token_rows, entries, .. } => {
                (if token_rows.is_null() { entries } else { entries.min(1) }, entries)
            }
        };
        let launch = match job.x {
            MatmulInput::Float(x) => {
                let grid = grid(&job.weights, EXACT_SIZE, job.rows.div_ceil(EXACT_SIZE));
                let kernel = self.kernel(modules.exact, "exact_matmul")?;
                Launch::new(kernel, grid, (256, 1, 1)).ptr(x, x_rows * cols)
            }
            MatmulInput::Narrow(x) => {
                let form = narrow_form(ty, cols);
                let form = form.unwrap_or_else(|| panic!("{ty} with {cols} columns takes f32"));
                let parts = if form == NarrowForm::Half { 1 } else { 2 };
                let (name, size) =
                    if is_few(&job.weights) { ("matmul_32", 32) } else { ("matmul_128", 128) };
                let module = modules.matmul.unwrap_or_else(|| panic!("{ty} takes f32"));
                let grid = grid(&job.weights, size, job.rows.div_ceil(ROWS));
                // Two buffers for a step's 64 columns of 16 bits; see `Plan` in `matmul.cu`.
                let shared_bytes = 2 * (parts * size + ROWS) * 64 * 2;
                let (low, scales) = match form {
                    NarrowForm::Half => (DevicePtr::null(), x.scales),
                    NarrowForm::HalfPair => (x.low, x.scales),
                    NarrowForm::BfloatPair => (x.low, DevicePtr::null()),
                };
                Launch::new(self.kernel(module, name)?, grid, (256, 1, 1))
                    .shared(shared_bytes as u32)
                    .ptr(x.high, x_rows * cols)
                    .optional(low, x_rows * cols)
                    .optional(scales, x_rows)
            }
        };
        let launch =
            launch.ptr(job.out, out_rows * job.rows).int(job.rows).int(cols).u64(row_bytes);
        with_weights(launch, &job.weights, job.rows * row_bytes as usize).run(self)
    }
}

/// Whether tiles of many tokens would stay mostly empty.
fn is_few(weights: &MatmulWeights) -> bool {
    match *weights {
        MatmulWeights::Dense { tokens, .. } => tokens <= 32,
        MatmulWeights::Experts { experts, entries, .. } => entries <= 48 * experts,
    }
}

/// Blocks for every tile of `size` tokens that there can be, times those along the rows.
fn grid(weights: &MatmulWeights, size: usize, along_rows: usize) -> (u32, u32, u32) {
    let tiles = match *weights {
        MatmulWeights::Dense { tokens, .. } => tokens.div_ceil(size),
        // Every expert with entries may have one tile that is not full.
        MatmulWeights::Experts { experts, entries, .. } => entries / size + experts.min(entries),
    };
    (tiles as u32, along_rows as u32, 1)
}

/// The parameters that `tiles.cuh` names, for matrices of `bytes` bytes.
fn with_weights(launch: Launch, weights: &MatmulWeights, bytes: usize) -> Launch {
    match *weights {
        MatmulWeights::Dense { data, tokens } => {
            let launch = launch.ptr(data, bytes).null().null().null().null();
            launch.int(0).int(tokens)
        }
        MatmulWeights::Experts {
            slots,
            experts,
            offset,
            starts,
            token_rows,
            out_rows,
            entries,
        } => {
            let launch = launch.u64(offset).table(slots, experts, offset + bytes as u64);
            let launch = launch.ptr(starts, experts + 1);
            let launch = launch.optional(token_rows, entries).optional(out_rows, entries);
            launch.int(experts).int(entries)
        }
    }
}
