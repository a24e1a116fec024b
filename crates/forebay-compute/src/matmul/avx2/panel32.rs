//! Panels of types with blocks of 32 and unsigned codes.

use std::marker::PhantomData;
use std::ops::Range;

use super::unpack::*;
use super::vector::*;
use crate::matmul::panel::{
    PanelKernel, PanelRows, Slab, TileAt, sums_in_16_bits, tile, tile_sizes,
};
use crate::matmul::quantize::SmallBlock;
use crate::matmul::task::Task;

pub(crate) struct Panel32<F>(PhantomData<F>);

/// Layout of a packed block of eight rows: codes, four columns of each row in turn; the scales; the
/// offsets, if the type has offsets.
impl<F: Scales> Panel32<F> {
    const SCALE: usize = 8 * VECTOR;
    const OFFSET: usize = Self::SCALE + VECTOR;
    const BYTES: usize = Self::OFFSET + if F::OFFSET_AT.is_some() { VECTOR } else { 0 };

    /// Adds the products of up to 8 blocks to `sums`.
    ///
    /// # Safety
    /// The requirements of [`PanelKernel::products`] hold, and the panels hold `count` blocks.
    #[inline(always)]
    unsafe fn tile_blocks<const N: usize, const P: usize>(
        panels: [*const u8; P],
        x: [*const SmallBlock; N],
        count: usize,
        sums: &mut [[__m256; P]; N],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            // The correction for codes that are too large, or the factor of the offsets.
            let mut zeroes = [[0_i32; 8]; N];
            let mut offsets = [[0.0_f32; 8]; N];
            for t in 0..N {
                let x_sums = load((&raw const (*x[t]).sums).cast());
                let zero = _mm256_mullo_epi32(x_sums, _mm256_set1_epi32(F::ZERO));
                store(zeroes[t].as_mut_ptr().cast(), zero);
                let x_scales = _mm256_loadu_ps((&raw const (*x[t]).scales).cast());
                let offset = _mm256_mul_ps(_mm256_cvtepi32_ps(x_sums), x_scales);
                _mm256_storeu_ps(offsets[t].as_mut_ptr(), offset);
            }
            for i in 0..count {
                let panels = panels.map(|panel| panel.add(i * Self::BYTES));
                let codes = x.map(|x| x.cast::<u8>().add(i * 32));
                let products = Self::products(panels, codes);
                for p in 0..P {
                    let scale = _mm256_loadu_ps(panels[p].add(Self::SCALE).cast());
                    for t in 0..N {
                        let mut product = products[t][p];
                        if F::ZERO != 0 {
                            product = _mm256_sub_epi32(product, _mm256_set1_epi32(zeroes[t][i]));
                        }
                        let scale = _mm256_mul_ps(scale, _mm256_set1_ps((*x[t]).scales[i]));
                        let product = _mm256_cvtepi32_ps(product);
                        sums[t][p] = _mm256_fmadd_ps(product, scale, sums[t][p]);
                        if F::OFFSET_AT.is_some() {
                            let offset = _mm256_loadu_ps(panels[p].add(Self::OFFSET).cast());
                            let x = _mm256_set1_ps(offsets[t][i]);
                            sums[t][p] = _mm256_fmadd_ps(offset, x, sums[t][p]);
                        }
                    }
                }
            }
        }
    }

    /// Returns the products of a block's codes.
    ///
    /// # Safety
    /// The requirements of [`Self::tile_blocks`] hold, and the pointers are to the block.
    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        x: [*const u8; N],
    ) -> [[__m256i; P]; N] {
        let steps = const { sums_in_16_bits(F::LARGEST, 8) };
        // SAFETY: by the caller's promise.
        unsafe {
            let mut products = [[_mm256_setzero_si256(); P]; N];
            for from in (0..8).step_by(steps) {
                let mut pairs = [[_mm256_setzero_si256(); P]; N];
                for step in from..from + steps {
                    let w = panels.map(|panel| load(panel.add(step * VECTOR)));
                    for t in 0..N {
                        let x = x[t].add(step * 4).cast::<i32>().read_unaligned();
                        let x = _mm256_set1_epi32(x);
                        for p in 0..P {
                            let product = _mm256_maddubs_epi16(w[p], x);
                            pairs[t][p] = _mm256_add_epi16(pairs[t][p], product);
                        }
                    }
                }
                for t in 0..N {
                    for p in 0..P {
                        let product = _mm256_madd_epi16(pairs[t][p], _mm256_set1_epi16(1));
                        products[t][p] = _mm256_add_epi32(products[t][p], product);
                    }
                }
            }
            products
        }
    }
}

impl<F: Scales> PanelKernel for Panel32<F> {
    const ROWS: usize = ROWS;
    const SLAB: usize = 1024;
    const TILE: usize = 4;
    type Token = *const SmallBlock;
    type Sum = __m256;
    tile_sizes!(1 2 3 4);

    fn panel_bytes(columns: usize) -> usize {
        columns / 32 * Self::BYTES
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        let rows = rows.eight(0);
        let stride = F::TYPE.block_bytes();
        // SAFETY: rows are whole blocks; the caller promises the rest.
        unsafe {
            for (i, block) in (columns.start / 32..columns.end / 32).enumerate() {
                let to = panel.add(i * Self::BYTES);
                let mut codes = [_mm256_setzero_si256(); ROWS];
                for (codes, row) in codes.iter_mut().zip(rows) {
                    *codes = F::load(task.row(row).as_ptr().add(block * stride), 0);
                }
                store_columns(codes, to, 8);
            }
            // The scales of eight blocks of one row are unpacked at once.
            let blocks = columns.len() / 32;
            for first in (0..blocks).step_by(8) {
                let count = (blocks - first).min(8);
                let to = panel.add(first * Self::BYTES);
                let at = (columns.start / 32 + first) * stride;
                let scales = |row: usize| F::scales(task.row(row).as_ptr().add(at), stride, count);
                store_scales(rows, scales, to.add(Self::SCALE), Self::BYTES, count);
                if let Some(offset) = F::OFFSET_AT {
                    let offsets =
                        |row: usize| halves(task.row(row).as_ptr().add(at + offset), stride, count);
                    store_scales(rows, offsets, to.add(Self::OFFSET), Self::BYTES, count);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        _: *mut u8,
    ) -> *const SmallBlock {
        task.activations().small(task.token(selected))[columns.start / 256..].as_ptr()
    }

    #[inline(always)]
    unsafe fn add(sum: __m256, out: *mut f32, count: usize, is_first: bool) {
        // SAFETY: as for this function.
        unsafe { add_to(out, count, sum, is_first) };
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const SmallBlock; N],
        columns: usize,
    ) -> [[__m256; P]; N] {
        let blocks = columns / 32;
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); P]; N];
            for first in (0..blocks).step_by(8) {
                let panels = panels.map(|panel| panel.add(first * Self::BYTES));
                let x = tokens.map(|x| x.add(first / 8));
                Self::tile_blocks(panels, x, (blocks - first).min(8), &mut sums);
            }
            sums
        }
    }
}

/// Stores a vector of eight rows' scales for each of the first `count` of eight blocks, `stride`
/// bytes apart. `scales` returns the scales of one row.
///
/// # Safety
/// The machine has AVX2 and `to` is valid for these vectors.
#[inline(always)]
pub(super) unsafe fn store_scales(
    rows: [usize; ROWS],
    scales: impl Fn(usize) -> __m256,
    to: *mut u8,
    stride: usize,
    count: usize,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut vectors = [_mm256_setzero_si256(); ROWS];
        for (vector, row) in vectors.iter_mut().zip(rows) {
            *vector = _mm256_castps_si256(scales(row));
        }
        for (i, column) in transpose(vectors).into_iter().enumerate().take(count) {
            store(to.add(i * stride), column);
        }
    }
}
