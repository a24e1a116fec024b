//! Reads an architecture from GGUF metadata. The keys are in the "LLM" section of the GGUF specification.

use forebay_compute::{RopeScaling, Scoring};
use forebay_format::{Array, Catalog, GgufMetadata};

use super::architecture::{
    Architecture, Attention, AttentionBias, Experts, FeedForward, LONG_FACTORS, Latent, Layer,
    LayerEmbeddings, Mixer, Naming, QkNorm, Rope, RopeFactors, Values, groups,
};
use super::deepseek4::{gating_of_gguf, of_gguf};
use super::families::{self, Family, Indexers, WindowTheta, Windows};
use super::gguf_keys::Keys;
use super::gguf_recurrent::{recurrent, recurrent_layers};
use super::indexer::{IndexerShape, with_indexer};
use super::layers::{keys_of, used};
use super::shapes::IndexerRule;
use super::streams;
use crate::ModelError;

/// Describes the model of a GGUF file.
pub fn describe(catalog: &Catalog, metadata: &GgufMetadata) -> Result<Architecture, ModelError> {
    let name = metadata.architecture().ok_or(ModelError::MissingKey {
        source_name: "the GGUF metadata".into(),
        key: "general.architecture".into(),
        family: "a",
    })?;
    let has_experts = metadata.u64(&format!("{name}.expert_count")).is_some_and(|count| count > 0);
    let family =
        families::from_gguf(name, has_experts).ok_or_else(|| families::unknown_gguf(name))?;
    if family.unrotated.is_some() {
        // GGUF files of this family do not give the length of chunks.
        return Err(ModelError::FolderOnly { name: name.into() });
    }
    let keys = Keys { metadata, architecture: name, family: family.name };
    let hidden = keys.count("embedding_length")?;
    let mut layers = layers(catalog, &keys, family)?;
    let (attentions, ropes) = match family.compressed {
        true => {
            let scaling = scaling(&keys, family, catalog)?;
            of_gguf(&keys, &layers, scaling)?.describe(&mut layers)
        }
        false => attention_and_ropes(catalog, &keys, family, &mut layers)?,
    };
    Ok(Architecture {
        family: family.name,
        name: metadata.str("general.name").map(str::to_owned),
        hidden,
        vocabulary: vocabulary(catalog, family)?,
        context_trained: keys.count("context_length")?,
        norm_epsilon: keys
            .optional_float("attention.layer_norm_rms_epsilon")
            .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?,
        norms: family.norms,
        streams: streams::of_gguf(&keys, family)?,
        embedding_scale: family.embedding_scale(hidden),
        layer_scales: family.layer_scales,
        ngrams: None,
        layer_embeddings: keys
            .optional_count("embedding_length_per_layer_input")?
            .filter(|width| *width > 0)
            .map(|width| LayerEmbeddings { width }),
        residual_scale: 1.0,
        logit_scale: 1.0,
        logit_softcap: keys.optional_float("final_logit_softcapping"),
        temperature: None,
        attentions,
        ropes,
        recurrent: family.recurrent.map(|rule| recurrent(&keys, family, rule)).transpose()?,
        gating: gating_of_gguf(&keys, family.gating)?,
        layers,
        mtp: None,
        tied_embeddings: catalog.tensor("output.weight").is_none(),
        naming: Naming::Gguf,
    })
}

/// Returns the shapes of attention and the rotations, and writes the numbers of the shapes to the layers.
fn attention_and_ropes(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    layers: &mut [Layer],
) -> Result<(Vec<Attention>, Vec<Rope>), ModelError> {
    let attentions = attentions(catalog, keys, family, layers)?;
    let attends = |layer: &Layer| layer.mixer == Mixer::Attention;
    let first = layers.iter().position(attends).unwrap_or(0);
    let heads_norm = catalog.tensor(&format!("blk.{first}.attn_q_norm.weight")).is_some();
    // GLM-4.5-Air has no such norms, but GLM-4.5 does.
    let qk_norm = if heads_norm { family.qk_norm } else { QkNorm::None };
    let attentions: Vec<Attention> =
        attentions.into_iter().map(|attention| Attention { qk_norm, ..attention }).collect();
    let ropes = used(ropes(keys, family, layers, &attentions, catalog)?, layers);
    Ok(with_indexer(attentions, ropes, indexer(keys, family)?, true))
}

/// Returns the shapes of the attention layers, each once, and writes their numbers to the layers.
fn attentions(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    layers: &mut [Layer],
) -> Result<Vec<Attention>, ModelError> {
    let mut found: Vec<Attention> = Vec::new();
    let count = layers.len();
    for index in 0..count {
        let layer = &layers[index];
        if layer.mixer != Mixer::Attention {
            continue;
        }
        if let Some(of) = layer.keys_of {
            layers[index].attention = layers[of].attention;
            continue;
        }
        let own = attention(catalog, keys, family, (index, count), layer.window.is_some())?;
        let number = found.iter().position(|of| *of == own).unwrap_or(found.len());
        if number == found.len() {
            found.push(own);
        }
        layers[index].attention = number;
    }
    Ok(found)
}

/// Returns the shape of attention of a layer.
fn attention(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    (layer, layers): (usize, usize),
    is_windowed: bool,
) -> Result<Attention, ModelError> {
    let hidden = keys.count("embedding_length")?;
    let heads = keys.count_of_layer("attention.head_count", layer)?;
    let heads = heads.ok_or_else(|| keys.missing("attention.head_count"))?;
    let usual = || hidden.checked_div(heads).unwrap_or(0);
    // Windowed layers may have lengths of their own.
    let length = |key: &str| match keys.optional_count(&format!("{key}_swa"))? {
        Some(length) if is_windowed => Ok(Some(length)),
        _ => keys.optional_count(key),
    };
    let head_dim = length("attention.key_length")?.unwrap_or_else(usual);
    let kv_heads = keys.count_of_layer("attention.head_count_kv", layer)?.unwrap_or(heads).max(1);
    let has_values = catalog.tensor(&format!("blk.{layer}.attn_v.weight")).is_some();
    let has_keys = catalog.tensor(&format!("blk.{layer}.attn_k.weight")).is_some();
    let grouped = Attention {
        heads,
        kv_heads,
        head_dim,
        value_dim: length("attention.value_length")?.unwrap_or(head_dim),
        scale: keys.optional_float("attention.scale").or(family.attention_scale).unwrap_or_else(
            || {
                // The Gemma models with 27 billion parameters, recognised by their layer count, scale this way.
                let per_head = [("gemma2", 46), ("gemma3", 62)].contains(&(family.name, layers));
                1.0 / (if per_head { usual() } else { head_dim } as f32).sqrt()
            },
        ),
        softcap: keys.optional_float("attn_logit_softcapping"),
        sinks: family.sinks,
        output_gate: family.output_gate,
        bias: bias(catalog, family, layer),
        qk_norm: family.qk_norm,
        values: Values {
            of_keys: family.keys_as_values && has_keys && !has_values,
            normed: family.normed_values,
            scale: 1.0,
        },
        latent: None,
        indexer: None,
        shared: None,
    };
    if !family.latent {
        return Ok(grouped);
    }
    // Until 2025, converters wrote both matrices of a head into one tensor. The lengths in such files are those of a
    // head.
    let one_tensor = catalog.tensor(&format!("blk.{layer}.attn_k_b.weight")).is_none();
    let name = format!("blk.{layer}.attn_kv_b.weight");
    if one_tensor && catalog.tensor(&name).is_none() {
        return Err(ModelError::MissingTensor { name, family: family.name });
    }
    let [key_length, value_length] = match one_tensor {
        true => ["attention.key_length", "attention.value_length"],
        false => ["attention.key_length_mla", "attention.value_length_mla"],
    };
    let rotary = keys.count("rope.dimension_count")?;
    let length = keys.count(key_length)?;
    let plain = length.checked_sub(rotary).ok_or_else(|| ModelError::BadValue {
        key: keys.path(key_length),
        value: length.to_string(),
        expected: format!("{rotary} elements of it rotate"),
    })?;
    let latent = Latent {
        query_rank: keys.optional_count("attention.q_lora_rank")?.filter(|rank| *rank > 0),
        rank: keys.count("attention.kv_lora_rank")?,
        plain,
        rotary,
        value: keys.count(value_length)?,
    };
    // If the file gives YaRN's magnitude, it applies to queries and keys together. The rotation then does not include
    // it.
    let magnitude = match (keys.log_multiplier(), keys.optional_float("rope.scaling.factor")) {
        (Some(multiplier), Some(factor)) if factor > 1.0 => 1.0 + multiplier * factor.ln(),
        _ => 1.0,
    };
    Ok(latent.attention(heads, magnitude))
}

/// Returns the rows of the embedding table. A file may have more rows than the tokenizer has tokens.
fn vocabulary(catalog: &Catalog, family: &Family) -> Result<usize, ModelError> {
    let embedding = catalog.tensor("token_embd.weight").ok_or(ModelError::MissingTensor {
        name: "token_embd.weight".into(),
        family: family.name,
    })?;
    Ok(embedding.shape.first().copied().unwrap_or(0) as usize)
}

fn bias(catalog: &Catalog, family: &Family, first: usize) -> AttentionBias {
    let has = |name: &str| catalog.tensor(&format!("blk.{first}.{name}")).is_some();
    if has("attn_output.bias") {
        AttentionBias::All
    } else if family.qkv_bias || has("attn_q.bias") {
        AttentionBias::Qkv
    } else {
        AttentionBias::None
    }
}

/// Returns the indexer of a family that has them.
fn indexer(keys: &Keys<'_>, family: &Family) -> Result<Option<IndexerShape>, ModelError> {
    let Some(Indexers::Keys(layout)) = family.indexer else { return Ok(None) };
    Ok(Some(IndexerShape {
        heads: keys.count("attention.indexer.head_count")?,
        head_dim: keys.count("attention.indexer.key_length")?,
        top_k: keys.count("attention.indexer.top_k")?,
        layout,
        rule: IndexerRule::Keys,
    }))
}

/// Returns the rotation of the layers, followed by that of windowed layers if it differs.
fn ropes(
    keys: &Keys<'_>,
    family: &Family,
    layers: &[Layer],
    attentions: &[Attention],
    catalog: &Catalog,
) -> Result<Vec<Rope>, ModelError> {
    if !family.rotates {
        return Ok(Vec::new());
    }
    let dim_of = |rope: usize| {
        let of = |layer: &&Layer| layer.mixer == Mixer::Attention && layer.rope == Some(rope);
        let attention = &attentions[layers.iter().find(of)?.attention];
        Some(attention.latent.map_or(attention.head_dim, |latent| latent.rotary))
    };
    let usual = dim_of(0).or(dim_of(1)).unwrap_or(0);
    let rotary_dim = keys.optional_count("rope.dimension_count")?.unwrap_or(usual);
    let scaling = scaling(keys, family, catalog)?;
    let theta = keys.optional_float("rope.freq_base").map_or(10_000.0, f64::from);
    let layout = family.gguf_rope;
    let rope = Rope { theta, rotary_dim, from: 0, layout, scaling, factors: None };
    let usual = match family.window_theta {
        None => return Ok(vec![rope]),
        Some(WindowTheta::Same) => theta,
        Some(WindowTheta::Of(theta)) => theta,
    };
    let theta = keys.optional_float("rope.freq_base_swa").map_or(usual, f64::from);
    let rotary_dim = keys.optional_count("rope.dimension_count_swa")?.unwrap_or(rotary_dim);
    // Factors of the file are for the other layers if those have heads of another length.
    let is_other = dim_of(1).is_some_and(|dim| Some(dim) != dim_of(0));
    let factors = is_other.then_some(RopeFactors::None);
    let windows = Rope { theta, rotary_dim, scaling: RopeScaling::None, factors, ..rope.clone() };
    Ok(vec![rope, windows])
}

/// Returns how the rotation of layers without a window is stretched.
fn scaling(keys: &Keys<'_>, family: &Family, catalog: &Catalog) -> Result<RopeScaling, ModelError> {
    let kind = keys.metadata.str(&keys.path("rope.scaling.type"));
    let factor = keys.optional_float("rope.scaling.factor").map_or(1.0, f64::from);
    Ok(match kind {
        _ if catalog.tensor("rope_freqs.weight").is_some() => RopeScaling::None,
        // Some files have the factors, but do not name the scaling type.
        Some("longrope") | None if kind.is_some() || catalog.tensor(LONG_FACTORS).is_some() => {
            long_rope(keys, family, catalog)?
        }
        None | Some("none") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor },
        Some("yarn") => RopeScaling::Yarn {
            factor,
            original_context: keys.count("rope.scaling.original_context_length")? as f64,
            beta_fast: keys.optional_float("rope.scaling.yarn_beta_fast").map_or(32.0, f64::from),
            beta_slow: keys.optional_float("rope.scaling.yarn_beta_slow").map_or(1.0, f64::from),
            truncate: true,
            // The scale of attention already includes the magnitude, so the rotation must not.
            magnitude: keys.log_multiplier().map(|_| 1.0),
        },
        Some(other) => {
            return Err(ModelError::BadValue {
                key: keys.path("rope.scaling.type"),
                value: other.into(),
                expected: "forebay knows none, linear, yarn, longrope and rope_freqs".into(),
            });
        }
    })
}

/// Returns LongRoPE's scaling. Converters write one magnitude for the whole context.
fn long_rope(
    keys: &Keys<'_>,
    family: &Family,
    catalog: &Catalog,
) -> Result<RopeScaling, ModelError> {
    if catalog.tensor(LONG_FACTORS).is_none() {
        return Err(ModelError::MissingTensor { name: LONG_FACTORS.into(), family: family.name });
    }
    let original = keys.optional_count("rope.scaling.original_context_length")?;
    let original = original.map_or_else(|| keys.count("context_length"), Ok)?;
    let magnitude = keys.optional_float("rope.scaling.attn_factor").map_or(1.0, f64::from);
    Ok(RopeScaling::LongRope {
        original_context: original as f64,
        short_magnitude: magnitude,
        long_magnitude: magnitude,
    })
}

fn layers(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &'static Family,
) -> Result<Vec<Layer>, ModelError> {
    let count = keys.count("block_count")?;
    // Every layer has tensors, so a count above the number of tensors means a damaged file.
    if count > catalog.tensors().len() {
        return Err(ModelError::BadValue {
            key: keys.path("block_count"),
            value: count.to_string(),
            expected: format!("the file has only {} tensors", catalog.tensors().len()),
        });
    }
    // The last layers may exist only to predict further tokens. They are not needed for the next token.
    let count = count.saturating_sub(keys.optional_count("nextn_predict_layers")?.unwrap_or(0));
    let window = match family.windows {
        Windows::NotInGguf => None,
        _ => keys.optional_count("attention.sliding_window")?.filter(|window| *window > 0),
    };
    if family.one_block {
        return one_block_layers(catalog, keys, family, count);
    }
    let pattern = match keys.metadata.get(&keys.path("attention.sliding_window_pattern")) {
        Some(value) => match value.as_array() {
            Some(Array::Bool(flags)) if flags.len() >= count => Some(flags),
            // A number is the period that the family has anyway.
            _ => None,
        },
        None => None,
    };
    let slides = |index: usize| match pattern {
        Some(flags) => flags[index],
        None => family.windows.slides(index),
    };
    let windows: Vec<Option<usize>> =
        (0..count).map(|index| window.filter(|_| slides(index))).collect();
    let with_keys =
        count - keys.optional_count("attention.shared_kv_layers")?.unwrap_or(0).min(count);
    let recurrent = match family.recurrent {
        Some(_) => recurrent_layers(keys, count)?,
        None => vec![false; count],
    };
    (0..count)
        .map(|index| {
            let routed = catalog.tensor(&format!("blk.{index}.ffn_gate_inp.weight")).is_some();
            let feed_forward = if routed && family.experts {
                FeedForward::Experts(experts(catalog, keys, family, index)?)
            } else {
                let width = keys.count_of_layer("feed_forward_length", index)?;
                let width = width.ok_or_else(|| keys.missing("feed_forward_length"))?;
                FeedForward::Dense { width }
            };
            let window = windows[index];
            let keys_of = keys_of(&windows, with_keys, index)?;
            let mixer = if recurrent[index] { Mixer::Recurrent } else { Mixer::Attention };
            let rope = family.rope_of(window, family.rotates);
            Ok(Layer { mixer, window, chunked: false, attention: 0, keys_of, rope, feed_forward })
        })
        .collect()
}

/// Returns layers of which each is only one block: those with key/value heads have attention, those with a width are
/// feed-forwards, and the others are recurrent.
fn one_block_layers(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    count: usize,
) -> Result<Vec<Layer>, ModelError> {
    let of_layers = |key: &str| {
        let list = keys.by_layer(key).ok_or_else(|| keys.missing(key))?;
        match list.len() >= count {
            true => Ok(list),
            false => Err(ModelError::BadValue {
                key: keys.path(key),
                value: format!("a list of {}", list.len()),
                expected: format!("the file has {count} layers"),
            }),
        }
    };
    let heads = of_layers("attention.head_count_kv")?;
    let widths = of_layers("feed_forward_length")?;
    (0..count)
        .map(|index| {
            let routed = catalog.tensor(&format!("blk.{index}.ffn_gate_inp.weight")).is_some();
            let (mixer, feed_forward) = match (heads[index], widths[index]) {
                (0, 0) => (Mixer::Recurrent, FeedForward::None),
                (_, 0) => (Mixer::Attention, FeedForward::None),
                (0, _) if routed && family.experts => {
                    (Mixer::None, FeedForward::Experts(experts(catalog, keys, family, index)?))
                }
                (0, width) => {
                    let width = usize::try_from(width).unwrap_or(usize::MAX);
                    (Mixer::None, FeedForward::Dense { width })
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
            let rope = family.rope_of(None, family.rotates);
            Ok(Layer::one_block(mixer, feed_forward, rope))
        })
        .collect()
}

fn experts(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    layer: usize,
) -> Result<Experts, ModelError> {
    let width = match keys.optional_count("expert_feed_forward_length")? {
        Some(width) => width,
        None => keys.count("feed_forward_length")?,
    };
    let renormalise =
        keys.metadata.bool(&keys.path("expert_weights_norm")).unwrap_or(family.renormalise);
    let correction_bias = catalog.tensor(&format!("blk.{layer}.exp_probs_b.bias")).is_some();
    let scoring = match keys.optional_count("expert_gating_func")? {
        // The converter writes no function for GLM-4.7-Flash. Routers with a correction bias are sigmoid routers, except those
        // of families that say otherwise.
        None if correction_bias => family.corrected.unwrap_or(Scoring::Sigmoid),
        // Value 3 is the softmax over the chosen experts only. This equals the softmax over all, renormalised.
        None | Some(0 | 1 | 3) => Scoring::Softmax,
        Some(2) => Scoring::Sigmoid,
        Some(4) => Scoring::SqrtSoftplus,
        Some(other) => {
            return Err(ModelError::BadValue {
                key: keys.path("expert_gating_func"),
                value: other.to_string(),
                expected: "forebay knows 1 (softmax), 2 (sigmoid), 3 (softmax of the chosen) and 4 (root of softplus)"
                    .into(),
            });
        }
    };
    let n_groups = keys.optional_count("expert_group_count")?.unwrap_or(1);
    let groups_kept = keys.optional_count("expert_group_used_count")?.unwrap_or(n_groups);
    Ok(Experts {
        count: keys.count("expert_count")?,
        used: keys.count("expert_used_count")?,
        width,
        scoring,
        renormalise,
        scale: keys
            .optional_float("expert_weights_scale")
            .filter(|scale| *scale != 0.0)
            .unwrap_or(1.0),
        correction_bias,
        by_token: keys.optional_count("hash_layer_count")?.is_some_and(|layers| layer < layers),
        groups: groups(n_groups, groups_kept, correction_bias),
        bias: family.expert_bias,
        shared_width: match keys.optional_count("expert_shared_feed_forward_length")? {
            Some(shared) if family.shared_gate || family.one_block || family.shared > 0 => shared,
            _ if family.beside_dense => keys.count("feed_forward_length")?,
            _ => width.saturating_mul(keys.optional_count("expert_shared_count")?.unwrap_or(0)),
        },
        shared_gate: family.shared_gate,
        scaled_input: family.scaled_input,
        transposed: false,
        own_norms: family.beside_dense,
        expert_scales: family.beside_dense,
    })
}
