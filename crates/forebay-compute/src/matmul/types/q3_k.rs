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
    const HAS_OFFSET: bool = false;

    #[inline(always)]
    fn header(block: &[u8]) -> Header {
        let packed = [u32_at(block, 96), u32_at(block, 100), u32_at(block, 104)];
        let mut scales = [0; 16];
        for (scales, packed) in scales.chunks_exact_mut(4).zip(scale_bytes(packed)) {
            for (scale, byte) in scales.iter_mut().zip(packed.to_le_bytes()) {
                *scale = i16::from(byte) - 32;
            }
        }
        Header { scale: f16_at(block, 108), offset: 0.0, scales, offsets: [0; 16] }
    }
}

/// The 16 scales, still 32 too large, as bytes: two numbers of low halves, one of high quarters.
#[inline(always)]
fn scale_bytes(packed: [u32; 3]) -> [u32; 4] {
    let [first, second, high] = packed;
    let low = [first, second, first >> 4, second >> 4];
    std::array::from_fn(|i| (low[i] & 0x0f0f_0f0f) | ((high >> (2 * i)) & 0x0303_0303) << 4)
}
