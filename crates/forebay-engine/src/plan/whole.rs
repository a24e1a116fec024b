//! Memory that models take beside each other.

use forebay_model::{CacheSize, cache_bytes};
use forebay_stream::Budget;

use super::PlanError;
use super::PlannedModel;
use crate::device::wanted_gpu;
use crate::gpu::{self, OpenGpu};
use crate::{DeviceChoice, Session, SessionOptions};

/// Memory of a model, in bytes, without what all models share, such as the driver's context.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ModelMemory {
    pub vram_bytes: u64,
    /// RAM for weights.
    pub ram_bytes: u64,
    /// RAM for keys and values. They are not part of a RAM budget.
    pub ram_kv_cache_bytes: u64,
}

impl PlannedModel {
    /// Returns the memory that a session with `options` takes if all weights are in VRAM, or in RAM if there is no GPU that
    /// it could use.
    ///
    /// # Errors
    /// Returns an error if an option does not fit the model.
    pub fn whole(
        &self,
        options: &SessionOptions,
        gpu: Option<&OpenGpu>,
    ) -> Result<ModelMemory, PlanError> {
        let context = self.context(options)?;
        let capacity = options.kv_capacity(context)?;
        if let Some(gpu) = gpu.filter(|_| wanted_gpu(options).is_some()) {
            match gpu::whole_bytes(self, gpu, options, capacity) {
                Ok(vram_bytes) => return Ok(ModelMemory { vram_bytes, ..ModelMemory::default() }),
                Err(_) if options.device == DeviceChoice::Auto => {}
                Err(error) => return Err(error.into()),
            }
        }
        let weights = &self.weights;
        let plan = Budget::plan(&weights.blocks, None, weights.small_bytes, options.policy)?;
        let size = CacheSize { kind: options.kv_type(), capacity };
        Ok(ModelMemory {
            vram_bytes: 0,
            ram_bytes: plan.arena_bytes + plan.reserved_bytes,
            ram_kv_cache_bytes: cache_bytes(&self.architecture, size),
        })
    }
}

impl Session {
    /// Returns the memory that the session holds.
    pub fn memory(&self) -> ModelMemory {
        let backend = self.runner.decoder.backend();
        let vram = backend.info().vram;
        let ram_bytes = self.plan().map_or(0, |plan| plan.arena_bytes + plan.reserved_bytes);
        ModelMemory {
            vram_bytes: vram.as_ref().map_or(0, |vram| vram.total_bytes - vram.context_bytes),
            ram_bytes,
            ram_kv_cache_bytes: match &vram {
                Some(vram) => vram.kv_cache_in_ram_bytes,
                None => backend.cache_bytes(),
            },
        }
    }
}
