//! Seconds for a token and for a prompt, from the model's costs, the placement of its weights and the machine's rates.
//!
//! Times of work that runs one after the other are summed. Work that runs side by side takes the longer time plus half
//! of the shorter one, because it does not overlap where it begins and ends.

use std::fmt;

use forebay_model::SubLayerPlan;
use forebay_stream::MemoryPlan;
use serde::Serialize;

use super::cpu_offload::copied_back;
use super::hits::{HitCurve, missing, share_in_either, used_together};
use super::model::{ExpertCosts, ModelCosts};
use super::rates::{GpuCosts, Rates};
use super::trust::{PredictedRate, Trust};
use crate::CpuOffload;

/// Placement of a model's weights, and the device that computes.
#[derive(Debug, Clone)]
pub enum Placement {
    /// Everything is in the GPU's memory.
    Vram,
    /// The GPU computes. Experts without a slot in VRAM are in pinned RAM, or are read from the disk through it.
    VramSlots {
        /// Slots for experts in VRAM.
        slots: MemoryPlan,
        /// RAM slots for experts.
        host: MemoryPlan,
        /// Choice of whether the CPU computes experts that are not in VRAM.
        cpu_offload: CpuOffload,
    },
    /// The GPU computes a dense model, of which some sub-layers are not in VRAM. Those are copied from pinned RAM, read
    /// from the disk through it, or computed by the CPU.
    SubLayers {
        sub_layers: SubLayerPlan,
        /// RAM slots for the sub-layers that are not in VRAM.
        host: MemoryPlan,
    },
    /// The CPU computes. Blocks are in RAM, or are read from the disk when they are needed.
    Ram(MemoryPlan),
}

/// Amount of work that a prediction is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Number of tokens in the prompt.
    pub prompt_tokens: usize,
    /// Number of tokens in the context before the prompt or before the generated token.
    pub depth: usize,
    /// Number of unrelated sequences that generate together, one token each in a pass.
    pub sequences: usize,
}

impl Work {
    /// Returns the work of one sequence.
    pub const fn alone(prompt_tokens: usize, depth: usize) -> Work {
        Work { prompt_tokens, depth, sequences: 1 }
    }
}

/// Kind of work that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cost {
    /// Kernels that read weights, keys and values in VRAM.
    GpuMemory,
    /// Multiplications for prompts on the GPU.
    GpuCompute,
    /// Kernels of each layer that take a fixed time, whatever their data.
    GpuLayers,
    /// Round trips to the host, which receives the router's choice and returns the table of experts.
    HostLoop,
    /// Copies of experts or layers from pinned RAM to VRAM.
    Pcie,
    /// Products and attention on the CPU.
    Cpu,
    /// Reads of weights from the disk.
    Disk,
}

impl fmt::Display for Cost {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Cost::GpuMemory => "GPU memory",
            Cost::GpuCompute => "GPU arithmetic",
            Cost::GpuLayers => "latency of the GPU's layers",
            Cost::HostLoop => "round trips to the host for experts",
            Cost::Pcie => "PCIe",
            Cost::Cpu => "CPU",
            Cost::Disk => "disk",
        })
    }
}

/// Predicted rate and the costs that lead to it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Speed {
    /// Rate according to the cost model, for comparing plans. Users and documents get [`Speed::shown`] instead.
    #[serde(skip)]
    pub tokens_per_second: f64,
    /// Seconds for one pass with a token of each sequence, or for the whole prompt.
    #[serde(skip)]
    pub seconds: f64,
    /// Rate to show to the user.
    #[serde(flatten)]
    pub shown: PredictedRate,
    /// Cost that takes longest.
    pub limit: Cost,
    /// Seconds of each kind of work. Their sum exceeds `seconds` if some of the work overlaps.
    pub costs: Vec<(Cost, f64)>,
    /// Bytes of weights read from the disk in those seconds.
    pub disk_bytes: f64,
}

/// Predicted speed of one placement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Prediction {
    pub generate: Speed,
    pub prompt: Speed,
    /// Share of the lookups of generated tokens that find the expert in the memory of the computing device. `None` for
    /// dense models.
    pub hit_rate: Option<f64>,
    /// Mean number of experts for which a generated token waits for the disk.
    pub disk_experts_per_token: f64,
    /// Mean number of experts for each generated token that are not in VRAM and that the CPU computes.
    pub cpu_experts_per_token: f64,
}

/// Costs in the order in which they were first added.
#[derive(Default)]
pub(super) struct Sum {
    costs: Vec<(Cost, f64)>,
    pub disk_bytes: f64,
}

impl Sum {
    pub fn add(&mut self, cost: Cost, seconds: f64) -> f64 {
        match self.costs.iter_mut().find(|known| known.0 == cost) {
            Some(known) => known.1 += seconds,
            None if seconds > 0.0 => self.costs.push((cost, seconds)),
            None => {}
        }
        seconds
    }

    pub fn speed(self, tokens: f64, seconds: f64) -> Speed {
        let largest = self.costs.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        let limit = largest.map_or(Cost::Cpu, |largest| largest.0);
        let tokens_per_second = tokens / seconds.max(f64::MIN_POSITIVE);
        Speed {
            tokens_per_second,
            seconds,
            shown: PredictedRate::default(),
            limit,
            costs: self.costs,
            disk_bytes: self.disk_bytes,
        }
    }
}

fn beside(a: f64, b: f64) -> f64 {
    a.max(b) + 0.5 * a.min(b)
}

/// Everything that a prediction depends on except the placement.
#[derive(Clone, Copy)]
pub(crate) struct Model<'a> {
    pub costs: &'a ModelCosts,
    pub rates: &'a Rates,
    pub hits: &'a HitCurve,
    pub work: Work,
}

impl Model<'_> {
    /// Predicts the speed of a placement. Returns `None` if a GPU computes and the profile has none.
    pub fn predict(&self, placement: &Placement) -> Option<Prediction> {
        let mut prediction = self.estimate(placement)?;
        let (doubt, last_cache_bytes) = (self.rates.doubt.as_ref(), self.rates.last_cache_bytes);
        let trust = Trust::new(doubt, last_cache_bytes, self.costs, placement);
        for speed in [&mut prediction.generate, &mut prediction.prompt] {
            speed.shown = trust.shown(speed);
        }
        Some(prediction)
    }

    fn estimate(&self, placement: &Placement) -> Option<Prediction> {
        let has_experts = self.costs.experts() > 0;
        Some(match placement {
            Placement::Vram => self.on_gpu(self.rates.gpu.as_ref()?, 1.0, 1.0, CpuOffload::Never),
            Placement::VramSlots { slots, host, cpu_offload } => {
                let (vram, ram) = (slots.kept_share(), host.kept_share());
                self.on_gpu(self.rates.gpu.as_ref()?, vram, ram, *cpu_offload)
            }
            Placement::SubLayers { sub_layers, host } => {
                self.with_sub_layers(self.rates.gpu.as_ref()?, sub_layers, host)
            }
            Placement::Ram(plan) => {
                let share = if has_experts { plan.kept_share() } else { 1.0 };
                self.on_cpu(plan, share)
            }
        })
    }

    /// Returns the hit rate of the experts that a pass of generated tokens uses.
    pub(super) fn hit_rate(&self, share: f64) -> f64 {
        self.hits.together(share, self.costs.used_share(), self.work.sequences)
    }

    /// Returns the bytes of keys and values that a pass reads.
    pub(super) fn kv_bytes(&self) -> f64 {
        self.sequences() * self.costs.kv.bytes_read(self.work.depth)
    }

    /// Returns the seconds for reading keys and values in RAM, if every sequence has `depth` positions.
    pub(super) fn kv_in_ram_seconds(&self, gpu: &GpuCosts, depth: usize) -> f64 {
        let bytes = self.costs.kv.bytes_read_in_ram(depth * self.work.sequences.max(1));
        if bytes > 0.0 { bytes / gpu.copy_rate(bytes) } else { 0.0 }
    }

    pub(super) fn sequences(&self) -> f64 {
        self.work.sequences.max(1) as f64
    }

    /// Returns the number of experts of a layer that a pass of generated tokens uses.
    pub(super) fn used(&self, experts: &ExpertCosts) -> f64 {
        used_together(experts.count, experts.used, self.work.sequences)
    }

    /// Returns the number of experts that a pass of generated tokens uses in all layers.
    fn used_in_all(&self) -> f64 {
        self.costs.expert_layers().map(|experts| self.used(experts)).sum()
    }

    /// Predicts the speed if the GPU computes. `vram` and `ram` are the shares of the experts kept there.
    fn on_gpu(&self, gpu: &GpuCosts, vram: f64, ram: f64, cpu_offload: CpuOffload) -> Prediction {
        let costs = self.costs;
        let all = vram >= 1.0;
        let either = share_in_either(vram, ram);
        let pairs = self.sequences();
        // The rows of a pass are in two lanes, each of which reads the dense weights.
        let has_lanes = self.work.sequences > 1 && !all;
        let rows = if has_lanes { 2.0 * gpu.rows(pairs / 2.0) } else { gpu.rows(pairs) };
        let lookups = self.used_in_all();
        let hit_rate = self.hit_rate(vram);
        let found = self.hit_rate(either).min(self.hits.found_at_most(ram)).max(hit_rate);
        let (missed, from_disk) = (lookups * (1.0 - hit_rate), lookups * (1.0 - found));
        let expert_bytes = costs.bytes_per_expert();
        let copy_seconds = expert_bytes / gpu.copy_rate(expert_bytes);

        let mut sum = Sum::default();
        let mut seconds = sum.add(Cost::GpuMemory, rows * gpu.seconds(&costs.head));
        seconds += sum.add(Cost::GpuMemory, gpu.attention_seconds(self.kv_bytes()));
        seconds += sum.add(Cost::Pcie, self.kv_in_ram_seconds(gpu, self.work.depth));
        for layer in &costs.layers {
            // Every row multiplies with its experts on its own.
            let used = layer.experts.as_ref().map_or(0.0, |experts| {
                pairs * experts.used as f64 * gpu.seconds(&experts.matrices)
            });
            seconds += sum.add(Cost::GpuMemory, rows * gpu.seconds(&layer.dense) + used);
            seconds += sum.add(Cost::GpuLayers, gpu.layer_seconds(layer));
            if layer.experts.is_some() && !all {
                seconds += sum.add(Cost::HostLoop, gpu.look_seconds());
            }
        }
        let on_cpu = self.missing_experts(
            gpu,
            (missed, hit_rate),
            copied_back(vram, ram),
            cpu_offload,
            &mut sum,
        );
        // One lane computes while the experts of the other are fetched.
        seconds = match has_lanes && on_cpu.experts == 0.0 {
            true => beside(on_cpu.seconds, seconds),
            false => on_cpu.seconds + seconds,
        };
        seconds += sum.add(Cost::Disk, self.bursts(from_disk));
        sum.disk_bytes = from_disk * expert_bytes;
        Prediction {
            generate: sum.speed(self.sequences(), seconds),
            prompt: self.prompt_on_gpu(gpu, vram, ram, copy_seconds),
            hit_rate: (lookups > 0.0).then_some(hit_rate),
            disk_experts_per_token: from_disk / self.sequences(),
            cpu_experts_per_token: on_cpu.experts / self.sequences(),
        }
    }

    /// Returns the seconds that a token waits for `experts` experts from the disk, all layers together. Each layer with
    /// a miss waits for a burst of its own.
    fn bursts(&self, experts: f64) -> f64 {
        let layers = self.costs.expert_layers().count().max(1) as f64;
        let waiting = layers * (1.0 - (-experts / layers).exp());
        experts * self.costs.bytes_per_expert() / self.rates.disk
            + waiting * self.rates.burst_seconds
    }

    fn prompt_on_gpu(&self, gpu: &GpuCosts, vram: f64, ram: f64, copy_seconds: f64) -> Speed {
        let costs = self.costs;
        let batches = batches(self.work.prompt_tokens, costs.gpu_batch_tokens);
        let tokens = self.work.prompt_tokens as f64 / batches;
        let mut sum = Sum::default();
        let mut computing = 0.0;
        for layer in &costs.layers {
            computing += sum.add(Cost::GpuLayers, batches * gpu.prompt_layer_seconds());
            let mut products = gpu.prompt_seconds(&layer.dense, tokens);
            if let Some(experts) = &layer.experts {
                let pairs = tokens * experts.used as f64;
                let each = pairs / experts.count as f64;
                products += gpu.expert_prompt_seconds(&experts.matrices, pairs, each);
            }
            computing += sum.add(Cost::GpuCompute, batches * products);
        }
        // Every batch copies what it sees of the prompt so far.
        let middle = self.work.depth + self.work.prompt_tokens / 2;
        computing += sum.add(Cost::Pcie, batches * self.kv_in_ram_seconds(gpu, middle));
        if vram >= 1.0 {
            return sum.speed(self.work.prompt_tokens as f64, computing);
        }
        let experts = costs.experts() as f64 * batches;
        let missed = experts * self.touched_beyond(vram, tokens);
        let from_disk = experts * self.hits.read_by_a_prompt(vram, ram, costs.used_share(), tokens);
        // Copies overlap with the products, in chunks of some experts. The first copy comes before any product, and the
        // last product comes after all copies.
        let copying = beside(sum.add(Cost::Pcie, missed * copy_seconds), computing);
        let loops = costs.expert_layers().count() as f64 * batches * gpu.host_loop_seconds();
        let loops = sum.add(Cost::HostLoop, loops);
        sum.disk_bytes = from_disk * costs.bytes_per_expert();
        // These reads fill RAM slots that were empty. The disk is faster if the same few slots are read into again and
        // again.
        let disk_seconds = sum.disk_bytes / self.rates.disk_in_place;
        let reading = sum.add(Cost::Disk, disk_seconds);
        sum.speed(self.work.prompt_tokens as f64, beside(copying, reading) + loops)
    }

    fn touched_beyond(&self, share: f64, tokens: f64) -> f64 {
        self.hits.touched_beyond(share, self.costs.used_share(), tokens)
    }

    /// Predicts the speed if the CPU computes and RAM keeps `share` of the experts.
    fn on_cpu(&self, plan: &MemoryPlan, share: f64) -> Prediction {
        let (costs, rates) = (self.costs, self.rates);
        let hit_rate = self.hit_rate(share);
        let mut sum = Sum::default();
        let rows = rates.cpu_rows(self.sequences());
        let mut dense = sum.add(Cost::Cpu, rows * rates.cpu_seconds(&costs.head));
        dense += sum.add(Cost::Cpu, rates.cpu_attention_seconds(self.kv_bytes()));
        let mut experts = 0.0;
        let mut from_disk = 0.0;
        for layer in &costs.layers {
            let of_dense = rows * rates.cpu_seconds(&layer.dense) + rates.cpu_layer_seconds();
            dense += sum.add(Cost::Cpu, of_dense);
            if let Some(of_layer) = &layer.experts {
                experts += self.experts_on_cpu(of_layer, hit_rate, &mut sum);
                let used = self.used(of_layer);
                if !plan.fully_resident {
                    let computing = used * rates.cpu_seconds(&of_layer.matrices);
                    experts += sum.add(Cost::Cpu, rates.cpu_streamed_seconds(computing));
                }
                from_disk += used * (1.0 - hit_rate);
            }
        }
        let streamed = streamed_bytes(plan) as f64;
        let reading = sum.add(Cost::Disk, rates.ring_seconds(streamed));
        sum.disk_bytes = streamed + from_disk * costs.bytes_per_expert();
        Prediction {
            generate: sum.speed(self.sequences(), beside(dense, reading) + experts),
            prompt: self.prompt_on_cpu(streamed, share),
            hit_rate: (costs.experts() > 0).then_some(hit_rate),
            disk_experts_per_token: from_disk / self.sequences(),
            cpu_experts_per_token: 0.0,
        }
    }

    /// Returns the seconds for a layer's experts. The CPU computes the resident experts while the missing ones are
    /// read, and then computes those. The number of misses is binomial.
    fn experts_on_cpu(&self, experts: &ExpertCosts, hit_rate: f64, sum: &mut Sum) -> f64 {
        let used = self.used(experts).round() as usize;
        let pairs = self.sequences() * experts.used as f64;
        let rows = self.rates.cpu_rows(pairs / self.used(experts).max(1.0));
        let one = rows * self.rates.cpu_seconds(&experts.matrices);
        let read = experts.matrices.total_bytes() as f64 / self.rates.disk;
        sum.add(Cost::Cpu, used as f64 * one);
        missing(used, hit_rate)
            .map(|(missed, probability)| {
                let (hit, missed) = ((used - missed) as f64, missed as f64);
                let reading = match missed {
                    0.0 => 0.0,
                    missed => missed * read + self.rates.burst_seconds,
                };
                sum.add(Cost::Disk, probability * reading);
                probability * (reading.max(hit * one) + missed * one)
            })
            .sum()
    }

    fn prompt_on_cpu(&self, streamed: f64, share: f64) -> Speed {
        let (costs, rates) = (self.costs, self.rates);
        let prompt = self.work.prompt_tokens as f64;
        let batches = batches(self.work.prompt_tokens, costs.cpu_batch_tokens);
        let mut sum = Sum::default();
        let mut computing = 0.0;
        for layer in &costs.layers {
            let mut seconds = rates.cpu_prompt_seconds(&layer.dense, prompt);
            if let Some(experts) = &layer.experts {
                let pairs = prompt * experts.used as f64;
                let each = pairs / batches / experts.count as f64;
                seconds += rates.cpu_expert_prompt_seconds(&experts.matrices, pairs, each);
            }
            computing += sum.add(Cost::Cpu, seconds + batches * rates.cpu_layer_seconds());
        }
        let experts = costs.experts() as f64 * self.touched_beyond(share, prompt / batches);
        sum.disk_bytes = batches * (streamed + experts * costs.bytes_per_expert());
        let of_experts = batches * experts * costs.bytes_per_expert() / rates.disk;
        let reading = sum.add(Cost::Disk, batches * rates.ring_seconds(streamed) + of_experts);
        sum.speed(prompt, beside(computing, reading))
    }
}

pub(super) fn batches(tokens: usize, most: usize) -> f64 {
    tokens.div_ceil(most).max(1) as f64
}

/// Returns the bytes of dense blocks that pass through the ring in every pass.
pub(super) fn streamed_bytes(plan: &MemoryPlan) -> u64 {
    let blocks = plan.dense.slot_bytes.iter().zip(&plan.dense.pinned);
    blocks.filter(|(_, pinned)| !**pinned).map(|(bytes, _)| bytes).sum()
}
