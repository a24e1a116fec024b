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
    const OFFSET_AT: Option<usize> = None;
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q8_0 {
        #[inline(always)]
        unsafe fn load(block: *const u8, _group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe { _mm256_loadu_si256(block.add(2).cast()) }
        }
    }

    impl Scales for Q8_0 {}
}
