//! Loads a session's weights to a GPU.

use std::thread;
use std::time::{Duration, Instant};

use forebay_format::at_least;
use forebay_model::{
    CpuOffloadMode, CudaPlan, HostExperts, HostSubLayers, HostWeights, OffloadCpu, WeightsToLoad,
};
use forebay_options::OptionName;
use forebay_store::{EngineInfo, Extent};
use forebay_stream::MemoryPlan;
use tracing::field::Empty;

use crate::doctor::MachineProfile;
use crate::load::{GpuRing, RingRequest, as_read, contents, name_of, named, poison, read_back};
use crate::memory::free_bytes;
use crate::placed::{Described, GpuStart, Placed, engine_only, engine_options};
use crate::plan::{self, Coding, Rates, memory};
use crate::session;
use crate::{CpuOffload, EngineError, KvInVram, SessionOptions};

impl Described<'_> {
    /// Loads the weights to the GPU through a ring. Host memory keeps only the weights that do not fit in VRAM.
    pub fn on_gpu(
        self,
        plan: CudaPlan,
        open_time: Duration,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Placed, EngineError> {
        // A budget that is too small is rejected before anything is read.
        let (slots, sub_layers) = (plan.slots().is_some(), !plan.sub_layers().all_in_vram());
        let blocks = match (slots, sub_layers) {
            (true, _) => Some(memory::experts(self.weights)),
            (false, true) => Some(plan.sub_layers().host_blocks(self.weights)),
            (false, false) => None,
        };
        let kv_bytes = plan.kv_in_ram_bytes();
        // Read once: other programs, and this one, change it at any time.
        let free_bytes = free_bytes();
        let host = blocks.map(|blocks| self.host_plan(blocks, options, free_bytes, kv_bytes));
        let host = host.transpose()?;
        let host_plan = host.as_ref().map(|host| host.plan.clone());
        let weights_bytes = host_plan.as_ref().map_or(0, |plan| plan.arena_bytes);
        memory::check_cache_on_gpu(self.context, weights_bytes, free_bytes, kv_bytes)?;
        if kv_bytes > 0 && options.kv_in_vram == KvInVram::AsMuchAsFits {
            tracing::warn!(
                "VRAM has no room for all keys and values: {} of them are in RAM, which makes long contexts slower; \
                 a smaller {} or a larger {} avoids this",
                at_least(kv_bytes),
                OptionName::Context,
                OptionName::Vram
            );
        }
        let cpu_sub_layers = plan.sub_layers().cpu_takes_part();
        let planned = plan.sub_layer_rates();
        let cpu_offload = match (plan.slots(), &host_plan) {
            (Some(slots), Some(host)) => self.offload_cpu(slots, host, options)?,
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
                    HostWeights::Experts(HostExperts { residency, pinned, cpu: cpu_offload })
                } else {
                    // Uses as many threads as the machine profile was measured with, because the split is based on
                    // their rates.
                    let cpu = cpu_sub_layers.then(|| session::host(options)).transpose()?;
                    HostWeights::SubLayers(HostSubLayers {
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
            traced: self.traced(options, &info),
            read_path: info.into(),
            gpu_start: Some(start),
        })
    }

    /// Returns the CPU workers that may compute experts without a slot in `slots`, with the rates for that decision.
    /// Returns `None` if CPU offload is not possible.
    fn offload_cpu(
        &self,
        slots: &MemoryPlan,
        host: &MemoryPlan,
        options: &SessionOptions,
    ) -> Result<Option<OffloadCpu>, EngineError> {
        let cpu_offload = options.cpu_offload_possible();
        if cpu_offload == CpuOffload::Never {
            return Ok(None);
        }
        let rates = Rates::of_folder(&self.catalog.root);
        let coding = Coding::of(self.catalog);
        let rates = rates.map(|rates| rates.reading(&coding).with_threads(options.threads));
        let (architecture, weights) = (self.architecture, self.weights);
        let (known, expected) =
            plan::offloading(architecture, weights, rates.as_ref(), slots, host);
        let wanted = match cpu_offload {
            CpuOffload::Always => CpuOffloadMode::Always,
            _ => CpuOffloadMode::ByMisses { expected },
        };
        let cpu = session::offload_host(options)?;
        Ok(Some(OffloadCpu { cpu, wanted, rates: options.cpu_offload_rates.or(known) }))
    }

    fn fill(
        &self,
        load: &WeightsToLoad<'_>,
        open_time: Duration,
        options: &SessionOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(EngineInfo, GpuStart), EngineError> {
        let (bytes, seconds) = (Empty, Empty);
        let span = tracing::debug_span!("load", to = "GPU", bytes, seconds).entered();
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
            poison(gpu, &load.parts, &load.memory)?;
        }
        // The ring is opened before the modules are loaded, because the driver blocks all other calls while it compiles
        // a module.
        let mut ring = GpuRing::open(gpu, request, &load.parts, &load.memory)?;
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
            let name = |extent: &Extent| name_of(&contents, extent);
            read_back(gpu, &self.files, as_read(&load.parts), &load.memory, &name)?;
        }
        span.record("bytes", weights.bytes);
        span.record("seconds", weights.seconds);
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
        Ok((ring.engine().expect("the ring was opened with its engine"), start))
    }
}
