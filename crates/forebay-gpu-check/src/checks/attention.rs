//! Compares all attention kernels with f64 arithmetic and with the CPU.

mod bench;
mod case;

use anyhow::Result;
use forebay_ops::{KvType, RowKind};

use self::case::Case;
pub use self::case::Variation;
use crate::bench::Bench;
use crate::harness::{Check, Context, Outcome};

pub fn benches() -> Vec<Bench> {
    bench::benches()
}

/// Query and key/value heads. The groups have 1, 4, 8 and 5 query heads.
const GROUPS: [(usize, usize); 4] = [(3, 3), (8, 2), (16, 2), (5, 1)];

/// Tolerance relative to the sum of magnitudes that an output was added up from.
const EXACT: f64 = 2e-5;
/// Tolerance if keys and values are rounded to halves, but queries and weights are not.
const BYTES_AS_HALVES: f64 = 3e-3;
/// Tolerance if queries and weights are rounded to halves.
const HALVES: f64 = 3e-3;
const BYTES_AND_HALVES: f64 = 5e-3;
/// The same tolerance for rows of 576. Their longer products accumulate more rounding error, and there are over a
/// million results.
const LATENT_HALVES: f64 = 6e-3;
const LATENT_BYTES: f64 = 1e-2;

const DECODE: [(usize, usize); 9] =
    [(0, 1), (1, 1), (62, 1), (63, 1), (64, 1), (1000, 1), (1003, 3), (0, 8), (517, 8)];
const PROMPT: [(usize, usize); 7] =
    [(0, 1), (0, 64), (0, 65), (37, 65), (190, 130), (301, 16), (700, 3)];
/// Spans of few tokens and of many.
const GENERAL: [(usize, usize); 6] = [(0, 1), (511, 1), (130, 5), (0, 9), (37, 40), (100, 33)];

/// Spans of one token, a few tokens and prompts, with 16 and 128 heads.
const LATENT: [(usize, usize); 8] =
    [(0, 1), (511, 1), (600, 1), (63, 2), (130, 5), (0, 9), (37, 40), (100, 33)];

/// Types that the specialised kernels support.
const FAST: [(KvType, &str); 3] =
    [(KvType::F16, "f16"), (KvType::Q8_0, "q8_0"), (KvType::Q4_0, "q4_0")];

pub fn checks() -> Vec<Check> {
    let dims =
        [(32, 32), (64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 16), (192, 128)];
    let mut checks = Vec::new();
    for (k, v) in dims {
        for (element, name) in FAST {
            let halves = element == KvType::F16;
            let (decode, prompt) =
                if halves { (EXACT, HALVES) } else { (BYTES_AS_HALVES, BYTES_AND_HALVES) };
            checks.push(check("decode", name, element, (k, v), &DECODE, decode));
            checks.push(check("prompt", name, element, (k, v), &PROMPT, prompt));
        }
    }
    for (k, v) in [(128, 128), (64, 64), (33, 17), (20, 12), (200, 200), (576, 512), (1088, 1024)] {
        checks.push(check("general", "f32", KvType::F32, (k, v), &GENERAL, EXACT));
    }
    for (element, name) in FAST {
        checks.push(check("general", name, element, (576, 512), &GENERAL, EXACT));
    }
    for (element, name) in FAST.into_iter().chain([(KvType::F32, "f32")]) {
        let run = move |context: &Context| latent(context, element);
        checks.push(Check::new(format!("attention latent {name}"), run));
        let run = move |context: &Context| windows(context, element);
        checks.push(Check::new(format!("attention windows {name}"), run));
    }
    for (element, name) in FAST.into_iter().chain([(KvType::F32, "f32")]) {
        let run = move |context: &Context| biases(context, element);
        checks.push(Check::new(format!("attention biases by distance {name}"), run));
    }
    checks.push(Check::new("attention ignores splits", splits));
    checks
}

/// Returns the kind of rows in checks of both: few are generated tokens.
fn kind_of(tokens: usize) -> RowKind {
    if tokens <= 8 { RowKind::Decode } else { RowKind::Prompt }
}

/// Checks all `spans` (first position, tokens). Each runs with one of the variations, and common shapes with all.
fn check(
    family: &'static str,
    name: &str,
    element: KvType,
    (dim_k, dim_v): (usize, usize),
    spans: &'static [(usize, usize)],
    tolerance: f64,
) -> Check {
    let thorough = matches!(dim_k, 64 | 128) && dim_k == dim_v;
    let run = move |context: &Context| {
        let mut outcome = Outcome::same::<f32>(&[], &[]);
        for (i, &(first, tokens)) in spans.iter().enumerate() {
            let (heads, kv_heads) = GROUPS[(i + dim_k / 8) % GROUPS.len()];
            let kind = match family {
                "decode" => RowKind::Decode,
                "prompt" => RowKind::Prompt,
                _ => kind_of(tokens),
            };
            let case = Case::of(element, (heads, kv_heads), (dim_k, dim_v), kind, (first, tokens));
            let inputs = case.inputs(context)?;
            let variations = Variation::all();
            let chosen = if thorough { 0..variations.len() } else { i % 6..i % 6 + 1 };
            for variation in &variations[chosen] {
                outcome = outcome.worse(inputs.check(context, variation, None, tolerance)?);
            }
        }
        Ok(outcome)
    };
    Check::new(format!("attention {family} {name} {dim_k}/{dim_v}"), run)
}

/// Checks biases by distance: few profiles and more than a warp has lanes, with distances that end before the context and after it.
fn biases(context: &Context, element: KvType) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let plain = Variation::plain();
    for (i, &(first, tokens)) in GENERAL.iter().enumerate() {
        let (groups, dim) = (GROUPS[i % GROUPS.len()], [128, 64, 200][i % 3]);
        let case = Case::of(element, groups, (dim, dim), kind_of(tokens), (first, tokens));
        let inputs = case.inputs(context)?;
        for (variation, profiles) in [
            (plain, (16, 100)),
            (plain, (3, 1000)),
            (Variation::windowed(48, true), (40, 48)),
            (Variation::windowed(16, false), (16, 5)),
        ] {
            outcome = outcome.worse(inputs.check_biases(context, &variation, profiles)?);
        }
    }
    Ok(outcome)
}

/// Checks values that are a part of their keys: DeepSeek's shapes, and short ones, which other kernels compute.
fn latent(context: &Context, element: KvType) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (heads, (dim_k, dim_v)) in [(16, (576, 512)), (128, (576, 512)), (6, (40, 32))] {
        for (i, &(first, tokens)) in LATENT.iter().enumerate() {
            let case =
                Case::of(element, (heads, 1), (dim_k, dim_v), kind_of(tokens), (first, tokens));
            let case = Case { values_in_keys: true, ..case };
            let tolerance = case.tolerance();
            let variation = Variation::all()[i % 6];
            let next = case.inputs(context)?.check(context, &variation, None, tolerance)?;
            outcome = outcome.worse(next);
        }
    }
    Ok(outcome)
}

/// Checks that caches that keep a window give the same bits as caches that keep all positions. The shapes are those of
/// gpt-oss (with sinks), of Gemma 3, and of a head that only the general kernel supports.
fn windows(context: &Context, element: KvType) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let shapes = [((64, 8), 64, 128, true), ((8, 4), 256, 1024, false), ((4, 2), 300, 100, true)];
    for (heads, dim, window, sinks) in shapes {
        for (first, tokens) in [(10, 1), (700, 1), (2047, 1), (1279, 5), (250, 30), (1990, 70)] {
            let case = Case::of(element, heads, (dim, dim), kind_of(tokens), (first, tokens));
            let few = Case { kept: Some(window), ..case };
            let variation = Variation::windowed(window, sinks);
            let kept = few.inputs(context)?;
            let tolerance = if dim > 256 { EXACT } else { case.tolerance() };
            outcome = outcome.worse(kept.check(context, &variation, None, tolerance)?);
            let all = case.inputs(context)?.run(context, &variation, None)?;
            let few = kept.run(context, &variation, None)?;
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            outcome = outcome.worse(Outcome::same(&bits(&few), &bits(&all)).at("a ring of blocks"));
        }
    }
    Ok(outcome)
}

/// Checks that results do not depend on the limit for the number of splits, apart from rounding.
fn splits(context: &Context) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (element, dim_k) in [(KvType::F16, 128), (KvType::F32, 128), (KvType::F16, 64)] {
        let kind = RowKind::Decode;
        let case = Case::of(element, (10, 2), (dim_k, dim_k), kind, (700, 2));
        let inputs = case.inputs(context)?;
        for variation in &Variation::all() {
            for splits in [1, 2, 3, 7, 11, 64] {
                let checked = inputs.check(context, variation, Some(splits), EXACT)?;
                outcome = outcome.worse(checked);
            }
        }
    }
    Ok(outcome)
}
