//! BF16 in compact blocks; `docs/codec.md` describes them.

use std::arch::x86_64::*;

use forebay_codec::compact_exception;

use super::float::Widen;

/// Blocks of 2048 weights.
pub(crate) struct Compact2048;

/// Blocks of 256 weights.
pub(crate) struct Compact256;

impl Widen for Compact2048 {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe { eight::<2048, 7>(row, i) }
    }
}

impl Widen for Compact256 {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole.
        unsafe { eight::<256, 3>(row, i) }
    }
}

/// Decodes the weights of columns `8 * i..8 * (i + 1)` of a row of blocks of `COLUMNS` weights, whose lists have room for `MOST` entries.
///
/// # Safety
/// The row has these columns, and the machine has AVX2.
#[inline(always)]
unsafe fn eight<const COLUMNS: usize, const MOST: usize>(row: *const u8, i: usize) -> __m256 {
    let header = COLUMNS / 2 * 3;
    let (block, i) = (i / (COLUMNS / 8) * (header + 2 + 2 * MOST), i % (COLUMNS / 8));
    // SAFETY: by the caller's promise; all offsets are inside of the block.
    unsafe {
        let block = row.add(block);
        let (low, word, header) = (block.add(8 * i), block.add(COLUMNS + 4 * i), block.add(header));
        let word = _mm256_set1_epi32(word.cast::<i32>().read_unaligned());
        // Each weight's sign and upper bits of its exponent code are in the word where a rotation brings them to the top.
        let left = _mm256_setr_epi32(16, 0, 20, 4, 24, 8, 28, 12);
        let right = _mm256_sub_epi32(_mm256_set1_epi32(32), left);
        let high = _mm256_or_si256(_mm256_sllv_epi32(word, left), _mm256_srlv_epi32(word, right));
        let high = _mm256_and_si256(high, _mm256_set1_epi32(0x8700_0000_u32 as i32));
        let low = _mm256_slli_epi32::<16>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(low.cast())));
        let base = _mm256_set1_epi32(i32::from(header.read()) << 23);
        let bits = _mm256_add_epi32(_mm256_or_si256(high, low), base);
        // Blocks with exceptions have few, so most eights of such a block have none either.
        let entry = |at: usize| header.add(2 + 2 * at).cast::<u16>().read_unaligned();
        let is_here = |at| compact_exception(u16::from_le(entry(at)), 0).0 / 8 == i;
        match usize::from(header.add(1).read()) {
            count if count > 0 && (0..count.min(MOST)).any(is_here) => {
                with_exceptions::<MOST>(bits, header, i)
            }
            _ => _mm256_castsi256_ps(bits),
        }
    }
}

/// Sets the exponents of those weights that the list of the block names.
///
/// # Safety
/// `header` is readable to the end of its block, and the machine has AVX2.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx2")]
unsafe fn with_exceptions<const MOST: usize>(bits: __m256i, header: *const u8, i: usize) -> __m256 {
    let mut weights = [0u32; 8];
    // SAFETY: by the caller's promise; the list has room for `MOST` entries.
    unsafe {
        _mm256_storeu_si256(weights.as_mut_ptr().cast(), bits);
        let (base, count) = (header.read(), usize::from(header.add(1).read()).min(MOST));
        for at in 0..count {
            let entry = header.add(2 + 2 * at).cast::<u16>().read_unaligned();
            let (column, exponent) = compact_exception(u16::from_le(entry), base);
            if let Some(weight) = weights.get_mut(column.wrapping_sub(8 * i)) {
                *weight = *weight & 0x807f_0000 | u32::from(exponent) << 23;
            }
        }
        _mm256_loadu_ps(weights.as_ptr().cast())
    }
}
