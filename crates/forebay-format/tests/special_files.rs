//! Tests that anything else than a regular file in the place of a model's file is refused at once, in words that say what it is. A FIFO
//! that were opened would hang the test.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use forebay_format::{Catalog, FormatError, Source, WeightsTable, model_files};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

const SAFETENSORS: &[u8] = br#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;

fn safetensors() -> Vec<u8> {
    let mut bytes = (SAFETENSORS.len() as u64).to_le_bytes().to_vec();
    bytes.extend(SAFETENSORS);
    bytes.extend([0, 0]);
    bytes
}

/// Creates a folder with a model in a shard.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let index = r#"{"weight_map":{"a":"s.safetensors"}}"#;
    for (name, content) in [
        ("config.json", &b"{}"[..]),
        ("s.safetensors", &safetensors()),
        ("model.safetensors.index.json", index.as_bytes()),
        ("tokenizer.json", b"{}"),
    ] {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

/// Puts something that is no regular file in the place of a file. Returns what errors call it, and what has to live as long.
fn replace(path: &Path, kind: &str) -> (&'static str, Option<UnixListener>) {
    let _ = std::fs::remove_file(path);
    match kind {
        "fifo" => {
            mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            ("FIFO", None)
        }
        "link to a fifo" => {
            let fifo = path.with_file_name("a fifo");
            let _ = std::fs::remove_file(&fifo);
            mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
            std::os::unix::fs::symlink(fifo, path).unwrap();
            ("FIFO", None)
        }
        "socket" => ("a socket", Some(UnixListener::bind(path).unwrap())),
        "device" => {
            std::os::unix::fs::symlink("/dev/zero", path).unwrap();
            ("a device", None)
        }
        _ => {
            std::fs::create_dir(path).unwrap();
            ("a folder", None)
        }
    }
}

const KINDS: [&str; 5] = ["fifo", "link to a fifo", "socket", "device", "folder"];

/// Reads everything of a model that is read when it is opened, and its tokenizer.
fn read_all(path: &Path) -> Result<(), String> {
    let catalog = Catalog::open(path).map_err(|error: FormatError| error.to_string())?;
    let Source::HuggingFace(metadata) = &catalog.source else { return Ok(()) };
    match &metadata.tokenizer_json {
        Some(document) => document.read().map(|_| ()).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}

#[test]
fn every_file_of_a_folder_must_be_a_regular_file() {
    read_all(folder().path()).unwrap();
    for name in [
        "config.json",
        "s.safetensors",
        "model.safetensors.index.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "chat_template.json",
    ] {
        for kind in KINDS {
            let folder = folder();
            let (called, _alive) = replace(&folder.path().join(name), kind);
            let error = read_all(folder.path()).expect_err(name);
            assert!(error.contains(called), "{name} as {kind}: {error}");
            // Listing the files opens none of them.
            let _ = model_files(folder.path());
        }
    }
}

#[test]
fn files_of_other_containers_must_be_regular_files() {
    for name in ["model.gguf", "model.fbay", "model.safetensors", "config.json", "model"] {
        for kind in KINDS {
            let folder = tempfile::tempdir().unwrap();
            let path: PathBuf = folder.path().join(name);
            let (_, _alive) = replace(&path, kind);
            assert!(Catalog::open(&path).is_err(), "{name} as {kind}");
            assert!(Catalog::open_weights(&path).is_err(), "{name} as {kind}");
            assert!(WeightsTable::open(&[path]).is_err(), "{name} as {kind}");
        }
    }
}
