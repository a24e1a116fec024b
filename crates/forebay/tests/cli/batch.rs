//! Tests `forebay batch`: answers do not depend on what runs beside them or on interrupts, and no file is lost.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use serde_json::{Value, json};

use crate::harness::{Ran, demo, forebay, stuck_schema};

/// A folder with a file of requests.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new(requests: &[Value]) -> Place {
        let place = Place { folder: tempfile::tempdir().unwrap() };
        place.write("in.jsonl", requests);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, requests: &[Value]) {
        let lines: Vec<String> = requests.iter().map(|request| format!("{request}\n")).collect();
        fs::write(self.path(name), lines.concat()).unwrap();
    }

    fn arguments(&self, out: &str, more: &[&str]) -> Vec<String> {
        let [input, out] = ["in.jsonl", out].map(|name| self.path(name));
        let [input, out] = [input, out].map(|path| path.to_str().unwrap().to_owned());
        let mut arguments = vec!["batch".to_owned(), demo(), input, "-o".to_owned(), out];
        arguments.extend(["--device", "cpu"].iter().chain(more).map(|word| (*word).to_owned()));
        arguments
    }

    fn run(&self, out: &str, more: &[&str]) -> Ran {
        forebay(&self.arguments(out, more))
    }

    /// Runs a batch that gets a signal at a point of the program.
    fn ended_at(&self, out: &str, signal_at: &str) -> ExitStatus {
        Command::new(env!("CARGO_BIN_EXE_forebay"))
            .args(self.arguments(out, &["--parallel", "3"]))
            .env("FOREBAY_SIGNAL_AT", signal_at)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

fn completion(id: &str, mut body: Value) -> Value {
    body["max_tokens"] = body.get("max_tokens").cloned().unwrap_or(json!(12));
    json!({ "custom_id": id, "method": "POST", "url": "/v1/completions", "body": body })
}

/// Returns the requests that most tests use. Some sample with a seed of their own, some without one.
fn requests() -> Vec<Value> {
    let prompts = ["Once upon a time", "The old king", "A small dog", "In the forest"];
    let request = |index: usize| {
        let mut body = json!({ "prompt": prompts[index % 4], "max_tokens": 6 + 5 * (index % 4) });
        match index % 3 {
            0 => body["temperature"] = json!(0),
            1 => body["seed"] = json!(index),
            _ => body["n"] = json!(2),
        }
        completion(&format!("request {index}"), body)
    };
    (0..12).map(request).collect()
}

/// Reads the answers without the time at which the batch began.
fn answers(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let line = |line: &str| {
        let mut answer: Value = serde_json::from_str(line).unwrap();
        if let Some(body) = answer["response"]["body"].as_object_mut() {
            body.remove("created");
        }
        answer
    };
    text.lines().map(line).collect()
}

#[test]
fn answers_do_not_depend_on_the_requests_beside_them() {
    let place = Place::new(&requests());
    place.run("one", &["--parallel", "1"]).ok();
    place.run("three", &["--parallel", "3"]).ok();
    place.run("auto", &[]).ok();
    let one = answers(&place.path("one"));
    assert_eq!(one, answers(&place.path("three")));
    assert_eq!(one, answers(&place.path("auto")));
    // The largest request needs 25 positions, and others wait until there is room.
    place.run("short", &["--kv-tokens", "32"]).ok();
    assert_eq!(one, answers(&place.path("short")));
    let error = place.run("none", &["--kv-tokens", "8"]).failed(2);
    assert!(error.contains("--kv-tokens"), "{error}");
    assert_eq!(place.names(), ["auto", "in.jsonl", "one", "short", "three"]);
    for (index, answer) in one.iter().enumerate() {
        assert_eq!(answer["custom_id"], format!("request {index}"), "in the order of the input");
        let response = &answer["response"];
        assert_eq!((&response["status_code"], &answer["error"]), (&json!(200), &Value::Null));
        let choices = response["body"]["choices"].as_array().unwrap();
        assert_eq!(choices.len(), if index % 3 == 2 { 2 } else { 1 });
        let wanted = choices.len() * (6 + 5 * (index % 4));
        assert_eq!(response["body"]["usage"]["completion_tokens"], wanted);
        assert!(choices.iter().all(|choice| choice["finish_reason"] == "length"), "{answer}");
    }
    // Without a seed, two choices and two requests with the same prompt get other random numbers.
    let text = |index: usize, choice: usize| &one[index]["response"]["body"]["choices"][choice];
    assert_ne!(text(2, 0)["text"], text(2, 1)["text"]);
    // Whether it runs in a batch or alone, a greedy answer is the same.
    let arguments = [
        "run",
        &demo(),
        "--raw",
        "--device",
        "cpu",
        "-p",
        "Once upon a time",
        "--temperature",
        "0",
    ];
    let alone = forebay(&[&arguments[..], &["-n", "6", "--json"]].concat()).json();
    assert_eq!(text(0, 0)["text"], alone["text"]);
}

/// The points of a batch at which a process can be ended, each with how often it is reached.
const POINTS: [(&str, usize); 6] = [
    ("journal begun", 1),
    ("answer added", 12),
    ("output begun", 2),
    ("output written", 1),
    ("output named", 1),
    ("journal removed", 1),
];

#[test]
fn work_that_is_killed_goes_on_without_loss_or_repetition() {
    let place = Place::new(&requests());
    place.run("whole", &[]).ok();
    let expected = answers(&place.path("whole"));
    for (point, times) in POINTS {
        for count in [1, times.div_ceil(2), times].iter().collect::<std::collections::BTreeSet<_>>()
        {
            let out = format!("{point} {count}");
            let status = place.ended_at(&out, &format!("KILL:{count}:{point}"));
            assert_eq!(status.signal(), Some(9), "{out}: the point is not reached");
            // The same command goes on, also if all its work was done.
            let ran = place.run(&out, &[]);
            match point {
                // Nothing is left to show whose answers these are.
                "journal removed" => assert!(ran.failed(2).contains("--force")),
                _ => drop(ran.ok()),
            }
            assert_eq!(answers(&place.path(&out)), expected, "{out}");
            assert!(!place.path(&format!("{out}.partial")).exists(), "{out}");
        }
    }
    // Several ends in a row, interrupts among them.
    for at in ["KILL:1:answer added", "INT:2:answer added", "KILL:3:answer added"] {
        place.ended_at("row", at);
    }
    for at in ["KILL:1:output written", "INT:1:output named"] {
        place.ended_at("row", at);
    }
    if place.path("row.partial").exists() {
        place.run("row", &[]).ok();
    }
    assert_eq!(answers(&place.path("row")), expected);
    assert!(!place.path("row.partial").exists());
}

#[test]
fn a_journal_beside_another_output_removes_nothing() {
    let place = Place::new(&requests());
    let journal = place.path("out.partial");
    let status = place.ended_at("out", "KILL:1:output named");
    assert_eq!(status.signal(), Some(9));
    let whole = fs::read(place.path("out")).unwrap();
    let kept = fs::read(&journal).unwrap();
    let [mut changed, mut longer] = [whole.clone(), whole.clone()];
    changed[10] ^= 1;
    longer.extend(b"x");
    for other in [&changed, &longer, &whole[..whole.len() - 1].to_vec(), &Vec::new()] {
        fs::write(place.path("out"), other).unwrap();
        assert!(place.run("out", &[]).failed(2).contains("--force"));
        assert_eq!(fs::read(place.path("out")).unwrap(), *other);
        assert_eq!(fs::read(&journal).unwrap(), kept);
    }
    // The journal has the answers, so they can be written again.
    place.run("out", &["--force"]).ok();
    assert_eq!(fs::read(place.path("out")).unwrap(), whole);
    assert!(!journal.exists());
}

#[test]
fn a_line_that_was_cut_is_answered_again() {
    let place = Place::new(&requests());
    place.run("whole", &[]).ok();
    // A journal with some answers and the beginning of another.
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(place.arguments("out", &["--parallel", "1"]))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let partial = place.path("out.partial");
    while fs::read_to_string(&partial).unwrap_or_default().lines().count() < 4 {
        assert!(child.try_wait().unwrap().is_none(), "the batch ended too soon");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let journal = fs::read(&partial).unwrap();
    let end = journal.iter().rposition(|byte| *byte == b'\n').unwrap();
    fs::write(&partial, &journal[..end - 3]).unwrap();
    let ran = place.run("out", &[]).ok();
    let told = ran.stderr.lines().find(|line| line.starts_with("answered already: "));
    assert!(told.is_some_and(|line| line.ends_with(" of 12 requests")), "{}", ran.stderr);
    assert_eq!(answers(&place.path("out")), answers(&place.path("whole")));
}

#[test]
fn other_files_and_other_batches_are_left_alone() {
    let place = Place::new(&requests());
    fs::write(place.path("out"), "precious").unwrap();
    let line = place.run("out", &[]).failed(2);
    assert!(line.contains("--force"), "{line}");
    place.run("out", &["--force"]).ok();
    assert_eq!(answers(&place.path("out")).len(), 12);
    // A file that is no journal is not replaced, not even with --force.
    fs::write(place.path("new.partial"), "precious").unwrap();
    for more in [&[][..], &["--force"]] {
        let line = place.run("new", more).failed(2);
        assert!(line.contains("is no journal"), "{line}");
    }
    assert_eq!(fs::read(place.path("new.partial")).unwrap(), b"precious");
    // The journal of another batch is replaced only with --force.
    let header = json!({ "forebay_batch": 1, "created": 1, "settings": { "--max-tokens": 3 } });
    fs::write(place.path("third.partial"), format!("{header}\n0\t{{}}\n")).unwrap();
    let line = place.run("third", &[]).failed(2);
    assert!(line.contains("--max-tokens") && line.contains("--force"), "{line}");
    place.run("third", &["--force"]).ok();
    // Without answers, it is replaced.
    fs::write(place.path("fourth.partial"), format!("{header}\n")).unwrap();
    place.run("fourth", &[]).ok();
    // Nothing stays of a batch whose model cannot be opened.
    place.run("fifth", &["--ram", "1MiB"]).failed(1);
    for (out, why) in [("-", "name a file"), ("/dev/null", "no regular file")] {
        let input = place.path("in.jsonl");
        let line = forebay(&["batch", &demo(), input.to_str().unwrap(), "-o", out]).failed(2);
        assert!(line.contains(why), "{line}");
    }
    // The input is never an output.
    let line = place.run("in.jsonl", &["--force"]).failed(2);
    assert!(line.contains("which this command reads"), "{line}");
    assert_eq!(place.names(), ["fourth", "in.jsonl", "new.partial", "out", "third"]);
}

#[test]
fn two_processes_do_not_share_a_batch() {
    let place = Place::new(&requests());
    let partial = place.path("out.partial");
    let journal = fs::File::create(&partial).unwrap();
    journal.lock().unwrap();
    let line = place.run("out", &[]).failed(1);
    assert!(line.contains("another process works on this batch"), "{line}");
    drop(journal);
    // An empty journal is that of a process that was killed at its beginning.
    place.run("out", &[]).ok();
}

#[test]
fn a_request_that_cannot_be_run_is_refused_alone() {
    let chat = |id: &str, body: Value| json!({ "custom_id": id, "url": "/v1/chat/completions", "body": body });
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    let place = Place::new(&[
        completion("good", json!({ "prompt": "The sea", "temperature": 0 })),
        completion("streams", json!({ "prompt": "The sea", "stream": true })),
        completion("typo", json!({ "prompt": "The sea", "heat": 1 })),
        completion("long", json!({ "prompt": vec![1; 5000] })),
        completion("no such token", json!({ "prompt": [4_000_000_000_u32] })),
        completion("empty", json!({ "prompt": Vec::<u32>::new() })),
        chat("role", json!({ "messages": [{ "role": "king", "content": "x" }] })),
        chat("effort", json!({ "messages": messages, "reasoning_effort": "high" })),
        completion("stops", json!({ "prompt": "Once upon a time", "stop": ["a", "e", "i", "o"] })),
        completion(
            "grammar",
            json!({ "prompt": "The sea", "max_tokens": 200, "guided_json": stuck_schema() }),
        ),
    ]);
    let ran = place.run("out", &["--ctx", "512"]).ok();
    assert!(ran.stderr.contains("8 of them are errors"), "{}", ran.stderr);
    let answers = answers(&place.path("out"));
    let error = |index: usize| {
        let response = &answers[index]["response"];
        assert_eq!(response["status_code"], 400, "{response}");
        response["body"]["error"].clone()
    };
    assert_eq!(answers[0]["response"]["status_code"], 200);
    assert_eq!(error(1)["param"], "stream");
    assert!(error(2)["message"].as_str().unwrap().contains("heat"));
    assert_eq!(error(3)["code"], "context_length_exceeded");
    assert_eq!(error(4)["type"], "invalid_request_error");
    assert_eq!(error(5)["param"], "prompt");
    assert_eq!(error(6)["param"], "messages[0].role");
    assert_eq!(error(7)["param"], "reasoning_effort");
    assert_eq!(error(9)["type"], "invalid_request_error");
    assert!(error(9)["message"].as_str().unwrap().contains("cannot continue after"));
    let stopped = &answers[8]["response"]["body"]["choices"][0];
    assert_eq!(stopped["finish_reason"], "stop");
    assert!(!stopped["text"].as_str().unwrap().contains(['a', 'e', 'i', 'o']), "{stopped}");
}

#[test]
fn a_file_that_is_no_batch_is_an_error() {
    let place = Place::new(&[]);
    for (text, why) in [
        ("", "there is no request"),
        ("{", "line 1: not JSON"),
        ("\n{\"custom_id\": \"a\"}", "line 2: url must be"),
    ] {
        fs::write(place.path("in.jsonl"), text).unwrap();
        let line = place.run("out", &[]).failed(1);
        assert!(line.contains(why), "{line}");
    }
    assert_eq!(place.names(), ["in.jsonl"]);
    let line = place.run("out", &["--parallel", "0"]).failed(2);
    assert!(line.contains("--parallel"), "{line}");
}

#[test]
fn keys_and_values_on_disk_are_found_by_a_later_batch_and_change_no_answer() {
    let start = "The king walked through the forest and came to a small house. ".repeat(12);
    let request = |name: &str, end: &str| {
        let prompt = format!("{start}{end}");
        completion(name, json!({ "prompt": prompt, "temperature": 0, "max_tokens": 10 }))
    };
    let place = Place::new(&[request("first", "He"), request("second", "She")]);
    place.run("plain.jsonl", &[]).ok();
    let kv = place.path("kv").to_str().unwrap().to_owned();
    let more = ["--kv-disk", kv.as_str(), "--parallel", "1"];
    let trace = |name: &str| place.path(name).to_str().unwrap().to_owned();
    let run = |output: &str, trace: &str| {
        let options = [&more[..], &["--trace-io", trace]].concat();
        place.run(output, &options)
    };
    run("written.jsonl", &trace("first.trace")).ok();
    let listed = forebay(&["kv", "list", &kv, "--json"]).ok();
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    let of_model = &listed["models"][0];
    assert!(of_model["bytes"].as_u64().unwrap() > 100_000, "{listed}");
    forebay(&["kv", "verify", &kv]).ok();
    let line = run("read.jsonl", &trace("first.trace")).failed(2);
    assert!(line.contains("first.trace"), "{line}");
    let line = run("read.jsonl", &trace("read.jsonl")).failed(2);
    assert!(line.contains("read.jsonl"), "{line}");
    let read = run("read.jsonl", &trace("second.trace")).ok();
    // Keys and values were written by the first batch and read by the second.
    for (name, reads) in [("first.trace", false), ("second.trace", true)] {
        let report = forebay(&["trace-io", &trace(name), "--json"]).ok();
        let report: Value = serde_json::from_str(&report.stdout).unwrap();
        let bytes = |key: &str| report[key].as_u64().unwrap();
        assert_eq!(bytes("kv_read_bytes") > 100_000, reads, "{name}");
        // The second batch finds what the first has written.
        assert!(reads || bytes("kv_written_bytes") > 100_000, "{name}");
        let parts = report["components"].as_array().unwrap();
        assert!(parts.iter().any(|part| part["component"] == "kv"), "{parts:?}");
        let text = forebay(&["trace-io", &trace(name)]).ok().stdout;
        assert!(text.contains("of keys and values read"), "{text}");
    }
    assert!(!read.stderr.contains("warning"), "{}", read.stderr);
    let [plain, written, read] =
        ["plain.jsonl", "written.jsonl", "read.jsonl"].map(|name| answers(&place.path(name)));
    let cached = |answer: &Value| {
        let usage = &answer["response"]["body"]["usage"];
        let details = &usage["prompt_tokens_details"];
        (details["cached_tokens"].as_u64(), usage["prompt_tokens"].as_u64())
    };
    for ((plain, written), read) in plain.iter().zip(&written).zip(&read) {
        let choices = |answer: &Value| answer["response"]["body"]["choices"].clone();
        assert_eq!(choices(written), choices(plain));
        assert_eq!(choices(read), choices(plain));
        let (cached, prompt) = cached(read);
        assert!(cached.unwrap() + 17 > prompt.unwrap(), "{read}");
    }
    let refused = place.run("other.jsonl", &["--kv-disk", &kv, "--kv-ram", "0"]);
    assert_eq!(refused.status, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("--kv-ram must not be 0"), "{}", refused.stderr);
}
