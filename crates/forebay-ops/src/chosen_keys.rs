//! The keys that rows of attention choose.

use crate::pools::Pools;

/// The positions that rows of attention see. `L` is where a device has their lists.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChosenKeys<L> {
    /// Ascending numbers of pools `[rows, lists of a row, most]`. A row also sees the positions after the last pool that it may choose. On a GPU, the list
    /// of a row that sees all positions begins with all pools that it may choose; on the CPU, such lists are not read.
    pub lists: L,
    /// Number of lists of a row: one for each key/value head, or one for all.
    pub lists_of_row: usize,
    pub pools: Pools,
}
