//! Products with BF16 in compact blocks, decoded 64 weights at a time.
//!
//! The instructions that move bytes are those of AVX-512 VBMI. Sums have the order of the AVX2 kernels for plain numbers.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use forebay_codec::{Compact, compact_exceptions};

use super::panel_float::{Pack, Plain};
use crate::matmul::avx2::{
    Blocks, Full, for_tokens, pack_eights, prefetch, set_exponents, sum_lanes,
};
use crate::matmul::panel::PanelRows;
use crate::matmul::task::{Kernel, Scratch, Task};

pub(crate) use crate::matmul::avx2::TOKENS;

/// Columns that are decoded together.
const STEP: usize = 64;

/// Order of bytes before they are interleaved.
const ORDER: [u8; STEP] = {
    let (mut order, mut i) = ([0; STEP], 0);
    while i < STEP {
        let (part, in_part) = (i / 16, i % 16);
        order[i] = (4 * part + in_part % 8 / 2 + 16 * (in_part % 2) + 32 * (in_part / 8)) as u8;
        i += 1;
    }
    order
};

/// Returns the kernel, if this machine has its instructions.
pub(crate) fn few_tokens<F: Blocks>() -> Option<Kernel> {
    is_x86_feature_detected!("avx512vbmi").then_some(rows::<F> as Kernel)
}

/// Computes rows.
///
/// # Safety
/// The requirements of [`Kernel`] hold, and the machine has AVX-512 VBMI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx2,fma,f16c")]
unsafe fn rows<F: Blocks>(task: &Task, rows: Range<usize>, _: &mut Scratch) {
    for row in rows {
        // SAFETY: as for this function.
        unsafe { for_tokens!(row_tokens, task, row) };
    }
}

/// Returns the kernel for many tokens, if this machine has its instructions.
pub(crate) fn many_tokens<F: Blocks>() -> Option<Kernel> {
    is_x86_feature_detected!("avx512vbmi").then_some(panels::<F> as Kernel)
}

/// Runs [`crate::matmul::panel::rows`] with the instructions of this family.
///
/// # Safety
/// The requirements of [`Kernel`] hold, and the machine has AVX-512 VBMI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
unsafe fn panels<F: Blocks>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    // SAFETY: as for this function.
    unsafe { crate::matmul::panel::rows::<Plain<Decoded<F>>>(task, rows, scratch) };
}

/// Packing of compact blocks.
struct Decoded<F>(PhantomData<F>);

impl<F: Blocks> Pack for Decoded<F> {
    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        let (block, step) = (columns.start / F::COLUMNS, columns.start % F::COLUMNS / STEP);
        let mut floats = [[0.0_f32; STEP]; 16];
        // SAFETY: rows have whole blocks, of which `columns` are a step; the caller promises the rest.
        unsafe {
            for (eight, floats) in floats.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                for (row, floats) in rows.eight(8 * eight).into_iter().zip(floats.iter_mut()) {
                    let from = task.row(row).as_ptr().add(block * F::BYTES);
                    let weights = Block::<F>::new(from).decode(step);
                    for (weights, floats) in weights.iter().zip(floats.as_chunks_mut::<16>().0) {
                        _mm512_storeu_ps(floats.as_mut_ptr(), *weights);
                    }
                }
                let starts = floats.each_ref().map(|row| row.as_ptr().cast());
                pack_eights::<Full>(starts, 0..STEP, panel.add(32 * eight), 64);
            }
        }
    }
}

/// A block, and what is the same for all of its steps.
struct Block<F> {
    start: *const u8,
    /// The lowest exponent, at the exponents' place in each of 32 numbers.
    base: __m512i,
    /// A bit for each step that has exceptions.
    exceptions: u32,
    of: PhantomData<F>,
}

impl<F: Blocks> Block<F> {
    /// # Safety
    /// `start` is readable for a whole block as long as the result is used, and the machine has AVX-512 VBMI.
    #[inline(always)]
    unsafe fn new(start: *const u8) -> Block<F> {
        // SAFETY: by the caller's promise.
        unsafe {
            let end = F::end(start);
            let base = _mm512_set1_epi16(i16::from(end[0]) << 7);
            let columns = compact_exceptions(end).map(|(column, _)| column);
            let columns = columns.filter(|column| *column < F::COLUMNS);
            let exceptions = columns.fold(0, |steps, column| steps | 1 << (column / STEP));
            Block { start, base, exceptions, of: PhantomData }
        }
    }

    /// Decodes a step.
    ///
    /// # Safety
    /// As for [`Block::new`]; the block has this step.
    #[inline(always)]
    unsafe fn decode(&self, step: usize) -> [__m512; 4] {
        // SAFETY: by the caller's promise.
        unsafe {
            let (low, words) = (Compact::byte_at(step * STEP), Compact::word_at(step * STEP));
            let mut weights = decode(self.start.add(low), self.start.add(words), self.base);
            if self.exceptions >> step & 1 == 1 {
                correct(&mut weights, step * STEP, F::end(self.start));
            }
            weights
        }
    }
}

/// Computes one row for tokens `first..first + N`.
///
/// # Safety
/// The requirements of [`rows`] hold, and these are tokens of the task.
#[inline(always)]
unsafe fn row_tokens<F: Blocks, const N: usize>(task: &Task, row: usize, first: usize) {
    let bytes = task.row(row).as_ptr();
    let x: [*const f32; N] =
        std::array::from_fn(|t| task.activations().floats(task.token(first + t)).as_ptr());
    // SAFETY: blocks are whole, and x has as many columns. The caller promises the rest.
    unsafe {
        // Sums of the columns whose remainder by 32 is below 16, and of the others.
        let mut sums = [[_mm512_setzero_ps(); 2]; N];
        for block in 0..task.cols / F::COLUMNS {
            let from = bytes.add(block * F::BYTES);
            let opened = Block::<F>::new(from);
            for step in 0..F::COLUMNS / STEP {
                prefetch(from.add(Compact::byte_at(step * STEP)), STEP);
                prefetch(from.add(Compact::word_at(step * STEP)), STEP / 2);
                let weights = opened.decode(step);
                for t in 0..N {
                    let x = x[t].add(block * F::COLUMNS + step * STEP);
                    for (v, weights) in weights.iter().enumerate() {
                        let x = _mm512_loadu_ps(x.add(16 * v));
                        sums[t][v % 2] = _mm512_fmadd_ps(*weights, x, sums[t][v % 2]);
                    }
                }
            }
        }
        for (t, sums) in sums.into_iter().enumerate() {
            let quarters =
                sums.map(|sum| [_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps::<1>(sum)]);
            let sum = quarters.into_iter().flatten().reduce(|a, b| _mm256_add_ps(a, b));
            // The kernels for plain numbers add what is left of a row, which is nothing here.
            let rest: f32 = std::iter::empty::<f32>().sum();
            task.store(first + t, row, sum_lanes(sum.unwrap_or(_mm256_setzero_ps())) + rest);
        }
    }
}

/// Decodes 64 weights, without exceptions.
///
/// # Safety
/// `low` is readable for 64 bytes and `words` for 32, and the machine has AVX-512 VBMI.
#[inline(always)]
unsafe fn decode(low: *const u8, words: *const u8, base: __m512i) -> [__m512; 4] {
    // SAFETY: by the caller's promise.
    unsafe {
        let low = _mm512_loadu_si512(low.cast());
        // Each word twice, so that its rotations are parts of 64 bits. Each weight's sign and the upper bits of its code become a byte.
        let words = _mm512_castsi256_si512(_mm256_loadu_si256(words.cast()));
        let twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        let words = _mm512_permutexvar_epi32(twice, words);
        let places = _mm512_set1_epi64(i64::from_le_bytes([8, 24, 4, 20, 0, 16, 28, 12]));
        let high = _mm512_multishift_epi64_epi8(places, words);
        let high = _mm512_and_si512(high, _mm512_set1_epi8(0x87_u8 as i8));
        // In this order, interleaving the bytes gives numbers i and 16 + i side by side.
        let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
        let low = _mm512_permutexvar_epi8(order, low);
        let high = _mm512_permutexvar_epi8(order, high);
        let first = _mm512_add_epi16(_mm512_unpacklo_epi8(low, high), base);
        let second = _mm512_add_epi16(_mm512_unpackhi_epi8(low, high), base);
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        [
            _mm512_slli_epi32::<16>(first),
            _mm512_and_si512(first, upper),
            _mm512_slli_epi32::<16>(second),
            _mm512_and_si512(second, upper),
        ]
        .map(|bits| _mm512_castsi512_ps(bits))
    }
}

/// Sets the exponents of those weights of a step that the block's list names. `first` is the step's first column.
///
/// # Safety
/// The machine has AVX-512.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f")]
unsafe fn correct(weights: &mut [__m512; 4], first: usize, end: &[u8]) {
    let mut bits = [0u32; STEP];
    // SAFETY: all accesses are to `bits`; the caller promises the rest.
    unsafe {
        for (weights, bits) in weights.iter().zip(bits.as_chunks_mut::<16>().0) {
            _mm512_storeu_ps(bits.as_mut_ptr().cast(), *weights);
        }
        set_exponents(&mut bits, first, end);
        for (weights, bits) in weights.iter_mut().zip(bits.as_chunks::<16>().0) {
            *weights = _mm512_loadu_ps(bits.as_ptr().cast());
        }
    }
}
