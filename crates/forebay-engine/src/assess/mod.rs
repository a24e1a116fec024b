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
pub use record::{Passage, RecordOptions, Recording, RoutingShape};
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
    /// Chat prompts that were continued as plain text, because the model has no chat template.
    pub prompts_without_template: usize,
    /// Tokens of prompts that did not fit the context.
    pub prompt_tokens_cut: usize,
    /// The answer, in sentences.
    pub verdict: Vec<String>,
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
    let (predictions, predictions_about) = predictions(session, recording, policy, disk);
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
        cycle_bytes: shape.cycle_bytes(),
        sampling_seed,
        mixed,
        domains,
        residency,
        predictions,
        predictions_about,
        prompts_without_template: recording.passages.iter().filter(|p| p.without_template).count(),
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

fn predictions(
    session: &Session,
    recording: &Recording,
    policy: PolicyKind,
    disk: Result<DiskRates, &'static str>,
) -> (Vec<Prediction>, String) {
    let none = |why: &str| (Vec::new(), format!("not predicted: {why}"));
    if session.plan().is_none() {
        return none(
            "the model was computed on a GPU, which does not stream experts yet; use --device cpu",
        );
    }
    let disk = match disk {
        Ok(disk) => disk,
        Err(why) => return none(&format!("{why}; run forebay doctor in the model's folder")),
    };
    let Some(compute_seconds_per_token) = recording.compute_seconds_per_token() else {
        return none("nothing was generated");
    };
    let weights = session.decoder.weights();
    let costs = predict::Costs {
        blocks: &weights.blocks,
        small_bytes: weights.small_bytes,
        compute_seconds_per_token,
        disk,
    };
    let lookups = recording.lookups(&recording.passages_of(None));
    let about = format!(
        "a token computes for {:.2} ms (measured while recording) and then reads what it misses at {:.2} GB/s, {:.0} us \
         for each layer that waits; reads beside computing are not counted in its favour",
        compute_seconds_per_token * 1e3,
        disk.bytes_per_second / 1e9,
        disk.latency_seconds * 1e6
    );
    (costs.predict(&lookups, policy), about)
}
