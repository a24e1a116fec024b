//! Steps of a layer whose sub-layers may be outside VRAM.

use forebay_compute::Cpu;
use forebay_cuda::{Added, DevicePtr};

use super::backend::CudaBackend;
use super::layer_ring::LayerRing;
use crate::ModelError;
use crate::backend::Step;
use crate::sharing::feed_forward_of;
use crate::weights::PartMatrix;

impl CudaBackend {
    /// Makes a sub-layer available to kernels or to the CPU, wherever it is.
    pub fn enter_sub_layer(&mut self, sub_layer: usize) -> Result<(), ModelError> {
        match &mut self.sub_layers {
            Some(sub_layers) if !self.plan.sub_layers.sub_layers[sub_layer].in_vram => {
                sub_layers.enter(&self.gpu, sub_layer)
            }
            _ => Ok(()),
        }
    }

    /// Ends a sub-layer that was entered.
    pub fn leave_sub_layer(&mut self, sub_layer: usize) -> Result<(), ModelError> {
        match &mut self.sub_layers {
            Some(sub_layers) if !self.plan.sub_layers.sub_layers[sub_layer].in_vram => {
                sub_layers.leave(&self.gpu)
            }
            _ => Ok(()),
        }
    }

    /// Returns where the norm before a layer's feed-forward writes its input and where the norm after it reads its
    /// output. Returns `None` unless the CPU computes the feed-forward.
    pub fn exchanged(&self, layer: usize) -> Option<[DevicePtr<f32>; 2]> {
        self.sub_layers.as_ref().and_then(|sub_layers| sub_layers.exchanged(feed_forward_of(layer)))
    }

    /// Returns the CPU that computes sub-layers beside the GPU, if there is one.
    pub fn cpu_beside(&self) -> Option<&Cpu> {
        self.sub_layers.as_ref().and_then(LayerRing::cpu)
    }

    /// Computes the feed-forward that was entered (gate, up and down) on the CPU, if it is assigned to the CPU.
    /// Returns true if it is.
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
