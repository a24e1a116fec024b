//! Rounding of activations to 8 bits, as llama.cpp does it for the dot product of each weight type.
//!
//! Types with blocks of 32 weights meet activations with one scale for every 32 elements, itself
//! rounded to F16 (ggml's `Q8_0`); types with blocks of 256 meet one F32 scale for every 256
//! (ggml's `Q8_K`). Unlike there, an exact half rounds to even: that is what vector instructions
//! do, so every kernel family rounds alike.

use half::f16;

/// Elements that share a scale in the finer form.
pub(crate) const SMALL: usize = 32;
/// Elements that share a scale in the coarser form.
pub(crate) const LARGE: usize = 256;
/// Elements that share a sum.
pub(crate) const SUM: usize = 16;

/// One token's activations in one of the two forms, structure of arrays.
pub(crate) struct QuantizedRow<'a> {
    /// Values, one for each element.
    pub(crate) codes: &'a mut [i8],
    /// One scale for each block of [`SMALL`] or [`LARGE`] elements.
    pub(crate) scales: &'a mut [f32],
    /// Sums of the values of each [`SUM`] elements.
    pub(crate) sums16: &'a mut [i16],
    /// Sums of the values of each 32 elements.
    pub(crate) sums32: &'a mut [i16],
}

/// Rounds `x` in blocks of `BLOCK`; `x` must be a whole number of blocks.
///
/// Inlined so that callers with more instructions at hand get them here. A NaN in `x` makes its
/// block's scale NaN, so that it is seen in every product and not rounded away.
#[inline(always)]
pub(crate) fn quantize_row<const BLOCK: usize>(x: &[f32], row: QuantizedRow<'_>) {
    let blocks = x.chunks_exact(BLOCK).zip(row.codes.chunks_exact_mut(BLOCK));
    for ((x, codes), scale) in blocks.zip(row.scales.iter_mut()) {
        let largest = largest_magnitude(x);
        let inverse = if largest > 1e-36 { 127.0 / largest } else { 0.0 };
        *scale = largest / 127.0;
        for (x, codes) in x.chunks_exact(8).zip(codes.chunks_exact_mut(8)) {
            for (x, code) in x.iter().zip(codes) {
                *code = nearest(x * inverse);
            }
        }
    }
    if BLOCK == SMALL {
        for scale in row.scales.iter_mut() {
            *scale = f16::from_f32(*scale).to_f32();
        }
    }
    for (codes, sum) in row.codes.chunks_exact(SUM).zip(row.sums16.iter_mut()) {
        *sum = codes.iter().map(|&code| i16::from(code)).sum();
    }
    for (pair, sum) in row.sums16.chunks_exact(2).zip(row.sums32.iter_mut()) {
        *sum = pair[0] + pair[1];
    }
}

/// The largest magnitude in `x`; NaN if there is one.
///
/// Compared as bits without the sign, where NaN is larger than every number.
#[inline(always)]
fn largest_magnitude(x: &[f32]) -> f32 {
    let mut lanes = [0_i32; 8];
    for x in x.chunks_exact(8) {
        for (lane, x) in lanes.iter_mut().zip(x) {
            let bits = (x.to_bits() & 0x7fff_ffff) as i32;
            *lane = if bits > *lane { bits } else { *lane };
        }
    }
    f32::from_bits(lanes.into_iter().max().unwrap_or(0) as u32)
}

/// Rounds a number of at most 127 to the nearest integer, halves to even: adding 1.5 * 2^23
/// leaves no bit for a fraction. Numbers that are out of range give something, not a fault.
#[inline(always)]
fn nearest(x: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantize<const BLOCK: usize>(x: &[f32]) -> (Vec<i8>, Vec<f32>, Vec<i16>, Vec<i16>) {
        let mut codes = vec![0; x.len()];
        let mut scales = vec![0.0; x.len() / BLOCK];
        let mut sums16 = vec![0; x.len() / 16];
        let mut sums32 = vec![0; x.len() / 32];
        let row = QuantizedRow {
            codes: &mut codes,
            scales: &mut scales,
            sums16: &mut sums16,
            sums32: &mut sums32,
        };
        quantize_row::<BLOCK>(x, row);
        (codes, scales, sums16, sums32)
    }

    #[test]
    fn values_scales_and_sums_follow_the_formula() {
        let x: Vec<f32> = (0..512).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.03).collect();
        let (codes, scales, sums16, sums32) = quantize::<32>(&x);
        for (block, x) in x.chunks(32).enumerate() {
            let largest = x.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            assert_eq!(scales[block], f16::from_f32(largest / 127.0).to_f32());
            for (i, x) in x.iter().enumerate() {
                let expected = (x * (127.0 / largest)).round_ties_even() as i8;
                assert_eq!(codes[block * 32 + i], expected);
            }
        }
        assert_eq!(i32::from(sums16[3]), codes[48..64].iter().map(|&c| i32::from(c)).sum::<i32>());
        assert_eq!(sums32[1], sums16[2] + sums16[3]);
        let (codes, scales, ..) = quantize::<256>(&x);
        assert_eq!(scales.len(), 2);
        assert!(codes.iter().any(|&c| c.unsigned_abs() == 127));
        for (i, x) in x.iter().enumerate() {
            assert!((f32::from(codes[i]) * scales[i / 256] - x).abs() <= scales[i / 256] * 0.51);
        }
    }

    #[test]
    fn zeros_extremes_and_nan() {
        let (codes, scales, ..) = quantize::<32>(&[0.0; 32]);
        assert!(codes.iter().all(|&c| c == 0) && scales[0] == 0.0);
        let mut x = [1.0; 256];
        x[200] = f32::NAN;
        assert!(quantize::<256>(&x).1[0].is_nan());
        x[200] = f32::INFINITY;
        assert!(quantize::<256>(&x).1[0].is_infinite());
        x[200] = f32::MIN_POSITIVE / 8.0;
        assert!(quantize::<256>(&x).1[0].is_finite());
    }
}
