//! Products with many tokens, tile by tile.
//!
//! A panel holds a few rows of weights, as many as a vector has 32-bit lanes, unpacked over a slab
//! of columns. The rows' numbers for the same columns are adjacent. One vector instruction then
//! multiplies all these rows with one token's numbers, broadcast. A panel stays in the L1 cache
//! while all tokens are multiplied with it, a few at a time, so each row is unpacked only once.
//!
//! This file iterates over rows, columns and tokens; a [`PanelKernel`] packs and multiplies.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use super::task::{ChunkRows, Scratch, Task};

/// Number of rows that are packed before the tokens are multiplied. Two panels at a time are
/// multiplied with the tokens, so the activations of a block are read from the L2 cache once for
/// every two panels.
const BATCH: usize = 64;

/// Number of rows that one call computes. With several batches in a call, the next batch's bytes can
/// be prefetched.
pub(crate) const CHUNK: ChunkRows = ChunkRows::Batches(32, 4 * BATCH);

/// Number of tokens in a block. Their part of a slab fits the L2 cache.
const TOKENS_OF_BLOCK: usize = 64;

/// Packing and multiplication for a set of weight types.
///
/// A common requirement of its unsafe methods: the machine has the kernel's instructions. The
/// methods are `inline(always)`, so that they become part of a function that enables these.
pub(crate) trait PanelKernel: Sized {
    /// Number of rows in a panel.
    const ROWS: usize;
    /// Number of columns in a slab: whole blocks of weights and of activations.
    const SLAB: usize;
    /// Number of columns that one call packs: whole blocks of weights and of activations. A slab has
    /// a multiple of it. Smaller steps spread prefetches better.
    const STEP: usize = 256;
    /// Largest number of tokens in a tile.
    const TILE: usize;
    /// Pointer to one token's numbers for a slab.
    type Token: Copy;
    /// One number for each row of a panel.
    type Sum: Copy;

    /// Returns the size in bytes of a panel of `columns` columns; a multiple of 32.
    fn panel_bytes(columns: usize) -> usize;

    /// Packs the given columns of a panel's rows, at most [`Self::STEP`], to `to`.
    ///
    /// # Safety
    /// See the trait. `to` is valid for `panel_bytes(columns)` bytes and aligned to 32.
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, to: *mut u8);

    /// Returns the number of bytes that `token` needs for each token of a block; a multiple of 32.
    fn token_bytes() -> usize {
        0
    }

    /// Returns a token's numbers for the given columns, which it may write to `buffer`.
    ///
    /// # Safety
    /// See the trait. `buffer` is valid for `token_bytes()` bytes and aligned to 32.
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        buffer: *mut u8,
    ) -> Self::Token;

    /// Returns the products of P panels with N tokens.
    ///
    /// # Safety
    /// See the trait. The panels and tokens were prepared for `columns` columns.
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [Self::Token; N],
        columns: usize,
    ) -> [[Self::Sum; P]; N];

    /// Adds the first `count` numbers to `out`, or sets `out` to them if `is_first`.
    ///
    /// # Safety
    /// See the trait. `out` is valid for `count` numbers, at most `ROWS`.
    unsafe fn add(sum: Self::Sum, out: *mut f32, count: usize, is_first: bool);

    /// Computes a tile. [`tile_sizes`](crate::matmul::panel::tile_sizes) implements it.
    ///
    /// # Safety
    /// The requirements of [`tile`] hold.
    unsafe fn any_tile(task: &Task, slab: &Slab, at: TileAt, tokens: &[Option<Self::Token>]);
}

/// Row numbers of a panel. A short last panel repeats the last row.
pub(crate) struct PanelRows {
    first: usize,
    last: usize,
}

impl PanelRows {
    /// Returns row `i` of the panel and the seven after it.
    #[inline(always)]
    pub(crate) fn eight(&self, i: usize) -> [usize; 8] {
        let mut rows = [0; 8];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = (self.first + i + j).min(self.last);
        }
        rows
    }

    /// Returns how many of the rows that [`Self::eight`] returns are not repeated.
    #[inline(always)]
    pub(crate) fn count(&self, i: usize) -> usize {
        (self.last + 1).saturating_sub(self.first + i).min(8)
    }
}

/// Packed rows over a slab of columns.
pub(crate) struct Slab {
    rows: Range<usize>,
    columns: Range<usize>,
    panels: *const u8,
    panel_bytes: usize,
    /// Buffer for the numbers that [`PanelKernel::token`] writes.
    tokens: *mut u8,
}

/// Position of a tile.
#[derive(Clone, Copy)]
pub(crate) struct TileAt {
    /// Index of the first of the tile's two panels, or of the last panel.
    pub(crate) panel: usize,
    pub(crate) is_last_panel: bool,
    /// Index of the tile's first token among the selected tokens.
    pub(crate) selected: usize,
}

/// Implements [`PanelKernel::any_tile`] for the given numbers of tokens.
macro_rules! tile_sizes {
    ($($count:literal)*) => {
        // SAFETY: the caller must meet the requirements of the trait's method.
        #[inline(always)]
        unsafe fn any_tile(task: &Task, slab: &Slab, at: TileAt, tokens: &[Option<Self::Token>]) {
            // SAFETY: as for this function. `tokens` has as many tokens as the tile.
            unsafe {
                match (tokens.len(), at.is_last_panel) {
                    $(($count, true) => tile::<Self, $count, 1>(task, slab, at, tokens),)*
                    $(($count, false) => tile::<Self, $count, 2>(task, slab, at, tokens),)*
                    _ => {}
                }
            }
        }
    };
}
pub(crate) use tile_sizes;

/// Multiplies P panels with N tokens and adds the products to the output.
///
/// # Safety
/// See [`PanelKernel`]. There are that many panels and tokens, and only the caller uses these rows
/// of the output.
#[inline(always)]
pub(crate) unsafe fn tile<K: PanelKernel, const N: usize, const P: usize>(
    task: &Task,
    slab: &Slab,
    at: TileAt,
    tokens: &[Option<K::Token>],
) {
    // SAFETY: panels lie one after the other; the caller promises the rest.
    unsafe {
        let tokens = std::array::from_fn(|t| tokens.get_unchecked(t).unwrap_unchecked());
        let panels = std::array::from_fn(|p| slab.panels.add((at.panel + p) * slab.panel_bytes));
        let sums = K::products::<N, P>(panels, tokens, slab.columns.len());
        for (t, sums) in sums.into_iter().enumerate() {
            for (p, sum) in sums.into_iter().enumerate() {
                let row = slab.rows.start + (at.panel + p) * K::ROWS;
                let count = (slab.rows.end - row).min(K::ROWS);
                let out = task.out_at(at.selected + t, row);
                K::add(sum, out, count, slab.columns.start == 0);
            }
        }
    }
}

/// Computes rows of a task. The range starts at a multiple of the kernel's rows.
///
/// # Safety
/// The requirements of [`crate::matmul::task::Kernel`] hold.
#[inline(always)]
pub(crate) unsafe fn rows<K: PanelKernel>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    for first in rows.clone().step_by(BATCH) {
        // SAFETY: as for this function.
        unsafe { batch::<K>(task, first..rows.end.min(first + BATCH), scratch) };
    }
}

/// Computes the rows of one batch.
///
/// # Safety
/// The requirements of [`rows`] hold.
#[inline(always)]
unsafe fn batch<K: PanelKernel>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let panels = rows.len().div_ceil(K::ROWS);
    let mut from = 0;
    while from < task.cols {
        let columns = from..task.cols.min(from + K::SLAB);
        let panel_bytes = K::panel_bytes(columns.len());
        let buffer_bytes = panels * panel_bytes + TOKENS_OF_BLOCK * K::token_bytes();
        let buffer = scratch.codes.first(buffer_bytes).as_mut_ptr().cast::<u8>();
        for panel in 0..panels {
            let panel_rows = PanelRows { first: rows.start + panel * K::ROWS, last: rows.end - 1 };
            for first in columns.clone().step_by(K::STEP) {
                let step = first..columns.end.min(first + K::STEP);
                let at = panel * panel_bytes + K::panel_bytes(first - columns.start);
                prefetch_next_batch::<K>(task, panel_rows.first, step.clone());
                // SAFETY: the buffer holds all panels; the caller promises the rest.
                unsafe { K::pack(task, &panel_rows, step, buffer.add(at)) };
            }
        }
        let slab = Slab {
            rows: rows.clone(),
            columns: columns.clone(),
            panels: buffer,
            panel_bytes,
            // SAFETY: this is after the panels and inside the buffer.
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

/// Prefetches, into the L2 cache, the columns of the panel that is one batch after the panel from
/// `row` on. It may lie in the next chunk or past the end of the weights.
///
/// Packing reads a few bytes of one row after the other. The processor's own prefetcher does not
/// follow this, and with few tokens, packing is most of the work. Prefetching into the L1 cache, or
/// less than a batch ahead, was slower.
#[inline(always)]
fn prefetch_next_batch<K: PanelKernel>(task: &Task, row: usize, columns: Range<usize>) {
    let byte = |column: usize| column / task.ty.block_elements() * task.ty.block_bytes();
    let bytes = byte(columns.end) - byte(columns.start);
    let first = task.row(row).as_ptr().wrapping_add(byte(columns.start) + BATCH * task.row_bytes);
    for i in 0..K::ROWS {
        for line in (0..bytes).step_by(64) {
            let at = first.wrapping_add(i * task.row_bytes + line);
            // SAFETY: a prefetch does not access memory as far as the program can observe.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
        }
    }
}

/// Multiplies all panels of a slab with a block of tokens.
///
/// # Safety
/// The requirements of [`rows`] hold.
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
    let panels = slab.rows.len().div_ceil(K::ROWS);
    for panel in (0..panels).step_by(2) {
        for first in (0..tokens.len()).step_by(K::TILE) {
            let found = &found[first..tokens.len().min(first + K::TILE)];
            let is_last_panel = panel + 1 == panels;
            let at = TileAt { panel, is_last_panel, selected: tokens.start + first };
            // SAFETY: as for this function.
            unsafe { K::any_tile(task, slab, at, found) };
        }
    }
}

/// Returns how many vectors of 16-bit products can be added without overflow, as a power of two up
/// to `limit`. The products are of codes up to `largest` with activations.
pub(crate) const fn sums_in_16_bits(largest: Option<i32>, limit: usize) -> usize {
    let Some(largest) = largest else { return 1 };
    let mut count = limit;
    while count > 1 && count as i32 * 2 * 127 * largest > i16::MAX as i32 {
        count /= 2;
    }
    count
}
