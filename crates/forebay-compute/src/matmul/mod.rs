//! Products of activations with weights in the encoding of the model file.
//!
//! Weights are never repacked permanently, because they may have arrived from disk a moment ago.
//! With [`Arithmetic::Fast`], activations for quantised weights are rounded to 8 bits and products
//! are computed in integers. Otherwise, and for types without a kernel, weights are converted to
//! F32 row by row.
//!
//! Each number of the output is computed by one thread in a fixed order. The order depends only on
//! the weight type and on the kind of the rows. So results do not depend on threads, chunks,
//! addresses of weights, other rows, or other jobs of the same call.

mod activations;
mod aligned;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod float;
#[cfg(target_arch = "x86_64")]
mod panel;
mod portable;
mod quantize;
mod task;
mod types;

use forebay_format::{TensorType, can_dequantize};
use forebay_ops::RowKind;

pub use activations::Activations;
pub(crate) use task::Workspace;
use task::{ChunkRows, Kernel, Plan};
use types::{ActivationForm, activation_form};

use crate::cpu::{Arithmetic, Cpu, Isa};

/// A matrix of weights: `rows` rows of `cols` elements, encoded as `ty`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    /// Encoding of the elements.
    pub ty: TensorType,
    /// Number of rows, which is the number of outputs.
    pub rows: usize,
    /// Number of columns, which is the number of inputs. A row is a whole number of blocks of `ty`.
    pub cols: usize,
    /// Bytes of the rows, one after the other without gaps. They need no alignment.
    pub data: &'a [u8],
}

/// One product: `out[t, r] = sum over c of x[tokens[t], c] * w[r, c]`.
pub struct MatmulJob<'a> {
    pub w: Matrix<'a>,
    /// Activations, prepared for a list of types that includes `w.ty`.
    pub x: &'a Activations,
    /// Rows of `x` to multiply, in the order of the output; `None` for all.
    pub tokens: Option<&'a [u32]>,
    /// Kind of these rows, which selects the kernel.
    pub kind: RowKind,
    /// Output, `[selected tokens, w.rows]`.
    pub out: &'a mut [f32],
}

impl Cpu {
    /// Returns true if [`Cpu::matmul`] accepts weights of this type.
    pub fn supports(ty: TensorType) -> bool {
        can_dequantize(ty)
    }

    /// Computes all jobs in one parallel region.
    ///
    /// # Panics
    /// Panics if a job's type is not supported, its slices do not fit its shape, or its activations
    /// were not prepared for its type.
    pub fn matmul(&self, jobs: &mut [MatmulJob<'_>]) {
        self.matmul_after(&mut || (), jobs);
    }

    /// Does the same as [`Cpu::matmul`], but the calling thread first runs `first` once, while the
    /// other workers have already begun. It is for work that would otherwise delay all of them,
    /// such as submitting reads to the disk.
    ///
    /// # Panics
    /// Panics as [`Cpu::matmul`] does, and if `first` panics.
    pub fn matmul_after(&self, first: &mut dyn FnMut(), jobs: &mut [MatmulJob<'_>]) {
        for job in jobs.iter() {
            let ty = job.w.ty;
            assert!(Cpu::supports(ty), "{ty} weights are not supported");
            assert!(job.x.has(self.form(ty)), "activations were not prepared for {ty} weights");
        }
        self.matmul.run(&self.pool, first, jobs, |ty, kind| self.plan(ty, kind));
    }

    /// Returns the form of the activations that weights of type `ty` are multiplied with.
    fn form(&self, ty: TensorType) -> ActivationForm {
        match self.arithmetic {
            Arithmetic::Exact => ActivationForm::Float,
            Arithmetic::Fast => activation_form(ty),
        }
    }

    /// Chooses the kernel. The choice may depend only on the type and the kind of the rows (see the
    /// module).
    fn plan(&self, ty: TensorType, kind: RowKind) -> Plan {
        let rounded = self.form(ty) != ActivationForm::Float;
        #[cfg(target_arch = "x86_64")]
        if let Some(plan) = match (self.isa, rounded) {
            (Isa::Avx512Vnni, true) => avx512::plan_rounded(ty, kind),
            (Isa::Avx512Vnni, false) => Some(avx512::plan_float(ty, kind)),
            (Isa::Avx2, true) => avx2::plan_rounded(ty, kind),
            (Isa::Avx2, false) => Some(avx2::plan_float(ty, kind)),
            (Isa::Portable, _) => None,
        } {
            return plan;
        }
        let _ = kind;
        let kernel = if rounded { portable_kernel(ty) } else { float::rows_portable };
        Plan { kernel, rows: ChunkRows::Any }
    }
}

fn portable_kernel(ty: TensorType) -> Kernel {
    use portable::{rows32, rows256};
    match ty {
        TensorType::IQ4_XS => rows256::<types::Iq4Xs>,
        _ => types::kernel_by_type!(ty, rows32, rows256).unwrap_or(float::rows_portable),
    }
}
