//! Reads a description from GGUF metadata. Keys: the GGUF specification, "LLM" section.

use forebay_compute::RopeScaling;
use forebay_format::{Catalog, GgufMetadata};

use super::families::{self, Family};
use super::{Architecture, Attention, AttentionBias, Experts, FeedForward, Layer, Naming, Rope};
use crate::ModelError;

/// Keys of one architecture, `ARCH.key`.
struct Keys<'a> {
    metadata: &'a GgufMetadata,
    architecture: &'a str,
    family: &'static str,
}

impl Keys<'_> {
    fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    fn missing(&self, key: &str) -> ModelError {
        ModelError::MissingKey {
            source_name: "the GGUF metadata".into(),
            key: self.path(key),
            family: self.family,
        }
    }

    fn optional_count(&self, key: &str) -> Result<Option<usize>, ModelError> {
        let path = self.path(key);
        let Some(value) = self.metadata.get(&path) else { return Ok(None) };
        let bad = |value: String| ModelError::BadValue {
            key: path.clone(),
            value,
            expected: "it must be one whole number, the same for all layers".into(),
        };
        let number = match value.as_u64() {
            Some(number) => number,
            // Some converters write one value per layer; equal values are one value.
            None => match value.as_array().and_then(|array| array.to_u64s()) {
                Some(list) if !list.is_empty() && list.iter().all(|item| *item == list[0]) => {
                    list[0]
                }
                _ => return Err(bad(value.describe())),
            },
        };
        usize::try_from(number).map(Some).map_err(|_| bad(number.to_string()))
    }

    fn count(&self, key: &str) -> Result<usize, ModelError> {
        self.optional_count(key)?.ok_or_else(|| self.missing(key))
    }

    fn optional_float(&self, key: &str) -> Option<f32> {
        self.metadata.f32(&self.path(key))
    }
}

/// Describes the model of a GGUF file.
pub fn describe(catalog: &Catalog, metadata: &GgufMetadata) -> Result<Architecture, ModelError> {
    let name = metadata.architecture().ok_or(ModelError::MissingKey {
        source_name: "the GGUF metadata".into(),
        key: "general.architecture".into(),
        family: "a",
    })?;
    let has_experts = metadata.u64(&format!("{name}.expert_count")).is_some_and(|count| count > 0);
    let family = families::from_gguf(name, has_experts).ok_or_else(|| {
        ModelError::UnknownArchitecture { name: name.into(), known: families::known_list() }
    })?;
    let keys = Keys { metadata, architecture: name, family: family.name };
    let hidden = keys.count("embedding_length")?;
    let heads = keys.count("attention.head_count")?;
    let head_dim = match keys.optional_count("attention.key_length")? {
        Some(dim) => dim,
        None => hidden.checked_div(heads).unwrap_or(0),
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
        attention: Attention {
            heads,
            kv_heads: keys.optional_count("attention.head_count_kv")?.unwrap_or(heads).max(1),
            head_dim,
            bias: bias(catalog, family),
            qk_norm: family.qk_norm,
        },
        rope: rope(&keys, family, head_dim, catalog)?,
        layers: layers(catalog, &keys, family)?,
        tied_embeddings: catalog.tensor("output.weight").is_none(),
        naming: Naming::Gguf,
    })
}

/// Rows of the embedding table: files may carry more rows than the tokenizer has tokens.
fn vocabulary(catalog: &Catalog, family: &Family) -> Result<usize, ModelError> {
    let embedding = catalog.tensor("token_embd.weight").ok_or(ModelError::MissingTensor {
        name: "token_embd.weight".into(),
        family: family.name,
    })?;
    Ok(embedding.shape.first().copied().unwrap_or(0) as usize)
}

fn bias(catalog: &Catalog, family: &Family) -> AttentionBias {
    if catalog.tensor("blk.0.attn_output.bias").is_some() {
        AttentionBias::All
    } else if family.qkv_bias || catalog.tensor("blk.0.attn_q.bias").is_some() {
        AttentionBias::Qkv
    } else {
        AttentionBias::None
    }
}

fn rope(
    keys: &Keys<'_>,
    family: &Family,
    head_dim: usize,
    catalog: &Catalog,
) -> Result<Rope, ModelError> {
    let rotary_dim = keys.optional_count("rope.dimension_count")?.unwrap_or(head_dim);
    let kind = keys.metadata.str(&keys.path("rope.scaling.type"));
    let factor = keys.optional_float("rope.scaling.factor");
    let scaling = match kind {
        _ if catalog.tensor("rope_freqs.weight").is_some() => RopeScaling::None,
        None | Some("none") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor.map_or(1.0, f64::from) },
        Some(other) => {
            return Err(ModelError::BadValue {
                key: keys.path("rope.scaling.type"),
                value: other.into(),
                expected: "forebay knows none, linear and rope_freqs for this family".into(),
            });
        }
    };
    let theta = keys.optional_float("rope.freq_base").map_or(10_000.0, f64::from);
    Ok(Rope { theta, rotary_dim, layout: family.gguf_rope, scaling })
}

fn layers(
    catalog: &Catalog,
    keys: &Keys<'_>,
    family: &'static Family,
) -> Result<Vec<Layer>, ModelError> {
    let count = keys.count("block_count")?;
    // A layer has tensors, so a count above the number of tensors is damage, not a model.
    if count > catalog.tensors().len() {
        return Err(ModelError::BadValue {
            key: keys.path("block_count"),
            value: count.to_string(),
            expected: format!("the file has only {} tensors", catalog.tensors().len()),
        });
    }
    (0..count)
        .map(|index| {
            let routed = catalog.tensor(&format!("blk.{index}.ffn_gate_inp.weight")).is_some();
            let feed_forward = if routed && family.experts {
                FeedForward::Experts(experts(keys, family)?)
            } else {
                FeedForward::Dense { width: keys.count("feed_forward_length")? }
            };
            Ok(Layer { window: None, feed_forward })
        })
        .collect()
}

fn experts(keys: &Keys<'_>, family: &Family) -> Result<Experts, ModelError> {
    let width = match keys.optional_count("expert_feed_forward_length")? {
        Some(width) => width,
        None => keys.count("feed_forward_length")?,
    };
    let renormalise =
        keys.metadata.bool(&keys.path("expert_weights_norm")).unwrap_or(family.renormalise);
    Ok(Experts {
        count: keys.count("expert_count")?,
        used: keys.count("expert_used_count")?,
        width,
        renormalise,
        scale: keys
            .optional_float("expert_weights_scale")
            .filter(|scale| *scale != 0.0)
            .unwrap_or(1.0),
    })
}
