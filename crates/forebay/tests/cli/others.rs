//! Tests models that lie in the library's folder, and models of Ollama, LM Studio and Hugging Face's tools.

use std::fs;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::harness::{Ran, demo, forebay};
use crate::pull::hub::{Answer, Hub};
use crate::pull::{Place, ended};
use crate::server::Server;

fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

/// Runs the binary without a hub.
fn run(place: &Place, line: &str) -> Ran {
    let hub = Hub::start(Vec::new(), |_, _| Answer::Status(404, ""));
    place.run(&hub, &line.split(' ').collect::<Vec<_>>())
}

fn names(list: &serde_json::Value) -> Vec<String> {
    let models = list["models"].as_array().unwrap();
    models.iter().map(|model| model["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn models_of_other_programs_are_opened_by_name_and_never_written() {
    let place = Place::new();
    let home = place.folder.path();
    let bytes = fs::read(demo()).unwrap();
    let digest: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
    let blob = home.join(format!(".ollama/models/blobs/sha256-{digest}"));
    write(&blob, &bytes);
    let layer = format!(
        r#"{{"layers":[{{"mediaType":"application/vnd.ollama.image.model","digest":"sha256:{digest}","size":{}}}]}}"#,
        bytes.len()
    );
    let manifest = home.join(".ollama/models/manifests/registry.ollama.ai/library/tales/latest");
    write(&manifest, layer.as_bytes());
    write(&home.join(".lmstudio/models/o/r/tales-Q4_K_M.gguf"), &bytes);
    let snapshot = home.join(".cache/huggingface/hub/models--o--tales/snapshots/0a");
    write(&snapshot.join("tales-Q8_0.gguf"), &bytes);

    let list = run(&place, "list --json").json();
    let expected = ["hf:o/tales:Q8_0", "lmstudio:o/r:Q4_K_M", "ollama:tales:latest"];
    assert_eq!(names(&list), expected);
    assert!(list["models"].as_array().unwrap().iter().all(|model| model["origin"] == "other"));
    let text = run(&place, "list").ok().stdout;
    assert!(expected.iter().all(|name| text.contains(name)), "{text}");
    let by_path = forebay(&["tokenize", &demo(), "--text", "sea"]).ok().stdout;
    for name in ["ollama:tales", "ollama:TALES:latest", "lmstudio:o/r", "hf:o/tales:q8_0"] {
        assert_eq!(run(&place, &format!("tokenize {name} --text sea")).ok().stdout, by_path);
    }
    let before = fs::read_dir(blob.parent().unwrap()).unwrap().count();
    for name in expected {
        let error = run(&place, &format!("rm {name}")).failed(1);
        assert!(error.contains("belongs to another program"), "{error}");
    }
    let error = run(&place, "inspect ollama:other").failed(1);
    assert!(error.contains("no such model"), "{error}");
    assert_eq!(fs::read_dir(blob.parent().unwrap()).unwrap().count(), before);
    assert!(fs::read(&blob).unwrap() == bytes);
    // A name of Ollama whose blob is damaged is not shown.
    fs::write(&blob, "short").unwrap();
    assert_eq!(names(&run(&place, "list --json").json()).len(), 2);
}

#[test]
fn files_in_the_folder_mean_the_same_to_list_run_and_serve() {
    let place = Place::new();
    let folder = place.folder.path().join("own");
    fs::create_dir(&folder).unwrap();
    fs::copy(demo(), folder.join("tales.gguf")).unwrap();
    let models = folder.to_str().unwrap();
    let list = run(&place, &format!("list --json --models {models}")).json();
    assert_eq!(names(&list), ["tales"]);
    assert_eq!(list["models"][0]["origin"], "folder");
    let by_path = forebay(&["tokenize", &demo(), "--text", "sea"]).ok().stdout;
    for name in ["tales", "tales.gguf"] {
        let line = format!("tokenize {name} --text sea --models {models}");
        assert_eq!(run(&place, &line).ok().stdout, by_path);
    }
    let server = Server::of(&["--models", models]);
    let (status, body) = server.get("/v1/models");
    assert!(status == 200 && body.contains(r#""id":"tales""#), "{body}");
    drop(server);
    let error = run(&place, &format!("rm tales --models {models}")).failed(1);
    assert!(error.contains("was not pulled") && error.contains("tales.gguf"), "{error}");
    assert!(folder.join("tales.gguf").exists());
    // A completion script asks the program, which knows the names.
    let hub = Hub::start(Vec::new(), |_, _| Answer::Usual);
    let complete = |typed: &str| {
        let mut command = place.command(&hub, &["--", "forebay", "run", typed]);
        command.env("FOREBAY_COMPLETE", "bash").env("FOREBAY_MODELS", models);
        command.env("_CLAP_COMPLETE_INDEX", "2").env("_CLAP_COMPLETE_COMP_TYPE", "9");
        command.env("_CLAP_COMPLETE_SPACE", "true").env("_CLAP_IFS", "\n");
        ended(command.spawn().unwrap()).ok().stdout
    };
    assert_eq!(complete("tal").trim(), "tales");
    assert_eq!(complete("xyz").trim(), "");
    for shell in ["bash", "zsh", "fish"] {
        let script = forebay(&["completions", shell]).ok().stdout;
        assert!(script.contains("FOREBAY_COMPLETE") && script.contains("forebay"), "{script}");
    }
}
