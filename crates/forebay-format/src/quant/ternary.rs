//! Elements that are -1, 0 or 1 times one scale: TQ1_0, TQ2_0. Blocks of 256; value = `d * (q - 1)`.
//!
//! TQ2_0: 64 bytes, then `d` f16. Of each 32 bytes, element `32*k + l` is the pair of bits `k` of
//! byte `l`.
//!
//! TQ1_0: 48 bytes of 5 elements, 4 bytes of 4 elements, then `d` f16. A byte holds digits in base
//! 3 as a fraction of 256: multiply by `3^k` modulo 256, then the digit is three times that,
//! shifted right by 8. Digit `k` of byte `l` is element `32*k + l` in the first 32 bytes; then the
//! same with 16 bytes (from element 160), then with 4 (from element 240).

use super::half;

pub(super) fn tq2_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 64);
    for (bytes, out) in block[..64].chunks_exact(32).zip(out.chunks_exact_mut(128)) {
        for (k, out) in out.chunks_exact_mut(32).enumerate() {
            for (value, byte) in out.iter_mut().zip(bytes) {
                *value = (f32::from(byte >> (2 * k) & 3) - 1.0) * d;
            }
        }
    }
}

pub(super) fn tq1_0(block: &[u8], out: &mut [f32]) {
    let d = half(block, 52);
    let (first, rest) = out.split_at_mut(160);
    let (second, third) = rest.split_at_mut(80);
    digits(&block[..32], d, first);
    digits(&block[32..48], d, second);
    digits(&block[48..52], d, third);
}

/// All first digits of `bytes`, then all second ones, and so on until `out` is full.
fn digits(bytes: &[u8], d: f32, out: &mut [f32]) {
    let mut power = 1u8;
    for out in out.chunks_exact_mut(bytes.len()) {
        for (value, byte) in out.iter_mut().zip(bytes) {
            let digit = (u16::from(byte.wrapping_mul(power)) * 3) >> 8;
            *value = (f32::from(digit) - 1.0) * d;
        }
        power = power.wrapping_mul(3);
    }
}
