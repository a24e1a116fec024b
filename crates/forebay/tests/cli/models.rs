//! Tests `inspect`, `bench` and `synth`.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::harness::{demo, forebay, moe};

#[test]
fn inspect_knows_the_demo_model() {
    let text = forebay(&["inspect", &demo()]).ok().stdout;
    for part in ["qwen3moe", "32 per layer, 4 per token", "8 layers", "experts", "Q4_K"] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
    let document = forebay(&["inspect", &demo(), "--tensors", "--json"]).json();
    assert_eq!(document["architecture"], "qwen3moe");
    let tensors = document["tensors"].as_array().expect("a list");
    let bytes: u64 = tensors.iter().filter_map(|tensor| tensor["bytes"].as_u64()).sum();
    assert_eq!(document["weights_bytes"].as_u64(), Some(bytes));
    let listing = forebay(&["inspect", &demo(), "--tensors"]).ok().stdout;
    for tensor in tensors {
        assert!(listing.contains(tensor["name"].as_str().unwrap()));
    }
}

/// A synthetic model of each family runs, and `inspect` lists its special features.
#[test]
fn families_run_and_say_what_is_special() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let families: [(&str, usize, &[&str]); 7] = [
        (
            "gpt-oss-tiny",
            2 * 2 * 128 * 2,
            &["sliding window", "attention sinks", "clamped SwiGLU", "expert biases"][..],
        ),
        (
            "deepseek-v3-tiny",
            2 * 288 * 2,
            &["latent attention (MLA)", "group-limited routing", "shared experts"][..],
        ),
        (
            "gemma3-tiny",
            2 * 2 * 128 * 2,
            &["sandwich norms", "GeGLU", "scaled embedding", "tied embeddings"][..],
        ),
        ("glm-4.5-tiny", 2 * 2 * 128 * 2, &["partial rotation", "routing", "biases"][..]),
        ("qwen3moe-tiny", 2 * 2 * 128 * 2, &["query/key norm"][..]),
        // One of the two layers keeps keys and values.
        ("qwen3.6-tiny", 2 * 128 * 2, &["gated DeltaNet", "gated attention", "shared experts"][..]),
        (
            "kimi-linear-tiny",
            288 * 2,
            &["Kimi Delta Attention", "latent attention (MLA)", "shared experts"][..],
        ),
    ];
    for (arch, kv_bytes, expected) in families {
        let out = path(arch);
        forebay(&["synth", arch, &out, "--layers", "2"]).ok();
        let document = forebay(&["inspect", &out, "--json"]).json();
        let features = document["features"].as_array().expect("a list");
        let named = |name: &str| features.iter().any(|feature| feature["name"] == name);
        let text = forebay(&["inspect", &out]).ok().stdout;
        for name in expected {
            assert!(named(name) && text.contains(name), "{arch}: {name} is missing in {text}");
        }
        assert_eq!(document["kv_bytes_per_position"], kv_bytes, "{arch}");
        let kept = &document["kv_bytes_per_position_kept"];
        // Of the two layers, one has a window in gpt-oss, and both have one in gemma3.
        let share = match arch {
            "gpt-oss-tiny" => 2_usize,
            "gemma3-tiny" => 0,
            _ => 1,
        };
        assert_eq!(kept, &kv_bytes.checked_div(share).unwrap_or(0), "{arch}");
        forebay(&["logits", &out, "--tokens", "1,2,3", "--force", "-o", &path("logits")]).ok();
    }
}

/// Layers after the last one predict further tokens. Opening the model reports once that they are left out.
#[test]
fn what_predicts_further_tokens_is_left_out_with_a_word() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let file = path("glm.gguf");
    forebay(&["synth", "glm-4.5-tiny", &file]).ok();
    // The key replaces another key of the same length whose value is also 2. Two of the four layers then predict
    // further tokens.
    let (usual, further) = (b"general.quantization_version", b"glm4moe.nextn_predict_layers");
    let mut bytes = fs::read(&file).unwrap();
    let at = bytes.windows(usual.len()).position(|window| window == usual).unwrap();
    bytes[at..][..further.len()].copy_from_slice(further);
    fs::write(&file, bytes).unwrap();

    let folder = path("folder");
    let from = crate::harness::fixture("models/llama3_rope").expect("it is among the small ones");
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), Path::new(&folder).join(entry.file_name())).unwrap();
    }
    let config = Path::new(&folder).join("config.json");
    let mut json: Value = serde_json::from_str(&fs::read_to_string(&config).unwrap()).unwrap();
    let layers = json["num_hidden_layers"].as_u64().unwrap();
    json["num_hidden_layers"] = (layers - 1).into();
    fs::write(&config, json.to_string()).unwrap();

    for (model, layers) in [(&file, 2), (&folder, layers - 1)] {
        let document = forebay(&["inspect", model, "--json"]).json();
        assert_eq!(document["layers"], layers);
        let words = document["left_out"].as_str().expect("words").to_owned();
        assert!(words.ends_with(" are left out: they predict further tokens"), "{words}");
        let ran =
            forebay(&["logits", model, "--tokens", "1,2,3", "--force", "-o", &path("logits")]).ok();
        assert_eq!(ran.stderr.matches(&format!("note: {words}\n")).count(), 1, "{}", ran.stderr);
        assert!(forebay(&["inspect", model]).ok().stdout.contains(&words));
    }
    let plain =
        forebay(&["logits", &demo(), "--tokens", "1", "--force", "-o", &path("logits")]).ok();
    assert!(!plain.stderr.contains("left out"), "{}", plain.stderr);
}

#[test]
fn inspect_reads_folders() {
    let document = forebay(&["inspect", &moe(), "--json"]).json();
    assert_eq!((&document["experts"], &document["experts_per_token"]), (&16.into(), &4.into()));
    assert_eq!(document["files"].as_array().map(Vec::len), Some(2));
}

#[test]
fn bench_measures_both_parts() {
    let base = ["bench", &moe(), "--prompt-tokens", "16", "--gen-tokens", "8", "--repeat", "2"];
    let text = forebay(&base).ok().stdout;
    assert!(text.contains("prompt") && text.contains("generate") && text.contains("median"));
    let document = forebay(&[&base[..], &["--json"]].concat()).json();
    let rate = |part: &str, name: &str| document[part][name].as_f64().expect("a number");
    for part in ["prompt", "generate"] {
        let median = rate(part, "tokens_per_second_median");
        assert!(rate(part, "tokens_per_second_min") <= median && median > 0.0);
        assert!(rate(part, "tokens_per_second_max") >= median);
    }
    assert_eq!(document["runs"].as_array().map(Vec::len), Some(2));
    let deep = forebay(&[&base[..], &["--depth", "9", "--json"]].concat()).json();
    assert_eq!(deep["runs"][0]["depth"], 9);
    let only = ["bench", &moe(), "--prompt-tokens", "0", "--gen-tokens", "4", "--json"];
    assert_eq!(forebay(&only).json()["prompt"], Value::Null);
}

#[test]
fn synth_makes_a_model_that_runs() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("model.gguf");
    let out = out.to_str().unwrap();
    let missing = forebay(&["synth", "gpt-9", out]).failed(2);
    assert!(missing.contains("qwen3moe-30b"), "{missing}");
    let wrong = forebay(&["synth", "llama-8b", out, "--quantisation", "Q9"]).failed(2);
    assert!(wrong.contains("Q4_K_M"), "{wrong}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);

    let line = ["synth", "qwen3moe-tiny", out, "--layers", "2", "--quantisation", "Q4_K_M"];
    let document = forebay(&[&line[..], &["--json"]].concat()).json();
    assert_eq!(document["bytes"].as_u64(), Some(fs::metadata(out).unwrap().len()));
    let said = forebay(&line).failed(2);
    assert!(said.contains("--force"), "{said}");
    forebay(&[&line[..], &["--force"]].concat()).ok();
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    let logits = directory.path().join("logits");
    forebay(&["logits", out, "--tokens", "1,2", "-o", logits.to_str().unwrap()]).ok();
}
