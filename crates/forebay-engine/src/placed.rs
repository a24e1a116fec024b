//! Where a session's weights are: blocks in host memory that stream past the CPU, all of them on a GPU, what every token
//! needs on a GPU and experts wherever there is room, or of a dense model as many layers on a GPU as it has room for.

use std::thread;
use std::time::{Duration, Instant};

use forebay_compute::Cpu;
use forebay_format::Catalog;
use forebay_model::{
    Architecture, Backend, CpuBackend, CudaPlan, HelpWanted, HelpingCpu, HostExperts, HostUnits,
    HostWeights, Weights, WeightsToLoad, cache_bytes,
};
use forebay_store::{
    Arena, EngineInfo, EngineOptions, FileSet, IoKind, LoadOptions, LoadStatistics, ReadEngine,
    open_engine, open_faulty_engine,
};
use forebay_stream::{MemoryPlan, ModelBlocks, Residency};
use serde::Serialize;

use crate::doctor::MachineProfile;
use crate::load::{GpuRing, RingRequest, contents, name_of, named, poison, read_back};
use crate::memory::free_bytes;
use crate::plan::{self, Rates, memory};
use crate::session;
use crate::statistics::ReadPath;
use crate::trace_io::TraceHeader;
use crate::{CpuHelp, EngineError, SessionOptions, default_budget_bytes};

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
    pub trace_header: Option<TraceHeader>,
}

/// Host memory that is planned.
struct HostPlan {
    blocks: ModelBlocks,
    plan: MemoryPlan,
    budget_bytes: u64,
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
    /// Has the weights brought to the GPU through a ring. Nothing of them stays in host memory, but for what the GPU has no
    /// room for.
    pub fn on_gpu(
        self,
        plan: CudaPlan,
        open_time: Duration,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Placed, EngineError> {
        // A budget that is too small is refused before anything is read.
        let (slots, units) = (plan.slots().is_some(), !plan.units().all_in_vram());
        let blocks = match (slots, units) {
            (true, _) => Some(memory::experts(self.weights)),
            (false, true) => Some(plan.units().host_blocks(self.weights)),
            (false, false) => None,
        };
        let host = blocks.map(|blocks| self.host_plan(blocks, options)).transpose()?;
        let host_plan = host.as_ref().map(|host| host.plan.clone());
        let cpu_units = plan.units().cpu_takes_part();
        let planned = plan.unit_rates();
        let help = match (plan.slots(), &host_plan) {
            (Some(slots), Some(host)) => self.helping_cpu(slots, host, options)?,
            _ => None,
        };
        let (backend, (info, start)) =
            plan.load(self.architecture, self.weights, &self.files, |load| {
                let (info, start) = self.fill(load, open_time, options, progress)?;
                let Some(host) = host else {
                    return Ok::<_, EngineError>((HostWeights::Nothing, (info, start)));
                };
                let (residency, arena) = self.fill_host(host, options, progress)?;
                let info = residency.engine_info();
                let huge_page_bytes = arena.huge_page_bytes();
                let pinned = load.gpu.pin(arena.addresses(), arena)?;
                let weights = if slots {
                    HostWeights::Experts(HostExperts { residency, pinned, cpu: help })
                } else {
                    // As many threads as the machine profile was made with: the rates that decided are theirs.
                    let cpu = cpu_units.then(|| session::host(options)).transpose()?;
                    HostWeights::Units(HostUnits {
                        residency,
                        pinned,
                        huge_page_bytes,
                        cpu,
                        planned,
                    })
                };
                Ok((weights, (info, start)))
            })?;
        Ok(Placed {
            backend: Box::new(backend),
            budget_bytes: host_plan.as_ref().and_then(|plan| plan.ram_bytes).unwrap_or(0),
            plan: host_plan,
            trace_header: self.trace_header(options, &info),
            read_path: info.into(),
            gpu_start: Some(start),
        })
    }

    /// The CPU that may compute some of the experts that have no place in `slots`, if it may: it knows how to decide.
    fn helping_cpu(
        &self,
        slots: &MemoryPlan,
        host: &MemoryPlan,
        options: &SessionOptions,
    ) -> Result<Option<HelpingCpu>, EngineError> {
        let help = options.cpu_help_possible();
        if help == CpuHelp::Never {
            return Ok(None);
        }
        let profile = MachineProfile::of_folder(&self.catalog.root).ok();
        let rates = profile.and_then(|profile| Rates::new(&profile).ok());
        let rates = rates.map(|rates| rates.with_threads(options.threads));
        let (architecture, weights) = (self.architecture, self.weights);
        let (known, expected) = plan::helping(architecture, weights, rates.as_ref(), slots, host);
        let wanted = match help {
            CpuHelp::Always => HelpWanted::Always,
            _ => HelpWanted::ByMisses { expected },
        };
        let cpu = session::helping_host(options)?;
        Ok(Some(HelpingCpu { cpu, wanted, rates: options.help_rates.or(known) }))
    }

    fn fill(
        &self,
        load: &WeightsToLoad<'_>,
        open_time: Duration,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(EngineInfo, GpuStart), EngineError> {
        let choice = MachineProfile::choice_for(&self.catalog.root);
        let defaults = RingRequest::new(&self.files, options.io, &choice);
        let request = RingRequest {
            engine: engine_options(options, &defaults.engine),
            faults: options.faults.clone(),
            copies: !engine_only(options),
            ..defaults
        };
        let (gpu, modules) = (load.gpu, &load.modules);
        if options.check_weights {
            poison(gpu, &load.parts)?;
        }
        // Before the modules: the driver lets nobody else in while it compiles one.
        let mut ring = GpuRing::open(gpu, request, &load.parts)?;
        let (filled, loaded) = thread::scope(|scope| {
            let modules = scope.spawn(|| {
                let started = Instant::now();
                gpu.load_modules(modules).map(|()| started.elapsed())
            });
            let filled = ring.fill(progress);
            (filled, modules.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        });
        let weights = filled.map_err(|error| named(error, &contents(self.catalog), &self.files))?;
        if options.check_weights {
            let contents = contents(self.catalog);
            read_back(gpu, &self.files, &load.parts, &|extent| name_of(&contents, extent))?;
        }
        let start = GpuStart {
            open_seconds: open_time.as_secs_f64(),
            pin_seconds: ring.pin_time().as_secs_f64(),
            pinned_bytes: ring.pinned_bytes(),
            modules: modules.len(),
            modules_seconds: loaded?.as_secs_f64(),
            weights_bytes_per_second: weights.bytes as f64 / weights.seconds,
            weights,
            chosen_by: choice.chosen_by,
        };
        Ok((ring.engine(), start))
    }

    /// Plans host memory by the budget, and fills it.
    pub fn on_host(
        self,
        cpu: Cpu,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Placed, EngineError> {
        let host = self.host_plan(self.weights.blocks.clone(), options)?;
        let budget_bytes = host.budget_bytes;
        let kind = options.kv_on_cpu();
        memory::check_cache(self.context, host.plan.arena_bytes, free_bytes(), |context| {
            cache_bytes(self.architecture, context, kind)
        })?;
        let (residency, _) = self.fill_host(host, options, progress)?;
        let (plan, info) = (residency.plan().clone(), residency.engine_info());
        let trace_header = self.trace_header(options, &info);
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
            trace_header,
        })
    }

    /// Plans host memory for `blocks` within the user's budget.
    fn host_plan(
        &self,
        blocks: ModelBlocks,
        options: &SessionOptions,
    ) -> Result<HostPlan, EngineError> {
        let budget_bytes = options.ram_bytes.unwrap_or_else(default_budget_bytes);
        let plan = memory::host(self.weights, &blocks, budget_bytes, options.policy)?;
        Ok(HostPlan { blocks, plan, budget_bytes })
    }

    /// Reserves memory by its plan and fills it, as far as it can hold all of a kind.
    fn fill_host(
        &self,
        host: HostPlan,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Residency, Arena), EngineError> {
        let HostPlan { blocks, plan, .. } = host;
        let arena = Arena::map(plan.arena_bytes as usize)?;
        let engine = read_engine(options, &self.files, &arena, blocks.recast_bytes())?;
        let mut residency = Residency::new(&blocks, plan, &self.files, &arena, engine)?;
        residency.preload_with_copies(&self.files, load_options(options), progress)?;
        // What is not loaded now must not wait for its pages later.
        arena.make_resident()?;
        Ok((residency, arena))
    }

    fn trace_header(&self, options: &SessionOptions, engine: &EngineInfo) -> Option<TraceHeader> {
        let (family, blocks) = (self.architecture.family, Some(&self.weights.blocks));
        let header = || TraceHeader::new(self.catalog, family, blocks, engine);
        options.recorder.as_ref().map(|_| header())
    }
}

/// What the user has chosen, `defaults` for the rest.
fn engine_options(options: &SessionOptions, defaults: &EngineOptions) -> EngineOptions {
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
    recast_bytes: u64,
) -> Result<Box<dyn ReadEngine>, EngineError> {
    let defaults =
        EngineOptions { recast_bytes: recast_bytes as usize, ..EngineOptions::suited_to(files) };
    let engine_options = engine_options(options, &defaults);
    Ok(match options.faults.clone() {
        None => open_engine(options.io, files, arena, &engine_options)?,
        Some(faults) => open_faulty_engine(options.io, files, arena, &engine_options, faults)?,
    })
}

/// Copies from the page cache would not meet a disk that is broken on purpose, nor be the page
/// faults that a mapping is to show; and the engine's counters, which a trace is compared with, do
/// not have them.
fn engine_only(options: &SessionOptions) -> bool {
    options.faults.is_some() || options.recorder.is_some() || options.io == IoKind::Mmap
}

fn load_options(options: &SessionOptions) -> LoadOptions {
    let defaults = LoadOptions::default();
    let copy_threads = if engine_only(options) { 0 } else { defaults.copy_threads };
    LoadOptions { copy_threads, ..defaults }
}
