//! `IQ4_XS`: F16 scale, 8 scales of 6 bits, 256 indices of 4 bits into the table of `IQ4_NL`.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Iq4Xs;

impl Format for Iq4Xs {
    const TYPE: TensorType = TensorType::IQ4_XS;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = None;

    #[inline(always)]
    fn codes(block: &[u8], group: usize, codes: &mut [i8; 32]) {
        nibbles(&block[8 + group * 16..], codes);
        for code in codes {
            *code = super::iq4_nl::TABLE[*code as usize & 15];
        }
    }
}

impl Block256 for Iq4Xs {
    const GROUP: usize = 32;
    const SCALE_AT: usize = 0;
    const OFFSET_AT: Option<usize> = None;

    #[inline(always)]
    fn groups(block: &[u8]) -> Groups {
        let scales = widen([scale_bytes(block)]).map(|scale| scale - 32);
        Groups { scales, offsets: [0; 16] }
    }
}

/// Returns the 8 scales, still 32 too large, as the bytes of a number. In the block, 2 bytes hold
/// their high 2 bits, then 4 bytes hold their low 4 bits.
#[inline(always)]
fn scale_bytes(block: &[u8]) -> u64 {
    let mut high = u64::from(u16::from_le_bytes([block[2], block[3]]));
    high = (high | high << 24) & 0x0000_00ff_0000_00ff;
    high = (high | high << 12) & 0x000f_000f_000f_000f;
    high = (high | high << 6) & 0x0303_0303_0303_0303;
    let mut low = u64::from(u32_at(block, 4));
    low = (low | low << 16) & 0x0000_ffff_0000_ffff;
    low = (low | low << 8) & 0x00ff_00ff_00ff_00ff;
    low = (low | low << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    low | high << 4
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Iq4Xs {
        #[inline(always)]
        unsafe fn load(block: *const u8, group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe { look_up(&super::super::iq4_nl::TABLE, nibbles_at(block.add(8 + group * 16))) }
        }
    }

    impl GroupLanes for Iq4Xs {
        #[inline(always)]
        unsafe fn lanes(block: *const u8) -> Lanes {
            // SAFETY: the scales lie inside the block, by the caller's promise.
            let block = unsafe { std::slice::from_raw_parts(block, 8) };
            // SAFETY: the caller promises AVX2.
            unsafe {
                let scales = both_lanes(scale_bytes(block));
                let scales = _mm256_sub_epi16(scales, _mm256_set1_epi16(32));
                Lanes { scales, offsets: _mm256_setzero_si256() }
            }
        }
    }
}
