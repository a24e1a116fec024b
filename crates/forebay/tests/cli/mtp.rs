//! Layers for multi-token prediction: `--mtp` of `run`, `bench` and `synth`.

use std::path::Path;

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
        assert!(error.contains("--mtp on"), "{args:?}: {error}");
    }
}
