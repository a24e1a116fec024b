//! The calls made to both sessions. Their results must be the same, even after errors.

use std::ops::ControlFlow;

use anyhow::{Result, bail, ensure};
use forebay_engine::{EngineError, GenerateOptions, Session, StopReason};
use forebay_model::ModelError;
use forebay_model::sampling::Sampling;

use crate::Tally;
use crate::fault_profile::{self, After};
use crate::pair::Pair;
use crate::random::Random;

/// Number of attempts that a call may take, since these disks recover.
pub const ATTEMPTS: usize = 300;
/// Largest number of tokens that are computed one at a time.
const ALONE: usize = 12;

/// State of a session after a call or a conversation.
#[derive(PartialEq, Eq)]
pub enum Then {
    GoesOn,
    /// The conversation has filled the context.
    Full,
    /// The session has stopped, and another one must be opened.
    Stopped,
}

/// A turn of a conversation.
pub struct Turn {
    pub prompt: Vec<u32>,
    tokens: usize,
    sampling: Sampling,
    /// Number of tokens after which the caller stops the answer.
    pub cancel_after: Option<usize>,
}

/// Result of a turn, or what it generated before it failed.
pub struct Answer {
    pub tokens: Vec<u32>,
    pub end: Result<StopReason, EngineError>,
}

impl Turn {
    pub fn random(session: &Session, random: &mut Random) -> Turn {
        let room = session.context() - session.cached_tokens().len();
        let prompt = ids(length(random).min(room), session, random);
        let tokens = 1 + random.next() as usize % 24;
        let seed = u64::from(random.next());
        let sampling = match random.next() % 3 {
            0 => Sampling::greedy(),
            1 => Sampling { seed, ..Sampling::default() },
            // These settings need all logits.
            _ => Sampling { seed, top_k: 0, repeat_penalty: 1.1, ..Sampling::default() },
        };
        let cancel_after = random.next().is_multiple_of(4).then(|| 1 + random.next() as usize % 8);
        Turn { prompt, tokens, sampling, cancel_after }
    }

    pub fn options(&self) -> GenerateOptions {
        GenerateOptions::exactly(self.tokens, self.sampling.clone())
    }

    pub fn of(&self, session: &mut Session) -> Answer {
        let mut tokens = Vec::new();
        let end = session.generate(&self.prompt, &self.options(), &mut |id| {
            tokens.push(id);
            match self.cancel_after {
                Some(count) if tokens.len() >= count => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        });
        Answer { tokens, end: end.map(|generation| generation.stop_reason) }
    }
}

impl Pair {
    /// Makes a few random calls to both sessions and compares the results.
    ///
    /// # Errors
    /// Returns an error if results differ, or if a call fails for another reason than the disk.
    pub fn converse(&mut self, random: &mut Random, tally: &mut Tally) -> Result<Then> {
        self.reference.reset();
        self.streaming.reset();
        tally.conversations += 1;
        for _ in 0..2 + random.next() % 5 {
            let then = match random.next() % 10 {
                0 => self.ask_for_logits(random, tally)?,
                1 => {
                    self.call_badly(random, tally)?;
                    Then::GoesOn
                }
                2 => {
                    let position =
                        random.next() as usize % (1 + self.reference.cached_tokens().len());
                    let left = self.reference.truncate(position);
                    if self.streaming.truncate(left) < left {
                        self.reference.reset();
                    }
                    tally.truncated += 1;
                    Then::GoesOn
                }
                _ if self.reference.cached_tokens().len() == self.reference.context() => Then::Full,
                _ => self.say(random, tally)?,
            };
            if then != Then::GoesOn {
                return Ok(then);
            }
            let (left, right) = (self.reference.cached_tokens(), self.streaming.cached_tokens());
            ensure!(left == right, "{} tokens in the cache, not {}", right.len(), left.len());
        }
        Ok(Then::GoesOn)
    }

    fn say(&mut self, random: &mut Random, tally: &mut Tally) -> Result<Then> {
        let turn = Turn::random(&self.reference, random);
        let before = self.reference.cached_tokens().len();
        let expected = turn.of(&mut self.reference);
        let reason = expected.end?;
        tally.cancelled += u64::from(reason == StopReason::Stopped);
        for _ in 0..ATTEMPTS {
            let Answer { tokens: said, end } = turn.of(&mut self.streaming);
            if !expected.tokens.starts_with(&said) {
                bail!("WRONG TOKENS: {said:?} instead of {:?}", expected.tokens);
            }
            let error = match end {
                Ok(found) => {
                    let whole = said == expected.tokens && found == reason;
                    ensure!(whole, "{found:?} after {} tokens, not {reason:?}", said.len());
                    tally.tokens_compared += said.len() as u64;
                    return Ok(Then::GoesOn);
                }
                Err(error) => error,
            };
            if self.failed(error, tally)? == After::Stopped {
                return Ok(Then::Stopped);
            }
            // The last token's pass has failed, or the prompt's.
            let kept = self.streaming.cached_tokens();
            let fed = if said.is_empty() { 0 } else { turn.prompt.len() + said.len() - 1 };
            if kept.is_empty() && before + fed > 0 && self.streaming.has_windows() {
                // Layers with a window no longer hold the positions from before this call.
                return Ok(self.begin_anew(tally));
            }
            let right = kept == &self.reference.cached_tokens()[..before + fed];
            ensure!(
                right,
                "{} tokens are in the cache after an error, not {}",
                kept.len(),
                before + fed
            );
            // A call reads its tokens as a prompt, which rounds otherwise than generating does. So the answer cannot be
            // resumed. Passes of an engine can (`run_together`).
            if self.streaming.truncate(before) < before {
                return Ok(self.begin_anew(tally));
            }
            tally.repeated += 1;
        }
        bail!("the disk recovers, but {ATTEMPTS} calls failed")
    }

    /// Resets both sessions.
    fn begin_anew(&mut self, tally: &mut Tally) -> Then {
        self.reference.reset();
        self.streaming.reset();
        tally.forgotten += 1;
        Then::GoesOn
    }

    fn ask_for_logits(&mut self, random: &mut Random, tally: &mut Tally) -> Result<Then> {
        let alone = random.next().is_multiple_of(2);
        let longest = if alone { ALONE } else { self.reference.context() };
        let ids = ids(length(random).min(longest), &self.reference, random);
        self.compare_logits(&ids, alone, tally)
    }

    /// Computes as many tokens as the context holds, so that all memory reserved at the start is in use.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Pair::converse`], and if the session stops.
    pub fn fill(&mut self, random: &mut Random, tally: &mut Tally) -> Result<()> {
        let ids = ids(self.reference.context(), &self.reference, random);
        match self.compare_logits(&ids, false, tally)? {
            Then::Stopped => bail!("the session stopped"),
            Then::GoesOn | Then::Full => Ok(()),
        }
    }

    fn compare_logits(&mut self, ids: &[u32], alone: bool, tally: &mut Tally) -> Result<Then> {
        let logits = |session: &mut Session| match alone {
            true => session.logits_one_by_one(ids),
            false => session.logits(ids, None),
        };
        let bits = |logits: &[f32]| logits.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        let expected = logits(&mut self.reference)?;
        for _ in 0..ATTEMPTS {
            match logits(&mut self.streaming) {
                Ok(found) => {
                    ensure!(
                        bits(&found) == bits(&expected),
                        "WRONG LOGITS of {} tokens",
                        ids.len()
                    );
                    tally.logits_compared += found.len() as u64;
                    return Ok(Then::GoesOn);
                }
                Err(error) => {
                    if self.failed(error, tally)? == After::Stopped {
                        return Ok(Then::Stopped);
                    }
                    tally.repeated += 1;
                }
            }
        }
        bail!("the disk recovers, but {ATTEMPTS} calls failed")
    }

    /// Makes calls that both sessions must refuse, and that must change nothing.
    fn call_badly(&mut self, random: &mut Random, tally: &mut Tally) -> Result<()> {
        let vocabulary = self.reference.vocab_size() as u32;
        let room = self.reference.context() - self.reference.cached_tokens().len();
        let prompt = match random.next() % 3 {
            0 => Vec::new(),
            1 => vec![0, vocabulary + random.next() % 9],
            _ => ids(room + 1 + random.next() as usize % 9, &self.reference, random),
        };
        let turn = Turn { prompt, tokens: 1, sampling: Sampling::greedy(), cancel_after: None };
        for session in [&mut self.reference, &mut self.streaming] {
            match turn.of(session).end {
                Err(
                    EngineError::EmptyPrompt
                    | EngineError::Model(
                        ModelError::TokenOutOfRange { .. } | ModelError::ContextFull { .. },
                    ),
                ) => {}
                other => bail!("a call that cannot be answered gave {other:?}"),
            }
        }
        tally.bad_calls += 1;
        Ok(())
    }

    /// Counts an error and returns the state it leaves the session in. Fails if the disk did not cause the error.
    fn failed(&mut self, error: EngineError, tally: &mut Tally) -> Result<After> {
        let (what, after) = fault_profile::name(error, &self.path)?;
        *tally.errors.entry(what).or_default() += 1;
        if after == After::Stopped {
            ensure!(
                self.streaming.logits(&[0], None).is_err(),
                "a session went on without its memory"
            );
        }
        Ok(after)
    }
}

/// Returns a random prompt length: short most often, several batches now and then.
fn length(random: &mut Random) -> usize {
    let longest = [8, 8, 8, 60, 60, 700][random.next() as usize % 6];
    1 + random.next() as usize % longest
}

fn ids(count: usize, session: &Session, random: &mut Random) -> Vec<u32> {
    (0..count).map(|_| random.next() % session.vocab_size() as u32).collect()
}
