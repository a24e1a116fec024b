//! Proposals of the layer that predicts further tokens, and their check in the model's passes (multi-token prediction).
//!
//! A pass computes the token that was chosen last and a proposal for the next one. If the choice from the model's logits equals the
//! proposal, the logits behind the proposal are already there. So tokens are the same as without proposals.

use forebay_format::Catalog;
use forebay_model::arch::MTP_ROWS_MAX;
use forebay_model::sampling::{Sampler, argmax};
use forebay_model::{Architecture, Decoder};
use forebay_ops::RowKind;
use forebay_options::{BadOption, OptionName};
use serde::Serialize;

use crate::kv::SequenceId;
use crate::options::SessionOptions;
use crate::pass_logits::{NoMasks, PassLogits, WantedRow};
use crate::runner::{Logits, Outputs, PredictionRows, Rows};
use crate::{EngineError, Session};

/// What became of proposals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct MtpStatistics {
    /// Number of proposals that were checked.
    pub proposals: u64,
    pub accepted: u64,
    /// Share of the proposals that were accepted; 0 if there were none.
    pub acceptance: f64,
    /// Number of passes for generated tokens.
    pub passes: u64,
    /// Number of rows in these passes.
    pub rows: u64,
}

impl MtpStatistics {
    /// Returns what came after `before`.
    pub(crate) fn since(&self, before: &MtpStatistics) -> MtpStatistics {
        let of = MtpStatistics {
            proposals: self.proposals - before.proposals,
            accepted: self.accepted - before.accepted,
            acceptance: 0.0,
            passes: self.passes - before.passes,
            rows: self.rows - before.rows,
        };
        of.with_share()
    }

    fn with_share(self) -> MtpStatistics {
        let acceptance = self.accepted as f64 / self.proposals.max(1) as f64;
        MtpStatistics { acceptance, ..self }
    }
}

/// Describes the model, with the predicting layer if the options ask for it.
///
/// # Errors
/// Returns an error if the layer cannot be used.
pub(crate) fn describe(
    catalog: &Catalog,
    options: &SessionOptions,
) -> Result<Architecture, EngineError> {
    if !options.mtp {
        return Ok(Architecture::from_catalog(catalog)?);
    }
    if options.sequences > 1 {
        return Err(refused("proposals are checked for one sequence only, and this runs several"));
    }
    Ok(Architecture::with_mtp(catalog)?)
}

fn refused(why: &str) -> EngineError {
    EngineError::Option(BadOption {
        name: OptionName::Mtp,
        value: "on".into(),
        expected: why.into(),
    })
}

/// State of the predicting layer of a session, and of the last pass.
pub(crate) struct Proposals {
    /// Length of a state.
    width: usize,
    /// States of consecutive positions from `first` on, which the predicting layer has not taken yet.
    hidden: Vec<f32>,
    first: usize,
    /// The last pass, if the row of its proposal may still be used.
    open: Option<Open>,
    statistics: MtpStatistics,
    /// Buffer for the logits of a proposal.
    logits: Vec<f32>,
    /// Gets the logits of all rows whose next token is known, while the caller wants them.
    kept: Option<Vec<f32>>,
}

/// A pass with a proposal about which nothing is decided yet.
#[derive(Clone, Copy)]
struct Open {
    /// Number of rows of the sequence before the pass.
    base: usize,
    proposal: u32,
    /// The proposal's row among those whose logits were wanted.
    row: usize,
}

impl Proposals {
    /// Returns the state for a decoder; `None` if the model was opened without the predicting layer.
    ///
    /// # Errors
    /// Returns an error if the device cannot run the layer.
    pub fn of(decoder: &Decoder, device: &str) -> Result<Option<Proposals>, EngineError> {
        if decoder.architecture().mtp.is_none() {
            return Ok(None);
        }
        if !decoder.predicts() {
            return Err(refused(&format!("forebay cannot run the predicting layer on {device}")));
        }
        Ok(Some(Proposals {
            width: decoder.architecture().predicted_from() * decoder.architecture().hidden,
            hidden: Vec::new(),
            first: 0,
            open: None,
            statistics: MtpStatistics::default(),
            logits: Vec::new(),
            kept: None,
        }))
    }

    pub fn statistics(&self) -> MtpStatistics {
        self.statistics.with_share()
    }

    /// Begins with a sequence that has so many rows, perhaps those of an earlier one. That has computed all of them in the predicting
    /// layer but the last one, whose next token it may not have known. Its state is gone, so zeros stand for it.
    fn begin(&mut self, rows: usize) {
        self.hidden.clear();
        self.hidden.resize(rows.min(1) * self.width, 0.0);
        self.first = rows.saturating_sub(1);
        self.open = None;
    }

    /// Returns the position behind the last state.
    fn end(&self) -> usize {
        self.first + self.hidden.len() / self.width
    }

    /// Drops the states from `position` on.
    pub fn forget_from(&mut self, position: usize) {
        self.hidden.truncate(position.saturating_sub(self.first) * self.width);
    }

    /// Adds the states from `position` on, in place of those that are there.
    fn append(&mut self, position: usize, hidden: &[f32]) {
        self.forget_from(position);
        if self.hidden.is_empty() || self.end() != position {
            self.hidden.clear();
            self.first = position;
        }
        self.hidden.extend_from_slice(hidden);
    }

    /// Drops the first `count` states.
    fn drop_first(&mut self, count: usize) {
        self.hidden.drain(..count * self.width);
        self.first += count;
    }
}

impl Session {
    /// Returns an error that says why, if the predicting layer is loaded.
    pub(crate) fn refuse_mtp(&self, why: &str) -> Result<(), EngineError> {
        if self.mtp.is_some() { Err(refused(why)) } else { Ok(()) }
    }

    /// Makes a sequence that has these rows the one that proposals are for.
    pub(crate) fn follow(&mut self, sequence: SequenceId, rows: &[u32]) {
        self.sequence = sequence;
        self.cached.clear();
        self.cached.extend_from_slice(rows);
        if let Some(mtp) = &mut self.mtp {
            mtp.begin(rows.len());
        }
    }

    /// Takes note that the sequence has ended, with whatever is proposed behind it.
    pub(crate) fn drop_proposal(&mut self) {
        if let Some(mtp) = &mut self.mtp {
            mtp.open = None;
        }
    }

    /// Returns true if the last pass has the logits behind this token, because it was proposed.
    pub(crate) fn has_logits_behind(&self, id: u32) -> bool {
        let open = self.mtp.as_ref().and_then(|mtp| mtp.open);
        open.is_some_and(|open| open.proposal == id)
    }

    /// Takes over the states of the last pass, whose `count` rows are the last cached tokens, and runs all of them whose next token is
    /// known through the predicting layer.
    pub(crate) fn predict_known(&mut self, kind: RowKind, count: usize) -> Result<(), EngineError> {
        let Some(mtp) = &mut self.mtp else { return Ok(()) };
        let end = self.cached.len();
        mtp.append(end - count, self.runner.decoder.final_rows());
        let tokens = self.cached[mtp.first + 1..].to_vec();
        let Some(mut kept) = mtp.kept.take() else {
            let unused = &mut Outputs::Logits(&mut Vec::new());
            return self.run_predictions(kind, &tokens, Logits::None, unused);
        };
        let ran = self.run_predictions(kind, &tokens, Logits::All, &mut Outputs::Logits(&mut kept));
        if let Some(mtp) = &mut self.mtp {
            mtp.kept = Some(kept);
        }
        ran
    }

    /// Runs the first states through the predicting layer, one for each of `tokens`, which are those behind their positions. `output`
    /// gets the logits of the last row, of all rows, or of none.
    fn run_predictions(
        &mut self,
        kind: RowKind,
        tokens: &[u32],
        logits: Logits,
        output: &mut Outputs<'_>,
    ) -> Result<(), EngineError> {
        let Some(mtp) = &mut self.mtp else { return Ok(()) };
        let backend = self.runner.decoder.backend();
        let most = match kind {
            RowKind::Prompt => backend.batch_tokens(),
            RowKind::Decode => backend.decode_rows(),
        };
        let mut left = tokens;
        while !left.is_empty() {
            let (part, others) = left.split_at(left.len().min(most));
            let all = 0..part.len() as u32;
            let outputs: Vec<u32> = match logits {
                Logits::All => all.collect(),
                Logits::Last if others.is_empty() => all.last().into_iter().collect(),
                _ => Vec::new(),
            };
            let rows = PredictionRows {
                kind,
                position: mtp.first,
                tokens: part,
                hidden: &mtp.hidden[..part.len() * mtp.width],
                outputs: &outputs,
            };
            self.runner.predict(self.sequence, &rows, output)?;
            mtp.drop_first(part.len());
            left = others;
        }
        Ok(())
    }

    fn require_mtp(&self) -> Result<(), EngineError> {
        match self.mtp {
            Some(_) => Ok(()),
            None => Err(EngineError::Option(BadOption {
                name: OptionName::Mtp,
                value: "off".into(),
                expected: "the layer that proposes tokens is not loaded".into(),
            })),
        }
    }

    /// Returns the logits of a text as [`Session::logits`] does, and those of the predicting layer, both `[tokens, vocabulary]`. Row
    /// `t` of the latter is about the token at `t + 2` and follows from the one at `t + 1`. For the last row, this is the likeliest
    /// token behind the text.
    ///
    /// # Errors
    /// Returns an error if the layer is not loaded or there are no tokens, or an error of [`Session::logits`].
    pub fn logits_and_predictions(
        &mut self,
        tokens: &[u32],
        routing: Option<&mut Vec<i32>>,
    ) -> Result<(Vec<f32>, Vec<f32>), EngineError> {
        self.require_mtp()?;
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        let vocabulary = self.vocab_size();
        if let Some(mtp) = &mut self.mtp {
            mtp.kept = Some(Vec::with_capacity(tokens.len() * vocabulary));
        }
        let ran = self.logits(tokens, routing);
        let kept = self.mtp.as_mut().and_then(|mtp| mtp.kept.take());
        let (logits, mut predicted) = (ran?, kept.unwrap_or_default());
        let next = argmax(&logits[logits.len() - vocabulary..]);
        // The token that will follow may be another one, so the last state stays for it.
        let state = self.mtp.as_ref().map(|mtp| (mtp.first, mtp.hidden.clone()));
        self.propose(RowKind::Prompt, next, &mut Outputs::Logits(&mut predicted))?;
        if let (Some(mtp), Some((first, hidden))) = (&mut self.mtp, state) {
            (mtp.first, mtp.hidden) = (first, hidden);
        }
        Ok((logits, predicted))
    }

    /// Returns the logits of the predicting layer for a text, of which the first `prompt` tokens are read together and the others one by
    /// one, as in generation: `[tokens - prompt, vocabulary]`. Row `t` is about the token at `prompt + t + 1`.
    ///
    /// # Errors
    /// Returns an error if the layer is not loaded or the prompt is empty, or an error of [`Session::logits`].
    pub fn proposal_logits(
        &mut self,
        tokens: &[u32],
        prompt: usize,
    ) -> Result<Vec<f32>, EngineError> {
        self.require_mtp()?;
        let (prompt, answer) = tokens.split_at(prompt.min(tokens.len()));
        if prompt.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        self.reset();
        self.begin_turn(prompt)?;
        let mut unused = Vec::new();
        let unused = &mut Outputs::Logits(&mut unused);
        self.run_tokens(RowKind::Prompt, prompt, Logits::None, unused, None)?;
        let mut all = Vec::new();
        for id in answer {
            self.propose(RowKind::Decode, *id, &mut Outputs::Logits(&mut all))?;
            self.run_tokens(RowKind::Decode, std::slice::from_ref(id), Logits::None, unused, None)?;
        }
        Ok(all)
    }

    /// Has the logits of the token that follows `id` in `output`, where `id` is the token behind the cached ones. Returns false if there
    /// are none, because the predicting layer has not seen the last of these.
    fn propose(
        &mut self,
        kind: RowKind,
        id: u32,
        output: &mut Outputs<'_>,
    ) -> Result<bool, EngineError> {
        let cached = self.cached.len();
        let Some(mtp) = &self.mtp else { return Ok(false) };
        if mtp.hidden.is_empty() || mtp.end() != cached {
            return Ok(false);
        }
        let mut tokens = self.cached[mtp.first + 1..].to_vec();
        tokens.push(id);
        self.run_predictions(kind, &tokens, Logits::Last, output)?;
        Ok(true)
    }

    /// Returns the likeliest token behind `id`, as the predicting layer sees it, if it has seen the last of the cached tokens.
    fn propose_likeliest(&mut self, id: u32) -> Result<Option<u32>, EngineError> {
        if self.runner.decoder.backend().largest_count() > 0 {
            let mut largest = Vec::with_capacity(1);
            let output = &mut Outputs::Largest(1, &mut largest);
            let proposed = self.propose(RowKind::Decode, id, output)?;
            return Ok(largest.first().filter(|_| proposed).map(|(_, id)| *id));
        }
        let mut logits = self.mtp.as_mut().map(|mtp| std::mem::take(&mut mtp.logits));
        let Some(logits) = &mut logits else { return Ok(None) };
        logits.clear();
        let proposed = self.propose(RowKind::Decode, id, &mut Outputs::Logits(logits))?;
        let likeliest = proposed.then(|| argmax(logits));
        if let Some(mtp) = &mut self.mtp {
            // The buffer is used again.
            mtp.logits = std::mem::take(logits);
        }
        Ok(likeliest)
    }

    /// Adds a chosen token to the cached ones, and has the logits behind it in `logits`. Returns the row there. With `proposes`, the
    /// pass for the token also checks a proposal for the next one. `probabilities` is as in [`WantedRow::chooses`].
    ///
    /// # Errors
    /// Returns an error of [`Session::run_tokens`]. Some of the last tokens are no longer cached then if the model has recurrent
    /// layers.
    pub(crate) fn advance(
        &mut self,
        id: u32,
        proposes: bool,
        (sampler, probabilities): (&Sampler, Option<usize>),
        logits: &mut PassLogits,
    ) -> Result<usize, EngineError> {
        let cached = self.cached.len();
        let open = self.mtp.as_mut().and_then(|mtp| mtp.open.take());
        if let Some(open) = open.filter(|open| open.proposal == id) {
            self.cached.push(id);
            self.count(|of| of.accepted += 1);
            return Ok(open.row);
        }
        let base = self.pass_begins_at(open);
        let known = cached - base + 1;
        let is_recurrent = self.runner.decoder.is_recurrent();
        // Recurrent layers go on where the last state is, which is before the rows of a pass whose proposal was refused. These are
        // computed again, and so a pass without a proposal follows the second refusal.
        let has_room = !is_recurrent || known < MTP_ROWS_MAX;
        let proposes = proposes && has_room && cached + 2 <= self.context();
        // The layer reads the positions of the last pass, so the sequence keeps them until it has.
        if let Some(mtp) = &mut self.mtp {
            mtp.forget_from(cached);
        }
        let proposed = if proposes { self.propose_likeliest(id) } else { Ok(None) };
        let proposal = match proposed {
            Ok(proposal) => proposal,
            Err(error) => {
                self.truncate(base);
                return Err(error);
            }
        };
        let mut rows = self.cached[base..].to_vec();
        rows.push(id);
        rows.extend(proposal);
        let chosen_from = 1 + usize::from(proposal.is_some());
        // The device selects logits for all rows of a pass. It cannot if a choice changes what the next one needs.
        let largest = self.runner.decoder.backend().largest_count();
        let (most, first) = match sampler.looks_back() {
            false if largest > 0 => (largest, rows.len() - chosen_from),
            _ => (0, 0),
        };
        let tail = Logits::Tail(first + chosen_from);
        let unused = (0..first).map(|_| WantedRow::unused());
        let wanted =
            (0..chosen_from).map(|_| WantedRow::chooses(sampler, &[], false, probabilities));
        let ran = logits.of_pass(most, unused.chain(wanted), &mut NoMasks, |output| {
            self.pass_again(base, &rows, tail, output)
        });
        if let Err(error) = ran {
            self.truncate(base);
            return Err(error);
        }
        self.cached.push(id);
        self.count(|of| {
            of.proposals += u64::from(proposal.is_some());
            of.passes += 1;
            of.rows += rows.len() as u64;
        });
        if let Some(mtp) = &mut self.mtp {
            mtp.open = proposal.map(|proposal| Open { base, proposal, row: first + 1 });
        }
        Ok(first)
    }

    /// Makes the sequence what it is without proposals: drops the row of a proposal about which nothing was decided.
    ///
    /// # Errors
    /// Returns an error of [`Session::advance`].
    pub(crate) fn settle(&mut self) -> Result<(), EngineError> {
        let Some(open) = self.mtp.as_mut().and_then(|mtp| mtp.open.take()) else { return Ok(()) };
        let base = self.pass_begins_at(Some(open));
        if base == self.cached.len() {
            self.truncate(base);
            return Ok(());
        }
        let rows = self.cached[base..].to_vec();
        let ran = self.pass_again(base, &rows, Logits::None, &mut Outputs::Logits(&mut Vec::new()));
        ran.inspect_err(|_| {
            self.truncate(base);
        })
    }

    /// Returns where the pass after one with a refused proposal begins: behind the last token, or where the last state is.
    fn pass_begins_at(&self, open: Option<Open>) -> usize {
        let refused = open.filter(|_| self.runner.decoder.is_recurrent());
        refused.map_or(self.cached.len(), |open| open.base)
    }

    /// Runs rows from position `base` on in place of those that the sequence has there, and keeps their states for the predicting
    /// layer.
    fn pass_again(
        &mut self,
        base: usize,
        tokens: &[u32],
        logits: Logits,
        output: &mut Outputs<'_>,
    ) -> Result<(), EngineError> {
        let left = self.runner.truncate(self.sequence, base);
        assert_eq!(left, base, "the rows of a refused proposal can be dropped");
        let rows = Rows { sequence: self.sequence, kind: RowKind::Decode, tokens, logits };
        self.runner.pass(&[rows], output, None, None)?;
        if let Some(mtp) = &mut self.mtp {
            mtp.append(base, self.runner.decoder.final_rows());
        }
        Ok(())
    }

    fn count(&mut self, note: impl FnOnce(&mut MtpStatistics)) {
        if let Some(mtp) = &mut self.mtp {
            note(&mut mtp.statistics);
        }
    }
}
