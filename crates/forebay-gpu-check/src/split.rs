//! Dense models that do not fit into VRAM. If the remaining weights stream through the GPU, logits are bit-identical to
//! those of a resident model, for every budget. If the CPU computes a part, logits are the same every time, and as
//! close to the exact ones as the arithmetic promises. Both also hold after an error.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use forebay_engine::{DeviceChoice, KvCacheType, Session, SessionOptions};
use forebay_format::{Catalog, FileIndex};
use forebay_lab::synth::{SynthOptions, synthesize};
use forebay_model::sampling::argmax;
use forebay_model::{SubLayerPlacement, SubLayerRates};
use forebay_store::{Fault, FaultKind, FaultPlan, OutputFile};

use crate::harness::Outcome;
use crate::logits::Distance;
use crate::models::Limits;
use crate::sessions::{CONTEXT, generate, least_ram, logits, open, open_as_planned, open_smallest};

const GENERATED: usize = 6;

/// Shape with more layers than the fixtures have.
const SHAPE: &str = "llama-tiny";
/// Number of tokens of a prompt of two batches. Both are so large that the CPU computes nothing.
const TWO_BATCHES: usize = 540;
/// Number of attempts within which a temporary fault must end.
const ATTEMPTS: usize = 20;

/// Rates with which the CPU computes nothing, half of what it may, or all of it.
const ON_CPU: [(&str, SubLayerRates); 3] =
    [("none", rates(1e12, 1.0)), ("some", rates(1e9, 1e9)), ("all", rates(1.0, 1e12))];

const fn rates(copy_bytes_per_second: f64, cpu_bytes_per_second: f64) -> SubLayerRates {
    SubLayerRates { copy_bytes_per_second, cpu_bytes_per_second, gpu_seconds: 0.0 }
}

/// Compares logits of `ids` computed as a prompt, of a few tokens at once, and of single tokens. Tests every VRAM
/// budget that makes a difference, with all RAM and with the smallest RAM budget.
///
/// # Errors
/// Returns an error if a model cannot be opened.
pub fn check(path: &Path, ids: &[u32], fast: &Limits, ordinal: usize) -> Result<Outcome> {
    let context = Some(CONTEXT);
    let cpu = SessionOptions { exact: true, context, ..SessionOptions::default() };
    let exact_logits = logits(&mut open(path, cpu)?, ids)?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    // 8-bit keys and values lose no more than 8-bit weights.
    let of_8_bits = fast.or(&Limits::ROUNDED);
    for (exact, kv_cache, limits) in [
        (true, KvCacheType::F16, &Limits::EXACT),
        (false, KvCacheType::F16, fast),
        (false, KvCacheType::Q8_0, &of_8_bits),
    ] {
        let device = DeviceChoice::Cuda(ordinal);
        let options =
            SessionOptions { device, exact, kv_cache, context, ..SessionOptions::default() };
        let resident = logits(&mut open(path, options.clone())?, ids)?;
        let expected = Expected { exact: &exact_logits, resident: &resident, limits };
        let budgets = budgets(path, &options)?;
        let is_usual = !exact && kv_cache == KvCacheType::F16;
        // The other modes differ only in kernels, not in which weights are copied.
        let budgets = if is_usual { &budgets[..] } else { &budgets[budgets.len() - 1..] };
        let on_cpu = if is_usual { &ON_CPU[..] } else { &ON_CPU[..2] };
        for &more in budgets {
            for &(name, rates) in on_cpu {
                let options = SessionOptions { sub_layer_rates: Some(rates), ..options.clone() };
                let what = format!(
                    "{more} bytes of VRAM beyond the least, {name} on the CPU, {kv_cache:?}, exact: {exact}"
                );
                let checked = check_budget(path, &options, more, ids, &expected);
                worst = worst.worse(checked.with_context(|| what.clone())?.at(&what));
            }
        }
    }
    Ok(worst)
}

/// Runs [`check`] on a model with more layers than the fixtures have. Also tests a prompt of two batches, and a disk
/// that fails and recovers.
///
/// # Errors
/// Returns an error if the model cannot be synthesised or opened.
pub fn check_deeper(ordinal: usize) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    let recipe = SynthOptions { quantisation: Some("Q8_0".into()), ..SynthOptions::default() };
    synthesize(SHAPE, OutputFile::create(&path)?, &recipe, &mut |_, _| true)?;
    // One tile of the smaller kernel. The two batches below use the larger one.
    let ids: Vec<u32> = (1..33).collect();
    let mut worst = check(&path, &ids, &Limits::ROUNDED, ordinal)?;
    let device = DeviceChoice::Cuda(ordinal);
    let context = Some(TWO_BATCHES);
    let options = SessionOptions { device, context, ..SessionOptions::default() };
    let long: Vec<u32> = (0..TWO_BATCHES as u32).collect();
    let expected = open(&path, options.clone())?.logits(&long, None)?;
    let some = SessionOptions { sub_layer_rates: Some(ON_CPU[1].1), ..options.clone() };
    let ram_bytes = Some(least_ram(&path, &some)?);
    // The CPU computes nothing for prompts of so many tokens.
    for options in [some.clone(), SessionOptions { ram_bytes, ..some }] {
        let what = format!("two batches, {:?} bytes of RAM", options.ram_bytes);
        let found = open_smallest(&path, &options, 0)?.0.logits(&long, None)?;
        worst = worst.worse(Outcome::same(&found, &expected).at(&what));
    }
    for (_, rates) in ON_CPU {
        let options = SessionOptions { sub_layer_rates: Some(rates), ..options.clone() };
        worst = worst.worse(check_faults(&path, &options, &ids)?);
    }
    Ok(worst)
}

/// Returns budgets from one byte less than everything takes down to the smallest, as bytes beyond the smallest.
fn budgets(path: &Path, options: &SessionOptions) -> Result<Vec<u64>> {
    let (least, with) = open_smallest(path, options, 0)?;
    let least = own_bytes(&least)?;
    let less = SessionOptions { vram_bytes: with.vram_bytes.map(|vram| vram - 1), ..with };
    if Session::open(path, &less, &mut |_, _| {}).is_ok() {
        bail!("{less:?} were asked for, but less are enough");
    }
    let all = own_bytes(&open(path, options.clone())?)?;
    if all == least {
        // Nothing can be left out: latent attention has no sub-layers, and the output projection is the embedding table.
        return Ok(vec![0]);
    }
    let mut budgets = vec![all - 1 - least];
    // If only the embedding table is left out, all sub-layers may still fit. Then this adds a budget in which one does
    // not.
    let (session, _) = open_smallest(path, options, budgets[0])?;
    if placement(&session).is_none() {
        budgets.push((own_bytes(&session)? - 1).saturating_sub(least));
    }
    let span = budgets[budgets.len() - 1];
    budgets.extend([span / 2, 0]);
    budgets.dedup();
    Ok(budgets)
}

/// Returns the device memory of a session without the driver's own.
fn own_bytes(session: &Session) -> Result<u64> {
    let vram = session.statistics().vram.context("a GPU computes")?;
    Ok(vram.total_bytes - vram.context_bytes)
}

/// Returns the placement of the sub-layers, if not all are in VRAM.
fn placement(session: &Session) -> Option<SubLayerPlacement> {
    session.statistics().device_sub_layers.map(|sub_layers| sub_layers.sub_layers.placement)
}

/// Logits of other configurations, to compare with.
struct Expected<'a> {
    /// Logits in f32 throughout.
    exact: &'a [f32],
    /// Logits with all weights in VRAM.
    resident: &'a [f32],
    limits: &'a Limits,
}

/// Checks one VRAM budget. If the CPU computes nothing, logits must be bit-identical to the resident model's. Otherwise
/// they must be close to the exact ones. They must be the same again, on one thread, and with the smallest RAM budget.
fn check_budget(
    path: &Path,
    options: &SessionOptions,
    more: u64,
    ids: &[u32],
    expected: &Expected<'_>,
) -> Result<Outcome> {
    let mut session = as_planned(path, options, more)?;
    let placement = placement(&session);
    let found = logits(&mut session, ids)?;
    let cpu = placement.is_some_and(|placement| placement.on_cpu.sub_layers > 0);
    let mut worst = match cpu {
        true => {
            let distance = Distance::between(expected.exact, &found, session.vocab_size());
            expected.limits.judge("logits", &distance)
        }
        false => Outcome::same(&found, expected.resident).at("resident"),
    };
    worst = worst.worse(Outcome::same(&logits(&mut session, ids)?, &found).at("again"));
    // When text is generated, only the largest logits are copied to the host.
    let text = generate(&mut session, &ids[..1], GENERATED)?;
    let whole = session.logits_of_answer(&ids[..1], &text)?;
    let likeliest: Vec<u32> = whole.chunks(session.vocab_size()).map(argmax).collect();
    worst = worst.worse(Outcome::same(&text[..], &likeliest[..GENERATED]).at("largest"));
    if let Some(sub_layers) = session.statistics().device_sub_layers {
        let (copied, on_cpu) =
            (sub_layers.sub_layers.bytes_copied > 0, sub_layers.sub_layers.bytes_on_cpu > 0);
        // Prompts copy all missing weights to the GPU. Single tokens copy those that the CPU does not compute.
        if !copied || on_cpu != cpu {
            bail!("not as planned: {sub_layers:?}");
        }
        let times = sub_layers.sub_layers.few_tokens;
        let parts = times.cpu_seconds
            + times.copy_wait_seconds
            + times.gpu_wait_seconds
            + times.disk_wait_seconds;
        if times.passes == 0 || (times.cpu_seconds > 0.0) != cpu || parts > times.seconds {
            bail!("times that cannot be: {times:?}");
        }
    }
    drop(session);
    if placement.is_none() {
        return Ok(worst);
    }
    let smallest = least_ram(path, options)?;
    let little = SessionOptions { ram_bytes: Some(smallest), ..options.clone() };
    let mut others = vec![("little RAM", little)];
    if cpu {
        others.push(("one thread", SessionOptions { threads: Some(1), ..options.clone() }));
    }
    for (what, options) in others {
        let found_so = logits(&mut open_smallest(path, &options, more)?.0, ids)?;
        worst = worst.worse(Outcome::same(&found_so, &found).at(what));
    }
    Ok(worst)
}

/// Opens a session with `more` bytes than the smallest budget, with the sub-layers in VRAM that the planner chose.
fn as_planned(path: &Path, options: &SessionOptions, more: u64) -> Result<Session> {
    open_as_planned(path, options, more, |planned, session| match placement(session) {
        None => planned.sub_layers.all_in_vram(),
        Some(placement) => planned.sub_layers.placement().in_vram == placement.in_vram,
    })
}

/// Lets reads of the second layer's feed-forward fail for a while. Calls must fail too, and afterwards give the same
/// bits as without faults.
fn check_faults(path: &Path, options: &SessionOptions, ids: &[u32]) -> Result<Outcome> {
    let expected = logits(&mut open_smallest(path, options, 0)?.0, ids)?;
    let range = middle_of(path, "blk.1.ffn_up.weight")?;
    let fault = Fault { file: FileIndex(0), range, kind: FaultKind::Error(5), spares: 0, times: 8 };
    let faults = Some(FaultPlan { faults: vec![fault], ..FaultPlan::default() });
    let ram_bytes = Some(least_ram(path, options)?);
    let options = SessionOptions { ram_bytes, ..options.clone() };
    let (mut session, _) = open_smallest(path, &SessionOptions { faults, ..options }, 0)?;
    let mut failed = 0;
    let found = loop {
        match logits(&mut session, ids) {
            Ok(found) => break found,
            Err(error) if failed == ATTEMPTS => return Err(error.context("the disk recovered")),
            Err(_) => failed += 1,
        }
    };
    if failed == 0 {
        bail!("reads that failed went unnoticed");
    }
    Ok(Outcome::same(&found, &expected).at("after errors"))
}

/// Returns the byte in the middle of a tensor. Exactly one request of a read covers it, so the failures of that request
/// are never spread over several requests that each succeed when they are repeated.
fn middle_of(path: &Path, name: &str) -> Result<Range<u64>> {
    let catalog = Catalog::open(path)?;
    let extent = catalog.tensor(name).with_context(|| format!("no tensor {name}"))?.extent;
    let middle = extent.offset + extent.length / 2;
    Ok(middle..middle + 1)
}
