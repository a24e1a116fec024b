//! A plan as text.

use std::fmt::Write as _;

use forebay_engine::ModelInfo;
use forebay_engine::plan::{Answered, Plan, Planned, PredictedRate, Speed, Together};
use forebay_model::{SubLayerCounts, SubLayerPlacement};
use forebay_stream::MemoryPlan;

use super::{Asked, PROMPT_TOKENS};
use crate::output::{self, Align};
use crate::size;

/// A plan and what it is for.
pub struct Told<'a> {
    pub asked: &'a Asked,
    pub model: &'a ModelInfo,
    pub answered: &'a Answered,
}

impl Told<'_> {
    pub fn text(&self) -> String {
        let Told { asked, model, answered } = self;
        let (planned, plan) = (&answered.planned, &answered.planned.plan);
        let mut lines = vec![
            ("model", of_model(model)),
            ("machine", asked.machine.in_words()),
            ("budget", self.budget(plan)),
            ("plan", placement(plan)),
        ];
        lines.extend(memory(plan).map(|text| ("memory", text)));
        match asked.machine.rates.is_measured() {
            true => lines.extend(self.speeds(planned)),
            false => lines
                .push(("speed", format!("not predicted: {}", asked.machine.why_not_measured()))),
        }
        if answered.free_vram_is_estimated && plan.device == "cuda" {
            let text = "free VRAM, from the GPU's total memory; assumes that no other program uses the GPU";
            lines.push(("estimated", text.into()));
        }
        let rows: Vec<Vec<String>> =
            lines.into_iter().map(|(key, value)| vec![key.into(), value]).collect();
        output::table(&[Align::Right, Align::Left], &rows)
    }

    /// Returns the lines about speed.
    fn speeds(&self, planned: &Planned) -> Vec<(&'static str, String)> {
        let plan = &planned.plan;
        let generate = &plan.prediction.generate;
        let prompt = format!("{}, {} tokens", speed(&plan.prediction.prompt), PROMPT_TOKENS);
        let mut lines = vec![("generate", speed(generate)), ("prompt", prompt)];
        let hits = hit_rates(plan, &self.asked.hits_from);
        lines.extend(hits.map(|text| ("experts", text)));
        lines.extend(together_in_words(&self.answered.together).map(|text| ("together", text)));
        lines.extend(one_more(planned).map(|text| ("one more", text)));
        lines.extend(instead(planned).map(|text| ("instead", text)));
        lines.extend(generate.shown.uncertain_because.clone().map(|text| ("caution", text)));
        lines
    }

    fn budget(&self, plan: &Plan) -> String {
        let request = &self.answered.request;
        let whose = if request.ram_chosen_by_user { "" } else { ", as much as is free here" };
        let ram = format!("{} of RAM{whose}", size::format(request.ram_bytes));
        let vram = plan.vram.as_ref().map(|vram| {
            let whose = if vram.budget_chosen_by_user { "" } else { " (all)" };
            format!("{} of VRAM{whose}, ", size::format(vram.budget_bytes))
        });
        let context = format!("{} positions of context", request.context);
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
pub fn tokens(per_second: f64) -> String {
    match per_second {
        rate if rate >= 100.0 => format!("{rate:.0}"),
        rate if rate >= 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.2}"),
    }
}
