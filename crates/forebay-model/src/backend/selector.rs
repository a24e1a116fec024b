//! What is wanted of the logits of a pass, known only once its work is queued.

use crate::sampling::{Largest, LogitChange};

/// Most changes of a row's logits on a device.
pub const CHANGES_MAX: usize = 1024;

/// What is wanted of a row of logits.
#[derive(Debug, Clone, Copy)]
pub struct RowSelection<'a> {
    /// Number of the largest logits, of the tokens that are allowed and after the changes.
    pub count: usize,
    /// The divisor of the logits in the row's total, if that is wanted.
    pub total_at: Option<f32>,
    /// Changes of single logits, at most one for a token and [`CHANGES_MAX`] in all.
    pub changes: &'a [LogitChange],
    /// Tokens that are allowed ([`is_allowed`](crate::sampling::is_allowed)). `None` means all.
    pub allowed: Option<&'a [u32]>,
}

/// Decides what is wanted of the logits of a pass, and takes it.
pub trait Selector {
    /// Returns what is wanted of the next `outputs` rows. The work of the pass is queued, so waiting costs no time while the
    /// device computes.
    fn selections(&mut self, outputs: usize) -> Vec<RowSelection<'_>>;

    /// Takes the next row. Returns true if all its logits are needed.
    fn take(&mut self, largest: Largest<'_>) -> bool;

    /// Takes all logits of the row that was taken last, after its changes.
    fn take_all(&mut self, logits: Vec<f32>);

    /// Returns the number of rows that were taken.
    fn taken(&self) -> usize;

    /// Forgets all rows but the first `taken`.
    fn truncate(&mut self, taken: usize);
}
