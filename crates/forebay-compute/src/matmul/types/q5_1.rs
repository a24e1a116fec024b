//! `Q5_1`: F16 scale, F16 offset, 32 fifth bits, the low 4 bits of 32 codes.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q5_1;

impl Format for Q5_1 {
    const TYPE: TensorType = TensorType::Q5_1;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = Some(31);

    #[inline(always)]
    fn codes(block: &[u8], _group: usize, codes: &mut [i8; 32]) {
        nibbles(&block[8..], codes);
        fifth_bits(u32_at(block, 4), codes);
    }
}

impl Block32 for Q5_1 {
    const OFFSET_AT: Option<usize> = Some(2);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q5_1 {
        #[inline(always)]
        unsafe fn load(block: *const u8, _group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe { _mm256_or_si256(nibbles_at(block.add(8)), fifth_bits_at(block.add(4))) }
        }
    }

    impl Scales for Q5_1 {}
}
