//! Converts a shape and a recipe into metadata and the list of tensors, in the order of llama-quantize.

mod describe;
mod mixers;
mod residual;
mod shared_keys;

use forebay_format::TensorType;
use forebay_format::random_weights::Content;

use super::error::SynthError;
use super::recipe::{Recipe, Role};
use super::shapes::{Experts, FeedForward, Norms, RopeScaling, Shape, Streams};
pub use describe::describe;

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

/// Factor of what leaves a layer. It is below one so that deep layers forget the embeddings: a tied output projection
/// would otherwise repeat the last token.
const LAYER_SCALE: f32 = 0.9;

/// Divisor of a frequency that makes an element stand still, as converters write it.
const STANDS_STILL: f32 = 1e30;

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
    if shape.norms != Norms::None {
        list.vector("output_norm.weight".to_owned(), &[hidden], 1.0);
    }
    if let Some(divisors) = rope_divisors(shape) {
        list.exactly("rope_freqs.weight".to_owned(), divisors);
    }
    list.embedding(vocabulary, hidden)?;
    if let Some(of) = &shape.shared_keys {
        list.streams_end(of)?;
    }
    if let Some(Streams::Gated { count, rank }) = shape.streams {
        list.gated_streams("output_hc", 0, (count, rank))?;
    }
    if let Some(of) = &shape.ngrams {
        list.ngram_tables(of)?;
    }
    if let Some(Streams::Bank(_)) = shape.streams {
        list.vector("output_res_score.weight".to_owned(), &[hidden], 0.0);
    }
    for layer in 0..layers {
        list.layer(layer)?;
    }
    if shape.writes_mtp {
        list.mtp()?;
    }
    Ok(list.tensors)
}

/// Returns the divisors of the frequencies of a rotation, if a file of the shape has them.
fn rope_divisors(shape: &Shape) -> Option<Vec<f32>> {
    match shape.rope_scaling {
        RopeScaling::Llama(scaling) => Some(scaling.divisors(shape.head_dim, shape.rope_base)),
        RopeScaling::Proportional { rotated } => {
            let head_dim = shape.full_attention.map_or(shape.head_dim, |full| full.head_dim);
            let mut divisors = vec![STANDS_STILL; head_dim as usize / 2];
            divisors[..rotated as usize / 2].fill(1.0);
            Some(divisors)
        }
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Yarn { .. } => None,
    }
}

struct List<'a> {
    shape: &'a Shape,
    recipe: &'a Recipe,
    layers: u32,
    tensors: Vec<PlannedTensor>,
}

impl List<'_> {
    fn layer(&mut self, layer: u32) -> Result<(), SynthError> {
        let shape = self.shape;
        self.norms(layer);
        if let Some(of) = &shape.shared_keys {
            self.streams(of.streams, layer)?;
        }
        match shape.streams {
            Some(Streams::Mixed(count)) => self.streams(count, layer)?,
            Some(Streams::Gated { count, rank }) => self.gated_blocks(layer, (count, rank))?,
            Some(Streams::Bank(_)) => {
                for block in ["attn", "ffn"] {
                    let name = format!("blk.{layer}.{block}_res_score.weight");
                    self.vector(name, &[u64::from(shape.hidden)], 0.0);
                }
            }
            None => {}
        }
        if let Some(of) = shape.ngrams.filter(|of| of.layer == layer) {
            self.ngrams(&of)?;
        }
        if shape.layer_scale {
            self.vector(format!("blk.{layer}.layer_output_scale.weight"), &[1], LAYER_SCALE);
        }
        self.mixer(layer)?;
        match shape.experts_of(layer) {
            _ if !shape.has_feed_forward(layer) => Ok(()),
            None => self.feed_forward(layer, "", u64::from(shape.dense_width())),
            Some(experts) => self.experts(&experts, layer),
        }
    }

    /// Adds the layer for multi-token prediction behind the last one. It is like the last layer with attention, and joins an embedding
    /// and a state.
    fn mtp(&mut self) -> Result<(), SynthError> {
        let (layers, hidden) = (self.layers, u64::from(self.shape.hidden));
        let like = (0..layers).rfind(|layer| self.shape.has_attention(*layer)).unwrap_or(layers);
        let first = self.tensors.len();
        self.layer(like)?;
        let (from, to) = (format!("blk.{like}."), format!("blk.{layers}."));
        self.tensors[first..]
            .iter_mut()
            .for_each(|tensor| tensor.name = tensor.name.replace(&from, &to));
        self.matrix(
            format!("{to}nextn.eh_proj.weight"),
            Role::Other,
            layers,
            &[hidden, 2 * hidden],
        )?;
        for name in ["enorm", "hnorm", "shared_head_norm"] {
            self.vector(format!("{to}nextn.{name}.weight"), &[hidden], 1.0);
        }
        Ok(())
    }

    fn norms(&mut self, layer: u32) {
        let names: &[&str] = match self.shape.norms {
            Norms::Plain => &["attn_norm", "ffn_norm"],
            Norms::SecondAfterAttention => &["attn_norm", "post_attention_norm"],
            Norms::Sandwich => &["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"],
            Norms::SandwichOfBoth => &[
                "attn_norm",
                "post_attention_norm",
                "ffn_norm",
                "post_ffw_norm_1",
                "pre_ffw_norm_2",
                "post_ffw_norm_2",
                "post_ffw_norm",
            ],
            Norms::One => &["attn_norm"],
            Norms::None => &[],
        };
        for name in names {
            let name = format!("blk.{layer}.{name}.weight");
            self.vector(name, &[u64::from(self.shape.hidden)], 1.0);
        }
    }

    /// Adds a dense feed-forward. `suffix` is part of the tensor names.
    fn feed_forward(&mut self, layer: u32, suffix: &str, width: u64) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.ffn_{part}{suffix}.weight");
        let hidden = u64::from(self.shape.hidden);
        self.matrix(name("down"), Role::Down, layer, &[hidden, width])?;
        if self.shape.gated {
            self.matrix(name("gate"), Role::GateOrUp, layer, &[width, hidden])?;
        }
        self.matrix(name("up"), Role::GateOrUp, layer, &[width, hidden])
    }

    fn experts(&mut self, experts: &Experts, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(self.shape.hidden);
        let (width, count) = (u64::from(experts.width), u64::from(experts.experts));
        let read = experts.latent.map_or(hidden, u64::from);
        let (inner, outer) = ([count, width, read], [count, read, width]);
        self.matrix(name("ffn_down_exps.weight"), Role::Down, layer, &outer)?;
        if experts.beside_dense {
            let both = [count, 2 * width, hidden];
            self.matrix(name("ffn_gate_up_exps.weight"), Role::GateOrUp, layer, &both)?;
            self.vector(name("ffn_down_exps.scale"), &[count], 1.0);
            // The router divides by the same number, so its outputs have a deviation of one.
            self.vector(name("ffn_gate_inp.scale"), &[hidden], (hidden as f32).sqrt());
            self.feed_forward(layer, "", u64::from(experts.dense_width))?;
        } else {
            if self.shape.gated {
                self.matrix(name("ffn_gate_exps.weight"), Role::GateOrUp, layer, &inner)?;
            }
            self.matrix(name("ffn_up_exps.weight"), Role::GateOrUp, layer, &inner)?;
        }
        // The router stays F32, as in published files.
        self.typed(name("ffn_gate_inp.weight"), TensorType::F32, &[count, hidden])?;
        let hashed = self.shape.shared_keys.map_or(0, |of| of.hashed_layers);
        if layer < hashed {
            self.experts_of_tokens(experts, layer);
        } else if experts.correction_bias {
            self.vector(name("exp_probs_b.bias"), &[count], 0.0);
        }
        if experts.biases {
            self.vector(name("ffn_gate_inp.bias"), &[count], 0.0);
            self.vector(name("ffn_down_exps.bias"), &[count, hidden], 0.0);
            self.vector(name("ffn_gate_exps.bias"), &[count, width], 0.0);
            self.vector(name("ffn_up_exps.bias"), &[count, width], 0.0);
        }
        if let Some(latent) = experts.latent {
            let latent = u64::from(latent);
            self.matrix(name("ffn_routed_down.weight"), Role::Other, layer, &[latent, hidden])?;
            self.vector(name("ffn_routed_norm.weight"), &[latent], 1.0);
            self.matrix(name("ffn_routed_up.weight"), Role::Other, layer, &[hidden, latent])?;
        }
        match u64::from(experts.shared) {
            0 => Ok(()),
            shared => {
                if experts.shared_gate {
                    self.vector(name("ffn_gate_inp_shexp.weight"), &[hidden], 0.0);
                }
                let width = experts.shared_width.map_or(shared * width, u64::from);
                self.feed_forward(layer, "_shexp", width)
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
            let factor = if self.shape.scaled_embedding { (hidden as f32).sqrt() } else { 1.0 };
            let rows = Content::weights(ty, EMBEDDING_DEVIATION / factor)
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

    fn exactly(&mut self, name: String, values: Vec<f32>) {
        self.tensors.push(PlannedTensor {
            name,
            ty: TensorType::F32,
            shape: vec![values.len() as u64],
            content: Content::Exactly(values),
        });
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
            ("glm-4.7-flash", 18.31),
            ("minimax-m2", 138.3),
            ("deepseek-v3.2", 404.8),
            ("kimi-linear-48b", 29.70),
            ("nemotron-3-nano", 24.57),
            ("gemma4-26b-a4b", 16.80),
            ("kimi-k3", 1506.0),
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
            ("glm-4.7-flash", 29.94),
            ("minimax-m2", 228.69),
            ("deepseek-v3.2", 671.88),
            ("deepseek-v4-flash", 284.0),
            ("kimi-linear-48b", 49.12),
            ("nemotron-3-nano", 31.58),
            ("gemma4-26b-a4b", 25.23),
            ("hunyuan-a13b", 80.39),
            ("kimi-k3", 2780.0),
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
