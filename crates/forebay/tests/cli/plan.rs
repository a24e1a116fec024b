//! `forebay plan`, and what `run` and `bench` make of a machine profile.

use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_engine::doctor::MachineProfile;
use forebay_engine::synth::{SynthOptions, hollow};

use crate::harness::{forebay, smallest_ram, words, workspace};

fn profile(name: &str) -> String {
    let folder = workspace().join("crates/forebay-engine/tests/profiles");
    folder.join(name).to_str().expect("UTF-8").to_string()
}

fn demo() -> String {
    crate::harness::demo()
}

#[test]
fn a_plan_in_words() {
    let line =
        format!("plan {} --profile {} --ram 20MiB --vram 8GiB", demo(), profile("h200.json"));
    let text = forebay(&words(&line)).ok().stdout;
    for part in [
        "NVIDIA H200",
        "the GPU computes, and all weights are in its memory",
        "tokens/s; time goes to latency of the GPU's layers",
        "GiB of VRAM: no faster",
        "--device cpu: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let line =
        format!("plan {} --profile {} --ram 20MiB --device cpu", demo(), profile("h200.json"));
    let text = forebay(&words(&line)).ok().stdout;
    assert!(text.contains("RAM holds what every token needs and"), "{text}");
    assert!(text.contains("of a token's experts are found in RAM"), "{text}");
}

#[test]
fn a_plan_as_a_document() {
    let ram = smallest_ram(&demo(), 128);
    let line = format!(
        "plan {} --profile {} --ram {ram} --device cpu --ctx 128 --json",
        demo(),
        profile("h200.json")
    );
    let plan = forebay(&words(&line)).json();
    assert_eq!((&plan["plan"]["device"], &plan["context"]), (&"cpu".into(), &128.into()));
    assert!(plan["plan"]["prediction"]["generate"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(plan["plan"]["prediction"]["generate"]["limit"], "disk");
    // The same slots as those of a session.
    let line = format!(
        "bench {} --ram {ram} --device cpu --ctx 128 --prompt-tokens 4 --gen-tokens 4 --repeat 1 --json",
        demo()
    );
    let bench = forebay(&words(&line)).json();
    assert_eq!(plan["plan"]["host"], bench["plan"]);
}

#[test]
fn what_cannot_be_planned() {
    let line = format!("plan {} --profile {} --device cpu --ram 1", demo(), profile("h200.json"));
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

/// A profile of this machine and the demo model's disk, below a configuration folder of its own.
fn saved_profile(folder: &Path, faster: f64) -> PathBuf {
    let model = demo();
    let here = forebay_engine::doctor::MachineIdentity::here(Path::new(&model).parent().unwrap());
    let text = std::fs::read_to_string(profile("epyc-2core.json")).unwrap();
    let mut profile = MachineProfile::parse(&text).unwrap();
    profile.machine = here.unwrap();
    profile.read.bytes_per_second *= faster;
    profile.kernels.iter_mut().for_each(|kernel| kernel.bytes_per_second *= faster);
    std::fs::create_dir_all(folder.join("forebay")).unwrap();
    let path = folder.join("forebay/machine.json");
    std::fs::write(&path, serde_json::to_string(&profile).unwrap()).unwrap();
    path
}

#[test]
fn run_and_bench_know_the_prediction() {
    let folder = tempfile::tempdir().unwrap();
    let with_profile = |line: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let output = command.args(words(line)).env("XDG_CONFIG_HOME", folder.path()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let bench =
        format!("bench {} --device cpu --prompt-tokens 8 --gen-tokens 8 --repeat 1 --json", demo());
    let predicted = |text: &str| {
        let document: serde_json::Value = serde_json::from_str(text).unwrap();
        document["generate"]["tokens_per_second_predicted"].as_f64()
    };
    assert_eq!(predicted(&with_profile(&bench).0), None, "there is no profile yet");
    saved_profile(folder.path(), 1.0);
    let (document, errors) = with_profile(&bench);
    assert!(predicted(&document).unwrap() > 10.0);
    assert!(!errors.contains("warning"), "{errors}");
    let table = with_profile(&bench.replace(" --json", "")).0;
    assert!(table.lines().next().unwrap().ends_with("predicted"), "{table}");
    let run = format!("run {} --device cpu --prompt Once --max-tokens 2 --seed 1", demo());
    let (document, _) = with_profile(&format!("{run} --json"));
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    let rate = document["generate_tokens_per_second_predicted"].as_f64().unwrap();
    assert!(rate > 10.0, "{rate}");
    let (text, errors) = with_profile(&format!("{run} --stats"));
    assert!(format!("{text}{errors}").contains(" predicted by the machine profile)"), "{errors}");
    // A machine so slow that a person should know.
    saved_profile(folder.path(), 1e-5);
    let errors = with_profile(&run).1;
    assert!(errors.contains("warning: generating will be slow, "), "{errors}");
    assert!(errors.contains("the CPU computes"), "{errors}");
}

/// Cards of 8 to 24 GiB with 16 and 64 GB of RAM, slow and fast buses and disks, each a profile in a file: plans stay within what
/// there is, and more is never slower.
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
            let line = format!("plan {model} --profile {machine} --ram {ram} --json");
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
        // The best of these machines is worth having.
        assert!(rates[23].1 > 1.5 * rates[0].1, "{arch}: {rates:?}");
    }
}

/// Whether the CPU helps, and with how many threads, is planned as sessions take it.
#[test]
fn help_and_threads_of_the_cpu_are_planned() {
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
