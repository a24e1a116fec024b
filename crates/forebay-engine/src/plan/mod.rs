//! The planner: where a model's weights should be on a machine, how fast it will be there, and why not faster.
//!
//! A pure function of what is known of the model, the machine profile, the budgets and the expected hits. Memory is planned
//! by the very functions that sessions use, so what is told here is what `run` does.
//!
//! ```text
//! model.rs    what a token costs a model
//! rates.rs    what a machine does per second
//! hits.rs     how often experts are found where they are wanted
//! memory.rs   memory plans of sessions
//! cost.rs     seconds of tokens and prompts
//! help.rs     the same of experts that the CPU computes for a GPU
//! units.rs    the same of dense models that VRAM does not hold
//! trust.rs    whether a prediction is shown as a number, a range or nothing
//! ```

mod cost;
mod cpu_offload;
mod hits;
pub(crate) mod memory;
mod model;
mod rates;
mod sub_layers;
mod trust;

use forebay_compute::KvType;
use forebay_model::{DeviceShare, SubLayerPlacement, VramUse};
use forebay_stream::{MemoryPlan, PolicyKind};
use serde::Serialize;
use tracing::field::Empty;

use crate::device;
use crate::gpu::{self, Facts};
use crate::{CpuOffload, DeviceChoice, EngineError, SessionOptions, default_budget_bytes};
pub use cost::{Cost, Placement, Prediction, Speed, Work};
pub use hits::{HitCurve, share_in_either};
pub use model::PlannedModel;
pub use rates::Rates;
pub use trust::{LEAST_TOKEN_BYTES, PredictedRate};

use cost::Model;
#[cfg(feature = "cuda")]
pub(crate) use cpu_offload::offloading;
use model::ModelCosts;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use model::row_bytes;
#[cfg(feature = "cuda")]
pub(crate) use sub_layers::sub_layer_rates;

/// What a gain is told for.
const ONE_MORE_BYTES: u64 = 1 << 30;

/// Below this many generated tokens per second a person is told before waiting for it.
pub const SLOW_TOKENS_PER_SECOND: f64 = 2.0;

/// What a user may choose, and what is free.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    pub device: DeviceChoice,
    /// As `--vram`; `None`: what is free.
    pub vram_bytes: Option<u64>,
    /// For weights in RAM.
    pub ram_bytes: u64,
    /// Whether the user named it.
    pub ram_chosen_by_user: bool,
    /// RAM that weights, keys and values may take together; `None`: nobody knows, as of another machine.
    pub ram_free_bytes: Option<u64>,
    /// Positions of key/value cache.
    pub context: usize,
    /// How keys and values are kept.
    pub cache: KvType,
    pub policy: PolicyKind,
    /// As `--threads`; `None`: as many as the machine profile was made with.
    pub threads: Option<usize>,
    /// Whether the CPU computes some of the experts that a GPU has no room for.
    pub cpu_offload: CpuOffload,
    pub work: Work,
}

impl PlanRequest {
    /// What a session with `options` and `context` positions will do.
    pub fn of_session(options: &SessionOptions, context: usize, work: Work) -> PlanRequest {
        // As a session chooses: options that are for the CPU alone, and none for a GPU.
        let for_cpu = device::wanted_gpu(options).is_none();
        PlanRequest {
            device: match options.device {
                DeviceChoice::Auto if for_cpu => DeviceChoice::Cpu,
                device => device,
            },
            vram_bytes: options.vram_bytes,
            ram_bytes: options.ram_bytes.unwrap_or_else(default_budget_bytes),
            ram_chosen_by_user: options.ram_bytes.is_some(),
            ram_free_bytes: None,
            context,
            cache: options.kv_type(),
            policy: options.policy,
            threads: options.threads,
            cpu_offload: options.cpu_offload_possible(),
            work,
        }
    }
}

/// One way to run a model.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Device memory by what it is for; `None` where the CPU computes.
    pub vram: Option<VramUse>,
    /// Slots for experts in VRAM, if not all are there.
    pub slots: Option<MemoryPlan>,
    /// Where a dense model's layers are, if not all are in VRAM.
    pub sub_layers: Option<SubLayerPlacement>,
    /// Blocks in RAM; `None` where all are in VRAM.
    pub host: Option<MemoryPlan>,
    /// Keys and values in RAM: bytes.
    pub host_kv_cache_bytes: u64,
    pub prediction: Prediction,
}

/// What one more GiB would bring: generated tokens per second with it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OneMoreGib {
    /// What the cost model says, to compare plans with; `None` where the device has no more, or none computes.
    #[serde(skip)]
    pub vram_tokens_per_second: Option<f64>,
    #[serde(skip)]
    pub ram_tokens_per_second: f64,
    #[serde(flatten)]
    pub shown: ShownGains,
}

/// What one more GiB would bring, as far as predictions can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ShownGains {
    /// `None` where numbers would mislead.
    pub vram_tokens_per_second: Option<f64>,
    pub ram_tokens_per_second: Option<f64>,
    /// The rate with it divided by the rate without; `None` where nothing is predicted.
    pub vram_gain: Option<f64>,
    pub ram_gain: Option<f64>,
}

impl OneMoreGib {
    fn new(now: &Speed, vram: Option<f64>, ram: f64) -> OneMoreGib {
        let is_number = now.shown.tokens_per_second.is_some();
        let gain = |rate: f64| now.shown.range().map(|_| rate / now.tokens_per_second);
        let shown = ShownGains {
            vram_tokens_per_second: vram.filter(|_| is_number),
            ram_tokens_per_second: is_number.then_some(ram),
            vram_gain: vram.and_then(gain),
            ram_gain: gain(ram),
        };
        OneMoreGib { vram_tokens_per_second: vram, ram_tokens_per_second: ram, shown }
    }
}

/// The planner's answer.
#[derive(Debug, Clone, Serialize)]
pub struct Planned {
    pub plan: Plan,
    /// The other device, where there was a choice.
    pub other: Option<Plan>,
    /// Why there was none although both were allowed.
    pub why_not_other: Option<String>,
    pub one_more_gib: OneMoreGib,
}

/// A machine and a model on it.
pub struct Planner<'a> {
    model: &'a PlannedModel,
    rates: &'a Rates,
    hits: &'a HitCurve,
    facts: Option<Facts>,
}

impl<'a> Planner<'a> {
    /// With memory that is thought to be free on the profile's GPU.
    pub fn new(model: &'a PlannedModel, rates: &'a Rates, hits: &'a HitCurve) -> Planner<'a> {
        let known = rates.gpu.as_ref();
        let facts = known.and_then(|gpu| gpu::estimate(gpu.multiprocessors, gpu.memory_bytes));
        Planner { model, rates, hits, facts }
    }

    /// With what is known of the GPU itself.
    pub fn with_facts(self, facts: Facts) -> Planner<'a> {
        Planner { facts: Some(facts), ..self }
    }

    /// The best way to run the model within the budgets, by its predicted rate of generating.
    ///
    /// # Errors
    /// What cannot run within them, with the smallest that would do.
    pub fn plan(&self, request: &PlanRequest) -> Result<Planned, EngineError> {
        let (device, tokens_per_second) = (Empty, Empty);
        let ram_bytes = request.ram_bytes;
        let span = tracing::debug_span!("plan", ram_bytes, device, tokens_per_second).entered();
        let costs = self.costs(request);
        let (plan, other, why_not_other) = self.choose(&costs, request)?;
        let more = |request: PlanRequest| {
            let planned = self.choose(&costs, &request).ok()?;
            Some(planned.0.prediction.generate.tokens_per_second)
        };
        let now = &plan.prediction.generate;
        span.record("device", plan.device);
        span.record("tokens_per_second", now.tokens_per_second);
        let ram_bytes = request.ram_bytes.saturating_add(ONE_MORE_BYTES);
        let ram = more(PlanRequest { ram_bytes, ..request.clone() });
        let vram = self.more_vram(request).and_then(more);
        let one_more_gib = OneMoreGib::new(now, vram, ram.unwrap_or(now.tokens_per_second));
        Ok(Planned { plan, other, why_not_other, one_more_gib })
    }

    fn costs(&self, request: &PlanRequest) -> ModelCosts {
        let PlannedModel { architecture, weights, .. } = self.model;
        ModelCosts::new(architecture, weights, request.context)
            .with_cache(architecture, request.cache)
    }

    /// The same without a look at what else there would be.
    pub fn best(&self, request: &PlanRequest) -> Result<Plan, EngineError> {
        let costs = self.costs(request);
        Ok(self.choose(&costs, request)?.0)
    }

    /// The request with one more GiB of VRAM, where the device may be used.
    fn more_vram(&self, request: &PlanRequest) -> Option<PlanRequest> {
        let facts = self.facts.filter(|_| request.device != DeviceChoice::Cpu)?;
        let total_bytes = gpu::total_bytes(&facts);
        let now = request.vram_bytes.unwrap_or(total_bytes).min(total_bytes);
        let more = now + ONE_MORE_BYTES;
        (more <= total_bytes).then(|| PlanRequest { vram_bytes: Some(more), ..request.clone() })
    }

    fn choose(
        &self,
        costs: &ModelCosts,
        request: &PlanRequest,
    ) -> Result<(Plan, Option<Plan>, Option<String>), EngineError> {
        match request.device {
            DeviceChoice::Cpu => Ok((self.on_cpu(costs, request)?, None, None)),
            DeviceChoice::Cuda(_) => Ok((self.on_gpu(costs, request)?, None, None)),
            DeviceChoice::Auto => {
                match (self.on_gpu(costs, request), self.on_cpu(costs, request)) {
                    (Ok(gpu), Ok(cpu)) => {
                        let rate = |plan: &Plan| plan.prediction.generate.tokens_per_second;
                        match rate(&cpu) > rate(&gpu) {
                            true => Ok((cpu, Some(gpu), None)),
                            false => Ok((gpu, Some(cpu), None)),
                        }
                    }
                    (Ok(gpu), Err(why)) => Ok((gpu, None, Some(why.to_string()))),
                    (Err(why), Ok(cpu)) => {
                        let no_gpu = self.rates.gpu.is_none();
                        Ok((cpu, None, (!no_gpu).then(|| why.to_string())))
                    }
                    (Err(_), Err(cpu)) if self.rates.gpu.is_none() => Err(cpu),
                    (Err(gpu), Err(cpu)) => {
                        Err(EngineError::NoPlan { gpu: Box::new(gpu), cpu: Box::new(cpu) })
                    }
                }
            }
        }
    }

    fn on_cpu(&self, costs: &ModelCosts, request: &PlanRequest) -> Result<Plan, EngineError> {
        let weights = &self.model.weights;
        let host = memory::host(weights, &weights.blocks, request.ram_bytes, request.policy)?;
        let free_bytes = request.ram_free_bytes.unwrap_or(u64::MAX);
        let cache_bytes = |context| self.model.cache_bytes(context, request.cache);
        memory::check_cache(request.context, host.arena_bytes, free_bytes, cache_bytes)?;
        let placement = Placement::Ram(host.clone());
        Ok(Plan {
            device: "cpu",
            vram: None,
            slots: None,
            sub_layers: None,
            host: Some(host),
            host_kv_cache_bytes: cache_bytes(request.context),
            prediction: self.predict(costs, request, &placement)?,
        })
    }

    fn on_gpu(&self, costs: &ModelCosts, request: &PlanRequest) -> Result<Plan, EngineError> {
        let rates = self.rates.with_threads(request.threads);
        let facts = self.facts.ok_or_else(gpu::none_in_profile)?;
        let DeviceShare { mut sub_layers, vram, slots } = gpu::share(self.model, &facts, request)?;
        let all_sub_layers = sub_layers.all_in_vram();
        if !all_sub_layers {
            sub_layers.share_with_cpu(&sub_layers::rates_of(costs, &rates, &sub_layers));
        }
        let (weights, ram, policy) = (&self.model.weights, request.ram_bytes, request.policy);
        let placement = match slots.clone() {
            Some(slots) => {
                let host = memory::host(weights, &memory::experts(weights), ram, policy)?;
                Placement::VramSlots { slots, host, cpu_offload: request.cpu_offload }
            }
            None if !all_sub_layers => {
                let host = memory::host(weights, &sub_layers.host_blocks(weights), ram, policy)?;
                Placement::SubLayers { sub_layers: sub_layers.clone(), host }
            }
            None => Placement::Vram,
        };
        let host = match &placement {
            Placement::Vram => None,
            Placement::VramSlots { host, .. }
            | Placement::SubLayers { host, .. }
            | Placement::Ram(host) => Some(host.clone()),
        };
        let prediction = self.predict(costs, request, &placement)?;
        Ok(Plan {
            device: "cuda",
            vram: Some(vram),
            slots,
            sub_layers: (!all_sub_layers).then(|| sub_layers.placement()),
            host,
            host_kv_cache_bytes: 0,
            prediction,
        })
    }

    fn predict(
        &self,
        costs: &ModelCosts,
        request: &PlanRequest,
        placement: &Placement,
    ) -> Result<Prediction, EngineError> {
        let rates = &self.rates.with_threads(request.threads);
        let model = Model { costs, rates, hits: self.hits, work: request.work };
        model.predict(placement).ok_or(EngineError::NoGpuInProfile)
    }
}

/// What the GPU that `device` means says of itself; `None` without one.
pub fn gpu_facts(device: DeviceChoice) -> Option<Facts> {
    let ordinal = match device {
        DeviceChoice::Cpu => return None,
        DeviceChoice::Auto => 0,
        DeviceChoice::Cuda(ordinal) => ordinal,
    };
    gpu::facts(ordinal)
}

/// What to expect of a model that is placed already. `None` where a GPU computes that the rates do not have.
pub(crate) fn predict(
    architecture: &forebay_model::Architecture,
    weights: &forebay_model::Weights,
    context: usize,
    (rates, hits): (&Rates, &HitCurve),
    placement: &Placement,
    work: Work,
) -> Option<Prediction> {
    let costs = ModelCosts::new(architecture, weights, context);
    Model { costs: &costs, rates, hits, work }.predict(placement)
}

impl Plan {
    /// Why generating will be slow, and what would help most, if it will be. `None`, too, where nothing is predicted.
    pub fn slow(&self) -> Option<String> {
        let generate = &self.prediction.generate;
        let is_slow = generate.tokens_per_second < SLOW_TOKENS_PER_SECOND;
        (is_slow && generate.shown.range().is_some()).then(|| match generate.limit {
            Cost::Disk => format!(
                "every token waits for {:.1} GB of weights from the disk: more RAM or VRAM would help",
                generate.disk_bytes / 1e9
            ),
            Cost::Pcie => {
                "every token waits for weights from RAM: more VRAM would help".to_owned()
            }
            Cost::Cpu => {
                "the CPU computes, and takes that long for this model's weights: a GPU would help"
                    .to_owned()
            }
            Cost::GpuMemory | Cost::GpuCompute | Cost::GpuLayers | Cost::HostLoop => {
                "the GPU takes that long for this model".to_owned()
            }
        })
    }
}
