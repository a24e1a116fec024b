//! Decides if a prediction is shown as a number, as a range, or not at all.
//!
//! `tests/accuracy.rs` compares predictions from good profiles with measurements. All are within a fifth, except for a
//! small model with latent attention in VRAM (`docs/design/plans.md`). A profile of a busy machine, or of an older
//! forebay that did not check this, widens the number to a range. If only rates of the disk are in doubt, the range is as wide as the
//! disk's part of the time makes it, and without such a part the number stays. A range too wide to be of use is left out. So is a
//! prediction for a model so small that most of a token's time goes to work that no profile measures.

use serde::Serialize;

use super::cost::{Cost, Placement, Speed};
use super::model::ModelCosts;
use crate::doctor::{MachineProfile, QualityState};

/// Bounds of the measured rate as a multiple of the rate predicted from a good profile. They are the reciprocals of the
/// bounds that `tests/accuracy.rs` checks.
const MEASURED_MIN: f64 = 1.0 / 1.2;
const MEASURED_MAX: f64 = 1.0 / 0.8;

/// Factor by which rates may be wrong if the profile does not say that the machine was idle. A disk that `doctor`
/// measured at 2.97 GB/s gave 1.7 GB/s to the runs that followed.
const UNKNOWN_SPREAD: f64 = 1.75;

/// Largest useful ratio between the ends of a range. A wider range does not help the user decide.
const WIDEST_RANGE: f64 = 5.0;

/// Factor up to which a prediction that may take longer is still shown as a number.
const CERTAIN: f64 = 1.02;

/// Smallest number of weight bytes for each token for which a prediction is shown. Below it, a processor's caches hold
/// the weights from token to token, and no profile has a rate for that. Fixed costs of a token (norms, attention,
/// sampling, handing work to threads) then take most of its time.
pub const TOKEN_BYTES_MIN: u64 = 64 << 20;

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
    /// True if this holds for the disk's rates only.
    pub only_disk: bool,
    /// Reason for the doubt, in words.
    pub why: String,
}

impl Doubt {
    /// Returns the doubt about a profile, or `None` for a good profile.
    pub fn of(profile: &MachineProfile) -> Option<Doubt> {
        let Some(quality) = &profile.quality else {
            let why =
                "the machine profile is of an older forebay: run forebay doctor again".to_owned();
            return Some(Doubt { spread: UNKNOWN_SPREAD, only_disk: false, why });
        };
        let why = match quality.state {
            QualityState::Good => return None,
            QualityState::Busy => "the machine was busy when it was measured",
            QualityState::Unstable => "readings of this machine disagreed",
        };
        let spread = if quality.spread.is_finite() { quality.spread.max(1.0) } else { f64::MAX };
        let why = format!("{why}: run forebay doctor again when it is idle");
        Some(Doubt { spread, only_disk: quality.only_disk, why })
    }

    /// Returns how many times as long, at least and at most, the work of a prediction may take.
    fn of_time(&self, speed: &Speed) -> (f64, f64) {
        if !self.only_disk {
            return (1.0 / self.spread, self.spread);
        }
        let of_disk = |&(cost, seconds): &(Cost, f64)| (cost == Cost::Disk).then_some(seconds);
        let disk: f64 = speed.costs.iter().filter_map(of_disk).sum();
        let share = (disk / speed.seconds.max(f64::MIN_POSITIVE)).min(1.0);
        (1.0 - share * (1.0 - 1.0 / self.spread), 1.0 + share * (self.spread - 1.0))
    }
}

/// Trustworthiness of the predictions for one model on one machine.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Trust<'a> {
    doubt: Option<&'a Doubt>,
    /// Reason why nothing is shown.
    too_small: Option<String>,
}

impl Trust<'_> {
    /// Decides how far predictions for `placement` can be trusted. `last_cache_bytes` is the size of the processor's
    /// last-level cache, if the profile has it.
    pub fn new<'a>(
        doubt: Option<&'a Doubt>,
        last_cache_bytes: Option<u64>,
        costs: &ModelCosts,
        placement: &Placement,
    ) -> Trust<'a> {
        let cache = match placement {
            Placement::Ram(_) => last_cache_bytes.unwrap_or(0),
            _ => 0,
        };
        let too_small = (costs.token_bytes() < TOKEN_BYTES_MIN.max(cache)).then(|| {
            let mib = costs.token_bytes() as f64 / (1 << 20) as f64;
            format!(
                "the model is too small to predict: a token goes through {mib:.1} MiB of weights, which caches hold"
            )
        });
        Trust { doubt, too_small }
    }

    /// Returns the rate to show for a predicted one.
    pub fn shown(&self, speed: &Speed) -> PredictedRate {
        if let Some(why) = &self.too_small {
            return PredictedRate::none(why);
        }
        let rate = speed.tokens_per_second;
        let (least, most) = self.doubt.map_or((1.0, 1.0), |doubt| doubt.of_time(speed));
        let (low, high) = (MEASURED_MIN / most, MEASURED_MAX / least);
        let is_certain = most <= CERTAIN;
        let range = (high / low <= WIDEST_RANGE).then_some((low * rate, high * rate));
        PredictedRate {
            tokens_per_second: is_certain.then_some(rate),
            low_tokens_per_second: range.map(|range| range.0),
            high_tokens_per_second: range.map(|range| range.1),
            uncertain_because: self.doubt.filter(|_| !is_certain).map(|doubt| doubt.why.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::cost::Sum;

    /// A prediction of a second, of which the disk takes a part.
    fn second(disk: f64) -> Speed {
        let mut sum = Sum::default();
        sum.add(Cost::Pcie, 1.0 - disk);
        sum.add(Cost::Disk, disk);
        sum.speed(100.0, 1.0)
    }

    #[test]
    fn a_disk_in_doubt_matters_as_much_as_it_takes_time() {
        let doubt = Doubt { spread: 2.0, only_disk: true, why: "readings disagree".into() };
        let trust = Trust { doubt: Some(&doubt), too_small: None };
        let none = trust.shown(&second(0.0));
        assert_eq!(none, Trust { doubt: None, too_small: None }.shown(&second(0.0)));
        assert_eq!(none.tokens_per_second, Some(100.0));
        let half = trust.shown(&second(0.5));
        assert_eq!((half.tokens_per_second, half.uncertain_because.is_some()), (None, true));
        let (low, high) = half.range().unwrap();
        // A slow disk makes it one and a half seconds, a fast one three quarters of a second.
        assert!((low - 100.0 * MEASURED_MIN / 1.5).abs() < 1e-9, "{low}");
        assert!((high - 100.0 * MEASURED_MAX / 0.75).abs() < 1e-9, "{high}");
        // Doubt about everything is the same for each prediction.
        let everything = Doubt { only_disk: false, ..doubt };
        let trust = Trust { doubt: Some(&everything), too_small: None };
        assert_eq!(trust.shown(&second(0.0)), trust.shown(&second(0.5)));
        assert_eq!(trust.shown(&second(0.0)).tokens_per_second, None);
    }
}
