//! Bad input: exit status 1 or 2, one clear line, nothing left behind.

use std::fs;
use std::path::Path;

use crate::harness::{command, demo, forebay, moe, words};

#[test]
fn wrong_usage_is_status_2() {
    for line in [
        "nonsense",
        "run m --ram 8GB",
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
        "run m n",
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
    for line in [
        "run MODEL --prompt x --device cuda",
        "bench MODEL --device cuda:0",
        "run MODEL --prompt x --vram 8GiB",
    ] {
        let model = moe();
        let line = words(line).into_iter().map(|word| word.replace("MODEL", &model));
        // Hidden from the driver, if there is one.
        let mut arguments =
            vec!["CUDA_VISIBLE_DEVICES=".into(), env!("CARGO_BIN_EXE_forebay").into()];
        arguments.extend(line);
        let said = command("/usr/bin/env", &arguments, "").failed(1);
        assert!(said.contains("NVIDIA driver"), "{said}");
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
    }
}

#[test]
fn a_budget_too_small_names_the_smallest() {
    let said = forebay(&["run", &demo(), "--prompt", "x", "--ram", "64KiB"]).failed(1);
    assert!(said.contains("smallest that works is"), "{said}");
    // What it names does work.
    let smallest = crate::harness::smallest_ram(&demo(), 64).to_string();
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
    for out in [directory.path(), &in_missing, &under_file, Path::new("/dev/null")] {
        let out = out.to_str().unwrap();
        forebay(&["logits", &model, "--tokens", "1,2", "-o", out]).failed(1);
        forebay(&["synth", "llama-8b", out, "--layers", "1"]).failed(1);
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

    // The same for standard error: statistics that nobody reads are no reason to fail.
    let mut child = Command::new(env!("CARGO_BIN_EXE_forebay"))
        .args(["run", "--max-tokens", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
}
