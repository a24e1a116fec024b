//! Tensors of attention with one key for all heads, of residual streams, and of tables that give the experts of tokens.

use forebay_format::TensorType;
use forebay_format::random_weights::Content;

use super::super::error::SynthError;
use super::super::recipe::Role;
use super::super::shapes::{Experts, Indexer, SharedKeys};
use super::{List, PlannedTensor};

impl List<'_> {
    /// Adds the tensors of attention with one key for all heads.
    pub fn shared_keys(&mut self, of: &SharedKeys, layer: u32) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let (hidden, heads) = (u64::from(self.shape.hidden), u64::from(self.shape.heads));
        let (dim, rank) = (u64::from(self.shape.head_dim), u64::from(of.query_rank));
        let groups = u64::from(of.output_groups);
        let joined = groups * u64::from(of.output_rank);
        self.vector(name("attn_sinks.weight"), &[heads], 0.0);
        self.vector(name("attn_kv_a_norm.weight"), &[dim], 1.0);
        self.vector(name("attn_q_a_norm.weight"), &[rank], 1.0);
        self.matrix(name("attn_kv.weight"), Role::Other, layer, &[dim, hidden])?;
        let of_group = [joined, heads * dim / groups];
        self.matrix(name("attn_output_a.weight"), Role::Other, layer, &of_group)?;
        self.matrix(name("attn_output_b.weight"), Role::Other, layer, &[hidden, joined])?;
        self.matrix(name("attn_q_a.weight"), Role::Other, layer, &[rank, hidden])?;
        self.matrix(name("attn_q_b.weight"), Role::Other, layer, &[heads * dim, rank])?;
        let ratio = of.ratio(layer);
        if ratio > 0 {
            self.compressor("attn", layer, (ratio, of.overlaps(ratio)), dim)?;
        }
        match self.shape.indexer {
            Some(indexer) if of.overlaps(ratio) => self.entry_indexer(&indexer, rank, ratio, layer),
            _ => Ok(()),
        }
    }

    /// Adds the tensors that make entries of `dim` elements from so many positions. Entries that overlap have two parts.
    fn compressor(
        &mut self,
        of: &str,
        layer: u32,
        (ratio, overlaps): (u32, bool),
        dim: u64,
    ) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.{of}_compressor_{part}.weight");
        let hidden = u64::from(self.shape.hidden);
        let width = if overlaps { 2 * dim } else { dim };
        self.vector(name("ape"), &[u64::from(ratio), width], 0.0);
        self.vector(name("norm"), &[dim], 1.0);
        self.matrix(name("gate"), Role::Other, layer, &[width, hidden])?;
        self.matrix(name("kv"), Role::Other, layer, &[width, hidden])
    }

    fn entry_indexer(
        &mut self,
        indexer: &Indexer,
        rank: u64,
        ratio: u32,
        layer: u32,
    ) -> Result<(), SynthError> {
        let name = |part: &str| format!("blk.{layer}.indexer.{part}.weight");
        let (heads, dim) = (u64::from(indexer.heads), u64::from(indexer.head_dim));
        self.compressor("indexer", layer, (ratio, true), dim)?;
        let hidden = u64::from(self.shape.hidden);
        self.matrix(name("proj"), Role::Other, layer, &[heads, hidden])?;
        self.matrix(name("attn_q_b"), Role::Other, layer, &[heads * dim, rank])
    }

    /// Adds the tensors that mix residual streams, for both blocks of a layer.
    pub fn streams(&mut self, streams: u32, layer: u32) -> Result<(), SynthError> {
        let streams = u64::from(streams);
        let coefficients = streams * (2 + streams);
        for block in ["attn", "ffn"] {
            let name = |part: &str| format!("blk.{layer}.hc_{block}_{part}.weight");
            self.stream_tensors(name, coefficients, 3, streams)?;
        }
        Ok(())
    }

    /// Adds the tensors that collapse the streams behind the last layer.
    pub fn streams_end(&mut self, of: &SharedKeys) -> Result<(), SynthError> {
        let streams = u64::from(of.streams);
        self.stream_tensors(|part| format!("output_hc_{part}.weight"), streams, 1, streams)
    }

    fn stream_tensors(
        &mut self,
        name: impl Fn(&str) -> String,
        coefficients: u64,
        scales: u64,
        streams: u64,
    ) -> Result<(), SynthError> {
        let width = streams * u64::from(self.shape.hidden);
        self.vector(name("base"), &[coefficients], 0.0);
        self.typed(name("fn"), TensorType::F32, &[coefficients, width])?;
        self.vector(name("scale"), &[scales], 1.0);
        Ok(())
    }

    /// Adds the table of a layer whose experts depend on the token alone.
    pub fn experts_of_tokens(&mut self, experts: &Experts, layer: u32) {
        self.tensors.push(PlannedTensor {
            name: format!("blk.{layer}.ffn_gate_tid2eid.weight"),
            ty: TensorType::I32,
            shape: vec![u64::from(self.shape.vocabulary), u64::from(experts.used)],
            content: Content::Choices { of: experts.experts, count: experts.used },
        });
    }
}
