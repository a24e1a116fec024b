//! Block layouts that kernels read without dequantising them first. Each type has a file.
//!
//! Every type is described as small integers with scales. A kernel multiplies the integers with
//! rounded activations and applies scales and offsets to the sums. So it needs only [`Format`] and
//! the scales of a block: one number for 32 elements ([`Block32`]) or a small table for 256
//! ([`Block256`]).

use forebay_format::TensorType;

mod iq4_nl;
mod iq4_xs;
mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_0;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;

pub(crate) use iq4_nl::Iq4Nl;
pub(crate) use iq4_xs::Iq4Xs;
pub(crate) use mxfp4::Mxfp4;
pub(crate) use q2_k::Q2K;
pub(crate) use q3_k::Q3K;
pub(crate) use q4_0::Q4_0;
pub(crate) use q4_1::Q4_1;
pub(crate) use q4_k::Q4K;
pub(crate) use q5_0::Q5_0;
pub(crate) use q5_1::Q5_1;
pub(crate) use q5_k::Q5K;
pub(crate) use q6_k::Q6K;
pub(crate) use q8_0::Q8_0;

/// Integer codes of a block. The value of an element is `scale * (code - ZERO)`, plus or minus an
/// offset if the type has one.
pub(crate) trait Format {
    const TYPE: TensorType;
    /// Stored code of the value zero.
    const ZERO: i32;
    /// Largest code of a type whose codes are never negative; `None` if codes use all 8 bits with a
    /// sign. It determines how many products fit 16 bits.
    const LARGEST: Option<i32>;

    /// Writes the codes of elements `32 * group..32 * (group + 1)` of a block to `codes`.
    fn codes(block: &[u8], group: usize, codes: &mut [i8; 32]);
}

/// A block of 32 elements with one scale.
pub(crate) trait Block32: Format {
    /// Position in the block of the F16 offset that is added to every element, if the type has one.
    const OFFSET_AT: Option<usize>;

    /// Returns the scale: an F16 at the start of the block in all types but one.
    #[inline(always)]
    fn scale(block: &[u8]) -> f32 {
        f16_at(block, 0)
    }
}

/// A block of 256 elements. Groups of 16 or 32 elements have integer scales relative to the block's
/// own scale. An element is `scale * scales[g] * (code - ZERO) - offset * offsets[g]`.
pub(crate) trait Block256: Format {
    /// Number of elements in a group: 16 or 32.
    const GROUP: usize;
    /// Position in the block of its F16 scale.
    const SCALE_AT: usize;
    /// Position in the block of the F16 scale of the offsets, if the type has offsets.
    const OFFSET_AT: Option<usize>;

    /// Returns the scales and offsets of the `256 / GROUP` groups.
    fn groups(block: &[u8]) -> Groups;
}

/// Integer scales and offsets of a block's groups; see [`Block256::groups`].
#[derive(Default)]
pub(crate) struct Groups {
    pub(crate) scales: [i16; 16],
    pub(crate) offsets: [i16; 16],
}

/// Form of the activations that a weight type is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ActivationForm {
    /// F32 without rounding.
    Float,
    /// 8 bits, with a scale for every 32 elements.
    Small,
    /// 8 bits, with a scale for every 256 elements.
    Large,
}

/// Returns the form for weights of type `ty` when activations may be rounded.
pub(crate) fn activation_form(ty: TensorType) -> ActivationForm {
    use TensorType as T;
    match ty {
        T::Q8_0 | T::Q4_0 | T::Q4_1 | T::Q5_0 | T::Q5_1 | T::IQ4_NL | T::MXFP4 => {
            ActivationForm::Small
        }
        T::Q2_K | T::Q3_K | T::Q4_K | T::Q5_K | T::Q6_K | T::IQ4_XS => ActivationForm::Large,
        _ => ActivationForm::Float,
    }
}

/// Reads the F16 number at byte `at`.
#[inline(always)]
pub(crate) fn f16_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Reads the little-endian number at byte `at`.
#[inline(always)]
pub(crate) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Unpacks 16 bytes of two 4-bit codes each: low halves first, then high halves.
#[inline(always)]
fn nibbles(bytes: &[u8], codes: &mut [i8; 32]) {
    for (i, byte) in bytes[..16].iter().enumerate() {
        codes[i] = (byte & 15) as i8;
        codes[i + 16] = (byte >> 4) as i8;
    }
}

/// Adds the fifth bits of 32 codes, lowest bit first.
#[inline(always)]
fn fifth_bits(bits: u32, codes: &mut [i8; 32]) {
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= (((bits >> i) & 1) << 4) as i8;
    }
}

/// Widens the bytes of `words`, lowest first, to 16-bit integers.
#[inline(always)]
fn widen<const N: usize>(words: [u64; N]) -> [i16; 16] {
    let mut wide = [0; 16];
    for (wide, byte) in wide.iter_mut().zip(words.into_iter().flat_map(u64::to_le_bytes)) {
        *wide = i16::from(byte);
    }
    wide
}

/// Selects the kernel of a type, if it has one, from two functions that are generic over types. The
/// first is for blocks of 32, the second for blocks of 256 with unsigned codes. The caller must
/// handle IQ4_XS, which has blocks of 256 with signed codes.
macro_rules! kernel_by_type {
    ($ty:expr, $rows32:ident, $rows256:ident) => {{
        use $crate::matmul::types;
        let kernel: Option<$crate::matmul::task::Kernel> = match $ty {
            forebay_format::TensorType::Q4_0 => Some($rows32::<types::Q4_0>),
            forebay_format::TensorType::Q4_1 => Some($rows32::<types::Q4_1>),
            forebay_format::TensorType::Q5_0 => Some($rows32::<types::Q5_0>),
            forebay_format::TensorType::Q5_1 => Some($rows32::<types::Q5_1>),
            forebay_format::TensorType::Q8_0 => Some($rows32::<types::Q8_0>),
            forebay_format::TensorType::IQ4_NL => Some($rows32::<types::Iq4Nl>),
            forebay_format::TensorType::MXFP4 => Some($rows32::<types::Mxfp4>),
            forebay_format::TensorType::Q2_K => Some($rows256::<types::Q2K>),
            forebay_format::TensorType::Q3_K => Some($rows256::<types::Q3K>),
            forebay_format::TensorType::Q4_K => Some($rows256::<types::Q4K>),
            forebay_format::TensorType::Q5_K => Some($rows256::<types::Q5K>),
            forebay_format::TensorType::Q6_K => Some($rows256::<types::Q6K>),
            _ => None,
        };
        kernel
    }};
}

pub(crate) use kernel_by_type;
