//! From a shape and a recipe to metadata and the list of tensors, in the order of llama-quantize.

use forebay_format::gguf::writer::GgufWriter;
use forebay_format::{FormatError, TensorType};

use super::SynthError;
use super::random::Content;
use super::recipe::{Recipe, Role};
use super::shapes::{FeedForward, QkNorm, Shape};

/// One tensor to write.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    pub name: String,
    pub ty: TensorType,
    /// Outermost first.
    pub shape: Vec<u64>,
    pub content: Content,
}

/// Norm weights lie around one, biases around zero, this far.
const SMALL_SPREAD: f32 = 0.1;

/// Standard deviation of the embeddings of models with experts.
const EMBEDDING_DEVIATION: f32 = 1.0;

/// Writes the keys that describe `shape` with `layers` layers; the tokenizer's are not among them.
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
    let dense_width = match shape.feed_forward {
        FeedForward::Dense { width } => width,
        FeedForward::Experts { dense_width, .. } => dense_width,
    };
    writer.set(&key("feed_forward_length"), dense_width)?;
    writer.set(&key("attention.head_count"), shape.heads)?;
    writer.set(&key("attention.head_count_kv"), shape.kv_heads)?;
    writer.set(&key("attention.key_length"), shape.head_dim)?;
    writer.set(&key("attention.value_length"), shape.head_dim)?;
    writer.set(&key("attention.layer_norm_rms_epsilon"), shape.norm_epsilon)?;
    writer.set(&key("rope.freq_base"), shape.rope_base)?;
    writer.set(&key("rope.dimension_count"), shape.head_dim)?;
    writer.set(&key("vocab_size"), shape.vocabulary)?;
    if let FeedForward::Experts { width, experts, used, .. } = shape.feed_forward {
        writer.set(&key("expert_count"), experts)?;
        writer.set(&key("expert_used_count"), used)?;
        // Where both are equal, published files name only the other.
        if width != dense_width {
            writer.set(&key("expert_feed_forward_length"), width)?;
        }
    }
    Ok(())
}

/// All tensors of a model.
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
    list.vector("output_norm.weight".to_owned(), hidden, 1.0);
    if let Some(scaling) = shape.rope_scaling {
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
        list.attention(layer)?;
        list.feed_forward(layer)?;
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
    fn attention(&mut self, layer: u32) -> Result<(), SynthError> {
        let shape = self.shape;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(shape.hidden);
        let queries = u64::from(shape.heads) * u64::from(shape.head_dim);
        let keys = u64::from(shape.kv_heads) * u64::from(shape.head_dim);
        let (query_norm, key_norm) = match shape.qk_norm {
            QkNorm::None => (0, 0),
            QkNorm::PerHead => (u64::from(shape.head_dim), u64::from(shape.head_dim)),
            QkNorm::WholeProjection => (queries, keys),
        };
        self.matrix(name("attn_k.weight"), Role::Key, layer, &[keys, hidden])?;
        self.vector(name("attn_k_norm.weight"), key_norm, 1.0);
        self.vector(name("attn_norm.weight"), hidden, 1.0);
        self.matrix(name("attn_output.weight"), Role::AttentionOutput, layer, &[hidden, queries])?;
        self.matrix(name("attn_q.weight"), Role::Query, layer, &[queries, hidden])?;
        self.vector(name("attn_q_norm.weight"), query_norm, 1.0);
        self.matrix(name("attn_v.weight"), Role::Value, layer, &[keys, hidden])?;
        if shape.qkv_bias {
            self.vector(name("attn_k.bias"), keys, 0.0);
            self.vector(name("attn_q.bias"), queries, 0.0);
            self.vector(name("attn_v.bias"), keys, 0.0);
        }
        Ok(())
    }

    fn feed_forward(&mut self, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(self.shape.hidden);
        match self.shape.feed_forward {
            FeedForward::Dense { width } => {
                let width = u64::from(width);
                self.matrix(name("ffn_down.weight"), Role::Down, layer, &[hidden, width])?;
                self.matrix(name("ffn_gate.weight"), Role::GateOrUp, layer, &[width, hidden])?;
                self.vector(name("ffn_norm.weight"), hidden, 1.0);
                self.matrix(name("ffn_up.weight"), Role::GateOrUp, layer, &[width, hidden])
            }
            FeedForward::Experts { width, experts, .. } => {
                let (width, experts) = (u64::from(width), u64::from(experts));
                let (inner, outer) = ([experts, width, hidden], [experts, hidden, width]);
                self.matrix(name("ffn_down_exps.weight"), Role::Down, layer, &outer)?;
                self.matrix(name("ffn_gate_exps.weight"), Role::GateOrUp, layer, &inner)?;
                // The router stays F32, as in published files.
                self.typed(name("ffn_gate_inp.weight"), TensorType::F32, &[experts, hidden])?;
                self.vector(name("ffn_norm.weight"), hidden, 1.0);
                self.matrix(name("ffn_up_exps.weight"), Role::GateOrUp, layer, &inner)
            }
        }
    }

    /// Routers see mostly the embeddings, so these decide how experts are chosen. Half of every row
    /// is the same, which makes some experts far more popular than others, and the other half has to
    /// say where a token goes. They are large beside what the layers add, so a layer's router
    /// would choose much the same one layer earlier. Both as in recorded routing of trained models.
    fn embedding(&mut self, vocabulary: u64, hidden: u64) -> Result<(), SynthError> {
        let name = "token_embd.weight".to_owned();
        self.matrix(name, Role::Embedding, 0, &[vocabulary, hidden])?;
        if let FeedForward::Experts { .. } = self.shape.feed_forward
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
        let columns = shape.last().copied().unwrap_or_default();
        let ty = self.recipe.type_of(role, self.shape, layer, self.layers, columns);
        self.typed(name, ty, shape)
    }

    /// Weights with a standard deviation of one over the square root of what a row sums up: activations then keep
    /// their size from layer to layer.
    fn typed(&mut self, name: String, ty: TensorType, shape: &[u64]) -> Result<(), SynthError> {
        let columns = shape.last().copied().unwrap_or(1);
        let content = Content::weights(ty, 1.0 / (columns as f32).sqrt())
            .ok_or_else(|| SynthError::unknown_quantisation(ty.name()))?;
        self.tensors.push(PlannedTensor { name, ty, shape: shape.to_vec(), content });
        Ok(())
    }

    fn vector(&mut self, name: String, length: u64, center: f32) {
        if length > 0 {
            let content = Content::Floats { ty: TensorType::F32, center, spread: SMALL_SPREAD };
            self.tensors.push(PlannedTensor {
                name,
                ty: TensorType::F32,
                shape: vec![length],
                content,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shapes::find;
    use super::*;

    fn bytes(shape: &str, recipe: &str, layers: Option<u32>) -> u64 {
        let (shape, recipe) = (find(shape).unwrap(), Recipe::find(recipe).unwrap());
        let tensors = tensors(shape, &recipe, layers.unwrap_or(shape.layers)).unwrap();
        let size = |tensor: &PlannedTensor| {
            let rows: u64 = tensor.shape[..tensor.shape.len() - 1].iter().product();
            rows * tensor.ty.row_bytes(tensor.shape[tensor.shape.len() - 1]).unwrap()
        };
        tensors.iter().map(size).sum()
    }

    /// Sizes of the published Q4_K_M files of these models.
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
        ] {
            let found = bytes(shape, "Q4_K_M", None) as f64 / 1e9;
            assert!((found / gigabytes - 1.0).abs() < 0.02, "{shape}: {found:.2} GB");
        }
    }
}
