//! Tests Ctrl-C in the middle of each long command. The command ends soon with status 130, reports it in JSON, and
//! leaves no files behind.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use forebay_lab::synth::{SynthOptions, hollow};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{demo, forebay};

/// Time limit for a command's end, far longer than the limit in `bench/interrupt.sh`, because tests run in parallel on
/// busy machines.
const SOON: Duration = Duration::from_secs(30);
/// Time limit that only a broken command reaches.
const LONG: Duration = Duration::from_secs(120);

/// A running command.
struct Started {
    child: Child,
}

/// Starts a command without input, whose output and log are read.
fn spawn<A: AsRef<OsStr>>(arguments: &[A], variables: &[(&str, &str)]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(arguments)
        .env("FOREBAY_LOG", "forebay=debug")
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts")
}

/// Result of a command that ended after the signal.
struct Ended {
    status: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Started {
    fn new<A: AsRef<OsStr>>(arguments: &[A]) -> Started {
        let started = Started { child: spawn(arguments, &[]) };
        started.until("its signal handler", || started.has_handler());
        started
    }

    /// Waits until `done` returns true. `what` describes the condition.
    fn until(&self, what: &str, done: impl Fn() -> bool) {
        let since = Instant::now();
        while !done() {
            assert!(since.elapsed() < LONG, "waited in vain for {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn has_handler(&self) -> bool {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.child.id())) else {
            return false;
        };
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm"));
        tasks.flatten().any(|task| name(task).is_ok_and(|name| name.trim() == "signals"))
    }

    /// Returns true if the command has this file open.
    fn has_open(&self, path: &Path) -> bool {
        let Ok(open) = fs::read_dir(format!("/proc/{}/fd", self.child.id())) else { return false };
        open.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == path))
    }

    /// Returns true if the command has written more than 1 MiB to a file in this folder. Until the file is complete, it
    /// has no name or a temporary one.
    fn has_unnamed(&self, folder: &Path) -> bool {
        let Ok(open) = fs::read_dir(format!("/proc/{}/fd", self.child.id())) else { return false };
        let length = |fd: &Path| fs::metadata(fd).map_or(0, |found| found.len());
        open.flatten().map(|fd| fd.path()).any(|fd| {
            fs::read_link(&fd).is_ok_and(|to| to.starts_with(folder)) && length(&fd) > 1 << 20
        })
    }

    /// Waits for a line of the log.
    fn until_logged(&mut self, text: &str) {
        let log = BufReader::new(self.child.stderr.take().expect("piped"));
        let mut lines = log.lines();
        let found = lines.by_ref().map_while(Result::ok).any(|line| line.contains(text));
        assert!(found, "{text} is not logged");
        // The remaining lines are read so that they do not fill the pipe.
        thread::spawn(move || lines.for_each(drop));
    }

    fn signal(&self, signal: Signal) {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(id.expect("a process"), signal).expect("the command still runs");
    }

    /// Sends the signal and waits for the end.
    fn interrupt_by(self, signal: Signal) -> Ended {
        self.signal(signal);
        let since = Instant::now();
        let ended = Ended::of(self.child);
        assert!(since.elapsed() < SOON, "it went on for {:?}", since.elapsed());
        ended
    }

    fn interrupt(self) -> Ended {
        self.interrupt_by(Signal::INT)
    }
}

impl Ended {
    /// Waits for the end of a command.
    fn of(child: Child) -> Ended {
        let output = child.wait_with_output().expect("the binary ends");
        Ended {
            status: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Returns the one JSON document, which says that the command was interrupted.
    #[track_caller]
    fn document(&self) -> Value {
        assert_eq!(self.status, Some(130), "{}", self.stderr);
        let document: Value = serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", self.stdout));
        assert_eq!(document["end"], "interrupted", "{document}");
        document
    }
}

/// Returns a text that takes the demo model more than a moment to process.
fn long_prompt() -> String {
    "Once upon a time there was a little dog who lived in a big house. ".repeat(45)
}

/// Makes a sparse model file of some hundred megabytes, whose weights are zeros. It is slow to read and to compute
/// with.
fn large_model(directory: &TempDir) -> String {
    let path = directory.path().join("large.gguf");
    // Its weights are zeros. A family that scales its rotation would be refused once it is loaded, which may be before the interrupt.
    let options = SynthOptions { layers: Some(2), ..SynthOptions::default() };
    hollow("qwen3-8b", &path, &options).expect("written");
    assert!(fs::metadata(&path).expect("written").len() > 500 << 20);
    path.to_str().expect("UTF-8").to_owned()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("the directory is there").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_prompt_ends_with_a_whole_document() {
    let prompt = long_prompt();
    let demo = demo();
    let arguments =
        ["run", &demo, "--raw", "--prompt", &prompt, "--threads", "1", "--ctx", "1024", "--json"];
    let mut started = Started::new(&arguments);
    started.until_logged("reused=");
    let document = started.interrupt().document();
    assert_eq!((&document["text"], &document["generated_tokens"]), (&"".into(), &0.into()));
    assert_eq!(document["prompt_tokens_per_second"], 0.0);
    assert!(document["statistics"]["threads"].is_number(), "{document}");
}

#[test]
fn an_answer_is_printed_as_far_as_it_came() {
    let demo = demo();
    let answer = ["run", &demo, "--raw", "--prompt", "Once", "--ctx", "1024", "--temperature", "0"];
    let whole = forebay(&[&answer[..], &["--max-tokens", "16"]].concat()).ok().stdout;
    let mut started = Started::new(&answer);
    let mut first = [0; 8];
    started.child.stdout.as_mut().expect("piped").read_exact(&mut first).expect("an answer");
    let ended = started.interrupt();
    assert_eq!(ended.status, Some(130));
    let text = String::from_utf8_lossy(&first).into_owned() + &ended.stdout;
    let common = whole.trim_end().len().min(text.trim_end().len());
    assert!(common >= 8 && whole[..common] == text[..common], "{text}");
    assert!(ended.stderr.contains("interrupted"), "{}", ended.stderr);
}

#[test]
fn sigterm_is_as_good() {
    let demo = demo();
    let arguments = ["bench", &demo, "--gen-tokens", "900", "--repeat", "1000", "--json"];
    interrupted_at("TERM:5:pass begun", &arguments);
}

/// Runs a command that gets a signal at a point of the program, and returns its JSON document, which must name the
/// command.
fn interrupted_at(signal_at: &str, arguments: &[&str]) -> Value {
    let child = spawn(arguments, &[("FOREBAY_SIGNAL_AT", signal_at)]);
    let document = Ended::of(child).document();
    assert_eq!(document["command"], arguments[0]);
    document
}

#[test]
fn a_load_ends() {
    let arguments = ["load", &demo(), "--repeat", "100000", "--no-limit", "--json"];
    let document = interrupted_at("INT:3:load begun", &arguments);
    assert_eq!(document["progress"]["unit"], "bytes", "{document}");
}

#[test]
fn packing_leaves_nothing_behind() {
    let directory = tempfile::tempdir().unwrap();
    let model = large_model(&directory);
    let out = tempfile::tempdir().unwrap();
    let pack = out.path().join("out.fbay");
    let started = Started::new(&["pack", &model, "-o", pack.to_str().unwrap(), "--json"]);
    started.until("the unfinished file", || started.has_unnamed(out.path()));
    let document = started.interrupt().document();
    assert_eq!(document["command"], "pack");
    assert_eq!(names(out.path()), [""; 0]);
}

#[test]
fn making_a_model_leaves_nothing_behind() {
    let out = tempfile::tempdir().unwrap();
    let model = out.path().join("out.gguf");
    let started = Started::new(&["synth", "llama-8b", model.to_str().unwrap(), "--json"]);
    started.until("the unfinished file", || started.has_unnamed(out.path()));
    let document = started.interrupt().document();
    assert_eq!(document["command"], "synth");
    assert_eq!(names(out.path()), [""; 0]);
}

#[test]
fn verifying_ends() {
    let directory = tempfile::tempdir().unwrap();
    let pack = directory.path().join("demo.fbay");
    forebay(&["pack", &demo(), "-o", pack.to_str().unwrap()]).ok();
    // The command is stopped as soon as it has opened the file, so that it cannot end before the signal arrives.
    let started = Started::new(&["verify", pack.to_str().unwrap(), "--io", "pread", "--json"]);
    started.until("the pack to be open", || started.has_open(&pack));
    started.signal(Signal::STOP);
    started.signal(Signal::INT);
    started.signal(Signal::CONT);
    let document = started.interrupt_by(Signal::CONT).document();
    assert_eq!(document["command"], "verify");
}

#[test]
fn measuring_the_machine_ends() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::File::create(&file).unwrap().set_len(2 << 30).unwrap();
    let folder = directory.path().to_str().unwrap();
    let arguments = ["doctor", folder, "--file", file.to_str().unwrap(), "--no-save", "--json"];
    interrupted_at("INT:1:measuring memory and kernels", &arguments);
    assert_eq!(names(directory.path()), ["file"]);
}

#[test]
fn an_assessment_leaves_nothing_behind() {
    let out = tempfile::tempdir().unwrap();
    let page = out.path().join("page.html");
    let demo = demo();
    let arguments = [
        "assess",
        &demo,
        "--tokens",
        "2000",
        "-o",
        page.to_str().unwrap(),
        "--ctx",
        "1024",
        "--json",
    ];
    interrupted_at("INT:20:pass begun", &arguments);
    assert_eq!(names(out.path()), [""; 0]);
}

#[test]
fn the_logits_of_a_prompt_leave_nothing_behind() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("logits.safetensors");
    let tokens = vec!["5"; 4000].join(",");
    let directory = tempfile::tempdir().unwrap();
    let model = large_model(&directory);
    let arguments = [
        "logits",
        &model,
        "--tokens",
        &tokens,
        "-o",
        file.to_str().unwrap(),
        "--threads",
        "1",
        "--json",
    ];
    interrupted_at("INT:1:pass begun", &arguments);
    assert_eq!(names(out.path()), [""; 0]);
}

#[test]
fn a_command_that_waits_for_its_input_ends_at_once() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["run", &demo(), "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let input = child.stdin.take();
    let started = Started { child };
    started.until("its signal handler", || started.has_handler());
    thread::sleep(Duration::from_millis(300));
    assert_eq!(started.interrupt().document()["command"], "run");
    drop(input);
}

#[test]
fn two_signals_end_the_program_at_once_with_one_document() {
    let started = Started::new(&["load", &demo(), "--repeat", "100000", "--no-limit", "--json"]);
    thread::sleep(Duration::from_millis(300));
    // Both signals stay pending until the program continues.
    started.signal(Signal::STOP);
    started.signal(Signal::INT);
    started.signal(Signal::TERM);
    started.interrupt_by(Signal::CONT).document();
}
