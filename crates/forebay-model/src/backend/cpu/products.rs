//! Products of leased matrices, and operations on their rows.

use forebay_compute::{Activations, Cpu, MatmulJob, Matrix, NormForm};
use forebay_format::TensorType;
use forebay_ops::RowKind;
use forebay_stream::{Lease, Residency};

use crate::ModelError;
use crate::backend::Step;
use crate::weights::{PartMatrix, ResidentMatrix};

/// Returns part `part` of a leased block as a matrix.
pub(in crate::backend) fn matrix<'lease>(
    residency: &Residency,
    lease: &'lease Lease,
    part: &PartMatrix,
) -> Matrix<'lease> {
    let data = residency.bytes(lease, part.part);
    Matrix { ty: part.ty, rows: part.rows, cols: part.cols, data }
}

/// Rows of activations by their kind.
#[derive(Clone, Copy)]
pub(super) struct RowsByKind<'a> {
    pub decode: &'a [u32],
    pub prompt: &'a [u32],
}

/// Returns the products of `w` with the decode rows and with the prompt rows. `out` is `[rows, w.rows]`, decode rows first.
pub(super) fn both_kinds<'a>(
    w: Matrix<'a>,
    x: &'a Activations,
    rows: RowsByKind<'a>,
    out: &'a mut [f32],
) -> [MatmulJob<'a>; 2] {
    let (decode, prompt) = out.split_at_mut(rows.decode.len() * w.rows);
    let job = |tokens, kind, out| MatmulJob { w, x, tokens: Some(tokens), kind, out };
    [job(rows.decode, RowKind::Decode, decode), job(rows.prompt, RowKind::Prompt, prompt)]
}

/// Computes `jobs`. While the other threads start on them, the calling thread submits queued reads to the disk and
/// takes in completed ones.
pub(in crate::backend) fn matmul_beside_reads(
    cpu: &Cpu,
    residency: &mut Residency,
    jobs: &mut [MatmulJob<'_>],
) -> Result<(), ModelError> {
    let mut progress = Ok(());
    cpu.matmul_after(&mut || progress = residency.progress(), jobs);
    Ok(progress?)
}

/// Computes the product of one matrix with rows of `x`, as [`matmul_beside_reads`] does.
pub(super) fn multiply(
    cpu: &Cpu,
    residency: &mut Residency,
    lease: &Lease,
    part: &PartMatrix,
    x: &Activations,
    rows: RowsByKind<'_>,
    out: &mut [f32],
) -> Result<(), ModelError> {
    let w = matrix(residency, lease, part);
    matmul_beside_reads(cpu, residency, &mut both_kinds(w, x, rows, out))
}

/// Returns an empty vector with the old one's memory. `A` and `B` are one type with different lifetimes. The step runs for
/// every layer of every token and must not allocate.
pub(in crate::backend) fn recycle<A, B>(mut values: Vec<A>) -> Vec<B> {
    const { assert!(size_of::<A>() == size_of::<B>() && align_of::<A>() == align_of::<B>()) };
    values.clear();
    values.into_iter().map(|_| unreachable!("the vector was cleared")).collect()
}

pub(super) fn add_bias(cpu: &Cpu, rows: &mut [f32], bias: Option<&[f32]>) {
    if let Some(bias) = bias {
        cpu.add_bias_rows(rows, bias);
    }
}

/// Normalises every run of `weight.len()` values: a head, or a whole projection.
pub(super) fn norm_in_place(cpu: &Cpu, values: &mut [f32], weight: Option<&[f32]>, epsilon: f32) {
    if let Some(weight) = weight {
        cpu.rms_norm_in_place(values, weight, epsilon);
    }
}

/// Writes the normed rows of `x` to `out`, or the rows themselves if there is no weight.
pub(super) fn norm_or_copy(
    cpu: &Cpu,
    form: NormForm,
    x: &[f32],
    weight: Option<&[f32]>,
    epsilon: f32,
    out: &mut [f32],
) {
    match weight {
        Some(weight) => cpu.norm(form, x, weight, epsilon, out),
        None => out.copy_from_slice(x),
    }
}

/// Returns a resident matrix for products.
pub(super) fn resident(of: &ResidentMatrix) -> Matrix<'_> {
    Matrix { ty: TensorType::F32, rows: of.rows, cols: of.cols, data: &of.data }
}

/// The numbers 0, 1, 2 ... of the rows of a pass.
pub struct RowNumbers(pub(super) Vec<u32>);

impl RowNumbers {
    /// Returns the rows of a pass by their kind.
    pub fn of(&self, step: &Step<'_>) -> RowsByKind<'_> {
        self.split(step.decode, step.count)
    }

    /// Returns the first `count` rows, of which the first `decode` are decode rows.
    pub fn split(&self, decode: usize, count: usize) -> RowsByKind<'_> {
        let (decode, prompt) = self.0[..count].split_at(decode);
        RowsByKind { decode, prompt }
    }
}
