//! One and two bits per element with one scale: Q1_0, Q2_0. `d` is f16. Elements start at the low
//! bits.
//!
//! | type | elements | bytes, in order | value |
//! |---|---|---|---|
//! | Q1_0 | 128 | `d`, 16 bytes of 8 elements | `d` where the bit is set, else `-d` |
//! | Q2_0 | 64 | `d`, 16 bytes of 4 elements | `d * (q - 1)`: -1, 0, 1 or 2 times `d` |

use super::half;

pub(super) fn q1_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (byte, out) in block[2..].iter().zip(out.chunks_exact_mut(8)) {
        for (j, value) in out.iter_mut().enumerate() {
            *value = if byte >> j & 1 == 1 { d } else { -d };
        }
    }
}

pub(super) fn q2_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (byte, out) in block[2..].iter().zip(out.chunks_exact_mut(4)) {
        for (j, value) in out.iter_mut().enumerate() {
            *value = (f32::from(byte >> (2 * j) & 3) - 1.0) * d;
        }
    }
}
