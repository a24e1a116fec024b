//! Placement of a session's weights in RAM and VRAM. There are four cases:
//!
//! - The CPU computes, and blocks stream through host memory.
//! - A GPU holds all blocks.
//! - A GPU holds what every token needs, and experts are wherever there is room.
//! - A GPU holds as many layers of a dense model as it has room for.

use forebay_compute::Cpu;
use forebay_format::Catalog;
use forebay_model::{
    Architecture, Backend, CacheSize, CpuBackend, KvCapacity, Weights, cache_bytes,
};
use forebay_store::{
    Arena, EngineInfo, EngineOptions, FileSet, IoKind, LoadOptions, LoadStatistics, ReadEngine,
    open_engine, open_faulty_engine,
};
use forebay_stream::{MemoryPlan, ModelBlocks, Residency};
use serde::Serialize;
use tracing::field::Empty;

use crate::memory::{budget_beside, for_model_bytes, free_bytes};
use crate::plan::memory;
use crate::statistics::ReadPath;
use crate::traced::TracedModel;
use crate::{EngineError, SessionOptions};

/// A model that has been described. Of its weights, only vectors have been read.
pub(crate) struct Described<'a> {
    pub catalog: &'a Catalog,
    pub architecture: &'a Architecture,
    pub weights: &'a Weights,
    pub files: FileSet,
    /// Number of positions in the key/value cache.
    pub context: usize,
}

/// A backend with its weights.
pub(crate) struct Placed {
    pub backend: Box<dyn Backend>,
    /// Plan of the blocks in host memory, or `None` if all blocks are on a GPU.
    pub plan: Option<MemoryPlan>,
    /// Budget of host memory.
    pub budget_bytes: u64,
    pub read_path: ReadPath,
    pub gpu_start: Option<GpuStart>,
    pub traced: Option<TracedModel>,
}

/// Plan of host memory for a set of blocks.
pub(crate) struct HostPlan {
    pub blocks: ModelBlocks,
    pub plan: MemoryPlan,
    pub budget_bytes: u64,
}

/// Times and sizes of loading weights to a GPU. Opening the GPU overlaps with reading the model's description, and
/// loading modules overlaps with loading the weights. Only the time that is left adds to the start.
#[derive(Debug, Clone, Serialize)]
pub struct GpuStart {
    pub open_seconds: f64,
    /// Seconds for pinning the ring buffer and opening the engine that reads into it.
    pub pin_seconds: f64,
    /// Bytes of pinned host memory that the GPU copied from. It has been freed since.
    pub pinned_bytes: u64,
    pub modules: usize,
    /// Seconds for loading the modules. The driver compiles modules that are not in its cache.
    pub modules_seconds: f64,
    pub weights: LoadStatistics,
    pub weights_bytes_per_second: f64,
    /// Source of the request size and queue depth of the reads.
    pub chosen_by: String,
}

impl Described<'_> {
    /// Plans host memory by the budget and fills it.
    pub fn on_host(
        self,
        cpu: Cpu,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Placed, EngineError> {
        let kind = options.kv_type();
        let capacity = options.kv_capacity(self.context)?;
        let kv_bytes = |context| {
            let capacity = KvCapacity { context, ..capacity };
            cache_bytes(self.architecture, CacheSize { kind, capacity })
        };
        // Read once: other programs, and this one, change it at any time.
        let free_bytes = free_bytes();
        let blocks = self.weights.blocks.clone();
        let host = self.host_plan(blocks, options, free_bytes, kv_bytes(self.context))?;
        let (budget_bytes, weights_bytes) = (host.budget_bytes, host.plan.arena_bytes);
        let for_model_bytes = for_model_bytes(free_bytes);
        memory::check_cache(self.context, weights_bytes, for_model_bytes, kv_bytes)?;
        let (residency, _) = self.fill_host(host, options, progress)?;
        let (plan, info) = (residency.plan().clone(), residency.engine_info());
        // A batch of a prompt may spend seconds in one layer.
        let cpu = cpu.stopping_on(options.interrupt.flag());
        let traced = self.traced(options, &info);
        let backend = CpuBackend::new(
            self.architecture,
            self.weights,
            cpu,
            self.files,
            residency,
            CacheSize { kind, capacity },
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

    /// Plans host memory for `blocks` within the user's budget. Without one, weights take their share of the free memory beside
    /// `other_bytes`.
    pub(crate) fn host_plan(
        &self,
        blocks: ModelBlocks,
        options: &SessionOptions,
        free_bytes: u64,
        other_bytes: u64,
    ) -> Result<HostPlan, EngineError> {
        let budget_bytes =
            options.ram_bytes.unwrap_or_else(|| budget_beside(free_bytes, other_bytes));
        let plan = memory::host(self.weights, &blocks, budget_bytes, options.policy)?;
        Ok(HostPlan { blocks, plan, budget_bytes })
    }

    /// Reserves memory as planned. Fills it with the dense blocks that stay there, and with experts of pools that hold
    /// all of theirs.
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
        // Slots that stay empty now must not cause page faults later.
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

/// Returns the engine options that the user chose, with `defaults` for the others.
pub(crate) fn engine_options(options: &SessionOptions, defaults: &EngineOptions) -> EngineOptions {
    EngineOptions {
        direct: options.direct,
        stall_timeout: options.stall_timeout,
        request_bytes: options.request_bytes.unwrap_or(defaults.request_bytes),
        queue_depth: options.queue_depth.unwrap_or(defaults.queue_depth),
        ..*defaults
    }
}

/// Opens the engine that `options` ask for, over `arena`, with `relayout_bytes` of scratch memory for blocks that are
/// converted after reading.
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

/// Returns true if all blocks must go through the read engine, without copies from the page cache. Such copies would
/// not see a simulated disk fault, and would not cause the page faults that a mapping is meant to show. They are also
/// missing from the engine's counters, which are compared with a trace.
pub(crate) fn engine_only(options: &SessionOptions) -> bool {
    options.faults.is_some() || options.recorder.is_some() || options.io == IoKind::Mmap
}

fn load_options(options: &SessionOptions) -> LoadOptions {
    let defaults = LoadOptions::default();
    let copy_threads = if engine_only(options) { 0 } else { defaults.copy_threads };
    LoadOptions { copy_threads, ..defaults }
}
