//! Tests that configurations with values that cannot be right, or of variants that forebay does not know, are refused with the
//! name of the key.

mod support;

use forebay_engine::{Session, SessionOptions};
use serde_json::{Value, json};
use support::{changed, with_causes};

/// Opens a fixture whose configuration has other values. Returns the error.
fn error_of(name: &str, changes: &[(&str, Value)]) -> Option<String> {
    let copy = changed(name, |config| {
        for (key, value) in changes {
            config[*key] = value.clone();
        }
    })?;
    let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
    match Session::open(copy.path(), &options, &mut |_, _| {}) {
        Ok(_) => panic!("{name} opens with {changes:?}"),
        Err(error) => Some(with_causes(&error)),
    }
}

#[test]
fn values_that_cannot_be_right_are_refused() {
    let huge = json!(u64::MAX);
    for (name, key, value, named) in [
        ("llama4", "attention_chunk_size", json!(0), "sliding window"),
        ("llama4", "attention_chunk_size", json!(-1), "attention_chunk_size"),
        ("llama4", "floor_scale", json!(0), "temperature"),
        ("llama4", "floor_scale", json!(1e300), "temperature"),
        ("llama4", "attn_scale", json!(-0.1), "temperature"),
        ("llama4", "num_experts_per_tok", json!(2), "experts per token"),
        ("llama4", "no_rope_layers", json!([1, 1, 1]), "no_rope_layers"),
        ("llama4", "no_rope_layers", json!([1, 1, 1, 7]), "no_rope_layers"),
        ("llama4", "layer_types", json!(["sliding_attention"]), "layer_types"),
        ("llama4", "intermediate_size", huge.clone(), "width"),
        ("minimax_m2", "qk_norm_type", json!("per_head"), "qk_norm_type"),
        ("minimax_m2", "attn_type_list", json!([1, 0]), "attn_type_list"),
        ("minimax_m2", "shared_intermediate_size", json!(64), "shared_intermediate_size"),
        ("minimax_m2", "rotary_dim", json!(0), "rotary dimension"),
        ("minimax_m2", "rotary_dim", json!(34), "rotary dimension"),
        ("minimax_m2", "rotary_dim", huge.clone(), "rotary dimension"),
        ("minimax_m2", "scoring_func", json!("tanh"), "scoring_func"),
        ("ernie4_5_moe", "use_bias", json!(true), "use_bias"),
        ("ernie4_5_moe", "moe_k", json!(0), "experts per token"),
        ("ernie4_5_moe", "moe_k", json!(7), "experts per token"),
        ("ernie4_5_moe", "moe_num_shared_experts", huge.clone(), "width"),
        ("glm4_moe_lite", "mlp_layer_types", json!(["dense", "other"]), "mlp_layer_types"),
        ("olmo3", "sliding_window", json!(0), "sliding window"),
        ("phi3", "intermediate_size", huge.clone(), "width"),
        ("phi3", "intermediate_size", json!(159), "mlp.gate_up_proj.weight"),
        ("phi3", "num_key_value_heads", json!(1), "self_attn.qkv_proj.weight"),
        ("deepseek_v4", "hc_mult", json!(0), "residual streams"),
        ("deepseek_v4", "hc_mult", json!(1), "residual streams"),
        ("deepseek_v4", "hc_mult", json!(3), "hc_attn_fn"),
        ("deepseek_v4", "hc_mult", json!(17), "residual streams"),
        ("deepseek_v4", "hc_mult", huge.clone(), "residual streams"),
        ("deepseek_v4", "hc_sinkhorn_iters", json!(0), "iterations"),
        ("deepseek_v4", "hc_sinkhorn_iters", huge.clone(), "iterations"),
        ("deepseek_v4", "hc_eps", json!(-1e-6), "epsilon of hyper-connections"),
        ("deepseek_v4", "hc_eps", json!(1e300), "epsilon of hyper-connections"),
        ("deepseek_v4", "hc_eps", json!("x"), "hc_eps"),
        ("deepseek_v4", "num_hash_layers", json!(2), "layers.1.ffn.gate.tid2eid"),
        ("deepseek_v4", "num_hash_layers", json!(0), "layers.0.ffn.gate.bias"),
        ("qwen4_exp", "hc_count", json!(1), "residual streams"),
        ("qwen4_exp", "hc_count", json!(5), "attn_hyper_connection"),
        ("qwen4_exp", "hc_lowrank", json!(0), "rank"),
        ("qwen4_exp", "hc_lowrank", json!(17), "input_mix_weight_down"),
        ("qwen4_exp", "hc_lowrank", huge.clone(), "rank"),
        ("hy_v4", "hc_mult", json!(1), "residual streams"),
        ("hy_v4", "hc_mult", json!(3), "hc_pre.hc_fn"),
        ("hy_v4", "hc_magnitude", json!(0), "magnitude of hyper-connections"),
        ("hy_v4", "hc_magnitude", json!(1e300), "magnitude of hyper-connections"),
        ("hy_v4", "hc_magnitude", Value::Null, "hc_magnitude"),
        ("hy_v4", "hc_eps", json!(-1e-6), "epsilon of hyper-connections"),
        ("hy_v4", "swiglu_limit", json!(-1), "limit of gate and up"),
        ("hy_v4", "indexer_types", json!(["full", "full", "half"]), "indexer_types"),
        ("hy_v4", "indexer_types", json!(["full"]), "indexer_types"),
        ("hy_v4", "indexer_types", json!(["shared", "full", "full"]), "choice of another"),
        ("hy_v4", "index_head_dim", json!(8), "length of the indexer's heads"),
        ("hy_v4", "index_topk", json!(0), "keys that the indexer chooses"),
        ("qwen2_moe", "shared_expert_intermediate_size", huge, "width"),
    ] {
        let Some(error) = error_of(name, &[(key, value.clone())]) else { continue };
        assert!(error.contains(named), "{name} with {key} {value}: {error}");
    }
}

#[test]
fn variants_of_hunyuan_are_refused() {
    let stretched = |alpha: Value| json!({"type": "dynamic", "alpha": alpha});
    for (name, key, value, named) in [
        ("hunyuan_v1_moe", "use_cla", json!(true), "use_cla"),
        ("hunyuan_v1_dense", "use_cla", json!(true), "use_cla"),
        ("hunyuan_v1_moe", "use_mla", json!(true), "use_mla"),
        ("hunyuan_v1_moe", "position_embedding_xdrope", json!(true), "position_embedding_xdrope"),
        ("hunyuan_v1_moe", "group_limited_greedy", json!(true), "group_limited_greedy"),
        ("hunyuan_v1_moe", "use_rotary_pos_emb", json!(false), "use_rotary_pos_emb"),
        ("hunyuan_v1_moe", "norm_type", json!("layernorm"), "norm_type"),
        ("hunyuan_v1_moe", "moe_layer_num_skipped", json!(1), "layers.0.mlp.gate_proj"),
        ("hunyuan_v1_moe", "moe_topk", json!([3, 2, 3]), "moe_topk"),
        ("hunyuan_v1_moe", "moe_topk", json!([]), "moe_topk"),
        ("hunyuan_v1_moe", "moe_topk", json!([9, 9, 9]), "experts per token"),
        ("hunyuan_v1_moe", "moe_intermediate_size", json!([32, 16, 32]), "moe_intermediate_size"),
        ("hunyuan_v1_moe", "num_shared_expert", json!([2, 1, 2]), "num_shared_expert"),
        ("hunyuan_v1_moe", "num_shared_expert", json!(1), "mlp.shared_mlp.gate_proj"),
        ("hunyuan_v1_moe", "num_shared_expert", json!(u64::MAX), "width"),
        ("hunyuan_v1_moe", "attention_head_dim", json!(2), "rope base"),
        // The base is stretched once, or with the length of the text.
        ("hunyuan_v1_moe", "rope_scaling", stretched(json!("50")), "alpha"),
        ("hunyuan_v1_moe", "rope_scaling", stretched(json!(0)), "rope base"),
        ("hunyuan_v1_moe", "rope_scaling", stretched(json!(-50)), "rope base"),
        ("hunyuan_v1_dense", "rope_scaling", stretched(json!(1e300)), "rope base"),
    ] {
        let Some(error) = error_of(name, &[(key, value.clone())]) else { continue };
        assert!(error.contains(named), "{name} with {key} {value}: {error}");
    }
}

#[test]
fn rope_factors_of_a_wrong_length_are_refused() {
    let scaling = json!({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]});
    let Some(error) = error_of("phi3", &[("rope_scaling", scaling)]) else { return };
    assert!(error.contains("short_factor"), "{error}");
}
