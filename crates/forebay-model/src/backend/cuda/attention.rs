//! The attention block: projections, the way into the cache, attention, output projection.

use forebay_compute::RopeLayout;
use forebay_cuda::{
    Added, Attention, AttentionInputs, AttentionScratch, HeadInput, Norm, Normed, Rotation,
    rounds_outputs, takes_inputs,
};

use super::vectors::optional;
use super::{CudaBackend, Step};
use crate::ModelError;
use crate::arch::QkNorm;
use crate::weights::{AttentionWeights, GroupedWeights};

impl CudaBackend {
    pub(super) fn project_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        match &step.layer_weights().attention {
            AttentionWeights::Grouped(weights) => self.project_grouped(step, weights),
            AttentionWeights::Latent(_) => unreachable!("the plan refused it"),
        }
    }

    fn project_grouped(
        &mut self,
        step: &Step<'_>,
        weights: &GroupedWeights,
    ) -> Result<(), ModelError> {
        let (at, vectors) = (self.at(), self.layer_vectors(step));
        let products = [
            self.product(step, weights.q, at.q),
            self.product(step, weights.k, at.k),
            self.product(step, weights.v, at.v),
        ];
        let gpu = &self.gpu;
        self.products.dense(gpu, self.float(at.normed), step.count, &products)?;
        let input = |projected: u64, bias: Option<usize>, norm: Option<usize>| HeadInput {
            projected: self.float(projected),
            bias: optional(self.vectors(), bias),
            norm: optional(self.vectors(), norm),
        };
        let mut q = input(at.q, vectors.q_bias, vectors.q_norm);
        let mut k = input(at.k, vectors.k_bias, vectors.k_norm);
        let epsilon = step.architecture.norm_epsilon;
        if step.architecture.attention.qk_norm == QkNorm::WholeProjection {
            for (input, width) in [(&mut q, weights.q.rows), (&mut k, weights.k.rows)] {
                if !input.bias.is_null() {
                    gpu.add_bias_rows(input.projected, input.bias, step.count, width)?;
                }
                let norm = Norm { weight: input.norm, width, epsilon };
                let rows = input.projected;
                gpu.rms_norm(rows, Added::Nothing, &norm, Normed::plain(rows), step.count, None)?;
                *input = HeadInput::plain(input.projected);
            }
        }
        let index = step.architecture.layers[step.layer].rope;
        let rope = &step.architecture.ropes[index];
        let inputs = AttentionInputs {
            q,
            k,
            key_norm_dim: step.architecture.attention.head_dim,
            v: input(at.v, vectors.v_bias, None),
            heads: step.architecture.attention.heads,
            norm_epsilon: epsilon,
            rotation: Some(Rotation {
                angles: self.float(at.ropes[index]),
                rotary_dim: rope.rotary_dim,
                rotary_from: 0,
                interleaved: rope.layout == RopeLayout::Interleaved,
            }),
            positions: self.exchange.positions(),
        };
        if takes_inputs(&self.plan.kv_shape, step.count) {
            self.inputs = Some(inputs);
        } else {
            gpu.attention_inputs(&inputs, &self.kv_layer(step), step.count)?;
        }
        Ok(())
    }

    pub(super) fn attend_layer(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let inputs = self.inputs.take();
        let (attention, at) = (&step.architecture.attention, self.at());
        let splits = self.attention_splits(step);
        let (shape, out) = (&self.plan.kv_shape, self.float(at.attended));
        let rounded = match rounds_outputs(shape, step.count) {
            true => self.products.rounded_too(out, step.count, attention.heads * shape.dim_v),
            false => None,
        };
        if rounded.is_none() {
            self.products.changed(out);
        }
        let what = Attention {
            q: self.float(at.q),
            out,
            inputs,
            rounded,
            first_position: self.exchange.positions(),
            tokens: step.count,
            heads: attention.heads,
            scale: attention.scale,
            window: step.architecture.layers[step.layer].window,
            softcap: attention.softcap,
            sinks: optional(self.vectors(), self.layer_vectors(step).sinks),
        };
        let scratch = AttentionScratch {
            parts: self.float(at.attention_parts),
            tickets: self.arena.activation(at.attention_tickets),
            size: at.attention_size,
        };
        self.gpu.attention(&what, &self.kv_layer(step), splits, &scratch)?;
        Ok(())
    }

    pub(super) fn project_layer_output(&mut self, step: &Step<'_>) -> Result<(), ModelError> {
        let at = self.at();
        let product = self.product(step, step.layer_weights().o, at.block_out);
        self.products.dense(&self.gpu, self.float(at.attended), step.count, &[product])?;
        if let Some(bias) = self.layer_vectors(step).o_bias {
            let bias = self.vectors().offset(bias);
            self.gpu.add_bias_rows(product.out, bias, step.count, step.architecture.hidden)?;
        }
        Ok(())
    }
}
