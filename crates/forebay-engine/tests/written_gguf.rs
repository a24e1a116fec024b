//! Tests families that have no GGUF file among the fixtures: their folders are written as GGUF, with the names and keys that
//! converters use, and must give the logits of the folders.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use forebay_engine::{Session, SessionOptions};
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{TensorType, Value};
use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;
use support::fixture;

/// Type, shape and bytes.
type Contents = (TensorType, Vec<u64>, Vec<u8>);

/// Parts of names in folders and in GGUF. Longer parts come before those that they contain.
const NAMES: [(&str, &str); 29] = [
    ("model.layers.", "blk."),
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.query_layernorm", "attn_q_norm"),
    ("self_attn.key_layernorm", "attn_k_norm"),
    ("input_layernorm", "attn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("mlp.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_experts.", "mlp.shared_expert."),
    ("mlp.shared_mlp.", "mlp.shared_expert."),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.gate.wg.weight", "ffn_gate_inp.weight"),
    ("mlp.experts.", "experts."),
];

/// Reads a folder's tensors under their names in GGUF. Those of a layer's experts become one.
fn tensors(folder: &Path, architecture: &str) -> BTreeMap<String, Contents> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut found = BTreeMap::<String, Contents>::new();
    // A layer's experts come in the order of their numbers, which have one digit.
    let mut all = file.tensors();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    for (name, view) in all {
        let ty = match view.dtype() {
            Dtype::BF16 => TensorType::BF16,
            Dtype::F32 => TensorType::F32,
            other => panic!("{other:?}"),
        };
        let mut name = NAMES.iter().fold(name, |name, (from, to)| name.replace(from, to));
        let behind_attention = match architecture {
            "olmo2" => "post_attention_norm",
            _ => "ffn_norm",
        };
        name = name.replace("post_attention_layernorm", behind_attention);
        let mut shape: Vec<u64> = view.shape().iter().map(|&length| length as u64).collect();
        if name.ends_with("exp_probs_b.bias") {
            shape.remove(0);
        }
        if let Some((layer, expert)) = name.split_once("experts.") {
            let (_, matrix) = expert.split_once('.').unwrap();
            let name = format!("{layer}ffn_{}", matrix.replace("_proj", "_exps"));
            let stack =
                found.entry(name).or_insert_with(|| (ty, [&[0], &shape[..]].concat(), vec![]));
            stack.1[0] += 1;
            stack.2.extend(view.data());
            continue;
        }
        let (mut ty, mut data) = (ty, view.data().to_vec());
        if architecture == "gemma" && name.ends_with("norm.weight") {
            // The converter adds the 1 that these norms lack.
            let numbers = data.as_chunks().0.iter();
            let whole = numbers.map(|bytes| 1.0 + f32::from(bf16::from_le_bytes(*bytes)));
            (ty, data) = (TensorType::F32, whole.flat_map(f32::to_le_bytes).collect());
        }
        found.insert(name, (ty, shape, data));
    }
    found
}

/// Writes a folder as GGUF. `more` are keys that not all families have.
fn write(out: &Path, folder: &Path, architecture: &str, more: Vec<(&str, Value)>) {
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let config: Json = serde_json::from_str(&config).unwrap();
    let mut tensors = tensors(folder, architecture);
    for which in ["long", "short"] {
        let Some(factors) = config["rope_scaling"][format!("{which}_factor")].as_array() else {
            continue;
        };
        let bytes: Vec<u8> = factors
            .iter()
            .flat_map(|factor| (factor.as_f64().unwrap() as f32).to_le_bytes())
            .collect();
        let shape = vec![factors.len() as u64];
        tensors.insert(format!("rope_factors_{which}.weight"), (TensorType::F32, shape, bytes));
    }
    let mut writer = GgufWriter::new(out);
    writer.set("general.architecture", architecture).unwrap();
    let count = |key: &str| config[key].as_u64().unwrap() as u32;
    let (hidden, heads) = (count("hidden_size"), count("num_attention_heads"));
    let said = config["attention_head_dim"].as_u64().or(config["head_dim"].as_u64());
    let dim = said.map_or(hidden / heads, |dim| dim as u32);
    let theta = config["rope_theta"].as_f64().unwrap();
    // Hunyuan's converter stretches the base.
    let stretched = config["rope_scaling"]["alpha"].as_f64();
    let exponent = f64::from(dim) / f64::from(dim - 2);
    let theta = stretched.map_or(theta, |alpha| theta * alpha.powf(exponent));
    let keys = [
        ("block_count", Value::from(count("num_hidden_layers"))),
        ("context_length", Value::from(count("max_position_embeddings"))),
        ("embedding_length", Value::from(hidden)),
        ("feed_forward_length", Value::from(count("intermediate_size"))),
        ("attention.head_count", Value::from(heads)),
        ("attention.head_count_kv", Value::from(count("num_key_value_heads"))),
        ("attention.key_length", Value::from(dim)),
        ("attention.value_length", Value::from(dim)),
        ("rope.dimension_count", Value::from(dim)),
        ("rope.freq_base", Value::from(theta as f32)),
        (
            "attention.layer_norm_rms_epsilon",
            Value::from(config["rms_norm_eps"].as_f64().unwrap() as f32),
        ),
    ];
    for (key, value) in keys.into_iter().chain(more) {
        writer.set(&format!("{architecture}.{key}"), value).unwrap();
    }
    for (name, (ty, shape, _)) in &tensors {
        writer.add_tensor(name, *ty, shape).unwrap();
    }
    let mut data = writer.start(Vec::new()).unwrap();
    for (.., bytes) in tensors.values() {
        data.write(bytes).unwrap();
    }
    std::fs::write(out, data.finish().unwrap()).unwrap();
}

fn logits(path: &Path, context: usize) -> Vec<f32> {
    let options =
        SessionOptions { exact: true, context: Some(context), ..SessionOptions::default() };
    let mut session = Session::open(path, &options, &mut |_, _| {}).unwrap();
    let ids: Vec<u32> = (0..48).map(|i| i * 37 % 400 + 3).collect();
    session.logits(&ids, None).unwrap()
}

/// Writes a fixture and compares the logits for contexts of both sizes.
fn check(name: &str, architecture: &str, more: Vec<(&str, Value)>) {
    let Some(folder) = fixture(&format!("models/{name}")) else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    write(&path, &folder, architecture, more);
    for context in [64, 256] {
        let (found, expected) = (logits(&path, context), logits(&folder, context));
        let pairs = found.iter().zip(&expected);
        let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        eprintln!("{name}, context {context}: max abs {largest:.1e}");
        assert_eq!(found.len(), expected.len());
        assert!(largest < 1e-4, "{name}, context {context}: {largest}");
    }
}

fn count(value: u32) -> Value {
    Value::from(value)
}

#[test]
fn qwen2_moe_is_read_from_gguf() {
    let keys = vec![
        ("expert_count", count(6)),
        ("expert_used_count", count(3)),
        ("expert_feed_forward_length", count(32)),
        ("expert_shared_feed_forward_length", count(96)),
    ];
    check("qwen2_moe", "qwen2moe", keys);
}

#[test]
fn ernie_is_read_from_gguf() {
    let keys = vec![
        ("expert_count", count(6)),
        ("expert_used_count", count(3)),
        ("expert_feed_forward_length", count(32)),
        ("expert_shared_count", count(2)),
    ];
    check("ernie4_5_moe", "ernie4_5-moe", keys);
}

#[test]
fn both_generations_of_olmo_are_read_from_gguf() {
    check("olmo2", "olmo2", Vec::new());
    let keys = vec![
        ("attention.sliding_window", count(16)),
        ("rope.scaling.type", Value::from("yarn")),
        ("rope.scaling.factor", Value::from(8.0_f32)),
        ("rope.scaling.original_context_length", count(64)),
    ];
    check("olmo3", "olmo2", keys);
}

#[test]
fn the_first_gemma_is_read_from_gguf() {
    check("gemma", "gemma", Vec::new());
}

#[test]
fn phi3_is_read_from_gguf() {
    let magnitude = (1.0 + 8.0_f64.ln() / 64.0_f64.ln()).sqrt() as f32;
    let keys = vec![
        ("attention.sliding_window", count(2047)),
        ("rope.scaling.type", Value::from("longrope")),
        ("rope.scaling.original_context_length", count(64)),
        ("rope.scaling.attn_factor", Value::from(magnitude)),
    ];
    check("phi3", "phi3", keys);
}

#[test]
fn hunyuan_is_read_from_gguf() {
    let mixture = vec![
        ("expert_count", count(8)),
        ("expert_used_count", count(3)),
        ("expert_feed_forward_length", count(32)),
        ("expert_shared_feed_forward_length", count(96)),
        ("expert_shared_count", count(2)),
        ("rope.scaling.type", Value::from("none")),
        ("rope.scaling.factor", Value::from(1.0_f32)),
    ];
    check("hunyuan_v1_moe", "hunyuan-moe", mixture);
    check("hunyuan_v1_dense", "hunyuan-dense", Vec::new());
}

/// The converter writes no gating function for GLM-4.7-Flash. The correction bias shows that scores are sigmoids.
#[test]
fn a_router_with_a_correction_bias_is_a_sigmoid_router() {
    let Some(path) = fixture("gguf/glm4_moe_lite/glm4_moe_lite-Q8_0.gguf") else { return };
    let mut bytes = std::fs::read(&path).unwrap();
    let key = b"deepseek2.expert_gating_func";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap();
    // A key of another architecture, of the same length, which nothing reads.
    bytes[at..at + 9].copy_from_slice(b"deepseek9");
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("model.gguf");
    std::fs::write(&copy, bytes).unwrap();
    assert!(logits(&copy, 64) == logits(&path, 64));
}
