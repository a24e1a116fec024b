//! Tests `--log` and `FOREBAY_LOG`: spans go to standard error, and standard output has only results.

use std::process::Command;

use crate::harness::{Ran, demo, forebay};

const GENERATE: [&str; 8] =
    ["--prompt", "Once upon a time", "--max-tokens", "4", "--temperature", "0", "--device", "cpu"];

/// Runs the demo model with these options, and with `FOREBAY_LOG` if it is given.
fn run(options: &[&str], variable: Option<&str>) -> Ran {
    let config = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["run", &demo()]).args(GENERATE).args(options);
    command.env("XDG_CONFIG_HOME", config.path()).env_remove("FOREBAY_LOG");
    if let Some(value) = variable {
        command.env("FOREBAY_LOG", value);
    }
    let output = command.output().unwrap();
    Ran {
        status: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// Returns the log lines that report when a span of this name ended and how long it took.
fn closes<'a>(log: &'a str, level: &str, name: &str) -> Vec<&'a str> {
    let is_close = |line: &&str| {
        let Some((spans, rest)) = line.rsplit_once("}: forebay_") else { return false };
        let innermost = spans.rsplit_once("}:").map_or(spans, |(_, last)| last);
        line.contains(level)
            && rest.contains(" close time.busy=")
            && (innermost.starts_with(&format!("{name}{{"))
                || innermost.contains(&format!(" {name}{{"))
                || innermost.contains(&format!(":{name}{{")))
    };
    log.lines().filter(is_close).collect()
}

#[test]
fn debug_tells_what_was_done_and_how_long_it_took() {
    let quiet = run(&[], None).ok();
    assert!(!quiet.stderr.contains("close"), "{}", quiet.stderr);
    let logged = run(&["--log", "debug"], None).ok();
    assert_eq!(logged.stdout, quiet.stdout);
    let log = &logged.stderr;
    for name in ["open", "catalog", "tokenizer", "plan", "load", "fill", "prompt", "prompt_batch"] {
        assert!(!closes(log, "DEBUG", name).is_empty(), "{name} is missing in: {log}");
    }
    // The prompt yields the first token, and each other token needs one pass.
    let tokens = closes(log, "DEBUG", "token");
    assert_eq!(tokens.len(), 3, "{log}");
    assert!(tokens[0].contains("hits=") && tokens[0].contains("misses=0"), "{}", tokens[0]);
    assert!(closes(log, "DEBUG", "open")[0].contains("device=\"cpu\""), "{log}");
    assert!(closes(log, "DEBUG", "load")[0].contains("bytes="), "{log}");
    assert!(!log.contains(" TRACE "), "{log}");
    let document = run(&["--log", "debug", "--json"], None).json();
    assert_eq!(document["generated_tokens"], 4);
}

#[test]
fn trace_tells_every_layer_read_and_eviction() {
    let quiet = run(&["--ram", "12MiB"], None).ok();
    let logged = run(&["--ram", "12MiB", "--log", "trace"], None).ok();
    assert_eq!(logged.stdout, quiet.stdout);
    let log = &logged.stderr;
    for name in ["layer", "expert_wait"] {
        assert!(!closes(log, "TRACE", name).is_empty(), "{name} is missing in: {log}");
    }
    for said in [": lookup layer=", ": evict layer=", ": read block=", " seconds=", " misses="] {
        assert!(log.lines().any(|line| line.contains("TRACE") && line.contains(said)), "{said}");
    }
    // A directive for one crate logs the spans of that crate alone.
    let store = run(&["--ram", "12MiB", "--log", "forebay_store=trace"], None).ok().stderr;
    assert!(store.contains("forebay_store") && !store.contains("forebay_stream"), "{store}");
}

#[test]
fn a_packs_checks_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let pack = folder.path().join("demo.fbay");
    let pack = pack.to_str().unwrap();
    let packed = forebay(&["pack", &demo(), "-o", pack, "--log", "debug", "--json"]);
    assert!(!closes(&packed.stderr, "DEBUG", "pack").is_empty(), "{}", packed.stderr);
    packed.json();
    let mut arguments = vec!["--log", "trace", "run", pack, "--ram", "12MiB"];
    arguments.extend(GENERATE);
    let log = forebay(&arguments).ok().stderr;
    assert!(log.lines().any(|line| line.contains("verify block=") && line.contains("bytes=")));
}

#[test]
fn the_option_goes_before_the_variable() {
    assert!(run(&[], Some("debug")).ok().stderr.contains("DEBUG"));
    assert!(!run(&["--log", "error"], Some("trace")).ok().stderr.contains("TRACE"));
    assert!(!run(&[], Some("")).ok().stderr.contains("DEBUG"));
    let line = run(&[], Some("loud")).failed(2);
    assert!(line.contains("FOREBAY_LOG=loud") && line.contains("error, warn, info"), "{line}");
    let refused = run(&["--log", "loud"], None);
    assert_eq!((refused.status, refused.stdout.as_str()), (Some(2), ""));
    assert!(refused.stderr.contains("'--log <LEVEL>'"), "{}", refused.stderr);
}
