//! Tests `forebay serve --kv-disk` and `forebay kv`: what was read is found again after a restart, and after `kill -9` at any
//! moment no answer is wrong.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{demo, forebay};
use crate::server::{Server, completion};

/// Number of times that the server is killed. FOREBAY_KILLS sets another one.
const KILLS: usize = 12;
/// Number of prompts that are sent to the servers that are killed.
const PROMPTS: usize = 8;

fn text_of(answer: &Value) -> String {
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn prompt(number: usize) -> String {
    let names = ["fox", "bear", "girl", "king", "cat", "boy"];
    let name = names[number % names.len()];
    let told = (0..12).map(|day| format!("On day {day} the {name} went to house {number}. "));
    told.collect::<String>() + "Then"
}

fn serve(kv: &str, more: &[&str]) -> Server {
    Server::start(&[&["--kv-disk", kv, "--ctx", "512"], more].concat())
}

fn json_of(arguments: &[&str]) -> Value {
    forebay(&[arguments, &["--json"]].concat()).json()
}

#[test]
fn prompts_are_found_again_after_a_restart() {
    let folder = TempDir::new().unwrap();
    let (kv, key) = (folder.path().join("kv"), folder.path().join("key"));
    let (kv, key) = (kv.to_str().unwrap(), key.to_str().unwrap());
    fs::write(key, [7; 32]).unwrap();
    fs::set_permissions(key, fs::Permissions::from_mode(0o600)).unwrap();
    for sealed in [&[][..], &["--kv-disk-encrypt", key][..]] {
        let server = serve(kv, sealed);
        let first = server.post("/v1/completions", &completion(&prompt(1), 8));
        assert_eq!(cached(&first), 0);
        assert_eq!(server.end(), Some(0));
        let server = serve(kv, sealed);
        let again = server.post("/v1/completions", &completion(&prompt(1), 8));
        let tokens = again["usage"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(cached(&again), (tokens - 1) / 16 * 16);
        assert_eq!(text_of(&again), text_of(&first));
        let (_, metrics) = server.get("/metrics");
        let line = metrics.lines().find(|line| {
            line.starts_with("forebay_kv_positions_total") && line.contains("\"disk\"")
        });
        let count: f64 = line.unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(count as u64, cached(&again), "{line:?}");
        assert_eq!(server.end(), Some(0));
        let key = if sealed.is_empty() { vec![] } else { vec!["--key", key] };
        let list = json_of(&[&["kv", "list", kv], &key[..]].concat());
        assert_eq!(list["models"][0]["model"], "demo");
        assert!(list["models"][0]["blocks"].as_u64().unwrap() >= cached(&again) / 16);
        let verified = json_of(&[&["kv", "verify", kv], &key[..]].concat());
        assert_eq!(verified["damaged_blocks"], 0);
        let left = json_of(&[&["kv", "gc", kv, "--size", "1MiB"], &key[..]].concat());
        assert!(left["bytes"].as_u64().unwrap() <= 1 << 20, "{left}");
        forebay(&["kv", "wipe", kv]).ok();
        assert!(!Path::new(kv).exists());
    }
}

#[test]
fn folders_and_keys_that_do_not_fit_are_refused_or_not_used() {
    let folder = TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (kv, key, other) = (path("kv"), path("key"), path("other"));
    for (name, byte) in [(&key, 1), (&other, 2)] {
        fs::write(name, [byte; 40]).unwrap();
        fs::set_permissions(name, fs::Permissions::from_mode(0o600)).unwrap();
    }
    assert_eq!(serve(&kv, &["--kv-disk-encrypt", &key]).end(), Some(0));
    // With another key, the server answers and leaves the folder alone.
    let before: Vec<_> = names(&kv);
    let server = serve(&kv, &["--kv-disk-encrypt", &other]);
    assert_eq!(cached(&server.post("/v1/completions", &completion(&prompt(1), 2))), 0);
    assert_eq!(server.end(), Some(0));
    assert_eq!(names(&kv), before);

    let model = demo();
    let refused = |arguments: &[&str], status, part: &str| {
        let line = ["serve", &model, "--device", "cpu", "--port", "0"];
        let told = forebay(&[&line, arguments].concat()).failed(status);
        assert!(told.contains(part), "{told}");
    };
    refused(&["--kv-disk", &kv], 2, "are encrypted: give the key file");
    refused(&["--kv-disk", &kv, "--kv-ram", "0"], 2, "--kv-ram must not be 0");
    refused(&["--kv-disk-encrypt", &key], 2, "--kv-disk");
    refused(&["--kv-disk-type", "q8_0"], 2, "--kv-disk");
    let twice = ["--kv-disk", &kv, "--kv-disk-type", "q8_0", "--kv-type", "q8_0"];
    refused(&twice, 2, "rounds keys and values in f16");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    refused(&["--kv-disk", &kv, "--kv-disk-encrypt", &key], 2, "chmod 600");
    fs::set_permissions(&kv, fs::Permissions::from_mode(0o755)).unwrap();
    refused(&["--kv-disk", &kv, "--kv-disk-encrypt", &other], 2, "chmod 700");
    fs::write(path("short"), "short").unwrap();
    fs::set_permissions(path("short"), fs::Permissions::from_mode(0o600)).unwrap();
    refused(&["--kv-disk", &kv, "--kv-disk-encrypt", &path("short")], 1, "at least 32 bytes");
    let full = path("full");
    fs::create_dir(&full).unwrap();
    fs::set_permissions(&full, fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(Path::new(&full).join("letter.txt"), "mine").unwrap();
    refused(&["--kv-disk", &full], 2, "is not a folder of KV blocks");
    for action in ["list", "verify", "wipe"] {
        let told = forebay(&["kv", action, &full]).failed(2);
        assert!(told.contains("is not a folder of KV blocks"), "{told}");
        forebay(&["kv", action, &path("missing")]).failed(1);
    }
    assert_eq!(names(&full), ["letter.txt"]);
    forebay(&["kv", "gc", &kv]).failed(2);
    forebay(&["kv", "list", &kv, "--size", "1GiB"]).failed(2);
}

/// Asks a server that may be gone for a completion. Returns `None` if no whole answer comes.
fn try_ask(server: &Server, body: &str) -> Option<Value> {
    let mut stream = TcpStream::connect(&server.address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(120))).ok()?;
    let head = format!(
        "POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    assert!(head.contains(" 200 "), "{head} {body}");
    serde_json::from_str(body).ok()
}

fn names(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn keys_of_clients_tell_their_prompts_apart() {
    let folder = TempDir::new().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "first\nsecond\n").unwrap();
    for (more, shares) in [(&[][..], false), (&["--share-prefixes", "all"][..], true)] {
        let keys = ["--api-key-file", keys.to_str().unwrap()];
        let server = Server::start(&[&keys, more].concat());
        let ask = |key: &str| {
            let head = format!("Authorization: Bearer {key}\r\n");
            let body = completion(&prompt(2), 2).to_string();
            let (status, answer) = server.ask("POST", "/v1/completions", &head, &body);
            assert_eq!(status, 200, "{answer}");
            cached(&serde_json::from_str(&answer).unwrap())
        };
        assert_eq!(ask("first"), 0);
        assert!(ask("first") > 0);
        assert_eq!(ask("second") > 0, shares);
    }
}

/// Returns the number of blocks that are in the folder, as the server says.
fn blocks_on_disk(server: &Server) -> u64 {
    let (status, live) = server.get("/live");
    assert_eq!(status, 200, "{live}");
    let live: Value = serde_json::from_str(&live).unwrap();
    live["models"][0]["kv_tiers"]["disk"]["blocks"].as_u64().unwrap()
}

/// Sends prompts in a random order until the server is gone, compares the answers, and counts them.
fn ask_until_gone(
    server: &Server,
    expected: &[String],
    mut random: fastrand::Rng,
    answered: &AtomicUsize,
) {
    loop {
        let number = random.usize(..PROMPTS);
        let body = completion(&prompt(number), 8).to_string();
        let Some(answer) = try_ask(server, &body) else { break };
        assert_eq!(text_of(&answer), expected[number]);
        answered.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn after_kill_at_any_moment_no_answer_is_wrong() {
    let folder = TempDir::new().unwrap();
    let kv = folder.path().join("kv");
    let kv = kv.to_str().unwrap();
    let server = Server::start(&["--ctx", "512"]);
    let expected: Vec<String> = (0..PROMPTS)
        .map(|number| text_of(&server.post("/v1/completions", &completion(&prompt(number), 8))))
        .collect();
    drop(server);
    let kills = std::env::var("FOREBAY_KILLS").ok().and_then(|kills| kills.parse().ok());
    let mut random = fastrand::Rng::with_seed(11);
    let mut found = 0;
    for round in 0..kills.unwrap_or(KILLS) {
        // The prompts have about 75 blocks. The device has room for two sequences of 10, RAM for 8 blocks and the disk for 60, so
        // blocks move all the time.
        let small = ["--kv-tokens", "600", "--kv-ram", "512KiB", "--kv-disk-size", "4MiB"];
        let server = serve(kv, &[&small[..], &["--parallel", "2"]].concat());
        // The moment is a number of answers and a short time, because a busy machine gives few answers in a fixed time. The first
        // server also lives until it has written blocks for the second to find.
        let answers = random.usize(..24);
        let blocks = if round == 0 { 32 } else { 0 };
        let pause = Duration::from_millis(random.u64(..40));
        let answered = AtomicUsize::new(0);
        // Only the disk can have what the very first request finds.
        let number = random.usize(..PROMPTS);
        let first = server.post("/v1/completions", &completion(&prompt(number), 8));
        assert_eq!(text_of(&first), expected[number]);
        found += cached(&first);
        thread::scope(|scope| {
            let clients: Vec<_> = (0..3)
                .map(|_| {
                    let random = random.fork();
                    scope.spawn(|| ask_until_gone(&server, &expected, random, &answered))
                })
                .collect();
            let is_due =
                || answered.load(Ordering::Relaxed) >= answers && blocks_on_disk(&server) >= blocks;
            let began = Instant::now();
            let mut is_late = false;
            // A client ends early only if it got a wrong answer.
            while !clients.iter().any(|client| client.is_finished()) && !is_late && !is_due() {
                thread::sleep(Duration::from_millis(2));
                is_late = began.elapsed() > Duration::from_secs(300);
            }
            thread::sleep(pause);
            kill_process(Pid::from_child(&server.child), Signal::KILL).unwrap();
            assert!(!is_late, "{answers} answers and {blocks} blocks on the disk did not come");
        });
    }
    assert!(found > 0, "nothing was found again");
    let server = serve(kv, &[]);
    let mut found = 0;
    for (number, expected) in expected.iter().enumerate() {
        let answer = server.post("/v1/completions", &completion(&prompt(number), 8));
        assert_eq!(text_of(&answer), *expected);
        found += cached(&answer);
    }
    assert!(found > 0, "nothing is left after the last kill");
    assert_eq!(server.end(), Some(0));
    let listed = json_of(&["kv", "list", kv]);
    assert!(listed["bytes"].as_u64().unwrap() > 0, "{}", json!(listed));
}
