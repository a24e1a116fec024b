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
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn header(block: &[u8]) -> Header {
        six_bit_header(block)
    }
}

/// The head that `Q4_K` and `Q5_K` share.
#[inline(always)]
pub(super) fn six_bit_header(block: &[u8]) -> Header {
    let packed = [u32_at(block, 4), u32_at(block, 8), u32_at(block, 12)];
    let (scale_bytes, offset_bytes) = six_bit_pairs(packed);
    let (mut scales, mut offsets) = ([0; 16], [0; 16]);
    widen8(scale_bytes, &mut scales);
    widen8(offset_bytes, &mut offsets);
    Header { scale: f16_at(block, 0), offset: f16_at(block, 2), scales, offsets }
}
