//! Requests that run together give the bits that each gives alone.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use forebay_engine::engine::{EngineOptions, EngineStatistics, Event, Latency, Pooling, Request};
use forebay_engine::{
    CpuOffload, DeviceChoice, Engine, GenerateOptions, KvInVram, Session, SessionOptions,
};
use forebay_format::Catalog;
use forebay_model::Architecture;
use forebay_model::sampling::Sampling;

use crate::harness::Outcome;
use crate::sessions::{CONTEXT, kv_vram_range, least_ram, open, open_smallest};

/// Sequences that run at a time.
const TOGETHER: usize = 5;

/// Tokens of the requests' prompts and answers.
const LENGTHS: [(usize, usize); 8] =
    [(1, 9), (23, 5), (7, 12), (40, 3), (2, 14), (33, 6), (5, 7), (37, 1)];

/// Those of two requests that need more KV blocks than a cache for [`CONTEXT`] positions has.
const LONG: [(usize, usize); 2] = [(10, 85), (12, 80)];

/// Ids and bits of the logarithmic probabilities that every request reported, or the indices and bits of an embedding.
type Answers = Vec<Vec<[u32; 2]>>;

/// Compares requests that come one after the other, run together and end at different times with the same requests alone:
/// resident, and with slots for only some of the experts.
///
/// # Errors
/// Returns an error if the model cannot be opened or a request fails.
pub fn check(path: &Path, ids: &[u32], slots: bool, ordinal: usize) -> Result<Outcome> {
    let options = |sequences| options(ordinal, sequences);
    let requests = requests(ids, &LENGTHS);
    let alone = run_alone(open(path, options(1))?, &requests)?;
    let turns = EngineOptions {
        generating: Some(TOGETHER),
        latency: Latency::AtMost(Duration::ZERO),
        ..EngineOptions::default()
    };
    let (session, together, statistics) = run(open(path, options(TOGETHER))?, &turns, &requests)?;
    // A pass pauses between two layers.
    if session.info().layers > 1 {
        ensure!(statistics.prompt_parts > statistics.prompt_passes, "no prompt was read in parts");
    }
    drop(session);
    let mut worst = same(&together, &alone).at("resident");
    worst = worst.worse(check_chosen_by_host(open(path, options(1))?, &requests, &alone)?);
    worst = worst.worse(check_suspended(path, ids, &options)?);
    worst = worst.worse(check_in_ram(path, &options(TOGETHER), &requests, &alone)?);
    if slots {
        let (session, _) = open_smallest(path, &options(TOGETHER), 0)?;
        let (_, together, _) = run(session, &EngineOptions::default(), &requests)?;
        worst = worst.worse(same(&together, &alone).at("slots"));
        if let Some((_, together)) = run_served(path, &options(TOGETHER), &requests)? {
            worst = worst.worse(same(&together, &alone).at("slots for several rows"));
        }
    }
    Ok(worst)
}

/// Compares the ids that the device selected with those that the host chooses of all logits.
///
/// # Errors
/// Returns an error if a request fails.
fn check_chosen_by_host(
    session: Session,
    requests: &[Request],
    answers: &Answers,
) -> Result<Outcome> {
    let with_probabilities = |request: &Request| Request { logprobs: Some(0), ..request.clone() };
    let requests: Vec<Request> = requests.iter().map(with_probabilities).collect();
    let by_host = run_alone(session, &requests)?;
    let ids = |answers: &Answers| -> Vec<Vec<u32>> {
        answers.iter().map(|answer| answer.iter().map(|[id, _]| *id).collect()).collect()
    };
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (found, expected) in ids(answers).iter().zip(&ids(&by_host)) {
        worst = worst.worse(Outcome::same(found, expected).at("chosen by the host"));
    }
    Ok(worst)
}

/// Compares requests that are suspended, because the KV cache has no room for both, with the same requests alone. The swap
/// space has room for all copies, or for none. If everything that layers keep has a short window, both have room and none is suspended.
///
/// # Errors
/// Returns an error if the model cannot be opened, a request fails, or none is suspended that should be.
fn check_suspended(
    path: &Path,
    ids: &[u32],
    options: &impl Fn(usize) -> SessionOptions,
) -> Result<Outcome> {
    let requests = requests(ids, &LONG);
    let alone = run_alone(open(path, options(1))?, &requests)?;
    let groups = Architecture::from_catalog(&Catalog::open(path)?)?.kv_groups();
    let keeps_all = groups.iter().any(|group| group.window.is_none_or(|window| window >= CONTEXT));
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for kv_ram_bytes in [None, Some(0)] {
        let short =
            SessionOptions { kv_tokens: Some(CONTEXT), kv_ram_bytes, ..options(LONG.len()) };
        let (_, suspended, statistics) =
            run(open(path, short)?, &EngineOptions::default(), &requests)?;
        ensure!(
            (statistics.suspended > 0) == keeps_all,
            "{} requests were suspended",
            statistics.suspended
        );
        worst = worst.worse(same(&suspended, &alone).at("suspended"));
    }
    Ok(worst)
}

/// Compares requests whose keys and values are in RAM, except for some blocks or for none, with the same requests alone. Layers
/// with a window keep theirs in VRAM.
///
/// # Errors
/// Returns an error if the model cannot be opened, a request fails, or all keys and values are in VRAM.
fn check_in_ram(
    path: &Path,
    options: &SessionOptions,
    requests: &[Request],
    alone: &Answers,
) -> Result<Outcome> {
    let with = |bytes| SessionOptions { kv_in_vram: KvInVram::Bytes(bytes), ..options.clone() };
    let (least, all) = kv_vram_range(path, options)?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for bytes in [least, (least + all) / 2] {
        let session = open(path, with(bytes))?;
        let in_ram = session.statistics().vram.map_or(0, |vram| vram.kv_cache_in_ram_bytes);
        ensure!((in_ram > 0) == (least < all), "{in_ram} bytes are in RAM");
        let (_, answers, _) = run(session, &EngineOptions::default(), requests)?;
        worst = worst.worse(same(&answers, alone).at("keys and values in RAM"));
    }
    Ok(worst)
}

/// Compares requests whose rows go through the layers in two lanes with the same requests alone: with slots for most experts
/// and for fewer, with all experts in RAM and with few. The layers of the model at `path` have many experts.
///
/// # Errors
/// Returns an error if the model cannot be opened, a request fails, or no pass had two lanes.
pub fn check_lanes(path: &Path, ordinal: usize) -> Result<Outcome> {
    let options = |sequences| options(ordinal, sequences);
    let ids: Vec<u32> = (5..45).collect();
    let requests = requests(&ids, &LENGTHS);
    let alone = run_alone(open(path, options(1))?, &requests)?;
    let expert_bytes = open(path, options(1))?.info().expert_bytes;
    let few = least_ram(path, &options(TOGETHER))? + expert_bytes / 4;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for ram_bytes in [None, Some(few)] {
        let options = SessionOptions { ram_bytes, ..options(TOGETHER) };
        let mut layers_in_lanes = 0;
        for eighths in [4, 7] {
            let (session, _) = open_smallest(path, &options, expert_bytes / 8 * eighths)?;
            let (session, together, _) = run(session, &EngineOptions::default(), &requests)?;
            let of = session.statistics().device_experts;
            let of = of.context("some experts are not in VRAM")?;
            layers_in_lanes += of.layers_in_lanes;
            ensure!(of.layers_resident < of.layers_served, "all experts were in VRAM");
            worst = worst.worse(same(&together, &alone).at(&format!("{eighths} of 8")));
        }
        ensure!(layers_in_lanes > 0, "no pass had two lanes");
    }
    Ok(worst.worse(check_few_rows(path, &options, expert_bytes)?))
}

/// Compares requests in passes that have room for so few rows that two lanes cannot share it with the same requests alone.
///
/// # Errors
/// Returns an error if the model cannot be opened, a request fails, or lanes share memory.
fn check_few_rows(
    path: &Path,
    options: &impl Fn(usize) -> SessionOptions,
    expert_bytes: u64,
) -> Result<Outcome> {
    let options = |sequences| SessionOptions { context: Some(3), ..options(sequences) };
    let request = |id: u32| Request {
        prompt: vec![id],
        options: GenerateOptions::exactly(3, Sampling::greedy()),
        ..Request::default()
    };
    let requests: Vec<Request> = (5..25).map(request).collect();
    let alone = run_alone(open(path, options(1))?, &requests)?;
    let (session, _) = open_smallest(path, &options(2), expert_bytes / 8 * 7)?;
    let (session, together, _) =
        run_arriving(usize::MAX, 1, session, &EngineOptions::default(), &requests)?;
    let of = session.statistics().device_experts.context("some experts are not in VRAM")?;
    ensure!(of.layers_in_lanes == 0, "lanes shared memory");
    ensure!(of.rows_served > of.layers_served, "no graph had two rows");
    Ok(same(&together, &alone).at("few rows"))
}

/// Runs the requests with slots for so many experts, but not all, that kernels fetch the experts of several rows. Returns
/// the bytes of VRAM beyond the least, and the answers. Returns `None` for a model whose layers have too few experts.
///
/// # Errors
/// Returns an error if the model cannot be opened or if kernels fetched for single rows only.
fn run_served(
    path: &Path,
    options: &SessionOptions,
    requests: &[Request],
) -> Result<Option<(u64, Answers)>> {
    let (least, _) = open_smallest(path, options, 0)?;
    let info = least.info();
    let (bytes, experts, used) = (info.expert_bytes, info.experts, info.experts_per_token);
    drop(least);
    for eighths in 4..8 {
        let more = bytes / 8 * eighths;
        let (session, _) = open_smallest(path, options, more)?;
        let (session, answers, _) = run(session, &EngineOptions::default(), requests)?;
        let Some(of) = session.statistics().device_experts else { break };
        if of.rows_served > of.layers_served || of.layers_in_lanes > 0 {
            return Ok(Some((more, answers)));
        }
    }
    // The slots of two rows, and those of experts on their way back to RAM, are all slots.
    ensure!(3 * used >= experts, "kernels fetched the experts of single rows only");
    Ok(None)
}

/// Returns the options of a session with room for so many sequences.
fn options(ordinal: usize, sequences: usize) -> SessionOptions {
    SessionOptions {
        device: DeviceChoice::Cuda(ordinal),
        context: Some(CONTEXT),
        cpu_offload: CpuOffload::Never,
        sequences,
        ..SessionOptions::default()
    }
}

/// Returns requests of these lengths of prompts and answers. Those with probabilities copy all logits to the host; for the others
/// the device changes logits, adds them up, or selects the largest alone.
fn requests(ids: &[u32], lengths: &[(usize, usize)]) -> Vec<Request> {
    let request = |(index, &(prompt, generated)): (usize, &(usize, usize))| Request {
        prompt: ids.iter().copied().cycle().skip(index).take(prompt).collect(),
        options: GenerateOptions::exactly(generated, sampling(index)),
        logprobs: (index < 2).then_some(1),
        pooling: (index == 7).then_some(Pooling::Mean),
        ..Request::default()
    };
    lengths.iter().enumerate().map(request).collect()
}

/// Returns options with other rules for every request.
fn sampling(index: usize) -> Sampling {
    let all =
        Sampling { seed: index as u64, top_k: 0, top_p: 1.0, min_p: 0.0, ..Sampling::default() };
    match index {
        2 => Sampling { temperature: 1.0, ..all },
        3 => Sampling { repeat_penalty: 1.3, presence_penalty: 0.5, ..Sampling::greedy() },
        4 => Sampling { top_p: 0.8, logit_bias: vec![(3, 2.5), (7, -9.0)], ..all },
        5 => Sampling { seed: 5, frequency_penalty: 0.7, ..Sampling::default() },
        _ => Sampling::greedy(),
    }
}

/// Runs each request by itself.
///
/// # Errors
/// Returns an error if a request fails.
fn run_alone(mut session: Session, requests: &[Request]) -> Result<Answers> {
    let mut alone = Answers::new();
    for request in requests {
        let answers;
        (session, answers, _) =
            run(session, &EngineOptions::default(), std::slice::from_ref(request))?;
        alone.extend(answers);
    }
    Ok(alone)
}

/// Runs the requests, of which one more comes with every second pass.
///
/// # Errors
/// Returns an error if a request fails.
fn run(
    session: Session,
    options: &EngineOptions,
    requests: &[Request],
) -> Result<(Session, Answers, EngineStatistics)> {
    run_arriving(1, 2, session, options, requests)
}

/// Runs the requests, of which `more` come every `passes` passes.
///
/// # Errors
/// Returns an error if a request fails.
fn run_arriving(
    more: usize,
    passes: usize,
    session: Session,
    options: &EngineOptions,
    requests: &[Request],
) -> Result<(Session, Answers, EngineStatistics)> {
    let mut engine = Engine::new(session, options);
    let answers = Arc::new(Mutex::new(vec![Vec::new(); requests.len()]));
    let mut step = 0;
    let mut waiting = requests.iter().enumerate();
    loop {
        let due = if step % passes == 0 { more } else { 0 };
        for (index, request) in waiting.by_ref().take(due) {
            let answers = answers.clone();
            let sink = Box::new(move |event: Event| {
                let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
                match event {
                    Event::Token(token) => {
                        answers[index].push([token.id, token.logprob.map_or(0, f32::to_bits)]);
                    }
                    Event::Finished { embedding, .. } => {
                        let numbers = (0..).zip(embedding.into_iter().flatten());
                        answers[index].extend(numbers.map(|(at, x)| [at, x.to_bits()]));
                    }
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
        let is_whole = match request.pooling {
            Some(_) => !answer.is_empty(),
            None => Some(answer.len()) == request.options.max_tokens,
        };
        ensure!(is_whole, "a request ended early");
    }
    let statistics = engine.statistics();
    Ok((engine.into_session(), answers, statistics))
}

/// Compares answers bit for bit.
fn same(found: &Answers, expected: &Answers) -> Outcome {
    Outcome::same(found.concat().as_flattened(), expected.concat().as_flattened())
}
