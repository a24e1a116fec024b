//! Less than two bits per element through a codebook of -1, 0 and 1: IQ1_S, IQ1_M.
//!
//! A run of 8 elements is a point of a grid with 2048 points. The whole run is shifted by `delta`,
//! which is 1/8 or -1/8. The value is `scale * (point + delta)` with `scale = d * (2 * sc + 1)`,
//! where `sc` has 3 bits.
//!
//! | type | bytes, in order |
//! |---|---|
//! | IQ1_S | `d` f16; 32 low index bytes; per group of 32 a u16: four times 3 high index bits, `sc`, and bit 15: delta is negative |
//! | IQ1_M | 32 low index bytes; 16 bytes with a nibble per run (even run low): 3 high index bits and bit 3: delta is negative; four u16: each four times 3 bits `sc` (one per 16 elements), and on top 4 bits of `d`, the lowest in the first |

use super::grids::{IQ1, IQ1_LEVELS};
use super::{half, u16_at};

fn decode_run(scale: f32, index: usize, negative: bool, out: &mut [f32]) {
    let delta = if negative { -0.125 } else { 0.125 };
    let point = IQ1[index & 2047];
    for (j, value) in out.iter_mut().enumerate() {
        *value = scale * (IQ1_LEVELS[usize::from(point >> (2 * j) & 3)] + delta);
    }
}

fn scale_of(d: f32, sc: u16) -> f32 {
    d * f32::from(2 * (sc & 7) + 1)
}

pub(super) fn iq1_s(block: &[u8], out: &mut [f32]) {
    let (d, low) = (half(block, 0), &block[2..34]);
    for (run, out) in out.chunks_exact_mut(8).enumerate() {
        let word = u16_at(block, 34 + run / 4 * 2);
        let high = usize::from(word >> (run % 4 * 3) & 7);
        let index = high << 8 | usize::from(low[run]);
        decode_run(scale_of(d, word >> 12), index, word >> 15 == 1, out);
    }
}

pub(super) fn iq1_m(block: &[u8], out: &mut [f32]) {
    let (low, high) = (&block[..32], &block[32..48]);
    let scales = |at: usize| u16_at(block, 48 + 2 * at);
    let bits = (0..4).fold(0, |bits, at| bits | scales(at) >> 12 << (4 * at));
    let d = half::f16::from_bits(bits).to_f32();
    for (run, out) in out.chunks_exact_mut(8).enumerate() {
        let nibble = high[run / 2] >> (run % 2 * 4);
        let index = usize::from(nibble & 7) << 8 | usize::from(low[run]);
        let scale = scale_of(d, scales(run / 8) >> (run / 2 % 4 * 3));
        decode_run(scale, index, nibble & 8 != 0, out);
    }
}
