//! Tests what a folder says about its model: the output projection in all families, keys that no reader knows, rotations, names of
//! tensors, and indexes.

mod support;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use forebay_compute::RopeScaling;
use forebay_engine::{Session, SessionOptions};
use forebay_format::Catalog;
use forebay_model::{Architecture, ModelError};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use support::{changed, copied, fixture, with_causes};
use tempfile::TempDir;

/// Returns a folder of every `model_type` among the fixtures.
fn folders() -> Vec<PathBuf> {
    let sets = support::sets().into_iter();
    let own = support::formulas();
    let own = [own.with_file_name("models"), own];
    let sets = sets.map(|set| set.join("models")).chain(own);
    let entries = sets.filter_map(|set| std::fs::read_dir(set).ok()).flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    let mut types = BTreeSet::new();
    folders.retain(|folder| {
        let Ok(text) = std::fs::read(folder.join("config.json")) else { return false };
        let config: Value = forebay_format::parse_config_bytes(&text).unwrap();
        let of = inner(&config)["model_type"].as_str().unwrap_or("").to_owned();
        folder.join("model.safetensors").exists() && types.insert(of)
    });
    folders
}

/// Returns the part of a configuration about the language model.
fn inner(config: &Value) -> &Value {
    config.get("text_config").filter(|inner| inner.is_object()).unwrap_or(config)
}

fn describe(folder: &Path) -> Result<Architecture, ModelError> {
    Architecture::from_catalog(&Catalog::open(folder)?)
}

/// Writes `model.safetensors` with some of the tensors of another one, under other names.
fn rewrite(from: &Path, to: &Path, name_of: &dyn Fn(&str) -> Option<String>) {
    let bytes = std::fs::read(from).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let kept = all.tensors().into_iter();
    let kept: Vec<_> = kept.filter_map(|(name, view)| Some((name_of(&name)?, view))).collect();
    let file = safetensors::serialize(kept, None).unwrap();
    let _ = std::fs::remove_file(to);
    std::fs::write(to, file).unwrap();
}

fn write_config(folder: &Path, config: &Value) {
    let path = folder.join("config.json");
    let _ = std::fs::remove_file(&path);
    std::fs::write(path, config.to_string()).unwrap();
}

/// Returns true if a tensor is the output projection or a part of it.
fn is_head(name: &str) -> bool {
    let name = name.strip_prefix("language_model.").unwrap_or(name);
    name.starts_with("lm_head.") || name.starts_with("head.") || name.ends_with("unembed.weight")
}

/// Families whose configuration class in transformers ties by default.
const TIES: [&str; 17] = [
    "gemma2",
    "gemma3",
    "gemma3n",
    "vaultgemma",
    "gemma4",
    "gemma",
    "ernie4_5",
    "ernie4_5-moe",
    "lfm2",
    "lfm2moe",
    "command-r",
    "cohere2",
    "cohere2moe",
    "starcoder2",
    "youtu",
    "granite_swa",
    "minicpm3",
];

#[test]
fn the_files_decide_about_the_output_projection_in_every_family() {
    let mut families = BTreeSet::new();
    for folder in folders() {
        let usual = match describe(&folder) {
            Ok(usual) => usual,
            Err(_) => continue,
        };
        families.insert(usual.family);
        let text = std::fs::read(folder.join("config.json")).unwrap();
        let config: Value = forebay_format::parse_config_bytes(&text).unwrap();
        let file = folder.join("model.safetensors");
        let copy = tempfile::tempdir().unwrap();
        let target = copy.path().join("model.safetensors");
        for has_head in [true, false] {
            rewrite(&file, &target, &|name| (!is_head(name)).then(|| name.to_owned()));
            if has_head {
                let name = match usual.family {
                    "deepseek4" => "head.weight",
                    "inkling" => "model.llm.unembed.weight",
                    _ if has_root(&file, "language_model.model.") => {
                        "language_model.lm_head.weight"
                    }
                    _ => "lm_head.weight",
                };
                add_head(&target, name, usual.vocabulary, usual.hidden);
            }
            for (levels, said) in flags() {
                write_config(copy.path(), &with_flags(&config, &levels));
                let found = describe(copy.path());
                let ties = TIES.contains(&usual.family);
                let shown = format!("{}: {levels:?}, head {has_head}", usual.family);
                match (has_head, said.unwrap_or(ties)) {
                    (true, _) => assert!(!found.unwrap().tied_embeddings, "{shown}"),
                    (false, true) => assert!(found.unwrap().tied_embeddings, "{shown}"),
                    (false, false) => {
                        let error = found.unwrap_err().to_string();
                        let names = ["head.weight", "unembed.weight"]
                            .iter()
                            .any(|head| error.contains(head))
                            && error.contains("tie_word_embeddings");
                        assert!(names, "{shown}: {error}");
                    }
                }
            }
        }
    }
    if families.len() < 25 {
        let _ = writeln!(std::io::stderr(), "SKIPPED: only {} families are there", families.len());
    }
    assert!(families.len() >= 5, "{families:?}");
}

fn has_root(file: &Path, root: &str) -> bool {
    let bytes = std::fs::read(file).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    all.names().iter().any(|name| name.starts_with(root))
}

/// Adds an output projection of zeros.
fn add_head(file: &Path, name: &str, vocabulary: usize, hidden: usize) {
    let bytes = std::fs::read(file).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let zeros = vec![0; vocabulary * hidden * 2];
    let head = TensorView::new(safetensors::Dtype::BF16, vec![vocabulary, hidden], &zeros).unwrap();
    let mut tensors = all.tensors();
    tensors.push((name.to_owned(), head));
    let written = safetensors::serialize(tensors, None).unwrap();
    std::fs::write(file, written).unwrap();
}

/// Flags at two levels of a configuration, `None` for a level that is not there, and what they say together.
type Flags = ([Option<Option<bool>>; 2], Option<bool>);

/// Every combination of flags at the whole configuration, at the part about the language model, and at a configuration without such a
/// part, with what it says: `Some(true)` if either says true.
fn flags() -> Vec<Flags> {
    let values = [Some(true), Some(false), None];
    let mut all: Vec<_> = values.iter().map(|one| ([Some(*one), None], *one)).collect();
    for outer in values {
        for inner in values {
            let said = match (outer, inner) {
                (None, None) => None,
                _ => Some(outer == Some(true) || inner == Some(true)),
            };
            all.push(([Some(outer), Some(inner)], said));
        }
    }
    all
}

/// Returns a configuration with these flags: one value for a configuration of one level, two for a configuration with a part about the
/// language model.
fn with_flags(config: &Value, levels: &[Option<Option<bool>>; 2]) -> Value {
    let set = |config: &mut Value, flag: Option<bool>| {
        let object = config.as_object_mut().unwrap();
        object.remove("tie_embedding");
        object.remove("tie_word_embeddings");
        if let Some(flag) = flag {
            object.insert("tie_word_embeddings".into(), flag.into());
        }
    };
    let mut text = inner(config).clone();
    // Quantised weights are described outside.
    let quantization =
        config.get("quantization_config").or(text.get("quantization_config")).cloned();
    match *levels {
        [Some(outer), Some(inner)] => {
            set(&mut text, inner);
            let mut whole = json!({ "model_type": "wrapper", "text_config": text });
            if let Some(quantization) = quantization {
                whole["quantization_config"] = quantization;
            }
            set(&mut whole, outer);
            whole
        }
        [flag, _] => {
            set(&mut text, flag.flatten());
            if let Some(quantization) = quantization {
                text["quantization_config"] = quantization;
            }
            text
        }
    }
}

#[test]
fn unknown_keys_that_may_change_the_answer_are_refused_in_every_family() {
    for folder in folders() {
        if describe(&folder).is_err() {
            continue;
        }
        let text = std::fs::read(folder.join("config.json")).unwrap();
        let config: Value = forebay_format::parse_config_bytes(&text).unwrap();
        let copy = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(
            folder.join("model.safetensors"),
            copy.path().join("model.safetensors"),
        )
        .unwrap();
        let try_with = |key: &str, value: &Value| {
            let mut config = config.clone();
            let at = if config.get("text_config").is_some_and(Value::is_object) {
                &mut config["text_config"]
            } else {
                &mut config
            };
            at[key] = value.clone();
            write_config(copy.path(), &config);
            describe(copy.path())
        };
        for (key, value) in [
            ("a_new_query_scale", json!(0.5)),
            ("a_new_multiplier", json!(3)),
            ("a_new_router_bias", json!(true)),
            ("sliding_window_of_the_future", json!(16)),
            ("a_new_softcap", json!(30.0)),
            ("rope_of_the_future", json!({ "a": 1 })),
        ] {
            let error = try_with(key, &value).unwrap_err().to_string();
            assert!(error.contains(key), "{}: {error}", folder.display());
        }
        for (key, value) in [
            ("a_note", json!("made by hand")),
            ("a_new_dropout", json!(0.1)),
            ("a_new_query_scale", json!(1.0)),
            ("a_new_bias", json!(false)),
            ("sliding_window_of_the_future", Value::Null),
            ("attn_implementation", json!("flash_attention_2")),
            ("image_token_scale", json!(7)),
        ] {
            if let Err(error) = try_with(key, &value) {
                panic!("{} with {key}: {error}", folder.display());
            }
        }
    }
}

/// Returns the rotation of a Llama with these parameters under a key.
fn rotation(key: &str, value: Value) -> Option<Result<RopeScaling, String>> {
    let copy = changed("llama3_rope", |config| {
        let object = config.as_object_mut().unwrap();
        object.remove("rope_scaling");
        object.remove("rope_parameters");
        object.insert("max_position_embeddings".into(), 512.into());
        object.insert(key.into(), value);
    })?;
    let found = describe(copy.path()).map(|architecture| architecture.ropes[0].scaling);
    Some(found.map_err(|error| error.to_string()))
}

#[test]
fn rotations_say_the_same_under_both_names_or_are_refused() {
    let yarn = |original_context: f64, magnitude: Option<f64>| RopeScaling::Yarn {
        factor: 4.0,
        original_context,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        magnitude,
    };
    for key in ["rope_scaling", "rope_parameters"] {
        for kind in ["type", "rope_type"] {
            for (value, expected) in [
                (json!({ kind: "linear", "factor": 4.0 }), RopeScaling::Linear { factor: 4.0 }),
                (json!({ kind: "yarn", "factor": 4 }), yarn(512.0, None)),
                (
                    json!({ kind: "yarn", "factor": 4.0, "original_max_position_embeddings": 128 }),
                    yarn(128.0, None),
                ),
                (
                    json!({ kind: "yarn", "factor": null, "original_max_position_embeddings": 128 }),
                    yarn(128.0, None),
                ),
                (
                    json!({ kind: "yarn", "factor": 4.0, "attention_factor": 0.5, "mscale": 1, "mscale_all_dim": 1 }),
                    yarn(512.0, Some(0.5)),
                ),
                (
                    json!({ kind: "yarn", "factor": 4.0, "attn_factor": 1.0, "finetuned": true }),
                    yarn(512.0, None),
                ),
                (json!({ kind: "dynamic", "factor": 2.0 }), RopeScaling::None),
                (json!({ kind: "default", "mrope_section": [2, 1, 1] }), RopeScaling::None),
                (json!({ "factor": 1.0 }), RopeScaling::None),
                (json!({}), RopeScaling::None),
            ] {
                let Some(found) = rotation(key, value.clone()) else { return };
                assert_eq!(found, Ok(expected), "{key} {value}");
            }
            for (value, named) in [
                (json!({ "factor": 4.0 }), "rope_type"),
                (json!({ kind: "linear", "factor": 4.0, "new": 1 }), "new"),
                (json!({ kind: "linear", "factor": "4.0" }), "factor"),
                (json!({ kind: "linear" }), "factor"),
                (json!({ kind: "yarn", "factor": 4.0, "attn_factor": 0.5 }), "attn_factor"),
                (
                    json!({ kind: "yarn", "factor": 4.0, "extrapolation_factor": 0.5 }),
                    "extrapolation_factor",
                ),
                (
                    json!({ kind: "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1 }),
                    "llama_4_scaling_beta",
                ),
                (json!({ kind: "ntk", "factor": 4.0 }), "ntk"),
                (json!("linear"), key),
            ] {
                let Some(found) = rotation(key, value.clone()) else { return };
                let error = found.unwrap_err();
                assert!(error.contains(named), "{key} {value}: {error}");
            }
        }
    }
    let both = |other: Value| {
        let copy = changed("llama3_rope", |config| {
            config["rope_scaling"] = json!({ "type": "linear", "factor": 2.0 });
            config["rope_parameters"] = other;
        })?;
        Some(describe(copy.path()).map_err(|error| error.to_string()))
    };
    let Some(same) = both(json!({ "rope_type": "linear", "factor": 2, "rope_theta": 7000.0 }))
    else {
        return;
    };
    assert_eq!(same.unwrap().ropes[0].theta, 7000.0);
    let error = both(json!({ "rope_type": "linear", "factor": 3.0 })).unwrap().unwrap_err();
    assert!(error.contains("factor"), "{error}");
}

#[test]
fn swish_is_silu() {
    let Some(copy) = changed("qwen3_moe", |config| config["hidden_act"] = "swish".into()) else {
        return;
    };
    describe(copy.path()).unwrap();
    let copy = changed("qwen3_moe", |config| config["hidden_act"] = "gelu".into()).unwrap();
    let error = describe(copy.path()).unwrap_err().to_string();
    assert!(error.contains("hidden_act") && error.contains("swish"), "{error}");
}

fn logits(folder: &Path) -> Vec<u32> {
    let options = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let mut session = Session::open(folder, &options, &mut |_, _| {}).unwrap();
    let logits = session.logits(&[3, 14, 15, 92, 65], None).unwrap();
    logits.into_iter().map(f32::to_bits).collect()
}

#[test]
fn tensors_may_have_no_prefix_or_another_one() {
    let Some(folder) = fixture("models/llama3_rope") else { return };
    let (usual, file) = (logits(&folder), folder.join("model.safetensors"));
    let copy = copied("llama3_rope").unwrap();
    for root in [
        "",
        "language_model.model.",
        "model.language_model.",
        "language_model.",
        "text_model.",
        "transformer.",
    ] {
        rewrite(&file, &copy.path().join("model.safetensors"), &|name| {
            Some(match name.strip_prefix("model.") {
                Some(rest) => format!("{root}{rest}"),
                None if root == "language_model.model." => format!("language_model.{name}"),
                None => name.to_owned(),
            })
        });
        assert_eq!(logits(copy.path()), usual, "{root}");
    }
}

/// Divides a folder's tensors over two files with an index, under these names in the index.
fn sharded(paths: [&str; 2], names: [&str; 2]) -> Option<(TempDir, Value)> {
    let copy = copied("llama3_rope")?;
    let file = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut map = serde_json::Map::new();
    for (number, path) in paths.iter().enumerate() {
        let target = copy.path().join(path);
        std::fs::create_dir_all(target.parent().unwrap()).unwrap();
        let own = |name: &str| usize::from(name.contains("layers.1.")) == number;
        rewrite(&file, &target, &|name| own(name).then(|| name.to_owned()));
        for name in all.names().into_iter().filter(|name| own(name)) {
            map.insert(name.to_owned(), names[number].into());
        }
    }
    std::fs::remove_file(&file).unwrap();
    Some((copy, json!({ "metadata": {}, "weight_map": map })))
}

fn write_index(folder: &Path, index: &Value) {
    std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn indexes_name_files_by_any_path_inside_the_folder() {
    let Some(folder) = fixture("models/llama3_rope") else { return };
    let usual = logits(&folder);
    for (paths, names) in [
        (["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"]),
        (["a.safetensors", "b.safetensors"], ["./a.safetensors", "././b.safetensors"]),
        (["one/a.safetensors", "two/b.safetensors"], ["one/a.safetensors", "./two//b.safetensors"]),
    ] {
        let (copy, index) = sharded(paths, names).unwrap();
        write_index(copy.path(), &index);
        assert_eq!(logits(copy.path()), usual, "{names:?}");
        let files = forebay_format::model_files(copy.path());
        for path in paths {
            assert!(
                files.contains(&copy.path().join(path)),
                "{path} is a file of the model: {files:?}"
            );
        }
    }
    let (copy, _) = sharded(["a.safetensors", "b.safetensors"], ["", ""]).unwrap();
    for outside in ["../a.safetensors", "one/../../a.safetensors", "/tmp/a.safetensors", ".", ""] {
        write_index(copy.path(), &json!({ "weight_map": { "x": outside } }));
        let error = describe(copy.path()).unwrap_err().to_string();
        assert!(error.contains("names the file"), "{outside}: {error}");
    }
}

#[test]
fn indexes_may_name_tensors_that_nothing_needs() {
    let Some(folder) = fixture("models/llama3_rope") else { return };
    let usual = logits(&folder);
    let names = ["a.safetensors", "b.safetensors"];
    let (copy, index) = sharded(names, names).unwrap();
    let with = |tensor: &str| {
        let mut index = index.clone();
        index["weight_map"][tensor] = "b.safetensors".into();
        write_index(copy.path(), &index);
    };
    for needless in [
        "mtp.fc.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision_tower.patch_embed.weight",
        "value_head.weight",
    ] {
        with(needless);
        assert_eq!(logits(copy.path()), usual, "{needless}");
    }
    for needed in
        ["model.layers.1.self_attn.q_proj.bias", "model.layers.0.mlp.gate_proj.weight_scale"]
    {
        with(needed);
        let error = with_causes(&describe(copy.path()).unwrap_err());
        assert!(error.contains(needed) && error.contains("b.safetensors"), "{error}");
    }
}

#[test]
fn empty_tensors_that_nothing_needs_are_left_out_of_packs_too() {
    let Some(copy) = copied("llama3_rope") else { return };
    let usual = logits(copy.path());
    let file = copy.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = all.tensors();
    let empty = TensorView::new(safetensors::Dtype::F32, vec![0, 4], &[]).unwrap();
    tensors.push(("unused.empty".into(), empty));
    let written = safetensors::serialize(tensors, None).unwrap();
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, written).unwrap();
    assert_eq!(logits(copy.path()), usual);
}
