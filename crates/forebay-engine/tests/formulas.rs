//! Tests families for which no results of another implementation are available. The reference logits come from a script
//! beside the fixture, which computes them by the formulas of the model's report.

use std::path::{Path, PathBuf};

use forebay_engine::{EngineError, Session, SessionOptions};
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{TensorType, Value};
use forebay_model::ModelError;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/formulas").join(name)
}

/// Returns the largest difference of `model`'s logits from the fixture's, and the largest magnitude of the fixture's
/// logits.
fn compared(model: &Path, (name, logits): (&str, &str), options: &SessionOptions) -> (f64, f64) {
    let folder = fixture(name);
    let text = std::fs::read_to_string(folder.join("reference.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&text).unwrap();
    let ids: Vec<u32> = serde_json::from_value(reference["ids"].clone()).unwrap();
    let expected: Vec<Vec<f64>> = serde_json::from_value(reference[logits].clone()).unwrap();
    let mut session = Session::open(model, options, &mut |_, _| {}).unwrap();
    let logits = session.logits(&ids, None).unwrap();
    let expected: Vec<f64> = expected.into_iter().flatten().collect();
    assert_eq!(logits.len(), expected.len());
    let differences = logits.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).abs());
    (
        differences.fold(0.0, f64::max),
        expected.iter().fold(0.0, |largest, value| f64::max(largest, value.abs())),
    )
}

#[test]
fn gemma_2_computes_what_its_report_says() {
    let exact = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let (folder, reference) = (fixture("gemma2"), ("gemma2", "logits"));
    let (difference, largest) = compared(&folder, reference, &exact);
    assert!(largest > 2.0, "logits of up to {largest} say nothing about their cap of 3");
    assert!(difference < 1e-4, "exact: {difference}");
    let usual = SessionOptions { exact: false, ..exact };
    let (difference, _) = compared(&folder, reference, &usual);
    assert!(difference < 2e-2, "with a cache of halves: {difference}");
}

#[test]
fn lfm_2_computes_what_its_report_says() {
    let exact = SessionOptions { exact: true, context: Some(64), ..SessionOptions::default() };
    let (folder, reference) = (fixture("lfm2"), ("lfm2", "logits"));
    let (difference, largest) = compared(&folder, reference, &exact);
    assert!(largest > 2.0, "logits of up to {largest} say little");
    assert!(difference < 1e-4, "exact: {difference}");
    let usual = SessionOptions { exact: false, ..exact };
    let (difference, _) = compared(&folder, reference, &usual);
    assert!(difference < 2e-2, "with a cache of halves: {difference}");
    // The width of the feed-forwards, the rotation and the choice of layers all come from keys of their own.
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    for (from, to) in [
        ("\"block_multiple_of\": 32", "\"block_multiple_of\": 64"),
        ("\"block_ff_dim\": 132", "\"block_ff_dim\": 150"),
        ("\"block_auto_adjust_ff_dim\": true", "\"block_auto_adjust_ff_dim\": false"),
    ] {
        let other = tempfile::tempdir().unwrap();
        let file = "model.safetensors";
        std::fs::copy(folder.join(file), other.path().join(file)).unwrap();
        let changed = config.replace(from, to);
        assert_ne!(changed, config);
        std::fs::write(other.path().join("config.json"), changed).unwrap();
        let opened = Session::open(other.path(), &SessionOptions::default(), &mut |_, _| {});
        let EngineError::Model(ModelError::TensorShape { name, .. }) = opened.err().unwrap() else {
            panic!("{to}: the shape of a tensor is wrong");
        };
        assert!(name.contains("feed_forward"), "{to}: {name}");
    }
}

/// Logits and contexts to compare. The context decides which factors apply, so the same tokens are tested with both.
const LONG_ROPE: [(&str, usize); 3] = [("logits", 24), ("logits", 32), ("long_logits", 33)];

fn long_rope(model: &Path) {
    for (logits, context) in LONG_ROPE {
        let options = SessionOptions { exact: true, context: Some(context), ..Default::default() };
        let (difference, largest) = compared(model, ("longrope", logits), &options);
        assert!(largest > 2.0 && difference < 1e-4, "{context}: {difference} of {largest}");
    }
}

#[test]
fn long_rope_turns_as_published() {
    long_rope(&fixture("longrope"));
}

/// Returns the tensors of a folder's file: name, shape, values.
fn tensors(folder: &Path) -> Vec<(String, Vec<u64>, Vec<f32>)> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |data: &[u8]| -> Vec<f32> {
        data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        let shape = view.shape().iter().map(|&length| length as u64).collect();
        (name, shape, floats(view.data()))
    };
    file.tensors().into_iter().map(tensor).collect()
}

/// Returns the rows of heads in the order of llama's converter, which puts the two rows of a pair side by side.
fn interleaved(values: &[f32], columns: usize, dim: usize) -> Vec<f32> {
    let head = |head: &[f32]| -> Vec<f32> {
        let row = |at: usize| head[at * columns..][..columns].to_vec();
        (0..dim / 2).flat_map(|pair| [row(pair), row(dim / 2 + pair)].concat()).collect()
    };
    values.chunks_exact(dim * columns).flat_map(head).collect()
}

/// Writes the fixture as a GGUF file. The factors are tensors, and the magnitude is a metadata value.
fn as_gguf(out: &Path, long: usize) {
    let mut writer = GgufWriter::new(out);
    writer.set("general.architecture", "llama").unwrap();
    let mut key = |name: &str, value: Value| writer.set(&format!("llama.{name}"), value).unwrap();
    for (name, value) in [
        ("block_count", 2),
        ("context_length", 128),
        ("embedding_length", 32),
        ("feed_forward_length", 48),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 16),
        ("attention.value_length", 16),
        ("rope.dimension_count", 16),
        ("rope.scaling.original_context_length", 32),
    ] {
        key(name, Value::from(value as u32));
    }
    key("attention.layer_norm_rms_epsilon", Value::from(1e-6_f32));
    key("rope.freq_base", Value::from(1e4_f32));
    key("rope.scaling.type", Value::from("longrope"));
    // ln 4 / ln 32 = 2/5.
    key("rope.scaling.attn_factor", Value::from(1.4_f32.sqrt()));
    let config = std::fs::read_to_string(fixture("longrope").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let factors = |name: &str| -> Vec<f32> {
        serde_json::from_value(config["rope_scaling"][name].clone()).unwrap()
    };
    let mut all: Vec<(String, Vec<u64>, Vec<f32>)> = tensors(&fixture("longrope"))
        .into_iter()
        .map(|(name, shape, values)| {
            let turned = name.contains("q_proj") || name.contains("k_proj");
            let values = if turned { interleaved(&values, 32, 16) } else { values };
            let mut name = name.replace("model.layers.", "blk.");
            for (from, to) in [
                ("model.embed_tokens", "token_embd"),
                ("lm_head", "output"),
                ("model.norm", "output_norm"),
                ("self_attn.o_proj", "attn_output"),
                ("self_attn.", "attn_"),
                ("mlp.", "ffn_"),
                ("input_layernorm", "attn_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("_proj", ""),
            ] {
                name = name.replace(from, to);
            }
            (name, shape, values)
        })
        .collect();
    let long_factors = factors("long_factor")[..long].to_vec();
    all.push(("rope_factors_long.weight".into(), vec![long as u64], long_factors));
    all.push(("rope_factors_short.weight".into(), vec![8], factors("short_factor")));
    for (name, shape, _) in &all {
        writer.add_tensor(name, TensorType::F32, shape).unwrap();
    }
    let mut data = writer.start(Vec::new()).unwrap();
    for (_, _, values) in &all {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        data.write(&bytes).unwrap();
    }
    std::fs::write(out, data.finish().unwrap()).unwrap();
}

#[test]
fn long_rope_is_read_from_gguf_files_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    as_gguf(&path, 8);
    long_rope(&path);
    as_gguf(&path, 7);
    let error = Session::open(&path, &SessionOptions::default(), &mut |_, _| {}).err().unwrap();
    let EngineError::Model(ModelError::TensorShape { name, .. }) = error else { panic!("{error}") };
    assert_eq!(name, "rope_factors_long.weight");
}

#[test]
fn factors_of_a_wrong_length_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let from = fixture("longrope");
    std::fs::copy(from.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let config = std::fs::read_to_string(from.join("config.json")).unwrap();
    for (bad, said) in [
        (config.replace("2.5\n", "2.5, 3.0\n"), "'short_factor' is a list of 9 numbers"),
        (config.replace("33.5", "\"33.5\""), "'long_factor' is a list of 7 numbers"),
        (config.replace("long_factor", "length"), "'long_factor' is no list"),
        (config.replace("33.5", "-33.5"), "a frequency factor is -33.5"),
    ] {
        assert_ne!(bad, config);
        std::fs::write(folder.path().join("config.json"), bad).unwrap();
        let opened = Session::open(folder.path(), &SessionOptions::default(), &mut |_, _| {});
        let error = opened.err().expect(said).to_string();
        assert!(error.contains(said), "{said}: {error}");
    }
}
