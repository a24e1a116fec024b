//! How small an expert cache will do for a model: routing recorded on prompts, measured, replayed through caches of
//! all sizes, and put into words.
//!
//! ```text
//! prompts.rs    the texts that ship with the project, or the user's
//! record.rs     which experts the model chooses on them
//! locality.rs   what routing looks like without a cache
//! sweep.rs      miss ratios by policy and capacity, through the engine's own cache state machine
//! residency.rs  one cache over time
//! predict.rs    tokens per second by budgets of RAM and VRAM, from the planner
//! verdict.rs    what to do about it
//! plot/         figures as SVG
//! page.rs       all of it as one HTML file
//! ```

mod locality;
mod page;
mod plot;
mod predict;
pub mod prompts;
mod record;
mod residency;
mod sweep;
mod verdict;

use std::path::Path;

use forebay_stream::PolicyKind;
use serde::Serialize;

use crate::plan::{HitCurve, PlanRequest, PlannedModel, Work};
use crate::{EngineError, Session, SessionOptions};

pub use locality::{Locality, ReuseClass, WindowExperts};
pub use page::page;
pub use plot::{Figure, comparison, figures};
pub use predict::{Machine, Prediction, Predictions, VramCurve};
pub use record::{GeneratingTime, Passage, PromptForm, RecordOptions, Recording, RoutingShape};
pub use residency::{ResidencyOverTime, Stretch};
pub use sweep::{CurvePoint, PolicyCurve};

/// What was found out about one model.
#[derive(Clone, Debug, Serialize)]
pub struct Assessment {
    /// The name of the file or folder, without its path.
    pub name: String,
    pub path: String,
    pub architecture: String,
    pub layers: usize,
    pub expert_layers: usize,
    /// Most experts of a layer, and how many of them a token uses.
    pub experts: u32,
    pub experts_per_token: usize,
    /// Bytes of the model's weights, and of its experts.
    pub weights_bytes: u64,
    pub expert_bytes: u64,
    /// RAM that this machine had for weights: three quarters of what was free, and what the session had taken.
    pub memory_bytes: u64,
    /// Bytes of the experts that one token uses: a global LRU list that is smaller never hits.
    pub cycle_bytes: u64,
    pub sampling_seed: u64,
    /// All domains in turns.
    pub mixed: Section,
    pub domains: Vec<Section>,
    pub residency: ResidencyOverTime,
    /// Speed by budgets with the policy that `residency` names.
    pub predictions: Option<Predictions>,
    /// Why there are none.
    pub not_predicted: Option<String>,
    /// What the recording itself ran with, and at which speed; `None` where nothing was generated.
    pub measured: Option<Measured>,
    /// What was recorded on, in the order of the recording.
    pub prompts: Vec<RecordedPrompt>,
    /// Tokens of prompts that did not fit the context.
    pub prompt_tokens_cut: usize,
    /// The answer, in sentences.
    pub verdict: Vec<String>,
}

/// One prompt of the recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RecordedPrompt {
    pub domain: String,
    pub form: PromptForm,
    pub prompt_tokens: usize,
    pub generated_tokens: usize,
}

/// The speed of the recording, and what would have been predicted for it: how far predictions can be trusted here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub tokens_per_second: f64,
    pub compute_seconds_per_token: f64,
    pub wait_seconds_per_token: f64,
    /// `None` without the rates of the machine that it ran on.
    pub predicted: Option<Prediction>,
}

/// What an assessment is of, beside the recording.
pub struct Subject<'a> {
    pub model: &'a Path,
    /// What the session of the recording was opened with.
    pub options: &'a SessionOptions,
    pub sampling_seed: u64,
    /// The machine that speeds are predicted for, or why they cannot be.
    pub machine: Result<&'a Machine, &'a str>,
}

/// One domain, or all in turns.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    pub name: String,
    pub locality: Locality,
    pub curves: Vec<PolicyCurve>,
}

impl Section {
    /// A policy's curve, by its name.
    pub fn curve(&self, policy: &str) -> Option<&PolicyCurve> {
        self.curves.iter().find(|curve| curve.policy == policy)
    }
}

/// The share of hits that a cache should reach to be called good enough, and the one for comfort.
const GOOD_HIT_RATE: f64 = 0.75;
const COMFORTABLE_HIT_RATE: f64 = 0.9;

/// Measures a recording of a model that `session` has open.
///
/// # Errors
/// A model whose headers cannot be read any more.
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
    let mixed = section("mixed".to_owned(), recording, &mixed_passages, &sweep::SHOWN);
    let named = recording.domains.iter().enumerate();
    let domains = named
        .map(|(index, name)| {
            let passages = recording.passages_of(Some(index));
            section(name.clone(), recording, &passages, &sweep::SHOWN_BY_DOMAIN)
        })
        .collect();
    let most = shape.layers.iter().map(|layer| layer.0).max().unwrap_or(1);
    // A quarter is where models differ most.
    let kept = most.div_ceil(4).max(1);
    let residency = residency::over_time(recording, &mixed_passages, policy, kept);
    // With what this session itself has taken.
    let memory_bytes =
        crate::default_budget_bytes() + session.plan().map_or(0, |plan| plan.arena_bytes);
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
) -> Section {
    Section {
        name,
        locality: locality::measure(&recording.shape, passages),
        curves: sweep::curves(&recording.lookups(passages), &recording.shape, policies),
    }
}

/// What the planner says of the machine with the hits of the mixed domains; else why it cannot.
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
    Ok(predict::predictions(machine, &model, &hits, &request))
}

/// What is predicted: tokens at the beginning of a text.
const WORK: Work = Work { prompt_tokens: 1, depth: 0 };

fn hits(recording: &Recording, passages: &[&Passage], policy: PolicyKind) -> Option<HitCurve> {
    HitCurve::of_lookups(&recording.lookups(passages), recording.shape.lookups_per_token(), policy)
}

/// The recording's own speed, and what the cost model says of it: of its own placement and policy,
/// its passages in their order.
fn measured(subject: &Subject<'_>, session: &Session, recording: &Recording) -> Option<Measured> {
    let time = recording.generating_time()?;
    let predicted = || {
        let machine = subject.machine.ok().filter(|machine| machine.is_here)?;
        let passages: Vec<&Passage> = recording.passages.iter().collect();
        let hits = hits(recording, &passages, subject.options.policy)?;
        let predicted = session.predicted(&machine.rates, &hits, WORK)?;
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

impl Assessment {
    /// The recording's own speed beside its prediction, in a sentence.
    pub fn about_measured(&self) -> Option<String> {
        let measured = self.measured.as_ref()?;
        let predicted = measured.predicted.as_ref()?;
        let ram = crate::page::bytes(predicted.ram_bytes as f64);
        let place = match predicted.vram_bytes.map(|vram| crate::page::bytes(vram as f64)) {
            None => format!("{ram} of weights in memory"),
            Some(vram) if predicted.ram_bytes == 0 => format!("{vram} of VRAM"),
            Some(vram) => format!("{vram} of VRAM and {ram} of weights in memory"),
        };
        Some(format!(
            "The recording itself ran at {:.1} tokens/s with {place}; for that the prediction is {:.1}.",
            measured.tokens_per_second, predicted.tokens_per_second
        ))
    }

    /// What speeds are predicted from, or why not, in sentences.
    pub fn about_predictions(&self) -> Vec<String> {
        let Some(predictions) = &self.predictions else {
            let why = self.not_predicted.as_deref().unwrap_or_default();
            return vec![format!("Speeds are not predicted: {why}.")];
        };
        let about = format!(
            "Speeds are what forebay plan says of {}, by its machine profile and by the hits of this recording under {}.",
            predictions.machine, self.residency.policy
        );
        let not = predictions.not_on_gpu.as_ref();
        let not = not.map(|why| format!("Speeds on a GPU are not predicted: {why}."));
        [about].into_iter().chain(not).collect()
    }

    /// How the prompts were put to the model, in a sentence.
    pub fn about_prompts(&self) -> String {
        let of = |form| {
            let of_form = self.prompts.iter().filter(move |prompt| prompt.form == form);
            let mut domains: Vec<(&str, usize)> = Vec::new();
            for prompt in of_form {
                match domains.iter_mut().find(|(name, _)| *name == prompt.domain) {
                    Some((_, count)) => *count += 1,
                    None => domains.push((&prompt.domain, 1)),
                }
            }
            let count: usize = domains.iter().map(|(_, count)| count).sum();
            let named: Vec<String> =
                domains.iter().map(|(name, count)| format!("{count} of {name}")).collect();
            (count, named.join(", "))
        };
        let mut said = format!("{} prompts", self.prompts.len());
        let (templated, named) = of(PromptForm::ChatTemplate);
        let (without, named_without) = of(PromptForm::NoChatTemplate);
        if templated > 0 {
            said.push_str(&format!(
                ": {templated} went through the model's chat template ({named}), the others were continued as they are"
            ));
        } else {
            said.push_str(", all continued as they are");
        }
        if without > 0 {
            said.push_str(&format!(
                "; the model has no chat template for the {without} of a chat ({named_without})"
            ));
        }
        said.push('.');
        said
    }
}
