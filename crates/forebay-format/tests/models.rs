//! Every reference model opens, as GGUF and as a Hugging Face folder.

mod common;

use std::fs::File;
use std::io::Read;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use common::fixtures;
use flate2::read::GzDecoder;
use forebay_format::{Catalog, FormatError, Source, TensorType, parse_gguf_bytes};
use safetensors::SafeTensors;

fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths
}

/// Checks the invariants of every catalog.
fn check(catalog: &Catalog) {
    assert!(!catalog.tensors().is_empty());
    let mut end_before = (0, 0);
    for tensor in catalog.tensors() {
        let (file, extent) = (tensor.extent.file.0 as usize, tensor.extent);
        assert!((file, extent.offset) >= end_before, "{} is out of file order", tensor.name);
        end_before = (file, extent.end());
        assert!(extent.end() <= catalog.file_bytes[file]);
        assert_eq!(tensor.ty.tensor_bytes(&tensor.shape), Some(extent.length), "{}", tensor.name);
        assert_eq!(catalog.tensor(&tensor.name), Some(tensor));
    }
    assert_eq!(catalog.tensor("no such tensor"), None);
    let bytes: u64 = catalog.tensors().iter().map(|tensor| tensor.extent.length).sum();
    assert_eq!(catalog.total_bytes(), bytes);
}

#[test]
fn all_gguf_files_open() {
    let Some(root) = fixtures("gguf") else { return };
    let mut opened = 0;
    for folder in entries(&root) {
        for path in entries(&folder) {
            if path.extension().is_none_or(|extension| extension != "gguf") {
                continue;
            }
            let catalog = Catalog::open(&path).unwrap();
            check(&catalog);
            let metadata = catalog.gguf().unwrap();
            assert_eq!(metadata.version, 3);
            let architecture = metadata.architecture().unwrap();
            assert!(metadata.u64(&format!("{architecture}.block_count")).unwrap() > 0);
            let tokens = metadata.strings("tokenizer.ggml.tokens").unwrap();
            assert_eq!(tokens.len() as u64, catalog.tensor("token_embd.weight").unwrap().shape[0]);
            opened += 1;
        }
    }
    assert!(opened > 0);
}

#[test]
fn tensor_types_are_those_of_the_record() {
    let Some(root) = fixtures("gguf") else { return };
    let mut compared = 0;
    for folder in entries(&root) {
        let record = std::fs::read(folder.join("llamacpp.json")).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        for facts in record["files"].as_object().unwrap().values() {
            let expected = facts["tensor_types"].as_object().unwrap();
            // A split set is a list of files. Opening its last file must open the whole set.
            let file = facts["file"].as_array().map_or(&facts["file"], |all| &all[all.len() - 1]);
            let path = folder.join(file.as_str().unwrap());
            if !path.exists() {
                // The small set has only some of the files.
                continue;
            }
            compared += 1;
            let catalog = Catalog::open(&path).unwrap();
            let mut counts = std::collections::BTreeMap::new();
            for tensor in catalog.tensors() {
                *counts.entry(tensor.ty.name()).or_insert(0u64) += 1;
            }
            for (ty, count) in expected {
                assert_eq!(counts.remove(ty.as_str()), count.as_u64(), "{} {ty}", path.display());
            }
            assert!(counts.is_empty(), "{}: {counts:?}", path.display());
        }
    }
    assert!(compared > 0);
}

#[test]
fn any_file_of_a_split_set_opens_the_whole() {
    let Some(root) = fixtures("gguf") else { return };
    let first = root.join("mixtral/mixtral-BF16-00001-of-00002.gguf");
    let second = root.join("mixtral/mixtral-BF16-00002-of-00002.gguf");
    if !first.exists() {
        // Write to stderr directly, because the test harness captures what passing tests print.
        let _ = writeln!(std::io::stderr(), "SKIPPED: no split mixtral in {}", root.display());
        return;
    }
    let catalog = Catalog::open(&first).unwrap();
    let again = Catalog::open(&second).unwrap();
    assert_eq!(catalog.files, [first, second.clone()]);
    assert_eq!(catalog.files, again.files);
    assert_eq!(catalog.tensors(), again.tensors());
    assert_eq!(catalog.gguf(), again.gguf());
    assert_eq!(catalog.gguf().unwrap().u64("split.tensors.count").unwrap(), {
        catalog.tensors().len() as u64
    });
    assert!(catalog.tensors().iter().any(|tensor| tensor.extent.file.0 == 1));

    let folder = tempfile::tempdir().unwrap();
    let alone = folder.path().join(second.file_name().unwrap());
    std::fs::copy(&second, &alone).unwrap();
    assert!(matches!(Catalog::open(&alone), Err(FormatError::MissingSplitFile { .. })));
    let renamed = folder.path().join("model.gguf");
    std::fs::rename(&alone, &renamed).unwrap();
    assert!(matches!(Catalog::open(&renamed), Err(FormatError::SplitName { count: 2, .. })));
    // The second file is also stored under the first one's name.
    std::fs::copy(&second, folder.path().join("m-00001-of-00002.gguf")).unwrap();
    let path = folder.path().join("m-00002-of-00002.gguf");
    std::fs::copy(&second, &path).unwrap();
    let result = Catalog::open(&path);
    assert!(matches!(result, Err(FormatError::SplitMismatch { what: "split.no", .. })));
}

#[test]
fn all_hugging_face_folders_open() {
    let Some(root) = fixtures("models") else { return };
    for folder in entries(&root) {
        let catalog = Catalog::open(&folder).unwrap();
        check(&catalog);
        let Source::HuggingFace(metadata) = &catalog.source else { panic!("not a folder") };
        // A model for text and images describes the part for text inside.
        let wrapped = metadata.config.get("text_config");
        let size = wrapped.unwrap_or(&metadata.config)["vocab_size"].as_u64().unwrap();
        assert!(metadata.tokenizer_json.as_ref().unwrap().path().exists());
        assert!(metadata.tokenizer_config.is_some() && metadata.generation_config.is_some());
        let part = if wrapped.is_some() { "language_model." } else { "" };
        let embedding = catalog.tensor(&format!("model.{part}embed_tokens.weight")).unwrap();
        assert_eq!(embedding.shape[0], size);

        // The config and any of the weight files open the same model.
        let config = Catalog::open(&folder.join("config.json")).unwrap();
        assert_eq!(config.tensors(), catalog.tensors());
        let file = Catalog::open(&catalog.files[catalog.files.len() - 1]).unwrap();
        assert_eq!(file.tensors(), catalog.tensors());
    }
}

#[test]
fn extents_are_those_of_the_safetensors_crate() {
    let Some(root) = fixtures("models") else { return };
    for folder in entries(&root) {
        let catalog = Catalog::open(&folder).unwrap();
        let files: Vec<Vec<u8>> =
            catalog.files.iter().map(|file| std::fs::read(file).unwrap()).collect();
        for (number, bytes) in files.iter().enumerate() {
            let parsed = SafeTensors::deserialize(bytes).unwrap();
            for (name, view) in parsed.iter() {
                let tensor = catalog.tensor(name).unwrap();
                let range = tensor.extent.offset as usize..tensor.extent.end() as usize;
                assert_eq!(tensor.extent.file.0 as usize, number);
                assert_eq!(&bytes[range], view.data(), "{name}");
                let shape: Vec<u64> = view.shape().iter().map(|dim| *dim as u64).collect();
                assert_eq!(tensor.shape, shape);
                assert_eq!(tensor.ty.name(), view.dtype().to_string());
            }
        }
        let types: Vec<TensorType> = catalog.tensors().iter().map(|tensor| tensor.ty).collect();
        if folder.ends_with("gpt_oss") {
            assert!(types.contains(&TensorType::U8) && types.contains(&TensorType::BF16));
        }
    }
}

#[test]
fn vocabularies_without_tensors_parse() {
    let Some(root) = fixtures("vocab") else { return };
    let mut parsed = 0;
    for path in entries(&root) {
        if path.extension().is_none_or(|extension| extension != "gz") {
            continue;
        }
        let mut bytes = Vec::new();
        GzDecoder::new(File::open(&path).unwrap()).read_to_end(&mut bytes).unwrap();
        let header = parse_gguf_bytes(&bytes).unwrap();
        assert!(header.tensors.is_empty());
        assert!(header.metadata.strings("tokenizer.ggml.tokens").unwrap().len() > 30_000);
        parsed += 1;
    }
    assert!(parsed > 0);
}
