//! Planning and loading of a model on a GPU.

use forebay_cuda::{
    DevicePtr, Gpu, ModelKernels, delta_module, indexer_modules, modules_needed, shared_key_modules,
};
use forebay_ops::KvType;
use forebay_store::{FileSet, UploadPart};
use forebay_stream::{MemoryPlan, PolicyKind};

use super::backend::CudaBackend;
use super::embedding::EmbeddingRows;
use super::kv_size::KvSize;
use super::memory::{Device, DeviceArena, DeviceFacts, DevicePlan, upload_tables};
use super::ngram_tables::NGramTable;
use super::placed::upload_parts;
use super::relayout::relayout_all;
use super::source::{HostWeights, WeightSource};
use crate::ModelError;
use crate::arch::{Architecture, KvCapacity, OutputGate};
use crate::sharing::{SubLayerPlan, SubLayerRates};
use crate::weights::Weights;

/// Plan of a model that fits a GPU, before its weights are read.
pub struct CudaPlan {
    gpu: Gpu,
    plan: DevicePlan,
    exact: bool,
    record: bool,
    sub_layer_rates: Option<SubLayerRates>,
}

impl CudaPlan {
    /// Returns the size of a KV cache for a capacity.
    pub fn cache(element: KvType, capacity: KvCapacity) -> KvSize {
        let KvCapacity { context, sequences, tokens, in_vram } = capacity;
        KvSize { element, context, sequences, tokens, in_vram }
    }

    /// Plans how much of a model is placed on `gpu`, with such a KV cache. `exact` computes in f32 throughout.
    /// `vram_bytes` bounds all device memory, including the driver's context. `policy` chooses the experts that stay
    /// in VRAM if not all fit.
    ///
    /// # Errors
    /// Returns [`ModelError::VramTooSmall`] if VRAM is too small. Returns an error for weights or routers that have
    /// no kernels, or if a driver call fails.
    pub fn new(
        gpu: Gpu,
        architecture: &Architecture,
        weights: &Weights,
        cache: KvSize,
        exact: bool,
        vram_bytes: Option<u64>,
        policy: PolicyKind,
    ) -> Result<CudaPlan, ModelError> {
        let facts = DeviceFacts::of(&gpu)?;
        let plan = DevicePlan::new(&facts, architecture, weights, cache, vram_bytes, policy)?;
        Ok(CudaPlan { gpu, plan, exact, record: true, sub_layer_rates: None })
    }

    /// Disables CUDA graphs, so that the kernels of single tokens are queued one by one too. The results are the
    /// same.
    pub fn without_graphs(mut self) -> CudaPlan {
        self.record = false;
        self
    }

    /// Returns the bytes of keys and values that will be in pinned host memory.
    pub fn kv_in_ram_bytes(&self) -> u64 {
        self.plan.vram.kv_cache_in_ram_bytes
    }

    /// Returns the slots for experts, if not all of them fit.
    pub fn slots(&self) -> Option<&MemoryPlan> {
        self.plan.tier.as_ref().map(|tier| &tier.plan)
    }

    /// Returns where the layers' dense weights are. Sub-layers that are not in VRAM are in host memory.
    pub fn sub_layers(&self) -> &SubLayerPlan {
        &self.plan.sub_layers
    }

    /// Assigns sub-layers outside VRAM to the CPU, as many as `rates` make worthwhile.
    pub fn share_with_cpu(mut self, rates: &SubLayerRates) -> CudaPlan {
        self.plan.sub_layers.share_with_cpu(rates);
        self.sub_layer_rates = Some(*rates);
        self
    }

    /// Returns the rates that decided the CPU's share, if there are any.
    pub fn sub_layer_rates(&self) -> Option<SubLayerRates> {
        self.sub_layer_rates
    }

    /// Reserves the memory and calls `fill` to load the weights into it. When `fill` returns, all parts must be
    /// there, in the layout of their files. `fill` may load the modules meanwhile. Modules that it does not load are
    /// loaded when they are first needed.
    ///
    /// `fill` returns the weights in host memory and a value that is passed on to the caller. The weights in host
    /// memory are experts, if [`CudaPlan::slots`] are not enough for all of them, or sub-layers that
    /// [`CudaPlan::sub_layers`] does not place in VRAM.
    ///
    /// # Errors
    /// Returns an error if memory cannot be allocated, for example because another program has taken it meanwhile.
    /// Also returns an error if the device or `fill` fails.
    pub fn load<T, E: From<ModelError>>(
        self,
        architecture: &Architecture,
        weights: &Weights,
        files: &FileSet,
        fill: impl FnOnce(&WeightsToLoad<'_>) -> Result<(HostWeights, T), E>,
    ) -> Result<(CudaBackend, T), E> {
        let CudaPlan { gpu, plan, exact, record, .. } = self;
        let arena = DeviceArena::reserve(&gpu, &plan, weights).map_err(ModelError::from)?;
        let types = weights.types_without_routers();
        let router = weights.routers().next().map(|router| (router.ty, router.rows));
        let mut modules = modules_needed(&ModelKernels {
            types: &types,
            embedding: weights.embedding.ty,
            kv: &plan.kv.shapes,
            router,
            exact,
        });
        if weights.blocks.relayout_bytes() > 0 {
            modules.push("convert");
        }
        if let Some(recurrent) = &architecture.recurrent {
            modules.push(delta_module(&recurrent.delta_shape()));
        }
        match architecture.has_bank() {
            true => modules.push("bank"),
            false if architecture.streams.is_some() => modules.push("streams"),
            false => {}
        }
        if architecture.active_stream().is_some() {
            modules.push("predicted_streams");
        }
        if architecture.layers.iter().any(|layer| layer.cut().is_some()) {
            modules.push("cut");
        }
        if architecture.convolutions.is_some() {
            modules.push("convolutions");
        }
        if architecture.ngrams.is_some() {
            modules.push("ngrams");
        }
        if weights.layer_embeddings.is_some() {
            modules.push("layer_embeddings");
        }
        if architecture.attentions.iter().any(|of| of.output_gate != OutputGate::None) {
            modules.extend(["columns", "row_gate"]);
        }
        if architecture.indexer().is_some() {
            modules.extend(indexer_modules(plan.kv.shapes[0].element));
        }
        if architecture.attentions.iter().any(|of| of.shared.is_some()) {
            let element = plan.kv.shapes[0].element;
            modules.extend(indexer_modules(element).into_iter().chain(shared_key_modules(element)));
        }
        let parts = upload_parts(&plan, &arena, weights);
        let memory = arena.of_weights();
        let (host, filled) = fill(&WeightsToLoad { gpu: &gpu, parts, memory, modules })?;
        relayout_all(&gpu, &plan, &arena, weights).map_err(ModelError::from)?;
        let ropes = architecture.rope_tables(weights.rope_factors.as_ref(), plan.kv.context())?;
        upload_tables(&gpu, &plan, &arena, &ropes, weights).map_err(ModelError::from)?;
        let rows = EmbeddingRows::new(&gpu, &plan, weights, files).map_err(ModelError::from)?;
        let on = Device { gpu: &gpu, plan: &plan, arena: &arena };
        // Exact products use the order of experts instead of the router's order, so exact tokens with experts in slots
        // do not run as graphs.
        let source = WeightSource::new(on, host, architecture, weights, record && !exact)
            .map_err(ModelError::from)?;
        let batch = plan.activations.batch;
        let tables = NGramTable::of_layers(&gpu, architecture, weights, files, batch)
            .map_err(ModelError::from)?;
        let of_device = (gpu, plan, arena);
        let model = (architecture, weights);
        let backend = CudaBackend::new(of_device, source, (rows, tables), model, exact, record)
            .map_err(ModelError::from)?;
        Ok((backend, filled))
    }
}

/// Weights that a model's reserved device memory still needs.
pub struct WeightsToLoad<'a> {
    pub gpu: &'a Gpu,
    /// Everything that is copied unchanged from files, with device addresses.
    pub parts: Vec<UploadPart>,
    /// Memory that contains the parts.
    pub memory: [DevicePtr<u8>; 2],
    /// Modules for [`Gpu::load_modules`].
    pub modules: Vec<&'static str>,
}
