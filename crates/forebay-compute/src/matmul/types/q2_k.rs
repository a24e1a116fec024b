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
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn header(block: &[u8]) -> Header {
        let (mut scales, mut offsets) = ([0; 16], [0; 16]);
        for (i, byte) in block[..16].iter().enumerate() {
            scales[i] = i16::from(byte & 15);
            offsets[i] = i16::from(byte >> 4);
        }
        Header { scale: f16_at(block, 80), offset: f16_at(block, 82), scales, offsets }
    }
}
