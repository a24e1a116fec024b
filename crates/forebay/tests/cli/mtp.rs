//! Layers for multi-token prediction: `--mtp` of `run`, `bench`, `logits` and `synth`.

use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::harness::{demo, forebay};

/// Returns a model of the formulas' fixtures, which has such a layer and no tokenizer.
fn formulas(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/formulas");
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn bench_measures_the_acceptance() {
    let model = formulas("glm-mtp");
    let args = ["bench", &model, "--prompt-tokens", "8", "--gen-tokens", "16", "--repeat", "2"];
    let on = [&args[..], &["--mtp", "on"]].concat();
    let document = forebay(&[&on[..], &["--json"]].concat()).json();
    for run in document["runs"].as_array().unwrap() {
        let of = |key: &str| run["mtp"][key].as_u64().unwrap();
        assert_eq!(of("passes") + of("accepted"), 16, "{run}");
        assert!(of("proposals") >= of("accepted") && of("rows") > of("passes"), "{run}");
        let share = of("accepted") as f64 / of("proposals") as f64;
        assert_eq!(run["mtp"]["acceptance"].as_f64(), Some(share));
    }
    assert!(document["statistics"]["mtp"]["proposals"].as_u64().unwrap() > 0);
    let stats = forebay(&on).ok().stderr;
    assert!(stats.contains("proposals  ") && stats.contains(" accepted ("), "{stats}");
    let off = forebay(&[&args[..], &["--json"]].concat()).json();
    assert!(off["runs"][0].get("mtp").is_none() && off["statistics"].get("mtp").is_none());
}

#[test]
fn synthetic_models_may_have_the_layer() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    for arch in ["qwen3.6-tiny", "deepseek-v3-tiny", "glm-4.5-tiny", "deepseek-v3.2-tiny"] {
        let (without, with) = (path("without.gguf"), path("with.gguf"));
        let tensors = |out: &str, more: &[&str]| {
            let args = [&["synth", arch, out, "--force", "--json"], more].concat();
            forebay(&args).json()["tensors"].as_u64().unwrap()
        };
        let (fewer, more) = (tensors(&without, &[]), tensors(&with, &["--mtp"]));
        let document = forebay(&["inspect", &with, "--json"]).json();
        let words = document["left_out"].as_str().unwrap();
        assert!(words.starts_with(&format!("{} tensors", more - fewer)), "{arch}: {words}");
        assert!(words.contains("--mtp on uses the first layer"), "{arch}: {words}");
        let run = ["run", &with, "-p", "abc", "--raw", "-n", "24", "--temperature", "0", "--json"];
        let plain = forebay(&run).json();
        let proposed = forebay(&[&run[..], &["--mtp", "on"]].concat()).json();
        assert_eq!(plain["text"], proposed["text"], "{arch}");
        assert!(proposed["statistics"]["mtp"]["proposals"].as_u64().unwrap() > 0, "{arch}");
        assert!(plain["statistics"].get("mtp").is_none());
        let none = forebay(&["run", &without, "-p", "abc", "--raw", "--mtp", "on"]).failed(2);
        assert!(none.contains("have no layers that predict further tokens"), "{arch}: {none}");
    }
    let refused = forebay(&["synth", "llama-tiny", &path("out.gguf"), "--mtp"]).failed(2);
    assert!(refused.contains("has no layer for multi-token prediction"), "{refused}");
}

/// Returns the values of a tensor as they are in the file.
fn data(file: &[u8], tensor: &str) -> Option<(Vec<usize>, Vec<u8>)> {
    let file = SafeTensors::deserialize(file).unwrap();
    let tensor = file.tensor(tensor).ok()?;
    Some((tensor.shape().to_vec(), tensor.data().to_vec()))
}

#[test]
fn logits_of_the_layer_are_what_the_formulas_say() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out.safetensors");
    for name in ["glm-mtp", "qwen35-mtp"] {
        let model = formulas(name);
        let reference = std::fs::read(Path::new(&model).join("reference.json")).unwrap();
        let reference: Value = serde_json::from_slice(&reference).unwrap();
        let ids: Vec<u32> = serde_json::from_value(reference["ids"].clone()).unwrap();
        let list = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let written = |more: &[&str]| {
            let out = out.to_str().unwrap();
            let args = ["logits", &model, "--tokens", &list, "--exact", "--force", "-o", out];
            forebay(&[&args[..], more].concat()).ok();
            std::fs::read(out).unwrap()
        };
        let (with, without) = (written(&["--mtp", "--routing"]), written(&["--routing"]));
        for tensor in ["logits", "routing"] {
            assert_eq!(data(&with, tensor), data(&without, tensor), "{name}, {tensor}");
        }
        assert_eq!(data(&without, "mtp_logits"), None);
        let (shape, bytes) = data(&with, "mtp_logits").unwrap();
        let expected: Vec<Vec<f32>> =
            serde_json::from_value(reference["proposals"].clone()).unwrap();
        assert_eq!(shape, [ids.len(), expected[0].len()]);
        let found = bytes.chunks_exact(4).map(|of| f32::from_le_bytes(of.try_into().unwrap()));
        let pairs = expected.iter().flatten().zip(found);
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(expected.len() + 1 == ids.len() && worst < 1e-4, "{name}: {worst}");
    }
    let (demo, out) = (demo(), out.to_str().unwrap());
    let none = forebay(&["logits", &demo, "--tokens", "1,2", "--mtp", "--force", "-o", out]);
    assert!(none.failed(2).contains("leave out --mtp"));
}

#[test]
fn what_cannot_check_proposals_refuses_them() {
    let (model, demo) = (formulas("glm-mtp"), demo());
    for args in [
        &["serve", &model, "--mtp", "on"][..],
        &["batch", &model, "in.jsonl", "-o", "out.jsonl", "--mtp", "on"],
        &["bench", &model, "--parallel", "2", "--mtp", "on"],
        &["bench", &model, "--routing-trace", "uniform", "--mtp", "on"],
        &["run", &model, "-p", "x", "--trace-routing", "out.routing", "--mtp", "on"],
        &["run", &demo, "-p", "x", "--raw", "--mtp", "on"],
    ] {
        let error = forebay(args).failed(2);
        assert!(error.contains("--mtp"), "{args:?}: {error}");
    }
}
