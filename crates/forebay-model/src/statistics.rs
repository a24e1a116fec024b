//! Statistics of the backends' memory and data transfers, as plain data.

use forebay_stream::TierStatistics;
use serde::Serialize;

use crate::sharing::{CpuOffloadStatistics, SubLayerPlacement, SubLayerRates};

/// Use of device memory, by purpose.
#[derive(Debug, Clone, Serialize)]
pub struct VramUse {
    /// `--vram` if given, otherwise the memory that was free.
    pub budget_bytes: u64,
    /// True if the user gave the budget.
    pub budget_chosen_by_user: bool,
    /// The driver's context before any reservation, and room for the code of kernels.
    pub context_bytes: u64,
    pub weights_bytes: u64,
    pub kv_cache_bytes: u64,
    /// Keys and values in pinned RAM, which the GPU reads there. They take no VRAM.
    pub kv_cache_in_ram_bytes: u64,
    /// Activations, tables and small vectors.
    pub activation_bytes: u64,
    /// Sum of the four uses above.
    pub total_bytes: u64,
    /// Bytes in use now by all programs, as reported by the driver; `None` if it does not report them.
    pub driver_used_bytes: Option<u64>,
    /// Total memory of the device, as reported by the driver.
    pub driver_total_bytes: Option<u64>,
}

/// Statistics of experts that were moved to the GPU while tokens were computed.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceExperts {
    #[serde(flatten)]
    pub tier: TierStatistics,
    /// Host memory that the GPU copies from.
    pub pinned_bytes: u64,
    pub experts_copied: u64,
    pub bytes_copied: u64,
    /// Experts copied back to RAM when VRAM evicted them, because RAM does not have a slot for every expert.
    pub experts_returned: u64,
    pub bytes_returned: u64,
    /// Times of tokens that run as a CUDA graph, in seconds. The GPU waited `answer_wait_seconds` to learn where
    /// experts are, including disk reads, and copied experts for `copy_seconds`. The host took `answer_seconds` to find
    /// its answers, whether the GPU asked for them or not.
    pub answer_wait_seconds: f64,
    pub answer_seconds: f64,
    pub copy_seconds: f64,
    /// Layers of such tokens, each once for every lane, and those in which all chosen experts were in VRAM.
    pub layers_served: u64,
    /// Sum of the rows over these layers.
    pub rows_served: u64,
    pub layers_resident: u64,
    /// Those of passes whose rows go through the layers in two lanes, so that one computes while the other's experts come.
    pub layers_in_lanes: u64,
    /// Tokens whose CUDA graph stopped waiting for the host, because a watchdog would have ended it. They were computed
    /// layer by layer instead.
    pub tokens_given_up: u64,
    /// Experts that the CPU computed, and the state of CPU offload; `None` if offload is not allowed.
    pub experts_on_cpu: u64,
    pub cpu_offload: Option<CpuOffloadStatistics>,
    /// Number of passes over parts of a layer's batch, needed when its experts do not all fit at once.
    pub passes: u64,
}

/// Statistics of a dense model that does not fit into VRAM as a whole.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceSubLayers {
    #[serde(flatten)]
    pub placement: SubLayerPlacement,
    /// Host memory that the GPU copies from.
    pub pinned_bytes: u64,
    /// Part of it in huge pages; `None` if the system does not report it. The CPU reads small pages more slowly.
    pub huge_page_bytes: Option<u64>,
    pub bytes_copied: u64,
    /// Bytes of weights that the CPU computed with.
    pub bytes_on_cpu: u64,
    /// Rates from which the CPU's share was planned.
    pub planned: Option<SubLayerRates>,
    /// Times of single tokens and of small batches.
    pub few_tokens: PassTimes,
    /// Times of prompts.
    pub many_tokens: PassTimes,
}

/// Times of passes of one kind. The parts add up to the total, except for time spent queueing kernels and copies.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PassTimes {
    pub passes: u64,
    pub seconds: f64,
    /// Time computing with sub-layers in host memory.
    pub cpu_seconds: f64,
    /// Time waiting for sub-layers that are being copied to VRAM.
    pub copy_wait_seconds: f64,
    /// Time waiting for the GPU's kernels while everything they need is in VRAM.
    pub gpu_wait_seconds: f64,
    /// Time waiting for sub-layers that are being read from the disk to host memory.
    pub disk_wait_seconds: f64,
}
