//! `Q2_K`: 16 scales and offsets of 4 bits, 256 codes of 2 bits, two F16 scales.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q2K;

impl Format for Q2K {
    const TYPE: TensorType = TensorType::Q2_K;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = Some(3);

    #[inline(always)]
    fn codes(block: &[u8], group: usize, codes: &mut [i8; 32]) {
        let bytes = &block[16 + group / 4 * 32..][..32];
        for (code, byte) in codes.iter_mut().zip(bytes) {
            *code = ((byte >> (group % 4 * 2)) & 3) as i8;
        }
    }
}

impl Block256 for Q2K {
    const GROUP: usize = 16;
    const SCALE_AT: usize = 80;
    const OFFSET_AT: Option<usize> = Some(82);

    #[inline(always)]
    fn groups(block: &[u8]) -> Groups {
        let bytes: &[u8; 16] = block.first_chunk().expect("whole blocks");
        let scales = bytes.map(|byte| i16::from(byte & 15));
        let offsets = bytes.map(|byte| i16::from(byte >> 4));
        Groups { scales, offsets }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q2K {
        #[inline(always)]
        unsafe fn load(block: *const u8, group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe {
                let bytes = _mm256_loadu_si256(block.add(16 + group / 4 * 32).cast());
                bits(bytes, group % 4 * 2, 0, 3)
            }
        }
    }

    impl GroupLanes for Q2K {
        #[inline(always)]
        unsafe fn lanes(block: *const u8) -> Lanes {
            // SAFETY: the scales lie inside the block, by the caller's promise.
            unsafe {
                let bytes = even_odd_signed(_mm_loadu_si128(block.cast()));
                let low = _mm256_set1_epi16(15);
                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), low);
                Lanes { scales: _mm256_and_si256(bytes, low), offsets: high }
            }
        }
    }
}
