//! Rounding of activations to 8 bits, as llama.cpp does it for the dot product of each weight type.
//!
//! Weights in blocks of 32 are multiplied with activations that have one scale for every 32
//! elements, rounded to F16 (ggml's `Q8_0`). Weights in blocks of 256 use one F32 scale for every
//! 256 elements (ggml's `Q8_K`). Unlike in ggml, an exact half rounds to even, because vector
//! instructions do so. Thus every kernel family rounds alike.
//!
//! 256 elements are stored together with their scales and sums, so that a kernel needs one pointer
//! for each token.

use half::f16;

/// Number of elements in one block in memory.
pub(crate) const BLOCK: usize = 256;

/// Up to 256 elements of a row, with a scale for every 32. Elements past the row's end are zero.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct SmallBlock {
    pub(crate) codes: [i8; BLOCK],
    /// Scale of each 32 elements.
    pub(crate) scales: [f32; 8],
    /// Sums of the codes of each 32 elements.
    pub(crate) sums: [i32; 8],
}

/// 256 elements of a row with one scale.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct LargeBlock {
    pub(crate) codes: [i8; BLOCK],
    /// Sums of the codes of each 16 elements: first those of the even sixteens, then of the odd. A
    /// kernel that holds 32 codes in two lanes thus finds their sums in the same lanes.
    pub(crate) half_sums: [i16; 16],
    /// Sums of the codes of each 32 elements.
    pub(crate) sums: [i16; 8],
    pub(crate) scale: f32,
}

/// A form of rounded activations.
pub(crate) trait Rounded: Copy + Send + Sync {
    const ZERO: Self;

    /// Rounds at most 256 elements, which must be whole blocks of the form.
    ///
    /// Implementations are inlined, so that they use the instructions that the caller enables. A
    /// NaN in `x` makes the scale NaN, so that it reaches every product and is not rounded away.
    fn round(&mut self, x: &[f32]);
}

impl Rounded for SmallBlock {
    const ZERO: SmallBlock = SmallBlock { codes: [0; BLOCK], scales: [0.0; 8], sums: [0; 8] };

    #[inline(always)]
    fn round(&mut self, x: &[f32]) {
        if x.len() < BLOCK {
            *self = Self::ZERO;
        }
        for (i, x) in x.chunks_exact(32).enumerate() {
            let codes = &mut self.codes[i * 32..][..32];
            self.scales[i] = f16::from_f32(round_block(x, codes)).to_f32();
            self.sums[i] = codes.iter().map(|&code| i32::from(code)).sum();
        }
    }
}

impl Rounded for LargeBlock {
    const ZERO: LargeBlock =
        LargeBlock { codes: [0; BLOCK], half_sums: [0; 16], sums: [0; 8], scale: 0.0 };

    #[inline(always)]
    fn round(&mut self, x: &[f32]) {
        self.scale = round_block(x, &mut self.codes);
        for i in 0..8 {
            let half = |at: usize| self.codes[at..][..16].iter().map(|&c| i16::from(c)).sum();
            (self.half_sums[i], self.half_sums[i + 8]) = (half(i * 32), half(i * 32 + 16));
            self.sums[i] = self.half_sums[i] + self.half_sums[i + 8];
        }
    }
}

/// Rounds `x`, a multiple of 8 elements, and returns the common scale.
#[inline(always)]
fn round_block(x: &[f32], codes: &mut [i8]) -> f32 {
    let largest = largest_magnitude(x);
    let inverse = if largest > 1e-36 { 127.0 / largest } else { 0.0 };
    for (x, codes) in x.as_chunks::<8>().0.iter().zip(codes.as_chunks_mut::<8>().0) {
        for (code, x) in codes.iter_mut().zip(x) {
            *code = nearest(x * inverse);
        }
    }
    largest / 127.0
}

/// Returns the largest magnitude in `x`, or NaN if an element is NaN.
///
/// Magnitudes are compared as bits without the sign, where NaN is larger than every number.
#[inline(always)]
fn largest_magnitude(x: &[f32]) -> f32 {
    let mut lanes = [0_i32; 8];
    for x in x.as_chunks::<8>().0 {
        for (lane, x) in lanes.iter_mut().zip(x) {
            let bits = (x.to_bits() & 0x7fff_ffff) as i32;
            *lane = if bits > *lane { bits } else { *lane };
        }
    }
    f32::from_bits(lanes.into_iter().max().unwrap_or(0) as u32)
}

/// Rounds a number of at most 127 to the nearest integer, halves to even: adding 1.5 * 2^23 leaves
/// no bit for a fraction. For a number out of range, the result is unspecified.
#[inline(always)]
fn nearest(x: f32) -> i8 {
    const SHIFT: f32 = 12_582_912.0;
    (x + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_scales_and_sums_follow_the_formula() {
        let x: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.03).collect();
        let mut small = SmallBlock::ZERO;
        small.round(&x);
        for (block, x) in x.chunks(32).enumerate() {
            let largest = x.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
            assert_eq!(small.scales[block], f16::from_f32(largest / 127.0).to_f32());
            for (i, x) in x.iter().enumerate() {
                let expected = (x * (127.0 / largest)).round_ties_even() as i8;
                assert_eq!(small.codes[block * 32 + i], expected);
            }
        }
        let sum = |codes: &[i8]| codes.iter().map(|&c| i32::from(c)).sum::<i32>();
        assert_eq!(small.sums[3], sum(&small.codes[96..128]));
        let mut large = LargeBlock::ZERO;
        large.round(&x);
        assert!(large.codes.iter().any(|&c| c.unsigned_abs() == 127));
        for (code, x) in large.codes.iter().zip(&x) {
            assert!((f32::from(*code) * large.scale - x).abs() <= large.scale * 0.51);
        }
        assert_eq!(i32::from(large.half_sums[1]), sum(&large.codes[32..48]));
        assert_eq!(i32::from(large.half_sums[8 + 1]), sum(&large.codes[48..64]));
        assert_eq!(i32::from(large.sums[1]), sum(&large.codes[32..64]));
    }

    #[test]
    fn short_rows_end_in_zeroes() {
        let mut small = SmallBlock::ZERO;
        small.round(&[1.0; 256]);
        small.round(&[1.0; 64]);
        assert_eq!(small.sums, [127 * 32, 127 * 32, 0, 0, 0, 0, 0, 0]);
        assert_eq!(small.scales[2..], [0.0; 6]);
        assert!(small.codes[64..].iter().all(|&c| c == 0));
    }

    #[test]
    fn zeros_extremes_and_nan() {
        let mut block = LargeBlock::ZERO;
        block.round(&[0.0; 256]);
        assert!(block.codes.iter().all(|&c| c == 0) && block.scale == 0.0);
        let mut x = [1.0; 256];
        x[200] = f32::NAN;
        block.round(&x);
        assert!(block.scale.is_nan());
        x[200] = f32::INFINITY;
        block.round(&x);
        assert!(block.scale.is_infinite());
        x[200] = f32::MIN_POSITIVE / 8.0;
        block.round(&x);
        assert!(block.scale.is_finite());
    }
}
