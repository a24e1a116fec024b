//! Finds how small an expert cache may be for a model. It records routing on prompts, measures it, replays it through
//! caches of all sizes, and states a verdict.
//!
//! ```text
//! prompts.rs    the texts that ship with the project, or the user's own
//! record.rs     recorded routing of the model on these texts
//! locality.rs   properties of the routing without a cache
//! sweep.rs      miss ratios by policy and capacity, through the engine's own cache state machine
//! residency.rs  one cache over time
//! prefixes.rs   not experts but prompts: what prefix caches of all sizes find of a log of requests
//! predict.rs    tokens per second by RAM and VRAM budget, from the planner
//! verdict.rs    the verdict in sentences
//! plot/         figures as SVG
//! page.rs       all results as one HTML file
//! ```

mod assessment;
mod locality;
mod page;
mod plot;
mod predict;
pub mod prefixes;
pub mod prompts;
mod record;
mod residency;
mod sweep;
mod verdict;

use std::path::Path;

use forebay_engine::plan::{HitCurve, PlanRequest, PlannedModel, Work};
use forebay_engine::{EngineError, Session, SessionOptions};
use forebay_store::Interrupt;
use forebay_stream::PolicyKind;

pub use assessment::{Assessment, CSV_HEAD, Measured, RecordedPrompt, Section};
pub use locality::{Locality, ReuseClass, WindowExperts};
pub use page::{page, prefix_page};
pub use plot::{Figure, comparison, figures, prefix_figure};
pub use predict::{Machine, Prediction, Predictions, VramCurve};
pub use record::{
    GeneratingTime, Passage, PromptForm, RecordOptions, Recording, RoutingShape, record_prompts,
    routing_shape,
};
pub use residency::{ResidencyOverTime, Stretch};
pub use sweep::{CurvePoint, PolicyCurve};

/// Inputs of an assessment other than the recording.
pub struct Subject<'a> {
    pub model: &'a Path,
    /// Options of the session that made the recording.
    pub options: &'a SessionOptions,
    pub sampling_seed: u64,
    /// Machine to predict speeds for, or the reason why none can be predicted.
    pub machine: Result<&'a Machine, &'a str>,
}

/// Assesses a recording of the model that `session` has open.
///
/// # Errors
/// Returns [`EngineError::Interrupted`] if the user interrupts the work.
pub fn assess(
    subject: &Subject<'_>,
    session: &Session,
    recording: &Recording,
) -> Result<Assessment, EngineError> {
    let model = subject.model;
    let info = session.info();
    let shape = &recording.shape;
    let policy = PolicyKind::default();
    let mixed_passages = recording.passages_of(None);
    let interrupt = &subject.options.interrupt;
    let section = |name: &str, passages: &[&Passage], policies: &[&str]| {
        section(name.to_owned(), recording, passages, policies, interrupt)
    };
    let mixed = section("mixed", &mixed_passages, &sweep::SHOWN)?;
    let named = recording.domains.iter().enumerate();
    let domains = named
        .map(|(index, name)| {
            let passages = recording.passages_of(Some(index));
            section(name, &passages, &sweep::SHOWN_BY_DOMAIN)
        })
        .collect::<Result<_, _>>()?;
    let most = shape.layers.iter().map(|layer| layer.0).max().unwrap_or(1);
    // Models differ most when a quarter of the experts is kept.
    let kept = most.div_ceil(4).max(1);
    let residency = residency::over_time(recording, &mixed_passages, policy, kept);
    interrupt.check()?;
    // Adds the RAM that this session itself holds.
    let memory_bytes =
        forebay_engine::default_budget_bytes() + session.plan().map_or(0, |plan| plan.arena_bytes);
    let (predictions, not_predicted) = match predicted(subject, session, recording, memory_bytes) {
        Ok(predictions) => (Some(predictions), None),
        Err(why) => (None, Some(why)),
    };
    let mut assessment = Assessment {
        name: model.file_name().unwrap_or(model.as_os_str()).to_string_lossy().into_owned(),
        path: model.display().to_string(),
        architecture: info.architecture.to_owned(),
        layers: info.layers,
        expert_layers: shape.layers.iter().filter(|layer| layer.0 > 0).count(),
        experts: shape.layers.iter().map(|layer| layer.0).max().unwrap_or(0),
        experts_per_token: shape.experts_per_token,
        weights_bytes: info.weights_bytes,
        expert_bytes: shape.expert_bytes(),
        reserved_bytes: session.plan().map_or(0, |plan| plan.reserved_bytes),
        memory_bytes,
        cycle_bytes: shape.cycle_bytes(),
        sampling_seed: subject.sampling_seed,
        mixed,
        domains,
        residency,
        predictions,
        not_predicted,
        measured: measured(subject, session, recording),
        prompts: prompts(recording),
        prompt_tokens_cut: recording.passages.iter().map(|p| p.cut_tokens).sum(),
        verdict: Vec::new(),
    };
    assessment.verdict = verdict::words(&assessment);
    Ok(assessment)
}

fn section(
    name: String,
    recording: &Recording,
    passages: &[&Passage],
    policies: &[&str],
    interrupt: &Interrupt,
) -> Result<Section, EngineError> {
    let locality = locality::measure(&recording.shape, passages);
    interrupt.check()?;
    let lookups = recording.lookups(passages);
    let curves = sweep::curves(&lookups, &recording.shape, policies, interrupt);
    interrupt.check()?;
    Ok(Section { name, locality, curves })
}

/// Returns the planner's predictions with the hits of the mixed domains. The error is the reason why there are none.
fn predicted(
    subject: &Subject<'_>,
    session: &Session,
    recording: &Recording,
    memory_bytes: u64,
) -> Result<Predictions, String> {
    let machine = subject.machine?;
    let policy = PolicyKind::default();
    let hits = hits(recording, &recording.passages_of(None), policy);
    let hits = hits.ok_or("nothing was generated")?;
    let model = PlannedModel::open(subject.model).map_err(|error| error.to_string())?;
    let request = PlanRequest {
        ram_bytes: memory_bytes,
        policy,
        ..PlanRequest::of_session(subject.options, session.context(), WORK)
    };
    predict::predictions(machine, &model, &hits, &request)
}

/// Work to predict: tokens at the beginning of a text.
const WORK: Work = Work::alone(1, 0);

fn hits(recording: &Recording, passages: &[&Passage], policy: PolicyKind) -> Option<HitCurve> {
    HitCurve::of_lookups(&recording.lookups(passages), recording.shape.lookups_per_token(), policy)
}

/// Returns the recording's measured speed and its prediction by the cost model. The prediction uses the placement and
/// policy of the recording, and its passages in their order.
fn measured(subject: &Subject<'_>, session: &Session, recording: &Recording) -> Option<Measured> {
    let time = recording.generating_time()?;
    let predicted = || {
        let machine = subject.machine.ok().filter(|machine| machine.is_here)?;
        let passages: Vec<&Passage> = recording.passages.iter().collect();
        let hits = hits(recording, &passages, subject.options.policy)?;
        let predicted = session.predicted(&machine.rates, &hits, WORK)?;
        predicted.generate.shown.tokens_per_second?;
        let statistics = session.statistics();
        let vram = statistics.vram.as_ref().map(|vram| vram.total_bytes);
        let host = session.plan();
        let ram = host.map_or(0, |plan| plan.reserved_bytes + plan.arena_bytes);
        let kept = if vram.is_some() { session.slots() } else { host };
        Some(Prediction::new((vram, ram), kept, &predicted))
    };
    let tokens = time.tokens as f64;
    Some(Measured {
        tokens_per_second: tokens / time.seconds,
        compute_seconds_per_token: (time.seconds - time.wait_seconds) / tokens,
        wait_seconds_per_token: time.wait_seconds / tokens,
        predicted: predicted(),
    })
}

fn prompts(recording: &Recording) -> Vec<RecordedPrompt> {
    let one = |passage: &Passage| RecordedPrompt {
        domain: recording.domains[passage.domain].clone(),
        form: passage.form,
        prompt_tokens: passage.prompt_tokens,
        generated_tokens: passage.tokens(&recording.shape) - passage.prompt_tokens,
    };
    recording.passages.iter().map(one).collect()
}
