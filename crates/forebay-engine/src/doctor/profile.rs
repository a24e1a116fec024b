//! The machine profile: a file that `doctor` writes and others read.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use forebay_store::{EngineOptions, IoKind};
use serde::{Deserialize, Serialize};

use super::{CuFileChoice, GpuRates, ProfileQuality};

/// The meaning of the file's fields; another number is not read.
pub const PROFILE_VERSION: u32 = 1;

/// Which machine and which disk were measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineIdentity {
    pub cpu: String,
    pub processors: usize,
    pub kernel: String,
    /// Number of the device that DIR is on, as `stat` gives it.
    pub device: u64,
    /// Type of its file system, as `statfs` gives it.
    pub filesystem: u64,
}

/// How loads read best, by measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfiledRead {
    /// `uring` or `pread`.
    pub engine: String,
    pub request_bytes: usize,
    pub queue_depth: usize,
    /// Into a small ring of memory; what the disk sustains, where it has bursts.
    pub bytes_per_second: f64,
    /// Into memory as large as a model's.
    pub in_place_bytes_per_second: f64,
    /// Ring to read into where that is clearly faster than reading in place; 0 where it is not.
    pub staging_bytes: usize,
}

/// Measured rates of a machine, for planning. Rates are bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    pub version: u32,
    pub machine: MachineIdentity,
    pub read: ProfiledRead,
    pub read_64kib_p50_seconds: f64,
    pub read_64kib_p99_seconds: f64,
    /// Copies from the page cache, with the best number of threads.
    pub cached_copy_bytes_per_second: Option<f64>,
    pub memory_read_bytes_per_second: f64,
    pub memory_copy_bytes_per_second: f64,
    /// Threads that computed for the rates below; not in older profiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Weights that one token's products go through, by type.
    pub kernels: Vec<KernelRate>,
    /// The first GPU, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuRates>,
    /// The processor's last cache; not in older profiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_cache_bytes: Option<u64>,
    /// Whether the machine was idle when it was measured; not in older profiles.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality: Option<ProfileQuality>,
}

/// How fast weights of one type are multiplied with one token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelRate {
    #[serde(rename = "type")]
    pub name: String,
    pub bytes_per_second: f64,
    /// Weights times tokens per second of products with many tokens, as prompts have them. (Not measured on GPUs, and not in
    /// older profiles.)
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_multiply_adds_per_second: Option<f64>,
}

/// How a load shall read, and who says so.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadChoice {
    pub kind: IoKind,
    pub request_bytes: usize,
    pub queue_depth: usize,
    /// Ring that loads read into; 0 to read in place.
    pub staging_bytes: usize,
    /// cuFile as it was measured, for loads to that GPU.
    pub cufile: Option<CuFileChoice>,
    pub chosen_by: String,
}

impl ReadChoice {
    /// What was measured, without a look at whether it makes sense.
    pub(super) fn of(read: &ProfiledRead, cufile: Option<CuFileChoice>) -> ReadChoice {
        ReadChoice {
            kind: read.engine.parse().unwrap_or(IoKind::Auto),
            request_bytes: read.request_bytes,
            queue_depth: read.queue_depth,
            staging_bytes: read.staging_bytes,
            cufile,
            chosen_by: "the machine profile".to_owned(),
        }
    }
}

impl MachineIdentity {
    /// This machine, and the device of `folder`.
    pub fn here(folder: &Path) -> std::io::Result<MachineIdentity> {
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Ok(MachineIdentity {
            cpu: cpu.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: kernel.trim().to_owned(),
            device: std::fs::metadata(folder)?.dev(),
            filesystem: forebay_store::filesystem_type(folder)?,
        })
    }
}

impl MachineProfile {
    /// Where the profile is kept: `forebay/machine.json` below `$XDG_CONFIG_HOME`, else below
    /// `~/.config`. `None` without either.
    pub fn path() -> Option<PathBuf> {
        let named = |name| std::env::var_os(name).map(PathBuf::from);
        let base = named("XDG_CONFIG_HOME")
            .filter(|path| path.is_absolute())
            .or_else(|| Some(named("HOME")?.join(".config")))?;
        Some(base.join("forebay/machine.json"))
    }

    /// The profile that `doctor` saved, if it is of this machine and the disk of `folder`; else why there is none.
    ///
    /// # Errors
    /// A profile that is not there, damaged, or of another machine or disk, in words.
    pub fn of_folder(folder: &Path) -> Result<MachineProfile, &'static str> {
        let found = MachineProfile::path().and_then(|path| std::fs::read_to_string(path).ok());
        let profile = MachineProfile::parse(&found.ok_or("no machine profile")?)?;
        match MachineIdentity::here(folder) {
            Ok(here) if here == profile.machine => Ok(profile),
            _ => Err("the machine profile is of another machine or disk"),
        }
    }

    /// A profile from the text of its file, of whatever machine.
    ///
    /// # Errors
    /// A text that is none of this version, in words.
    pub fn parse(text: &str) -> Result<MachineProfile, &'static str> {
        match serde_json::from_str::<MachineProfile>(text) {
            Ok(profile) if profile.version == PROFILE_VERSION => Ok(profile),
            _ => Err("the machine profile is damaged or of another version"),
        }
    }

    /// How files in `folder` are read best: what the profile found, if there is one of this machine
    /// and this disk, else what suits most disks.
    pub fn choice_for(folder: &Path) -> ReadChoice {
        let options = EngineOptions::default();
        let default = |why: &str| ReadChoice {
            kind: IoKind::Auto,
            request_bytes: options.request_bytes,
            queue_depth: DEFAULT_DEPTH,
            staging_bytes: 0,
            cufile: None,
            chosen_by: format!("default ({why}; forebay doctor measures)"),
        };
        let profile = match MachineProfile::of_folder(folder) {
            Ok(profile) => profile,
            Err(why) => return default(why),
        };
        let read = profile.read;
        let good = read.request_bytes.is_multiple_of(4096)
            && (4096..=64 << 20).contains(&read.request_bytes)
            && (1..=1024).contains(&read.queue_depth)
            && read.staging_bytes <= 256 << 20
            && read.engine.parse::<IoKind>().is_ok();
        if !good {
            return default("the machine profile is damaged");
        }
        let cufile = profile.gpu.and_then(|gpu| CuFileChoice::of(&gpu.name, &gpu.cufile?));
        ReadChoice::of(&read, cufile)
    }
}

/// Enough for every disk that was measured, and a fair share of one that others use too.
const DEFAULT_DEPTH: usize = 32;
