//! Machine profile: a file that `doctor` writes and that planning and loading read.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use forebay_store::{EngineOptions, IoKind, read_text};
use serde::{Deserialize, Serialize};

use super::{CuFileChoice, GpuRates, ProfileQuality};

/// Version of the file's format. Files with another version are rejected.
pub const PROFILE_VERSION: u32 = 1;

/// Most bytes of a profile's file.
const PROFILE_BYTES_MAX: u64 = 16 << 20;

/// Identity of the machine and the disk that were measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineIdentity {
    pub cpu: String,
    pub processors: usize,
    pub kernel: String,
    /// Device number of the folder's disk, as reported by `stat`.
    pub device: u64,
    /// Type of its file system, as reported by `statfs`.
    pub filesystem: u64,
}

/// Fastest way for loads to read, as measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfiledRead {
    /// `uring` or `pread`.
    pub engine: String,
    pub request_bytes: usize,
    pub queue_depth: usize,
    /// Rate of reads into a small ring of memory. On a disk with bursts, it is the sustained rate.
    pub bytes_per_second: f64,
    /// Rate of reads into memory as large as a model's.
    pub in_place_bytes_per_second: f64,
    /// Bytes of the ring to read into, if that is clearly faster than reading in place. Otherwise 0.
    pub staging_bytes: usize,
}

/// Reason why there is no profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("{}: {why}", path.display())]
    Damaged { path: PathBuf, why: &'static str },
    /// `forebay doctor` has not measured this machine.
    #[error("{why}")]
    NotMeasured { why: &'static str },
}

/// Returns a folder on the disk of a model.
pub fn folder_of(model: &Path) -> &Path {
    match model.parent() {
        _ if model.is_dir() => model,
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Measured rates of a machine, for planning. Rates are bytes per second.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    pub version: u32,
    pub machine: MachineIdentity,
    pub read: ProfiledRead,
    pub read_64kib_p50_seconds: f64,
    pub read_64kib_p99_seconds: f64,
    /// Rate of copies from the page cache, with the best number of threads.
    pub cached_copy_bytes_per_second: Option<f64>,
    pub memory_read_bytes_per_second: f64,
    pub memory_copy_bytes_per_second: f64,
    /// Number of threads that computed for the rates below. Older profiles do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// Bytes of weights per second of one token's products, by type.
    pub kernels: Vec<KernelRate>,
    /// Rates of the decoders of packs' chunks, on one core. Older profiles do not have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decoders: Vec<DecoderRate>,
    /// Rates of the first GPU, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuRates>,
    /// Size of the processor's last-level cache. Older profiles do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_cache_bytes: Option<u64>,
    /// Quality of the measurement, which depends on the machine being idle. Older profiles do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quality: Option<ProfileQuality>,
}

/// Rate of products of one token with weights of one type.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelRate {
    #[serde(rename = "type")]
    pub name: String,
    pub bytes_per_second: f64,
    /// Weights times tokens per second of products with many tokens, as in prompts. It is not measured on GPUs, and
    /// older profiles do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_multiply_adds_per_second: Option<f64>,
}

/// Rate of a decoder on one core.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecoderRate {
    /// Name of the codec.
    pub codec: String,
    /// Bytes after decoding per second.
    pub bytes_per_second: f64,
}

/// Way that a load reads, and the reason for this choice.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadChoice {
    pub kind: IoKind,
    pub request_bytes: usize,
    pub queue_depth: usize,
    /// Bytes of the ring that loads read into. 0 means to read in place.
    pub staging_bytes: usize,
    /// Measured results of cuFile, for loads to the GPU that was measured.
    pub cufile: Option<CuFileChoice>,
    pub chosen_by: String,
}

impl ReadChoice {
    /// Converts the measured values without checking if they make sense.
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

/// Beginning of the names of profiles.
const PREFIX: &str = "machine";
/// Largest profile that is read, in bytes.
const PROFILE_BYTES_MAX: u64 = 1 << 20;

/// Returns the profiles in a folder.
fn saved(folder: &Path) -> Vec<PathBuf> {
    let is_profile = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with(PREFIX) && name.ends_with(".json") && path.is_file()
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_profile).collect();
    found.sort();
    found
}

impl MachineIdentity {
    /// Returns true if two identities differ in the disk at most.
    fn is_same_machine(&self, other: &MachineIdentity) -> bool {
        let machine = |of: &MachineIdentity| (of.cpu.clone(), of.processors, of.kernel.clone());
        machine(self) == machine(other)
    }

    /// Returns the identity of this machine and of the device of `folder`.
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
    /// Returns the folders that profiles are looked for in: `forebay` below `$XDG_STATE_HOME`, or else below
    /// `~/.local/state`, and then `forebay` below `$XDG_CONFIG_HOME`, or else below `~/.config`. `doctor` saves in the first.
    pub fn folders() -> Vec<PathBuf> {
        let named = |name| std::env::var_os(name).map(PathBuf::from);
        let home = named("HOME").filter(|path| path.is_absolute());
        let below = |variable, usual: &str| {
            let base = named(variable).filter(|path| path.is_absolute());
            Some(base.or_else(|| Some(home.as_ref()?.join(usual)))?.join("forebay"))
        };
        let state = below("XDG_STATE_HOME", ".local/state");
        state.into_iter().chain(below("XDG_CONFIG_HOME", ".config")).collect()
    }

    /// Returns the path where `doctor` saves the profile of this machine with the disk of `folder`: each disk has a file of its
    /// own. Returns `None` if no folder for it is known.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn path(folder: &Path) -> std::io::Result<Option<PathBuf>> {
        let here = MachineIdentity::here(folder)?;
        let name = format!("{PREFIX}-{:x}-{:x}.json", here.device, here.filesystem);
        Ok(MachineProfile::folders().into_iter().next().map(|state| state.join(name)))
    }

    /// Reads the profile that `doctor` saved for this machine and the disk of `folder`.
    ///
    /// # Errors
    /// Returns the reason in words if there is none.
    pub fn of_folder(folder: &Path) -> Result<MachineProfile, &'static str> {
        let here =
            MachineIdentity::here(folder).map_err(|_| "the model's folder cannot be read")?;
        let mut why = "no machine profile";
        for path in MachineProfile::folders().iter().flat_map(|folder| saved(folder)) {
            match read_text(&path, PROFILE_BYTES_MAX)
                .map_err(|_| "the machine profile cannot be read")
            {
                Ok(text) => match MachineProfile::parse(&text) {
                    Ok(profile) if profile.machine == here => return Ok(profile),
                    Ok(profile) if profile.machine.is_same_machine(&here) => {
                        why = "this disk is not measured";
                    }
                    Ok(_) if why == "no machine profile" => {
                        why = "the machine profile is of another machine";
                    }
                    Ok(_) => {}
                    Err(damaged) => why = damaged,
                },
                Err(unreadable) => why = unreadable,
            }
        }
        Err(why)
    }

    /// Reads the profile in `file`, or this machine's profile with the disk that `model` is on.
    ///
    /// # Errors
    /// Returns an error if there is no such profile, or if it is damaged.
    pub fn find(file: Option<&Path>, model: &Path) -> Result<MachineProfile, ProfileError> {
        let Some(path) = file else {
            let found = MachineProfile::of_folder(folder_of(model));
            return found.map_err(|why| ProfileError::NotMeasured { why });
        };
        let path = path.to_owned();
        match read_text(&path, PROFILE_BYTES_MAX) {
            Ok(text) => {
                MachineProfile::parse(&text).map_err(|why| ProfileError::Damaged { path, why })
            }
            Err(source) => Err(ProfileError::Unreadable { path, source }),
        }
    }

    /// Parses a profile from the text of its file, whatever its machine.
    ///
    /// # Errors
    /// Returns an error in words if the text is not a profile of this version.
    pub fn parse(text: &str) -> Result<MachineProfile, &'static str> {
        match serde_json::from_str::<MachineProfile>(text) {
            Ok(profile) if profile.version == PROFILE_VERSION => Ok(profile),
            _ => Err("the machine profile is damaged or of another version"),
        }
    }

    /// Returns the best way to read files in `folder`. It comes from the profile, if there is one for this machine and
    /// this disk. Otherwise it is a default that suits most disks.
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

/// Default queue depth. It is enough for every disk that was measured, and fair to other programs that use the disk.
const DEFAULT_DEPTH: usize = 32;
