//! Passes over the rows of sequences: blocks are reserved, the decoder runs, rows are committed.

use std::ops::Range;

use forebay_compute::RowKind;
use forebay_model::{Decoder, ModelError, Output, Pass, PassWatch, Paused, Routing, Run, Selector};

use crate::EngineError;
use crate::engine::SnapshotBlock;
use crate::kv::{
    BlockManager, Changes, GroupConfig, GroupStatistics, KV_BLOCK, Row, SavedBlock, SequenceId,
};
use crate::swap::{SwapSlot, SwapSpace};

/// The decoder with the sequences whose keys and values are in its blocks.
pub(crate) struct Runner {
    pub decoder: Decoder,
    blocks: BlockManager,
    swap: SwapSpace,
    /// Work for the backend before the next pass.
    changes: Changes,
    // Buffers that are reused from pass to pass.
    tokens: Vec<u32>,
    runs: Vec<Run>,
    outputs: Vec<u32>,
    final_rows: Vec<Range<usize>>,
    moved: Vec<SavedBlock>,
}

/// How far a sequence will grow.
pub(crate) struct Growth {
    pub sequence: SequenceId,
    /// Rows whose tokens are known: the prompt, and what is generated.
    pub known_rows: usize,
    /// Rows at the end of the request, at most.
    pub most_rows: usize,
}

/// Copy of a sequence in the swap space.
pub(crate) struct SavedSequence {
    rows: Vec<Row>,
    /// Every block by the index of its layer group, and its index in the sequence's table.
    blocks: Vec<(usize, usize, SwapSlot)>,
}

impl SavedSequence {
    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }
}

/// Most bytes of swap space if the caller does not choose them.
const SWAP_BYTES_MOST: u64 = 4 << 30;

/// Consecutive rows of one sequence, behind the rows that it has.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub sequence: SequenceId,
    pub kind: RowKind,
    pub tokens: &'a [u32],
    pub logits: Logits,
}

/// The rows of [`Rows`] whose logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logits {
    None,
    Last,
    All,
    /// Not logits, but the states behind the last layer of all rows ([`Decoder::final_rows`]).
    FinalStates,
}

/// Where the logits of several passes go.
pub(crate) enum Outputs<'a> {
    Logits(&'a mut Vec<f32>),
    Largest(usize, &'a mut Vec<(f32, u32)>),
    Selected(&'a mut dyn Selector),
}

impl Outputs<'_> {
    /// Returns the output of one pass.
    pub fn again(&mut self) -> Output<'_> {
        match self {
            Outputs::Logits(logits) => Output::Logits(logits),
            Outputs::Largest(count, largest) => Output::Largest(*count, largest),
            Outputs::Selected(selector) => Output::Selected(&mut **selector),
        }
    }
}

impl Runner {
    /// Takes over a decoder, in whose blocks nothing is written yet. Suspended sequences take up to `swap_bytes` of host
    /// memory; `None` is as much as the decoder's blocks have, at most 4 GiB.
    pub fn new(decoder: Decoder, swap_bytes: Option<u64>) -> Runner {
        let backend = decoder.backend();
        let group = |group: forebay_model::KvGroup| GroupConfig {
            window: group.window,
            blocks: group.blocks,
            block_bytes: group.block_bytes as usize,
        };
        let groups: Vec<GroupConfig> = backend.kv_groups().into_iter().map(group).collect();
        // Blocks do not outlive the process, so nothing else needs to be told apart.
        let blocks = BlockManager::new(&groups, backend.batch_tokens(), 0);
        let block_bytes = groups.iter().map(|group| group.block_bytes);
        let swap_bytes = swap_bytes.unwrap_or(backend.cache_bytes().min(SWAP_BYTES_MOST));
        Runner {
            swap: SwapSpace::new(block_bytes, swap_bytes),
            decoder,
            blocks,
            changes: Changes::default(),
            tokens: Vec::new(),
            runs: Vec::new(),
            outputs: Vec::new(),
            final_rows: Vec::new(),
            moved: Vec::new(),
        }
    }

    /// Begins a sequence with the longest prefix of `rows` whose keys and values are in blocks already. Returns the
    /// sequence and the length of that prefix, which is less than that of the rows.
    pub fn begin(&mut self, rows: &[Row]) -> (SequenceId, usize) {
        let admission = self.blocks.admit(rows, &mut self.changes);
        (admission.sequence, admission.hit_rows)
    }

    /// Returns the number of blocks in each layer group that sequences still need for the rows that are known, and at most
    /// `growth` more for each sequence.
    pub fn blocks_left(
        &self,
        sequences: impl Iterator<Item = Growth>,
        growth: usize,
    ) -> Vec<usize> {
        let mut left = vec![0; self.blocks.groups()];
        for Growth { sequence, known_rows, most_rows } in sequences {
            let known = self.blocks.blocks_needed(known_rows, 0);
            let most = self.blocks.blocks_needed(most_rows.max(known_rows), 0);
            let held = self.blocks.blocks_held(sequence);
            for (left, ((known, most), held)) in left.iter_mut().zip(known.zip(most).zip(held)) {
                let soon = known.max(held);
                *left += soon - held + most.saturating_sub(soon).min(growth);
            }
        }
        left
    }

    /// Does the same as [`Runner::begin`] if there is room for all rows, and `left_free` blocks of each layer group remain
    /// free. Returns `None` otherwise. Without `reuse`, no rows of other sequences are used.
    pub fn begin_with_room(
        &mut self,
        rows: &[Row],
        reuse: bool,
        left_free: &[usize],
    ) -> Option<(SequenceId, usize)> {
        let begun = self.begin(if reuse { rows } else { &[] });
        let blocks = &self.blocks;
        let needed = blocks.blocks_needed(rows.len(), 0).zip(blocks.blocks_held(begun.0));
        let needed = needed.map(|(needed, held)| needed.saturating_sub(held));
        if has_room(blocks, needed, left_free) {
            return Some(begun);
        }
        self.end(begun.0);
        None
    }

    /// Copies a sequence to the swap space and ends it. Returns `None`, and ends it all the same, if the swap space has no
    /// room.
    ///
    /// # Errors
    /// Returns an error if memory cannot be reserved or the device fails. The sequence goes on then.
    pub fn suspend(&mut self, sequence: SequenceId) -> Result<Option<SavedSequence>, EngineError> {
        // Blocks get their content before they are copied.
        self.apply_changes()?;
        let mut saved =
            SavedSequence { rows: self.blocks.rows(sequence).to_vec(), blocks: Vec::new() };
        let copied = self.copy_blocks(sequence, &mut saved);
        if let Ok(true) = copied {
            self.end(sequence);
            return Ok(Some(saved));
        }
        self.forget(saved);
        copied?;
        self.end(sequence);
        Ok(None)
    }

    /// Copies the blocks of a sequence to the swap space. Returns false if it has no room for all.
    fn copy_blocks(
        &mut self,
        sequence: SequenceId,
        saved: &mut SavedSequence,
    ) -> Result<bool, EngineError> {
        let Runner { decoder, blocks, swap, .. } = self;
        for SavedBlock { group, index, block } in blocks.blocks_to_save(sequence) {
            let Some(slot) = swap.take(decoder.backend(), group)? else { return Ok(false) };
            saved.blocks.push((group, index, slot));
            let (_, _, slot) = &saved.blocks[saved.blocks.len() - 1];
            decoder.backend_mut().save_block(group, block.index() as u32, swap.bytes_mut(slot))?;
        }
        Ok(true)
    }

    /// Returns copies of the blocks that a sequence needs.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn export(&mut self, sequence: SequenceId) -> Result<Vec<SnapshotBlock>, EngineError> {
        self.apply_changes()?;
        let Runner { decoder, blocks, .. } = self;
        let copied = blocks.blocks_to_save(sequence).map(|SavedBlock { group, index, block }| {
            let mut bytes = vec![0; blocks.block_bytes(group)];
            decoder.backend_mut().save_block(group, block.index() as u32, &mut bytes)?;
            Ok(SnapshotBlock { group, index, bytes })
        });
        copied.collect()
    }

    /// Returns copies of the blocks of a saved sequence.
    pub fn export_saved(&self, saved: &SavedSequence) -> Vec<SnapshotBlock> {
        let copy = |(group, index, slot): &(usize, usize, SwapSlot)| SnapshotBlock {
            group: *group,
            index: *index,
            bytes: self.swap.bytes(slot).to_vec(),
        };
        saved.blocks.iter().map(copy).collect()
    }

    /// Copies the blocks of a sequence with these rows to the swap space. Returns `None` if it has no room.
    ///
    /// # Errors
    /// Returns an error if these are not the blocks that a sequence with these rows needs, or if memory cannot be reserved.
    pub fn import(
        &mut self,
        rows: &[Row],
        blocks: Vec<SnapshotBlock>,
    ) -> Result<Option<SavedSequence>, EngineError> {
        let own = blocks.iter().map(|block| (block.group, block.index, block.bytes.len()));
        if !own.eq(self.blocks.blocks_seen(rows.len())) {
            let why = "its KV blocks are not those that this engine needs".into();
            return Err(EngineError::BadSnapshot { why });
        }
        let mut saved = SavedSequence { rows: rows.to_vec(), blocks: Vec::new() };
        for SnapshotBlock { group, index, bytes } in blocks {
            match self.swap.take(self.decoder.backend(), group) {
                Ok(Some(slot)) => {
                    self.swap.bytes_mut(&slot).copy_from_slice(&bytes);
                    saved.blocks.push((group, index, slot));
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
        let sequence = self.blocks.restore(&saved.rows, &mut self.moved, &mut self.changes)?;
        self.apply_changes()?;
        for &SavedBlock { group, index, block } in &self.moved {
            let found = saved.blocks.binary_search_by_key(&(group, index), |(g, i, _)| (*g, *i));
            let at = found.expect("all blocks that the next token sees were saved");
            let bytes = self.swap.bytes(&saved.blocks[at].2);
            self.decoder.backend_mut().restore_block(group, block.index() as u32, bytes)?;
        }
        Ok(Some(sequence))
    }

    /// Frees the swap space of a copy.
    pub fn forget(&mut self, saved: SavedSequence) {
        for (_, _, slot) in saved.blocks {
            self.swap.release(slot);
        }
    }

    /// Returns the blocks of each layer group.
    pub fn kv_blocks(&self) -> impl Iterator<Item = GroupStatistics> {
        self.blocks.group_statistics()
    }

    /// Returns the bytes of the KV blocks that have content.
    pub fn kv_bytes(&self) -> u64 {
        let groups = self.blocks.group_statistics().enumerate();
        let used = |(group, of): (usize, GroupStatistics)| {
            (of.cached + of.referenced) * self.blocks.block_bytes(group)
        };
        groups.map(used).sum::<usize>() as u64
    }

    /// Returns the bytes of the KV blocks of so many positions, as if all layers kept all of them.
    pub fn kv_bytes_of(&self, positions: usize) -> u64 {
        let blocks = positions.div_ceil(KV_BLOCK);
        (0..self.blocks.groups())
            .map(|group| blocks * self.blocks.block_bytes(group))
            .sum::<usize>() as u64
    }

    /// Ends a sequence. Its blocks stay where they are until others need them.
    pub fn end(&mut self, sequence: SequenceId) {
        self.blocks.release(sequence);
    }

    /// Drops the positions from `len` on, and returns how many are left. They are fewer than `len` if a layer with a window
    /// no longer has what a token at `len` sees.
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        self.blocks.truncate(sequence, len, &mut self.changes)
    }

    /// Runs rows of one or several sequences, in one pass if the backend can. All decode rows come before all prompt rows.
    ///
    /// # Errors
    /// Returns an error if the context of a sequence is full, or an error of [`Decoder::pass`]. No sequence has changed
    /// then.
    ///
    /// # Panics
    /// Panics if there are more rows than the backend takes in a pass.
    pub fn pass(
        &mut self,
        rows: &[Rows<'_>],
        output: &mut Outputs<'_>,
        mut routing: Option<&mut Routing>,
        mut watch: Option<PassWatch<'_>>,
    ) -> Result<(), EngineError> {
        self.prepare(rows)?;
        let Runner { decoder, tokens, runs, outputs, final_rows, .. } = self;
        let (mixes, most) = (decoder.backend().mixes_rows(), decoder.backend().decode_rows());
        let (mut runs, mut tokens, mut outputs) = (&runs[..], &tokens[..], &mut outputs[..]);
        let mut final_rows = &mut final_rows[..];
        while let Some(run) = runs.first() {
            let kind = run.kind;
            let alike = || runs.iter().take_while(|run| run.kind == kind).take(most).count();
            let count = if mixes { runs.len() } else { alike() };
            let (own_runs, other_runs) = runs.split_at(count);
            let rows: usize = own_runs.iter().map(|run| run.count).sum();
            let (own_tokens, other_tokens) = tokens.split_at(rows);
            let wanted = outputs.partition_point(|row| (*row as usize) < rows);
            let (own_outputs, other_outputs) = outputs.split_at_mut(wanted);
            other_outputs.iter_mut().for_each(|row| *row -= rows as u32);
            let wanted = final_rows.partition_point(|of| of.start < rows);
            let (own_final, other_final) = final_rows.split_at_mut(wanted);
            other_final.iter_mut().for_each(|of| *of = of.start - rows..of.end - rows);
            let pass = Pass {
                tokens: own_tokens,
                runs: own_runs,
                outputs: own_outputs,
                final_rows: own_final,
            };
            let watch = watch.as_mut().map(|watch| &mut **watch as PassWatch<'_>);
            decoder.pass(&pass, output.again(), routing.as_deref_mut(), watch)?;
            (runs, tokens, outputs) = (other_runs, other_tokens, other_outputs);
            final_rows = other_final;
        }
        self.commit(rows);
        Ok(())
    }

    /// Runs rows of one or several prompts through the next `layers` layers ([`Decoder::pass_part`]). Returns true if the rows
    /// have gone through all. The rows must be the same in every call.
    ///
    /// # Errors
    /// Returns the errors of [`Runner::pass`]. The next call begins again then.
    ///
    /// # Panics
    /// Panics if the backend takes fewer rows or prompts in a pass.
    pub fn pass_part(
        &mut self,
        rows: &[Rows<'_>],
        paused: &mut Paused,
        layers: usize,
        output: &mut Outputs<'_>,
    ) -> Result<bool, EngineError> {
        self.prepare(rows)?;
        let Runner { decoder, tokens, runs, outputs, final_rows, .. } = self;
        let pass = Pass { tokens, runs, outputs, final_rows };
        let ended = decoder.pass_part(&pass, paused, layers, output.again())?;
        if ended {
            self.commit(rows);
        }
        Ok(ended)
    }

    /// Reserves blocks for the rows of a pass and describes the pass to the decoder.
    fn prepare(&mut self, rows: &[Rows<'_>]) -> Result<(), EngineError> {
        self.tokens.clear();
        self.runs.clear();
        self.outputs.clear();
        self.final_rows.clear();
        self.decoder.clear_final_rows();
        let context = self.decoder.backend().context();
        for &Rows { sequence, kind, tokens, logits } in rows {
            let (position, first) = (self.blocks.len(sequence), self.tokens.len() as u32);
            let end = position + tokens.len();
            if end > context {
                let (used, wanted) = (position, tokens.len());
                return Err(ModelError::ContextFull { used, context, wanted }.into());
            }
            self.blocks.reserve(sequence, end, &mut self.changes)?;
            let table = sequence.slot();
            self.runs.push(Run { table, kind, position, count: tokens.len() });
            self.tokens.extend_from_slice(tokens);
            let after = self.tokens.len() as u32;
            match logits {
                Logits::None => {}
                Logits::FinalStates => self.final_rows.push(first as usize..after as usize),
                Logits::Last => self.outputs.push(after - 1),
                Logits::All => self.outputs.extend(first..after),
            }
        }
        self.apply_changes()
    }

    /// Notes that a pass has ended. Only now, so that after an error no sequence has changed.
    fn commit(&mut self, rows: &[Rows<'_>]) {
        for &Rows { sequence, kind, tokens, .. } in rows {
            self.blocks.commit(sequence, tokens, kind, &mut self.changes);
        }
    }

    fn apply_changes(&mut self) -> Result<(), EngineError> {
        let backend = self.decoder.backend_mut();
        for copy in &self.changes.copies {
            backend.copy_block(copy.group, copy.from.index() as u32, copy.to.index() as u32)?;
        }
        for entry in &self.changes.entries {
            let (table, block) = (entry.sequence.slot(), entry.block.index() as u32);
            backend.set_block(table, entry.group, entry.index, block)?;
        }
        self.changes.clear();
        Ok(())
    }
}

/// Returns true if every layer group has as many free blocks as are needed and left free.
fn has_room(
    blocks: &BlockManager,
    needed: impl Iterator<Item = usize>,
    left_free: &[usize],
) -> bool {
    let wanted = needed.zip(left_free).map(|(needed, left_free)| needed + left_free);
    wanted.zip(blocks.free_blocks()).all(|(wanted, free)| wanted <= free)
}
