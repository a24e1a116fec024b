//! Models whose experts do not all fit into VRAM. Logits are bit-identical to those of a fully resident model, for
//! every budget and policy. The counters equal those of a replay of the recorded routing.

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail};
use forebay_engine::{CpuOffload, DeviceChoice, Session, SessionOptions};
use forebay_format::Catalog;
use forebay_model::{Architecture, CpuOffloadRates, DeviceShare, MissSplit};
use forebay_stream::{CacheShape, Lookups, PolicyKind, replay, routing};

use crate::harness::Outcome;
use crate::sessions::{CONTEXT, generate, least_ram, logits, open, open_as_planned, open_smallest};

pub const GENERATED: usize = 8;
/// Largest error if the CPU computes experts. It rounds activations differently from the GPU.
const CPU_NMSE: f64 = 1e-2;

/// Rates of a CPU that computes an expert in half the time of copying it, and of one that takes a thousand times as
/// long.
pub const PAYS: CpuOffloadRates = rates(1.0, 0.5);
const NEVER_PAYS: CpuOffloadRates = rates(1.0, 1e3);

const fn rates(copy_seconds: f64, cpu_seconds: f64) -> CpuOffloadRates {
    let (cpu_start_seconds, both_seconds) = (0.0, 0.0);
    let split = MissSplit { copy_seconds, cpu_seconds, cpu_start_seconds, both_seconds };
    CpuOffloadRates { split, copy_alone_seconds: copy_seconds }
}

/// Compares logits of `ids` computed as a prompt, of a few tokens at once, and of single tokens. Budgets range from the
/// fewest slots to nearly all experts.
///
/// # Errors
/// Returns an error if a model cannot be opened.
pub fn check(path: &Path, ids: &[u32], ordinal: usize) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for exact in [false, true] {
        let options = SessionOptions {
            device: DeviceChoice::Cuda(ordinal),
            exact,
            context: Some(CONTEXT),
            // If the CPU computed experts, results would differ by rounding.
            cpu_offload: CpuOffload::Never,
            ..SessionOptions::default()
        };
        let (expected, weights) = {
            let mut resident = open(path, options.clone())?;
            let weights = resident.statistics().vram.context("a GPU computes")?.weights_bytes;
            (logits(&mut resident, ids)?, weights)
        };
        // Bytes that experts take beyond the fewest slots.
        let span = {
            let (fewest, _) = open_smallest(path, &options, 0)?;
            weights - fewest.statistics().vram.context("a GPU computes")?.weights_bytes
        };
        // With few experts, a single missing one is a large share.
        let most = if has_many(path)? { 0.97 } else { 0.8 };
        for (share, small_ram) in [(0.0, false), (0.0, true), (0.4, false), (most, false)] {
            let more = (span as f64 * share) as u64;
            let mut session = as_planned(path, &options, more, small_ram)?;
            let what = format!(
                "{more} bytes of VRAM beyond the least, least RAM: {small_ram}, exact: {exact}"
            );
            for round in 0..2 {
                let found = logits(&mut session, ids).with_context(|| what.clone())?;
                worst =
                    worst.worse(Outcome::same(&found, &expected).at(&format!("{what} {round}")));
            }
            let experts = session.statistics().device_experts.context("experts come and go")?;
            // The exact products have no kernels that fetch experts.
            if (experts.layers_served == 0) != exact {
                bail!("{what}: {} layers of recorded tokens", experts.layers_served);
            }
        }
        worst = worst.worse(shared(path, &options, (&expected, ids), span)?);
        if !exact {
            worst = worst.worse(offloaded(path, &options, (&expected, ids), span)?);
            for policy in PolicyKind::ALL {
                let with = SessionOptions { policy, ..options.clone() };
                let (session, _) = open_smallest(path, &with, span / 2)?;
                let counted = counters(session, policy, ids).with_context(|| policy.to_string())?;
                worst = worst.worse(counted.at(&format!("{policy} counters")));
            }
        }
    }
    Ok(worst)
}

/// Returns true if the model has so many experts that the fewest slots are a small part of them.
fn has_many(path: &Path) -> Result<bool> {
    let architecture = Architecture::from_catalog(&Catalog::open(path)?)?;
    let counts = || architecture.expert_layers().map(|experts| experts.count);
    let used = architecture.experts_per_token();
    Ok(counts().count() > 1 && counts().all(|count| count >= 4 * used))
}

/// Compares logits of a model of which VRAM and RAM together hold a part. The two form an exclusive cache: an evicted expert gets
/// the RAM slot of a promoted one. With many slots, RAM still has most evicted experts.
fn shared(
    path: &Path,
    options: &SessionOptions,
    (expected, ids): (&[f32], &[u32]),
    span: u64,
) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let least_ram = least_ram(path, options)?;
    let all = {
        let (session, _) = open_smallest(path, options, 0)?;
        session.statistics().device_experts.context("experts come and go")?.pinned_bytes
    };
    let has_many = has_many(path)?;
    for (vram, ram) in [(0.3, 0.3), (0.7, 0.7)] {
        let what = format!("{vram} of the experts in VRAM, {ram} in RAM, exact: {}", options.exact);
        let ram_bytes = Some(least_ram + (all as f64 * ram) as u64);
        let with = SessionOptions { ram_bytes, ..options.clone() };
        let (mut session, _) = open_smallest(path, &with, (span as f64 * vram) as u64)?;
        let mut read = [0; 3];
        for read in &mut read {
            let found = logits(&mut session, ids).with_context(|| what.clone())?;
            worst = worst.worse(Outcome::same(&found, expected).at(&what));
            *read = session.statistics().stream.context("experts are read")?.experts_read;
        }
        let experts = session.statistics().device_experts.context("experts come and go")?;
        // During a prompt, an evicted expert may find no free RAM slot. During single tokens it always finds one.
        let (more, known) = (read[2] - read[0], experts.tier.experts);
        if vram + ram > 1.0 && more > known / 8 && has_many {
            bail!("{what}: {more} of {known} experts were read when all had been there");
        }
        let (returned, evicted) = (experts.experts_returned, experts.tier.evictions);
        if vram + ram < 1.0 && returned == 0 && has_many {
            bail!("{what}: nothing went back to RAM");
        }
        if vram + ram > 1.0 && 2 * returned > evicted && has_many {
            bail!("{what}: {returned} of {evicted} evicted experts went back to RAM");
        }
    }
    Ok(worst)
}

/// Compares logits with those of the GPU alone if the CPU may compute missing experts. They must be close, and the same
/// each time. They must be bit-identical as soon as the CPU computes nothing.
fn offloaded(
    path: &Path,
    options: &SessionOptions,
    (expected, ids): (&[f32], &[u32]),
    span: u64,
) -> Result<Outcome> {
    let mut worst = Outcome::same::<u8>(&[], &[]);
    let little = least_ram(path, options)? + span / 3;
    let cases = [
        ("asked for, at rates that are measured", CpuOffload::Always, None, 0.0, None),
        ("much is missing", CpuOffload::Auto, Some(PAYS), 0.0, None),
        ("much is missing, also in RAM", CpuOffload::Auto, Some(PAYS), 0.3, Some(little)),
        ("a slow CPU", CpuOffload::Auto, Some(NEVER_PAYS), 0.0, None),
    ];
    // At least one of a layer's missing experts is copied, so nothing is left for the CPU if tokens use one expert.
    let several = Architecture::from_catalog(&Catalog::open(path)?)?.experts_per_token() > 1;
    for (what, cpu_offload, cpu_offload_rates, share, ram_bytes) in cases {
        let threads = Some(2);
        let with = SessionOptions {
            cpu_offload,
            cpu_offload_rates,
            threads,
            ram_bytes,
            ..options.clone()
        };
        let more = (span as f64 * share) as u64;
        let mut before = None;
        for _ in 0..1 + usize::from(cpu_offload_rates.is_some()) {
            let (mut session, _) = open_smallest(path, &with, more).context(what)?;
            let found = logits(&mut session, ids).context(what)?;
            let experts = session.statistics().device_experts.context("experts come and go")?;
            let cpu_offload = experts.cpu_offload.context("the CPU may compute experts")?;
            let pays = cpu_offload_rates == Some(PAYS) && several;
            if cpu_offload_rates.is_some() && (experts.experts_on_cpu > 0) != pays {
                bail!(
                    "{what}: the CPU computed {} experts: {cpu_offload:?}",
                    experts.experts_on_cpu
                );
            }
            let limit = if cpu_offload_rates == Some(NEVER_PAYS) { 0.0 } else { CPU_NMSE };
            worst = worst.worse(Outcome::nmse(&found, expected, limit).at(what));
            if let Some(before) = before.replace(found.clone()) {
                worst = worst.worse(Outcome::same(&found, &before).at(what));
            }
        }
    }
    if !several || !has_many(path)? {
        return Ok(worst);
    }
    // CPU offload looks worthwhile when the session opens. It no longer is once nearly all experts are in VRAM.
    let what = "little is missing";
    let with = SessionOptions {
        cpu_offload_rates: Some(PAYS),
        cpu_offload: CpuOffload::Auto,
        ..options.clone()
    };
    let (mut session, _) = open_smallest(path, &with, (span as f64 * 0.97) as u64)?;
    let mut offloaded = Vec::new();
    for _ in 0..4 {
        let found = logits(&mut session, ids).context(what)?;
        let experts = session.statistics().device_experts.context("experts come and go")?;
        let cpu_offload = experts.cpu_offload.context("the CPU may compute experts")?;
        offloaded.push((cpu_offload.is_on, cpu_offload.changes));
        if offloaded.ends_with(&[(false, 1), (false, 1)]) {
            worst = worst.worse(Outcome::same(&found, expected).at(what));
            return Ok(worst);
        }
        worst = worst.worse(Outcome::nmse(&found, expected, CPU_NMSE).at(what));
    }
    bail!("{what}, but the CPU goes on helping: {offloaded:?}")
}

/// Opens a session with `more` bytes beyond the smallest VRAM budget, whose experts are cached in slots as planned.
fn as_planned(
    path: &Path,
    options: &SessionOptions,
    more: u64,
    small_ram: bool,
) -> Result<Session> {
    let ram_bytes = small_ram.then(|| least_ram(path, options)).transpose()?;
    let with = SessionOptions { ram_bytes, ..options.clone() };
    let agrees =
        |planned: &DeviceShare, session: &Session| planned.slots.as_ref() == session.slots();
    let session = open_as_planned(path, &with, more, agrees)?;
    if session.slots().is_none() {
        bail!("{with:?}, {more} bytes of VRAM beyond the least: all experts were kept");
    }
    Ok(session)
}

/// Compares the lookups, hits and evictions of a conversation with those of a replay of its trace.
fn counters(mut session: Session, policy: PolicyKind, ids: &[u32]) -> Result<Outcome> {
    let out = Shared::default();
    session.record_routing(Box::new(out.clone()), false)?;
    for ids in [ids, &ids[..1]] {
        generate(&mut session, ids, GENERATED)?;
    }
    session.end_routing()?;
    let trace = routing::read(out.0.lock().unwrap_or_else(PoisonError::into_inner).as_slice())?;
    let shape = CacheShape::from_plan(session.slots().context("not all experts are kept")?);
    let replayed = replay(&Lookups::of(&trace), policy, &shape).all;
    let counted = session.statistics().device_experts.context("experts come and go")?.tier;
    Ok(Outcome::same(
        &[counted.lookups, counted.hits, counted.evictions],
        &[replayed.lookups, replayed.hits, replayed.evictions],
    ))
}

/// A trace in memory.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
