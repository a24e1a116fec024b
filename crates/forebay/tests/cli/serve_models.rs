//! Tests `forebay serve` with several models: answers are those of each model alone, and models come and go as requests and
//! memory want it.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{command, demo, forebay, moe};
use crate::server::Server;

/// A folder with the models `one` and `two`, which are the demo model, and `small`.
fn library() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (target, name) in [(demo(), "one.gguf"), (demo(), "two.gguf"), (moe(), "small")] {
        symlink(fs::canonicalize(target).unwrap(), folder.path().join(name)).unwrap();
    }
    folder
}

fn path(folder: &TempDir) -> &str {
    folder.path().to_str().unwrap()
}

fn completion(model: &str, tokens: usize) -> Value {
    json!({ "model": model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": true })
}

fn text(server: &Server, body: &Value) -> String {
    let answer = server.post("/v1/completions", body);
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

/// Returns the names of the loaded models.
fn loaded(server: &Server) -> Vec<String> {
    let ps: Value = serde_json::from_str(&server.get("/api/ps").1).unwrap();
    let name = |model: &Value| model["name"].as_str().unwrap().replace(":latest", "");
    let mut names: Vec<String> = ps["models"].as_array().unwrap().iter().map(name).collect();
    names.sort();
    names
}

fn until(what: &str, is_true: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_true() {
        assert!(started.elapsed() < Duration::from_secs(30), "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn two_models_answer_as_each_alone() {
    let (demo, moe) = (demo(), moe());
    let alone = |model: &str| {
        text(
            &Server::of(&[model]),
            &json!({ "prompt": "Once upon a time",
        "max_tokens": 12, "temperature": 0, "ignore_eos": true }),
        )
    };
    let expected = [alone(&demo), alone(&moe)];
    let server = Server::of(&[&demo, &moe]);
    let names = ["tales-moe-sticky-Q4_K_M", "qwen3_moe"];
    thread::scope(|scope| {
        for _ in 0..3 {
            for (name, expected) in names.iter().zip(&expected) {
                let server = &server;
                scope.spawn(move || assert_eq!(text(server, &completion(name, 12)), *expected));
            }
        }
    });
    // A request without a name is for the first model.
    let unnamed = json!({ "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "ignore_eos": true });
    assert_eq!(text(&server, &unnamed), expected[0]);
    // Lists and descriptions have both, in the forms of the interfaces.
    let list: Value = serde_json::from_str(&server.get("/v1/models").1).unwrap();
    assert_eq!(
        (&list["data"][0]["id"], &list["data"][1]["id"]),
        (&names[0].into(), &names[1].into())
    );
    let tags: Value = serde_json::from_str(&server.get("/api/tags").1).unwrap();
    assert_eq!(tags["models"][1]["name"], "qwen3_moe:latest");
    assert!(tags["models"][1]["size"].as_u64().unwrap() > 0);
    let shown = server.post("/api/show", &json!({ "model": "qwen3_moe" }));
    assert_eq!(shown["model_info"]["qwen3moe.block_count"].as_u64(), Some(2));
    assert_eq!(server.get("/v1/models/qwen3_moe").0, 200);
    let ids = |name: &str| server.post("/tokenize", &json!({ "model": name, "content": "a fox" }));
    assert_ne!(ids(names[0])["tokens"], ids(names[1])["tokens"]);
    // Other names are unknown, in the forms of the interfaces.
    let messages = json!([{ "role": "user", "content": "x" }]);
    for wrong in ["other", "../qwen3_moe", "/etc/passwd", demo.as_str()] {
        let ask = |path: &str| {
            let mut body = json!({ "model": wrong });
            match path {
                "/v1/completions" | "/api/generate" => body["prompt"] = "x".into(),
                "/v1/responses" => body["input"] = "x".into(),
                "/v1/messages" => {
                    (body["messages"], body["max_tokens"]) = (messages.clone(), 1.into());
                }
                "/tokenize" => body["content"] = "x".into(),
                "/api/show" => {}
                _ => body["messages"] = messages.clone(),
            }
            let (status, answer) = server.ask("POST", path, "", &body.to_string());
            assert_eq!(status, 404, "{path} {answer}");
            serde_json::from_str::<Value>(&answer).unwrap()
        };
        for path in ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"] {
            assert_eq!(ask(path)["error"]["code"], "model_not_found", "{path}");
        }
        assert_eq!(ask("/v1/messages")["error"]["type"], "not_found_error");
        for path in ["/api/chat", "/api/generate", "/api/show"] {
            assert!(ask(path)["error"].as_str().unwrap().contains("qwen3_moe"), "{path}");
        }
    }
    let (_, metrics) = server.get("/metrics");
    for line in [
        "forebay_requests_total{model=\"qwen3_moe\"} 3",
        "forebay_requests_total{model=\"tales-moe-sticky-Q4_K_M\"} 4",
    ] {
        assert!(metrics.lines().any(|of| of == line), "{line}: {metrics}");
    }
    assert_eq!(server.end(), Some(0));
}

#[test]
fn models_without_room_for_both_answer_all_requests() {
    let folder = library();
    let expected = text(&Server::start(&[]), &completion("demo", 8));
    let server = Server::of(&["--models", path(&folder), "--ram", "45MiB", "--keep-alive", "-1"]);
    assert_eq!(server.get("/ready").0, 200);
    assert!(loaded(&server).is_empty());
    // The description of a model needs no weights.
    let body = json!({ "model": "two", "messages": [{ "role": "user", "content": "x" }] });
    assert!(server.post("/v1/messages/count_tokens", &body)["input_tokens"].as_u64().unwrap() > 0);
    assert!(loaded(&server).is_empty());
    thread::scope(|scope| {
        for client in 0..6 {
            let (server, expected) = (&server, &expected);
            scope.spawn(move || {
                let name = if client % 2 == 0 { "one" } else { "two" };
                for _ in 0..4 {
                    assert_eq!(text(server, &completion(name, 8)), *expected);
                }
            });
        }
    });
    for name in ["one", "two"] {
        server.post("/api/generate", &json!({ "model": name, "keep_alive": 0 }));
    }
    assert!(loaded(&server).is_empty());
    // One after the other, each has the memory alone: an idle model leaves for the other.
    for name in ["one", "two", "one"] {
        assert_eq!(text(&server, &completion(name, 8)), expected);
        assert_eq!(text(&server, &completion(name, 8)), expected);
        assert_eq!(loaded(&server), [name]);
    }
    let (_, metrics) = server.get("/metrics");
    let counted = |name: &str| {
        let line = metrics.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).unwrap_or_default()
    };
    assert_eq!(counted("forebay_requests_total{model=\"one\"}"), 16, "{metrics}");
    assert_eq!(counted("forebay_generated_tokens_total{model=\"two\"}"), 14 * 8, "{metrics}");
    assert!(counted("forebay_model_loads_total{model=\"one\"}") >= 2, "{metrics}");
    // A client that goes while its model comes does no harm.
    drop(server.begin("POST", "/v1/completions", "", &completion("two", 8).to_string()));
    assert_eq!(text(&server, &completion("one", 8)), expected);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_model_stays_as_long_as_requests_say() {
    let folder = library();
    let server = Server::of(&["--models", path(&folder), "--ctx", "2048"]);
    let ask = |body: Value| server.post("/api/generate", &body);
    assert_eq!(ask(json!({ "model": "small", "keep_alive": "10m" }))["done_reason"], "load");
    assert_eq!(ask(json!({ "model": "one", "keep_alive": -1 }))["done_reason"], "load");
    assert_eq!(loaded(&server), ["one", "small"]);
    let ps: Value = serde_json::from_str(&server.get("/api/ps").1).unwrap();
    let of =
        |name: &str| ps["models"].as_array().unwrap().iter().find(|of| of["name"] == name).unwrap();
    let seconds = of("small:latest")["expires_seconds"].as_f64().unwrap();
    assert!(seconds > 590.0 && seconds <= 600.0, "{seconds}");
    // The demo model was trained for fewer positions than the other one.
    assert_eq!(
        (&of("one:latest")["context_length"], &of("small:latest")["context_length"]),
        (&1024.into(), &2048.into())
    );
    assert!(of("one:latest")["expires_at"].as_str().unwrap().starts_with("9999"));
    assert!(of("one:latest")["size_ram"].as_u64().unwrap() > 30_000_000);
    assert_eq!(ask(json!({ "model": "one", "keep_alive": 0 }))["done_reason"], "unload");
    assert_eq!(loaded(&server), ["small"]);
    assert_eq!(ask(json!({ "model": "one", "keep_alive": "0s" }))["done_reason"], "unload");
    // An answer with a time of its own, and one that does not let the model stay.
    let options = json!({ "num_predict": 2 });
    let body = json!({ "model": "small", "prompt": "a", "raw": true, "stream": false, "keep_alive": "200ms", "options": options });
    assert_eq!(ask(body)["eval_count"], 2);
    until("the model leaves", || loaded(&server).is_empty());
    let body = json!({ "model": "one", "messages": [{ "role": "user", "content": "a" }], "keep_alive": 0, "options": options });
    let (_, lines) = server.ask("POST", "/api/chat", "", &body.to_string());
    let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert!(last["load_duration"].as_u64().unwrap() > 0, "{last}");
    until("the model leaves", || loaded(&server).is_empty());
    let (status, answer) =
        server.ask("POST", "/api/generate", "", r#"{"model": "one", "keep_alive": "soon"}"#);
    assert!(status == 400 && answer.contains("keep_alive"), "{answer}");
}

#[test]
fn a_damaged_model_is_an_error_and_the_others_answer() {
    let folder = library();
    let bad = folder.path().join("bad.gguf");
    let whole = fs::read(demo()).unwrap();
    fs::write(&bad, &whole[..whole.len() / 2]).unwrap();
    let server = Server::of(&["--models", path(&folder)]);
    let expected = text(&server, &completion("one", 6));
    for _ in 0..2 {
        let (status, answer) =
            server.ask("POST", "/v1/completions", "", &completion("bad", 6).to_string());
        assert!(status == 500 && answer.contains("cut off or damaged"), "{status} {answer}");
        assert_eq!(text(&server, &completion("one", 6)), expected);
    }
    // The list shows what is in the folder now.
    let names = || {
        let tags: Value = serde_json::from_str(&server.get("/api/tags").1).unwrap();
        let names = tags["models"]
            .as_array()
            .unwrap()
            .iter()
            .map(|of| of["name"].as_str().unwrap().to_owned());
        names.collect::<Vec<_>>()
    };
    assert_eq!(names(), ["bad:latest", "one:latest", "small:latest", "two:latest"]);
    fs::remove_file(&bad).unwrap();
    assert_eq!(names(), ["one:latest", "small:latest", "two:latest"]);
    assert_eq!(server.ask("POST", "/v1/completions", "", &completion("bad", 6).to_string()).0, 404);
    // A model that was downloaded anew is read anew.
    fs::write(&bad, &whole).unwrap();
    assert_eq!(text(&server, &completion("bad", 6)), expected);
    assert_eq!(server.end(), Some(0));

    // On the command line, a damaged model keeps the server from starting.
    fs::write(&bad, &whole[..whole.len() / 2]).unwrap();
    let serve =
        |more: &[&str]| forebay(&[&["serve", "--device", "cpu", "--port", "0"], more].concat());
    assert!(serve(&[&demo(), bad.to_str().unwrap()]).failed(1).contains("damaged"));
    assert!(serve(&[&demo(), &demo()]).failed(2).contains("both called"));
    assert!(serve(&[&demo(), &moe(), "--name", "x"]).failed(2).contains("--name"));
    assert!(serve(&["--models", &demo()]).failed(2).contains("is not a folder"));
    assert!(serve(&["--models", "/no/such/folder"]).failed(1).contains("no such"));
    assert!(serve(&[&demo(), "--keep-alive", "soon"]).status == Some(2));
}

#[test]
fn models_that_do_not_fit_at_the_start_come_on_request() {
    let folder = library();
    let [one, two] = ["one.gguf", "two.gguf"].map(|name| {
        // A copy has a name of its own, other than a link.
        let copy = folder.path().join(format!("copy-{name}"));
        fs::copy(folder.path().join(name), &copy).unwrap();
        copy.to_str().unwrap().to_owned()
    });
    let small = moe();
    let server = Server::of(&[&one, &two, &small, "--ram", "45MiB"]);
    assert_eq!(loaded(&server), ["copy-one", "qwen3_moe"]);
    assert!(!text(&server, &completion("copy-two", 4)).is_empty());
    assert!(loaded(&server).contains(&"copy-two".to_owned()));

    // `forebay ps` asks this server.
    let ps = |arguments: &[&str]| forebay(&[&["ps"], arguments].concat());
    let table = ps(&["--server", &server.address]).ok().stdout;
    let head = table.lines().next().unwrap();
    assert_eq!(
        head.split_whitespace().collect::<Vec<_>>(),
        ["name", "size", "VRAM", "RAM", "until", "requests"]
    );
    assert!(table.contains("copy-two") && table.contains("0 running"), "{table}");
    let list = ps(&["--server", &format!("http://{}/", server.address), "--json"]).json();
    assert_eq!(list["models"].as_array().unwrap().len(), table.lines().count() - 1);
    let host = format!("FOREBAY_HOST={}", server.address);
    let program = env!("CARGO_BIN_EXE_forebay");
    assert_eq!(command("env", &[host.as_str(), program, "ps"], "").ok().stdout, table);
    assert!(ps(&["--server", "https://localhost"]).failed(2).contains("only http"));
    let address = server.address.clone();
    assert_eq!(server.end(), Some(0));
    assert!(ps(&["--server", &address]).failed(1).contains("no server answers"));
}

#[test]
fn ps_sends_a_key() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "# of the lab\nsecret\n").unwrap();
    let keys = keys.to_str().unwrap();
    let server = Server::start(&["--api-key-file", keys]);
    let ps = |more: &[&str]| forebay(&[&["ps", "--server", &server.address], more].concat());
    assert!(ps(&[]).failed(1).contains("status 401"));
    assert!(ps(&["--api-key-file", keys]).ok().stdout.contains("demo"));
    assert!(Path::new(keys).exists());
}

#[test]
fn a_signal_lets_the_answers_of_all_models_finish() {
    let folder = library();
    let server = Server::of(&["--models", path(&folder)]);
    let begin = |name: &str| {
        let mut body = completion(name, 200);
        body["stream"] = true.into();
        let mut stream = server.begin("POST", "/v1/completions", "", &body.to_string());
        let mut start = vec![0; 100];
        stream.read_exact(&mut start).unwrap();
        stream
    };
    let streams = ["one", "two"].map(begin);
    // This one still waits for its model when the signal comes.
    let waits = server.begin("POST", "/v1/completions", "", &completion("small", 4).to_string());
    until("the request is there", || loaded(&server).len() == 3);
    server.signal();
    for mut stream in streams.into_iter().chain([waits]) {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let is_whole =
            text.ends_with("data: [DONE]\n\n") || text.contains("\"finish_reason\":\"length\"");
        assert!(is_whole, "{text}");
    }
    assert_eq!(server.wait(), Some(0));
}
