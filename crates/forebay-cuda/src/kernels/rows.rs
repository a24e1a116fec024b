//! The rows of a pass: which arithmetic they take, and where they belong in the cache.

use crate::DevicePtr;

/// The kind of a row, which selects the kernels and so the order in which sums are rounded. A row's bits depend on its
/// kind, its position and its sequence alone. The CPU's type of the same name has the same meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// A token of a prompt.
    Prompt,
    /// A generated token.
    Decode,
}

/// Rows of a pass, all of one kind.
#[derive(Clone, Copy)]
pub struct PassRows {
    pub kind: RowKind,
    pub count: usize,
    /// Position of each row in its sequence `[count]`.
    pub positions: DevicePtr<u32>,
    /// Number of each row's table among those of [`super::KvTables`] `[count]`.
    pub tables: DevicePtr<u32>,
}
