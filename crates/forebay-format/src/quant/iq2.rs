//! Two bits per element through codebooks: IQ2_XXS, IQ2_XS, IQ2_S.
//!
//! A block of 256 elements is cut into 8 groups of 32, and a group into 4 runs of 8. A run is a
//! point of the type's grid with 8 signs. Bit `j` of a sign byte negates element `j`. Where only 7
//! sign bits are stored, the eighth makes the number of set bits even. `d` is f16. A scale `sc` of
//! 4 bits means `d * (0.5 + sc) / 4`.
//!
//! | type | bytes, in order |
//! |---|---|
//! | IQ2_XXS | `d`; per group 4 index bytes and a u32: four times 7 signs from the low bits, `sc` on top |
//! | IQ2_XS | `d`; per run a u16: 9 bits index, 7 signs; per group a byte with `sc` of runs 0-1 (low nibble) and 2-3 |
//! | IQ2_S | `d`; per run the index's low byte; per run a sign byte; per group a byte with the indices' bits 8-9 (run 0 lowest); scales as in IQ2_XS |

use super::grids::{IQ2_LEVELS, IQ2_S, IQ2_XS, IQ2_XXS};
use super::{half, u16_at, u32_at};

/// Returns the seven stored signs and the eighth that their parity implies.
pub(super) fn signs_of(stored: u32) -> u8 {
    let stored = (stored & 127) as u8;
    stored | ((stored.count_ones() as u8) & 1) << 7
}

/// Returns `magnitude`, negated if bit `j` of `signs` is set.
pub(super) fn signed(magnitude: f32, signs: u8, j: usize) -> f32 {
    if signs >> j & 1 == 1 { -magnitude } else { magnitude }
}

fn scale_of(d: f32, sc: u8) -> f32 {
    d * (0.5 + f32::from(sc)) * 0.25
}

/// Returns the scale of run `run` (0 to 3) of a group that stores two scales in one byte.
fn run_scale(d: f32, scales: u8, run: usize) -> f32 {
    scale_of(d, scales >> (run / 2 * 4) & 15)
}

fn decode_run(scale: f32, point: u16, signs: u8, out: &mut [f32]) {
    for (j, value) in out.iter_mut().enumerate() {
        let level = IQ2_LEVELS[usize::from(point >> (2 * j) & 3)];
        *value = signed(scale * level, signs, j);
    }
}

pub(super) fn iq2_xxs(block: &[u8], out: &mut [f32]) {
    let d = half(block, 0);
    for (group, out) in block[2..].chunks_exact(8).zip(out.chunks_exact_mut(32)) {
        let word = u32_at(group, 4);
        let scale = scale_of(d, (word >> 28) as u8);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let point = IQ2_XXS[usize::from(group[run])];
            decode_run(scale, point, signs_of(word >> (7 * run)), out);
        }
    }
}

pub(super) fn iq2_xs(block: &[u8], out: &mut [f32]) {
    let (d, scales) = (half(block, 0), &block[66..74]);
    for (run, out) in out.chunks_exact_mut(8).enumerate() {
        let word = u16_at(block, 2 + 2 * run);
        let scale = run_scale(d, scales[run / 4], run % 4);
        decode_run(scale, IQ2_XS[usize::from(word & 511)], signs_of(u32::from(word >> 9)), out);
    }
}

pub(super) fn iq2_s(block: &[u8], out: &mut [f32]) {
    let (d, low, signs) = (half(block, 0), &block[2..34], &block[34..66]);
    let (high, scales) = (&block[66..74], &block[74..82]);
    for (run, out) in out.chunks_exact_mut(8).enumerate() {
        let high = usize::from(high[run / 4] >> (run % 4 * 2) & 3);
        let scale = run_scale(d, scales[run / 4], run % 4);
        decode_run(scale, IQ2_S[high << 8 | usize::from(low[run])], signs[run], out);
    }
}
