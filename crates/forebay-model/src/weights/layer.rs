//! Builds one layer: the tensors that form its blocks, and its vectors.

use forebay_format::{Block, TensorType};

use super::parts::{
    AttentionWeights, DenseBiases, ExpertNorms, ExpertVectors, FeedForwardWeights, GroupedWeights,
    HeadMatrices, LatentWeights, LayerEmbeddingWeights, LayerWeights, PartMatrix, RecurrenceBeside,
};
use super::tensors::Tensors;
use super::{quantized, relayout};
use crate::ModelError;
use crate::arch::{
    Architecture, AttentionBias, ExpertInput, Experts, FeedForward, Latent, LayerEmbeddings, Mixer,
    Names, Naming, NormLayout, QkNorm,
};

pub(super) struct LayerBuilder<'a> {
    pub architecture: &'a Architecture,
    pub names: &'a Names,
    pub index: usize,
}

impl LayerBuilder<'_> {
    /// Returns the layer, its dense block, and the blocks of its experts, if it has any.
    ///
    /// # Errors
    /// Returns the same errors as [`super::Weights::new`].
    pub fn build(
        &self,
        tensors: &mut Tensors<'_>,
    ) -> Result<(LayerWeights, Block, Vec<Block>), ModelError> {
        let shape = self.architecture.attention_of(self.index);
        let hidden = self.architecture.hidden;
        let mut dense = Block::default();
        let mixer = self.architecture.layers[self.index].mixer;
        let attends = mixer.attends();
        let ngrams = self.ngrams(tensors, &mut dense)?;
        let attention = match (mixer, shape.latent) {
            (Mixer::None, _) => AttentionWeights::None,
            (Mixer::Recurrent, _) => AttentionWeights::Delta(self.recurrence(tensors, &mut dense)?),
            (_, _) if shape.shared.is_some() => {
                AttentionWeights::Shared(self.shared_keys(tensors, &mut dense)?)
            }
            (_, None) => AttentionWeights::Grouped(self.grouped(tensors, &mut dense)?),
            (_, Some(latent)) => {
                AttentionWeights::Latent(self.latent(tensors, &mut dense, &latent)?)
            }
        };
        let o = match mixer {
            Mixer::None => None,
            Mixer::Recurrent => Some(self.delta_output(tensors, &mut dense)?),
            Mixer::Attention | Mixer::AttentionAndRecurrent => {
                Some(self.matrix(tensors, &mut dense, "o", hidden, shape.output_width())?)
            }
        };
        let beside = match mixer {
            Mixer::AttentionAndRecurrent => Some(Box::new(RecurrenceBeside {
                delta: self.recurrence(tensors, &mut dense)?,
                o: self.delta_output(tensors, &mut dense)?,
            })),
            Mixer::Attention | Mixer::Recurrent | Mixer::None => None,
        };
        let [attention_streams, feed_forward_streams] = self.streams(tensors, &mut dense)?;
        let predicted = self.predicted(tensors, &mut dense)?;
        let attention_parts = dense.part_bytes().len();
        let described = &self.architecture.layers[self.index].feed_forward;
        let (feed_forward, experts) = match described {
            FeedForward::None => (FeedForwardWeights::None, Vec::new()),
            FeedForward::Dense { width, .. } => {
                let [gate, up, down] = self.gated(tensors, &mut dense, "", *width)?;
                (FeedForwardWeights::Dense { gate, up, down }, Vec::new())
            }
            FeedForward::Experts(experts) => {
                let router = self.matrix(tensors, &mut dense, "router", experts.count, hidden)?;
                let shared = match experts.shared_width {
                    0 => None,
                    width => Some(self.gated(tensors, &mut dense, "shared_", width)?),
                };
                let latent = self.latent_experts(tensors, &mut dense, experts)?;
                let (parts, extents) = self.experts(tensors, experts)?;
                let [gate, up, down] = parts;
                let vectors = Box::new(self.expert_vectors(tensors, experts)?);
                let weights =
                    FeedForwardWeights::Experts { router, gate, up, down, shared, latent, vectors };
                (weights, extents)
            }
        };
        let embeddings = self.embeddings(tensors, &mut dense)?;
        let biases = self.dense_biases(tensors, described)?;
        let norms = self.architecture.norms_of(self.index);
        let [before, after] = [norms.before(), norms.after()].map(|has| has.then_some(hidden));
        let (has_mixer, has_feed_forward) = (mixer != Mixer::None, !described.is_none());
        let [mixer_norm, mixer_post_norm] = [before, after].map(|of| of.filter(|_| has_mixer));
        let [inner_norm, inner_post_norm] =
            [before, after].map(|of| of.filter(|_| has_feed_forward));
        let (attention_gate, attention_share) =
            self.residual_gate(tensors, "attention_residual_gate")?.unzip();
        let (mut feed_forward_gate, feed_forward_share) =
            self.residual_gate(tensors, "feed_forward_residual_gate")?.unzip();
        let feed_forward_post_norm =
            self.norm(tensors, "feed_forward_post_norm", inner_post_norm)?;
        // Behind a gate, the weight of this norm multiplies before it. That of attention has none.
        let feed_forward_post_norm = match (&mut feed_forward_gate, feed_forward_share) {
            (Some(gate), share) => {
                gate.scale = feed_forward_post_norm;
                share
            }
            (None, _) => feed_forward_post_norm,
        };
        let layer = LayerWeights {
            attention_norm: self.stream_norm(tensors, self.outer_norm(tensors), mixer_norm)?,
            attention_post_norm: match attention_share {
                Some(share) => Some(share),
                None => self.norm(tensors, "attention_post_norm", mixer_post_norm)?,
            },
            feed_forward_norm: self.feed_forward_norm(tensors, inner_norm)?,
            feed_forward_post_norm,
            attention_streams,
            feed_forward_streams,
            predicted,
            attention,
            sinks: self.vector(
                tensors,
                "sinks",
                (attends && shape.sinks).then_some(shape.heads),
            )?,
            beside,
            o,
            o_bias: self.vector(
                tensors,
                "o_bias",
                (attends && shape.bias == AttentionBias::All).then_some(hidden),
            )?,
            attention_parts,
            feed_forward,
            gatings: self.architecture.gatings_of(self.index),
            biases,
            embeddings,
            ngrams,
            attention_gate,
            feed_forward_gate,
            convolutions: self.convolutions(tensors)?,
            feed_forward_scale: self.feed_forward_scale(tensors, described.has_experts())?,
            scale: match self.architecture.layer_scales {
                true => tensors.vector(&self.name("layer_scale"), 1)?[0],
                false => 1.0,
            },
        };
        Ok((layer, dense, experts))
    }

    /// Reads the norm before the feed-forward, if `length` is given. Its weights have the factor of the inputs of feed-forwards.
    fn feed_forward_norm(
        &self,
        tensors: &mut Tensors<'_>,
        length: Option<usize>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let mut norm = self.stream_norm(tensors, self.inner_norm(), length)?;
        let scale = self.architecture.feed_forward_input_scale;
        if scale != 1.0 {
            norm.iter_mut().flatten().for_each(|weight| *weight *= scale);
        }
        Ok(norm)
    }

    /// Returns what the layer does with the tokens' embeddings for it.
    fn embeddings(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<Option<LayerEmbeddingWeights>, ModelError> {
        let Some(LayerEmbeddings { width, .. }) = self.architecture.layer_embeddings else {
            return Ok(None);
        };
        let (hidden, layers) = (self.architecture.hidden, self.architecture.layers.len());
        // One matrix has the projections for all layers, one after the other.
        let (all, extent) =
            tensors.matrix(&self.names.layer_projection(), layers * width, hidden)?;
        let bytes = extent.length / layers as u64;
        let own = extent.slice(self.index as u64 * bytes, bytes).expect("a part of an extent");
        let project = PartMatrix { part: dense.push(own), rows: width, ..all };
        let mut norm = tensors.norm(&self.names.layer_projection_norm(), width)?;
        norm.iter_mut().for_each(|weight| *weight *= std::f32::consts::FRAC_1_SQRT_2);
        Ok(Some(LayerEmbeddingWeights {
            project,
            norm,
            gate: self.matrix(tensors, dense, "layer_gate", width, hidden)?,
            out: self.matrix(tensors, dense, "layer_out", hidden, width)?,
            post_norm: tensors.norm(&self.name("layer_post_norm"), hidden)?,
        }))
    }

    /// Appends a matrix to the dense block as its next part.
    pub(super) fn matrix(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        role: &str,
        rows: usize,
        cols: usize,
    ) -> Result<PartMatrix, ModelError> {
        Ok(tensors.source(&self.name(role), rows, cols)?.push(dense))
    }

    /// Appends matrices, given by role and rows, that take the same input. They are tensors of their own or the rows of one
    /// tensor with the role `together`.
    pub(super) fn matrices<const N: usize>(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        together: &str,
        roles: [(&str, usize); N],
        cols: usize,
    ) -> Result<[PartMatrix; N], ModelError> {
        let (name, rows) = (self.name(together), roles.iter().map(|(_, rows)| rows).sum::<usize>());
        let mut found = [PartMatrix { part: 0, ty: TensorType::F32, rows: 0, cols }; N];
        // In some files, the whole has the name that one of the matrices has elsewhere.
        let is_whole = tensors.optional(&name).is_some_and(|tensor| {
            let is_one = roles.iter().any(|(role, _)| self.name(role) == name);
            !is_one || tensor.shape.first() == Some(&(rows as u64))
        });
        if !is_whole {
            for (matrix, (role, rows)) in found.iter_mut().zip(roles) {
                *matrix = self.matrix(tensors, dense, role, rows, cols)?;
            }
            return Ok(found);
        }
        let (matrix, whole) = tensors.matrix(&name, rows, cols)?;
        let row_bytes = whole.length / rows.max(1) as u64;
        let mut from = 0;
        for (part, (_, rows)) in found.iter_mut().zip(roles) {
            let length = rows as u64 * row_bytes;
            let extent = whole.slice(from, length).expect("rows of the tensor");
            from += length;
            *part = PartMatrix { part: dense.push(extent), rows, ..matrix };
        }
        Ok(found)
    }

    /// Appends gate, up and down of a feed-forward to the dense block. `of` is the beginning of their roles. Without a gate, `up`
    /// stands for it.
    fn gated(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        of: &str,
        width: usize,
    ) -> Result<[PartMatrix; 3], ModelError> {
        let hidden = self.architecture.hidden;
        if self.names.interleaves_gate_up() {
            return self.interleaved(tensors, dense, width);
        }
        let [together, gate, up, down] =
            ["gate_up", "gate", "up", "down"].map(|role| format!("{of}{role}"));
        let [gate, up] = match self.architecture.gating.has_gate() {
            false => [self.matrix(tensors, dense, &up, width, hidden)?; 2],
            true => {
                let roles = [(&gate[..], width), (&up[..], width)];
                self.matrices(tensors, dense, &together, roles, hidden)?
            }
        };
        Ok([gate, up, self.matrix(tensors, dense, &down, hidden, width)?])
    }

    /// Reads the biases of a dense feed-forward, as far as the file has such.
    fn dense_biases(
        &self,
        tensors: &mut Tensors<'_>,
        described: &FeedForward,
    ) -> Result<DenseBiases, ModelError> {
        let FeedForward::Dense { width, .. } = *described else {
            return Ok(DenseBiases::default());
        };
        let mut bias = |role: &str, length| tensors.optional_bias(&self.name(role), length);
        let has_gate = self.architecture.gating.has_gate();
        Ok(DenseBiases {
            gate: if has_gate { bias("gate", width)? } else { None },
            up: bias("up", width)?,
            down: bias("down", self.architecture.hidden)?,
        })
    }

    /// Reads a vector, if `length` is given.
    fn vector(
        &self,
        tensors: &mut Tensors<'_>,
        role: &str,
        length: Option<usize>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        length.map(|length| tensors.vector(&self.name(role), length)).transpose()
    }

    fn norm(
        &self,
        tensors: &mut Tensors<'_>,
        role: &str,
        length: Option<usize>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        // Families without the norm have no name for it.
        let Some(length) = length else { return Ok(None) };
        tensors.norm(&self.norm_name(tensors, role), length).map(Some)
    }

    /// Returns the name of a norm in the files: of two that it may have, the one that is there.
    fn norm_name(&self, tensors: &Tensors<'_>, role: &str) -> String {
        let name = self.name(role);
        let renamed = self.names.renamed(self.index, role);
        let is_there = |name: &String| tensors.optional(name).is_some();
        renamed.filter(|renamed| !is_there(&name) && is_there(renamed)).unwrap_or(name)
    }

    /// Returns the role of the norm before attention. In parallel blocks it may be that before the feed-forward.
    fn outer_norm(&self, tensors: &Tensors<'_>) -> &'static str {
        let role = "attention_norm";
        let is_parallel = self.architecture.norms == NormLayout::Parallel;
        let is_absent = || tensors.optional(&self.name(role)).is_none();
        match is_parallel && !self.names.has_one_norm() && is_absent() {
            true => "feed_forward_norm",
            false => role,
        }
    }

    /// Returns the role of the norm before the feed-forward.
    fn inner_norm(&self) -> &'static str {
        let is_parallel = self.architecture.norms == NormLayout::Parallel;
        match is_parallel && self.names.has_one_norm() {
            true => "attention_norm",
            false => "feed_forward_norm",
        }
    }

    /// Reads the norm before a block.
    fn stream_norm(
        &self,
        tensors: &mut Tensors<'_>,
        role: &str,
        length: Option<usize>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(length) = length else { return Ok(None) };
        let (form, name) = (self.architecture.norm_form, self.norm_name(tensors, role));
        tensors.stream_norm(form, &name, length).map(Some)
    }

    fn grouped(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<GroupedWeights, ModelError> {
        let shape = self.architecture.attention_of(self.index);
        let hidden = self.architecture.hidden;
        let (q_width, q_rows) = (shape.heads * shape.head_dim, shape.query_rows());
        let (k_width, v_width) =
            (shape.kv_heads * shape.head_dim, shape.kv_heads * shape.value_dim);
        let (q_norm, k_norm) = match shape.qk_norm {
            QkNorm::None => (None, None),
            QkNorm::PerHead | QkNorm::PerRotatedHead => {
                (Some(shape.head_dim), Some(shape.head_dim))
            }
            QkNorm::WholeProjection => (Some(q_width), Some(k_width)),
            QkNorm::Weightless { .. } => (None, None),
        };
        let own_keys = self.architecture.layers[self.index].keys_of.is_none();
        let own_values = own_keys && !shape.values.of_keys;
        let (q, k, v) = if own_values {
            let roles = [("q", q_rows), ("k", k_width), ("v", v_width)];
            let [q, k, v] = self.matrices(tensors, dense, "qkv", roles, hidden)?;
            (q, Some(k), Some(v))
        } else {
            let q = self.matrix(tensors, dense, "q", q_rows, hidden)?;
            let k = own_keys.then(|| self.matrix(tensors, dense, "k", k_width, hidden));
            (q, k.transpose()?, None)
        };
        let gate = self.output_gate(tensors, dense)?;
        let relative = self.relative(tensors, dense)?;
        let [k_rows, v_rows] = [(k_width, own_keys), (v_width, own_values)]
            .map(|(rows, is_own)| if is_own { rows } else { 0 });
        let [q_bias, k_bias, v_bias] = self.biases(tensors, [q_rows, k_rows, v_rows])?;
        Ok(GroupedWeights {
            q,
            k,
            v,
            gate,
            q_bias,
            k_bias,
            v_bias,
            q_norm: self.head_norm(tensors, "q_norm", q_norm)?,
            k_norm: self.head_norm(tensors, "k_norm", k_norm.filter(|_| own_keys))?,
            // Such norms have no weight in the files.
            v_norm: (shape.values.normed && own_keys).then(|| tensors.ones(shape.value_dim)),
            output_norm: shape.output_norm.then(|| tensors.ones(shape.value_dim)),
            relative,
            indexer: self.indexer(tensors, dense, None)?,
        })
    }

    /// Reads the biases of queries, keys and values, if they have any, for so many rows of each. They are tensors of their own or
    /// parts of one.
    fn biases(
        &self,
        tensors: &mut Tensors<'_>,
        rows: [usize; 3],
    ) -> Result<[Option<Vec<f32>>; 3], ModelError> {
        let roles = ["q_bias", "k_bias", "v_bias"];
        if self.architecture.attention_of(self.index).bias == AttentionBias::None {
            return Ok([None, None, None]);
        }
        let together = self.name("qkv_bias");
        let is_whole = tensors.optional(&together).is_some();
        let mut whole = match is_whole {
            true => tensors.vector(&together, rows.iter().sum())?,
            false => Vec::new(),
        };
        let mut found = [None, None, None];
        for (index, role) in roles.into_iter().enumerate() {
            found[index] = match rows[index] {
                0 => None,
                rows if is_whole => Some(whole.drain(..rows).collect()),
                rows => Some(tensors.vector(&self.name(role), rows)?),
            };
        }
        Ok(found)
    }

    /// Appends the projection to gates of attention's output, if there is one.
    fn output_gate(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
    ) -> Result<Option<PartMatrix>, ModelError> {
        let rows = self.architecture.attention_of(self.index).gate_rows();
        let hidden = self.architecture.hidden;
        let matrix = || self.matrix(tensors, dense, "output_gate", rows, hidden);
        (rows > 0).then(matrix).transpose()
    }

    /// Reads the norm of queries or keys. A norm without weights has ones, in the layers that have it.
    fn head_norm(
        &self,
        tensors: &mut Tensors<'_>,
        role: &str,
        length: Option<usize>,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let shape = self.architecture.attention_of(self.index);
        let QkNorm::Weightless { unrotated_too } = shape.qk_norm else {
            return self.norm(tensors, role, length);
        };
        let rotates = self.architecture.layers[self.index].rope.is_some();
        Ok((rotates || unrotated_too).then(|| tensors.ones(shape.head_dim)))
    }

    fn latent(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
        latent: &Latent,
    ) -> Result<LatentWeights, ModelError> {
        let heads = self.architecture.attention_of(self.index).heads;
        let hidden = self.architecture.hidden;
        let Latent { query_rank, rank, plain, rotary, value, key_norm, rescaled } = *latent;
        let q_width = heads * (plain + rotary);
        let rescale = |mut norm: Vec<f32>| {
            let factor = if rescaled { (hidden as f32 / norm.len() as f32).sqrt() } else { 1.0 };
            norm.iter_mut().for_each(|weight| *weight *= factor);
            norm
        };
        let (q_a, q) = match query_rank {
            None => (None, self.matrix(tensors, dense, "q", q_width, hidden)?),
            Some(width) => {
                let matrix = self.matrix(tensors, dense, "q_a", width, hidden)?;
                let norm = rescale(tensors.norm(&self.name("q_a_norm"), width)?);
                (Some((matrix, norm)), self.matrix(tensors, dense, "q_b", q_width, width)?)
            }
        };
        let kv_a = self.matrix(tensors, dense, "kv_a", rank + rotary, hidden)?;
        let (k_b, v_b) = match tensors.optional(&self.name("k_b")) {
            Some(_) => {
                let mut stack = |role: &str, rows: usize, cols: usize| {
                    let (matrix, extent) = tensors.stack(&self.name(role), heads, rows, cols)?;
                    let matrix = PartMatrix { part: dense.push(extent), ..matrix };
                    let bytes = extent.length as usize / heads;
                    Ok::<_, ModelError>(HeadMatrices { matrix, bytes, heads })
                };
                (stack("k_b", rank, plain)?, stack("v_b", value, rank)?)
            }
            None => {
                let name = self.name("kv_b");
                match tensors.is_quantized(&name) {
                    true => quantized::heads(tensors, dense, &name, heads, latent)?,
                    false => relayout::heads(tensors, dense, &name, heads, latent)?,
                }
            }
        };
        let kv_a_norm = rescale(tensors.norm(&self.name("kv_a_norm"), rank)?);
        let rotary_norm = self.norm(tensors, "rotary_norm", key_norm.then_some(rotary))?;
        let gate = self.output_gate(tensors, dense)?;
        let indexer = self.indexer(tensors, dense, query_rank)?;
        Ok(LatentWeights { q_a, q, kv_a, kv_a_norm, rotary_norm, k_b, v_b, gate, indexer })
    }

    fn expert_vectors(
        &self,
        tensors: &mut Tensors<'_>,
        experts: &Experts,
    ) -> Result<ExpertVectors, ModelError> {
        let count = experts.count;
        let router_bias = self.vector(tensors, "router_bias", experts.bias.then_some(count))?;
        let corrected = experts.correction_bias.then_some(count - experts.always);
        let name = self.name("correction_bias");
        let mut correction_bias =
            corrected.map(|count| tensors.vector(&name, count)).transpose()?;
        if let Some(bias) = &mut correction_bias {
            // Experts that every token uses are not chosen.
            bias.resize(count, 0.0);
        }
        let by_token = match experts.by_token {
            true => Some(self.experts_of_tokens(tensors, experts)?),
            false => None,
        };
        let biases = match experts.bias {
            false => None,
            true => Some(self.expert_biases(tensors, experts)?),
        };
        let hidden = self.architecture.hidden;
        let shared_scale = match experts.shared_gate && experts.shared_width > 0 {
            true => Some(tensors.vector(&self.name("shared_scale"), hidden)?),
            // The sigmoid of 0 halves the output.
            false => experts.averaged.then(|| tensors.zeros(hidden)),
        };
        let scales = experts.expert_scales.then_some(count);
        let scales = self.vector(tensors, "expert_scales", scales)?;
        let norms = match experts.own_norms {
            true => Some(self.expert_norms(tensors)?),
            false => None,
        };
        Ok(ExpertVectors {
            router_bias,
            correction_bias,
            by_token,
            shared_scale,
            biases,
            scales,
            latent_norm: self.norm(tensors, "latent_norm", experts.latent.map(|of| of.width))?,
            output_norm: self.expert_output_norm(tensors, experts)?,
            input: experts.input,
            input_norm: self.norm(
                tensors,
                "expert_norm",
                (experts.input == ExpertInput::OfLayer).then_some(hidden),
            )?,
            norms,
        })
    }

    fn expert_norms(&self, tensors: &mut Tensors<'_>) -> Result<ExpertNorms, ModelError> {
        let hidden = self.architecture.hidden;
        let mut router = tensors.vector(&self.name("router_norm"), hidden)?;
        // The router's input is scaled by the root of its width, too.
        let scale = 1.0 / (hidden as f32).sqrt();
        router.iter_mut().for_each(|weight| *weight *= scale);
        Ok(ExpertNorms {
            router,
            input: tensors.norm(&self.name("expert_norm"), hidden)?,
            shared: tensors.norm(&self.name("shared_post_norm"), hidden)?,
            output: tensors.norm(&self.name("expert_post_norm"), hidden)?,
        })
    }

    /// Reads the biases of gate, up and down, `[experts, rows]` each.
    fn expert_biases(
        &self,
        tensors: &mut Tensors<'_>,
        experts: &Experts,
    ) -> Result<[Vec<f32>; 3], ModelError> {
        let (count, width, hidden) = (experts.count, experts.width, self.architecture.hidden);
        let mut rows = |role: &str, width: usize| tensors.rows(&self.name(role), count, width);
        let [gate, up] = match self.architecture.naming {
            Naming::Gguf => [rows("expert_gate_bias", width)?, rows("expert_up_bias", width)?],
            // The tensor holds values of gate and up alternately.
            Naming::HuggingFace { .. } => {
                let both = rows("expert_gate_up_bias", 2 * width)?;
                [0, 1].map(|first| both.iter().skip(first).step_by(2).copied().collect())
            }
        };
        Ok([gate, up, rows("expert_down_bias", hidden)?])
    }

    pub(super) fn name(&self, role: &str) -> String {
        self.names.layer(self.index, role)
    }

    /// Returns gate, up and down of every expert as parts 0, 1 and 2 of the expert's block.
    fn experts(
        &self,
        tensors: &Tensors<'_>,
        experts: &Experts,
    ) -> Result<([PartMatrix; 3], Vec<Block>), ModelError> {
        if self.names.interleaves_gate_up() {
            return self.interleaved_experts(tensors, experts);
        }
        let hidden = experts.outer_width(self.architecture.hidden);
        if relayout::experts_need_relayout(self.architecture.naming, experts) {
            return relayout::experts(tensors, &|role| self.name(role), experts, hidden);
        }
        if experts.transposed {
            return relayout::transposed_experts(tensors, &|role| self.name(role), experts, hidden);
        }
        let stack = self.name("expert_gate_up");
        if tensors.optional(&stack).is_some() {
            return self.stacked_experts(tensors, experts, &stack);
        }
        let roles = [
            ("expert_gate", experts.width, hidden),
            ("expert_up", experts.width, hidden),
            ("expert_down", hidden, experts.width),
        ];
        // Without a gate, `up` stands for it.
        let roles = &roles[usize::from(!self.architecture.gating.has_gate())..];
        let mut blocks = vec![Block::default(); experts.count];
        let mut parts = Vec::with_capacity(3);
        for (part, &(role, rows, cols)) in roles.iter().enumerate() {
            let is_split = tensors.optional(&self.names.expert(self.index, 0, role)).is_none();
            let name_of = |expert: usize| match self.names.split_expert(self.index, expert, role) {
                Some(name) if is_split => name,
                _ => self.names.expert(self.index, expert, role),
            };
            if tensors.is_quantized(&name_of(0)) {
                let of = quantized::experts(tensors, &name_of, &mut blocks, rows, cols)?;
                parts.push(of);
                continue;
            }
            let (matrix, slices) = tensors.expert_matrices(&name_of, experts.count, rows, cols)?;
            parts.push(PartMatrix { part, ..matrix });
            for (block, slice) in blocks.iter_mut().zip(slices) {
                block.push(slice);
            }
        }
        Ok(([parts[0], parts[parts.len() - 2], parts[parts.len() - 1]], blocks))
    }

    /// Returns gate, up and down of every expert of a file that holds them as two stacks: `gate_up_proj` `[experts, 2 * width,
    /// hidden]` with this name, whose rows are those of gate and then those of up, and `down_proj` `[experts, hidden, width]`.
    fn stacked_experts(
        &self,
        tensors: &Tensors<'_>,
        experts: &Experts,
        name: &str,
    ) -> Result<([PartMatrix; 3], Vec<Block>), ModelError> {
        let Experts { count, width, .. } = *experts;
        let hidden = experts.outer_width(self.architecture.hidden);
        let down = self.name("expert_down_stack");
        let (both, gate_ups) =
            tensors.expert_matrices(&|_| name.into(), count, 2 * width, hidden)?;
        let (down, downs) = tensors.expert_matrices(&|_| down.clone(), count, hidden, width)?;
        let mut blocks = Vec::with_capacity(count);
        for (both, down) in gate_ups.into_iter().zip(downs) {
            let half = both.length / 2;
            let mut block = Block::default();
            for start in [0, half] {
                block.push(both.slice(start, half).expect("half of an extent"));
            }
            block.push(down);
            blocks.push(block);
        }
        let half = |part| PartMatrix { part, rows: width, ..both };
        Ok(([half(0), half(1), PartMatrix { part: 2, ..down }], blocks))
    }
}
