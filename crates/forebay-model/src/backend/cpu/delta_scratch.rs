//! Activations of recurrent layers.

use forebay_compute::{DeltaShape, StateRun};

use crate::arch::{Architecture, HeadOrder, Recurrent};

/// Activations of recurrent layers, for one batch.
#[derive(Default)]
pub struct DeltaScratch {
    pub(super) qkv: Vec<f32>,
    pub(super) z: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) a: Vec<f32>,
    /// What [`forebay_compute::Cpu::gated_delta`] needs.
    pub(super) scratch: Vec<f32>,
    /// Always empty between calls; kept for its memory.
    pub(super) runs: Vec<StateRun>,
}

impl Recurrent {
    /// Returns the shape for the operations.
    pub(crate) fn delta_shape(&self) -> DeltaShape {
        DeltaShape {
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            convolution: self.convolution,
            tiled: self.head_order == HeadOrder::Tiled,
        }
    }
}

impl DeltaScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> DeltaScratch {
        let Some(shape) = &architecture.recurrent else { return DeltaScratch::default() };
        let floats = |width: usize| vec![0.0; batch * width];
        DeltaScratch {
            qkv: floats(shape.channels() + shape.value_width()),
            z: floats(shape.value_width()),
            b: floats(2 * shape.value_heads),
            a: floats(shape.value_heads),
            scratch: floats(shape.delta_shape().scratch_floats()),
            runs: Vec::with_capacity(batch),
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        architecture.recurrent.map_or(0, |shape| {
            shape.channels()
                + 2 * shape.value_width()
                + 3 * shape.value_heads
                + shape.delta_shape().scratch_floats()
        })
    }
}
