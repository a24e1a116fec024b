//! Tests that configurations with values that cannot be right, or of variants that forebay does not know, are refused with the
//! name of the key.

mod support;

use std::path::Path;

use forebay_engine::{Session, SessionOptions};
use forebay_format::Catalog;
use forebay_model::Architecture;
use serde_json::{Value, json};
use support::{changed, with_causes};

/// Opens a fixture whose configuration was changed. Returns the error.
fn error_after(name: &str, shown: &str, change: impl FnOnce(&mut Value)) -> Option<String> {
    let copy = changed(name, change)?;
    let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
    match Session::open(copy.path(), &options, &mut |_, _| {}) {
        Ok(_) => panic!("{name} opens with {shown}"),
        Err(error) => Some(with_causes(&error)),
    }
}

/// Opens a fixture whose configuration has other values. Returns the error.
fn error_of(name: &str, changes: &[(&str, Value)]) -> Option<String> {
    error_after(name, &format!("{changes:?}"), |config| {
        for (key, value) in changes {
            config[*key] = value.clone();
        }
    })
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
        ("falcon_h1", "mamba_d_ssm", json!(120), "mamba_d_ssm"),
        ("falcon_h1", "mamba_d_ssm", huge.clone(), "mamba_d_ssm"),
        ("falcon_h1", "mamba_n_groups", json!(3), "multiple of the key heads"),
        ("falcon_h1", "mamba_n_heads", json!(0), "mamba_d_ssm"),
        ("falcon_h1", "mlp_multipliers", json!([0.9]), "mlp_multipliers"),
        ("falcon_h1", "mlp_multipliers", json!([0.9, "x"]), "mlp_multipliers"),
        ("falcon_h1", "mlp_multipliers", json!([0, 0.6]), "mlp_multipliers"),
        ("falcon_h1", "ssm_multipliers", json!([1, 1, 1, 1]), "ssm_multipliers"),
        ("falcon_h1", "ssm_multipliers", json!([1, 1, -1, 1, 1]), "factors of recurrent layers"),
        ("falcon_h1", "ssm_in_multiplier", json!(1e300), "factors of recurrent layers"),
        ("falcon_h1", "ssm_out_multiplier", json!(-0.8), "factors of recurrent layers"),
        ("falcon_h1", "key_multiplier", json!(0), "key_multiplier"),
        ("falcon_h1", "attention_in_multiplier", json!(-1), "attention_in_multiplier"),
        ("falcon_h1", "attention_out_multiplier", json!("x"), "attention_out_multiplier"),
        ("falcon_h1", "lm_head_multiplier", json!(0), "scale of logits"),
        ("falcon_h1", "mamba_rms_norm", json!(true), "mamba.norm.weight"),
        ("falcon_h1", "attn_layer_indices", json!([0]), "attn_layer_indices"),
        ("falcon_h1", "mamba_use_mlp", json!(false), "mamba_use_mlp"),
        ("falcon_h1", "projectors_bias", json!(true), "projectors_bias"),
        ("falcon_h1", "mamba_proj_bias", json!(true), "mamba_proj_bias"),
        ("falcon_h1", "attention_bias", json!(true), "multipliers of attention"),
        ("granitemoehybrid", "mamba_rms_norm", json!(false), "mamba_rms_norm"),
        ("granitemoehybrid", "mamba_norm_before_gate", json!(true), "mamba_norm_before_gate"),
        ("qwen3_moe", "mlp_multipliers", json!([0.9, 0.6]), "multipliers of attention"),
        ("mixtral", "mlp_multipliers", json!([0.5, 0.5]), "inputs of feed-forwards"),
        ("granite_swa", "layer_rope_theta", json!([300, 500]), "layer_rope_theta"),
        ("granite_swa", "layer_rope_theta", json!([0, -1]), "layer_rope_theta"),
        ("granite_swa", "layer_rope_theta", json!([0, "x"]), "layer_rope_theta"),
        ("internlm3", "qkv_bias", json!(true), "qkv_bias"),
        ("internlm3", "bias", json!(true), "bias"),
        ("minicpm3", "dim_model_base", json!(0), "scale of logits"),
        ("minicpm3", "scale_depth", json!(0), "scale of"),
        ("minicpm3", "v_head_dim", json!(0), "value"),
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
        ("gemma3n", "altup_num_inputs", json!(0), "residual streams"),
        ("gemma3n", "altup_num_inputs", json!(1), "residual streams"),
        ("gemma3n", "altup_num_inputs", json!(5), "altup.modality_router"),
        ("gemma3n", "altup_num_inputs", huge.clone(), "residual streams"),
        ("gemma3n", "altup_active_idx", json!(4), "altup_active_idx"),
        ("gemma3n", "altup_coef_clip", json!(0), "altup_coef_clip"),
        ("gemma3n", "altup_coef_clip", json!(1e300), "altup_coef_clip"),
        ("gemma3n", "altup_correct_scale", json!("x"), "altup_correct_scale"),
        ("gemma3n", "laurel_rank", json!(0), "laurel_rank"),
        ("gemma3n", "laurel_rank", json!(17), "laurel.linear_left"),
        ("gemma3n", "laurel_rank", huge.clone(), "laurel_rank"),
        ("gemma3n", "activation_sparsity_pattern", json!(1.0), "activation_sparsity_pattern"),
        ("gemma3n", "activation_sparsity_pattern", json!([0.95]), "activation_sparsity_pattern"),
        ("gemma3n", "activation_sparsity_pattern", json!(-0.5), "activation_sparsity_pattern"),
        ("gemma3n", "hidden_size_per_layer_input", json!(0), "embeddings of layers"),
        ("gemma3n", "hidden_size_per_layer_input", huge.clone(), "embeddings"),
        ("gemma3n", "vocab_size_per_layer_input", json!(0), "embeddings"),
        ("gemma3n", "vocab_size_per_layer_input", json!(501), "embed_tokens_per_layer"),
        ("gemma3n", "num_kv_shared_layers", json!(null), "num_kv_shared_layers"),
        ("gemma3n", "intermediate_size", json!([96, 96, 96, 64]), "intermediate_size"),
        ("llama", "altup_num_inputs", json!(4), "altup_num_inputs"),
        ("llama", "activation_sparsity_pattern", json!(0.5), "sparse gates"),
        ("olmo_hybrid", "linear_use_gate", json!(false), "linear_use_gate"),
        ("olmo_hybrid", "linear_allow_neg_eigval", json!("x"), "linear_allow_neg_eigval"),
        ("olmo_hybrid", "linear_key_head_dim", json!(24), "linear_attn"),
        ("qwen2_moe", "shared_expert_intermediate_size", huge, "width"),
    ] {
        let Some(error) = error_of(name, &[(key, value.clone())]) else { continue };
        assert!(error.contains(named), "{name} with {key} {value}: {error}");
    }
}

/// Opens a fixture whose configuration of the language model, which is part of a larger one, has another value.
fn error_of_part(name: &str, key: &str, value: &Value) -> Option<String> {
    let shown = format!("{key} {value}");
    error_after(name, &shown, |config| config["text_config"][key] = value.clone())
}

#[test]
fn variants_of_muse_and_inkling_are_refused() {
    let huge = json!(u64::MAX);
    for (name, key, value, named) in [
        ("muse_glimmer", "post_norm_eps", json!(0), "epsilon of norms of outputs"),
        ("muse_glimmer", "qk_scale_factor", json!(0), "scale of attention"),
        ("muse_glimmer", "output_multiplier", json!(-1), "scale of logits"),
        ("muse_glimmer", "layer_rope_theta", json!([500_000.0]), "layer_rope_theta of layer 1"),
        ("muse_glimmer", "layer_rope_theta", json!([10_000.0, 0]), "layer_rope_theta of layer 0"),
        ("muse_spark", "residual_gate_temperature", json!(0), "residual_gate_temperature"),
        ("muse_spark", "moe_hidden_size", json!(0), "space of experts"),
        ("muse_spark", "moe_hidden_size", huge.clone(), "space of experts"),
        ("muse_spark", "moe_hidden_size", json!(16), "pre_expert_proj"),
        ("muse_spark", "moe_hidden_size", Value::Null, "moe_hidden_size"),
        ("inkling", "conv_kernel_size", json!(1), "short convolutions"),
        ("inkling", "conv_kernel_size", json!(3), "k_sconv"),
        ("inkling", "conv_kernel_size", huge.clone(), "short convolutions"),
        ("inkling", "d_rel", json!(0), "biases by distance"),
        ("inkling", "d_rel", json!(8), "wr_du"),
        ("inkling", "rel_extent", json!(0), "biases by distance"),
        ("inkling", "rel_extent", json!(32), "rel_logits_proj"),
        ("inkling", "rel_extent", huge.clone(), "biases by distance"),
        ("inkling", "log_scaling_n_floor", json!(0), "step of the temperature"),
        ("inkling", "shared_expert_sink", json!(false), "shared_expert_sink"),
        ("inkling", "n_shared_experts", json!(0), "n_shared_experts"),
        ("inkling", "n_shared_experts", json!(1), "mlp.experts"),
        ("inkling", "n_shared_experts", huge.clone(), "experts per token"),
        ("inkling", "embedding_multiplier", json!(2), "embedding_multiplier"),
        ("inkling", "unpadded_vocab_size", json!(0), "vocabulary size"),
        ("inkling", "unpadded_vocab_size", json!(513), "embedding table"),
        ("inkling", "unpadded_vocab_size", json!(500), "unembed"),
        ("inkling", "logits_mup_width_multiplier", json!(0), "scale of logits"),
    ] {
        let Some(error) = error_of_part(name, key, &value) else { continue };
        assert!(error.contains(named), "{name} with {key} {value}: {error}");
    }
}

#[test]
fn variants_of_gated_families_are_refused() {
    for (name, key, value, named) in [
        ("laguna", "gating", json!("per-token"), "gating"),
        ("laguna", "gating", json!("per-element"), "self_attn.g_proj.weight"),
        ("laguna", "num_attention_heads_per_layer", json!([4, 0]), "attention heads"),
        ("laguna", "num_attention_heads_per_layer", json!([4, 5]), "attention heads"),
        ("laguna", "num_attention_heads_per_layer", json!([4, 6, 6]), "layer_types of layer 2"),
        ("laguna", "moe_apply_router_weight_on_input", json!(true), "moe_apply_router"),
        ("laguna", "layer_types", json!(["full_attention", "other"]), "layer_types"),
        ("afmoe", "score_func", json!("tanh"), "score_func"),
        ("exaone_moe", "mup_enabled", json!(true), "mup_enabled"),
        ("exaone_moe", "is_moe_layer", json!(7), "is_moe_layer"),
        ("hy_v3", "router_scaling_factor", json!("x"), "router_scaling_factor"),
        ("smollm3", "no_rope_layers", json!([1, 1]), "no_rope_layers"),
        (
            "bailing_hybrid",
            "gated_attention_proj_granularity_type",
            json!("none"),
            "gated_attention",
        ),
        ("bailing_hybrid", "kda_lower_bound", json!(5.0), "gate_lower_bound"),
        ("bailing_hybrid", "no_kda_lora", json!(false), "linear_conv_kernel_dim"),
    ] {
        let Some(error) = error_of(name, &[(key, value.clone())]) else { continue };
        assert!(error.contains(named), "{name} with {key} {value}: {error}");
    }
}

/// Changes the part of a configuration about the language model.
fn error_of_text(name: &str, key: &str, value: &Value) -> Option<String> {
    let copy = changed(name, |config| config["text_config"][key] = value.clone())?;
    let options = SessionOptions { context: Some(64), ..SessionOptions::default() };
    match Session::open(copy.path(), &options, &mut |_, _| {}) {
        Ok(_) => panic!("{name} opens with {key} {value}"),
        Err(error) => Some(with_causes(&error)),
    }
}

#[test]
fn variants_of_text_parts_are_refused() {
    let other = |heads: Value| json!({"num_attention_heads": heads, "head_dim": 16});
    for (name, key, value, named) in [
        ("step3p7", "swiglu_limits", json!([0.0]), "swiglu_limits of layer 1"),
        ("step3p7", "swiglu_limits", json!([0.0, -1.0]), "limit of gate and up"),
        ("step3p7", "swiglu_limits_shared", json!([0.0, "x"]), "swiglu_limits_shared"),
        ("step3p7", "rope_theta", json!([5e6]), "rope_theta of layer 1"),
        ("step3p7", "partial_rotary_factors", json!([0.5]), "partial_rotary_factors of layer 1"),
        ("step3p7", "attention_other_setting", other(json!(6)), "head_dim"),
        ("step3p7", "sink", json!(true), "sink"),
        ("step3p7", "zero_centered", json!(false), "zero_centered"),
        ("step3p7", "use_head_wise_attn_gate", json!(false), "use_head_wise_attn_gate"),
        ("step3p7", "use_rope_layers", json!([0]), "use_rope_layers"),
    ] {
        let Some(error) = error_of_text(name, key, &value) else { continue };
        assert!(error.contains(named), "{name} with {key} {value}: {error}");
    }
}

#[test]
fn variants_of_models_with_layer_norms_are_refused() {
    for (name, key, value) in [
        ("cohere2_moe", "expert_selection_fn", json!("tanh")),
        ("cohere2_moe", "shared_expert_combination_strategy", json!("product")),
        ("cohere2_moe", "use_parallel_block", json!(false)),
        ("cohere2_moe", "use_gated_activation", json!(false)),
        ("cohere2_moe", "use_qk_norm", json!(true)),
        ("cohere2_moe", "layer_types", Value::Null),
        ("cohere2_moe", "logit_scale", json!(0)),
        ("cohere2_moe", "layer_norm_eps", json!(0)),
        ("cohere", "use_qk_norm", json!(true)),
        ("cohere", "use_parallel_residual", json!(false)),
        ("stablelm", "qk_layernorm", json!(true)),
        ("stablelm", "use_parallel_residual", json!("x")),
        ("starcoder2", "norm_type", json!("rms")),
        ("starcoder2", "hidden_act", json!("relu")),
        ("phi", "hidden_act", json!("silu")),
        ("phi", "qk_layernorm", json!(true)),
        ("phi", "partial_rotary_factor", json!(0)),
        ("nemotron", "hidden_act", json!("silu")),
        ("olmo", "clip_qkv", json!(0)),
        ("phi", "clip_qkv", json!(8.0)),
        ("phimoe", "router_jitter_noise", json!(0.1)),
        ("phimoe", "hidden_act", json!("gelu")),
    ] {
        let Some(error) = error_of(name, &[(key, value.clone())]) else { continue };
        let named = match key {
            "logit_scale" => "scale of logits",
            "layer_norm_eps" => "norm epsilon",
            "clip_qkv" if name == "olmo" => "bound of queries",
            "partial_rotary_factor" => "rotary dimension",
            key => key,
        };
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

#[test]
fn variants_of_dots_and_minimax_are_refused() {
    for (name, key, value, named) in [
        ("dots3_note", "use_dsa", json!(false), "use_dsa"),
        ("dots3_note", "k_rope_only_layernorm", json!(false), "k_rope_only_layernorm"),
        ("dots3_note", "attention_gate_type", json!("elementwise"), "attention_gate_type"),
        ("dots3_note", "swa_attention_gate_type", json!("elementwise"), "swa_attention_gate_type"),
        ("dots3_note", "normalization", json!("LayerNorm"), "normalization"),
        ("dots3_note", "use_dynamic_rsf", json!(true), "use_dynamic_rsf"),
        ("dots3_note", "layer_types", json!(["full_attention", "full_attention"]), "layer_types"),
        ("dots3_note", "swa_kv_lora_rank", json!(24), "layers.1.self_attn"),
        ("dots3_note", "swa_num_attention_heads", json!(0), "heads"),
        ("dots3_note", "qk_rope_head_dim", json!(7), "rotary dimension"),
        ("minimax", "postnorm", json!(false), "postnorm"),
        ("minimax", "shared_intermediate_size", json!(64), "shared_intermediate_size"),
        ("minimax", "layernorm_mlp_alpha", json!(1.5), "layernorm_mlp_alpha"),
        ("minimax", "layernorm_linear_attention_beta", json!(0.5), "layernorm_linear"),
        ("minimax", "layernorm_full_attention_alpha", json!(-1.7), "layernorm"),
        (
            "minimax",
            "layer_types",
            json!(["sliding_attention", "full_attention"]),
            "sliding_window",
        ),
    ] {
        let Some(error) = error_of(name, &[(key, value.clone())]) else { return };
        assert!(error.contains(named), "{name}, {key} {value}: {error}");
    }
}

#[test]
fn windows_beside_indexers_are_refused_in_other_families() {
    for name in ["deepseek_v32", "glm_moe_dsa"] {
        let windows = [("use_sliding_window", json!(true)), ("sliding_window", json!(16))];
        let Some(error) = error_of(name, &windows) else { return };
        assert!(error.contains("window"), "{name}: {error}");
    }
}

#[test]
fn published_configurations_of_dots_and_minimax_are_those_of_transformers() {
    let minimax_kinds = |config: &mut Value| {
        let keys = config.as_object_mut().unwrap();
        keys.retain(|key, _| !key.ends_with("_factor") && key != "layer_types");
        keys.insert("shared_moe_mode".into(), json!("sigmoid"));
        keys.insert("postnorm".into(), json!(true));
    };
    let rescaled = |config: &mut Value| {
        config.as_object_mut().unwrap().remove("apply_mla_qkv_lora_rescale");
    };
    type Change<'a> = &'a dyn Fn(&mut Value);
    let changes: [(&str, &str, Change<'_>); 3] = [
        ("minimax", "minimax_text_01", &minimax_kinds),
        ("minimax", "minimax_m1", &minimax_kinds),
        ("dots3_note", "dots3_note", &rescaled),
    ];
    for (name, published, change) in changes {
        let Some(usual) = changed(name, |_| {}) else { return };
        let other = changed(name, |config| {
            config["model_type"] = json!(published);
            change(config);
        });
        let describe = |folder: &Path| {
            let catalog = Catalog::open(folder).unwrap();
            format!("{:?}", Architecture::from_catalog(&catalog).unwrap())
        };
        assert_eq!(describe(other.unwrap().path()), describe(usual.path()), "{published}");
    }
}
