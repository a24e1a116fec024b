//! Runs a soak of at most a minute and checks its report.

use std::path::Path;
use std::process::Command;

/// Runs the program on a dense model and on a model with experts. Fails unless it compared many results and met many
/// faults.
pub fn passes(command: &mut Command, fixtures: &Path) {
    command.arg("--json");
    // Lets malloc return memory at once, so that resident memory is the memory in use.
    command.env("MALLOC_MMAP_THRESHOLD_", "65536").env("MALLOC_TRIM_THRESHOLD_", "65536");
    command.env("MALLOC_ARENA_MAX", "2");
    for model in ["llama_k/llama_k-Q4_K_M.gguf", "qwen3_moe/qwen3_moe-Q8_0.gguf"] {
        command.arg(fixtures.join("gguf").join(model));
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let count = |name: &str| report[name].as_u64().unwrap();
    for (name, least) in [
        ("tokens_compared", 100),
        ("together", 10),
        ("logits_compared", 10_000),
        ("cancelled", 1),
        ("truncated", 1),
        ("bad_calls", 1),
        ("retries", 20),
    ] {
        assert!(count(name) >= least, "{name}: {report}");
    }
}
