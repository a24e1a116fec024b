//! Prompts that are read between passes of generated rows. A pass of prompt rows pauses after some layers, so that others need
//! not wait for all of it.

use std::time::Instant;

use forebay_compute::RowKind;
use forebay_model::{ModelError, Paused};

use super::Engine;
use super::request::{RequestEnd, RequestId};
use super::schedule::Part;
use crate::EngineError;

/// A pass of prompt rows that pauses while others generate.
pub struct Reading {
    id: RequestId,
    /// Number of its rows.
    count: usize,
    paused: Paused,
    /// Seconds of its parts so far.
    seconds: f64,
}

impl Engine {
    /// Runs a pass of generated rows, and then some layers of a pass of prompt rows: those of the pass that is paused, or else
    /// `prompt`.
    pub(super) fn run_between(
        &mut self,
        decode: &[Part],
        prompt: Option<Part>,
    ) -> Result<(), EngineError> {
        if !decode.is_empty() {
            self.run_noted(decode)?;
        }
        let Some(of_next) = prompt else { return Ok(()) };
        let begins = || {
            let id = self.running[of_next.index].id;
            Reading { id, count: of_next.count, paused: Paused::default(), seconds: 0.0 }
        };
        let mut reading = self.reading.take().unwrap_or_else(begins);
        let index = self.running.iter().position(|active| active.id == reading.id);
        let index = index.expect("a request that ends or is suspended reads no more");
        let left = self.session.info().layers - reading.paused.layer();
        let layers = if decode.is_empty() { left } else { self.pace.layers().min(left) };
        let part = Part { index, count: reading.count, kind: RowKind::Prompt, reads: true };
        let started = Instant::now();
        match self.run_part(&part, &mut reading.paused, layers) {
            Ok(ended) => {
                let seconds = started.elapsed().as_secs_f64();
                self.note_weights(&[part]);
                self.statistics.prompt_parts += 1;
                reading.seconds += seconds;
                if ended {
                    self.note_prompt(reading.count, reading.seconds);
                } else {
                    self.pace.note_layers(layers, seconds);
                    self.reading = Some(reading);
                }
                Ok(())
            }
            Err(error @ EngineError::Model(ModelError::NumericFailure { .. })) => {
                self.running[index].end = Some(RequestEnd::Failed(error.to_string()));
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Runs prompt rows through the next `layers` layers. If they have gone through all, the request gets its next token if
    /// its prompt is read. Returns true then.
    fn run_part(
        &mut self,
        part: &Part,
        paused: &mut Paused,
        layers: usize,
    ) -> Result<bool, EngineError> {
        let parts = std::slice::from_ref(part);
        let ended = self.run_with_logits(parts, |runner, rows, output| {
            runner.pass_part(rows[0], paused, layers, output)
        })?;
        if ended {
            self.take_results(parts);
        }
        Ok(ended)
    }

    /// Forgets the paused pass if it is of this request.
    pub(super) fn read_no_more(&mut self, id: RequestId) {
        self.reading.take_if(|reading| reading.id == id);
    }
}
