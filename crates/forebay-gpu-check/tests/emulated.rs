//! Tests of the GPU backend without a GPU. `gpu-check` runs on the emulated driver in `emulator`, which compiles the
//! kernels' sources for the CPU.

#![cfg(target_os = "linux")]

mod soak;

use std::io::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use forebay_engine::{DeviceChoice, EngineError, GenerateOptions, Session, SessionOptions};
use forebay_model::ModelError;
use forebay_model::sampling::Sampling;

/// Checks that take little time, at least one of each family.
const KERNELS: [&str; 53] = [
    "buffers",
    "gdeflate",
    "modules from",
    "zstd",
    "norm",
    "quantize",
    "router",
    "top_k",
    "delta",
    "gates of",
    "elementwise",
    "streams: predicted",
    "sparse activations",
    "attention_inputs",
    "attention decode f16 24/16",
    "attention decode q8_0 24/16",
    "attention prompt f16 24/16",
    "attention prompt q8_0 24/16",
    "attention general f32 33/17",
    "attention biases by distance f16",
    "short convolutions",
    "attention latent f16",
    "attention rows f16 64/64",
    "attention rows q8_0 576/512",
    "attention rows f32 64/64",
    "attention cuts q4_0 64/64",
    "attention cuts f16 256/256",
    "attention cuts f16 576/512",
    "attention prompts together f16 64/64",
    "attention prompts together q8_0 576/512",
    "attention after inputs f16",
    "embedding Q6_K",
    "expand BF16",
    "expand IQ3_XXS",
    "expand Q3_K",
    "expand Q4_K",
    "expand Q8_0",
    "matvec Q4_K",
    "matvec TQ2_0",
    "matvec-experts MXFP4",
    "matmul-experts Q4_K",
    "matmul-together Q4_K",
    "alone matvec Q4_K",
    "alone matvec Q5_0",
    "alone matvec Q8_0",
    "alone matvec TQ2_0",
    "alone matvec BF16",
    "alone matvec-experts Q4_K",
    "alone matvec-experts MXFP4",
    "alone matmul Q4_K",
    "alone matmul BF16",
    "alone exact Q4_K",
    "load",
];

fn emulator() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("emulator")
}

/// Returns the folder of the emulated driver, which the first call builds, or `None` without a compiler.
fn driver() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".into());
        if Command::new(&compiler).arg("--version").output().is_err() {
            let why = format!("SKIPPED: no {compiler}, so that no GPU can be emulated");
            let _ = writeln!(std::io::stderr(), "{why}");
            return None;
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
        let status = Command::new("sh").arg(emulator().join("build.sh")).arg(&folder).status();
        assert!(status.expect("a shell").success(), "the emulated driver does not compile");
        Some(folder)
    };
    FOLDER.get_or_init(build).as_deref()
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// Creates a command for a program that finds the emulated driver.
fn emulated(driver: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", driver).env("FOREBAY_EMULATOR", emulator());
    command.env("FOREBAY_EMULATOR_CACHE", driver.join("modules"));
    command
}

fn gpu_check(driver: &Path, only: &[&str], settings: &[(&str, &str)]) -> Output {
    let mut command = emulated(driver, env!("CARGO_BIN_EXE_gpu-check"));
    command.arg("--models").arg(fixtures());
    // Its layers have 32 experts.
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    command.arg("--mixture").arg(demo.join("tales-moe-sticky-Q4_K_M.gguf"));
    for only in only {
        command.args(["--only", only]);
    }
    command.envs(settings.iter().map(|(name, value)| (format!("FOREBAY_EMULATOR_{name}"), value)));
    command.output().unwrap()
}

/// Runs checks. Fails unless all of them pass and there are at least `least`.
fn passes(only: &[&str], settings: &[(&str, &str)], least: usize) {
    let Some(driver) = driver() else { return };
    let output = gpu_check(driver, only, settings);
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{text}\n{errors}", output.status);
    let passed = text.lines().filter(|line| line.contains(" ok   worst ")).count();
    assert!(passed >= least, "{passed} checks instead of {least}:\n{text}");
    // The emulated driver writes what it refuses to stderr.
    assert!(errors.is_empty(), "{errors}");
}

#[test]
fn kernels() {
    passes(&KERNELS, &[], 56);
}

/// Runs threads and blocks in reverse order, and queued work only when the program waits for it.
#[test]
fn kernels_in_another_order() {
    let only = [
        "norm",
        "router",
        "top_k",
        "delta",
        "attention prompt f16 24/16",
        "alone matvec-experts Q4_K",
    ];
    passes(&only, &[("ORDER", "backward"), ("LAZY", "1")], 17);
}

#[test]
fn dense_models() {
    passes(&["model exact models/llama3_rope", "model load models/llama3_rope"], &[], 2);
    passes(&["model graphs models/llama3_rope"], &[("LAZY", "1")], 1);
    passes(&["model exact models/vaultgemma"], &[], 1);
    passes(&["model fast gguf/llama_k"], &[("CAPABILITY", "80"), ("ORDER", "backward")], 1);
}

/// Parts of the model are computed on the CPU and on the GPU.
#[test]
fn dense_models_that_do_not_fit() {
    passes(&["model split synthetic"], &[("LAZY", "1")], 1);
}

#[test]
fn models_with_experts() {
    passes(&["model exact models/qwen3_moe", "model load gguf/qwen3_moe"], &[], 2);
    passes(&["model fast gguf/qwen3_moe", "model graphs gguf/qwen3_moe"], &[("LAZY", "1")], 2);
}

/// Norms of heads follow the rotation, in passes of many rows and of one.
#[test]
fn models_made_by_scripts() {
    passes(&["model exact models/hunyuan_v1_moe", "model load models/hunyuan_v1_moe"], &[], 2);
}

/// Scores have biases by distance, and convolutions beside attention have states; gates mix the residual stream with outputs, which
/// experts norm; xIELU has numbers of each layer.
#[test]
fn models_with_parts_of_their_own() {
    let (inkling, muse) = ("models/inkling", "models/muse_spark");
    let only =
        ["exact", "many"].map(|check| [inkling, muse].map(|of| format!("model {check} {of}")));
    let only: Vec<&str> = only.iter().flatten().map(String::as_str).collect();
    passes(&only, &[("LAZY", "1")], 4);
    passes(&["model states models/inkling", "model exact gguf/apertus"], &[], 2);
}

/// Predicting layers take states in different forms, and have windows, or attention and experts in one layer.
#[test]
fn models_that_propose_tokens() {
    let names = ["step3p7_mtp", "nemotron_h_mtp", "deepseek_v4_mtp"];
    let names = names.map(|name| format!("model mtp gguf/{name}"));
    passes(&names.each_ref().map(String::as_str), &[], 3);
}

/// Layers have states, which alternate between two places from pass to pass.
#[test]
fn models_with_states() {
    passes(&["model exact models/qwen3_next", "model fast gguf/qwen3_5_moe"], &[], 2);
    let names = ["graphs", "many", "states"];
    let only = names.map(|name| format!("model {name} gguf/qwen3_5_moe"));
    passes(&only.each_ref().map(String::as_str), &[("LAZY", "1")], 3);
}

/// Only some experts have slots. Queued work runs only when the program waits for it, so a copy that it forgets to wait
/// for is noticed.
#[test]
fn experts_in_slots() {
    passes(&["model slots gguf/qwen3_moe"], &[("LAZY", "1")], 1);
}

/// Requests that run together give the bits that each gives alone.
#[test]
fn many_sequences() {
    passes(&["model many gguf/qwen3_moe", "model many models/gemma3"], &[("LAZY", "1")], 1);
}

/// So do requests whose rows go through the layers in two lanes.
#[test]
fn two_lanes() {
    passes(&["model lanes"], &[], 1);
}

/// Keys and values that leave for RAM or the disk and come back give the same bits.
#[test]
fn tiers_of_the_kv_cache() {
    passes(&["model tiers gguf/llama_k", "model tiers models/gemma3"], &[("LAZY", "1")], 2);
}

/// Sessions share the GPU's memory.
#[test]
fn sessions_beside_each_other() {
    passes(
        &["model beside gguf/qwen3_moe", "model beside models/llama3_rope"],
        &[("LAZY", "1")],
        2,
    );
}

/// The GPU has a watchdog, and the disk stalls for longer than its limit. No kernel may wait so long that the watchdog
/// ends it.
#[test]
fn kernels_give_up_before_a_watchdog_ends_them() {
    let Some(driver) = driver() else { return };
    let only = ["fetch", "model late disk gguf/qwen3_moe"];
    let output = gpu_check(driver, &only, &[("WATCHDOG", "1"), ("TIMES", "1")]);
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}\n{text}\n{errors}", output.status);
    assert_eq!(text.matches(" ok   worst ").count(), 9, "{text}");
    let waited = errors.lines().find_map(|line| line.strip_prefix("longest wait for the host: "));
    let waited: f64 = waited.and_then(|line| line.strip_suffix(" s")).unwrap().parse().unwrap();
    assert!((0.2..0.5).contains(&waited), "a kernel waited for {waited} s");
}

/// After an error that loses the GPU's context, sessions refuse work with that error, and make no more calls to the
/// driver.
#[test]
fn a_lost_gpu_is_asked_for_nothing_more() {
    let Some(driver) = driver() else { return };
    let executable = std::env::current_exe().unwrap();
    // Number of the launch that fails: in a prompt, in a token whose kernels are queued one by one, and in a CUDA
    // graph.
    for launch in ["150", "300", "900"] {
        let mut command = emulated(driver, executable.to_str().unwrap());
        command.args(["a_session_on_a_gpu_that_fails", "--exact", "--ignored", "--nocapture"]);
        command.env("FOREBAY_EMULATOR_BREAK", launch).env("FOREBAY_EMULATOR_TIMES", "1");
        let output = command.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}\n{}", String::from_utf8_lossy(&output.stdout));
        let after = errors.lines().find_map(|line| line.strip_prefix("calls after a failure: "));
        let after: u32 = after.unwrap().parse().unwrap();
        assert!(after < 30, "launch {launch}: {after} calls after the failure\n{errors}");
    }
}

/// Part of the test above, in a separate process, because the GPU is lost for the whole process.
#[test]
#[ignore = "needs an emulated GPU that fails"]
fn a_session_on_a_gpu_that_fails() {
    let model = fixtures().join("gguf/qwen3_moe/qwen3_moe-Q8_0.gguf");
    let options = SessionOptions {
        device: DeviceChoice::Cuda(0),
        context: Some(128),
        ..SessionOptions::default()
    };
    let mut session = Session::open(&model, &options, &mut |_, _| {}).unwrap();
    let mut generate = || {
        session.reset();
        let options = GenerateOptions::exactly(16, Sampling::greedy());
        session.generate(&[1, 2, 3], &options, &mut |_| ControlFlow::Continue(()))
    };
    let first = (0..100).find_map(|_| generate().err()).expect("the GPU fails");
    let EngineError::Model(ModelError::Cuda(cause)) = &first else { panic!("{first}") };
    assert!(cause.is_sticky(), "{cause}");
    assert_eq!(cause.driver_code(), Some((700, "CUDA_ERROR_ILLEGAL_ADDRESS")));
    let text = first.to_string();
    assert!(text.contains("must be restarted"), "{text}");
    for _ in 0..50 {
        assert_eq!(generate().err().map(|error| error.to_string()), Some(text.clone()));
    }
    let another = Session::open(&model, &options, &mut |_, _| {}).err().expect("the GPU is lost");
    assert!(another.to_string().contains("must be restarted"), "{another}");
}

/// A GPU that cannot map memory reserves all of it at the start. A GPU with too little memory gives an error that says
/// so.
#[test]
fn memory_of_other_gpus() {
    passes(&["model load models/qwen3_moe"], &[("MAPS", "0")], 1);
    let Some(driver) = driver() else { return };
    let output = gpu_check(driver, &["model load models/qwen3_moe"], &[("MIB", "1")]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("of VRAM, but 1.00 MiB may be used"), "{text}");
}

/// Runs sessions of dense models and of models with experts, from files and from packs, on a failing disk.
#[test]
fn a_short_soak() {
    let Some(driver) = driver() else { return };
    let mut command = emulated(driver, env!("CARGO_BIN_EXE_soak"));
    command.args(["--device", "cuda", "--context", "60", "--rounds", "8"]);
    soak::passes(&mut command, &fixtures());
}
