//! What layers do with outputs beside norms: gates of the residual stream, short convolutions, and spaces of experts.

use forebay_format::{Block, Extent, Step};

use super::layer::LayerBuilder;
use super::parts::{PartMatrix, RelativeWeights, ResidualGate};
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::Experts;

/// Smallest square of the factor of the residual stream.
const KEPT_MIN: f64 = 1e-3;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl LayerBuilder<'_> {
    /// Reads the gates of a block. Returns them with the share of the block's output: `sigmoid(g)`, where the factor of the residual
    /// stream is `sqrt(sigmoid(-g) * (1 + sigmoid(g)))`. Without gates, returns nothing.
    pub(super) fn residual_gate(
        &self,
        tensors: &mut Tensors<'_>,
        role: &str,
    ) -> Result<Option<(ResidualGate, Vec<f32>)>, ModelError> {
        let Some(temperature) = self.architecture.residual_gates else { return Ok(None) };
        let gates = tensors.vector(&self.name(role), self.architecture.hidden)?;
        let gates = || gates.iter().map(|gate| f64::from(*gate) / f64::from(temperature));
        let kept = |gate: f64| (sigmoid(-gate) * (1.0 + sigmoid(gate))).max(KEPT_MIN).sqrt() as f32;
        let keep = gates().map(kept).collect();
        let share = gates().map(|gate| sigmoid(gate) as f32).collect();
        tensors.count_bytes(4 * self.architecture.hidden as u64);
        Ok(Some((ResidualGate { keep, scale: None }, share)))
    }

    /// Reads the weights of the layer's short convolutions. Files hold them by channel.
    pub(super) fn convolutions(
        &self,
        tensors: &mut Tensors<'_>,
    ) -> Result<Option<Box<[Vec<f32>; 4]>>, ModelError> {
        let Some(taps) = self.architecture.convolutions else { return Ok(None) };
        let roles =
            ["k_convolution", "v_convolution", "attention_convolution", "feed_forward_convolution"];
        let mut found = [const { Vec::new() }; 4];
        let widths = self.architecture.convolved(self.index);
        for ((of, role), channels) in found.iter_mut().zip(roles).zip(widths) {
            let by_channel = tensors.convolution(&self.name(role), channels, taps)?;
            let at = |index: usize| by_channel[index % channels * taps + index / channels];
            *of = (0..taps * channels).map(at).collect();
        }
        Ok(Some(Box::new(found)))
    }

    /// Reads the factor of the feed-forward's output.
    pub(super) fn feed_forward_scale(
        &self,
        tensors: &mut Tensors<'_>,
        has_experts: bool,
    ) -> Result<f32, ModelError> {
        if !self.architecture.feed_forward_scales {
            return Ok(1.0);
        }
        let role = if has_experts { "expert_scale" } else { "dense_scale" };
        Ok(tensors.vector(&self.name(role), 1)?[0])
    }

    /// Appends the projection for biases by distance, and reads their profiles.
    pub(super) fn relative(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
    ) -> Result<Option<RelativeWeights>, ModelError> {
        let attention = self.architecture.attention_of(self.index);
        let Some(of) = attention.relative else { return Ok(None) };
        let (rows, hidden) = (attention.heads * of.rank, self.architecture.hidden);
        let project = self.matrix(tensors, dense, "relative", rows, hidden)?;
        let mut profiles = tensors.rows(&self.name("relative_profiles"), of.rank, of.extent)?;
        profiles.chunks_exact_mut(of.extent).for_each(<[f32]>::reverse);
        Ok(Some(RelativeWeights { project, profiles }))
    }

    /// Appends the projections to the space of the experts and back, if they have one.
    pub(super) fn latent_experts(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        experts: &Experts,
    ) -> Result<Option<[PartMatrix; 2]>, ModelError> {
        let Some(latent) = experts.latent else { return Ok(None) };
        let hidden = self.architecture.hidden;
        let down = self.matrix(tensors, dense, "latent_down", latent.width, hidden)?;
        let up = self.matrix(tensors, dense, "latent_up", hidden, latent.width)?;
        Ok(Some([down, up]))
    }

    /// Reads the factors of the output of every expert, with the weight of the norm after them, which is 1.
    pub(super) fn expert_output_norm(
        &self,
        tensors: &mut Tensors<'_>,
        experts: &Experts,
    ) -> Result<Option<[Vec<f32>; 2]>, ModelError> {
        if !experts.output_norms {
            return Ok(None);
        }
        let width = experts.outer_width(self.architecture.hidden);
        let factors = tensors.norm(&self.name("expert_output_norm"), width)?;
        Ok(Some([factors, tensors.ones(width)]))
    }

    /// Appends gate, up and down of a feed-forward whose rows of gate and up take turns in one matrix.
    pub(super) fn interleaved(
        &self,
        tensors: &Tensors<'_>,
        dense: &mut Block,
        width: usize,
    ) -> Result<[PartMatrix; 3], ModelError> {
        let hidden = self.architecture.hidden;
        let (both, extent) = tensors.matrix(&self.name("gate_up"), 2 * width, hidden)?;
        let part = push_turns(dense, extent, width);
        let half = |part| PartMatrix { part, rows: width, ..both };
        let down = self.matrix(tensors, dense, "down", hidden, width)?;
        Ok([half(part), half(part + 1), down])
    }

    /// Returns gate, up and down of every expert of a folder that holds them as stacks in which rows of gate and up take turns:
    /// those that are chosen, then those that every token uses.
    pub(super) fn interleaved_experts(
        &self,
        tensors: &Tensors<'_>,
        experts: &Experts,
    ) -> Result<([PartMatrix; 3], Vec<Block>), ModelError> {
        let Experts { count, always, width, .. } = *experts;
        let outer = experts.outer_width(self.architecture.hidden);
        let mut blocks = Vec::with_capacity(count);
        let mut matrices = None;
        for (gate_up, down, count) in [
            ("expert_gate_up", "expert_down_stack", count - always),
            ("always_gate_up", "always_down_stack", always),
        ] {
            if count == 0 {
                continue;
            }
            let stack = |role: &str, rows, cols| {
                let name = self.name(role);
                tensors.expert_matrices(&|_| name.clone(), count, rows, cols)
            };
            let (both, gate_ups) = stack(gate_up, 2 * width, outer)?;
            let (down, downs) = stack(down, outer, width)?;
            let (first, of_first) = *matrices.get_or_insert((both, down));
            if (both.ty, down.ty) != (first.ty, of_first.ty) {
                let found = both.ty.name();
                return Err(ModelError::TensorType { name: self.name(gate_up), found });
            }
            for (both, down) in gate_ups.into_iter().zip(downs) {
                let mut block = Block::default();
                push_turns(&mut block, both, width);
                block.push(down);
                blocks.push(block);
            }
        }
        let (both, down) = matrices.expect("there is at least one expert");
        let half = |part| PartMatrix { part, rows: width, ..both };
        Ok(([half(0), half(1), PartMatrix { part: 2, ..down }], blocks))
    }
}

/// Appends a matrix of `2 * width` rows that take turns. Returns the number of the first of its two parts.
fn push_turns(block: &mut Block, extent: Extent, width: usize) -> usize {
    let rows = 2 * width;
    let row_bytes = extent.length as usize / rows;
    block.push_quantized(&[extent], Step::Turns { extent: 0, rows, row_bytes, turns: 2 })
}
