//! A running `forebay serve`, and the requests that tests send to it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::demo;

/// A running server.
pub struct Server {
    pub child: Child,
    pub address: String,
    /// What the server keeps between its runs. Servers beside each other must not share it.
    _state: TempDir,
}

/// Status, and body.
pub type Answer = (u16, String);

impl Server {
    pub fn start(more: &[&str]) -> Server {
        Server::of(&[&[demo().as_str(), "--name", "demo"], more].concat())
    }

    /// Starts a server with these models and options.
    pub fn of(arguments: &[&str]) -> Server {
        Server::with_environment(arguments, &[])
    }

    /// Starts a server with these models, options and environment variables.
    pub fn with_environment(arguments: &[&str], variables: &[(&str, &str)]) -> Server {
        let state = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
            .env("XDG_STATE_HOME", state.path())
            .args(["serve", "--device", "cpu", "--port", "0", "--threads", "1"])
            .args(arguments)
            .envs(variables.iter().copied())
            .env_remove("FOREBAY_LOG")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line = lines.find(|line| line.contains("answers at"));
        let line = line.expect("the server says where it listens");
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(',').next());
        let address = address.expect("an address").to_owned();
        // The pipe must not fill up.
        thread::spawn(move || lines.for_each(drop));
        Server { child, address, _state: state }
    }

    /// Sends a request and does not wait for its answer. HTTP/1.0 has no chunks, and the connection ends with the answer.
    pub fn begin(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let host = if headers.contains("Host:") { "" } else { "Host: localhost\r\n" };
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.0\r\n{host}{headers}Content-Length: {length}\r\n\r\n");
        // A server that refuses a large body may close the connection before it has read it.
        let _ = stream.write_all((head + body).as_bytes());
        stream
    }

    pub fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let mut text = Vec::new();
        let _ = self.begin(method, path, headers, body).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("{head}")), body.to_owned())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask("POST", path, "", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    /// Returns the data of the events of a streamed answer.
    pub fn events(&self, path: &str, body: &Value) -> Vec<Value> {
        let (status, answer) = self.ask("POST", path, "", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        let data = answer.lines().filter_map(|line| line.strip_prefix("data: "));
        data.filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).unwrap())
            .collect()
    }

    pub fn running(&self) -> (Value, Value) {
        let (_, slots) = self.get("/slots");
        let slots: Value = serde_json::from_str(&slots).unwrap();
        (slots["running"].clone(), slots["waiting"].clone())
    }

    pub fn signal(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
    }

    /// Asks the server to end, and returns its exit status.
    pub fn end(self) -> Option<i32> {
        self.signal();
        self.wait()
    }

    /// Waits for the end of the server, and returns its exit status.
    pub fn wait(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn completion(prompt: &str, tokens: usize) -> Value {
    json!({ "model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0 })
}
