//! Tests what a server reports of itself over real connections: plans, statistics of answers, the access log, metrics and the
//! OpenAPI document.

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use forebay_engine::doctor::QualityState;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::{chat_model, demo, forebay, smallest_ram, words};
use crate::plan::saved_profile;
use crate::server::{Server, completion};

/// Returns the lines of a log that are there once `is_enough` is true of them.
fn lines(path: &Path, is_enough: impl Fn(&[Value]) -> bool) -> Vec<Value> {
    let started = Instant::now();
    loop {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        // The last line may not be written whole yet.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let lines: Vec<Value> =
            whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        if is_enough(&lines) {
            return lines;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{text}");
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_plan_of_a_loaded_model_has_the_keys_of_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::copy(demo(), at("fox.gguf")).unwrap();
    let model = at("fox.gguf");
    let options = ["--ram", "24MiB", "--ctx", "256"];
    let start = || {
        let arguments = [&[model.as_str()], &options[..]].concat();
        Server::with_environment(
            &arguments,
            &[("XDG_CONFIG_HOME", folder.path().to_str().unwrap())],
        )
    };
    let server = start();
    let plans: Value = serde_json::from_str(&server.get("/plan").1).unwrap();
    assert_eq!(plans["models"][0]["plan"], Value::Null);
    let why = plans["models"][0]["why_not"].as_str().unwrap();
    assert!(why.contains("forebay doctor"), "{why}");
    for (path, status) in
        [("/plan?model=fox", 200), ("/plan?model=other", 404), ("/plan?model=%zz&model=b", 400)]
    {
        assert_eq!(server.get(path).0, status, "{path}");
    }
    drop(server);

    // On a machine that was measured, the report is that of the command, without paths.
    saved_profile(folder.path(), &model, 1.0, Some((QualityState::Good, 1.0)));
    let line = format!("plan {model} --device cpu --json {}", options.join(" "));
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(words(&line)).env("XDG_CONFIG_HOME", folder.path());
    let command: Value = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    let server = start();
    let plans: Value = serde_json::from_str(&server.get("/plan").1).unwrap();
    let report = &plans["models"][0];
    assert_eq!(report["name"], "fox");
    for (key, value) in command.as_object().unwrap() {
        match key.as_str() {
            "path" => assert_eq!(report.get(key), None),
            "model" => assert_eq!(report["model"]["parameters"], value["parameters"]),
            "ram_bytes" | "context" | "prompt_tokens" | "machine" | "expected_hits_from" => {
                assert_eq!(&report[key], value, "{key}");
            }
            _ => assert!(report.get(key).is_some(), "{key}"),
        }
    }
    assert_eq!(report["plan"]["host"], command["plan"]["host"]);
    assert!(!plans.to_string().contains(folder.path().to_str().unwrap()), "{plans}");
}

/// Asserts what must be true of the statistics of an answer by a model that does not fit.
#[track_caller]
fn check(statistics: &Value, tokens: u64) {
    let number = |pointer: &str| {
        statistics
            .pointer(pointer)
            .and_then(Value::as_f64)
            .unwrap_or_else(|| panic!("{pointer}: {statistics}"))
    };
    assert_eq!(statistics["generated_tokens"], tokens, "{statistics}");
    let (hits, misses) = (number("/weights/expert_hits"), number("/weights/expert_misses"));
    assert_eq!(number("/hit_rate"), hits / (hits + misses), "{statistics}");
    assert!(misses > 0.0, "{statistics}");
    assert!(number("/bytes/disk") > 0.0, "{statistics}");
    assert_eq!(number("/bytes/pcie"), 0.0);
    assert!(number("/waiting_seconds/disk") > 0.0, "{statistics}");
    assert!(number("/waiting_seconds/disk") < number("/total_seconds"), "{statistics}");
    for cause in ["model", "queue", "pcie"] {
        assert!(number(&format!("/waiting_seconds/{cause}")) >= 0.0);
    }
    assert!(number("/first_token_seconds") > 0.0);
    let rate = number("/tokens_per_second");
    let expected =
        (tokens - 1) as f64 / (number("/total_seconds") - number("/first_token_seconds"));
    assert!((rate / expected - 1.0).abs() < 1e-6, "{rate} {expected}");
    // The demo model is too small for a prediction, and the reason is said.
    assert_eq!(statistics["predicted_tokens_per_second"], Value::Null);
    assert!(statistics["predicted"]["uncertain_because"].is_string(), "{statistics}");
}

#[test]
fn every_interface_reports_what_an_answer_needed() {
    let ram = format!("{}B", smallest_ram(&demo(), 256));
    let server = Server::start(&["--ram", &ram, "--ctx", "256", "--parallel", "1"]);
    let messages = json!([{ "role": "user", "content": "Tell me a story." }]);
    let chat = json!({ "messages": messages, "max_tokens": 20, "temperature": 0, "include_statistics": true });
    let mut streamed = chat.clone();
    streamed["stream"] = true.into();
    for path in ["/v1/chat/completions", "/v1/messages"] {
        let whole = server.post(path, &chat);
        let last = server.events(path, &streamed).pop().unwrap();
        for answer in [whole, last] {
            let statistics = &answer["statistics"];
            check(statistics.get(0).unwrap_or(statistics), 20);
        }
    }
    let mut responses = json!({ "input": "Tell me a story.", "max_output_tokens": 20, "temperature": 0,
        "include_statistics": true });
    check(&server.post("/v1/responses", &responses)["statistics"], 20);
    responses["stream"] = true.into();
    let events = server.events("/v1/responses", &responses);
    check(&events.last().unwrap()["response"]["statistics"], 20);
    let options = json!({ "num_predict": 20, "temperature": 0 });
    let ollama = json!({ "messages": messages, "options": options, "include_statistics": true });
    let (_, lines) = server.ask("POST", "/api/chat", "", &ollama.to_string());
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    check(&last["statistics"], 20);
    // Only on request.
    assert_eq!(
        server
            .post("/v1/messages", &json!({ "messages": messages, "max_tokens": 2 }))
            .get("statistics"),
        None
    );
}

#[test]
fn the_access_log_has_every_request_and_no_secrets() {
    let folder = tempfile::tempdir().unwrap();
    let [log, moved] = ["access.log", "access.log.1"].map(|name| folder.path().join(name));
    let server = Server::start(&["--access-log", log.to_str().unwrap()]);
    let prompt = "A secret fox";
    let mut body = completion(prompt, 5);
    let headers = "X-Request-Id: mine-1\r\nAuthorization: Bearer hidden-key\r\n";
    let mut stream = server.begin("POST", "/v1/completions", headers, &body.to_string());
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).unwrap();
    let (head, text) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.to_lowercase().contains("x-request-id: mine-1"), "{head}");
    let first = lines(&log, |lines| lines.len() == 1).pop().unwrap();
    for (key, value) in [
        ("request_id", json!("mine-1")),
        ("method", json!("POST")),
        ("path", json!("/v1/completions")),
        ("model", json!("demo")),
        ("status", json!(200)),
        ("bytes", json!(text.len())),
        ("generated_tokens", json!(5)),
    ] {
        assert_eq!(first[key], value, "{key}: {first}");
    }
    assert!(first["prompt_tokens"].as_u64().unwrap() > 0);
    let seconds = |line: &Value, key: &str| line[key].as_f64().unwrap();
    assert!(seconds(&first, "first_token_seconds") <= seconds(&first, "seconds"), "{first}");
    assert_eq!(first["key"].as_str().unwrap().len(), 12);
    assert!(first["remote"].as_str().unwrap().starts_with("127.0.0.1:"), "{first}");
    assert!(first["time"].as_str().unwrap().ends_with('Z'), "{first}");

    // Streams are logged when they end, with all their bytes; errors and other paths, too. A harmful id is replaced.
    body["stream"] = true.into();
    let (_, sent) = server.ask("POST", "/v1/completions", "", &body.to_string());
    server.ask("GET", "/nothing", "X-Request-Id: {\"a\": 1}\r\n", "");
    server.get("/health");
    let all = lines(&log, |lines| lines.len() == 4);
    assert_eq!((&all[1]["bytes"], &all[1]["generated_tokens"]), (&json!(sent.len()), &json!(5)));
    assert_eq!((&all[1]["key"], &all[2]["status"]), (&Value::Null, &json!(404)));
    assert!(all[2]["request_id"].as_str().unwrap().starts_with("req_"), "{}", all[2]);
    assert_eq!((&all[3]["model"], &all[3]["generated_tokens"]), (&Value::Null, &Value::Null));
    let text = std::fs::read_to_string(&log).unwrap();
    assert!(!text.contains("secret") && !text.contains("hidden"), "{text}");

    // After SIGHUP, the log goes on in a new file.
    std::fs::rename(&log, &moved).unwrap();
    kill_process(Pid::from_child(&server.child), Signal::HUP).unwrap();
    let started = Instant::now();
    while !log.exists() {
        assert!(started.elapsed() < Duration::from_secs(30), "no new file");
        thread::sleep(Duration::from_millis(20));
    }
    server.get("/v1/models");
    let path = lines(&log, |lines| lines.len() == 1)[0]["path"].clone();
    assert_eq!(path, "/v1/models");
    // A client that goes is logged with what it got.
    let mut long = completion("Once", 900);
    long["stream"] = true.into();
    let mut stream = server.begin("POST", "/v1/completions", "", &long.to_string());
    let _ = std::io::Read::read(&mut stream, &mut [0; 256]).unwrap();
    drop(stream);
    let gone = lines(&log, |lines| lines.len() == 2).pop().unwrap();
    assert!(gone["generated_tokens"].as_u64().unwrap() < 900, "{gone}");
    assert_eq!(server.end(), Some(0));
    // A file that is something else stays as it is.
    let precious = folder.path().join("precious.txt");
    let config = folder.path().join("generation_config.json");
    let json = "{\n  \"temperature\": 0.6,\n  \"eos_token_id\": 1\n}\n";
    std::fs::write(&precious, "precious").unwrap();
    std::fs::write(&config, json).unwrap();
    for (wrong, status) in
        [(&folder.path().join("none").join("log"), 1), (&precious, 2), (&config, 2)]
    {
        let wrong = wrong.to_str().unwrap();
        let options = ["--device", "cpu", "--port", "0", "--access-log", wrong];
        let error = forebay(&[&["serve", &demo()][..], &options].concat());
        assert!(error.failed(status).contains("--access-log"));
    }
    assert_eq!(std::fs::read(&precious).unwrap(), b"precious");
    assert_eq!(std::fs::read_to_string(&config).unwrap(), json);
}

#[test]
fn metrics_count_traffic_memory_and_statuses() {
    let server = Server::start(&["--ram", "18MiB"]);
    server.post("/v1/completions", &completion("Once upon a time", 40));
    server.ask("POST", "/v1/completions", "", "{");
    let metrics = || server.get("/metrics").1;
    let value = |text: &str, name: &str| -> Option<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.trim().parse().unwrap())
    };
    let started = Instant::now();
    // The engine's thread reports when it has no more work, shortly after the answer. On a busy machine there are reports before, in
    // which the answer still holds its blocks and no expert was found in memory yet.
    let text = loop {
        let text = metrics();
        let is_there = |name: &str| value(&text, name).is_some_and(|value| value > 0.0);
        if is_there("forebay_weights_bytes_total{model=\"demo\",tier=\"disk\"}")
            && is_there("forebay_expert_hits_total{model=\"demo\",tier=\"ram\"}")
            && is_there("forebay_kv_blocks{model=\"demo\",state=\"cached\"}")
        {
            break text;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{text}");
        thread::sleep(Duration::from_millis(20));
    };
    let at_least = |name: &str, least: f64| {
        let found = value(&text, name).unwrap_or_else(|| panic!("{name}: {text}"));
        assert!(found >= least, "{name} {found}");
    };
    for name in [
        "expert_hits_total{model=\"demo\",tier=\"ram\"}",
        "expert_misses_total{model=\"demo\",tier=\"ram\"}",
        "expert_hit_rate{model=\"demo\",tier=\"ram\"}",
        "evictions_total{model=\"demo\",tier=\"ram\"}",
        "weights_wait_seconds_total{model=\"demo\",cause=\"disk\"}",
        "disk_busy_seconds_total{model=\"demo\",disk=\"weights\"}",
        "disk_busy_ratio{model=\"demo\",disk=\"weights\"}",
        "ram_use_bytes{model=\"demo\",use=\"weights\"}",
        "ram_use_bytes{model=\"demo\",use=\"kv_cache\"}",
        "tokens_per_second{model=\"demo\",kind=\"generated\"}",
    ] {
        at_least(&format!("forebay_{name}"), f64::MIN_POSITIVE);
    }
    at_least("forebay_kv_blocks{model=\"demo\",state=\"cached\"}", 1.0);
    at_least("forebay_kv_blocks{model=\"demo\",state=\"in_use\"}", 0.0);
    at_least("forebay_evictions_total{model=\"demo\",tier=\"kv\"}", 0.0);
    at_least("forebay_http_responses_total{status=\"200\"}", 1.0);
    assert_eq!(value(&text, "forebay_http_responses_total{status=\"400\"}"), Some(1.0));
}

#[test]
fn the_openapi_document_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&["--files", folder.path().join("files").to_str().unwrap()]);
    let (status, text) = server.get("/openapi.json");
    assert_eq!(status, 200);
    let document: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(document["openapi"], "3.1.0");
    // Paths without parameters that need no body are there.
    for (path, item) in document["paths"].as_object().unwrap() {
        if item.get("get").is_some() && !path.contains('{') {
            assert_eq!(server.get(path).0, 200, "{path}");
        }
    }
}

#[test]
fn streams_get_comments_while_nothing_comes() {
    let folder = tempfile::tempdir().unwrap();
    let model = chat_model(&folder.path().join("m"));
    let options =
        ["--name", "demo", "--sse-ping-interval", "1", "--parallel", "1", "--ctx", "16384"];
    let server = Server::of(&[&[model.as_str()], &options[..]].concat());
    // The second request waits for the first one, which has the only place.
    let mut long = completion("Once", 15_000);
    long["stream"] = true.into();
    // Without its end tokens, the answer takes seconds.
    long["logit_bias"] = json!({ "497": -100, "499": -100 });
    let mut first = server.begin("POST", "/v1/completions", "", &long.to_string());
    let _ = std::io::Read::read(&mut first, &mut [0; 256]).unwrap();
    let mut second = server.begin("POST", "/v1/completions", "", &long.to_string());
    let mut text = String::new();
    let started = Instant::now();
    while !text.contains(": keep-alive\n\n") {
        assert!(started.elapsed() < Duration::from_secs(60), "{text}");
        let mut part = [0; 256];
        let count = std::io::Read::read(&mut second, &mut part).unwrap();
        assert!(count > 0, "{text}");
        text.push_str(&String::from_utf8_lossy(&part[..count]));
    }
    assert!(!text.contains("data: "), "{text}");
}
