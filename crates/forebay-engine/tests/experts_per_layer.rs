//! Tests models whose layers have different numbers of experts, files with a tensor for each expert, and vectors that are stored with
//! more dimensions than one.

#[path = "support/gguf_file.rs"]
mod gguf_file;
mod support;

use forebay_engine::{Session, SessionOptions, inspect};
use forebay_format::TensorType;
use gguf_file::{GgufFile, logits};
use support::{fixture, generate_greedily};

/// Returns a model of Mixtral's shape with so many experts in each layer.
fn mixtral(experts: &[u64]) -> GgufFile {
    let mut file = GgufFile::random("llama", experts.len() as u32);
    file.set("expert_count", 8u32);
    file.set("expert_used_count", 2u32);
    file.tensors.retain(|(name, ..)| {
        ["gate", "up", "down"].iter().all(|of| !name.contains(&format!("ffn_{of}.")))
    });
    for (layer, count) in experts.iter().enumerate() {
        file.add(&format!("blk.{layer}.ffn_gate_inp.weight"), &[*count, 64]);
        file.add(&format!("blk.{layer}.ffn_gate_exps.weight"), &[*count, 96, 64]);
        file.add(&format!("blk.{layer}.ffn_up_exps.weight"), &[*count, 96, 64]);
        file.add(&format!("blk.{layer}.ffn_down_exps.weight"), &[*count, 64, 96]);
    }
    file
}

/// Returns the same model with a tensor for each expert.
fn split(file: &GgufFile) -> GgufFile {
    let mut split = GgufFile { keys: file.keys.clone(), tensors: Vec::new() };
    for (name, ty, shape, bytes) in &file.tensors {
        match name.contains("_exps.") {
            false => split.tensors.push((name.clone(), *ty, shape.clone(), bytes.clone())),
            true => {
                for (expert, bytes) in bytes.chunks(bytes.len() / shape[0] as usize).enumerate() {
                    let name = name.replace("_exps.", &format!(".{expert}."));
                    split.tensors.push((name, *ty, shape[1..].to_vec(), bytes.to_vec()));
                }
            }
        }
    }
    split
}

#[test]
fn a_tensor_for_each_expert_is_the_same_model() {
    for experts in [&[4, 4][..], &[8, 3, 5]] {
        let merged = mixtral(experts);
        let split = split(&merged);
        assert!(split.tensors.iter().any(|(name, ..)| name == "blk.0.ffn_gate.3.weight"));
        assert_eq!(split.logits().unwrap(), merged.logits().unwrap());
        let (_folder, path) = split.written();
        let kinds = inspect(&path).unwrap().kinds;
        let experts = kinds.iter().find(|kind| kind.kind == "experts").unwrap();
        assert_eq!(experts.tensors, 3 * experts_of(&merged).iter().sum::<usize>());
    }
}

fn experts_of(file: &GgufFile) -> Vec<usize> {
    file.described().unwrap().layers.iter().map(|layer| layer.experts()).collect()
}

#[test]
fn the_router_of_each_layer_says_how_many_experts_it_has() {
    for experts in [&[8, 8][..], &[5, 5], &[8, 3], &[2, 7, 4]] {
        let file = mixtral(experts);
        let found: Vec<u64> = experts_of(&file).iter().map(|count| *count as u64).collect();
        assert_eq!(found, experts);
        let resident = file.logits().unwrap();
        // The number in the metadata says nothing.
        for number in [1u32, 2, 100] {
            assert_eq!(file.with("expert_count", number).logits().unwrap(), resident, "{number}");
        }
        let mut without = file.clone();
        without.unset("expert_count");
        assert_eq!(without.logits().unwrap(), resident);
    }
    // A layer with fewer experts than a token uses cannot be run.
    let error = mixtral(&[8, 1]).described().unwrap_err().to_string();
    assert!(error.contains("experts per token"), "{error}");
}

#[test]
fn layers_with_different_numbers_stream_as_they_compute_in_memory() {
    let (_folder, path) = mixtral(&[8, 3, 5, 2]).written();
    let tokens = |budget: Option<u64>| {
        let options = SessionOptions {
            exact: true,
            context: Some(64),
            ram_bytes: budget,
            ..SessionOptions::default()
        };
        let mut session = Session::open(&path, &options, &mut |_, _| {})?;
        Ok::<_, forebay_engine::EngineError>(generate_greedily(&mut session, &[3, 14, 15], 24))
    };
    let least = support::needed_bytes(tokens(Some(1)));
    assert_eq!(tokens(Some(least)).unwrap(), tokens(None).unwrap());
}

/// Prunes a folder's experts in one layer.
#[test]
fn folders_may_be_pruned_too() {
    let Some(folder) = support::copied("mixtral") else { return };
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let router = "model.layers.1.block_sparse_moe.gate.weight";
    let (experts, hidden) = match all.tensor(router).unwrap().shape() {
        [experts, hidden] => (*experts, *hidden),
        other => panic!("{other:?}"),
    };
    let kept = experts / 2 + 1;
    let mut tensors = Vec::new();
    for (name, view) in all.tensors() {
        let number = name.strip_prefix("model.layers.1.block_sparse_moe.experts.");
        let number = number.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
        if number.is_some_and(|number| number >= kept) {
            continue;
        }
        let is_router = name == router;
        let shape = if is_router { vec![kept, hidden] } else { view.shape().to_vec() };
        let bytes = view.data().len() * if is_router { kept } else { experts } / experts;
        tensors.push((name.clone(), view.dtype(), shape, view.data()[..bytes].to_vec()));
    }
    let views: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, data)| {
            let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap();
            (name.clone(), view)
        })
        .collect();
    let written = safetensors::serialize(views, None).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, written).unwrap();
    assert!(logits(folder.path()).unwrap() != logits(&fixture("models/mixtral").unwrap()).unwrap());
}

#[test]
fn vectors_may_be_stored_as_rows_and_columns() {
    let plain = GgufFile::random("llama", 2);
    let usual = plain.logits().unwrap();
    for change in [|length| vec![1, length], |length| vec![length, 1], |length| vec![1, 1, length]]
    {
        let mut file = plain.clone();
        for (.., shape, _) in file.tensors.iter_mut().filter(|(name, ..)| name.contains("norm")) {
            *shape = change(shape[0]);
        }
        assert_eq!(file.logits().unwrap(), usual);
    }
    // Other shapes of as many elements are no vectors.
    let mut file = plain.clone();
    let norm = file.tensors.iter_mut().find(|(name, ..)| name.contains("norm")).unwrap();
    norm.2 = vec![8, 8];
    assert!(file.logits().is_err());
}

#[test]
fn unused_tensors_may_be_empty_and_used_ones_may_not() {
    let mut file = GgufFile::random("llama", 2);
    let usual = file.logits().unwrap();
    let (_folder, path) = file.written();
    let bytes = std::fs::read(&path).unwrap();
    file.tensors.push(("unused.weight".into(), TensorType::F32, vec![1, 2], vec![0; 8]));
    let (_folder, path) = file.written();
    // The writer refuses such shapes, so the dimension is changed in the file: that of the last tensor, before its type.
    let mut changed = std::fs::read(&path).unwrap();
    let at = changed.windows(13).position(|part| part == b"unused.weight").unwrap() + 13;
    assert_eq!(changed[at..at + 12], [2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    changed[at + 4] = 0;
    std::fs::write(&path, &changed).unwrap();
    assert_eq!(logits(&path).unwrap(), usual);

    let at = bytes.windows(18).position(|part| part == b"blk.1.attn_norm.we").unwrap();
    let mut changed = bytes;
    let at = at + "blk.1.attn_norm.weight".len() + 4;
    assert_eq!(changed[at], 64);
    changed[at] = 0;
    std::fs::write(&path, &changed).unwrap();
    let error = support::with_causes(&logits(&path).unwrap_err());
    assert!(error.contains("blk.1.attn_norm.weight") && error.contains("no elements"), "{error}");
}
