//! Reads an architecture from a Hugging Face `config.json`. Supports the form of published models and the one that
//! transformers 5 writes (`rope_parameters` instead of `rope_scaling`).

use forebay_compute::{Growth, Temperature};
use forebay_format::{Catalog, HfMetadata};
use serde_json::Value;

use super::architecture::{
    Architecture, FeedForward, Gatings, Layer, LayerEmbeddings, Mixer, Naming, QkNorm,
};
use super::check::check;
use super::config::{Config, short};
use super::deepseek4::of_config;
use super::families;
use super::family::{Factors, Family};
use super::feed_forward_width::{cut, feed_forward_width};
use super::head::is_tied;
use super::huggingface_attention::attention;
use super::huggingface_experts::{experts, has_count, is_by_token, is_sparse, output_multiplier};
use super::huggingface_indexer::{choices, indexer};
use super::huggingface_recurrent::{OneBlock, is_recurrent, one_blocks, recurrent};
use super::huggingface_rotation::rotates;
use super::huggingface_variants::{SHARED_MLP, gating, refuse_variants};
use super::huggingface_windows::window;
use super::indexer::with_indexer;
use super::layers::{keys_of, limited, temper, used};
use super::multipliers::Multipliers;
use super::ngrams::ngrams;
use super::quantization::{Method, Quantization};
use super::roots::naming;
use super::rope_parameters::Parameters;
use super::unrotated::Unrotated;
use super::{norms, streams};
use crate::ModelError;

/// Keys about experts that classes of configurations write for models without experts, too.
const KEYS_OF_EXPERTS: [&str; 12] = [
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
];

/// Keys of the width of dense feed-forwards.
const WIDTHS: [&str; 4] = [
    "intermediate_size_mlp",
    "dense_intermediate_size",
    "prefix_dense_intermediate_size",
    "intermediate_size",
];

/// Describes the model of a Hugging Face folder.
pub fn describe(catalog: &Catalog, metadata: &HfMetadata) -> Result<Architecture, ModelError> {
    // A multimodal model has the language model's description in `text_config`.
    let json = metadata.config.get("text_config").filter(|inner| !inner.is_null());
    let json = json.unwrap_or(&metadata.config);
    let model_type = json.get("model_type").and_then(Value::as_str).unwrap_or("");
    let family = families::from_huggingface(model_type).ok_or_else(|| {
        let name =
            if model_type.is_empty() { "(config.json has no model_type)" } else { model_type };
        families::unknown_huggingface(name)
    })?;
    expect_quantization(&metadata.config, family)?;
    let whole = Config::new(&metadata.config, family.name);
    let inner = whole.object("text_config")?;
    let config = inner.as_ref().unwrap_or(&whole);
    let architecture = of_language_model(catalog, [&whole, config], family)?;
    if architecture.layers.iter().all(|layer| layer.experts() == 0) {
        [&whole, config].iter().for_each(|config| config.note(&KEYS_OF_EXPERTS));
    }
    // HunYuan-VL says it beside the description of its language model.
    if let (Some(_), Some(said)) = (&inner, whole.flag("use_qk_norm")?) {
        let has = architecture.attentions.iter().all(|of| of.qk_norm != QkNorm::None);
        check("use_qk_norm", said, said == has, "forebay knows the other value for this model")?;
    }
    whole.finish()?;
    Ok(architecture)
}

/// Describes a model by its whole configuration and the part about the language model.
fn of_language_model(
    catalog: &Catalog,
    levels: [&Config<'_>; 2],
    family: &'static Family,
) -> Result<Architecture, ModelError> {
    let [_, config] = levels;
    refuse_variants(config, family)?;
    let gating = gating(config, family)?;
    let naming = naming(catalog, family);
    let hidden = config.count("hidden_size")?;
    let (mut attentions, ropes, mut layers) = match family.attention.compressed {
        true => {
            let mut layers = layers(catalog, config, family, naming, 1)?;
            let (attentions, ropes) = of_config(config, &layers)?.describe(&mut layers);
            (attentions, ropes, layers)
        }
        false => {
            let (attentions, ropes) = attention(catalog, config, family, naming)?;
            let mut layers = layers(catalog, config, family, naming, attentions.len())?;
            let choices = choices(config, family, &layers)?;
            let (indexer, ropes) = (indexer(config, family)?, used(ropes, &layers));
            let of_layers = (&choices[..], family);
            let (attentions, ropes) =
                with_indexer(attentions, ropes, indexer, &mut layers, of_layers);
            (attentions, ropes, layers)
        }
    };
    let multipliers = Multipliers::of(config)?;
    multipliers.apply(&mut attentions, &layers)?;
    let by_ratio = ratio_temperature(config, family)?;
    if let Some(gatings) = family.gatings(gating) {
        layers.iter_mut().for_each(|layer| layer.gatings = Some(gatings));
    }
    let temperature = match family.rotation.unrotated.and_then(Unrotated::chunks) {
        Some(chunks) => chunks.temperature(config)?,
        None if family.rotation.tempered => Parameters::of(config, None)?.temperature()?,
        None => by_ratio,
    };
    if by_ratio.is_some() {
        layers.iter_mut().for_each(|layer| layer.tempered = layer.window.is_none());
    } else if temperature.is_some() {
        temper(&mut layers, family.rotation.tempered);
    }
    let [embedding_factor, residual_scale, logit_divisor] = factors(config, family)?;
    let residual_scale = residual_scale * multipliers.residual();
    let (norm_form, norm_epsilon) = norms::of_config(config, family)?;
    let logit_softcap = config.float_or("final_logit_softcapping", family.ends.logit_softcap)?;
    let post_norm_epsilon =
        config.float_or("post_norm_eps", family.layers.post_norm_epsilon)?.unwrap_or(norm_epsilon);
    let width_scale = config.float_or("logits_mup_width_multiplier", family.ends.width_scale)?;
    Ok(Architecture {
        family: family.name,
        name: config.text("_name_or_path")?.map(str::to_owned),
        hidden,
        embedding_rows: config.count("vocab_size")?,
        vocabulary: match config.optional_count("unpadded_vocab_size")? {
            Some(rows) => rows,
            None => config.count("vocab_size")?,
        },
        context_trained: config.first_count(&["max_position_embeddings", "model_max_length"])?,
        norm_epsilon,
        post_norm_epsilon,
        norms: norms::layout(family, config.flag("use_parallel_residual")?)?,
        norm_form,
        streams: streams::of_huggingface(config, family)?,
        embedding_scale: embedding_scale(config, family)? * embedding_factor / residual_scale,
        embedding_norm: family.ends.embedding_norm,
        residual_scale,
        feed_forward_input_scale: multipliers.feed_forward_input(),
        normed_residual: match family.layers.normed_residual {
            true => Some(normed_residual(config)?),
            false => None,
        },
        residual_gates: match family.layers.gated_residuals {
            true => config.float_or("residual_gate_temperature", Some(0.3))?,
            false => None,
        },
        convolutions: match family.layers.convolutions {
            true => Some(config.first_count(&["conv_kernel_size", "sconv_kernel_size"])?),
            false => None,
        },
        feed_forward_scales: family.layers.feed_forward_scales,
        logit_scale: output_multiplier(config, family)?
            * config.float("lm_head_multiplier")?.map_or(1.0, |factor| factor as f32)
            / (logit_divisor * width_scale.unwrap_or(1.0)),
        layer_scales: family.layers.scales,
        layer_embeddings: layer_embeddings(config)?,
        ngrams: ngrams(config)?,
        logit_softcap,
        attentions,
        ropes,
        temperature,
        recurrent: family
            .recurrence
            .rule
            .map(|rule| recurrent(config, family, rule, &multipliers))
            .transpose()?,
        gating,
        layers,
        mtp: None,
        tied_embeddings: is_tied(levels, family, catalog, naming)?,
        naming,
    })
}

/// Returns the factor of queries and biases by distance in layers without a window, if it grows with the position.
fn ratio_temperature(
    config: &Config<'_>,
    family: &Family,
) -> Result<Option<Temperature>, ModelError> {
    if !family.attention.relative {
        return Ok(None);
    }
    let rate = config.float("log_scaling_alpha")?.unwrap_or(0.1) as f32;
    let floor = config.float("log_scaling_n_floor")?;
    Ok(floor.map(|step| Temperature { rate, step: step as f32, first: 1, growth: Growth::Ratio }))
}

/// Returns the factors of embeddings and of outputs added to the residual stream, and the divisor of logits.
fn factors(config: &Config<'_>, family: &Family) -> Result<[f32; 3], ModelError> {
    let factor =
        |key: &str, usual: f64| Ok::<_, ModelError>(config.float(key)?.unwrap_or(usual) as f32);
    if family.ends.gguf_factors != Factors::OfMiniCpm {
        let keys = ["embedding_multiplier", "residual_multiplier", "logits_scaling"];
        let [embedding, residual, logits] = keys.map(|key| factor(key, 1.0));
        return Ok([embedding?, residual?, logits?]);
    }
    let root = (config.count("num_hidden_layers")? as f64).sqrt() as f32;
    let hidden = config.count("hidden_size")? as f64;
    // Null means no factor, and no key the published one.
    let or_neutral = |key: &str, usual: f64, neutral: f64| {
        let is_null = config.get(key).is_some_and(Value::is_null);
        factor(key, if is_null { neutral } else { usual })
    };
    Ok([
        factor("scale_emb", 12.0)?,
        or_neutral("scale_depth", 1.4, root.into())? / root,
        hidden as f32 / or_neutral("dim_model_base", 256.0, hidden)?,
    ])
}

/// Returns the factor of the normed rows to which blocks add their outputs. Configurations give one for each kind of blocks, in the
/// published form or in that of transformers 5, and a factor of the outputs.
fn normed_residual(config: &Config<'_>) -> Result<f32, ModelError> {
    // Models with shared experts are refused.
    config.note(&["shared_moe_mode"]);
    let mut found = None;
    for (published, own) in
        [("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp")]
    {
        let factor = |what: &str| {
            let keys = [format!("layernorm_{published}_{what}"), format!("{own}_{what}_factor")];
            let said = config.first_float(&keys.each_ref().map(String::as_str))?;
            Ok::<_, ModelError>((keys, said.unwrap_or(1.0)))
        };
        let ([key, _], beta) = factor("beta")?;
        check(&key, beta, beta == 1.0, "forebay knows 1")?;
        let ([key, _], alpha) = factor("alpha")?;
        let expected = "forebay knows the same factor for all kinds of blocks";
        check(&key, alpha, *found.get_or_insert(alpha) == alpha, expected)?;
    }
    Ok(found.unwrap_or(1.0) as f32)
}

/// Returns the embeddings of tokens for each layer, if there are any.
fn layer_embeddings(config: &Config<'_>) -> Result<Option<LayerEmbeddings>, ModelError> {
    let tokens = match config.optional_count("vocab_size_per_layer_input")? {
        Some(tokens) => tokens,
        None => config.count("vocab_size")?,
    };
    let width = config.optional_count("hidden_size_per_layer_input")?.filter(|width| *width > 0);
    Ok(width.map(|width| LayerEmbeddings { width, tokens }))
}

/// Returns the factor of embeddings that the family has. Trinity's configurations have a flag for it, which is false if it is absent.
fn embedding_scale(config: &Config<'_>, family: &Family) -> Result<f32, ModelError> {
    const FLAG: &str = "mup_enabled";
    let said = config.flag(FLAG)?;
    let is_said = family.name == "afmoe";
    check(FLAG, true, is_said || said != Some(true), "forebay knows it for Trinity only")?;
    match is_said && said != Some(true) {
        true => Ok(1.0),
        false => Ok(family.embedding_scale(config.count("hidden_size")?)),
    }
}

/// Returns the gatings of a layer with limits of its own.
fn gatings(
    config: &Config<'_>,
    family: &Family,
    layer: usize,
) -> Result<Option<Gatings>, ModelError> {
    if !family.feed_forward.limits_by_layer {
        return Ok(None);
    }
    let limit = |key: &str| {
        let Some(list) = config.list(key)? else { return Ok(0.0) };
        // Null stands for none, too.
        match list.get(layer).map(|limit| (limit.is_null(), limit.as_f64())) {
            Some((true, _)) => Ok(0.0),
            Some((_, Some(limit))) => Ok(limit as f32),
            _ => Err(ModelError::BadValue {
                key: format!("{key} of layer {layer}"),
                value: list.get(layer).map_or("none".into(), short),
                expected: "it must be a number".into(),
            }),
        }
    };
    Ok(Some(limited([limit("swiglu_limits")?, limit("swiglu_limits_shared")?])))
}

/// Refuses forms of quantised weights that forebay does not know, for this family or for all.
fn expect_quantization(config: &Value, family: &Family) -> Result<(), ModelError> {
    let quantization = Quantization::of_config(config)?;
    match quantization.map(|how| how.method == Method::Mxfp4) {
        Some(is_mxfp4) if is_mxfp4 != family.feed_forward.bias => Err(ModelError::BadValue {
            key: "quantization_config.quant_method".into(),
            value: config["quantization_config"]["quant_method"].to_string(),
            expected: "forebay reads mxfp4 for gpt-oss, and other forms for other families; convert the model to GGUF"
                .into(),
        }),
        _ => Ok(()),
    }
}

fn layers(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    naming: Naming,
    shapes: usize,
) -> Result<Vec<Layer>, ModelError> {
    let blocks = if family.layers.one_block { Some(one_blocks(config)?) } else { None };
    let count = match &blocks {
        Some(blocks) => blocks.len(),
        None => config.first_count(&["num_hidden_layers", "num_layers"])?,
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
    config.note(&["use_double_wide_mlp", "intermediate_size"]);
    let shared = config.optional_count("num_kv_shared_layers")?.unwrap_or(0);
    let with_keys = count.saturating_sub(shared);
    let of = family.feed_forward;
    let with_experts = of.experts && (!of.dense_too || has_count(config));
    (0..count)
        .map(|index| {
            if let Some(blocks) = &blocks {
                return one_block_layer(catalog, config, family, naming, (index, blocks[index]));
            }
            let all = family.attention.compressed;
            let feed_forward = if with_experts && (all || is_sparse(config, index)?) {
                let by_token = is_by_token(config, index)?;
                let of = experts(catalog, config, family, naming, index)?;
                FeedForward::Experts(of.chosen_by_token(by_token))
            } else {
                let keys = match family.feed_forward.shared_mlp {
                    true => &[SHARED_MLP][..],
                    false => &WIDTHS[..],
                };
                let width = feed_forward_width(config, family, keys)?;
                let is_wide = index >= with_keys && config.is_set("use_double_wide_mlp")?;
                let width = if is_wide { width.saturating_mul(2) } else { width };
                FeedForward::Dense { width, cut: cut(config, family, index)? }
            };
            let window = windows[index];
            let keys_of = keys_of(&windows, with_keys, index)?;
            let mixer = match family.recurrence.rule {
                Some(_) if family.recurrence.beside_attention => Mixer::AttentionAndRecurrent,
                Some(_) if is_recurrent(config, index)? => Mixer::Recurrent,
                _ => Mixer::Attention,
            };
            let rope = family.rope_of(window, rotates(config, family)?);
            let attention = usize::from(shapes > 1 && window.is_some());
            let gatings = gatings(config, family, index)?;
            let layer = Layer {
                mixer,
                window,
                chunked: false,
                attention,
                keys_of,
                rope,
                tempered: false,
                gatings,
                feed_forward,
            };
            match family.rotation.unrotated {
                Some(unrotated) => unrotated.of_config(config, layer, (index, &windows)),
                None => Ok(layer),
            }
        })
        .collect()
}

/// Returns a layer that is only one block.
fn one_block_layer(
    catalog: &Catalog,
    config: &Config<'_>,
    family: &'static Family,
    naming: Naming,
    (index, block): (usize, OneBlock),
) -> Result<Layer, ModelError> {
    let (mixer, feed_forward) = match block {
        OneBlock::Recurrent => (Mixer::Recurrent, FeedForward::None),
        OneBlock::Attention => (Mixer::Attention, FeedForward::None),
        OneBlock::Dense => {
            let width = config.count("intermediate_size")?;
            (Mixer::None, FeedForward::Dense { width, cut: None })
        }
        OneBlock::Experts => {
            let of = experts(catalog, config, family, naming, index)?;
            (Mixer::None, FeedForward::Experts(of))
        }
    };
    let rope = family.rope_of(None, rotates(config, family)?);
    Ok(Layer::one_block(mixer, feed_forward, rope))
}
