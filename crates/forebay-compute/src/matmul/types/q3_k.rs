//! `Q3_K`: 256 third bits, the low 2 bits of 256 codes, 16 scales of 6 bits, an F16 scale.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q3K;

impl Format for Q3K {
    const TYPE: TensorType = TensorType::Q3_K;
    const ZERO: i32 = 4;
    const LARGEST: Option<i32> = Some(7);

    #[inline(always)]
    fn codes(block: &[u8], group: usize, codes: &mut [i8; 32]) {
        let bytes = &block[32 + group / 4 * 32..][..32];
        for ((code, byte), third) in codes.iter_mut().zip(bytes).zip(&block[..32]) {
            *code = ((byte >> (group % 4 * 2)) & 3 | ((third >> group) & 1) << 2) as i8;
        }
    }
}

impl Block256 for Q3K {
    const GROUP: usize = 16;
    const SCALE_AT: usize = 108;
    const OFFSET_AT: Option<usize> = None;

    #[inline(always)]
    fn groups(block: &[u8]) -> Groups {
        let scales = widen(scale_bytes(block)).map(|scale| scale - 32);
        Groups { scales, offsets: [0; 16] }
    }
}

/// Returns the 16 scales, still 32 too large, as the bytes of two numbers. In the block, 8 bytes
/// hold the low 4 bits of the scales, and 4 more bytes hold the high 2 bits. Low nibbles come
/// first.
#[inline(always)]
fn scale_bytes(block: &[u8]) -> [u64; 2] {
    let (first, second, high) = (u32_at(block, 96), u32_at(block, 100), u32_at(block, 104));
    let join = |low: u32, i: usize| {
        u64::from((low & 0x0f0f_0f0f) | ((high >> (2 * i)) & 0x0303_0303) << 4)
    };
    [join(first, 0) | join(second, 1) << 32, join(first >> 4, 2) | join(second >> 4, 3) << 32]
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q3K {
        #[inline(always)]
        unsafe fn load(block: *const u8, group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe {
                let low = _mm256_loadu_si256(block.add(32 + group / 4 * 32).cast());
                let third = _mm256_loadu_si256(block.cast());
                _mm256_or_si256(bits(low, group % 4 * 2, 0, 3), bits(third, group, 2, 4))
            }
        }
    }

    impl GroupLanes for Q3K {
        #[inline(always)]
        unsafe fn lanes(block: *const u8) -> Lanes {
            // SAFETY: the block is whole, by the caller's promise.
            let block = unsafe { std::slice::from_raw_parts(block, Self::TYPE.block_bytes()) };
            let [low, high] = scale_bytes(block);
            // SAFETY: the caller promises AVX2.
            unsafe {
                let scales = even_odd_signed(_mm_set_epi64x(high as i64, low as i64));
                let scales = _mm256_sub_epi16(scales, _mm256_set1_epi16(32));
                Lanes { scales, offsets: _mm256_setzero_si256() }
            }
        }
    }
}
