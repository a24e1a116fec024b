//! Two keys: whatever one of them does, the other one is served, and what it has stays as it is.

use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::models::KeepAlive;
use crate::testing::{Answer, Running, Test};

/// Uploads a file for batches, and returns the status and the answer.
pub fn upload(server: &Running, key: &str, content: &str) -> (u16, String) {
    let body = format!(
        "--B\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--B\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n{content}\r\n--B--\r\n"
    );
    let kind = "multipart/form-data; boundary=B";
    server.begin_as(key, "POST", "/v1/files", kind, &body).rest()
}

fn line() -> String {
    let body = json!({ "model": "a", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0 });
    let line =
        json!({ "custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body });
    format!("{line}\n")
}

fn id(answer: &str) -> String {
    let answer: Value = serde_json::from_str(answer).unwrap();
    answer["id"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

fn start(folder: &Path, test: &Arc<Test>) -> Running {
    Running::start(test.models_one_by_one(KeepAlive::Forever), "A\nB", |options| {
        options.files.folder = Some(folder.join("files"));
        options.files.bytes_max = 1 << 20;
        options.connections = 64;
    })
}

/// What the other key has and gets.
struct Other<'a> {
    server: &'a Running,
    file: String,
    content: String,
    text: String,
}

impl Other<'_> {
    fn new(server: &Running) -> Other<'_> {
        let content = line();
        let file = id(&upload(server, "B", &content).1);
        let text = Other::answer(server);
        Other { server, file, content, text }
    }

    fn answer(server: &Running) -> String {
        let body = json!({ "model": "a", "prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0 });
        let (status, answer) = server.ask("B", "POST", "/v1/completions", &body);
        assert_eq!(status, 200, "{answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    }

    fn get(&self, path: &str) -> String {
        let (status, body) = self.server.ask("B", "GET", path, &Value::Null);
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    /// Checks that the other key is served, and sees what is its own and nothing else.
    fn check(&self, attack: &str) {
        self.get("/health");
        assert!(self.get("/v1/models").contains("\"a\""), "{attack}");
        assert_eq!(Other::answer(self.server), self.text, "{attack}");
        let content = self.get(&format!("/v1/files/{}/content", self.file));
        assert_eq!(content, self.content, "{attack}");
        let files: Value = serde_json::from_str(&self.get("/v1/files")).unwrap();
        let ids: Vec<&Value> =
            files["data"].as_array().unwrap().iter().map(|of| &of["id"]).collect();
        assert_eq!(ids, [&Value::from(self.file.as_str())], "{attack}");
        // There is room for one more file and one more batch, which runs.
        let (status, file) = upload(self.server, "B", &self.content);
        assert_eq!(status, 200, "{attack}: {file}");
        let file = id(&file);
        let batch = json!({ "input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h" });
        let (status, batch) = self.server.ask("B", "POST", "/v1/batches", &batch);
        assert_eq!(status, 200, "{attack}: {batch}");
        let path = format!("/v1/batches/{}", id(&batch));
        let done = loop {
            let batch: Value = serde_json::from_str(&self.get(&path)).unwrap();
            match batch["status"].as_str().unwrap() {
                "completed" => break batch,
                "failed" => panic!("{attack}: {batch}"),
                _ => std::thread::yield_now(),
            }
        };
        assert_eq!(done["request_counts"]["completed"], 1, "{attack}");
        let output = done["output_file_id"].as_str().unwrap();
        for file in [file.as_str(), output] {
            let (status, _) =
                self.server.ask("B", "DELETE", &format!("/v1/files/{file}"), &Value::Null);
            assert_eq!(status, 200, "{attack}");
        }
        // The attacker reaches nothing of it.
        for (method, path) in [
            ("GET", format!("/v1/files/{}/content", self.file)),
            ("DELETE", format!("/v1/files/{}", self.file)),
            ("GET", path.clone()),
            ("POST", format!("{path}/cancel")),
        ] {
            assert_eq!(
                self.server.ask("A", method, &path, &Value::Null).0,
                404,
                "{attack}: {path}"
            );
        }
    }
}

fn completion(tokens: usize, stream: bool) -> String {
    json!({ "model": "a", "prompt": [1, 2, 3], "max_tokens": tokens, "stream": stream }).to_string()
}

/// Asks for something again and again until it is refused, and returns the status and the number of times before it.
fn until_refused(ask: impl Fn(usize) -> (u16, String)) -> (u16, usize) {
    for number in 0.. {
        let (status, _) = ask(number);
        if status != 200 {
            return (status, number);
        }
    }
    unreachable!()
}

#[test]
fn files_and_batches_of_one_key_leave_room_for_the_other() {
    let models = [("a", 4, 4), ("slow", 1, 1)];
    let (folder, test) = (tempfile::tempdir().unwrap(), Test::new(&models));
    let server = start(folder.path(), &test);
    let other = Other::new(&server);
    let large = "x".repeat(100 << 10);
    let (status, files) = until_refused(|_| upload(&server, "A", &large));
    assert_eq!((status, files), (413, 5), "half of the room");
    other.check("files");
    let own: Value =
        serde_json::from_str(&server.ask("A", "GET", "/v1/files", &Value::Null).1).unwrap();
    for file in own["data"].as_array().unwrap() {
        let path = format!("/v1/files/{}", file["id"].as_str().unwrap());
        assert_eq!(server.ask("A", "DELETE", &path, &Value::Null).0, 200);
    }
    // Batches of requests that wait for a model that does not come.
    test.held.lock().unwrap().insert("slow");
    let file = id(&upload(&server, "A", &line().replace("\"a\"", "\"slow\"")).1);
    let batch =
        json!({ "input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h" });
    let (status, batches) = until_refused(|_| server.ask("A", "POST", "/v1/batches", &batch));
    assert_eq!((status, batches), (429, 50), "half of the places");
    other.check("batches");
    test.held.lock().unwrap().clear();
}

#[test]
fn requests_of_one_key_leave_room_for_the_other() {
    let models = [("a", 4, 4), ("slow", 1, 1), ("hung", 1, 1)];
    let (folder, test) = (tempfile::tempdir().unwrap(), Test::new(&models));
    let server = start(folder.path(), &test);
    let other = Other::new(&server);
    test.held.lock().unwrap().insert("slow");
    test.held_measuring.lock().unwrap().insert("hung");
    let begin = |body: &str| server.begin("A", "POST", "/v1/completions", body);
    // Each attack keeps its connections until the next one.
    type Attack<'a> = (&'a str, Box<dyn Fn() -> Vec<Answer> + 'a>);
    let several = |body: String| (0..20).map(|_| begin(&body)).collect();
    let attacks: Vec<Attack<'_>> = vec![
        ("queue", Box::new(|| several(completion(40, false)))),
        ("answers that nobody reads", Box::new(|| several(completion(40, true)))),
        (
            "a load that stands still",
            Box::new(|| several(completion(2, true).replace("\"a\"", "\"slow\""))),
        ),
        (
            "a disk that stands still",
            Box::new(|| several(completion(2, true).replace("\"a\"", "\"hung\""))),
        ),
        (
            "half requests",
            Box::new(|| {
                (0..20).map(|_| {
                let mut answer = Answer::open(&server);
                answer.send("POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: A\r\nContent-Length: 100\r\n\r\n{");
                answer
            }).collect()
            }),
        ),
        (
            "connections",
            Box::new(|| {
                let silent: Vec<TcpStream> =
                    (0..200).map(|_| TcpStream::connect(server.address).unwrap()).collect();
                silent.into_iter().map(|stream| Answer { stream, text: String::new() }).collect()
            }),
        ),
    ];
    for (name, attack) in attacks {
        let connections = attack();
        other.check(name);
        drop(connections);
    }
    test.held.lock().unwrap().clear();
    test.held_measuring.lock().unwrap().clear();
}

#[test]
fn one_key_cannot_take_all_places_of_the_queue() {
    let test = Test::new(&[("a", 6, 6)]);
    test.is_held.store(true, std::sync::atomic::Ordering::SeqCst);
    let server = Running::start(test.models_one_by_one(KeepAlive::Forever), "A\nB", |options| {
        options.connections = 300;
    });
    // The queue has 100 places.
    let waiting: Vec<Answer> = (0..120)
        .map(|_| server.begin("A", "POST", "/v1/completions", &completion(2, false)))
        .collect();
    let refused = || waiting.len() - server.waiting();
    while refused() > 70 {
        std::thread::yield_now();
    }
    let other = server.begin("B", "POST", "/v1/completions", &completion(2, false));
    while server.waiting() < 51 {
        std::thread::yield_now();
    }
    test.is_held.store(false, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(other.rest().0, 200);
    let statuses: Vec<u16> = waiting.into_iter().map(|answer| answer.rest().0).collect();
    let of = |wanted: u16| statuses.iter().filter(|status| **status == wanted).count();
    assert_eq!((of(200), of(429)), (50, 70));
}
