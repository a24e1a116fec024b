//! The blocks of one sequence as a stream of bytes, to go on with it in another process.

use std::io::{Read, Write};

use forebay_model::ModelError;

use super::{Runner, SavedPlace, SavedSequence};
use crate::EngineError;
use crate::engine::SnapshotBlock;
use crate::kv::{Row, SavedBlock, SequenceId};
use crate::kv_file::KvFileError;

impl Runner {
    /// Returns the committed rows of a sequence.
    pub fn rows(&self, sequence: SequenceId) -> &[Row] {
        self.blocks.rows(sequence)
    }

    /// Returns the layer group, the index and the bytes of every block that the next token of a sequence with so many rows sees,
    /// in the order of [`Runner::write_blocks`].
    pub fn blocks_seen(&self, rows: usize) -> Vec<(usize, usize, usize)> {
        self.blocks.blocks_seen(rows).collect()
    }

    /// Returns copies of the blocks that a sequence needs, and of its state if the model has recurrent layers. `None` means that
    /// there is no state after its rows.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn export(
        &mut self,
        sequence: SequenceId,
    ) -> Result<Option<Vec<SnapshotBlock>>, EngineError> {
        self.apply_changes()?;
        self.wait_for_arrival(sequence)?;
        let Runner { decoder, blocks, .. } = self;
        let copied = blocks.blocks_to_save(sequence).map(|SavedBlock { group, index, block }| {
            let mut bytes = vec![0; blocks.block_bytes(group)];
            decoder.backend_mut().save_block(group, block.index() as u32, &mut bytes)?;
            Ok(SnapshotBlock { group, index, bytes })
        });
        let mut copied = copied.collect::<Result<Vec<_>, EngineError>>()?;
        Ok(self.export_state(sequence, &mut copied)?.then_some(copied))
    }

    /// Returns copies of the blocks of a saved sequence.
    pub fn export_saved(&self, saved: &SavedSequence) -> Vec<SnapshotBlock> {
        let copy = |(group, index, place): &(usize, usize, SavedPlace)| {
            let (memory, range) = place.place(&self.tiers);
            SnapshotBlock { group: *group, index: *index, bytes: memory.as_ref()[range].to_vec() }
        };
        saved.blocks.iter().map(copy).collect()
    }

    /// Writes the blocks that the next token of a sequence sees, and its state if the model has recurrent layers.
    ///
    /// # Errors
    /// Returns an error if there is no state after the rows of the sequence, if the device fails or if `to` does.
    pub fn write_blocks(
        &mut self,
        sequence: SequenceId,
        to: &mut dyn Write,
    ) -> Result<(), EngineError> {
        self.apply_changes()?;
        self.wait_for_arrival(sequence)?;
        let Runner { decoder, blocks, .. } = self;
        let mut bytes = Vec::new();
        for SavedBlock { group, block, .. } in blocks.blocks_to_save(sequence) {
            bytes.resize(blocks.block_bytes(group), 0);
            decoder.backend_mut().save_block(group, block.index() as u32, &mut bytes)?;
            to.write_all(&bytes).map_err(KvFileError::Io)?;
        }
        let mut state = Vec::new();
        if !self.export_state(sequence, &mut state)? {
            return Err(ModelError::NoState { position: self.blocks.len(sequence) }.into());
        }
        let mut write = |bytes: &[u8]| to.write_all(bytes).map_err(KvFileError::Io);
        Ok(state.iter().try_for_each(|of| write(&of.bytes))?)
    }

    /// Begins a sequence with these rows, which shares its blocks with no other, and reads its blocks. `is_whole` is asked once
    /// all of them are read: if it returns an error, the sequence ends again.
    ///
    /// # Errors
    /// Returns an error if there are too few blocks, if the device fails or if `from` does.
    pub fn read_blocks<R: Read>(
        &mut self,
        rows: &[Row],
        from: &mut R,
        is_whole: impl FnOnce(&mut R) -> Result<(), EngineError>,
    ) -> Result<SequenceId, EngineError> {
        let seen = self.blocks_seen(rows.len());
        let root = self.root(b"");
        let mut restored = Vec::new();
        let sequence = self.blocks.restore(root, rows, &mut restored, &mut self.changes)?;
        self.decoder.forget_state(sequence.slot());
        let read = || {
            self.apply_changes()?;
            let (mut bytes, mut next) = (Vec::new(), restored.iter().peekable());
            for (group, index, len) in seen {
                bytes.resize(len, 0);
                from.read_exact(&mut bytes).map_err(KvFileError::Io)?;
                // A block that is in a pool already needs no copy.
                let of = next.next_if(|of| (of.group, of.index) == (group, index));
                if let Some(of) = of {
                    let content = of.with_content((&bytes, 0..len));
                    let mut contents = std::iter::once(content);
                    self.last_restoring =
                        self.decoder.backend_mut().restore_blocks(&mut contents)?;
                }
            }
            if let Some((_, _, len)) = self.state_seen(rows.len()) {
                bytes.resize(len, 0);
                from.read_exact(&mut bytes).map_err(KvFileError::Io)?;
                self.decoder.restore_state(sequence.slot(), rows.len(), &bytes)?;
            }
            self.wait_for_arrivals()?;
            is_whole(from)
        };
        if let Err(error) = read() {
            self.blocks.abandon(sequence, &restored);
            return Err(error);
        }
        Ok(sequence)
    }
}
