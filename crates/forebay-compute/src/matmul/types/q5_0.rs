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
    const OFFSET_AT: Option<usize> = None;
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q5_0 {
        #[inline(always)]
        unsafe fn load(block: *const u8, _group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe { _mm256_or_si256(nibbles_at(block.add(6)), fifth_bits_at(block.add(2))) }
        }
    }

    impl Scales for Q5_0 {}
}
