//! GPUs in the machine profile.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

use super::KernelRate;
use super::cufile::CuFileRates;

/// GPUs of this machine.
#[derive(Debug, Clone, Serialize)]
pub struct GpuReport {
    /// Number of GPUs that the driver finds. The first one is measured.
    pub count: usize,
    pub first: Option<GpuRates>,
    /// Reason why no GPU is measured. It is empty if one is.
    pub why: String,
    /// Reason why cuFile is not measured. It is empty if it is.
    pub why_not_cufile: String,
}

/// Measured rates of one GPU, in bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuRates {
    pub name: String,
    pub compute_capability: (i32, i32),
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    /// Driver version as reported by the kernel module. `None` if it is not visible.
    pub driver: Option<String>,
    pub pcie: Option<PcieRates>,
    pub pinned_copies: Vec<PinnedCopyRate>,
    pub pageable_copy_bytes_per_second: f64,
    pub memory_read_bytes_per_second: f64,
    /// Bytes copied per second. Each byte is read once and written once.
    pub memory_copy_bytes_per_second: f64,
    /// Bytes of weights per second of one token's products, by type. Older profiles have none.
    #[serde(default)]
    pub kernels: Vec<KernelRate>,
    /// Rates of the bus and the CPU at the same time. Older profiles do not have them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside_cpu: Option<BesideCpu>,
    /// Rates of cuFile and of the ring. `None` if cuFile does not work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cufile: Option<CuFileRates>,
}

/// Rates of copies from pinned memory to the GPU and of products on the CPU at the same time, in bytes per second. Both
/// read host memory.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BesideCpu {
    pub copy_bytes_per_second: f64,
    pub cpu_bytes_per_second: f64,
}

/// PCIe link of the GPU, as reported by the system.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PcieRates {
    pub address: String,
    pub speed: String,
    pub lanes: String,
}

/// Rates of consecutive copies of one size between pinned memory and the GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PinnedCopyRate {
    pub bytes: usize,
    pub to_device_bytes_per_second: f64,
    pub from_device_bytes_per_second: f64,
}

/// Returns a report in which none of `count` GPUs is measured because of `error`.
pub(crate) fn none(count: usize, error: &dyn Display) -> GpuReport {
    let why_not_cufile = format!("it reads to GPUs: {error}");
    GpuReport { count, first: None, why: error.to_string(), why_not_cufile }
}
