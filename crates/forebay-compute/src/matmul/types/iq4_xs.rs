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
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn header(block: &[u8]) -> Header {
        let high = u16::from_le_bytes([block[2], block[3]]);
        let mut scales = [0; 16];
        for (i, scale) in scales.iter_mut().take(8).enumerate() {
            let low = (block[4 + i / 2] >> (i % 2 * 4)) & 15;
            *scale = i16::from(low) + (((high >> (2 * i)) & 3) << 4) as i16 - 32;
        }
        Header { scale: f16_at(block, 0), offset: 0.0, scales, offsets: [0; 16] }
    }
}
