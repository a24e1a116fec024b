//! Tests the server's files and batches: batches survive `kill -9`, files stay within their bounds, and nobody sees those of
//! others.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{demo, stuck_schema};
use crate::server::{Answer, Server, completion};

const BOUNDARY: &str = "----boundary7";

/// Starts a server that stores files in this folder.
fn start(folder: &TempDir, more: &[&str]) -> Server {
    let files = folder.path().join("files");
    Server::start(&[&["--files", files.to_str().unwrap()], more].concat())
}

/// Runs a server that gets a signal at a point of the program, and returns how it ended.
fn ended_at(folder: &TempDir, signal_at: &str) -> ExitStatus {
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["serve", &demo(), "--name", "demo", "--device", "cpu", "--port", "0"])
        .args(["--threads", "1", "--parallel", "3", "--files"])
        .arg(folder.path().join("files"))
        .env("FOREBAY_SIGNAL_AT", signal_at)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if started.elapsed() > Duration::from_secs(300) {
            child.kill().unwrap();
            panic!("{signal_at} is not reached");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Counts the answers in all journals.
fn answered(files: &Path) -> usize {
    let batches = files.join("batches");
    let journals = names(&batches).into_iter().filter(|name| name.ends_with(".journal"));
    let lines = |name: String| fs::read_to_string(batches.join(name)).unwrap().lines().count() - 1;
    journals.map(lines).sum()
}

/// Returns the body of a form with these fields and a file.
fn form(fields: &[(&str, &str)], file: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in fields {
        let part = format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"
        );
        body.extend(part.into_bytes());
    }
    let head = format!(
        "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"../../in.jsonl\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n"
    );
    body.extend(head.into_bytes());
    body.extend(file);
    body.extend(format!("\r\n--{BOUNDARY}--\r\n").into_bytes());
    body
}

/// Sends the first `sent` bytes of a form.
fn begin(server: &Server, body: &[u8], headers: &str, sent: usize) -> TcpStream {
    let mut stream = TcpStream::connect(&server.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = format!(
        "POST /v1/files HTTP/1.0\r\nHost: localhost\r\n{headers}Content-Length: {}\r\n\
         Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses a form may close the connection before it has read it.
    let _ = stream.write_all(&body[..sent]);
    stream
}

fn send(server: &Server, body: &[u8], headers: &str) -> Answer {
    let mut text = Vec::new();
    let _ = begin(server, body, headers, body.len()).read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Sends a file and returns its id.
fn upload(server: &Server, content: &[u8]) -> String {
    let (status, answer) = send(server, &form(&[("purpose", "batch")], content), "");
    assert_eq!(status, 200, "{answer}");
    let file: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((&file["bytes"], &file["object"]), (&json!(content.len()), &json!("file")));
    file["id"].as_str().unwrap().to_owned()
}

fn json_of((status, answer): Answer) -> Value {
    assert_eq!(status, 200, "{answer}");
    serde_json::from_str(&answer).unwrap()
}

fn lines(requests: &[Value]) -> String {
    requests.iter().map(|request| format!("{request}\n")).collect()
}

fn request(id: &str, url: &str, body: Value) -> Value {
    json!({ "custom_id": id, "method": "POST", "url": url, "body": body })
}

fn create(server: &Server, file: &str, endpoint: &str, window: &str) -> String {
    let body = json!({ "input_file_id": file, "endpoint": endpoint, "completion_window": window,
        "metadata": { "job": "test" } });
    let batch = server.post("/v1/batches", &body);
    assert_eq!((&batch["status"], &batch["object"]), (&json!("validating"), &json!("batch")));
    assert_eq!(batch["metadata"]["job"], "test");
    batch["id"].as_str().unwrap().to_owned()
}

fn batch(server: &Server, id: &str) -> Value {
    json_of(server.get(&format!("/v1/batches/{id}")))
}

/// Waits until a batch has this status.
fn until(server: &Server, id: &str, status: &str) -> Value {
    let started = Instant::now();
    loop {
        let batch = batch(server, id);
        if batch["status"] == status {
            return batch;
        }
        let over = ["failed", "completed", "expired", "cancelled"];
        let is_over = over.iter().any(|over| batch["status"] == *over);
        assert!(!is_over && started.elapsed() < Duration::from_secs(90), "{batch}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the lines of an output file by their ids. No id is there twice. Without a file there are none.
fn content(server: &Server, file: &Value) -> BTreeMap<String, Value> {
    if file.is_null() {
        return BTreeMap::new();
    }
    let (status, text) = server.get(&format!("/v1/files/{}/content", file.as_str().unwrap()));
    assert_eq!(status, 200, "{text}");
    let mut all = BTreeMap::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let id = line["custom_id"].as_str().unwrap().to_owned();
        assert!(all.insert(id, line).is_none(), "{text}");
    }
    all
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn files_come_and_go() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, &["--max-body", "64KiB", "--file-size", "3MiB"]);
    let place = folder.path().join("files");
    assert!(!place.exists(), "the folder is made on first use");
    // The limit of other requests does not hold for files.
    let large: Vec<u8> = (0..2_500_000_u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
    let first = upload(&server, &large);
    let second = upload(&server, b"");
    let third = upload(&server, b"x\n");
    assert_eq!(place.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let file = json_of(server.get(&format!("/v1/files/{first}")));
    assert_eq!(file["filename"], "../../in.jsonl");
    assert_eq!((&file["purpose"], &file["expires_at"]), (&json!("batch"), &Value::Null));
    let mut stream = server.begin("GET", &format!("/v1/files/{first}/content"), "", "");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let head = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
    assert!(bytes[head + 4..] == large, "{} bytes came back", bytes.len() - head - 4);

    let page = json_of(server.get("/v1/files?limit=2"));
    assert_eq!((&page["first_id"], &page["last_id"]), (&json!(third), &json!(second)));
    assert_eq!(page["has_more"], true);
    let page = json_of(server.get(&format!("/v1/files?limit=2&after={second}")));
    assert_eq!((&page["data"][0]["id"], &page["has_more"]), (&json!(first), &json!(false)));
    let page = json_of(server.get("/v1/files?order=asc&purpose=batch"));
    assert_eq!(page["data"][0]["id"], json!(first));
    assert_eq!(json_of(server.get("/v1/files?purpose=batch_output"))["data"], json!([]));
    for wrong in ["limit=0", "limit=x", "order=up", "after=file-x"] {
        let (status, answer) = server.get(&format!("/v1/files?{wrong}"));
        assert!(status == 400 && answer.contains("invalid_request_error"), "{wrong}: {answer}");
    }

    // A file is visible to the key that sent it, and ids are no paths.
    let other = "Authorization: Bearer other\r\n";
    let path = format!("/v1/files/{first}");
    for (method, path) in
        [("GET", path.clone()), ("DELETE", path.clone()), ("GET", format!("{path}/content"))]
    {
        assert_eq!(server.ask(method, &path, other, "").0, 404, "{method} {path}");
    }
    assert_eq!(json_of(server.ask("GET", "/v1/files", other, ""))["data"], json!([]));
    for id in ["..%2flock", "%2e%2e", "..%2f..%2ffiles%2flock", "x"] {
        for path in [format!("/v1/files/{id}"), format!("/v1/files/{id}/content")] {
            assert_eq!(server.get(&path).0, 404, "{path}");
        }
    }
    let deleted = json_of(server.ask("DELETE", &path, "", ""));
    assert_eq!((&deleted["deleted"], &deleted["id"]), (&json!(true), &json!(first)));
    assert_eq!(server.get(&path).0, 404);
    assert_eq!(names(&place.join("files")).len(), 4);
    // Files stay when the server ends.
    assert_eq!(server.end(), Some(0));
    let server = start(&folder, &[]);
    assert_eq!(json_of(server.get("/v1/files"))["data"][0]["id"], json!(third));
}

#[test]
fn uploads_that_are_wrong_or_cut_leave_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, &["--file-size", "1MiB", "--files-size", "3MiB"]);
    let batch = ("purpose", "batch");
    let anchor = ("expires_after[anchor]", "created_at");
    let megabyte = vec![b'x'; 1 << 20];
    let long = "x".repeat(5000);
    for (fields, status, why) in [
        (&[][..], 400, "purpose is missing"),
        (&[("purpose", "assistants")], 400, "purpose must be batch"),
        (&[("purpose", &long)], 400, "too long"),
        (&[batch, ("colour", "red")], 400, "unknown field"),
        (&[batch, anchor], 400, "expires_after"),
        (&[batch, anchor, ("expires_after[seconds]", "5")], 400, "between 3600"),
    ] {
        let (found, answer) = send(&server, &form(fields, b"x"), "");
        assert!(found == status && answer.contains(why), "{why}: {found} {answer}");
    }
    let (status, answer) = send(&server, &form(&[batch], &vec![0; (1 << 20) + 1]), "");
    assert!(status == 413 && answer.contains("--file-size"), "{status} {answer}");
    let (status, answer) = server.ask("POST", "/v1/files", "Content-Type: text/plain\r\n", "x");
    assert_eq!(status, 400, "{answer}");
    // The head of a part that has no end does not fill the memory.
    let mut endless = format!("--{BOUNDARY}\r\nContent-Disposition: ").into_bytes();
    endless.resize(16 << 20, b'x');
    let (status, answer) = send(&server, &endless, "");
    assert!(status == 400 && answer.contains("too large around"), "{status} {answer}");

    // A connection that is cut in the middle of the file.
    let whole = form(&[batch], &megabyte);
    let incoming = folder.path().join("files/incoming");
    let stream = begin(&server, &whole, "", whole.len() / 2);
    let started = Instant::now();
    while names(&incoming).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(20), "nothing is written");
        thread::sleep(Duration::from_millis(5));
    }
    stream.shutdown(Shutdown::Both).unwrap();
    while !names(&incoming).is_empty() {
        assert!(started.elapsed() < Duration::from_secs(20), "{:?}", names(&incoming));
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(json_of(server.get("/v1/files"))["data"], json!([]));
    assert!(names(&folder.path().join("files/files")).is_empty());
    // What is left of a killed server goes at the next start.
    let stream = begin(&server, &whole, "", whole.len() / 2);
    while names(&incoming).is_empty() {
        thread::sleep(Duration::from_millis(5));
    }
    drop(server);
    drop(stream);
    assert_eq!(names(&incoming).len(), 1);
    let server = start(&folder, &["--file-size", "1MiB", "--files-size", "3MiB"]);
    let first = upload(&server, &megabyte);
    assert!(names(&incoming).is_empty());
    // All files together are bounded, and a deleted one makes room.
    upload(&server, &megabyte);
    upload(&server, &megabyte);
    let (status, answer) = send(&server, &whole, "");
    assert!(status == 413 && answer.contains("files_full"), "{status} {answer}");
    json_of(server.ask("DELETE", &format!("/v1/files/{first}"), "", ""));
    let fields = [batch, anchor, ("expires_after[seconds]", "3600")];
    let file = json_of(send(&server, &form(&fields, b"x"), ""));
    let seconds = file["expires_at"].as_u64().unwrap() - file["created_at"].as_u64().unwrap();
    assert_eq!(seconds, 3600);
    // Another server does not touch the folder.
    let other = start(&folder, &[]);
    let (status, answer) = other.get("/v1/files");
    assert!(status == 503 && answer.contains("--files DIR"), "{status} {answer}");
}

#[test]
fn no_key_takes_the_room_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    fs::write(&keys, "one\ntwo\n").unwrap();
    let options = ["--files-size", "64KiB", "--api-key-file", keys.to_str().unwrap()];
    let [one, two] = ["one", "two"].map(|key| format!("X-Api-Key: {key}\r\n"));
    let whole = form(&[("purpose", "batch")], &[b'x'; 20 << 10]);
    let full = |server: &Server, key: &str| {
        let (status, answer) = send(server, &whole, key);
        assert!(status == 413 && answer.contains("files_full"), "{status} {answer}");
        assert!(answer.contains("32.00 KiB") && answer.contains("2 keys"), "{answer}");
    };
    let server = start(&folder, &options);
    let file = json_of(send(&server, &whole, &one));
    full(&server, &one);
    json_of(send(&server, &whole, &two));
    full(&server, &two);
    // The next server counts the same.
    assert_eq!(server.end(), Some(0));
    let server = start(&folder, &options);
    full(&server, &one);
    let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
    json_of(server.ask("DELETE", &path, &one, ""));
    json_of(send(&server, &whole, &one));
    full(&server, &two);
}

#[test]
fn a_batch_gives_the_answers_of_single_requests() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, &["--parallel", "3"]);
    let chat = |text: &str| {
        json!({ "model": "demo", "max_tokens": 9, "temperature": 0,
            "messages": [{ "role": "user", "content": text }] })
    };
    let url = "/v1/chat/completions";
    let mut requests: Vec<Value> =
        (0..7).map(|i| request(&format!("r{i}"), url, chat(&format!("Tell {i}.")))).collect();
    requests.push(request("wrong", url, json!({ "model": "demo", "messages": 5 })));
    let mut streams = chat("x");
    streams["stream"] = true.into();
    requests.push(request("streams", url, streams));
    let file = upload(&server, lines(&requests).as_bytes());
    let id = create(&server, &file, url, "24h");
    let done = until(&server, &id, "completed");
    assert_eq!(done["request_counts"], json!({ "total": 9, "completed": 7, "failed": 2 }));
    for time in ["in_progress_at", "finalizing_at", "completed_at"] {
        assert!(done[time].as_u64() >= done["created_at"].as_u64(), "{done}");
    }
    assert_eq!(done["expires_at"].as_u64().unwrap() - done["created_at"].as_u64().unwrap(), 86400);
    let answers = content(&server, &done["output_file_id"]);
    assert_eq!(answers.len(), 7);
    for request in &requests[..7] {
        let answer = &answers[request["custom_id"].as_str().unwrap()];
        let alone = server.post(url, &request["body"]);
        let body = &answer["response"]["body"];
        assert_eq!(body["choices"][0]["message"], alone["choices"][0]["message"]);
        assert_eq!((&body["object"], &body["model"]), (&alone["object"], &alone["model"]));
    }
    let errors = content(&server, &done["error_file_id"]);
    assert_eq!(errors["wrong"]["response"]["status_code"], 400);
    assert_eq!(errors["streams"]["response"]["body"]["error"]["param"], "stream");
    let page = json_of(server.get("/v1/files?purpose=batch_output"));
    assert_eq!(page["data"].as_array().unwrap().len(), 2);

    // Embeddings and completions work, too.
    let body = json!({ "model": "demo", "input": "The sea" });
    let file = upload(&server, lines(&[request("e", "/v1/embeddings", body.clone())]).as_bytes());
    let embeddings = create(&server, &file, "/v1/embeddings", "24h");
    let done = until(&server, &embeddings, "completed");
    let answers = content(&server, &done["output_file_id"]);
    let alone = server.post("/v1/embeddings", &body);
    assert_eq!(answers["e"]["response"]["body"]["data"], alone["data"]);
    assert_eq!(done["error_file_id"], Value::Null);

    let page = json_of(server.get("/v1/batches?limit=1"));
    assert_eq!((&page["data"][0]["id"], &page["has_more"]), (&json!(embeddings), &json!(true)));
    let page = json_of(server.get(&format!("/v1/batches?after={embeddings}")));
    assert_eq!((&page["data"][0]["id"], &page["has_more"]), (&json!(id), &json!(false)));
    let other = "Authorization: Bearer other\r\n";
    assert_eq!(server.ask("GET", &format!("/v1/batches/{id}"), other, "").0, 404);
    assert_eq!(server.ask("POST", &format!("/v1/batches/{id}/cancel"), other, "").0, 404);
    assert_eq!(json_of(server.ask("GET", "/v1/batches", other, ""))["data"], json!([]));
    let (status, answer) = server.ask("POST", &format!("/v1/batches/{id}/cancel"), "", "");
    assert!(status == 409 && answer.contains("completed"), "{status} {answer}");
}

#[test]
fn a_batch_that_is_wrong_fails_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, &[]);
    let good = request("a", "/v1/completions", completion("x", 1));
    let file = upload(&server, lines(std::slice::from_ref(&good)).as_bytes());
    let body = |name: &str, value: Value| {
        let mut body = json!({ "input_file_id": file, "endpoint": "/v1/completions",
            "completion_window": "24h" });
        body[name] = value;
        body
    };
    let many: Value =
        (0..17).map(|i| (i.to_string(), json!("x"))).collect::<serde_json::Map<_, _>>().into();
    for (body, why) in [
        (body("endpoint", json!("/v1/responses")), "do not support \\\"/v1/responses\\\""),
        (body("completion_window", json!("soon")), "completion_window"),
        (body("input_file_id", json!("file-x")), "no file"),
        (body("metadata", json!({ "a": 1 })), "metadata"),
        (body("metadata", many), "metadata"),
        (body("output_expires_after", json!({ "anchor": "x", "seconds": 3600 })), "anchor"),
        (json!({}), "input_file_id is missing"),
    ] {
        let (status, answer) = server.ask("POST", "/v1/batches", "", &body.to_string());
        assert!(status == 400 && answer.contains(why), "{why}: {status} {answer}");
    }
    let mut unknown = good.clone();
    unknown["body"]["model"] = "nonesuch".into();
    for (content, line, why) in [
        (lines(&[good.clone(), good.clone()]), json!(2), "custom_id"),
        ("\n{\n".to_owned(), json!(2), "not JSON"),
        (lines(&[request("a", "/v1/embeddings", json!({}))]), json!(1), "url must be"),
        (lines(&[unknown]), json!(1), "nonesuch"),
        (String::new(), Value::Null, "no request"),
    ] {
        let file = upload(&server, content.as_bytes());
        let id = create(&server, &file, "/v1/completions", "24h");
        let failed = until(&server, &id, "failed");
        let problem = &failed["errors"]["data"][0];
        assert_eq!(problem["line"], line, "{failed}");
        assert!(problem["message"].as_str().unwrap().contains(why), "{failed}");
        assert!(failed["failed_at"].is_u64() && failed["output_file_id"].is_null(), "{failed}");
    }
}

#[test]
fn batches_go_on_after_kill_without_loss_or_repetition() {
    let requests: Vec<Value> = (0..40_u32)
        .map(|i| {
            let mut body = completion(&format!("Once upon a time {i}"), 5 + (i as usize % 4) * 8);
            // Some sample, with a seed of their own or without one.
            if i % 2 == 1 {
                body["temperature"] = json!(0.9);
            }
            if i % 4 == 1 {
                body["seed"] = i.into();
            }
            request(&format!("r{i}"), "/v1/completions", body)
        })
        .collect();
    let text = lines(&requests);
    let folder = tempfile::tempdir().unwrap();
    let files = folder.path().join("files");
    let server = start(&folder, &["--parallel", "3"]);
    let file = upload(&server, text.as_bytes());
    let ids: Vec<String> =
        (0..2).map(|_| create(&server, &file, "/v1/completions", "24h")).collect();
    // The first is killed before the batches do anything, the others at points of their work.
    drop(server);
    let mut seen = Vec::new();
    let ends = [
        ("KILL", 1, "answer added"),
        ("KILL", 9, "answer added"),
        ("TERM", 3, "answer added"),
        ("KILL", 20, "answer added"),
        ("TERM", 1, "answer added"),
        ("KILL", 2, "answer added"),
        ("KILL", 1, "batch output kept"),
        ("KILL", 1, "batch outputs kept"),
        ("KILL", 1, "batch finished"),
        ("KILL", 1, "journal removed"),
    ];
    for (signal, count, point) in ends {
        let status = ended_at(&folder, &format!("{signal}:{count}:{point}"));
        let expected = if signal == "KILL" { (Some(9), None) } else { (None, Some(0)) };
        assert_eq!((status.signal(), status.code()), expected, "{signal} {count} {point}");
        if point == "answer added" {
            seen.push(answered(&files));
        }
    }
    let server = start(&folder, &["--parallel", "3"]);
    let mut outputs = Vec::new();
    for id in &ids {
        let done = until(&server, id, "completed");
        assert_eq!(done["request_counts"], json!({ "total": 40, "completed": 40, "failed": 0 }));
        assert_eq!(done["error_file_id"], Value::Null);
        let answers = content(&server, &done["output_file_id"]);
        assert_eq!(answers.len(), 40);
        outputs.push(answers);
    }
    // Both have the same seeds, because they have the same input.
    for request in &requests {
        let id = request["custom_id"].as_str().unwrap();
        let texts: Vec<&Value> = outputs
            .iter()
            .map(|answers| &answers[id]["response"]["body"]["choices"][0]["text"])
            .collect();
        assert_eq!(texts[0], texts[1], "{id}");
        if request["body"]["temperature"] == 0 || request["body"]["seed"].is_u64() {
            let alone = server.post("/v1/completions", &request["body"]);
            assert_eq!(*texts[0], alone["choices"][0]["text"], "{id}");
        }
    }
    // Nothing is left but the input, two outputs, and two batches.
    assert_eq!(names(&files.join("files")).len(), 6, "{:?}", names(&files.join("files")));
    assert_eq!(names(&files.join("batches")).len(), 2, "{:?}", names(&files.join("batches")));
    assert!(names(&files.join("incoming")).is_empty());
    assert!(seen.is_sorted_by(|a, b| a < b), "answers were lost: {seen:?}");
}

#[test]
fn batches_are_cancelled_and_expire() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, &["--parallel", "2"]);
    let slow = |i: usize| {
        let mut body = completion("Once upon a time", 900);
        body["ignore_eos"] = true.into();
        request(&format!("r{i}"), "/v1/completions", body)
    };
    let short = request("short", "/v1/completions", completion("x", 1));
    let mut requests: Vec<Value> = vec![short];
    requests.extend((0..200).map(slow));
    let file = upload(&server, lines(&requests).as_bytes());
    let id = create(&server, &file, "/v1/completions", "24h");
    let started = Instant::now();
    while batch(&server, &id)["request_counts"]["completed"] == 0 {
        assert!(started.elapsed() < Duration::from_secs(30));
        thread::sleep(Duration::from_millis(10));
    }
    // Its input cannot be deleted meanwhile.
    let (status, answer) = server.ask("DELETE", &format!("/v1/files/{file}"), "", "");
    assert!(status == 409 && answer.contains(&id), "{status} {answer}");
    // A client that asks goes first.
    let asked = Instant::now();
    server.post("/v1/completions", &completion("The old king", 8));
    let waited = asked.elapsed();
    let now = batch(&server, &id);
    assert_eq!(now["status"], "in_progress");
    assert!(now["request_counts"]["completed"].as_u64() < Some(100), "{waited:?} {now}");
    let cancelled = json_of(server.ask("POST", &format!("/v1/batches/{id}/cancel"), "", ""));
    assert!(["cancelling", "cancelled"].iter().any(|is| cancelled["status"] == *is));
    let done = until(&server, &id, "cancelled");
    assert!(done["cancelling_at"].is_u64() && done["cancelled_at"].is_u64(), "{done}");
    let answers = content(&server, &done["output_file_id"]);
    assert!(answers.contains_key("short") && answers.len() < 201);
    assert_eq!(done["request_counts"]["completed"], answers.len());

    let id = create(&server, &file, "/v1/completions", "3s");
    let done = until(&server, &id, "expired");
    assert!(done["expired_at"].is_u64(), "{done}");
    let errors = content(&server, &done["error_file_id"]);
    let answers = content(&server, &done["output_file_id"]);
    assert_eq!(errors.len() + answers.len(), 201);
    assert_eq!(errors["r199"]["error"]["code"], "batch_expired");
    assert_eq!(done["request_counts"]["failed"], errors.len());
    json_of(server.ask("DELETE", &format!("/v1/files/{file}"), "", ""));
    assert_eq!(server.end(), Some(0));
}

#[test]
fn a_grammar_that_cannot_go_on_is_an_error_of_the_client() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, &[]);
    let body = json!({ "model": "demo", "prompt": "A fox", "max_tokens": 200, "guided_json": stuck_schema() });
    let file = upload(&server, lines(&[request("stuck", "/v1/completions", body)]).as_bytes());
    let id = create(&server, &file, "/v1/completions", "24h");
    let done = until(&server, &id, "completed");
    let response = &content(&server, &done["error_file_id"])["stuck"]["response"];
    assert_eq!(response["status_code"], 400, "{response}");
    assert_eq!(response["body"]["error"]["type"], "invalid_request_error");
}

#[test]
fn answers_without_room_end_the_batch() {
    let folder = tempfile::tempdir().unwrap();
    let server = start(&folder, &["--files-size", "16KiB"]);
    let body = |i: usize| completion(&format!("Once upon a time {i}"), 30);
    let requests: Vec<Value> =
        (0..50).map(|i| request(&format!("r{i}"), "/v1/completions", body(i))).collect();
    let file = upload(&server, lines(&requests).as_bytes());
    let id = create(&server, &file, "/v1/completions", "24h");
    let failed = until(&server, &id, "failed");
    assert_eq!(failed["errors"]["data"][0]["code"], "files_full");
    // The answers until then are there.
    let answers = content(&server, &failed["output_file_id"]);
    assert_eq!(failed["request_counts"]["completed"], answers.len());
    assert!((1..50).contains(&answers.len()), "{}", answers.len());
}
