//! Tests `run`, the first command that new users try.

use serde_json::Value;

use crate::harness::{
    chat_model, demo, fixture, forebay, forebay_with_input, model_with_template, moe,
};

#[test]
fn the_demo_streams_and_says_so() {
    let ran = forebay(&["run", "--max-tokens", "40"]).ok();
    assert!(ran.stdout.starts_with("The old sailor"), "{}", ran.stdout);
    assert!(ran.stdout.len() > 100, "{}", ran.stdout);
    assert!(
        ran.stderr.contains("streaming") && ran.stderr.contains("weight cache"),
        "{}",
        ran.stderr
    );
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
    // The stop text is from the middle of the answer and crosses a token boundary.
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

#[test]
fn a_prompt_in_every_form() {
    let base = ["run", &demo(), "--raw", "--temperature", "0", "-n", "8"];
    let run = |arguments: &[&str], input: &str| {
        forebay_with_input(&[&base[..], arguments].concat(), input).ok().stdout
    };
    let expected = run(&["--prompt", "Once upon a time"], "");
    assert_eq!(run(&["-p", "Once upon a time"], ""), expected);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("prompt.txt");
    std::fs::write(&file, "Once upon a time").unwrap();
    assert_eq!(run(&["-f", file.to_str().unwrap()], ""), expected);
    let positional = ["run", &demo(), "Once upon a time", "--raw", "--temperature", "0", "-n", "8"];
    assert_eq!(forebay(&positional).ok().stdout, expected);
    // If both a prompt and text on standard input are given, they are joined by an empty line.
    let document = |arguments: &[&str], input: &str| {
        forebay_with_input(&[&base[..], &["--json"], arguments].concat(), input).json()
    };
    let both = document(&["-p", "Once upon"], "a time");
    assert_eq!(both["prompt"], "Once upon\n\na time");
    assert_eq!(both["tokens"], document(&["-p", "Once upon\n\na time"], "")["tokens"]);
    let line = forebay(&["run", &demo(), "-f", "/no/such/file"]).failed(1);
    assert!(line.contains("/no/such/file"), "{line}");
}

#[test]
fn short_flags_are_the_long_ones() {
    let model = demo();
    let long =
        ["--prompt", "Once", "--max-tokens", "6", "--seed", "4", "--ctx", "32", "--threads", "1"];
    let short = ["-p", "Once", "-n", "6", "-s", "4", "-c", "32", "-t", "1"];
    let run =
        |options: &[&str]| forebay(&[&["run", &model, "--raw"], options].concat()).ok().stdout;
    assert_eq!(run(&long), run(&short));
}

#[test]
fn raw_text_that_begins_with_bos_gets_no_second_one() {
    let model = fixture("models/llama3_rope").expect("the project holds it");
    let model = model.to_str().unwrap();
    let run = |text: &str| {
        let options = ["--raw", "--temperature", "0", "-n", "4", "--json", "-p", text];
        forebay(&[&["run", model], &options[..]].concat()).json()
    };
    let (with, without) = (run("<|begin_of_text|>Hello"), run("Hello"));
    assert_eq!(with["prompt_tokens"], without["prompt_tokens"]);
    assert_eq!(with["tokens"], without["tokens"]);
}

#[test]
fn options_of_the_template_reach_it_or_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let model = chat_model(&directory.path().join("model"));
    let tokens = |options: &[&str]| {
        let base = ["run", &model, "-p", "Hello", "-n", "1", "--json"];
        forebay(&[&base[..], options].concat()).json()["prompt_tokens"].as_u64().unwrap()
    };
    let plain = tokens(&[]);
    assert!(tokens(&["--system", "Be brief."]) > plain);
    let file = directory.path().join("system.txt");
    std::fs::write(&file, "Be brief.").unwrap();
    assert_eq!(
        tokens(&["--system-file", file.to_str().unwrap()]),
        tokens(&["--system", "Be brief."])
    );
    assert!(tokens(&["--think", "off"]) > plain);
    assert_eq!(tokens(&["--think", "on"]), plain);
    assert_eq!(tokens(&["--template-arg", "enable_thinking=false"]), tokens(&["--think", "off"]));
    for (options, wanted) in [
        (&["--think", "high"][..], "supports on and off (enable_thinking)"),
        (&["--template-arg", "mood=calm"], "it has enable_thinking"),
        (&["--think", "on", "--template-arg", "enable_thinking=true"], "set twice"),
    ] {
        let line = forebay(&[&["run", &model, "-p", "x"], options].concat()).failed(2);
        assert!(line.contains(wanted), "{line}");
    }
    let line = forebay(&["run", &moe(), "-p", "x", "--system", "y"]).failed(2);
    assert!(line.contains("no chat template"), "{line}");
    let line = forebay(&["run", &demo(), "-p", "x", "--think", "on"]).failed(2);
    assert!(line.contains("--think"), "{line}");
}

#[test]
fn thinking_is_apart_from_the_answer() {
    let directory = tempfile::tempdir().unwrap();
    // Text after <think> is thinking. This model never closes it.
    let source =
        "{% for m in messages %}({{ m.role }}) {{ m.content }} {% endfor %}<think>{# </think> #}";
    let model = model_with_template(&directory.path().join("model"), source, 512);
    let base = ["run", &model, "-p", "Hello", "-n", "12", "--temperature", "0"];
    let document = forebay(&[&base[..], &["--json"]].concat()).json();
    let thought = document["reasoning"].as_str().expect("it thinks").to_owned();
    assert!(!thought.is_empty());
    assert_eq!((&document["text"], &document["tool_calls"]), (&"".into(), &serde_json::json!([])));
    let shown = forebay(&base).ok();
    assert_eq!(shown.stdout.trim(), "");
    assert!(
        shown.stderr.contains("[thinking]") && shown.stderr.contains(&thought),
        "{}",
        shown.stderr
    );
    let hidden = forebay(&[&base[..], &["--hide-thinking"]].concat()).ok();
    assert!(!hidden.stderr.contains(&thought), "{}", hidden.stderr);
}
