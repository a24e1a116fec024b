//! Dense models that do not fit in VRAM: which sub-layers the CPU computes, and how long a token takes.
//!
//! The bus and the CPU work at the same time, and both read host memory. A token takes at least as long as either of
//! them needs for its own share at its own rate. It also takes at least as long as host memory needs to deliver all the
//! bytes. The CPU waits while the GPU computes; copies do not.

use forebay_model::{Architecture, SubLayerPlan, SubLayerRates, Weights};
use forebay_stream::MemoryPlan;

use super::cost::{Cost, Model, Prediction, Speed, Sum, batches, streamed_bytes};
use super::model::{LayerCosts, Matrices, ModelCosts};
use super::rates::{GpuCosts, Rates};

/// Assumed size of one copy, in bytes, for which the copy rate is looked up. Parts of a large model's layers have this
/// size.
const PART_BYTES: f64 = (64 << 20) as f64;

/// Overhead of each sub-layer that the CPU computes, in addition to its products, in seconds. The input is copied to
/// the host, threads wake, and the output is copied back. Estimated from the calls: one wait, two thread-pool regions,
/// and some KiB each way over the bus.
const HAND_OVER_SECONDS: f64 = 80e-6;

/// Extra time for each layer that is not entirely in a CUDA graph, in seconds. Its kernels are queued one by one. That
/// took 1.2 to 1.6 times as long as the CUDA graph on an H100 (bench/results/2026-11-21-h100-cuda.md).
const QUEUED_LAYER_SECONDS: f64 = 15e-6;

/// Fraction of the disk's rate that a pass gets for sub-layers read from the disk. Two slots in host memory are read
/// into while others are used, so the disk seldom pauses.
const DISK_SHARE: f64 = 0.95;

/// Sizes and number of the sub-layers that are not in VRAM.
struct Outside {
    all_bytes: f64,
    /// Bytes of the feed-forward sub-layers among them, which the CPU may compute.
    feed_forward_bytes: f64,
    feed_forwards: f64,
}

impl Outside {
    fn of(sub_layers: &SubLayerPlan) -> Outside {
        let bytes = |sub_layer: &forebay_model::SubLayer| sub_layer.bytes as f64;
        let may = || {
            sub_layers
                .outside()
                .map(|(_, sub_layer)| sub_layer)
                .filter(|sub_layer| sub_layer.for_cpu)
        };
        Outside {
            all_bytes: sub_layers.outside().map(|(_, sub_layer)| bytes(sub_layer)).sum(),
            feed_forward_bytes: may().map(bytes).sum(),
            feed_forwards: may().count() as f64,
        }
    }
}

/// Rates of one machine for one model.
struct Machine {
    /// Bytes per second that the bus copies while the CPU is idle.
    copy: f64,
    /// Bytes per second that the CPU computes while the bus is idle, including the overhead of each sub-layer.
    cpu: f64,
    /// Bytes per second of the bus and of the CPU while both read host memory.
    both: (f64, f64),
    /// Seconds of GPU work for a token if the CPU computes nothing.
    gpu_seconds: f64,
    /// Bytes per second of the GPU for the sub-layers that the CPU may compute.
    gpu: f64,
}

impl Machine {
    fn new(model: &Model<'_>, gpu: &GpuCosts, outside: &Outside) -> Machine {
        let costs = model.costs;
        let feed_forward: Vec<&Matrices> =
            costs.layers.iter().filter_map(|layer| layer.feed_forward.as_ref()).collect();
        let bytes: f64 = feed_forward.iter().map(|of| of.total_bytes() as f64).sum();
        let mean = |seconds: f64| bytes.max(1.0) / seconds.max(f64::MIN_POSITIVE);
        let on_cpu = mean(feed_forward.iter().map(|of| model.rates.cpu_seconds(of)).sum());
        let each = outside.feed_forward_bytes / outside.feed_forwards.max(1.0);
        let layers = costs.layers.len() as f64;
        let of_layer = |layer: &LayerCosts| gpu.seconds(&layer.dense) + gpu.layer_seconds(layer);
        let of_layers: f64 = costs.layers.iter().map(of_layer).sum();
        let copy = gpu.copy_rate(PART_BYTES);
        Machine {
            copy,
            cpu: 1.0 / (1.0 / on_cpu + HAND_OVER_SECONDS / each.max(1.0)),
            both: model.rates.both(gpu, copy, on_cpu),
            gpu_seconds: gpu.seconds(&costs.head)
                + gpu.attention_seconds(model.kv_bytes())
                + model.kv_in_ram_seconds(gpu, model.work.depth)
                + of_layers
                + layers * QUEUED_LAYER_SECONDS,
            gpu: mean(feed_forward.iter().map(|of| gpu.seconds(of)).sum()),
        }
    }

    /// Returns how many of the bytes outside VRAM the CPU should compute so that the CPU and the bus finish at the same
    /// time.
    fn cpu_bytes(&self, outside: &Outside) -> f64 {
        let saved = 1.0 / self.cpu - 1.0 / self.gpu;
        let copying = outside.all_bytes / self.copy;
        let bytes = (copying - self.gpu_seconds) / (1.0 / self.copy + saved.max(0.0));
        bytes.clamp(0.0, outside.feed_forward_bytes)
    }
}

/// Returns the rates by which a session divides sub-layers between the bus and the CPU.
pub(crate) fn sub_layer_rates(
    architecture: &Architecture,
    weights: &Weights,
    context: usize,
    rates: &Rates,
    sub_layers: &SubLayerPlan,
) -> SubLayerRates {
    let costs = ModelCosts::new(architecture, weights, context);
    rates_of(&costs, rates, sub_layers)
}

pub(super) fn rates_of(
    costs: &ModelCosts,
    rates: &Rates,
    sub_layers: &SubLayerPlan,
) -> SubLayerRates {
    let hits = super::HitCurve::default();
    let work = super::Work::alone(1, 0);
    let model = Model { costs, rates, hits: &hits, work };
    let usual = GpuCosts::usual();
    let outside = Outside::of(sub_layers);
    let machine = Machine::new(&model, rates.gpu.as_ref().unwrap_or(&usual), &outside);
    let cpu_bytes = machine.cpu_bytes(&outside);
    let (copy, cpu) = machine.both;
    SubLayerRates {
        copy_bytes_per_second: copy,
        cpu_bytes_per_second: cpu.min(machine.cpu),
        gpu_seconds: machine.gpu_seconds - cpu_bytes / machine.gpu,
    }
}

impl Model<'_> {
    pub(super) fn with_sub_layers(
        &self,
        gpu: &GpuCosts,
        sub_layers: &SubLayerPlan,
        host: &MemoryPlan,
    ) -> Prediction {
        let outside = Outside::of(sub_layers);
        let machine = Machine::new(self, gpu, &outside);
        let from_disk = streamed_bytes(host) as f64;
        let disk_seconds = from_disk / (DISK_SHARE * self.rates.disk);
        let cpu_bytes = machine.cpu_bytes(&outside);
        let mut sum = Sum::default();
        let on_gpu = gpu.rows(self.sequences()) * (machine.gpu_seconds - cpu_bytes / machine.gpu);
        sum.add(Cost::GpuMemory, on_gpu);
        let copying = sum.add(Cost::Pcie, (outside.all_bytes - cpu_bytes) / machine.copy);
        let cpu_rows = self.rates.cpu_rows(self.sequences());
        let computing = sum.add(Cost::Cpu, cpu_rows * cpu_bytes / machine.cpu);
        let reading = sum.add(Cost::Disk, disk_seconds);
        // While the CPU waits for the GPU, copies have host memory to themselves. This uses the least time that the GPU
        // can need: the bound must not depend on the bus through the split of the work.
        let memory = machine.both.0 + machine.both.1;
        let alone = (1.0 - machine.copy / memory).max(0.0);
        let least = machine.gpu_seconds - outside.feed_forward_bytes / machine.gpu;
        let both = outside.all_bytes / memory + least * alone;
        sum.disk_bytes = from_disk;
        let seconds = copying.max(computing + on_gpu).max(both).max(reading);
        Prediction {
            generate: sum.speed(self.sequences(), seconds),
            prompt: self.prompt_with_sub_layers(gpu, &outside, machine.copy, from_disk),
            hit_rate: None,
            disk_experts_per_token: 0.0,
            cpu_experts_per_token: 0.0,
        }
    }

    /// Predicts the prompt. Every batch copies all weights that are not in VRAM to the GPU once.
    fn prompt_with_sub_layers(
        &self,
        gpu: &GpuCosts,
        outside: &Outside,
        copy: f64,
        from_disk: f64,
    ) -> Speed {
        let batches = batches(self.work.prompt_tokens, self.costs.gpu_batch_tokens);
        let tokens = self.work.prompt_tokens as f64 / batches;
        let mut sum = Sum::default();
        let mut computing = 0.0;
        for layer in &self.costs.layers {
            let products = gpu.prompt_seconds(&layer.dense, tokens);
            computing += sum.add(Cost::GpuLayers, batches * gpu.prompt_layer_seconds());
            computing += sum.add(Cost::GpuCompute, batches * products);
        }
        let copying = sum.add(Cost::Pcie, batches * outside.all_bytes / copy);
        sum.disk_bytes = batches * from_disk;
        let reading = sum.add(Cost::Disk, sum.disk_bytes / (DISK_SHARE * self.rates.disk));
        sum.speed(self.work.prompt_tokens as f64, computing.max(copying).max(reading))
    }
}
