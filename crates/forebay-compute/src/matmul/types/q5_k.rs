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
    const HAS_OFFSET: bool = true;

    #[inline(always)]
    fn header(block: &[u8]) -> Header {
        super::q4_k::six_bit_header(block)
    }
}
