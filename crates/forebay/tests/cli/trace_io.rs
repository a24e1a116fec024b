//! Tests `--trace-io` and `trace-io`: the recording matches the engine's counters.

use serde_json::Value;

use crate::harness::{command, demo, forebay};

#[test]
fn a_trace_has_what_the_statistics_say() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    for io in ["auto", "pread", "mmap"] {
        let trace = path(io);
        let arguments = ["run", "--max-tokens", "20", "--json", "--io", io, "--trace-io", &trace];
        let run = forebay(&arguments).json();
        let html = path("page.html");
        let chrome = path("chrome.json");
        let arguments =
            ["trace-io", &trace, "--json", "--html", &html, "--chrome", &chrome, "--force"];
        let report = forebay(&arguments).json();
        let reasons = report["reasons"].as_array().unwrap();
        let sum = |key: &str| -> u64 {
            let counted = reasons.iter().filter(|reason| reason["why"] != "small");
            counted.map(|reason| reason[key].as_u64().unwrap()).sum()
        };
        let counters = &run["statistics"]["stream"]["io"];
        assert_eq!(counters["requests"], sum("requests"), "{io}: {counters}");
        assert_eq!(counters["bytes_read"], sum("bytes"), "{io}");
        assert_eq!(report["engine"], run["statistics"]["io_engine"]["name"]);
        let experts = report["experts"]["requests"].as_array().unwrap();
        assert_eq!(experts.len() as u64, report["experts"]["layers"].as_u64().unwrap() * 32);
        // Small reads are rows of the embedding table: one for each token of prompt and answer except the last.
        let small = reasons.iter().find(|reason| reason["why"] == "small").unwrap();
        assert!(small["requests"].as_u64() >= run["generated_tokens"].as_u64(), "{small}");
        assert_eq!(report["pages"] == Value::Null, io != "mmap");
        let page = std::fs::read_to_string(&html).unwrap();
        assert!(page.starts_with("<!doctype html>") && page.contains("tales-moe"));
        let document: Value = serde_json::from_slice(&std::fs::read(&chrome).unwrap()).unwrap();
        let events = document["traceEvents"].as_array().unwrap();
        let slices = |group: &str| {
            let is_group = |event: &&Value| event["args"]["name"] == *group;
            let pid = events.iter().find(is_group).map(|event| &event["pid"]);
            events.iter().filter(|e| e["ph"] == "X" && Some(&e["pid"]) == pid).collect::<Vec<_>>()
        };
        let reads = slices("reads");
        assert_eq!(reads.len() as u64, sum("requests"), "{io}");
        let bytes = reads.iter().map(|slice| slice["args"]["bytes"].as_u64().unwrap());
        assert_eq!(bytes.sum::<u64>(), sum("bytes"), "{io}");
        assert_eq!(slices("computation").len() as u64, report["stalls"]["count"], "{io}");
    }
    let text = forebay(&["trace-io", &path("pread"), "--limit", "3GiB"]).ok().stdout;
    for needed in ["experts", "random", "3.00 GiB/s (given with --limit)", "stalls"] {
        assert!(text.contains(needed), "{needed} is missing in: {text}");
    }
}

#[test]
fn what_cannot_be_traced_or_read_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing/out");
    let line = forebay(&["run", "--trace-io", missing.to_str().unwrap()]).failed(1);
    assert!(line.contains("does not exist"), "{line}");
    let line = forebay(&["trace-io", &demo()]).failed(1);
    assert!(line.contains("tales-moe") && line.contains("not an I/O trace"), "{line}");
    let line = forebay(&["trace-io", "no/such/file"]).failed(1);
    assert!(line.contains("no/such/file"), "{line}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_trace_that_does_not_fit_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("run.trace");
    let html = folder.path().join("page.html");
    let (trace, html) = (trace.to_str().unwrap(), html.to_str().unwrap());
    // A limit on the size of files makes writes fail as on a full disk, and needs no root.
    let limited = |arguments: &[&str]| {
        let shell = "trap '' XFSZ; ulimit -f 1; exec \"$0\" \"$@\"";
        let binary = env!("CARGO_BIN_EXE_forebay");
        command("sh", &[&["-c", shell, binary], arguments].concat(), "")
    };
    let demo = demo();
    let traced = ["load", &demo, "--json", "--trace-io", trace];
    let line = limited(&traced).failed(1);
    assert!(line.contains("run.trace") && line.contains("cannot be written"), "{line}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    forebay(&traced).ok();
    let line = limited(&["trace-io", trace, "--html", html]).failed(1);
    assert!(line.contains("page.html") && line.contains("cannot be written"), "{line}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
