//! From a model that is described to one on a GPU.

use forebay_cuda::{
    CudaError, DevicePtr, Gpu, KvElement, KvLayerShape, MATVEC_TOKENS, ModelKernels, modules_needed,
};
use forebay_store::{FileSet, UploadPart};
use forebay_stream::{MemoryPlan, PolicyKind};

use super::backend::CudaBackend;
use super::embedding::EmbeddingRows;
use super::graphs::Graphs;
use super::memory::{DeviceArena, DeviceFacts, DevicePlan};
use super::on_cpu::expert_matrices;
use super::placed::upload_parts;
use super::relayout::relayout_all;
use super::streamed::{HostExperts, Streamed};
use super::streamed_sub_layers::{HostSubLayers, StreamedSubLayers};
use crate::ModelError;
use crate::arch::Architecture;
use crate::sharing::{SubLayerPlan, SubLayerRates};
use crate::weights::Weights;

/// A model that was found to fit a GPU, before its weights are read.
pub struct CudaPlan {
    gpu: Gpu,
    plan: DevicePlan,
    exact: bool,
    record: bool,
    sub_layer_rates: Option<SubLayerRates>,
}

impl CudaPlan {
    /// The key/value cache of a layer that keeps all of `context` positions.
    pub fn cache(architecture: &Architecture, context: usize, element: KvElement) -> KvLayerShape {
        let attention = &architecture.attention;
        KvLayerShape {
            element,
            kv_heads: attention.kv_heads,
            dim_k: attention.head_dim,
            dim_v: attention.value_dim,
            values_in_keys: attention.latent.is_some(),
            context,
            rows: context,
        }
    }

    /// Finds out how much of a model `gpu` has room for with such a cache; `exact` computes in f32 throughout.
    /// `vram_bytes` bounds all device memory, the driver's context included; `policy` says which experts stay if not
    /// all fit.
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
        Ok(CudaPlan { gpu, plan, exact, record: true, sub_layer_rates: None })
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

    /// Where the layers' dense weights are: those that are not in VRAM are in host memory.
    pub fn sub_layers(&self) -> &SubLayerPlan {
        &self.plan.sub_layers
    }

    /// Has the CPU compute as many of the units that are not in VRAM as `rates` make it worth.
    pub fn share_with_cpu(mut self, rates: &SubLayerRates) -> CudaPlan {
        self.plan.sub_layers.share_with_cpu(rates);
        self.sub_layer_rates = Some(*rates);
        self
    }

    /// What decided about the CPU's share, if something did.
    pub fn sub_layer_rates(&self) -> Option<SubLayerRates> {
        self.sub_layer_rates
    }

    /// Reserves the memory and has `fill` bring the weights into it: all parts must be there when it returns, as files have them. It may load
    /// the modules meanwhile; those that it leaves are loaded when they are first needed. What it returns comes back, but for
    /// what is in host memory: experts, where [`CudaPlan::slots`] are not enough for all, or [`CudaPlan::units`].
    ///
    /// # Errors
    /// Memory that somebody else took meanwhile, a failed device, and what `fill` says.
    pub fn load<T, E: From<ModelError>>(
        self,
        architecture: &Architecture,
        weights: &Weights,
        files: &FileSet,
        fill: impl FnOnce(&WeightsToLoad<'_>) -> Result<(HostWeights, T), E>,
    ) -> Result<(CudaBackend, T), E> {
        let CudaPlan { gpu, plan, exact, record, .. } = self;
        let used = architecture.experts_per_token();
        let arena = DeviceArena::reserve(&gpu, &plan, used, weights).map_err(ModelError::from)?;
        let types = weights.types_without_routers();
        let router = weights.routers().next().map(|router| (router.ty, router.rows));
        let mut modules = modules_needed(&ModelKernels {
            types: &types,
            embedding: weights.embedding.ty,
            kv: &plan.kv_shape,
            router,
            exact,
        });
        if weights.blocks.relayout_bytes() > 0 {
            modules.push("convert");
        }
        let parts = upload_parts(&plan, &arena, weights);
        let memory = arena.of_weights();
        let (host, filled) = fill(&WeightsToLoad { gpu: &gpu, parts, memory, modules })?;
        relayout_all(&gpu, &plan, &arena, weights).map_err(ModelError::from)?;
        let mut backend = CudaBackend::new(gpu, plan, arena, architecture, weights, exact, record)?;
        let rows = EmbeddingRows::new(&backend.gpu, &backend.plan, weights, files);
        backend.embedding_rows = rows.map_err(ModelError::from)?;
        let attached = match host {
            HostWeights::Nothing => Ok(()),
            HostWeights::Experts(host) => {
                backend.attach_experts(host, architecture, weights, record && !exact)
            }
            HostWeights::SubLayers(host) => backend.attach_sub_layers(host, architecture),
        };
        attached.map_err(ModelError::from)?;
        Ok((backend, filled))
    }
}

/// What a GPU still lacks of a model that memory is reserved for.
pub struct WeightsToLoad<'a> {
    pub gpu: &'a Gpu,
    /// Everything that comes from files as it is, with addresses of the GPU.
    pub parts: Vec<UploadPart>,
    /// What the parts lie in.
    pub memory: [DevicePtr<u8>; 2],
    /// For [`Gpu::load_modules`].
    pub modules: Vec<&'static str>,
}

/// What of a model is in host memory beside a GPU.
pub enum HostWeights {
    Nothing,
    Experts(HostExperts),
    SubLayers(HostSubLayers),
}

impl CudaBackend {
    /// `records`: single tokens' work may be recorded. Exact products go by the experts' order, not by that of the
    /// choice, so theirs is not.
    ///
    /// # Panics
    /// When all experts are on the GPU.
    fn attach_experts(
        &mut self,
        host: HostExperts,
        architecture: &Architecture,
        weights: &Weights,
        records: bool,
    ) -> Result<(), CudaError> {
        let sizes = (self.at().batch, MATVEC_TOKENS, architecture.experts_per_token());
        let gating = architecture.gating;
        let of = weights.layers.iter().find_map(|layer| expert_matrices(layer, gating));
        let of = of.expect("a model with slots for experts has some");
        let on = (&self.gpu, &self.plan, &self.arena);
        let streamed = Streamed::new(on, host, sizes, &of, records)?;
        self.graphs = Graphs::new(streamed.serves());
        self.streamed = Some(streamed);
        Ok(())
    }

    fn attach_sub_layers(
        &mut self,
        host: HostSubLayers,
        architecture: &Architecture,
    ) -> Result<(), CudaError> {
        let sizes = (MATVEC_TOKENS, architecture.hidden, architecture.dense_width());
        let ring = self.arena.dense(self.plan.weights.ring);
        let sub_layers =
            StreamedSubLayers::new(&self.gpu, &self.plan.sub_layers, ring, host, sizes)?;
        self.sub_layers = Some(sub_layers);
        Ok(())
    }
}
