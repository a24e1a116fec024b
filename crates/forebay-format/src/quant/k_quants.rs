//! Super-blocks of 256 with quantised scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
//!
//! A super-block is cut into sub-blocks of 16 (Q2_K, Q3_K, Q6_K) or 32 (Q4_K, Q5_K) elements.
//! `d` and `dmin` are f16. With sub-block `s`, its scale `sc` and its minimum `mn`:
//!
//! | type | bytes, in order | value |
//! |---|---|---|
//! | Q2_K | `scales` 16 (low nibble `sc`, high `mn`), `qs` 64, `d`, `dmin` | `d*sc * q - dmin*mn` |
//! | Q3_K | `hmask` 32, `qs` 64, `scales` 12, `d` | `d*(sc - 32) * (q - 4)` |
//! | Q4_K | `d`, `dmin`, `scales` 12, `qs` 128 | `d*sc * q - dmin*mn` |
//! | Q5_K | `d`, `dmin`, `scales` 12, `qh` 32, `qs` 128 | `d*sc * q - dmin*mn` |
//! | Q6_K | `ql` 128, `qh` 64, `scales` 16 (i8), `d` | `d*sc * (q - 32)` |
//!
//! Two bits per element (`qs` of Q2_K and Q3_K, `qh` of Q6_K): element `128*n + 32*j + l` is in
//! byte `32*n + l`, bits `2*j` and `2*j + 1`.
//!
//! One bit per element (`hmask` of Q3_K, `qh` of Q5_K): element `32*j + l` is bit `j` of byte `l`.
//! The bit is worth 4 in Q3_K and 16 in Q5_K.
//!
//! Four bits per element of Q4_K and Q5_K: sub-blocks `2*p` and `2*p + 1` are the low and high
//! nibbles of the 32 bytes from `32*p`. In Q6_K, 128 elements share 64 bytes: the first 64 elements
//! are the low nibbles, the other 64 the high nibbles.
//!
//! Scales of 6 bits are described at `scale_q3` and `scale_and_minimum`.

use super::half;

/// Returns the two-bit fields of sub-block `s` (16 elements) from `bytes`.
fn pairs(bytes: &[u8], s: usize) -> impl Iterator<Item = u8> {
    let (n, shift, first) = (s / 8, s / 2 % 4 * 2, s % 2 * 16);
    bytes[32 * n + first..][..16].iter().map(move |byte| byte >> shift & 3)
}

pub(super) fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, qs) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half(block, 80), half(block, 82));
    for (s, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[s] & 15);
        let minimum = dmin * f32::from(scales[s] >> 4);
        for (value, q) in out.iter_mut().zip(pairs(qs, s)) {
            *value = scale * f32::from(q) - minimum;
        }
    }
}

/// Returns scale `s` of the 16 that Q3_K stores in 12 bytes. The first 8 bytes hold the low four
/// bits, scales 0-7 in the low nibbles. The last 4 bytes hold the high two bits, those of scale `s`
/// in byte `s % 4`.
fn scale_q3(scales: &[u8], s: usize) -> u8 {
    let low = scales[s % 8] >> (s / 8 * 4) & 15;
    let high = scales[8 + s % 4] >> (s / 4 * 2) & 3;
    high << 4 | low
}

pub(super) fn q3_k(block: &[u8], out: &mut [f32]) {
    let (hmask, qs, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half(block, 108);
    for (s, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * (f32::from(scale_q3(scales, s)) - 32.0);
        let high = hmask[s % 2 * 16..].iter().map(|byte| (byte >> (s / 2) & 1) << 2);
        for ((value, low), high) in out.iter_mut().zip(pairs(qs, s)).zip(high) {
            *value = scale * (f32::from(high | low) - 4.0);
        }
    }
}

/// Returns scale and minimum `s` of the 8 that Q4_K and Q5_K store in 12 bytes. The first four are
/// the low six bits of bytes `s` and `s + 4`. The low four bits of the others share byte `s + 4`,
/// and their high two bits are on top of bytes `s - 4` and `s`.
fn scale_and_minimum(scales: &[u8], s: usize) -> (f32, f32) {
    let (scale, minimum) = if s < 4 {
        (scales[s] & 63, scales[s + 4] & 63)
    } else {
        let (low, high) = (scales[s + 4] & 15, scales[s + 4] >> 4);
        (scales[s - 4] >> 6 << 4 | low, scales[s] >> 6 << 4 | high)
    };
    (f32::from(scale), f32::from(minimum))
}

/// Returns the nibbles of sub-block `s` (32 elements) from 128 bytes.
fn nibbles(qs: &[u8], s: usize) -> impl Iterator<Item = u8> {
    let shift = s % 2 * 4;
    qs[s / 2 * 32..][..32].iter().map(move |byte| byte >> shift & 15)
}

pub(super) fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin, scales, qs) = (half(block, 0), half(block, 2), &block[4..16], &block[16..]);
    for (s, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(scales, s);
        let (scale, minimum) = (d * scale, dmin * minimum);
        for (value, q) in out.iter_mut().zip(nibbles(qs, s)) {
            *value = scale * f32::from(q) - minimum;
        }
    }
}

pub(super) fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin, scales) = (half(block, 0), half(block, 2), &block[4..16]);
    let (qh, qs) = (&block[16..48], &block[48..]);
    for (s, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, minimum) = scale_and_minimum(scales, s);
        let (scale, minimum) = (d * scale, dmin * minimum);
        let high = qh.iter().map(|byte| (byte >> s & 1) << 4);
        for ((value, low), high) in out.iter_mut().zip(nibbles(qs, s)).zip(high) {
            *value = scale * f32::from(high | low) - minimum;
        }
    }
}

pub(super) fn q6_k(block: &[u8], out: &mut [f32]) {
    let (ql, qh, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half(block, 208);
    for (s, out) in out.chunks_exact_mut(16).enumerate() {
        let scale = d * f32::from(scales[s] as i8);
        let (n, shift, first) = (s / 8, s / 4 % 2 * 4, s % 4 * 16);
        let low = ql[64 * n + first..].iter().map(|byte| byte >> shift & 15);
        for ((value, low), high) in out.iter_mut().zip(low).zip(pairs(qh, s)) {
            *value = scale * (f32::from(high << 4 | low) - 32.0);
        }
    }
}
