//! Models whose experts do not all fit the GPU: the same bits come out as where they do, whatever the budgets and the
//! policy, and the counters are those that the replay of the recorded routing gives.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail};
use forebay_engine::plan::{self, PlanRequest, PlannedModel, Work};
use forebay_engine::{DeviceChoice, EngineError, GenerateOptions, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use forebay_model::{MissSplit, ModelError};
use forebay_stream::{CacheShape, Lookups, MemoryPlan, PolicyKind, ReplayPolicy, replay, routing};

use crate::harness::Outcome;

const CONTEXT: usize = 128;
/// Tokens that go through alone.
const ALONE: usize = 12;
const GENERATED: usize = 8;
/// The CPU rounds activations in its own way.
const CPU_NMSE: f64 = 1e-2;

/// Logits of `ids` as a prompt, of few tokens, and of single ones, with as many slots as fit budgets from the smallest to
/// nearly everything.
///
/// # Errors
/// A model that cannot be opened.
pub fn check(path: &Path, ids: &[u32], ordinal: usize) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for exact in [false, true] {
        let options = SessionOptions {
            device: DeviceChoice::Cuda(ordinal),
            exact,
            context: Some(CONTEXT),
            ..SessionOptions::default()
        };
        let (expected, weights) = {
            let mut resident = open(path, options.clone())?;
            let weights = resident.statistics().vram.context("a GPU computes")?.weights_bytes;
            (logits(&mut resident, ids)?, weights)
        };
        // What experts take beyond the fewest slots. The driver's own share grows from session to session, so the
        // smallest budget is asked for each time.
        let span = {
            let with =
                SessionOptions { vram_bytes: Some(smallest(path, &options)?), ..options.clone() };
            let fewest = open(path, with)?.statistics().vram.context("a GPU computes")?;
            weights - fewest.weights_bytes
        };
        for (share, small_ram) in [(0.0, false), (0.0, true), (0.4, false), (0.97, false)] {
            let vram = smallest(path, &options)? + (span as f64 * share) as u64;
            let ram = match small_ram {
                true => Some(smallest_ram(path, &options, vram)?),
                false => None,
            };
            let what = format!("{vram} bytes of VRAM and {ram:?} of RAM, exact: {exact}");
            let options = SessionOptions { cpu_experts: false, ..options.clone() };
            let with = SessionOptions { vram_bytes: Some(vram), ram_bytes: ram, ..options };
            let planned = planned(path, &with)?;
            let mut session = open(path, with).with_context(|| what.clone())?;
            if session.slots().is_none() {
                bail!("{what}: all experts were kept");
            }
            if planned.as_ref() != session.slots() {
                bail!("{what}: the session has other slots than were planned: {planned:?}");
            }
            for round in 0..2 {
                let found = logits(&mut session, ids).with_context(|| what.clone())?;
                worst =
                    worst.worse(Outcome::same(&found, &expected).at(&format!("{what} {round}")));
            }
        }
        if !exact {
            let what = "with the CPU's help";
            let split = MissSplit { copy_seconds: 1e-4, cpu_seconds: 5e-5, cpu_start_seconds: 0.0 };
            let with =
                SessionOptions { vram_bytes: Some(smallest(path, &options)?), ..options.clone() };
            let with = SessionOptions {
                miss_split: Some(split),
                threads: Some(2),
                cpu_experts: true,
                ..with
            };
            let mut session = open(path, with).context(what)?;
            let found = logits(&mut session, ids)?;
            let counted = session.statistics().device_experts.context("experts come and go")?;
            if counted.experts_on_cpu == 0 {
                bail!("the CPU took no part: {:?}", counted.split);
            }
            worst = worst.worse(Outcome::nmse(&found, &expected, CPU_NMSE).at(what));
            drop(session);
            for policy in PolicyKind::ALL {
                let with = SessionOptions {
                    vram_bytes: Some(smallest(path, &options)? + span / 2),
                    policy,
                    cpu_experts: false,
                    ..options.clone()
                };
                let counted = counters(path, with, ids).with_context(|| policy.to_string())?;
                worst = worst.worse(counted.at(&format!("{policy} counters")));
            }
        }
    }
    Ok(worst)
}

/// The slots that the planner promises.
fn planned(path: &Path, options: &SessionOptions) -> Result<Option<MemoryPlan>> {
    let facts = plan::gpu_facts(options.device).context("there is a GPU")?;
    let work = Work { prompt_tokens: 1, depth: 0 };
    let request = PlanRequest::of_session(options, CONTEXT, work);
    Ok(PlannedModel::open(path)?.in_vram(&facts, &request)?.slots)
}

fn open(path: &Path, options: SessionOptions) -> Result<Session> {
    Ok(Session::open(path, &options, &mut |_, _| {})?)
}

fn logits(session: &mut Session, ids: &[u32]) -> Result<Vec<f32>> {
    let mut all = session.logits(ids, None)?;
    all.extend(session.logits(&ids[..ids.len().min(3)], None)?);
    let alone: Vec<u32> = ids.iter().copied().cycle().take(ALONE).collect();
    all.extend(session.logits_one_by_one(&alone)?);
    Ok(all)
}

/// The smallest `--vram`, as the refusal of less says it.
fn smallest(path: &Path, options: &SessionOptions) -> Result<u64> {
    match Session::open(
        path,
        &SessionOptions { vram_bytes: Some(1), ..options.clone() },
        &mut |_, _| {},
    ) {
        Err(EngineError::Model(ModelError::VramTooSmall { needed_bytes, .. })) => Ok(needed_bytes),
        Err(error) => Err(error.into()),
        Ok(_) => bail!("a model ran in a byte"),
    }
}

/// Likewise of `--ram`.
fn smallest_ram(path: &Path, options: &SessionOptions, vram: u64) -> Result<u64> {
    let (vram_bytes, ram_bytes) = (Some(vram), Some(1));
    let with = SessionOptions { vram_bytes, ram_bytes, ..options.clone() };
    match Session::open(path, &with, &mut |_, _| {}) {
        Err(EngineError::Stream(forebay_stream::StreamError::BudgetTooSmall {
            needed_bytes,
            ..
        })) => Ok(needed_bytes),
        Err(error) => Err(error.into()),
        Ok(_) => bail!("experts that are not on the GPU were kept in a byte"),
    }
}

/// Lookups, hits and evictions of a conversation, and of the replay of its trace.
fn counters(path: &Path, options: SessionOptions, ids: &[u32]) -> Result<Outcome> {
    let policy = options.policy;
    let mut session = open(path, options)?;
    let out = Shared::default();
    session.record_routing(Box::new(out.clone()), false)?;
    let generate = GenerateOptions {
        max_tokens: Some(GENERATED),
        sampling: Sampling::greedy(),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    for ids in [ids, &ids[..1]] {
        session.reset();
        session.generate(ids, &generate, &mut |_| ControlFlow::Continue(()))?;
    }
    session.end_routing()?;
    let trace = routing::read(out.0.lock().unwrap_or_else(PoisonError::into_inner).as_slice())?;
    let shape = CacheShape::from_plan(session.slots().context("not all experts are kept")?);
    let replayed = replay(&Lookups::of(&trace), ReplayPolicy::Online(policy), &shape).all;
    let counted = session.statistics().device_experts.context("experts come and go")?.tier;
    Ok(Outcome::same(
        &[counted.lookups, counted.hits, counted.evictions],
        &[replayed.lookups, replayed.hits, replayed.evictions],
    ))
}

/// A trace in memory.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
