//! Finds reference data.

use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Returns the root of the fixtures: `FOREBAY_FIXTURES`, else the full set beside the project, else the small set
/// inside it.
pub fn fixtures() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let candidates = [
        std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from),
        Some(workspace.join("../shared/fixtures")),
        Some(workspace.join("fixtures")),
    ];
    let found = candidates.into_iter().flatten().find(|path| path.is_dir());
    found.expect("the project's own fixtures/ are always there")
}

/// Returns a path below the fixtures. If this set lacks it, prints a message and returns `None`.
pub fn fixture(relative: &str) -> Option<PathBuf> {
    let path = fixtures().join(relative);
    if path.exists() {
        return Some(path);
    }
    // Written directly to stderr, because the test harness captures what passing tests print.
    let _ = writeln!(std::io::stderr(), "SKIPPED: {relative} is not in {}", fixtures().display());
    None
}

/// Returns a model of every kind of attention and of mixture: windows, latent attention, shared experts.
#[allow(dead_code, reason = "only some tests need many models")]
pub fn models() -> Vec<PathBuf> {
    [
        "gguf/qwen3_moe_k/qwen3_moe_k-Q4_K_M.gguf",
        "gguf/llama_k/llama_k-Q4_K_M.gguf",
        "gguf/gpt_oss/gpt_oss-Q4_K_M.gguf",
        "gguf/gemma3/gemma3-BF16.gguf",
        "gguf/deepseek_v2_k/deepseek_v2_k-Q4_K_M.gguf",
        "models/qwen3_moe",
        "models/mixtral",
        "models/glm4_moe",
        "models/deepseek_v3",
    ]
    .iter()
    .filter_map(|name| fixture(name))
    .collect()
}
