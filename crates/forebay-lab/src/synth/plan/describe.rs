//! Metadata of a shape.

use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{Array, FormatError};

use super::super::recipe::Recipe;
use super::super::shapes::{
    Experts, FeedForward, GatedDelta, Pattern, Pools, Recurrent, RopeScaling, Scores, Shape,
    SharedKeys, Streams,
};

/// Writes the keys that describe `shape` with `layers` layers, without those of the tokenizer.
pub fn describe(
    shape: &Shape,
    recipe: &Recipe,
    layers: u32,
    writer: &mut GgufWriter,
) -> Result<(), FormatError> {
    let architecture = shape.architecture;
    let key = |name: &str| format!("{architecture}.{name}");
    writer.set("general.architecture", architecture)?;
    writer.set("general.type", "model")?;
    writer.set("general.name", format!("{} shape, random weights", shape.name).as_str())?;
    writer.set("general.file_type", recipe.file_type)?;
    writer.set("general.quantization_version", 2u32)?;
    writer.set(&key("block_count"), layers + u32::from(shape.writes_mtp))?;
    if shape.writes_mtp {
        writer.set(&key("nextn_predict_layers"), 1u32)?;
    }
    writer.set(&key("context_length"), shape.context)?;
    writer.set(&key("embedding_length"), shape.hidden)?;
    match shape.pattern {
        Pattern::OneBlock(_) => {
            let width = |layer| u32::from(shape.has_feed_forward(layer)) * shape.dense_width();
            writer.set(&key("feed_forward_length"), by_layer(layers, width))?;
        }
        _ => writer.set(&key("feed_forward_length"), shape.dense_width())?,
    }
    match shape.windowed {
        Some(_) => {
            let heads = by_layer(layers, |layer| shape.heads_of(layer));
            writer.set(&key("attention.head_count"), heads)?;
        }
        None => writer.set(&key("attention.head_count"), shape.heads)?,
    }
    describe_heads(shape, layers, writer)?;
    writer.set(&key("attention.layer_norm_rms_epsilon"), shape.norm_epsilon)?;
    if let Some(Recurrent::Mamba(_)) = shape.recurrent {
        // Published files of Nemotron-H have both, and other programs ask for this one.
        writer.set(&key("attention.layer_norm_epsilon"), shape.norm_epsilon)?;
    }
    writer.set(&key("vocab_size"), shape.vocabulary)?;
    if let Some(window) = shape.window {
        writer.set(&key("attention.sliding_window"), window)?;
    }
    if let Some(cap) = shape.logit_cap {
        writer.set(&key("final_logit_softcapping"), cap)?;
    }
    describe_latent(shape, layers, writer)?;
    if let Some(of) = &shape.shared_keys {
        describe_shared_keys(shape, of, layers, writer)?;
    }
    describe_recurrent(shape, layers, writer)?;
    describe_residual(shape, layers, writer)?;
    describe_rope(shape, writer)?;
    if let FeedForward::Experts(experts) = &shape.feed_forward {
        describe_experts(shape, experts, writer)?;
    }
    Ok(())
}

/// Returns a list with a number for each layer.
fn by_layer(layers: u32, number: impl Fn(u32) -> u32) -> Array {
    Array::I32((0..layers).map(|layer| number(layer) as i32).collect())
}

fn describe_heads(shape: &Shape, layers: u32, writer: &mut GgufWriter) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.attention.{name}", shape.architecture);
    let head_dim = shape.full_attention.map_or(shape.head_dim, |full| full.head_dim);
    let [kv_heads, key_length, value_length] = match shape.latent_attention {
        None => [shape.kv_heads, head_dim, head_dim],
        Some(latent) if latent.one_tensor => {
            [shape.heads, latent.unrotated + latent.rotated, latent.value]
        }
        Some(latent) => [shape.kv_heads, shape.head_dim, latent.latent],
    };
    // A gated delta network has a key for the period of attention instead.
    let differ = match shape.recurrent {
        None => shape.full_attention.is_some(),
        Some(Recurrent::Delta(_)) => false,
        Some(Recurrent::ChannelDelta(_) | Recurrent::Mamba(_)) => true,
    };
    if differ {
        let kv_heads = |layer| match shape.full_attention_of(layer) {
            Some(full) => full.kv_heads,
            None => u32::from(shape.has_attention(layer)) * kv_heads,
        };
        writer.set(&key("head_count_kv"), by_layer(layers, kv_heads))?;
    } else {
        writer.set(&key("head_count_kv"), kv_heads)?;
    }
    writer.set(&key("key_length"), key_length)?;
    writer.set(&key("value_length"), value_length)?;
    if shape.full_attention.is_some() {
        writer.set(&key("key_length_swa"), shape.head_dim)?;
        writer.set(&key("value_length_swa"), shape.head_dim)?;
        writer.set(&key("shared_kv_layers"), 0u32)?;
        let slides = (0..layers).map(|layer| shape.full_attention_of(layer).is_none());
        writer.set(&key("sliding_window_pattern"), Array::Bool(slides.collect()))?;
        // The mixture has no embeddings for each layer, and its published files say so.
        let key = format!("{}.embedding_length_per_layer_input", shape.architecture);
        writer.set(&key, 0u32)?;
    }
    Ok(())
}

fn describe_latent(shape: &Shape, layers: u32, writer: &mut GgufWriter) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.attention.{name}", shape.architecture);
    if let Some(latent) = shape.latent_attention {
        if latent.query_rank > 0 {
            writer.set(&key("q_lora_rank"), latent.query_rank)?;
        }
        writer.set(&key("kv_lora_rank"), latent.latent)?;
        if !latent.one_tensor {
            writer.set(&key("key_length_mla"), latent.unrotated + latent.rotated)?;
            writer.set(&key("value_length_mla"), latent.value)?;
        }
    }
    if let Some(indexer) = shape.indexer {
        writer.set(&key("indexer.head_count"), indexer.heads)?;
        writer.set(&key("indexer.key_length"), indexer.head_dim)?;
        writer.set(&key("indexer.top_k"), indexer.chosen)?;
        match indexer.pools {
            Pools::Keys => {}
            Pools::Gated(length) => {
                writer.set(&key("indexer.kpool"), length)?;
                writer.set(&key("indexer.kpool_select_tail"), true)?;
                writer.set(&key("indexer.types"), Array::Bool(vec![true; layers as usize]))?;
            }
            Pools::Mean(length) => {
                let ratio = |layer| u32::from(shape.has_attention(layer)) * length;
                writer.set(&key("compress_ratios"), by_layer(layers, ratio))?;
            }
        }
    }
    Ok(())
}

/// Writes the keys of residual streams, of embeddings of n-grams and of limits.
fn describe_residual(
    shape: &Shape,
    layers: u32,
    writer: &mut GgufWriter,
) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.{name}", shape.architecture);
    match shape.streams {
        None => {}
        Some(Streams::Mixed(count)) => {
            writer.set(&key("hyper_connection.count"), count)?;
            writer.set(&key("hyper_connection.sinkhorn_iterations"), 20u32)?;
            writer.set(&key("hyper_connection.epsilon"), 1e-6f32)?;
        }
        Some(Streams::Gated { count, rank }) => {
            writer.set(&key("hyper_connection.count"), count)?;
            writer.set(&key("hyper_connection.low_rank"), rank)?;
        }
        Some(Streams::Bank(every)) => writer.set(&key("attn_res.block_size"), every)?,
    }
    if let Some(limit) = shape.experts_limit {
        for name in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
            writer.set(&key(name), Array::F32(vec![limit; layers as usize]))?;
        }
    }
    if let Some((limit, up_limit)) = shape.soft_limits {
        writer.set(&key("activation.situ_beta"), limit)?;
        writer.set(&key("activation.situ_linear_beta"), up_limit)?;
    }
    let Some(of) = shape.ngrams else { return Ok(()) };
    for (name, value) in [
        ("ple.ngram_size", of.size),
        ("ple.heads_per_ngram", of.hashes),
        ("ple.conv_kernel", of.convolution),
        ("ple.eos_token_id", shape.vocabulary - 1),
        ("embedding_length_per_layer_input", of.row()),
    ] {
        writer.set(&key(name), value)?;
    }
    writer.set(&key("ple.layers"), Array::I32(vec![of.layer as i32]))?;
    // Odd numbers whose products with tokens stay below 2^63. Their seed is that of published files, and nothing
    // depends on it.
    let mut random = fastrand::Rng::with_seed(1234);
    let bound = (i64::MAX as u64 / u64::from(shape.vocabulary)) / 2;
    let multipliers = (0..of.size).map(|_| 2 * random.u64(..bound) + 1);
    writer.set(&key("ple.layer_multipliers"), Array::U64(multipliers.collect()))?;
    let rows = of.table_rows((layers, shape.layers));
    let firsts = rows.iter().scan(0u64, |sum, rows| {
        let first = *sum;
        *sum += rows;
        Some(first)
    });
    writer.set(&key("ple.head_offsets"), Array::U64(firsts.collect()))?;
    writer.set(&key("ple.head_vocab_sizes"), Array::U64(rows))
}

fn describe_shared_keys(
    shape: &Shape,
    of: &SharedKeys,
    layers: u32,
    writer: &mut GgufWriter,
) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.{name}", shape.architecture);
    writer.set(&key("attention.q_lora_rank"), of.query_rank)?;
    writer.set(&key("attention.output_group_count"), of.output_groups)?;
    writer.set(&key("attention.output_lora_rank"), of.output_rank)?;
    let ratios = by_layer(layers, |layer| of.ratio(layer));
    writer.set(&key("attention.compress_ratios"), ratios)?;
    writer.set(&key("attention.compress_rope_freq_base"), of.rope_base)?;
    writer.set(&key("hyper_connection.count"), of.streams)?;
    writer.set(&key("hyper_connection.sinkhorn_iterations"), 20u32)?;
    writer.set(&key("hyper_connection.epsilon"), 1e-6f32)?;
    writer.set(&key("hash_layer_count"), of.hashed_layers)?;
    writer.set(&key("embedding_length_out"), of.streams * shape.hidden)?;
    for name in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
        writer.set(&key(name), Array::F32(vec![of.limit; layers as usize]))?;
    }
    Ok(())
}

fn describe_recurrent(
    shape: &Shape,
    layers: u32,
    writer: &mut GgufWriter,
) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.{name}", shape.architecture);
    match shape.recurrent {
        None => {}
        Some(Recurrent::Delta(delta)) => {
            for (name, value) in [
                ("ssm.conv_kernel", delta.convolution),
                ("ssm.state_size", delta.key_dim),
                ("ssm.group_count", delta.key_heads),
                ("ssm.time_step_rank", delta.value_heads),
                ("ssm.inner_size", delta.value_heads * delta.value_dim),
            ] {
                writer.set(&key(name), value)?;
            }
        }
        Some(Recurrent::ChannelDelta(delta)) => {
            writer.set(&key("ssm.conv_kernel"), delta.convolution)?;
            writer.set(&key("kda.head_dim"), delta.head_dim)?;
            if let Some(bound) = delta.bound {
                writer.set(&key("kda.gate_lower_bound"), bound)?;
            }
        }
        Some(Recurrent::Mamba(mamba)) => {
            for (name, value) in [
                ("ssm.conv_kernel", mamba.convolution),
                ("ssm.state_size", mamba.state),
                ("ssm.group_count", mamba.groups),
                ("ssm.time_step_rank", mamba.heads),
                ("ssm.inner_size", mamba.heads * mamba.head_dim),
            ] {
                writer.set(&key(name), value)?;
            }
        }
    }
    match (shape.recurrent, shape.pattern) {
        (Some(Recurrent::Delta(_)), Pattern::AttentionEvery(period)) => {
            if shape.streams.is_some() {
                let recurrent = (0..layers).map(|layer| shape.recurrent_of(layer).is_some());
                let flags = Array::Bool(recurrent.collect());
                writer.set(&key("attention.recurrent_layers"), flags)?;
            }
            writer.set(&key("full_attention_interval"), period)
        }
        _ => Ok(()),
    }
}

fn describe_rope(shape: &Shape, writer: &mut GgufWriter) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.rope.{name}", shape.architecture);
    writer.set(&key("freq_base"), shape.rope_base)?;
    match shape.full_attention {
        None => {
            writer.set(&key("dimension_count"), shape.rotary_dim)?;
            if shape.windowed.is_some() {
                writer.set(&key("dimension_count_swa"), shape.head_dim)?;
            }
        }
        Some(full) => {
            writer.set(&key("dimension_count"), full.head_dim)?;
            writer.set(&key("dimension_count_swa"), shape.rotary_dim)?;
        }
    }
    if let Some(Recurrent::Delta(GatedDelta { one_tensor: false, .. })) = shape.recurrent {
        // Pairs of elements that rotate by the position in time, by row and by column of an image. Other programs ask for them.
        let pairs = shape.rotary_dim as i32 / 2;
        let column = pairs / 3;
        let row = (pairs - column) / 2;
        let sections = vec![pairs - row - column, row, column, 0];
        writer.set(&key("dimension_sections"), Array::I32(sections))?;
    }
    if let Some(base) = shape.rope_base_windowed {
        writer.set(&key("freq_base_swa"), base)?;
    }
    match shape.rope_scaling {
        RopeScaling::None | RopeScaling::Llama(_) | RopeScaling::Proportional { .. } => Ok(()),
        RopeScaling::Linear { factor } => {
            writer.set(&key("scaling.type"), "linear")?;
            writer.set(&key("scaling.factor"), factor)
        }
        RopeScaling::Yarn { factor, original_context, log_multiplier } => {
            writer.set(&key("scaling.type"), "yarn")?;
            writer.set(&key("scaling.factor"), factor)?;
            writer.set(&key("scaling.original_context_length"), original_context)?;
            writer.set(&key("scaling.yarn_beta_fast"), 32.0f32)?;
            writer.set(&key("scaling.yarn_beta_slow"), 1.0f32)?;
            log_multiplier.map_or(Ok(()), |multiplier| {
                writer.set(&key("scaling.yarn_log_multiplier"), multiplier)
            })
        }
    }
}

fn describe_experts(
    shape: &Shape,
    experts: &Experts,
    writer: &mut GgufWriter,
) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.{name}", shape.architecture);
    writer.set(&key("expert_count"), experts.experts)?;
    writer.set(&key("expert_used_count"), experts.used)?;
    if experts.names_width {
        writer.set(&key("expert_feed_forward_length"), experts.width)?;
    }
    if let Some(latent) = experts.latent {
        writer.set(&key("expert_latent_length"), latent)?;
    }
    if experts.dense_layers > 0 {
        writer.set(&key("leading_dense_block_count"), experts.dense_layers)?;
    }
    if experts.shared > 0 && experts.shared_gate {
        let width = experts.shared * experts.width;
        writer.set(&key("expert_shared_feed_forward_length"), width)?;
    } else if experts.shared > 0 {
        writer.set(&key("expert_shared_count"), experts.shared)?;
        if let Some(width) = experts.shared_width {
            writer.set(&key("expert_shared_feed_forward_length"), width)?;
        }
    }
    if let Some((groups, used)) = experts.groups {
        writer.set(&key("expert_group_count"), groups)?;
        writer.set(&key("expert_group_used_count"), used)?;
    }
    match experts.scores {
        Scores::Unsaid => {}
        Scores::Softmax => writer.set(&key("expert_gating_func"), 1u32)?,
        Scores::Sigmoid => writer.set(&key("expert_gating_func"), 2u32)?,
        Scores::RootOfSoftplus => writer.set(&key("expert_gating_func"), 4u32)?,
    }
    if let Some(scale) = experts.weights_scale {
        writer.set(&key("expert_weights_scale"), scale)?;
    }
    experts
        .weights_norm
        .map_or(Ok(()), |normalised| writer.set(&key("expert_weights_norm"), normalised))
}
