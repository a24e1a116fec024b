//! Whether a prediction is shown as a number, as a range, or not at all.
//!
//! `tests/accuracy.rs` compares predictions from good profiles with measurements: all are within a fifth, but for a
//! small model with latent attention in VRAM (`docs/design/plans.md`). A profile of
//! a busy machine, or of an older forebay that did not look, widens that to a range. A range too wide to be of use is left
//! out, and so is a prediction for a model so small that work which no profile measures takes most of a token's time.

use serde::Serialize;

use super::cost::Placement;
use super::model::ModelCosts;
use crate::doctor::{MachineProfile, QualityState};

/// Measured rates are at least and at most this share of those predicted from a good profile: the bounds that `tests/accuracy.rs`
/// holds predictions to, turned around.
const LEAST: f64 = 1.0 / 1.2;
const MOST: f64 = 1.0 / 0.8;

/// By how much rates of a profile may be wrong that does not say whether the machine was idle: a disk that `doctor` measured with
/// 2.97 GB/s gave 1.7 GB/s to the runs that followed.
const UNKNOWN_SPREAD: f64 = 1.75;

/// A range whose ends are further apart than this factor helps nobody decide.
const WIDEST_RANGE: f64 = 5.0;

/// Bytes of weights that one token must go through at least. Below, a processor's caches hold them from token to token, which no
/// profile has a rate for, and fixed costs of a token (norms, attention, sampling, handing work to threads) are most of its time.
pub const LEAST_TOKEN_BYTES: u64 = 64 << 20;

/// The rate to show for a prediction.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PredictedRate {
    /// Tokens per second; `None` where only a range is known, or nothing.
    pub tokens_per_second: Option<f64>,
    /// Tokens per second that are to be expected at least; `None` where nothing is known.
    pub low_tokens_per_second: Option<f64>,
    /// Tokens per second that are to be expected at most; `None` where nothing is known.
    pub high_tokens_per_second: Option<f64>,
    /// Why there is no number, in words.
    pub uncertain_because: Option<String>,
}

impl PredictedRate {
    /// No prediction, and why.
    pub fn none(why: impl Into<String>) -> PredictedRate {
        PredictedRate { uncertain_because: Some(why.into()), ..PredictedRate::default() }
    }

    /// The lowest and the highest rate to expect; `None` where there is no prediction.
    pub fn range(&self) -> Option<(f64, f64)> {
        self.low_tokens_per_second.zip(self.high_tokens_per_second)
    }
}

/// What a profile's rates may be wrong by.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Doubt {
    /// At least 1.
    pub spread: f64,
    pub why: String,
}

impl Doubt {
    /// `None` for a good profile.
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

/// How far predictions for one model on one machine can be trusted.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Trust {
    /// Factors to the lowest and the highest rate; `None` where nothing is to be said.
    factors: Option<(f64, f64)>,
    /// Why a number alone would mislead.
    why: Option<String>,
}

impl Trust {
    /// `last_cache_bytes`: the processor's, if the profile has it.
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

    /// The rate to show for a predicted one.
    pub fn shown(&self, tokens_per_second: f64) -> PredictedRate {
        PredictedRate {
            tokens_per_second: self.why.is_none().then_some(tokens_per_second),
            low_tokens_per_second: self.factors.map(|(low, _)| low * tokens_per_second),
            high_tokens_per_second: self.factors.map(|(_, high)| high * tokens_per_second),
            uncertain_because: self.why.clone(),
        }
    }
}
