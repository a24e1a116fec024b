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
    const OFFSET_AT: Option<usize> = None;
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q4_0 {
        #[inline(always)]
        unsafe fn load(block: *const u8, _group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe { nibbles_at(block.add(2)) }
        }
    }

    impl Scales for Q4_0 {}
}
