//! Requests that run together give the bits that each gives alone.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use forebay_engine::engine::{EngineOptions, Event, Request};
use forebay_engine::{CpuOffload, DeviceChoice, Engine, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;

use crate::harness::Outcome;
use crate::sessions::{CONTEXT, open, open_with_least};

/// Sequences that run at a time.
const TOGETHER: usize = 5;

/// Ids and bits of the logarithmic probabilities that every request reported.
pub type Answers = Vec<Vec<[u32; 2]>>;

/// Compares requests that come one after the other, run together and end at different times with the same requests alone:
/// resident, and with slots for only some of the experts.
///
/// # Errors
/// Returns an error if the model cannot be opened or a request fails.
pub fn check(path: &Path, ids: &[u32], slots: bool, ordinal: usize) -> Result<Outcome> {
    let options = |sequences| SessionOptions {
        device: DeviceChoice::Cuda(ordinal),
        context: Some(CONTEXT),
        cpu_offload: CpuOffload::Never,
        sequences,
        ..SessionOptions::default()
    };
    let requests = requests(ids);
    let mut alone = Answers::new();
    let mut session = open(path, options(1))?;
    for request in &requests {
        let answers;
        (session, answers) = run(session, std::slice::from_ref(request))?;
        alone.extend(answers);
    }
    drop(session);
    let (_, together) = run(open(path, options(TOGETHER))?, &requests)?;
    let mut worst = same(&together, &alone).at("resident");
    if slots {
        let (session, _) = open_with_least(path, &options(TOGETHER), 0)?;
        let (_, together) = run(session, &requests)?;
        worst = worst.worse(same(&together, &alone).at("slots"));
        let (session, together) = run(open_with_room(path, &options(TOGETHER))?, &requests)?;
        ensure_rows_were_served(&session)?;
        worst = worst.worse(same(&together, &alone).at("slots for all rows"));
    }
    Ok(worst)
}

/// Opens a session with slots for most experts but not for all, so that kernels fetch the experts of several rows.
///
/// # Errors
/// Returns an error if the model cannot be opened.
pub fn open_with_room(path: &Path, options: &SessionOptions) -> Result<Session> {
    let (least, _) = open_with_least(path, options, 0)?;
    let more = least.info().expert_bytes * 3 / 4;
    drop(least);
    Ok(open_with_least(path, options, more)?.0)
}

/// Fails unless kernels have fetched the experts of several rows at a time.
///
/// # Errors
/// Returns an error if they have not.
pub fn ensure_rows_were_served(session: &Session) -> Result<()> {
    let experts = session.statistics().device_experts.context("some experts are not in VRAM")?;
    ensure!(experts.rows_served > experts.layers_served, "only single rows: {experts:?}");
    Ok(())
}

/// Returns requests of different lengths. Those with probabilities copy all logits to the host; the others copy only the
/// largest.
fn requests(ids: &[u32]) -> Vec<Request> {
    let lengths = [(1, 9), (23, 5), (7, 12), (40, 3), (2, 14), (33, 6), (5, 7)];
    let request = |(index, (prompt, generated)): (usize, (usize, usize))| Request {
        prompt: ids.iter().copied().cycle().skip(index).take(prompt).collect(),
        options: GenerateOptions::exactly(generated, Sampling::greedy()),
        logprobs: (index < 3).then_some(1),
        ..Request::default()
    };
    lengths.into_iter().enumerate().map(request).collect()
}

/// Runs the requests, of which one more comes with every second pass.
///
/// # Errors
/// Returns an error if a request fails.
pub fn run(session: Session, requests: &[Request]) -> Result<(Session, Answers)> {
    let mut engine = Engine::new(session, &EngineOptions::default());
    let answers = Arc::new(Mutex::new(vec![Vec::new(); requests.len()]));
    let mut step = 0;
    let mut waiting = requests.iter().enumerate();
    loop {
        if step % 2 == 0
            && let Some((index, request)) = waiting.next()
        {
            let answers = answers.clone();
            let sink = Box::new(move |event: Event| {
                if let Event::Token(token) = event {
                    let bits = token.logprob.map_or(0, f32::to_bits);
                    let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
                    answers[index].push([token.id, bits]);
                }
                ControlFlow::Continue(())
            });
            engine.submit(request.clone(), sink)?;
        }
        let ran = engine.step()?;
        if !ran && waiting.len() == 0 {
            break;
        }
        step += 1;
    }
    let answers = answers.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for (answer, request) in answers.iter().zip(requests) {
        ensure!(Some(answer.len()) == request.options.max_tokens, "a request ended early");
    }
    Ok((engine.into_session(), answers))
}

/// Compares answers bit for bit.
pub fn same(found: &Answers, expected: &Answers) -> Outcome {
    Outcome::same(found.concat().as_flattened(), expected.concat().as_flattened())
}
