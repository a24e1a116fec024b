//! Models with a layer that predicts further tokens, as they are and changed so that it predicts well.
#![allow(dead_code, reason = "every user needs a part of it")]

use std::path::{Path, PathBuf};

use tempfile::TempDir;

pub const QWEN: &str = "qwen35-mtp";
pub const GLM: &str = "glm-mtp";

/// Share of their usual outputs at which layers change some choices of the model ([`alike`]).
pub const SOME: f32 = 0.01;

/// Name, shape and values.
pub type Tensor = (String, Vec<u64>, Vec<f32>);

/// Returns the folder of a fixture: below the current folder, or where this was built.
pub fn formulas(name: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/formulas");
    let here = Path::new("fixtures/formulas");
    if here.is_dir() { here.join(name) } else { built.join(name) }
}

/// Reads the tensors of a folder in f32, in the order of their names.
pub fn tensors(folder: &Path) -> Vec<Tensor> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let shape = view.shape().iter().map(|&length| length as u64).collect();
        let data = view.data();
        let values = match view.dtype() {
            safetensors::Dtype::F32 => {
                let floats = data.chunks_exact(4);
                floats.map(|of| f32::from_le_bytes(of.try_into().unwrap())).collect()
            }
            safetensors::Dtype::BF16 => {
                let halves = data.chunks_exact(2);
                halves.map(|of| f32::from_le_bytes([0, 0, of[0], of[1]])).collect()
            }
            other => panic!("{name}: {other:?}"),
        };
        (name, shape, values)
    };
    let mut all: Vec<Tensor> = file.tensors().into_iter().map(tensor).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Writes a folder with the configuration of a fixture of the formulas and other tensors.
pub fn folder(name: &str, tensors: &[Tensor]) -> TempDir {
    written(&config(&formulas(name)), tensors)
}

/// Reads the configuration of a folder.
pub fn config(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// Writes a folder.
pub fn written(config: &serde_json::Value, tensors: &[Tensor]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let (mut table, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, values) in tensors {
        let from = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = serde_json::json!({
            "dtype": "F32", "shape": shape, "data_offsets": [from, data.len()]
        });
        table.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&table).unwrap();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_slice(), &data].concat();
    std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

/// Returns a fixture of the formulas, changed as in [`alike_to`].
pub fn alike(name: &str, share: f32) -> TempDir {
    alike_to(&formulas(name), share)
}

/// Returns a model whose layers add `share` of what they usually add to the residual stream, and whose predicting layer passes on the
/// embedding of the token that it gets. Without shares, model and layer compute the same of a token.
pub fn alike_to(model: &Path, share: f32) -> TempDir {
    let mut all = tensors(model);
    let find = |of: &str| all.iter().find(|(name, ..)| name == of).unwrap().2.clone();
    let (norm, head) = (find("model.norm.weight"), find("lm_head.weight"));
    let embedding = find("model.embed_tokens.weight");
    let is_beside = all.iter().any(|(name, ..)| name.starts_with("mtp."));
    // The families with a module beside the layers add 1 to the weights of norms.
    let neutral = if is_beside { 0.0 } else { 1.0 };
    for (tensor, shape, values) in &mut all {
        let has = |of: &str| tensor.ends_with(of);
        if ["o_proj.weight", "out_proj.weight", "down_proj.weight"].into_iter().any(has) {
            values.iter_mut().for_each(|value| *value *= share);
        } else if ["mtp.norm.weight", "shared_head.norm.weight"].into_iter().any(has) {
            values.clone_from(&norm);
        } else if has("shared_head.head.weight") {
            values.clone_from(&head);
        } else if has("layers.2.embed_tokens.weight") {
            values.clone_from(&embedding);
        } else if ["enorm.weight", "pre_fc_norm_embedding.weight"].into_iter().any(has) {
            values.fill(neutral);
        } else if ["eh_proj.weight", "mtp.fc.weight"].into_iter().any(has) {
            let columns = shape[1] as usize;
            for (row, values) in values.chunks_exact_mut(columns).enumerate() {
                values.iter_mut().for_each(|value| *value *= 0.1 * share);
                values[row] += 1.0;
            }
        }
    }
    written(&config(model), &all)
}
