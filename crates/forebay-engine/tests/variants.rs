//! Tests keys that choose between variants of OLMo Hybrid and Gemma 3n, and names of tensors that their folders may have.

mod support;

use std::collections::HashMap;
use std::path::Path;

use forebay_engine::{Session, SessionOptions, inspect};
use forebay_format::Catalog;
use forebay_model::Architecture;
use forebay_model::arch::NormLayout;
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use support::{changed, copied};

fn describe(folder: &Path) -> Architecture {
    Architecture::from_catalog(&Catalog::open(folder).unwrap()).unwrap()
}

fn logits(folder: &Path) -> Vec<f32> {
    let options = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let mut session = Session::open(folder, &options, &mut |_, _| {}).unwrap();
    let ids: Vec<u32> = (0..24).map(|i| i * 37 % 490 + 3).collect();
    session.logits(&ids, None).unwrap()
}

/// Returns a fixture's logits with another value of a key, or `None` if the fixture is not there.
fn logits_with(name: &str, key: &str, value: Value) -> Option<Vec<f32>> {
    let folder = changed(name, |config| config[key] = value)?;
    Some(logits(folder.path()))
}

/// A tensor's type, shape and bytes.
type Contents = (safetensors::Dtype, Vec<usize>, Vec<u8>);

/// Replaces the tensors of a folder by what `change` makes of them.
fn rewrite(folder: &Path, change: impl Fn(&str, Contents) -> (String, Contents)) {
    let path = folder.join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let changed: HashMap<String, Contents> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            change(&name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        })
        .collect();
    let views = changed.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn keys_of_olmo_hybrid_decide_about_eigenvalues_and_rotations() {
    let Some(usual) = copied("olmo_hybrid") else { return };
    let of = describe(usual.path());
    assert_eq!(of.recurrent.unwrap().share_scale, 2.0);
    assert_eq!((of.norms_of(0), of.norms_of(1)), (NormLayout::Pre, NormLayout::Post));
    assert!(of.ropes.is_empty() && of.layers[1].rope.is_none());
    let rotated = json!({ "rope_theta": 5000.0, "rope_type": "default" });
    let folder = changed("olmo_hybrid", |config| config["rope_parameters"] = rotated).unwrap();
    let of = describe(folder.path());
    assert_eq!((of.ropes[0].theta, of.layers[1].rope), (5000.0, Some(0)));
    let positive = changed("olmo_hybrid", |config| {
        config["linear_allow_neg_eigval"] = json!(false);
    });
    let positive = positive.unwrap();
    assert_eq!(describe(positive.path()).recurrent.unwrap().share_scale, 1.0);
    let usual = logits(usual.path());
    for folder in [folder, positive] {
        assert_ne!(logits(folder.path()), usual);
    }
}

/// Folders have the names of the first publication, those inside transformers, or a mixture. The three parts of the convolution
/// may end anywhere.
#[test]
fn tensors_of_olmo_hybrid_have_either_name() {
    let (Some(usual), Some(other)) = (copied("olmo_hybrid"), copied("olmo_hybrid")) else { return };
    rewrite(other.path(), |name, contents| {
        let name = name
            .replace("attention_layer_norm", "input_layernorm")
            .replace("feedforward_layer_norm", "post_attention_layernorm");
        (name, contents)
    });
    let expected = logits(usual.path());
    assert_eq!(logits(other.path()), expected);
    // Queries and keys have 64 channels each, and values have 128. The fixture has parts of 86, 86 and 84.
    let bytes = std::fs::read(usual.path().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let part = |part: &str| {
        let name = format!("model.layers.0.linear_attn.{part}_conv1d.weight");
        file.tensor(&name).unwrap().data().to_vec()
    };
    let all = [part("q"), part("k"), part("v")].concat();
    let row = all.len() / 256;
    rewrite(usual.path(), |name, contents| {
        let range = match name.rsplit('.').nth(1) {
            Some("q_conv1d") => 0..64,
            Some("k_conv1d") => 64..128,
            Some("v_conv1d") => 128..256,
            _ => return (name.to_owned(), contents),
        };
        let shape = vec![range.len(), 1, 4];
        (name.to_owned(), (contents.0, shape, all[range.start * row..range.end * row].to_vec()))
    });
    assert_eq!(logits(usual.path()), expected);
}

#[test]
fn keys_of_gemma_3n_change_the_logits() {
    let Some(usual) = copied("gemma3n") else { return };
    let found = inspect(usual.path()).unwrap();
    for name in
        ["alternating updates (AltUp)", "augmented residuals (LAuReL)", "sparse activations"]
    {
        assert!(found.features.iter().any(|feature| feature.name == name), "{name}");
    }
    let usual = logits(usual.path());
    for (key, value) in [
        ("altup_correct_scale", json!(false)),
        ("altup_active_idx", json!(2)),
        ("altup_coef_clip", json!(0.01)),
        ("activation_sparsity_pattern", json!([0.95, 0.9, 0.0, 0.0])),
        ("activation_sparsity_pattern", json!(0.0)),
        ("final_logit_softcapping", json!(null)),
    ] {
        let other = logits_with("gemma3n", key, value.clone()).unwrap();
        assert!(other != usual, "{key} {value}");
    }
    // No weight is as large as the usual limit.
    for value in [json!(120.0), json!(null)] {
        assert!(logits_with("gemma3n", "altup_coef_clip", value).unwrap() == usual);
    }
}

/// Published models have embeddings for layers for fewer tokens than others: those of images and sound have none.
#[test]
fn tokens_without_embeddings_for_layers_use_the_first_row() {
    const ROWS: usize = 300;
    let Some(few) = changed("gemma3n", |config| config["vocab_size_per_layer_input"] = json!(ROWS))
    else {
        return;
    };
    let all = copied("gemma3n").unwrap();
    let is_table = |name: &str| name.contains("embed_tokens_per_layer");
    rewrite(few.path(), |name, (dtype, mut shape, mut data)| {
        if is_table(name) {
            data.truncate(data.len() / shape[0] * ROWS);
            shape[0] = ROWS;
        }
        (name.to_owned(), (dtype, shape, data))
    });
    rewrite(all.path(), |name, (dtype, shape, mut data)| {
        if is_table(name) {
            let row = data.len() / shape[0];
            let first = data[..row].to_vec();
            data[ROWS * row..].chunks_exact_mut(row).for_each(|to| to.copy_from_slice(&first));
        }
        (name.to_owned(), (dtype, shape, data))
    });
    assert_eq!(logits(few.path()), logits(all.path()));
}
