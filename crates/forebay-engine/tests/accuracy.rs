//! Compares predictions with measurements. There are two classes of measurements:
//!
//! - [`fitted`]: a constant or a part of the formulas was chosen by this measurement. The row says which. These rows
//!   show that one formula fits all of them, and nothing about other machines or models.
//! - [`held_out`]: no constant was chosen by this measurement. These rows show the accuracy of predictions. Do not
//!   change a constant for them: a row that decides about a constant becomes a fitted one.
//!
//! The errors of all rows are in `docs/design/plans.md`.

#[path = "support/planning.rs"]
mod planning;

use std::fs::File;
use std::path::Path;

use forebay_engine::plan::{HitCurve, PlanRequest, PlannedModel, Planner, Prediction, Rates, Work};
use forebay_engine::{CpuOffload, DeviceChoice};
use forebay_lab::synth::SynthOptions;
use forebay_stream::PolicyKind;
use forebay_stream::routing::read_any;
use planning::{GIB, gpu_alone, h200_together, model, model_of, plan, profile, request};

/// Largest error of a prediction, as a share of the measurement.
const BAR: f64 = 0.2;

/// Checks a measurement by which `constants` of the formulas were chosen.
#[track_caller]
fn fitted(constants: &[&str], what: &str, predicted: f64, measured: f64) {
    assert!(!constants.is_empty());
    within(BAR, &format!("fitted ({})", constants.join(", ")), what, predicted, measured);
}

/// Checks a measurement by which no constant was chosen.
#[track_caller]
fn held_out(what: &str, predicted: f64, measured: f64) {
    within(BAR, "held out", what, predicted, measured);
}

/// Checks a held-out measurement that the formulas miss by more than [`BAR`] and at most `bar`. A comment beside the
/// row gives the reason.
#[track_caller]
fn held_out_and_missed(bar: f64, what: &str, predicted: f64, measured: f64) {
    let error = (predicted / measured - 1.0).abs();
    assert!(error > BAR, "{what}: now within the usual bar, say so: {predicted:.1}, {measured}");
    within(bar, "held out, MISSED", what, predicted, measured);
}

#[track_caller]
fn within(bar: f64, class: &str, what: &str, predicted: f64, measured: f64) {
    let error = predicted / measured - 1.0;
    println!("| {class} | {what} | {predicted:.1} | {measured} | {:+.0} % |", 100.0 * error);
    assert!(error.abs() <= bar, "{what}: predicted {predicted:.1}, measured {measured}");
}

/// Measurements: `bench` on an H200 with experts in slots and the default hit curve, 2026-11-22. Rows have budgets,
/// slots kept and tokens/s. The model's own routing missed less in RAM than the curve predicts, so rows with little RAM
/// check the slots only.
#[test]
fn experts_in_slots() {
    let (model, profile) = (model("qwen3moe-30b", None, "Q4_K_M"), profile("h200.json"));
    let ample = 90 * GIB;
    let at = |vram, ram, in_vram: u64, in_ram| {
        let found = plan(&model, &profile, &gpu_alone(vram, ram, 512)).unwrap().plan;
        let what = format!("qwen3moe-30b, VRAM {} GiB, RAM {} GiB", vram / GIB, ram / GIB);
        let slots = found.slots.unwrap().kept_slots();
        assert_eq!(found.host.unwrap().kept_slots(), in_ram, "{what}");
        assert!(slots.abs_diff(in_vram) <= 8, "{what}: {slots} slots instead of {in_vram}");
        (what, found.prediction)
    };
    let (what, found) = at(8 * GIB, ample, 2347, 6144);
    fitted(&["TAIL_MISSES", "TAIL_POWER"], &what, found.generate.tokens_per_second, 230.0);
    fitted(&["DISTINCT_POWER"], &format!("{what}, prompt"), found.prompt.tokens_per_second, 3217.0);
    let (what, found) = at(4 * GIB, ample, 860, 6144);
    held_out(&what, found.generate.tokens_per_second, 101.8);
    fitted(&["DISTINCT_POWER"], &format!("{what}, prompt"), found.prompt.tokens_per_second, 2037.0);
    at(8 * GIB, 10 * GIB, 2347, 3709);
    at(8 * GIB, 4 * GIB, 2347, 1474);
    let request = request(DeviceChoice::Auto, None, ample, 512);
    let resident = plan(&model, &profile, &request).unwrap();
    assert!(resident.plan.slots.is_none() && resident.plan.device == "cuda");
    let generate = resident.plan.prediction.generate.tokens_per_second;
    fitted(&["GPU_EXPERT_LAYER_SECONDS"], "qwen3moe-30b, all in VRAM", generate, 422.0);
}

/// Measurements of models that an H200 holds whole (`bench/results/2026-11-22-h200-resident.md`,
/// `2026-11-22-h200-families.md`). The constants of a GPU's layers and prompts were fitted on an H100, except for the
/// constant of layers with experts.
#[test]
fn models_in_vram() {
    let rates = Rates::new(&profile("h200.json")).unwrap();
    let at = |model: &PlannedModel, depth: usize| {
        let work = Work::alone(512, depth);
        let request = request(DeviceChoice::Cuda(0), None, 90 * GIB, depth + 1024);
        let request = PlanRequest { work, ..request };
        let found = Planner::new(model, &rates, &HitCurve::default()).plan(&request).unwrap();
        found.plan.prediction
    };
    let llama = model("llama-8b", None, "Q4_K_M");
    held_out("llama-8b, prompt", at(&llama, 0).prompt.tokens_per_second, 9957.2);
    held_out("llama-8b", at(&llama, 0).generate.tokens_per_second, 476.6);
    held_out("llama-8b behind 16384", at(&llama, 16_384).generate.tokens_per_second, 360.3);
    let qwen = model("qwen3moe-30b", None, "Q4_K_M");
    held_out("qwen3moe-30b, prompt", at(&qwen, 0).prompt.tokens_per_second, 7345.4);
    held_out("qwen3moe-30b behind 16384", at(&qwen, 16_384).generate.tokens_per_second, 305.3);
    let gpt_oss = model("gpt-oss-20b", None, "MXFP4_MOE");
    held_out("gpt-oss-20b, prompt", at(&gpt_oss, 0).prompt.tokens_per_second, 10959.0);
    held_out("gpt-oss-20b", at(&gpt_oss, 0).generate.tokens_per_second, 523.1);
    let deepseek = model("deepseek-v2-lite", None, "Q4_K_M");
    // The formulas treat all matrix products of prompts as equally fast on the GPU. This model has more and smaller
    // products than the models that the rate was measured with: experts of width 1408 and attention in latent space.
    let prompt = at(&deepseek, 0).prompt.tokens_per_second;
    held_out_and_missed(0.3, "deepseek-v2-lite, prompt", prompt, 10693.0);
    let generate = at(&deepseek, 0).generate.tokens_per_second;
    fitted(&["GPU_KERNEL_SECONDS"], "deepseek-v2-lite", generate, 452.1);
}

/// Measurements of two more models with experts in slots, uniform random routing and the GPU alone
/// (`2026-11-22-h200-families.md`).
#[test]
fn families_in_slots() {
    let rates = Rates::new(&profile("h200.json")).unwrap();
    let hits = HitCurve::uniform();
    for (arch, quantisation, vram, measured) in
        [("gpt-oss-20b", "MXFP4_MOE", 8 * GIB, 73.5), ("deepseek-v2-lite", "Q4_K_M", 4 * GIB, 62.0)]
    {
        let model = model(arch, None, quantisation);
        let request = gpu_alone(vram, 90 * GIB, 640);
        let found = Planner::new(&model, &rates, &hits).plan(&request).unwrap().plan.prediction;
        let what = format!("{arch}, VRAM {} GiB, uniform", vram / GIB);
        held_out(&what, found.generate.tokens_per_second, measured);
    }
}

/// Checks a dense model of which a part is in VRAM: the placement, and that all memory is used. Measured with `bench
/// --vram 8GiB` on an H200, 2026-11-22, where bus and CPU together had these rates. The constants of weights that pass
/// through the ring were estimated before, from call times and from an H100.
#[test]
fn dense_models_beyond_vram() {
    let (model, profile) = (model("llama-70b", None, "Q4_K_M"), h200_together());
    for (ram, disk) in [(90 * GIB, false), (24 * GIB, true), (8 * GIB, true)] {
        let request = request(DeviceChoice::Cuda(0), Some(8 * GIB), ram, 640);
        let found = plan(&model, &profile, &request).unwrap().plan;
        let (sub_layers, host) = (found.sub_layers.unwrap(), found.host.unwrap());
        let generate = &found.prediction.generate;
        let vram = found.vram.unwrap();
        let unused = vram.budget_bytes - vram.total_bytes;
        assert!(unused < 512 << 20, "{unused} bytes of VRAM are for nothing");
        assert_eq!(generate.disk_bytes > 0.0, disk);
        if !disk {
            let prompt = found.prediction.prompt.tokens_per_second;
            held_out("llama-70b, VRAM 8 GiB, prompt", prompt, 785.2);
            held_out("llama-70b, VRAM 8 GiB", generate.tokens_per_second, 3.70);
        }
        if disk {
            let unused = ram - host.arena_bytes - host.reserved_bytes;
            assert!(unused < 512 << 20, "{unused} bytes of RAM are for nothing");
        }
        let outside = (sub_layers.streamed.bytes + sub_layers.on_cpu.bytes) as f64;
        assert!(
            sub_layers.on_cpu.bytes as f64 > 0.4 * outside,
            "the CPU takes a part: {sub_layers:?}"
        );
    }
}

/// Measurements: `bench --vram 8GiB` of the model with 6 experts for each token, with recorded and with uniform random
/// routing, on an H200, 2026-11-22. The disk gave 1.7 GB/s in that hour.
#[test]
fn routing_decides() {
    let options = SynthOptions { experts_used: Some(6), ..SynthOptions::default() };
    let (model, mut profile) = (model_of("qwen3moe-30b", &options), profile("h200.json"));
    (profile.read.bytes_per_second, profile.read.in_place_bytes_per_second) = (1.7e9, 1.7e9);
    let bring: &[&str] = &["LOOK_SECONDS", "BRING_SECONDS"];
    let tiers: &[&str] = &["BOTH_WAYS", "DISTINCT_IN_RAM"];
    for (what, by, hits, ram, measured) in [
        ("recorded", bring, HitCurve::default(), 90 * GIB, 207.8),
        ("uniform", bring, HitCurve::uniform(), 90 * GIB, 73.1),
        ("recorded, RAM 4 GiB", tiers, HitCurve::default(), 4 * GIB, 33.9),
    ] {
        let rates = Rates::new(&profile).unwrap();
        let request = gpu_alone(8 * GIB, ram, 512);
        let found = Planner::new(&model, &rates, &hits).plan(&request).unwrap().plan;
        let what = format!("qwen3moe-30b, 6 experts, VRAM 8 GiB, {what}");
        fitted(by, &what, found.prediction.generate.tokens_per_second, measured);
        assert_eq!(found.prediction.cpu_experts_per_token, 0.0);
    }
}

/// Measurements: prompts of `bench --vram 8GiB` with the model's own routing, on an H200, 2026-11-22. Of a token's 384
/// experts, 122 were missing in VRAM when it held 14 % of them, and 35 when it held 38 %. 5.2 were read from the disk
/// when VRAM and RAM held 60 %, and 0.9 when they held 94 %. The disk gave 1.7 GB/s in that hour. Tokens generated with 10 GiB of RAM
/// were measured again on 2026-11-28, when RAM had begun to keep copies: 0.8 experts of a token were read, at 1.6 GB/s.
#[test]
fn vram_and_ram_together_hold_part_of_the_experts() {
    let mut profile = profile("h200.json");
    (profile.read.bytes_per_second, profile.read.in_place_bytes_per_second) = (1.7e9, 1.7e9);
    let rates = Rates::new(&profile).unwrap();
    let hits = |missing: f64| 1.0 - missing / 384.0;
    let points = vec![
        (0.0, 0.0),
        (0.14, hits(122.0)),
        (0.382, hits(35.0)),
        (0.605, hits(5.2)),
        (0.944, hits(0.9)),
        (1.0, 1.0),
    ];
    let own = HitCurve::through(points, 8.0 / 128.0).unwrap();
    let model = model("qwen3moe-30b", None, "Q4_K_M");
    let touched: &[&str] = &["DISTINCT_POWER"];
    let read: &[&str] = &["DISTINCT_POWER", "USED_BY_A_TURN"];
    for (vram, ram, generate, by, prompt) in [
        (8 * GIB, 90 * GIB, 230.5, touched, 3240.0),
        (4 * GIB, 90 * GIB, 102.3, touched, 2045.0),
        (8 * GIB, 10 * GIB, 174.9, read, 1244.0),
        (8 * GIB, 4 * GIB, 69.0, read, 540.0),
    ] {
        let request = gpu_alone(vram, ram, 512);
        let found = Planner::new(&model, &rates, &own).plan(&request).unwrap().plan.prediction;
        let what =
            format!("qwen3moe-30b, VRAM {} GiB, RAM {} GiB, counted hits", vram / GIB, ram / GIB);
        held_out(&what, found.generate.tokens_per_second, generate);
        fitted(by, &format!("{what}, prompt"), found.prompt.tokens_per_second, prompt);
    }
    // The model with 6 experts for each token was measured with prompts only, so the default hit curve is used.
    let options = SynthOptions { experts_used: Some(6), ..SynthOptions::default() };
    let model = model_of("qwen3moe-30b", &options);
    let request = PlanRequest { work: Work::alone(512, 0), ..gpu_alone(8 * GIB, 90 * GIB, 2048) };
    let hits = HitCurve::default();
    let found = Planner::new(&model, &rates, &hits).plan(&request).unwrap().plan.prediction;
    let what = "qwen3moe-30b, 6 experts, VRAM 8 GiB, prompt of 512";
    held_out(what, found.prompt.tokens_per_second, 3075.8);
}

/// Measurements of the same setup with CPU offload of experts. `Auto` must use it only where it is faster. With uniform
/// random routing, the CPU computed 77 experts of a token, with recorded routing 10.
#[test]
fn the_cpu_computes_experts_where_it_pays() {
    let options = SynthOptions { experts_used: Some(6), ..SynthOptions::default() };
    let model = model_of("qwen3moe-30b", &options);
    let rates = Rates::new(&h200_together()).unwrap();
    let of = |hits: &HitCurve, cpu_offload| {
        let request = PlanRequest { cpu_offload, ..gpu_alone(8 * GIB, 90 * GIB, 512) };
        Planner::new(&model, &rates, hits).plan(&request).unwrap().plan.prediction
    };
    let rate = |prediction: &Prediction| prediction.generate.tokens_per_second;
    for (what, hits, measured, pays) in [
        ("uniform", HitCurve::uniform(), 106.2, true),
        ("recorded", HitCurve::default(), 219.9, false),
    ] {
        let [never, always, auto] = [CpuOffload::Never, CpuOffload::Always, CpuOffload::Auto]
            .map(|cpu_offload| of(&hits, cpu_offload));
        let row = format!("qwen3moe-30b, 6 experts, VRAM 8 GiB, CPU experts, {what}");
        fitted(&["CPU_START_SECONDS", "streaming_share"], &row, rate(&always), measured);
        assert!(always.cpu_experts_per_token > 0.0 && never.cpu_experts_per_token == 0.0);
        assert_eq!(auto, if pays { always } else { never }, "{what}");
    }
}

/// Measurements: `bench --device cpu` of three runs on the machine of the profile, 2026-11-22. Rows have RAM, the cache
/// hit rate for the share of experts kept, and tokens/s. The synthetic model with 6 layers routes more evenly from
/// token to token than the recorded one, so its own hit curve is used.
///
/// All of these measurements were known when the formulas were written. The held-out ones decided about no constant.
#[test]
fn on_the_cpu() {
    let profile = profile("epyc-2core.json");
    let rates = Rates::new(&profile).unwrap();
    let dense = model("llama-1b", None, "Q4_K_M");
    let moe = model("qwen3moe-30b", Some(6), "Q4_K_M");
    let points = vec![(0.0, 0.0), (0.168, 0.91), (0.41, 0.987), (1.0, 1.0)];
    let of_moe = HitCurve::through(points, 8.0 / 128.0).unwrap();
    const MIB: u64 = 1 << 20;
    let predicted = |model, ram| {
        let request = request(DeviceChoice::Cpu, None, ram, 512);
        let found = Planner::new(model, &rates, &of_moe).plan(&request).unwrap().plan.prediction;
        (found.generate.tokens_per_second, found.prompt.tokens_per_second)
    };
    let (generate, prompt) = predicted(&dense, 8 * GIB);
    fitted(&["CPU_LAYER_SECONDS"], "llama-1b on the CPU", generate, 46.0);
    held_out("llama-1b on the CPU, prompt", prompt, 386.6);
    let (generate, prompt) = predicted(&dense, 600 * MIB);
    held_out("llama-1b on the CPU, RAM 600 MiB", generate, 9.0);
    held_out("llama-1b on the CPU, RAM 600 MiB, prompt", prompt, 357.1);
    let (generate, prompt) = predicted(&dense, 400 * MIB);
    fitted(&["RING_SHARE"], "llama-1b on the CPU, RAM 400 MiB", generate, 4.87);
    held_out("llama-1b on the CPU, RAM 400 MiB, prompt", prompt, 351.9);
    let experts: &[&str] = &["CPU_EXPERT_TOKENS_HALF_FAST"];
    let streamed: &[&str] = &["CPU_STREAMED_SHARE"];
    let (generate, prompt) = predicted(&moe, 8 * GIB);
    fitted(&["CPU_LAYER_SECONDS"], "qwen3moe-30b, 6 layers, on the CPU", generate, 89.7);
    fitted(experts, "qwen3moe-30b, 6 layers, on the CPU, prompt", prompt, 758.0);
    let (generate, prompt) = predicted(&moe, 700 * MIB);
    fitted(streamed, "qwen3moe-30b, 6 layers, on the CPU, RAM 700 MiB", generate, 54.8);
    held_out("qwen3moe-30b, 6 layers, on the CPU, RAM 700 MiB, prompt", prompt, 702.0);
    let (generate, _) = predicted(&moe, 1200 * MIB);
    fitted(streamed, "qwen3moe-30b, 6 layers, on the CPU, RAM 1200 MiB", generate, 68.9);
}

/// Measurements: `bench --vram 8GiB` of deepseek-v3 with 8 layers and 32 GiB of RAM on an H200, 2026-11-22. Routing was
/// the model's own, recorded in the trace of this test, and uniform. The disk gave 2.6 GB/s, and 1.9 GB/s into memory
/// that nothing had been read into before. Measured after all constants had been chosen. An earlier run of the same
/// kind changed how prompts of a trace are counted, so the prompt is not a held-out row.
#[test]
fn large_experts_in_three_tiers() {
    let mut profile = h200_together();
    (profile.read.bytes_per_second, profile.read.in_place_bytes_per_second) = (2.62e9, 1.91e9);
    let rates = Rates::new(&profile).unwrap();
    let model = model("deepseek-v3", Some(8), "Q4_K_M");
    let trace =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/routing/deepseek-v3-8-layers.route");
    let trace = read_any(File::open(trace).unwrap()).unwrap();
    let own = HitCurve::of_trace(&trace, PolicyKind::default()).unwrap();
    for (what, hits, generate, prompt) in
        [("own routing", own, 96.5, Some(390.0)), ("uniform", HitCurve::uniform(), 10.02, None)]
    {
        let request = request(DeviceChoice::Cuda(0), Some(8 * GIB), 24 * GIB, 512);
        let found = Planner::new(&model, &rates, &hits).plan(&request).unwrap().plan;
        let what = format!("deepseek-v3, 8 layers, VRAM 8 GiB, RAM 24 GiB, {what}");
        held_out(&what, found.prediction.generate.tokens_per_second, generate);
        if let Some(prompt) = prompt {
            let prompt_rate = found.prediction.prompt.tokens_per_second;
            fitted(&["prompts of a trace"], &format!("{what}, prompt"), prompt_rate, prompt);
        }
        let slots = found.slots.unwrap().kept_slots();
        assert!(slots.abs_diff(137) <= 2, "{what}: {slots} slots");
    }
}

/// Measurements: `bench --vram 24GiB --ram 32GiB --prompt-tokens 512 --gen-tokens 512 --repeat 4` with the model's own routing on an
/// H200 with 16 cores, 2026-11-28, and its machine profile. Together, VRAM and RAM hold all experts. The prompt is the first of
/// four: in later ones, all experts that it needs are in memory.
#[test]
fn vram_and_ram_together_hold_all_experts() {
    let rates = Rates::new(&profile("h200-16core.json")).unwrap();
    let model = model("deepseek-v4-flash", Some(13), "MXFP4_MOE");
    let trace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/routing/deepseek-v4-flash-13-layers.route");
    let trace = read_any(File::open(trace).unwrap()).unwrap();
    let own = HitCurve::of_trace(&trace, PolicyKind::default()).unwrap();
    let request = request(DeviceChoice::Cuda(0), Some(24 * GIB), 32 * GIB, 4096);
    let found = Planner::new(&model, &rates, &own).plan(&request).unwrap().plan;
    let what = "deepseek-v4-flash, 13 layers, VRAM 24 GiB, RAM 32 GiB, own routing";
    held_out(what, found.prediction.generate.tokens_per_second, 153.2);
    held_out(&format!("{what}, prompt"), found.prediction.prompt.tokens_per_second, 487.6);
}
