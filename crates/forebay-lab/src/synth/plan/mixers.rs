//! Tensors of attention and of the recurrent blocks that stand in its place.

use forebay_format::TensorType;

use super::super::error::SynthError;
use super::super::recipe::Role;
use super::super::shapes::{
    ChannelDelta, GatedDelta, Indexer, LatentAttention, Mamba, Pools, QkNorm, Recurrent,
};
use super::List;

/// Logarithm of what a state keeps in a step of length one. Half of the state is forgotten within about ten tokens.
const DECAY: f32 = -0.15;

/// Weight of a position in a convolution over four.
const TAP: f32 = 0.25;

impl List<'_> {
    /// Adds the tensors of attention, or those of the recurrent block that layer `layer` has in its place.
    pub fn mixer(&mut self, layer: u32) -> Result<(), SynthError> {
        match (self.shape.recurrent_of(layer), self.shape.latent_attention) {
            (Some(Recurrent::Delta(delta)), _) => self.gated_delta(&delta, layer),
            (Some(Recurrent::ChannelDelta(delta)), _) => self.channel_delta(&delta, layer),
            (Some(Recurrent::Mamba(mamba)), _) => self.mamba(&mamba, layer),
            (None, _) if !self.shape.has_attention(layer) => Ok(()),
            (None, Some(latent)) => self.latent_attention(&latent, layer),
            (None, None) => match self.shape.shared_keys {
                Some(of) => self.shared_keys(&of, layer),
                None => self.attention(layer),
            },
        }
    }

    fn attention(&mut self, layer: u32) -> Result<(), SynthError> {
        let shape = self.shape;
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(shape.hidden);
        let full = shape.full_attention_of(layer);
        let head_dim = u64::from(full.map_or(shape.head_dim, |full| full.head_dim));
        let heads = u64::from(shape.heads_of(layer));
        let queries = heads * head_dim;
        let keys = u64::from(shape.kv_heads_of(layer)) * head_dim;
        if shape.head_gates {
            self.matrix(name("attn_gate.weight"), Role::Other, layer, &[heads, hidden])?;
        }
        self.matrix(name("attn_k.weight"), Role::Key, layer, &[keys, hidden])?;
        self.matrix(name("attn_output.weight"), Role::AttentionOutput, layer, &[hidden, queries])?;
        let rows = if shape.output_gate { 2 * queries } else { queries };
        self.matrix(name("attn_q.weight"), Role::Query, layer, &[rows, hidden])?;
        if full.is_none() {
            self.matrix(name("attn_v.weight"), Role::Value, layer, &[keys, hidden])?;
        }
        let norms = match shape.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some((head_dim, head_dim)),
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
        match shape.indexer {
            Some(indexer) => self.mean_indexer(&indexer, layer),
            None => Ok(()),
        }
    }

    /// Adds the tensors of the indexer of usual attention, which chooses pools by the mean of their keys. Files have
    /// them in F32.
    fn mean_indexer(&mut self, indexer: &Indexer, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.indexer.{part}.weight");
        let hidden = u64::from(self.shape.hidden);
        let (heads, dim) = (u64::from(indexer.heads), u64::from(indexer.head_dim));
        self.vector(name("k_norm"), &[dim], 1.0);
        self.typed(name("k_proj"), TensorType::F32, &[dim, hidden])?;
        self.vector(name("q_norm"), &[dim], 1.0);
        self.typed(name("q_proj"), TensorType::F32, &[heads * dim, hidden])
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
        self.vector(name("ssm_a"), &[heads], DECAY);
        self.vector(name("ssm_conv1d.weight"), &[channels, u64::from(delta.convolution)], TAP);
        self.vector(name("ssm_dt.bias"), &[heads], 0.0);
        self.vector(name("ssm_norm.weight"), &[dim], 1.0);
        self.matrix(name("ssm_out.weight"), Role::Other, layer, &[hidden, values])
    }

    /// Adds the tensors of a delta network that forgets each channel at its own speed.
    fn channel_delta(&mut self, delta: &ChannelDelta, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(self.shape.hidden);
        let (heads, dim) = (u64::from(delta.heads), u64::from(delta.head_dim));
        let channels = heads * dim;
        for (part, role) in [("k", Role::Key), ("q", Role::Query), ("v", Role::Value)] {
            self.matrix(name(&format!("attn_{part}.weight")), role, layer, &[channels, hidden])?;
            let taps = [channels, 1, u64::from(delta.convolution)];
            self.vector(name(&format!("ssm_conv1d_{part}.weight")), &taps, TAP);
        }
        let output = [hidden, channels];
        self.matrix(name("attn_output.weight"), Role::AttentionOutput, layer, &output)?;
        let decays: &[u64] = if delta.full_gate { &[heads] } else { &[heads, 1] };
        self.vector(name("ssm_a"), decays, DECAY);
        self.matrix(name("ssm_beta.weight"), Role::Other, layer, &[heads, hidden])?;
        self.vector(name("ssm_dt.bias"), &[channels], 0.0);
        // Decays and the gate of the output are products of two matrices.
        let products: &[&str] = if delta.full_gate { &["f"] } else { &["f", "g"] };
        for part in products {
            let (a, b) = (format!("ssm_{part}_a.weight"), format!("ssm_{part}_b.weight"));
            self.matrix(name(&a), Role::Other, layer, &[dim, hidden])?;
            self.matrix(name(&b), Role::Other, layer, &[channels, dim])?;
        }
        if delta.full_gate {
            self.matrix(name("ssm_g.weight"), Role::Other, layer, &[channels, hidden])?;
        }
        self.vector(name("ssm_norm.weight"), &[dim], 1.0);
        Ok(())
    }

    /// Adds the tensors of a selective state space.
    fn mamba(&mut self, mamba: &Mamba, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let hidden = u64::from(self.shape.hidden);
        let (heads, groups) = (u64::from(mamba.heads), u64::from(mamba.groups));
        let inner = heads * u64::from(mamba.head_dim);
        // The convolution covers the values and the vectors that write to the state and read from it.
        let channels = inner + 2 * groups * u64::from(mamba.state);
        self.vector(name("ssm_a"), &[heads, 1], DECAY);
        self.vector(name("ssm_conv1d.bias"), &[channels], 0.0);
        self.vector(name("ssm_conv1d.weight"), &[channels, u64::from(mamba.convolution)], TAP);
        self.vector(name("ssm_d"), &[heads, 1], 1.0);
        self.vector(name("ssm_dt.bias"), &[heads], 0.0);
        let rows = inner + channels + heads;
        self.matrix(name("ssm_in.weight"), Role::Other, layer, &[rows, hidden])?;
        self.vector(name("ssm_norm.weight"), &[groups, inner / groups], 1.0);
        self.matrix(name("ssm_out.weight"), Role::Other, layer, &[hidden, inner])
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
        if let Some(indexer) = self.shape.indexer {
            self.indexer(&indexer, rank, layer)?;
        }
        if self.shape.element_gates {
            let gates = [heads * value, hidden];
            self.matrix(name("attn_gate.weight"), Role::Other, layer, &gates)?;
        }
        let output = [hidden, heads * value];
        self.matrix(name("attn_output.weight"), Role::AttentionOutput, layer, &output)
    }

    /// Adds the tensors of the indexer of sparse attention. Its queries are made from the vector of length `rank`.
    fn indexer(&mut self, indexer: &Indexer, rank: u64, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.indexer.{part}");
        let hidden = u64::from(self.shape.hidden);
        let (heads, dim) = (u64::from(indexer.heads), u64::from(indexer.head_dim));
        self.matrix(name("attn_k.weight"), Role::Other, layer, &[dim, hidden])?;
        self.matrix(name("attn_q_b.weight"), Role::Other, layer, &[heads * dim, rank])?;
        self.vector(name("k_norm.bias"), &[dim], 0.0);
        self.vector(name("k_norm.weight"), &[dim], 1.0);
        if let Pools::Gated(length) = indexer.pools {
            let name = |part: &str| format!("blk.{layer}.indexer_compressor_{part}.weight");
            self.vector(name("ape"), &[u64::from(length), dim], 0.0);
            self.matrix(name("gate"), Role::Other, layer, &[dim, hidden])?;
        }
        self.matrix(name("proj.weight"), Role::Other, layer, &[heads, hidden])
    }
}
