//! Steps of a layer whose unit is not in VRAM.

use forebay_compute::Cpu;
use forebay_cuda::{Added, DevicePtr};

use super::backend::CudaBackend;
use super::streamed_sub_layers::StreamedSubLayers;
use crate::ModelError;
use crate::backend::Step;
use crate::sharing::feed_forward_of;
use crate::weights::PartMatrix;

impl CudaBackend {
    /// Sees to it that kernels or the CPU find a unit, wherever it lives.
    pub fn enter_sub_layer(&mut self, sub_layer: usize) -> Result<(), ModelError> {
        match &mut self.sub_layers {
            Some(sub_layers) if !self.plan.sub_layers.sub_layers[sub_layer].in_vram => {
                sub_layers.enter(&self.gpu, sub_layer)
            }
            _ => Ok(()),
        }
    }

    /// Ends a unit that was entered.
    pub fn leave_sub_layer(&mut self, sub_layer: usize) -> Result<(), ModelError> {
        match &mut self.sub_layers {
            Some(sub_layers) if !self.plan.sub_layers.sub_layers[sub_layer].in_vram => {
                sub_layers.leave(&self.gpu)
            }
            _ => Ok(()),
        }
    }

    /// Where the norm before a layer's feed-forward writes its input and the norm behind it finds its output, if the CPU
    /// computes it.
    pub fn exchanged(&self, layer: usize) -> Option<[DevicePtr<f32>; 2]> {
        self.sub_layers.as_ref().and_then(|sub_layers| sub_layers.exchanged(feed_forward_of(layer)))
    }

    /// What computes beside the GPU, if something does.
    pub fn cpu_beside(&self) -> Option<&Cpu> {
        self.sub_layers.as_ref().and_then(StreamedSubLayers::cpu)
    }

    /// Has the CPU compute the feed-forward that was entered, gate, up and down, if it is to; whether it did.
    pub fn compute_sub_layer_on_cpu(
        &mut self,
        step: &Step<'_>,
        matrices: [PartMatrix; 3],
    ) -> Result<bool, ModelError> {
        let (Some([_, out]), Some(sub_layers)) = (self.exchanged(step.layer), &mut self.sub_layers)
        else {
            return Ok(false);
        };
        let gating = step.architecture.gating;
        sub_layers.compute_on_cpu(&self.gpu, matrices, gating, step.count)?;
        self.outputs = Some(Added::Rows(out));
        Ok(true)
    }
}
