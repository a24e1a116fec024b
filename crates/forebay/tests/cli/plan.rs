//! Tests `forebay plan`, and how `run` and `bench` use a machine profile.

use std::path::Path;
use std::process::Command;

use forebay_engine::doctor::{MachineIdentity, MachineProfile, ProfileQuality, QualityState};
use forebay_lab::synth::{SynthOptions, hollow};

use crate::harness::{forebay, smallest_ram, words, workspace};

fn profile(name: &str) -> String {
    let folder = workspace().join("crates/forebay-engine/tests/profiles");
    folder.join(name).to_str().expect("UTF-8").to_string()
}

fn demo() -> String {
    crate::harness::demo()
}

/// Makes a model that is large enough for predictions and small enough for tests: a file of the right shape, full of
/// zeros.
fn hollow_model(folder: &Path) -> String {
    let path = folder.join("model.gguf");
    let options = SynthOptions {
        quantisation: Some("Q4_K_M".into()),
        layers: Some(2),
        ..SynthOptions::default()
    };
    hollow("qwen3moe-30b", &path, &options).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Writes the profile `name` with another quality: `state`, and the factor by which its rates may be wrong.
fn profile_of_quality(folder: &Path, name: &str, quality: Option<(QualityState, f64)>) -> String {
    let text = std::fs::read_to_string(profile(name)).unwrap();
    let mut profile = MachineProfile::parse(&text).unwrap();
    profile.quality = quality.map(|(state, spread)| ProfileQuality {
        state,
        reasons: vec!["other programs used the processors 40 % of the time".into()],
        spread,
        only_disk: false,
    });
    let path = folder.join("profile.json");
    std::fs::write(&path, serde_json::to_string(&profile).unwrap()).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn a_plan_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let model = hollow_model(folder.path());
    let line = format!("plan {model} --profile {} --ram 8GiB --vram 8GiB", profile("h200.json"));
    let text = forebay(&words(&line)).ok().stdout;
    for part in [
        "NVIDIA H200",
        "the GPU computes, and all weights are in its memory",
        "tokens/s; time goes to ",
        "GiB of VRAM: no faster",
        "32 sequences give most: ",
        "--device cpu: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("caution"), "{text}");
    let line =
        format!("plan {} --profile {} --ram 20MiB --device cpu", demo(), profile("h200.json"));
    let text = forebay(&words(&line)).ok().stdout;
    assert!(text.contains("RAM holds what every token needs and"), "{text}");
    assert!(text.contains("of a token's experts are found in RAM"), "{text}");
}

/// The demo's weights fit in a processor's caches, and fixed costs take most of a token's time, so its speed is not
/// predicted.
#[test]
fn a_tiny_model_has_no_prediction() {
    let line = format!("plan {} --profile {} --device cpu", demo(), profile("epyc-2core.json"));
    let text = forebay(&words(&line)).ok().stdout;
    assert!(text.contains("generate  speed not predicted; time goes to CPU"), "{text}");
    assert!(text.contains("caution  the model is too small to predict"), "{text}");
    assert!(!text.contains("tokens/s") && !text.contains("one more"), "{text}");
    let plan = forebay(&words(&format!("{line} --json"))).json();
    let generate = &plan["plan"]["prediction"]["generate"];
    for name in ["tokens_per_second", "low_tokens_per_second", "high_tokens_per_second"] {
        assert!(generate[name].is_null() && generate.get(name).is_some(), "{generate}");
    }
    assert!(generate["uncertain_because"].as_str().unwrap().contains("too small"), "{generate}");
    assert!(plan["one_more_gib"]["ram_tokens_per_second"].is_null());
}

#[test]
fn a_busy_or_unknown_profile_gives_a_range_or_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let model = hollow_model(folder.path());
    let planned = |quality| {
        let profile = profile_of_quality(folder.path(), "epyc-2core.json", quality);
        let line = format!("plan {model} --profile {profile} --ram 8GiB --device cpu");
        let json = forebay(&words(&format!("{line} --json"))).json();
        (forebay(&words(&line)).ok().stdout, json["plan"]["prediction"]["generate"].clone())
    };
    let (_, good) = planned(Some((QualityState::Good, 1.0)));
    let rate = good["tokens_per_second"].as_f64().unwrap();
    assert!(good["uncertain_because"].is_null());
    for (quality, said) in [
        (
            Some((QualityState::Busy, 1.3)),
            "the machine was busy when it was measured: run forebay doctor again when it is idle\n",
        ),
        (Some((QualityState::Unstable, 1.3)), "readings of this machine disagreed: run"),
        (None, "the machine profile is of an older forebay"),
    ] {
        let (text, generate) = planned(quality);
        assert!(generate["tokens_per_second"].is_null(), "{generate}");
        let (low, high) = (&generate["low_tokens_per_second"], &generate["high_tokens_per_second"]);
        let (low, high) = (low.as_f64().unwrap(), high.as_f64().unwrap());
        assert!(low < 0.7 * rate && high > 1.5 * rate && high / low <= 5.0, "{generate}");
        let line = text.lines().find(|line| line.contains("generate")).unwrap();
        assert!(line.contains(" to ") && line.contains(" tokens/s; time"), "{line}");
        assert!(text.contains(&format!("caution  {said}")), "{text}");
    }
    let (text, generate) = planned(Some((QualityState::Busy, 3.0)));
    assert!(text.contains("generate  speed not predicted"), "{text}");
    assert!(generate["low_tokens_per_second"].is_null(), "{generate}");
}

#[test]
fn a_plan_as_a_document() {
    let ram = smallest_ram(&demo(), 128);
    let line = format!(
        "plan {} --profile {} --ram {ram}B --device cpu --ctx 128 --json",
        demo(),
        profile("h200.json")
    );
    let plan = forebay(&words(&line)).json();
    assert_eq!((&plan["plan"]["device"], &plan["context"]), (&"cpu".into(), &128.into()));
    assert_eq!(plan["plan"]["prediction"]["generate"]["limit"], "disk");
    // The demo's speed is not predicted, so no number of sequences is the best.
    assert!(plan["best_sequences"].is_null());
    assert_eq!(plan["together"][1]["sequences"], 2);
    // The plan has the same slots as a session.
    let line = format!(
        "bench {} --ram {ram}B --device cpu --ctx 128 --prompt-tokens 4 --gen-tokens 4 --repeat 1 --json",
        demo()
    );
    let bench = forebay(&words(&line)).json();
    assert_eq!(plan["plan"]["host"], bench["plan"]);
}

#[test]
fn what_cannot_be_planned() {
    let line = format!("plan {} --profile {} --device cpu --ram 1B", demo(), profile("h200.json"));
    assert!(forebay(&words(&line)).failed(1).contains("the smallest that works is"));
    let line = format!("plan {} --profile {} --device cuda", demo(), profile("epyc-2core.json"));
    assert!(forebay(&words(&line)).failed(1).contains("the machine profile has no GPU"));
    let line = format!("plan {} --profile {}", demo(), demo());
    forebay(&words(&line)).failed(1);
    let line = format!("plan {} --profile {} --ctx 100000000", demo(), profile("h200.json"));
    assert!(forebay(&words(&line)).failed(2).contains("was trained for"));
}

#[test]
fn recorded_routing_replaces_the_usual_hits() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("demo.routing");
    let trace = trace.to_str().unwrap();
    let line = format!(
        "bench {} --device cpu --prompt-tokens 0 --gen-tokens 24 --repeat 1 --trace-routing {trace}",
        demo()
    );
    forebay(&words(&line)).ok();
    let hits = |more: &str| {
        let line = format!(
            "plan {} --profile {} --device cpu --ram 14MiB --json{more}",
            demo(),
            profile("h200.json")
        );
        forebay(&words(&line)).json()["plan"]["prediction"]["hit_rate"].as_f64().unwrap()
    };
    let (usual, recorded) = (hits(""), hits(&format!(" --routing {trace}")));
    assert!(recorded > 0.0 && recorded < 1.0 && (recorded - usual).abs() > 0.001);
}

/// Saves a profile of this machine and of the disk that `model` is on in its own configuration folder.
pub fn saved_profile(
    folder: &Path,
    model: &str,
    faster: f64,
    quality: Option<(QualityState, f64)>,
) {
    let here = MachineIdentity::here(Path::new(model).parent().unwrap()).unwrap();
    let text = profile_of_quality(folder, "epyc-2core.json", quality);
    let mut profile = MachineProfile::parse(&std::fs::read_to_string(text).unwrap()).unwrap();
    profile.machine = here;
    profile.read.bytes_per_second *= faster;
    profile.kernels.iter_mut().for_each(|kernel| kernel.bytes_per_second *= faster);
    std::fs::create_dir_all(folder.join("forebay")).unwrap();
    let path = folder.join("forebay/machine.json");
    std::fs::write(path, serde_json::to_string(&profile).unwrap()).unwrap();
}

/// Runs the binary with a configuration folder. Returns its standard output and standard error.
fn configured(folder: &Path, line: &str) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(words(line)).env("XDG_CONFIG_HOME", folder).env_remove("FOREBAY_LOG");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn run_and_bench_know_the_prediction() {
    let folder = tempfile::tempdir().unwrap();
    let model = hollow_model(folder.path());
    let with_profile = |line: &str| configured(folder.path(), line);
    let common = format!("{model} --device cpu --ctx 64");
    let bench = format!("bench {common} --prompt-tokens 2 --gen-tokens 2 --repeat 1 --json");
    let predicted = |text: &str| {
        let document: serde_json::Value = serde_json::from_str(text).unwrap();
        document["generate"].clone()
    };
    let without = predicted(&with_profile(&bench).0);
    assert!(without["tokens_per_second_predicted"].is_null(), "there is no profile yet");
    let why = without["predicted"]["uncertain_because"].as_str().unwrap();
    assert_eq!(why, "no machine profile: run forebay doctor");
    let good = Some((QualityState::Good, 1.0));
    saved_profile(folder.path(), &model, 1.0, good);
    let (document, errors) = with_profile(&bench);
    let rate = predicted(&document)["tokens_per_second_predicted"].as_f64().unwrap();
    assert!(rate > 10.0 && !errors.contains("warning"), "{rate} {errors}");
    let table = with_profile(&bench.replace(" --json", "")).0;
    assert!(table.lines().next().unwrap().ends_with("predicted"), "{table}");
    // This profile does not say whether the machine was idle.
    saved_profile(folder.path(), &model, 1.0, None);
    let generate = predicted(&with_profile(&bench).0);
    assert!(generate["tokens_per_second_predicted"].is_null(), "{generate}");
    assert!(generate["predicted"]["low_tokens_per_second"].as_f64().unwrap() < rate);
    let (table, errors) = with_profile(&bench.replace(" --json", ""));
    assert!(table.lines().nth(2).unwrap().contains(" to "), "{table}");
    assert!(errors.contains("prediction: the machine profile is of an older forebay"), "{errors}");
    // This machine is so slow that the user is warned.
    saved_profile(folder.path(), &model, 1e-3, good);
    let errors = with_profile(&bench).1;
    assert!(errors.contains("warning: generating will be slow, "), "{errors}");
    assert!(errors.contains("the CPU is the bottleneck"), "{errors}");
}

/// The model's disk decides which profile is used.
#[test]
fn every_disk_has_a_profile() {
    let folder = tempfile::tempdir().unwrap();
    let model = hollow_model(folder.path());
    let line = format!("plan {model} --device cpu --ram 8GiB --json");
    let rate = || {
        let plan = configured(folder.path(), &line).0;
        let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
        let generate = &plan["plan"]["prediction"]["generate"];
        (generate["tokens_per_second"].as_f64(), plan["not_predicted_because"].clone())
    };
    let good = Some((QualityState::Good, 1.0));
    saved_profile(folder.path(), &model, 1.0, good);
    let here = folder.path().join("forebay/machine.json");
    let (expected, why) = rate();
    assert!(expected.is_some() && why.is_null());
    // The same machine with another disk, and another machine.
    let text = std::fs::read_to_string(&here).unwrap();
    let mut other = MachineProfile::parse(&text).unwrap();
    other.machine.device += 1;
    other.kernels.iter_mut().for_each(|kernel| kernel.bytes_per_second /= 2.0);
    let write = |name: &str, profile: &MachineProfile| {
        let path = folder.path().join("forebay").join(name);
        std::fs::write(path, serde_json::to_string(profile).unwrap()).unwrap();
    };
    write("machine-1-1.json", &other);
    assert_eq!(rate().0, expected);
    std::fs::rename(&here, folder.path().join("forebay/machine-2-2.json")).unwrap();
    assert_eq!(rate().0, expected);
    std::fs::remove_file(folder.path().join("forebay/machine-2-2.json")).unwrap();
    assert_eq!(rate(), (None, "this disk is not measured: run forebay doctor".into()));
    other.machine.cpu.push('x');
    write("machine-1-1.json", &other);
    let why = "the machine profile is of another machine: run forebay doctor";
    assert_eq!(rate(), (None, why.into()));
}

#[test]
fn an_answer_stands_beside_its_prediction() {
    let folder = tempfile::tempdir().unwrap();
    let run = format!("run {} --device cpu --prompt Once --max-tokens 2 --seed 1", demo());
    saved_profile(folder.path(), &demo(), 1.0, Some((QualityState::Good, 1.0)));
    let (document, errors) = configured(folder.path(), &format!("{run} --json"));
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    assert!(document["generate_tokens_per_second_predicted"].is_null(), "{document}");
    let why = document["generate_predicted"]["uncertain_because"].as_str().unwrap();
    assert!(why.contains("the model is too small to predict"), "{why}");
    assert!(!errors.contains("warning"), "{errors}");
    let (text, errors) = configured(folder.path(), &format!("{run} --stats"));
    assert!(!format!("{text}{errors}").contains("predicted"), "{errors}");
}

/// Tests cards of 8 to 24 GiB with 16 and 64 GB of RAM, and slow and fast buses and disks, each with its own profile.
/// Plans stay within the budgets, and more of a resource is never slower.
#[test]
fn machines_that_people_have() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let machine = path("machine.json");
    let text = std::fs::read_to_string(profile("desktop.json")).unwrap();
    for arch in ["qwen3moe-30b", "llama-70b"] {
        let model = path(arch);
        let options =
            SynthOptions { quantisation: Some("Q4_K_M".into()), ..SynthOptions::default() };
        hollow(arch, Path::new(&model), &options).unwrap();
        let mut rates: Vec<([usize; 4], f64)> = Vec::new();
        for point in 0..24 {
            let at = [point % 3, point / 3 % 2, point / 6 % 2, point / 12];
            let (vram, ram) = ([8_u64, 16, 24][at[0]] << 30, [16_u64, 64][at[1]] << 30);
            let mut profile = MachineProfile::parse(&text).unwrap();
            profile.read.bytes_per_second = [1.6e9, 7e9][at[3]];
            let gpu = profile.gpu.as_mut().unwrap();
            gpu.memory_bytes = vram;
            for copy in &mut gpu.pinned_copies {
                copy.to_device_bytes_per_second *= [8.0, 25.0][at[2]] / 25.0;
            }
            std::fs::write(&machine, serde_json::to_string(&profile).unwrap()).unwrap();
            let line = format!("plan {model} --profile {machine} --ram {ram}B --json");
            let plan = forebay(&words(&line)).json()["plan"].take();
            let bytes = |of: &str, name: &str| plan[of][name].as_u64().unwrap_or(0);
            assert!(bytes("vram", "total_bytes") <= vram, "{arch} {at:?}: {plan}");
            assert!(bytes("host", "arena_bytes") <= ram, "{arch} {at:?}: {plan}");
            let rate = plan["prediction"]["generate"]["tokens_per_second"].as_f64().unwrap();
            for (less, slower) in &rates {
                let is_more = less.iter().zip(&at).all(|(less, more)| less <= more);
                let right = !is_more || rate >= slower * (1.0 - 1e-9);
                assert!(right, "{arch}: {less:?} {slower}, {at:?} {rate}");
            }
            rates.push((at, rate));
        }
        // The best of these machines is much faster than the worst.
        assert!(rates[23].1 > 1.5 * rates[0].1, "{arch}: {rates:?}");
    }
}

/// `plan` handles the options for CPU offload and threads as sessions do.
#[test]
fn cpu_offload_and_its_threads_are_planned() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.gguf");
    let options = SynthOptions { quantisation: Some("Q4_K_M".into()), ..SynthOptions::default() };
    hollow("qwen3moe-30b", &model, &options).unwrap();
    let plan = |flags: &str| {
        let (model, profile) = (model.to_str().unwrap(), profile("h200.json"));
        let line = format!("plan {model} --profile {profile} --ram 64GiB --json {flags}");
        let prediction = forebay(&words(line.trim())).json()["plan"]["prediction"].take();
        let on_cpu = prediction["cpu_experts_per_token"].as_f64().unwrap();
        (prediction["generate"]["tokens_per_second"].as_f64().unwrap(), on_cpu)
    };
    let on_gpu = |flags: &str| plan(&format!("--device cuda --vram 4GiB {flags}"));
    let (auto, alone, asked) = (on_gpu(""), on_gpu("--no-cpu-experts"), on_gpu("--cpu-experts"));
    assert!(alone.1 == 0.0 && asked.1 > 0.0, "{alone:?} {asked:?}");
    assert_eq!(auto, if alone.0 > asked.0 { alone } else { asked });
    assert!(on_gpu("--cpu-experts --threads 1").0 < asked.0);
    assert!(plan("--device cpu --threads 4").0 < plan("--device cpu").0);
}

#[test]
fn options_for_a_gpu_need_one_in_the_profile() {
    for (profile_name, device, option, wanted) in [
        ("epyc-2core.json", "auto", "--vram 8GiB", "the machine profile has none"),
        ("epyc-2core.json", "auto", "--no-cpu-experts", "the machine profile has none"),
        ("h200.json", "cpu", "--vram 8GiB", "--device cpu does not use"),
    ] {
        let profile = profile(profile_name);
        let line = format!("plan {} --profile {profile} --device {device} {option}", demo());
        let said = forebay(&words(&line)).failed(2);
        assert!(said.contains(wanted) && said.contains("is given, but it is for a GPU"), "{said}");
    }
    let line = format!("plan {} --profile {} --vram 8GiB", demo(), profile("h200.json"));
    forebay(&words(&line)).ok();
}
