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
    recorder: RoutingRecorder,
    /// Buffer that is reused from call to call.
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
        let RoutingLog { recorder, rows } = self;
        let written = write(recorder, phase, rows, batch_tokens);
        rows.clear();
        written
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
        self.routing = Some(RoutingLog { recorder, rows });
        Ok(())
    }

    /// Returns empty rows for a caller that wants the routing itself and then passes it to [`Session::record`].
    pub(crate) fn routing_rows(&self) -> Routing {
        let scored = self.routing.as_ref().is_some_and(|log| log.rows.scores.is_some());
        Routing { scores: scored.then(Vec::new), ..Routing::default() }
    }

    /// Completes the trace that [`Session::record_routing`] started, if one is in progress.
    ///
    /// # Errors
    /// Returns [`RoutingError::Write`] if the trace cannot be written.
    pub fn end_routing(&mut self) -> Result<(), RoutingError> {
        match self.routing.take() {
            Some(log) => log.recorder.finish().map_err(RoutingError::Write),
            None => Ok(()),
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
            Some(log) => log.recorder.turn(prompt).map_err(RoutingError::Write),
            None => Ok(()),
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
        let RoutingLog { recorder, rows } = log;
        Ok(write(recorder, phase, rows, batch_tokens)?)
    }

    /// Records rows that the caller obtained from [`Session::routing_rows`].
    pub(crate) fn record(&mut self, phase: Phase, rows: &Routing) -> Result<(), RoutingError> {
        let batch_tokens = self.runner.decoder.backend().batch_tokens();
        let Some(log) = &mut self.routing else { return Ok(()) };
        write(&mut log.recorder, phase, rows, batch_tokens)
    }
}

fn write(
    recorder: &mut RoutingRecorder,
    phase: Phase,
    rows: &Routing,
    batch_tokens: usize,
) -> Result<(), RoutingError> {
    let scores = rows.scores.as_deref().unwrap_or(&[]);
    let recorded = recorder.record(phase, &rows.experts, &rows.weights, scores, batch_tokens);
    recorded.map_err(RoutingError::Write)
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
