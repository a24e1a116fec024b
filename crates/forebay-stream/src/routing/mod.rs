//! Routing traces: the experts that every token chose in every layer, with their weights and router scores.
//!
//! `docs/routing-trace.md` describes the file. Reading and writing work on streams; this crate opens no files.

mod csv;
mod header;
mod profile;
mod reader;
mod recorder;
mod writer;

use std::ops::Range;

use serde::Serialize;

use crate::blocks::ExpertIndex;

pub use header::{LookupOrder, RoutingHeader, RoutingLayer};
pub use profile::RoutingProfile;
pub use reader::{read, read_any, read_uncompressed};
pub use recorder::RoutingRecorder;
pub use writer::RoutingWriter;

/// Phase of a batch: a prompt or a generated token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    Prompt,
    Generate,
}

/// A prompt and the answer to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Turn {
    /// XXH3 of the prompt's token ids, four bytes each, least significant first; `None` if the recording does not have
    /// it.
    pub prompt_hash: Option<u64>,
    /// Number of prompt tokens that were processed, without those already in the KV cache.
    pub prompt_tokens: u32,
}

/// Tokens that went through the model together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RoutingBatch {
    pub phase: Phase,
    /// Number of the turn, counted from 0.
    pub turn: usize,
    /// Range of tokens, counted from the start of the trace.
    pub tokens: Range<usize>,
}

/// Errors of reading or writing a trace.
#[derive(Debug, thiserror::Error)]
pub enum RoutingError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is no routing trace: {0}")]
    NotATrace(String),
    #[error("is a routing trace of version {found}; this program reads version {known}")]
    Version { found: u64, known: u32 },
    #[error("the header is damaged: {0}")]
    Header(String),
    #[error("record {record} is damaged: {why}")]
    Record {
        /// Number of the record, counted from 1.
        record: u64,
        why: String,
    },
    #[error("line {line}: {why}")]
    Line {
        /// Line number in the CSV form, counted from 1.
        line: usize,
        why: String,
    },
    #[error("is cut off: {0}; the program that wrote it did not end well")]
    CutOff(String),
    #[error("holds more than {limit} choices of experts: more than this program keeps in memory")]
    TooLarge { limit: usize },
}

/// Marks a choice in a layer that the token did not go through.
pub(crate) const NONE: u16 = u16::MAX;

/// Most choices that a trace in memory may hold: 1 GiB of them.
pub(crate) const CHOICES_MAX: usize = 1 << 29;

/// A recording in memory: a row of choices for every token, and how tokens were batched.
#[derive(Clone, PartialEq, Debug)]
pub struct RoutingTrace {
    header: RoutingHeader,
    /// Offset of each layer's choices in a row, followed by the width of a row.
    offsets: Vec<usize>,
    /// Experts `[tokens, width]`, best first.
    choices: Vec<u16>,
    /// Weights in the order of `choices`; empty for a trace without weights.
    weights: Vec<f32>,
    /// Scores `[tokens, sum of experts]`; empty for a trace without scores.
    scores: Vec<f32>,
    /// Phase, turn and end of every batch.
    batches: Vec<(Phase, u32, usize)>,
    turns: Vec<Turn>,
    tokens: usize,
}

impl RoutingTrace {
    /// Creates a trace without tokens.
    pub fn new(header: RoutingHeader) -> RoutingTrace {
        let mut end = 0;
        let ends = header.layers.iter().map(|layer| {
            end += layer.used as usize;
            end
        });
        let offsets = std::iter::once(0).chain(ends).collect();
        RoutingTrace {
            header,
            offsets,
            choices: Vec::new(),
            weights: Vec::new(),
            scores: Vec::new(),
            batches: Vec::new(),
            turns: Vec::new(),
            tokens: 0,
        }
    }

    pub fn header(&self) -> &RoutingHeader {
        &self.header
    }

    /// Returns the number of tokens of all batches.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// Returns the number of choices of one token in all layers.
    pub fn width(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// Returns all batches in the order in which they were computed.
    pub fn batches(&self) -> impl DoubleEndedIterator<Item = RoutingBatch> + '_ {
        (0..self.batches.len()).map(|index| self.batch(index))
    }

    /// Returns one batch of [`RoutingTrace::batches`].
    pub fn batch(&self, index: usize) -> RoutingBatch {
        let start = index.checked_sub(1).map_or(0, |before| self.batches[before].2);
        let (phase, turn, end) = self.batches[index];
        RoutingBatch { phase, turn: turn as usize, tokens: start..end }
    }

    /// Returns the experts that a token chose in a layer, as the router ranked them. Returns none if the token did not
    /// go through the layer.
    pub fn experts(
        &self,
        token: usize,
        layer: usize,
    ) -> impl DoubleEndedIterator<Item = ExpertIndex> + Clone + '_ {
        let row = &self.choices[token * self.width()..];
        let chosen = &row[self.offsets[layer]..self.offsets[layer + 1]];
        chosen.iter().filter(|&&id| id != NONE).map(|&id| ExpertIndex(id.into()))
    }

    /// Returns the weights of a token's choices in a layer, one for each slot of the layer. Returns an empty slice for
    /// a trace without weights.
    pub fn weights(&self, token: usize, layer: usize) -> &[f32] {
        if self.weights.is_empty() {
            return &[];
        }
        let row = &self.weights[token * self.width()..];
        &row[self.offsets[layer]..self.offsets[layer + 1]]
    }

    /// Returns the scores of every expert by the layer's router, computed on the token's state one layer earlier.
    /// Returns an empty slice for a trace without scores.
    pub fn scores(&self, token: usize, layer: usize) -> &[f32] {
        if self.scores.is_empty() {
            return &[];
        }
        let experts = |layers: &[RoutingLayer]| -> usize {
            layers.iter().map(|layer| layer.experts as usize).sum()
        };
        let start = token * experts(&self.header.layers) + experts(&self.header.layers[..layer]);
        &self.scores[start..start + self.header.layers[layer].experts as usize]
    }

    /// Begins a turn. The batches that follow belong to it.
    pub fn begin_turn(&mut self, turn: Turn) {
        self.turns.push(turn);
    }

    /// Appends tokens that went through the model together. The rows are `[tokens, width]` for choices and, if the
    /// header says so, weights, and `[tokens, experts of all layers]` for scores.
    ///
    /// # Errors
    /// Returns a message that says why a trace cannot hold these rows.
    pub fn push(&mut self, phase: Phase, rows: Rows<'_>) -> Result<(), String> {
        rows.check(&self.header, &self.offsets)?;
        if self.turns.is_empty() {
            return Err("a batch before the first turn".to_owned());
        }
        self.choices.extend_from_slice(rows.choices);
        self.weights.extend_from_slice(rows.weights);
        self.scores.extend_from_slice(rows.scores);
        self.tokens += rows.tokens;
        self.batches.push((phase, self.turns.len() as u32 - 1, self.tokens));
        Ok(())
    }

    /// Returns the rows of a range of tokens.
    pub fn rows(&self, tokens: Range<usize>) -> Rows<'_> {
        let of = |width: usize| tokens.start * width..tokens.end * width;
        let scored = self.header.layers.iter().map(|layer| layer.experts as usize).sum();
        let optional = |values: &'_ [f32], width: usize| match values.is_empty() {
            true => 0..0,
            false => of(width),
        };
        Rows {
            tokens: tokens.len(),
            choices: &self.choices[of(self.width())],
            weights: &self.weights[optional(&self.weights, self.width())],
            scores: &self.scores[optional(&self.scores, scored)],
        }
    }
}

/// Choices, weights and scores of some tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rows<'a> {
    pub tokens: usize,
    /// Experts `[tokens, width]`, best first; 65535 if a token did not go through the layer.
    pub choices: &'a [u16],
    /// Weights in the order of `choices`, or nothing.
    pub weights: &'a [f32],
    /// Scores `[tokens, experts of all layers]`, or nothing.
    pub scores: &'a [f32],
}

impl Rows<'_> {
    fn check(&self, header: &RoutingHeader, offsets: &[usize]) -> Result<(), String> {
        let width = offsets.last().copied().unwrap_or(0);
        let scored: usize = header.layers.iter().map(|layer| layer.experts as usize).sum();
        let lengths = [
            (self.choices.len(), width, true, "choices"),
            (self.weights.len(), width, header.weights, "weights"),
            (self.scores.len(), scored, header.scores, "scores"),
        ];
        for (length, width, is_kept, what) in lengths {
            let wanted = if is_kept { self.tokens * width } else { 0 };
            if length != wanted {
                return Err(format!("{length} {what} for {} tokens, not {wanted}", self.tokens));
            }
        }
        for row in self.choices.chunks_exact(width.max(1)) {
            for (layer, of) in header.layers.iter().enumerate() {
                let chosen = &row[offsets[layer]..offsets[layer + 1]];
                for (slot, &id) in chosen.iter().enumerate() {
                    if id != NONE && u32::from(id) >= of.experts {
                        return Err(format!(
                            "expert {id} of layer {layer}, which has {} experts",
                            of.experts
                        ));
                    }
                    if id != NONE && chosen[..slot].contains(&id) {
                        return Err(format!("expert {id} of layer {layer} twice for one token"));
                    }
                }
            }
        }
        let finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
        if !finite(self.weights) || !finite(self.scores) {
            return Err("a weight or score that is not finite".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
