//! Products with BF16 in compact blocks, decoded 64 weights at a time.
//!
//! The instructions that move bytes are those of AVX-512 VBMI. Sums have the order of the AVX2 kernels for plain numbers.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use forebay_codec::compact_exception;

use super::panel_float::Plain;
use crate::matmul::avx2::{Full, for_tokens, pack_eights, prefetch, sum_lanes};
use crate::matmul::panel::{PanelKernel, PanelRows, Slab, TileAt, tile, tile_sizes};
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

/// The blocks of a compact type.
pub(crate) trait Blocks {
    /// Number of weights of a block.
    const COLUMNS: usize;
    /// Room for entries of its list.
    const EXCEPTIONS: usize;

    const HEADER: usize = Self::COLUMNS / 2 * 3;
    const BYTES: usize = Self::HEADER + 2 + 2 * Self::EXCEPTIONS;
}

pub(crate) struct Of2048;
pub(crate) struct Of256;

impl Blocks for Of2048 {
    const COLUMNS: usize = 2048;
    const EXCEPTIONS: usize = 7;
}

impl Blocks for Of256 {
    const COLUMNS: usize = 256;
    const EXCEPTIONS: usize = 3;
}

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
    unsafe { crate::matmul::panel::rows::<Panels<F>>(task, rows, scratch) };
}

/// Panels of F32, like those of plain numbers.
struct Panels<F>(PhantomData<F>);

type Floats = Plain<Full>;

impl<F: Blocks> PanelKernel for Panels<F> {
    const ROWS: usize = Floats::ROWS;
    const SLAB: usize = Floats::SLAB;
    const STEP: usize = STEP;
    const TILE: usize = Floats::TILE;
    type Token = *const f32;
    type Sum = __m512;
    tile_sizes!(1 2 3 4 5 6);

    fn panel_bytes(columns: usize) -> usize {
        Floats::panel_bytes(columns)
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        let (block, step) = (columns.start / F::COLUMNS, columns.start % F::COLUMNS / STEP);
        let mut floats = [[0.0_f32; STEP]; 16];
        // SAFETY: rows have whole blocks, of which `columns` are a step; the caller promises the rest.
        unsafe {
            for (eight, floats) in floats.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                for (row, floats) in rows.eight(8 * eight).into_iter().zip(floats.iter_mut()) {
                    let from = task.row(row).as_ptr().add(block * F::BYTES);
                    let weights = decode_step::<F>(from, step);
                    for (weights, floats) in weights.iter().zip(floats.as_chunks_mut::<16>().0) {
                        _mm512_storeu_ps(floats.as_mut_ptr(), *weights);
                    }
                }
                let starts = floats.each_ref().map(|row| row.as_ptr().cast());
                pack_eights::<Full>(starts, 0..STEP, panel.add(32 * eight), 64);
            }
        }
    }

    #[inline(always)]
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        to: *mut u8,
    ) -> *const f32 {
        // SAFETY: as for this function.
        unsafe { Floats::token(task, selected, columns, to) }
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const f32; N],
        columns: usize,
    ) -> [[__m512; P]; N] {
        // SAFETY: as for this function.
        unsafe { Floats::products(panels, tokens, columns) }
    }

    #[inline(always)]
    unsafe fn add(sum: __m512, out: *mut f32, count: usize, is_first: bool) {
        // SAFETY: as for this function.
        unsafe { Floats::add(sum, out, count, is_first) };
    }
}

/// Decodes a step of a block.
///
/// # Safety
/// The block is whole, and the machine has AVX-512 VBMI.
#[inline(always)]
unsafe fn decode_step<F: Blocks>(block: *const u8, step: usize) -> [__m512; 4] {
    // SAFETY: by the caller's promise.
    unsafe {
        let header = block.add(F::HEADER);
        let base = _mm512_set1_epi16(i16::from(header.read()) << 7);
        let words = block.add(F::COLUMNS + step * STEP / 2);
        let mut weights = decode(block.add(step * STEP), words, base);
        if header.add(1).read() > 0 && steps_with_exceptions::<F>(header) >> step & 1 == 1 {
            correct::<F>(&mut weights, header, step);
        }
        weights
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
            let header = from.add(F::HEADER);
            let base = _mm512_set1_epi16(i16::from(header.read()) << 7);
            let exceptions = steps_with_exceptions::<F>(header);
            for step in 0..F::COLUMNS / STEP {
                let low = from.add(step * STEP);
                let words = from.add(F::COLUMNS + step * STEP / 2);
                prefetch(low, STEP);
                prefetch(words, STEP / 2);
                let mut weights = decode(low, words, base);
                if exceptions >> step & 1 == 1 {
                    correct::<F>(&mut weights, header, step);
                }
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

/// Returns the steps of a block that have exceptions, a bit for each.
///
/// # Safety
/// `header` is readable to the end of its block.
#[inline(always)]
unsafe fn steps_with_exceptions<F: Blocks>(header: *const u8) -> u32 {
    // SAFETY: by the caller's promise; the list has room for these entries.
    let entries = unsafe {
        let count = usize::from(header.add(1).read()).min(F::EXCEPTIONS);
        (0..count).map(move |at| header.add(2 + 2 * at).cast::<u16>().read_unaligned())
    };
    let columns = entries.map(|entry| compact_exception(u16::from_le(entry), 0).0);
    columns
        .filter(|column| *column < F::COLUMNS)
        .fold(0, |steps, column| steps | 1 << (column / STEP))
}

/// Sets the exponents of those weights of a step that the list of the block names.
///
/// # Safety
/// `header` is readable to the end of its block, and the machine has AVX-512.
#[cold]
#[inline(never)]
#[target_feature(enable = "avx512f")]
unsafe fn correct<F: Blocks>(weights: &mut [__m512; 4], header: *const u8, step: usize) {
    let mut bits = [0u32; STEP];
    // SAFETY: by the caller's promise; the list has room for these entries.
    unsafe {
        for (weights, bits) in weights.iter().zip(bits.as_chunks_mut::<16>().0) {
            _mm512_storeu_ps(bits.as_mut_ptr().cast(), *weights);
        }
        let (base, count) = (header.read(), usize::from(header.add(1).read()).min(F::EXCEPTIONS));
        for at in 0..count {
            let entry = header.add(2 + 2 * at).cast::<u16>().read_unaligned();
            let (column, exponent) = compact_exception(u16::from_le(entry), base);
            if let Some(bits) = bits.get_mut(column.wrapping_sub(step * STEP)) {
                *bits = *bits & 0x807f_0000 | u32::from(exponent) << 23;
            }
        }
        for (weights, bits) in weights.iter_mut().zip(bits.as_chunks::<16>().0) {
            *weights = _mm512_loadu_ps(bits.as_ptr().cast());
        }
    }
}
