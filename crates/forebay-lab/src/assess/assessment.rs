//! The results of an assessment.

use forebay_options::OptionName;
use serde::Serialize;

use super::locality::Locality;
use super::predict::{Prediction, Predictions};
use super::record::PromptForm;
use super::residency::ResidencyOverTime;
use super::sweep::PolicyCurve;
use crate::csv::quoted;

/// Head of [`Assessment::csv`].
pub const CSV_HEAD: &str = "model,domain,policy,share,capacity_bytes,hit_rate,hit_rate_low,hit_rate_high,misses_per_token,\
                            missed_bytes_per_token\n";

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
    pub experts_per_token: usize,
    /// Bytes of all weights.
    pub weights_bytes: u64,
    /// Bytes of all experts.
    pub expert_bytes: u64,
    /// RAM beside the weights that the recording's session reserved: KV cache, activations and buffers.
    pub reserved_bytes: u64,
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

/// Budgets that are proposed are multiples of this.
const BUDGET_STEP: u64 = 64 << 20;

/// Hit rate at which a cache counts as good enough.
pub(super) const GOOD_HIT_RATE: f64 = 0.75;
/// Hit rate at which a cache counts as comfortable.
pub(super) const COMFORTABLE_HIT_RATE: f64 = 0.9;

impl Assessment {
    /// Returns the command that runs the model with the least RAM for nine tenths of the hits, or of the predicted speed,
    /// and says which. Returns `None` without a verdict, and where no smaller budget reaches that.
    pub fn command(&self) -> Option<(String, &'static str)> {
        if !self.has_verdict() {
            return None;
        }
        let (needed, why) = match &self.predictions {
            Some(predictions) => {
                let most = predictions.by_ram.last()?;
                let enough = |p: &&Prediction| {
                    p.tokens_per_second >= COMFORTABLE_HIT_RATE * most.tokens_per_second
                };
                let least = predictions.by_ram.iter().find(enough)?;
                (least.ram_bytes, "the least RAM for nine tenths of its speed on the CPU")
            }
            None => {
                let point = self.mixed.curves.first()?.reaches(COMFORTABLE_HIT_RATE)?;
                let dense = self.weights_bytes.saturating_sub(self.expert_bytes);
                let needed = dense + point.capacity_bytes + self.reserved_bytes;
                (needed, "the least RAM in which nine of ten accesses hit")
            }
        };
        let mebibytes = needed.next_multiple_of(BUDGET_STEP) >> 20;
        let quoted =
            match self.path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-+:@".contains(c)) {
                true => self.path.clone(),
                false => format!("'{}'", self.path.replace('\'', "'\\''")),
            };
        Some((
            format!("forebay run {quoted} {}", OptionName::Ram.with(format!("{mebibytes}MiB"))),
            why,
        ))
    }

    /// Returns true if the recording was long enough, and of a trained model.
    pub fn has_verdict(&self) -> bool {
        self.verdict.first().is_some_and(|line| !line.starts_with("No verdict"))
    }

    /// Returns all curves as lines of comma-separated values, without a head: model, domain, policy, share of the experts,
    /// capacity in bytes, hit rate, its interval, misses and missed bytes for each generated token.
    pub fn csv(&self) -> String {
        let mut lines = String::new();
        for section in std::iter::once(&self.mixed).chain(&self.domains) {
            for curve in &section.curves {
                for point in &curve.points {
                    let bound = |index: usize| {
                        point
                            .hit_rate_interval
                            .map_or(String::new(), |bounds| format!("{:.6}", bounds[index]))
                    };
                    let faulted = point.faulted_experts_per_token.all;
                    let faulted = faulted.map_or(String::new(), |faulted| format!("{faulted:.6}"));
                    lines += &format!(
                        "{},{},{},{:.6},{},{:.6},{},{},{faulted},{:.1}\n",
                        quoted(&self.name),
                        quoted(&section.name),
                        curve.policy,
                        point.share,
                        point.capacity_bytes,
                        point.hit_rate,
                        bound(0),
                        bound(1),
                        point.missed_bytes_per_token
                    );
                }
            }
        }
        lines
    }

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
