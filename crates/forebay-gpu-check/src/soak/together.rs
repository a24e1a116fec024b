//! Requests that run together on the streaming session. Each must get what the reference gives it alone.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use forebay_engine::engine::{EngineOptions, Event, Latency, Request, RequestEnd};
use forebay_engine::{Engine, StopReason};

use crate::Tally;
use crate::conversation::{ATTEMPTS, Then, Turn};
use crate::fault_profile::{self, After};
use crate::pair::Pair;
use crate::random::Random;

/// Most requests of a round.
const REQUESTS: u32 = 5;

/// Passes within which they come.
const COME_WITHIN: u32 = 30;

/// Events that a request has got.
#[derive(Default, Clone)]
struct Got {
    tokens: Vec<u32>,
    end: Option<RequestEnd>,
}

impl Pair {
    /// Runs random requests on an engine and compares their answers with those of the reference. Passes that fail because
    /// of the disk are tried again.
    ///
    /// # Errors
    /// Returns an error if answers differ, or if a pass fails for another reason than the disk.
    pub fn run_together(self, random: &mut Random, tally: &mut Tally) -> Result<(Pair, Then)> {
        let Pair { path, fault_profile, options, mut reference, mut streaming } = self;
        reference.reset();
        streaming.reset();
        let requests = 2 + random.next() % (REQUESTS - 1);
        let turns: Vec<(Turn, usize)> = (0..requests)
            .map(|_| (Turn::random(&reference, random), (random.next() % COME_WITHIN) as usize))
            .collect();
        let mut expected = Vec::new();
        for (turn, _) in &turns {
            reference.reset();
            let answer = turn.of(&mut reference);
            expected.push((answer.tokens, answer.end?));
        }
        reference.reset();

        let mut engine = Engine::new(streaming, &engine_options(random));
        let got = Arc::new(Mutex::new(vec![Got::default(); turns.len()]));
        let (mut step, mut left, mut failed) = (0, turns.len(), 0);
        let mut then = Then::GoesOn;
        while left > 0 || engine.load() != (0, 0) {
            for (index, (turn, _)) in turns.iter().enumerate().filter(|(_, of)| of.1 == step) {
                engine.submit(request(turn, random), sink(turn, index, &got))?;
                left -= 1;
            }
            step += 1;
            let Err(error) = engine.step() else { continue };
            let (what, after) = fault_profile::name(error, &path)?;
            *tally.errors.entry(what).or_default() += 1;
            if after == After::Stopped {
                ensure!(engine.step().is_err(), "an engine went on without its memory");
                then = Then::Stopped;
                break;
            }
            tally.resumed += 1;
            failed += 1;
            if failed == ATTEMPTS {
                bail!("the disk recovers, but {ATTEMPTS} passes failed");
            }
        }
        let streaming = engine.into_session();
        let got = std::mem::take(&mut *got.lock().expect("no sink panics"));
        for (index, (got, (tokens, reason))) in got.into_iter().zip(expected).enumerate() {
            tally.together += 1;
            tally.tokens_compared += got.tokens.len() as u64;
            if !tokens.starts_with(&got.tokens) {
                bail!("WRONG TOKENS of request {index}: {:?} instead of {tokens:?}", got.tokens);
            }
            if then != Then::Stopped {
                let whole = got.tokens == tokens && got.end == Some(as_request(reason));
                ensure!(whole, "request {index}: {:?}, not {reason:?}", got.end);
            }
        }
        Ok((Pair { path, fault_profile, options, reference, streaming }, then))
    }
}

fn engine_options(random: &mut Random) -> EngineOptions {
    let mut one_in = |sides: u32| random.next().is_multiple_of(sides);
    let latency = match (one_in(3), one_in(2)) {
        (true, _) => Latency::AtMost(Duration::ZERO),
        (false, true) => Latency::Unbounded,
        (false, false) => Latency::Automatic,
    };
    let (few_rows, few_generate) = (one_in(2), one_in(3));
    EngineOptions {
        prompt_rows: few_rows.then(|| 1 + random.next() as usize % 40),
        generating: few_generate.then(|| 1 + random.next() as usize % 3),
        latency,
        ..EngineOptions::default()
    }
}

fn request(turn: &Turn, random: &mut Random) -> Request {
    let priority = (random.next() % 3) as i32;
    Request { prompt: turn.prompt.clone(), options: turn.options(), priority, ..Request::default() }
}

fn sink(
    turn: &Turn,
    index: usize,
    got: &Arc<Mutex<Vec<Got>>>,
) -> Box<dyn FnMut(Event) -> ControlFlow<()> + Send> {
    let (got, cancel_after) = (got.clone(), turn.cancel_after);
    Box::new(move |event| {
        let got = &mut got.lock().expect("no sink panics")[index];
        match event {
            Event::Token(token) => {
                got.tokens.push(token.id);
                if cancel_after.is_some_and(|count| got.tokens.len() >= count) {
                    return ControlFlow::Break(());
                }
            }
            Event::Finished { end, .. } => got.end = Some(end),
        }
        ControlFlow::Continue(())
    })
}

fn as_request(reason: StopReason) -> RequestEnd {
    match reason {
        StopReason::End => RequestEnd::End,
        StopReason::MaxTokens => RequestEnd::MaxTokens,
        StopReason::ContextFull => RequestEnd::ContextFull,
        StopReason::Stopped => RequestEnd::Stopped,
        StopReason::Interrupted => RequestEnd::Cancelled,
    }
}
