//! Variants of known families that would run but generate wrong text. They are refused.

use forebay_compute::NormForm;
use forebay_ops::Gating;
use serde_json::Value;

use super::architecture::{OutputGate, QkNorm};
use super::config::Config;
use super::family::Family;
use super::shapes::NormLayout;
use crate::ModelError;

/// Key of the bound of queries, keys and values.
pub(super) const CLAMP: &str = "clip_qkv";

/// Key of the width of the MLP that tokens pass through beside experts ([`super::family::FeedForward::shared_mlp`]).
pub(super) const SHARED_MLP: &str = "shared_intermediate_size";

fn refuse<T>(key: &str, value: &str, expected: &str) -> Result<T, ModelError> {
    Err(ModelError::BadValue { key: key.into(), value: value.into(), expected: expected.into() })
}

/// Returns the gating, with the numbers that the configuration gives.
pub(super) fn gating(config: &Config<'_>, family: &Family) -> Result<Gating, ModelError> {
    let activation = expect_activation(config, family)?;
    let float = |key: &str, usual: f32| {
        Ok::<_, ModelError>(config.float(key)?.map_or(usual, |value| value as f32))
    };
    Ok(match family.feed_forward.gating {
        Gating::Clamped { alpha, limit } => Gating::Clamped {
            alpha: float("swiglu_alpha", alpha)?,
            limit: float("swiglu_limit", limit)?,
        },
        Gating::ClampedSilu { limit } => {
            Gating::ClampedSilu { limit: float("swiglu_limit", limit)? }
        }
        Gating::PlainGelu | Gating::PlainGeluTanh => match activation {
            Some("gelu") => Gating::PlainGelu,
            Some(_) => Gating::PlainGeluTanh,
            None => family.feed_forward.gating,
        },
        other => other,
    })
}

/// Returns the name of the activation, if the configuration has one. It is one that the family may have.
fn expect_activation<'a>(
    config: &Config<'a>,
    family: &Family,
) -> Result<Option<&'a str>, ModelError> {
    let keys =
        ["mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function", "activation"];
    config.note(&keys);
    let Some(key) = keys.into_iter().find(|key| config.set(key).is_some()) else {
        return Ok(None);
    };
    let activation = config.text(key)?.unwrap_or("");
    let known: &[&str] = match family.feed_forward.gating {
        // Configurations of Gemma whose `hidden_act` is `gelu` mean this one.
        Gating::GeluTanh if key == "hidden_act" => {
            &["gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu"]
        }
        Gating::GeluTanh => &["gelu_pytorch_tanh", "gelu_new", "gelu_fast"],
        Gating::Relu => &["relu"],
        Gating::Xielu { .. } => &["xielu"],
        Gating::SquaredRelu => &["relu2"],
        Gating::PlainGelu | Gating::PlainGeluTanh => {
            &["gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast"]
        }
        Gating::Situ { .. } => &["situ"],
        // MiniMax-M3 names the clamped gate.
        Gating::Clamped { .. } => &["silu", "swish", "swigluoai"],
        Gating::Silu | Gating::ClampedSilu { .. } | Gating::SiluClamped { .. } => {
            &["silu", "swish"]
        }
    };
    match known.contains(&activation) {
        true => Ok(Some(activation)),
        false => {
            let expected = format!("forebay knows {} for this family", known.join(", "));
            refuse("hidden_act", activation, &expected)
        }
    }
}

/// Refuses what forebay does not know.
pub(super) fn refuse_variants(config: &Config<'_>, family: &Family) -> Result<(), ModelError> {
    if config.set(CLAMP).is_some() && !family.attention.clamps {
        let convert = "forebay does not know this variant; convert the model to GGUF";
        return refuse(CLAMP, "set", convert);
    }
    let gated = config.flag("attn_output_gate")?;
    let is_gated = family.attention.output_gate != OutputGate::None;
    if gated.is_some_and(|gated| gated != is_gated) {
        return refuse("attn_output_gate", "set", "forebay does not know this variant");
    }
    for key in ["mlp_bias", "use_bias", "mamba_proj_bias", "projectors_bias", "conv_bias"] {
        // Biases of dense feed-forwards are read if the files have them.
        let is_dense = key == "mlp_bias" && !family.feed_forward.experts;
        let is_known = family.attention.bias_by_tensors || is_dense;
        if config.is_set(key)? && !is_known {
            return refuse(key, "true", "forebay does not know these biases yet");
        }
    }
    // Variants of Hunyuan: keys and values of the layer before, latent attention, other rotations and other choices of experts.
    for key in ["use_cla", "use_mla", "position_embedding_xdrope", "group_limited_greedy"] {
        if config.is_set(key)? {
            return refuse(key, "true", "forebay does not know this variant");
        }
    }
    refuse_blocks(config, family)?;
    // Variants of Step and Laguna.
    for (key, known) in [
        ("sink", false),
        ("use_head_wise_attn_gate", true),
        ("zero_centered", true),
        ("use_moe", true),
        ("moe_apply_router_weight_on_input", false),
        ("use_dsa", true),
        ("k_rope_only_layernorm", true),
        ("use_dynamic_rsf", false),
    ] {
        if config.flag(key)?.is_some_and(|flag| flag != known) {
            return refuse(key, &(!known).to_string(), &format!("forebay knows {known}"));
        }
    }
    if config.list("use_rope_layers")?.is_some_and(|layers| !layers.is_empty()) {
        return refuse("use_rope_layers", "set", "forebay knows rotations by kind of layer only");
    }
    for key in ["use_rotary_pos_emb", "mamba_use_mlp", "linear_use_gate"] {
        if config.flag(key)? == Some(false) {
            return refuse(key, "false", "forebay does not know this variant");
        }
    }
    if family.recurrence.beside_attention && config.set("attn_layer_indices").is_some() {
        return refuse("attn_layer_indices", "set", "forebay knows attention in every layer");
    }
    for (key, known) in [
        ("qk_norm_type", "per_layer"),
        ("mamba_hidden_act", "silu"),
        ("normalization_function", "rmsnorm"),
        ("normalization", "RMSNorm"),
        ("final_norm", "RMSNorm"),
        ("swa_attention_gate_type", "headwise"),
        (
            "norm_type",
            if family.layers.norm_form == NormForm::Layer { "layer_norm" } else { "rms" },
        ),
    ] {
        if let Some(other) = config.text(key)?.filter(|text| *text != known) {
            return refuse(key, other, &format!("forebay knows {known}"));
        }
    }
    // MiniMax's earlier models have lightning attention in the layers of type 0.
    let types = config.list("attn_type_list")?;
    let is_later = family.recurrence.rule.is_none();
    if is_later && types.is_some_and(|types| types.iter().any(|kind| kind.as_u64() != Some(1))) {
        return refuse("attn_type_list", "not 1 in all layers", "forebay knows type 1 only");
    }
    if config.set("moe_latent_size").is_some() {
        return refuse("moe_latent_size", "set", "forebay knows experts of the hidden size only");
    }
    // MiniMax-M3 has shared experts of this width.
    let shared = config.optional_count(SHARED_MLP)?.is_some_and(|width| width > 0);
    if shared && !family.feed_forward.shared_mlp && family.feed_forward.shared == 0 {
        let expected = "forebay knows no such shared experts for this family";
        return refuse(SHARED_MLP, "set", expected);
    }
    // Inkling's configurations call the divisor of the logits by this name, too.
    if family.attention.relative && config.set("embedding_multiplier").is_some() {
        return refuse("embedding_multiplier", "set", "forebay does not know it for this family");
    }
    let by_layer = family.attention.keys_as_values
        || family.feed_forward.limits_by_layer
        || family.attention.normed_rotary;
    if config.set("per_layer_config").is_some() && !by_layer {
        return refuse("per_layer_config", "set", "forebay does not know this variant");
    }
    if family.layers.one_block && config.set("sliding_window").is_some() {
        return refuse("sliding_window", "set", "forebay knows this family without windows");
    }
    // Images may be seen from both sides, but text is not.
    let both_ways = config.set("use_bidirectional_attention");
    if both_ways.is_some_and(|value| *value == true || *value == "all") {
        return refuse("use_bidirectional_attention", "set", "forebay generates text");
    }
    Ok(())
}

/// Refuses other blocks than those of the family: with norms of queries and keys, one after the other, without gates.
fn refuse_blocks(config: &Config<'_>, family: &Family) -> Result<(), ModelError> {
    for key in ["use_qk_norm", "qk_norm", "qk_layernorm"] {
        if config.is_set(key)? && family.attention.qk_norm == QkNorm::None {
            return refuse(key, "true", "forebay knows no such norms for this family");
        }
    }
    for (key, has) in [
        ("use_parallel_block", family.layers.norms == NormLayout::Parallel),
        ("use_gated_activation", family.feed_forward.gating.has_gate()),
        ("postnorm", family.layers.normed_residual),
    ] {
        if let Some(said) = config.flag(key)?.filter(|said| *said != has) {
            return refuse(key, &said.to_string(), &format!("forebay knows {has} for this family"));
        }
    }
    let first = config.optional_count("first_k_dense_replace")?.unwrap_or(0);
    if family.name == "cohere2moe" && first > 0 && config.set("layer_types").is_none() {
        let expected = "forebay needs the list of layers of models that begin with dense ones";
        return refuse("layer_types", "absent", expected);
    }
    Ok(())
}

/// Returns true if a list of numbers has this one.
pub(super) fn has_number(list: &[Value], number: usize) -> bool {
    list.iter().any(|item| item.as_u64() == Some(number as u64))
}
