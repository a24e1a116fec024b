//! States of recurrent layers in host memory: those after prefixes that later prompts are likely to share, and those of suspended
//! sequences. They are in a group of their own of the KV tiers, and share the memory of KV blocks.

use super::{Runner, SavedPlace, SavedSequence};
use crate::EngineError;
use crate::kv::{GroupConfig, KV_BLOCK, SequenceId};

/// Positions at the end of a prompt behind which no state is kept: templates end a prompt with tokens that announce an answer, and
/// the next turn has others in their place.
const TURN_END: usize = 16;

/// Fewest rows that a kept state must spare later prompts. Reading so few rows again takes less than a pass that ends at a block.
const ROWS_LEAST: usize = 64;

/// Returns the group of states in the tiers. A prefix needs only the state at its end, as in a layer with a window.
pub(super) fn group(bytes: usize) -> GroupConfig {
    GroupConfig { window: Some(1), blocks: 1, on_device: 1, block_bytes: bytes }
}

impl Runner {
    /// Returns the position at which a prompt of `prompt` rows must be cut, so that its state there can be kept. The first
    /// `begun` rows were known when it began. `None` means that it need not be cut.
    pub fn state_border(&self, prompt: usize, begun: usize) -> Option<usize> {
        self.state_group?;
        let border = prompt.saturating_sub(TURN_END) / KV_BLOCK * KV_BLOCK;
        (border >= begun + ROWS_LEAST).then_some(border)
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

    /// Gives a new sequence the state that was kept after its first `rows` rows.
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
}
