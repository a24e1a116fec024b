//! Products with many tokens, tile by tile.
//!
//! Eight rows of weights, over a slab of columns, are unpacked into a panel in which the eight
//! rows' numbers for the same columns lie side by side. One vector instruction then multiplies
//! eight rows with one token's numbers, broadcast. A panel stays in the first cache while all
//! tokens pass by, a few tokens at a time, and its unpacking is paid once for all of them.

use std::ops::Range;

use super::vector::*;
use crate::matmul::task::{ChunkRows, Scratch, Task};

/// Rows of a panel: the 32-bit lanes of a vector.
pub(crate) const ROWS: usize = 8;

/// Rows that one call packs: two panels at a time run through the tokens of a block, and the
/// activations of a block are read from the second cache once for every two panels.
pub(crate) const CHUNK: ChunkRows = ChunkRows::Batches(2 * ROWS, 64);

/// Tokens of a block: their part of a slab stays in the second cache.
const TOKENS_OF_BLOCK: usize = 64;

/// Tokens of a tile.
const TOKENS_OF_TILE: usize = 4;

/// How the weights of some types are packed and multiplied.
pub(crate) trait PanelKernel {
    /// Columns of a slab.
    const SLAB: usize;
    /// Where one token's numbers for a slab begin.
    type Token: Copy;

    /// Bytes of a panel of `columns`, a multiple of 32.
    fn panel_bytes(columns: usize) -> usize;

    /// Packs `columns` from `from` on of eight rows, of which some may be the same.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C; `panel` has `panel_bytes(columns)`, aligned to 32.
    unsafe fn pack(task: &Task, rows: [usize; ROWS], columns: Range<usize>, panel: *mut u8);

    /// Bytes that `token` wants for each token of a block.
    fn token_bytes() -> usize {
        0
    }

    /// Finds, or makes in `buffer`, a token's numbers for some columns.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C; `buffer` has `token_bytes()`, aligned to 32.
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        buffer: *mut u8,
    ) -> Self::Token;

    /// The products of P panels with N tokens.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C; panels and tokens were made for `columns` columns.
    unsafe fn tile<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [Self::Token; N],
        columns: usize,
    ) -> [[__m256; P]; N];
}

/// Rows of a task, a multiple of [`ROWS`] unless they are its last.
///
/// # Safety
/// As [`crate::matmul::task::Kernel`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn rows<K: PanelKernel>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let panels = rows.len().div_ceil(ROWS);
    let mut from = 0;
    while from < task.cols {
        let columns = from..task.cols.min(from + K::SLAB);
        let panel_bytes = K::panel_bytes(columns.len());
        let tokens_bytes = TOKENS_OF_BLOCK * K::token_bytes();
        let buffer = scratch.codes.first(panels * panel_bytes + tokens_bytes).as_mut_ptr();
        let buffer = buffer.cast::<u8>();
        for panel in 0..panels {
            let first = rows.start + panel * ROWS;
            // A short last panel repeats the last row.
            let panel_rows = std::array::from_fn(|i| (first + i).min(rows.end - 1));
            // SAFETY: the buffer holds all panels; the caller promises the rest.
            unsafe {
                K::pack(task, panel_rows, columns.clone(), buffer.add(panel * panel_bytes));
            }
        }
        let slab = Slab {
            rows: rows.clone(),
            columns: columns.clone(),
            panels: buffer,
            panel_bytes,
            // SAFETY: behind the panels, inside the buffer.
            tokens: unsafe { buffer.add(panels * panel_bytes) },
        };
        for first in (0..task.token_count).step_by(TOKENS_OF_BLOCK) {
            let tokens = first..task.token_count.min(first + TOKENS_OF_BLOCK);
            // SAFETY: as for this function.
            unsafe { block_of_tokens::<K>(task, &slab, tokens) };
        }
        from = columns.end;
    }
}

/// Packed rows over a slab of columns.
struct Slab {
    rows: Range<usize>,
    columns: Range<usize>,
    panels: *const u8,
    panel_bytes: usize,
    /// Room for what [`PanelKernel::token`] makes.
    tokens: *mut u8,
}

/// All panels of a slab with a block of tokens.
///
/// # Safety
/// As for [`rows`].
#[inline(always)]
unsafe fn block_of_tokens<K: PanelKernel>(task: &Task, slab: &Slab, tokens: Range<usize>) {
    let mut found = [None; TOKENS_OF_BLOCK];
    for (i, selected) in tokens.clone().enumerate() {
        // SAFETY: the slab has room for a block of tokens; the caller promises the rest.
        found[i] = Some(unsafe {
            let buffer = slab.tokens.add(i * K::token_bytes());
            K::token(task, selected, slab.columns.clone(), buffer)
        });
    }
    let panels = slab.rows.len().div_ceil(ROWS);
    for panel in (0..panels).step_by(2) {
        let mut first = 0;
        while first < tokens.len() {
            let count = (tokens.len() - first).min(TOKENS_OF_TILE);
            let found = &found[first..];
            let selected = tokens.start + first;
            // SAFETY: as for this function.
            unsafe {
                match (count, panels - panel) {
                    (1, 1) => tile::<K, 1, 1>(task, slab, panel, found, selected),
                    (2, 1) => tile::<K, 2, 1>(task, slab, panel, found, selected),
                    (3, 1) => tile::<K, 3, 1>(task, slab, panel, found, selected),
                    (_, 1) => tile::<K, 4, 1>(task, slab, panel, found, selected),
                    (1, _) => tile::<K, 1, 2>(task, slab, panel, found, selected),
                    (2, _) => tile::<K, 2, 2>(task, slab, panel, found, selected),
                    (3, _) => tile::<K, 3, 2>(task, slab, panel, found, selected),
                    _ => tile::<K, 4, 2>(task, slab, panel, found, selected),
                }
            }
            first += count;
        }
    }
}

/// P panels with the first N tokens that were found, into the output.
///
/// # Safety
/// As for [`rows`]; so many panels and tokens are there.
#[inline(always)]
unsafe fn tile<K: PanelKernel, const N: usize, const P: usize>(
    task: &Task,
    slab: &Slab,
    panel: usize,
    found: &[Option<K::Token>],
    selected: usize,
) {
    // SAFETY: panels lie one after the other; the caller promises the rest.
    unsafe {
        let tokens = std::array::from_fn(|t| found[t].unwrap_unchecked());
        let panels = std::array::from_fn(|p| slab.panels.add((panel + p) * slab.panel_bytes));
        let sums = K::tile::<N, P>(panels, tokens, slab.columns.len());
        for (t, sums) in sums.into_iter().enumerate() {
            for (p, sum) in sums.into_iter().enumerate() {
                let row = slab.rows.start + (panel + p) * ROWS;
                let count = (slab.rows.end - row).min(ROWS);
                let out = task.out_at(selected + t, row);
                add_to(out, count, sum, slab.columns.start == 0);
            }
        }
    }
}

/// Adds the first `count` lanes to `out`, or sets `out` if they are the first to come.
///
/// # Safety
/// `out` is valid for `count` numbers, and the machine has AVX.
#[inline(always)]
unsafe fn add_to(out: *mut f32, count: usize, sum: __m256, is_first: bool) {
    // SAFETY: by the caller's promise; lanes that are masked out are not touched.
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

/// Most vectors of 16-bit products of codes up to `largest` with activations that can be added
/// without overflow, as a power of two up to `limit`.
pub(crate) const fn sums_in_16_bits(largest: Option<i32>, limit: usize) -> usize {
    let Some(largest) = largest else { return 1 };
    let mut count = limit;
    while count > 1 && count as i32 * 2 * 127 * largest > i16::MAX as i32 {
        count /= 2;
    }
    count
}
