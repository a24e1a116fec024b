//! Statistics of a session, for people and for programs.

use forebay_format::Catalog;
use forebay_model::{DeviceExperts, DeviceSubLayers, VramUse};
use forebay_options::{BadOption, OptionName};
use forebay_store::EngineInfo;
use forebay_stream::{LayerUses, Residency, StreamStatistics};
use serde::{Deserialize, Serialize};

use crate::Session;
use crate::mtp::MtpStatistics;
use crate::placed::GpuStart;

/// Statistics of a session and the code paths it took. All values are in raw units, and none is rounded.
#[derive(Debug, Clone, Serialize)]
pub struct SessionStatistics {
    /// Name of the device: `cpu`, `cuda:N`, or `cuda:N and cpu`.
    pub device: String,
    /// Reason why a GPU that might have been used is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why_not_cuda: Option<String>,
    /// Use of device memory, if a GPU computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramUse>,
    /// Budget for weights and activations in the memory of the device that computes.
    pub budget_bytes: u64,
    /// True if the user gave the budget, false if it was derived from the free memory.
    pub budget_chosen_by_user: bool,
    /// Bytes of all files of the model.
    pub model_bytes: u64,
    /// Bytes of all weights of the model.
    pub weights_bytes: u64,
    /// Bytes of the experts, which are part of the weights.
    pub expert_bytes: u64,
    /// Bytes of host memory reserved for blocks.
    pub arena_bytes: u64,
    /// Bytes reserved for keys and values. They are not part of the budget.
    pub kv_cache_bytes: u64,
    /// Largest resident set of the process so far, in bytes.
    pub peak_resident_bytes: Option<u64>,
    /// Seconds from opening the file until the session is ready.
    pub load_seconds: f64,
    /// Times of loading the weights to a GPU, if one computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_start: Option<GpuStart>,
    pub threads: usize,
    /// Name of the kernel family in use, for example an instruction set.
    pub isa: String,
    pub compute: String,
    pub policy: String,
    pub io_engine: ReadPath,
    pub checksums: Checks,
    /// Expert statistics of a GPU that does not hold all experts. `stream` then counts only the requests to host
    /// memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_experts: Option<DeviceExperts>,
    /// Layout and transfers of a dense model that a GPU does not hold whole. `stream` then counts only the requests to
    /// host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_sub_layers: Option<SubLayerStatistics>,
    /// Proposals of the predicting layer since the start, if it is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtp: Option<MtpStatistics>,
    /// Transfers between disk and memory since the start, or `None` if the model does not stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamStatistics>,
}

impl Session {
    /// Returns the uses of all experts since the start, by layer: in the memory of the device that computes, if it holds
    /// part of them, otherwise in RAM. A model without experts, or with all of them in VRAM, has none.
    pub fn expert_uses(&self) -> Vec<LayerUses> {
        let device = self.runner.decoder.backend().expert_uses();
        if !device.is_empty() {
            return device;
        }
        self.runner.decoder.residency().map_or_else(Vec::new, Residency::expert_uses)
    }
}

/// Statistics of a dense model that a GPU does not hold whole.
#[derive(Debug, Clone, Serialize)]
pub struct SubLayerStatistics {
    #[serde(flatten)]
    pub sub_layers: DeviceSubLayers,
    /// Budget of host memory for weights. `budget_bytes` is the GPU's budget.
    pub ram_budget_bytes: u64,
}

/// Verification of reads against checksums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Checks {
    /// All blocks are verified.
    On,
    /// There are checksums, but the user disabled verification.
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

    /// Returns the checks that the user asked for.
    ///
    /// # Errors
    /// Returns an error if the user disables checksums of a file that has none.
    pub(crate) fn requested(catalog: &Catalog, verify: bool) -> Result<Checks, BadOption> {
        let checks = Checks::of(catalog, verify);
        if checks == Checks::None && !verify {
            return Err(BadOption {
                name: OptionName::NoVerify,
                value: "given".into(),
                expected: "only packs (.fbay) have checksums, and this model is none".into(),
            });
        }
        Ok(checks)
    }
}

/// The engine that read blocks.
#[derive(Debug, Clone, Serialize)]
pub struct ReadPath {
    pub name: &'static str,
    /// True if reads bypass the page cache.
    pub direct: bool,
    pub registered_buffers: bool,
    /// Reason why a faster engine is not in use. Empty if the fastest one is.
    pub why: String,
}

impl From<EngineInfo> for ReadPath {
    fn from(info: EngineInfo) -> ReadPath {
        let EngineInfo { name, direct, registered_buffers, why } = info;
        ReadPath { name, direct, registered_buffers, why }
    }
}

/// Use of weights that are not all in the memory of the device that computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct WeightUse {
    /// Experts that were in that memory when a pass needed them. An expert that several rows of a pass use counts once.
    pub expert_hits: f64,
    pub expert_misses: f64,
    /// Bytes copied from RAM to the GPU.
    pub bytes_from_ram: f64,
    /// Bytes read from the disk.
    pub bytes_from_disk: f64,
    /// Seconds that passes waited for weights from the disk. If a GPU does not hold all experts, this is the time that it
    /// waited to learn where experts are, which includes reads.
    #[serde(default)]
    pub disk_wait_seconds: f64,
    /// Seconds that a GPU waited for copies from RAM.
    #[serde(default)]
    pub copy_wait_seconds: f64,
}

impl WeightUse {
    /// Returns the share of experts that were in memory, or `None` if no pass needed any.
    pub fn hit_rate(&self) -> Option<f64> {
        let lookups = self.expert_hits + self.expert_misses;
        (lookups > 0.0).then(|| self.expert_hits / lookups)
    }

    /// Adds a share of the use between two moments.
    pub(crate) fn add_between(&mut self, before: &WeightUse, now: &WeightUse, share: f64) {
        self.expert_hits += share * (now.expert_hits - before.expert_hits);
        self.expert_misses += share * (now.expert_misses - before.expert_misses);
        self.bytes_from_ram += share * (now.bytes_from_ram - before.bytes_from_ram);
        self.bytes_from_disk += share * (now.bytes_from_disk - before.bytes_from_disk);
        self.disk_wait_seconds += share * (now.disk_wait_seconds - before.disk_wait_seconds);
        self.copy_wait_seconds += share * (now.copy_wait_seconds - before.copy_wait_seconds);
    }
}

/// Returns the median of the values: the middle one, or the mean of the two in the middle. Returns 0 if there are none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}
