//! Plans that sessions on this machine follow where the user left the choice.

use std::path::Path;

use forebay_engine::doctor::MachineProfile;
use forebay_engine::plan::{HitCurve, PlanRequest, PlannedModel, Planner, Rates, Work};
use forebay_engine::{CpuOffload, DeviceChoice, EngineError, SessionOptions, free_bytes};
use forebay_server::Outlook;

use crate::commands::plan::{
    PROMPT_TOKENS, SEQUENCES_MOST, best_together, rate_in_words, warnings,
};
use crate::{open, output};

/// A model that was read for plans, and the rates of this machine with the model's disk.
pub struct SessionPlan {
    pub model: PlannedModel,
    /// `None` if `doctor` has not measured the machine.
    rates: Option<Rates>,
    profile: Option<MachineProfile>,
}

impl SessionPlan {
    /// Reads the model's headers.
    ///
    /// # Errors
    /// Returns an error if the file is damaged or its architecture is unknown.
    pub fn open(model: &Path) -> Result<SessionPlan, EngineError> {
        let profile = MachineProfile::of_folder(open::folder(model)).ok();
        let rates = profile.as_ref().and_then(|profile| Rates::new(profile).ok());
        Ok(SessionPlan { model: PlannedModel::open(model)?, rates, profile })
    }

    /// Calls `ask` with a planner for this machine and the request of a session. Returns `None` if `doctor` has not measured
    /// the machine, or if the model cannot be planned.
    fn ask<T>(
        &self,
        options: &SessionOptions,
        ask: impl FnOnce(&Planner<'_>, &PlanRequest) -> Option<T>,
    ) -> Option<T> {
        let rates = self.rates.as_ref()?;
        let context = self.model.context(options).ok()?;
        let work = Work::alone(PROMPT_TOKENS, 0);
        let mut request = PlanRequest::of_session(options, context, work);
        request.ram_free_bytes = Some(free_bytes());
        ask(&Planner::new(&self.model, rates, &HitCurve::default()), &request)
    }

    /// Returns the number of sequences, up to the most that a GPU runs, that a session on this machine generates most tokens
    /// per second with. Returns `None` if nothing is predicted.
    pub fn best_sequences(&self, options: &SessionOptions) -> Option<usize> {
        self.ask(options, |planner, request| {
            let together = planner.together(request, SEQUENCES_MOST);
            best_together(&together).map(|best| best.sequences)
        })
    }

    /// Returns what this machine can do with the model, as far as `doctor` has measured it.
    pub fn outlook(&self, options: &SessionOptions) -> Outlook {
        let Some(profile) = &self.profile else { return Outlook::default() };
        let copies = profile.gpu.iter().flat_map(|gpu| &gpu.pinned_copies);
        let copies = copies.map(|copy| copy.to_device_bytes_per_second);
        Outlook {
            planned: self.ask(options, |planner, request| planner.plan(request).ok()),
            disk_bytes_per_second: Some(profile.read.bytes_per_second),
            pcie_bytes_per_second: copies.max_by(f64::total_cmp),
        }
    }

    /// Makes a session follow the plan where the user left the choice. Warns before loading if the model will be slow.
    pub fn follow(&self, options: &mut SessionOptions) {
        // If nothing can run, the session reports the error itself.
        let planned = self.ask(options, |planner, request| planner.plan(request).ok());
        let Some(planned) = planned else { return };
        let only_for_gpu = !options.cuda_graphs || options.cpu_offload != CpuOffload::Auto;
        let cpu = options.device == DeviceChoice::Auto && planned.plan.device == "cpu";
        if let Some(gpu) = planned.other.as_ref().filter(|_| cpu && !only_for_gpu) {
            output::tell!(
                "device: cpu, predicted {}; the GPU: {} (use --device cuda to choose it anyway)",
                rate_in_words(&planned.plan.prediction.generate.shown),
                rate_in_words(&gpu.prediction.generate.shown)
            );
            options.device = DeviceChoice::Cpu;
            options.vram_bytes = None;
        }
        warnings(&planned).iter().for_each(|warning| output::tell!("warning: {warning}"));
    }
}

/// Makes a session follow the plan of its model. A model that cannot be read is reported when it is opened.
pub fn follow(model: &Path, options: &mut SessionOptions) {
    if let Ok(plan) = SessionPlan::open(model) {
        plan.follow(options);
    }
}

/// Returns the best number of sequences for a model, or `None` if nothing is predicted.
pub fn best_sequences(model: &Path, options: &SessionOptions) -> Option<usize> {
    SessionPlan::open(model).ok()?.best_sequences(options)
}
