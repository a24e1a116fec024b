//! Codes of quantised safetensors files, each block with its scale. No file holds these blocks: a
//! [`crate::Relayout`] makes them from tensors of codes and tensors of scales.
//!
//! | type | elements | bytes, in order |
//! |---|---|---|
//! | F8_B128, F8_B32 | 128, 32 | a byte E4M3 for each element, F32 scale |
//! | NVFP4_F32 | 64 | F32 factor, then a block of NVFP4: scales are E4M3 with their sign and with NaN |
//! | I4_BF16 | 32 | BF16 scale, 16 nibble bytes: byte `i` has elements `i` (low) and `i + 16`; value `scale * (code - 8)` |
//! | I4_Z32, I4_Z128 | 32, 128 | a word, then I4_BF16's nibble bytes of every 32 elements; value `scale * (code - zero)` |
//!
//! The word of `I4_Z32` and `I4_Z128` is an F32 scale whose lowest five bits are the zero point. Files have
//! scales of F16 and BF16, whose widened numbers need none of these bits.

use super::u32_at;

/// Bits of the zero point in the word of `I4_Z32` and `I4_Z128`.
pub const ZERO_BITS: u32 = 31;

/// Zero point of symmetric 4-bit integers.
const MIDDLE: i32 = 8;

/// E4M3 of every code. The codes with all bits below the sign set are NaN.
pub const E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = match exponent {
            0 => mantissa as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        let magnitude = if code & 0x7f == 0x7f { f32::NAN } else { magnitude };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
};

/// Values of E2M1.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

pub(super) fn f8<const N: usize>(block: &[u8], out: &mut [f32]) {
    let scale = f32::from_bits(u32_at(block, N));
    for (out, code) in out.iter_mut().zip(&block[..N]) {
        *out = E4M3[usize::from(*code)] * scale;
    }
}

pub(super) fn nvfp4(block: &[u8], out: &mut [f32]) {
    let factor = f32::from_bits(u32_at(block, 0));
    let groups = block[8..].chunks_exact(8).zip(out.chunks_exact_mut(16));
    for (scale, (nibbles, out)) in block[4..8].iter().zip(groups) {
        let scale = E4M3[usize::from(*scale)] * factor;
        for (i, byte) in nibbles.iter().enumerate() {
            out[i] = E2M1[usize::from(byte & 15)] * scale;
            out[i + 8] = E2M1[usize::from(byte >> 4)] * scale;
        }
    }
}

/// Decodes 16 bytes of nibbles.
fn int4(nibbles: &[u8], scale: f32, zero: i32, out: &mut [f32]) {
    for (i, byte) in nibbles.iter().enumerate() {
        out[i] = scale * (i32::from(byte & 15) - zero) as f32;
        out[i + 16] = scale * (i32::from(byte >> 4) - zero) as f32;
    }
}

pub(super) fn int4_bf16(block: &[u8], out: &mut [f32]) {
    let scale = half::bf16::from_le_bytes([block[0], block[1]]).to_f32();
    int4(&block[2..], scale, MIDDLE, out);
}

pub(super) fn int4_zero(block: &[u8], out: &mut [f32]) {
    let word = u32_at(block, 0);
    let (scale, zero) = (f32::from_bits(word & !ZERO_BITS), (word & ZERO_BITS) as i32);
    for (nibbles, out) in block[4..].chunks_exact(16).zip(out.chunks_exact_mut(32)) {
        int4(nibbles, scale, zero, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TensorType, dequantize};

    /// Computes E4M3 with the published formula (arXiv 2209.05433, section 3).
    fn e4m3(code: u8) -> f32 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
        let magnitude = match (code & 0x7f, exponent) {
            (0x7f, _) => f32::NAN,
            (_, 0) => mantissa / 512.0,
            _ => (8.0 + mantissa) / 8.0 * f32::powi(2.0, exponent - 7),
        };
        if code >> 7 == 1 { -magnitude } else { magnitude }
    }

    #[test]
    fn the_table_of_e4m3_and_plain_elements_follow_the_formula() {
        for code in 0..=255 {
            let mut out = [0.0];
            dequantize(TensorType::F8_E4M3, &[code], &mut out).unwrap();
            assert_eq!(E4M3[usize::from(code)].to_bits(), e4m3(code).to_bits(), "{code}");
            assert_eq!(out[0].to_bits(), e4m3(code).to_bits(), "{code}");
        }
    }

    #[test]
    fn blocks_have_their_scales() {
        let mut block = vec![0x38; 32];
        block.extend(0.1_f32.to_le_bytes());
        let mut out = [0.0; 32];
        dequantize(TensorType::F8_B32, &block, &mut out).unwrap();
        assert_eq!(out, [0.1; 32]);
        // A scale of 0.75 and a zero point of 16, and codes 0 and 15.
        let mut block = (0.75_f32.to_bits() | 16).to_le_bytes().to_vec();
        block.extend([0xf0; 16]);
        dequantize(TensorType::I4_Z32, &block, &mut out).unwrap();
        assert_eq!((out[0], out[15], out[16], out[31]), (-12.0, -12.0, -0.75, -0.75));
        let mut block = half::bf16::from_f32(0.5).to_le_bytes().to_vec();
        block.extend([0x91; 16]);
        dequantize(TensorType::I4_BF16, &block, &mut out).unwrap();
        assert_eq!((out[0], out[16]), (-3.5, 0.5));
        // Factor 3, scales -1, 1, 1 and 1; codes 1.5 and -6.
        let mut block = 3.0_f32.to_le_bytes().to_vec();
        block.extend([0xb8, 0x38, 0x38, 0x38]);
        block.extend([0xf3; 32]);
        let mut out = [0.0; 64];
        dequantize(TensorType::NVFP4_F32, &block, &mut out).unwrap();
        assert_eq!((out[0], out[8], out[16], out[24]), (-4.5, 18.0, 4.5, -18.0));
    }
}
