//! Panels of all types that are multiplied with rounded activations.
//!
//! The family's instruction multiplies unsigned with signed bytes and adds four products to 32
//! bits, so 16 rows advance by four columns at once. Codes are too large as unsigned bytes. The
//! sums start with a correction for this: the excess times the sum of the activations. Scales are
//! F32 and are applied once per group.

use std::marker::PhantomData;
use std::ops::Range;

use super::scales::{EightRows, FloatScales, GroupNumbers, X, zero};
use crate::matmul::avx2::unpack::*;
use crate::matmul::avx2::{add_to, store, transpose};
use crate::matmul::panel::{PanelKernel, PanelRows, Slab, TileAt, tile, tile_sizes};
use crate::matmul::task::Task;

pub(crate) struct PanelRounded<F>(PhantomData<F>);

/// Size of a vector in bytes.
const VECTOR: usize = 64;

/// 256 activations. Groups are numbered in the order of their elements.
#[repr(C, align(32))]
pub(crate) struct TokenBlock {
    codes: [i8; 256],
    /// Start value of each group's sum of products.
    starts: [i32; 16],
    /// Factor of each group's offsets.
    sums: [f32; 16],
    /// Scale of each 32 elements.
    scales: [f32; 8],
}

/// Layout of 32 packed columns: codes, four columns of each row in turn; the scales of each group;
/// the offsets of each group, if the type has offsets.
impl<F: FloatScales> PanelRounded<F> {
    const GROUPS: usize = 32 / F::GROUP;
    const SCALES: usize = 8 * VECTOR;
    const OFFSETS: usize = Self::SCALES + Self::GROUPS * VECTOR;
    const BYTES: usize = Self::OFFSETS + if F::HAS_OFFSETS { Self::GROUPS * VECTOR } else { 0 };

    /// Packs rows `i..i + 8` of a panel into one half of its vectors.
    ///
    /// # Safety
    /// The requirements of [`PanelKernel::pack`] hold, and `to` points to the half.
    #[inline(always)]
    unsafe fn pack_eight(
        task: &Task,
        rows: &PanelRows,
        i: usize,
        columns: Range<usize>,
        to: *mut u8,
    ) {
        let stride = F::TYPE.block_bytes();
        let rows = EightRows {
            starts: rows.eight(i).map(|row| task.row(row).as_ptr()),
            row_bytes: task.row_bytes,
            count: rows.count(i),
        };
        // SAFETY: rows are whole blocks; the caller promises the rest.
        unsafe {
            for (i, column) in columns.clone().step_by(32).enumerate() {
                let (block, group) = (column / F::BLOCK, column % F::BLOCK / 32);
                let mut codes = [_mm256_setzero_si256(); 8];
                for (codes, row) in codes.iter_mut().zip(rows.starts) {
                    let signed = F::load(row.add(block * stride), group);
                    *codes = if F::LARGEST.is_some() {
                        signed
                    } else {
                        _mm256_xor_si256(signed, _mm256_set1_epi8(i8::MIN))
                    };
                }
                for (step, codes) in transpose(codes).into_iter().enumerate() {
                    store(to.add(i * Self::BYTES + step * VECTOR), codes);
                }
            }
            let to = GroupNumbers {
                scales: to.add(Self::SCALES),
                offsets: to.add(Self::OFFSETS),
                group_bytes: VECTOR,
                columns_bytes: Self::BYTES,
            };
            F::scales(&rows, columns, &to);
        }
    }

    /// Adds the products of up to 256 columns to `sums`.
    ///
    /// # Safety
    /// The requirements of [`PanelKernel::products`] hold for `count` times 32 columns.
    #[inline(always)]
    unsafe fn block<const N: usize, const P: usize>(
        panels: [*const u8; P],
        x: [*const TokenBlock; N],
        count: usize,
        sums: &mut [[__m512; P]; N],
    ) {
        // SAFETY: by the caller's promise.
        unsafe {
            for i in 0..count {
                let panels = panels.map(|panel| panel.add(i * Self::BYTES));
                for half in 0..Self::GROUPS {
                    let group = i * Self::GROUPS + half;
                    let products = Self::group(panels, x, group, half);
                    for p in 0..P {
                        let scale = load_floats(panels[p].add(Self::SCALES + half * VECTOR));
                        for t in 0..N {
                            let product = _mm512_cvtepi32_ps(products[t][p]);
                            let scale = if F::LARGE {
                                scale
                            } else {
                                _mm512_mul_ps(scale, _mm512_set1_ps((*x[t]).scales[i]))
                            };
                            sums[t][p] = _mm512_fmadd_ps(product, scale, sums[t][p]);
                            if F::HAS_OFFSETS {
                                let at = Self::OFFSETS + half * VECTOR;
                                let offset = load_floats(panels[p].add(at));
                                let x = _mm512_set1_ps((*x[t]).sums[group]);
                                sums[t][p] = _mm512_fnmadd_ps(offset, x, sums[t][p]);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Returns the products of one group's codes.
    ///
    /// # Safety
    /// The requirements of [`Self::block`] hold.
    #[inline(always)]
    unsafe fn group<const N: usize, const P: usize>(
        panels: [*const u8; P],
        x: [*const TokenBlock; N],
        group: usize,
        half: usize,
    ) -> [[__m512i; P]; N] {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut products = [[_mm512_setzero_si512(); P]; N];
            for t in 0..N {
                products[t] = [_mm512_set1_epi32((*x[t]).starts[group]); P];
            }
            for step in 0..F::GROUP / 4 {
                let at = half * F::GROUP / 4 + step;
                let w = panels.map(|panel| _mm512_loadu_si512(panel.add(at * VECTOR).cast()));
                for t in 0..N {
                    let x = (&raw const (*x[t]).codes).cast::<i32>();
                    let x = _mm512_set1_epi32(*x.add(group * F::GROUP / 4 + step));
                    for p in 0..P {
                        products[t][p] = _mm512_dpbusd_epi32(products[t][p], w[p], x);
                    }
                }
            }
            products
        }
    }
}

/// # Safety
/// The machine has AVX-512 and `at` is valid for a vector.
#[inline(always)]
unsafe fn load_floats(at: *const u8) -> __m512 {
    // SAFETY: by the caller's promise.
    unsafe { _mm512_loadu_ps(at.cast()) }
}

/// Adds the lanes of a vector to two groups of eight rows of output.
///
/// # Safety
/// The requirements of [`PanelKernel::add`] hold.
#[inline(always)]
pub(super) unsafe fn add_sixteen(sum: __m512, out: *mut f32, count: usize, is_first: bool) {
    // SAFETY: by the caller's promise.
    unsafe {
        add_to(out, count.min(8), _mm512_castps512_ps256(sum), is_first);
        if count > 8 {
            add_to(out.add(8), count - 8, _mm512_extractf32x8_ps::<1>(sum), is_first);
        }
    }
}

impl<F: FloatScales> PanelKernel for PanelRounded<F> {
    const ROWS: usize = 16;
    const SLAB: usize = 512;
    const TILE: usize = 6;
    type Token = *const TokenBlock;
    type Sum = __m512;
    tile_sizes!(1 2 3 4 5 6);

    fn panel_bytes(columns: usize) -> usize {
        columns / 32 * Self::BYTES
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        // SAFETY: as for this function.
        unsafe {
            Self::pack_eight(task, rows, 0, columns.clone(), panel);
            Self::pack_eight(task, rows, 8, columns, panel.add(VECTOR / 2));
        }
    }

    fn token_bytes() -> usize {
        Self::SLAB / 256 * size_of::<TokenBlock>()
    }

    #[inline(always)]
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        buffer: *mut u8,
    ) -> *const TokenBlock {
        let token = task.token(selected);
        let to = buffer.cast::<TokenBlock>();
        for (i, block) in (columns.start / 256..columns.end.div_ceil(256)).enumerate() {
            // SAFETY: the buffer has room for a slab, and `fill` writes all of it.
            let to = unsafe { &mut *to.add(i) };
            fill::<F>(to, F::activations(task, token, block));
        }
        to
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const TokenBlock; N],
        columns: usize,
    ) -> [[__m512; P]; N] {
        let groups = columns / 32;
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); P]; N];
            for first in (0..groups).step_by(8) {
                let panels = panels.map(|panel| panel.add(first * Self::BYTES));
                let x = tokens.map(|x| x.add(first / 8));
                let count = (groups - first).min(8);
                if !F::LARGE {
                    Self::block(panels, x, count, &mut sums);
                    continue;
                }
                let mut own = [[_mm512_setzero_ps(); P]; N];
                Self::block(panels, x, count, &mut own);
                for t in 0..N {
                    let scale = _mm512_set1_ps((*x[t]).scales[0]);
                    for p in 0..P {
                        sums[t][p] = _mm512_fmadd_ps(own[t][p], scale, sums[t][p]);
                    }
                }
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn add(sum: __m512, out: *mut f32, count: usize, is_first: bool) {
        // SAFETY: as for this function.
        unsafe { add_sixteen(sum, out, count, is_first) };
    }
}

/// Copies 256 activations to `to`.
#[inline(always)]
fn fill<F: FloatScales>(to: &mut TokenBlock, x: X<'_>) {
    match x {
        X::Small(x) => {
            (to.codes, to.scales) = (x.codes, x.scales);
            for (i, sum) in x.sums.into_iter().enumerate() {
                to.starts[i] = -zero::<F>() * sum;
                to.sums[i] = x.scales[i] * sum as f32;
            }
        }
        X::Large(x) => {
            (to.codes, to.scales) = (x.codes, [x.scale; 8]);
            for i in 0..256 / F::GROUP {
                let sum = if F::GROUP == 32 { x.sums[i] } else { x.half_sums[i / 2 + i % 2 * 8] };
                to.starts[i] = -zero::<F>() * i32::from(sum);
                to.sums[i] = f32::from(sum);
            }
        }
    }
}
