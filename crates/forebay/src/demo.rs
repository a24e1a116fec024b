//! Finds and describes the demo model that ships with the project.

use std::path::{Path, PathBuf};

use anyhow::bail;
use forebay_engine::ModelInfo;
use forebay_model::sampling::Sampling;

/// Environment variable with the path of the demo model, if it is not in one of the usual directories.
pub const VARIABLE: &str = "FOREBAY_DEMO_MODEL";

/// A prompt that suits the model, which was trained on narrative fiction.
pub const PROMPT: &str = "The old sailor looked out at the sea and";

/// Returns the sampling options for the demo model. A small model repeats itself, so they combine a repeat penalty with
/// a low temperature.
pub fn sampling() -> Sampling {
    Sampling { seed: 3, temperature: 0.7, repeat_penalty: 1.1, ..Sampling::default() }
}

/// Length of the demo answer in tokens. The model stays coherent for a paragraph or two.
pub const TOKENS_MAX: usize = 200;

/// Suggestions for a new user after the first run.
pub const NEXT: &str = "\
next: forebay run --prompt 'def binary_search(items, target):'    the same model on other text
      forebay run MODEL.gguf --ram 8GiB                           a chat with a model of yours";

/// Returns true if this is the demo model, wherever its file is. The file has a chat template, which came with the
/// tokenizer. The model was never trained with it.
pub fn is_demo(model: &ModelInfo) -> bool {
    model.architecture == "qwen3moe"
        && model.name.as_deref() == Some("Tales MoE 56M")
        && (model.layers, model.hidden, model.experts) == (8, 256, 32)
        && (model.vocabulary, model.context_trained) == (8192, 1024)
}

/// Folder of the models beside an installed program's `bin`.
const INSTALLED: &str = "share/forebay";
const FILE: &str = "models/tales-moe-sticky-Q4_K_M.gguf";

/// Finds the demo model. `FOREBAY_DEMO_MODEL` has precedence. Otherwise the search looks for `models/` above the
/// executable, above the current directory, and above the source tree of this build.
pub fn find() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        if !path.exists() {
            bail!("{VARIABLE}={}: no such file: correct or unset it", path.display());
        }
        return Ok(path);
    }
    let executable = std::env::current_exe().and_then(|path| path.canonicalize()).ok();
    let current = std::env::current_dir().ok();
    let source = Some(PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    for start in [executable, current, source].into_iter().flatten() {
        if let Some(found) = above(&start) {
            return Ok(found);
        }
    }
    bail!(
        "the demo model {FILE} was not found in any folder above this program or the current directory: \
         name a model (forebay run MODEL) or set {VARIABLE} to its path"
    )
}

fn above(start: &Path) -> Option<PathBuf> {
    let places = |directory: &Path| [directory.join(FILE), directory.join(INSTALLED).join(FILE)];
    start.ancestors().flat_map(places).find(|path| path.is_file())
}
