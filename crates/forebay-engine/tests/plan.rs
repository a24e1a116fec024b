//! Tests properties that plans have on every machine. `accuracy.rs` compares predictions with measurements.

#[path = "support/planning.rs"]
mod planning;

use std::path::Path;

use forebay_engine::doctor::{BesideCpu, MachineProfile};
use forebay_engine::plan::{
    Cost, HitCurve, PlanError, PlanRequest, PlannedModel, Planner, Prediction, Rates, Speed, Work,
};
use forebay_engine::{CpuOffload, DeviceChoice, KvInVram, Session, SessionOptions};
use forebay_model::ModelError;
use forebay_stream::routing::Phase;
use forebay_stream::{ExpertIndex, LayerIndex, Lookups, PolicyKind, StreamError};
use planning::{GIB, h200_together, model, plan, profile, request};
use proptest::prelude::*;

/// Fewer threads make the CPU slower, both alone and in CPU offload.
#[test]
fn threads_are_counted() {
    let (profile, moe) = (h200_together(), model("qwen3moe-30b", None, "Q4_K_M"));
    let at = |device, threads| {
        let rates = Rates::new(&profile).unwrap();
        let mut request = request(device, Some(6 * GIB), 90 * GIB, 512);
        (request.threads, request.cpu_offload) = (threads, CpuOffload::Always);
        let hits = HitCurve::uniform();
        Planner::new(&moe, &rates, &hits).plan(&request).unwrap().plan.prediction
    };
    for device in [DeviceChoice::Cpu, DeviceChoice::Cuda(0)] {
        let rates = [Some(1), Some(4), None].map(|threads| at(device, threads));
        let generate = rates.each_ref().map(|found| found.generate.tokens_per_second);
        assert!(generate[0] < generate[1] && generate[1] < generate[2], "{generate:?}");
        if device == DeviceChoice::Cpu {
            let prompt = rates.each_ref().map(|found| found.prompt.tokens_per_second);
            assert!(prompt[0] < prompt[1] && prompt[1] < prompt[2], "{prompt:?}");
            assert_eq!(at(device, Some(16)), rates[2]);
        }
    }
}

/// A server plans the room of models with this.
#[test]
fn a_whole_model_takes_the_memory_that_is_planned() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    for name in ["qwen3_moe", "gemma3", "llama3_rope"] {
        let path = fixtures.join(name);
        let model = PlannedModel::open(&path).unwrap();
        for (sequences, kv_tokens) in [(1, None), (3, None), (3, Some(80))] {
            let context = Some(64);
            let options =
                SessionOptions { sequences, kv_tokens, context, ..SessionOptions::default() };
            let session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
            assert_eq!(session.memory(), model.whole(&options, None).unwrap(), "{name}");
        }
    }
}

/// Layers with a window are planned with the rows that they keep.
#[test]
fn windows_are_planned_as_they_are_kept() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/gguf/gpt_oss/gpt_oss-MXFP4_MOE.gguf");
    let model = PlannedModel::open(&path).unwrap();
    let bytes = |context| {
        let options = SessionOptions { context: Some(context), ..SessionOptions::default() };
        let work = Work::alone(512, 0);
        let request = PlanRequest::of_session(&options, context, work);
        let found = plan(&model, &profile("epyc-2core.json"), &request).unwrap();
        let session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
        assert_eq!(session.statistics().kv_cache_bytes, found.plan.host_kv_cache_bytes);
        found.plan.host_kv_cache_bytes
    };
    let [short, long, longer] = [300, 1000, 2000].map(bytes);
    // One of two layers has a window: 768 positions, and a block for its other end. Each has a block that is never written.
    let block = short / 40;
    assert_eq!(short, 2 * (19 + 1) * block);
    assert_eq!(long, (63 + 1 + 49 + 1) * block);
    assert_eq!(longer, (125 + 1 + 49 + 1) * block);
}

/// A session reserves exactly the memory that was planned for it.
#[test]
fn sessions_have_the_slots_that_were_planned() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales-moe-sticky-Q4_K_M.gguf");
    let model = PlannedModel::open(&path).unwrap();
    for (ram, policy) in
        [(8 << 20, "layer-lfu"), (14 << 20, "lru"), (20 << 20, "layer-lru"), (1 << 30, "lfu")]
    {
        let options = SessionOptions {
            ram_bytes: Some(ram),
            policy: policy.parse().unwrap(),
            context: Some(128),
            ..SessionOptions::default()
        };
        let work = Work::alone(512, 0);
        let request = PlanRequest::of_session(&options, 128, work);
        let found = plan(&model, &profile("epyc-2core.json"), &request).unwrap();
        let session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
        assert_eq!(session.plan(), found.plan.host.as_ref());
        assert_eq!(session.context(), request.context);
        assert_eq!(session.statistics().kv_cache_bytes, found.plan.host_kv_cache_bytes);
        // The prediction for the open session equals the planned one.
        let rates = Rates::new(&profile("epyc-2core.json")).unwrap();
        let predicted = session.predicted(&rates, &HitCurve::default(), work).unwrap();
        assert_eq!(predicted, found.plan.prediction);
    }
}

/// Models: a dense one, one with experts beyond VRAM, one with windows and one with a latent cache.
#[test]
fn a_context_that_does_not_fit_is_refused_with_the_largest_that_does() {
    let profile = profile("h200.json");
    for (arch, layers) in
        [("llama-8b", None), ("qwen3moe-30b", None), ("gemma3-4b", None), ("deepseek-v3", Some(4))]
    {
        let model = model(arch, layers, "Q4_K_M");
        let trained = model.info.context_trained;
        let with = |vram, context| {
            plan(&model, &profile, &request(DeviceChoice::Cuda(0), Some(vram), 64 * GIB, context))
        };
        let error = with(1 << 20, 4096).unwrap_err();
        assert!(error.to_string().contains("; give a larger budget of VRAM"), "{error}");
        let vram = error.needed_bytes().unwrap();
        let on_gpu = |context| with(vram, context);
        let error = on_gpu(trained).unwrap_err();
        let PlanError::Model(ModelError::VramTooSmall { largest_context: Some(most), .. }) = error
        else {
            panic!("{arch}: {error}")
        };
        assert!(error.to_string().contains(&format!("give a context of at most {most} or ")));
        assert!(
            most >= 4096 && on_gpu(most).is_ok() && on_gpu(most + 1).is_err(),
            "{arch}: {most}"
        );
        // The same applies to RAM, where the weights are placed first.
        let on_cpu = |context, free_bytes| {
            let request = request(DeviceChoice::Cpu, None, 64 * GIB, context);
            let ram_free_bytes = Some(free_bytes);
            plan(&model, &profile, &PlanRequest { ram_free_bytes, ..request })
        };
        let whole = on_cpu(trained, u64::MAX).unwrap().plan;
        let weights = whole.host.unwrap().arena_bytes;
        let all = weights + whole.host_kv_cache_bytes;
        assert!(on_cpu(trained, all).is_ok());
        let free = weights + whole.host_kv_cache_bytes / 2;
        let error = on_cpu(trained, free).unwrap_err();
        let PlanError::CacheDoesNotFit { largest_context: Some(most), .. } = error else {
            panic!("{arch}: {error}")
        };
        assert!(on_cpu(most, free).is_ok() && on_cpu(most + 1, free).is_err(), "{arch}: {most}");
        let error = on_cpu(trained, weights).unwrap_err();
        assert!(error.to_string().contains("give a smaller budget of RAM"), "{error}");
    }
}

/// The same models. Windows and latent caches have less to move.
#[test]
fn a_context_that_does_not_fit_has_a_place_in_ram() {
    let profile = profile("h200.json");
    for (arch, layers) in
        [("llama-8b", None), ("qwen3moe-30b", None), ("gemma3-4b", None), ("deepseek-v3", Some(4))]
    {
        let model = model(arch, layers, "Q4_K_M");
        let trained = model.info.context_trained;
        let short = |vram| request(DeviceChoice::Cuda(0), Some(vram), 64 * GIB, 4096);
        // All that every token needs fits with a short context.
        let needed = match model.info.experts {
            0 => plan(&model, &profile, &short(140 * GIB)).unwrap().plan.vram.unwrap().total_bytes,
            _ => plan(&model, &profile, &short(1 << 20)).unwrap_err().needed_bytes().unwrap(),
        };
        let vram = needed + GIB / 4;
        let with = |kv_in_vram, free_bytes| {
            let request = request(DeviceChoice::Cuda(0), Some(vram), 64 * GIB, trained);
            let ram_free_bytes = Some(free_bytes);
            plan(&model, &profile, &PlanRequest { kv_in_vram, ram_free_bytes, ..request })
        };
        let in_vram = |found: &forebay_engine::plan::Planned| found.plan.vram.clone().unwrap();
        assert!(with(KvInVram::All, u64::MAX).is_err(), "{arch}");
        let found = with(KvInVram::AsMuchAsFits, u64::MAX).unwrap();
        let used = in_vram(&found);
        assert!(used.total_bytes <= vram && used.kv_cache_in_ram_bytes > 0, "{arch}: {used:?}");
        assert_eq!(found.plan.host_kv_cache_bytes, used.kv_cache_in_ram_bytes);
        // A little more in VRAM does not fit, or weights leave for it.
        let more = used.kv_cache_bytes + (4 << 20);
        let is_worse = match with(KvInVram::Bytes(more), u64::MAX) {
            Err(_) => true,
            Ok(other) => other.plan.sub_layers.is_some(),
        };
        assert!(is_worse, "{arch}");
        // Less in VRAM leaves more to RAM.
        let error = with(KvInVram::Bytes(1), u64::MAX).unwrap_err();
        assert!(
            error.to_string().contains("give a larger share of VRAM for keys and values"),
            "{arch}: {error}"
        );
        let PlanError::Model(ModelError::KvVramTooSmall { bytes_min, .. }) = error else {
            panic!("{arch}: {error}")
        };
        let bytes = (bytes_min + used.kv_cache_bytes) / 2;
        let less = with(KvInVram::Bytes(bytes), u64::MAX).unwrap();
        // The windows of gemma3 and the copy of a layer are as much as fits.
        let is_smallest = arch == "gemma3-4b";
        assert_eq!(bytes_min == used.kv_cache_bytes, is_smallest, "{arch}");
        let [less, most] = [&less, &found].map(|found| found.plan.host_kv_cache_bytes);
        assert!(if is_smallest { less == most } else { less > most }, "{arch}");
        // RAM must have the room.
        let weights = found.plan.host.as_ref().map_or(0, |host| host.arena_bytes);
        let needed = weights + used.kv_cache_in_ram_bytes;
        assert!(with(KvInVram::AsMuchAsFits, needed).is_ok(), "{arch}");
        let error = with(KvInVram::AsMuchAsFits, needed - (1 << 20)).unwrap_err();
        assert!(matches!(error, PlanError::CacheDoesNotFit { .. }), "{arch}: {error}");
    }
}

#[test]
fn what_cannot_run_is_refused_with_what_would_do() {
    let (model, profile) = (model("qwen3moe-30b", None, "Q4_K_M"), profile("h200.json"));
    let needed = |error: PlanError| match error {
        PlanError::Model(ModelError::VramTooSmall { needed_bytes, .. }) => needed_bytes,
        PlanError::Stream(StreamError::BudgetTooSmall { needed_bytes, .. }) => needed_bytes,
        other => panic!("{other}"),
    };
    let on_gpu = |vram, ram| request(DeviceChoice::Cuda(0), Some(vram), ram, 4096);
    let vram = needed(plan(&model, &profile, &on_gpu(GIB, 64 * GIB)).unwrap_err());
    assert!(vram > GIB);
    let ram = needed(plan(&model, &profile, &on_gpu(vram, 1 << 20)).unwrap_err());
    let least = plan(&model, &profile, &on_gpu(vram, ram)).unwrap().plan;
    assert_eq!(least.slots.unwrap().kept_slots(), 0);
    assert!(plan(&model, &profile, &on_gpu(vram - 8192, ram)).is_err());
    assert!(plan(&model, &profile, &on_gpu(vram, ram - 4096)).is_err());
    // With the smallest budgets, the layers of a dense model pass through the GPU one by one.
    let dense = self::model("llama-70b", None, "Q4_K_M");
    let vram = needed(plan(&dense, &profile, &on_gpu(GIB, 64 * GIB)).unwrap_err());
    let ram = needed(plan(&dense, &profile, &on_gpu(vram, 1 << 20)).unwrap_err());
    let least = plan(&dense, &profile, &on_gpu(vram, ram)).unwrap().plan;
    assert_eq!(least.sub_layers.unwrap().in_vram.sub_layers, 0);
    assert!(least.host.unwrap().dense.pinned_blocks() == 0 && vram < 6 * GIB && ram < 2 * GIB);
    assert!(plan(&dense, &profile, &on_gpu(vram - 1, ram)).is_err());
    assert!(plan(&dense, &profile, &on_gpu(vram, ram - 4096)).is_err());
    let on_cpu = |ram| request(DeviceChoice::Cpu, None, ram, 4096);
    let ram = needed(plan(&model, &profile, &on_cpu(1 << 20)).unwrap_err());
    assert!(plan(&model, &profile, &on_cpu(ram)).is_ok());
    // If the planner may choose the device, the error names both.
    let neither = request(DeviceChoice::Auto, Some(GIB), 1 << 20, 4096);
    let text = plan(&model, &profile, &neither).unwrap_err().to_string();
    assert!(
        text.contains("on the GPU, the model needs") && text.contains(&ram.to_string()),
        "{text}"
    );
}

/// A typical user's machine.
#[derive(Clone, Copy, Debug)]
struct Machine {
    vram_gib: u64,
    ram_gib: u64,
    pcie: f64,
    disk: f64,
    cpu: f64,
    /// True if bus and CPU were measured at the same time. They share the memory's bandwidth, so both are slower than
    /// alone.
    together: bool,
}

impl Machine {
    /// Returns the desktop's profile with these rates, in GB/s.
    fn profile(&self) -> MachineProfile {
        let mut profile = profile("desktop.json");
        profile.read.bytes_per_second = 1e9 * self.disk;
        profile.read.in_place_bytes_per_second = 1e9 * self.disk;
        let faster = 1e9 * self.cpu / profile.memory_read_bytes_per_second;
        profile.memory_read_bytes_per_second *= faster;
        for kernel in &mut profile.kernels {
            kernel.bytes_per_second *= faster;
        }
        let gpu = profile.gpu.as_mut().unwrap();
        gpu.memory_bytes = self.vram_gib * GIB;
        for copy in &mut gpu.pinned_copies {
            copy.to_device_bytes_per_second *= self.pcie / 25.0;
        }
        gpu.beside_cpu = self.together.then_some(BesideCpu {
            copy_bytes_per_second: 0.8e9 * self.pcie,
            cpu_bytes_per_second: 0.7e9 * self.cpu,
        });
        profile
    }

    /// Returns tokens per second of generation with the device that the planner chooses; 0 if the model cannot run.
    fn best_rate(&self, model: &PlannedModel) -> f64 {
        let request = request(DeviceChoice::Auto, None, self.ram_gib * GIB, 4096);
        let planned = plan(model, &self.profile(), &request).ok();
        planned.map_or(0.0, |planned| planned.plan.prediction.generate.tokens_per_second)
    }

    /// Returns tokens per second: of generation with the GPU and with the CPU, then of prompts with the GPU and with the CPU. A value
    /// is 0 if the model cannot run.
    fn rates(&self, model: &PlannedModel) -> [f64; 4] {
        let of = |device| {
            let planned =
                plan(model, &self.profile(), &request(device, None, self.ram_gib * GIB, 4096));
            planned.ok().map(|planned| planned.plan.prediction)
        };
        let rate = |speed: Option<Speed>| speed.map_or(0.0, |speed| speed.tokens_per_second);
        let (gpu, cpu) = (of(DeviceChoice::Cuda(0)), of(DeviceChoice::Cpu));
        let generate = |p: &Option<Prediction>| rate(p.as_ref().map(|p| p.generate.clone()));
        let prompt = |p: &Option<Prediction>| rate(p.as_ref().map(|p| p.prompt.clone()));
        [generate(&gpu), generate(&cpu), prompt(&gpu), prompt(&cpu)]
    }
}

/// Checks that a machine with more of one resource is never predicted to be slower with a model.
fn more_is_never_slower(arch: &str) {
    let steps: [fn(&mut Machine, usize); 5] = [
        |machine, step| machine.vram_gib = [8, 10, 12, 16, 20, 24][step],
        |machine, step| machine.ram_gib = [16, 17, 24, 32, 48, 64][step],
        |machine, step| machine.pcie = [8.0, 10.0, 12.0, 16.0, 20.0, 25.0][step],
        |machine, step| machine.disk = [1.6, 2.0, 3.0, 4.0, 5.5, 7.0][step],
        |machine, step| machine.cpu = [30.0, 35.0, 40.0, 50.0, 65.0, 80.0][step],
    ];
    let model = model(arch, None, "Q4_K_M");
    for corner in 0..16_usize {
        let together = corner >= 8;
        // The other resources stay at their low or high end.
        let high = |bit: usize| 5 * (corner >> bit & 1);
        for (varied, vary) in steps.iter().enumerate() {
            let mut before: Option<([f64; 4], Machine)> = None;
            for step in 0..6 {
                let (vram_gib, ram_gib, pcie, disk, cpu) = (0, 0, 0.0, 0.0, 0.0);
                let mut machine = Machine { vram_gib, ram_gib, pcie, disk, cpu, together };
                for (other, set) in steps.iter().enumerate() {
                    set(&mut machine, high((other + varied) % 3));
                }
                vary(&mut machine, step);
                let rates = machine.rates(&model);
                if let Some((before, less)) = before {
                    let faster = before.iter().zip(&rates).all(|(a, b)| *b >= a * (1.0 - 1e-9));
                    assert!(faster, "{arch}: {less:?} {before:?}, {machine:?} {rates:?}");
                }
                // Planning for both devices takes as long as for each of them, so one step in six is checked.
                if step == (corner + varied) % 6 {
                    let best = machine.best_rate(&model);
                    assert!(best >= rates[0].max(rates[1]), "{best}: auto takes the better");
                }
                before = Some((rates, machine));
            }
        }
    }
}

#[test]
fn more_of_any_resource_is_never_slower_with_many_small_experts() {
    more_is_never_slower("qwen3moe-30b");
}

#[test]
fn more_of_any_resource_is_never_slower_with_few_large_experts() {
    more_is_never_slower("mixtral-8x7b");
}

#[test]
fn more_of_any_resource_is_never_slower_with_a_dense_model() {
    more_is_never_slower("llama-8b");
}

#[test]
fn more_of_any_resource_is_never_slower_with_a_large_dense_model() {
    more_is_never_slower("llama-70b");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(40) })]

    /// Also checks machines between the corners, and more of several resources at once.
    #[test]
    fn a_better_machine_is_never_slower(
        arch in prop::sample::select(vec!["qwen3moe-30b", "mixtral-8x7b", "llama-8b", "llama-70b"]),
        memory in (8..=24_u64, 16..=64_u64, 0..=16_u64, 0..=48_u64),
        rates in (8.0..=25.0, 1.6..=7.0, 30.0..=80.0),
        faster in (0.0..=17.0, 0.0..=5.4, 0.0..=50.0),
        together: bool,
    ) {
        let (vram_gib, ram_gib, more_vram, more_ram) = memory;
        let (pcie, disk, cpu) = rates;
        let less = Machine { vram_gib, ram_gib, pcie, disk, cpu, together };
        let more = Machine {
            vram_gib: (vram_gib + more_vram).min(24),
            ram_gib: (ram_gib + more_ram).min(64),
            pcie: f64::min(pcie + faster.0, 25.0),
            disk: f64::min(disk + faster.1, 7.0),
            cpu: f64::min(cpu + faster.2, 80.0),
            together,
        };
        let model = model(arch, None, "Q4_K_M");
        let (slow, fast) = (less.rates(&model), more.rates(&model));
        let (slow_best, fast_best) = (less.best_rate(&model), more.best_rate(&model));
        let pairs = slow.iter().zip(&fast).chain([(&slow_best, &fast_best)]);
        let right = pairs.into_iter().all(|(a, b)| *b >= a * (1.0 - 1e-9));
        prop_assert!(right, "{arch}: {less:?} {slow:?}, {more:?} {fast:?}");
    }
}

#[test]
fn placements_make_sense() {
    let at = |vram_gib, ram_gib, pcie, disk, cpu| {
        let together = false;
        Machine { vram_gib, ram_gib, pcie, disk, cpu, together }
    };
    let planned = |model: &PlannedModel, machine: Machine| {
        let request = request(DeviceChoice::Auto, None, machine.ram_gib * GIB, 4096);
        plan(model, &machine.profile(), &request).unwrap()
    };
    let (small, large) = (model("llama-8b", None, "Q4_K_M"), model("llama-70b", None, "Q4_K_M"));
    let experts = model("qwen3moe-30b", None, "Q4_K_M");
    // A model that fits is in VRAM on every card, and more memory does not make it faster.
    for vram in [8, 16, 24] {
        let found = planned(&small, at(vram, 16, 8.0, 1.6, 30.0));
        assert!(found.plan.device == "cuda" && found.plan.host.is_none());
        let now = found.plan.prediction.generate.tokens_per_second;
        assert_eq!(found.one_more_gib.ram_tokens_per_second, now);
    }
    assert!(planned(&experts, at(24, 16, 8.0, 1.6, 30.0)).plan.host.is_none());
    // Experts are in slots where PCIe is fast, and more VRAM makes generation faster.
    let found = planned(&experts, at(16, 64, 25.0, 7.0, 30.0));
    let slots = found.plan.slots.as_ref().unwrap();
    assert!(slots.kept_slots() * 2 > slots.experts());
    let now = found.plan.prediction.generate.tokens_per_second;
    assert!(found.plan.host.as_ref().unwrap().fully_resident);
    assert_eq!(found.one_more_gib.ram_tokens_per_second, now);
    let roomier = Machine { vram_gib: 17, ..at(16, 64, 25.0, 7.0, 30.0) };
    assert!(planned(&experts, roomier).plan.prediction.generate.tokens_per_second > 1.02 * now);
    // With large experts and a slow bus, the GPU is slower than a fast CPU.
    let few_large = model("mixtral-8x7b", None, "Q4_K_M");
    let found = planned(&few_large, at(8, 64, 8.0, 7.0, 80.0));
    assert_eq!((found.plan.device, found.other.map(|other| other.device)), ("cpu", Some("cuda")));
    // Dense weights beyond RAM are read from the disk for every token, and the plan warns about it.
    let found = planned(&large, at(24, 16, 25.0, 1.6, 80.0));
    assert_eq!(found.plan.prediction.generate.limit, Cost::Disk);
    assert!(found.plan.slow().unwrap().contains("from the disk"));
    assert_eq!(found.other.unwrap().device, "cpu");
    // The bus and the CPU share the weights that VRAM does not hold. More VRAM leaves less to both.
    let ample = Machine { ram_gib: 64, ..at(24, 16, 25.0, 1.6, 80.0) };
    let found_ample = planned(&large, ample);
    let sub_layers = found_ample.plan.sub_layers.unwrap();
    assert_eq!(
        sub_layers.in_vram.sub_layers
            + sub_layers.streamed.sub_layers
            + sub_layers.on_cpu.sub_layers,
        160
    );
    assert!(
        sub_layers.on_cpu.bytes > sub_layers.streamed.bytes && sub_layers.streamed.sub_layers > 0,
        "{sub_layers:?}"
    );
    let generate = &found_ample.plan.prediction.generate;
    assert_eq!((generate.limit, generate.disk_bytes), (Cost::Pcie, 0.0));
    let roomier = planned(&large, Machine { vram_gib: 28, ..ample });
    let of_roomier = roomier.plan.sub_layers.unwrap();
    assert!(of_roomier.in_vram.bytes > sub_layers.in_vram.bytes);
    // With a CPU that is too slow to be useful, all weights outside VRAM go over the bus.
    let slow = planned(&large, Machine { cpu: 0.3, ..ample });
    assert_eq!(slow.plan.sub_layers.unwrap().on_cpu.sub_layers, 0);
    assert_eq!(slow.plan.prediction.generate.limit, Cost::Pcie);
    assert!(roomier.plan.prediction.generate.seconds < 0.95 * generate.seconds);
    assert!(
        found.one_more_gib.ram_tokens_per_second > found.plan.prediction.generate.tokens_per_second
    );
}

/// Layers that use 204 to 252 of 256 experts in a turn. VRAM and RAM together have room for all experts, but neither has alone.
#[test]
fn prompts_read_from_the_disk_what_no_turn_before_used() {
    let model = model("qwen3.6-35b-a3b", Some(13), "Q4_K_M");
    let request = request(DeviceChoice::Cuda(0), Some(4 * GIB), 5 * GIB, 1024);
    let rates = Rates::new(&h200_together()).unwrap();
    let after_turns = |turns: &[u32]| {
        let mut lookups = Lookups::new(vec![(256, 1); 13]);
        for &first in turns {
            let mut turn = |phase, tokens, experts: &dyn Fn(u32) -> Vec<ExpertIndex>| {
                for layer in 0..13 {
                    lookups.push(phase, LayerIndex(layer), tokens, &experts(204 + 4 * layer));
                }
            };
            turn(Phase::Prompt, 512, &|used| (first..first + used).map(ExpertIndex).collect());
            for token in 0..100_u32 {
                let of = |place, used| ExpertIndex(first + (8 * token + place) % used);
                turn(Phase::Generate, 1, &|used| (0..8).map(|place| of(place, used)).collect());
            }
        }
        let hits = HitCurve::of_lookups(&lookups, 8 * 13, PolicyKind::default()).unwrap();
        let plan = Planner::new(&model, &rates, &hits).plan(&request).unwrap().plan;
        let (slots, host) = (plan.slots.unwrap(), plan.host.unwrap());
        assert!(slots.kept_slots() + host.kept_slots() > slots.experts());
        assert!(slots.kept_share() < 0.9 && !host.fully_resident);
        plan.prediction.prompt
    };
    let experts = |speed: &Speed| speed.disk_bytes / model.info.bytes_per_expert as f64;
    let same = after_turns(&[0, 0]);
    assert_eq!((same.disk_bytes, same.limit), (0.0, Cost::Pcie));
    assert!(same.costs.iter().all(|(cost, _)| *cost != Cost::Disk), "{same:?}");
    // The second turn uses 4 experts of each layer that the first has not used.
    let other = after_turns(&[0, 4]);
    assert!((experts(&other) - 4.0 * 13.0).abs() < 1e-3, "{other:?}");
    assert!(other.seconds > same.seconds);
    // With a first turn alone, some of the unused experts are expected.
    let first = experts(&after_turns(&[0]));
    assert!((1.0..(256.0 - 228.0) * 13.0 + 1e-3).contains(&first), "{first}");
}
