//! The demo model that ships with the project.

use std::path::{Path, PathBuf};

use anyhow::bail;
use forebay_engine::ModelInfo;
use forebay_model::sampling::Sampling;

/// Where the demo model is, if not in one of the usual places.
pub const VARIABLE: &str = "FOREBAY_DEMO_MODEL";

/// A beginning that shows the model well: it was trained on narrative fiction.
pub const PROMPT: &str = "The old sailor looked out at the sea and";

/// A small model repeats itself; this much penalty and this little heat keep it telling.
pub fn sampling() -> Sampling {
    Sampling { seed: 3, temperature: 0.7, repeat_penalty: 1.1, ..Sampling::default() }
}

/// Length of the demo answer in tokens; the model writes sense for a paragraph or two.
pub const MAX_TOKENS: usize = 200;

/// What a newcomer may do after the first run.
pub const NEXT: &str = "\
next: forebay run --prompt 'def binary_search(items, target):'    the same model on other text
      forebay run MODEL.gguf --ram 8GiB                           a chat with a model of yours";

/// Whether this is the demo model, wherever its file is. The file has a chat template, which came
/// with the tokenizer; the model was never trained with it.
pub fn is_demo(model: &ModelInfo) -> bool {
    model.architecture == "qwen3moe"
        && model.name.as_deref() == Some("hfB2")
        && (model.layers, model.hidden, model.experts) == (8, 256, 32)
        && (model.vocabulary, model.context_trained) == (8192, 1024)
}

const FILE: &str = "models/tales-moe-sticky-Q4_K_M.gguf";

/// Finds the demo model: the path in `FOREBAY_DEMO_MODEL`, else `models/` in a directory above
/// the executable, above the current directory, or in the source tree that this was built from.
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
        "the demo model {FILE} is neither above this program nor above the current directory: \
         name a model (forebay run MODEL) or set {VARIABLE} to its path"
    )
}

fn above(start: &Path) -> Option<PathBuf> {
    start.ancestors().map(|directory| directory.join(FILE)).find(|path| path.is_file())
}
