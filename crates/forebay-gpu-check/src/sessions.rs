//! Helpers for checks that open sessions: logits and text by every path through the decoder, the smallest budgets, and
//! comparison with the plan.

use std::ops::ControlFlow;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use forebay_engine::plan::{self, PlanRequest, PlannedModel, Work};
use forebay_engine::{EngineError, GenerateOptions, KvInVram, Session, SessionOptions};
use forebay_model::sampling::Sampling;
use forebay_model::{DeviceShare, ModelError};

/// Context of the sessions that are compared, in positions.
pub const CONTEXT: usize = 128;
/// Number of attempts to find the smallest budget.
const TRIES: usize = 5;
/// Number of tokens that are computed one at a time. The first ones are queued kernel by kernel; the later ones run as
/// a CUDA graph.
const ALONE: usize = 12;

pub fn open(path: &Path, options: SessionOptions) -> Result<Session> {
    Ok(Session::open(path, &options, &mut |_, _| {})?)
}

/// Returns logits of `ids` computed as a prompt, of a few tokens at once, and of single tokens.
pub fn logits(session: &mut Session, ids: &[u32]) -> Result<Vec<f32>> {
    let mut all = session.logits(ids, None)?;
    all.extend(session.logits(&ids[..ids.len().min(3)], None)?);
    let alone: Vec<u32> = ids.iter().copied().cycle().take(ALONE).collect();
    all.extend(session.logits_one_by_one(&alone)?);
    Ok(all)
}

/// Returns the least bytes of VRAM that keys and values need, and the bytes of all of them.
///
/// # Errors
/// Returns an error if the model cannot be opened, or if it can without VRAM for keys and values.
pub fn kv_vram_range(path: &Path, options: &SessionOptions) -> Result<(u64, u64)> {
    let all = open(path, options.clone())?.statistics().kv_cache_bytes;
    let with_none = SessionOptions { kv_in_vram: KvInVram::Bytes(0), ..options.clone() };
    match Session::open(path, &with_none, &mut |_, _| {}) {
        Err(EngineError::Model(ModelError::KvVramTooSmall { bytes_min, .. })) => {
            Ok((bytes_min, all))
        }
        Err(error) => Err(error.into()),
        Ok(_) => bail!("keys and values need no VRAM"),
    }
}

/// Generates exactly `count` tokens after `prompt`, always the likeliest. Stop tokens do not end the text.
pub fn generate(session: &mut Session, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
    session.reset();
    let options = GenerateOptions::exactly(count, Sampling::greedy());
    Ok(session.generate(prompt, &options, &mut |_| ControlFlow::Continue(()))?.tokens)
}

/// Returns the share of the model that the planner gives to the GPU.
fn planned(path: &Path, options: &SessionOptions) -> Result<DeviceShare> {
    let facts = plan::gpu_facts(options.device).context("there is a GPU")?;
    let work = Work::alone(1, 0);
    let request = PlanRequest::of_session(options, CONTEXT, work);
    Ok(PlannedModel::open(path)?.in_vram(&facts, &request)?)
}

/// Keeps keys and values in VRAM, unless the options say how many. Otherwise a session with little VRAM moves them to RAM, and they
/// take the bytes that are meant for experts.
fn with_kv_in_vram(options: &SessionOptions) -> SessionOptions {
    let kv_in_vram = match options.kv_in_vram {
        KvInVram::AsMuchAsFits => KvInVram::All,
        chosen => chosen,
    };
    SessionOptions { kv_in_vram, ..options.clone() }
}

/// Opens a session with `more` bytes than the smallest `--vram` that works, and returns it with its options. The
/// driver's own memory use grows now and then as sessions open and close, so a budget found a moment ago may be too
/// small. This function then tries again.
pub fn open_smallest(
    path: &Path,
    options: &SessionOptions,
    more: u64,
) -> Result<(Session, SessionOptions)> {
    let options = &with_kv_in_vram(options);
    let mut tries = 0;
    loop {
        tries += 1;
        let vram_bytes = Some(smallest_vram(path, options)? + more);
        let with = SessionOptions { vram_bytes, ..options.clone() };
        match Session::open(path, &with, &mut |_, _| {}) {
            Err(EngineError::Model(ModelError::VramTooSmall { .. })) if tries < TRIES => {}
            session => return Ok((session?, with)),
        }
    }
}

/// Opens a session with `more` bytes than the smallest `--vram` that works. `agrees` must confirm that the session's
/// share of the GPU is the planned one. Tries several times, because the driver's own memory use may grow between
/// planning and opening.
pub fn open_as_planned(
    path: &Path,
    options: &SessionOptions,
    more: u64,
    agrees: impl Fn(&DeviceShare, &Session) -> bool,
) -> Result<Session> {
    let options = &with_kv_in_vram(options);
    for _ in 0..TRIES {
        let vram_bytes = Some(smallest_vram(path, options)? + more);
        let with = SessionOptions { vram_bytes, ..options.clone() };
        let opened = planned(path, &with).and_then(|planned| Ok((planned, open(path, with)?)));
        match opened {
            Ok((planned, session)) if agrees(&planned, &session) => return Ok(session),
            Ok(_) => {}
            Err(error) if is_too_little_vram(&error) => {}
            Err(error) => return Err(error),
        }
    }
    bail!("{TRIES} sessions were refused, or had another share of the GPU than was planned")
}

fn is_too_little_vram(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<EngineError>();
    matches!(error, Some(EngineError::Model(ModelError::VramTooSmall { .. })))
}

/// Returns the smallest `--ram` at the smallest `--vram`. It depends only on the sizes of layers and experts.
pub fn least_ram(path: &Path, options: &SessionOptions) -> Result<u64> {
    let mut tries = 0;
    loop {
        tries += 1;
        let vram_bytes = Some(smallest_vram(path, options)?);
        let with = SessionOptions { vram_bytes, ram_bytes: Some(1), ..options.clone() };
        match needed(path, with) {
            Err(_) if tries < TRIES => {}
            found => return found,
        }
    }
}

/// Returns the smallest `--vram`, taken from the error that refuses a smaller one.
fn smallest_vram(path: &Path, options: &SessionOptions) -> Result<u64> {
    needed(path, SessionOptions { vram_bytes: Some(1), ..options.clone() })
}

fn needed(path: &Path, options: SessionOptions) -> Result<u64> {
    match Session::open(path, &options, &mut |_, _| {}) {
        Err(error) => error.needed_bytes().ok_or(error).map_err(Into::into),
        Ok(_) => bail!("a model ran in a byte"),
    }
}
