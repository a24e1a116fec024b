//! The weights of a recurrent layer with the gated delta rule.

use forebay_compute::{DeltaColumns, HeadColumns};
use forebay_format::Block;

use super::layer::LayerBuilder;
use super::parts::DeltaWeights;
use super::tensors::Tensors;
use crate::ModelError;
use crate::arch::{Naming, Recurrent};

impl LayerBuilder<'_> {
    /// Adds the projections of a recurrent layer to the dense block, and reads its vectors. Files hold queries, keys, values and
    /// gates in one matrix, ordered by key head, or in two. The same holds for the shares of replacement and steps.
    pub(super) fn delta(
        &self,
        tensors: &mut Tensors<'_>,
        dense: &mut Block,
        shape: &Recurrent,
    ) -> Result<DeltaWeights, ModelError> {
        let hidden = self.architecture.hidden;
        let (keys, values) = (shape.key_heads * shape.key_dim, shape.value_width());
        let (heads, per_key) = (shape.value_heads, shape.value_heads / shape.key_heads);
        let (dim, of_values) = (shape.key_dim, per_key * shape.value_dim);
        let columns = |first, step| HeadColumns { first, step };
        let has = |tensors: &Tensors<'_>, role: &str| tensors.optional(&self.name(role)).is_some();
        let (qkv, z, [q_at, k_at, v_at, z_at]) = if has(tensors, "delta_qkvz") {
            let all = self.matrix(tensors, dense, "delta_qkvz", 2 * (keys + values), hidden)?;
            let step = 2 * (dim + of_values);
            let first = [0, dim, 2 * dim, 2 * dim + of_values];
            (all, None, first.map(|first| columns(first, step)))
        } else {
            let qkv = self.matrix(tensors, dense, "delta_qkv", 2 * keys + values, hidden)?;
            let z = self.matrix(tensors, dense, "delta_z", values, hidden)?;
            let [q, k] = [0, keys].map(|first| columns(first, dim));
            (qkv, Some(z), [q, k, columns(2 * keys, of_values), columns(0, of_values)])
        };
        let (b, a, [b_at, a_at]) = if has(tensors, "delta_ba") {
            let both = self.matrix(tensors, dense, "delta_ba", 2 * heads, hidden)?;
            (both, None, [0, per_key].map(|first| columns(first, 2 * per_key)))
        } else {
            let b = self.matrix(tensors, dense, "delta_b", heads, hidden)?;
            let a = self.matrix(tensors, dense, "delta_a", heads, hidden)?;
            (b, Some(a), [columns(0, per_key); 2])
        };
        let mut decay = tensors.vector(&self.name("delta_decay"), heads)?;
        if let Naming::HuggingFace { .. } = self.architecture.naming {
            // The logarithm of the rate. GGUF files hold the rate itself.
            decay.iter_mut().for_each(|rate| *rate = -rate.exp());
        }
        let (channels, width) = (shape.channels(), shape.convolution);
        let by_channel = tensors.convolution(&self.name("delta_convolution"), channels, width)?;
        let at = |index: usize| by_channel[index % channels * width + index / channels];
        Ok(DeltaWeights {
            qkv,
            z,
            b,
            a,
            columns: DeltaColumns { q: q_at, k: k_at, v: v_at, z: z_at, b: b_at, a: a_at },
            convolution: (0..width * channels).map(at).collect(),
            decay,
            step: tensors.vector(&self.name("delta_step"), heads)?,
            norm: tensors.vector(&self.name("delta_norm"), shape.value_dim)?,
        })
    }
}
