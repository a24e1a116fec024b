//! `Q5_K`: the head of `Q4_K`, 256 fifth bits, the low 4 bits of 256 codes.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q5K;

impl Format for Q5K {
    const TYPE: TensorType = TensorType::Q5_K;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = Some(31);

    #[inline(always)]
    fn codes(block: &[u8], group: usize, codes: &mut [i8; 32]) {
        let bytes = &block[48 + group / 2 * 32..][..32];
        let fifth = &block[16..48];
        for ((code, byte), fifth) in codes.iter_mut().zip(bytes).zip(fifth) {
            *code = ((byte >> (group % 2 * 4)) & 15 | ((fifth >> group) & 1) << 4) as i8;
        }
    }
}

impl Block256 for Q5K {
    const GROUP: usize = 32;
    const SCALE_AT: usize = 0;
    const OFFSET_AT: Option<usize> = Some(2);

    #[inline(always)]
    fn groups(block: &[u8]) -> Groups {
        Q4K::groups(block)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q5K {
        #[inline(always)]
        unsafe fn load(block: *const u8, group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe {
                let bytes = _mm256_loadu_si256(block.add(48 + group / 2 * 32).cast());
                let fifth = _mm256_loadu_si256(block.add(16).cast());
                _mm256_or_si256(bits(bytes, group % 2 * 4, 0, 15), bits(fifth, group, 4, 16))
            }
        }
    }

    impl GroupLanes for Q5K {
        #[inline(always)]
        unsafe fn lanes(block: *const u8) -> Lanes {
            // SAFETY: the head of the block is that of Q4_K.
            unsafe { Q4K::lanes(block) }
        }
    }
}
