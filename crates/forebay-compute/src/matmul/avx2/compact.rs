//! BF16 in compact blocks; `docs/codec.md` describes them.

use std::arch::x86_64::*;

use forebay_codec::{Compact, compact_exceptions};

use super::float::Widen;

/// The blocks of a compact type.
pub(crate) trait Blocks {
    const OF: Compact;
    /// Number of weights of a block.
    const COLUMNS: usize = Self::OF.weights();
    /// Offset of the lowest exponent, which the number of exceptions and their list follow.
    const HEADER: usize = Self::OF.header();
    const BYTES: usize = Self::OF.bytes();

    /// Returns the bytes from the lowest exponent on.
    ///
    /// # Safety
    /// `block` is readable for a whole block, as long as the result is used.
    #[inline(always)]
    unsafe fn end<'a>(block: *const u8) -> &'a [u8] {
        // SAFETY: by the caller's promise.
        unsafe { std::slice::from_raw_parts(block.add(Self::HEADER), Self::BYTES - Self::HEADER) }
    }
}

/// Blocks of 2048 weights.
pub(crate) struct Compact2048;

/// Blocks of 256 weights.
pub(crate) struct Compact256;

impl Blocks for Compact2048 {
    const OF: Compact = Compact::C2048;
}

impl Blocks for Compact256 {
    const OF: Compact = Compact::C256;
}

impl Widen for Compact2048 {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe { eight::<Compact2048>(row, i) }
    }
}

impl Widen for Compact256 {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe { eight::<Compact256>(row, i) }
    }
}

/// Sets the exponents of those weights that a block's list names. `weights` are the F32 bits of the columns from `first` on, and `end` the
/// block's bytes from the lowest exponent on.
pub(crate) fn set_exponents(weights: &mut [u32], first: usize, end: &[u8]) {
    for (column, exponent) in compact_exceptions(end) {
        if let Some(weight) = weights.get_mut(column.wrapping_sub(first)) {
            *weight = *weight & 0x807f_0000 | u32::from(exponent) << 23;
        }
    }
}

/// Decodes the weights of columns `8 * i..8 * (i + 1)` of a row.
///
/// # Safety
/// The row has these columns, in whole blocks, and the machine has AVX2.
#[inline(always)]
unsafe fn eight<F: Blocks>(row: *const u8, i: usize) -> __m256 {
    let (block, i) = (i / (F::COLUMNS / 8) * F::BYTES, i % (F::COLUMNS / 8));
    // SAFETY: by the caller's promise; all offsets are inside of the block.
    unsafe {
        let block = row.add(block);
        let (low, word) = (block.add(Compact::byte_at(8 * i)), block.add(Compact::word_at(8 * i)));
        let end = F::end(block);
        let word = _mm256_set1_epi32(word.cast::<i32>().read_unaligned());
        // Each weight's sign and upper bits of its exponent code are in the word where a rotation brings them to the top.
        let left = _mm256_setr_epi32(16, 0, 20, 4, 24, 8, 28, 12);
        let right = _mm256_sub_epi32(_mm256_set1_epi32(32), left);
        let high = _mm256_or_si256(_mm256_sllv_epi32(word, left), _mm256_srlv_epi32(word, right));
        let high = _mm256_and_si256(high, _mm256_set1_epi32(0x8700_0000_u32 as i32));
        let low = _mm256_slli_epi32::<16>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(low.cast())));
        let base = _mm256_set1_epi32(i32::from(end[0]) << 23);
        let bits = _mm256_add_epi32(_mm256_or_si256(high, low), base);
        // Blocks with exceptions have few, so most eights of such a block have none either.
        match end[1] > 0 && compact_exceptions(end).any(|(column, _)| column / 8 == i) {
            true => with_exceptions(bits, 8 * i, end),
            false => _mm256_castsi256_ps(bits),
        }
    }
}

/// Returns the eight weights from column `first` on with the exponents that the list names.
///
/// # Safety
/// The machine has AVX2.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2")]
unsafe fn with_exceptions(bits: __m256i, first: usize, end: &[u8]) -> __m256 {
    let mut weights = [0u32; 8];
    // SAFETY: both accesses are to `weights`; the caller promises the rest.
    unsafe {
        _mm256_storeu_si256(weights.as_mut_ptr().cast(), bits);
        set_exponents(&mut weights, first, end);
        _mm256_loadu_ps(weights.as_ptr().cast())
    }
}
