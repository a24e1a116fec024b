//! Converts a shape and a recipe into metadata and the list of tensors, in the order of llama-quantize.

use forebay_format::gguf::writer::GgufWriter;
use forebay_format::random_weights::Content;
use forebay_format::{FormatError, TensorType};

use super::error::SynthError;
use super::recipe::{Recipe, Role};
use super::shapes::{
    Experts, FeedForward, GatedDelta, LatentAttention, Norms, QkNorm, RopeScaling, Scores, Shape,
};

/// One tensor to write.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    pub name: String,
    pub ty: TensorType,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    pub content: Content,
}

/// Spread of norm weights around one, and of biases around zero.
const SMALL_SPREAD: f32 = 0.1;

/// Standard deviation of the embeddings of models with experts.
const EMBEDDING_DEVIATION: f32 = 1.0;

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
    writer.set(&key("block_count"), layers)?;
    writer.set(&key("context_length"), shape.context)?;
    writer.set(&key("embedding_length"), shape.hidden)?;
    writer.set(&key("feed_forward_length"), shape.dense_width())?;
    writer.set(&key("attention.head_count"), shape.heads)?;
    let [kv_heads, key_length, value_length] = match shape.latent_attention {
        None => [shape.kv_heads, shape.head_dim, shape.head_dim],
        Some(latent) if latent.one_tensor => {
            [shape.heads, latent.unrotated + latent.rotated, latent.value]
        }
        Some(latent) => [shape.kv_heads, shape.head_dim, latent.latent],
    };
    writer.set(&key("attention.head_count_kv"), kv_heads)?;
    writer.set(&key("attention.key_length"), key_length)?;
    writer.set(&key("attention.value_length"), value_length)?;
    writer.set(&key("attention.layer_norm_rms_epsilon"), shape.norm_epsilon)?;
    writer.set(&key("vocab_size"), shape.vocabulary)?;
    if let Some(window) = shape.window {
        writer.set(&key("attention.sliding_window"), window)?;
    }
    if let Some(latent) = shape.latent_attention {
        if latent.query_rank > 0 {
            writer.set(&key("attention.q_lora_rank"), latent.query_rank)?;
        }
        writer.set(&key("attention.kv_lora_rank"), latent.latent)?;
        if !latent.one_tensor {
            let keys = latent.unrotated + latent.rotated;
            writer.set(&key("attention.key_length_mla"), keys)?;
            writer.set(&key("attention.value_length_mla"), latent.value)?;
        }
    }
    if let Some(delta) = shape.gated_delta {
        for (name, value) in [
            ("ssm.conv_kernel", delta.convolution),
            ("ssm.state_size", delta.key_dim),
            ("ssm.group_count", delta.key_heads),
            ("ssm.time_step_rank", delta.value_heads),
            ("ssm.inner_size", delta.value_heads * delta.value_dim),
            ("full_attention_interval", delta.attention_period),
        ] {
            writer.set(&key(name), value)?;
        }
    }
    describe_rope(shape, writer)?;
    if let FeedForward::Experts(experts) = &shape.feed_forward {
        describe_experts(shape, experts, writer)?;
    }
    Ok(())
}

fn describe_rope(shape: &Shape, writer: &mut GgufWriter) -> Result<(), FormatError> {
    let key = |name: &str| format!("{}.rope.{name}", shape.architecture);
    writer.set(&key("freq_base"), shape.rope_base)?;
    writer.set(&key("dimension_count"), shape.rotary_dim)?;
    if let Some(base) = shape.rope_base_windowed {
        writer.set(&key("freq_base_swa"), base)?;
    }
    match shape.rope_scaling {
        RopeScaling::None | RopeScaling::Llama(_) => Ok(()),
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
    if experts.dense_layers > 0 {
        writer.set(&key("leading_dense_block_count"), experts.dense_layers)?;
    }
    if experts.shared > 0 && experts.shared_gate {
        let width = experts.shared * experts.width;
        writer.set(&key("expert_shared_feed_forward_length"), width)?;
    } else if experts.shared > 0 {
        writer.set(&key("expert_shared_count"), experts.shared)?;
    }
    if let Some((groups, used)) = experts.groups {
        writer.set(&key("expert_group_count"), groups)?;
        writer.set(&key("expert_group_used_count"), used)?;
    }
    match experts.scores {
        Scores::Unsaid => {}
        Scores::Softmax => writer.set(&key("expert_gating_func"), 1u32)?,
        Scores::Sigmoid => writer.set(&key("expert_gating_func"), 2u32)?,
    }
    if let Some(scale) = experts.weights_scale {
        writer.set(&key("expert_weights_scale"), scale)?;
    }
    experts
        .weights_norm
        .map_or(Ok(()), |normalised| writer.set(&key("expert_weights_norm"), normalised))
}

/// Returns all tensors of a model.
pub fn tensors(
    shape: &Shape,
    recipe: &Recipe,
    layers: u32,
) -> Result<Vec<PlannedTensor>, SynthError> {
    let mut list = List { shape, recipe, layers, tensors: Vec::new() };
    let (hidden, vocabulary) = (u64::from(shape.hidden), u64::from(shape.vocabulary));
    if !shape.tied {
        list.matrix("output.weight".to_owned(), Role::Output, 0, &[vocabulary, hidden])?;
    }
    list.vector("output_norm.weight".to_owned(), &[hidden], 1.0);
    if let RopeScaling::Llama(scaling) = shape.rope_scaling {
        let divisors = scaling.divisors(shape.head_dim, shape.rope_base);
        list.tensors.push(PlannedTensor {
            name: "rope_freqs.weight".to_owned(),
            ty: TensorType::F32,
            shape: vec![divisors.len() as u64],
            content: Content::Exactly(divisors),
        });
    }
    list.embedding(vocabulary, hidden)?;
    for layer in 0..layers {
        list.norms(layer);
        match &shape.latent_attention {
            _ if let Some(delta) = shape.gated_delta_of(layer) => {
                list.gated_delta(&delta, layer)?
            }
            None => list.attention(layer)?,
            Some(latent) => list.latent_attention(latent, layer)?,
        }
        match shape.experts_of(layer) {
            None => list.feed_forward(layer, "", u64::from(shape.dense_width()))?,
            Some(experts) => list.experts(&experts, layer)?,
        }
    }
    Ok(list.tensors)
}

struct List<'a> {
    shape: &'a Shape,
    recipe: &'a Recipe,
    layers: u32,
    tensors: Vec<PlannedTensor>,
}

impl List<'_> {
    fn norms(&mut self, layer: u32) {
        let names: &[&str] = match self.shape.norms {
            Norms::Plain => &["attn_norm", "ffn_norm"],
            Norms::SecondAfterAttention => &["attn_norm", "post_attention_norm"],
            Norms::Sandwich => &["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"],
        };
        for name in names {
            let name = format!("blk.{layer}.{name}.weight");
            self.vector(name, &[u64::from(self.shape.hidden)], 1.0);
        }
    }

    fn attention(&mut self, layer: u32) -> Result<(), SynthError> {
        let shape = self.shape;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(shape.hidden);
        let queries = u64::from(shape.heads) * u64::from(shape.head_dim);
        let keys = u64::from(shape.kv_heads) * u64::from(shape.head_dim);
        self.matrix(name("attn_k.weight"), Role::Key, layer, &[keys, hidden])?;
        self.matrix(name("attn_output.weight"), Role::AttentionOutput, layer, &[hidden, queries])?;
        let rows = if shape.output_gate { 2 * queries } else { queries };
        self.matrix(name("attn_q.weight"), Role::Query, layer, &[rows, hidden])?;
        self.matrix(name("attn_v.weight"), Role::Value, layer, &[keys, hidden])?;
        let norms = match shape.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some((u64::from(shape.head_dim), u64::from(shape.head_dim))),
            QkNorm::WholeProjection => Some((queries, keys)),
        };
        if let Some((query, key)) = norms {
            self.vector(name("attn_k_norm.weight"), &[key], 1.0);
            self.vector(name("attn_q_norm.weight"), &[query], 1.0);
        }
        if shape.qkv_bias {
            self.vector(name("attn_k.bias"), &[keys], 0.0);
            self.vector(name("attn_q.bias"), &[queries], 0.0);
            self.vector(name("attn_v.bias"), &[keys], 0.0);
        }
        if shape.output_bias {
            self.vector(name("attn_output.bias"), &[hidden], 0.0);
        }
        if shape.sinks {
            self.vector(name("attn_sinks.weight"), &[u64::from(shape.heads)], 0.0);
        }
        Ok(())
    }

    /// Adds the tensors of a gated delta network.
    fn gated_delta(&mut self, delta: &GatedDelta, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(self.shape.hidden);
        let (heads, dim) = (u64::from(delta.value_heads), u64::from(delta.value_dim));
        let keys = u64::from(delta.key_heads) * u64::from(delta.key_dim);
        let (values, channels) = (heads * dim, 2 * keys + heads * dim);
        self.matrix(name("attn_gate.weight"), Role::Other, layer, &[values, hidden])?;
        self.matrix(name("attn_qkv.weight"), Role::Other, layer, &[channels, hidden])?;
        let parts: &[(&str, u64)] = match delta.one_tensor {
            true => &[("ssm_ba.weight", 2)],
            false => &[("ssm_alpha.weight", 1), ("ssm_beta.weight", 1)],
        };
        for (part, count) in parts {
            self.matrix(name(part), Role::Other, layer, &[count * heads, hidden])?;
        }
        // A state that forgets half of itself within about ten tokens.
        self.vector(name("ssm_a"), &[heads], -0.15);
        self.vector(name("ssm_conv1d.weight"), &[channels, u64::from(delta.convolution)], 0.25);
        self.vector(name("ssm_dt.bias"), &[heads], 0.0);
        self.vector(name("ssm_norm.weight"), &[dim], 1.0);
        self.matrix(name("ssm_out.weight"), Role::Other, layer, &[hidden, values])
    }

    /// Adds the tensors of latent attention. Unless `one_tensor` is set, the matrices that make keys and values from
    /// the latent vector are two stacks with a matrix for each head. The matrices of the keys are transposed.
    fn latent_attention(&mut self, latent: &LatentAttention, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (hidden, heads) = (u64::from(self.shape.hidden), u64::from(self.shape.heads));
        let (rank, width) = (u64::from(latent.query_rank), u64::from(latent.latent));
        let (unrotated, rotated) = (u64::from(latent.unrotated), u64::from(latent.rotated));
        let value = u64::from(latent.value);
        let queries = heads * (unrotated + rotated);
        if rank == 0 {
            self.matrix(name("attn_q.weight"), Role::Query, layer, &[queries, hidden])?;
        } else {
            self.matrix(name("attn_q_a.weight"), Role::Other, layer, &[rank, hidden])?;
            self.vector(name("attn_q_a_norm.weight"), &[rank], 1.0);
            self.matrix(name("attn_q_b.weight"), Role::Other, layer, &[queries, rank])?;
        }
        let both = [width + rotated, hidden];
        self.matrix(name("attn_kv_a_mqa.weight"), Role::Other, layer, &both)?;
        self.vector(name("attn_kv_a_norm.weight"), &[width], 1.0);
        if latent.one_tensor {
            let rows = heads * (unrotated + value);
            self.matrix(name("attn_kv_b.weight"), Role::Other, layer, &[rows, width])?;
        } else {
            self.matrix(name("attn_k_b.weight"), Role::Other, layer, &[heads, width, unrotated])?;
            self.matrix(name("attn_v_b.weight"), Role::Other, layer, &[heads, value, width])?;
        }
        let output = [hidden, heads * value];
        self.matrix(name("attn_output.weight"), Role::AttentionOutput, layer, &output)
    }

    /// Adds a dense feed-forward. `suffix` is part of the tensor names.
    fn feed_forward(&mut self, layer: u32, suffix: &str, width: u64) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.ffn_{part}{suffix}.weight");
        let hidden = u64::from(self.shape.hidden);
        self.matrix(name("down"), Role::Down, layer, &[hidden, width])?;
        self.matrix(name("gate"), Role::GateOrUp, layer, &[width, hidden])?;
        self.matrix(name("up"), Role::GateOrUp, layer, &[width, hidden])
    }

    fn experts(&mut self, experts: &Experts, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(self.shape.hidden);
        let (width, count) = (u64::from(experts.width), u64::from(experts.experts));
        let (inner, outer) = ([count, width, hidden], [count, hidden, width]);
        self.matrix(name("ffn_down_exps.weight"), Role::Down, layer, &outer)?;
        self.matrix(name("ffn_gate_exps.weight"), Role::GateOrUp, layer, &inner)?;
        self.matrix(name("ffn_up_exps.weight"), Role::GateOrUp, layer, &inner)?;
        // The router stays F32, as in published files.
        self.typed(name("ffn_gate_inp.weight"), TensorType::F32, &[count, hidden])?;
        if experts.correction_bias {
            self.vector(name("exp_probs_b.bias"), &[count], 0.0);
        }
        if experts.biases {
            self.vector(name("ffn_gate_inp.bias"), &[count], 0.0);
            self.vector(name("ffn_down_exps.bias"), &[count, hidden], 0.0);
            self.vector(name("ffn_gate_exps.bias"), &[count, width], 0.0);
            self.vector(name("ffn_up_exps.bias"), &[count, width], 0.0);
        }
        match u64::from(experts.shared) {
            0 => Ok(()),
            shared => {
                if experts.shared_gate {
                    self.vector(name("ffn_gate_inp_shexp.weight"), &[hidden], 0.0);
                }
                self.feed_forward(layer, "_shexp", shared * width)
            }
        }
    }

    /// Adds the embedding matrix. For a model with experts, it makes routing resemble the recorded routing of trained
    /// models.
    ///
    /// Routers see mostly the embeddings, so the embeddings decide how experts are chosen. Half of every row is the
    /// same in all rows, which makes some experts far more popular than others. The other half distinguishes tokens.
    /// The embeddings are large compared with what the layers add. So a layer's router would choose much the same
    /// experts one layer earlier.
    fn embedding(&mut self, vocabulary: u64, hidden: u64) -> Result<(), SynthError> {
        let name = "token_embd.weight".to_owned();
        self.matrix(name, Role::Embedding, 0, &[vocabulary, hidden])?;
        if let FeedForward::Experts(_) = self.shape.feed_forward
            && let Some(tensor) = self.tensors.last_mut()
        {
            let ty = tensor.ty;
            let row_blocks = hidden as usize / ty.block_elements();
            let rows = Content::weights(ty, EMBEDDING_DEVIATION)
                .ok_or_else(|| SynthError::unknown_quantisation(ty.name()))?;
            let (rows, alike) = (Box::new(rows), row_blocks / 2);
            tensor.content = Content::RowsAlike { rows, ty, row_blocks, alike };
        }
        Ok(())
    }

    fn matrix(
        &mut self,
        name: String,
        role: Role,
        layer: u32,
        shape: &[u64],
    ) -> Result<(), SynthError> {
        let ty = self.recipe.type_of(role, self.shape, layer, self.layers, shape);
        self.typed(name, ty, shape)
    }

    /// Adds a matrix of random weights. Their standard deviation is one over the square root of the row length, so
    /// activations keep their size from layer to layer.
    fn typed(&mut self, name: String, ty: TensorType, shape: &[u64]) -> Result<(), SynthError> {
        let columns = shape.last().copied().unwrap_or(1);
        let content = Content::weights(ty, 1.0 / (columns as f32).sqrt())
            .ok_or_else(|| SynthError::unknown_quantisation(ty.name()))?;
        self.tensors.push(PlannedTensor { name, ty, shape: shape.to_vec(), content });
        Ok(())
    }

    /// Adds norm weights or biases.
    fn vector(&mut self, name: String, shape: &[u64], center: f32) {
        let content = Content::Floats { ty: TensorType::F32, center, spread: SMALL_SPREAD };
        self.tensors.push(PlannedTensor {
            name,
            ty: TensorType::F32,
            shape: shape.to_vec(),
            content,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::known::find;
    use super::*;

    fn bytes(shape: &str) -> u64 {
        let shape = find(shape).unwrap();
        let recipe = Recipe::find(shape.quantisation).unwrap();
        let tensors = tensors(shape, &recipe, shape.layers).unwrap();
        let size = |tensor: &PlannedTensor| {
            let rows: u64 = tensor.shape[..tensor.shape.len() - 1].iter().product();
            rows * tensor.ty.row_bytes(tensor.shape[tensor.shape.len() - 1]).unwrap()
        };
        tensors.iter().map(size).sum()
    }

    /// Compares with the sizes of published files of these models: Q4_K_M, and MXFP4 for gpt-oss.
    #[test]
    fn sizes_are_those_of_real_files() {
        for (shape, gigabytes) in [
            ("qwen3moe-30b", 18.55),
            ("llama-1b", 0.80),
            ("llama-8b", 4.91),
            ("llama-70b", 42.5),
            ("mixtral-8x7b", 28.45),
            ("qwen3-8b", 5.02),
            ("qwen2-7b", 4.68),
            ("olmoe-7b", 4.21),
            ("gpt-oss-20b", 12.11),
            ("gpt-oss-120b", 63.39),
            ("deepseek-v2-lite", 10.36),
            ("deepseek-v3", 404.4),
            ("gemma3-4b", 2.49),
            ("qwen3moe-235b", 142.2),
        ] {
            let found = bytes(shape) as f64 / 1e9;
            assert!((found / gigabytes - 1.0).abs() < 0.02, "{shape}: {found:.2} GB");
        }
    }

    /// Compares with published numbers of weights, in billions.
    #[test]
    fn weights_are_as_many_as_published() {
        for (shape, billions) in [
            ("gpt-oss-20b", 20.9),
            ("gpt-oss-120b", 116.8),
            ("deepseek-v2-lite", 15.7),
            ("deepseek-v3", 671.0),
            ("gemma3-4b", 3.88),
            ("glm-4.5-air", 106.85),
            ("qwen3moe-235b", 235.1),
            ("qwen3-next-80b", 79.67),
            ("qwen3.6-35b-a3b", 34.66),
        ] {
            let shape = find(shape).unwrap();
            let recipe = Recipe::find("BF16").unwrap();
            let tensors = tensors(shape, &recipe, shape.layers).unwrap();
            let weights: u64 = tensors.iter().map(|t| t.shape.iter().product::<u64>()).sum();
            let found = weights as f64 / 1e9;
            assert!((found / billions - 1.0).abs() < 0.01, "{}: {found:.2}", shape.name);
        }
    }
}
