//! Synthetic models load and depend only on their seed. If one cannot be made, no file is left behind.

use std::collections::BTreeSet;
use std::path::Path;

use forebay_engine::{Session, SessionOptions};
use forebay_format::{Catalog, Source, TensorType, can_dequantize, dequantize};
use forebay_lab::synth::{SynthError, SynthOptions, architectures, synthesize};
use forebay_store::OutputFile;
use forebay_text::Tokenizer;

fn options(quantisation: &str) -> SynthOptions {
    SynthOptions { quantisation: Some(quantisation.to_owned()), ..SynthOptions::default() }
}

fn make(arch: &str, out: &Path, options: &SynthOptions) -> Result<(), SynthError> {
    let out = OutputFile::replace(out)?;
    synthesize(arch, out, options, &mut |_, _| true).map(|_| ())
}

fn files_in(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn tiny_models_open_with_finite_weights() {
    let folder = tempfile::tempdir().unwrap();
    for arch in architectures().filter(|name| name.ends_with("-tiny")) {
        for quantisation in ["Q4_K_M", "Q8_0", "BF16", "IQ4_XS", "MXFP4_MOE"] {
            let path = folder.path().join("model.gguf");
            let out = OutputFile::replace(&path).unwrap();
            let report = synthesize(arch, out, &options(quantisation), &mut |_, _| true).unwrap();
            assert_eq!(report.bytes, path.metadata().unwrap().len(), "{arch} {quantisation}");
            let catalog = Catalog::open(&path).unwrap();
            let bytes = std::fs::read(&path).unwrap();
            for tensor in catalog.tensors() {
                let start = tensor.extent.offset as usize;
                let data = &bytes[start..start + tensor.extent.length as usize];
                if tensor.ty == TensorType::I32 {
                    let numbers = data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
                    let numbers: Vec<i32> = numbers.collect();
                    for row in numbers.chunks_exact(tensor.shape[1] as usize) {
                        let experts: BTreeSet<i32> = row.iter().copied().collect();
                        assert_eq!(experts.len(), row.len(), "{}", tensor.name);
                        assert!(experts.iter().all(|expert| (0..16).contains(expert)));
                    }
                    continue;
                }
                assert!(can_dequantize(tensor.ty));
                let mut values = vec![0.0; tensor.shape.iter().product::<u64>() as usize];
                dequantize(tensor.ty, data, &mut values).unwrap();
                assert!(values.iter().all(|value| value.is_finite()), "{}", tensor.name);
                assert!(values.iter().any(|value| *value != 0.0), "{}", tensor.name);
            }
        }
    }
}

#[test]
fn the_tokenizer_writes_back_what_it_reads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    make("qwen3moe-tiny", &path, &options("Q8_0")).unwrap();
    let tokenizer = Tokenizer::from_catalog(&Catalog::open(&path).unwrap()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 1024);
    let text = "the old sailor, 1867: \u{e9}\n";
    let ids = tokenizer.encode(text, false, false).unwrap();
    assert!(ids.len() < text.len());
    assert_eq!(tokenizer.decode(&ids, false), text);
}

#[test]
fn layers_and_types_are_those_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let two = SynthOptions { layers: Some(2), ..options("q6_k") };
    make("llama-tiny", &path, &two).unwrap();
    let catalog = Catalog::open(&path).unwrap();
    let Source::Gguf(metadata) = &catalog.source else { panic!("not a GGUF file") };
    assert_eq!(metadata.u64("llama.block_count"), Some(2));
    assert_eq!(catalog.tensor("blk.1.ffn_down.weight").unwrap().ty, TensorType::Q6_K);
    assert!(catalog.tensor("blk.2.ffn_down.weight").is_none());
    assert!(catalog.tensor("output.weight").is_none(), "the embedding is the output");
}

#[test]
fn the_seed_decides_and_the_threads_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = |seed, threads| {
        let path = folder.path().join("model.gguf");
        let options = SynthOptions { seed, threads, ..options("Q4_K_M") };
        make("qwen3moe-tiny", &path, &options).unwrap();
        std::fs::read(path).unwrap()
    };
    let first = bytes(1, 1);
    assert!(first == bytes(1, 4));
    assert!(first != bytes(2, 1));
}

#[test]
fn what_cannot_be_made_is_refused_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");

    let error = make("llama-9000", &path, &options("Q8_0")).unwrap_err().to_string();
    assert!(error.contains("llama-9000") && error.contains("qwen3moe-30b"), "{error}");
    let error = make("llama-tiny", &path, &options("Q7_Z")).unwrap_err().to_string();
    assert!(error.contains("Q7_Z") && error.contains("Q4_K_M"), "{error}");
    let five = SynthOptions { layers: Some(5), ..options("Q8_0") };
    let error = make("llama-tiny", &path, &five).unwrap_err().to_string();
    assert!(error.contains("1 to 4"), "{error}");
    let one = SynthOptions { layers: Some(1), ..options("Q8_0") };
    let error = make("qwen3.6-tiny", &path, &one).unwrap_err().to_string();
    assert!(error.contains("2 to 4"), "{error}");
    let error = make("llama-tiny", folder.path(), &options("Q8_0")).unwrap_err().to_string();
    assert!(error.contains("directory"), "{error}");
    let nowhere = folder.path().join("missing").join("model.gguf");
    let error = make("llama-tiny", &nowhere, &options("Q8_0")).unwrap_err().to_string();
    assert!(error.contains("missing"), "{error}");

    let stop = &mut |done, _| done < 100_000;
    let out = OutputFile::create(&path).unwrap();
    let result = synthesize("llama-tiny", out, &options("Q8_0"), stop);
    assert!(matches!(result, Err(SynthError::Interrupted)));
    assert_eq!(files_in(folder.path()), 0);
}

/// Models of the latest families run: their keys and tensors are those that the engine expects.
#[test]
fn the_latest_tiny_models_run() {
    let folder = tempfile::tempdir().unwrap();
    for arch in ["qwen3.8-flash-next-tiny", "glm-5.3-tiny", "laguna-tiny", "deepseek-v4-tiny"] {
        for layers in [None, Some(4)] {
            let path = folder.path().join("model.gguf");
            make(arch, &path, &SynthOptions { layers, ..options("Q4_K_M") }).unwrap();
            let options =
                SessionOptions { context: Some(128), threads: Some(2), ..Default::default() };
            let mut session = Session::open(&path, &options, &mut |_, _| {}).unwrap();
            let tokens: Vec<u32> = (0..90).map(|index| (index * 7919 + 13) % 1022).collect();
            let logits = session.logits(&tokens, None).unwrap();
            assert_eq!(logits.len(), 90 * 1024);
            assert!(logits.iter().all(|logit| logit.is_finite()), "{arch}");
            let other = session.logits(&[5], None).unwrap();
            assert!(other != logits && other.iter().all(|logit| logit.is_finite()), "{arch}");
        }
    }
}

/// A model with fewer layers has as much smaller tables of n-grams.
#[test]
fn tables_of_ngrams_are_cut_with_the_layers() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = |layers| {
        let path = folder.path().join("model.gguf");
        let options = SynthOptions { layers: Some(layers), ..options("Q4_K_M") };
        forebay_lab::synth::hollow("qwen3.8-flash-next", &path, &options).unwrap();
        let catalog = Catalog::open(&path).unwrap();
        catalog.tensor("per_layer_token_embd.weight").unwrap().extent.length
    };
    let (whole, part) = (bytes(48), bytes(12));
    assert!((whole as f64 / part as f64 - 4.0).abs() < 0.001, "{whole} {part}");
    // 16 tables of 20 million rows with 160 elements, in Q5_0.
    assert!((whole as f64 / (16.0 * 20e6 * 110.0) - 1.0).abs() < 0.001, "{whole}");
}
