//! Reads the experts of GGUF metadata. Tensors decide how many there are: layers of pruned models have different numbers.

use forebay_format::{Catalog, TensorInfo};
use forebay_ops::{Gating, Scoring};

use super::architecture::{Experts, Naming, groups};
use super::family::Family;
use super::gguf_keys::Keys;
use super::names::Names;
use super::shapes::LatentExperts;
use crate::ModelError;

/// Returns true if a layer of the file has experts.
pub(super) fn has_experts(catalog: &Catalog) -> bool {
    catalog.tensors().iter().any(|tensor| tensor.name.ends_with(".ffn_gate_inp.weight"))
}

/// Returns the router of a layer `[experts, hidden]`, if it has one.
pub(super) fn router(catalog: &Catalog, layer: usize) -> Option<&TensorInfo> {
    catalog.tensor(&format!("blk.{layer}.ffn_gate_inp.weight"))
}

/// Returns the number of columns of a tensor of a layer.
fn columns(catalog: &Catalog, layer: usize, name: &str) -> Option<usize> {
    columns_of(catalog, &format!("blk.{layer}.{name}.weight"))
}

fn columns_of(catalog: &Catalog, name: &str) -> Option<usize> {
    let tensor = catalog.tensor(name)?;
    tensor.shape.last().and_then(|columns| usize::try_from(*columns).ok())
}

/// Returns the experts of a layer.
pub(super) fn experts(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &'static Family,
    layer: usize,
) -> Result<Experts, ModelError> {
    keys.note(&["feed_forward_length"]);
    let width = match keys.count_of_layer("expert_feed_forward_length", layer)? {
        Some(width) => width,
        // Old files have no such key.
        None => match columns(catalog, layer, "ffn_down_exps") {
            Some(width) => width,
            None => keys.count("feed_forward_length")?,
        },
    };
    let correction_bias = catalog.tensor(&format!("blk.{layer}.exp_probs_b.bias")).is_some();
    let n_groups = keys.optional_count("expert_group_count")?.unwrap_or(1);
    let groups_kept = keys.optional_count("expert_group_used_count")?.unwrap_or(n_groups);
    let scale = keys.said_float("expert_weights_scale")?;
    let hashed = keys.optional_count("hash_layer_count")?;
    let shared_width = shared_width(catalog, keys, family, layer, width)?;
    let averaged = family.feed_forward.averaged && shared_width > 0;
    let scale = scale.unwrap_or(1.0);
    Ok(Experts {
        count: match Names::new(Naming::Gguf, family).routed_experts(catalog, layer) {
            Some(count) => count,
            None => keys.count("expert_count")?,
        },
        used: keys.count("expert_used_count")?,
        always: 0,
        width,
        output_norms: false,
        logit_scale: 1.0,
        scoring: scoring(keys, family, correction_bias)?,
        renormalise: keys.flag("expert_weights_norm")?.unwrap_or(family.feed_forward.renormalise),
        scale: if averaged { 0.5 * scale } else { scale },
        correction_bias,
        by_token: hashed.is_some_and(|layers| layer < layers),
        groups: groups(n_groups, groups_kept, correction_bias),
        bias: family.feed_forward.bias,
        shared_width,
        averaged,
        shared_gate: family.feed_forward.shared_gate,
        scaled_input: family.feed_forward.scaled_input,
        input: family.feed_forward.input,
        transposed: false,
        own_norms: family.feed_forward.beside_dense,
        expert_scales: family.feed_forward.beside_dense,
        latent: match family.feed_forward.latent {
            Some(norm) => keys
                .optional_count("expert_latent_length")?
                .map(|width| LatentExperts { width, norm }),
            None => None,
        },
    })
}

fn scoring(keys: &Keys<'_>, family: &Family, correction_bias: bool) -> Result<Scoring, ModelError> {
    match keys.optional_count("expert_gating_func")? {
        // The converter writes no function for GLM-4.7-Flash. Routers with a correction bias are sigmoid routers, except those
        // of families that say otherwise.
        None | Some(0) if correction_bias => {
            Ok(family.feed_forward.corrected.unwrap_or(Scoring::Sigmoid))
        }
        // Value 3 is the softmax over the chosen experts only. This equals the softmax over all, renormalised.
        None | Some(0) => Ok(family.feed_forward.scoring),
        Some(1 | 3) => Ok(Scoring::Softmax),
        Some(2) if family.feed_forward.chosen_by_logits => Ok(Scoring::SigmoidOfChosen),
        Some(2) => Ok(Scoring::Sigmoid),
        Some(4) => Ok(Scoring::SqrtSoftplus),
        Some(other) => {
            let expected = "forebay knows 1 (softmax), 2 (sigmoid), 3 (softmax of the chosen) and 4 (root of softplus)";
            Err(keys.wrong("expert_gating_func", other, expected))
        }
    }
}

/// Returns the gating that the metadata describes. Limits of clamped gates are given for each layer, for experts and for shared
/// experts.
pub(super) fn gating(keys: &Keys<'_>, family: &Family) -> Result<Gating, ModelError> {
    let required = |key: &str| keys.optional_float(key)?.ok_or_else(|| keys.missing(key));
    let usual = match family.feed_forward.gating {
        Gating::ClampedSilu { limit } => limit,
        Gating::Situ { .. } => {
            return Ok(Gating::Situ {
                limit: required("activation.situ_beta")?,
                up_limit: required("activation.situ_linear_beta")?,
            });
        }
        other => return Ok(other),
    };
    let mut keys_of_limit = &["swiglu_clamp_exp", "swiglu_clamp_shexp"][..];
    if family.feed_forward.gating_of_others.is_some() {
        keys_of_limit = &keys_of_limit[..1];
        keys.only("swiglu_clamp_shexp", &[0.0], "forebay knows none for this family")?;
    }
    let mut found = None;
    for &key in keys_of_limit {
        for limit in keys.floats(key)?.unwrap_or_default() {
            if found.is_some_and(|found: f32| found != limit) {
                return Err(keys.wrong(key, limit, "forebay knows one limit for all layers"));
            }
            found = Some(limit);
        }
    }
    Ok(Gating::ClampedSilu { limit: found.unwrap_or(usual) })
}

/// Returns the width of a layer's shared experts. Their tensors decide, if there are any.
fn shared_width(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &'static Family,
    layer: usize,
    width: usize,
) -> Result<usize, ModelError> {
    let said = keys.optional_count("expert_shared_feed_forward_length")?;
    let number = keys.optional_count("expert_shared_count")?.unwrap_or(0);
    if family.feed_forward.beside_dense {
        let dense = keys.count_of_layer("feed_forward_length", layer)?;
        return dense.ok_or_else(|| keys.missing("feed_forward_length"));
    }
    let said = said.filter(|_| {
        family.feed_forward.shared_gate || family.layers.one_block || family.feed_forward.shared > 0
    });
    let usual = || said.unwrap_or(width.saturating_mul(number));
    // Beside Arctic's experts is a dense feed-forward.
    let down = Names::new(Naming::Gguf, family).layer(layer, "shared_down");
    Ok(columns_of(catalog, &down).unwrap_or_else(usual))
}
