//! States of recurrent layers outside the device: those after prefixes that later prompts are likely to share, and those of
//! suspended sequences. They are in a group of their own of the KV tiers, and share the memory and the folder of KV blocks.

use forebay_ops::KV_BLOCK;

use super::{Runner, SavedPlace, SavedSequence};
use crate::EngineError;
use crate::engine::SnapshotBlock;
use crate::kv::{GroupConfig, SequenceId};

/// Positions at the end of a prompt behind which no state is kept: templates end a prompt with tokens that announce an answer, and
/// the next turn has others in their place.
const TURN_END: usize = 16;

/// Fewest rows that a kept state must spare later prompts. Reading so few rows again takes less than a pass that ends at a block.
const ROWS_MIN: usize = 64;

/// Bounds of the interval at which states are kept within a prompt, unless the user chooses it. It is a multiple of the least one,
/// so that few passes over prompt rows end early.
const INTERVAL_MIN: usize = 512;
const INTERVAL_MAX: usize = 4096;

/// Returns the number of prompt rows between two kept states at which states take about as much memory as keys and values, of which
/// a row has `row_bytes`.
pub(super) fn usual_interval(state_bytes: usize, row_bytes: usize) -> usize {
    let rows = state_bytes / row_bytes.max(1);
    rows.next_multiple_of(INTERVAL_MIN).clamp(INTERVAL_MIN, INTERVAL_MAX)
}

/// Returns the group of states in the tiers. A prefix needs only the state at its end, as in a layer with a window.
pub(super) fn group(bytes: usize) -> GroupConfig {
    GroupConfig { window: Some(1), blocks: 1, on_device: 1, block_bytes: bytes }
}

impl Runner {
    /// Returns the next position at which a prompt of `prompt` rows must be cut, so that its state there can be kept. `done` rows
    /// are computed, and the first `begun` rows were known when the prompt began. `None` means that it need not be cut.
    pub fn state_border(&self, prompt: usize, begun: usize, done: usize) -> Option<usize> {
        self.state_group?;
        let least = begun + ROWS_MIN;
        let end = prompt.saturating_sub(TURN_END) / KV_BLOCK * KV_BLOCK;
        if end < least || end <= done {
            return None;
        }
        let every = self.snapshot_every;
        let within = (every > 0).then(|| (done.max(least - 1) / every + 1) * every);
        Some(within.filter(|within| within + ROWS_MIN <= end).unwrap_or(end))
    }

    /// Returns the group of the tiers that holds states, if the model has recurrent layers.
    pub fn state_group(&self) -> Option<usize> {
        self.state_group
    }

    /// Says at which multiples of rows states of prompts are kept, beside those near their ends; 0 keeps only these. Does nothing
    /// without recurrent layers.
    pub fn set_snapshot_interval(&mut self, rows: usize) {
        // No prompt is longer than the context.
        self.snapshot_every = rows.min(self.decoder.backend().context()).next_multiple_of(KV_BLOCK);
    }

    /// Keeps the state of a sequence whose length is a multiple of the block size, so that later sequences with the same rows begin
    /// there. Does nothing if host memory has no room.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn keep_state(&mut self, sequence: SequenceId) -> Result<(), EngineError> {
        let rows = self.blocks.len(sequence);
        let (Some(group), true) = (self.state_group, rows > 0 && rows.is_multiple_of(KV_BLOCK))
        else {
            return Ok(());
        };
        let last = rows / KV_BLOCK - 1;
        let (key, link) = self.blocks.block_key(sequence, group, last).expect("the block is full");
        if self.tiers.has(key) {
            return Ok(());
        }
        let Some(slot) = self.tiers.take(group)? else { return Ok(()) };
        let bytes = self.tiers.slot_bytes_mut(&slot);
        match self.decoder.save_state(sequence.slot(), rows, bytes) {
            Ok(true) => self.tiers.insert(key, link, slot, 0),
            other => {
                self.tiers.release(slot);
                other?;
            }
        }
        Ok(())
    }

    /// Returns the number of rows of a sequence, at most `rows`, after which its state is kept last; 0 if there is none.
    pub(super) fn kept_before(&self, sequence: SequenceId, rows: usize) -> usize {
        let Some(group) = self.state_group else { return 0 };
        let is_kept = |blocks: &usize| {
            let key = self.blocks.block_key(sequence, group, blocks - 1);
            key.is_some_and(|(key, _)| self.tiers.has(key))
        };
        (1..=rows / KV_BLOCK).rev().find(is_kept).unwrap_or(0) * KV_BLOCK
    }

    /// Gives a sequence the state that was kept after its first `rows` rows.
    pub(super) fn take_kept_state(
        &mut self,
        sequence: SequenceId,
        rows: usize,
    ) -> Result<(), EngineError> {
        let (Some(group), true) = (self.state_group, rows > 0) else { return Ok(()) };
        let Runner { decoder, blocks, tiers, .. } = self;
        let last = rows / KV_BLOCK - 1;
        let block_key = blocks.block_key(sequence, group, last);
        let (key, _) = block_key.expect("the prefix has full blocks");
        let (memory, range) = tiers.place(key).expect("the prefix ends where a state is kept");
        decoder.restore_state(sequence.slot(), rows, &memory.as_ref()[range])?;
        tiers.note_use(key.hash);
        Ok(())
    }

    /// Copies the state of a sequence to a slot of its own. Returns false if host memory has no room. True if there are no states.
    pub(super) fn copy_state(
        &mut self,
        sequence: SequenceId,
        saved: &mut SavedSequence,
    ) -> Result<bool, EngineError> {
        let Some(group) = self.state_group.filter(|_| saved.len() > 0) else { return Ok(true) };
        let Some(slot) = self.tiers.take(group)? else { return Ok(false) };
        saved.blocks.push((group, 0, SavedPlace::Own(slot)));
        let bytes = self.tiers.slot_bytes_mut(&slot);
        Ok(self.decoder.save_state(sequence.slot(), saved.len(), bytes)?)
    }

    /// Gives a sequence the state that was copied with it.
    pub(super) fn restore_saved_state(
        &mut self,
        sequence: SequenceId,
        saved: &SavedSequence,
    ) -> Result<(), EngineError> {
        let Some(group) = self.state_group else { return Ok(()) };
        let Runner { decoder, tiers, .. } = self;
        decoder.forget_state(sequence.slot());
        let Some((_, _, place)) = saved.blocks.iter().find(|(of, _, _)| *of == group) else {
            return Ok(());
        };
        let (memory, range) = place.place(tiers);
        Ok(decoder.restore_state(sequence.slot(), saved.len(), &memory.as_ref()[range])?)
    }

    /// Appends a copy of the state of a sequence to copies of its blocks. Returns false if there is no state after its rows.
    pub(super) fn export_state(
        &mut self,
        sequence: SequenceId,
        to: &mut Vec<SnapshotBlock>,
    ) -> Result<bool, EngineError> {
        let rows = self.blocks.len(sequence);
        let Some(group) = self.state_group.filter(|_| rows > 0) else { return Ok(true) };
        let mut bytes = vec![0; self.decoder.state_bytes()];
        let is_saved = self.decoder.save_state(sequence.slot(), rows, &mut bytes)?;
        to.push(SnapshotBlock { group, index: 0, bytes });
        Ok(is_saved)
    }

    /// Returns the group, the index and the bytes of the state that a sequence with so many rows has beside its blocks.
    pub(super) fn state_seen(&self, rows: usize) -> Option<(usize, usize, usize)> {
        let group = self.state_group.filter(|_| rows > 0)?;
        Some((group, 0, self.decoder.state_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_take_about_as_much_memory_as_keys_and_values() {
        // Qwen3.6-35B-A3B: 63 MiB, and 20 KiB for each token.
        assert_eq!(usual_interval(63 << 20, 20 << 10), 3584);
        assert_eq!(usual_interval(100, 4096), 512);
        assert_eq!(usual_interval(1 << 30, 64), 4096);
        assert_eq!(usual_interval(1 << 20, 0), 4096);
    }
}
