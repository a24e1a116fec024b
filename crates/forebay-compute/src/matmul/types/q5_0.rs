//! `Q5_0`: F16 scale, 32 fifth bits, the low 4 bits of 32 codes.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q5_0;

impl Format for Q5_0 {
    const TYPE: TensorType = TensorType::Q5_0;
    const ZERO: i32 = 16;
    const LARGEST: Option<i32> = Some(31);

    #[inline(always)]
    fn codes(block: &[u8], _group: usize, codes: &mut [i8; 32]) {
        nibbles(&block[6..], codes);
        fifth_bits(u32_at(block, 2), codes);
    }
}

impl Block32 for Q5_0 {
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn scale(block: &[u8]) -> (f32, f32) {
        (f16_at(block, 0), 0.0)
    }
}
