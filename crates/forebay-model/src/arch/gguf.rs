//! Reads an architecture from GGUF metadata. The keys are in the "LLM" section of the GGUF specification.

use forebay_compute::{Growth, Temperature};
use forebay_format::{Catalog, GgufMetadata};

use super::architecture::{
    Architecture, Attention, AttentionBias, Gatings, Latent, Layer, LayerEmbeddings, Naming,
    OutputGate, QkNorm, Rope, Values,
};
use super::deepseek4::of_gguf;
use super::families;
use super::family::{Factors, Family};
use super::gguf_experts::{gating, has_experts};
use super::gguf_indexer::{choices, indexer};
use super::gguf_keys::Keys;
use super::gguf_layers::{CLAMP, OUTPUT_SCALE, TEMPERATURE, gatings, layers, refuse_variants};
use super::gguf_recurrent::recurrent;
use super::gguf_rope::{latent_magnitude, original_context, ropes, scaling};
use super::gguf_windows::windows;
use super::indexer::with_indexer;
use super::layers::{temper, used};
use super::unrotated::Unrotated;
use super::{ngrams, norms, streams};
use crate::ModelError;

/// Describes the model of a GGUF file.
pub fn describe(catalog: &Catalog, metadata: &GgufMetadata) -> Result<Architecture, ModelError> {
    let name = metadata.architecture().ok_or(ModelError::MissingKey {
        source_name: "the GGUF metadata".into(),
        key: "general.architecture".into(),
        family: "a",
    })?;
    let counted = metadata.u64(&format!("{name}.expert_count")).is_some_and(|count| count > 0);
    let family = families::from_gguf(name, counted || has_experts(catalog))
        .ok_or_else(|| families::unknown_gguf(name))?;
    let keys = Keys::new(metadata, name, family.name);
    refuse_variants(&keys, family)?;
    let hidden = keys.count("embedding_length")?;
    let mut layers = layers(catalog, &keys, family)?;
    let (attentions, ropes) = match family.attention.compressed {
        true => {
            let scaling = scaling(&keys, family, catalog)?;
            of_gguf(&keys, &layers, scaling)?.describe(&mut layers)
        }
        false => attention_and_ropes(catalog, &keys, family, &mut layers)?,
    };
    let logit_softcap = keys.optional_float("final_logit_softcapping")?;
    let logit_softcap = logit_softcap.or(family.ends.logit_softcap);
    let [embedding_scale, residual_scale, logit_scale] = factors(&keys, family)?;
    let normed_residual = Some(residual_scale).filter(|_| family.layers.normed_residual);
    let residual_scale = if normed_residual.is_some() { 1.0 } else { residual_scale };
    let ngrams = ngrams::of_gguf(&keys)?;
    let (norm_form, norm_epsilon) = norms::of_gguf(&keys, family)?;
    let gating = gating(&keys, family)?;
    if let Some(gatings) = family.gatings(gating) {
        layers.iter_mut().for_each(|layer| layer.gatings = Some(gatings));
    }
    let temperature = temperature(&keys, family, &layers)?;
    if temperature.is_some() {
        temper(&mut layers, family.rotation.tempered);
    }
    let architecture = Architecture {
        family: family.name,
        name: metadata.str("general.name").map(str::to_owned),
        hidden,
        vocabulary: vocabulary(catalog, family)?,
        embedding_rows: vocabulary(catalog, family)?,
        context_trained: keys.count("context_length")?,
        norm_epsilon,
        // GGUF files have no key for it.
        post_norm_epsilon: family.layers.post_norm_epsilon.unwrap_or(norm_epsilon),
        norms: norms::layout(family, keys.flag("use_parallel_residual")?)?,
        norm_form,
        streams: streams::of_gguf(catalog, &keys, family, layers.len())?,
        embedding_scale: family.embedding_scale(hidden) * embedding_scale / residual_scale,
        embedding_norm: family.ends.embedding_norm,
        layer_scales: family.layers.scales,
        layer_embeddings: keys
            .optional_count(ngrams::ROW_WIDTH)?
            // The key has another meaning in models with n-grams.
            .filter(|width| *width > 0 && ngrams.is_none())
            .map(|width| {
                vocabulary(catalog, family).map(|tokens| LayerEmbeddings { width, tokens })
            })
            .transpose()?,
        ngrams,
        residual_scale,
        normed_residual,
        residual_gates: None,
        convolutions: None,
        feed_forward_scales: false,
        feed_forward_input_scale: 1.0,
        logit_scale,
        logit_softcap: logit_softcap.filter(|cap| *cap != 0.0),
        temperature,
        attentions,
        ropes,
        recurrent: family
            .recurrence
            .rule
            .map(|rule| recurrent(catalog, &keys, family, rule))
            .transpose()?,
        gating,
        layers,
        mtp: None,
        tied_embeddings: catalog.tensor("output.weight").is_none(),
        naming: Naming::Gguf,
    };
    keys.finish()?;
    Ok(architecture)
}

/// Returns the window and the gatings of its own of the predicting layer, which has number `layer` and comes after those that every
/// token goes through. `has_windows` says if one of those has a window.
///
/// # Errors
/// Returns an error if lists of the file have no entry for the layer.
pub(super) fn predicting_layer(
    catalog: &Catalog,
    family: &'static Family,
    (layer, has_windows): (usize, bool),
) -> Result<(Option<usize>, Option<Gatings>), ModelError> {
    let Some(metadata) = catalog.gguf() else { return Ok((None, None)) };
    let architecture = metadata.architecture().unwrap_or_default();
    let keys = Keys::new(metadata, architecture, family.name);
    let window = if has_windows { windows(&keys, family, layer + 1)?[layer] } else { None };
    Ok((window, gatings(&keys, family, layer)?))
}

/// Returns the factors of embeddings, of outputs added to the residual stream, and of logits.
fn factors(keys: &Keys<'_>, family: &Family) -> Result<[f32; 3], ModelError> {
    let names = ["embedding_scale", "residual_scale", "logit_scale"];
    let (known, other) = match family.ends.gguf_factors {
        Factors::None => (&names[..0], &names[..]),
        Factors::AllOfGranite | Factors::OfMiniCpm => (&names[..], &names[..0]),
        Factors::OfGrok => (&["embedding_scale", "logit_scale"][..], &names[1..2]),
        Factors::OfLogits => (&names[2..], &names[..2]),
        Factors::OfNormedResidual => (&names[1..2], &["embedding_scale", "logit_scale"][..]),
    };
    for key in other {
        keys.only(key, &[0.0, 1.0], "forebay knows 1 for this family")?;
    }
    let mut factors = match family.ends.gguf_factors {
        Factors::OfMiniCpm => {
            let (hidden, layers) = (keys.count("embedding_length")?, keys.count("block_count")?);
            [12.0, 1.4 / (layers as f32).sqrt(), hidden as f32 / 256.0]
        }
        Factors::OfGrok => [78.383_67, 1.0, 0.577_350_26],
        _ => [1.0; 3],
    };
    for (factor, name) in factors.iter_mut().zip(names) {
        if known.contains(&name) {
            *factor = keys.said_float(name)?.unwrap_or(*factor);
        }
    }
    if matches!(family.ends.gguf_factors, Factors::AllOfGranite | Factors::OfMiniCpm) {
        factors[2] = 1.0 / factors[2];
    }
    Ok(factors)
}

/// Returns the factor of queries that grows with the position, if there is one. For Llama 4, GGUF files have no keys for it.
fn temperature(
    keys: &Keys<'_>,
    family: &Family,
    layers: &[Layer],
) -> Result<Option<Temperature>, ModelError> {
    if let Some(chunks) = family.rotation.unrotated.and_then(Unrotated::chunks) {
        let has_chunks = layers.iter().any(|layer| layer.chunked);
        return Ok(has_chunks.then_some(chunks.temperature));
    }
    if !family.rotation.tempered {
        return Ok(None);
    }
    let Some(rate) = keys.said_float(TEMPERATURE)? else { return Ok(None) };
    let step = original_context(keys)? as f32;
    Ok(Some(Temperature { rate, step, first: 0, growth: Growth::WholeSteps }))
}

/// Returns the shapes of attention and the rotations, and writes the numbers of the shapes to the layers.
fn attention_and_ropes(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    layers: &mut [Layer],
) -> Result<(Vec<Attention>, Vec<Rope>), ModelError> {
    let attentions = attentions(catalog, keys, family, layers)?;
    let attends = |layer: &Layer| layer.mixer.attends();
    let first = layers.iter().position(attends).unwrap_or(0);
    let heads_norm = catalog.tensor(&format!("blk.{first}.attn_q_norm.weight")).is_some();
    let qk_norm = match family.attention.qk_norm {
        QkNorm::None if heads_norm => {
            return Err(ModelError::BadValue {
                key: format!("blk.{first}.attn_q_norm.weight"),
                value: "a tensor of the file".into(),
                expected: "forebay knows no norms of queries and keys for this family".into(),
            });
        }
        // Of the Llama 4 models, the one with 128 experts has no such norms. The file does not say it otherwise.
        QkNorm::Weightless { unrotated_too: false }
            if keys.optional_count("expert_count")? != Some(128) =>
        {
            QkNorm::Weightless { unrotated_too: false }
        }
        // The weights are the factor of queries and ones.
        QkNorm::Weightless { unrotated_too: true } if heads_norm => QkNorm::PerHead,
        // GLM-4.5-Air has no such norms, but GLM-4.5 does.
        usual if heads_norm => usual,
        _ => QkNorm::None,
    };
    let attentions: Vec<Attention> =
        attentions.into_iter().map(|attention| Attention { qk_norm, ..attention }).collect();
    let ropes = used(ropes(keys, family, layers, &attentions, catalog)?, layers);
    let indexer = indexer(keys, family, layers)?;
    let choices = choices(catalog, keys, family, layers.len())?;
    Ok(with_indexer(attentions, ropes, indexer, layers, (&choices, family)))
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
        if !layer.mixer.attends() {
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
    let length = |key: &str| {
        let [of_windows, usual] = [&format!("{key}_swa"), key].map(|key| keys.optional_count(key));
        Ok::<_, ModelError>(of_windows?.filter(|_| is_windowed).or(usual?))
    };
    let head_dim = length("attention.key_length")?.unwrap_or_else(usual);
    let kv_heads = keys.count_of_layer("attention.head_count_kv", layer)?.unwrap_or(heads).max(1);
    let softcap = keys.optional_float("attn_logit_softcapping")?;
    let has = |name: &str| catalog.tensor(&format!("blk.{layer}.{name}")).is_some();
    let [has_keys, has_values] = ["attn_k.weight", "attn_v.weight"].map(has);
    let grouped = Attention {
        heads,
        kv_heads,
        head_dim,
        value_dim: length("attention.value_length")?.unwrap_or(head_dim),
        scale: said_scale(keys)?.or(family.attention.scale).unwrap_or_else(|| {
            // The Gemma models with 27 billion parameters, recognised by their layer count, scale this way.
            let per_head = [("gemma2", 46), ("gemma3", 62)].contains(&(family.name, layers));
            1.0 / (if per_head { usual() } else { head_dim } as f32).sqrt()
        }),
        softcap: softcap.or(family.attention.softcap).filter(|cap| *cap != 0.0),
        sinks: family.attention.sinks || has("attn_sinks.weight"),
        output_norm: family.attention.output_norm,
        output_gate: output_gate(catalog, family, layer, heads),
        bias: bias(catalog, family, layer),
        clamp: match family.attention.clamps {
            true => keys.said_float(CLAMP)?,
            false => None,
        },
        qk_norm: family.attention.qk_norm,
        values: Values {
            of_keys: family.attention.keys_as_values && has_keys && !has_values,
            normed: family.attention.normed_values,
            scale: keys.said_float("attention.value_scale")?.unwrap_or(1.0),
        },
        relative: None,
        latent: None,
        indexer: None,
        shared: None,
    };
    match family.attention.latent {
        false => Ok(grouped),
        true => latent(catalog, keys, family, (layer, is_windowed), heads),
    }
}

/// Returns the factor of the scores, if the file says it. Grok has a key of its own for it.
fn said_scale(keys: &Keys<'_>) -> Result<Option<f32>, ModelError> {
    let key = "attention.scale";
    if keys.family != "grok" {
        return keys.said_float(key);
    }
    keys.only(key, &[0.0], "forebay knows attention.output_scale for this family")?;
    keys.said_float(OUTPUT_SCALE)
}

/// Returns the key that gives a length of layers with a window, or of others. Files have keys for windows only if they differ.
fn of_kind(keys: &Keys<'_>, key: &str, is_windowed: bool) -> String {
    let own = format!("{key}_swa");
    if is_windowed && keys.get(&own).is_some() { own } else { key.to_owned() }
}

/// Returns the shape of latent attention of a layer.
fn latent(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &Family,
    (layer, is_windowed): (usize, bool),
    heads: usize,
) -> Result<Attention, ModelError> {
    for (key, neutral) in
        [("attention.scale", 0.0), ("attention.value_scale", 1.0), ("attn_logit_softcapping", 0.0)]
    {
        keys.only(key, &[0.0, neutral], "forebay knows latent attention without it")?;
    }
    // Until 2025, converters wrote both matrices of a head into one tensor. The lengths in such files are those of a
    // head.
    let one_tensor = catalog.tensor(&format!("blk.{layer}.attn_k_b.weight")).is_none();
    let name = format!("blk.{layer}.attn_kv_b.weight");
    if one_tensor && catalog.tensor(&name).is_none() {
        return Err(ModelError::MissingTensor { name, family: family.name });
    }
    // Files say both the lengths of a head and those in latent space.
    keys.note(&["attention.key_length_mla", "attention.value_length_mla"]);
    keys.note(&["attention.key_length_swa", "attention.value_length_swa"]);
    let [key_length, value_length, rank] = match one_tensor {
        true => ["attention.key_length", "attention.value_length", "attention.kv_lora_rank"],
        false => {
            ["attention.key_length_mla", "attention.value_length_mla", "attention.kv_lora_rank"]
        }
    }
    .map(|key| of_kind(keys, key, is_windowed));
    let rotary = keys.count("rope.dimension_count")?;
    let length = keys.count(&key_length)?;
    let plain = length.checked_sub(rotary).ok_or_else(|| ModelError::BadValue {
        key: keys.path(&key_length),
        value: length.to_string(),
        expected: format!("{rotary} elements of it rotate"),
    })?;
    let latent = Latent {
        query_rank: keys.optional_count("attention.q_lora_rank")?.filter(|rank| *rank > 0),
        rank: keys.count(&rank)?,
        plain,
        rotary,
        value: match keys.optional_count(&value_length)? {
            Some(length) => length,
            // The converter of MiniCPM 3 writes none.
            None if one_tensor => keys.count("embedding_length")?.checked_div(heads).unwrap_or(0),
            None => return Err(keys.missing(&value_length)),
        },
        key_norm: family.attention.normed_rotary,
        rescaled: false,
    };
    let magnitude = latent_magnitude(keys, scaling(keys, family, catalog)?)?;
    let output_gate = output_gate(catalog, family, layer, heads);
    let sinks = family.attention.sinks;
    Ok(Attention { output_gate, sinks, ..latent.attention(heads, magnitude) })
}

/// Returns the rows of the embedding table. A file may have more rows than the tokenizer has tokens.
fn vocabulary(catalog: &Catalog, family: &Family) -> Result<usize, ModelError> {
    let embedding = catalog.tensor("token_embd.weight").ok_or(ModelError::MissingTensor {
        name: "token_embd.weight".into(),
        family: family.name,
    })?;
    Ok(embedding.shape.first().copied().unwrap_or(0) as usize)
}

/// Returns the gate of attention's output. A projection to gates has as many rows as there are heads if they gate whole heads.
fn output_gate(catalog: &Catalog, family: &Family, layer: usize, heads: usize) -> OutputGate {
    let projection = catalog.tensor(&format!("blk.{layer}.attn_gate.weight"));
    let rows = projection.and_then(|of| of.shape.first()).copied();
    match family.attention.output_gate {
        OutputGate::ByHead(function) if rows.is_some_and(|rows| rows != heads as u64) => {
            OutputGate::ByElement(function)
        }
        usual => usual,
    }
}

fn bias(catalog: &Catalog, family: &Family, first: usize) -> AttentionBias {
    let has = |name: &str| catalog.tensor(&format!("blk.{first}.{name}")).is_some();
    let fused = has("attn_qkv.bias");
    if has("attn_output.bias") {
        AttentionBias::All
    } else if family.attention.qkv_bias || has("attn_q.bias") || has("attn_qkv.bias") || fused {
        AttentionBias::Qkv
    } else {
        AttentionBias::None
    }
}
