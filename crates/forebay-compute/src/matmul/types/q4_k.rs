//! `Q4_K`: two F16 scales, 8 scales and 8 offsets of 6 bits, 256 codes of 4 bits.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Q4K;

impl Format for Q4K {
    const TYPE: TensorType = TensorType::Q4_K;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = Some(15);

    #[inline(always)]
    fn codes(block: &[u8], group: usize, codes: &mut [i8; 32]) {
        let bytes = &block[16 + group / 2 * 32..][..32];
        for (code, byte) in codes.iter_mut().zip(bytes) {
            *code = ((byte >> (group % 2 * 4)) & 15) as i8;
        }
    }
}

impl Block256 for Q4K {
    const GROUP: usize = 32;
    const SCALE_AT: usize = 0;
    const OFFSET_AT: Option<usize> = Some(2);

    #[inline(always)]
    fn groups(block: &[u8]) -> Groups {
        let [scales, offsets] = six_bits(block);
        Groups { scales: widen([scales]), offsets: widen([offsets]) }
    }
}

/// Returns the eight 6-bit scales and the eight 6-bit offsets as the bytes of two numbers. `Q4_K`
/// and `Q5_K` pack them into bytes 4..16.
#[inline(always)]
pub(super) fn six_bits(block: &[u8]) -> [u64; 2] {
    let (low, middle, high) = (u32_at(block, 4), u32_at(block, 8), u32_at(block, 12));
    let scales = (high & 0x0f0f_0f0f) | ((low >> 6) & 0x0303_0303) << 4;
    let offsets = ((high >> 4) & 0x0f0f_0f0f) | ((middle >> 6) & 0x0303_0303) << 4;
    let join = |first: u32, second: u32| u64::from(first & 0x3f3f_3f3f) | u64::from(second) << 32;
    [join(low, scales), join(middle, offsets)]
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Q4K {
        #[inline(always)]
        unsafe fn load(block: *const u8, group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe {
                let bytes = _mm256_loadu_si256(block.add(16 + group / 2 * 32).cast());
                bits(bytes, group % 2 * 4, 0, 15)
            }
        }
    }

    impl GroupLanes for Q4K {
        #[inline(always)]
        unsafe fn lanes(block: *const u8) -> Lanes {
            // SAFETY: the scales lie inside the block, by the caller's promise.
            let block = unsafe { std::slice::from_raw_parts(block, 16) };
            let [scales, offsets] = six_bits(block);
            // SAFETY: the caller promises AVX2.
            unsafe { Lanes { scales: both_lanes(scales), offsets: both_lanes(offsets) } }
        }
    }
}
