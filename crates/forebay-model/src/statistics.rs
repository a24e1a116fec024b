//! What backends say of their memory and of what they moved: plain data.

use forebay_stream::TierStatistics;
use serde::Serialize;

use crate::sharing::{CpuOffloadStatistics, SubLayerPlacement, SubLayerRates};

/// Device memory, by what it is for.
#[derive(Debug, Clone, Serialize)]
pub struct VramUse {
    /// `--vram`, else what was free.
    pub budget_bytes: u64,
    /// Whether the user named the budget.
    pub budget_chosen_by_user: bool,
    /// The driver's context before anything was reserved, and room for the code of kernels.
    pub context_bytes: u64,
    pub weights_bytes: u64,
    pub kv_cache_bytes: u64,
    /// Activations, tables and small vectors.
    pub activation_bytes: u64,
    /// The sum of these.
    pub total_bytes: u64,
    /// What the driver says is in use now, by all programs; `None` if it does not say.
    pub driver_used_bytes: Option<u64>,
    /// What the device has.
    pub driver_total_bytes: Option<u64>,
}

/// What went to the GPU while tokens were computed, for statistics.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceExperts {
    #[serde(flatten)]
    pub tier: TierStatistics,
    /// Host memory that the GPU copies from.
    pub pinned_bytes: u64,
    pub experts_copied: u64,
    pub bytes_copied: u64,
    /// Experts that went back to host memory when others took their slots, because not all have a home there.
    pub experts_returned: u64,
    pub bytes_returned: u64,
    /// Of tokens whose work is recorded: seconds in which the GPU waited to be told where experts are, reads from the
    /// disk included, and seconds in which it copied them; and what the host took to find its answers, asked or not.
    pub answer_wait_seconds: f64,
    pub answer_seconds: f64,
    pub copy_seconds: f64,
    /// Layers of such tokens, and those in which all chosen experts were on the GPU: it did not ask.
    pub layers_served: u64,
    pub layers_resident: u64,
    /// Tokens whose work gave up waiting for the host, because a watchdog would have ended it, and was done layer by layer.
    pub tokens_given_up: u64,
    /// Experts that the CPU computed, and whether it helps and why; `None`: it may not.
    pub experts_on_cpu: u64,
    pub cpu_offload: Option<CpuOffloadStatistics>,
    /// Parts of layers' batches, because not all of their experts fit at once.
    pub passes: u64,
}

/// What a dense model that VRAM does not hold whole moved, for statistics.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceSubLayers {
    #[serde(flatten)]
    pub placement: SubLayerPlacement,
    /// Host memory that the GPU copies from.
    pub pinned_bytes: u64,
    /// Of it in huge pages; `None` where the system does not tell. The CPU reads small pages more slowly.
    pub huge_page_bytes: Option<u64>,
    pub bytes_copied: u64,
    /// Weights that the CPU computed with.
    pub bytes_on_cpu: u64,
    /// What decided about the CPU's share.
    pub planned: Option<SubLayerRates>,
    /// Where the time of single tokens and of batches of few went.
    pub few_tokens: PassTimes,
    /// The same of prompts.
    pub many_tokens: PassTimes,
}

/// Passes of one kind. The parts add up to all but what the thread spent on queueing kernels and copies.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct PassTimes {
    pub passes: u64,
    pub seconds: f64,
    /// Computing with units in host memory.
    pub cpu_seconds: f64,
    /// Waiting for units on their way to VRAM.
    pub copy_wait_seconds: f64,
    /// Waiting for the GPU's kernels, with all that they need in VRAM.
    pub gpu_wait_seconds: f64,
    /// Waiting for units on their way from the disk to host memory.
    pub disk_wait_seconds: f64,
}
