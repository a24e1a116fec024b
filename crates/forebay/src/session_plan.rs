//! Plans that sessions on this machine follow where the user left the choice.

use std::path::Path;

use forebay_engine::doctor::{MachineProfile, folder_of};
use forebay_engine::plan::{
    HitCurve, PlanError, PlanRequest, PlannedModel, Planner, PredictedRate, Rates, SEQUENCES_MAX,
    Together, Work,
};
use forebay_engine::{CpuOffload, DeviceChoice, Session, SessionOptions, free_bytes};
use forebay_server::Outlook;
use serde_json::Value;

use crate::commands::plan::{Document, PROMPT_TOKENS, RECORDED_ROUTING, rate_in_words, warnings};
use crate::output;

/// A model that was read for plans, and the rates of this machine with the model's disk.
pub struct SessionPlan {
    pub model: PlannedModel,
    /// The machine's profile with its rates, or why there is none.
    machine: Result<(MachineProfile, Rates), String>,
}

impl SessionPlan {
    /// Reads the model's headers.
    ///
    /// # Errors
    /// Returns an error if the file is damaged or its architecture is unknown.
    pub fn open(model: &Path) -> Result<SessionPlan, PlanError> {
        let again = |why: &str| format!("{why}: run forebay doctor");
        let profile = MachineProfile::of_folder(folder_of(model)).map_err(again);
        let machine = profile.and_then(|profile| {
            let rates = Rates::new(&profile).map_err(again)?;
            Ok((profile, rates))
        });
        Ok(SessionPlan { model: PlannedModel::open(model)?, machine })
    }

    /// Calls `ask` with a planner for this machine and the request of a session. Returns `None` if `doctor` has not measured
    /// the machine, or if the model cannot be planned.
    fn ask<T>(
        &self,
        options: &SessionOptions,
        ask: impl FnOnce(&Planner<'_>, &PlanRequest) -> Option<T>,
    ) -> Option<T> {
        let (_, rates) = self.machine.as_ref().ok()?;
        let request = self.request(options, free_bytes()).ok()?;
        ask(&Planner::new(&self.model, rates, &HitCurve::default()), &request)
    }

    /// Returns the request for a plan of a session on a machine with so much free RAM.
    fn request(&self, options: &SessionOptions, free_bytes: u64) -> Result<PlanRequest, PlanError> {
        let context = self.model.context(options)?;
        let work = Work::alone(PROMPT_TOKENS, 0);
        let mut request = PlanRequest::of_session(options, context, work);
        request.ram_free_bytes = Some(free_bytes);
        Ok(request)
    }

    /// Returns what `forebay plan --json` prints, without paths, for a session on this machine when so much RAM was free.
    ///
    /// # Errors
    /// Returns why there is no plan.
    pub fn report(&self, options: &SessionOptions, free_bytes: u64) -> Result<Value, String> {
        let (profile, rates) = self.machine.as_ref().map_err(Clone::clone)?;
        let words = |error: PlanError| error.to_string();
        let request = self.request(options, free_bytes).map_err(words)?;
        let hits = HitCurve::default();
        let planner = Planner::new(&self.model, rates, &hits);
        let planned = planner.plan(&request).map_err(words)?;
        let together = planner.together(&request, SEQUENCES_MAX);
        let document = Document {
            path: None,
            model: &self.model.info,
            machine: &profile.machine.cpu,
            gpu: rates.gpu_name(),
            ram_bytes: request.ram_bytes,
            vram_bytes: request.vram_bytes,
            context: request.context,
            prompt_tokens: PROMPT_TOKENS,
            expected_hits_from: RECORDED_ROUTING.to_owned(),
            free_vram_is_estimated: rates.gpu_name().is_some(),
            planned: &planned,
            best_sequences: Together::best(&together).map(|best| best.sequences),
            together: &together,
            warnings: &warnings(&planned),
        };
        let mut report = serde_json::to_value(&document).map_err(|error| error.to_string())?;
        // Clients name models, and need not know where they are.
        if let Some(model) = report.get_mut("model").and_then(Value::as_object_mut) {
            model.shift_remove("path");
        }
        Ok(report)
    }

    /// Returns the rate that is predicted for one request alone in an open session.
    pub fn predicted(&self, session: &Session) -> PredictedRate {
        let (_, rates) = match &self.machine {
            Ok(machine) => machine,
            Err(why) => return PredictedRate::none(why),
        };
        let work = Work::alone(PROMPT_TOKENS, 0);
        match session.predicted(rates, &HitCurve::default(), work) {
            Some(predicted) => predicted.generate.shown,
            None => PredictedRate::none("the machine profile has no GPU: run forebay doctor"),
        }
    }

    /// Returns the number of sequences, up to the most that a GPU runs, that a session on this machine generates most tokens
    /// per second with. Returns `None` if nothing is predicted.
    pub fn best_sequences(&self, options: &SessionOptions) -> Option<usize> {
        self.ask(options, |planner, request| {
            let together = planner.together(request, SEQUENCES_MAX);
            Together::best(&together).map(|best| best.sequences)
        })
    }

    /// Returns what this machine can do with the model, as far as `doctor` has measured it.
    pub fn outlook(&self, options: &SessionOptions) -> Outlook {
        let Ok((profile, _)) = &self.machine else { return Outlook::default() };
        let copies = profile.gpu.iter().flat_map(|gpu| &gpu.pinned_copies);
        let copies = copies.map(|copy| copy.to_device_bytes_per_second);
        Outlook {
            planned: self.ask(options, |planner, request| planner.plan(request).ok()),
            disk_bytes_per_second: Some(profile.read.bytes_per_second),
            pcie_bytes_per_second: copies.max_by(f64::total_cmp),
            ..Outlook::default()
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
