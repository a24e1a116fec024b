//! Small operations on vectors of eight 32-bit lanes.

pub(super) use std::arch::x86_64::*;

/// Size of a vector in bytes.
pub(super) const VECTOR: usize = 32;

/// Number of rows in a panel, which is the number of lanes in a vector.
pub(super) const ROWS: usize = 8;

/// Returns the sum of all lanes.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
pub(crate) unsafe fn sum_lanes(v: __m256) -> f32 {
    // SAFETY: by the caller's promise.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

/// Transposes eight rows of eight 32-bit lanes into eight columns.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(crate) unsafe fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    // SAFETY: by the caller's promise.
    unsafe {
        let (ab0, ab1) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd0, cd1) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        let (ef0, ef1) = (_mm256_unpacklo_epi32(e, f), _mm256_unpackhi_epi32(e, f));
        let (gh0, gh1) = (_mm256_unpacklo_epi32(g, h), _mm256_unpackhi_epi32(g, h));
        let quads = [
            (_mm256_unpacklo_epi64(ab0, cd0), _mm256_unpacklo_epi64(ef0, gh0)),
            (_mm256_unpackhi_epi64(ab0, cd0), _mm256_unpackhi_epi64(ef0, gh0)),
            (_mm256_unpacklo_epi64(ab1, cd1), _mm256_unpacklo_epi64(ef1, gh1)),
            (_mm256_unpackhi_epi64(ab1, cd1), _mm256_unpackhi_epi64(ef1, gh1)),
        ];
        let mut columns = [_mm256_setzero_si256(); 8];
        for (i, (upper, lower)) in quads.into_iter().enumerate() {
            columns[i] = _mm256_permute2x128_si256::<0x20>(upper, lower);
            columns[i + 4] = _mm256_permute2x128_si256::<0x31>(upper, lower);
        }
        columns
    }
}

/// Transposes eight rows of eight 16-bit integers in each 128-bit lane.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(crate) unsafe fn transpose_words(rows: [__m256i; 8]) -> [__m256i; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    // SAFETY: by the caller's promise.
    unsafe {
        let (ab0, ab1) = (_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b));
        let (cd0, cd1) = (_mm256_unpacklo_epi16(c, d), _mm256_unpackhi_epi16(c, d));
        let (ef0, ef1) = (_mm256_unpacklo_epi16(e, f), _mm256_unpackhi_epi16(e, f));
        let (gh0, gh1) = (_mm256_unpacklo_epi16(g, h), _mm256_unpackhi_epi16(g, h));
        let quads = [
            (_mm256_unpacklo_epi32(ab0, cd0), _mm256_unpacklo_epi32(ef0, gh0)),
            (_mm256_unpackhi_epi32(ab0, cd0), _mm256_unpackhi_epi32(ef0, gh0)),
            (_mm256_unpacklo_epi32(ab1, cd1), _mm256_unpacklo_epi32(ef1, gh1)),
            (_mm256_unpackhi_epi32(ab1, cd1), _mm256_unpackhi_epi32(ef1, gh1)),
        ];
        let mut columns = [_mm256_setzero_si256(); 8];
        for (i, (upper, lower)) in quads.into_iter().enumerate() {
            columns[2 * i] = _mm256_unpacklo_epi64(upper, lower);
            columns[2 * i + 1] = _mm256_unpackhi_epi64(upper, lower);
        }
        columns
    }
}

/// Stores the first `count` columns of eight rows.
///
/// # Safety
/// The machine has AVX2 and `to` is valid for `count` vectors.
#[inline(always)]
pub(super) unsafe fn store_columns(rows: [__m256i; 8], to: *mut u8, count: usize) {
    // SAFETY: by the caller's promise.
    unsafe {
        for (i, column) in transpose(rows).into_iter().enumerate().take(count) {
            store(to.add(i * VECTOR), column);
        }
    }
}

/// Returns `vector` unchanged, but hides this from the compiler. Otherwise the compiler would
/// regroup long sums into pairs of products, for which there are too few registers.
///
/// # Safety
/// The machine has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn keep(mut vector: __m256i) -> __m256i {
    // SAFETY: the assembly is only a comment.
    unsafe {
        std::arch::asm!(
            "/* {0} */",
            inout(ymm_reg) vector,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    vector
}

/// # Safety
/// The machine has AVX2 and `at` is valid for a vector.
#[inline(always)]
pub(super) unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// # Safety
/// The machine has AVX2 and `at` is valid for a vector.
#[inline(always)]
pub(crate) unsafe fn store(at: *mut u8, vector: __m256i) {
    // SAFETY: by the caller's promise.
    unsafe { _mm256_storeu_si256(at.cast(), vector) }
}

/// Adds the first `count` lanes to `out`, or sets `out` to them if `is_first`.
///
/// # Safety
/// `out` is valid for `count` numbers, and the machine has AVX2.
#[inline(always)]
pub(crate) unsafe fn add_to(out: *mut f32, count: usize, sum: __m256, is_first: bool) {
    // SAFETY: by the caller's promise. Lanes that are masked out are not accessed.
    unsafe {
        if count == ROWS {
            let before = if is_first { _mm256_setzero_ps() } else { _mm256_loadu_ps(out) };
            return _mm256_storeu_ps(out, _mm256_add_ps(before, sum));
        }
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes);
        let before = if is_first { _mm256_setzero_ps() } else { _mm256_maskload_ps(out, mask) };
        _mm256_maskstore_ps(out, mask, _mm256_add_ps(before, sum));
    }
}
