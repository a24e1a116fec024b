//! Recording of the experts that a session's tokens choose.

use std::hash::Hasher as _;
use std::io::Write;

use forebay_model::Routing;
use forebay_model::arch::{Experts, FeedForward};
use forebay_ops::RowKind;
use forebay_stream::routing::{LookupOrder, RoutingHeader, RoutingLayer, RoutingRecorder};
use forebay_stream::{Block, Phase};
use forebay_text::Tokenizer;
use twox_hash::XxHash3_64;

use crate::routing_error::RoutingError;
use crate::runner::{Logits, Outputs};
use crate::{EngineError, Session};

/// A recording in progress.
pub(crate) struct RoutingLog {
    /// Writes a trace, if one is wanted.
    recorder: Option<RoutingRecorder>,
    /// Experts of all rows `[rows, layers, k]`, if the caller wants them.
    kept: Option<Vec<i32>>,
    /// Rows that are not written yet. The buffer is reused.
    rows: Routing,
}

impl RoutingLog {
    /// Returns the rows that are not written yet.
    pub fn rows(&mut self) -> &mut Routing {
        &mut self.rows
    }

    /// Drops the rows that are not written yet.
    pub fn forget(&mut self) {
        self.rows.clear();
    }

    /// Writes the rows.
    ///
    /// # Errors
    /// Returns an error if the trace cannot be written.
    pub fn write(&mut self, phase: Phase, batch_tokens: usize) -> Result<(), RoutingError> {
        let RoutingLog { recorder, kept, rows } = self;
        let scores = rows.scores.as_deref().unwrap_or(&[]);
        let recorded = recorder.as_mut().map_or(Ok(()), |recorder| {
            recorder.record(phase, &rows.experts, &rows.weights, scores, batch_tokens)
        });
        if let Some(kept) = kept {
            kept.extend_from_slice(&rows.experts);
        }
        rows.clear();
        recorded.map_err(RoutingError::Write)
    }
}

impl Session {
    /// Writes the experts that every token chooses from now on to `out` as a routing trace. [`Session::end_routing`]
    /// completes it. With `scores`, the trace also has each layer's router scores for the token's state one layer
    /// earlier, for studies of predictors. On a GPU, tokens are then queued kernel by kernel, without a CUDA graph.
    ///
    /// # Errors
    /// Returns [`RoutingError::NoExperts`] for a dense model, [`RoutingError::NoScores`] if the device does not give
    /// scores, and [`RoutingError::Write`] if `out` cannot be written.
    pub fn record_routing(
        &mut self,
        out: Box<dyn Write + Send>,
        scores: bool,
    ) -> Result<(), EngineError> {
        self.refuse_mtp("the routing of proposals is not recorded")?;
        let header = RoutingHeader { scores, ..self.routing_header()? };
        if scores && !self.runner.decoder.backend().gives_early_scores() {
            return Err(RoutingError::NoScores.into());
        }
        let recorder = RoutingRecorder::new(out, header).map_err(RoutingError::Write)?;
        let rows = Routing { scores: scores.then(Vec::new), ..Routing::default() };
        self.routing = Some(RoutingLog { recorder: Some(recorder), kept: None, rows });
        Ok(())
    }

    /// Keeps the experts of all rows from now on, until [`Session::take_kept_routing`].
    pub(crate) fn keep_routing(&mut self) {
        let (recorder, kept) = (None, Some(Vec::new()));
        match &mut self.routing {
            Some(log) => log.kept = kept,
            None => self.routing = Some(RoutingLog { recorder, kept, rows: Routing::default() }),
        }
    }

    /// Returns the experts of the rows since [`Session::keep_routing`], `[rows, layers, k]`.
    pub(crate) fn take_kept_routing(&mut self) -> Vec<i32> {
        let kept = self.routing.as_mut().and_then(|log| log.kept.take());
        self.routing.take_if(|log| log.recorder.is_none());
        kept.unwrap_or_default()
    }

    /// Completes the trace that [`Session::record_routing`] started, if one is in progress.
    ///
    /// # Errors
    /// Returns [`RoutingError::Write`] if the trace cannot be written.
    pub fn end_routing(&mut self) -> Result<(), RoutingError> {
        match self.routing.take() {
            Some(RoutingLog { recorder: Some(recorder), .. }) => {
                recorder.finish().map_err(RoutingError::Write)
            }
            _ => Ok(()),
        }
    }

    /// Returns the number and size of the experts in each layer. Dense layers have zeros.
    ///
    /// # Errors
    /// Returns [`RoutingError::NoExperts`] if all layers are dense.
    pub fn routing_layers(&self) -> Result<Vec<RoutingLayer>, RoutingError> {
        let architecture = self.runner.decoder.architecture();
        let blocks = &self.runner.decoder.weights().blocks.experts;
        let bytes = |layer: usize| {
            blocks.get(layer).and_then(|of| of.iter().map(Block::bytes).max()).unwrap_or(0)
        };
        let described = architecture.layers.iter().enumerate();
        let layers: Vec<RoutingLayer> = described
            .map(|(index, layer)| match &layer.feed_forward {
                FeedForward::Experts(Experts { count, used, .. }) => RoutingLayer {
                    experts: *count as u32,
                    used: *used as u32,
                    expert_bytes: bytes(index),
                },
                FeedForward::None | FeedForward::Dense { .. } => {
                    RoutingLayer { experts: 0, used: 0, expert_bytes: 0 }
                }
            })
            .collect();
        if layers.iter().all(|layer| layer.used == 0) {
            return Err(RoutingError::NoExperts);
        }
        Ok(layers)
    }

    fn routing_header(&self) -> Result<RoutingHeader, RoutingError> {
        let layers = self.routing_layers()?;
        let info = self.info();
        let file = info.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let model = info.name.clone().unwrap_or(file);
        let family = info.architecture.to_owned();
        let header = RoutingHeader::new(model, family, layers, LookupOrder::Ascending);
        Ok(RoutingHeader {
            tokenizer: self.tokenizer.as_deref().map(fingerprint),
            weights: self.runner.decoder.backend().gives_routing_weights(),
            ..header
        })
    }

    /// Starts a turn of the recording, if one is in progress.
    pub(crate) fn begin_turn(&mut self, prompt: &[u32]) -> Result<(), RoutingError> {
        match &mut self.routing {
            Some(RoutingLog { recorder: Some(recorder), .. }) => {
                recorder.turn(prompt).map_err(RoutingError::Write)
            }
            _ => Ok(()),
        }
    }

    /// Runs tokens, and records their routing if a recording is in progress.
    pub(crate) fn forward(
        &mut self,
        phase: Phase,
        tokens: &[u32],
        logits: Logits,
        output: &mut Outputs<'_>,
    ) -> Result<(), EngineError> {
        let mut log = self.routing.take();
        let rows = log.as_mut().map(|log| {
            log.rows.clear();
            &mut log.rows
        });
        let ran = self.run_tokens(row_kind(phase), tokens, logits, output, rows);
        self.routing = log;
        ran?;
        let Some(log) = &mut self.routing else { return Ok(()) };
        let batch_tokens = self.runner.decoder.backend().batch_tokens();
        Ok(log.write(phase, batch_tokens)?)
    }
}

/// Returns the kind of the rows of a phase.
pub(crate) fn row_kind(phase: Phase) -> RowKind {
    match phase {
        Phase::Prompt => RowKind::Prompt,
        Phase::Generate => RowKind::Decode,
    }
}

/// Returns the XXH3 hash of all tokens of the vocabulary in the order of their ids, each preceded by its length.
fn fingerprint(tokenizer: &Tokenizer) -> String {
    let mut hash = XxHash3_64::new();
    for id in 0..tokenizer.vocab_size() as u32 {
        let text = tokenizer.token_text(id).unwrap_or_default();
        hash.write(&(text.len() as u32).to_le_bytes());
        hash.write(text.as_bytes());
    }
    format!("{:016x}", hash.finish())
}
