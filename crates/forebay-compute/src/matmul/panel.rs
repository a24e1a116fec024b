//! Products with many tokens, tile by tile.
//!
//! A few rows of weights, as many as a vector has 32-bit lanes, are unpacked over a slab of
//! columns into a panel in which the rows' numbers for the same columns lie side by side. One
//! vector instruction then multiplies all these rows with one token's numbers, broadcast. Panels
//! stay in the first cache while all tokens pass by, a few at a time, and unpacking is paid once
//! for all of them.
//!
//! This file walks through rows, columns and tokens; a [`PanelKernel`] packs and multiplies.

use std::ops::Range;

use super::task::{ChunkRows, Scratch, Task};

/// Rows that one call packs. Panels run through the tokens two at a time, and the activations of
/// a block come from the second cache once for every two panels.
pub(crate) const CHUNK: ChunkRows = ChunkRows::Batches(32, 64);

/// Tokens of a block: their part of a slab stays in the second cache.
const TOKENS_OF_BLOCK: usize = 64;

/// How the weights of some types are packed and multiplied.
///
/// A common condition of its unsafe methods: the machine has the kernel's instructions. They are
/// `inline(always)`, to become part of a function that enables these.
pub(crate) trait PanelKernel: Sized {
    /// Rows of a panel.
    const ROWS: usize;
    /// Columns of a slab: whole blocks of weights and of activations.
    const SLAB: usize;
    /// Most tokens of a tile.
    const TILE: usize;
    /// Where one token's numbers for a slab begin.
    type Token: Copy;
    /// One number for each row of a panel.
    type Sum: Copy;

    /// Bytes of a panel of `columns`; a multiple of 32.
    fn panel_bytes(columns: usize) -> usize;

    /// Packs some columns of the rows of a panel.
    ///
    /// # Safety
    /// See the trait; `panel` has `panel_bytes(columns)`, aligned to 32.
    unsafe fn pack(task: &Task, rows: &PanelRows, columns: Range<usize>, panel: *mut u8);

    /// Bytes that `token` wants for each token of a block; a multiple of 32.
    fn token_bytes() -> usize {
        0
    }

    /// Finds, or makes in `buffer`, a token's numbers for some columns.
    ///
    /// # Safety
    /// See the trait; `buffer` has `token_bytes()`, aligned to 32.
    unsafe fn token(
        task: &Task,
        selected: usize,
        columns: Range<usize>,
        buffer: *mut u8,
    ) -> Self::Token;

    /// The products of P panels with N tokens.
    ///
    /// # Safety
    /// See the trait; panels and tokens were made for `columns` columns.
    unsafe fn products<const N: usize, const P: usize>(
        panels: [*const u8; P],
        tokens: [Self::Token; N],
        columns: usize,
    ) -> [[Self::Sum; P]; N];

    /// Adds the first `count` numbers to `out`, or sets `out` if they are the first to come.
    ///
    /// # Safety
    /// See the trait; `out` is valid for `count` numbers, at most `ROWS`.
    unsafe fn add(sum: Self::Sum, out: *mut f32, count: usize, is_first: bool);

    /// Computes a tile; [`tile_sizes`](crate::matmul::panel::tile_sizes) writes it.
    ///
    /// # Safety
    /// As [`tile`].
    unsafe fn any_tile(task: &Task, slab: &Slab, at: TileAt, tokens: &[Option<Self::Token>]);
}

/// The rows of a panel. A short last panel repeats the last row.
pub(crate) struct PanelRows {
    first: usize,
    last: usize,
}

impl PanelRows {
    /// Row `i` of the panel and the seven after it.
    #[inline(always)]
    pub(crate) fn eight(&self, i: usize) -> [usize; 8] {
        let mut rows = [0; 8];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = (self.first + i + j).min(self.last);
        }
        rows
    }
}

/// Packed rows over a slab of columns.
pub(crate) struct Slab {
    rows: Range<usize>,
    columns: Range<usize>,
    panels: *const u8,
    panel_bytes: usize,
    /// Room for what [`PanelKernel::token`] makes.
    tokens: *mut u8,
}

/// Where a tile begins.
#[derive(Clone, Copy)]
pub(crate) struct TileAt {
    /// The first of its two panels, or the last of all.
    pub(crate) panel: usize,
    pub(crate) is_last_panel: bool,
    /// Its first token, an index of those that were selected.
    pub(crate) selected: usize,
}

/// Writes [`PanelKernel::any_tile`], for the given numbers of tokens.
macro_rules! tile_sizes {
    ($($count:literal)*) => {
        // SAFETY: the caller's duties are those that the trait's method states.
        #[inline(always)]
        unsafe fn any_tile(task: &Task, slab: &Slab, at: TileAt, tokens: &[Option<Self::Token>]) {
            // SAFETY: as for this function; so many tokens are there.
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

/// P panels with N tokens, into the output.
///
/// # Safety
/// See [`PanelKernel`]; so many panels and tokens are there, and the rows are the caller's.
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

/// Computes rows of a task, from a multiple of the kernel's rows on.
///
/// # Safety
/// As [`crate::matmul::task::Kernel`].
#[inline(always)]
pub(crate) unsafe fn rows<K: PanelKernel>(task: &Task, rows: Range<usize>, scratch: &mut Scratch) {
    let panels = rows.len().div_ceil(K::ROWS);
    let mut from = 0;
    while from < task.cols {
        let columns = from..task.cols.min(from + K::SLAB);
        let panel_bytes = K::panel_bytes(columns.len());
        let buffer_bytes = panels * panel_bytes + TOKENS_OF_BLOCK * K::token_bytes();
        let buffer = scratch.codes.first(buffer_bytes).as_mut_ptr().cast::<u8>();
        for panel in 0..panels {
            let panel_rows = PanelRows { first: rows.start + panel * K::ROWS, last: rows.end - 1 };
            // SAFETY: the buffer holds all panels; the caller promises the rest.
            unsafe {
                let to = buffer.add(panel * panel_bytes);
                K::pack(task, &panel_rows, columns.clone(), to);
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
