//! Sequences that are copied to host memory, and go on later.

use forebay_kv::BlockHash;

use super::{Runner, SavedPlace, SavedSequence, has_room};
use crate::EngineError;
use crate::engine::SnapshotBlock;
use crate::engine::SnapshotError;
use crate::kv::{Row, SavedBlock, SequenceId};

impl Runner {
    /// Copies a sequence to host memory and ends it. Returns `None`, and ends it all the same, if host memory has no room.
    ///
    /// # Errors
    /// Returns an error if memory cannot be reserved or the device fails. The sequence goes on then.
    pub fn suspend(&mut self, sequence: SequenceId) -> Result<Option<SavedSequence>, EngineError> {
        // Blocks get their content before they are copied.
        self.apply_changes()?;
        self.wait_for_arrival(sequence)?;
        let mut saved = SavedSequence {
            root: self.blocks.root(sequence),
            rows: self.blocks.rows(sequence).to_vec(),
            blocks: Vec::new(),
        };
        let copied = match self.copy_blocks(sequence, &mut saved) {
            Ok(true) => self.copy_state(sequence, &mut saved),
            copied => copied,
        };
        if let Ok(true) = copied {
            self.end(sequence);
            return Ok(Some(saved));
        }
        self.forget(saved);
        copied?;
        self.end(sequence);
        Ok(None)
    }

    /// Copies the blocks of a sequence to host memory. Returns false if it has no room for all.
    fn copy_blocks(
        &mut self,
        sequence: SequenceId,
        saved: &mut SavedSequence,
    ) -> Result<bool, EngineError> {
        let Runner { decoder, blocks, tiers, .. } = self;
        for SavedBlock { group, index, block } in blocks.blocks_to_save(sequence) {
            let key = blocks.block_key(sequence, group, index);
            if let Some((key, _)) = key
                && tiers.has(key)
            {
                tiers.lease(key.hash);
                saved.blocks.push((group, index, SavedPlace::Shared(key)));
                continue;
            }
            let Some(slot) = tiers.take(group)? else { return Ok(false) };
            tiers.copy_to(slot, decoder.backend_mut(), block)?;
            let place = match key {
                Some((key, link)) => {
                    tiers.insert(key, link, slot, 0);
                    tiers.lease(key.hash);
                    SavedPlace::Shared(key)
                }
                None => SavedPlace::Own(slot),
            };
            saved.blocks.push((group, index, place));
        }
        Ok(true)
    }

    /// Copies the blocks of a sequence with these rows to host memory. Returns `None` if it has no room.
    ///
    /// # Errors
    /// Returns an error if these are not the blocks that a sequence with these rows needs, or if memory cannot be reserved.
    pub fn import(
        &mut self,
        root: BlockHash,
        rows: &[Row],
        blocks: Vec<SnapshotBlock>,
    ) -> Result<Option<SavedSequence>, EngineError> {
        let own = blocks.iter().map(|block| (block.group, block.index, block.bytes.len()));
        let seen = self.blocks.blocks_seen(rows.len()).chain(self.state_seen(rows.len()));
        if !own.eq(seen) {
            let why = "its KV blocks are not those that this engine needs".into();
            return Err(SnapshotError::Bad { why }.into());
        }
        let mut saved = SavedSequence { root, rows: rows.to_vec(), blocks: Vec::new() };
        for SnapshotBlock { group, index, bytes } in blocks {
            match self.tiers.take(group) {
                Ok(Some(slot)) => {
                    self.tiers.slot_bytes_mut(&slot).copy_from_slice(&bytes);
                    saved.blocks.push((group, index, SavedPlace::Own(slot)));
                }
                full => {
                    self.forget(saved);
                    full?;
                    return Ok(None);
                }
            }
        }
        Ok(Some(saved))
    }

    /// Begins a saved sequence where it ended, if there is room for `known_rows`, and `left_free` blocks of each layer group
    /// remain free. The copy stays as it is.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn resume(
        &mut self,
        saved: &SavedSequence,
        known_rows: usize,
        left_free: &[usize],
    ) -> Result<Option<SequenceId>, EngineError> {
        let needed = self.blocks.blocks_needed(known_rows, 0);
        if !has_room(&self.blocks, needed, left_free) {
            return Ok(None);
        }
        self.moved.clear();
        let sequence =
            self.blocks.restore(saved.root, &saved.rows, &mut self.moved, &mut self.changes)?;
        let moved = std::mem::take(&mut self.moved);
        let restored = self.restore_saved_state(sequence, saved);
        let restored = restored.and_then(|()| self.apply_changes()).and_then(|()| {
            let Runner { decoder, tiers, last_restoring, .. } = self;
            let mut contents = moved.iter().map(|of| {
                let place = (of.group, of.index);
                let found = saved.blocks.binary_search_by_key(&place, |(g, i, _)| (*g, *i));
                let at = found.expect("all blocks that the next token sees were saved");
                of.with_content(saved.blocks[at].2.place(tiers))
            });
            *last_restoring = decoder.backend_mut().restore_blocks(&mut contents)?;
            // Others may have begun to copy blocks that this sequence shares.
            self.wait_for_arrivals()
        });
        self.moved = moved;
        if let Err(error) = restored {
            self.blocks.abandon(sequence, &self.moved);
            return Err(error);
        }
        Ok(Some(sequence))
    }

    /// Gives up a copy.
    pub fn forget(&mut self, saved: SavedSequence) {
        for (_, _, place) in saved.blocks {
            match place {
                SavedPlace::Shared(key) => self.tiers.end_lease(key.hash),
                SavedPlace::Own(slot) => self.tiers.release(slot),
            }
        }
    }
}
