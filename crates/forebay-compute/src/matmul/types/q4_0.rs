//! `Q4_0`: F16 scale, 32 codes of 4 bits.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q4_0;

impl Format for Q4_0 {
    const TYPE: TensorType = TensorType::Q4_0;
    const ZERO: i32 = 8;
    const LARGEST: Option<i32> = Some(15);

    #[inline(always)]
    fn codes(block: &[u8], _group: usize, codes: &mut [i8; 32]) {
        nibbles(&block[2..], codes);
    }
}

impl Block32 for Q4_0 {
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn scale(block: &[u8]) -> (f32, f32) {
        (f16_at(block, 0), 0.0)
    }
}
