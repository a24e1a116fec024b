//! Exact values of quantised blocks: the reference that every faster kernel is held against.
//!
//! One file per family describes the layout of its blocks and decodes one block at a time. All
//! scales of 16 bits are little-endian IEEE halves. Results equal ggml's `to_float` bit for bit.

mod legacy;
mod plain;

use crate::{FormatError, TensorType};

/// Decodes one block (`block_bytes`) into its values (`block_elements`).
type DecodeBlock = fn(&[u8], &mut [f32]);

/// Decodes `data`, whole blocks of type `ty`, into `out`.
///
/// # Errors
/// [`FormatError::NotDequantizable`] for types that are not numbers of their own (integers wider
/// than f32 can hold, bools, bare exponents); [`FormatError::DequantizeLength`] if `data` is not
/// exactly as many blocks as `out` has room for.
pub fn dequantize(ty: TensorType, data: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    let decode = decoder(ty).ok_or(FormatError::NotDequantizable { ty })?;
    if ty.row_bytes(out.len() as u64) != Some(data.len() as u64) {
        let (data_bytes, elements) = (data.len(), out.len());
        return Err(FormatError::DequantizeLength { ty, data_bytes, elements });
    }
    let blocks = data.chunks_exact(ty.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(ty.block_elements())) {
        decode(block, out);
    }
    Ok(())
}

/// Whether [`dequantize`] knows the type.
pub fn can_dequantize(ty: TensorType) -> bool {
    decoder(ty).is_some()
}

fn decoder(ty: TensorType) -> Option<DecodeBlock> {
    Some(match ty {
        TensorType::F64 => plain::f64,
        TensorType::F32 => plain::f32,
        TensorType::F16 => plain::f16,
        TensorType::BF16 => plain::bf16,
        TensorType::Q4_0 => legacy::q4_0,
        TensorType::Q4_1 => legacy::q4_1,
        TensorType::Q5_0 => legacy::q5_0,
        TensorType::Q5_1 => legacy::q5_1,
        TensorType::Q8_0 => legacy::q8_0,
        _ => return None,
    })
}

/// The f16 at byte `at` of a block, as f32.
fn half(block: &[u8], at: usize) -> f32 {
    half::f16::from_bits(u16_at(block, at)).to_f32()
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
