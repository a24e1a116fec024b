//! Tests folders that hold the experts of a layer as two stacks (`gate_up_proj` and `down_proj`), as transformers 5 writes them:
//! they give the bits of the folder with a tensor for each matrix, resident, streamed and from a pack.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use forebay_engine::pack::pack;
use forebay_engine::{Session, SessionOptions};
use forebay_store::{IoKind, OutputFile};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use support::fixture;

/// Bytes of a tensor, its type and its shape.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// Writes a copy of a folder with stacked experts.
fn stack(folder: &Path, to: &Path) {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut stacks = 0;
    for (name, view) in file.tensors() {
        let Some((before, behind)) = name.split_once(".experts.") else {
            tensors.insert(name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
            continue;
        };
        if behind != "0.gate_proj.weight" {
            continue;
        }
        let find = |expert: usize, matrix: &str| {
            file.tensor(&format!("{before}.experts.{expert}.{matrix}_proj.weight")).ok()
        };
        let count = (0..).take_while(|expert| find(*expert, "down").is_some()).count();
        for (stack, matrices) in [("gate_up", &["gate", "up"][..]), ("down", &["down"])] {
            let all = (0..count).flat_map(|expert| {
                matrices.iter().map(move |matrix| find(expert, matrix).unwrap())
            });
            let data = all.flat_map(|matrix| matrix.data().to_vec()).collect();
            let one = find(0, matrices[0]).unwrap();
            let shape = vec![count, matrices.len() * one.shape()[0], one.shape()[1]];
            tensors.insert(format!("{before}.experts.{stack}_proj"), (one.dtype(), shape, data));
        }
        stacks += 1;
    }
    assert!(stacks > 0, "the folder has experts");
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(to.join("model.safetensors"), safetensors::serialize(views, None).unwrap())
        .unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(folder.join(name), to.join(name)).unwrap();
    }
}

fn logits(path: &Path, ram_bytes: Option<u64>) -> Result<Vec<u32>, forebay_engine::EngineError> {
    let options = SessionOptions { context: Some(64), ram_bytes, ..SessionOptions::default() };
    let mut session = Session::open(path, &options, &mut |_, _| {})?;
    let tokens: Vec<u32> = (0..40).map(|at| at * 37 % 500).collect();
    let logits = session.logits(&tokens, None)?;
    Ok(logits.iter().map(|value| value.to_bits()).collect())
}

#[test]
fn stacked_experts_are_the_same_experts() {
    for name in ["models/qwen3_5_moe", "models/qwen3_next"] {
        let Some(folder) = fixture(name) else { continue };
        let copy = tempfile::tempdir().unwrap();
        stack(&folder, copy.path());
        let expected = logits(&folder, None).unwrap();
        assert_eq!(logits(copy.path(), None).unwrap(), expected, "{name}");
        let needed = logits(copy.path(), Some(1)).unwrap_err().needed_bytes().expect("too small");
        assert_eq!(logits(copy.path(), Some(needed)).unwrap(), expected, "{name}: streamed");
        let packed = copy.path().join("model.fbay");
        let out = OutputFile::replace(&packed).unwrap();
        pack(copy.path(), out, IoKind::Auto, &mut |_, _| true).unwrap();
        assert_eq!(logits(&packed, None).unwrap(), expected, "{name}: packed");
        assert_eq!(logits(&packed, Some(needed + (1 << 20))).unwrap(), expected, "{name}");
    }
}
