//! BF16 in compact blocks; `docs/codec.md` describes them.

use std::arch::x86_64::*;

use forebay_codec::compact_exception;

use super::float::Widen;

/// Blocks of 2048 weights.
pub(crate) struct Compact2048;

/// Blocks of 256 weights.
pub(crate) struct Compact256;

/// Offset from which on a block of 2048 has its lowest exponent, the number of exceptions, and their list.
const HEADER_2048: usize = 3072;
const HEADER_256: usize = 384;

impl Widen for Compact2048 {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole, and all offsets are inside.
        unsafe {
            let (block, i) = (row.add(i / 256 * (HEADER_2048 + 16)), i % 256);
            let (group, stride, lane) = (i / 128, i / 32 % 4, i % 32);
            let group = block.add(1536 * group);
            let low = group.add(512 * (stride / 2) + 16 * lane + 8 * (stride % 2));
            let word = group.add(1024 + 16 * lane + 4 * stride);
            eight::<7>(low, word, block.add(HEADER_2048), i)
        }
    }
}

impl Widen for Compact256 {
    #[inline(always)]
    unsafe fn eight(row: *const u8, i: usize) -> __m256 {
        // SAFETY: by the caller's promise, the block is whole, and all offsets are inside.
        unsafe {
            let (block, i) = (row.add(i / 32 * (HEADER_256 + 8)), i % 32);
            eight::<3>(block.add(8 * i), block.add(256 + 4 * i), block.add(HEADER_256), i)
        }
    }
}

/// Decodes eight weights: those of columns `8 * i..8 * (i + 1)` of a block whose list has room for `MOST`
/// entries.
///
/// # Safety
/// `low` is readable for eight bytes, `word` for four, `header` to the end of its block, and the machine has AVX2.
#[inline(always)]
unsafe fn eight<const MOST: usize>(
    low: *const u8,
    word: *const u8,
    header: *const u8,
    i: usize,
) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        let word = _mm256_set1_epi32(word.cast::<i32>().read_unaligned());
        // Each weight's sign and upper bits of its exponent code are in the word where a rotation brings them to the top.
        let left = _mm256_setr_epi32(16, 0, 20, 4, 24, 8, 28, 12);
        let right = _mm256_sub_epi32(_mm256_set1_epi32(32), left);
        let high = _mm256_or_si256(_mm256_sllv_epi32(word, left), _mm256_srlv_epi32(word, right));
        let high = _mm256_and_si256(high, _mm256_set1_epi32(0x8700_0000_u32 as i32));
        let low = _mm256_slli_epi32::<16>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(low.cast())));
        let base = _mm256_set1_epi32(i32::from(header.read()) << 23);
        let bits = _mm256_add_epi32(_mm256_or_si256(high, low), base);
        match header.add(1).read() {
            0 => _mm256_castsi256_ps(bits),
            _ => with_exceptions::<MOST>(bits, header, i),
        }
    }
}

/// Sets the exponents of those weights that the list of the block names.
///
/// # Safety
/// As for [`eight`].
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
