//! Prompts that are read between passes of generated rows. A pass of prompt rows pauses after some layers, so that others need
//! not wait for all of it.

use std::time::Instant;

use forebay_model::{ModelError, Paused};
use forebay_ops::RowKind;

use super::Engine;
use super::request::RequestId;
use super::schedule::Part;
use crate::EngineError;

/// A pass of prompt rows that pauses while others generate.
pub struct Reading {
    /// The requests, and the number of rows of each.
    requests: Vec<(RequestId, usize)>,
    paused: Paused,
    /// Seconds of its parts so far.
    seconds: f64,
}

impl Engine<'_> {
    /// Runs a pass of generated rows, and then some layers of a pass of prompt rows: those of the pass that is paused, or else
    /// `prompts`.
    pub(super) fn run_between(
        &mut self,
        decode: &[Part],
        prompts: &[Part],
    ) -> Result<(), EngineError> {
        if !decode.is_empty() {
            self.run_noted(decode)?;
        }
        if prompts.is_empty() {
            return Ok(());
        }
        let mut reading = match self.reading.take() {
            Some(reading) => reading,
            None => self.begin_reading(prompts),
        };
        let index_of = |id| {
            let index = self.running.iter().position(|active| active.id == id);
            index.expect("a request that ends or is suspended reads no more")
        };
        let part = |&(id, count): &(RequestId, usize)| Part {
            index: index_of(id),
            count,
            kind: RowKind::Prompt,
            reads: true,
        };
        let parts: Vec<Part> = reading.requests.iter().map(part).collect();
        let left = self.session.info().layers - reading.paused.layer();
        let layers = if decode.is_empty() { left } else { self.pace.layers().min(left) };
        let started = Instant::now();
        match self.run_parts(&parts, &mut reading.paused, layers) {
            Ok(ended) => {
                let seconds = started.elapsed().as_secs_f64();
                self.note_weights(&parts);
                self.note_use(&parts, seconds);
                self.statistics.prompt_parts += 1;
                reading.seconds += seconds;
                if ended {
                    let rows = parts.iter().map(|part| part.count).sum();
                    self.note_prompt(rows, reading.seconds);
                } else {
                    self.pace.note_layers(layers, seconds);
                    self.reading = Some(reading);
                }
                Ok(())
            }
            Err(EngineError::Model(ModelError::NumericFailure { .. })) => {
                self.run_one_by_one(&parts)
            }
            Err(error) => Err(error),
        }
    }

    /// Begins a pass with as many of the prompts as the backend takes together. After a pass that was forgotten, it is the first
    /// prompt alone, so that requests which end early cannot hold up the others again and again.
    fn begin_reading(&mut self, prompts: &[Part]) -> Reading {
        let together = self.session.runner.decoder.backend().decode_rows();
        let most = if std::mem::take(&mut self.reads_alone) { 1 } else { together };
        let of = |part: &Part| (self.running[part.index].id, part.count);
        let requests = prompts.iter().take(most).map(of).collect();
        Reading { requests, paused: Paused::default(), seconds: 0.0 }
    }

    /// Runs prompt rows through the next `layers` layers. If they have gone through all, the requests whose prompts are read
    /// get their next tokens. Returns true then.
    fn run_parts(
        &mut self,
        parts: &[Part],
        paused: &mut Paused,
        layers: usize,
    ) -> Result<bool, EngineError> {
        let ended = self.run_with_logits(parts, |runner, rows, output| {
            runner.pass_part(rows, paused, layers, output)
        })?;
        if ended {
            self.take_results(parts);
        }
        Ok(ended)
    }

    /// Forgets the paused pass if the request has rows in it. Its other requests begin theirs again.
    pub(super) fn read_no_more(&mut self, id: RequestId) {
        let has_rows = |reading: &mut Reading| reading.requests.iter().any(|(own, _)| *own == id);
        if let Some(forgotten) = self.reading.take_if(has_rows) {
            self.reads_alone = forgotten.requests.len() > 1;
        }
    }
}
