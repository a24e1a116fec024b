//! How small an expert cache will do for a model: routing recorded on prompts, measured, replayed through caches of
//! all sizes, and put into words.
//!
//! ```text
//! prompts.rs    the texts that ship with the project, or the user's
//! record.rs     which experts the model chooses on them
//! locality.rs   what routing looks like without a cache
//! sweep.rs      miss ratios by policy and capacity, through the engine's own cache state machine
//! residency.rs  one cache over time
//! predict.rs    tokens per second by RAM budget
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

use crate::Session;

pub use locality::{Locality, ReuseClass, WindowExperts};
pub use page::page;
pub use plot::{Figure, comparison, figures};
pub use predict::{DiskRates, Prediction, disk_rates};
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
    /// Speed by RAM budget with the policy that `residency` names; empty where it cannot be told.
    pub predictions: Vec<Prediction>,
    /// What the predictions were made from, or why there are none.
    pub predictions_about: String,
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub tokens_per_second: f64,
    /// Means, while `predicted` takes the median of the passages for computing.
    pub compute_seconds_per_token: f64,
    pub wait_seconds_per_token: f64,
    /// Without a model on a GPU, and without the disk's rates, there is none.
    pub predicted: Option<Prediction>,
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

/// Measures a recording of `model`, which `session` has open. `disk` are the rates that predictions are made with, or
/// why there are none.
pub fn assess(
    model: &Path,
    session: &Session,
    recording: &Recording,
    sampling_seed: u64,
    disk: Result<DiskRates, &'static str>,
) -> Assessment {
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
    let costs = costs(session, recording, disk);
    let (predictions, predictions_about) = match &costs {
        Ok(costs) => {
            let lookups = recording.lookups(&recording.passages_of(None));
            (costs.predict(&lookups, policy), costs.about())
        }
        Err(why) => (Vec::new(), format!("not predicted: {why}")),
    };
    let measured = recording.generating_time().map(|time| {
        let tokens = time.tokens as f64;
        Measured {
            tokens_per_second: tokens / time.seconds,
            compute_seconds_per_token: (time.seconds - time.wait_seconds) / tokens,
            wait_seconds_per_token: time.wait_seconds / tokens,
            predicted: costs.ok().and_then(|costs| of_recording(session, recording, &costs)),
        }
    });
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
        // With what this session itself has taken.
        memory_bytes: crate::default_budget_bytes()
            + session.plan().map_or(0, |plan| plan.arena_bytes),
        cycle_bytes: shape.cycle_bytes(),
        sampling_seed,
        mixed,
        domains,
        residency,
        predictions,
        predictions_about,
        measured,
        prompts: prompts(recording),
        prompt_tokens_cut: recording.passages.iter().map(|p| p.cut_tokens).sum(),
        verdict: Vec::new(),
    };
    assessment.verdict = verdict::words(&assessment);
    assessment
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

/// What a prediction is made from, or why there can be none.
fn costs<'a>(
    session: &'a Session,
    recording: &Recording,
    disk: Result<DiskRates, &'static str>,
) -> Result<predict::Costs<'a>, String> {
    // Whatever of the model is in host memory beside it.
    if session.statistics().vram.is_some() {
        return Err(
            "the model was computed on a GPU, whose costs are not part of the prediction; use --device cpu"
                .to_owned(),
        );
    }
    let disk = disk.map_err(|why| format!("{why}; run forebay doctor in the model's folder"))?;
    let weights = session.decoder.weights();
    Ok(predict::Costs {
        blocks: &weights.blocks,
        small_bytes: weights.small_bytes,
        compute_seconds_per_token: recording
            .compute_seconds_per_token()
            .ok_or("nothing was generated")?,
        disk,
    })
}

/// What the cost model says of the recording itself: its own plan and policy, its passages in their order.
fn of_recording(
    session: &Session,
    recording: &Recording,
    costs: &predict::Costs<'_>,
) -> Option<Prediction> {
    let (plan, statistics) = (session.plan()?, session.statistics());
    let passages: Vec<&Passage> = recording.passages.iter().collect();
    let policy = statistics.stream?.policy;
    let ram_bytes = costs.small_bytes + plan.arena_bytes;
    Some(costs.with_plan(&recording.lookups(&passages), policy, plan, ram_bytes))
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
        let measured = self.measured?;
        let predicted = measured.predicted?;
        Some(format!(
            "The recording itself ran at {:.1} tokens/s with {} of weights in memory; for that the prediction is {:.1}.",
            measured.tokens_per_second,
            crate::page::bytes(predicted.ram_bytes as f64),
            predicted.tokens_per_second
        ))
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
