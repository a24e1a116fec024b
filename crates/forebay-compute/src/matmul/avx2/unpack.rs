//! Traits for weight types that AVX2 kernels unpack, and helpers for their implementations.
//!
//! Everything here is `inline(always)`, so that it becomes part of a kernel, which enables the
//! instructions. A common requirement of the unsafe functions: the machine has AVX2, FMA and F16C,
//! and `block` points to a whole block of the type.

pub(crate) use std::arch::x86_64::*;

use crate::matmul::types::{Block32, Block256, Format};

/// Unpacking of codes.
pub(crate) trait Codes: Format {
    /// Loads the codes of elements `32 * group..32 * (group + 1)`; see [`Format::codes`].
    ///
    /// # Safety
    /// See the module. Also, `group` is less than the block's number of groups.
    unsafe fn load(block: *const u8, group: usize) -> __m256i;
}

/// Scales of blocks of 32.
pub(crate) trait Scales: Block32 + Codes {
    /// Loads the scales of `count` (at most 8) blocks that are `stride` bytes apart, then zeroes.
    ///
    /// # Safety
    /// See the module. The requirement holds for all these blocks.
    #[inline(always)]
    unsafe fn scales(blocks: *const u8, stride: usize, count: usize) -> __m256 {
        // SAFETY: as for this function.
        unsafe { halves(blocks, stride, count) }
    }
}

/// Scales of the groups of a block of 256.
pub(crate) trait GroupLanes: Block256 + Codes {
    /// Loads the scales and offsets of all groups.
    ///
    /// # Safety
    /// See the module.
    unsafe fn lanes(block: *const u8) -> Lanes;
}

/// Scales and offsets of a block's groups. Word `g` of 128-bit lane `l` belongs to the 16 elements
/// from `32 * g + 16 * l` on, as does lane `l` of [`Codes::load`] of group `g`. For groups of 32,
/// both lanes are equal.
pub(crate) struct Lanes {
    pub(crate) scales: __m256i,
    pub(crate) offsets: __m256i,
}

/// Loads `count` (at most 8) F16 numbers that are `stride` bytes apart, then zeroes.
///
/// # Safety
/// See the module. All numbers are readable.
#[inline(always)]
pub(crate) unsafe fn halves(first: *const u8, stride: usize, count: usize) -> __m256 {
    let mut bits = [0; 8];
    for (i, bits) in bits.iter_mut().enumerate().take(count) {
        // SAFETY: the caller promises these.
        *bits = unsafe { first.add(i * stride).cast::<i16>().read_unaligned() };
    }
    let [a, b, c, d, e, f, g, h] = bits;
    // SAFETY: the caller promises the instructions.
    unsafe { _mm256_cvtph_ps(_mm_setr_epi16(a, b, c, d, e, f, g, h)) }
}

/// Loads the F16 number at `at`.
///
/// # Safety
/// See the module. The number is readable.
#[inline(always)]
pub(crate) unsafe fn half_at(at: *const u8) -> f32 {
    // SAFETY: the caller promises that it is readable, and the instructions.
    unsafe {
        let bits = at.cast::<u16>().read_unaligned();
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
    }
}

/// Loads the 4-bit codes of 16 bytes: low halves first, then high halves.
///
/// # Safety
/// See the module. The bytes are readable.
#[inline(always)]
pub(crate) unsafe fn nibbles_at(at: *const u8) -> __m256i {
    // SAFETY: the caller promises that they are readable, and the instructions.
    unsafe {
        let bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128(at.cast()));
        let shifted = _mm256_srlv_epi64(bytes, _mm256_setr_epi64x(0, 0, 4, 4));
        _mm256_and_si256(shifted, _mm256_set1_epi8(15))
    }
}

/// Loads 32 bits, lowest first, as bytes of value 0 or 16.
///
/// # Safety
/// See the module. The bits are readable.
#[inline(always)]
pub(crate) unsafe fn fifth_bits_at(at: *const u8) -> __m256i {
    // SAFETY: the caller promises that they are readable, and the instructions.
    unsafe {
        let all = _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
        let byte_of_bit = _mm256_setr_epi64x(
            0,
            0x0101_0101_0101_0101,
            0x0202_0202_0202_0202,
            0x0303_0303_0303_0303,
        );
        let spread = _mm256_shuffle_epi8(all, byte_of_bit);
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

/// Moves bit `from` of each byte, with its neighbours, to bit `to`, and keeps the bits of `mask`.
/// `from` and `to` should be known at compile time.
///
/// # Safety
/// See the module.
#[inline(always)]
pub(crate) unsafe fn bits(bytes: __m256i, from: usize, to: usize, mask: i8) -> __m256i {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let moved = if from >= to {
            _mm256_srl_epi16(bytes, _mm_cvtsi64_si128((from - to) as i64))
        } else {
            _mm256_sll_epi16(bytes, _mm_cvtsi64_si128((to - from) as i64))
        };
        _mm256_and_si256(moved, _mm256_set1_epi8(mask))
    }
}

/// Looks up the entries of `table` for indices in 0..16.
///
/// # Safety
/// See the module.
#[inline(always)]
pub(crate) unsafe fn look_up(table: &[i8; 16], indices: __m256i) -> __m256i {
    // SAFETY: the caller promises the instructions, and the table is 16 bytes long.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
        _mm256_shuffle_epi8(table, indices)
    }
}

/// Widens 8 bytes to 16-bit integers in both lanes, as [`Lanes`] has them for groups of 32.
///
/// # Safety
/// See the module.
#[inline(always)]
pub(crate) unsafe fn both_lanes(bytes: u64) -> __m256i {
    // SAFETY: the caller promises the instructions.
    unsafe { _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bytes as i64))) }
}

/// Widens 16 signed bytes to 16-bit integers, the even ones in the first lane, as [`Lanes`] has
/// them for groups of 16.
///
/// # Safety
/// See the module.
#[inline(always)]
pub(crate) unsafe fn even_odd_signed(bytes: __m128i) -> __m256i {
    // SAFETY: the caller promises the instructions.
    unsafe {
        let order = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, order))
    }
}
