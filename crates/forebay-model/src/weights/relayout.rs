//! Weights that need a relayout, because Hugging Face folders and GGUF files of older converters hold them in another
//! form than products need.

use forebay_format::{Block, Step, TensorType};

use super::parts::{HeadMatrices, PartMatrix};
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::{Experts, Latent, Naming};

/// Elements of an MXFP4 block, and its bytes without the scale.
const MXFP4_ELEMENTS: usize = 32;
const MXFP4_NIBBLES: usize = 16;

/// Adds both matrix stacks of latent attention, made from `kv_b_proj` `[heads * (plain + value), rank]`, to the dense
/// block.
///
/// # Errors
/// Returns an error if the tensor is missing, has another shape, or has a type that weights cannot have.
pub fn heads(
    tensors: &Tensors<'_>,
    dense: &mut Block,
    name: &str,
    heads: usize,
    latent: &Latent,
) -> Result<(HeadMatrices, HeadMatrices), ModelError> {
    let Latent { rank, plain, value, .. } = *latent;
    let (matrix, extent) = tensors.matrix(name, heads * (plain + value), rank)?;
    let ty = matrix.ty;
    if !Step::divides_heads(ty, rank) {
        return Err(ModelError::TensorType { name: name.into(), found: ty.name() });
    }
    let step = Step::Heads { extent: 0, heads, plain, value, rank, ty };
    let bytes = [0, 1].map(|part| step.part_bytes(part) / heads.max(1));
    let part = dense.push_heads(&[extent], step);
    let matrix = |part, ty, rows, cols| PartMatrix { part, ty, rows, cols };
    let keys = matrix(part, Step::transposed(ty), rank, plain);
    let values = matrix(part + 1, ty, value, rank);
    let stack = |matrix, bytes| HeadMatrices { matrix, bytes, heads };
    Ok((stack(keys, bytes[0]), stack(values, bytes[1])))
}

/// Returns true if the files hold experts as `_blocks` and `_scales`. Only gpt-oss does, and only gpt-oss has expert
/// biases.
pub fn experts_need_relayout(naming: Naming, experts: &Experts) -> bool {
    matches!(naming, Naming::HuggingFace { .. }) && experts.bias
}

/// Returns gate, up and down of every expert, and the experts' blocks. `gate_up` holds rows of gate and up alternately.
///
/// # Errors
/// Returns an error if a tensor is missing or has another shape or type.
pub fn experts(
    tensors: &Tensors<'_>,
    name: &dyn Fn(&str) -> String,
    experts: &Experts,
    hidden: usize,
) -> Result<([PartMatrix; 3], Vec<Block>), ModelError> {
    let Experts { count, width, .. } = *experts;
    if let Some(whole) = tensors.optional(&name("expert_gate_up")) {
        return Err(ModelError::BadValue {
            key: whole.name.clone(),
            value: format!("of type {}", whole.ty),
            expected: "folders of this family are read with experts of MXFP4 alone ('_blocks' and '_scales'); \
                       convert the model to GGUF"
                .into(),
        });
    }
    // Role, rows and columns of each stored matrix. A row has `cols` / 32 MXFP4 blocks.
    let matrices = [("expert_gate_up", 2 * width, hidden), ("expert_down", hidden, width)];
    for (role, _, cols) in matrices {
        if !cols.is_multiple_of(MXFP4_ELEMENTS) {
            return Err(ModelError::BadValue {
                key: format!("columns of {}", name(role)),
                value: cols.to_string(),
                expected: format!("MXFP4 needs a multiple of {MXFP4_ELEMENTS}"),
            });
        }
    }
    let mut stacks = Vec::with_capacity(4);
    for suffix in ["_blocks", "_scales"] {
        for (role, rows, cols) in matrices {
            let mut shape = vec![count, rows, cols / MXFP4_ELEMENTS];
            if suffix == "_blocks" {
                shape.push(MXFP4_NIBBLES);
            }
            stacks.push(tensors.byte_stack(&format!("{}{suffix}", name(role)), &shape)?);
        }
    }
    let step = |blocks: usize, turns: usize| {
        let (_, rows, cols) = matrices[blocks];
        Step::Mxfp4 { blocks, scales: blocks + 2, rows, row_blocks: cols / MXFP4_ELEMENTS, turns }
    };
    let block = |expert: usize| {
        let mut block = Block::default();
        let extents: Vec<_> = stacks.iter().map(|of| of[expert]).collect();
        block.push_relayout(&extents, vec![step(0, 2), step(1, 1)]);
        block
    };
    let matrix = |part, rows, cols| PartMatrix { part, ty: TensorType::MXFP4, rows, cols };
    let parts = [matrix(0, width, hidden), matrix(1, width, hidden), matrix(2, hidden, width)];
    Ok((parts, (0..count).map(block).collect()))
}

/// Returns gate, up and down of every expert, and the experts' blocks, of a folder that holds the transposed matrices of all
/// experts as two tensors: `[experts, hidden, 2 * width]`, whose columns are those of gate and then those of up, and
/// `[experts, width, hidden]`.
///
/// # Errors
/// Returns an error if a tensor is missing or has another shape, or a type whose elements do not stand alone.
pub fn transposed_experts(
    tensors: &Tensors<'_>,
    name: &dyn Fn(&str) -> String,
    experts: &Experts,
    hidden: usize,
) -> Result<([PartMatrix; 3], Vec<Block>), ModelError> {
    let Experts { count, width, .. } = *experts;
    let stack = |role: &str, rows, cols| {
        let name = name(role);
        let (matrix, extents) = tensors.expert_matrices(&|_| name.clone(), count, rows, cols)?;
        match Step::transposes(matrix.ty) {
            true => Ok((matrix.ty, extents)),
            false => Err(ModelError::TensorType { name, found: matrix.ty.name() }),
        }
    };
    let (ty, gate_ups) = stack("expert_gate_up", hidden, 2 * width)?;
    let (down_ty, downs) = stack("expert_down_stack", width, hidden)?;
    let steps = [
        Step::Transposed { extent: 0, rows: hidden, cols: 2 * width, parts: 2, ty },
        Step::Transposed { extent: 1, rows: width, cols: hidden, parts: 1, ty: down_ty },
    ];
    let block = |(gate_up, down)| {
        let mut block = Block::default();
        block.push_relayout(&[gate_up, down], steps.to_vec());
        block
    };
    let part = |part, ty, rows, cols| PartMatrix { part, ty, rows, cols };
    let parts =
        [part(0, ty, width, hidden), part(1, ty, width, hidden), part(2, down_ty, hidden, width)];
    Ok((parts, gate_ups.into_iter().zip(downs).map(block).collect()))
}
