//! GPUs: what a machine profile says of them.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

use super::KernelRate;
use super::cufile::CuFileRates;

/// GPUs of this machine.
#[derive(Debug, Clone, Serialize)]
pub struct GpuReport {
    /// How many the driver finds; the first is measured.
    pub count: usize,
    pub first: Option<GpuRates>,
    /// Why nothing is measured; empty if something is.
    pub why: String,
    /// Why cuFile is not measured; empty if it is.
    pub why_not_cufile: String,
}

/// One GPU, measured. Rates are bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuRates {
    pub name: String,
    pub compute_capability: (i32, i32),
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    /// As the kernel module says it; `None` where it is not to be seen.
    pub driver: Option<String>,
    pub pcie: Option<PcieRates>,
    pub pinned_copies: Vec<PinnedCopyRate>,
    pub pageable_copy_bytes_per_second: f64,
    pub memory_read_bytes_per_second: f64,
    /// Bytes copied: each is read once and written once.
    pub memory_copy_bytes_per_second: f64,
    /// Weights that one token's products go through, by type. (Older profiles have none.)
    #[serde(default)]
    pub kernels: Vec<KernelRate>,
    /// The bus and the CPU at the same time. (Older profiles do not have it.)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_cpu: Option<BesideCpu>,
    /// cuFile, where it works, beside the ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cufile: Option<CuFileRates>,
}

/// Copies from pinned memory to the GPU while the CPU multiplies with weights in memory: both read it. Bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BesideCpu {
    pub copy_bytes_per_second: f64,
    pub cpu_bytes_per_second: f64,
}

/// How the GPU is connected, as the system says it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PcieRates {
    pub address: String,
    pub speed: String,
    pub lanes: String,
}

/// Copies of one size, one after the other, between pinned memory and the GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PinnedCopyRate {
    pub bytes: usize,
    pub to_device_bytes_per_second: f64,
    pub from_device_bytes_per_second: f64,
}

/// Nothing measured of `count` GPUs, and why.
pub(crate) fn none(count: usize, error: &dyn Display) -> GpuReport {
    let why_not_cufile = format!("it reads to GPUs: {error}");
    GpuReport { count, first: None, why: error.to_string(), why_not_cufile }
}
