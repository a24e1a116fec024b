//! `run`: the first thing a newcomer does.

use serde_json::Value;

use crate::harness::{demo, forebay, forebay_with_input, moe};

#[test]
fn the_demo_streams_and_says_so() {
    let ran = forebay(&["run", "--max-tokens", "40"]).ok();
    assert!(ran.stdout.starts_with("The old sailor"), "{}", ran.stdout);
    assert!(ran.stdout.len() > 100, "{}", ran.stdout);
    assert!(ran.stderr.contains("streaming") && ran.stderr.contains("basin"), "{}", ran.stderr);
    for name in ["budget", "experts", "loading", "hit rate", "streamed", "from disk", "memory"] {
        assert!(ran.stderr.contains(name), "{name} is missing in: {}", ran.stderr);
    }
}

#[test]
fn the_demo_as_json() {
    let document = forebay(&["run", "--max-tokens", "40", "--json"]).json();
    let figure = |pointer: &str| {
        document.pointer(pointer).and_then(Value::as_f64).unwrap_or_else(|| panic!("{pointer}"))
    };
    assert!(figure("/statistics/budget_bytes") < figure("/statistics/model_bytes"));
    assert!(figure("/statistics/arena_bytes") <= figure("/statistics/budget_bytes"));
    assert!(figure("/statistics/stream/bytes_read") > 0.0);
    let hit_rate = figure("/statistics/stream/hit_rate");
    assert!((0.3..1.0).contains(&hit_rate), "{hit_rate}");
    let peak = figure("/statistics/peak_resident_bytes");
    let kv_cache = figure("/statistics/kv_cache_bytes");
    let limit = figure("/statistics/budget_bytes") + kv_cache + f64::from(200 << 20);
    assert!(peak <= limit, "{peak} of {limit}");
    assert_eq!(document["end"], "max_tokens");
    assert_eq!(document["generated_tokens"], 40);
    assert_eq!(document["tokens"].as_array().map(Vec::len), Some(40));
}

#[test]
fn the_seed_decides() {
    let run = |arguments: &[&str]| {
        let base = ["run", &demo(), "--raw", "--prompt", "Once upon a time", "--max-tokens", "16"];
        forebay(&[&base[..], arguments].concat()).ok().stdout
    };
    assert_eq!(run(&["--seed", "3"]), run(&["--seed", "3"]));
    assert_ne!(run(&["--seed", "3"]), run(&["--seed", "4"]));
    let greedy = run(&["--temperature", "0"]);
    assert_eq!(greedy, run(&["--temperature", "0", "--ram", "16MiB", "--io", "pread"]));
}

#[test]
fn a_stop_text_is_never_printed() {
    let base = ["run", &demo(), "--raw", "--temperature", "0", "--prompt", "Once upon a time"];
    let whole = forebay(&[&base[..], &["--max-tokens", "30"]].concat()).ok().stdout;
    // Some text from the middle, across a token border.
    let stop: String = whole.trim_end().chars().skip(20).take(9).collect();
    let expected = whole.split(&stop).next().unwrap();
    let ran = forebay(&[&base[..], &["--max-tokens", "30", "--stop", &stop]].concat()).ok();
    assert_eq!(ran.stdout.trim_end_matches('\n'), expected.trim_end_matches('\n'));
    let arguments = ["--max-tokens", "30", "--stop", &stop, "--json"];
    let document = forebay(&[&base[..], &arguments].concat()).json();
    assert_eq!(document["end"], "stop_text");
    assert_eq!(document["text"], expected);
}

#[test]
fn standard_input_is_the_prompt() {
    let arguments = ["run", &demo(), "--raw", "--temperature", "0", "--max-tokens", "8"];
    let piped = forebay_with_input(&arguments, "Once upon a time").ok().stdout;
    let given = forebay(&[&arguments[..], &["--prompt", "Once upon a time"]].concat()).ok().stdout;
    assert_eq!(piped, given);
    let line = forebay(&arguments).failed(1);
    assert!(line.contains("no prompt"), "{line}");
}

#[test]
fn a_missing_template_is_said() {
    let ran = forebay(&["run", &moe(), "--prompt", "x", "--max-tokens", "1"]).ok();
    assert!(ran.stderr.contains("no chat template"), "{}", ran.stderr);
    let ran = forebay(&["run", &moe(), "--prompt", "x", "--max-tokens", "1", "--raw"]).ok();
    assert_eq!(ran.stderr, "");
}

#[test]
fn the_answer_may_fill_the_context() {
    let arguments = ["run", &demo(), "--raw", "--prompt", "Once", "--ctx", "12", "--json"];
    let document = forebay(&arguments).json();
    assert_eq!(document["end"], "context_full", "{document}");
    let long = "word ".repeat(50);
    let line = forebay(&["run", &demo(), "--raw", "--prompt", &long, "--ctx", "12"]).failed(1);
    assert!(line.contains("12"), "{line}");
}
