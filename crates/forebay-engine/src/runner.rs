//! Passes over the rows of sequences: blocks are reserved, the decoder runs, rows are committed.

mod arriving;
mod kept;
mod states;
mod suspended;

use std::ops::Range;
use std::time::Duration;

use forebay_kv::{BlockHash, BlockKey, Link};
use forebay_model::{
    Decoder, HostMemory, ModelError, Output, Pass, PassWatch, Paused, Prediction, Restoring,
    Routing, Run, Selector,
};
use forebay_ops::{KV_BLOCK, RowKind};

use crate::EngineError;
use crate::kv::{BlockManager, Changes, GroupConfig, GroupStatistics, Row, SavedBlock, SequenceId};
use crate::kv_tiers::{Fetching, HostSlot, KvTiers};

/// The decoder with the sequences whose keys and values are in its blocks.
pub(crate) struct Runner {
    pub decoder: Decoder,
    blocks: BlockManager,
    tiers: KvTiers,
    /// What keys and values depend on beside rows and who may share them.
    identity: Vec<u8>,
    /// Work for the backend before the next pass.
    changes: Changes,
    /// Sequences whose blocks may still be copied from host memory, each with the copies that it waits for.
    arriving: Vec<(SequenceId, Restoring)>,
    /// The group of the tiers that holds states of recurrent layers, behind the layer groups, if the model has such layers.
    state_group: Option<usize>,
    /// Rows of a prompt between two states that are kept; 0 keeps only those near the ends of prompts.
    snapshot_every: usize,
    /// True if passes keep the states of all rows behind the last layer ([`Decoder::final_rows`]), whatever else is wanted.
    keeps_final_rows: bool,
    /// The copies that began last.
    last_restoring: Restoring,
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
    pub rows_max: usize,
}

/// Copy of a sequence in host memory.
pub(crate) struct SavedSequence {
    root: BlockHash,
    rows: Vec<Row>,
    /// Every block by the index of its layer group, and its index in the sequence's table.
    blocks: Vec<(usize, usize, SavedPlace)>,
}

/// Where a block of a saved sequence is.
#[derive(Debug, Clone, Copy)]
enum SavedPlace {
    /// A full block, which others may use too. It is leased.
    Shared(BlockKey),
    Own(HostSlot),
}

impl SavedPlace {
    fn place<'a>(&self, tiers: &'a KvTiers) -> (&'a dyn HostMemory, Range<usize>) {
        match self {
            SavedPlace::Shared(key) => tiers.place(*key).expect("leased blocks stay"),
            SavedPlace::Own(slot) => tiers.slot_place(slot),
        }
    }
}

impl SavedSequence {
    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }
}

/// A sequence that has begun, and what it found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Begun {
    pub sequence: SequenceId,
    /// Rows at the start that need not be computed.
    pub rows: usize,
    /// Those of them that were copied from host memory, also if they came from the disk before.
    pub rows_from_below: usize,
}

/// Most bytes of host memory for KV blocks if the caller does not choose them.
const RAM_BYTES_MAX: u64 = 4 << 30;

/// How long it takes to compute a row again, and to read a block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FetchRates {
    pub seconds_per_row: f64,
    pub disk_bytes_per_second: f64,
}

/// Consecutive rows of one sequence, behind the rows that it has.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub sequence: SequenceId,
    pub kind: RowKind,
    pub tokens: &'a [u32],
    pub logits: Logits,
}

/// Rows of the predicting layer at consecutive positions of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct PredictionRows<'a> {
    pub kind: RowKind,
    pub position: usize,
    /// For each row, the token behind its position.
    pub tokens: &'a [u32],
    /// For each row, the state at its position.
    pub hidden: &'a [f32],
    /// Rows whose logits are wanted.
    pub outputs: &'a [u32],
}

/// The rows of [`Rows`] whose logits are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logits {
    None,
    Last,
    All,
    /// Those of so many rows at the end.
    Tail(usize),
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
    /// Takes over a decoder, in whose blocks nothing is written yet. KV blocks outside the device take up to `ram_bytes` of host
    /// memory; `None` is as much as the decoder's blocks have, at most 4 GiB.
    pub fn new(decoder: Decoder, ram_bytes: Option<u64>) -> Runner {
        let backend = decoder.backend();
        let group = |group: forebay_model::KvGroup| GroupConfig {
            window: group.window,
            blocks: group.blocks,
            on_device: group.on_device,
            block_bytes: group.block_bytes as usize,
        };
        let groups: Vec<GroupConfig> = backend.kv_groups().into_iter().map(group).collect();
        let ram_bytes = ram_bytes.unwrap_or(backend.cache_bytes().min(RAM_BYTES_MAX));
        let state_group = decoder.is_recurrent().then_some(groups.len());
        let states = state_group.map(|_| states::group(decoder.state_bytes()));
        let whole = groups.iter().filter(|of| of.window.is_none());
        let row_bytes = whole.map(|of| of.block_bytes).sum::<usize>() / KV_BLOCK;
        let snapshot_every = states::usual_interval(decoder.state_bytes(), row_bytes);
        Runner {
            tiers: KvTiers::new(backend.host_reserver(), &groups, states, ram_bytes),
            blocks: BlockManager::new(&groups, backend.batch_tokens()),
            state_group,
            snapshot_every,
            keeps_final_rows: decoder.predicts(),
            decoder,
            identity: Vec::new(),
            changes: Changes::default(),
            arriving: Vec::new(),
            last_restoring: Restoring::default(),
            tokens: Vec::new(),
            runs: Vec::new(),
            outputs: Vec::new(),
            final_rows: Vec::new(),
            moved: Vec::new(),
        }
    }

    /// Says on what keys and values depend beside rows. Only blocks that outlive this process need it.
    pub fn set_identity(&mut self, identity: Vec<u8>) {
        self.identity = identity;
    }

    /// Returns the tiers of KV blocks below the device.
    pub fn tiers(&self) -> &KvTiers {
        &self.tiers
    }

    pub fn tiers_mut(&mut self) -> &mut KvTiers {
        &mut self.tiers
    }

    /// Returns the hash before the first block of sequences that share blocks with those of the same `namespace` only.
    pub fn root(&self, namespace: &[u8]) -> BlockHash {
        BlockHash::root(&[&self.identity, namespace])
    }

    /// Begins an empty sequence that shares its blocks with no other.
    pub fn begin_empty(&mut self) -> SequenceId {
        let root = self.root(b"");
        let sequence = self.blocks.admit(root, &[], |_| false, &mut self.changes).sequence;
        self.decoder.forget_state(sequence.slot());
        sequence
    }

    /// Returns the number of blocks in each layer group that sequences still need for the rows that are known, and at most
    /// `growth` more for each sequence.
    pub fn blocks_left(
        &self,
        sequences: impl Iterator<Item = Growth>,
        growth: usize,
    ) -> Vec<usize> {
        let mut left = vec![0; self.blocks.groups()];
        for Growth { sequence, known_rows, rows_max } in sequences {
            let known = self.blocks.blocks_needed(known_rows, 0);
            let most = self.blocks.blocks_needed(rows_max.max(known_rows), 0);
            let held = self.blocks.blocks_held(sequence);
            for (left, ((known, most), held)) in left.iter_mut().zip(known.zip(most).zip(held)) {
                let soon = known.max(held);
                *left += soon - held + most.saturating_sub(soon).min(growth);
            }
        }
        left
    }

    /// Begins a sequence with the longest prefix of `rows` whose keys and values are in blocks of the device or in host memory, if
    /// there is room for all rows, and `left_free` blocks of each layer group remain free. Returns `None` otherwise. Without
    /// `reuse`, no rows of other sequences are used. If the model has recurrent layers, the prefix ends where a state is kept
    /// ([`Runner::keep_state`]).
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn begin_with_room(
        &mut self,
        root: BlockHash,
        rows: &[Row],
        reuse: bool,
        left_free: &[usize],
    ) -> Result<Option<Begun>, EngineError> {
        let Runner { decoder, blocks, tiers, changes, state_group, .. } = self;
        let known = if reuse { rows } else { &[] };
        let has_state = |hash| {
            state_group.is_none_or(|group| tiers.has(BlockKey { hash, group: group as u32 }))
        };
        let admission = blocks.admit_where(root, known, |key| tiers.has(key), has_state, changes);
        let sequence = admission.sequence;
        decoder.forget_state(sequence.slot());
        let needed = blocks.blocks_needed(rows.len(), 0).zip(blocks.blocks_held(sequence));
        let needed = needed.map(|(needed, held)| needed.saturating_sub(held));
        if !has_room(blocks, needed, left_free) {
            self.end(sequence);
            return Ok(None);
        }
        self.blocks.note_uses(sequence);
        if let Err(error) = self.take_kept_state(sequence, admission.hit_rows) {
            self.end(sequence);
            return Err(error);
        }
        let rows_from_below = self.fill_up(sequence)?;
        if admission.hit_rows > 0 {
            self.note_arriving(sequence)?;
        }
        Ok(Some(Begun { sequence, rows: admission.hit_rows, rows_from_below }))
    }

    /// Begins to copy those blocks of a new sequence from host memory that the device does not have. Returns the number of their
    /// rows.
    fn fill_up(&mut self, sequence: SequenceId) -> Result<usize, EngineError> {
        self.moved.clear();
        self.blocks.fill_up(sequence, &mut self.moved, &mut self.changes);
        let key = |blocks: &BlockManager, of: &SavedBlock| {
            let (key, _) = blocks.block_key(sequence, of.group, of.index).expect("a full block");
            key
        };
        // Blocks that the device loses for these must not take their place in host memory.
        let keys: Vec<BlockKey> = self.moved.iter().map(|of| key(&self.blocks, of)).collect();
        keys.iter().for_each(|key| self.tiers.lease(key.hash));
        let filled = self.apply_changes().and_then(|()| {
            let Runner { decoder, tiers, moved, last_restoring, .. } = self;
            let mut contents = moved
                .iter()
                .zip(&keys)
                .map(|(of, key)| of.with_content(tiers.place(*key).expect("leased blocks stay")));
            *last_restoring = decoder.backend_mut().restore_blocks(&mut contents)?;
            Ok(())
        });
        // What takes the place of a block in host memory waits until it is copied.
        keys.iter().for_each(|key| self.tiers.end_lease(key.hash));
        if let Err(error) = filled {
            self.blocks.abandon(sequence, &self.moved);
            return Err(error);
        }
        let mut hashes: Vec<BlockHash> = keys.iter().map(|key| key.hash).collect();
        hashes.sort_unstable();
        hashes.dedup();
        hashes.iter().for_each(|hash| self.tiers.note_restored(*hash));
        Ok(hashes.len() * KV_BLOCK)
    }

    /// Begins to read those blocks of a prefix of `rows` from the disk whose reading is sooner than computing them again. Returns
    /// `None` if there are none.
    pub fn fetch(&self, root: BlockHash, rows: &[Row], rates: FetchRates) -> Option<Fetching> {
        #[derive(Clone, Copy, PartialEq)]
        enum Place {
            Memory,
            Disk(u64),
        }
        let disk = self.tiers.disk()?;
        let place = |key| match self.tiers.has(key) {
            true => Some(Place::Memory),
            false => disk.store.len_of(key).map(Place::Disk),
        };
        let survey = self.blocks.survey(root, rows, Place::Memory, place);
        // Recurrent layers need the state at the end of the prefix.
        let state_key = |hit: usize| {
            let group = self.state_group? as u32;
            Some(BlockKey { hash: survey.hashes[hit - 1], group })
        };
        // For each group, the bytes on disk of the blocks before each block.
        let sums: Vec<Vec<u64>> = survey
            .places
            .iter()
            .map(|places| {
                let bytes = places.iter().scan(0, |sum, place| {
                    *sum += if let Some(Place::Disk(len)) = place { *len } else { 0 };
                    Some(*sum)
                });
                std::iter::once(0).chain(bytes).collect()
            })
            .collect();
        let computing = |hit: usize| (hit * KV_BLOCK) as f64 * rates.seconds_per_row;
        let fits = |group: usize, blocks: usize| blocks <= self.tiers.room(group);
        let best = survey.hits.iter().filter_map(|&hit| {
            let seen = self.blocks.first_seen_behind(hit);
            let mut bytes = match state_key(hit).map(place) {
                // No prefix can end here.
                Some(None) => return None,
                Some(Some(Place::Disk(len))) => len,
                Some(Some(Place::Memory)) | None => 0,
            };
            let mut has_room = bytes == 0 || self.state_group.is_none_or(|group| fits(group, 1));
            for (group, first) in seen.enumerate() {
                bytes += sums[group][hit] - sums[group][first];
                let places = &survey.places[group][first..hit];
                let read = places.iter().filter(|place| matches!(place, Some(Place::Disk(_))));
                has_room &= bytes == 0 || fits(group, read.count());
            }
            let saved = computing(hit) - bytes as f64 / rates.disk_bytes_per_second;
            Some((if has_room { saved } else { f64::NEG_INFINITY }, hit, bytes))
        });
        let (saved, hit, bytes) = best.max_by(|a, b| a.0.total_cmp(&b.0))?;
        if bytes == 0 || saved <= 0.0 {
            return None;
        }
        let link = |index: usize| {
            let previous = index.checked_sub(1).map_or(root, |before| survey.hashes[before]);
            Link { previous, index: index as u32 }
        };
        let mut keys: Vec<(BlockKey, Link)> = Vec::new();
        for (group, index) in self.blocks.seen_behind(hit) {
            if let Some(Place::Disk(_)) = survey.places[group][index] {
                let key = BlockKey { hash: survey.hashes[index], group: group as u32 };
                keys.push((key, link(index)));
            }
        }
        let states = state_key(hit).filter(|key| matches!(place(*key), Some(Place::Disk(_))));
        keys.extend(states.map(|key| (key, link(hit - 1))));
        keys.sort_by_key(|(_, link)| link.index);
        let limit = Duration::from_secs_f64((1.0 + 2.0 * computing(hit)).min(3600.0));
        Some(Fetching::begin(disk, keys, limit))
    }

    /// Copies fetched blocks to host memory ([`Fetching::advance`]). Returns true if nothing more will come.
    pub fn advance(&mut self, fetching: &mut Fetching, wait: Duration) -> bool {
        fetching.advance(&mut self.tiers, wait)
    }

    /// Notes that the prompt of a sequence is computed: later requests are likely to share it up to here.
    pub fn note_end_of_turn(&mut self, sequence: SequenceId) {
        self.blocks.note_end_of_turn(sequence);
    }

    /// Writes KV blocks to the disk, if there is such a tier, for up to `limit`: everything, or what has earned it.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn write_kv(&mut self, everything: bool, limit: Duration) -> Result<(), EngineError> {
        if self.tiers.disk().is_none() {
            return Ok(());
        }
        self.apply_changes()?;
        self.wait_for_arrivals()?;
        let pools = self.blocks.full_blocks();
        self.tiers.write(self.decoder.backend_mut(), &pools, everything, limit)?;
        Ok(())
    }

    /// Returns the blocks of each layer group.
    pub fn kv_blocks(&self) -> impl Iterator<Item = GroupStatistics> {
        self.blocks.group_statistics()
    }

    /// Returns the bytes of the KV blocks of the device that have content.
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
        // Others must not get its blocks while they are written. If the device has failed, nothing writes.
        let _ = self.wait_for_arrival(sequence);
        self.blocks.release(sequence);
    }

    /// Drops the positions from `len` on, and returns how many are left. They are fewer than `len` if a layer with a window
    /// no longer has what a token at `len` sees. If recurrent layers have no state after so many positions, those behind the last
    /// kept state are dropped, too ([`Runner::keep_state`]).
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> usize {
        let len = len.min(self.blocks.len(sequence));
        let has_state = |runner: &Runner, len| runner.decoder.has_state(sequence.slot(), len);
        let wanted = if has_state(self, len) { len } else { self.kept_before(sequence, len) };
        let kept = self.blocks.truncate(sequence, wanted, &mut self.changes);
        if has_state(self, kept) || kept == wanted && self.take_kept_state(sequence, kept).is_ok() {
            return kept;
        }
        self.blocks.truncate(sequence, 0, &mut self.changes)
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
        forebay_store::reached("pass begun");
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

    /// Runs rows of a sequence through the predicting layer. The sequence has the positions of these rows: they are those of the last
    /// pass or before them.
    ///
    /// # Errors
    /// Returns an error of [`Decoder::predict`].
    pub fn predict(
        &mut self,
        sequence: SequenceId,
        rows: &PredictionRows<'_>,
        output: &mut Outputs<'_>,
    ) -> Result<(), EngineError> {
        let PredictionRows { kind, position, tokens, hidden, outputs } = *rows;
        let run = Run { table: sequence.slot(), kind, position, count: tokens.len() };
        let prediction = Prediction { run, tokens, hidden, outputs };
        Ok(self.decoder.predict(&prediction, output.again())?)
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
                Logits::Tail(count) => self.outputs.extend(after - count as u32..after),
            }
            if self.keeps_final_rows && logits != Logits::FinalStates {
                self.final_rows.push(first as usize..after as usize);
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
        for lost in &self.changes.lost {
            self.tiers.save_lost(backend, lost)?;
        }
        self.changes.lost.clear();
        if !self.changes.copies.is_empty() {
            self.wait_for_arrivals()?;
        }
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
