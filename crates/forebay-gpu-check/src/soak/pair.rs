//! Two sessions of one model. The reference has everything in memory and a healthy disk; the streaming session has
//! neither.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use forebay_engine::plan::PlannedModel;
use forebay_engine::{CpuOffload, DeviceChoice, EngineError, KvCacheType, Session, SessionOptions};
use forebay_model::{ModelError, SubLayerRates};
use forebay_store::IoKind;
use forebay_stream::PolicyKind;

use crate::Tally;
use crate::fault_profile::{self, FaultProfile};
use crate::random::Random;

/// Number of attempts to open a session on a failing disk. Later attempts get a healthy disk.
const BAD_STARTS: usize = 8;
const STARTS_MAX: usize = 20;
/// Read timeout for a disk with a dead range.
const DEAD_TIMEOUT: Duration = Duration::from_millis(500);

/// Rates with which the CPU computes no part of a dense model, because it would round differently from the GPU.
const NOTHING_ON_CPU: SubLayerRates =
    SubLayerRates { copy_bytes_per_second: 1e12, cpu_bytes_per_second: 1.0, gpu_seconds: 0.0 };

/// Device, threads and context of the sessions.
pub struct Place {
    pub device: DeviceChoice,
    pub threads: usize,
    /// Largest context, in positions of the KV cache.
    pub context: usize,
}

pub struct Pair {
    pub path: PathBuf,
    pub fault_profile: FaultProfile,
    /// Options of the streaming session.
    pub options: SessionOptions,
    pub reference: Session,
    pub streaming: Session,
}

impl Pair {
    /// Opens both sessions with random options. The streaming one gets budgets between the smallest and two thirds of
    /// what the model takes.
    pub fn open(
        path: &Path,
        place: &Place,
        fault_profile: FaultProfile,
        random: &mut Random,
        tally: &mut Tally,
    ) -> Result<Pair> {
        let options = random_options(path, place, random)?;
        let mut tight = options.clone();
        let reference = open(path, &options)?;
        if let Some(vram) = reference.statistics().vram {
            let least = needed(path, SessionOptions { vram_bytes: Some(1), ..options.clone() })?;
            tight.vram_bytes = Some(between(least, vram.total_bytes, random));
        }
        let whole = match reference.plan() {
            Some(plan) => plan.arena_bytes,
            None => reference.statistics().weights_bytes,
        };
        let least = needed(path, SessionOptions { ram_bytes: Some(1), ..tight.clone() })?;
        tight.ram_bytes = Some(between(least, whole, random));
        if fault_profile == FaultProfile::DeadRead {
            tight.stall_timeout = DEAD_TIMEOUT;
        }
        let streaming = start(path, &mut tight, fault_profile, random, tally)?;
        ensure!(streaming.plan().is_some(), "everything fits the VRAM of {tight:?}");
        tally.sessions_opened += 2;
        Ok(Pair { path: path.to_owned(), fault_profile, options: tight, reference, streaming })
    }

    /// Adds the reads of the streaming session since its start to `tally`.
    pub fn count_reads(&self, tally: &mut Tally) {
        if let Some(stream) = self.streaming.statistics().stream {
            tally.retries += stream.io.retries;
            tally.checksum_mismatches += stream.io.checksum_mismatches;
            tally.bytes_read += stream.io.bytes_read;
        }
    }
}

impl std::fmt::Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Pair { path, fault_profile, options, .. } = self;
        let SessionOptions { vram_bytes, ram_bytes, exact, kv_cache, policy, io, .. } = options;
        write!(
            f,
            "{}, {fault_profile:?}, VRAM {vram_bytes:?}, RAM {ram_bytes:?}, exact {exact}, {kv_cache:?}, {policy}, {io:?}, \
             prefetch {}, graphs {}, sequences {}, KV tokens {:?}, swap {:?}",
            path.display(),
            options.prefetch,
            options.cuda_graphs,
            options.sequences,
            options.kv_tokens,
            options.kv_ram_bytes
        )
    }
}

/// Returns random options. Some must not change results; the others are the same for both sessions.
fn random_options(path: &Path, place: &Place, random: &mut Random) -> Result<SessionOptions> {
    let model = PlannedModel::open(path)?;
    let mut one_in = |sides: u32| random.next().is_multiple_of(sides);
    let exact = one_in(3);
    let options = SessionOptions {
        device: place.device,
        exact,
        io: if one_in(3) { IoKind::Pread } else { IoKind::Auto },
        ..SessionOptions::default()
    };
    let options = match place.device {
        DeviceChoice::Cpu => SessionOptions {
            threads: Some(place.threads),
            prefetch: model.info.experts > 0 && one_in(2),
            ..options
        },
        _ => SessionOptions {
            kv_cache: match exact {
                false if one_in(2) => KvCacheType::Q8_0,
                false if one_in(2) => KvCacheType::Q4_0,
                _ => KvCacheType::F16,
            },
            cuda_graphs: !one_in(4),
            sub_layer_rates: Some(NOTHING_ON_CPU),
            cpu_offload: CpuOffload::Never,
            ..options
        },
    };
    let context = model.context(&options)?.min(place.context);
    let sequences = 1 + random.next() as usize % 4;
    let policy = PolicyKind::ALL[random.next() as usize % PolicyKind::ALL.len()];
    // Half of the engines suspend requests, because the KV cache has no room for all.
    let kv_tokens = random.next().is_multiple_of(2).then_some(context);
    let kv_ram_bytes = [None, Some(0), Some(1 << 20)][random.next() as usize % 3];
    let many = SessionOptions { sequences, kv_tokens, kv_ram_bytes, ..options };
    Ok(SessionOptions { context: Some(context), policy, ..many })
}

/// Returns a random budget between the smallest one and two thirds of the way to `whole`. Small ones are most frequent.
fn between(least: u64, whole: u64, random: &mut Random) -> u64 {
    let percent = [0, 0, 5, 20, 66][random.next() as usize % 5];
    least + whole.saturating_sub(least) * percent / 100
}

/// Returns the smallest budget that works, taken from the error that refuses a smaller one.
fn needed(path: &Path, options: SessionOptions) -> Result<u64> {
    match Session::open(path, &options, &mut |_, _| {}) {
        Err(error) => error.needed_bytes().ok_or(error).map_err(Into::into),
        Ok(_) => bail!("a model ran in a byte"),
    }
}

fn open(path: &Path, options: &SessionOptions) -> Result<Session> {
    Session::open(path, options, &mut |_, _| {}).with_context(|| path.display().to_string())
}

/// Opens a session on a failing disk, which may take several attempts.
fn start(
    path: &Path,
    options: &mut SessionOptions,
    fault_profile: FaultProfile,
    random: &mut Random,
    tally: &mut Tally,
) -> Result<Session> {
    for attempt in 0..STARTS_MAX {
        let fault_profile = if attempt < BAD_STARTS { fault_profile } else { FaultProfile::Fair };
        options.faults = fault_profile.faults(path, random);
        match Session::open(path, options, &mut |_, _| {}) {
            Ok(session) => return Ok(session),
            // The driver's own memory use has grown since the budget was chosen.
            Err(EngineError::Model(ModelError::VramTooSmall { needed_bytes, .. })) => {
                options.vram_bytes = Some(needed_bytes);
            }
            Err(error) => {
                let (what, _) = fault_profile::name(error, path)?;
                *tally.errors.entry(what).or_default() += 1;
            }
        }
    }
    bail!("{}: no session could be opened in {STARTS_MAX} attempts", path.display())
}
