//! Packs with compact BF16: bits of the logits are those of the source, on the CPU, resident and streamed, and the source comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use forebay_engine::pack::{Codec, PackOptions, PackReport, pack, to_gguf, verify};
use forebay_engine::{EngineError, Session, SessionOptions, inspect};
use forebay_format::{Catalog, TensorType};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_store::{IoKind, OutputFile};
use forebay_stream::StreamError;

/// Shapes whose rows are multiples of 256, so that they can become compact. Those of `deepseek-v3-tiny` have matrices of heads.
const SHAPES: [&str; 7] = [
    "qwen3.6-tiny",
    "llama-tiny",
    "qwen3moe-tiny",
    "gpt-oss-tiny",
    "deepseek-v3-tiny",
    "gemma3-tiny",
    "glm-4.5-tiny",
];

fn never(_: u64, _: u64) -> bool {
    true
}

fn synth(shape: &str, folder: &Path) -> PathBuf {
    synth_as(shape, "BF16", folder)
}

fn synth_as(shape: &str, quantisation: &str, folder: &Path) -> PathBuf {
    let path = folder.join("source.gguf");
    let quantisation = Some(quantisation.to_owned());
    let options = SynthOptions { quantisation, ..SynthOptions::default() };
    let out = OutputFile::replace(&path).unwrap();
    synthesize(shape, out, &options, &mut |_, _| true).unwrap();
    path
}

fn packed(source: &Path, codec: Codec) -> (PathBuf, PackReport) {
    let path = source.with_file_name(format!("{codec:?}.fbay"));
    let options = PackOptions { codec, ..PackOptions::default() };
    let report = pack(source, OutputFile::replace(&path).unwrap(), options, &mut never).unwrap();
    (path, report)
}

/// Replaces weights of a tensor: every one of `every` by 0, beginning with the first.
fn thin_out(path: &Path, name: &str, every: usize) {
    let tensor =
        Catalog::open(path).unwrap().tensor(name).unwrap_or_else(|| panic!("{name}")).clone();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    for index in (0..tensor.elements()).step_by(every) {
        file.write_all_at(&[0, 0], tensor.extent.offset + 2 * index).unwrap();
    }
}

fn options(ram_bytes: Option<u64>) -> SessionOptions {
    SessionOptions { ram_bytes, context: Some(64), threads: Some(2), ..SessionOptions::default() }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session, EngineError> {
    Session::open(path, options, &mut |_, _| {})
}

/// Returns the bits of the logits after a prompt and after single tokens.
fn bits(path: &Path, ram_bytes: Option<u64>) -> Vec<u32> {
    let mut session = open(path, &options(ram_bytes)).unwrap();
    let vocabulary = session.vocab_size();
    let tokens: Vec<u32> = (0..40).map(|index| ((index * 7919 + 13) % vocabulary) as u32).collect();
    let mut logits = session.logits(&tokens, None).unwrap();
    for token in &tokens[..3] {
        logits.extend(session.logits(&[*token], None).unwrap());
    }
    logits.iter().map(|value| value.to_bits()).collect()
}

fn smallest(path: &Path) -> u64 {
    match open(path, &options(Some(1))) {
        Err(EngineError::Stream(StreamError::BudgetTooSmall { needed_bytes, .. })) => needed_bytes,
        Err(error) => panic!("one byte must be refused as too small: {error}"),
        Ok(_) => panic!("one byte must be refused"),
    }
}

fn types(path: &Path) -> BTreeSet<&'static str> {
    let catalog = Catalog::open(path).unwrap();
    let matrices = catalog.tensors().iter().filter(|tensor| tensor.shape.len() > 1);
    matrices.map(|tensor| tensor.ty.name()).collect()
}

#[test]
fn every_shape_has_the_bits_of_its_source_and_comes_back() {
    for shape in SHAPES {
        let folder = tempfile::tempdir().unwrap();
        let source = synth(shape, folder.path());
        let outputs = ["blk.0.attn_output.weight", "blk.0.ssm_out.weight"];
        let of_source = Catalog::open(&source).unwrap();
        let output = outputs.into_iter().find(|name| of_source.tensor(name).is_some()).unwrap();
        // One exception in every block of 256.
        thin_out(&source, output, 256);
        let (path, report) = packed(&source, Codec::Auto);
        assert!(types(&path).contains("BF16_C256"), "{shape}: {:?}", types(&path));
        assert!(report.bytes < report.source_bytes * 9 / 10, "{shape}: {report:?}");
        assert!(!report.saved.is_empty() && report.left_plain == 0, "{shape}: {report:?}");
        let catalog = Catalog::open(&path).unwrap();
        let ty = |name: &str| catalog.tensor(name).map(|tensor| tensor.ty);
        assert_eq!(ty(output), Some(TensorType::BF16_C256), "{shape}");
        for router in ["blk.1.ffn_gate_inp.weight", "blk.2.ffn_gate_inp.weight"] {
            assert!(ty(router).is_none_or(|ty| ty.compact().is_none()), "{shape}");
        }

        let expected = bits(&source, None);
        for ram_bytes in [None, Some(smallest(&path)), Some(2 * smallest(&path))] {
            assert!(bits(&path, ram_bytes) == expected, "{shape} with {ram_bytes:?} bytes");
        }
        assert_eq!(verify(&path, IoKind::Auto, &mut never).unwrap().damaged_chunks, 0);
        let back = folder.path().join("back.gguf");
        to_gguf(&path, OutputFile::create(&back).unwrap(), IoKind::Auto, &mut never).unwrap();
        assert!(fs::read(&source).unwrap() == fs::read(&back).unwrap(), "{shape} comes back");

        let (plain, report) = packed(&source, Codec::None);
        assert!(!types(&plain).contains("BF16_C256") && report.saved.is_empty());
        assert!(smallest(&path) < smallest(&plain), "{shape} needs less memory");
    }
}

/// Returns how many chunks of a pack have each codec.
fn codecs(path: &Path) -> BTreeMap<&'static str, usize> {
    let catalog = Catalog::open(path).unwrap();
    let index = &catalog.pack.as_ref().unwrap().chunks;
    let mut counts = BTreeMap::new();
    for chunk in index.chunks(index.range().start, index.range().end) {
        *counts.entry(chunk.codec.name()).or_insert(0) += 1;
    }
    counts
}

/// Replaces a half of all weights by 0, so that every codec makes them smaller.
fn prune(path: &Path) {
    let catalog = Catalog::open(path).unwrap();
    let file = fs::OpenOptions::new().read(true).write(true).open(path).unwrap();
    for tensor in catalog.tensors().iter().filter(|tensor| tensor.shape.len() > 1) {
        let mut bytes = vec![0; tensor.bytes() as usize];
        file.read_exact_at(&mut bytes, tensor.extent.offset).unwrap();
        bytes.chunks_mut(64).step_by(2).for_each(|part| part.fill(0));
        file.write_all_at(&bytes, tensor.extent.offset).unwrap();
    }
}

#[test]
fn coded_packs_have_the_bits_of_their_source_in_every_budget() {
    for (shape, quantisation) in [
        ("llama-tiny", "F16"),
        ("qwen3moe-tiny", "BF16"),
        ("deepseek-v3-tiny", "BF16"),
        ("qwen3moe-tiny", "Q8_0"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let source = synth_as(shape, quantisation, folder.path());
        prune(&source);
        let expected = bits(&source, None);
        let of_floats = if quantisation == "Q8_0" { "zstd" } else { "exponents" };
        for (codec, name) in [
            (Codec::Auto, "zstd"),
            (Codec::Exponents, of_floats),
            (Codec::Zstd, "zstd"),
            (Codec::Gdeflate, "gdeflate"),
        ] {
            if codec == Codec::Exponents && quantisation == "Q8_0" {
                continue;
            }
            let (path, report) = packed(&source, codec);
            let counts = codecs(&path);
            let coded: usize = match codec {
                // Which of the two saves more depends on the shape.
                Codec::Auto => counts.iter().filter(|(of, _)| **of != "raw").map(|(_, n)| n).sum(),
                _ => counts.get(name).copied().unwrap_or(0),
            };
            assert!(coded > 10, "{counts:?}");
            assert!(report.bytes < report.source_bytes * 9 / 10, "{shape}: {report:?}");
            assert_eq!(fs::metadata(&path).unwrap().len(), report.bytes);
            for ram_bytes in [None, Some(smallest(&path)), Some(2 * smallest(&path))] {
                let found = bits(&path, ram_bytes);
                assert!(found == expected, "{shape} {codec:?} with {ram_bytes:?} bytes");
            }
            assert_eq!(verify(&path, IoKind::Auto, &mut never).unwrap().damaged_chunks, 0);
            let back = folder.path().join("back.gguf");
            to_gguf(&path, OutputFile::replace(&back).unwrap(), IoKind::Auto, &mut never).unwrap();
            assert!(fs::read(&source).unwrap() == fs::read(&back).unwrap(), "{shape} comes back");
            assert!(
                inspect(&path).unwrap().model.kinds.iter().any(|it| it.stored_bytes < it.bytes)
            );
        }
    }
}

/// An output projection is read in several pieces if it is large.
#[test]
fn large_heads_of_coded_packs_have_the_bits_of_their_source() {
    for (quantisation, codec) in
        [("BF16", Codec::Auto), ("BF16", Codec::Zstd), ("F16", Codec::Exponents)]
    {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source.gguf");
        let options = SynthOptions {
            quantisation: Some(quantisation.to_owned()),
            layers: Some(1),
            // Two and a half pieces of compact BF16, three and a bit of F16.
            vocabulary: Some(54_321),
            ..SynthOptions::default()
        };
        let out = OutputFile::replace(&source).unwrap();
        synthesize("glm-4.5-tiny", out, &options, &mut |_, _| true).unwrap();
        let (path, _) = packed(&source, codec);
        let catalog = Catalog::open(&path).unwrap();
        let head = catalog.tensor("output.weight").unwrap().extent.offset;
        assert!(catalog.pack.as_ref().unwrap().chunks.is_coded_at(head), "{codec:?}");
        let expected = bits(&source, None);
        for ram_bytes in [None, Some(smallest(&path))] {
            assert!(bits(&path, ram_bytes) == expected, "{codec:?} with {ram_bytes:?} bytes");
        }
        assert_eq!(verify(&path, IoKind::Auto, &mut never).unwrap().damaged_chunks, 0);
    }
}

#[test]
fn tensors_with_too_many_exceptions_stay_as_they_are_with_their_groups() {
    for (shape, name, with) in [
        ("llama-tiny", "blk.1.ffn_up.weight", Some("blk.1.ffn_gate.weight")),
        ("qwen3moe-tiny", "blk.1.ffn_gate_exps.weight", Some("blk.1.ffn_up_exps.weight")),
        ("qwen3moe-tiny", "blk.0.attn_q.weight", None),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let source = synth(shape, folder.path());
        thin_out(&source, name, 16);
        let (path, report) = packed(&source, Codec::Auto);
        let plain: BTreeSet<&str> = [name].into_iter().chain(with).collect();
        assert_eq!(report.left_plain, plain.len(), "{shape}");
        let catalog = Catalog::open(&path).unwrap();
        for tensor in catalog
            .tensors()
            .iter()
            .filter(|of| of.name.starts_with("blk.1.ffn_") || of.name == name)
        {
            let is_plain = plain.contains(tensor.name.as_str());
            let is_other = matches!(tensor.ty, TensorType::F32) || tensor.name.contains("_inp");
            assert!(is_other || is_plain == tensor.ty.compact().is_none(), "{}", tensor.name);
        }
        assert!(bits(&path, None) == bits(&source, None), "{shape}");
        let back = folder.path().join("back.gguf");
        to_gguf(&path, OutputFile::create(&back).unwrap(), IoKind::Auto, &mut never).unwrap();
        assert!(fs::read(&source).unwrap() == fs::read(&back).unwrap(), "{shape} comes back");
    }
}

#[test]
fn a_damaged_block_is_an_error_when_the_source_is_restored() {
    let folder = tempfile::tempdir().unwrap();
    let source = synth("llama-tiny", folder.path());
    let (path, _) = packed(&source, Codec::Auto);
    let catalog = Catalog::open(&path).unwrap();
    let tensor = catalog.tensor("blk.0.attn_q.weight").unwrap();
    // The number of exceptions of the first block.
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[9], tensor.extent.offset + 385).unwrap();
    let back = folder.path().join("back.gguf");
    let out = OutputFile::create(&back).unwrap();
    let error = to_gguf(&path, out, IoKind::Auto, &mut never).unwrap_err().to_string();
    assert!(error.contains("attn_q") || error.contains("damaged"), "{error}");
    assert!(!back.exists());
}
