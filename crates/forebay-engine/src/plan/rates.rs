//! Rates of a machine, from its profile. Rates that no profile has are estimated.

use std::path::Path;

use forebay_format::TensorType;

use super::coding::Coding;
use super::model::{LayerCosts, Matrices};
use super::trust::Doubt;
use crate::doctor::{
    BESIDE_TYPE, BesideCpu, DecoderRate, GpuRates, KernelRate, MachineProfile, PinnedCopyRate,
};

/// Multiplications per second and processor for prompts, used if the profile has none. This is the slower of the
/// measured processors (Zen 3 with AVX2, 62e9 for Q4_K and 34e9 for Q8_0 per core).
const CPU_MULTIPLY_ADDS_PER_PROCESSOR: f64 = 40e9;

/// Multiplications per second and multiprocessor for prompts, which no profile has. An H100 with 132 multiprocessors
/// did 77e12 (llama-8b, Q4_K_M, 9641 tokens/s). Server GPUs have tensor cores of that speed. Other GPUs have about half
/// of it according to their data sheets.
const GPU_MULTIPLY_ADDS_SERVER: f64 = 0.58e12;
const GPU_MULTIPLY_ADDS_OTHER: f64 = 0.27e12;

/// Fraction of the disk's rate that dense blocks get while they pass through the ring. One block is read ahead, so the
/// disk pauses between blocks (llama-1b with half of its weights streamed: 2.3 of 3.2 GB/s).
const RING_SHARE: f64 = 0.75;

/// Time of the CPU for each layer in addition to the products, in seconds: norms, attention, and the start and end of
/// thread-pool regions.
const CPU_LAYER_SECONDS: f64 = 40e-6;

/// Extra computing time, as a fraction, if some experts are missing now and then. The reading is not included. The
/// products are split in two, and reads use the same memory. Derived from 54.8 and 69 tokens/s of qwen3moe-30b with 6
/// layers, where a token missed 4.3 and 0.6 experts. A model with experts of 119 KB loses as small a part.
const CPU_STREAMED_SHARE: f64 = 0.5;

/// Tokens for each expert at which the CPU's prompt products run half as fast as with many tokens (qwen3moe-30b, 512
/// tokens).
const CPU_EXPERT_TOKENS_HALF_FAST: f64 = 24.0;

/// Time of one token's kernels in a layer that do not read weights, in a CUDA graph, in seconds. Derived from 422
/// tokens/s of qwen3moe-30b on an H200 (experts) and 403 tokens/s of llama-8b on an H100 (dense). These are latencies,
/// which are much the same on every GPU.
const GPU_DENSE_LAYER_SECONDS: f64 = 17e-6;
const GPU_EXPERT_LAYER_SECONDS: f64 = 35e-6;
/// Time of each kernel of such a layer that is not one of grouped attention with experts. Derived from 452 tokens/s of deepseek-v2-lite
/// on an H200, whose latent attention and shared experts are 9 kernels more.
const GPU_KERNEL_SECONDS: f64 = 3.2e-6;

/// Time of a round trip to the host in each layer, for a prompt batch, in seconds. The router's choice is copied to the
/// host, and a table of experts is copied back.
const HOST_LOOP_SECONDS: f64 = 25e-6;

/// Time that each further row of a pass of generated tokens adds to the products with weights that all rows share, as a
/// share of the first row's time. The GPU's is from 415, 1142, 1515, 1936 and 2543 tokens/s of llama-8b with 1, 4, 8, 16 and 32
/// sequences on an H100 (0.18 to 0.23), the CPU's from 1.62 times the tokens/s of one sequence with 4 (llama-1b, 2 cores of an EPYC).
const GPU_NEXT_ROW: f64 = 0.2;
const CPU_NEXT_ROW: f64 = 0.5;

/// Time of one token's kernel that looks up a layer's experts, in seconds. `BRING_SECONDS` is added for each expert
/// that must be copied: the request to the host, and what its copy loses against large copies. Derived from 213 and 74
/// tokens/s of qwen3moe-30b on an H200, with 30 and 177 experts copied for each token.
const LOOK_SECONDS: f64 = 6e-6;
const BRING_SECONDS: f64 = 12e-6;

/// Fraction of the memory read rate that attention to a long context gets for keys and values (16 384 positions on an
/// H100: 47 to 75 %).
const ATTENTION_SHARE: f64 = 0.5;

/// Time of one layer's kernels for a prompt batch, in seconds.
const GPU_PROMPT_LAYER_SECONDS: f64 = 0.2e-3;

/// Tokens for each expert at which the tensor cores are half busy. Fitted to a prompt of 512 tokens on an H100
/// (qwen3moe-30b, 7396 tokens/s).
const EXPERT_TOKENS_HALF_BUSY: f64 = 96.0;

/// Assumed rates of a machine that `doctor` has not measured, in bytes per second. Memory reads have a rate for each
/// processor and one for all, and the GPU is behind PCIe 4.
const USUAL_READ_PER_PROCESSOR: f64 = 8e9;
const USUAL_READ: f64 = 60e9;
const USUAL_DISK: f64 = 2e9;
const USUAL_PINNED_COPY: f64 = 22e9;
const USUAL_VRAM_READ: f64 = 600e9;
/// Fraction of the memory read rate that the CPU's products get on such a machine.
const USUAL_KERNEL_SHARE: f64 = 0.8;

/// Rates that all the formulas divide by, in bytes or multiplications per second.
#[derive(Clone, Debug)]
pub struct Rates {
    pub(crate) disk: f64,
    /// Rate of the disk when it reads into memory as large as a model's, every part of which is filled for the first
    /// time.
    pub(crate) disk_in_place: f64,
    /// Seconds that a burst of demanded reads takes in addition to the time of its bytes.
    pub(crate) burst_seconds: f64,
    memory_read: f64,
    processors: usize,
    cpu: Vec<KernelRate>,
    /// Number of threads with which `cpu` was measured.
    usual_threads: usize,
    /// Number of threads that compute. `None` means `usual_threads`.
    threads: Option<usize>,
    pub(crate) gpu: Option<GpuCosts>,
    /// False for assumed rates.
    pub(super) measured: bool,
    /// Reason why these rates may be wrong, if there is one.
    pub(super) doubt: Option<Doubt>,
    /// Rates of the decoders of coded blocks, on one core.
    decoders: Vec<DecoderRate>,
    /// Size of the processor's last-level cache, if the profile has it.
    pub(super) last_cache_bytes: Option<u64>,
}

/// Rates of a GPU.
#[derive(Clone, Debug)]
pub(crate) struct GpuCosts {
    pub name: String,
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    memory_read: f64,
    kernels: Vec<KernelRate>,
    copies: Vec<PinnedCopyRate>,
    beside_cpu: Option<BesideCpu>,
    multiply_adds: f64,
}

impl Rates {
    /// Returns the rate of the disk.
    pub(crate) fn disk_bytes_per_second(&self) -> f64 {
        self.disk
    }

    /// Returns the rates of this machine with the disk of a folder, or `None` if `doctor` has not measured them.
    pub(crate) fn of_folder(folder: &Path) -> Option<Rates> {
        Rates::new(&MachineProfile::of_folder(folder).ok()?).ok()
    }

    /// Takes the rates from a machine profile.
    ///
    /// # Errors
    /// Returns an error message if the profile contains rates that no machine has.
    pub fn new(profile: &MachineProfile) -> Result<Rates, &'static str> {
        let (p50, p99) = (profile.read_64kib_p50_seconds, profile.read_64kib_p99_seconds);
        let rates = Rates {
            disk: profile.read.bytes_per_second,
            disk_in_place: profile.read.in_place_bytes_per_second,
            // In addition to its bytes, a burst waits for its first request and for the last one to complete.
            burst_seconds: 2.0 * p99.max(p50),
            memory_read: profile.memory_read_bytes_per_second,
            processors: profile.machine.processors.max(1),
            cpu: profile.kernels.clone(),
            usual_threads: profile.threads.unwrap_or(profile.machine.processors).max(1),
            threads: None,
            gpu: profile.gpu.as_ref().map(GpuCosts::new),
            measured: true,
            doubt: Doubt::of(profile),
            decoders: profile.decoders.clone(),
            last_cache_bytes: profile.last_cache_bytes,
        };
        let mut all = vec![rates.disk, rates.disk_in_place, p50, p99, rates.memory_read];
        all.extend(kernel_rates(&rates.cpu));
        if let Some(gpu) = &rates.gpu {
            all.push(gpu.memory_read);
            all.extend(kernel_rates(&gpu.kernels));
            all.extend(gpu.copies.iter().map(|copy| copy.to_device_bytes_per_second));
            if gpu.copies.is_empty() {
                all.push(0.0);
            }
        }
        let good = |rate: &f64| rate.is_finite() && *rate > 0.0;
        all.iter().all(good).then_some(rates).ok_or("the machine profile is damaged")
    }

    /// Returns assumed rates for a machine with `processors` processors that `doctor` has not measured.
    pub(crate) fn usual(processors: usize) -> Rates {
        let memory_read = (USUAL_READ_PER_PROCESSOR * processors as f64).min(USUAL_READ);
        Rates {
            disk: USUAL_DISK,
            disk_in_place: USUAL_DISK,
            burst_seconds: 0.0,
            memory_read,
            processors,
            cpu: vec![KernelRate {
                name: String::new(),
                bytes_per_second: USUAL_KERNEL_SHARE * memory_read,
                prompt_multiply_adds_per_second: None,
            }],
            usual_threads: processors,
            threads: None,
            gpu: None,
            measured: false,
            doubt: Some(Doubt {
                spread: f64::MAX,
                only_disk: false,
                why: "this machine and disk are not measured: run forebay doctor".into(),
            }),
            decoders: Vec::new(),
            last_cache_bytes: None,
        }
    }

    /// Returns assumed rates for this machine and a GPU, if `doctor` has not measured it.
    pub(crate) fn usual_here() -> Rates {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        Rates { gpu: Some(GpuCosts::usual()), ..Rates::usual(processors) }
    }

    /// Returns assumed rates for this machine, for plans without a predicted speed. `has_gpu` says that a GPU can be used.
    pub fn unmeasured(has_gpu: bool) -> Rates {
        let rates = Rates::usual_here();
        Rates { gpu: rates.gpu.filter(|_| has_gpu), ..Rates::usual(rates.processors) }
    }

    /// Returns true if the rates are those of a machine profile.
    pub fn is_measured(&self) -> bool {
        self.measured
    }

    /// Returns the rates for a model whose blocks are stored in this way: the disk's are those of bytes in memory.
    pub(crate) fn reading(&self, coding: &Coding) -> Rates {
        let rate = |disk| coding.rate(disk, &self.decoders, self.processors);
        let (disk, disk_in_place) = (rate(self.disk), rate(self.disk_in_place));
        Rates { disk, disk_in_place, ..self.clone() }
    }

    /// Returns the rates for `threads` CPU threads. `None` keeps the current number.
    pub fn with_threads(&self, threads: Option<usize>) -> Rates {
        Rates { threads: threads.or(self.threads), ..self.clone() }
    }

    /// Returns the rates for the threads that compute experts beside a GPU: half of them, unless the user chose a
    /// number.
    pub(crate) fn for_cpu_offload(&self) -> Rates {
        self.with_threads(Some(self.threads.unwrap_or(self.usual_threads.div_ceil(2))))
    }

    /// Returns the number of computing threads as a share of the threads with which the rates were measured.
    fn threads_share(&self) -> f64 {
        let threads = self.threads.unwrap_or(self.usual_threads);
        (threads as f64 / self.usual_threads as f64).min(1.0)
    }

    /// Returns the seconds for `bytes` of dense blocks to pass through the ring.
    pub(crate) fn ring_seconds(&self, bytes: f64) -> f64 {
        bytes / (RING_SHARE * self.disk)
    }

    /// Returns the bytes per second of the bus and of the CPU while both read host memory. Alone, the bus copies at
    /// `copy` and the CPU computes at `cpu`. If `doctor` has not measured this, they share the rate that the CPU alone
    /// can have.
    pub(crate) fn both(&self, gpu: &GpuCosts, copy: f64, cpu: f64) -> (f64, f64) {
        match gpu.beside_cpu {
            Some(both) => {
                let alone = rate_of(&self.cpu, BESIDE_TYPE, self.memory_read);
                let share = (both.cpu_bytes_per_second / alone).min(1.0);
                (both.copy_bytes_per_second.min(copy), share * cpu)
            }
            None => {
                let share = (self.memory_read.max(cpu) / (copy + cpu)).min(1.0);
                (share * copy, share * cpu)
            }
        }
    }

    /// Returns [`Rates::both`] if `doctor` has measured it. Otherwise returns the rates of each alone, because it is
    /// not known how they share the memory.
    pub(crate) fn beside(&self, gpu: &GpuCosts, copy: f64, cpu: f64) -> (f64, f64) {
        if gpu.beside_cpu.is_some() { self.both(gpu, copy, cpu) } else { (copy, cpu) }
    }

    /// Returns the GPU's name, if there is a GPU.
    pub fn gpu_name(&self) -> Option<&str> {
        self.gpu.as_ref().map(|gpu| gpu.name.as_str())
    }

    /// Returns the seconds for one token's products with weights in RAM.
    pub(crate) fn cpu_seconds(&self, matrices: &Matrices) -> f64 {
        let seconds = seconds(&matrices.bytes, |ty| rate_of(&self.cpu, ty, self.memory_read));
        seconds / streaming_share(self.threads_share())
    }

    /// Returns the time of products of `rows` rows with the same weights, as a multiple of the time of one row.
    pub(crate) fn cpu_rows(&self, rows: f64) -> f64 {
        1.0 + CPU_NEXT_ROW * (rows - 1.0).max(0.0)
    }

    pub(crate) fn cpu_layer_seconds(&self) -> f64 {
        CPU_LAYER_SECONDS
    }

    /// Returns the extra seconds for `seconds` of computing with experts if some of them are missing.
    pub(crate) fn cpu_streamed_seconds(&self, seconds: f64) -> f64 {
        CPU_STREAMED_SHARE * seconds
    }

    /// Returns the CPU's seconds for attention to `bytes` of keys and values.
    pub(crate) fn cpu_attention_seconds(&self, bytes: f64) -> f64 {
        bytes / (ATTENTION_SHARE * self.memory_read)
    }

    /// Returns the CPU's seconds for the products of `tokens` prompt tokens.
    pub(crate) fn cpu_prompt_seconds(&self, matrices: &Matrices, tokens: f64) -> f64 {
        let usual = CPU_MULTIPLY_ADDS_PER_PROCESSOR * self.processors as f64;
        let rate = |ty: TensorType| {
            let known = self.cpu.iter().find(|known| known.name == ty.name());
            known.and_then(|known| known.prompt_multiply_adds_per_second).unwrap_or(usual)
        };
        tokens * seconds(&matrices.elements, rate) / self.threads_share()
    }

    /// Returns the CPU's seconds for the products of `tokens` prompt tokens with experts that get `each` tokens each.
    pub(crate) fn cpu_expert_prompt_seconds(
        &self,
        matrices: &Matrices,
        tokens: f64,
        each: f64,
    ) -> f64 {
        let share = each / (each + CPU_EXPERT_TOKENS_HALF_FAST);
        self.cpu_prompt_seconds(matrices, tokens) / share
    }
}

impl GpuCosts {
    /// Returns assumed rates for a GPU that `doctor` has not measured.
    pub fn usual() -> GpuCosts {
        GpuCosts {
            name: "a GPU".to_owned(),
            multiprocessors: 64,
            memory_bytes: 0,
            memory_read: USUAL_VRAM_READ,
            kernels: Vec::new(),
            copies: vec![PinnedCopyRate {
                bytes: 1 << 26,
                to_device_bytes_per_second: USUAL_PINNED_COPY,
                from_device_bytes_per_second: USUAL_PINNED_COPY,
            }],
            beside_cpu: None,
            multiply_adds: 64.0 * GPU_MULTIPLY_ADDS_OTHER,
        }
    }

    fn new(gpu: &GpuRates) -> GpuCosts {
        let per_multiprocessor = match gpu.compute_capability {
            (8, 0) | (9..=11, _) => GPU_MULTIPLY_ADDS_SERVER,
            _ => GPU_MULTIPLY_ADDS_OTHER,
        };
        let mut copies = gpu.pinned_copies.clone();
        copies.sort_by_key(|copy| copy.bytes);
        GpuCosts {
            name: gpu.name.clone(),
            multiprocessors: gpu.multiprocessors,
            memory_bytes: gpu.memory_bytes,
            memory_read: gpu.memory_read_bytes_per_second,
            kernels: gpu.kernels.clone(),
            copies,
            beside_cpu: gpu.beside_cpu,
            multiply_adds: per_multiprocessor * f64::from(gpu.multiprocessors),
        }
    }

    /// Returns the seconds for one token's products with weights in VRAM.
    pub fn seconds(&self, matrices: &Matrices) -> f64 {
        seconds(&matrices.bytes, |ty| rate_of(&self.kernels, ty, self.memory_read))
    }

    /// Returns the time of products of `rows` rows with the same weights, as a multiple of the time of one row.
    pub fn rows(&self, rows: f64) -> f64 {
        1.0 + GPU_NEXT_ROW * (rows - 1.0).max(0.0)
    }

    /// Returns the time of one token's kernels in a layer that do not read weights.
    pub fn layer_seconds(&self, layer: &LayerCosts) -> f64 {
        let least = match layer.experts {
            Some(_) => GPU_EXPERT_LAYER_SECONDS,
            None => GPU_DENSE_LAYER_SECONDS,
        };
        least + GPU_KERNEL_SECONDS * layer.more_kernels as f64
    }

    pub fn look_seconds(&self) -> f64 {
        LOOK_SECONDS
    }

    pub fn host_loop_seconds(&self) -> f64 {
        HOST_LOOP_SECONDS
    }

    /// Returns the seconds that the host spends for each expert that it copies to VRAM.
    pub fn bring_seconds(&self) -> f64 {
        BRING_SECONDS
    }

    /// Returns the GPU's seconds for attention to `bytes` of keys and values.
    pub fn attention_seconds(&self, bytes: f64) -> f64 {
        bytes / (ATTENTION_SHARE * self.memory_read)
    }

    /// Returns the bytes per second of copies of `bytes` bytes from pinned memory. Between two measured sizes, the rate
    /// is interpolated over the logarithm of the size.
    pub fn copy_rate(&self, bytes: f64) -> f64 {
        let rate = |copy: &PinnedCopyRate| copy.to_device_bytes_per_second;
        let after = self.copies.partition_point(|copy| (copy.bytes as f64) < bytes);
        match (after.checked_sub(1).map(|before| &self.copies[before]), self.copies.get(after)) {
            (Some(below), Some(above)) => {
                let (low, high) = ((below.bytes as f64).ln(), (above.bytes as f64).ln());
                let part = (bytes.ln() - low) / (high - low);
                rate(below) + part * (rate(above) - rate(below))
            }
            (Some(only), None) | (None, Some(only)) => rate(only),
            (None, None) => unreachable!("a profile without copies is refused"),
        }
    }

    /// Returns the GPU's seconds for the products of `tokens` prompt tokens.
    pub fn prompt_seconds(&self, matrices: &Matrices, tokens: f64) -> f64 {
        tokens * seconds(&matrices.elements, |_| self.multiply_adds)
    }

    /// Returns the GPU's seconds for the products of `tokens` prompt tokens with experts that get `each` tokens each.
    pub fn expert_prompt_seconds(&self, matrices: &Matrices, tokens: f64, each: f64) -> f64 {
        let busy = each / (each + EXPERT_TOKENS_HALF_BUSY);
        self.prompt_seconds(matrices, tokens) / busy
    }

    pub fn prompt_layer_seconds(&self) -> f64 {
        GPU_PROMPT_LAYER_SECONDS
    }
}

/// Returns the share of the product rate that a share of the threads keeps, for products that read weights once.
/// Measured: 68 % with 8 of 16 threads and 95 % with 15 (an H200's host, beside copies), 60 % with 1 of 2 (an EPYC).
/// Threads that share a core, and cores that share a memory, ask for less together.
fn streaming_share(threads: f64) -> f64 {
    threads.powf(0.6)
}

fn kernel_rates(kernels: &[KernelRate]) -> impl Iterator<Item = f64> {
    let prompts = kernels.iter().filter_map(|kernel| kernel.prompt_multiply_adds_per_second);
    kernels.iter().map(|kernel| kernel.bytes_per_second).chain(prompts)
}

/// Returns the rate of a type. A type that was not measured gets the slowest measured rate. If no type was measured, it
/// gets half of the memory read rate.
fn rate_of(kernels: &[KernelRate], ty: TensorType, memory_read: f64) -> f64 {
    let known = kernels.iter().find(|known| known.name == ty.name());
    let slowest = || kernels.iter().map(|known| known.bytes_per_second).min_by(f64::total_cmp);
    known.map(|known| known.bytes_per_second).or_else(slowest).unwrap_or(memory_read / 2.0)
}

fn seconds(parts: &[(TensorType, u64)], rate: impl Fn(TensorType) -> f64) -> f64 {
    parts.iter().map(|&(ty, amount)| amount as f64 / rate(ty)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_threads_get_less_of_the_rate() {
        let rates = Rates::usual(16);
        let near = |threads, measured: f64| {
            let share = streaming_share(rates.with_threads(threads).threads_share());
            assert!((share - measured).abs() < 0.05, "{threads:?}: {share}");
        };
        near(None, 1.0);
        near(Some(64), 1.0);
        near(Some(15), 85.3 / 90.2);
        near(Some(8), 61.7 / 90.2);
        let helpers = |threads| rates.with_threads(threads).for_cpu_offload().threads;
        assert_eq!((helpers(None), helpers(Some(12))), (Some(8), Some(12)));
    }
}
