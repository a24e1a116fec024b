//! Tests `forebay bench --parallel`.

use crate::harness::{demo, forebay, words};

#[test]
fn several_sequences_are_measured_together() {
    let line = format!(
        "bench {} --device cpu --parallel 1,3 --prompt-tokens 20 --gen-tokens 4 --repeat 2 --json",
        demo()
    );
    let document = forebay(&words(&line)).json();
    assert!(document["prompt"].is_null() && document["generate"].is_null());
    let parallel = document["parallel"].as_array().unwrap();
    assert_eq!(parallel.len(), 2);
    for (summary, sequences) in parallel.iter().zip([1, 3]) {
        assert_eq!(summary["sequences"], sequences);
        assert_eq!(summary["runs"].as_array().unwrap().len(), 2);
        let number = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("{key}"));
        let (all, each) =
            (number("generate_tokens_per_second"), number("generate_tokens_per_second_each"));
        assert!(number("prompt_tokens_per_second") > 0.0 && number("first_token_seconds") > 0.0);
        assert!(all > 0.0 && (all / each / f64::from(sequences) - 1.0).abs() < 0.5);
        // The demo model is a mixture of experts: three tokens use more of them than one.
        assert!(number("experts_per_pass") > 0.0);
    }
    let experts = |index: usize| parallel[index]["experts_per_pass"].as_f64().unwrap();
    assert!(experts(1) > experts(0), "{parallel:?}");
}

#[test]
fn the_engine_chooses_how_many_generate_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("routing.csv");
    let generate = format!(
        "run {} --device cpu -p Once --temperature 0 -n 12 --trace-routing {}",
        demo(),
        trace.display()
    );
    forebay(&words(&generate)).ok();
    let measure = |options: &str| {
        let line = format!(
            "bench {} --device cpu --parallel 3 --prompt-tokens 2 --gen-tokens 5 --repeat 1 --json{options}",
            demo()
        );
        forebay(&words(&line)).json()["parallel"][0].take()
    };
    let all = measure(" --scheduled");
    // Everything is in memory, so nothing speaks against all of them.
    assert_eq!(all["generating_per_pass"], 3.0);
    let rates = ["prompt_tokens_per_second", "generate_tokens_per_second", "first_token_seconds"];
    assert!(rates.iter().all(|rate| all[rate].as_f64().unwrap() > 0.0), "{all}");
    let experts = |options: &str| {
        let options = format!(" --routing-trace {}{options}", trace.display());
        measure(&options)["experts_per_pass"].as_f64().unwrap()
    };
    let (related, unrelated) = (experts(""), experts(" --unrelated"));
    assert!(unrelated > related, "other numbers share less: {unrelated} and {related}");
}

#[test]
fn a_prompt_arrives_while_others_generate() {
    let line = format!(
        "bench {} --device cpu --parallel 2 --arriving 150 --gen-tokens 60 --repeat 2 --json",
        demo()
    );
    let arrivals = |options: &str| {
        let document = forebay(&words(&format!("{line}{options}"))).json();
        document["arrivals"].as_array().unwrap().clone()
    };
    let automatic = arrivals("");
    assert_eq!(automatic.len(), 2);
    for run in &automatic {
        assert_eq!((&run["sequences"], &run["prompt_tokens"]), (&2.into(), &150.into()));
        let number = |key: &str| run[key].as_f64().unwrap_or_else(|| panic!("{key}"));
        assert!(number("usual_gap_seconds") > 0.0);
        assert!(number("longest_gap_seconds") >= number("median_gap_seconds"));
        assert!(number("first_token_seconds") > 0.0 && number("longest_pass_alone_seconds") > 0.0);
        assert!(number("generated_meanwhile") >= 2.0, "others go on: {run}");
        assert!(number("prompt_passes") >= 2.0, "the prompt is read in parts: {run}");
    }
    // There is time for the whole prompt in one pass, but its number of rows grows from pass to pass.
    let slow = arrivals(" --max-latency 100s");
    assert!(slow.iter().all(|run| run["prompt_passes"].as_f64().unwrap() <= 4.0), "{slow:?}");
    let shown = forebay(&words(&line.replace(" --json", ""))).ok().stdout;
    assert!(shown.contains("usual gap ms") && shown.contains("tokens meanwhile"), "{shown}");
}

#[test]
fn prompts_that_begin_alike_share_keys_and_values() {
    let line =
        format!("bench {} --device cpu --parallel 8 --shared-prefix 160 --repeat 2 --json", demo());
    let document = forebay(&words(&line)).json();
    let runs = document["prefixes"].as_array().unwrap();
    assert_eq!(runs.len(), 2);
    for run in runs {
        let number = |key: &str| run[key].as_f64().unwrap_or_else(|| panic!("{key}"));
        assert_eq!((number("requests"), number("own_tokens")), (8.0, 16.0));
        assert!(number("first_seconds") > number("later_seconds"), "{run}");
        assert_eq!(number("kv_bytes"), number("kv_bytes_once"), "the prefix is there once");
    }
}

#[test]
fn what_cannot_be_measured_together_is_refused() {
    for (options, words_of_error) in [
        ("--parallel 0", "--parallel"),
        ("--parallel 1,x", "--parallel"),
        ("--parallel 2 --depth 8", "--depth"),
        ("--scheduled", "--parallel"),
        ("--unrelated", "--routing-trace"),
        ("--arriving 10", "--parallel"),
        ("--shared-prefix 10", "--parallel"),
        ("--parallel 2 --shared-prefix 10 --gen-tokens 5", "--gen-tokens"),
        ("--parallel 2 --arriving 0", "--arriving"),
        ("--parallel 2 --arriving 10 --scheduled", "--scheduled"),
        ("--parallel 2 --max-latency 1s", "--max-latency is for --scheduled and --arriving"),
        ("--parallel 2 --scheduled --max-latency 5", "a time such as 200ms"),
        ("--parallel 2 --scheduled --max-latency 0s", "a time above 0"),
    ] {
        let line = format!("bench {} --device cpu {options}", demo());
        let error = forebay(&words(&line)).failed(2);
        assert!(error.contains(words_of_error), "{options}: {error}");
    }
}
