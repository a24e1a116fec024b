//! Experts that are not in VRAM: copied there, or computed by the CPU from RAM.
//!
//! A running session takes the rates for this decision from here too, so the prediction matches what the session does.

use forebay_model::{Architecture, CpuOffloadRates, MissSplit, Weights};
use forebay_stream::MemoryPlan;

use super::cost::{Cost, Model, Sum, Work};
use super::hits::{HitCurve, missing};
use super::model::ModelCosts;
use super::rates::{GpuCosts, Rates};
use crate::CpuOffload;

/// Time to copy an expert to the GPU and another one back, relative to copying one to the GPU (an H200).
const BOTH_WAYS: f64 = 1.66;

/// Experts copied back to RAM for each one that comes to VRAM, as a multiple of the share of all experts that neither memory has
/// room for. RAM still has the other evicted experts. Recorded routing of a synthetic deepseek-v4-flash, replayed with 15, 30 and
/// 45 % of the experts in VRAM: 0.00 to 0.23 without room for a tenth, 0.68 to 0.83 without room for three tenths.
const COPIED_BACK: f64 = 2.5;

/// Overhead of the CPU for any number of a layer's experts, in seconds. The hidden state is copied to the host, two
/// thread-pool regions run on threads that are awake, and rows are copied back. Measured with 8 threads on an H200's
/// host.
const CPU_START_SECONDS: f64 = 20e-6;

/// Cost of a token's missing experts.
pub(super) struct Missing {
    pub seconds: f64,
    /// Number of missing experts that the CPU computes.
    pub experts: f64,
}

/// Returns how many experts are copied back to RAM for each one that comes to VRAM, 0 to 1, if the two hold these shares of all experts.
pub(super) fn copied_back(vram: f64, ram: f64) -> f64 {
    (COPIED_BACK * (1.0 - vram - ram)).clamp(0.0, 1.0)
}

impl Model<'_> {
    /// Returns the time for `missed` experts of a token, and how many of them the CPU computes. Each lookup hits with
    /// probability `hit_rate`. For a share `copied_back` of them, an expert evicted from VRAM is copied to RAM.
    pub(super) fn missing_experts(
        &self,
        gpu: &GpuCosts,
        (missed, hit_rate): (f64, f64),
        copied_back: f64,
        cpu_offload: CpuOffload,
        sum: &mut Sum,
    ) -> Missing {
        let rates = self.cpu_offload_rates(gpu, copied_back);
        let expected = self.expected_misses(hit_rate);
        let offloads = match cpu_offload {
            CpuOffload::Always => true,
            CpuOffload::Auto => rates.saved(&expected) > 0.0,
            CpuOffload::Never => false,
        };
        if !offloads || missed == 0.0 {
            let asking = sum.add(Cost::HostLoop, missed * gpu.bring_seconds());
            let copying = missed * (rates.copy_alone_seconds - gpu.bring_seconds());
            return Missing { seconds: asking + sum.add(Cost::Pcie, copying), experts: 0.0 };
        }
        let layers = self.costs.expert_layers().count() as f64;
        let (mut seconds, mut brought, mut begun) = (0.0, 0.0, 0.0);
        for (misses, probability) in expected.iter().enumerate() {
            let comes = rates.split.brought(misses);
            seconds += layers * probability * rates.seconds(misses)[1];
            brought += layers * probability * comes as f64;
            begun += layers * probability * f64::from(u8::from(comes < misses));
        }
        let experts = (missed - brought).max(0.0);
        // The copies and the CPU's work run side by side and take about equally long.
        sum.add(Cost::Pcie, brought * rates.split.copy_seconds);
        let starting = begun * rates.split.cpu_start_seconds;
        sum.add(Cost::Cpu, starting + experts * rates.split.cpu_seconds);
        Missing { seconds, experts }
    }

    /// Returns the probability of each number of misses (the index) in one layer with experts, for one generated token.
    fn expected_misses(&self, hit_rate: f64) -> Vec<f64> {
        let used = self.costs.expert_layers().map(|experts| self.used(experts).round() as usize);
        let used = used.max().unwrap_or(0);
        missing(used, hit_rate).map(|(_, probability)| probability).collect()
    }

    /// Returns the rates that decide if the CPU computes experts that are not in VRAM.
    fn cpu_offload_rates(&self, gpu: &GpuCosts, copied_back: f64) -> CpuOffloadRates {
        let cpu = self.rates.for_cpu_offload();
        let bytes = self.costs.bytes_per_expert();
        let of_all: f64 = self
            .costs
            .expert_layers()
            .map(|experts| experts.count as f64 * cpu.cpu_seconds(&experts.matrices))
            .sum();
        let cpu_rate = bytes / (of_all / self.costs.experts().max(1) as f64);
        let copy_rate = gpu.copy_rate(bytes);
        let (copy, computing) = cpu.beside(gpu, copy_rate, cpu_rate);
        let ways = 1.0 + (BOTH_WAYS - 1.0) * copied_back;
        let bring = |rate: f64| ways * bytes / rate + gpu.bring_seconds();
        let (copy_both, cpu_both) = cpu.both(gpu, copy_rate, cpu_rate);
        let split = MissSplit {
            copy_seconds: bring(copy),
            cpu_seconds: bytes / computing,
            cpu_start_seconds: CPU_START_SECONDS,
            both_seconds: bytes / (copy_both + cpu_both),
        };
        CpuOffloadRates { split, copy_alone_seconds: bring(copy_rate) }
    }
}

/// Returns what a session with these VRAM and RAM slots needs to decide about CPU offload. The first part is this
/// machine's rates, if they were measured. The second is the initial probability of each number of misses in a layer.
pub(crate) fn offloading(
    architecture: &Architecture,
    weights: &Weights,
    rates: Option<&Rates>,
    slots: &MemoryPlan,
    host: &MemoryPlan,
) -> (Option<CpuOffloadRates>, Vec<f64>) {
    let costs = ModelCosts::new(architecture, weights, 1);
    let hits = HitCurve::default();
    let work = Work::alone(1, 0);
    let usual = Rates::usual(1);
    let model = Model { costs: &costs, rates: rates.unwrap_or(&usual), hits: &hits, work };
    let gpu = rates.and_then(|rates| rates.gpu.as_ref());
    let copied_back = copied_back(slots.kept_share(), host.kept_share());
    let known = gpu.map(|gpu| model.cpu_offload_rates(gpu, copied_back));
    (known, model.expected_misses(model.hit_rate(slots.kept_share())))
}
