//! Disks that stall for longer than a kernel may wait for the host. The kernel gives up, the host continues in another
//! way, and the logits are bit-identical. GPUs without a watchdog get an artificial bound.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use forebay_engine::{CpuOffload, DeviceChoice, SessionOptions};
use forebay_format::Catalog;
use forebay_model::{Architecture, DeviceExperts};
use forebay_store::{Fault, FaultKind, FaultPlan, IoRecorder, Why};

use crate::harness::{Context, Outcome};
use crate::sessions::{CONTEXT, least_ram, open_smallest};
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

/// Number of attempts until the disk stalls while tokens are computed.
const TRIES: usize = 5;

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
        let options = SessionOptions {
            device: DeviceChoice::Cuda(ordinal),
            context: Some(CONTEXT),
            cpu_offload,
            cpu_offload_rates: Some(PAYS),
            gpu_wait_bound: (!has_watchdog).then_some(BOUND),
            ..SessionOptions::default()
        };
        let mut tries = 0;
        let (stalled, what) = loop {
            tries += 1;
            let stalled = compute(path, &options, &ids, stalls)?;
            let what = format!("{cpu_offload:?}, {} reads, try {tries}", stalled.reads);
            if stalled.is_alike && stalled.longest_read >= stalls[0] {
                break (stalled, what);
            }
            ensure!(tries < TRIES, "{what}: the disk did not stall while tokens were computed");
        };
        worst = worst.worse(Outcome::same(&stalled.found, &stalled.expected).at(&what));
        let experts = stalled.experts.context("experts come and go")?;
        ensure!(experts.tokens_given_up > 0, "{what}: no kernel gave up: {experts:?}");
        ensure!(
            (experts.experts_on_cpu > 0) == (cpu_offload == CpuOffload::Auto && several),
            "{what}: the CPU computed {} experts",
            experts.experts_on_cpu
        );
    }
    Ok(worst)
}

/// What a session without stalls computes, and one with stalls.
struct Computed {
    expected: Vec<f32>,
    /// Number of reads for which the tokens of the session without stalls waited.
    reads: u32,
    found: Vec<f32>,
    /// Longest read for which the tokens of the session with stalls waited.
    longest_read: Duration,
    experts: Option<DeviceExperts>,
    /// True if VRAM has the same room for weights in both sessions. Otherwise the CPU computes other experts, which rounds
    /// differently.
    is_alike: bool,
}

/// Computes logits without stalls, and with stalls after half and after three quarters of the reads.
///
/// Another program on the same GPU changes how much memory the driver needs, also between the search for the smallest
/// budget and opening the session. A session with more VRAM than was meant reads less than the other one, or nothing. The
/// stall is then due while the session is opened, or after the last token.
fn compute(
    path: &Path,
    options: &SessionOptions,
    ids: &[u32],
    stalls: [Duration; 2],
) -> Result<Computed> {
    let ram_bytes = Some(least_ram(path, options)?);
    let run = |faults: Option<FaultPlan>| {
        let recorder = IoRecorder::new(1 << 16);
        let recorded = Some(recorder.clone());
        let with = SessionOptions { ram_bytes, faults, recorder: recorded, ..options.clone() };
        let (mut session, _) = open_smallest(path, &with, 0)?;
        let logits = session.logits_one_by_one(ids)?;
        // Reads made while opening the session have another reason and do not count.
        let mut reads = recorder.take().reads;
        reads.retain(|read| read.why == Why::Demand);
        let statistics = session.statistics();
        let weights_bytes = statistics.vram.map(|vram| vram.weights_bytes);
        anyhow::Ok((logits, reads, weights_bytes, statistics.device_experts))
    };
    let (expected, reads, weights_bytes, _) = run(None)?;
    // A model may consist of several files. The one with the most reads stalls.
    let of_file = |file| reads.iter().filter(|read| read.file == file).count() as u32;
    let file = reads.iter().map(|read| read.file).max_by_key(|file| of_file(*file));
    let reads = file.map_or(0, of_file);
    let faults = file.map(|file| {
        let fault = |(index, stall): (u32, Duration)| Fault {
            file,
            range: 0..u64::MAX,
            kind: FaultKind::Delay(stall),
            spares: reads / 4 * (2 + index),
            times: 1,
        };
        FaultPlan { faults: (0..).zip(stalls).map(fault).collect(), ..FaultPlan::default() }
    });
    let (found, with_stalls, weights_with_stalls, experts) = run(faults)?;
    let longest = with_stalls.iter().map(|read| read.duration_nanoseconds).max().unwrap_or(0);
    let longest_read = Duration::from_nanos(longest);
    let is_alike = weights_bytes == weights_with_stalls;
    Ok(Computed { expected, reads, found, longest_read, experts, is_alike })
}
