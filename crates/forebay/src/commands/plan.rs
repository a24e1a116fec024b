//! `forebay plan` shows where a model's weights would be on a machine, how fast it would run, and what limits the
//! speed.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::anyhow;
use forebay_engine::doctor::{MachineProfile, ProfileError, folder_of};
use forebay_engine::plan::{
    self, Answered, HitCurve, Plan, PlanRequest, Planned, PlannedModel, PredictedRate, Prediction,
    Rates, Speed, Together, Work,
};
use forebay_engine::{DeviceChoice, EngineError, Generation, ModelInfo, Session, SessionOptions};
use forebay_model::{SubLayerCounts, SubLayerPlacement};
use forebay_stream::{MemoryPlan, PolicyKind};
use serde::Serialize;

use crate::args::PlanArgs;
use crate::commands::replay;
use crate::config;
use crate::failure::{Failure, Outcome, usage};
use crate::open;
use crate::output::{self, Align};
use crate::size;

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

/// The user's request, and the part of it that is estimated.
struct Asked<'a> {
    args: &'a PlanArgs,
    request: PlanRequest,
    profile: MachineProfile,
    /// True if the free memory of the GPU was estimated rather than queried.
    estimated: bool,
}

pub fn run(args: PlanArgs) -> Outcome {
    open::check(&args.model)?;
    let options = options(&args);
    let named = |error: EngineError| match error {
        EngineError::BadOption { .. } => Failure::Usage(error.to_string()),
        error => open::named(error, &args.model),
    };
    let model = PlannedModel::open(&args.model).map_err(named)?;
    let context = model.context(&options).map_err(named)?;
    let profile = profile(args.profile.as_deref(), &args.model)?;
    let rates = rates(&profile)?;
    takes_effect(&options, rates.gpu_name().is_some())?;
    let hits = match &args.routing {
        None => HitCurve::default(),
        Some(path) => hits(path, args.policy)?,
    };
    let is_here = args.profile.is_none();
    let prompt_tokens = PROMPT_TOKENS;
    let (model, options, rates, hits) = (&model, &options, &rates, &hits);
    let asked = plan::Asked { model, options, context, prompt_tokens, rates, hits, is_here };
    let answered = asked.plan().map_err(named)?;
    let best_sequences = answered.best_sequences();
    let Answered { request, planned, together, free_vram_is_estimated } = answered;
    let asked = Asked { args: &args, request, profile, estimated: free_vram_is_estimated };
    let warnings = warnings(&planned);
    if args.json {
        return output::json(&Document {
            path: Some(&args.model),
            model: &model.info,
            machine: &asked.profile.machine.cpu,
            gpu: rates.gpu_name(),
            ram_bytes: asked.request.ram_bytes,
            vram_bytes: asked.request.vram_bytes,
            context,
            prompt_tokens: PROMPT_TOKENS,
            expected_hits_from: asked.hits_from(),
            free_vram_is_estimated,
            planned: &planned,
            best_sequences,
            together: &together,
            warnings: &warnings,
        });
    }
    output::print(&asked.text(&model.info, rates.gpu_name(), &planned, &together))?;
    warnings.iter().for_each(|warning| output::tell!("warning: {warning}"));
    Ok(())
}

/// Refuses options for a GPU where no GPU computes, as `run` does.
fn takes_effect(options: &SessionOptions, has_gpu: bool) -> Outcome {
    let Some(name) = options.gpu_option() else { return Ok(()) };
    match options.device {
        DeviceChoice::Cpu => usage(format!(
            "{name} is given, but it is for a GPU, which --device cpu does not use: leave one of them out"
        )),
        DeviceChoice::Auto if !has_gpu => usage(format!(
            "{name} is given, but it is for a GPU, and the machine profile has none: leave it out, or give the --profile of \
             a machine with a GPU"
        )),
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

/// Reads the profile in `file`, or this machine's profile with the disk that `model` is on.
pub fn profile(file: Option<&Path>, model: &Path) -> anyhow::Result<MachineProfile> {
    if let Some(path) = file {
        open::check(path)?;
    }
    MachineProfile::find(file, model).map_err(|error| match error {
        ProfileError::NotMeasured { why } => {
            anyhow!("{why}: run forebay doctor on the model's disk first, or give --profile FILE")
        }
        error => error.into(),
    })
}

/// Returns the rates in a profile.
pub fn rates(profile: &MachineProfile) -> anyhow::Result<Rates> {
    Rates::new(profile).map_err(|why| anyhow!("{why}: run forebay doctor again"))
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

impl Asked<'_> {
    fn hits_from(&self) -> String {
        match &self.args.routing {
            Some(path) => path.display().to_string(),
            None => RECORDED_ROUTING.into(),
        }
    }

    fn text(
        &self,
        model: &ModelInfo,
        gpu: Option<&str>,
        planned: &Planned,
        together: &[Together],
    ) -> String {
        let plan = &planned.plan;
        let mut lines = vec![
            ("model", of_model(model)),
            ("machine", self.machine(gpu)),
            ("budget", self.budget(plan)),
            ("plan", placement(plan)),
        ];
        lines.extend(memory(plan).map(|text| ("memory", text)));
        let generate = &plan.prediction.generate;
        lines.push(("generate", speed(generate)));
        let prompt = format!("{}, {} tokens", speed(&plan.prediction.prompt), PROMPT_TOKENS);
        lines.push(("prompt", prompt));
        lines.extend(hit_rates(plan, &self.hits_from()).map(|text| ("experts", text)));
        lines.extend(together_in_words(together).map(|text| ("together", text)));
        lines.extend(one_more(planned).map(|text| ("one more", text)));
        lines.extend(instead(planned).map(|text| ("instead", text)));
        lines.extend(generate.shown.uncertain_because.clone().map(|text| ("caution", text)));
        if self.estimated && plan.device == "cuda" {
            let text = "free VRAM, from the GPU's total memory; assumes that no other program uses the GPU";
            lines.push(("estimated", text.into()));
        }
        let rows: Vec<Vec<String>> =
            lines.into_iter().map(|(key, value)| vec![key.into(), value]).collect();
        output::table(&[Align::Right, Align::Left], &rows)
    }

    fn machine(&self, gpu: Option<&str>) -> String {
        let machine = &self.profile.machine;
        let gpu = gpu.map_or(String::new(), |gpu| format!(", {gpu}"));
        let of = match &self.args.profile {
            Some(path) => format!(" ({})", path.display()),
            None => String::new(),
        };
        format!("{}, {} processors{gpu}{of}", machine.cpu, machine.processors)
    }

    fn budget(&self, plan: &Plan) -> String {
        let whose = if self.request.ram_chosen_by_user { "" } else { ", as much as is free here" };
        let ram = format!("{} of RAM{whose}", size::format(self.request.ram_bytes));
        let vram = plan.vram.as_ref().map(|vram| {
            let whose = if vram.budget_chosen_by_user { "" } else { " (all)" };
            format!("{} of VRAM{whose}, ", size::format(vram.budget_bytes))
        });
        let context = format!("{} positions of context", self.request.context);
        format!("{}{ram}; {context}", vram.unwrap_or_default())
    }
}

fn of_model(model: &ModelInfo) -> String {
    let mut text = format!("{}, {} layers", size::format(model.weights_bytes), model.layers);
    if model.experts > 0 {
        let _ = write!(
            text,
            ", {} of {} experts for each token, {} each",
            model.experts_per_token,
            model.experts,
            size::format(model.bytes_per_expert)
        );
    }
    text
}

fn placement(plan: &Plan) -> String {
    match (&plan.slots, &plan.host) {
        (Some(slots), Some(host)) => format!(
            "the GPU computes; VRAM holds the dense weights and {} of {} experts; the others are copied from {}",
            slots.kept_slots(),
            slots.experts(),
            match host.fully_resident {
                true => "pinned RAM, which holds all experts".into(),
                false => format!(
                    "pinned RAM, which holds {} experts, or read from the disk",
                    host.kept_slots()
                ),
            }
        ),
        (None, Some(host)) if let Some(sub_layers) = &plan.sub_layers => {
            sub_layers_in_words(sub_layers, host)
        }
        (_, None) => "the GPU computes, and all weights are in its memory".into(),
        (None, Some(host)) => format!("the CPU computes; {}", in_ram(host, "all weights")),
    }
}

/// Describes the placement of a dense model that VRAM does not hold whole.
fn sub_layers_in_words(sub_layers: &SubLayerPlacement, host: &MemoryPlan) -> String {
    let of = |counts: &SubLayerCounts, all: usize| {
        format!("{} of {all} ({})", counts.sub_layers, size::format(counts.bytes))
    };
    let all = sub_layers.in_vram.sub_layers
        + sub_layers.streamed.sub_layers
        + sub_layers.on_cpu.sub_layers;
    let cpu = match sub_layers.on_cpu.sub_layers {
        0 => String::new(),
        _ => format!(
            "; of these the CPU computes {} itself when generating",
            of(&sub_layers.on_cpu, sub_layers.streamed.sub_layers + sub_layers.on_cpu.sub_layers)
        ),
    };
    format!(
        "the GPU computes; VRAM holds {} sub-layers, the others are streamed through {} of VRAM{cpu}; {}",
        of(&sub_layers.in_vram, all),
        size::format(sub_layers.ring_bytes),
        in_ram(host, "they")
    )
}

/// Describes the weights in RAM. `all` names the weights for the case that RAM holds all of them.
fn in_ram(host: &MemoryPlan, all: &str) -> String {
    if host.fully_resident {
        return format!("{all} are in RAM");
    }
    let (pinned, all) = (host.dense.pinned_blocks(), host.dense.pinned.len());
    let dense = match host.dense.all_pinned() {
        true => "RAM holds what every token needs".into(),
        false => format!("RAM holds {pinned} of the {all} blocks that every token needs"),
    };
    match host.experts() {
        0 => format!("{dense}; the rest is read from the disk for every token"),
        experts => format!(
            "{dense} and {} of {experts} experts; the rest is read from the disk as needed",
            host.kept_slots()
        ),
    }
}

fn memory(plan: &Plan) -> Option<String> {
    let vram = plan.vram.as_ref().map(|vram| {
        format!(
            "VRAM {}: weights {}, KV cache {}, activations {}, context {}",
            size::format(vram.total_bytes),
            size::format(vram.weights_bytes),
            size::format(vram.kv_cache_bytes),
            size::format(vram.activation_bytes),
            size::format(vram.context_bytes)
        )
    });
    let weights = plan
        .host
        .as_ref()
        .map(|host| format!("weights {}", size::format(host.arena_bytes + host.reserved_bytes)));
    let cache = plan.host_kv_cache_bytes;
    let cache = (cache > 0).then(|| format!("KV cache {}", size::format(cache)));
    let in_ram: Vec<String> = [weights, cache].into_iter().flatten().collect();
    let host = (!in_ram.is_empty()).then(|| format!("RAM: {}", in_ram.join(", ")));
    let parts: Vec<String> = [vram, host].into_iter().flatten().collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}

fn speed(speed: &Speed) -> String {
    let total: f64 = speed.costs.iter().map(|cost| cost.1).sum();
    let mut costs = speed.costs.clone();
    costs.sort_by(|a, b| b.1.total_cmp(&a.1));
    let shares = costs.iter().map(|&(cost, seconds)| {
        format!("{cost} {:.0} %", 100.0 * seconds / total.max(f64::MIN_POSITIVE))
    });
    let shares: Vec<String> = shares.take(3).collect();
    format!("{}; time goes to {}", rate_in_words(&speed.shown), shares.join(", "))
}

fn hit_rates(plan: &Plan, from: &str) -> Option<String> {
    let hits = plan.prediction.hit_rate.filter(|hits| *hits < 1.0)?;
    let place = if plan.device == "cuda" { "VRAM" } else { "RAM" };
    let on_cpu = match plan.prediction.cpu_experts_per_token {
        0.0 => String::new(),
        experts => format!(", the CPU computes {experts:.1} of the others"),
    };
    Some(format!(
        "{:.1} % of a token's experts are found in {place}{on_cpu}, {:.1} are read from the disk (by {from})",
        100.0 * hits,
        plan.prediction.disk_experts_per_token
    ))
}

/// Describes the best number of sequences that generate together.
fn together_in_words(together: &[Together]) -> Option<String> {
    let best = Together::best(together)?;
    Some(match best.sequences {
        1 => "one sequence at a time gives most tokens/s, if sequences are unrelated".into(),
        number => format!("{number} sequences give most: {} in all", rate_in_words(&best.shown)),
    })
}

/// Describes the gain from one more GiB of memory, or returns `None` where nothing is predicted.
fn one_more(planned: &Planned) -> Option<String> {
    let gain = |what: &str, gain: f64, then: Option<f64>| match (gain - 1.0, then) {
        (more, _) if more < 0.005 => format!("GiB of {what}: no faster"),
        (more, Some(then)) => {
            format!("GiB of {what}: {} tokens/s, {:+.0} %", tokens(then), 100.0 * more)
        }
        (more, None) => format!("GiB of {what}: {:+.0} %", 100.0 * more),
    };
    let shown = planned.one_more_gib.shown;
    let ram = gain("RAM", shown.ram_gain?, shown.ram_tokens_per_second);
    let vram = shown.vram_gain.map(|more| gain("VRAM", more, shown.vram_tokens_per_second));
    Some(vram.into_iter().chain([ram]).collect::<Vec<_>>().join("; "))
}

fn instead(planned: &Planned) -> Option<String> {
    if let Some(other) = &planned.other {
        let rate = rate_in_words(&other.prediction.generate.shown);
        return Some(format!("--device {}: {rate}", other.device));
    }
    planned.why_not_other.as_ref().map(|why| format!("no other device: {why}"))
}

/// Formats a rate as a number, a range, or the statement that there is no prediction.
pub fn rate_in_words(rate: &PredictedRate) -> String {
    match (rate.tokens_per_second, rate.range()) {
        (Some(rate), _) => format!("{} tokens/s", tokens(rate)),
        (None, Some((low, high))) => format!("{} to {} tokens/s", tokens(low), tokens(high)),
        (None, None) => "speed not predicted".into(),
    }
}

/// Formats a rate with three digits. A prediction is not more accurate than that.
fn tokens(per_second: f64) -> String {
    match per_second {
        rate if rate >= 100.0 => format!("{rate:.0}"),
        rate if rate >= 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.2}"),
    }
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
