//! Tests families that have no GGUF file among the fixtures: their folders are written as GGUF, with the names and keys that
//! converters use, and must give the logits of the folders.

mod support;

use std::collections::BTreeMap;
use std::path::Path;

use forebay_engine::{Session, SessionOptions};
use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{Array, TensorType, Value};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;
use support::{changed, fixture};

/// Type, shape and bytes.
type Contents = (TensorType, Vec<u64>, Vec<u8>);

/// Parts of names in folders and in GGUF. Longer parts come before those that they contain.
const NAMES: [(&str, &str); 54] = [
    ("model.layers.", "blk."),
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("altup.modality_router", "altup_router"),
    ("altup.router_norm", "altup_router_norm"),
    ("altup.prediction_coefs", "altup_predict_coef"),
    ("altup.correction_coefs", "altup_correct_coef"),
    ("altup.correct_output_scale", "altup_correct_scale.weight"),
    ("model.altup_projections", "altup_proj"),
    ("model.altup_unembed_projections", "altup_unembd_proj"),
    ("laurel.linear_left", "laurel_l"),
    ("laurel.linear_right", "laurel_r"),
    ("laurel.post_laurel_norm", "laurel_post_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("model.final_layernorm", "output_norm"),
    ("lm_head", "output"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.dense", "attn_output"),
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
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.gate.wg.weight", "ffn_gate_inp.weight"),
    ("mlp.experts.", "experts."),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("block_sparse_moe.experts.", "experts."),
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
            "olmo2" | "gemma3n" => "post_attention_norm",
            _ => "ffn_norm",
        };
        name = name.replace("post_attention_layernorm", behind_attention);
        let mut shape: Vec<u64> = view.shape().iter().map(|&length| length as u64).collect();
        if name.ends_with("exp_probs_b.bias") {
            shape.remove(0);
        }
        if let Some((layer, expert)) = name.split_once("experts.") {
            let (_, matrix) = expert.split_once('.').unwrap();
            let matrix = match matrix {
                "w1.weight" => "gate_proj.weight",
                "w2.weight" => "down_proj.weight",
                "w3.weight" => "up_proj.weight",
                usual => usual,
            };
            let name = format!("{layer}ffn_{}", matrix.replace("_proj", "_exps"));
            let stack =
                found.entry(name).or_insert_with(|| (ty, [&[0], &shape[..]].concat(), vec![]));
            stack.1[0] += 1;
            stack.2.extend(view.data());
            continue;
        }
        found.insert(name, (ty, shape, view.data().to_vec()));
    }
    found
}

/// Writes a folder as GGUF. `more` are keys that not all families have.
fn write(out: &Path, folder: &Path, architecture: &str, more: Vec<(&str, Value)>) {
    let config = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let config: Json = serde_json::from_str(&config).unwrap();
    let mut tensors = tensors(folder, architecture);
    match architecture {
        "nemotron" => tensors.iter_mut().for_each(|(name, of)| whole_norm(name, of)),
        "olmo" => tensors.iter_mut().for_each(|(name, of)| in_pairs(&config, name, of)),
        "gemma3n" => tensors = with_stacks(tensors),
        _ => {}
    }
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
    let dim = config["attention_head_dim"].as_u64().or(config["head_dim"].as_u64());
    let dim = dim.map_or(hidden / heads, |dim| dim as u32);
    let share = config["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let rotary = (share * f64::from(dim)) as u32;
    let theta = config["rope_theta"].as_f64().unwrap();
    let widths = &config["intermediate_size"];
    let width = widths.as_array().map_or(widths, |list| &list[0]).as_u64().unwrap() as u32;
    // Hunyuan's converter stretches the base.
    let stretched = config["rope_scaling"]["alpha"].as_f64();
    let exponent = f64::from(dim) / f64::from(dim - 2);
    let theta = stretched.map_or(theta, |alpha| theta * alpha.powf(exponent));
    let keys = [
        ("block_count", Value::from(count("num_hidden_layers"))),
        ("context_length", Value::from(count("max_position_embeddings"))),
        ("embedding_length", Value::from(hidden)),
        ("feed_forward_length", Value::from(width)),
        ("attention.head_count", Value::from(heads)),
        ("attention.head_count_kv", Value::from(count("num_key_value_heads"))),
        ("attention.key_length", Value::from(dim)),
        ("attention.value_length", Value::from(dim)),
        ("rope.dimension_count", Value::from(rotary)),
        ("rope.freq_base", Value::from(theta as f32)),
        match config["rms_norm_eps"].as_f64() {
            Some(epsilon) => ("attention.layer_norm_rms_epsilon", Value::from(epsilon as f32)),
            // All of these have the same.
            None => ("attention.layer_norm_epsilon", Value::from(1e-5_f32)),
        },
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

/// Joins the projections of residual streams, which end in a number, to a tensor for all.
fn with_stacks(tensors: BTreeMap<String, Contents>) -> BTreeMap<String, Contents> {
    let mut found = BTreeMap::<String, Contents>::new();
    // They come in the order of their numbers, which have one digit.
    for (name, (ty, shape, bytes)) in tensors {
        let Some((stack, _)) = name.split_once("_proj.").filter(|(of, _)| of.starts_with("altup"))
        else {
            found.insert(name, (ty, shape, bytes));
            continue;
        };
        let stack = found
            .entry(format!("{stack}_proj.weight"))
            .or_insert_with(|| (ty, [&[0], &shape[..]].concat(), vec![]));
        stack.1[0] += 1;
        stack.2.extend(bytes);
    }
    found
}

/// Adds 1 to the weights of a norm, as Nemotron's converter does.
fn whole_norm(name: &str, (ty, _, bytes): &mut Contents) {
    if !name.ends_with("norm.weight") {
        return;
    }
    assert_eq!(*ty, TensorType::BF16);
    let halves = bytes.as_chunks::<2>().0.iter();
    let numbers = halves.map(|half| f32::from_bits(u32::from(u16::from_le_bytes(*half)) << 16));
    *bytes = numbers.flat_map(|number| (number + 1.0).to_le_bytes()).collect();
    *ty = TensorType::F32;
}

/// Reorders the rows of queries and keys, as OLMo's converter does: elements that rotate together become neighbours.
fn in_pairs(config: &Json, name: &str, (_, shape, bytes): &mut Contents) {
    let key = match name.rsplit_once("attn_") {
        Some((_, "q.weight")) => "num_attention_heads",
        Some((_, "k.weight")) => "num_key_value_heads",
        _ => return,
    };
    let heads = config[key].as_u64().unwrap() as usize;
    let half = shape[0] as usize / heads / 2;
    let rows: Vec<&[u8]> = bytes.chunks_exact(bytes.len() / shape[0] as usize).collect();
    let row = |to: usize| {
        let (head, at) = (to / (2 * half), to % (2 * half));
        rows[head * 2 * half + at % 2 * half + at / 2]
    };
    *bytes = (0..rows.len()).flat_map(row).copied().collect();
}

fn logits(path: &Path, context: usize) -> Vec<f32> {
    let options =
        SessionOptions { exact: true, context: Some(context), ..SessionOptions::default() };
    let mut session = Session::open(path, &options, &mut |_, _| {}).unwrap();
    let tokens = session.vocab_size().min(403) as u32 - 3;
    let ids: Vec<u32> = (0..48).map(|i| i * 37 % tokens + 3).collect();
    session.logits(&ids, None).unwrap()
}

/// Writes a fixture and compares the logits for contexts of both sizes.
fn check(name: &str, architecture: &str, more: Vec<(&str, Value)>) {
    if let Some(folder) = fixture(&format!("models/{name}")) {
        check_folder(name, &folder, architecture, more);
    }
}

fn check_folder(name: &str, folder: &Path, architecture: &str, more: Vec<(&str, Value)>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    write(&path, folder, architecture, more);
    for context in [64, 256] {
        let (found, expected) = (logits(&path, context), logits(folder, context));
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

/// The folder's logits are those of transformers. llama.cpp estimates the deviation of a sample, so its cut is another one.
#[test]
fn gemma3n_is_read_from_gguf() {
    // 0.95 of a normal distribution is below the first number.
    let deviations = [1.644_853_6, 1.644_853_6, f32::NEG_INFINITY, f32::NEG_INFINITY];
    let windows = [true, false, true, false];
    let keys = vec![
        ("altup.active_idx", count(0)),
        ("altup.num_inputs", count(4)),
        ("embedding_length_per_layer_input", count(16)),
        ("attention.shared_kv_layers", count(2)),
        ("attention.sliding_window", count(16)),
        ("attention.sliding_window_pattern", Value::Array(Array::Bool(windows.into()))),
        ("activation_sparsity_scale", Value::Array(Array::F32(deviations.into()))),
    ];
    check("gemma3n", "gemma3n", keys);
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
fn models_with_layer_norms_are_read_from_gguf() {
    check("cohere", "command-r", vec![("logit_scale", Value::from(0.5_f32))]);
    let keys = vec![
        ("logit_scale", Value::from(0.75_f32)),
        ("attention.sliding_window", count(16)),
        ("attention.sliding_window_pattern", count(2)),
    ];
    check("cohere2", "cohere2", keys);
    check("stablelm", "stablelm", vec![("use_parallel_residual", Value::from(false))]);
    check("stablelm_parallel", "stablelm", vec![("use_parallel_residual", Value::from(true))]);
    check("olmo", "olmo", Vec::new());
    check("nemotron", "nemotron", Vec::new());
    check("phi", "phi2", Vec::new());
}

/// The bound is small, so that it matters.
#[test]
fn bounds_of_queries_keys_and_values_are_read_from_gguf() {
    let Some(folder) = changed("olmo", |config| config["clip_qkv"] = Json::from(0.5)) else {
        return;
    };
    check_folder(
        "olmo",
        folder.path(),
        "olmo",
        vec![("attention.clamp_kqv", Value::from(0.5_f32))],
    );
    assert!(logits(folder.path(), 64) != logits(&fixture("models/olmo").unwrap(), 64));
}

/// GGUF files have one magnitude of the rotation.
#[test]
fn phimoe_is_read_from_gguf() {
    let folder = changed("phimoe", |config| {
        let rope = &mut config["rope_scaling"];
        rope["long_mscale"] = rope["short_mscale"].clone();
        rope["original_max_position_embeddings"] = Json::from(64);
    });
    let Some(folder) = folder else { return };
    let keys = vec![
        ("expert_count", count(8)),
        ("expert_used_count", count(2)),
        ("attention.sliding_window", count(40)),
        ("rope.scaling.type", Value::from("longrope")),
        ("rope.scaling.original_context_length", count(64)),
        ("rope.scaling.attn_factor", Value::from(1.2_f32)),
    ];
    check_folder("phimoe", folder.path(), "phimoe", keys);
}

/// GGUF files do not carry the window of StarCoder 2, so the folder must have none.
#[test]
fn starcoder2_is_read_from_gguf() {
    let Some(folder) = changed("starcoder2", |config| config["sliding_window"] = Json::Null) else {
        return;
    };
    check_folder("starcoder2", folder.path(), "starcoder2", Vec::new());
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
