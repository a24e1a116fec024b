//! Connections that stand still, and the end of the server.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::two_keys::upload;
use crate::models::KeepAlive;
use crate::testing::{Answer, Running, Test};

const NEVER: Duration = Duration::from_secs(100_000);

/// Starts a server whose model is being loaded until the test lets it.
fn held(change: impl FnOnce(&mut crate::ServerOptions)) -> (Arc<Test>, Running) {
    let test = Test::new(&[("a", 6, 6)]);
    test.is_held.store(true, Ordering::SeqCst);
    let server = Running::start(test.models(KeepAlive::Forever), "A", change);
    (test, server)
}

const BODY: &str = r#"{"model": "a", "prompt": [1, 2, 3], "max_tokens": 2}"#;

/// Waits until the address is free.
fn until_closed(server: &Running) {
    while TcpStream::connect(server.address).is_ok() {
        std::thread::yield_now();
    }
}

#[test]
fn an_ending_server_refuses_new_clients_and_finishes_answers() {
    let (test, server) = held(|options| options.drain = NEVER);
    let answer = server.begin("A", "POST", "/v1/completions", BODY);
    // These stay open: an answer says that it does not end its connection.
    let mut others: Vec<Answer> = (0..2).map(|_| server.keep_alive("/health")).collect();
    others.iter_mut().for_each(|other| other.until("{\"status\":\"ok\"}"));
    server.stop();
    until_closed(&server);
    let stopping = [("/health", "{\"status\":\"stopping\"}"), ("/v1/models", "no more requests")];
    for (mut other, (path, text)) in others.into_iter().zip(stopping) {
        other.text.clear();
        other.send(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nX-Api-Key: A\r\n\r\n"));
        let lower = other.rest_of_head();
        assert!(lower.contains("connection: close") && lower.contains("retry-after:"), "{lower}");
        let (status, body) = other.rest();
        assert!(status == 503 && body.contains(text), "{path}: {status} {body}");
    }
    test.is_held.store(false, Ordering::SeqCst);
    let (status, body) = answer.rest();
    assert_eq!(status, 200, "{body}");
    drop(server);
}

#[test]
fn the_end_of_the_server_has_a_deadline() {
    let (test, server) = held(|options| options.drain = Duration::from_millis(10));
    let mut answer = server.begin("A", "POST", "/v1/completions", BODY);
    while server.waiting() == 0 {
        std::thread::yield_now();
    }
    // It ends although the request waits for a load that does not end.
    server.stop();
    server.join();
    assert_eq!(answer.read_to_end(), "");
    test.is_held.store(false, Ordering::SeqCst);
}

#[test]
fn a_client_that_does_not_read_does_not_hold_up_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let test = Test::new(&[("a", 6, 6)]);
    let start = |client_time| {
        Running::start(test.models(KeepAlive::Forever), "A", |options| {
            options.drain = NEVER;
            options.client_time = client_time;
            options.files.folder = Some(folder.path().join("files"));
            options.files.bytes_max = 64 << 20;
            options.files.file_bytes_max = 64 << 20;
        })
    };
    // More than the buffers of both ends of a connection hold. Another server takes the file, because this takes as long as it
    // takes on a busy machine.
    let server = start(NEVER);
    let (status, file) = upload(&server, "A", &"x".repeat(24 << 20));
    assert_eq!(status, 200, "{file}");
    server.stop();
    server.join();
    let server = start(Duration::from_secs(2));
    let file: Value = serde_json::from_str(&file).unwrap();
    let path = format!("/v1/files/{}/content", file["id"].as_str().unwrap());
    let mut answer = server.begin("A", "GET", &path, "");
    answer.until("HTTP/1.1 200");
    server.stop();
    server.join();
    drop(answer);
}

#[test]
fn health_says_that_the_first_model_is_being_loaded() {
    let test = Test::new(&[("a", 6, 6)]);
    let loads = Arc::new(AtomicBool::new(true));
    let own = loads.clone();
    let server = Running::start_with(
        test.models(KeepAlive::Forever),
        "",
        |_| {},
        move |_| {
            while own.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            Ok(())
        },
    );
    for path in ["/health", "/ready"] {
        let (status, body) = server.ask("", "GET", path, &Value::Null);
        assert_eq!((status, body.as_str()), (503, "{\"status\":\"loading\"}"), "{path}");
    }
    // Other requests wait.
    let models = server.begin("", "GET", "/v1/models", "");
    loads.store(false, Ordering::SeqCst);
    assert_eq!(models.rest().0, 200);
    assert_eq!(server.ask("", "GET", "/health", &Value::Null).0, 200);
}

#[test]
fn a_first_model_that_cannot_be_loaded_ends_the_server() {
    let test = Test::new(&[("a", 6, 6)]);
    let fails = |_: &crate::Models| Err(crate::ServeError::Origin { origin: "x".to_owned() });
    let server = Running::start_with(test.models(KeepAlive::Forever), "", |_| {}, fails);
    assert!(server.join_failed().contains("is no origin"));
}

#[test]
fn idle_connections_give_way_to_clients_that_ask() {
    let test = Test::new(&[("a", 6, 6)]);
    let server = Running::start(test.models(KeepAlive::Forever), "A", |options| {
        options.connections = 16;
        options.client_time = NEVER;
    });
    let silent: Vec<TcpStream> =
        (0..200).map(|_| TcpStream::connect(server.address).unwrap()).collect();
    for _ in 0..5 {
        assert_eq!(server.ask("A", "GET", "/health", &Value::Null).0, 200);
        let (status, body) = server.ask(
            "A",
            "POST",
            "/v1/completions",
            &json!({
                "model": "a", "prompt": [1, 2, 3], "max_tokens": 2,
            }),
        );
        assert_eq!(status, 200, "{body}");
    }
    drop(silent);
}
