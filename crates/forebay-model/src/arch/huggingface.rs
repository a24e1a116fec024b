//! Reads an architecture from a Hugging Face `config.json`. Supports the form of published models and the one that
//! transformers 5 writes (`rope_parameters` instead of `rope_scaling`).

use forebay_compute::{Gating, Scoring};
use forebay_format::{Catalog, HfMetadata};
use serde_json::Value;

use super::architecture::{
    Architecture, Experts, FeedForward, Layer, LayerEmbeddings, Mixer, Naming, groups,
};
use super::config::Config;
use super::deepseek4::of_config;
use super::families::{self, Family};
use super::feed_forward_width::feed_forward_width;
use super::huggingface_attention::{attention, rotates, window};
use super::huggingface_indexer::{indexer, is_indexed};
use super::huggingface_recurrent::{OneBlock, is_recurrent, one_blocks, recurrent};
use super::indexer::with_indexer;
use super::layers::{keys_of, used};
use super::ngrams::ngrams;
use super::quantization::{Method, Quantization};
use super::streams;
use crate::ModelError;

/// Key of the width of the MLP that tokens pass through beside experts ([`Family::shared_mlp`]).
const SHARED_MLP: &str = "shared_intermediate_size";

/// Describes the model of a Hugging Face folder.
pub fn describe(catalog: &Catalog, metadata: &HfMetadata) -> Result<Architecture, ModelError> {
    // A multimodal model has the language model's description in `text_config`.
    let json = metadata.config.get("text_config").unwrap_or(&metadata.config);
    let model_type = json.get("model_type").and_then(Value::as_str).unwrap_or("");
    let family = families::from_huggingface(model_type).ok_or_else(|| {
        let name =
            if model_type.is_empty() { "(config.json has no model_type)" } else { model_type };
        families::unknown_huggingface(name)
    })?;
    let config = Config { json, family: family.name };
    expect_quantization(&metadata.config, family)?;
    let gating = gating(&config, family)?;
    let naming = naming(catalog);
    let hidden = config.count("hidden_size")?;
    let (attentions, ropes, layers) = match family.compressed {
        true => {
            let mut layers = layers(catalog, &config, family, 1)?;
            let (attentions, ropes) = of_config(&config, &layers)?.describe(&mut layers);
            (attentions, ropes, layers)
        }
        false => {
            let (attentions, ropes) = attention(catalog, &config, family, naming)?;
            let mut layers = layers(catalog, &config, family, attentions.len())?;
            let in_all = index_layers(&config, family, &mut layers, attentions.len())?;
            let (indexer, ropes) = (indexer(&config, family)?, used(ropes, &layers));
            let (attentions, ropes) = with_indexer(attentions, ropes, indexer, in_all);
            (attentions, ropes, layers)
        }
    };
    let factor = |key: &str| config.float(key).map_or(1.0, |factor| factor as f32);
    Ok(Architecture {
        family: family.name,
        name: json.get("_name_or_path").and_then(Value::as_str).map(str::to_owned),
        hidden,
        vocabulary: config.count("vocab_size")?,
        context_trained: config.first_count(&["max_position_embeddings", "model_max_length"])?,
        norm_epsilon: ["rms_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"]
            .iter()
            .find_map(|key| config.float(key))
            .map_or(1e-6, |epsilon| epsilon as f32),
        norms: family.norms,
        streams: streams::of_huggingface(&config, family)?,
        embedding_scale: family.embedding_scale(hidden) * factor("embedding_multiplier")
            / factor("residual_multiplier"),
        residual_scale: factor("residual_multiplier"),
        logit_scale: 1.0 / factor("logits_scaling"),
        layer_scales: family.layer_scales,
        layer_embeddings: config
            .optional_count("hidden_size_per_layer_input")?
            .filter(|width| *width > 0)
            .map(|width| LayerEmbeddings { width }),
        ngrams: ngrams(&config)?,
        logit_softcap: config.float("final_logit_softcapping").map(|cap| cap as f32),
        attentions,
        ropes,
        temperature: family.unrotated.and_then(|of| of.temperature(&config)),
        recurrent: family.recurrent.map(|rule| recurrent(&config, family, rule)).transpose()?,
        gating,
        layers,
        mtp: None,
        tied_embeddings: is_tied(&config, family),
        naming,
    })
}

/// Refuses forms of quantised weights that forebay does not know, for this family or for all.
fn expect_quantization(config: &Value, family: &Family) -> Result<(), ModelError> {
    let quantization = Quantization::of_config(config)?;
    match quantization.map(|how| how.method == Method::Mxfp4) {
        Some(is_mxfp4) if is_mxfp4 != family.expert_bias => Err(ModelError::BadValue {
            key: "quantization_config.quant_method".into(),
            value: config["quantization_config"]["quant_method"].to_string(),
            expected: "forebay reads mxfp4 for gpt-oss, and other forms for other families; convert the model to GGUF"
                .into(),
        }),
        _ => Ok(()),
    }
}

/// Returns the prefixes of the tensor names.
fn naming(catalog: &Catalog) -> Naming {
    let roots = ["language_model.model.", "model.language_model.", "backbone."];
    let has = |root: &&str| {
        let names = ["embed_tokens", "embeddings"].map(|name| format!("{root}{name}.weight"));
        names.iter().any(|name| catalog.tensor(name).is_some())
    };
    let root = roots.into_iter().find(has).unwrap_or("model.");
    // DeepSeek-V4's names have no root.
    let root = if catalog.tensor("embed.weight").is_some() { "" } else { root };
    // Transformers 5 saves the text layers of Kimi K2.5 under the name that the layers of its vision tower have.
    let renamed = format!("{root}blocks.0.input_layernorm.weight");
    let layers = if catalog.tensor(&renamed).is_some() { "blocks" } else { "layers" };
    Naming::HuggingFace { root, layers }
}

/// Returns the gating. Refuses variants of known families that would run but generate wrong text.
fn gating(config: &Config<'_>, family: &Family) -> Result<Gating, ModelError> {
    let refuse = |key: &str, value: &str, expected: &str| {
        Err(ModelError::BadValue {
            key: key.into(),
            value: value.into(),
            expected: expected.into(),
        })
    };
    let text = |key: &str| config.json.get(key).and_then(Value::as_str);
    let activation = ["mlp_hidden_act", "hidden_activation", "hidden_act"];
    let activation = activation.into_iter().find_map(text);
    let expected = match family.gating {
        Gating::GeluTanh => "gelu_pytorch_tanh",
        Gating::SquaredRelu => "relu2",
        Gating::Silu | Gating::Clamped { .. } | Gating::ClampedSilu { .. } => "silu",
    };
    // MiniMax-M3 names the clamped gate.
    let clamped = matches!(family.gating, Gating::Clamped { .. });
    let is_known = |name: &str| name == expected || clamped && name == "swigluoai";
    if activation.is_some_and(|activation| !is_known(activation)) {
        let expected = format!("forebay knows {expected} for this family");
        return refuse("hidden_act", activation.unwrap_or(""), &expected);
    }
    let convert = "forebay does not know this variant; convert the model to GGUF";
    if config.json.get("clip_qkv").is_some_and(|value| !value.is_null()) {
        return refuse("clip_qkv", "set", convert);
    }
    let gated = config.json.get("attn_output_gate").and_then(Value::as_bool);
    if gated.is_some_and(|gated| gated != family.output_gate) {
        return refuse("attn_output_gate", "set", "forebay does not know this variant");
    }
    for key in ["mlp_bias", "use_bias", "mamba_proj_bias", "conv_bias"] {
        if config.flag(key) {
            return refuse(key, "true", "forebay does not know these biases yet");
        }
    }
    // Variants of Hunyuan: keys and values of the layer before, latent attention, other rotations and other choices of experts.
    for key in ["use_cla", "use_mla", "position_embedding_xdrope", "group_limited_greedy"] {
        if config.flag(key) {
            return refuse(key, "true", "forebay does not know this variant");
        }
    }
    if config.json.get("use_rotary_pos_emb").and_then(Value::as_bool) == Some(false) {
        return refuse("use_rotary_pos_emb", "false", "forebay does not know this variant");
    }
    let norm_type = text("qk_norm_type");
    if norm_type.is_some_and(|kind| kind != "per_layer") {
        let expected = "forebay knows per_layer";
        return refuse("qk_norm_type", norm_type.unwrap_or(""), expected);
    }
    // MiniMax's earlier models have linear attention in the layers of type 0, and shared experts.
    let types = config.json.get("attn_type_list").and_then(Value::as_array);
    if types.is_some_and(|types| types.iter().any(|kind| kind.as_u64() != Some(1))) {
        return refuse("attn_type_list", "not 1 in all layers", "forebay knows type 1 only");
    }
    let mamba = text("mamba_hidden_act");
    if mamba.is_some_and(|activation| activation != "silu") {
        return refuse("mamba_hidden_act", mamba.unwrap_or(""), "forebay knows silu");
    }
    for (key, known) in [("normalization_function", "rmsnorm"), ("norm_type", "rms")] {
        if let Some(norm) = text(key).filter(|norm| *norm != known) {
            return refuse(key, norm, &format!("forebay knows {known}"));
        }
    }
    if config.json.get("moe_latent_size").is_some_and(|size| !size.is_null()) {
        return refuse("moe_latent_size", "set", "forebay knows experts of the hidden size only");
    }
    // MiniMax-M3 has shared experts of this width.
    let shared = config.optional_count(SHARED_MLP)?.is_some_and(|width| width > 0);
    if shared && !family.shared_mlp && family.shared == 0 {
        let expected = "forebay knows no such shared experts for this family";
        return refuse(SHARED_MLP, "set", expected);
    }
    // Images may be seen from both sides, but text is not.
    let both_ways = config.json.get("use_bidirectional_attention");
    if both_ways.is_some_and(|value| *value == true || *value == "all") {
        return refuse("use_bidirectional_attention", "set", "forebay generates text");
    }
    let float = |key: &str, usual: f32| config.float(key).map_or(usual, |value| value as f32);
    Ok(match family.gating {
        Gating::Clamped { alpha, limit } => Gating::Clamped {
            alpha: float("swiglu_alpha", alpha),
            limit: float("swiglu_limit", limit),
        },
        Gating::ClampedSilu { limit } => {
            Gating::ClampedSilu { limit: float("swiglu_limit", limit) }
        }
        other => other,
    })
}

fn layers(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    shapes: usize,
) -> Result<Vec<Layer>, ModelError> {
    let blocks = if family.one_block { Some(one_blocks(config)?) } else { None };
    let count = match &blocks {
        Some(blocks) => blocks.len(),
        None => config.count("num_hidden_layers")?,
    };
    if count > catalog.tensors().len() {
        return Err(ModelError::BadValue {
            key: "num_hidden_layers".into(),
            value: count.to_string(),
            expected: format!("the folder has only {} tensors", catalog.tensors().len()),
        });
    }
    let windows: Vec<Option<usize>> =
        (0..count).map(|index| window(config, family, index)).collect::<Result<_, _>>()?;
    let shared = config.optional_count("num_kv_shared_layers")?.unwrap_or(0);
    let with_keys = count.saturating_sub(shared);
    (0..count)
        .map(|index| {
            if let Some(blocks) = &blocks {
                return one_block_layer(config, family, blocks[index]);
            }
            let all = family.compressed;
            let feed_forward = if family.experts && (all || is_sparse(config, index)?) {
                let by_token = is_by_token(config, index)?;
                FeedForward::Experts(experts(config, family)?.chosen_by_token(by_token))
            } else {
                let keys = match family.shared_mlp {
                    true => &[SHARED_MLP][..],
                    false => {
                        &["intermediate_size_mlp", "dense_intermediate_size", "intermediate_size"]
                    }
                };
                let width = feed_forward_width(config, family, keys)?;
                let is_wide = index >= with_keys && config.flag("use_double_wide_mlp");
                FeedForward::Dense { width: if is_wide { width.saturating_mul(2) } else { width } }
            };
            let window = windows[index];
            let keys_of = keys_of(&windows, with_keys, index)?;
            let mixer = match family.recurrent.is_some() && is_recurrent(config, index)? {
                true => Mixer::Recurrent,
                false => Mixer::Attention,
            };
            let rope = family.rope_of(window, rotates(config, family));
            let attention = usize::from(shapes > 1 && window.is_some());
            let layer =
                Layer { mixer, window, chunked: false, attention, keys_of, rope, feed_forward };
            let Some(unrotated) = family.unrotated else { return Ok(layer) };
            let seen = unrotated.layer(config, index)?;
            let rope = layer.rope.filter(|_| seen.rotates);
            Ok(Layer { window: seen.chunk, chunked: seen.chunk.is_some(), rope, ..layer })
        })
        .collect()
}

/// Gives layers with an indexer the shapes of attention that have one, which follow the `shapes` without. Returns true if all
/// layers with attention have an indexer, so that no other shapes are needed.
fn index_layers(
    config: &Config<'_>,
    family: &Family,
    layers: &mut [Layer],
    shapes: usize,
) -> Result<bool, ModelError> {
    let mut indexed = Vec::with_capacity(layers.len());
    for (index, layer) in layers.iter().enumerate() {
        indexed.push(layer.mixer != Mixer::Attention || is_indexed(config, family, index)?);
    }
    let in_all = indexed.iter().all(|indexed| *indexed) || family.indexer.is_none();
    for (layer, indexed) in layers.iter_mut().zip(indexed) {
        let moved = !in_all && indexed && layer.mixer == Mixer::Attention;
        layer.attention += if moved { shapes } else { 0 };
    }
    Ok(in_all)
}

/// Returns true if a table gives the experts of every token in layer `index`.
fn is_by_token(config: &Config<'_>, index: usize) -> Result<bool, ModelError> {
    let types = config.json.get("mlp_layer_types").and_then(Value::as_array);
    if let Some(kind) = types.and_then(|types| types.get(index)).and_then(Value::as_str) {
        return Ok(kind == "hash_moe");
    }
    Ok(config.optional_count("num_hash_layers")?.is_some_and(|layers| index < layers))
}

/// Returns a layer that is only one block.
fn one_block_layer(
    config: &Config<'_>,
    family: &Family,
    block: OneBlock,
) -> Result<Layer, ModelError> {
    let (mixer, feed_forward) = match block {
        OneBlock::Recurrent => (Mixer::Recurrent, FeedForward::None),
        OneBlock::Attention => (Mixer::Attention, FeedForward::None),
        OneBlock::Dense => {
            (Mixer::None, FeedForward::Dense { width: config.count("intermediate_size")? })
        }
        OneBlock::Experts => (Mixer::None, FeedForward::Experts(experts(config, family)?)),
    };
    let rope = family.rope_of(None, rotates(config, family));
    Ok(Layer::one_block(mixer, feed_forward, rope))
}

/// Returns true if layer `index` has experts (qwen3_moe: `decoder_sparse_step`, `mlp_only_layers`; deepseek:
/// `first_k_dense_replace`, `moe_layer_freq`; ernie4_5_moe: `moe_layer_start_index`, `moe_layer_end_index`,
/// `moe_layer_interval`; llama4: `interleave_moe_layer_step`). `mlp_layer_types` or `moe_layers` decides if it is present.
fn is_sparse(config: &Config<'_>, index: usize) -> Result<bool, ModelError> {
    if let Some(types) = config.json.get("mlp_layer_types").and_then(Value::as_array) {
        return match types.get(index).and_then(Value::as_str) {
            Some("sparse") => Ok(true),
            Some("dense") => Ok(false),
            other => Err(ModelError::BadValue {
                key: format!("mlp_layer_types of layer {index}"),
                value: other.unwrap_or("none").into(),
                expected: "forebay knows sparse and dense".into(),
            }),
        };
    }
    if let Some(sparse) = config.json.get("moe_layers").and_then(Value::as_array) {
        return Ok(sparse.iter().any(|item| item.as_u64() == Some(index as u64)));
    }
    let no_experts = config.optional_count("num_local_experts")? == Some(0);
    let dense_only = config
        .json
        .get("mlp_only_layers")
        .and_then(Value::as_array)
        .is_some_and(|list| list.iter().any(|item| item.as_u64() == Some(index as u64)));
    let step = config.optional_first_count(&[
        "decoder_sparse_step",
        "moe_layer_interval",
        "interleave_moe_layer_step",
    ])?;
    let step = step.unwrap_or(1).max(1);
    let first = [
        "first_k_dense_replace",
        "moe_layer_start_index",
        "num_dense_layers",
        "moe_layer_num_skipped",
    ];
    let first = config.optional_first_count(&first)?.unwrap_or(0);
    // The index of the last layer with experts; -1 is the last layer of all.
    let end = config.json.get("moe_layer_end_index").and_then(Value::as_u64);
    let is_before_end = end.is_none_or(|end| index as u64 <= end);
    // Some models give a flag for each layer.
    let flag = config.flag_of_layer("moe_layer_freq", index)?;
    let is_step = (index + 1).is_multiple_of(step)
        && match flag {
            Some(flag) => flag,
            None => {
                let every = config.optional_count("moe_layer_freq")?.unwrap_or(1).max(1);
                index.is_multiple_of(every)
            }
        };
    let enabled = config.json.get("enable_moe_block").and_then(Value::as_bool).unwrap_or(true);
    Ok(enabled && !no_experts && !dense_only && is_step && index >= first && is_before_end)
}

fn experts(config: &Config<'_>, family: &Family) -> Result<Experts, ModelError> {
    let text = |key: &str| config.json.get(key).and_then(Value::as_str);
    // Only the third DeepSeek generation and later models select this way, and not all of them say so.
    let third = ["deepseek_v3", "kimi_k2", "glm4_moe_lite"];
    let is_third = text("model_type").is_some_and(|of| third.contains(&of));
    let corrected = family.corrected.or(is_third.then_some(Scoring::Sigmoid));
    let denied = ["use_routing_bias", "moe_use_aux_free", "use_expert_bias"]
        .iter()
        .any(|key| config.json.get(*key).and_then(Value::as_bool) == Some(false));
    let correction_bias =
        text("topk_method").map_or(corrected.is_some() && !denied, |method| method == "noaux_tc");
    let scoring = match text("scoring_func").or(text("moe_router_activation_func")) {
        Some("softmax") => Scoring::Softmax,
        Some("sigmoid") => Scoring::Sigmoid,
        Some("sqrtsoftplus") => Scoring::SqrtSoftplus,
        None => corrected.unwrap_or(family.scoring),
        Some(other) => {
            return Err(ModelError::BadValue {
                key: "scoring_func".into(),
                value: other.into(),
                expected: "forebay knows softmax, sigmoid and sqrtsoftplus".into(),
            });
        }
    };
    let norm = ["norm_topk_prob", "moe_renormalize"].iter().find_map(|key| config.json.get(*key));
    let norm = norm.and_then(Value::as_bool);
    let width = config.first_count(&["moe_intermediate_size", "intermediate_size"])?;
    let n_groups = match text("topk_method") {
        Some("greedy") => 1,
        _ => config.optional_first_count(&["n_group", "num_expert_group"])?.unwrap_or(1),
    };
    let groups_kept = config.optional_count("topk_group")?.unwrap_or(n_groups);
    Ok(Experts {
        count: config.first_count(&[
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "moe_num_experts",
        ])?,
        used: config.first_count(&[
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_k",
            "top_k_experts",
            "moe_topk",
        ])?,
        width,
        scoring,
        renormalise: norm.unwrap_or(family.renormalise || is_third),
        scale: config.float("routed_scaling_factor").map_or(1.0, |scale| scale as f32),
        correction_bias,
        by_token: false,
        groups: groups(n_groups, groups_kept, correction_bias),
        bias: family.expert_bias,
        shared_width: match config.optional_count("shared_expert_intermediate_size")? {
            Some(shared) if family.shared_gate => shared,
            _ if family.beside_dense => config.count("intermediate_size")?,
            _ if family.shared_mlp => config.count(SHARED_MLP)?,
            _ if family.one_block => config.count("moe_shared_expert_intermediate_size")?,
            _ => {
                let keys = [
                    "n_shared_experts",
                    "num_shared_experts",
                    "moe_num_shared_experts",
                    "num_shared_expert",
                ];
                let count = config.optional_first_count(&keys)?.unwrap_or(family.shared);
                let mixed = config.json.get("use_mixed_mlp_moe").and_then(Value::as_bool);
                let count = if mixed == Some(false) { 0 } else { count };
                let own = config.optional_first_count(&[SHARED_MLP, "intermediate_size"])?;
                own.filter(|_| family.shared > 0).unwrap_or(width).saturating_mul(count)
            }
        },
        shared_gate: family.shared_gate,
        scaled_input: family.scaled_input,
        transposed: family.transposed_experts,
        own_norms: family.beside_dense,
        expert_scales: family.beside_dense,
    })
}

/// Returns true if the output projection is tied to the embedding. Gemma ties them without always saying so.
fn is_tied(config: &Config<'_>, family: &Family) -> bool {
    let said =
        ["tie_word_embeddings", "tie_embedding"].iter().find_map(|key| config.json.get(*key));
    let said = said.and_then(Value::as_bool);
    said.unwrap_or(family.scaled_embedding)
}
