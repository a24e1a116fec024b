//! Exact values of quantised blocks: the reference for every faster kernel.
//!
//! One file per family describes the layout of its blocks and decodes one block at a time. All
//! 16-bit scales are little-endian IEEE half-precision floats. Results equal ggml's `to_float` bit
//! for bit.

pub mod compact;
pub mod fp4;
mod grids;
pub mod iq1;
pub mod iq2;
pub mod iq3;
pub mod iq4;
pub mod k_quants;
pub mod legacy;
pub mod low_bits;
pub mod plain;
pub mod scaled;
pub mod ternary;

use crate::{FormatError, TensorType};

/// Decodes one block (`block_bytes`) into its values (`block_elements`).
type DecodeBlock = fn(&[u8], &mut [f32]);

/// Decodes `data`, whole blocks of type `ty`, into `out`.
///
/// # Errors
/// Returns [`FormatError::NotDequantizable`] for integers, bools and bare exponents, which are not
/// weights. Returns [`FormatError::DequantizeLength`] if `data` does not hold exactly as many
/// elements as `out`.
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

/// Returns true if [`dequantize`] supports the type.
pub fn can_dequantize(ty: TensorType) -> bool {
    decoder(ty).is_some()
}

fn decoder(ty: TensorType) -> Option<DecodeBlock> {
    Some(match ty {
        TensorType::F64 => plain::f64,
        TensorType::F32 => plain::f32,
        TensorType::F16 => plain::f16,
        TensorType::BF16 => plain::bf16,
        TensorType::F8_E4M3 => plain::f8_e4m3,
        TensorType::F8_E5M2 => plain::f8_e5m2,
        TensorType::Q4_0 => legacy::q4_0,
        TensorType::Q4_1 => legacy::q4_1,
        TensorType::Q5_0 => legacy::q5_0,
        TensorType::Q5_1 => legacy::q5_1,
        TensorType::Q8_0 => legacy::q8_0,
        TensorType::Q2_K => k_quants::q2_k,
        TensorType::Q3_K => k_quants::q3_k,
        TensorType::Q4_K => k_quants::q4_k,
        TensorType::Q5_K => k_quants::q5_k,
        TensorType::Q6_K => k_quants::q6_k,
        TensorType::IQ4_NL => iq4::iq4_nl,
        TensorType::IQ4_XS => iq4::iq4_xs,
        TensorType::IQ2_XXS => iq2::iq2_xxs,
        TensorType::IQ2_XS => iq2::iq2_xs,
        TensorType::IQ2_S => iq2::iq2_s,
        TensorType::IQ3_XXS => iq3::iq3_xxs,
        TensorType::IQ3_S => iq3::iq3_s,
        TensorType::IQ1_S => iq1::iq1_s,
        TensorType::IQ1_M => iq1::iq1_m,
        TensorType::TQ1_0 => ternary::tq1_0,
        TensorType::TQ2_0 => ternary::tq2_0,
        TensorType::MXFP4 => fp4::mxfp4,
        TensorType::NVFP4 => fp4::nvfp4,
        TensorType::Q1_0 => low_bits::q1_0,
        TensorType::Q2_0 => low_bits::q2_0,
        TensorType::BF16_C2048 => compact::c2048,
        TensorType::BF16_C256 => compact::c256,
        TensorType::F8_B128 => scaled::f8::<128>,
        TensorType::F8_B32 => scaled::f8::<32>,
        TensorType::NVFP4_F32 => scaled::nvfp4,
        TensorType::I4_BF16 => scaled::int4_bf16,
        TensorType::I4_Z32 | TensorType::I4_Z128 => scaled::int4_zero,
        TensorType::F8_E8M0
        | TensorType::I8
        | TensorType::I16
        | TensorType::I32
        | TensorType::I64
        | TensorType::U8
        | TensorType::U16
        | TensorType::U32
        | TensorType::U64
        | TensorType::Bool => return None,
    })
}

/// Returns the f16 at byte `at` of a block as an f32.
fn half(block: &[u8], at: usize) -> f32 {
    half::f16::from_bits(u16_at(block, at)).to_f32()
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
