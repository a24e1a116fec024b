//! The results of an assessment.

use serde::Serialize;

use super::locality::Locality;
use super::predict::{Prediction, Predictions};
use super::record::PromptForm;
use super::residency::ResidencyOverTime;
use super::sweep::PolicyCurve;

/// Assessment of one model.
#[derive(Clone, Debug, Serialize)]
pub struct Assessment {
    /// File or folder name of the model, without its path.
    pub name: String,
    pub path: String,
    pub architecture: String,
    pub layers: usize,
    pub expert_layers: usize,
    /// Largest number of experts in a layer.
    pub experts: u32,
    /// Bytes of all weights.
    pub experts_per_token: usize,
    /// Bytes of the model's weights, and of its experts.
    /// Bytes of all experts.
    pub weights_bytes: u64,
    pub expert_bytes: u64,
    /// RAM available for weights on this machine: three quarters of the free RAM plus the RAM that the session holds.
    pub memory_bytes: u64,
    /// Bytes of the experts that one token uses in all layers. A global LRU cache smaller than this never hits.
    pub cycle_bytes: u64,
    pub sampling_seed: u64,
    /// All domains, in turns.
    pub mixed: Section,
    pub domains: Vec<Section>,
    pub residency: ResidencyOverTime,
    /// Predicted speed by memory budget, with the policy that `residency` names.
    pub predictions: Option<Predictions>,
    /// Reason why `predictions` is `None`.
    pub not_predicted: Option<String>,
    /// Measured speed of the recording and its prediction; `None` if nothing was generated.
    pub measured: Option<Measured>,
    /// Prompts in the order of the recording.
    pub prompts: Vec<RecordedPrompt>,
    /// Number of prompt tokens that did not fit the context.
    pub prompt_tokens_cut: usize,
    /// Verdict, one paragraph per element.
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

/// Measured speed of the recording beside the prediction for it. The difference shows how far predictions can be
/// trusted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    pub tokens_per_second: f64,
    pub compute_seconds_per_token: f64,
    pub wait_seconds_per_token: f64,
    /// Prediction for the recording; `None` if the rates of the machine are unknown.
    pub predicted: Option<Prediction>,
}

/// Results for one domain, or for all domains in turns.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    pub name: String,
    pub locality: Locality,
    pub curves: Vec<PolicyCurve>,
}

impl Section {
    /// Returns the curve of the policy with this name.
    pub fn curve(&self, policy: &str) -> Option<&PolicyCurve> {
        self.curves.iter().find(|curve| curve.policy == policy)
    }
}

/// Hit rate at which a cache counts as good enough.
pub(super) const GOOD_HIT_RATE: f64 = 0.75;
/// Hit rate at which a cache counts as comfortable.
pub(super) const COMFORTABLE_HIT_RATE: f64 = 0.9;

impl Assessment {
    /// Returns a sentence with the recording's own speed and its prediction.
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

    /// Returns sentences that name the source of the predicted speeds, or the reason why there are none.
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

    /// Returns a sentence about how the prompts were given to the model.
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
