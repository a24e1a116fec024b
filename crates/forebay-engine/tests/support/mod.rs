//! Finds reference data, and makes changed copies of it.
#![allow(dead_code, reason = "every test file uses a part of it")]

use std::error::Error;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use forebay_engine::{EngineError, GenerateOptions, Session};
use forebay_model::sampling::Sampling;
use forebay_stream::StreamError;
use serde_json::{Map, Value};
use tempfile::TempDir;

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

/// Returns a path below one of the sets of fixtures ([`all_sets`]), or a model that a script of the project made (`formulas`). If all
/// lack it, prints a message and returns `None`.
pub fn fixture(relative: &str) -> Option<PathBuf> {
    let made = relative.strip_prefix("models/").map(|name| formulas().join(name));
    let mut paths = all_sets().into_iter().map(|set| set.join(relative)).chain(made);
    let path = paths.find(|path| path.exists());
    if path.is_none() {
        // Written directly to stderr, because the test harness captures what passing tests print.
        let first = fixtures();
        let _ = writeln!(std::io::stderr(), "SKIPPED: {relative} is not in {}", first.display());
    }
    path
}

/// Returns the folder of the models whose references come from scripts with the formulas.
pub fn formulas() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/formulas")
}

/// Returns the roots of the sets of fixtures that are there: the first one, and those beside it (`fixtures2`, `fixtures3`).
pub fn sets() -> Vec<PathBuf> {
    let first = fixtures();
    let others = ["fixtures2", "fixtures3"].map(|name| first.with_file_name(name));
    let others = others.into_iter().filter(|set| set.is_dir());
    std::iter::once(first.clone()).chain(others).collect()
}

/// Returns the roots of [`sets`] and of the project's own set, which has models that the others lack.
pub fn all_sets() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    let others = sets();
    let is_among = others.iter().any(|set| set.canonicalize().ok() == own.canonicalize().ok());
    others.into_iter().chain((!is_among).then_some(own)).collect()
}

/// Returns the models of the third set: folders, and the first file of each folder with GGUF files.
pub fn third_set() -> Vec<PathBuf> {
    let Some(set) = sets().into_iter().find(|set| set.ends_with("fixtures3")) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for kind in ["gguf", "models"] {
        for entry in std::fs::read_dir(set.join(kind)).unwrap() {
            let folder = entry.unwrap().path();
            let mut files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
            let is_gguf = |path: &PathBuf| path.extension().is_some_and(|end| end == "gguf");
            found.push(if kind == "models" { folder } else { files.find(is_gguf).unwrap() });
        }
    }
    found.sort();
    found
}

/// Returns a copy of the fixture `models/NAME`, or `None` if the fixture is not there.
pub fn copied(name: &str) -> Option<TempDir> {
    let folder = fixture(&format!("models/{name}"))?;
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    Some(copy)
}

/// Returns a copy of the fixture `models/NAME` whose `config.json` was changed, or `None` if the fixture is not there.
pub fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Option<TempDir> {
    let copy = copied(name)?;
    let path = copy.path().join("config.json");
    let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    // The copy of a read-only file is read-only too.
    std::fs::remove_file(&path).unwrap();
    std::fs::write(path, config.to_string()).unwrap();
    Some(copy)
}

/// Writes `model.safetensors` with a table of tensors and their data.
pub fn write_safetensors(folder: &Path, table: &Map<String, Value>, data: &[u8]) {
    let header = serde_json::to_vec(table).unwrap();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_slice(), data].concat();
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

/// Returns a model of every kind of attention and of mixture: windows, latent attention, shared experts.
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
        "models/minimax_m2",
        "models/deepseek_v32",
        "models/olmo3",
        "models/llama4",
        "models/deepseek_v4",
        "models/hunyuan_v1_moe",
        "models/muse_glimmer",
        "models/muse_spark",
        "models/minicpm3",
        "gguf/granite_swa/granite_swa-Q4_0.gguf",
        "gguf/deci/deci-Q4_0.gguf",
        "gguf/spark2_5/spark2_5-Q4_0.gguf",
        "gguf/dbrx/dbrx-Q4_0.gguf",
        "gguf/smallthinker/smallthinker-Q4_0.gguf",
        "gguf/arctic/arctic-Q4_0.gguf",
        "models/cohere2",
        "models/starcoder2",
        "models/phi",
        "models/phimoe",
    ]
    .iter()
    .filter_map(|name| fixture(name))
    .collect()
}

/// Returns models with recurrent layers, whose sequences share no keys and values.
pub fn recurrent_models() -> Vec<PathBuf> {
    [
        "gguf/qwen3_5_moe_k/qwen3_5_moe_k-Q4_K_M.gguf",
        "gguf/qwen3_next/qwen3_next-Q8_0.gguf",
        "models/qwen3_5_moe",
        "models/qwen3_5",
        "gguf/kimi_linear/kimi_linear-Q8_0.gguf",
        "models/kimi_linear",
        "gguf/nemotron_h/nemotron_h-Q8_0.gguf",
        "models/nemotron_h_dense",
        "models/lfm2_moe",
        "models/granitemoehybrid",
        "models/qwen4_exp",
        "gguf/qwen4_exp/qwen4_exp-Q8_0.gguf",
        "gguf/lfm2/lfm2-Q8_0.gguf",
        "models/bailing_hybrid",
        "models/inkling",
        "models/falcon_h1",
        "gguf/falcon_h1/falcon_h1-Q4_0.gguf",
        "gguf/jamba/jamba-Q4_0.gguf",
        "gguf/kimi_k3/kimi_k3-Q8_0.gguf",
        "models/olmo_hybrid",
    ]
    .iter()
    .filter_map(|name| fixture(name))
    .collect()
}

/// What is written to clones of this value, together.
#[derive(Clone, Default)]
pub struct SharedBytes(Arc<Mutex<Vec<u8>>>);

impl SharedBytes {
    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Write for SharedBytes {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Returns the text of an error and of its causes.
pub fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Returns the smallest budget that works, from the answer to one byte.
pub fn needed_bytes<T>(opened: Result<T, EngineError>) -> u64 {
    match opened {
        Err(EngineError::Stream(StreamError::BudgetTooSmall { needed_bytes, .. })) => needed_bytes,
        Err(error) => panic!("one byte must be refused as too small: {error}"),
        Ok(_) => panic!("one byte must be refused"),
    }
}

/// Returns the value of an E4M3 code.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// Generates so many tokens without a choice of chance.
pub fn generate_greedily(session: &mut Session, ids: &[u32], tokens: usize) -> Vec<u32> {
    let options = GenerateOptions::exactly(tokens, Sampling::greedy());
    session.generate(ids, &options, &mut |_| ControlFlow::Continue(())).unwrap().tokens
}
