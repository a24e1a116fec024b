//! Paths, methods, headers and bodies as clients send them.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::harness::demo;
use crate::server::{Server, completion};

/// Sends a request of HTTP/1.1, and returns the whole answer.
fn raw(server: &Server, text: &str) -> String {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn paths_have_their_usual_other_names() {
    let server = Server::start(&[]);
    let body = completion("A", 1).to_string();
    for path in ["/completions", "/v1/completions/", "/v1/v1/completions", "//v1/completions"] {
        assert_eq!(server.ask("POST", path, "", &body).0, 200, "{path}");
    }
    let chat = json!({ "messages": [{ "role": "user", "content": "A" }], "max_tokens": 1 });
    assert_eq!(server.ask("POST", "/chat/completions", "", &chat.to_string()).0, 200);
    assert_eq!(server.ask("POST", "/messages", "", &chat.to_string()).0, 200);
    let input = json!({ "input": "A" }).to_string();
    assert_eq!(server.ask("POST", "/embeddings", "", &input).0, 200);
    let document: Value = serde_json::from_str(&server.get("/openapi.json").1).unwrap();
    let paths = document["paths"].as_object().unwrap();
    let gets = paths.iter().filter(|(path, of)| of["get"].is_object() && !path.contains('{'));
    let gets: Vec<&str> = gets.map(|(path, _)| path.as_str()).collect();
    assert!(gets.len() > 12, "{gets:?}");
    for path in gets.into_iter().chain(["/models", "/v1/health", "/v1/props", "/api/tags/"]) {
        let (status, answer) = server.get(path);
        // Files need a folder, which this server may not have.
        assert!(
            status == 200 || path.starts_with("/v1/files") || path.starts_with("/v1/batches"),
            "{path}: {answer}"
        );
        let head = raw(
            &server,
            &format!("HEAD {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
        );
        let (head, rest) = head.split_once("\r\n\r\n").unwrap();
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status}")) && rest.is_empty(),
            "{path}: {head}"
        );
    }
    let props: Value = serde_json::from_str(&server.get("/props").1).unwrap();
    assert!(
        props["chat_template"].is_string()
            && props["default_generation_settings"]["n_ctx"].is_u64()
    );
}

/// lm-evaluation-harness counts tokens in this way if no tokenizer is given.
#[test]
fn evaluation_programs_can_use_the_tokenizer() {
    let server = Server::start(&[]);
    let info: Value = serde_json::from_str(&server.get("/tokenizer_info").1).unwrap();
    let end = &info["eos_token"];
    let ids = server.post("/tokenize", &json!({ "prompt": end, "add_special_tokens": false }));
    assert_eq!(ids["count"], 1, "{info} {ids}");
    let back = server.post("/detokenize", &json!({ "tokens": ids["tokens"] }));
    assert_eq!((&back["prompt"], &back["content"]), (end, end));
    let props: Value = serde_json::from_str(&server.get("/props").1).unwrap();
    assert_eq!(info["chat_template"], props["chat_template"]);
}

#[test]
fn large_bodies_get_an_answer() {
    let server = Server::start(&["--max-body", "100KiB"]);
    for (path, pointer) in [
        ("/v1/completions", "/error/message"),
        ("/v1/messages", "/error/message"),
        ("/api/chat", "/error"),
    ] {
        for size in [200 << 10, 20 << 20] {
            let body = json!({ "prompt": "x".repeat(size) }).to_string();
            let length = body.len();
            let mut answers = vec![raw(
                &server,
                &format!(
                    "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
                ),
            )];
            if size < 1 << 20 {
                answers.push(raw(&server, &format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n{length:x}\r\n{body}\r\n0\r\n\r\n")));
            }
            for answer in answers {
                let (head, body) = answer
                    .split_once("\r\n\r\n")
                    .unwrap_or_else(|| panic!("{path} {size}: {answer:?}"));
                assert!(head.starts_with("HTTP/1.1 413"), "{head}");
                let body: Value = serde_json::from_str(body).unwrap();
                assert!(
                    body.pointer(pointer).unwrap().as_str().unwrap().contains("--max-body"),
                    "{body}"
                );
            }
        }
    }
}

#[test]
fn bodies_that_are_announced_as_too_large_are_not_read() {
    let server = Server::start(&["--max-body", "100KiB"]);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n";
    for headers in ["Expect: 100-continue\r\nContent-Length: 204800", "Content-Length: 4294967296"]
    {
        let answer = raw(&server, &format!("{head}{headers}\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 413"), "{headers}: {answer}");
    }
    let body = completion("A", 1).to_string();
    let length = body.len();
    let headers = format!("Expect: 100-continue\r\nContent-Length: {length}");
    let answer = raw(&server, &format!("{head}{headers}\r\n\r\n{body}"));
    assert!(answer.starts_with("HTTP/1.1 100") && answer.contains("HTTP/1.1 200"), "{answer}");
}

#[test]
fn clients_that_have_sent_all_get_their_answers() {
    let server = Server::start(&[]);
    let body = completion("A fox", 100).to_string();
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    // The connection ends with the answer, although the client has asked to keep it.
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains(" 200 OK") && answer.contains("\"finish_reason\""), "{answer}");
}

#[test]
fn clients_that_close_their_side_in_the_middle_of_a_body_learn_it_at_once() {
    let server = Server::start(&[]);
    for (headers, part) in
        [("Content-Length: 1000", "{\"prompt\":"), ("Transfer-Encoding: chunked", "9\r\n{\"pro")]
    {
        let mut stream = TcpStream::connect(&server.address).unwrap();
        let head = format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n");
        stream.write_all((head + part).as_bytes()).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        // A client that only is slow would get another answer, 20 s later.
        assert!(answer.contains(" 400 ") && answer.contains("before its end"), "{answer}");
    }
}

#[test]
fn headers_say_which_request_it_was_and_who_may_read_it() {
    let server = Server::start(&[]);
    let ask = |headers: &str| {
        raw(
            &server,
            &format!(
                "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
            ),
        )
        .to_lowercase()
    };
    let answer = ask("X-Request-Id: mine\r\nOrigin: http://localhost:3000\r\n");
    for header in [
        "x-request-id: mine",
        "\nrequest-id: mine",
        "access-control-allow-origin: http://localhost:3000",
    ] {
        assert!(answer.contains(header), "{answer}");
    }
    assert!(ask("Origin: http://example.com\r\n").starts_with("http/1.1 403"));
    let preflight = raw(&server, "OPTIONS /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nOrigin: http://127.0.0.1:5173\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: authorization,content-type\r\n\r\n").to_lowercase();
    assert!(
        preflight.contains("access-control-allow-headers: authorization,content-type"),
        "{preflight}"
    );
}

#[test]
fn lists_describe_the_file() {
    let server = Server::start(&[]);
    let of = |path: &str| -> Value {
        serde_json::from_str::<Value>(&server.get(path).1).unwrap()["models"][0].take()
    };
    let (listed, loaded) = (of("/api/tags"), of("/api/ps"));
    assert_eq!(listed["details"]["quantization_level"], "Q4_K_M");
    let bytes = std::fs::metadata(demo()).unwrap().len();
    assert_eq!((&listed["size"], &loaded["size"]), (&json!(bytes), &json!(bytes)));
    let digest = listed["digest"].as_str().unwrap();
    assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{digest}");
    assert_eq!(loaded["digest"], digest);
    assert_eq!(of("/api/tags")["digest"], digest);
}

#[test]
fn responses_have_their_items_and_counts() {
    let server = Server::start(&["--ctx", "512"]);
    let input = json!([{ "role": "user", "content": "A fox" }, { "type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x" },
        { "type": "custom_tool_call_output", "call_id": "c", "output": "done" }]);
    let counted = server.post("/v1/responses/input_tokens", &json!({ "input": input }));
    let response = server.post("/v1/responses", &json!({ "input": input, "max_output_tokens": 2 }));
    assert_eq!(counted["input_tokens"], response["usage"]["input_tokens"]);
    let id = response["id"].as_str().unwrap();
    let list = |query: &str| -> Value {
        serde_json::from_str(&server.get(&format!("/v1/responses/{id}/input_items{query}")).1)
            .unwrap()
    };
    let items = list("?order=asc");
    let kinds: Vec<&str> = items["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap())
        .collect();
    assert_eq!(kinds, ["message", "custom_tool_call", "custom_tool_call_output"]);
    let page = list("?limit=1");
    assert_eq!(
        (page["data"][0]["type"].as_str(), &page["has_more"]),
        (Some("custom_tool_call_output"), &json!(true))
    );
    let next = list(&format!("?limit=5&after={}", page["last_id"].as_str().unwrap()));
    assert_eq!(next["data"].as_array().unwrap().len(), 2);
    assert_eq!(server.get("/v1/responses/none/input_items").0, 404);
}

/// Starts a server of the demo model, and does not wait for it.
fn start_quietly(more: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["serve", "--device", "cpu", "--threads", "1", &demo(), "--name", "demo"])
        .args(more)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts")
}

#[test]
fn a_unix_socket_is_an_address() {
    use std::os::unix::net::UnixStream;

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("server.sock");
    // What an ended server has left is replaced.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let mut child = start_quietly(&["--host", path.to_str().unwrap()]);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut stream = loop {
        match UnixStream::connect(&path) {
            Ok(stream) => break stream,
            Err(why) => assert!(std::time::Instant::now() < until, "{why}"),
        }
        std::thread::yield_now();
    };
    let body = completion("A fox", 3).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("200 OK") && answer.contains("finish_reason"), "{answer}");
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!path.exists());
}

#[test]
fn a_client_that_is_gone_ends_its_request() {
    let server = Server::start(&["--ctx", "1024"]);
    let mut body = completion("A fox", 1000);
    body["ignore_eos"] = true.into();
    let body = body.to_string();
    let mut stream = TcpStream::connect(&server.address).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).unwrap();
    let slots = || -> Value { serde_json::from_str(&server.get("/slots").1).unwrap() };
    while slots()["running"] == 0 {}
    drop(stream);
    while slots()["running"] != 0 {}
    let metrics = server.get("/metrics").1;
    let generated = metrics.lines().find(|line| line.starts_with("forebay_generated_tokens_total"));
    let count = generated.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    assert!(count.is_some_and(|count| count < 1000.0), "{generated:?}");
}
