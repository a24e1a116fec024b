//! Predicted speed by memory budget, from the planner with the hit rates of the recording.
//!
//! The planner has the only cost model (`docs/plan.md`). `forebay plan --routing` gives the same
//! speeds for the same recording and budgets.

use forebay_engine::DeviceChoice;
use forebay_engine::plan::{
    self, Cost, HitCurve, Plan, PlanError, PlanRequest, PlannedModel, Planner, Rates,
};
use forebay_model::ModelError;
use forebay_stream::{Budget, MemoryPlan};
use serde::Serialize;

/// A machine to predict speeds for.
pub struct Machine {
    /// Name of the machine that fits after "on".
    pub name: String,
    pub rates: Rates,
    /// True if this program runs on it.
    pub is_here: bool,
}

/// Predicted speeds of one machine. One text at a time is generated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Predictions {
    /// Name of the machine that fits after "on".
    pub machine: String,
    /// Name of the GPU in the machine profile.
    pub gpu: Option<String>,
    /// CPU speeds, from the smallest RAM budget that works to the whole model.
    pub by_ram: Vec<Prediction>,
    /// GPU speeds, a curve for each amount of RAM, largest first; empty without a GPU.
    pub by_vram: Vec<VramCurve>,
    /// Reason why there are no GPU speeds.
    pub not_on_gpu: Option<String>,
}

/// Speed on a GPU with a fixed amount of RAM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VramCurve {
    /// RAM for weights that do not fit into VRAM.
    pub ram_bytes: u64,
    /// Points from the smallest VRAM budget that works to the whole model, or to all VRAM of the
    /// GPU.
    pub points: Vec<Prediction>,
}

/// Predicted speed with one budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// VRAM for everything on the GPU; `None` if the CPU computes.
    pub vram_bytes: Option<u64>,
    /// RAM for weights.
    pub ram_bytes: u64,
    /// Share of all experts that are kept in the memory of the device that computes them.
    pub kept_share: f64,
    /// Share of expert lookups that find their expert in that memory.
    pub hit_rate: f64,
    /// Bytes read from the disk per token.
    pub read_bytes_per_token: f64,
    /// The kind of work that takes longest.
    pub limit: Cost,
    /// Seconds per token of each kind of work. Kinds that run at the same time overlap.
    pub costs: Vec<(Cost, f64)>,
    pub tokens_per_second: f64,
}

impl Prediction {
    /// Creates a prediction. `kept` is the plan of expert slots on the device that computes; `None`
    /// if every expert has a slot.
    pub(super) fn new(
        (vram_bytes, ram_bytes): (Option<u64>, u64),
        kept: Option<&MemoryPlan>,
        predicted: &plan::Prediction,
    ) -> Prediction {
        Prediction {
            vram_bytes,
            ram_bytes,
            kept_share: kept.map_or(1.0, MemoryPlan::kept_share),
            hit_rate: predicted.hit_rate.unwrap_or(1.0),
            read_bytes_per_token: predicted.generate.disk_bytes,
            limit: predicted.generate.limit,
            costs: predicted.generate.costs.clone(),
            tokens_per_second: predicted.generate.tokens_per_second,
        }
    }

    /// Returns the budget that a curve varies: VRAM if a GPU computes, otherwise RAM.
    pub fn budget_bytes(&self) -> u64 {
        self.vram_bytes.unwrap_or(self.ram_bytes)
    }
}

/// Returns the planner's predictions for a model with these hit rates. Uses all fields of `request`
/// except device and VRAM; its RAM is the RAM of the machine.
///
/// # Errors
/// Returns the reason why predictions for this model or from this profile would mislead.
pub(super) fn predictions(
    machine: &Machine,
    model: &PlannedModel,
    hits: &HitCurve,
    request: &PlanRequest,
) -> Result<Predictions, String> {
    let planner = Planner::new(model, &machine.rates, hits);
    let budgets = Budgets { model, planner, request };
    let by_ram = budgets.by_ram()?;
    let (by_vram, not_on_gpu) = match budgets.by_vram() {
        Ok(curves) => (curves, None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    };
    Ok(Predictions {
        machine: machine.name.clone(),
        gpu: machine.rates.gpu_name().map(str::to_owned),
        by_ram,
        by_vram,
        not_on_gpu,
    })
}

struct Budgets<'a> {
    model: &'a PlannedModel,
    planner: Planner<'a>,
    request: &'a PlanRequest,
}

impl Budgets<'_> {
    fn plan(
        &self,
        device: DeviceChoice,
        vram_bytes: Option<u64>,
        ram_bytes: u64,
    ) -> Result<Plan, PlanError> {
        let request = PlanRequest { device, vram_bytes, ram_bytes, ..self.request.clone() };
        self.planner.best(&PlanRequest { ram_chosen_by_user: true, ..request })
    }

    fn by_ram(&self) -> Result<Vec<Prediction>, String> {
        let weights = &self.model.weights;
        let (smallest, whole) = self.host_bytes(&weights.blocks);
        let mut found = Vec::new();
        for ram in between(smallest, whole) {
            let Ok(plan) = self.plan(DeviceChoice::Cpu, None, ram) else { continue };
            if let Some(why) = plan.prediction.generate.shown.uncertain_because {
                return Err(why);
            }
            found.push(Prediction::new((None, ram), plan.host.as_ref(), &plan.prediction));
        }
        Ok(found)
    }

    fn by_vram(&self) -> Result<Vec<VramCurve>, PlanError> {
        let experts = self.model.expert_blocks();
        let (smallest_ram, all_ram) = self.host_bytes(&experts);
        let on_gpu = |vram: Option<u64>, ram: u64| self.plan(DeviceChoice::Cuda(0), vram, ram);
        // Plans with all VRAM of the GPU, which may be more than the model needs.
        let most = on_gpu(None, all_ram)?;
        let used = |vram: &forebay_model::VramUse| match most.slots {
            Some(_) => vram.budget_bytes,
            None => vram.total_bytes,
        };
        let largest = most.vram.as_ref().map_or(0, used);
        let smallest = match on_gpu(Some(0), all_ram) {
            Err(PlanError::Model(ModelError::VramTooSmall { needed_bytes, .. })) => needed_bytes,
            Err(other) => return Err(other),
            Ok(_) => 0,
        };
        let budgets = between(smallest, largest);
        let curve = |ram_bytes: u64| {
            let at = |&vram: &u64| {
                let plan = on_gpu(Some(vram), ram_bytes).ok()?;
                let budget = (Some(vram), ram_bytes);
                Some(Prediction::new(budget, plan.slots.as_ref(), &plan.prediction))
            };
            VramCurve { ram_bytes, points: budgets.iter().filter_map(at).collect() }
        };
        let amounts = amounts(smallest_ram, all_ram.min(self.request.ram_bytes));
        let curves = amounts.into_iter().map(curve);
        Ok(curves.filter(|curve| !curve.points.is_empty()).collect())
    }

    /// Returns the RAM for weights: the least that works for these blocks, and the least that holds
    /// all of them.
    fn host_bytes(&self, blocks: &forebay_stream::ModelBlocks) -> (u64, u64) {
        let (small, policy) = (self.model.weights.small_bytes, self.request.policy);
        let smallest = Budget::smallest(blocks, small);
        let all = Budget::plan(blocks, None, small, policy);
        (smallest, all.map_or(smallest, |plan| small + plan.arena_bytes))
    }
}

/// Returns budgets to predict: the smallest, round ones between, and the largest.
fn between(smallest: u64, largest: u64) -> Vec<u64> {
    const BETWEEN: u64 = 7;
    let mut found = vec![smallest];
    // This unit makes the round budgets numbers of one or two digits.
    let step = (largest.saturating_sub(smallest) / BETWEEN).max(1);
    let unit = 1_u64 << step.ilog2();
    let round = |times: u64| smallest.div_ceil(unit).saturating_add(times).saturating_mul(unit);
    found.extend((0..2 * BETWEEN).map(round).filter(|&size| smallest < size && size < largest));
    found.push(largest);
    found.dedup();
    found
}

/// Returns amounts of RAM to predict: all usable RAM, about half of it and about a quarter.
fn amounts(smallest: u64, most: u64) -> Vec<u64> {
    let round = |size: u64| {
        let unit = (1_u64 << size.max(1).ilog2()).div_ceil(8);
        (size + unit / 2) / unit * unit
    };
    let less = [round(most / 2), round(most / 4)];
    std::iter::once(most)
        .chain(less.into_iter().filter(|&size| smallest <= size && size < most))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_are_round_and_in_order() {
        let found = between(3_000_000, 40_000_000);
        assert_eq!((found[0], *found.last().unwrap()), (3_000_000, 40_000_000));
        assert!((5..=16).contains(&found.len()), "{found:?}");
        assert!(found.windows(2).all(|pair| pair[0] < pair[1]), "{found:?}");
        assert!(found[1..found.len() - 1].iter().all(|size| size % (1 << 20) == 0), "{found:?}");
        assert_eq!(between(5, 5), [5]);
    }

    #[test]
    fn amounts_of_ram_are_all_half_and_a_quarter_as_far_as_they_work() {
        const GIB: u64 = 1 << 30;
        // Half and a quarter of 16.4 GiB, rounded to three binary digits.
        let most = 164 * GIB / 10;
        assert_eq!(amounts(GIB, most), [most, 8 * GIB, 4 * GIB]);
        assert_eq!(amounts(5 * GIB, most), [most, 8 * GIB]);
        assert_eq!(amounts(20 * GIB, most), [most]);
        assert_eq!(amounts(0, 0), [0]);
    }
}
