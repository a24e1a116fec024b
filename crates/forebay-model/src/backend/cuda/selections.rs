//! What is wanted of the rows of logits of a pass, on its way to the device.

use forebay_cuda::{CudaError, DevicePtr, Gpu, HostWords, Selections};

use crate::backend::{CHANGES_MAX, RowSelection};

/// Returns the words of the selections of `rows` rows.
pub fn selection_words(rows: usize, vocabulary: usize) -> usize {
    rows * (4 + 4 * CHANGES_MAX + vocabulary.div_ceil(32))
}

/// A pinned buffer for the selections of a pass, and its copy on the device.
pub struct SelectionWords {
    words: HostWords,
    device: DevicePtr<u32>,
    vocabulary: usize,
    /// The words of a pass.
    written: Vec<u32>,
}

impl SelectionWords {
    /// Reserves pinned memory for `rows` rows. `device` has [`selection_words`] words.
    pub fn new(
        gpu: &Gpu,
        rows: usize,
        vocabulary: usize,
        device: DevicePtr<u32>,
    ) -> Result<SelectionWords, CudaError> {
        let words = gpu.host_words(selection_words(rows, vocabulary))?;
        Ok(SelectionWords { words, device, vocabulary, written: Vec::new() })
    }

    /// Queues the copy of selections to the device. No queued work may use the words of an earlier pass. `totals` is where the
    /// rows' totals will be.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if there are too many rows or changes.
    pub fn queue_up(
        &mut self,
        gpu: &Gpu,
        rows: &[RowSelection<'_>],
        totals: DevicePtr<f32>,
    ) -> Result<Selections, CudaError> {
        let mask_words = self.vocabulary.div_ceil(32);
        let out = &mut self.written;
        out.clear();
        out.resize(4 * rows.len(), 0);
        for (row, selection) in rows.iter().enumerate() {
            assert!(selection.changes.len() <= CHANGES_MAX, "too many changes of logits");
            let changes = out.len();
            out.extend(selection.changes.iter().flat_map(|change| {
                let [divisor, subtracted, added] =
                    [change.divisor, change.subtracted, change.added].map(f32::to_bits);
                [change.id, divisor, subtracted, added]
            }));
            let mask = selection.allowed.map(|allowed| {
                let mask = out.len();
                out.extend_from_slice(&allowed[..allowed.len().min(mask_words)]);
                out.resize(mask + mask_words, 0);
                mask
            });
            let divisor = selection.total_at.unwrap_or(0.0);
            let count = selection.changes.len();
            let of_row = Selections::row(mask.unwrap_or(0), changes, count, divisor);
            out[4 * row..4 * row + 4].copy_from_slice(&of_row);
        }
        self.words.write(0, out);
        gpu.read_words(&self.words, 0..out.len(), self.device)?;
        let has_changes = rows.iter().any(|row| !row.changes.is_empty());
        let has_totals = rows.iter().any(|row| row.total_at.is_some());
        let (words, count) = (self.device, out.len());
        Ok(Selections { words, count, totals, has_totals, has_changes })
    }
}
