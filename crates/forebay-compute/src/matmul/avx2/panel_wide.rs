//! Panels of types whose codes use all 8 bits with a sign.
//!
//! The sum of two products of 8-bit codes barely fits 16 bits, so products would have to be widened
//! before they are added. Widening both factors to 16 bits beforehand needs as many multiplications
//! and fewer of the other instructions.

use std::marker::PhantomData;
use std::ops::Range;

use super::panel32::store_scales;
use super::unpack::*;
use super::vector::*;
use crate::matmul::panel::{PanelKernel, PanelRows, Slab, TileAt, tile, tile_sizes};
use crate::matmul::task::Task;
use crate::matmul::types::{Block256, Format, Iq4Nl, Iq4Xs, Q8_0};

pub(crate) struct PanelWide<F>(PhantomData<F>);

/// A weight type that [`PanelWide`] supports.
pub(crate) trait Wide: Codes {
    /// Number of elements in a block.
    const BLOCK: usize;

    /// Loads the scales of a row's groups of 32 elements from `group` on, up to `count` (at most
    /// 8), then zeroes. `group` must be a multiple of 8.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C, and the row has these groups.
    unsafe fn scales(row: *const u8, group: usize, count: usize) -> __m256;

    /// Returns a token's codes and scales for the 256 elements of `block`.
    fn activations(task: &Task, token: usize, block: usize) -> (*const i8, [f32; 8]);
}

macro_rules! wide32 {
    ($($format:ty),*) => {$(
        impl Wide for $format {
            const BLOCK: usize = 32;

            #[inline(always)]
            unsafe fn scales(row: *const u8, group: usize, count: usize) -> __m256 {
                let stride = <$format as Format>::TYPE.block_bytes();
                // SAFETY: by the caller's promise.
                unsafe { <$format as Scales>::scales(row.add(group * stride), stride, count) }
            }

            #[inline(always)]
            fn activations(task: &Task, token: usize, block: usize) -> (*const i8, [f32; 8]) {
                let x = &task.activations().small(token)[block];
                (x.codes.as_ptr(), x.scales)
            }
        }
    )*};
}
wide32!(Q8_0, Iq4Nl);

impl Wide for Iq4Xs {
    const BLOCK: usize = 256;

    #[inline(always)]
    unsafe fn scales(row: *const u8, group: usize, _: usize) -> __m256 {
        // SAFETY: by the caller's promise. 8 groups are one block.
        unsafe {
            let block = row.add(group / 8 * Self::TYPE.block_bytes());
            let groups = _mm256_castsi256_si128(Self::lanes(block).scales);
            let groups = _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(groups));
            _mm256_mul_ps(groups, _mm256_set1_ps(half_at(block.add(Self::SCALE_AT))))
        }
    }

    #[inline(always)]
    fn activations(task: &Task, token: usize, block: usize) -> (*const i8, [f32; 8]) {
        let x = &task.activations().large(token)[block];
        (x.codes.as_ptr(), [x.scale; 8])
    }
}

/// 256 widened activations. Within each 32, the even ones come first, then the odd ones.
#[repr(C, align(32))]
pub(crate) struct WideBlock {
    codes: [[i16; 32]; 8],
    scales: [f32; 8],
}

/// Size in bytes of 32 packed columns of eight rows. The codes come first: for every four columns,
/// the even columns of each row in turn, then the odd columns. The scales follow.
const GROUP_BYTES: usize = SCALE + VECTOR;
const SCALE: usize = 16 * VECTOR;

/// Widens the even bytes of a vector, and the odd ones, to 16-bit integers.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn even_odd(bytes: __m256i) -> (__m256i, __m256i) {
    // SAFETY: by the caller's promise.
    unsafe {
        let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes));
        (even, _mm256_srai_epi16::<8>(bytes))
    }
}

impl<F: Wide> PanelKernel for PanelWide<F> {
    const ROWS: usize = ROWS;
    const SLAB: usize = 512;
    const TILE: usize = 4;
    type Token = *const WideBlock;
    type Sum = __m256;
    tile_sizes!(1 2 3 4);

    fn panel_bytes(columns: usize) -> usize {
        columns / 32 * GROUP_BYTES
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        let rows = rows.eight(0);
        let stride = F::TYPE.block_bytes();
        let first_group = columns.start / 32;
        let groups = columns.len() / 32;
        // SAFETY: rows are whole blocks; the caller promises the rest.
        unsafe {
            for group in 0..groups {
                let to = panel.add(group * GROUP_BYTES);
                let column = (first_group + group) * 32;
                let (block, group) = (column / F::BLOCK, column % F::BLOCK / 32);
                let mut codes = [_mm256_setzero_si256(); ROWS];
                for (codes, row) in codes.iter_mut().zip(rows) {
                    *codes = F::load(task.row(row).as_ptr().add(block * stride), group);
                }
                for (i, codes) in transpose(codes).into_iter().enumerate() {
                    let (even, odd) = even_odd(codes);
                    store(to.add(2 * i * VECTOR), even);
                    store(to.add((2 * i + 1) * VECTOR), odd);
                }
            }
            for first in (0..groups).step_by(8) {
                let count = (groups - first).min(8);
                let scales = |row: usize| {
                    <F as Wide>::scales(task.row(row).as_ptr(), first_group + first, count)
                };
                let to = panel.add(first * GROUP_BYTES + SCALE);
                store_scales(rows, scales, to, GROUP_BYTES, count);
            }
        }
    }

    fn token_bytes() -> usize {
        Self::SLAB / 256 * size_of::<WideBlock>()
    }

    #[inline(always)]
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        buffer: *mut u8,
    ) -> *const WideBlock {
        let token = task.token(selected);
        let to = buffer.cast::<WideBlock>();
        for (i, block) in (columns.start / 256..columns.end.div_ceil(256)).enumerate() {
            let (codes, scales) = F::activations(task, token, block);
            // SAFETY: the buffer has room for a slab, and activations are whole blocks of 256.
            unsafe {
                let to = to.add(i);
                for group in 0..8 {
                    let (even, odd) = even_odd(load(codes.add(group * 32).cast()));
                    let to = (&raw mut (*to).codes[group]).cast::<u8>();
                    store(to, even);
                    store(to.add(VECTOR), odd);
                }
                (*to).scales = scales;
            }
        }
        to
    }

    #[inline(always)]
    unsafe fn add(sum: __m256, out: *mut f32, count: usize, is_first: bool) {
        // SAFETY: as for this function.
        unsafe { add_to(out, count, sum, is_first) };
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const WideBlock; N],
        columns: usize,
    ) -> [[__m256; P]; N] {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); P]; N];
            for group in 0..columns / 32 {
                let panels = panels.map(|panel| panel.add(group * GROUP_BYTES));
                let x = tokens.map(|x| (&raw const (*x.add(group / 8)).codes[group % 8]).cast());
                let products = products(panels, x);
                for p in 0..P {
                    let scale = _mm256_loadu_ps(panels[p].add(SCALE).cast());
                    for t in 0..N {
                        let x = (*tokens[t].add(group / 8)).scales[group % 8];
                        let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x));
                        let product = _mm256_cvtepi32_ps(products[t][p]);
                        sums[t][p] = _mm256_fmadd_ps(product, scale, sums[t][p]);
                    }
                }
            }
            sums
        }
    }
}

/// Returns the products of 32 columns.
///
/// # Safety
/// The requirements of [`PanelKernel::products`] hold, and the pointers are to the codes.
#[inline(always)]
unsafe fn products<const N: usize, const P: usize>(
    panels: [*const u8; P],
    x: [*const u8; N],
) -> [[__m256i; P]; N] {
    // SAFETY: by the caller's promise.
    unsafe {
        let mut products = [[_mm256_setzero_si256(); P]; N];
        for step in 0..8 {
            for odd in 0..2 {
                let w = panels.map(|panel| load(panel.add((step * 2 + odd) * VECTOR)));
                for t in 0..N {
                    let x = x[t].add(odd * VECTOR + step * 4);
                    let x = _mm256_set1_epi32(x.cast::<i32>().read_unaligned());
                    for p in 0..P {
                        let product = _mm256_madd_epi16(w[p], x);
                        products[t][p] = keep(_mm256_add_epi32(products[t][p], product));
                    }
                }
            }
        }
        products
    }
}
