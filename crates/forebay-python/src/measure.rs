//! Plans, assessments of expert caches, and replays of routing traces. Results are JSON.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use forebay_engine::doctor::{MachineProfile, ProfileError};
use forebay_engine::plan::{Asked, HitCurve, PlannedModel, Rates};
use forebay_engine::{EngineError, Interrupt, Session, SessionOptions};
use forebay_lab::assess as lab;
use forebay_lab::assess::{Machine, RecordOptions, Subject, prompts};
use forebay_lab::replay::{ReplayPolicy, replay_while};
use forebay_model::sampling::Sampling;
use forebay_store::{OutputFile, SharedStream};
use forebay_stream::{CacheCounters, Capacity, Lookups, Phase, RoutingTrace, routing};
use pyo3::prelude::*;
use serde_json::{Value, json};

use crate::errors::{of_engine, of_output, raise};
use crate::names::path_of;
use crate::options::Options;
use crate::watch::Watch;

/// Why work has ended.
enum Failed {
    Engine(EngineError),
    /// Class of the exception, and words.
    Words(&'static str, String),
}

impl<E: Into<EngineError>> From<E> for Failed {
    fn from(error: E) -> Failed {
        let error = error.into();
        Failed::Engine(error)
    }
}

impl Failed {
    fn raise(self, py: Python<'_>, stopped: Option<PyErr>) -> PyErr {
        match (self, stopped) {
            (_, Some(stopped)) => stopped,
            (Failed::Engine(error), None) => of_engine(py, &error, None),
            (Failed::Words(class, words), None) => raise(py, class, words),
        }
    }
}

/// Returns where the weights of a model would be, and how fast it would run.
#[pyfunction]
pub fn plan(
    py: Python<'_>,
    model: PathBuf,
    options: &str,
    profile: Option<PathBuf>,
    trace: Option<PathBuf>,
    prompt_tokens: usize,
) -> PyResult<String> {
    let options = Options::read(py, options)?.session(py)?;
    let model = path_of(py, model)?;
    let planned = py.detach(|| planned(&model, &options, profile, trace, prompt_tokens));
    planned.map(|planned| planned.to_string()).map_err(|failed| failed.raise(py, None))
}

fn planned(
    path: &Path,
    options: &SessionOptions,
    profile: Option<PathBuf>,
    trace: Option<PathBuf>,
    prompt_tokens: usize,
) -> Result<Value, Failed> {
    let is_here = profile.is_none();
    let profile = machine_profile(profile.as_deref(), path)?;
    let rates = rates(&profile)?;
    let model = PlannedModel::open(path)?;
    let hits = match trace {
        None => HitCurve::default(),
        Some(trace) => {
            let hits = HitCurve::of_trace(&open_trace(&trace)?, options.policy);
            let words = || format!("{}: this trace has no generated tokens", trace.display());
            hits.ok_or_else(|| Failed::Words("OptionError", words()))?
        }
    };
    let context = model.context(options)?;
    let (model, rates, hits) = (&model, &rates, &hits);
    let asked = Asked { model, options, context, prompt_tokens, rates, hits, is_here };
    let answered = asked.plan()?;
    let mut document = json!({
        "model": model.info,
        "machine": profile.machine.cpu,
        "gpu": rates.gpu_name(),
        "ram_bytes": answered.request.ram_bytes,
        "vram_bytes": answered.request.vram_bytes,
        "context": context,
        "prompt_tokens": prompt_tokens,
        "best_sequences": answered.best_sequences(),
        "together": answered.together,
    });
    let planned = json!(answered.planned);
    if let (Value::Object(document), Value::Object(planned)) = (&mut document, planned) {
        document.extend(planned);
    }
    Ok(document)
}

/// Reads the profile in `file`, or this machine's profile with the disk that the model is on.
fn machine_profile(file: Option<&Path>, model: &Path) -> Result<MachineProfile, Failed> {
    MachineProfile::find(file, model).map_err(|error| match error {
        ProfileError::NotMeasured { why } => {
            let words =
                format!("{why}: run forebay doctor on the model's disk first, or name a profile");
            Failed::Words("ProfileError", words)
        }
        ProfileError::Damaged { .. } => Failed::Words("FormatError", error.to_string()),
        ProfileError::Unreadable { path, source } => {
            EngineError::Format(forebay_format::FormatError::Io { path, source }).into()
        }
    })
}

fn rates(profile: &MachineProfile) -> Result<Rates, Failed> {
    let again =
        |why: &str| Failed::Words("ProfileError", format!("{why}: run forebay doctor again"));
    Rates::new(profile).map_err(again)
}

fn open_trace(path: &Path) -> Result<RoutingTrace, Failed> {
    let opened = File::open(path).map_err(|source| {
        EngineError::Format(forebay_format::FormatError::Io { path: path.to_owned(), source })
    })?;
    let wrong = |error| Failed::Words("FormatError", format!("{}: {error}", path.display()));
    routing::read_any(opened).map_err(wrong)
}

/// Replays a routing trace with policies and capacities. A capacity is a share ("share", x), experts of a layer
/// ("experts", n) or bytes ("bytes", n).
#[pyfunction]
pub fn replay(
    py: Python<'_>,
    trace: PathBuf,
    policies: Option<Vec<String>>,
    capacities: Vec<(String, f64)>,
    keep_batches: bool,
) -> PyResult<String> {
    let policies: Vec<ReplayPolicy> = match policies {
        None => ReplayPolicy::all(),
        Some(names) => {
            let parsed = names.iter().map(|name| name.parse());
            let parsed: Result<_, _> = parsed.collect();
            parsed.map_err(|error: forebay_stream::StreamError| {
                let known: Vec<&str> =
                    ReplayPolicy::all().into_iter().map(ReplayPolicy::name).collect();
                raise(py, "OptionError", format!("{error}; policies are {}", known.join(", ")))
            })?
        }
    };
    let capacities: Vec<Capacity> = capacities
        .iter()
        .map(|(kind, number)| match kind.as_str() {
            "share" => Capacity::Share(*number),
            "experts" => Capacity::ExpertsPerLayer(*number as u32),
            _ => Capacity::Bytes(*number as u64),
        })
        .collect();
    let mut watch = Watch::new(None, Interrupt::new());
    let replayed = py.detach(|| {
        let trace = open_trace(&trace)?;
        replayed(&trace, &policies, &capacities, keep_batches, &mut watch)
    });
    match (replayed, watch.stopped) {
        (Ok(document), None) => Ok(document.to_string()),
        (Ok(_), Some(stopped)) => Err(stopped),
        (Err(failed), stopped) => Err(failed.raise(py, stopped)),
    }
}

fn replayed(
    trace: &RoutingTrace,
    policies: &[ReplayPolicy],
    capacities: &[Capacity],
    keep_batches: bool,
    watch: &mut Watch<'_>,
) -> Result<Value, Failed> {
    let lookups = Lookups::of(trace);
    let tokens = |phase| -> u64 {
        let of_phase = trace.batches().filter(|batch| batch.phase == phase);
        of_phase.map(|batch| batch.tokens.len() as u64).sum()
    };
    let mut results = Vec::new();
    for &policy in policies {
        let mut row = Vec::new();
        for capacity in capacities {
            let shape = capacity.shape(policy.scope(), lookups.layers(), keep_batches);
            let counters = replay_while(&lookups, policy, &shape, |_| match watch.tell(0, 1) {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            });
            if watch.stopped.is_some() {
                return Err(EngineError::Interrupted.into());
            }
            let of = |of: CacheCounters| [of.lookups, of.hits, of.evictions];
            row.push(json!([of(counters.all), of(counters.prompt), of(counters.generate)]));
        }
        results.push(row);
    }
    let header = trace.header();
    Ok(json!({
        "model": header.model,
        "architecture": header.architecture,
        "layers": lookups.layers(),
        "prompt_tokens": tokens(Phase::Prompt),
        "generated_tokens": tokens(Phase::Generate),
        "lookups": lookups.len(),
        "experts_bytes": lookups.total_bytes(),
        "cycle_bytes": lookups.cycle_bytes(),
        "policies": policies.iter().map(|policy| policy.name()).collect::<Vec<_>>(),
        "counters": results,
    }))
}

/// What to record for an assessment.
struct Wanted {
    prompts: Option<PathBuf>,
    tokens: usize,
    seed: u64,
    raw: bool,
    profile: Option<PathBuf>,
}

/// Records the routing of prompts and returns the assessment. With `trace`, the routing is written to that file.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "the Python part names each of them")]
pub fn assess(
    py: Python<'_>,
    model: PathBuf,
    options: &str,
    prompts: Option<PathBuf>,
    tokens: usize,
    seed: u64,
    raw: bool,
    profile: Option<PathBuf>,
    trace: Option<PathBuf>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let options = Options::read(py, options)?.session(py)?;
    let options = SessionOptions { for_engine: false, mtp: false, ..options };
    let model = path_of(py, model)?;
    let trace = trace.map(|path| OutputFile::replace(&path)).transpose();
    let trace = trace.map_err(|error| of_output(py, &error))?;
    let trace = trace.map(|file| SharedStream::new(file.into_stream()));
    let asked = Wanted { prompts, tokens, seed, raw, profile };
    let mut watch = Watch::new(progress.as_ref(), options.interrupt.clone());
    let done = py.detach(|| assessed(&model, &options, &asked, trace.as_ref(), &mut watch));
    let document = match (done, watch.stopped) {
        (Ok(document), None) => document,
        (Ok(_), Some(stopped)) => return Err(stopped),
        (Err(failed), stopped) => return Err(failed.raise(py, stopped)),
    };
    if let Some(file) = trace.and_then(SharedStream::into_inner) {
        py.detach(|| file.commit()).map_err(|error| of_output(py, &error))?;
    }
    Ok(document.to_string())
}

fn assessed(
    model: &Path,
    options: &SessionOptions,
    asked: &Wanted,
    trace: Option<&SharedStream>,
    watch: &mut Watch<'_>,
) -> Result<Value, Failed> {
    let read = match &asked.prompts {
        Some(path) => {
            prompts::read(path).map_err(|error| Failed::Words("FormatError", error.to_string()))?
        }
        None => prompts::shipped(),
    };
    let machine = machine_profile(asked.profile.as_deref(), model).and_then(|profile| {
        let name = if asked.profile.is_none() { "this machine" } else { "another machine" };
        let rates = rates(&profile)?;
        Ok(Machine { name: name.to_owned(), rates, is_here: asked.profile.is_none() })
    });
    let machine = match (machine, &asked.profile) {
        (Err(failed), Some(_)) => return Err(failed),
        // Without a profile, the result has no predicted speeds and says why.
        (Err(Failed::Words(_, why)), None) => Err(why),
        (Err(failed), None) => return Err(failed),
        (Ok(machine), _) => Ok(machine),
    };
    let mut session = Session::open(model, options, &mut |_, _| {
        // Progress counts tokens, but Ctrl-C ends the load, too.
        watch.tell(0, 1);
    })?;
    if let Some(trace) = trace {
        session.record_routing(Box::new(trace.clone()), false)?;
    }
    let sampling = Sampling { seed: asked.seed, ..Sampling::default() };
    let record = RecordOptions { tokens: asked.tokens, sampling, raw: asked.raw };
    let mut update = |done: usize, total: usize| {
        watch.tell(done as u64, total as u64);
    };
    let recording = lab::record_prompts(&mut session, &read, &record, &mut update)?;
    session.end_routing()?;
    let machine = machine.as_ref().map_err(String::as_str);
    let subject = Subject { model, options, sampling_seed: asked.seed, machine };
    Ok(json!(lab::assess(&subject, &session, &recording)?))
}
