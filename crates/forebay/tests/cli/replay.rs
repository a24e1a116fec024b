//! Tests `--trace-routing` and `replay`: the recording matches the engine's counters.

use std::path::Path;

use serde_json::Value;

use crate::harness::{demo, forebay, replayed};

fn path(folder: &Path, name: &str) -> String {
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_recording_replays_to_the_engines_hit_rate() {
    let folder = tempfile::tempdir().unwrap();
    let trace = path(folder.path(), "demo.routing");
    for policy in ["layer-lfu", "lru", "layer-slru"] {
        let run = forebay(&[
            "run",
            "--max-tokens",
            "30",
            "--seed",
            "1",
            "--json",
            "--policy",
            policy,
            "--trace-routing",
            &trace,
            "--force",
        ])
        .json();
        let kept = &run["plan"]["kept_per_layer"];
        let kept: Vec<u64> = kept.as_array().unwrap().iter().map(|k| k.as_u64().unwrap()).collect();
        // One capacity matches the plan only if all layers keep the same number of experts.
        let capacity = format!("{}/layer", kept[0]);
        let report = replayed(&trace, policy, &capacity, "");
        let stream = &run["statistics"]["stream"];
        assert_eq!(report["lookups"], stream["lookups"]);
        assert_eq!(report["generated_tokens"], stream["generated_tokens"]);
        assert_eq!(report["prompt_tokens"], stream["prompt_tokens"]);
        if kept.iter().all(|&k| k == kept[0]) {
            let found = &report["replays"][0];
            assert_eq!(found["hit_rate"], stream["hit_rate"], "{policy}");
            assert_eq!(found["counters"]["all"]["evictions"], stream["evictions"], "{policy}");
        }
    }
}

#[test]
fn tables_csv_and_both_forms_of_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let [trace, text, back] =
        ["a.routing", "a.csv", "b.routing"].map(|name| path(folder.path(), name));
    forebay(&[
        "bench",
        &demo(),
        "--prompt-tokens",
        "9",
        "--gen-tokens",
        "12",
        "--repeat",
        "1",
        "--trace-routing",
        &trace,
    ])
    .ok();
    let table = forebay(&["replay", &trace, "--phase", "generate"]).ok().stdout;
    for needed in [
        "hit %, generated tokens",
        "misses for each generated token",
        "layer-lfu",
        "least-stale",
        "belady",
        "90%",
        "never hits",
    ] {
        assert!(table.contains(needed), "{needed} is missing in: {table}");
    }
    forebay(&["replay", &trace, "--to-csv", &text]).ok();
    forebay(&["replay", &text, "--to-trace", &back]).ok();
    let csv = |trace: &str| {
        let arguments = ["replay", trace, "--csv", "--policy", "layer-belady", "--capacity", "25%"];
        forebay(&arguments)
            .ok()
            .stdout
            .lines()
            .nth(1)
            .unwrap()
            .split_once(',')
            .unwrap()
            .1
            .to_owned()
    };
    assert_eq!(csv(&trace), csv(&text));
    assert_eq!(csv(&text), csv(&back));
    // Capacities of forebay's engine hold. The engine of published traces keeps a whole batch, so it finds more.
    let hits = |more: &str| {
        let replayed = &replayed(&trace, "layer-lfu", "2/layer", more)["replays"][0];
        replayed["counters"]["all"]["hits"].as_u64().unwrap()
    };
    assert!(hits(" --keep-batches") > hits(""));
    let predicted = &replayed(&trace, "layer-lfu", "8/layer", " --predict lag")["predictions"][0];
    assert!(
        predicted["foreseen"].as_u64().unwrap() > 0 && predicted["displaced_bytes"] != Value::Null
    );
}

#[test]
fn recorded_scores_are_for_the_predictor_that_needs_them() {
    let folder = tempfile::tempdir().unwrap();
    let trace = path(folder.path(), "demo.routing");
    let text = ["run", "--max-tokens", "40", "--seed", "1", "--trace-routing", &trace];
    let with = forebay(&[&text[..], &["--trace-scores"]].concat()).ok().stdout;
    let replayed = ["replay", &trace, "--predict", "next-router", "--policy", "layer-lfu"];
    let found = forebay(&[&replayed[..], &["--capacity", "25%", "--json"]].concat()).json();
    let found = &found["traces"][0]["predictions"][0];
    let recall = found["foreseen"].as_f64().unwrap() / found["lookups"].as_f64().unwrap();
    // Uniform random predictions would have a recall of one eighth.
    assert!(recall > 0.5, "{recall}");
    let table = forebay(&["replay", &trace, "--predict", "next-router"]).ok().stdout;
    assert!(table.contains("recall") && table.contains("precision"), "{table}");
    // Recording does not change the answer.
    assert_eq!(forebay(&[&text[..], &["--force"]].concat()).ok().stdout, with);
}

#[test]
fn what_cannot_be_replayed_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let trace = path(folder.path(), "demo.routing");
    assert!(forebay(&["replay", &demo()]).failed(1).contains("tales-moe"));
    assert!(forebay(&["replay", "no/such/file"]).failed(1).contains("no/such/file"));
    forebay(&["run", "--max-tokens", "3", "--trace-routing", &trace]).ok();
    let whole = std::fs::read(&trace).unwrap();
    std::fs::write(&trace, &whole[..whole.len() - 9]).unwrap();
    assert!(forebay(&["replay", &trace]).failed(1).contains("demo.routing"));
    std::fs::write(&trace, &whole).unwrap();
    let line = forebay(&["replay", &trace, "--predict", "next-router"]).failed(2);
    assert!(line.contains("router scores"), "{line}");
    let line = forebay(&["run", "--max-tokens", "3", "--trace-scores"]).failed(2);
    assert!(line.contains("--trace-routing"), "{line}");
    for wrong in [&["--capacity", "8"][..], &["--policy", "best"], &["--csv", "--json"]] {
        forebay(&[&["replay", &trace], wrong].concat()).failed(2);
    }
    let missing = path(folder.path(), "missing/out");
    assert!(forebay(&["run", "--trace-routing", &missing]).failed(1).contains("does not exist"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
