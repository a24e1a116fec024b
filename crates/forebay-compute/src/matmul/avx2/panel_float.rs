//! Panels of F32 made from types that are plain numbers or have no other kernel.

use std::marker::PhantomData;
use std::ops::Range;

use super::float::Widen;
use super::vector::*;
use crate::matmul::float::widen_row;
use crate::matmul::panel::{PanelKernel, PanelRows, Slab, TileAt, tile, tile_sizes};
use crate::matmul::task::Task;

/// Number of columns in a slab; a multiple of every block length.
const SLAB: usize = 256;

/// A plain number type.
pub(crate) struct Plain<W>(PhantomData<W>);

/// Any type, dequantised one slab at a time.
pub(crate) struct Dequantised;

impl<W: Widen> PanelKernel for Plain<W> {
    const ROWS: usize = ROWS;
    const SLAB: usize = SLAB;
    const STEP: usize = 64;
    const TILE: usize = 4;
    type Token = *const f32;
    type Sum = __m256;
    tile_sizes!(1 2 3 4);

    fn panel_bytes(columns: usize) -> usize {
        columns * VECTOR
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        // SAFETY: as for this function.
        unsafe { pack_floats::<W>(task, rows.eight(0), columns, panel, VECTOR) };
    }

    #[inline(always)]
    unsafe fn token(task: &Task, selected: usize, columns: Range<usize>, _: *mut u8) -> *const f32 {
        task.activations().floats(task.token(selected))[columns.start..].as_ptr()
    }

    #[inline(always)]
    unsafe fn add(sum: __m256, out: *mut f32, count: usize, is_first: bool) {
        // SAFETY: as for this function.
        unsafe { add_to(out, count, sum, is_first) };
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const f32; N],
        columns: usize,
    ) -> [[__m256; P]; N] {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); P]; N];
            for column in 0..columns {
                let w = panels.map(|panel| _mm256_loadu_ps(panel.add(column * VECTOR).cast()));
                for t in 0..N {
                    let x = _mm256_set1_ps(*tokens[t].add(column));
                    for p in 0..P {
                        sums[t][p] = _mm256_fmadd_ps(w[p], x, sums[t][p]);
                    }
                }
            }
            sums
        }
    }
}

/// Packs the given columns, a multiple of eight of them, of the eight rows that begin at `rows`.
///
/// # Safety
/// The rows have these columns. The rest as for [`pack_floats`].
#[inline(always)]
pub(crate) unsafe fn pack_eights<W: Widen>(
    rows: [*const u8; ROWS],
    columns: Range<usize>,
    panel: *mut u8,
    stride: usize,
) {
    for column in (0..columns.len()).step_by(8) {
        // SAFETY: by the caller's promise.
        unsafe {
            let i = (columns.start + column) / 8;
            // A closure would not always be inlined, and its instructions would then be calls.
            let mut vectors = [_mm256_setzero_si256(); ROWS];
            for (vector, row) in vectors.iter_mut().zip(rows) {
                *vector = _mm256_castps_si256(W::eight(row, i));
            }
            for (i, vector) in transpose(vectors).into_iter().enumerate() {
                store(panel.add((column + i) * stride), vector);
            }
        }
    }
}

/// Packs the given columns of eight rows. The vectors of eight numbers start `stride` bytes apart.
///
/// # Safety
/// The machine has AVX2, FMA and F16C, and `panel` is valid for these vectors.
#[inline(always)]
pub(crate) unsafe fn pack_floats<W: Widen>(
    task: &Task,
    rows: [usize; ROWS],
    columns: Range<usize>,
    panel: *mut u8,
    stride: usize,
) {
    let whole = columns.len() / 8 * 8;
    // SAFETY: the rows have these columns; the caller promises the rest.
    unsafe {
        let starts = rows.map(|row| task.row(row).as_ptr());
        pack_eights::<W>(starts, columns.start..columns.start + whole, panel, stride);
        for (i, row) in rows.into_iter().enumerate() {
            let rest = columns.start + whole..columns.end;
            let byte = |column: usize| column / task.ty.block_elements() * task.ty.block_bytes();
            let bytes = &task.row(row)[byte(rest.start)..byte(rest.end)];
            let mut values = [0.0; 8];
            widen_row(task.ty, bytes, &mut values[..rest.len()]);
            for (column, value) in values[..rest.len()].iter().enumerate() {
                panel.add((whole + column) * stride).cast::<f32>().add(i).write(*value);
            }
        }
    }
}

impl PanelKernel for Dequantised {
    const ROWS: usize = ROWS;
    const SLAB: usize = SLAB;
    const TILE: usize = 4;
    type Token = *const f32;
    type Sum = __m256;
    tile_sizes!(1 2 3 4);

    fn panel_bytes(columns: usize) -> usize {
        columns * VECTOR
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        let rows = rows.eight(0);
        let mut values = [0.0; SLAB];
        let bytes = |column: usize| column / task.ty.block_elements() * task.ty.block_bytes();
        let bytes = bytes(columns.start)..bytes(columns.end);
        for (i, row) in rows.into_iter().enumerate() {
            widen_row(task.ty, &task.row(row)[bytes.clone()], &mut values[..columns.len()]);
            for (column, value) in values[..columns.len()].iter().enumerate() {
                // SAFETY: inside the panel, by the caller's promise.
                unsafe { panel.cast::<f32>().add(column * ROWS + i).write(*value) };
            }
        }
    }

    #[inline(always)]
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        buffer: *mut u8,
    ) -> *const f32 {
        // SAFETY: as for this function.
        unsafe { Plain::<super::float::Full>::token(task, selected, columns, buffer) }
    }

    #[inline(always)]
    unsafe fn add(sum: __m256, out: *mut f32, count: usize, is_first: bool) {
        // SAFETY: as for this function.
        unsafe { add_to(out, count, sum, is_first) };
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const f32; N],
        columns: usize,
    ) -> [[__m256; P]; N] {
        // SAFETY: as for this function.
        unsafe { Plain::<super::float::Full>::products(panels, tokens, columns) }
    }
}
