//! The plan that a user asks for, on this machine or another one.

use super::PlanError;
use super::{
    HitCurve, PlanRequest, Planned, PlannedModel, Planner, Rates, SEQUENCES_MAX, Together, Work,
    gpu_facts,
};
use crate::{SessionOptions, free_bytes};

/// What a user asks a plan for.
pub struct Asked<'a> {
    pub model: &'a PlannedModel,
    /// Options of the session. The plan is for one sequence.
    pub options: &'a SessionOptions,
    /// Number of positions of context.
    pub context: usize,
    /// Number of tokens of the prompt whose speed is predicted.
    pub prompt_tokens: usize,
    pub rates: &'a Rates,
    pub hits: &'a HitCurve,
    /// True if the rates are those of this machine, whose free memory is then known.
    pub is_here: bool,
}

/// A plan, and what it is for.
pub struct Answered {
    pub request: PlanRequest,
    pub planned: Planned,
    pub together: Vec<Together>,
    /// True if the free memory of the GPU was estimated rather than queried.
    pub free_vram_is_estimated: bool,
}

impl Answered {
    /// Returns the number of sequences that generate most tokens per second together, if anything is predicted.
    pub fn best_sequences(&self) -> Option<usize> {
        Together::best(&self.together).map(|best| best.sequences)
    }
}

impl Asked<'_> {
    /// Makes the plan.
    ///
    /// # Errors
    /// Returns an error of [`Planner::plan`].
    pub fn plan(&self) -> Result<Answered, PlanError> {
        let alone = SessionOptions {
            sequences: 1,
            kv_tokens: None,
            for_engine: false,
            mtp: false,
            ..self.options.clone()
        };
        let work = Work::alone(self.prompt_tokens, 0);
        let mut request = PlanRequest::of_session(&alone, self.context, work);
        let mut planner = Planner::new(self.model, self.rates, self.hits);
        let mut free_vram_is_estimated = self.rates.gpu_name().is_some();
        if self.is_here {
            // If the user names more RAM than is free here, the plan is for a machine that has it.
            request.ram_free_bytes = Some(free_bytes().max(alone.ram_bytes.unwrap_or(0)));
            if let Some(facts) = gpu_facts(request.device) {
                planner = planner.with_facts(facts);
                free_vram_is_estimated = false;
            }
        }
        let planned = planner.plan(&request)?;
        let together = planner.together(&request, SEQUENCES_MAX);
        Ok(Answered { request, planned, together, free_vram_is_estimated })
    }
}
