//! The rows of a pass: which arithmetic they take, and where they belong in the cache.

use forebay_ops::RowKind;

use crate::DevicePtr;

/// Rows of a pass, all of one kind.
#[derive(Clone, Copy)]
pub struct PassRows {
    pub kind: RowKind,
    pub count: usize,
    /// Position of each row in its sequence `[count]`.
    pub positions: DevicePtr<u32>,
    /// Number of each row's table among those of [`super::KvTables`] `[count]`.
    pub tables: DevicePtr<u32>,
    /// Prompt rows as attention takes them; nothing for generated tokens.
    pub tiles: PromptTiles,
}

/// Consecutive rows of one sequence in a pass of prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptRun {
    /// Index of the first row in the pass.
    pub first: usize,
    pub count: usize,
    /// Position of the first row in its sequence.
    pub position: usize,
    /// Number of the sequence's table.
    pub table: usize,
}

/// Tiles of a pass of prompts on the device ([`crate::Gpu::prompt_tiles`]).
#[derive(Clone, Copy)]
pub struct PromptTiles {
    /// Four words for each tile, aligned to 16 bytes (`PromptTile` of the kernels).
    pub words: DevicePtr<u32>,
    pub count: usize,
    /// True if a tile has one part of the context, and false if it has all parts.
    pub in_parts: bool,
}

/// A pass of prompts cut into tiles, before it is on the device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CutPrompts {
    pub tiles: Vec<[u32; PromptTiles::WORDS]>,
    /// The same as in [`PromptTiles`].
    pub in_parts: bool,
}

impl PromptTiles {
    /// Number of words of a tile.
    pub const WORDS: usize = 4;

    pub fn none() -> PromptTiles {
        PromptTiles { words: DevicePtr::null(), count: 0, in_parts: false }
    }
}
