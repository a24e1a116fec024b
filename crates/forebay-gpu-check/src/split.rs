//! Dense models that do not fit the GPU: wherever they are cut, the CPU and the GPU together give what the CPU gives alone,
//! the same bits every time, and after an error, too.

use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use forebay_engine::synth::{SynthOptions, synthesize};
use forebay_engine::{DeviceChoice, EngineError, KvCacheType, Session, SessionOptions};
use forebay_format::{Catalog, FileIndex};
use forebay_model::ModelError;
use forebay_model::sampling::argmax;
use forebay_store::{Fault, FaultKind, FaultPlan};

use crate::harness::Outcome;
use crate::logits::Distance;
use crate::models::Limits;
use crate::sessions::{CONTEXT, generate, logits, open, planned, smallest_ram};

const GENERATED: usize = 6;

/// Shape with enough layers that some of the CPU's may have to stream.
const SHAPE: &str = "llama-tiny";
/// Tokens of a prompt that is more than a batch.
const TWO_BATCHES: usize = 520;
/// Attempts that a fault which ends may take.
const ATTEMPTS: usize = 20;

/// Logits of `ids` as a prompt, of few tokens, and of single ones, with every number of layers on the CPU: as near to those of
/// the CPU alone, in f32 throughout, as `fast` says, or exact arithmetic does.
///
/// # Errors
/// A model that cannot be opened.
pub fn check(path: &Path, ids: &[u32], fast: &Limits, ordinal: usize) -> Result<Outcome> {
    let context = Some(CONTEXT);
    let cpu = SessionOptions { exact: true, context, ..SessionOptions::default() };
    let expected = logits(&mut open(path, cpu)?, ids)?;
    let mut worst = Outcome::same::<u8>(&[], &[]);
    for (exact, kv_cache, limits) in [
        (true, KvCacheType::F16, &Limits::EXACT),
        (false, KvCacheType::F16, fast),
        (false, KvCacheType::Q8_0, fast),
    ] {
        let device = DeviceChoice::Cuda(ordinal);
        let options =
            SessionOptions { device, exact, kv_cache, context, ..SessionOptions::default() };
        for cut in cuts(path, &options)? {
            let what = format!("{} layers on the CPU, {kv_cache:?}, exact: {exact}", cut.layers);
            let checked = check_cut(path, &cut, ids, &expected, limits);
            worst = worst.worse(checked.with_context(|| what.clone())?.at(&what));
        }
    }
    Ok(worst)
}

/// A model of more layers than the fixtures have: as [`check`]; besides, a prompt of two batches, and a disk that fails and
/// recovers.
///
/// # Errors
/// As [`check`].
pub fn check_deeper(ordinal: usize) -> Result<Outcome> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    let recipe = SynthOptions { quantisation: "Q8_0".into(), ..SynthOptions::default() };
    synthesize(SHAPE, &path, &recipe, &mut |_, _| true)?;
    let ids: Vec<u32> = (1..40).collect();
    let checked = check(&path, &ids, &Limits::ROUNDED, ordinal)?;
    let device = DeviceChoice::Cuda(ordinal);
    let context = Some(TWO_BATCHES + GENERATED);
    let options = SessionOptions { device, exact: true, context, ..SessionOptions::default() };
    let cuts = cuts(&path, &options)?;
    let last = cuts.last().context("the model has more than one layer")?;
    let long: Vec<u32> = (0..TWO_BATCHES as u32).collect();
    let expected = {
        let device = DeviceChoice::Cpu;
        generate(&mut open(&path, SessionOptions { device, ..options })?, &long, GENERATED)?
    };
    let mut session = open(&path, last.options.clone())?;
    let found = generate(&mut session, &long, GENERATED)?;
    let batches = Outcome::same(&found, &expected).at("two batches");
    drop(session);
    Ok(checked.worse(batches).worse(check_faults(&path, last, &ids)?))
}

/// A place to cut a model at.
struct Cut {
    /// On the CPU.
    layers: usize,
    options: SessionOptions,
}

/// All places where a model can be cut, found by taking one byte less than the last needed, and that the smallest budget
/// is the one that the refusal of less names.
fn cuts(path: &Path, options: &SessionOptions) -> Result<Vec<Cut>> {
    let mut cuts: Vec<Cut> = Vec::new();
    let mut needed = total_bytes(&open(path, options.clone())?)?;
    loop {
        let options = SessionOptions { vram_bytes: Some(needed - 1), ..options.clone() };
        let session = match Session::open(path, &options, &mut |_, _| {}) {
            Ok(session) => session,
            Err(EngineError::Model(ModelError::VramTooSmall { needed_bytes, .. })) => {
                if needed_bytes != needed {
                    bail!("{needed} bytes of VRAM are enough, but {needed_bytes} were asked for");
                }
                return Ok(cuts);
            }
            Err(error) => return Err(error.into()),
        };
        let statistics = session.statistics();
        let layers = statistics.split.context("the model fits a byte less")?.layers.cpu_layers;
        if layers != cuts.len() + 1 {
            bail!("{} layers on the CPU are enough, but there are {layers}", cuts.len() + 1);
        }
        needed = total_bytes(&session)?;
        cuts.push(Cut { layers, options });
    }
}

fn total_bytes(session: &Session) -> Result<u64> {
    Ok(session.statistics().vram.context("a GPU computes")?.total_bytes)
}

/// Distance from `expected`; the same bits again, without recordings, on one thread, and with as little RAM as will do.
fn check_cut(
    path: &Path,
    cut: &Cut,
    ids: &[u32],
    expected: &[f32],
    limits: &Limits,
) -> Result<Outcome> {
    let planned = planned(path, &cut.options)?.first_layer;
    let mut session = open(path, cut.options.clone())?;
    let cpu_layers = session.statistics().split.map_or(0, |split| split.layers.cpu_layers);
    if planned != cpu_layers {
        bail!("{planned} layers were planned for the CPU, which has {cpu_layers}");
    }
    let found = logits(&mut session, ids)?;
    let distance = Distance::between(expected, &found, session.vocab_size());
    let mut worst = limits.judge("logits", &distance);
    let again = logits(&mut session, ids)?;
    worst = worst.worse(Outcome::same(&again, &found).at("again"));
    // When text is generated, only the largest logits come to the host.
    let mut text = ids[..1].to_vec();
    text.extend(generate(&mut session, &ids[..1], GENERATED)?);
    let whole = session.logits_one_by_one(&text)?;
    let likeliest: Vec<u32> = whole.chunks(session.vocab_size()).map(argmax).collect();
    worst = worst.worse(Outcome::same(&text[1..], &likeliest[..GENERATED]).at("largest"));
    drop(session);
    let smallest = smallest_ram(path, &cut.options)?;
    for (what, options) in [
        ("direct", SessionOptions { cuda_graphs: false, ..cut.options.clone() }),
        ("one thread", SessionOptions { threads: Some(1), ..cut.options.clone() }),
        ("little RAM", SessionOptions { ram_bytes: Some(smallest), ..cut.options.clone() }),
    ] {
        let found_so = logits(&mut open(path, options)?, ids)?;
        worst = worst.worse(Outcome::same(&found_so, &found).at(what));
    }
    Ok(worst)
}

/// Reads of the CPU's second layer fail for a while: calls do, too, and then give the bits that they give without.
fn check_faults(path: &Path, cut: &Cut, ids: &[u32]) -> Result<Outcome> {
    let expected = logits(&mut open(path, cut.options.clone())?, ids)?;
    let range = middle_of(path, "blk.1.ffn_up.weight")?;
    let fault = Fault { file: FileIndex(0), range, kind: FaultKind::Error(5), times: 8 };
    let faults = Some(FaultPlan { faults: vec![fault], ..FaultPlan::default() });
    let ram_bytes = Some(smallest_ram(path, &cut.options)?);
    let mut session = open(path, SessionOptions { faults, ram_bytes, ..cut.options.clone() })?;
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

/// Bytes of a tensor that no other block's aligned reads reach.
fn middle_of(path: &Path, name: &str) -> Result<Range<u64>> {
    let catalog = Catalog::open(path)?;
    let extent = catalog.tensor(name).with_context(|| format!("no tensor {name}"))?.extent;
    Ok(extent.offset + extent.length / 4..extent.end() - extent.length / 4)
}
