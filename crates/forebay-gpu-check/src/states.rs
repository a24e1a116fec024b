//! States of recurrent layers that are kept in host memory give the bits of a prompt that is read whole.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, ensure};
use forebay_engine::engine::{EngineOptions, Event, Request};
use forebay_engine::{CpuOffload, DeviceChoice, Engine, GenerateOptions, SessionOptions};
use forebay_model::sampling::Sampling;

use crate::harness::Outcome;
use crate::sessions::open;

/// Tokens of the first prompt, and those of it that the next turn has, too.
const FIRST: usize = 112;
const SHARED: usize = 104;
/// Tokens that the next turn finds: 16 less than the first prompt, in whole blocks.
const CACHED: usize = 96;

/// Number of cached tokens, and ids with the bits of their logarithmic probabilities.
type Answer = (usize, Vec<[u32; 2]>);

/// Compares the next turn of a conversation, which begins where a state was kept, with the same prompt in an engine that keeps
/// none.
///
/// # Errors
/// Returns an error if the model cannot be opened, a request fails, or the state was not found.
pub fn check(path: &Path, ids: &[u32], ordinal: usize) -> Result<Outcome> {
    let engine = |kv_ram_bytes| {
        let options = SessionOptions {
            device: DeviceChoice::Cuda(ordinal),
            context: Some(192),
            cpu_offload: CpuOffload::Never,
            sequences: 2,
            kv_ram_bytes,
            for_engine: true,
            ..SessionOptions::default()
        };
        Ok::<_, anyhow::Error>(Engine::new(open(path, options)?, &EngineOptions::default()))
    };
    let first: Vec<u32> = ids.iter().copied().cycle().take(FIRST).collect();
    let said = ids.iter().rev().copied().take(30);
    let second: Vec<u32> = first[..SHARED].iter().copied().chain(said).collect();
    let mut alone = engine(Some(0))?;
    let (_, expected) = ask(&mut alone, &second)?;
    drop(alone);
    let mut together = engine(None)?;
    let (cached, _) = ask(&mut together, &first)?;
    ensure!(cached == 0, "the first prompt shares with another one");
    let (cached, answer) = ask(&mut together, &second)?;
    ensure!(cached == CACHED, "{cached} cached tokens instead of {CACHED}");
    Ok(Outcome::same(answer.as_flattened(), expected.as_flattened()))
}

fn ask(engine: &mut Engine, prompt: &[u32]) -> Result<Answer> {
    let all = Arc::new(Mutex::new(Answer::default()));
    let to = all.clone();
    let sink = Box::new(move |event: Event| {
        let mut answer = to.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Token(token) => {
                answer.1.push([token.id, token.logprob.map_or(0, f32::to_bits)]);
            }
            Event::Finished { statistics, .. } => answer.0 = statistics.cached_tokens,
        }
        ControlFlow::Continue(())
    });
    let request = Request {
        prompt: prompt.to_vec(),
        options: GenerateOptions::exactly(6, Sampling::greedy()),
        logprobs: Some(1),
        ..Request::default()
    };
    engine.submit(request, sink)?;
    engine.drain()?;
    let answer = std::mem::take(&mut *all.lock().unwrap_or_else(PoisonError::into_inner));
    ensure!(answer.1.len() == 6, "a request ended early");
    Ok(answer)
}
