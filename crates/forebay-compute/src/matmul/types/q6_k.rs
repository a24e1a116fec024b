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
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn header(block: &[u8]) -> Header {
        let mut scales = [0; 16];
        for (scale, byte) in scales.iter_mut().zip(&block[192..208]) {
            *scale = i16::from(*byte as i8);
        }
        Header { scale: f16_at(block, 208), offset: 0.0, scales, offsets: [0; 16] }
    }
}
