//! Reads the layers of GGUF metadata.

use forebay_format::Catalog;
use forebay_ops::{GateFunction, Gating};

use super::architecture::{FeedForward, Gatings, Layer, Mixer};
use super::family::{Factors, Family};
use super::gguf_experts::{experts, router};
use super::gguf_keys::Keys;
use super::gguf_recurrent::recurrent_layers;
use super::gguf_windows::{unrotate, windows};
use super::layers::{keys_of, limited};
use super::unrotated::Unrotated;
use crate::ModelError;

/// Rate of the factor of queries that grows with the position.
pub(super) const TEMPERATURE: &str = "attention.temperature_scale";
/// Bound of queries, keys and values.
pub(super) const CLAMP: &str = "attention.clamp_kqv";
/// Factor of the scores of attention (Grok).
pub(super) const OUTPUT_SCALE: &str = "attention.output_scale";
/// Keys that mean nothing without experts.
const OF_EXPERTS: [&str; 9] = [
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_gating_func",
    "expert_weights_norm",
    "expert_weights_scale",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
];

/// Returns the layers that every token goes through.
pub(super) fn layers(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &'static Family,
) -> Result<Vec<Layer>, ModelError> {
    let count = keys.count("block_count")?;
    // Every layer has tensors, so a count above the number of tensors means a damaged file.
    if count > catalog.tensors().len() {
        let expected = format!("the file has only {} tensors", catalog.tensors().len());
        return Err(keys.wrong("block_count", count, &expected));
    }
    // The last layers may exist only to predict further tokens. They are not needed for the next token.
    let count = count.saturating_sub(keys.optional_count("nextn_predict_layers")?.unwrap_or(0));
    if (0..count).all(|index| router(catalog, index).is_none()) {
        keys.note(&OF_EXPERTS);
    }
    if family.layers.one_block {
        return one_block_layers(catalog, keys, family, count);
    }
    let (windows, rotates) = (windows(keys, family, count)?, rotates(keys, family)?);
    let with_keys =
        count - keys.optional_count("attention.shared_kv_layers")?.unwrap_or(0).min(count);
    let recurrent = match family.recurrence.rule {
        Some(rule) if !family.recurrence.beside_attention => recurrent_layers(keys, rule, count)?,
        _ => vec![false; count],
    };
    (0..count)
        .map(|index| {
            let feed_forward = feed_forward(catalog, keys, family, index)?;
            let window = windows[index];
            let keys_of = keys_of(&windows, with_keys, index)?;
            let mixer = match family.layers.may_lack_blocks && !has_heads(keys, index)? {
                true => Mixer::None,
                false if recurrent[index] => Mixer::Recurrent,
                false if family.recurrence.beside_attention => Mixer::AttentionAndRecurrent,
                false => Mixer::Attention,
            };
            let rope = family.rope_of(window, rotates);
            let gatings = gatings(keys, family, index)?;
            let layer = Layer {
                mixer,
                window,
                chunked: false,
                attention: 0,
                keys_of,
                rope,
                tempered: false,
                gatings,
                feed_forward,
            };
            match family.rotation.unrotated {
                Some(unrotated) => unrotate(keys, unrotated, layer, (index, &windows)),
                None => Ok(layer),
            }
        })
        .collect()
}

/// Returns the gatings of a layer with limits of its own.
pub(super) fn gatings(
    keys: &Keys<'_>,
    family: &Family,
    layer: usize,
) -> Result<Option<Gatings>, ModelError> {
    if matches!(family.feed_forward.gating, Gating::Xielu { .. }) {
        let own = xielu(keys, layer)?;
        return Ok(Some(Gatings { experts: own, others: own }));
    }
    if !family.feed_forward.limits_by_layer {
        return Ok(None);
    }
    let limit = |key: &str| match keys.floats(key)? {
        None => Ok(0.0),
        Some(list) => list.get(layer).copied().ok_or_else(|| {
            keys.wrong(key, format!("{} values", list.len()), "it must have one for each layer")
        }),
    };
    Ok(Some(limited([limit("swiglu_clamp_exp")?, limit("swiglu_clamp_shexp")?])))
}

/// Returns the xIELU of a layer. Files have the numbers from which a softplus makes positive ones.
fn xielu(keys: &Keys<'_>, layer: usize) -> Result<Gating, ModelError> {
    let number = |key: &str| keys.global_float_of_layer(&format!("xielu.{key}"), layer);
    let softplus = |x: f32| GateFunction::Softplus.of(x);
    let slope = number("beta")?;
    Ok(Gating::Xielu {
        positive: softplus(number("alpha_p")?),
        negative: slope + softplus(number("alpha_n")?),
        slope,
        floor: number("eps")?,
    })
}

/// Returns the feed-forward of a layer, which is a mixture of experts if the layer has a router.
fn feed_forward(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &'static Family,
    index: usize,
) -> Result<FeedForward, ModelError> {
    if family.feed_forward.experts && router(catalog, index).is_some() {
        let dense = format!("blk.{index}.ffn_up.weight");
        if family.name == "grok" && catalog.tensor(&dense).is_some() {
            return Err(ModelError::BadValue {
                key: dense,
                value: "a tensor of the file".into(),
                expected: "forebay knows Grok 1, which has no feed-forward beside experts".into(),
            });
        }
        return Ok(FeedForward::Experts(experts(catalog, keys, family, index)?));
    }
    let width = keys.count_of_layer("feed_forward_length", index)?;
    let width = width.ok_or_else(|| keys.missing("feed_forward_length"))?;
    Ok(match width {
        0 if family.layers.may_lack_blocks => FeedForward::None,
        width if family.feed_forward.doubled_width => {
            FeedForward::Dense { width: width / 2, cut: None }
        }
        width => FeedForward::Dense { width, cut: cut(keys, family, index)? },
    })
}

/// Returns what is subtracted from the gates of a layer, in standard deviations above their mean, if they are sparse. Layers whose
/// gates are not have minus infinity in the file.
fn cut(keys: &Keys<'_>, family: &Family, index: usize) -> Result<Option<f32>, ModelError> {
    const KEY: &str = "activation_sparsity_scale";
    if family.feed_forward.sparse_layers.is_none() {
        return Ok(None);
    }
    let list = keys.floats(KEY)?.ok_or_else(|| keys.missing(KEY))?;
    let Some(&of_layer) = list.get(index) else {
        let given = format!("{} values", list.len());
        return Err(keys.wrong(KEY, given, "it must have one for each layer"));
    };
    if of_layer.is_nan() || of_layer == f32::INFINITY {
        return Err(keys.wrong(KEY, of_layer, "it must be numbers"));
    }
    Ok((of_layer != f32::NEG_INFINITY).then_some(of_layer))
}

/// Returns true if a layer has heads of attention.
///
/// # Errors
/// Returns an error if the layer has heads without keys: such a layer multiplies its input by one matrix.
fn has_heads(keys: &Keys<'_>, index: usize) -> Result<bool, ModelError> {
    let [heads, kv_heads] = ["attention.head_count", "attention.head_count_kv"]
        .map(|key| keys.count_of_layer(key, index));
    match (heads?, kv_heads?) {
        (Some(0), None | Some(0)) => Ok(false),
        (_, Some(0)) => {
            let expected = format!("forebay knows layers with keys, but layer {index} has none");
            Err(keys.wrong("attention.head_count_kv", 0, &expected))
        }
        _ => Ok(true),
    }
}

/// Returns true if queries and keys are rotated. Granite's converter says so with a key that is a remark in other files.
pub(super) fn rotates(keys: &Keys<'_>, family: &Family) -> Result<bool, ModelError> {
    let said = keys.flag("rope.scaling.finetuned")?;
    let of_granite = family.ends.gguf_factors == Factors::AllOfGranite;
    // Some files have a flag for each layer instead.
    let is_switch = of_granite && family.rotation.unrotated != Some(Unrotated::AsSaid);
    Ok(if is_switch { said.unwrap_or(true) } else { family.rotation.rotates })
}

/// Returns layers of which each is only one block: those with key/value heads have attention, those with a width are
/// feed-forwards, and the others are recurrent.
fn one_block_layers(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &'static Family,
    count: usize,
) -> Result<Vec<Layer>, ModelError> {
    let of_layers = |key: &str| {
        let list = keys.by_layer(key).ok_or_else(|| keys.missing(key))?;
        match list.len() >= count {
            true => Ok(list),
            false => {
                let expected = format!("the file has {count} layers");
                Err(keys.wrong(key, format!("a list of {}", list.len()), &expected))
            }
        }
    };
    let heads = of_layers("attention.head_count_kv")?;
    let widths = of_layers("feed_forward_length")?;
    (0..count)
        .map(|index| {
            let routed = router(catalog, index).is_some();
            let (mixer, feed_forward) = match (heads[index], widths[index]) {
                (0, 0) => (Mixer::Recurrent, FeedForward::None),
                (_, 0) => (Mixer::Attention, FeedForward::None),
                (0, _) if routed && family.feed_forward.experts => {
                    (Mixer::None, FeedForward::Experts(experts(catalog, keys, family, index)?))
                }
                (0, width) => {
                    let width = usize::try_from(width).unwrap_or(usize::MAX);
                    (Mixer::None, FeedForward::Dense { width, cut: None })
                }
                (heads, width) => {
                    return Err(ModelError::BadValue {
                        key: format!("key/value heads and feed-forward length of layer {index}"),
                        value: format!("{heads} and {width}"),
                        expected: "one of them must be 0: a layer of this family is one block"
                            .into(),
                    });
                }
            };
            let rope = family.rope_of(None, family.rotation.rotates);
            Ok(Layer::one_block(mixer, feed_forward, rope))
        })
        .collect()
}

/// Refuses values of keys that no family of the table has.
pub(super) fn refuse_variants(keys: &Keys<'_>, family: &Family) -> Result<(), ModelError> {
    for (key, is_known) in [
        ("attention.max_alibi_bias", false),
        (CLAMP, family.attention.clamps),
        (TEMPERATURE, family.rotation.tempered),
    ] {
        if !is_known {
            keys.only(key, &[0.0], "forebay knows models without it")?;
        }
    }
    match family.name == "grok" {
        // Grok 1 takes no notice of this cap, which its converter writes.
        true => keys.note(&["router_logit_softcapping"]),
        false => keys.only(OUTPUT_SCALE, &[0.0, 1.0], "forebay knows 1 for this family")?,
    }
    if family.name == "baichuan" {
        let expected = "forebay knows Baichuan with 32 layers, because larger models have ALiBi instead of a rotation";
        keys.only("block_count", &[32.0], expected)?;
    }
    keys.note(&["attention.temperature_length"]);
    for (key, known) in [("attention.causal", true), ("ssm.dt_b_c_rms", false)] {
        if keys.flag(key)?.is_some_and(|flag| flag != known) {
            return Err(keys.wrong(key, !known, &format!("forebay knows {known}")));
        }
    }
    let known: &[&str] = match family.feed_forward.gating {
        Gating::GeluTanh => &["gelu", "gelu_pytorch_tanh", "gelu_new"],
        Gating::Relu => &["relu"],
        Gating::Xielu { .. } => &["xielu"],
        Gating::SquaredRelu => &["relu2", "relu_sqr"],
        Gating::Situ { .. } => &["situ"],
        Gating::PlainGelu | Gating::PlainGeluTanh => &["gelu", "gelu_pytorch_tanh", "gelu_new"],
        Gating::Silu
        | Gating::Clamped { .. }
        | Gating::ClampedSilu { .. }
        | Gating::SiluClamped { .. } => &["silu", "swish", "swiglu", "swigluoai"],
    };
    let activation = keys.text("hidden_activation")?;
    match activation.filter(|name| !known.contains(name)) {
        Some(name) => {
            let expected = format!("forebay knows {} for this family", known.join(", "));
            Err(keys.wrong("hidden_activation", name, &expected))
        }
        None => Ok(()),
    }
}
