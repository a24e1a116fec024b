//! Root-mean-square norms and layer norms.

use super::{ExpertOutputs, FiniteFlag, NarrowActivations, NarrowForm, RoundedActivations};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of threads of the largest block.
const THREADS_MAX: usize = 1024;
/// Number of elements that a thread keeps in registers; the same as in the kernel.
const KEPT: usize = 16;

/// Values that are added to the rows before the norm.
#[derive(Clone, Copy)]
pub enum Added {
    Nothing,
    /// Rows `[rows, width]`.
    Rows(DevicePtr<f32>),
    /// The weighted sum of each row's expert outputs, plus that of the shared expert.
    Experts(ExpertOutputs),
}

/// Buffers for normed rows.
#[derive(Clone, Copy)]
pub struct Normed {
    /// Normed rows `[rows, width]`.
    pub rows: DevicePtr<f32>,
    /// Second output that gets the same rows.
    pub also: Option<Converted>,
}

/// Rows in the form that products take.
#[derive(Clone, Copy)]
pub enum Converted {
    /// Rounded for products in integers.
    Rounded(RoundedActivations),
    /// In the form [`NarrowForm::Half`].
    Halves(NarrowActivations),
}

impl Added {
    /// Returns the rows that are added, or null, and the experts' outputs, which are none of `k` experts if there are no such.
    ///
    /// # Panics
    /// Panics if the experts' outputs are incomplete or have another width.
    pub(super) fn parts(self, width: usize) -> (DevicePtr<f32>, ExpertOutputs) {
        let (add, experts) = match self {
            Added::Nothing => (DevicePtr::null(), ExpertOutputs::none(width)),
            Added::Rows(add) => (add, ExpertOutputs::none(width)),
            Added::Experts(experts) => (experts.shared, experts),
        };
        assert_eq!(experts.width, width, "experts' outputs of another width");
        let pointers = [experts.row_of_pair, experts.ids];
        let complete = !experts.parts.is_null() && !pointers.iter().any(|ids| ids.is_null());
        assert!(experts.k == 0 || complete, "experts without outputs");
        (add, experts)
    }
}

impl Launch {
    /// Passes what [`Added::parts`] returned for `rows` rows, as the members of `Addition` of the kernels.
    pub(super) fn added(
        self,
        (add, experts): (DevicePtr<f32>, ExpertOutputs),
        rows: usize,
    ) -> Launch {
        let (width, pairs) = (experts.width, rows * experts.k);
        self.optional(add, rows * width)
            .optional(experts.parts, pairs * width)
            .optional(experts.weights, pairs)
            .optional(experts.row_of_pair, pairs)
            .optional(experts.bias, width)
            .optional(experts.ids, pairs)
            .int(experts.k)
    }
}

/// Returns true if kernels may read 16 bytes at once from all of these pointers.
pub(super) fn aligned(pointers: &[DevicePtr<f32>]) -> bool {
    pointers.iter().all(|pointer| pointer.address().is_multiple_of(16))
}

impl Normed {
    /// Returns a value for rows without a second output.
    pub fn plain(rows: DevicePtr<f32>) -> Normed {
        Normed { rows, also: None }
    }
}

/// How rows are normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormForm {
    /// `weight * x / sqrt(mean(x^2) + epsilon)`, with a weight `[width]`.
    RootMeanSquare,
    /// `weight * (x - mean) / sqrt(variance + epsilon) + bias`. The weight is `[2, width]`: factors, then biases.
    Layer,
}

/// A norm over rows of `width` elements: `weight * x / sqrt(mean(x^2) + epsilon)`.
#[derive(Clone, Copy)]
pub struct Norm {
    /// Weight `[width]`, aligned to 16 bytes. If it is null, rows are added and converted, but not normed.
    pub weight: DevicePtr<f32>,
    pub width: usize,
    pub epsilon: f32,
}

impl Norm {
    /// Returns the number of threads for a row: one for every 8 elements, rounded up to a power of two and limited. It
    /// depends only on the width, because the order of the sum depends on it.
    fn threads(&self) -> u32 {
        (self.width / 8).next_power_of_two().clamp(32, THREADS_MAX) as u32
    }

    fn check(&self, rows: &[DevicePtr<f32>]) {
        assert!(self.width > 0, "a norm of empty rows");
        let aligned = aligned(rows) && aligned(&[self.weight]);
        assert!(!self.width.is_multiple_of(4) || aligned, "norms read 16 bytes at once");
    }
}

impl Gpu {
    /// Computes `x += added`, then `out = norm(x)`, for `rows` rows: the end of one block and the beginning of the
    /// next. `out` may be `x`. `flag`, if given, records rows that are not finite.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, or if it is not aligned to 16 bytes although `width` is a multiple of 4.
    /// Panics if rows are to be rounded but are not whole groups of 32, or if experts' outputs have another width.
    pub fn rms_norm(
        &self,
        x: DevicePtr<f32>,
        added: Added,
        norm: &Norm,
        out: Normed,
        rows: usize,
        flag: Option<FiniteFlag>,
    ) -> Result<(), CudaError> {
        self.rms_norm_of_scaled(x, (added, 1.0), norm, out, rows, flag)
    }

    /// Computes `x += added` for `rows` rows of `width` elements. `flag`, if given, records rows that are not finite.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics as [`Gpu::rms_norm`] does.
    pub fn add_rows(
        &self,
        x: DevicePtr<f32>,
        added: Added,
        width: usize,
        rows: usize,
        flag: Option<FiniteFlag>,
    ) -> Result<(), CudaError> {
        let none = Norm { weight: DevicePtr::null(), width, epsilon: 0.0 };
        self.rms_norm(x, added, &none, Normed::plain(DevicePtr::null()), rows, flag)
    }

    /// Does the same as [`Gpu::rms_norm`] with `x = factor * (x + added)`. Without anything to add, there is no factor. If
    /// `out.rows` is null, only the sum is computed.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics as [`Gpu::rms_norm`] does.
    pub fn rms_norm_of_scaled(
        &self,
        x: DevicePtr<f32>,
        (added, factor): (Added, f32),
        norm: &Norm,
        out: Normed,
        rows: usize,
        flag: Option<FiniteFlag>,
    ) -> Result<(), CudaError> {
        self.norm_of_scaled(NormForm::RootMeanSquare, x, (added, factor), norm, out, (rows, flag))
    }

    /// Does the same as [`Gpu::rms_norm_of_scaled`] with a norm of another form.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics as [`Gpu::rms_norm`] does, and if a layer norm is to add experts' outputs with biases.
    pub fn norm_of_scaled(
        &self,
        form: NormForm,
        x: DevicePtr<f32>,
        (added, factor): (Added, f32),
        norm: &Norm,
        out: Normed,
        (rows, flag): (usize, Option<FiniteFlag>),
    ) -> Result<(), CudaError> {
        assert!(!out.rows.is_null() || out.also.is_none(), "no rows to convert");
        let (add, experts) = added.parts(norm.width);
        norm.check(&[x, out.rows, add, experts.parts, experts.bias]);
        let flag = flag.unwrap_or(FiniteFlag::none());
        // Conversion in this kernel needs the row in registers, in whole quads; other rows are converted afterwards.
        let at_once = norm.width <= KEPT * norm.threads() as usize && norm.width.is_multiple_of(4);
        let (mut codes, mut scales) = (DevicePtr::null(), DevicePtr::null());
        let (mut halves, mut half_scales) = (DevicePtr::null(), DevicePtr::null());
        match out.also.filter(|_| at_once) {
            Some(Converted::Rounded(to)) => (codes, scales) = (to.codes, to.scales),
            Some(Converted::Halves(to)) => (halves, half_scales) = (to.high, to.scales),
            None => {}
        }
        let rounds = matches!(out.also, Some(Converted::Rounded(_)));
        assert!(!rounds || norm.width.is_multiple_of(32), "no whole groups of 32");
        let values = rows * norm.width;
        let (grid, block) = ((rows as u32, 1, 1), (norm.threads(), 1, 1));
        // Without a weight, there is no norm.
        let is_layer = form == NormForm::Layer && !norm.weight.is_null();
        assert!(!is_layer || experts.bias.is_null(), "a layer norm after experts with biases");
        let kernel = match (is_layer, experts.bias.is_null()) {
            (true, _) => "layer_norm",
            (false, true) => "rms_norm",
            (false, false) => "rms_norm_biased",
        };
        Launch::new(self.kernel("norm", kernel)?, grid, block)
            .ptr(x, values)
            .added((add, experts), rows)
            .optional(norm.weight, norm.width * (1 + usize::from(is_layer)))
            .optional(out.rows, values)
            .optional(codes, values)
            .optional(scales, values / 32)
            .optional(halves, values)
            .optional(half_scales, rows)
            .int(norm.width)
            .float(norm.epsilon)
            .optional(flag.flag, 1)
            .int(flag.first_tag)
            .float(factor)
            .run(self)?;
        match out.also.filter(|_| !at_once) {
            Some(Converted::Rounded(to)) => self.quantize_q8(out.rows, to, rows, norm.width),
            Some(Converted::Halves(to)) => {
                self.narrow(NarrowForm::Half, out.rows, to, rows, norm.width)
            }
            None => Ok(()),
        }
    }
}
