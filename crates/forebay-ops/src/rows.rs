//! The two kinds of rows in a pass, which differ in their arithmetic.

/// The kind of a row: one token of one sequence in a pass.
///
/// The kind selects the kernels, and so the order in which products and sums are rounded. What a row's result depends on is
/// its kind, its position and its sequence. It never depends on the number of rows beside it, nor on where a prompt is
/// cut into batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowKind {
    /// A token of a prompt. Kernels read each weight once for many rows.
    Prompt,
    /// A generated token. Kernels are as fast as possible for a single row.
    Decode,
}
