//! Decides if a prediction is shown as a number, as a range, or not at all.
//!
//! `tests/accuracy.rs` compares predictions from good profiles with measurements. All are within a fifth, except for a
//! small model with latent attention in VRAM (`docs/design/plans.md`). A profile of a busy machine, or of an older
//! forebay that did not check this, widens the number to a range. A range too wide to be of use is left out. So is a
//! prediction for a model so small that most of a token's time goes to work that no profile measures.

use serde::Serialize;

use super::cost::Placement;
use super::model::ModelCosts;
use crate::doctor::{MachineProfile, QualityState};

/// Bounds of the measured rate as a multiple of the rate predicted from a good profile. They are the reciprocals of the
/// bounds that `tests/accuracy.rs` checks.
const LEAST: f64 = 1.0 / 1.2;
const MOST: f64 = 1.0 / 0.8;

/// Factor by which rates may be wrong if the profile does not say that the machine was idle. A disk that `doctor`
/// measured at 2.97 GB/s gave 1.7 GB/s to the runs that followed.
const UNKNOWN_SPREAD: f64 = 1.75;

/// Largest useful ratio between the ends of a range. A wider range does not help the user decide.
const WIDEST_RANGE: f64 = 5.0;

/// Smallest number of weight bytes for each token for which a prediction is shown. Below it, a processor's caches hold
/// the weights from token to token, and no profile has a rate for that. Fixed costs of a token (norms, attention,
/// sampling, handing work to threads) then take most of its time.
pub const LEAST_TOKEN_BYTES: u64 = 64 << 20;

/// Rate to show for a prediction.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PredictedRate {
    /// Tokens per second. `None` if only a range is known, or nothing.
    pub tokens_per_second: Option<f64>,
    /// Lowest tokens per second to expect. `None` if nothing is known.
    pub low_tokens_per_second: Option<f64>,
    /// Highest tokens per second to expect. `None` if nothing is known.
    pub high_tokens_per_second: Option<f64>,
    /// Reason why there is no number, in words.
    pub uncertain_because: Option<String>,
}

impl PredictedRate {
    /// Returns no prediction, with the reason.
    pub fn none(why: impl Into<String>) -> PredictedRate {
        PredictedRate { uncertain_because: Some(why.into()), ..PredictedRate::default() }
    }

    /// Returns the lowest and the highest rate to expect, or `None` if there is no prediction.
    pub fn range(&self) -> Option<(f64, f64)> {
        self.low_tokens_per_second.zip(self.high_tokens_per_second)
    }
}

/// Possible error of a profile's rates.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Doubt {
    /// Factor by which the rates may be wrong, at least 1.
    pub spread: f64,
    /// Reason for the doubt, in words.
    pub why: String,
}

impl Doubt {
    /// Returns the doubt about a profile, or `None` for a good profile.
    pub fn of(profile: &MachineProfile) -> Option<Doubt> {
        let again = "run forebay doctor again when the machine is idle";
        let Some(quality) = &profile.quality else {
            let why = "the machine profile is of an older forebay, which did not check that the machine was idle";
            return Some(Doubt { spread: UNKNOWN_SPREAD, why: format!("{why}: {again}") });
        };
        let why = match quality.state {
            QualityState::Good => return None,
            QualityState::Busy => "the machine was busy when its profile was measured",
            QualityState::Unstable => "readings for the machine profile disagreed",
        };
        let spread = if quality.spread.is_finite() { quality.spread.max(1.0) } else { f64::MAX };
        let reasons = quality.reasons.join("; ");
        Some(Doubt { spread, why: format!("{why} ({reasons}): {again}") })
    }
}

/// Trustworthiness of the predictions for one model on one machine.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Trust {
    /// Factors from the predicted rate to the lowest and the highest rate. `None` if nothing is shown.
    factors: Option<(f64, f64)>,
    /// Reason why a number alone would mislead.
    why: Option<String>,
}

impl Trust {
    /// Decides how far predictions for `placement` can be trusted. `last_cache_bytes` is the size of the processor's
    /// last-level cache, if the profile has it.
    pub fn new(
        doubt: Option<&Doubt>,
        last_cache_bytes: Option<u64>,
        costs: &ModelCosts,
        placement: &Placement,
    ) -> Trust {
        let cache = match placement {
            Placement::Ram(_) => last_cache_bytes.unwrap_or(0),
            _ => 0,
        };
        if costs.token_bytes() < LEAST_TOKEN_BYTES.max(cache) {
            let mib = costs.token_bytes() as f64 / (1 << 20) as f64;
            let why = format!(
                "the model is too small to predict: a token goes through {mib:.1} MiB of weights, which caches hold"
            );
            return Trust { factors: None, why: Some(why) };
        }
        let spread = doubt.map_or(1.0, |doubt| doubt.spread);
        let (low, high) = (LEAST / spread, MOST * spread);
        let factors = (high / low <= WIDEST_RANGE).then_some((low, high));
        Trust { factors, why: doubt.map(|doubt| doubt.why.clone()) }
    }

    /// Returns the rate to show for a predicted rate.
    pub fn shown(&self, tokens_per_second: f64) -> PredictedRate {
        PredictedRate {
            tokens_per_second: self.why.is_none().then_some(tokens_per_second),
            low_tokens_per_second: self.factors.map(|(low, _)| low * tokens_per_second),
            high_tokens_per_second: self.factors.map(|(_, high)| high * tokens_per_second),
            uncertain_because: self.why.clone(),
        }
    }
}
