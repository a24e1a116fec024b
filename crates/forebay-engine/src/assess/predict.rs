//! Speed by RAM budget: what a replay says that would be read, over what this machine reads per second.
//!
//! The model, stated: a token takes its computing time, as measured while the routing was recorded (without waits for
//! the disk), plus its reads. Reads are the missed experts' and the streamed dense blocks' bytes over the disk's rate,
//! plus one latency for each layer that has to wait. Computing and reading are not overlapped in this sum. The
//! engine overlaps them in part, but computes more slowly while it reads, which weighs a little more: recorded with
//! everything in memory, predictions were 8-10 % too fast (`bench/results/2026-11-22-assess.md`).

use std::path::Path;

use forebay_stream::{
    Budget, CacheShape, Lookups, MemoryPlan, ModelBlocks, PolicyKind, ReplayPolicy,
};
use serde::Serialize;

use super::sweep;
use crate::doctor::{MachineIdentity, MachineProfile, PROFILE_VERSION};

/// What the disk does, from the machine profile.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DiskRates {
    pub bytes_per_second: f64,
    /// Median of one small read.
    pub latency_seconds: f64,
}

/// The speed to expect with a budget.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Prediction {
    pub ram_bytes: u64,
    /// Experts that the plan keeps, as a share of all.
    pub kept_share: f64,
    pub hit_rate: f64,
    pub read_bytes_per_token: f64,
    pub compute_seconds_per_token: f64,
    pub read_seconds_per_token: f64,
    pub tokens_per_second: f64,
}

/// The disk's rates by the machine profile, if `doctor` saved one for this machine and the disk that `model` is on;
/// else why there are none.
pub fn disk_rates(model: &Path) -> Result<DiskRates, &'static str> {
    let text = MachineProfile::path().and_then(|path| std::fs::read_to_string(path).ok());
    let text = text.ok_or("there is no machine profile")?;
    let damaged = "the machine profile is damaged or of another version";
    let profile: MachineProfile = serde_json::from_str(&text).map_err(|_| damaged)?;
    if profile.version != PROFILE_VERSION {
        return Err(damaged);
    }
    let folder = match model.parent() {
        _ if model.is_dir() => model,
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    match MachineIdentity::here(folder) {
        Ok(here) if here == profile.machine => {}
        _ => return Err("the machine profile is of another machine or disk"),
    }
    let rates = DiskRates {
        bytes_per_second: profile.read.bytes_per_second,
        latency_seconds: profile.read_64kib_p50_seconds,
    };
    let good = |value: f64| value.is_finite() && value > 0.0;
    (good(rates.bytes_per_second) && good(rates.latency_seconds)).then_some(rates).ok_or(damaged)
}

/// What a prediction needs to know of the model and the machine.
pub struct Costs<'a> {
    pub blocks: &'a ModelBlocks,
    /// Bytes of weights that are in memory under every budget.
    pub small_bytes: u64,
    pub compute_seconds_per_token: f64,
    pub disk: DiskRates,
}

impl Costs<'_> {
    /// Predictions for budgets from the smallest that works to the whole model, for a policy of the engine.
    pub fn predict(&self, lookups: &Lookups, policy: PolicyKind) -> Vec<Prediction> {
        let smallest = Budget::smallest(self.blocks, self.small_bytes);
        let Ok(whole) = Budget::plan(self.blocks, None, self.small_bytes, policy) else {
            return Vec::new();
        };
        let largest = self.small_bytes + whole.arena_bytes;
        let budgets = budgets(smallest, largest);
        budgets.into_iter().filter_map(|ram| self.at(lookups, policy, ram)).collect()
    }

    fn at(&self, lookups: &Lookups, policy: PolicyKind, ram_bytes: u64) -> Option<Prediction> {
        let plan = Budget::plan(self.blocks, Some(ram_bytes), self.small_bytes, policy).ok()?;
        Some(self.with_plan(lookups, policy, &plan, ram_bytes))
    }

    /// The prediction for a plan that is there already.
    pub fn with_plan(
        &self,
        lookups: &Lookups,
        policy: PolicyKind,
        plan: &MemoryPlan,
        ram_bytes: u64,
    ) -> Prediction {
        let shape = CacheShape::from_plan(plan).after_preload(plan);
        let met = sweep::simulate(lookups, ReplayPolicy::Online(policy), &shape);
        let dense = plan.dense.slot_bytes.iter().zip(&plan.dense.pinned);
        let streamed = || dense.clone().filter(|(_, pinned)| !**pinned);
        let dense_bytes: u64 = streamed().map(|(bytes, _)| *bytes).sum();
        let read_bytes_per_token = met.per_token(met.missed_bytes) + dense_bytes as f64;
        let waits = met.per_token(met.layers_missed) + streamed().count() as f64;
        let read_seconds_per_token =
            read_bytes_per_token / self.disk.bytes_per_second + waits * self.disk.latency_seconds;
        Prediction {
            ram_bytes,
            kept_share: plan.kept_slots() as f64 / plan.experts().max(1) as f64,
            hit_rate: met.hit_rate(),
            read_bytes_per_token,
            compute_seconds_per_token: self.compute_seconds_per_token,
            read_seconds_per_token,
            tokens_per_second: 1.0 / (self.compute_seconds_per_token + read_seconds_per_token),
        }
    }

    /// What predictions are made from, in a sentence.
    pub fn about(&self) -> String {
        format!(
            "a token computes for {:.2} ms (measured while recording) and then reads what it misses at {:.2} GB/s, {:.0} us \
             for each layer that waits; reads beside computing are not counted in its favour",
            self.compute_seconds_per_token * 1e3,
            self.disk.bytes_per_second / 1e9,
            self.disk.latency_seconds * 1e6
        )
    }
}

/// Budgets worth telling: the smallest, round ones between, and all.
fn budgets(smallest: u64, largest: u64) -> Vec<u64> {
    const BETWEEN: u64 = 7;
    let mut found = vec![smallest];
    // The unit that leaves numbers of one or two digits.
    let step = (largest.saturating_sub(smallest) / BETWEEN).max(1);
    let unit = 1_u64 << step.ilog2();
    let round = |times: u64| smallest.div_ceil(unit).saturating_add(times).saturating_mul(unit);
    found.extend((0..2 * BETWEEN).map(round).filter(|&ram| smallest < ram && ram < largest));
    found.push(largest);
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_stream::{ExpertIndex, Extent, FileIndex, LayerIndex, Phase};

    fn extent(offset: u64, length: u64) -> Extent {
        Extent { file: FileIndex(0), offset, length }
    }

    /// One dense block of 4 KiB, one layer of 4 experts of 8 KiB, of which a token uses one.
    fn blocks() -> ModelBlocks {
        let expert = |index: u64| vec![extent((1 << 20) + index * 8192, 8192)];
        ModelBlocks {
            dense: vec![vec![extent(0, 4096)]],
            experts: vec![(0..4).map(expert).collect()],
            experts_per_token: 1,
        }
    }

    #[test]
    fn reads_and_computing_add_up() {
        let blocks = blocks();
        let mut trace = Lookups::new(vec![(4, 8192)]);
        for expert in [0, 1, 0, 1] {
            trace.push(Phase::Generate, LayerIndex(0), &[ExpertIndex(expert)]);
        }
        let disk = DiskRates { bytes_per_second: 8192e3, latency_seconds: 1e-3 };
        let costs =
            Costs { blocks: &blocks, small_bytes: 0, compute_seconds_per_token: 2e-3, disk };
        let found = costs.predict(&trace, "layer-lru".parse().unwrap());
        let last = found.last().unwrap();
        // Everything fits and is there from the start.
        assert_eq!((last.kept_share, last.hit_rate, last.read_bytes_per_token), (1.0, 1.0, 0.0));
        assert!((last.tokens_per_second - 500.0).abs() < 1e-6);
        // One of four: every token misses, 8 KiB take 1 ms and the wait another.
        let one = found.iter().find(|p| p.kept_share == 0.25).unwrap();
        assert_eq!((one.hit_rate, one.read_bytes_per_token), (0.0, 8192.0));
        assert!((one.read_seconds_per_token - 2e-3).abs() < 1e-12);
        assert!((one.tokens_per_second - 250.0).abs() < 1e-6);
        assert!(found.windows(2).all(|pair| pair[0].ram_bytes < pair[1].ram_bytes));
        assert!(found[0].tokens_per_second <= last.tokens_per_second);
    }

    #[test]
    fn budgets_are_round_and_in_order() {
        let found = budgets(3_000_000, 40_000_000);
        assert_eq!((found[0], *found.last().unwrap()), (3_000_000, 40_000_000));
        assert!((5..=16).contains(&found.len()), "{found:?}");
        assert!(found.windows(2).all(|pair| pair[0] < pair[1]), "{found:?}");
        assert_eq!(budgets(5, 5), [5]);
    }
}
