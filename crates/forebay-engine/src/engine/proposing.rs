//! A request whose next tokens a predicting layer proposes (multi-token prediction).
//!
//! Such an engine runs one request at a time. Its sequence is the session's own, so that [`Session`](crate::Session) makes the
//! proposals and checks them. Rows for which nothing is proposed go through the engine's passes, as without the layer: prompts,
//! tokens that are computed again, and answers that follow a grammar.

use forebay_ops::RowKind;

use super::Engine;
use super::active::Active;
use super::request::Request;
use super::schedule::Part;
use crate::EngineError;

impl Engine<'_> {
    /// Adds a request to those that run.
    pub(super) fn run_request(&mut self, active: Active) {
        if self.proposes {
            self.session.follow(active.sequence, &active.tokens()[..active.done()]);
        }
        self.running.push(active);
    }

    /// Checks that the states of which a request wants an embedding are normed.
    ///
    /// # Errors
    /// Returns an error if the predicting layer takes other states, because passes keep one kind.
    pub(super) fn check_pooling(&self, request: &Request) -> Result<(), EngineError> {
        let mtp = self.session.runner.decoder.architecture().mtp;
        if request.pooling.is_none() || mtp.is_none_or(|mtp| !mtp.raw_states) {
            return Ok(());
        }
        let why = "embeddings are normed states, and the layer that proposes tokens takes other ones in this family: turn it off";
        self.session.refuse_mtp(why)
    }

    /// Makes the sequence of the request that runs what it is without proposals.
    ///
    /// # Errors
    /// Returns an error if a read or the device fails.
    pub(super) fn settle_proposals(&mut self) -> Result<(), EngineError> {
        match self.proposes {
            true => self.session.settle(),
            false => Ok(()),
        }
    }

    /// Runs the rows of the only request in one pass. If the pass checks a proposal and finds the token that is chosen, the
    /// request gets two tokens.
    pub(super) fn run_proposing(&mut self, part: &Part) -> Result<(), EngineError> {
        if part.kind == RowKind::Decode && self.running[part.index].may_propose() {
            return self.choose_two(part.index);
        }
        self.session.settle()?;
        let parts = std::slice::from_ref(part);
        self.run_pass(parts)?;
        let rows = self.running[part.index].next_tokens(part.count);
        self.session.cached.extend_from_slice(rows);
        self.take_results(parts);
        self.session.predict_known(part.kind, part.count)
    }

    fn choose_two(&mut self, index: usize) -> Result<(), EngineError> {
        // The session may end the answer behind each token.
        let (mut is_first, lent) = (true, self.is_lent());
        loop {
            let Engine { session, running, logits, .. } = self;
            let active = &mut running[index];
            let id = active.next_tokens(1)[0];
            let row = match active.advance_proposing(session, id, logits) {
                Ok(row) => row,
                Err(error) => {
                    // Rows that are gone are computed again.
                    active.resume(active.sequence, session.cached_tokens().len());
                    return Err(error);
                }
            };
            match is_first {
                true => drop(active.advance(1)),
                false => active.accept(),
            }
            let row = logits.row(row, session.vocab_size(), active.needed_count());
            if let Some(chosen) = row.and_then(|row| active.choose(row)) {
                let ends = session.ends_with(chosen.id, &active.options);
                active.take(chosen, ends, session.context());
            }
            let next = active.tokens().get(active.done()).filter(|_| active.end.is_none());
            if lent || !next.is_some_and(|id| session.has_logits_behind(*id)) {
                return Ok(());
            }
            self.statistics.generate_rows += 1;
            is_first = false;
        }
    }
}
