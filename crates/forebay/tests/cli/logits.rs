//! Tests `logits`: the same bytes with every budget, policy and read engine, and close to the reference.

use std::fs;
use std::path::Path;

use safetensors::SafeTensors;
use serde_json::Value;

use crate::harness::{fixture, forebay, moe, smallest_ram};

const IDS: &str = "5,17,301,44,9,120,77,3,250,31,8,499,60,61,62,63,64,65,66,67";

#[track_caller]
fn logits(out: &Path, arguments: &[&str]) -> Vec<u8> {
    let out = out.to_str().unwrap();
    forebay(&[&["logits", &moe(), "--tokens", IDS, "--force", "-o", out], arguments].concat()).ok();
    fs::read(out).unwrap()
}

#[test]
fn budgets_policies_and_engines_change_no_byte() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out.safetensors");
    let smallest = smallest_ram(&moe(), 20);
    let resident = logits(&out, &["--routing"]);
    let half = format!("{}B", smallest + 700_000);
    let smallest = format!("{smallest}B");
    for ram in [Some(smallest.as_str()), Some(half.as_str()), None] {
        for policy in ["layer-lru", "layer-lfu", "lru"] {
            for io in ["auto", "pread"] {
                let mut arguments = vec!["--routing", "--policy", policy, "--io", io];
                arguments.extend(ram.iter().flat_map(|ram| ["--ram", ram]));
                let bytes = logits(&out, &arguments);
                assert!(bytes == resident, "{arguments:?} changed the result");
            }
        }
    }
    let one_thread = logits(&out, &["--routing", "--threads", "1", "--ram", &smallest]);
    assert!(one_thread == resident, "the number of threads changed the result");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "left a file behind");
}

#[test]
fn exact_logits_and_routing_are_the_reference() {
    let Some(folder) = fixture("models/qwen3_moe") else { return };
    let reference: Value =
        serde_json::from_slice(&fs::read(folder.join("reference.json")).unwrap()).unwrap();
    let ids: Vec<String> =
        reference["short"]["ids"].as_array().unwrap().iter().map(Value::to_string).collect();
    let directory = tempfile::tempdir().unwrap();
    let list = directory.path().join("ids");
    fs::write(&list, ids.join("\n")).unwrap();
    let out = directory.path().join("out");
    let smallest = format!("{}B", smallest_ram(&moe(), ids.len()));
    let document = forebay(&[
        "logits",
        &moe(),
        "--tokens",
        &format!("@{}", list.display()),
        "--exact",
        "--routing",
        "--ram",
        &smallest,
        "--json",
        "-o",
        out.to_str().unwrap(),
    ])
    .json();
    assert_eq!(document["tokens"], ids.len());

    let bytes = fs::read(&out).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let expected = fs::read(folder.join("reference.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&expected).unwrap();
    let expected = expected.tensor("hf.short.logits").unwrap();
    let ours = file.tensor("logits").unwrap();
    assert_eq!(ours.shape(), expected.shape());
    let worst = floats(ours.data())
        .zip(floats(expected.data()))
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(worst <= 1e-3, "off by {worst}");

    let routing = file.tensor("routing").unwrap();
    let [tokens, layers, used] = routing.shape()[..] else { panic!("{:?}", routing.shape()) };
    let chosen: Vec<i32> = routing
        .data()
        .chunks_exact(4)
        .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    for layer in 0..layers {
        let wanted = &reference["short"]["routing"][layer.to_string()]["ids"];
        for token in 0..tokens {
            let at = (token * layers + layer) * used;
            let mut ours = chosen[at..at + used].to_vec();
            ours.sort_unstable();
            let wanted: Vec<i32> =
                serde_json::from_value(wanted[token].clone()).expect("experts of the reference");
            assert_eq!(ours, wanted, "token {token}, layer {layer}");
        }
    }
}

fn floats(data: &[u8]) -> impl Iterator<Item = f32> + '_ {
    data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}
