//! Elements that stand alone: little-endian floats.

use half::bf16;

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

/// Rounded to the nearest f32.
pub(super) fn f64(block: &[u8], out: &mut [f32]) {
    let bits = u64::from(u32_at(block, 0)) | u64::from(u32_at(block, 4)) << 32;
    out[0] = f64::from_bits(bits) as f32;
}
