//! Tests bad input: exit status 1 or 2, one clear line, no files left behind.

use std::fs;
use std::path::Path;

use crate::harness::{command, demo, forebay, moe, words};

#[test]
fn wrong_usage_is_status_2() {
    for line in [
        "nonsense",
        "run m --ram 8",
        "run m --ram 8GX",
        "run m --ram 0",
        "run m --ram -1",
        "run m --ram 99999999PiB",
        "run m --polcy lru",
        "run m --policy fifo",
        "run m --io fread",
        "run m --device gpu",
        "run m --temperature hot",
        "run m --temperature nan",
        "run m --top-p 2",
        "run m --threads 0",
        "run m --ctx 0",
        "run m --max-tokens 0",
        "run m --prompt x --stop ",
        "run m n o",
        "run m n --prompt x",
        "run m n -f x",
        "run m -p x -f y",
        "run m --system x --system-file y",
        "run m --raw --system x",
        "run m --raw --think on",
        "run m --think maybe",
        "run m --template-arg x",
        "run m --temperature -1",
        "run m --on-full shift -p x",
        "run --system x",
        "run m -q",
        "bench",
        "bench m --prompt-tokens 0 --gen-tokens 0",
        "logits m --tokens 1,2",
        "logits m -o out",
        "logits m -o out --tokens 1,x",
        "load",
        "load m --io cufile",
        "load m --repeat 0",
        "doctor a b",
        "tokenize",
        "completions tcsh",
    ] {
        let said = forebay(&words(line)).failed(2);
        assert!(said.len() < 400, "{line}: {said}");
    }
}

#[test]
fn devices_that_are_not_there_are_refused() {
    for (line, status) in [
        ("run MODEL --prompt x --device cuda", 1),
        ("bench MODEL --device cuda:0", 1),
        ("run MODEL --prompt x --vram 8GiB", 2),
        ("run MODEL --prompt x --no-cpu-experts", 2),
        ("run MODEL --prompt x --vram 8GiB --threads 2", 2),
    ] {
        let model = moe();
        let line = words(line).into_iter().map(|word| word.replace("MODEL", &model));
        // An existing GPU is hidden from the driver.
        let mut arguments =
            vec!["CUDA_VISIBLE_DEVICES=".into(), env!("CARGO_BIN_EXE_forebay").into()];
        arguments.extend(line);
        let said = command("/usr/bin/env", &arguments, "").failed(status);
        assert!(said.contains("NVIDIA driver"), "{said}");
        assert!(status == 1 || said.contains("is given, but it is for a GPU"), "{said}");
    }
}

#[test]
fn options_that_the_device_does_not_use_are_refused() {
    let model = moe();
    for (options, wanted) in [
        ("--device cuda --prefetch", "--prefetch"),
        ("--device cuda --threads 2 --no-cpu-experts", "--threads"),
        ("--device cuda --threads 2 --exact", "--threads"),
        ("--device cuda --cpu-experts --exact", "--cpu-experts"),
        ("--device auto --cpu-experts --exact", "--cpu-experts"),
        ("--device cpu --vram 1GiB", "--vram"),
        ("--device cpu --kv-vram 1GiB", "--kv-vram"),
        ("--device cpu --kv-type q8_0 --exact", "--kv-type"),
        ("--device auto --kv-type q4_0 --exact", "--kv-type"),
        ("--device cpu --no-cuda-graph", "--no-cuda-graph"),
        ("--device cpu --cpu-experts", "--cpu-experts"),
        ("--device cpu --no-cpu-experts", "--no-cpu-experts"),
        ("--cpu-experts --no-cpu-experts", "--no-cpu-experts"),
        ("--prefetch --vram 1GiB", "--prefetch"),
    ] {
        let mut arguments = words("run --prompt x");
        arguments.push(model.clone());
        arguments.extend(words(options));
        let said = forebay(&arguments).failed(2);
        assert!(said.contains(wanted), "{options}: {said}");
    }
}

/// Every command that reads a model, with `MODEL` in its place.
const READERS: [&str; 7] = [
    "run MODEL --prompt x",
    "load MODEL",
    "bench MODEL",
    "inspect MODEL",
    "logits MODEL --tokens 1,2 -o OUT",
    "tokenize MODEL --text x",
    "render MODEL",
];

fn refuse(model: &Path, wanted: &str) {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out.safetensors");
    for reader in READERS {
        let arguments: Vec<String> = words(reader)
            .into_iter()
            .map(|word| match word.as_str() {
                "MODEL" => model.to_str().unwrap().to_string(),
                "OUT" => out.to_str().unwrap().to_string(),
                _ => word,
            })
            .collect();
        let said = forebay(&arguments).failed(1);
        assert!(said.contains(wanted), "{reader}: {said} (wanted: {wanted})");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "{reader} left a file");
    }
}

#[test]
fn models_that_are_none() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    refuse(&at("missing.gguf"), "missing.gguf");

    fs::create_dir(at("empty")).unwrap();
    refuse(&at("empty"), "empty");

    fs::write(at("zero.gguf"), "").unwrap();
    refuse(&at("zero.gguf"), "zero.gguf");

    fs::write(at("text.gguf"), "this is no model, only some words").unwrap();
    refuse(&at("text.gguf"), "text.gguf");
}

#[test]
fn truncated_files() {
    let directory = tempfile::tempdir().unwrap();
    let whole = fs::read(demo()).unwrap();
    let path = directory.path().join("cut.gguf");
    for length in [3, 4, 8, 20, 24, 100, 5000, 100_000, whole.len() / 2, whole.len() - 1] {
        fs::write(&path, &whole[..length]).unwrap();
        let said = forebay(&["inspect", path.to_str().unwrap()]).failed(1);
        assert!(said.contains("cut.gguf"), "{length}: {said}");
    }
    refuse(&path, "cut.gguf");
}

#[test]
fn an_unknown_architecture_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let mut bytes = fs::read(demo()).unwrap();
    let at = bytes.windows(8).position(|w| w == b"qwen3moe").expect("names its architecture");
    bytes[at..at + 8].copy_from_slice(b"qwen9moe");
    let path = directory.path().join("new.gguf");
    fs::write(&path, bytes).unwrap();
    for arguments in [&["inspect"][..], &["run", "--prompt", "x"]] {
        let said = forebay(&[arguments, &[path.to_str().unwrap()]].concat()).failed(1);
        assert!(said.contains("qwen9moe") && said.contains("llama"), "{said}");
        assert!(said.contains("is not supported") && !said.contains("Convert"), "{said}");
    }
    // Its tensors are listed all the same.
    let ran = forebay(&["inspect", path.to_str().unwrap(), "--tensors"]);
    assert_eq!(ran.status, Some(1));
    assert!(ran.stdout.contains("blk.0.attn_q.weight"), "{}", ran.stdout);
    assert!(ran.stderr.contains("is not supported"), "{}", ran.stderr);
}

#[test]
fn a_budget_too_small_names_the_smallest() {
    let said = forebay(&["run", &demo(), "--prompt", "x", "--ram", "64KiB"]).failed(1);
    assert!(said.contains("smallest that works is"), "{said}");
    // The budget that the error names works.
    let smallest = format!("{}B", crate::harness::smallest_ram(&demo(), 64));
    let ram = ["--ram", &smallest, "--ctx", "64", "--max-tokens", "2"];
    forebay(&[&["run", &demo(), "--prompt", "The sea", "--raw"][..], &ram].concat()).ok();
}

#[test]
fn a_context_beyond_the_model_is_refused() {
    let said = forebay(&["run", &moe(), "--prompt", "x", "--ctx", "99999999"]).failed(2);
    assert!(said.contains("--ctx"), "{said}");
}

#[test]
fn unwritable_outputs() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, "kept").unwrap();
    let model = moe();
    let in_missing = directory.path().join("missing/out");
    let under_file = file.join("out");
    for (out, status) in [(directory.path(), 2), (&in_missing, 1), (&under_file, 1)] {
        let out = out.to_str().unwrap();
        forebay(&["logits", &model, "--tokens", "1,2", "-o", out]).failed(status);
        forebay(&["synth", "llama-8b", out, "--layers", "1"]).failed(status);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "kept");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}

#[test]
fn tokens_that_the_model_does_not_know() {
    let directory = tempfile::tempdir().unwrap();
    let out = directory.path().join("out");
    let out = out.to_str().unwrap();
    let said = forebay(&["logits", &moe(), "--tokens", "1,4000000000", "-o", out]).failed(1);
    assert!(said.contains("4000000000"), "{said}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["inspect", &demo(), "--tensors"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));

    // The same applies to standard error: a command must not fail because its statistics are not read.
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["run", "--max-tokens", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
}

/// Files that people mistake for a model, and the text of their errors.
#[test]
fn what_a_file_seems_to_be_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    let safetensors = fs::read(Path::new(&moe()).join("model-00001-of-00002.safetensors")).unwrap();
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n";
    for (bytes, wanted) in [
        (&b""[..], "the file is empty"),
        (pointer, "git lfs pull"),
        (b"<!DOCTYPE html>\n<html><head>", "web page"),
        (b"PK\x03\x04\x00\x00\x00\x00\x08\x08", "PyTorch"),
        (&safetensors, "safetensors file"),
        (b"Once upon a time", "it is text"),
        (&[0; 4096], "zeros"),
        (&[7, 200, 1, 0, 9, 9], "right file"),
    ] {
        fs::write(&path, bytes).unwrap();
        for line in ["inspect MODEL", "run MODEL --prompt x", "pack MODEL -o /dev/null"] {
            let model = path.to_str().unwrap();
            let arguments: Vec<String> =
                words(line).into_iter().map(|word| word.replace("MODEL", model)).collect();
            let said = forebay(&arguments).failed(1);
            assert!(said.contains("model.gguf: not a GGUF file: "), "{said}");
            assert!(said.contains(wanted) && !said.contains('['), "{said} (wanted: {wanted})");
        }
    }
}

/// Every argument that names a file to read, with a missing file and with a folder in its place.
#[test]
fn missing_files_and_folders_are_said_in_words() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("nofile").to_str().unwrap().to_owned();
    let folder = directory.path().to_str().unwrap();
    for line in [
        "run FILE --prompt x",
        "plan FILE",
        "bench FILE",
        "bench MODEL --prompt-tokens 1 --gen-tokens 1 --routing-trace FILE",
        "load FILE",
        "inspect FILE",
        "logits FILE --tokens 1 -o /dev/null",
        "logits MODEL --tokens @FILE -o /dev/null",
        "tokenize FILE --text x",
        "render FILE",
        "pack FILE -o /dev/null",
        "verify FILE",
        "assess FILE",
        "assess MODEL --prompts FILE",
        "assess MODEL --profile FILE",
        "plan MODEL --profile FILE",
        "trace-io FILE",
        "replay FILE",
        "doctor --no-save --file FILE",
    ] {
        for (path, wanted) in [(missing.as_str(), "no such file"), (folder, "folder")] {
            let model = demo();
            let word = |word: String| word.replace("FILE", path).replace("MODEL", &model);
            let arguments: Vec<String> = words(line).into_iter().map(word).collect();
            let said = forebay(&arguments).failed(1);
            assert!(said.contains(path) && said.contains(wanted), "{line}: {said}");
            assert!(!said.contains("os error"), "{line}: {said}");
        }
    }
}

#[test]
fn a_dense_model_is_not_told_about_experts() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("dense.gguf");
    let model = model.to_str().unwrap();
    forebay(&["synth", "llama-tiny", model]).ok();
    let said = forebay(&["run", model, "--prompt", "x", "--ram", "1KiB"]).failed(1);
    assert!(said.contains("smallest that works is") && !said.contains("expert"), "{said}");
}
