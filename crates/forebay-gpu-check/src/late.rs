//! Disks that stall for longer than a kernel may wait for the host. The kernel gives up, the host continues in another
//! way, and the logits are bit-identical. GPUs without a watchdog get an artificial bound.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use forebay_engine::{CpuOffload, DeviceChoice, SessionOptions};
use forebay_format::Catalog;
use forebay_model::Architecture;
use forebay_store::{Fault, FaultKind, FaultPlan, FileIndex, IoRecorder, Why};

use crate::harness::{Context, Outcome};
use crate::sessions::{CONTEXT, least_ram, open_with_least};
use crate::slots::PAYS;

/// How long kernels wait on a GPU that has no watchdog.
const BOUND: Duration = Duration::from_millis(100);
/// How long the disk stalls: first after half of the reads, then after three quarters.
const STALLS: [Duration; 2] = [Duration::from_secs(1), Duration::from_millis(500)];
/// The same on a GPU with a watchdog, which ends kernels that run for seconds.
const LONG_STALLS: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(1)];
/// Number of tokens that are computed one at a time. The first ones are queued kernel by kernel; the later ones run as
/// a CUDA graph.
const TOKENS: usize = 10;
/// Number of times that it is tried to make a token wait for the disk.
const ATTEMPTS: usize = 4;

/// Compares logits of single tokens with and without stalls. Does so once with all experts computed by the GPU, and
/// once with some computed by the CPU.
///
/// # Errors
/// Returns an error if the model cannot be opened or the disk kept no kernel waiting.
pub fn check(context: &Context, path: &Path, ids: &[u32], ordinal: usize) -> Result<Outcome> {
    let ids: Vec<u32> = ids.iter().copied().cycle().take(TOKENS).collect();
    let has_watchdog = context.gpu.host_wait_bound().is_some();
    let stalls = if has_watchdog { LONG_STALLS } else { STALLS };
    // At least one of a layer's missing experts is copied, so nothing is left for the CPU if tokens use one expert.
    let several = Architecture::from_catalog(&Catalog::open(path)?)?.experts_per_token() > 1;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for cpu_offload in [CpuOffload::Never, CpuOffload::Auto] {
        let mut options = SessionOptions {
            device: DeviceChoice::Cuda(ordinal),
            context: Some(CONTEXT),
            threads: (cpu_offload != CpuOffload::Never).then_some(2),
            cpu_offload,
            cpu_offload_rates: Some(PAYS),
            gpu_wait_bound: (!has_watchdog).then_some(BOUND),
            ..SessionOptions::default()
        };
        options.ram_bytes = Some(least_ram(path, &options)?);
        // Another program's memory may change the least VRAM between the two sessions. Then tokens may read nothing, and nothing
        // waits for the disk.
        let mut outcome = None;
        for _ in 0..ATTEMPTS {
            outcome = stalled(path, &ids, &options, stalls, several)?;
            if outcome.is_some() {
                break;
            }
        }
        let what = || format!("{cpu_offload:?}: the disk did not stall while tokens were computed");
        worst = worst.worse(outcome.with_context(what)?);
    }
    Ok(worst)
}

/// Computes the tokens without and with stalls. Returns `None` if the disk did not stall while tokens were computed.
fn stalled(
    path: &Path,
    ids: &[u32],
    options: &SessionOptions,
    stalls: [Duration; 2],
    several: bool,
) -> Result<Option<Outcome>> {
    let recorder = IoRecorder::new(1 << 16);
    let recorded = SessionOptions { recorder: Some(recorder.clone()), ..options.clone() };
    let (mut session, _) = open_with_least(path, &recorded, 0)?;
    let expected = session.logits_one_by_one(ids)?;
    // Reads made while opening the session have another reason and do not count.
    let reads = recorder.take().reads;
    let of_file = |file: FileIndex| {
        let demanded = reads.iter().filter(|read| read.why == Why::Demand);
        demanded.filter(|read| read.file == file).count() as u32
    };
    // A model may consist of several files. The one with the most reads stalls.
    let files = reads.iter().map(|read| read.file);
    let file = files.max_by_key(|file| of_file(*file)).context("the model reads nothing")?;
    let reads = of_file(file);
    drop(session);
    let fault = |(index, stall): (u32, Duration)| Fault {
        file,
        range: 0..u64::MAX,
        kind: FaultKind::Delay(stall),
        spares: reads / 4 * (2 + index),
        times: 1,
    };
    let faults = (0..).zip(stalls).map(fault).collect();
    let faults = Some(FaultPlan { faults, ..FaultPlan::default() });
    let (mut session, _) = open_with_least(path, &SessionOptions { faults, ..options.clone() }, 0)?;
    let began = Instant::now();
    let found = session.logits_one_by_one(ids)?;
    let took = began.elapsed();
    let outcome = Outcome::same(&found, &expected);
    if took <= stalls[0] {
        // Logits must be equal without a stall, too.
        ensure!(outcome.passed(), "logits differ without a stall");
        return Ok(None);
    }
    let cpu_offload = options.cpu_offload;
    let what = format!("{cpu_offload:?}, {reads} reads, {took:?}");
    let experts = session.statistics().device_experts.context("experts come and go")?;
    ensure!(experts.tokens_given_up > 0, "{what}: no kernel gave up: {experts:?}");
    ensure!(
        (experts.experts_on_cpu > 0) == (cpu_offload == CpuOffload::Auto && several),
        "{what}: the CPU computed {} experts",
        experts.experts_on_cpu
    );
    Ok(Some(outcome.at(&what)))
}
