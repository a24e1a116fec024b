//! Tests the model library: pulls from a hub on this machine, names in place of paths, interrupts and kills.

#[path = "../../../forebay-library/tests/pull/hub.rs"]
#[expect(dead_code, reason = "the tests of the library use more of it")]
pub mod hub;

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::harness::{Ran, demo, forebay};
use crate::server::Server;
use hub::{Answer, Hub, Served};
use serde_json::{Value, json};

/// Three ranges of a pull, the last one short.
const SIZE: usize = (70 << 20) + 5;

/// A home and a library of its own.
pub struct Place {
    pub folder: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        Place { folder: tempfile::tempdir().unwrap() }
    }

    pub fn command(&self, hub: &Hub, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command
            .args(arguments)
            .env("HOME", self.folder.path())
            .env("FOREBAY_MODELS", self.folder.path().join("models"))
            .env("HF_ENDPOINT", &hub.address)
            .env_remove("HF_TOKEN")
            .env_remove("HF_HOME")
            .env_remove("XDG_STATE_HOME")
            .env_remove("XDG_CONFIG_HOME")
            .env_remove("FOREBAY_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn run(&self, hub: &Hub, arguments: &[&str]) -> Ran {
        ended(self.command(hub, arguments).spawn().unwrap())
    }

    /// Returns the number of ranges that journals of unfinished files name.
    fn finished_ranges(&self) -> usize {
        let mut folders = vec![self.folder.path().join("models")];
        let mut count = 0;
        while let Some(folder) = folders.pop() {
            for path in fs::read_dir(folder).into_iter().flatten().map(|e| e.unwrap().path()) {
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|ending| ending == "journal") {
                    let text = fs::read_to_string(path).unwrap();
                    // A line with + is about a part of a range.
                    count += text.lines().skip(1).filter(|line| !line.contains('+')).count();
                }
            }
        }
        count
    }

    /// Starts a pull and waits until it has finished a range.
    fn started(&self, hub: &Hub) -> Child {
        let child =
            self.command(hub, &["pull", "o/r", "--jobs", "1", "--no-check"]).spawn().unwrap();
        let since = Instant::now();
        while self.finished_ranges() == 0 {
            assert!(since.elapsed() < Duration::from_secs(60), "no range arrives");
            thread::sleep(Duration::from_millis(2));
        }
        child
    }
}

pub fn ended(child: Child) -> Ran {
    let output = child.wait_with_output().unwrap();
    Ran {
        status: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Returns a hub with a file whose first range arrives fast, and the others slowly.
fn slow_hub(bytes: &[u8]) -> Hub {
    let files = vec![Served::large("m-Q8_0.gguf", bytes.to_vec())];
    Hub::start(files, |_, before| if before == 0 { Answer::Usual } else { Answer::Slow(1000) })
}

fn bytes() -> Vec<u8> {
    (0..SIZE).map(|i| (i * 31 + i / 4099) as u8).collect()
}

#[test]
fn a_model_is_pulled_listed_opened_by_name_and_removed() {
    let model = Served::large("tales-Q4_K_M.gguf", fs::read(demo()).unwrap());
    let hub = Hub::start(vec![model], |_, _| Answer::Usual);
    let place = Place::new();
    fs::create_dir_all(place.folder.path().join(".cache/huggingface")).unwrap();
    fs::write(place.folder.path().join(".cache/huggingface/token"), "from-file\n").unwrap();
    let pulled = place.run(&hub, &["pull", "hf.co/o/r"]).ok();
    assert!(pulled.stdout.starts_with("o/r:Q4_K_M: "), "{}", pulled.stdout);
    assert_eq!(pulled.stderr, "forebay run o/r:Q4_K_M starts a chat with it\n");
    let sent: Vec<_> = hub.requests().iter().map(|r| r.headers["authorization"].clone()).collect();
    assert!(sent.iter().all(|token| token == "Bearer from-file"), "{sent:?}");

    let list = place.run(&hub, &["list"]).ok().stdout;
    assert!(list.starts_with("NAME") && list.contains("\no/r:Q4_K_M  "), "{list}");
    let json = place.run(&hub, &["list", "--json"]).json();
    assert_eq!(json["models"][0]["name"], "o/r:Q4_K_M");
    let path = PathBuf::from(json["models"][0]["path"].as_str().unwrap());
    assert_eq!(fs::read(&path).unwrap(), fs::read(demo()).unwrap());

    // A name is the same as the path, in every command.
    let by_path = forebay(&["tokenize", &demo(), "--text", "The sea"]).ok().stdout;
    for name in ["o/r", "o/r:q4_k_m", "hf.co/O/R:Q4_K_M"] {
        let by_name = place.run(&hub, &["tokenize", name, "--text", "The sea"]).ok().stdout;
        assert_eq!(by_name, by_path);
    }
    let run = ["run", "o/r", "--raw", "-p", "The sea", "-n", "4", "--temperature", "0"];
    assert!(!place.run(&hub, &run).ok().stdout.is_empty());
    let models = place.folder.path().join("models");
    let elsewhere = ["inspect", "o/r", "--models", models.to_str().unwrap()];
    let mut command = place.command(&hub, &elsewhere);
    ended(command.env_remove("FOREBAY_MODELS").spawn().unwrap()).ok();

    place.run(&hub, &["rm", "o/r"]).ok();
    assert!(!path.exists());
    let error = place.run(&hub, &["inspect", "o/r"]).failed(1);
    assert!(error.contains("no such file or folder, and no model of the library"), "{error}");
    assert!(error.contains("forebay pull o/r"), "{error}");
    place.run(&hub, &["rm", "o/r"]).failed(1);
}

#[test]
fn a_server_pulls_copies_and_deletes_models() {
    let bytes = fs::read(demo()).unwrap();
    let hub = Hub::start(vec![Served::large("tales-Q4_K_M.gguf", bytes)], |_, _| Answer::Usual);
    let place = Place::new();
    let folder = place.folder.path().join("models");
    fs::create_dir(&folder).unwrap();
    let home = place.folder.path().to_str().unwrap();
    let variables = [("HF_ENDPOINT", hub.address.as_str()), ("HOME", home), ("HF_TOKEN", "t")];
    let server = Server::with_environment(&["--models", folder.to_str().unwrap()], &variables);
    let names = || {
        let tags: Value = serde_json::from_str(&server.get("/api/tags").1).unwrap();
        let names = tags["models"].as_array().unwrap().iter();
        names.map(|model| model["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(names().is_empty());
    let (status, lines) =
        server.ask("POST", "/api/pull", "", &json!({ "model": "hf.co/o/r" }).to_string());
    assert_eq!(status, 200, "{lines}");
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.first().unwrap()["status"], "pulling manifest");
    assert_eq!(lines.last().unwrap(), &json!({ "status": "success" }), "{lines:?}");
    let last = &lines[lines.len() - 2];
    assert!(last["total"].as_u64() > Some(0) && last["total"] == last["completed"], "{last}");
    assert_eq!(names(), ["o/r:Q4_K_M"]);

    // The model answers by its name, without a restart, and by a second name.
    let copied = json!({ "source": "o/r", "destination": "mine" });
    assert_eq!(server.ask("POST", "/api/copy", "", &copied.to_string()).0, 200);
    assert_eq!(server.ask("POST", "/api/copy", "", &copied.to_string()).0, 409);
    assert_eq!(names(), ["mine:latest", "o/r:Q4_K_M"]);
    let ask = |name: &str| {
        let body = json!({ "model": name, "prompt": "The sea", "max_tokens": 4, "temperature": 0 });
        server.post("/v1/completions", &body)["choices"][0]["text"].clone()
    };
    assert_eq!(ask("mine"), ask("o/r"));
    let pulled_again = json!({ "name": "o/r:q4_k_m", "stream": false });
    assert_eq!(server.post("/api/pull", &pulled_again), json!({ "status": "success" }));

    let delete = |name: &str| {
        server.ask("DELETE", "/api/delete", "", &json!({ "model": name }).to_string()).0
    };
    assert_eq!([delete("o/r"), delete("o/r"), delete("mine:latest")], [200, 404, 200]);
    assert!(names().is_empty());
    assert_eq!(fs::read_dir(folder.join("files")).unwrap().count(), 0);
    let (_, ps) = server.get("/api/ps");
    assert_eq!(ps, r#"{"models":[]}"#);

    // Names of another registry, wrong names, and what the hub does not have.
    fs::copy(demo(), folder.join("own.gguf")).unwrap();
    assert_eq!([delete("own"), delete("../own"), delete("")], [403, 400, 400]);
    for (name, status) in [("llama3.2", 404), ("../x", 400), ("o/r:Q9", 400)] {
        let body = json!({ "model": name, "stream": false }).to_string();
        let (found, answer) = server.ask("POST", "/api/pull", "", &body);
        assert!(found == status && answer.contains("error"), "{name}: {found} {answer}");
    }
    drop(server);

    // A server of one model has no library.
    let server = Server::start(&[]);
    let (status, answer) = server.ask("POST", "/api/pull", "", r#"{ "model": "o/r" }"#);
    assert!(status == 501 && answer.contains("--models"), "{status} {answer}");
    // Codex pulls a model that the list shows with the tag `latest`.
    for name in ["demo", "demo:latest"] {
        let (status, lines) =
            server.ask("POST", "/api/pull", "", &json!({ "model": name }).to_string());
        assert_eq!((status, lines.as_str()), (200, "{\"status\":\"success\"}\n"), "{name}");
        let at_once = json!({ "model": name, "stream": false });
        assert_eq!(server.post("/api/pull", &at_once), json!({ "status": "success" }));
    }
}

#[test]
fn a_killed_pull_goes_on_where_it_ended() {
    let (place, bytes) = (Place::new(), bytes());
    let mut child = place.started(&slow_hub(&bytes));
    child.kill().unwrap();
    child.wait().unwrap();
    let hub = Hub::start(vec![Served::large("m-Q8_0.gguf", bytes.clone())], |_, _| Answer::Usual);
    let list = place.run(&hub, &["list"]).ok();
    assert!(list.stderr.contains("the pull of o/r:Q8_0 is not finished"), "{}", list.stderr);
    assert_eq!(list.stdout, "");
    let json = place.run(&hub, &["pull", "o/r", "--json", "--no-check"]).json();
    assert!(fs::read(json["path"].as_str().unwrap()).unwrap() == bytes);
    assert_eq!(hub.downloads().len(), 2, "the first range is not asked for again");
    assert_eq!(place.finished_ranges(), 0, "no journal stays");
}

#[test]
fn an_interrupted_pull_says_how_to_go_on() {
    let (place, bytes) = (Place::new(), bytes());
    let hub = slow_hub(&bytes);
    let child = place.started(&hub);
    let process = child.id().to_string();
    assert!(Command::new("kill").args(["-s", "INT", &process]).status().unwrap().success());
    let ran = ended(child);
    assert_eq!(ran.status, Some(130), "{}", ran.stderr);
    assert!(ran.stderr.contains("note: forebay pull o/r resumes"), "{}", ran.stderr);
    assert_eq!(place.finished_ranges(), 1);
    place.run(&hub, &["rm", "o/r"]).ok();
    assert_eq!(fs::read_dir(place.folder.path().join("models/files")).unwrap().count(), 0);
}

#[test]
fn wrong_names_and_options_are_refused() {
    let hub = Hub::start(Vec::new(), |_, _| Answer::Status(404, ""));
    let place = Place::new();
    for (line, words, status) in [
        ("pull ../x", "is not a name", 2),
        ("pull llama3.2", "has no owner", 2),
        ("pull o/r --jobs 0", "--jobs", 2),
        ("pull o/r --revision ../x", "no revision", 1),
        ("pull o/r", "does not exist", 1),
        ("rm o/r", "not in the library", 1),
        ("rm ../models", "is not a name", 2),
        ("replay x --models y", "--models", 2),
        ("inspect o/r.gguf", "no such file or folder: check the path", 1),
        ("inspect a/b/c", "no such file or folder: check the path", 1),
    ] {
        let arguments: Vec<&str> = line.split(' ').collect();
        let error = place.run(&hub, &arguments).failed(status);
        assert!(error.contains(words), "{line}: {error}");
    }
    let error = place.run(&hub, &["list"]).ok().stderr;
    assert!(error.contains("no models in"), "{error}");
    let mut nowhere = place.command(&hub, &["list"]);
    let nowhere = nowhere.env_remove("HOME").env_remove("FOREBAY_MODELS");
    ended(nowhere.env_remove("XDG_DATA_HOME").spawn().unwrap()).failed(2);
}
