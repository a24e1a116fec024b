//! What an assessment says.

use serde::Serialize;

use super::locality::Locality;
use super::predict::{Prediction, Predictions};
use super::record::PromptForm;
use super::residency::ResidencyOverTime;
use super::sweep::PolicyCurve;

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
pub(super) const GOOD_HIT_RATE: f64 = 0.75;
pub(super) const COMFORTABLE_HIT_RATE: f64 = 0.9;

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
