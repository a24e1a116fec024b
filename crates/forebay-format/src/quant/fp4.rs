//! Four-bit floats (E2M1) with a shared scale: MXFP4, NVFP4.
//!
//! An element has a sign bit and a magnitude of 0, 0.5, 1, 1.5, 2, 3, 4 or 6 (OCP Microscaling
//! Formats 1.0, section 5.3.3). Minus zero decodes to zero.
//!
//! | type | elements | bytes, in order |
//! |---|---|---|
//! | MXFP4 | 32 | exponent `e`, 16 nibble bytes: byte `i` has elements `i` (low) and `i + 16`; scale `2^(e - 127)` |
//! | NVFP4 | 64 | 4 scales E4M3, 4 times 8 nibble bytes: of 16 elements byte `i` has `i` (low) and `i + 8` |

/// Signed values, doubled so that they are whole numbers. The scales are halved in return.
const DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// Decodes low nibbles into the first half of `out` and high nibbles into the second.
fn decode_group(half_scale: f32, nibbles: &[u8], out: &mut [f32]) {
    for (i, byte) in nibbles.iter().enumerate() {
        out[i] = half_scale * DOUBLED[usize::from(byte & 15)];
        out[i + nibbles.len()] = half_scale * DOUBLED[usize::from(byte >> 4)];
    }
}

/// Returns `2^(e - 128)`, half of the E8M0 scale `e`. The two lowest results are subnormal.
pub(crate) fn half_of_e8m0(e: u8) -> f32 {
    let bits = if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 };
    f32::from_bits(bits)
}

/// Returns half of an E4M3 scale (bias 7) without its sign. The NaN code 0x7f decodes to 0.
fn half_of_e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    match (bits, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => mantissa / 1024.0,
        _ => (8.0 + mantissa) / 16.0 * f32::powi(2.0, exponent - 7),
    }
}

pub(super) fn mxfp4(block: &[u8], out: &mut [f32]) {
    decode_group(half_of_e8m0(block[0]), &block[1..], out);
}

pub(super) fn nvfp4(block: &[u8], out: &mut [f32]) {
    let groups = block[4..].chunks_exact(8).zip(out.chunks_exact_mut(16));
    for (scale, (nibbles, out)) in block[..4].iter().zip(groups) {
        decode_group(half_of_e4m3(*scale), nibbles, out);
    }
}
