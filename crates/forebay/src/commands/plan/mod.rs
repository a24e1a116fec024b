//! `forebay plan` shows where a model's weights would be on a machine, how fast it would run, and what limits the
//! speed.
//!
//! ```text
//! mod.rs      a model on the disk, or a known shape
//! machine.rs  the machine that plans are for
//! words.rs    a plan as text
//! remote.rs   all models of a repository on the hub
//! shape.rs    models of known shapes, without a file
//! ```

mod machine;
mod remote;
mod shape;
mod words;

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use forebay_engine::doctor::{MachineProfile, folder_of};
use forebay_engine::plan::{
    self, Answered, HitCurve, PlanError, Planned, PlannedModel, PredictedRate, Prediction, Rates,
    Together, Work,
};
use forebay_engine::{DeviceChoice, Generation, ModelInfo, Session, SessionOptions};
use forebay_stream::PolicyKind;
use serde::Serialize;
use serde_json::Value;

use crate::args::PlanArgs;
use crate::commands::replay;
use crate::config;
use crate::failure::{Failure, Outcome, usage};
use crate::library;
use crate::open;
use crate::output;
pub use machine::{Machine, profile, rates};
pub use remote::{Offer, offer};
use words::Told;
pub use words::rate_in_words;

/// Number of tokens of the prompt whose speed is predicted.
pub const PROMPT_TOKENS: usize = 512;

/// Source of the hit rates that are expected without a trace.
pub const RECORDED_ROUTING: &str = "recorded routing of Qwen3-30B-A3B";

/// A plan as `--json` prints it.
#[derive(Serialize)]
pub struct Document<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<&'a Path>,
    pub model: &'a ModelInfo,
    pub machine: &'a str,
    pub gpu: Option<&'a str>,
    pub ram_bytes: u64,
    pub vram_bytes: Option<u64>,
    pub context: usize,
    pub prompt_tokens: usize,
    pub expected_hits_from: String,
    pub free_vram_is_estimated: bool,
    #[serde(flatten)]
    pub planned: &'a Planned,
    /// Number of sequences that generate most tokens per second together. `None` if nothing is predicted.
    pub best_sequences: Option<usize>,
    pub together: &'a [Together],
    pub warnings: &'a [String],
}

/// What plans of one command have in common.
pub struct Asked {
    pub machine: Machine,
    pub options: SessionOptions,
    pub hits: HitCurve,
    /// Source of the hit rates.
    pub hits_from: String,
}

impl Asked {
    /// Reads what the arguments name. `folder` is on the disk that the model is on, or would be.
    fn new(args: &PlanArgs, folder: &Path) -> Outcome<Asked> {
        let options = options(args);
        let machine = Machine::new(args.profile.as_deref(), folder, options.device)?;
        takes_effect(&options, &machine)?;
        let (hits, hits_from) = match &args.routing {
            None => (HitCurve::default(), RECORDED_ROUTING.to_owned()),
            Some(path) => (hits(path, args.policy)?, path.display().to_string()),
        };
        Ok(Asked { machine, options, hits, hits_from })
    }

    /// Returns the plan for a model with the options that a session would have by default.
    fn usual(folder: &Path) -> Outcome<Asked> {
        let options = SessionOptions::default();
        let machine = Machine::new(None, folder, options.device)?;
        let hits_from = RECORDED_ROUTING.to_owned();
        Ok(Asked { machine, options, hits: HitCurve::default(), hits_from })
    }

    fn plan(&self, model: &PlannedModel) -> Result<Answered, PlanError> {
        let (options, hits) = (&self.options, &self.hits);
        let context = model.context(options)?;
        let (rates, is_here) = (&self.machine.rates, self.machine.is_here());
        let prompt_tokens = PROMPT_TOKENS;
        plan::Asked { model, options, context, prompt_tokens, rates, hits, is_here }.plan()
    }

    /// Returns the document of a plan. Without measured rates it has no predictions.
    fn document(
        &self,
        path: Option<&Path>,
        model: &ModelInfo,
        answered: &Answered,
    ) -> Outcome<Value> {
        let request = &answered.request;
        let document = Document {
            path,
            model,
            machine: &self.machine.cpu,
            gpu: self.machine.rates.gpu_name(),
            ram_bytes: request.ram_bytes,
            vram_bytes: request.vram_bytes,
            context: request.context,
            prompt_tokens: PROMPT_TOKENS,
            expected_hits_from: self.hits_from.clone(),
            free_vram_is_estimated: answered.free_vram_is_estimated,
            planned: &answered.planned,
            best_sequences: answered.best_sequences(),
            together: &answered.together,
            warnings: &warnings(&answered.planned),
        };
        let mut document = serde_json::to_value(&document)?;
        if !self.machine.rates.is_measured() {
            for place in ["/plan/prediction", "/other", "/one_more_gib", "/together"] {
                if let Some(value) = document.pointer_mut(place) {
                    *value = Value::Null;
                }
            }
            document["not_predicted_because"] = self.machine.why_not_measured().into();
        }
        Ok(document)
    }

    /// Prints a plan as text.
    fn tell(&self, model: &ModelInfo, answered: &Answered) -> Outcome {
        output::print(&Told { asked: self, model, answered }.text())?;
        for warning in warnings(&answered.planned) {
            output::tell!("warning: {warning}");
        }
        Ok(())
    }
}

/// Runs the command. `models` is the folder of the library, if the user named it.
pub fn run(args: PlanArgs, models: Option<PathBuf>) -> Outcome {
    if let Some(name) = &args.shape {
        return shape::run(&args, name, models);
    }
    let Some(model) = &args.model else {
        return usage(
            "name a MODEL, a repository of the hub (OWNER/REPO), or a shape (--shape lists them)",
        );
    };
    if let Some(name) = library::remote_name(model) {
        return remote::run(&args, &name, models);
    }
    open::check(model)?;
    let named = |error: PlanError| refused(error, model);
    let planned = PlannedModel::open(model).map_err(named)?;
    let asked = Asked::new(&args, folder_of(model))?;
    let answered = asked.plan(&planned).map_err(named)?;
    match args.json {
        true => output::json(&asked.document(Some(model), &planned.info, &answered)?),
        false => asked.tell(&planned.info, &answered),
    }
}

/// Returns the failure of a plan. An option that does not fit the model is wrong usage.
fn refused(error: PlanError, model: &Path) -> Failure {
    match error {
        PlanError::Option(_) => Failure::Usage(error.to_string()),
        error => open::named(error, model),
    }
}

/// Refuses options for a GPU where no GPU computes, as `run` does.
fn takes_effect(options: &SessionOptions, machine: &Machine) -> Outcome {
    let Some(name) = options.gpu_option() else { return Ok(()) };
    match options.device {
        DeviceChoice::Cpu => usage(format!(
            "{name} is given, but it is for a GPU, which --device cpu does not use: leave one of them out"
        )),
        DeviceChoice::Auto if machine.rates.gpu_name().is_none() => {
            let whose =
                if machine.rates.is_measured() { "the machine profile" } else { "this machine" };
            usage(format!(
                "{name} is given, but it is for a GPU, and {whose} has none: leave it out, or give the --profile of a \
                 machine with a GPU"
            ))
        }
        DeviceChoice::Auto | DeviceChoice::Cuda(_) => Ok(()),
    }
}

fn options(args: &PlanArgs) -> SessionOptions {
    SessionOptions {
        device: config::device(args.device),
        vram_bytes: args.vram,
        ram_bytes: args.ram,
        context: args.ctx,
        kv_cache: config::kv_cache(args.kv_type),
        kv_in_vram: args.kv_vram.unwrap_or_default(),
        cpu_offload: args.cpu_offload.resolve(),
        threads: args.threads,
        policy: args.policy,
        ..SessionOptions::default()
    }
}

/// Returns the hit curve of `policy` for recorded routing.
pub fn hits(path: &Path, policy: PolicyKind) -> anyhow::Result<HitCurve> {
    HitCurve::of_trace(&replay::open(path)?, policy)
        .ok_or_else(|| anyhow!("{}: this trace has no generated tokens", path.display()))
}

/// Returns the warnings that a user should see before loading.
pub fn warnings(planned: &Planned) -> Vec<String> {
    let slow = planned.plan.slow().map(|why| {
        let rate = rate_in_words(&planned.plan.prediction.generate.shown);
        format!("generating will be slow, {rate}: {why}")
    });
    slow.into_iter().collect()
}

/// Returns the rate of an answer that this machine's profile predicts for the session.
pub fn predicted_answer(model: &Path, session: &Session, answer: &Generation) -> PredictedRate {
    let depth = answer.prompt_tokens + answer.tokens.len() / 2;
    let work = Work::alone(answer.prompt_tokens.max(1), depth);
    match predicted(model, session, HitCurve::default, work) {
        Ok(predicted) => predicted.generate.shown,
        Err(why) => PredictedRate::none(why),
    }
}

/// Returns the prediction for a session from this machine's profile.
///
/// # Errors
/// Returns the reason, in words, if there is no prediction.
pub fn predicted(
    model: &Path,
    session: &Session,
    hits: impl FnOnce() -> HitCurve,
    work: Work,
) -> Result<Prediction, String> {
    let again = |why: &str| format!("{why}: run forebay doctor");
    let profile = MachineProfile::of_folder(folder_of(model)).map_err(again)?;
    let rates = Rates::new(&profile).map_err(again)?;
    let predicted = session.predicted(&rates, &hits(), work);
    predicted.ok_or_else(|| again("the machine profile has no GPU"))
}
