//! Options of an engine, as Python gives them.

use std::path::PathBuf;

use forebay_engine::engine::{EngineOptions, Latency};
use forebay_engine::{
    CpuOffload, DeviceChoice, KvCacheType, KvDiskType, KvFolder, KvInVram, SessionOptions,
};
use forebay_store::IoKind;
use forebay_stream::PolicyKind;
use pyo3::prelude::*;
use serde::Deserialize;

use crate::errors::raise;

/// The options, with sizes in bytes. What is `None` is left to the engine.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Options {
    device: String,
    vram: Option<u64>,
    ram: Option<u64>,
    context: Option<usize>,
    threads: Option<usize>,
    /// Number of requests that run together.
    pub parallel: Option<usize>,
    kv_tokens: Option<usize>,
    kv_type: String,
    /// `None` takes what fits.
    kv_vram: Option<u64>,
    kv_ram: Option<u64>,
    snapshot_every: Option<usize>,
    kv_disk: Option<PathBuf>,
    kv_disk_size: u64,
    kv_disk_type: String,
    kv_disk_writes_per_day: u64,
    kv_disk_encrypt: Option<PathBuf>,
    /// True lets the CPU always compute experts, false never.
    cpu_experts: Option<bool>,
    cuda_graphs: bool,
    policy: Option<String>,
    prefetch: bool,
    /// True to load the layer that predicts further tokens.
    pub mtp: bool,
    io: Option<String>,
    verify: bool,
    exact: bool,
    max_latency: Option<f64>,
    queue: usize,
    /// True if special tokens in messages are special tokens.
    pub special_tokens_in_messages: bool,
}

impl Options {
    pub fn read(py: Python<'_>, json: &str) -> PyResult<Options> {
        serde_json::from_str(json).map_err(|error| wrong(py, error.to_string()))
    }

    /// Returns the options of the session.
    pub fn session(&self, py: Python<'_>) -> PyResult<SessionOptions> {
        let usual = SessionOptions::default();
        let device = device(&self.device).ok_or_else(|| {
            let device = &self.device;
            wrong(
                py,
                format!(
                    "device is {device:?}, but \"auto\", \"cpu\", \"cuda\" or \"cuda:N\" is needed"
                ),
            )
        })?;
        let kv_cache = match self.kv_type.as_str() {
            "f16" => KvCacheType::F16,
            "q8_0" => KvCacheType::Q8_0,
            "q4_0" => KvCacheType::Q4_0,
            other => {
                let words =
                    format!("kv_type is {other:?}, but \"f16\", \"q8_0\" or \"q4_0\" is needed");
                return Err(wrong(py, words));
            }
        };
        let named = |name: &str, error: String| wrong(py, format!("{name}: {error}"));
        let policy = match &self.policy {
            Some(policy) => {
                policy.parse::<PolicyKind>().map_err(|error| named("policy", error.to_string()))?
            }
            None => usual.policy,
        };
        let io = match &self.io {
            Some(io) => io.parse::<IoKind>().map_err(|error| named("io", error.to_string()))?,
            None => usual.io,
        };
        for (name, is_zero) in [
            ("context", self.context == Some(0)),
            ("threads", self.threads == Some(0)),
            ("parallel", self.parallel == Some(0)),
            ("kv_disk_size", self.kv_disk_size == 0),
            ("kv_disk_writes_per_day", self.kv_disk_writes_per_day == 0),
        ] {
            if is_zero {
                return Err(wrong(py, format!("{name} is 0, but at least 1 is needed")));
            }
        }
        Ok(SessionOptions {
            device,
            vram_bytes: self.vram,
            ram_bytes: self.ram,
            context: self.context,
            threads: self.threads,
            kv_tokens: self.kv_tokens,
            kv_cache,
            kv_in_vram: self.kv_vram.map_or_else(KvInVram::default, KvInVram::Bytes),
            kv_ram_bytes: self.kv_ram,
            snapshot_every: self.snapshot_every,
            cpu_offload: match self.cpu_experts {
                None => CpuOffload::Auto,
                Some(true) => CpuOffload::Always,
                Some(false) => CpuOffload::Never,
            },
            cuda_graphs: self.cuda_graphs,
            policy,
            prefetch: self.prefetch,
            mtp: self.mtp,
            io,
            verify: self.verify,
            exact: self.exact,
            for_engine: true,
            ..usual
        })
    }

    /// Returns the folder for keys and values, if there is one.
    pub fn kv_folder(&self, py: Python<'_>) -> PyResult<Option<KvFolder>> {
        let ty = match self.kv_disk_type.as_str() {
            "as-cached" => KvDiskType::AsCached,
            "q8_0" => KvDiskType::Q8_0,
            other => {
                let words =
                    format!("kv_disk_type is {other:?}, but \"as-cached\" or \"q8_0\" is needed");
                return Err(wrong(py, words));
            }
        };
        let Some(path) = &self.kv_disk else {
            let without = [
                ("kv_disk_type", ty != KvDiskType::AsCached),
                ("kv_disk_encrypt", self.kv_disk_encrypt.is_some()),
            ];
            let without = without.into_iter().find(|(_, is_given)| *is_given);
            return match without {
                Some((name, _)) => Err(wrong(py, format!("{name} needs kv_disk, which is None"))),
                None => Ok(None),
            };
        };
        Ok(Some(KvFolder {
            path: path.clone(),
            bytes: self.kv_disk_size,
            ty,
            bytes_per_day: self.kv_disk_writes_per_day,
            key: self.kv_disk_encrypt.clone(),
        }))
    }

    /// Returns the options of the engine.
    pub fn engine(&self, py: Python<'_>) -> PyResult<EngineOptions> {
        let latency = match self.max_latency {
            None => Latency::Automatic,
            Some(seconds) => {
                let time = std::time::Duration::try_from_secs_f64(seconds);
                let time = time.ok().filter(|time| !time.is_zero());
                let words = format!("max_latency is {seconds}, but seconds above 0 are needed");
                Latency::AtMost(time.ok_or_else(|| wrong(py, words))?)
            }
        };
        Ok(EngineOptions { latency, waiting: self.queue, ..EngineOptions::default() })
    }
}

fn wrong(py: Python<'_>, words: String) -> PyErr {
    raise(py, "OptionError", words)
}

fn device(name: &str) -> Option<DeviceChoice> {
    match name.split_once(':') {
        None => match name {
            "auto" => Some(DeviceChoice::Auto),
            "cpu" => Some(DeviceChoice::Cpu),
            "cuda" => Some(DeviceChoice::Cuda(0)),
            _ => None,
        },
        Some(("cuda", number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
            number.parse().ok().map(DeviceChoice::Cuda)
        }
        Some(_) => None,
    }
}
