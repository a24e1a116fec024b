//! Blocks of 32 with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! `d` is the scale and `m` the smallest value. Byte `i` of the nibbles holds element `i` in its
//! low half and element `i + 16` in its high half. `qh` is a little-endian u32 whose bit `i` is the
//! fifth bit of element `i`.
//!
//! | type | bytes | value |
//! |---|---|---|
//! | Q4_0 | `d` f16, 16 nibble bytes | `d * (q - 8)` |
//! | Q4_1 | `d` f16, `m` f16, 16 nibble bytes | `d * q + m` |
//! | Q5_0 | `d` f16, `qh`, 16 nibble bytes | `d * (q - 16)` |
//! | Q5_1 | `d` f16, `m` f16, `qh`, 16 nibble bytes | `d * q + m` |
//! | Q8_0 | `d` f16, 32 bytes i8 | `d * q` |

use super::{half, u32_at};

/// Sets each of the 32 elements to `value` of its 4 low bits and its number.
fn nibbles(qs: &[u8], out: &mut [f32], value: impl Fn(u8, usize) -> f32) {
    for (i, byte) in qs.iter().enumerate() {
        out[i] = value(byte & 15, i);
        out[i + 16] = value(byte >> 4, i + 16);
    }
}

/// Returns the fifth bit of element `i`, shifted above the nibble.
fn fifth(qh: u32, i: usize) -> u8 {
    ((qh >> i & 1) << 4) as u8
}

pub(super) fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    nibbles(&block[2..], out, |q, _| d * (f32::from(q) - 8.0));
}

pub(super) fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    nibbles(&block[4..], out, |q, _| d * f32::from(q) + m);
}

pub(super) fn q5_0(block: &[u8], out: &mut [f32]) {
    let (d, qh) = (half(block, 0), u32_at(block, 2));
    nibbles(&block[6..], out, |q, i| d * (f32::from(q | fifth(qh, i)) - 16.0));
}

pub(super) fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m, qh) = (half(block, 0), half(block, 2), u32_at(block, 4));
    nibbles(&block[8..], out, |q, i| d * f32::from(q | fifth(qh, i)) + m);
}

pub(super) fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (value, q) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(*q as i8);
    }
}
