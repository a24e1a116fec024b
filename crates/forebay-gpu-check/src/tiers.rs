//! Keys and values that leave the GPU for RAM or the disk and come back give the bits of those that never left.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};
use forebay_engine::engine::{EngineOptions, Event, Request, RequestStatistics};
use forebay_engine::{
    CpuOffload, DeviceChoice, Engine, GenerateOptions, KvCacheType, KvDisk, KvDiskOptions,
    KvDiskStore, KvDiskType, KvInVram, SessionOptions, inspect,
};
use forebay_model::sampling::Sampling;

use crate::harness::Outcome;
use crate::sessions::{CONTEXT, kv_vram_range, open};

const CONVERSATIONS: usize = 4;
const TURNS: usize = 3;
/// Tokens of the prompt that all conversations begin with, of what a user says, and of an answer.
const SYSTEM: usize = 20;
const SAID: usize = 14;
const ANSWER: usize = 5;

/// Ids with the bits of their logarithmic probabilities.
type Answer = Vec<[u32; 2]>;

/// The prompts and answers of all conversations in one turn.
type Turn = (Vec<Vec<u32>>, Vec<Answer>);

/// Compares conversations that take turns in a GPU with room for little more than one of them with the same conversations
/// alone: with copies in RAM, with copies in RAM for some, and after a restart with a store on the disk.
///
/// # Errors
/// Returns an error if the model cannot be opened, a request fails, or nothing came from the tier that is tested.
pub fn check(path: &Path, ids: &[u32], ordinal: usize) -> Result<Outcome> {
    let keeps_all = inspect(path)?.kv_bytes_per_position_kept > 0;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for kv_cache in [KvCacheType::F16, KvCacheType::Q8_0] {
        let options = SessionOptions {
            device: DeviceChoice::Cuda(ordinal),
            context: Some(CONTEXT),
            cpu_offload: CpuOffload::Never,
            sequences: 2,
            kv_tokens: Some(CONTEXT),
            kv_ram_bytes: Some(64 << 20),
            for_engine: true,
            kv_cache,
            ..SessionOptions::default()
        };
        let turns = alone(path, ids, &options)?;
        let (least, _) = kv_vram_range(path, &options)?;
        let folder = tempfile::tempdir()?;
        let disk = || KvDiskStore::open(KvDiskOptions::new(&folder.path().join("kv"), 256 << 20));
        for (ram, restarts) in [(64 << 20, false), (100_000, false), (64 << 20, true)] {
            // After the restart, the GPU reads most blocks in RAM.
            let with_ram = SessionOptions {
                kv_ram_bytes: Some(ram),
                kv_in_vram: if restarts { KvInVram::Bytes(least) } else { KvInVram::All },
                ..options.clone()
            };
            let mut engine = Engine::new(open(path, with_ram)?, &EngineOptions::default());
            if ram > 100_000 {
                let (store, ty) = (Arc::new(disk()?), KvDiskType::AsCached);
                engine.set_kv_disk(KvDisk { store, ty }, "a model")?;
            }
            let mut of_all = RequestStatistics::default();
            let skipped = if restarts { TURNS - 1 } else { 0 };
            for (prompts, expected) in turns.iter().skip(skipped) {
                let (answers, statistics) = ask(&mut engine, prompts, b"all")?;
                let at = match (ram, restarts) {
                    (100_000, _) => "little RAM",
                    (_, false) => "RAM",
                    (_, true) => "disk",
                };
                let expected = expected.concat();
                let same = Outcome::same(answers.concat().as_flattened(), expected.as_flattened());
                worst = worst.worse(same.at(at));
                for of in statistics {
                    of_all.cached_tokens_from_ram += of.cached_tokens_from_ram;
                    of_all.cached_tokens_from_disk += of.cached_tokens_from_disk;
                }
            }
            if keeps_all && !restarts && ram > 100_000 {
                ensure!(of_all.cached_tokens_from_ram > 0, "nothing came from RAM");
            }
            if keeps_all && restarts {
                ensure!(of_all.cached_tokens_from_disk > 0, "nothing came from the disk");
            }
            engine.write_kv(true, Duration::from_secs(30))?;
        }
    }
    Ok(worst)
}

/// Runs all turns in an engine that shares nothing between requests.
///
/// # Errors
/// Returns an error if the model cannot be opened or a request fails.
fn alone(path: &Path, ids: &[u32], options: &SessionOptions) -> Result<Vec<Turn>> {
    let mut engine = Engine::new(open(path, options.clone())?, &EngineOptions::default());
    let from = |at: usize, count: usize| ids.iter().copied().cycle().skip(at).take(count);
    let mut talks: Vec<Vec<u32>> = vec![from(0, SYSTEM).collect(); CONVERSATIONS];
    let mut turns = Vec::new();
    for turn in 0..TURNS {
        let mut of_turn = Vec::new();
        for (index, talk) in talks.iter_mut().enumerate() {
            talk.extend(from(3 * index + turn + 1, SAID));
            let namespace = format!("{turn} {index}");
            let (answer, statistics) =
                ask(&mut engine, std::slice::from_ref(talk), namespace.as_bytes())?;
            ensure!(statistics[0].cached_tokens == 0, "a request shares with another one");
            of_turn.extend(answer);
        }
        let prompts = talks.clone();
        for (talk, answer) in talks.iter_mut().zip(&of_turn) {
            talk.extend(answer.iter().map(|[id, _]| id));
        }
        turns.push((prompts, of_turn));
    }
    Ok(turns)
}

/// Runs requests together. Returns the answer and the statistics of each.
///
/// # Errors
/// Returns an error if a request fails.
fn ask(
    engine: &mut Engine,
    prompts: &[Vec<u32>],
    namespace: &[u8],
) -> Result<(Vec<Answer>, Vec<RequestStatistics>)> {
    let all =
        Arc::new(Mutex::new(vec![(Answer::new(), RequestStatistics::default()); prompts.len()]));
    for (index, prompt) in prompts.iter().enumerate() {
        let all = all.clone();
        let sink = Box::new(move |event: Event| {
            let of = &mut all.lock().unwrap_or_else(PoisonError::into_inner)[index];
            match event {
                Event::Token(token) => {
                    of.0.push([token.id, token.logprob.map_or(0, f32::to_bits)]);
                }
                Event::Finished { statistics, .. } => of.1 = statistics,
            }
            ControlFlow::Continue(())
        });
        let request = Request {
            prompt: prompt.clone(),
            options: GenerateOptions::exactly(ANSWER, Sampling::greedy()),
            logprobs: Some(1),
            namespace: namespace.to_vec(),
            ..Request::default()
        };
        engine.submit(request, sink)?;
    }
    engine.drain()?;
    let all = std::mem::take(&mut *all.lock().unwrap_or_else(PoisonError::into_inner));
    ensure!(all.iter().all(|(answer, _)| answer.len() == ANSWER), "a request ended early");
    Ok(all.into_iter().unzip())
}
