//! Tests plans and pulls of models that are on a hub: only headers are read, and what cannot run is refused before any weight.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{Array, ByteStrings, TensorType, Value as GgufValue};
use forebay_lab::synth::{SynthOptions, hollow};
use serde_json::Value;

use crate::harness::{Ran, demo, fixture, forebay, moe, words, workspace};
use crate::plan::saved_profile;
use crate::pull::Place;
use crate::pull::hub::{Answer, Hub, Served};
use crate::serve::Server;

/// Most bytes that a plan reads.
const SENT_MAX: u64 = 16 << 20;

fn desktop() -> String {
    let path = workspace().join("crates/forebay-engine/tests/profiles/desktop.json");
    path.to_str().expect("UTF-8").to_owned()
}

/// Makes hollow models of one shape in a folder, one for each quantisation.
fn quants(folder: &Path, arch: &str, quantisations: &[&str]) -> Vec<(String, PathBuf)> {
    let make = |name: &&str| {
        let file = format!("m-{name}.gguf");
        let path = folder.join(&file);
        let quantisation = Some(name.to_string());
        hollow(arch, &path, &SynthOptions { quantisation, ..SynthOptions::default() }).unwrap();
        (file, path)
    };
    quantisations.iter().map(make).collect()
}

fn served(models: &[(String, PathBuf)]) -> Vec<Served> {
    models.iter().map(|(name, path)| Served::on_disk(name, path)).collect()
}

/// Returns the parts of a plan that a download must not change.
fn essence(document: &Value) -> Value {
    let mut document = document.clone();
    let object = document.as_object_mut().unwrap();
    object.remove("path");
    object.remove("repository");
    object["model"].as_object_mut().unwrap().remove("path");
    document
}

/// Plans on a machine with a profile, so that free memory does not matter.
fn planned(place: &Place, hub: &Hub, name: &str, more: &str) -> Ran {
    let line = format!("plan {name} --profile {} --ram 20GiB{more}", desktop());
    let arguments = words(&line);
    place.run(hub, &arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn all_quantisations_are_planned_from_their_headers_as_after_the_download() {
    let place = Place::new();
    let names = [
        "Q2_K",
        "Q3_K_M",
        "Q4_K_M",
        "Q5_K_M",
        "Q6_K",
        "Q8_0",
        "Q4_0",
        "Q5_0",
        "MXFP4_MOE",
        "F16",
        "BF16",
        "IQ4_NL",
        "IQ4_XS",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ3_XXS",
        "IQ1_S",
        "Q5_1",
        "Q4_1",
        "F32",
    ];
    let models = quants(place.folder.path(), "qwen3moe-30b", &names);
    let hub = Hub::start(served(&models), |_, _| Answer::Usual);
    let document = planned(&place, &hub, "o/r", " --json").json();
    assert!(hub.sent_bytes() <= SENT_MAX, "{}", hub.sent_bytes());
    let repository = &document["repository"];
    assert_eq!(repository["read_bytes"].as_u64(), Some(hub.sent_bytes()));
    let listed = repository["models"].as_array().unwrap();
    assert_eq!(listed.len(), names.len());
    let sizes: Vec<u64> = listed.iter().map(|of| of["size_bytes"].as_u64().unwrap()).collect();
    assert!(sizes.is_sorted(), "{sizes:?}");
    for entry in listed {
        let quant = entry["quant"].as_str().unwrap();
        let file = place.folder.path().join(format!("m-{quant}.gguf"));
        let line = format!("plan {} --profile {} --ram 20GiB --json", file.display(), desktop());
        let local = forebay(&words(&line)).json();
        let shown = &local["plan"]["prediction"]["generate"];
        for rate in ["tokens_per_second", "low_tokens_per_second", "high_tokens_per_second"] {
            assert_eq!(entry["generate"][rate], shown[rate], "{quant}");
        }
        assert_eq!(
            (&entry["state"], &entry["device"]),
            (&"planned".into(), &local["plan"]["device"])
        );
        if entry["best"] == true {
            assert_eq!(essence(&document), essence(&local), "{quant}");
        }
        let sum: u64 = ["vram_bytes", "ram_bytes", "ssd_bytes"]
            .iter()
            .map(|tier| entry[tier].as_u64().unwrap())
            .sum();
        let weights = local["model"]["weights_bytes"].as_u64().unwrap();
        assert!(sum <= weights && sum >= weights - (1 << 30), "{quant}: {sum} of {weights}");
    }
    // One is marked: no larger one is wholly in memory.
    let best = listed.iter().position(|entry| entry["best"] == true).unwrap();
    assert_eq!(listed[best]["ssd_bytes"], 0);
    assert_eq!(repository["best"], listed[best]["name"]);
    for larger in &listed[best + 1..] {
        assert!(
            larger["ssd_bytes"].as_u64() > Some(0)
                || larger["size_bytes"] == listed[best]["size_bytes"]
        );
    }
    // By name, one model is planned like a file.
    let one = planned(&place, &hub, "o/r:q8_0", " --json").json();
    let file = place.folder.path().join("m-Q8_0.gguf");
    let line = format!("plan {} --profile {} --ram 20GiB", file.display(), desktop());
    assert_eq!(essence(&one), essence(&forebay(&words(&format!("{line} --json"))).json()));
    let text = planned(&place, &hub, "o/r:Q8_0", "").ok().stdout;
    assert!(text.starts_with(&forebay(&words(&line)).ok().stdout), "{text}");
    let text = planned(&place, &hub, "o/r", "").ok().stdout;
    let marked: Vec<&str> = text.lines().filter(|line| line.starts_with("*  ")).collect();
    assert_eq!(marked.len(), 1, "{text}");
    assert!(text.contains("forebay pull o/r:") && text.contains("GENERATES"), "{text}");
}

/// Cuts a hollow model into the parts of a split set. Every part has some of the tensors.
fn split(source: &Path, folder: &Path, name: &str) -> Vec<(String, PathBuf)> {
    let catalog = forebay_format::Catalog::open(source).unwrap();
    let metadata = catalog.gguf().unwrap();
    let tensors = catalog.tensors();
    let parts = 3;
    let mut written = Vec::new();
    for part in 0..parts {
        let file = format!("{name}-{:05}-of-{parts:05}.gguf", part + 1);
        let path = folder.join(&file);
        let mut writer = GgufWriter::new(&path);
        if part == 0 {
            for (key, value) in metadata.iter() {
                writer.set(key, value.clone()).unwrap();
            }
        }
        writer.set("split.no", GgufValue::U16(part as u16)).unwrap();
        writer.set("split.count", GgufValue::U16(parts as u16)).unwrap();
        writer.set("split.tensors.count", tensors.len() as i32).unwrap();
        let share = tensors.len().div_ceil(parts);
        for tensor in tensors.iter().skip(part * share).take(share) {
            writer.add_tensor(&tensor.name, tensor.ty, &tensor.shape).unwrap();
        }
        let (header, placed) = writer.into_header().unwrap();
        let end = placed.iter().map(|tensor| tensor.extent.end()).max().unwrap();
        fs::write(&path, header).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(end).unwrap();
        written.push((file, path));
    }
    written
}

#[test]
fn split_sets_folders_and_packs() {
    let place = Place::new();
    let at = place.folder.path();
    let models = quants(at, "qwen3moe-30b", &["Q4_K_M", "Q8_0"]);
    let sets = at.join("sets");
    fs::create_dir(&sets).unwrap();
    let mut parts = split(&models[0].1, &sets, "m-Q4_K_M");
    parts.extend(split(&models[1].1, &sets, "m-Q8_0"));
    let mut files = served(&parts);
    let hub = Hub::start(files.clone(), |_, _| Answer::Usual);
    let remote = planned(&place, &hub, "o/r:Q8_0", " --json").json();
    assert!(hub.sent_bytes() <= SENT_MAX, "{}", hub.sent_bytes());
    let line = format!("plan {} --profile {} --ram 20GiB --json", parts[3].1.display(), desktop());
    assert_eq!(essence(&remote), essence(&forebay(&words(&line)).json()));
    // A set that lacks a part is not planned.
    files.remove(1);
    let hub = Hub::start(files, |_, _| Answer::Usual);
    let text = planned(&place, &hub, "o/r", "").ok().stdout;
    assert!(text.contains("Q4_K_M: the repository lacks parts of it"), "{text}");

    let folder = PathBuf::from(moe());
    let names = ["config.json", "tokenizer.json"].map(String::from).into_iter();
    let others = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
    let others = others.map(|name| name.into_string().unwrap());
    let others = others.filter(|name| name.contains("safetensors"));
    let files = names.chain(others).filter(|name| folder.join(name).exists());
    let files = files.map(|name| Served::large(&name, fs::read(folder.join(&name)).unwrap()));
    let hub = Hub::start(files.collect(), |_, _| Answer::Usual);
    let remote = planned(&place, &hub, "o/r", " --json").json();
    let line = format!("plan {} --profile {} --ram 20GiB --json", folder.display(), desktop());
    assert_eq!(essence(&remote), essence(&forebay(&words(&line)).json()));

    let pack = at.join("tales-Q4_K_M.fbay");
    forebay(&["pack", &demo(), "-o", pack.to_str().unwrap()]).ok();
    let hub = Hub::start(vec![Served::on_disk("tales-Q4_K_M.fbay", &pack)], |_, _| Answer::Usual);
    let remote = planned(&place, &hub, "o/r:Q4_K_M", " --json").json();
    let line = format!("plan {} --profile {} --ram 20GiB --json", pack.display(), desktop());
    assert_eq!(essence(&remote), essence(&forebay(&words(&line)).json()));
    assert!(hub.sent_bytes() < fs::metadata(&pack).unwrap().len() / 2, "{}", hub.sent_bytes());
}

#[test]
fn other_vocabularies_and_orders_in_one_repository_are_read_by_themselves() {
    let place = Place::new();
    let at = place.folder.path();
    let mut models = quants(at, "qwen3moe-30b", &["Q4_K_M"]);
    for (arch, name) in [("llama-8b", "Q8_0"), ("gpt-oss-20b", "MXFP4")] {
        let path = at.join(format!("other-{name}.gguf"));
        hollow(arch, &path, &SynthOptions::default()).unwrap();
        models.push((format!("other-{name}.gguf"), path));
    }
    let hub = Hub::start(served(&models), |_, _| Answer::Usual);
    let document = planned(&place, &hub, "o/r", " --json").json();
    assert!(hub.sent_bytes() <= SENT_MAX);
    let mut states = Vec::new();
    for entry in document["repository"]["models"].as_array().unwrap() {
        states.push(entry["state"].as_str().unwrap().to_owned());
        if entry["state"] == "planned" {
            let quant = entry["quant"].as_str().unwrap();
            let path = &models.iter().find(|(name, _)| name.contains(quant)).unwrap().1;
            let line =
                format!("plan {} --profile {} --ram 20GiB --json", path.display(), desktop());
            let local = forebay(&words(&line)).json();
            let rate = &local["plan"]["prediction"]["generate"]["low_tokens_per_second"];
            assert_eq!(&entry["generate"]["low_tokens_per_second"], rate, "{quant}");
        }
    }
    assert!(states.iter().filter(|state| *state == "planned").count() >= 2, "{states:?}");
}

#[test]
fn a_server_without_ranges_and_connections_that_break() {
    let place = Place::new();
    let models = quants(place.folder.path(), "qwen3moe-30b", &["Q4_K_M", "Q8_0"]);
    // Whole files only: the first is read as far as its header, the other one is estimated.
    let hub = Hub::start(served(&models), |_, _| Answer::Whole);
    let document = planned(&place, &hub, "o/r", " --json").json();
    let listed = document["repository"]["models"].as_array().unwrap();
    assert_eq!(listed[0]["state"], "planned", "{listed:?}");
    assert_eq!(listed[1]["state"], "estimated", "{listed:?}");
    let text = planned(&place, &hub, "o/r", "").ok().stdout;
    assert!(text.lines().any(|line| line.contains("Q8_0") && line.contains("estimated")), "{text}");
    assert!(document["repository"]["read_bytes"].as_u64() <= Some(SENT_MAX));
    // Every second connection dies early.
    let hub = Hub::start(served(&models), |_, before| match before % 2 {
        0 => Answer::Cut(1000),
        _ => Answer::Usual,
    });
    let ran = planned(&place, &hub, "o/r", " --json");
    assert!(ran.stderr.contains("broke off; trying again in 1 s"), "{}", ran.stderr);
    let document: Value = serde_json::from_str(&ran.ok().stdout).unwrap();
    for entry in document["repository"]["models"].as_array().unwrap() {
        assert_eq!(entry["state"], "planned");
    }
}

#[test]
fn what_the_hub_refuses_is_said() {
    let place = Place::new();
    for (status, more, words) in [
        (401, "x-error-code: GatedRepo\r\n", "is gated"),
        (403, "x-error-code: GatedRepo\r\n", "is gated"),
        (401, "", "does not exist, or is private or gated"),
        (404, "", "does not exist"),
        (404, "x-error-code: RevisionNotFound\r\n", "has no such revision"),
    ] {
        let hub = Hub::start(Vec::new(), move |_, _| Answer::Status(status, more));
        for line in ["plan o/r", "pull o/r", "plan o/r:Q8_0 --json"] {
            let error = place.run(&hub, &line.split(' ').collect::<Vec<_>>()).failed(1);
            assert!(error.contains(words), "{line}: {error}");
        }
    }
    let hub = Hub::start(vec![Served::small("README.md", "x")], |_, _| Answer::Usual);
    assert!(place.run(&hub, &["plan", "o/r"]).failed(1).contains("has no GGUF files"));
    let models = quants(place.folder.path(), "qwen3moe-30b", &["Q8_0"]);
    let hub = Hub::start(served(&models), |_, _| Answer::Usual);
    let error = place.run(&hub, &["plan", "o/r:Q4_K_M"]).failed(1);
    assert!(error.contains("has no Q4_K_M; it has: Q8_0"), "{error}");
}

/// Writes a file with a header of more than 16 MiB.
fn with_large_header(path: &Path) {
    let mut writer = GgufWriter::new(path);
    writer.set("general.architecture", "llama").unwrap();
    let tokens: ByteStrings =
        (0..600_000).map(|n| format!("a token of the vocabulary {n}")).collect();
    writer.set("tokenizer.ggml.tokens", GgufValue::Array(Array::String(tokens))).unwrap();
    writer.add_tensor("output_norm.weight", TensorType::F32, &[64]).unwrap();
    let (header, placed) = writer.into_header().unwrap();
    assert!(header.len() as u64 > SENT_MAX);
    fs::write(path, header).unwrap();
    let end = placed[0].extent.end();
    fs::File::options().write(true).open(path).unwrap().set_len(end).unwrap();
}

#[test]
fn no_more_than_16_mib_are_read() {
    let place = Place::new();
    let path = place.folder.path().join("m-Q8_0.gguf");
    with_large_header(&path);
    let hub = Hub::start(vec![Served::on_disk("m-Q8_0.gguf", &path)], |_, _| Answer::Usual);
    let text = planned(&place, &hub, "o/r", "").ok().stdout;
    assert!(text.contains("Q8_0: not planned: its header is beyond the 16 MiB"), "{text}");
    assert!(hub.sent_bytes() <= SENT_MAX, "{}", hub.sent_bytes());
}

/// Makes a model of a shape that no machine has memory for, whatever is streamed: one matrix has half a tebibyte.
fn monster(path: &Path) {
    let mut writer = GgufWriter::new(path);
    for (key, value) in [
        ("llama.block_count", 1_u32),
        ("llama.embedding_length", 1 << 17),
        ("llama.feed_forward_length", 1 << 21),
        ("llama.attention.head_count", 1 << 10),
        ("llama.attention.head_count_kv", 8),
        ("llama.context_length", 4096),
    ] {
        writer.set(key, value).unwrap();
    }
    writer.set("general.architecture", "llama").unwrap();
    writer.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f32).unwrap();
    let (hidden, wide, kv) = (1 << 17, 1 << 21, 8 << 7);
    let mut add = |name: &str, ty, shape: &[u64]| writer.add_tensor(name, ty, shape).unwrap();
    add("token_embd.weight", TensorType::BF16, &[256, hidden]);
    add("output_norm.weight", TensorType::F32, &[hidden]);
    add("blk.0.attn_norm.weight", TensorType::F32, &[hidden]);
    add("blk.0.ffn_norm.weight", TensorType::F32, &[hidden]);
    add("blk.0.attn_q.weight", TensorType::BF16, &[hidden, hidden]);
    add("blk.0.attn_k.weight", TensorType::BF16, &[kv, hidden]);
    add("blk.0.attn_v.weight", TensorType::BF16, &[kv, hidden]);
    add("blk.0.attn_output.weight", TensorType::BF16, &[hidden, hidden]);
    add("blk.0.ffn_gate.weight", TensorType::BF16, &[wide, hidden]);
    add("blk.0.ffn_up.weight", TensorType::BF16, &[wide, hidden]);
    add("blk.0.ffn_down.weight", TensorType::BF16, &[hidden, wide]);
    let (header, placed) = writer.into_header().unwrap();
    fs::write(path, header).unwrap();
    let end = placed.iter().map(|tensor| tensor.extent.end()).max().unwrap();
    fs::File::options().write(true).open(path).unwrap().set_len(end).unwrap();
}

#[test]
fn what_cannot_run_is_refused_before_the_first_weight() {
    let place = Place::new();
    let monster_path = place.folder.path().join("m-BF16.gguf");
    monster(&monster_path);
    let files = vec![
        Served::on_disk("m-BF16.gguf", &monster_path),
        Served::large("m-Q8_0.gguf", fs::read(demo()).unwrap()),
    ];
    let hub = Hub::start(files, |_, _| Answer::Usual);
    for line in ["pull o/r:BF16", "plan o/r:BF16"] {
        let error = place.run(&hub, &line.split(' ').collect::<Vec<_>>()).failed(1);
        assert!(error.contains("o/r:BF16 cannot run here: "), "{error}");
        assert!(error.contains("; o/r:Q8_0 (") && error.ends_with("can run here"), "{error}");
        assert!(!error.contains("/tmp"), "{error}");
    }
    assert!(!place.folder.path().join("models").exists(), "nothing was begun");
    let most = 2 << 20;
    assert!(hub.sent_bytes() < most, "{}", hub.sent_bytes());
    let text = place.run(&hub, &["plan", "o/r"]).ok().stdout;
    assert!(text.contains("BF16: cannot run: "), "{text}");

    // A server refuses it, too.
    let folder = place.folder.path().join("models");
    fs::create_dir(&folder).unwrap();
    let home = place.folder.path().to_str().unwrap();
    let variables = [("HF_ENDPOINT", hub.address.as_str()), ("HOME", home)];
    let server = Server::with_environment(&["--models", folder.to_str().unwrap()], &variables);
    let body = r#"{ "model": "o/r:BF16", "stream": false }"#;
    let (status, answer) = server.ask("POST", "/api/pull", "", body);
    assert!(status == 422 && answer.contains("o/r:BF16 cannot run here: "), "{status} {answer}");
    assert!(!folder.join("files").exists(), "nothing was begun");
}

/// Writes a GGUF file of another architecture, with the same length.
fn renamed(from: &str, to: &str) -> Vec<u8> {
    let mut bytes = fs::read(demo()).unwrap();
    let places: Vec<usize> = (0..bytes.len() - from.len())
        .filter(|at| bytes[*at..].starts_with(from.as_bytes()))
        .collect();
    for at in places {
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
    bytes
}

#[test]
fn an_unknown_architecture_is_refused_before_its_weights_come() {
    let place = Place::new();
    let hub =
        Hub::start(vec![Served::large("m-Q8_0.gguf", renamed("qwen3moe", "qwen8moe"))], |_, _| {
            Answer::Usual
        });
    for line in ["pull o/r", "plan o/r:Q8_0"] {
        let error = place.run(&hub, &line.split(' ').collect::<Vec<_>>()).failed(1);
        assert!(error.contains("'qwen8moe' is not supported"), "{error}");
        assert!(!error.contains("can run here"), "{error}");
    }
    assert!(hub.sent_bytes() < 2 << 20, "{}", hub.sent_bytes());
    // One that is not known at all is told with those that are.
    let file = place.folder.path().join("x.gguf");
    fs::write(&file, renamed("qwen3moe", "qwen9moe")).unwrap();
    let error = forebay(&["inspect", file.to_str().unwrap()]).failed(1);
    assert!(error.contains("'qwen9moe' is not supported") && error.contains("qwen3moe"), "{error}");
}

#[test]
fn run_names_the_command_that_downloads() {
    let place = Place::new();
    let hub = Hub::start(Vec::new(), |_, _| Answer::Usual);
    let error = place.run(&hub, &["run", "o/r:Q8_0", "hello"]).failed(1);
    assert!(error.contains("forebay pull o/r:Q8_0"), "{error}");
    assert!(hub.requests().is_empty(), "nothing is asked without a terminal");
}

#[test]
fn a_shape_is_planned_without_a_file() {
    let place = Place::new();
    let hub = Hub::start(Vec::new(), |_, _| Answer::Usual);
    let list = place.run(&hub, &["plan", "--shape"]).ok().stdout;
    assert!(list.lines().any(|line| line == "qwen3moe-30b"), "{list}");
    let error = place.run(&hub, &["plan", "--shape", "gpt-9"]).failed(2);
    assert!(
        error.contains("there is no shape 'gpt-9'") && error.contains("qwen3moe-30b"),
        "{error}"
    );
    let error = place.run(&hub, &["plan"]).failed(2);
    assert!(error.contains("name a MODEL"), "{error}");
    let line = format!(
        "plan --shape qwen3moe-30b --quantisation Q8_0 --profile {} --ram 20GiB --json",
        desktop()
    );
    let arguments = words(&line);
    let shape = place.run(&hub, &arguments.iter().map(String::as_str).collect::<Vec<_>>()).json();
    let models = quants(place.folder.path(), "qwen3moe-30b", &["Q8_0"]);
    let line = format!("plan {} --profile {} --ram 20GiB --json", models[0].1.display(), desktop());
    assert_eq!(essence(&shape), essence(&forebay(&words(&line)).json()));
}

#[test]
fn without_a_profile_the_placement_is_shown_and_no_speed() {
    let place = Place::new();
    let models = quants(place.folder.path(), "qwen3moe-30b", &["Q4_K_M"]);
    let hub = Hub::start(served(&models), |_, _| Answer::Usual);
    let file = models[0].1.to_str().unwrap();
    for line in
        [vec!["plan", file], vec!["plan", "o/r:Q4_K_M"], vec!["plan", "--shape", "llama-8b"]]
    {
        let line = [&line[..], &["--ram", "8GiB", "--device", "cpu"]].concat();
        let text = place.run(&hub, &line).ok().stdout;
        assert!(text.contains("plan  the CPU computes; "), "{text}");
        let said = text.matches("run forebay doctor").count();
        assert!(said == 1 && text.contains("no machine profile: run forebay doctor"), "{text}");
        assert!(!text.contains("tokens/s") && !text.contains("time goes to"), "{text}");
        let json = place.run(&hub, &[&line[..], &["--json"]].concat()).json();
        assert!(json["plan"]["prediction"].is_null() && json["one_more_gib"].is_null(), "{json}");
        assert_eq!(json["not_predicted_because"], "no machine profile: run forebay doctor");
        assert!(json["plan"]["host"]["arena_bytes"].as_u64() > Some(0));
    }
    let text = place.run(&hub, &["plan", "o/r"]).ok().stdout;
    assert!(
        !text.contains("GENERATES") && text.contains("not predicted: no machine profile"),
        "{text}"
    );
    // With one, both.
    let state = place.folder.path().join("state");
    fs::create_dir(&state).unwrap();
    saved_profile(&state, file, 1.0, None);
    let run = |line: &[&str]| {
        let mut command = place.command(&hub, line);
        crate::pull::ended(command.env("XDG_STATE_HOME", &state).spawn().unwrap()).ok().stdout
    };
    let text = run(&["plan", file, "--ram", "8GiB", "--device", "cpu"]);
    assert!(text.contains(" tokens/s; time goes to "), "{text}");
    assert!(
        text.contains(
            "caution  the machine profile is of an older forebay: run forebay doctor again\n"
        ),
        "{text}"
    );
}

#[test]
fn a_hub_that_is_not_there_is_said_in_plain_words() {
    let place = Place::new();
    let hub = Hub::start(Vec::new(), |_, _| Answer::Usual);
    // The port of a listener that is gone.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    for line in ["pull o/r", "plan o/r", "pull o/r --no-check"] {
        let arguments: Vec<&str> = line.split(' ').collect();
        let mut command = place.command(&hub, &arguments);
        let command = command.env("HF_ENDPOINT", format!("http://{address}"));
        let ran = crate::pull::ended(command.spawn().unwrap());
        assert_eq!(ran.status, Some(1), "{}", ran.stderr);
        let why = format!("{address} cannot be reached: the connection is refused");
        assert!(
            ran.stderr.contains(&format!("note: {why}; trying again in 1 s")),
            "{}",
            ran.stderr
        );
        assert!(ran.stderr.ends_with(&format!("error: {why}\n")), "{}", ran.stderr);
    }
}

#[test]
fn small_models_are_planned_too() {
    let place = Place::new();
    let hub =
        Hub::start(vec![Served::large("m.gguf", fs::read(demo()).unwrap())], |_, _| Answer::Usual);
    let remote = planned(&place, &hub, "o/r", " --json").json();
    let line = format!("plan {} --profile {} --ram 20GiB --json", demo(), desktop());
    assert_eq!(essence(&remote), essence(&forebay(&words(&line)).json()));
    assert!(fixture("models/qwen3_moe").is_some());
}
