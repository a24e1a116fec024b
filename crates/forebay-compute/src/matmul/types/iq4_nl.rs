//! `IQ4_NL`: F16 scale, 32 indices of 4 bits into a table of signed bytes.

use forebay_format::TensorType;

use super::*;

pub(crate) struct Iq4Nl;

impl Format for Iq4Nl {
    const TYPE: TensorType = TensorType::IQ4_NL;
    const ZERO: i32 = 0;
    const LARGEST: Option<i32> = None;

    #[inline(always)]
    fn codes(block: &[u8], _group: usize, codes: &mut [i8; 32]) {
        nibbles(&block[2..], codes);
        for code in codes {
            *code = TABLE[*code as usize & 15];
        }
    }
}

impl Block32 for Iq4Nl {
    const OFFSET_AT: Option<usize> = None;
}

/// Values of the 4-bit indices, denser near zero. `IQ4_XS` uses the same table.
#[rustfmt::skip]
pub(super) const TABLE: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::*;
    use crate::matmul::avx2::unpack::*;

    impl Codes for Iq4Nl {
        #[inline(always)]
        unsafe fn load(block: *const u8, _group: usize) -> __m256i {
            // SAFETY: inside the block, by the caller's promise.
            unsafe { look_up(&TABLE, nibbles_at(block.add(2))) }
        }
    }

    impl Scales for Iq4Nl {}
}
