//! Panels of types with blocks of 256 and unsigned codes.
//!
//! Within a block everything is an integer: products of codes are added in 16 bits as long as they
//! fit, then multiplied with the group's scale into 32 bits. Only the block's own scale and offset
//! are floats.

use std::marker::PhantomData;
use std::ops::Range;

use super::unpack::*;
use super::vector::*;
use crate::matmul::panel::{
    PanelKernel, PanelRows, Slab, TileAt, sums_in_16_bits, tile, tile_sizes,
};
use crate::matmul::quantize::LargeBlock;
use crate::matmul::task::Task;

pub(crate) struct Panel256<F>(PhantomData<F>);

/// Layout of a packed block of eight rows: codes, four columns of each row in turn; the scales of
/// the groups, twice for each row; pairs of offsets of neighbouring groups; the blocks' own scales.
impl<F: GroupLanes> Panel256<F> {
    const CODES: usize = 0;
    const SCALES: usize = Self::CODES + 64 * VECTOR;
    const OFFSETS: usize = Self::SCALES + 256 / F::GROUP * VECTOR;
    const PAIRS: usize = if F::ZERO == 0 && F::OFFSET_AT.is_none() { 0 } else { 128 / F::GROUP };
    const SCALE: usize = Self::OFFSETS + Self::PAIRS * VECTOR;
    const OFFSET: usize = Self::SCALE + VECTOR;
    const BYTES: usize = Self::OFFSET + VECTOR;

    /// Packs one block of eight rows.
    ///
    /// # Safety
    /// The requirements of [`PanelKernel::pack`] hold, `blocks` point to blocks, and `to` points to
    /// `BYTES` bytes.
    #[inline(always)]
    unsafe fn pack_block(blocks: [*const u8; ROWS], to: *mut u8) {
        // SAFETY: by the caller's promise; the constants lay out `BYTES`.
        unsafe {
            for group in 0..8 {
                let mut rows = [_mm256_setzero_si256(); ROWS];
                for (row, block) in rows.iter_mut().zip(blocks) {
                    *row = F::load(block, group);
                }
                store_columns(rows, to.add(Self::CODES + group * 8 * VECTOR), 8);
            }
            let mut lower = [_mm256_setzero_si256(); ROWS];
            let mut upper = [_mm256_setzero_si256(); ROWS];
            let mut offsets = [_mm256_setzero_si256(); ROWS];
            for row in 0..ROWS {
                let lanes = F::lanes(blocks[row]);
                lower[row] = _mm256_unpacklo_epi16(lanes.scales, lanes.scales);
                upper[row] = _mm256_unpackhi_epi16(lanes.scales, lanes.scales);
                offsets[row] = if F::ZERO != 0 {
                    _mm256_mullo_epi16(lanes.scales, _mm256_set1_epi16(F::ZERO as i16))
                } else {
                    lanes.offsets
                };
            }
            Self::store_scales(lower, upper, to.add(Self::SCALES));
            if Self::PAIRS > 0 {
                store_columns(offsets, to.add(Self::OFFSETS), Self::PAIRS);
            }
            let mut scales = [[0.0; ROWS]; 2];
            for row in 0..ROWS {
                scales[0][row] = half_at(blocks[row].add(F::SCALE_AT));
                scales[1][row] = F::OFFSET_AT.map_or(0.0, |at| half_at(blocks[row].add(at)));
            }
            to.add(Self::SCALE).cast::<[[f32; ROWS]; 2]>().write(scales);
        }
    }

    /// Stores the scales, doubled. If groups have 32 elements, `lower` holds groups 0 to 3 in both
    /// lanes and `upper` holds groups 4 to 7. If they have 16, the two lanes hold the scales of the
    /// two halves of each 32 elements.
    ///
    /// # Safety
    /// The requirements of [`Self::pack_block`] hold.
    #[inline(always)]
    unsafe fn store_scales(lower: [__m256i; ROWS], upper: [__m256i; ROWS], to: *mut u8) {
        // SAFETY: by the caller's promise.
        unsafe {
            let (lower, upper) = (transpose(lower), transpose(upper));
            for group in 0..4 {
                if F::GROUP == 32 {
                    store(to.add(group * VECTOR), lower[group]);
                    store(to.add((4 + group) * VECTOR), upper[group]);
                } else {
                    store(to.add(2 * group * VECTOR), lower[group]);
                    store(to.add((2 * group + 1) * VECTOR), lower[4 + group]);
                    store(to.add((8 + 2 * group) * VECTOR), upper[group]);
                    store(to.add((8 + 2 * group + 1) * VECTOR), upper[4 + group]);
                }
            }
        }
    }

    /// Adds one block's products to `sums`.
    ///
    /// # Safety
    /// The requirements of [`PanelKernel::products`] hold, and each pointer is to one packed block.
    #[inline(always)]
    unsafe fn tile_block<const N: usize, const P: usize>(
        panels: [*const u8; P],
        x: [*const LargeBlock; N],
        sums: &mut [[__m256; P]; N],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut products = [[_mm256_setzero_si256(); P]; N];
            for group in 0..256 / F::GROUP {
                let codes = panels.map(|panel| panel.add(group * F::GROUP * ROWS));
                let scales = panels.map(|panel| load(panel.add(Self::SCALES + group * VECTOR)));
                let x = x.map(|x| x.cast::<u8>().add(group * F::GROUP));
                Self::tile_group(codes, scales, x, &mut products);
            }
            for p in 0..P {
                let scale = _mm256_loadu_ps(panels[p].add(Self::SCALE).cast());
                let offset = _mm256_loadu_ps(panels[p].add(Self::OFFSET).cast());
                for t in 0..N {
                    let x_scale = _mm256_set1_ps((*x[t]).scale);
                    let mut product = products[t][p];
                    let offsets = Self::offset_products(panels[p], x[t]);
                    if F::ZERO != 0 {
                        product = _mm256_sub_epi32(product, offsets);
                    }
                    let product = _mm256_mul_ps(_mm256_cvtepi32_ps(product), scale);
                    sums[t][p] = _mm256_fmadd_ps(product, x_scale, sums[t][p]);
                    if F::OFFSET_AT.is_some() {
                        let product = _mm256_mul_ps(_mm256_cvtepi32_ps(offsets), offset);
                        sums[t][p] = _mm256_fnmadd_ps(product, x_scale, sums[t][p]);
                    }
                }
            }
        }
    }

    /// Adds one group's scaled products to `products`.
    ///
    /// # Safety
    /// The requirements of [`Self::tile_block`] hold, and the pointers are to the group's codes.
    #[inline(always)]
    unsafe fn tile_group<const N: usize, const P: usize>(
        codes: [*const u8; P],
        scales: [__m256i; P],
        x: [*const u8; N],
        products: &mut [[__m256i; P]; N],
    ) {
        let steps = const { sums_in_16_bits(F::LARGEST, F::GROUP / 4) };
        // SAFETY: by the caller's promise.
        unsafe {
            for from in (0..F::GROUP / 4).step_by(steps) {
                let mut pairs = [[_mm256_setzero_si256(); P]; N];
                for step in from..from + steps {
                    let w = codes.map(|codes| load(codes.add(step * VECTOR)));
                    for t in 0..N {
                        let x = x[t].add(step * 4).cast::<i32>().read_unaligned();
                        let x = _mm256_set1_epi32(x);
                        for p in 0..P {
                            let product = _mm256_maddubs_epi16(w[p], x);
                            pairs[t][p] = keep(_mm256_add_epi16(pairs[t][p], product));
                        }
                    }
                }
                for t in 0..N {
                    for p in 0..P {
                        let product = _mm256_madd_epi16(pairs[t][p], scales[p]);
                        products[t][p] = _mm256_add_epi32(products[t][p], product);
                    }
                }
            }
        }
    }

    /// Returns the offsets of all groups times the sums of the activations.
    ///
    /// # Safety
    /// The requirements of [`Self::tile_block`] hold.
    #[inline(always)]
    unsafe fn offset_products(panel: *const u8, x: *const LargeBlock) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe {
            let sums = if F::GROUP == 32 {
                (&raw const (*x).sums).cast::<i32>()
            } else {
                (&raw const (*x).half_sums).cast::<i32>()
            };
            let mut product = _mm256_setzero_si256();
            for pair in 0..Self::PAIRS {
                let x = _mm256_set1_epi32(sums.add(pair).read_unaligned());
                let offsets = load(panel.add(Self::OFFSETS + pair * VECTOR));
                product = _mm256_add_epi32(product, _mm256_madd_epi16(offsets, x));
            }
            product
        }
    }
}

impl<F: GroupLanes> PanelKernel for Panel256<F> {
    const ROWS: usize = ROWS;
    const SLAB: usize = 1024;
    const TILE: usize = 4;
    type Token = *const LargeBlock;
    type Sum = __m256;
    tile_sizes!(1 2 3 4);

    fn panel_bytes(columns: usize) -> usize {
        columns / 256 * Self::BYTES
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        let rows = rows.eight(0);
        let stride = F::TYPE.block_bytes();
        for (i, block) in (columns.start / 256..columns.end / 256).enumerate() {
            let mut blocks = [std::ptr::null(); ROWS];
            for (pointer, row) in blocks.iter_mut().zip(rows) {
                *pointer = task.row(row)[block * stride..].as_ptr();
            }
            // SAFETY: rows are whole blocks; the caller promises the rest.
            unsafe { Self::pack_block(blocks, panel.add(i * Self::BYTES)) };
        }
    }

    #[inline(always)]
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        _: *mut u8,
    ) -> *const LargeBlock {
        task.activations().large(task.token(selected))[columns.start / 256..].as_ptr()
    }

    #[inline(always)]
    unsafe fn add(sum: __m256, out: *mut f32, count: usize, is_first: bool) {
        // SAFETY: as for this function.
        unsafe { add_to(out, count, sum, is_first) };
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const LargeBlock; N],
        columns: usize,
    ) -> [[__m256; P]; N] {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); P]; N];
            for block in 0..columns / 256 {
                let panels = panels.map(|panel| panel.add(block * Self::BYTES));
                Self::tile_block(panels, tokens.map(|x| x.add(block)), &mut sums);
            }
            sums
        }
    }
}
