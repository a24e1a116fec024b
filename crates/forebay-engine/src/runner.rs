//! Passes over the rows of sequences: blocks are reserved, the decoder runs, rows are committed.

use forebay_compute::RowKind;
use forebay_model::{Decoder, ModelError, Output, Pass, PassWatch, Routing, Run};

use crate::EngineError;
use crate::kv::{BlockManager, Changes, GroupConfig, SequenceId};

/// The decoder with the sequences whose keys and values are in its blocks.
pub(crate) struct Runner {
    pub decoder: Decoder,
    blocks: BlockManager,
    /// Work for the backend before the next pass.
    changes: Changes,
    // Buffers that are reused from pass to pass.
    tokens: Vec<u32>,
    runs: Vec<Run>,
    outputs: Vec<u32>,
}

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
}

/// Where the logits of several passes go.
pub(crate) enum Outputs<'a> {
    Logits(&'a mut Vec<f32>),
    Largest(usize, &'a mut Vec<(f32, u32)>),
}

impl Outputs<'_> {
    /// Returns the output of one pass.
    pub fn again(&mut self) -> Output<'_> {
        match self {
            Outputs::Logits(logits) => Output::Logits(logits),
            Outputs::Largest(count, largest) => Output::Largest(*count, largest),
        }
    }
}

impl Runner {
    /// Takes over a decoder, in whose blocks nothing is written yet.
    pub fn new(decoder: Decoder) -> Runner {
        let backend = decoder.backend();
        let group = |group: forebay_model::KvGroup| GroupConfig {
            window: group.window,
            blocks: group.blocks,
            block_bytes: group.block_bytes as usize,
        };
        let groups: Vec<GroupConfig> = backend.kv_groups().into_iter().map(group).collect();
        // Blocks do not outlive the process, so nothing else needs to be told apart.
        let blocks = BlockManager::new(&groups, backend.batch_tokens(), 0);
        Runner {
            decoder,
            blocks,
            changes: Changes::default(),
            tokens: Vec::new(),
            runs: Vec::new(),
            outputs: Vec::new(),
        }
    }

    /// Begins a sequence with the longest prefix of `prompt` whose keys and values are in blocks already. Returns the
    /// sequence and the length of that prefix, which is less than the prompt.
    pub fn begin(&mut self, prompt: &[u32]) -> (SequenceId, usize) {
        let admission = self.blocks.admit(prompt, &mut self.changes);
        (admission.sequence, admission.hit_tokens)
    }

    /// Ends a sequence. Its blocks stay where they are until others need them.
    pub fn end(&mut self, sequence: SequenceId) {
        self.blocks.release(sequence);
    }

    /// Returns the number of positions that a sequence has.
    pub fn len(&self, sequence: SequenceId) -> usize {
        self.blocks.len(sequence)
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
        self.tokens.clear();
        self.runs.clear();
        self.outputs.clear();
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
                Logits::Last => self.outputs.push(after - 1),
                Logits::All => self.outputs.extend(first..after),
            }
        }
        self.apply_changes()?;
        let Runner { decoder, tokens, runs, outputs, .. } = self;
        let mixes = decoder.backend().mixes_rows();
        let (mut runs, mut tokens, mut outputs) = (&runs[..], &tokens[..], &mut outputs[..]);
        while let Some(run) = runs.first() {
            let count = match run.kind {
                _ if mixes => runs.len(),
                RowKind::Decode => {
                    runs.iter().take_while(|run| run.kind == RowKind::Decode).count()
                }
                RowKind::Prompt => 1,
            };
            let (own_runs, other_runs) = runs.split_at(count);
            let rows: usize = own_runs.iter().map(|run| run.count).sum();
            let (own_tokens, other_tokens) = tokens.split_at(rows);
            let wanted = outputs.partition_point(|row| (*row as usize) < rows);
            let (own_outputs, other_outputs) = outputs.split_at_mut(wanted);
            other_outputs.iter_mut().for_each(|row| *row -= rows as u32);
            let pass = Pass { tokens: own_tokens, runs: own_runs, outputs: own_outputs };
            let watch = watch.as_mut().map(|watch| &mut **watch as PassWatch<'_>);
            decoder.pass(&pass, output.again(), routing.as_deref_mut(), watch)?;
            (runs, tokens, outputs) = (other_runs, other_tokens, other_outputs);
        }
        // Only now, so that after an error no sequence has changed.
        for &Rows { sequence, kind, tokens, .. } in rows {
            self.blocks.commit(sequence, tokens, kind, &mut self.changes);
        }
        Ok(())
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
