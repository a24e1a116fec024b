//! `Q8_0`: F16 scale, 32 signed bytes.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q8_0;

impl Format for Q8_0 {
    const TYPE: TensorType = TensorType::Q8_0;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = None;

    #[inline(always)]
    fn codes(block: &[u8], _group: usize, codes: &mut [i8; 32]) {
        for (code, byte) in codes.iter_mut().zip(&block[2..34]) {
            *code = *byte as i8;
        }
    }
}

impl Block32 for Q8_0 {
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn scale(block: &[u8]) -> (f32, f32) {
        (f16_at(block, 0), 0.0)
    }
}
