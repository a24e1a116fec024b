//! The figures of a session, for people and for programs.

use forebay_format::Catalog;
use forebay_model::{DeviceExperts, DeviceSubLayers, VramUse};
use forebay_store::EngineInfo;
use forebay_stream::StreamStatistics;
use serde::Serialize;

use crate::EngineError;
use crate::placed::GpuStart;

/// What a session did and which paths it took. Raw units; nothing here is rounded.
#[derive(Debug, Clone, Serialize)]
pub struct SessionStatistics {
    /// `cpu`, `cuda:N`, or `cuda:N and cpu`.
    pub device: String,
    /// Why a GPU that might have been used is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_not_cuda: Option<String>,
    /// Device memory, where a GPU computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramUse>,
    /// The budget in force for weights and activations, in the memory of the device that computes.
    pub budget_bytes: u64,
    /// Whether the user named the budget, or it was taken from the free memory.
    pub budget_chosen_by_user: bool,
    /// All files of the model.
    pub model_bytes: u64,
    /// All weights of the model.
    pub weights_bytes: u64,
    /// The experts' share of the weights.
    pub expert_bytes: u64,
    /// Host memory reserved for blocks.
    pub arena_bytes: u64,
    /// Memory reserved for keys and values, beside the budget.
    pub kv_cache_bytes: u64,
    /// Largest resident set of the process so far.
    pub peak_resident_bytes: Option<u64>,
    /// From opening the file to ready.
    pub load_seconds: f64,
    /// How the weights came to the GPU, where one computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_start: Option<GpuStart>,
    pub threads: usize,
    /// Kernel family in use.
    pub isa: String,
    pub compute: String,
    pub policy: String,
    pub io_engine: ReadPath,
    pub checksums: Checks,
    /// What experts did on a GPU that does not hold all of them; `stream` then counts what it asked of host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_experts: Option<DeviceExperts>,
    /// Where a dense model's layers are that a GPU does not hold whole, and what moved; `stream` then counts what was asked of
    /// host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_sub_layers: Option<SubLayerStatistics>,
    /// What moved between disk and memory since the start; `None` where the model does not stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamStatistics>,
}

/// A dense model that a GPU does not hold whole.
#[derive(Debug, Clone, Serialize)]
pub struct SubLayerStatistics {
    #[serde(flatten)]
    pub sub_layers: DeviceSubLayers,
    /// For weights in host memory; `budget_bytes` is the GPU's.
    pub ram_budget_bytes: u64,
}

/// Whether what was read was compared with checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Checks {
    /// Everything that was read.
    On,
    /// There are checksums, and the user did not want them.
    Off,
    /// The container has none.
    None,
}

impl Checks {
    pub(crate) fn of(catalog: &Catalog, verify: bool) -> Checks {
        match (&catalog.pack, verify) {
            (None, _) => Checks::None,
            (Some(_), true) => Checks::On,
            (Some(_), false) => Checks::Off,
        }
    }

    /// As [`Checks::of`], but not to want checksums of a container without any is an error.
    pub(crate) fn requested(catalog: &Catalog, verify: bool) -> Result<Checks, EngineError> {
        let checks = Checks::of(catalog, verify);
        if checks == Checks::None && !verify {
            return Err(EngineError::BadOption {
                name: "--no-verify",
                value: "given".into(),
                expected: "only packs (.fbay) have checksums, and this model is none".into(),
            });
        }
        Ok(checks)
    }
}

/// How blocks were read.
#[derive(Debug, Clone, Serialize)]
pub struct ReadPath {
    pub name: &'static str,
    /// Past the page cache.
    pub direct: bool,
    pub registered_buffers: bool,
    /// Why something faster is not in use; empty when nothing had to give way.
    pub why: String,
}

impl From<EngineInfo> for ReadPath {
    fn from(info: EngineInfo) -> ReadPath {
        let EngineInfo { name, direct, registered_buffers, why } = info;
        ReadPath { name, direct, registered_buffers, why }
    }
}

/// The middle of the values, or the mean of the two in the middle; 0 without any.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
