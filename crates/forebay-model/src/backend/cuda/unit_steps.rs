//! Steps of a layer whose unit is not in VRAM.

use forebay_compute::Cpu;
use forebay_cuda::{Added, DevicePtr};

use super::backend::CudaBackend;
use super::streamed_units::StreamedUnits;
use crate::ModelError;
use crate::backend::Step;
use crate::sharing::feed_forward_of;
use crate::weights::PartMatrix;

impl CudaBackend {
    /// Sees to it that kernels or the CPU find a unit, wherever it lives.
    pub fn enter_unit(&mut self, unit: usize) -> Result<(), ModelError> {
        match &mut self.units {
            Some(units) if !self.plan.units.units[unit].in_vram => units.enter(&self.gpu, unit),
            _ => Ok(()),
        }
    }

    /// Ends a unit that was entered.
    pub fn leave_unit(&mut self, unit: usize) -> Result<(), ModelError> {
        match &mut self.units {
            Some(units) if !self.plan.units.units[unit].in_vram => units.leave(&self.gpu),
            _ => Ok(()),
        }
    }

    /// Where the norm before a layer's feed-forward writes its input and the norm behind it finds its output, if the CPU
    /// computes it.
    pub fn exchanged(&self, layer: usize) -> Option<[DevicePtr<f32>; 2]> {
        self.units.as_ref().and_then(|units| units.exchanged(feed_forward_of(layer)))
    }

    /// What computes beside the GPU, if something does.
    pub fn cpu_beside(&self) -> Option<&Cpu> {
        self.units.as_ref().and_then(StreamedUnits::cpu)
    }

    /// Has the CPU compute the feed-forward that was entered, gate, up and down, if it is to; whether it did.
    pub fn compute_unit_on_cpu(
        &mut self,
        step: &Step<'_>,
        matrices: [PartMatrix; 3],
    ) -> Result<bool, ModelError> {
        let (Some([_, out]), Some(units)) = (self.exchanged(step.layer), &mut self.units) else {
            return Ok(false);
        };
        let gating = step.architecture.gating;
        units.compute_on_cpu(&self.gpu, matrices, gating, step.count)?;
        self.outputs = Some(Added::Rows(out));
        Ok(true)
    }
}
