//! The experts of a layer, as `config.json` describes them. Tensors decide how many there are: layers of pruned models have different
//! numbers.

use forebay_format::Catalog;
use forebay_ops::{NEAR_LOGITS, Scoring};

use super::architecture::{Experts, Naming, groups};
use super::check::check;
use super::config::Config;
use super::family::Family;
use super::huggingface_variants::{SHARED_MLP, has_number};
use super::names::Names;
use super::shapes::LatentExperts;
use crate::ModelError;

/// Keys of the number of experts.
const COUNTS: [&str; 4] =
    ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"];

/// Keys of the number of experts that a token uses.
const USED: [&str; 7] = [
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "top_k_experts",
    "moe_topk",
    "experts_per_token",
    "moe_top_k",
];

/// Keys of which every so many layers one has experts.
const STEPS: [&str; 3] = ["decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"];

/// Keys of the number of the first layer that has experts.
const FIRSTS: [&str; 5] = [
    "first_k_dense_replace",
    "moe_layer_start_index",
    "num_dense_layers",
    "moe_layer_num_skipped",
    "dense_mlp_idx",
];

/// Keys of the flag that weights of experts are renormalised.
const NORMS: [&str; 4] = ["norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight"];

/// Keys of the factor of the weights of experts.
const SCALES: [&str; 5] = [
    "moe_router_scaling_factor",
    "routed_scaling_factor",
    "router_scaling_factor",
    "moe_routed_scaling_factor",
    "route_scale",
];

/// Keys of the function that scores experts.
const SCORINGS: [&str; 6] = [
    "scoring_func",
    "moe_router_activation_func",
    "moe_router_activation",
    "score_func",
    "score_function",
    "expert_selection_fn",
];

/// Returns true if a configuration says how many experts there are.
pub(super) fn has_count(config: &Config<'_>) -> bool {
    config.note(&COUNTS);
    COUNTS.iter().any(|key| config.set(key).is_some())
}

/// Returns true if a table gives the experts of every token in layer `index`.
pub(super) fn is_by_token(config: &Config<'_>, index: usize) -> Result<bool, ModelError> {
    let layers = config.optional_count("num_hash_layers")?;
    match config.text_of_layer("mlp_layer_types", index)? {
        Some(kind) => Ok(kind == "hash_moe"),
        None => Ok(layers.is_some_and(|layers| index < layers)),
    }
}

/// Returns true if layer `index` has experts (qwen3_moe: `decoder_sparse_step`, `mlp_only_layers`; deepseek:
/// `first_k_dense_replace`, `moe_layer_freq`; ernie4_5_moe: `moe_layer_start_index`, `moe_layer_end_index`,
/// `moe_layer_interval`; llama4: `interleave_moe_layer_step`). `mlp_layer_types` or `moe_layers` decides if it is present.
pub(super) fn is_sparse(config: &Config<'_>, index: usize) -> Result<bool, ModelError> {
    config.note(&["moe_layers_enum", "moe_every_n_layer", "moe_layer_offset"]);
    config.note(&STEPS);
    config.note(&FIRSTS);
    let dense_only = config.list("mlp_only_layers")?;
    // Some models give a flag for each layer.
    let flag = config.flag_of_layer("moe_layer_freq", index)?;
    // The index of the last layer with experts; -1 is the last layer of all.
    let end = config.set("moe_layer_end_index").and_then(serde_json::Value::as_u64);
    let enabled = config.flag("enable_moe_block")?.unwrap_or(true);
    let with_experts = config.list("moe_layers")?;
    let no_experts = config.set("num_local_experts").is_some_and(|count| *count == 0);
    let is_moe = config.list("is_moe_layer")?.and_then(|list| list.get(index)?.as_bool());
    match config.text_of_layer("mlp_layer_types", index)? {
        None => {}
        Some("sparse") => return Ok(true),
        Some("dense") => return Ok(false),
        Some(other) => {
            return Err(ModelError::BadValue {
                key: format!("mlp_layer_types of layer {index}"),
                value: other.into(),
                expected: "forebay knows sparse and dense".into(),
            });
        }
    }
    if let Some(is_moe) = is_moe {
        return Ok(is_moe);
    }
    if let Some(listed) = config.text("moe_layers_enum")? {
        // Numbers with commas between them.
        return Ok(listed.split(',').any(|number| number.trim().parse() == Ok(index)));
    }
    if let Some(layers) = with_experts {
        return Ok(has_number(layers, index));
    }
    let is_dense = dense_only.is_some_and(|layers| has_number(layers, index));
    let step = config.optional_first_count(&STEPS)?.unwrap_or(1).max(1);
    let first = config.optional_first_count(&FIRSTS)?.unwrap_or(0);
    let is_before_end = end.is_none_or(|end| index as u64 <= end);
    let is_step = (index + 1).is_multiple_of(step)
        && match flag {
            Some(flag) => flag,
            None => {
                let every = config.optional_count("moe_layer_freq")?.unwrap_or(1).max(1);
                index.is_multiple_of(every)
            }
        };
    Ok(enabled && !no_experts && !is_dense && is_step && index >= first && is_before_end)
}

/// Returns the experts of layer `index`.
pub(super) fn experts(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    naming: Naming,
    index: usize,
) -> Result<Experts, ModelError> {
    // Only the third DeepSeek generation and later models select this way, and not all of them say so.
    let third = ["deepseek_v3", "kimi_k2", "glm4_moe_lite"];
    let is_third = config.text("model_type")?.is_some_and(|of| third.contains(&of));
    let corrected = family.feed_forward.corrected.or(is_third.then_some(Scoring::Sigmoid));
    let mut denied = false;
    for key in [
        "use_routing_bias",
        "moe_use_aux_free",
        "use_expert_bias",
        "moe_router_enable_expert_bias",
        "use_moe_router_bias",
    ] {
        denied |= config.flag(key)? == Some(false);
    }
    let method = config.text("topk_method")?;
    let correction_bias =
        method.map_or(corrected.is_some() && !denied, |method| method == "noaux_tc");
    let norm = norm(config)?;
    let width = config.first_count(&["moe_intermediate_size", "intermediate_size"])?;
    let of_groups =
        config.optional_first_count(&["n_group", "num_expert_group", "num_expert_groups"])?;
    let n_groups = if method == Some("greedy") { 1 } else { of_groups.unwrap_or(1) };
    let groups_kept = config.optional_first_count(&["topk_group", "num_limited_groups"])?;
    let groups_kept = groups_kept.unwrap_or(n_groups);
    config.note(&COUNTS);
    let always = match family.feed_forward.scored_shared {
        true => scored_shared(config)?,
        false => 0,
    };
    let scoring = scoring(config, family, corrected)?;
    // A softmax of the chosen logits is one of all logits, divided by the sum of the chosen ones.
    let of_chosen = family.feed_forward.chosen_by_logits && scoring == Scoring::Softmax;
    let shared_width = if always > 0 { 0 } else { shared_width(config, family, width)? };
    let averaged = is_averaged(config, family)? && shared_width > 0;
    let scale =
        config.first_float(&SCALES)?.map_or(family.feed_forward.scale, |scale| scale as f32);
    Ok(Experts {
        count: match Names::new(naming, family).routed_experts(catalog, index) {
            Some(count) => count,
            None => config.first_count(&COUNTS)?,
        },
        always,
        used: config.first_count(&USED)?.saturating_add(always),
        width,
        latent: match family.feed_forward.latent {
            Some(norm) => Some(LatentExperts { width: config.count("moe_hidden_size")?, norm }),
            None => None,
        },
        output_norms: family.feed_forward.output_norms,
        logit_scale: match family.feed_forward.scaled_router {
            true => output_multiplier(config, family)?,
            false => 1.0,
        },
        scoring,
        renormalise: of_chosen || norm.unwrap_or(family.feed_forward.renormalise || is_third),
        scale: if averaged { 0.5 * scale } else { scale },
        correction_bias,
        by_token: false,
        groups: groups(n_groups, groups_kept, correction_bias),
        bias: family.feed_forward.bias,
        shared_width,
        averaged,
        shared_gate: family.feed_forward.shared_gate,
        scaled_input: family.feed_forward.scaled_input,
        input: family.feed_forward.input,
        transposed: family.files.transposed_experts,
        own_norms: family.feed_forward.beside_dense,
        expert_scales: family.feed_forward.beside_dense,
    })
}

/// Returns the number of shared experts that the router scores.
fn scored_shared(config: &Config<'_>) -> Result<usize, ModelError> {
    // Nothing is normed before the router, whatever this number is.
    config.note(&["rms_norm_eps_moe_gate"]);
    const FLAG: &str = "shared_expert_sink";
    let known = config.flag(FLAG)? != Some(false);
    check(FLAG, false, known, "forebay knows shared experts that the router scores")?;
    let count = config.count("n_shared_experts")?;
    check("n_shared_experts", count, count > 0, "it must be positive")?;
    Ok(count)
}

/// Returns the factor of the logits before their cap. Configurations of Cohere do not write the usual one.
pub(super) fn output_multiplier(config: &Config<'_>, family: &Family) -> Result<f32, ModelError> {
    let said = config.first_float(&["output_multiplier", "logit_scale"])?;
    Ok(said.map_or(family.ends.logit_scale, |said| said as f32))
}

fn scoring(
    config: &Config<'_>,
    family: &Family,
    corrected: Option<Scoring>,
) -> Result<Scoring, ModelError> {
    config.note(&SCORINGS);
    if family.feed_forward.scoring == Scoring::SparseMixer {
        let said = config.float("router_jitter_noise")?.unwrap_or(f64::from(NEAR_LOGITS) / 2.0);
        let fits = (2.0 * said - f64::from(NEAR_LOGITS)).abs() < 1e-6;
        check("router_jitter_noise", said, fits, "forebay knows 0.01")?;
    }
    let Some(key) = SCORINGS.into_iter().find(|key| config.set(key).is_some()) else {
        return Ok(corrected.unwrap_or(family.feed_forward.scoring));
    };
    match config.text(key)? {
        Some("softmax") => Ok(Scoring::Softmax),
        Some("sigmoid") if family.feed_forward.chosen_by_logits => Ok(Scoring::SigmoidOfChosen),
        Some("sigmoid") => Ok(Scoring::Sigmoid),
        Some("sqrtsoftplus") => Ok(Scoring::SqrtSoftplus),
        other => Err(ModelError::BadValue {
            key: key.into(),
            value: other.unwrap_or("").into(),
            expected: "forebay knows softmax, sigmoid and sqrtsoftplus".into(),
        }),
    }
}

/// Returns true if weights of experts are renormalised, if the configuration says it.
fn norm(config: &Config<'_>) -> Result<Option<bool>, ModelError> {
    config.note(&NORMS);
    match NORMS.iter().find(|key| config.set(key).is_some()) {
        Some(key) => config.flag(key),
        None => Ok(None),
    }
}

/// Returns true if outputs of experts and shared experts are averaged.
fn is_averaged(config: &Config<'_>, family: &Family) -> Result<bool, ModelError> {
    const KEY: &str = "shared_expert_combination_strategy";
    match config.text(KEY)? {
        None => Ok(family.feed_forward.averaged),
        Some("average") => Ok(true),
        Some("sum") => Ok(false),
        Some(other) => {
            check(KEY, other, false, "forebay knows average and sum")?;
            Ok(false)
        }
    }
}

/// Returns the width of the shared experts that every token uses.
fn shared_width(config: &Config<'_>, family: &Family, width: usize) -> Result<usize, ModelError> {
    let counts =
        ["n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"];
    let count = config.optional_first_count(&counts)?;
    let mixed = config.flag("use_mixed_mlp_moe")?;
    config.note(&[SHARED_MLP, "intermediate_size"]);
    let of_all = ["moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"];
    let of_one_block = config.optional_first_count(&of_all)?;
    let widths = ["shared_expert_intermediate_size", "share_expert_dims", "share_expert_dim"];
    match config.optional_first_count(&widths)? {
        Some(shared) if family.feed_forward.shared_gate || family.feed_forward.shared > 0 => {
            Ok(shared)
        }
        _ if family.feed_forward.beside_dense => config.count("intermediate_size"),
        _ if family.feed_forward.shared_mlp => config.count(SHARED_MLP),
        _ if family.layers.one_block => {
            of_one_block.ok_or_else(|| config.missing("moe_shared_expert_intermediate_size"))
        }
        _ => {
            let count =
                if mixed == Some(false) { 0 } else { count.unwrap_or(family.feed_forward.shared) };
            let own = config.optional_first_count(&[SHARED_MLP, "intermediate_size"])?;
            let own = own.filter(|_| family.feed_forward.shared > 0).or(of_one_block);
            Ok(own.unwrap_or(width).saturating_mul(count))
        }
    }
}
