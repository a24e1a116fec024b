//! Formats statistics for people. Rates stand beside the limit that they are measured against, and shares beside the
//! whole.

use std::fmt::Write as _;
use std::path::Path;

use forebay_engine::plan::PredictedRate;
use forebay_engine::{
    Checks, Generation, MtpStatistics, Session, SessionStatistics, SubLayerStatistics,
};
use forebay_model::{DeviceExperts, PassTimes, SubLayerCounts, VramUse};
use forebay_stream::{MemoryPlan, StreamStatistics};

use crate::commands::plan;
use crate::output;
use crate::size::{format as bytes, format_rate};

/// The work that the statistics describe.
#[derive(Clone, Copy)]
pub enum After<'a> {
    Answer(&'a Generation),
    Benchmark,
    /// Much of the time was spent waiting for the user, so shares of it mean nothing.
    Chat(&'a ChatFigures),
}

/// Figures of all answers of a chat so far.
#[derive(Clone, Copy, Default)]
pub struct ChatFigures {
    /// Number of prompt tokens that were processed. Tokens that were already in the cache do not count.
    pub prompt_tokens: usize,
    pub prompt_seconds: f64,
    /// Number of generated tokens without the first one of each answer, which belongs to the prompt.
    pub generated_tokens: usize,
    pub generate_seconds: f64,
    pub context_used: usize,
    pub turns_dropped: usize,
}

/// Returns what `--stats` prints: lines with a label each.
pub fn block(session: &Session, path: &Path, after: After<'_>) -> Vec<(&'static str, String)> {
    let statistics = session.statistics();
    let mut lines: Vec<(&str, String)> = vec![
        ("model", model(session, path)),
        ("budget", budget(&statistics)),
        ("device", device(&statistics)),
        ("loading", loading(&statistics)),
    ];
    if let After::Answer(generation) = after {
        lines.push(("prompt", prompt(generation)));
        let predicted = plan::predicted_answer(path, session, generation);
        lines.push(("answer", answer(generation, &predicted)));
    }
    if let After::Chat(figures) = after {
        lines.extend(chat(figures, session.context()));
    }
    if let Some(of) = &statistics.mtp {
        lines.push(("proposals", proposals(of)));
    }
    if let Some(sub_layers) = &statistics.device_sub_layers {
        lines.push(("layers", layers(sub_layers)));
        lines.push(("to GPU", sub_layers_to_gpu(sub_layers, statistics.stream.as_ref())));
        let times = &sub_layers.sub_layers;
        for (name, of) in [("tokens", &times.few_tokens), ("prompts", &times.many_tokens)] {
            if of.passes > 0 {
                lines.push((name, passes(of)));
            }
        }
    }
    if let Some(experts) = &statistics.device_experts {
        lines.push(("slots", slots(experts)));
        lines.push(("to GPU", to_gpu(experts, statistics.stream.as_ref())));
        lines.push(("CPU offload", cpu_offload(experts)));
        if experts.layers_served > 0 {
            lines.push(("fetched", fetched(experts)));
        }
    }
    if let (Some(stream), Some(plan)) = (&statistics.stream, session.plan()) {
        lines.push(("weight cache", weight_cache(&statistics, plan)));
        if stream.lookups > 0 {
            lines.push(("experts", experts(stream)));
            lines.push(("faults", faults(stream, plan)));
        }
        let shares = !matches!(after, After::Chat(_));
        lines.push(("streamed", streamed(stream, shares)));
        lines.push(("waited", waited(stream, shares)));
    }
    lines.push(("disk", reader(&statistics)));
    lines.push(("compute", compute(&statistics)));
    if let Some(used) = &statistics.vram {
        lines.push(("vram", vram(used)));
    }
    if let Some(peak) = statistics.peak_resident_bytes {
        lines.push(("memory", memory(&statistics, peak)));
    }
    lines
}

/// Says in one line what the model is, which device computes it, and where its weights are.
pub fn place(session: &Session, path: &Path) -> String {
    let statistics = session.statistics();
    let place = match (&statistics.device_experts, &statistics.device_sub_layers) {
        (Some(experts), _) => format!(
            "{} of {} experts in VRAM, the others in RAM or on disk",
            experts.tier.kept_slots, experts.tier.experts
        ),
        (None, Some(sub_layers)) => {
            let place = &sub_layers.sub_layers.placement;
            format!(
                "{} of weights in VRAM, {} streamed through it, {} computed by the CPU",
                bytes(place.in_vram.bytes),
                bytes(place.streamed.bytes),
                bytes(place.on_cpu.bytes)
            )
        }
        (None, None) if statistics.vram.is_some() => "all weights in VRAM".into(),
        (None, None) => match session.plan() {
            Some(plan) if !plan.fully_resident => format!(
                "{} of weights streamed from disk through {} of RAM",
                bytes(statistics.weights_bytes),
                bytes(plan.arena_bytes)
            ),
            _ => "all weights in RAM".into(),
        },
    };
    format!(
        "{}; on {}, {place}; context of {} tokens",
        model(session, path),
        statistics.device,
        session.context()
    )
}

fn model(session: &Session, path: &Path) -> String {
    let info = session.info();
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    let types: Vec<&str> = info.types.iter().map(|ty| ty.name).take(3).collect();
    let more = if info.types.len() > 3 { ", …" } else { "" };
    format!(
        "{name}: {}, {} of weights ({}{more})",
        info.architecture,
        bytes(info.weights_bytes),
        types.join(", ")
    )
}

fn device(statistics: &SessionStatistics) -> String {
    match &statistics.why_not_cuda {
        None => statistics.device.clone(),
        Some(why) => format!("{}, not cuda: {why}", statistics.device),
    }
}

/// Describes how long loading took, and on a GPU where the time went.
fn loading(statistics: &SessionStatistics) -> String {
    let ready = format!("ready after {}", seconds(statistics.load_seconds));
    let Some(start) = &statistics.gpu_start else { return ready };
    let weights = &start.weights;
    format!(
        "{ready}: GPU opened in {}; {} at {}/s, {} of it from the page cache, through {} of pinned memory; {} \
         modules in {} meanwhile",
        seconds(start.open_seconds),
        bytes(weights.bytes),
        format_rate(start.weights_bytes_per_second),
        bytes(weights.cached_bytes),
        bytes(start.pinned_bytes),
        start.modules,
        seconds(start.modules_seconds),
    )
}

/// Describes the use of device memory by forebay's own count and as reported by the driver.
fn vram(used: &VramUse) -> String {
    let driver = match used.driver_used_bytes {
        None => "the driver does not say how much is in use".into(),
        Some(driver) => format!("{} in use as reported by the driver", bytes(driver)),
    };
    let in_ram = match used.kv_cache_in_ram_bytes {
        0 => String::new(),
        count => format!(" with {} more in pinned RAM", bytes(count)),
    };
    format!(
        "{} by our count: weights {}, KV cache {}{in_ram}, activations {}, context and kernels {}; {driver}",
        bytes(used.total_bytes),
        bytes(used.weights_bytes),
        bytes(used.kv_cache_bytes),
        bytes(used.activation_bytes),
        bytes(used.context_bytes)
    )
}

fn budget(statistics: &SessionStatistics) -> String {
    let share = percent(statistics.budget_bytes as f64, statistics.weights_bytes as f64);
    let whose = match statistics.budget_chosen_by_user {
        true => format!("{share} of the model"),
        false => "chosen from the free memory".into(),
    };
    let kind = if statistics.vram.is_some() { "VRAM" } else { "RAM" };
    let ram = match &statistics.device_sub_layers {
        Some(sub_layers) => {
            format!("; {} of RAM for the other layers", bytes(sub_layers.ram_budget_bytes))
        }
        None => String::new(),
    };
    format!("{} of {kind}, {whose}{ram}", bytes(statistics.budget_bytes))
}

/// Describes where a dense model's layers are, and which device computes them.
fn layers(statistics: &SubLayerStatistics) -> String {
    let placement = &statistics.sub_layers.placement;
    let of = |counts: &SubLayerCounts| format!("{} ({})", counts.sub_layers, bytes(counts.bytes));
    let all =
        placement.in_vram.sub_layers + placement.streamed.sub_layers + placement.on_cpu.sub_layers;
    format!(
        "{all} sub-layers: VRAM holds {}, {} are streamed through {} of VRAM, the CPU computes {}",
        of(&placement.in_vram),
        of(&placement.streamed),
        bytes(placement.ring_bytes),
        of(&placement.on_cpu)
    )
}

/// Describes the weights that passed through VRAM, and the CPU's work meanwhile.
fn sub_layers_to_gpu(statistics: &SubLayerStatistics, stream: Option<&StreamStatistics>) -> String {
    let sub_layers = &statistics.sub_layers;
    let tokens = stream.map_or(0, |stream| stream.prompt_tokens + stream.generated_tokens).max(1);
    let mut text = format!(
        "{}, {} per token, from {} of pinned memory",
        bytes(sub_layers.bytes_copied),
        bytes(sub_layers.bytes_copied / tokens),
        bytes(sub_layers.pinned_bytes),
    );
    if let Some(huge) = sub_layers.huge_page_bytes {
        let share = percent(huge as f64, sub_layers.pinned_bytes as f64);
        let _ = write!(text, " ({share} in huge pages)");
    }
    if sub_layers.few_tokens.cpu_seconds > 0.0 {
        let rate = sub_layers.bytes_on_cpu as f64 / sub_layers.few_tokens.cpu_seconds;
        let planned = sub_layers.planned.map_or(rate, |rates| rates.cpu_bytes_per_second);
        let _ = write!(
            text,
            "; the CPU computed {} of weights at {}/s ({}/s expected)",
            bytes(sub_layers.bytes_on_cpu),
            format_rate(rate),
            format_rate(planned)
        );
    }
    text
}

/// Describes where the time of passes over all layers went.
fn passes(times: &PassTimes) -> String {
    let each = |of: f64| format!("{:.1} ms", 1e3 * of / times.passes as f64);
    let waits = times.copy_wait_seconds + times.gpu_wait_seconds + times.disk_wait_seconds;
    format!(
        "{} passes of {} each: CPU computing {}, waiting for copies {}, for the GPU {}, for the disk {}, other {}",
        times.passes,
        each(times.seconds),
        each(times.cpu_seconds),
        each(times.copy_wait_seconds),
        each(times.gpu_wait_seconds),
        each(times.disk_wait_seconds),
        each(times.seconds - times.cpu_seconds - waits)
    )
}

/// Describes the experts that the GPU keeps.
fn slots(experts: &DeviceExperts) -> String {
    let tier = &experts.tier;
    format!(
        "VRAM keeps {} of {} experts ({}), with {} more slots for experts in transit; {} hit rate: {} of {} lookups \
         found their expert in VRAM",
        tier.kept_slots,
        tier.experts,
        tier.policy,
        tier.transient_slots,
        percent(tier.hits as f64, tier.lookups as f64),
        tier.hits,
        tier.lookups
    )
}

/// Describes the experts that were copied to the GPU.
fn to_gpu(experts: &DeviceExperts, stream: Option<&StreamStatistics>) -> String {
    let tokens = stream.map_or(0, |stream| stream.prompt_tokens + stream.generated_tokens);
    let each = match tokens {
        0 => String::new(),
        tokens => format!(", {} per token", bytes(experts.bytes_copied / tokens)),
    };
    let mut text = format!(
        "{} experts, {}{each}, from {} of pinned memory",
        experts.experts_copied,
        bytes(experts.bytes_copied),
        bytes(experts.pinned_bytes)
    );
    if experts.experts_returned > 0 {
        let (count, returned) = (experts.experts_returned, bytes(experts.bytes_returned));
        let _ = write!(text, "; {count} evicted experts ({returned}) moved back to RAM");
    }
    text
}

/// Describes CPU offload: if the CPU computes some of the experts that are missing in VRAM, and why.
fn cpu_offload(experts: &DeviceExperts) -> String {
    let Some(cpu_offload) = &experts.cpu_offload else {
        return "off: the GPU computes all experts, and output is bit-identical to a fully resident run".into();
    };
    let micros = |seconds: f64| seconds * 1e6;
    let (split, saved) = (&cpu_offload.rates.split, micros(cpu_offload.saved_seconds_per_layer));
    let state = match (cpu_offload.is_on, cpu_offload.always) {
        (true, true) => "on, as asked",
        (true, false) => "on",
        (false, _) => "off",
    };
    let mut text = String::new();
    if !cpu_offload.always || cpu_offload.counted {
        let counted = if cpu_offload.counted { "" } else { " expected to be" };
        let is = if cpu_offload.is_on { "is" } else { "would be" };
        let than = if saved < 0.0 { "slower" } else { "faster" };
        let _ = write!(
            text,
            ": {:.1} experts of a layer are{counted} missing in VRAM, and with the CPU a layer {is} {:.0} us {than}",
            cpu_offload.misses_per_layer,
            saved.abs()
        );
    }
    let from =
        if cpu_offload.from_profile { "by the machine profile" } else { "measured at the start" };
    let _ = write!(
        text,
        "; the CPU computed {} experts ({:.0} us each; a copy to VRAM takes {:.0} us; {from})",
        experts.experts_on_cpu,
        micros(split.cpu_seconds),
        micros(split.copy_seconds)
    );
    format!("{state}{text}")
}

/// Describes the tokens whose CUDA graph fetches experts by itself.
fn fetched(experts: &DeviceExperts) -> String {
    let layers = experts.layers_served as f64;
    let micros = |seconds: f64| seconds / layers * 1e6;
    let given_up = match experts.tokens_given_up {
        0 => String::new(),
        tokens => {
            format!("; tokens computed layer by layer, because the GPU gave up waiting: {tokens}")
        }
    };
    format!(
        "{:.0} % of {} layers found all their experts in VRAM; on average a layer waited {:.0} us for the host to \
         locate the others, and copied for {:.0} us{given_up}",
        100.0 * experts.layers_resident as f64 / layers,
        experts.layers_served,
        micros(experts.answer_wait_seconds),
        micros(experts.copy_seconds)
    )
}

fn weight_cache(statistics: &SessionStatistics, plan: &MemoryPlan) -> String {
    if plan.fully_resident {
        let what = match (&statistics.device_experts, &statistics.device_sub_layers) {
            (Some(_), _) => "all experts stay",
            (None, Some(_)) => "all that VRAM does not hold stays",
            (None, None) => "the whole model stays",
        };
        return format!("{} reserved; {what} in it", bytes(plan.arena_bytes));
    }
    let mut kept = Vec::new();
    match plan.dense.all_pinned() {
        true if plan.dense.pinned.is_empty() => {}
        true => kept.push("all layers' dense parts".to_string()),
        false => {
            let (pinned, all) = (plan.dense.pinned_blocks(), plan.dense.pinned.len());
            kept.push(format!("{pinned} of {all} dense blocks"));
        }
    }
    if plan.experts() > 0 {
        kept.push(format!("{} of {} experts", plan.kept_slots(), plan.experts()));
    }
    let kept = kept.join(" and ");
    let policy =
        if plan.experts() > 0 { format!(" ({})", statistics.policy) } else { String::new() };
    format!("{} reserved; keeps {kept}{policy}", bytes(plan.arena_bytes))
}

fn prompt(generation: &Generation) -> String {
    format!(
        "{} in {}, {:.1} tokens/s",
        output::counted(generation.prompt_tokens, "token"),
        seconds(generation.prompt_seconds),
        generation.prompt_tokens_per_second()
    )
}

fn chat(figures: &ChatFigures, context: usize) -> [(&'static str, String); 3] {
    let part = |tokens: usize, time: f64| {
        let rate = if time > 0.0 { tokens as f64 / time } else { 0.0 };
        let tokens = output::counted(tokens, "token");
        format!("{tokens} in {}, {rate:.1} tokens/s", seconds(time))
    };
    let left = match figures.turns_dropped {
        0 => String::new(),
        turns => format!(
            "; {} dropped because it was full",
            if turns == 1 { "1 old turn was".into() } else { format!("{turns} old turns were") }
        ),
    };
    [
        ("prompts", part(figures.prompt_tokens, figures.prompt_seconds)),
        ("answers", part(figures.generated_tokens, figures.generate_seconds)),
        ("context", format!("{} of {context} tokens used{left}", figures.context_used)),
    ]
}

fn answer(generation: &Generation, predicted: &PredictedRate) -> String {
    let rate = match (predicted.tokens_per_second, predicted.range()) {
        (Some(rate), _) => Some(format!("{rate:.1}")),
        (None, range) => range.map(|(low, high)| format!("{low:.1} to {high:.1}")),
    };
    let predicted = rate.map(|rate| format!(" ({rate} predicted by the machine profile)"));
    format!(
        "{} in {}, {:.1} tokens/s{}",
        output::counted(generation.tokens.len(), "token"),
        seconds(generation.generate_seconds),
        generation.generate_tokens_per_second(),
        predicted.unwrap_or_default()
    )
}

/// Describes what became of the proposals of the predicting layer.
fn proposals(of: &MtpStatistics) -> String {
    format!(
        "{} of {} accepted ({}); {} passes of {:.2} rows for {} tokens",
        of.accepted,
        of.proposals,
        percent(of.accepted as f64, of.proposals as f64),
        of.passes,
        of.rows as f64 / of.passes.max(1) as f64,
        of.passes + of.accepted,
    )
}

fn experts(stream: &StreamStatistics) -> String {
    format!(
        "{} hit rate: {} of {} lookups found their expert in RAM",
        percent(stream.hits as f64, stream.lookups as f64),
        stream.hits,
        stream.lookups
    )
}

fn faults(stream: &StreamStatistics, plan: &MemoryPlan) -> String {
    let faulted = &stream.faulted_experts_per_token;
    let mut text = match (faulted.all, faulted.steady) {
        (None, _) => "only prompts so far".to_string(),
        (Some(all), None) => format!("{all:.1} experts per token"),
        (Some(all), Some(steady)) => {
            format!("{all:.1} experts per token, {steady:.1} after warm-up")
        }
    };
    let largest = plan.experts_per_layer.iter().max().copied().unwrap_or(0);
    let _ =
        write!(text, "; at most {} of {largest} kept in a layer", stream.max_resident_per_layer);
    text
}

fn streamed(stream: &StreamStatistics, shares: bool) -> String {
    let io = &stream.io;
    let mut text = format!("{} from disk", bytes(stream.bytes_read));
    if io.busy_seconds > 0.0 {
        let rate = format_rate(io.bytes_read as f64 / io.busy_seconds);
        let _ = write!(text, " at {rate}/s while reading");
    }
    if shares {
        let _ = write!(text, "; the disk was busy {} of the time", percent(io.busy_fraction, 1.0));
    }
    if io.retries > 0 {
        let _ = write!(text, "; {} retries", io.retries);
    }
    text
}

fn waited(stream: &StreamStatistics, shares: bool) -> String {
    let waited = stream.wait_seconds;
    let elapsed = stream.io.elapsed_seconds;
    let mut text = format!("{} for weights", seconds(waited));
    if shares {
        let _ = write!(text, ", {} of {}", percent(waited, elapsed), seconds(elapsed));
    }
    text
}

/// Describes the path that the bytes took.
fn reader(statistics: &SessionStatistics) -> String {
    let engine = &statistics.io_engine;
    let direct = if engine.direct { "O_DIRECT" } else { "through the page cache" };
    let registered = if engine.registered_buffers { ", registered buffers" } else { "" };
    let why = match engine.why.as_str() {
        "" => String::new(),
        why => format!(" ({why})"),
    };
    let checks = match statistics.checksums {
        Checks::None => "",
        Checks::On => "; every read verified against its checksum",
        Checks::Off => "; checksums not verified (--no-verify)",
    };
    format!("{}, {direct}{registered}{why}{checks}", engine.name)
}

fn compute(statistics: &SessionStatistics) -> String {
    statistics.compute.clone()
}

fn memory(statistics: &SessionStatistics, peak: u64) -> String {
    if statistics.vram.is_some() {
        return format!("{} of RAM at most", bytes(peak));
    }
    format!(
        "{} of RAM at most; of it weights within {}, KV cache {}",
        bytes(peak),
        bytes(statistics.budget_bytes),
        bytes(statistics.kv_cache_bytes)
    )
}

fn percent(part: f64, whole: f64) -> String {
    if whole <= 0.0 {
        return "0 %".into();
    }
    let percent = 100.0 * part / whole;
    match percent < 9.95 || (percent > 99.0 && percent < 100.0) {
        true => format!("{percent:.1} %"),
        false => format!("{percent:.0} %"),
    }
}

fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 60.0 => format!("{} min {:.0} s", (s / 60.0).floor(), s % 60.0),
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.0} ms", s * 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_read_well() {
        assert_eq!(percent(0.0, 0.0), "0 %");
        assert_eq!(percent(1.0, 30.0), "3.3 %");
        assert_eq!(percent(1.0, 3.0), "33 %");
        assert_eq!(percent(999.0, 1000.0), "99.9 %");
        assert_eq!(percent(1.0, 1.0), "100 %");
        assert_eq!(seconds(0.0123), "12 ms");
        assert_eq!(seconds(1.234), "1.23 s");
        assert_eq!(seconds(75.0), "1 min 15 s");
    }
}
