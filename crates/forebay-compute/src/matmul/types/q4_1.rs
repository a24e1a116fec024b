//! `Q4_1`: F16 scale, F16 offset, 32 codes of 4 bits.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q4_1;

impl Format for Q4_1 {
    const TYPE: TensorType = TensorType::Q4_1;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = Some(15);

    #[inline(always)]
    fn codes(block: &[u8], _group: usize, codes: &mut [i8; 32]) {
        nibbles(&block[4..], codes);
    }
}

impl Block32 for Q4_1 {
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn scale(block: &[u8]) -> (f32, f32) {
        (f16_at(block, 0), f16_at(block, 2))
    }
}
