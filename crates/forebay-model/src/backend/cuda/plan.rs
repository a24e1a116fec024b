//! From a model that is described to one on a GPU.

use forebay_cuda::{Gpu, KvLayerShape, MATVEC_TOKENS, ModelKernels, modules_needed};
use forebay_store::UploadPart;
use forebay_stream::{MemoryPlan, PolicyKind};

use super::CudaBackend;
use super::memory::{self, DeviceArena, DeviceFacts, DevicePlan};
use super::on_cpu::expert_matrices;
use super::recording::Recordings;
use super::streamed::{HostExperts, Streamed};
use crate::ModelError;
use crate::arch::Architecture;
use crate::weights::Weights;

/// A model that was found to fit a GPU, before its weights are read.
pub struct CudaPlan {
    gpu: Gpu,
    plan: DevicePlan,
    exact: bool,
    record: bool,
}

impl CudaPlan {
    /// Finds out how a model fits `gpu` with such a cache, or how many of its last layers do; `exact` computes in f32
    /// throughout. `vram_bytes` bounds all device memory, the driver's context included; `policy` says which experts
    /// stay if not all fit.
    ///
    /// # Errors
    /// [`ModelError::VramTooSmall`]; weights or routers that have no kernels; whatever the driver says.
    pub fn new(
        gpu: Gpu,
        architecture: &Architecture,
        weights: &Weights,
        cache: KvLayerShape,
        exact: bool,
        vram_bytes: Option<u64>,
        policy: PolicyKind,
    ) -> Result<CudaPlan, ModelError> {
        let facts = DeviceFacts::of(&gpu)?;
        let plan = DevicePlan::new(&facts, architecture, weights, cache, vram_bytes, policy)?;
        Ok(CudaPlan { gpu, plan, exact, record: true })
    }

    /// Queues every kernel by itself, where single tokens' work would be recorded as a CUDA graph. Same results.
    pub fn without_graphs(mut self) -> CudaPlan {
        self.record = false;
        self
    }

    /// Slots for experts, if not all of them fit.
    pub fn slots(&self) -> Option<&MemoryPlan> {
        self.plan.tier.as_ref().map(|tier| &tier.plan)
    }

    /// The first layer that the GPU has room for, which is not 0 if a dense model does not fit: another backend has to compute
    /// those before it.
    pub fn first_layer(&self) -> usize {
        self.plan.first_layer
    }

    /// Reserves the memory and has `fill` bring the weights into it: all parts must be there when it returns. It may load
    /// the modules meanwhile; those that it leaves are loaded when they are first needed. What it returns comes back, but for
    /// the experts, which it gives where [`CudaPlan::slots`] are not enough for all.
    ///
    /// # Errors
    /// Memory that somebody else took meanwhile, a failed device, and what `fill` says.
    pub fn load<T, E: From<ModelError>>(
        self,
        architecture: &Architecture,
        weights: &Weights,
        fill: impl FnOnce(&WeightsToLoad<'_>) -> Result<(Option<HostExperts>, T), E>,
    ) -> Result<(CudaBackend, T), E> {
        let CudaPlan { gpu, plan, exact, record } = self;
        let arena = DeviceArena::reserve(&gpu, &plan).map_err(ModelError::from)?;
        let types = weights.types_without_routers();
        let router = weights.routers().next().map(|router| (router.ty, router.rows));
        let modules = modules_needed(&ModelKernels {
            types: &types,
            embedding: weights.embedding.ty,
            kv: &plan.kv_shape,
            router,
            exact,
        });
        let parts = memory::parts(&plan, &arena, weights);
        let (host, filled) = fill(&WeightsToLoad { gpu: &gpu, parts, modules })?;
        let mut backend = CudaBackend::new(gpu, plan, arena, architecture, weights, exact, record)?;
        if backend.plan.tier.is_some() {
            let host = host.expect("experts that are not on the GPU are in host memory");
            let sizes = (backend.at().batch, MATVEC_TOKENS, architecture.experts_per_token());
            let of = weights.layers.iter().find_map(expert_matrices);
            let of = of.expect("a model with slots for experts has some");
            // Exact products go by the experts' order, not by that of the choice.
            let serves = record && !exact;
            let streamed = Streamed::new(&backend.gpu, &backend.plan, host, sizes, &of, serves);
            let streamed = streamed.map_err(ModelError::from)?;
            backend.recordings = Recordings::new(streamed.serves());
            backend.streamed = Some(streamed);
        }
        Ok((backend, filled))
    }
}

/// What a GPU still lacks of a model that memory is reserved for.
pub struct WeightsToLoad<'a> {
    pub gpu: &'a Gpu,
    /// Everything that comes from files as it is, with addresses of the GPU.
    pub parts: Vec<UploadPart>,
    /// For [`Gpu::load_modules`].
    pub modules: Vec<&'static str>,
}
