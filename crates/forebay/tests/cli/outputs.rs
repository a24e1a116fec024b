//! Tests that outputs never destroy files: every command that writes is run against every file that it must not
//! overwrite.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::{Ran, command, demo, forebay, moe, words};

/// One output of one command. In the command line, `OUT` is the output, and `MODEL`, `PACK`, `TRACE`, `ROUTING` and
/// `PROMPTS` are files of [`Place`].
struct Row {
    command: &'static str,
    argument: &'static str,
    line: &'static str,
    /// The file that the command reads.
    input: &'static str,
    to: To,
}

/// Kind of file that an output may be, besides a regular file.
#[derive(Clone, Copy, PartialEq)]
enum To {
    /// A pipe, or standard output, which then carries only this output.
    Stream,
    /// A pipe. Standard output has the command's result.
    Pipe,
    /// Only a file that can be written in any order.
    Seekable,
}

const fn row(
    command: &'static str,
    argument: &'static str,
    input: &'static str,
    to: To,
    line: &'static str,
) -> Row {
    Row { command, argument, line, input, to }
}

const ROWS: [Row; 17] = [
    row(
        "run",
        "--trace-io",
        "MODEL",
        To::Pipe,
        "run MODEL --raw --prompt x --max-tokens 3 --trace-io OUT",
    ),
    row(
        "run",
        "--trace-routing",
        "MODEL",
        To::Pipe,
        "run MODEL --raw --prompt x --max-tokens 3 --trace-routing OUT",
    ),
    row(
        "bench",
        "--trace-io",
        "MODEL",
        To::Pipe,
        "bench MODEL --prompt-tokens 2 --gen-tokens 2 --repeat 1 --trace-io OUT",
    ),
    row(
        "bench",
        "--trace-routing",
        "MODEL",
        To::Pipe,
        "bench MODEL --prompt-tokens 2 --gen-tokens 2 --repeat 1 --trace-routing OUT",
    ),
    row("load", "--trace-io", "MODEL", To::Pipe, "load MODEL --no-limit --trace-io OUT"),
    row("logits", "--output", "MODEL", To::Stream, "logits MODEL --tokens 1,2 -o OUT"),
    row(
        "logits",
        "--trace-io",
        "MODEL",
        To::Pipe,
        "logits MODEL --tokens 1,2 -o /dev/null --trace-io OUT",
    ),
    row("trace-io", "--html", "TRACE", To::Stream, "trace-io TRACE --html OUT"),
    row("trace-io", "--chrome", "TRACE", To::Stream, "trace-io TRACE --chrome OUT"),
    row(
        "assess",
        "--output",
        "MODEL",
        To::Stream,
        "assess MODEL --prompts PROMPTS --tokens 2 -o OUT",
    ),
    row(
        "assess",
        "--csv",
        "MODEL",
        To::Stream,
        "assess MODEL --prompts PROMPTS --tokens 2 --csv OUT",
    ),
    row(
        "assess",
        "--trace-routing",
        "MODEL",
        To::Pipe,
        "assess MODEL --prompts PROMPTS --tokens 2 --trace-routing OUT",
    ),
    row("replay", "--to-csv", "ROUTING", To::Stream, "replay ROUTING --to-csv OUT"),
    row("replay", "--to-trace", "ROUTING", To::Stream, "replay ROUTING --to-trace OUT"),
    row("synth", "out", "", To::Stream, "synth llama-tiny OUT"),
    row("pack", "--output", "MODEL", To::Seekable, "pack MODEL -o OUT"),
    row("pack", "--to-gguf", "PACK", To::Seekable, "pack PACK --to-gguf OUT"),
];

/// These outputs have tests of their own: folders, and files that are taken up again, of a batch and of an access log.
const OTHERS: [(&str, &str); 9] = [
    ("man", "folder"),
    ("assess", "--svg"),
    ("pack", "--to-huggingface"),
    ("batch", "--output"),
    ("batch", "--trace-io"),
    ("batch", "--kv-disk"),
    ("serve", "--access-log"),
    ("serve", "--files"),
    ("serve", "--kv-disk"),
];

/// Copies of all inputs, and a folder for outputs.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let place = Place { folder: tempfile::tempdir().unwrap() };
        fs::create_dir(place.path("out")).unwrap();
        fs::copy(demo(), place.path("MODEL")).unwrap();
        fs::write(place.path("PROMPTS"), "The sea\n---\nOnce upon a time\n").unwrap();
        let text = |name: &str| place.text(name);
        forebay(&["pack", &text("MODEL"), "-o", &text("PACK")]).ok();
        let run = ["run", &text("MODEL"), "--raw", "--prompt", "x", "--max-tokens", "3"];
        let traces = ["--trace-io", &text("TRACE"), "--trace-routing", &text("ROUTING")];
        forebay(&[&run[..], &traces].concat()).ok();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn arguments(&self, row: &Row, out: &Path, force: bool) -> Vec<String> {
        let word = |word: String| match word.as_str() {
            "MODEL" | "PACK" | "TRACE" | "ROUTING" | "PROMPTS" => self.text(&word),
            "OUT" => out.to_str().unwrap().to_owned(),
            _ => word,
        };
        let mut arguments: Vec<String> = words(row.line).into_iter().map(word).collect();
        arguments.extend(force.then(|| "--force".to_owned()));
        arguments
    }

    fn run(&self, row: &Row, out: &Path, force: bool) -> Ran {
        forebay(&self.arguments(row, out, force))
    }

    /// Returns the bytes of every input.
    fn inputs(&self) -> Vec<Vec<u8>> {
        ["MODEL", "PACK", "TRACE", "ROUTING", "PROMPTS"]
            .map(|name| fs::read(self.path(name)).unwrap())
            .into()
    }

    /// Returns the names in the folder for outputs.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.path("out")).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

/// Checks that a command refused an output: status 2, a message that contains `wanted`, and empty standard output.
#[track_caller]
fn refused(ran: Ran, wanted: &str, line: &str) {
    assert_eq!(ran.status, Some(2), "{line}: {}", ran.stderr);
    assert!(ran.stderr.contains(wanted), "{line}: {} (wanted: {wanted})", ran.stderr);
    assert_eq!(ran.stdout, "", "{line}");
}

#[test]
fn the_table_has_every_output() {
    let listed = include_str!("path_arguments.txt");
    let outputs = listed.lines().filter_map(|line| line.strip_suffix(" output"));
    for output in outputs {
        let (command, argument) = output.split_once(' ').unwrap();
        let is_there = ROWS.iter().any(|row| (row.command, row.argument) == (command, argument));
        assert!(is_there || OTHERS.contains(&(command, argument)), "{output} is not in the table");
    }
}

#[test]
fn a_file_that_exists_needs_force() {
    let place = Place::new();
    let inputs = place.inputs();
    for row in &ROWS {
        let out = place.path("out/file");
        let line = row.line;
        place.run(row, &out, false).ok();
        assert_eq!(place.names(), ["file"], "{line}");
        let first = fs::metadata(&out).unwrap().len();
        assert!(first > 0, "{line}");
        fs::write(&out, "precious").unwrap();
        refused(place.run(row, &out, false), "--force", line);
        assert_eq!(fs::read(&out).unwrap(), b"precious", "{line}");
        place.run(row, &out, true).ok();
        assert_ne!(fs::read(&out).unwrap(), b"precious", "{line}");
        assert_eq!(place.names(), ["file"], "{line}");
        fs::remove_file(&out).unwrap();
        for force in [false, true] {
            refused(place.run(row, &place.path("out"), force), "is a directory", line);
        }
        assert!(place.names().is_empty(), "{line}");
    }
    assert!(place.inputs() == inputs);
}

#[test]
fn an_input_is_refused_even_with_force() {
    let place = Place::new();
    let inputs = place.inputs();
    for row in ROWS.iter().filter(|row| !row.input.is_empty()) {
        let input = place.path(row.input);
        let (hard, soft) = (place.path("out/hard"), place.path("out/soft"));
        fs::hard_link(&input, &hard).unwrap();
        symlink(&input, &soft).unwrap();
        for out in [&input, &hard, &soft] {
            refused(place.run(row, out, true), "which this command reads", row.line);
        }
        assert_eq!(place.names(), ["hard", "soft"], "{}", row.line);
        assert!(soft.is_symlink());
        fs::remove_file(hard).unwrap();
        fs::remove_file(soft).unwrap();
    }
    assert!(place.inputs() == inputs);
}

#[test]
fn every_file_of_a_model_is_an_input() {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(moe()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    let text = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let model = folder.path().to_str().unwrap();
    for name in ["model-00002-of-00002.safetensors", "config.json", "tokenizer.json"].map(text) {
        let before = fs::read(&name).unwrap();
        let logits = ["logits", model, "--tokens", "1", "-o", &name, "--force"];
        refused(forebay(&logits), "which this command reads", &name);
        assert!(fs::read(&name).unwrap() == before);
    }
    // Other files that are read are protected, too. Outputs of other runs in the same folder may be replaced.
    let (ids, prompts) = (text("ids"), text("prompts"));
    fs::write(&ids, "1,2").unwrap();
    fs::write(&prompts, "The sea").unwrap();
    let list = format!("@{ids}");
    refused(forebay(&["logits", model, "--tokens", &list, "-o", &ids, "--force"]), "reads", "ids");
    let assess = ["assess", model, "--prompts", &prompts, "-o", &prompts, "--force"];
    refused(forebay(&assess), "reads", "prompts");
    let out = text("out.safetensors");
    forebay(&["logits", model, "--tokens", &list, "-o", &out]).ok();
    forebay(&["logits", model, "--tokens", &list, "-o", &out, "--force"]).ok();
    assert_eq!(fs::read_to_string(&ids).unwrap(), "1,2");
}

#[test]
fn two_outputs_do_not_share_a_name() {
    let place = Place::new();
    let out = place.text("out/file");
    for line in [
        "run MODEL --raw --prompt x --trace-io OUT --trace-routing OUT",
        "logits MODEL --tokens 1 -o OUT --trace-io OUT",
        "replay ROUTING --to-csv OUT --to-trace OUT",
        "assess MODEL -o OUT --trace-routing OUT",
    ] {
        let row = row("", "", "", To::Pipe, line);
        refused(place.run(&row, out.as_ref(), true), "two outputs", line);
        assert!(place.names().is_empty(), "{line}");
    }
    for line in ["run MODEL --prompt x --force", "replay ROUTING --force"] {
        let row = row("", "", "", To::Pipe, line);
        refused(place.run(&row, out.as_ref(), false), "name an output", line);
    }
}

#[test]
fn devices_pipes_and_standard_output_are_written_directly() {
    let place = Place::new();
    for row in &ROWS {
        let line = row.line;
        place.run(row, Path::new("/dev/null"), false).ok();
        let full = place.run(row, Path::new("/dev/full"), false);
        assert_eq!(full.status, Some(1), "{line}: {}", full.stderr);
        assert!(
            full.stderr.contains("/dev/full") && full.stderr.contains("disk is full"),
            "{}",
            full.stderr
        );

        let standard = place.run(row, Path::new("-"), false);
        let pipe = place.path("out/pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read(pipe).unwrap()
        });
        let piped = place.run(row, &pipe, false);
        let read = reader.join().unwrap();
        match row.to {
            To::Seekable => {
                refused(piped, "out of order", line);
                refused(standard, "out of order", line);
            }
            To::Pipe => {
                piped.ok();
                assert!(!read.is_empty(), "{line}");
                refused(standard, "goes to standard output", line);
            }
            To::Stream => {
                piped.ok();
                let standard = standard.ok().stdout;
                assert!(!read.is_empty() && !standard.is_empty(), "{line}");
                if !line.contains("html") && row.command != "assess" {
                    assert!(String::from_utf8_lossy(&read) == standard, "{line}");
                }
            }
        }
        assert_eq!(place.names(), ["pipe"], "{line}");
        fs::remove_file(pipe).unwrap();
    }
    assert!(Path::new("/dev/null").metadata().unwrap().len() == 0);
}

#[test]
fn an_input_that_standard_output_appends_to_is_refused() {
    let place = Place::new();
    let before = place.inputs();
    let append = File::options().append(true).open(place.path("MODEL")).unwrap();
    let ran = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["logits", &place.text("MODEL"), "--tokens", "1", "-o", "-"])
        .stdout(append)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(2), "{}", String::from_utf8_lossy(&ran.stderr));
    assert!(place.inputs() == before);
}

#[test]
fn a_full_disk_leaves_nothing_new_and_the_old_file_whole() {
    let place = Place::new();
    // A limit on the size of files makes writes fail as on a full disk, and needs no root.
    let shell = "trap '' XFSZ; ulimit -f 0; exec \"$0\" \"$@\"";
    let binary = env!("CARGO_BIN_EXE_forebay");
    for row in &ROWS {
        let out = place.path("out/file");
        for old in [None, Some("precious")] {
            if let Some(old) = old {
                fs::write(&out, old).unwrap();
            }
            let mut arguments = vec!["-c".to_owned(), shell.to_owned(), binary.to_owned()];
            arguments.extend(place.arguments(row, &out, old.is_some()));
            let ran = command("sh", &arguments, "");
            assert_eq!(ran.status, Some(1), "{}: {}", row.line, ran.stderr);
            assert!(
                ran.stderr.contains("out/file: cannot be written"),
                "{}: {}",
                row.line,
                ran.stderr
            );
            assert!(!ran.stderr.contains("os error"), "{}", ran.stderr);
            let left = fs::read_to_string(&out).ok();
            assert_eq!(left.as_deref(), old, "{}", row.line);
        }
        fs::remove_file(&out).unwrap();
        assert!(place.names().is_empty(), "{}", row.line);
    }
}

#[test]
fn interrupted_or_killed_work_leaves_the_whole_file_or_none() {
    let place = Place::new();
    let inputs = place.inputs();
    for row in &ROWS {
        let out = place.path("out/file");
        // The complete file, for comparison where it is always the same.
        place.run(row, &out, false).ok();
        let is_same = ["logits", "replay", "synth", "pack"].contains(&row.command)
            && row.argument != "--trace-io";
        let whole = fs::read(&out).unwrap();
        let points = ["output begun", "output written", "output named"];
        for (signal, point) in ["INT", "KILL"].iter().flat_map(|s| points.map(|point| (s, point))) {
            fs::remove_file(&out).unwrap_or_default();
            let status = Command::new(env!("CARGO_BIN_EXE_forebay"))
                .args(place.arguments(row, &out, false))
                .env("FOREBAY_SIGNAL_AT", format!("{signal}:1:{point}"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .unwrap();
            let at = format!("{} {signal} at {point}", row.line);
            // A command may be finished before it notices an interrupt.
            assert!(*signal == "INT" || status.signal() == Some(9), "{at}: {status}");
            match fs::read(&out) {
                Ok(left) => {
                    assert!(!is_same || left == whole, "{at}");
                    assert_eq!(place.names(), ["file"], "{at}");
                }
                Err(_) => assert!(place.names().is_empty(), "{at}: {:?}", place.names()),
            }
        }
        fs::remove_file(&out).unwrap_or_default();
    }
    assert!(place.inputs() == inputs);
}

#[test]
fn folders_are_new_or_empty() {
    let place = Place::new();
    let pack = place.text("folder.fbay");
    forebay(&["pack", &moe(), "-o", &pack]).ok();
    let (model, prompts) = (place.text("MODEL"), place.text("PROMPTS"));
    let figures = ["assess", &model, "--prompts", &prompts, "--tokens", "2", "--svg"];
    for arguments in [&["pack", &pack, "--to-huggingface"][..], &figures] {
        let folder = place.text("out/folder");
        let run = |more: &[&str]| forebay(&[arguments, &[&folder], more].concat());
        run(&[]).ok();
        let count = fs::read_dir(&folder).unwrap().count();
        assert!(count > 2, "{arguments:?}");
        refused(run(&[]), "is not empty", &folder);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), count);
        if arguments[0] == "assess" {
            run(&["--force"]).ok();
            assert_eq!(fs::read_dir(&folder).unwrap().count(), count);
        }
        fs::remove_dir_all(&folder).unwrap();
        fs::write(&folder, "a file").unwrap();
        refused(run(&[]), "is not a directory", &folder);
        assert_eq!(fs::read_to_string(&folder).unwrap(), "a file");
        fs::remove_file(&folder).unwrap();
        assert!(place.names().is_empty());
    }
}
