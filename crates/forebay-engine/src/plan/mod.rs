//! The planner: where to put a model's weights on a machine, how fast the model will run there, and what limits the
//! speed.
//!
//! A plan is a pure function of the model's facts, the machine profile, the budgets and the expected hit rates.
//! Sessions plan their memory with the same functions, so a plan describes what `run` does.
//!
//! ```text
//! model.rs       cost of a token for a model
//! rates.rs       rates of a machine, per second
//! hits.rs        how often experts are found in VRAM and RAM
//! memory.rs      memory plans of sessions
//! cost.rs        seconds for tokens and prompts
//! cpu_offload.rs seconds for experts that the CPU computes for a GPU
//! sub_layers.rs  seconds for dense models that do not fit in VRAM
//! trust.rs       decides if a prediction is shown as a number, a range or nothing
//! whole.rs       memory that a whole model takes beside others
//! asked.rs       the plan that a user asks for
//! ```

mod asked;
mod coding;
mod cost;
mod cpu_offload;
mod error;
mod hits;
pub(crate) mod memory;
mod model;
mod rates;
mod sub_layers;
mod trust;
mod whole;

use forebay_model::{DeviceShare, KvInVram, SubLayerPlacement, VramUse};
use forebay_ops::KvType;
use forebay_stream::{MemoryPlan, PolicyKind};
use serde::Serialize;
use tracing::field::Empty;

use crate::device;
pub use crate::gpu::OpenGpu;
use crate::gpu::{self, Facts};
use crate::memory::share_of;
use crate::{CpuOffload, DeviceChoice, SessionOptions, default_budget_bytes};
pub use asked::{Answered, Asked};
pub(crate) use coding::Coding;
pub use cost::{Cost, Placement, Prediction, Speed, Work};
pub use error::PlanError;
pub(crate) use error::{needed_by_model, needed_by_stream};
pub use hits::{HitCurve, share_in_either};
pub use model::PlannedModel;
pub use rates::Rates;
pub use trust::{PredictedRate, TOKEN_BYTES_MIN};
pub use whole::ModelMemory;

use cost::Model;
#[cfg(feature = "cuda")]
pub(crate) use cpu_offload::offloading;
use model::ModelCosts;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use model::row_bytes;
#[cfg(feature = "cuda")]
pub(crate) use sub_layers::sub_layer_rates;

/// Additional memory for which a plan reports the gain, in bytes.
const ONE_MORE_BYTES: u64 = 1 << 30;

/// Generated tokens per second below which the user is warned before the run.
pub const SLOW_TOKENS_PER_SECOND: f64 = 2.0;

/// Choices of the user, and the free memory.
#[derive(Debug, Clone)]
pub struct PlanRequest {
    pub device: DeviceChoice,
    /// VRAM budget in bytes, as given by `--vram`. `None` means all free VRAM.
    pub vram_bytes: Option<u64>,
    /// RAM budget for weights, in bytes.
    pub ram_bytes: u64,
    /// True if the user chose the RAM budget.
    pub ram_chosen_by_user: bool,
    /// Bytes of RAM that weights, keys and values may take together. `None` if unknown, as for another machine.
    pub ram_free_bytes: Option<u64>,
    /// Number of positions in the KV cache.
    pub context: usize,
    /// How much of the keys and values is in VRAM.
    pub kv_in_vram: KvInVram,
    /// Type in which keys and values are stored.
    pub cache: KvType,
    pub policy: PolicyKind,
    /// Number of CPU threads, as given by `--threads`. `None` means as many as the machine profile was measured with.
    pub threads: Option<usize>,
    /// Choice of whether the CPU computes some of the experts that are not in VRAM.
    pub cpu_offload: CpuOffload,
    pub work: Work,
}

impl PlanRequest {
    /// Returns the request for a session with `options` and `context` positions.
    pub fn of_session(options: &SessionOptions, context: usize, work: Work) -> PlanRequest {
        // A session chooses the CPU if there are options for the CPU alone and none for a GPU.
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
            kv_in_vram: options.kv_in_vram,
            cache: options.kv_type(),
            policy: options.policy,
            threads: options.threads,
            cpu_offload: options.cpu_offload_possible(),
            work,
        }
    }

    /// Returns the RAM budget for weights if `kv_bytes` of keys and values are in RAM, too. A budget of the user is for weights
    /// alone; without one, weights have their share of what keys and values leave, as in a session.
    fn ram_bytes_beside(&self, kv_bytes: u64) -> u64 {
        match self.ram_chosen_by_user {
            true => self.ram_bytes,
            false => self.ram_bytes.saturating_sub(share_of(kv_bytes)),
        }
    }
}

/// One way to run a model.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Device memory by purpose. `None` if the CPU computes.
    pub vram: Option<VramUse>,
    /// Slots for experts in VRAM. `None` unless some experts are not in VRAM.
    pub slots: Option<MemoryPlan>,
    /// Placement of a dense model's sub-layers. `None` unless some of them are not in VRAM.
    pub sub_layers: Option<SubLayerPlacement>,
    /// Blocks in RAM. `None` if all weights are in VRAM.
    pub host: Option<MemoryPlan>,
    /// Bytes of keys and values in RAM.
    pub host_kv_cache_bytes: u64,
    pub prediction: Prediction,
}

/// Predicted rates of generated tokens with one more GiB of memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct OneMoreGib {
    /// Rate with one more GiB of VRAM according to the cost model, for comparing plans. `None` if the GPU has no more
    /// memory, or if there is no GPU.
    #[serde(skip)]
    pub vram_tokens_per_second: Option<f64>,
    #[serde(skip)]
    pub ram_tokens_per_second: f64,
    #[serde(flatten)]
    pub shown: ShownGains,
}

/// Gains from one more GiB of memory, as far as predictions can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ShownGains {
    /// Rate with one more GiB of VRAM. `None` if a number would mislead.
    pub vram_tokens_per_second: Option<f64>,
    pub ram_tokens_per_second: Option<f64>,
    /// Rate with one more GiB of VRAM divided by the rate without it. `None` if nothing is predicted.
    pub vram_gain: Option<f64>,
    /// Rate with one more GiB of RAM divided by the rate without it. `None` if nothing is predicted.
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

/// Result of [`Planner::plan`].
#[derive(Debug, Clone, Serialize)]
pub struct Planned {
    pub plan: Plan,
    /// Plan for the other device, if there was a choice.
    pub other: Option<Plan>,
    /// Reason why there is no plan for the other device although both were allowed.
    pub why_not_other: Option<String>,
    pub one_more_gib: OneMoreGib,
}

/// Predicted rate of several sequences that generate together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Together {
    pub sequences: usize,
    /// Tokens of all sequences per second according to the cost model, for comparing plans.
    #[serde(skip)]
    pub tokens_per_second: f64,
    #[serde(flatten)]
    pub shown: PredictedRate,
}

/// Largest number of sequences whose speed together is predicted: the most that a GPU runs.
pub const SEQUENCES_MAX: usize = 32;

impl Together {
    /// Returns the entry with most tokens per second, if anything is predicted.
    pub fn best(together: &[Together]) -> Option<&Together> {
        let predicted = together.iter().filter(|of| of.shown.range().is_some());
        predicted.max_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second))
    }
}

/// Planner for one model on one machine.
pub struct Planner<'a> {
    model: &'a PlannedModel,
    rates: Rates,
    hits: &'a HitCurve,
    facts: Option<Facts>,
}

impl<'a> Planner<'a> {
    /// Creates a planner that estimates the free memory of the profile's GPU.
    pub fn new(model: &'a PlannedModel, rates: &Rates, hits: &'a HitCurve) -> Planner<'a> {
        let rates = rates.reading(&model.info.coding);
        let known = rates.gpu.as_ref();
        let facts = known.and_then(|gpu| gpu::estimate(gpu.multiprocessors, gpu.memory_bytes));
        Planner { model, rates, hits, facts }
    }

    /// Replaces the estimate by the facts of the GPU itself.
    pub fn with_facts(self, facts: Facts) -> Planner<'a> {
        Planner { facts: Some(facts), ..self }
    }

    /// Returns the way to run the model within the budgets that generates fastest, according to the prediction.
    ///
    /// # Errors
    /// Returns an error if the model cannot run within the budgets. The error names the smallest budget that works.
    pub fn plan(&self, request: &PlanRequest) -> Result<Planned, PlanError> {
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

    /// Returns the best plan, without the alternatives and gains of [`Planner::plan`].
    pub fn best(&self, request: &PlanRequest) -> Result<Plan, PlanError> {
        let costs = self.costs(request);
        Ok(self.choose(&costs, request)?.0)
    }

    /// Returns the plans for several numbers of sequences that generate together: powers of two up to `most`. Numbers for
    /// which memory has no room are left out.
    pub fn together(&self, request: &PlanRequest, most: usize) -> Vec<Together> {
        let numbers = std::iter::successors(Some(1), |number| Some(2 * number));
        let planned = numbers.take_while(|number| *number <= most).map_while(|sequences| {
            let work = Work { sequences, ..request.work };
            let chosen = request.cpu_offload;
            let cpu_offload = if sequences > 1 { chosen.beside_others() } else { chosen };
            let plan = self.best(&PlanRequest { work, cpu_offload, ..request.clone() }).ok()?;
            let generate = plan.prediction.generate;
            let tokens_per_second = generate.tokens_per_second;
            Some(Together { sequences, tokens_per_second, shown: generate.shown })
        });
        planned.collect()
    }

    /// Returns the request with one more GiB of VRAM, or `None` if no GPU may be used or the GPU has no more memory.
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
    ) -> Result<(Plan, Option<Plan>, Option<String>), PlanError> {
        match request.device {
            DeviceChoice::Cpu => Ok((self.on_cpu(costs, request)?, None, None)),
            DeviceChoice::Cuda(_) => Ok((self.on_gpu(costs, request)?, None, None)),
            DeviceChoice::Auto => {
                match (self.on_gpu(costs, request), self.on_cpu(costs, request)) {
                    (Ok(gpu), Ok(cpu)) => {
                        let rate = |plan: &Plan| plan.prediction.generate.tokens_per_second;
                        // A session on a machine that was not measured takes the GPU.
                        match self.rates.measured && rate(&cpu) > rate(&gpu) {
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
                        Err(PlanError::NoPlan { gpu: Box::new(gpu), cpu: Box::new(cpu) })
                    }
                }
            }
        }
    }

    fn on_cpu(&self, costs: &ModelCosts, request: &PlanRequest) -> Result<Plan, PlanError> {
        let weights = &self.model.weights;
        let free_bytes = request.ram_free_bytes.unwrap_or(u64::MAX);
        let sequences = request.work.sequences.max(1);
        let cache_bytes = |context| self.model.cache_bytes(context, sequences, request.cache);
        let ram_bytes = request.ram_bytes_beside(cache_bytes(request.context));
        let host = memory::host(weights, &weights.blocks, ram_bytes, request.policy)?;
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

    fn on_gpu(&self, costs: &ModelCosts, request: &PlanRequest) -> Result<Plan, PlanError> {
        let rates = self.rates.with_threads(request.threads);
        let facts = self.facts.ok_or_else(gpu::none_in_profile)?;
        let share = gpu::share(self.model, &facts, request)?;
        let DeviceShare { mut sub_layers, vram, slots, batch_tokens } = share;
        let all_sub_layers = sub_layers.all_in_vram();
        if !all_sub_layers {
            sub_layers.share_with_cpu(&sub_layers::rates_of(costs, &rates, &sub_layers));
        }
        let (kv_bytes, free_bytes) = (vram.kv_cache_in_ram_bytes, request.ram_free_bytes);
        let (weights, policy) = (&self.model.weights, request.policy);
        let ram = request.ram_bytes_beside(kv_bytes);
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
        let weights_bytes = host.as_ref().map_or(0, |host| host.arena_bytes);
        memory::check_cache_on_gpu(
            request.context,
            weights_bytes,
            free_bytes.unwrap_or(u64::MAX),
            kv_bytes,
        )?;
        let positions = request.context * request.work.sequences.max(1);
        let in_ram = vram.kv_cache_in_ram_bytes as f64 / costs.kv.bytes_kept(positions).max(1.0);
        let kv = costs.kv.clone().with_in_vram(1.0 - in_ram, positions);
        let costs = ModelCosts { kv, gpu_batch_tokens: batch_tokens, ..costs.clone() };
        let prediction = self.predict(&costs, request, &placement)?;
        Ok(Plan {
            device: "cuda",
            slots,
            sub_layers: (!all_sub_layers).then(|| sub_layers.placement()),
            host,
            host_kv_cache_bytes: vram.kv_cache_in_ram_bytes,
            vram: Some(vram),
            prediction,
        })
    }

    fn predict(
        &self,
        costs: &ModelCosts,
        request: &PlanRequest,
        placement: &Placement,
    ) -> Result<Prediction, PlanError> {
        let rates = &self.rates.with_threads(request.threads);
        let model = Model { costs, rates, hits: self.hits, work: request.work };
        model.predict(placement).ok_or(PlanError::NoGpuInProfile)
    }
}

/// Returns what the GPU selected by `device` reports about itself, or `None` if there is no such GPU.
pub fn gpu_facts(device: DeviceChoice) -> Option<Facts> {
    let ordinal = match device {
        DeviceChoice::Cpu => return None,
        DeviceChoice::Auto => 0,
        DeviceChoice::Cuda(ordinal) => ordinal,
    };
    gpu::facts(ordinal)
}

/// Predicts the speed of a model that is already placed, with such a share of the keys and values for so many positions in VRAM,
/// and with such a context and number of prompt tokens in a pass. Returns `None` if a GPU computes and the rates do not have one.
pub(crate) fn predict(
    architecture: &forebay_model::Architecture,
    weights: &forebay_model::Weights,
    (context, batch_tokens): (usize, usize),
    (rates, hits): (&Rates, &HitCurve),
    (placement, (in_vram, positions)): (&Placement, (f64, usize)),
    work: Work,
) -> Option<Prediction> {
    let costs = ModelCosts::new(architecture, weights, context);
    let kv = costs.kv.clone().with_in_vram(in_vram, positions);
    let costs = ModelCosts { kv, gpu_batch_tokens: batch_tokens, ..costs };
    Model { costs: &costs, rates, hits, work }.predict(placement)
}

impl Plan {
    /// Explains why generating will be slow and what would help most. Returns `None` if it will not be slow, or if
    /// nothing is predicted.
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
            Cost::Cpu => "the CPU is the bottleneck for this model: a GPU would help".to_owned(),
            Cost::GpuMemory | Cost::GpuCompute | Cost::GpuLayers | Cost::HostLoop => {
                "the GPU is the bottleneck for this model".to_owned()
            }
        })
    }
}
