//! Panels of F32.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::panel_rounded::add_sixteen;
use crate::matmul::avx2::{Widen, pack_floats};
use crate::matmul::panel::{PanelKernel, PanelRows, Slab, TileAt, tile, tile_sizes};
use crate::matmul::task::Task;

/// Panels of a type that [`Pack`] makes F32.
pub(crate) struct Plain<W>(PhantomData<W>);

/// Size of a vector in bytes.
const VECTOR: usize = 64;

/// Packing of a type's rows to panels of F32.
pub(crate) trait Pack {
    /// Packs columns of a panel's rows: see [`PanelKernel::pack`].
    ///
    /// # Safety
    /// As for [`PanelKernel::pack`].
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8);
}

impl<W: Widen> Pack for W {
    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        // SAFETY: as for this function.
        unsafe {
            pack_floats::<W>(task, rows.eight(0), columns.clone(), panel, VECTOR);
            pack_floats::<W>(task, rows.eight(8), columns, panel.add(VECTOR / 2), VECTOR);
        }
    }
}

impl<W: Pack> PanelKernel for Plain<W> {
    const ROWS: usize = 16;
    const SLAB: usize = 256;
    const STEP: usize = 64;
    const TILE: usize = 6;
    type Token = *const f32;
    type Sum = __m512;
    tile_sizes!(1 2 3 4 5 6);

    fn panel_bytes(columns: usize) -> usize {
        columns * VECTOR
    }

    #[inline(always)]
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8) {
        // SAFETY: as for this function.
        unsafe { W::pack(task, rows, columns, panel) };
    }

    #[inline(always)]
    unsafe fn token(task: &Task, selected: usize, columns: Range<usize>, _: *mut u8) -> *const f32 {
        task.activations().floats(task.token(selected))[columns.start..].as_ptr()
    }

    #[inline(always)]
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [*const f32; N],
        columns: usize,
    ) -> [[__m512; P]; N] {
        // SAFETY: by the caller's promise.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); P]; N];
            for column in 0..columns {
                let w = panels.map(|panel| _mm512_loadu_ps(panel.add(column * VECTOR).cast()));
                for t in 0..N {
                    let x = _mm512_set1_ps(*tokens[t].add(column));
                    for p in 0..P {
                        sums[t][p] = _mm512_fmadd_ps(w[p], x, sums[t][p]);
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
