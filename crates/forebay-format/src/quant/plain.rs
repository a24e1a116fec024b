//! Plain floating-point elements, little-endian, one per block.

use half::bf16;

use super::scaled::E4M3;
use super::{half, u16_at, u32_at};

pub(super) fn f32(block: &[u8], out: &mut [f32]) {
    out[0] = f32::from_bits(u32_at(block, 0));
}

pub(super) fn f16(block: &[u8], out: &mut [f32]) {
    out[0] = half(block, 0);
}

pub(super) fn bf16(block: &[u8], out: &mut [f32]) {
    out[0] = bf16::from_bits(u16_at(block, 0)).to_f32();
}

/// Rounds the value to the nearest f32.
pub(super) fn f64(block: &[u8], out: &mut [f32]) {
    let bits = u64::from(u32_at(block, 0)) | u64::from(u32_at(block, 4)) << 32;
    out[0] = f64::from_bits(bits) as f32;
}

/// Decodes E4M3 with bias 7. There are no infinities, and the code with all bits below the sign set
/// is NaN (arXiv 2209.05433, section 3).
pub(super) fn f8_e4m3(block: &[u8], out: &mut [f32]) {
    out[0] = E4M3[usize::from(block[0])];
}

/// Decodes E5M2, which is the upper byte of an f16.
pub(super) fn f8_e5m2(block: &[u8], out: &mut [f32]) {
    out[0] = half(&[0, block[0]], 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(decode: fn(&[u8], &mut [f32]), byte: u8) -> f32 {
        let mut out = [0.0];
        decode(&[byte], &mut out);
        out[0]
    }

    #[test]
    fn f8_values() {
        // The codes are the largest value, the smallest subnormal, one, and minus one and a half.
        assert_eq!(decode(f8_e4m3, 0x7e), 448.0);
        assert_eq!(decode(f8_e4m3, 0x01), 0.001_953_125);
        assert_eq!(decode(f8_e4m3, 0x38), 1.0);
        assert_eq!(decode(f8_e4m3, 0xbc), -1.5);
        assert!(decode(f8_e4m3, 0x7f).is_nan());
        assert_eq!(decode(f8_e5m2, 0x7b), 57_344.0);
        assert_eq!(decode(f8_e5m2, 0x3c), 1.0);
    }
}
