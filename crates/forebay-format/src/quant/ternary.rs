//! Elements that are -1, 0 or 1 times one scale: TQ1_0, TQ2_0. Blocks have 256 elements, and the
//! value is `d * (q - 1)`.
//!
//! TQ2_0 stores 64 bytes, then `d` as f16. In each group of 32 bytes, element `32*k + l` is bit
//! pair `k` of byte `l`.
//!
//! TQ1_0 stores 48 bytes of 5 elements, 4 bytes of 4 elements, then `d` as f16. A byte holds base-3
//! digits as a fraction of 256. To get digit `k`, multiply the byte by `3^k` modulo 256, multiply
//! that by three, and shift right by 8. In the first 32 bytes, digit `k` of byte `l` is element
//! `32*k + l`. The next 16 bytes (from element 160) and the last 4 (from element 240) follow the
//! same pattern.

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

/// Decodes all first digits of `bytes`, then all second ones, and so on until `out` is full.
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
