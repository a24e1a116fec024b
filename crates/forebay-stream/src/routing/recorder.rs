//! Records an engine: writes its rows of routing as a trace.

use std::io::{self, Write};

use twox_hash::XxHash3_64;

use super::{NONE, Phase, RoutingHeader, RoutingWriter, Rows, Turn};

/// Writes the routing that a decoder reports. Rows of experts and weights are `[tokens, layers, k]`, with expert -1 for
/// unused places. Rows of scores are `[tokens, experts of all layers]`.
pub struct RoutingRecorder {
    writer: RoutingWriter<Box<dyn Write + Send>>,
    /// Number of experts that each layer uses, and the largest of them.
    used: Vec<usize>,
    most: usize,
    has_weights: bool,
    /// Number of scores of a token; 0 if no scores are kept.
    scored: usize,
    /// Buffers, reused from batch to batch.
    choices: Vec<u16>,
    weights: Vec<f32>,
}

impl RoutingRecorder {
    /// Creates a recorder and writes the header of the recording.
    ///
    /// # Errors
    /// Returns an error if `out` fails, or if the header has no experts.
    pub fn new(out: Box<dyn Write + Send>, header: RoutingHeader) -> io::Result<RoutingRecorder> {
        let used: Vec<usize> = header.layers.iter().map(|layer| layer.used as usize).collect();
        Ok(RoutingRecorder {
            most: used.iter().copied().max().unwrap_or(0),
            used,
            has_weights: header.weights,
            scored: match header.scores {
                true => header.layers.iter().map(|layer| layer.experts as usize).sum(),
                false => 0,
            },
            writer: RoutingWriter::new(out, header)?,
            choices: Vec::new(),
            weights: Vec::new(),
        })
    }

    /// Begins a turn with the tokens of its prompt.
    ///
    /// # Errors
    /// Returns an error if the output fails.
    pub fn turn(&mut self, prompt: &[u32]) -> io::Result<()> {
        let bytes: Vec<u8> = prompt.iter().flat_map(|id| id.to_le_bytes()).collect();
        let prompt_hash = Some(XxHash3_64::oneshot(&bytes));
        self.writer.turn(Turn { prompt_hash, prompt_tokens: prompt.len() as u32 })
    }

    /// Records `experts` and `weights` `[tokens, layers, k]`, which went through the model in batches of
    /// `batch_tokens`. Also records `scores` `[tokens, experts of all layers]` if the header has them.
    ///
    /// # Errors
    /// Returns an error if the output fails, or if the rows do not match the header.
    pub fn record(
        &mut self,
        phase: Phase,
        experts: &[i32],
        weights: &[f32],
        scores: &[f32],
        batch_tokens: usize,
    ) -> io::Result<()> {
        let row = self.used.len() * self.most;
        for (index, experts) in experts.chunks(row * batch_tokens.max(1)).enumerate() {
            let start = index * row * batch_tokens;
            self.choices.clear();
            self.weights.clear();
            for (number, chosen) in experts.chunks_exact(self.most).enumerate() {
                let used = self.used[number % self.used.len()];
                let id = |&id: &i32| u16::try_from(id).unwrap_or(NONE);
                self.choices.extend(chosen[..used].iter().map(id));
                if self.has_weights {
                    let from = start + number * self.most;
                    self.weights.extend_from_slice(&weights[from..from + used]);
                }
            }
            let tokens = experts.len() / row;
            let first = index * batch_tokens * self.scored;
            let scores = scores.get(first..first + tokens * self.scored).unwrap_or(&[]);
            let rows = Rows { tokens, choices: &self.choices, weights: &self.weights, scores };
            self.writer.batch(phase, rows)?;
        }
        Ok(())
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// Returns an error if the output fails.
    pub fn finish(self) -> io::Result<()> {
        self.writer.finish().map(drop)
    }
}
