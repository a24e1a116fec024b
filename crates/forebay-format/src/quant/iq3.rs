//! Three bits per element through codebooks: IQ3_XXS, IQ3_S.
//!
//! The layout follows IQ2, but a grid point has 4 elements, so a run of 8 elements takes two
//! points. `d` is f16.
//!
//! | type | bytes, in order | scale |
//! |---|---|---|
//! | IQ3_XXS | `d`; 64 index bytes; per group of 32 a u32: four times 7 signs, `sc` on top | `d * (0.5 + sc) / 2` |
//! | IQ3_S | `d`; 64 low index bytes; per group a byte with bit 8 of its 8 indices; 32 sign bytes; 4 bytes with `sc` of two groups (low nibble first) | `d * (1 + 2 * sc)` |

use super::grids::{IQ3_S, IQ3_S_LEVELS, IQ3_XXS, IQ3_XXS_LEVELS};
use super::iq2::{signed, signs_of};
use super::{half, u32_at};

/// Decodes one run of 8 elements from its two points.
fn decode_run(scale: f32, levels: &[f32; 8], points: [u16; 2], signs: u8, out: &mut [f32]) {
    for (j, value) in out.iter_mut().enumerate() {
        let level = levels[usize::from(points[j / 4] >> (j % 4 * 3) & 7)];
        *value = signed(scale * level, signs, j);
    }
}

pub(super) fn iq3_xxs(block: &[u8], out: &mut [f32]) {
    let (d, indices) = (half(block, 0), &block[2..66]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let word = u32_at(block, 66 + 4 * group);
        let scale = d * (0.5 + (word >> 28) as f32) * 0.5;
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let point = |k| IQ3_XXS[usize::from(indices[8 * group + 2 * run + k])];
            let signs = signs_of(word >> (7 * run));
            decode_run(scale, &IQ3_XXS_LEVELS, [point(0), point(1)], signs, out);
        }
    }
}

pub(super) fn iq3_s(block: &[u8], out: &mut [f32]) {
    let (d, low, high) = (half(block, 0), &block[2..66], &block[66..74]);
    let (signs, scales) = (&block[74..106], &block[106..110]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let sc = scales[group / 2] >> (group % 2 * 4) & 15;
        let scale = d * f32::from(1 + 2 * sc);
        for (run, out) in out.chunks_exact_mut(8).enumerate() {
            let point = |k| {
                let high = usize::from(high[group] >> (2 * run + k) & 1);
                IQ3_S[high << 8 | usize::from(low[8 * group + 2 * run + k])]
            };
            let signs = signs[4 * group + run];
            decode_run(scale, &IQ3_S_LEVELS, [point(0), point(1)], signs, out);
        }
    }
}
