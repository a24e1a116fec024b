//! Where a session's weights are: blocks in host memory that stream past the CPU, all of them on a GPU, what every token
//! needs on a GPU and experts wherever there is room, or of a dense model as many layers on a GPU as it has room for.

use forebay_compute::Cpu;
use forebay_format::Catalog;
use forebay_model::{Architecture, Backend, CpuBackend, Weights, cache_bytes};
use forebay_store::{
    Arena, EngineInfo, EngineOptions, FileSet, IoKind, LoadOptions, LoadStatistics, ReadEngine,
    open_engine, open_faulty_engine,
};
use forebay_stream::{MemoryPlan, ModelBlocks, Residency};
use serde::Serialize;
use tracing::field::Empty;

use crate::memory::free_bytes;
use crate::plan::memory;
use crate::statistics::ReadPath;
use crate::traced::TracedModel;
use crate::{EngineError, SessionOptions, default_budget_bytes};

/// A model that is known, of whose weights nothing has been read but vectors.
pub(crate) struct Described<'a> {
    pub catalog: &'a Catalog,
    pub architecture: &'a Architecture,
    pub weights: &'a Weights,
    pub files: FileSet,
    /// Positions of key/value cache.
    pub context: usize,
}

/// What computes, with its weights.
pub(crate) struct Placed {
    pub backend: Box<dyn Backend>,
    /// Where blocks are in host memory; `None` where all are on a GPU.
    pub plan: Option<MemoryPlan>,
    /// Of host memory.
    pub budget_bytes: u64,
    pub read_path: ReadPath,
    pub gpu_start: Option<GpuStart>,
    pub traced: Option<TracedModel>,
}

/// Host memory that is planned.
pub(crate) struct HostPlan {
    pub blocks: ModelBlocks,
    pub plan: MemoryPlan,
    pub budget_bytes: u64,
}

/// How the weights came to a GPU. Opening it goes on beside reading the model's description, and loading modules beside
/// the weights: only the rest adds up.
#[derive(Debug, Clone, Serialize)]
pub struct GpuStart {
    pub open_seconds: f64,
    /// Pinning the ring and opening what reads into it.
    pub pin_seconds: f64,
    /// Host memory that the GPU copied from, given back since.
    pub pinned_bytes: u64,
    pub modules: usize,
    /// Loading them; the driver compiles those that it does not have in its cache.
    pub modules_seconds: f64,
    pub weights: LoadStatistics,
    pub weights_bytes_per_second: f64,
    /// Where request size and depth of the reads come from.
    pub chosen_by: String,
}

impl Described<'_> {
    /// Plans host memory by the budget, and fills it.
    pub fn on_host(
        self,
        cpu: Cpu,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Placed, EngineError> {
        let host = self.host_plan(self.weights.blocks.clone(), options)?;
        let budget_bytes = host.budget_bytes;
        let kind = options.kv_type();
        memory::check_cache(self.context, host.plan.arena_bytes, free_bytes(), |context| {
            cache_bytes(self.architecture, context, kind)
        })?;
        let (residency, _) = self.fill_host(host, options, progress)?;
        let (plan, info) = (residency.plan().clone(), residency.engine_info());
        // A batch of a prompt may compute on a layer for seconds.
        let cpu = cpu.stopping_on(options.interrupt.flag());
        let traced = self.traced(options, &info);
        let backend = CpuBackend::new(
            self.architecture,
            self.weights,
            cpu,
            self.files,
            residency,
            self.context,
            kind,
            options.prefetch,
        )?;
        Ok(Placed {
            backend: Box::new(backend),
            plan: Some(plan),
            budget_bytes,
            read_path: info.into(),
            gpu_start: None,
            traced,
        })
    }

    /// Plans host memory for `blocks` within the user's budget.
    pub(crate) fn host_plan(
        &self,
        blocks: ModelBlocks,
        options: &SessionOptions,
    ) -> Result<HostPlan, EngineError> {
        let budget_bytes = options.ram_bytes.unwrap_or_else(default_budget_bytes);
        let plan = memory::host(self.weights, &blocks, budget_bytes, options.policy)?;
        Ok(HostPlan { blocks, plan, budget_bytes })
    }

    /// Reserves memory by its plan and fills it, as far as it can hold all of a kind.
    pub(crate) fn fill_host(
        &self,
        host: HostPlan,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Residency, Arena), EngineError> {
        let HostPlan { blocks, plan, .. } = host;
        let (reserved_bytes, kept_experts) = (plan.arena_bytes, plan.kept_slots());
        let span =
            tracing::debug_span!("load", to = "RAM", reserved_bytes, kept_experts, bytes = Empty);
        let _entered = span.enter();
        let arena = Arena::map(plan.arena_bytes as usize)?;
        let engine = read_engine(options, &self.files, &arena, blocks.relayout_bytes())?;
        let mut residency = Residency::new(&blocks, plan, &self.files, &arena, engine)?;
        let loaded = residency.preload_with_copies(&self.files, load_options(options), progress)?;
        span.record("bytes", loaded.bytes);
        // What is not loaded now must not wait for its pages later.
        arena.make_resident_unless(&options.interrupt)?;
        Ok((residency, arena))
    }

    pub(crate) fn traced(
        &self,
        options: &SessionOptions,
        engine: &EngineInfo,
    ) -> Option<TracedModel> {
        let (family, blocks) = (self.architecture.family, Some(&self.weights.blocks));
        options.recorder.as_ref().map(|_| TracedModel::new(self.catalog, family, blocks, engine))
    }
}

/// What the user has chosen, `defaults` for the rest.
pub(crate) fn engine_options(options: &SessionOptions, defaults: &EngineOptions) -> EngineOptions {
    EngineOptions {
        direct: options.direct,
        stall_timeout: options.stall_timeout,
        request_bytes: options.request_bytes.unwrap_or(defaults.request_bytes),
        queue_depth: options.queue_depth.unwrap_or(defaults.queue_depth),
        ..*defaults
    }
}

/// The engine that `options` ask for, over `arena`, for blocks of which so many bytes are recast.
fn read_engine(
    options: &SessionOptions,
    files: &FileSet,
    arena: &Arena,
    relayout_bytes: u64,
) -> Result<Box<dyn ReadEngine>, EngineError> {
    let defaults = EngineOptions {
        relayout_bytes: relayout_bytes as usize,
        ..EngineOptions::suited_to(files)
    };
    let engine_options = engine_options(options, &defaults);
    Ok(match options.faults.clone() {
        None => open_engine(options.io, files, arena, &engine_options)?,
        Some(faults) => open_faulty_engine(options.io, files, arena, &engine_options, faults)?,
    })
}

/// Copies from the page cache would not meet a disk that is broken on purpose, nor be the page
/// faults that a mapping is to show; and the engine's counters, which a trace is compared with, do
/// not have them.
pub(crate) fn engine_only(options: &SessionOptions) -> bool {
    options.faults.is_some() || options.recorder.is_some() || options.io == IoKind::Mmap
}

fn load_options(options: &SessionOptions) -> LoadOptions {
    let defaults = LoadOptions::default();
    let copy_threads = if engine_only(options) { 0 } else { defaults.copy_threads };
    LoadOptions { copy_threads, ..defaults }
}
