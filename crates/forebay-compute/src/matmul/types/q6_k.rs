//! `Q6_K`: the low 4 bits of 256 codes, their high 2 bits, 16 signed scales of 8 bits, an F16 scale.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q6K;

impl Format for Q6K {
    const TYPE: TensorType = TensorType::Q6_K;
    const ZERO: i32 = 32;
    const LARGEST: Option<i32> = Some(63);

    #[inline(always)]
    fn codes(block: &[u8], group: usize, codes: &mut [i8; 32]) {
        let (half, quarter) = (group / 4, group % 4);
        let low = &block[half * 64 + quarter % 2 * 32..][..32];
        let high = &block[128 + half * 32..][..32];
        for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
            let low = (low >> (quarter / 2 * 4)) & 15;
            *code = (low | ((high >> (quarter * 2)) & 3) << 4) as i8;
        }
    }
}

impl Block256 for Q6K {
    const GROUP: usize = 16;
    const SCALE_AT: usize = 208;
    const OFFSET_AT: Option<usize> = None;

    #[inline(always)]
    fn groups(block: &[u8]) -> Groups {
        let mut scales = [0; 16];
        for (scale, byte) in scales.iter_mut().zip(&block[192..208]) {
            *scale = i16::from(*byte as i8);
        }
        Groups { scales, offsets: [0; 16] }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q6K {
        #[inline(always)]
        unsafe fn load(block: *const u8, group: usize) -> __m256i {
            let (half, quarter) = (group / 4, group % 4);
            // SAFETY: inside the block, by the caller's promise.
            unsafe {
                let low = block.add(half * 64 + quarter % 2 * 32);
                let low = bits(_mm256_loadu_si256(low.cast()), quarter / 2 * 4, 0, 15);
                let high = _mm256_loadu_si256(block.add(128 + half * 32).cast());
                _mm256_or_si256(low, bits(high, quarter * 2, 4, 0x30))
            }
        }
    }

    impl GroupLanes for Q6K {
        #[inline(always)]
        unsafe fn lanes(block: *const u8) -> Lanes {
            // SAFETY: the scales lie inside the block, by the caller's promise.
            unsafe {
                let scales = _mm_loadu_si128(block.add(192).cast());
                Lanes { scales: even_odd_signed(scales), offsets: _mm256_setzero_si256() }
            }
        }
    }
}
