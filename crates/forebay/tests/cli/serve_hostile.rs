//! Tests `forebay serve` with requests of hostile clients: none ends the server, and none takes from others for long.

use std::io::Read as _;
use std::net::TcpListener;

use serde_json::{Map, Value, json};

use crate::harness::{demo, stuck_schema};
use crate::server::Server;

#[test]
fn grammars_that_lead_deep_or_take_long_are_answered() {
    let server = Server::start(&[]);
    let ask = |field: &str, value: Value| {
        let mut body = json!({ "prompt": "A", "max_tokens": 2 });
        body[field] = value;
        server.ask("POST", "/v1/completions", "", &body.to_string())
    };
    // Each rule leads to the next one, deeper than the stack of a usual thread.
    let definitions: Map<String, Value> = (0..9_000)
        .map(|at| (format!("d{at}"), json!({ "$ref": format!("#/$defs/d{}", at + 1) })))
        .chain([("d9000".to_owned(), json!({ "type": "null" }))])
        .collect();
    let schema = json!({ "$ref": "#/$defs/d0", "$defs": definitions });
    let (status, answer) = ask("guided_json", schema);
    assert!(status == 200 || status == 400, "{status} {answer}");
    // What can only fail is refused before an answer begins, and so is what is too large to be tried.
    let itself = json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/a" } } });
    let large = json!("ab|".repeat(200_000) + "c");
    for (field, value) in [("guided_json", itself), ("guided_regex", large)] {
        let (status, answer) = ask(field, value);
        assert!(status == 400 && answer.contains("grammar cannot be used"), "{status} {answer}");
    }
    assert_eq!(
        server.ask("POST", "/v1/completions", "", r#"{"prompt": "A", "max_tokens": 2}"#).0,
        200
    );
}

/// Such a grammar is the client's error in every interface, whole and in parts, and no error of the server.
#[test]
fn a_grammar_that_cannot_go_on_is_an_error_of_the_client() {
    let server = Server::start(&[]);
    let schema = stuck_schema();
    let format = json!({ "type": "json_schema", "name": "x", "schema": schema });
    let of_openai = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
    let messages = json!([{ "role": "user", "content": "A fox" }]);
    let is_clear = |message: &Value| {
        let message = message.as_str().unwrap();
        let parts = ["cannot continue after ", " tokens by its grammar", "max is 2000"];
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        assert!(!message.contains("after 0 tokens") && !message.contains('\n'), "{message}");
    };
    for (path, mut body) in [
        ("/v1/completions", json!({ "prompt": "A fox", "max_tokens": 200, "guided_json": schema })),
        ("/v1/chat/completions", json!({ "messages": messages, "response_format": of_openai })),
        ("/v1/responses", json!({ "input": "A fox", "text": { "format": format } })),
        (
            "/v1/messages",
            json!({ "messages": messages, "max_tokens": 200, "output_config": { "format": format } }),
        ),
        ("/api/chat", json!({ "messages": messages, "format": schema })),
        ("/api/generate", json!({ "prompt": "A fox", "format": schema })),
    ] {
        (body["model"], body["stream"]) = ("demo".into(), false.into());
        let (status, answer) = server.ask("POST", path, "", &body.to_string());
        assert_eq!(status, 400, "{path}: {answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let error = &answer["error"];
        if path.starts_with("/api/") {
            is_clear(error);
        } else {
            assert_eq!(error["type"], "invalid_request_error", "{path}");
            is_clear(&error["message"]);
        }
        body["stream"] = true.into();
        if path.starts_with("/api/") {
            let (status, lines) = server.ask("POST", path, "", &body.to_string());
            assert_eq!(status, 200, "{path}: {lines}");
            let last: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
            is_clear(&last["error"]);
            continue;
        }
        let events = server.events(path, &body);
        let error = match path {
            "/v1/responses" => &events.last().unwrap()["response"]["error"],
            _ => events.iter().find_map(|event| event.get("error")).unwrap(),
        };
        is_clear(&error["message"]);
        match path {
            "/v1/responses" => assert_eq!(error["code"], "invalid_prompt"),
            _ => assert_eq!(error["type"], "invalid_request_error", "{path}"),
        }
    }
}

#[test]
fn prompts_that_cannot_fit_are_refused_before_they_become_tokens() {
    let server = Server::start(&["--ctx", "64"]);
    let long = "word ".repeat(100_000);
    let messages = json!([{ "role": "user", "content": long }]);
    // Too many to be rendered: each takes a position or more.
    let many = vec![json!({ "role": "user", "content": "" }); 65];
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": long })),
        ("/v1/chat/completions", json!({ "messages": messages })),
        ("/v1/chat/completions", json!({ "messages": many })),
    ] {
        let (status, answer) = server.ask("POST", path, "", &body.to_string());
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((status, &answer["error"]["code"]), (400, &"context_length_exceeded".into()));
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("64 positions") && message.contains("at least"), "{message}");
    }
    // A text that may fit becomes tokens, and their number is in the error.
    let body = json!({ "prompt": "word ".repeat(70) }).to_string();
    let (status, answer) = server.ask("POST", "/v1/completions", "", &body);
    assert!(status == 400 && answer.contains("more are asked for"), "{answer}");
}

#[test]
fn paths_that_are_no_text_are_refused_in_the_form_of_their_interface() {
    let server = Server::start(&[]);
    for path in ["/v1/models/%ff", "/v1/responses/%ff", "/page/%ff"] {
        let (status, answer) = server.get(path);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(status == 400 && answer["error"]["message"].is_string(), "{path}: {answer}");
    }
}

#[test]
fn pulls_that_stand_still_leave_threads_for_others() {
    // This hub takes connections and says nothing.
    let hub = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", hub.local_addr().unwrap());
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(demo(), folder.path().join("demo.gguf")).unwrap();
    let home = folder.path().to_str().unwrap();
    let variables = [("HF_ENDPOINT", endpoint.as_str()), ("HOME", home), ("HF_TOKEN", "t")];
    let server = Server::with_environment(&["--models", home], &variables);
    let begin = |number: usize| {
        let body = json!({ "model": format!("o/r{number}") }).to_string();
        let mut stream = server.begin("POST", "/api/pull", "", &body);
        // The pull runs when its first line has come.
        stream.read_exact(&mut [0; 12]).unwrap();
        stream
    };
    let pulls: Vec<_> = (0..4).map(begin).collect();
    let (status, refused) = server.ask("POST", "/api/pull", "", r#"{ "model": "o/more" }"#);
    assert_eq!(status, 429, "{refused}");
    assert!(refused.contains("4 pulls at a time"), "{refused}");
    assert_eq!(server.get("/v1/models").0, 200);
    let asked = json!({ "model": "demo", "prompt": "A", "max_tokens": 2 });
    assert_eq!(server.post("/v1/completions", &asked)["usage"]["completion_tokens"], 2);
    drop(pulls);
}

#[test]
fn a_server_for_all_without_keys_answers_to_known_names_only() {
    let options = ["--host", "0.0.0.0", "--insecure", "--allowed-host", "Box.example.com"];
    let server = Server::start(&options);
    for (host, status) in [
        ("localhost", 200),
        ("192.0.2.7:8080", 200),
        ("box.example.com:8080", 200),
        ("evil.example.com", 403),
        ("box.example.com.evil.example", 403),
    ] {
        let headers = format!("Host: {host}\r\n");
        let (got, answer) = server.ask("GET", "/v1/models", &headers, "");
        assert_eq!(got, status, "{host}: {answer}");
        assert!(status == 200 || answer.contains("--allowed-host"), "{answer}");
    }
}
