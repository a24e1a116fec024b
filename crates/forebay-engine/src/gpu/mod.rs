//! Everything that the rest of this crate needs from GPUs. `no_gpu.rs` replaces this module in a build without CUDA.

mod open;
mod place;

use forebay_cuda::{CudaError, Gpu};
pub use forebay_model::DeviceFacts as Facts;
use forebay_model::{CudaPlan, DeviceShare, KvCapacity, ModelError};

pub(crate) use crate::doctor::gpu_measure::measure;
pub(crate) use crate::load::device::load;
pub(crate) use crate::load::hold_chosen;
pub(crate) use crate::load::hold_device::{KeptRing, Pool, hold};
pub(crate) use forebay_model::CudaPlan as GpuPlan;
pub(crate) use open::Opening;

use crate::gpu_error::GpuError;
use crate::plan::PlanError;
use crate::plan::{PlanRequest, PlannedModel};
use crate::{SessionOptions, device};

/// Returns true if an error means that no GPU can be used, whatever the model.
pub(crate) fn is_unusable(error: &PlanError) -> bool {
    matches!(error, PlanError::Gpu(_))
}

/// Returns the error in words, and true if it is worth a message to a user who did not ask for a GPU. A missing driver
/// is not worth one.
pub(crate) fn why_unusable(error: PlanError) -> (String, bool) {
    match error {
        PlanError::Gpu(GpuError::Cuda(error)) => (error.to_string(), error != CudaError::NoDriver),
        other => (other.to_string(), true),
    }
}

/// Returns the estimated facts of a GPU that is not open.
pub(crate) fn estimate(multiprocessors: u32, total_bytes: u64) -> Option<Facts> {
    Some(Facts::estimate(multiprocessors, total_bytes))
}

/// Returns the facts that the GPU reports about itself, or `None` if there is no such GPU.
pub(crate) fn facts(ordinal: usize) -> Option<Facts> {
    Facts::of(&Gpu::open(ordinal).ok()?).ok()
}

pub(crate) fn total_bytes(facts: &Facts) -> u64 {
    facts.total_bytes
}

/// Returns the error for a GPU plan without a GPU in the profile.
pub(crate) fn none_in_profile() -> PlanError {
    PlanError::NoGpuInProfile
}

/// Returns how much of a model fits in the GPU's memory.
///
/// # Errors
/// Returns an error if there is too little memory, and names the amount that works. Returns an error if there are no
/// kernels for the weights or the router.
pub(crate) fn share(
    model: &PlannedModel,
    facts: &Facts,
    request: &PlanRequest,
) -> Result<DeviceShare, ModelError> {
    let PlannedModel { architecture, weights, .. } = model;
    let sequences = request.work.sequences.max(1);
    let PlanRequest { context, kv_in_vram: in_vram, .. } = *request;
    let capacity = KvCapacity { context, sequences, tokens: None, in_vram };
    let cache = CudaPlan::cache(request.cache, capacity);
    facts.plan(architecture, weights, cache, request.vram_bytes, request.policy)
}

/// A GPU that stays open while no session uses it, so that the next session need not open it and load its kernels again.
pub struct OpenGpu(Gpu);

impl OpenGpu {
    /// Opens the GPU that sessions with `options` will ask for. Returns `None` if they will not ask for one, or if it cannot
    /// be used.
    pub fn open(options: &SessionOptions) -> Option<OpenGpu> {
        Gpu::open(device::wanted_gpu(options)?).ok().map(OpenGpu)
    }

    fn facts(&self) -> Result<Facts, PlanError> {
        Ok(Facts::of(&self.0)?)
    }

    /// Returns the bytes that models have in the GPU's memory now, within a budget for everything on the GPU.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn room_bytes(&self, vram_bytes: Option<u64>) -> Result<u64, PlanError> {
        Ok(self.facts()?.room_bytes(vram_bytes))
    }

    /// Returns the VRAM budget of a session that may take `bytes` beside the sessions that are open.
    ///
    /// # Errors
    /// Returns an error if the driver fails.
    pub fn budget_bytes(&self, bytes: u64) -> Result<u64, PlanError> {
        Ok(bytes + self.facts()?.context_bytes())
    }
}

/// Returns the bytes that a whole model takes in the GPU's memory, without the driver's context.
///
/// # Errors
/// Returns an error if there are no kernels for the weights or the router, or if the driver fails.
pub(crate) fn whole_bytes(
    model: &PlannedModel,
    gpu: &OpenGpu,
    options: &SessionOptions,
    capacity: KvCapacity,
) -> Result<u64, ModelError> {
    let PlannedModel { architecture, weights, .. } = model;
    let cache = CudaPlan::cache(options.kv_type(), capacity);
    // As much memory as any model needs.
    let facts = Facts { free_bytes: 1 << 60, total_bytes: 1 << 60, ..Facts::of(&gpu.0)? };
    let vram = facts.plan(architecture, weights, cache, None, options.policy)?.vram;
    Ok(vram.total_bytes - vram.context_bytes)
}

impl PlannedModel {
    /// Returns how much of the model fits in the GPU's memory.
    ///
    /// # Errors
    /// Returns an error if there is too little memory, and names the amount that works. Returns an error if there are
    /// no kernels for the weights or the router.
    pub fn in_vram(&self, facts: &Facts, request: &PlanRequest) -> Result<DeviceShare, ModelError> {
        share(self, facts, request)
    }
}

#[cfg(test)]
mod tests {
    use forebay_ops::{KV_BLOCK, KvType};

    use crate::plan::row_bytes;

    /// Plans on machines without a GPU use `row_bytes` of `plan/model.rs`. Sessions use the sizes of the backend.
    #[test]
    fn plans_count_keys_and_values_as_the_backend_does() {
        for kind in [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0] {
            for (dim_k, dim_v, values_in_keys) in
                [(64, 64, false), (33, 17, false), (576, 512, true)]
            {
                let shape = forebay_cuda::KvLayerShape {
                    values_in_keys,
                    ..forebay_cuda::KvLayerShape::new(kind, 3, (dim_k, dim_v), 1)
                };
                let values = if values_in_keys { 0 } else { row_bytes(kind, dim_v) };
                let planned = 3 * (row_bytes(kind, dim_k) + values);
                let block = KV_BLOCK as u64;
                assert_eq!(block * planned, shape.block_bytes(), "{kind:?} {dim_k}");
            }
        }
    }
}
