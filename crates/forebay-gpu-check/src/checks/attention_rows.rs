//! Checks that a row's attention has the same bits whatever other rows are in the pass, and wherever a prompt is cut.

use anyhow::Result;
use forebay_cuda::{
    AttentionScratch, Converted, DeviceAttention, DeviceKvLayer, DeviceMemory, DevicePtr,
    KvLayerShape, PassRows, RelativeBiases, converts_outputs,
};
use forebay_ops::{ChosenKeys, KvType, RowKind};

use super::attention::Variation;
use super::halves::Halves;
use super::paged::{PagedCache, Rows};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

/// One call of attention on inputs that are already in the cache.
#[derive(Clone, Copy)]
pub struct Call {
    pub q: DevicePtr<f32>,
    pub rows: PassRows,
    pub heads: usize,
    /// Largest end of a row's context.
    pub end: usize,
    pub scale: f32,
    pub variation: Variation,
    /// Null if there are none.
    pub sinks: DevicePtr<f32>,
    pub relative: Option<RelativeBiases>,
    pub chosen: Option<ChosenKeys<DevicePtr<u32>>>,
    /// Limit of the number of splits of generated tokens, or `None` for that of the GPU.
    pub limit: Option<usize>,
}

/// Runs a call, with memory that is poisoned before, and returns the outputs.
pub fn attend(context: &Context, call: &Call, layer: &DeviceKvLayer) -> Result<Vec<f32>> {
    let (gpu, shape, Call { rows, heads, end, .. }) = (&context.gpu, &layer.shape, *call);
    let splits = match call.limit {
        Some(limit) => gpu.attention_splits_with(limit, shape, end),
        None => gpu.attention_splits(shape, heads, rows.kind, end),
    };
    let size = gpu.attention_scratch(shape, heads, &rows, splits);
    let parts = context.poisoned(size.floats.max(1))?;
    let tickets = context.upload(&vec![0_u32; size.tickets.max(1)])?;
    let scratch = AttentionScratch { parts: parts.ptr(), tickets: tickets.ptr(), size };
    let count = rows.count * heads * shape.dim_v;
    let out = context.poisoned(count)?;
    // Prompts in parts also get halves.
    let width = heads * shape.dim_v;
    let converts = rows.kind == RowKind::Prompt && converts_outputs(shape, &rows);
    let halves = Halves::new(context, rows.count, width)?;
    let what = DeviceAttention {
        q: call.q,
        out: out.ptr(),
        rows,
        heads,
        scale: call.scale,
        window: call.variation.window,
        chunked: call.variation.chunked,
        softcap: call.variation.softcap,
        sinks: call.sinks,
        inputs: None,
        relative: call.relative,
        chosen: call.chosen,
        also: converts.then(|| Converted::Halves(halves.checked())),
    };
    gpu.attention(&what, layer, splits, &scratch)?;
    if converts {
        let same = halves.compare(context, out.ptr())?;
        anyhow::ensure!(same.passed(), "halves: {}", same.place);
    }
    let left = gpu.download::<u32>(scratch.tickets, size.tickets)?;
    anyhow::ensure!(left.iter().all(|&ticket| ticket == 0), "tickets stay: {left:?}");
    Ok(gpu.download(out.ptr(), count)?)
}

/// Positions of the generated tokens of different sequences: around the ends of blocks, tiles and parts.
const POSITIONS: [usize; 8] = [300, 0, 15, 600, 16, 255, 63, 256];
/// Numbers of rows in a pass.
const BATCHES: [usize; 3] = [2, 3, 8];
/// First position and number of tokens of the prompts of different sequences. Alone, the parts of their contexts are computed
/// by blocks of threads of their own; together, there are too many rows for that. One begins before a position at which parts
/// become longer, and ends after it.
const PROMPTS: [(usize, usize); 6] = [(0, 70), (2045, 5), (15, 1), (63, 66), (0, 1), (250, 9)];
/// Length of the prompt, and where it is cut in different runs.
const PROMPT: usize = 300;
const CUTS: [&[usize]; 4] =
    [&[1], &[64, 128, 290], &[7, 8, 72, 199, 299], &[100, 103, 170, 250, 270]];

/// Heads and their elements, with values in keys or not.
#[derive(Clone, Copy, Debug)]
struct Form {
    heads: usize,
    kv_heads: usize,
    dim_k: usize,
    dim_v: usize,
    latent: bool,
}

pub fn checks() -> Vec<Check> {
    let form =
        |heads, kv_heads, dim| Form { heads, kv_heads, dim_k: dim, dim_v: dim, latent: false };
    let latent = |heads| Form { dim_k: 576, dim_v: 512, latent: true, ..form(heads, 1, 0) };
    // The groups have fewer and more query heads than a block of the decode kernel. Every length is of another module.
    let forms = [form(4, 2, 64), form(10, 1, 96), form(3, 3, 128), form(4, 1, 256), latent(20)];
    let elements = [
        (KvType::F16, "f16"),
        (KvType::Q8_0, "q8_0"),
        (KvType::Q4_0, "q4_0"),
        (KvType::F32, "f32"),
    ];
    let mut checks = Vec::new();
    for (element, name) in elements {
        for form in forms {
            let Form { dim_k, dim_v, .. } = form;
            let label = |what: &str| format!("attention {what} {name} {dim_k}/{dim_v}");
            checks.push(Check::new(label("rows"), move |context: &Context| {
                rows(context, element, form)
            }));
            // A prompt of few latent heads has several tokens in a block, and takes less time.
            let form = if form.latent { latent(5) } else { form };
            checks.push(Check::new(label("cuts"), move |context: &Context| {
                cuts(context, element, form)
            }));
            checks.push(Check::new(label("prompts together"), move |context: &Context| {
                prompts(context, element, form)
            }));
        }
    }
    checks
}

fn variations() -> [Variation; 4] {
    let plain = Variation::plain();
    [
        plain,
        // The largest score of two is often so far below 0 that a careless difference of scores is not 0.
        Variation { window: Some(2), sinks: true, ..plain },
        Variation { window: Some(100), softcap: Some(30.0), ..plain },
        Variation { softcap: Some(5.0), sinks: true, ..plain },
    ]
}

/// Random queries, keys, values and sinks on the device.
struct Numbers {
    q: DeviceMemory,
    keys: DeviceMemory,
    values: DeviceMemory,
    sinks: DeviceMemory,
}

impl Form {
    fn shape(&self, element: KvType, context: usize) -> KvLayerShape {
        let Form { kv_heads, dim_k, dim_v, latent, .. } = *self;
        let shape = KvLayerShape::new(element, kv_heads, (dim_k, dim_v), context);
        KvLayerShape { values_in_keys: latent, ..shape }
    }

    fn numbers(&self, context: &Context, rows: usize, positions: usize) -> Result<Numbers> {
        let mut random = Random::new((rows * 31 + self.dim_k) as u64);
        Ok(Numbers {
            q: context.upload(&random.gaussians(rows * self.heads * self.dim_k))?,
            keys: context.upload(&random.gaussians(positions * self.kv_heads * self.dim_k))?,
            values: context.upload(&random.gaussians(positions * self.kv_heads * self.dim_v))?,
            sinks: context.upload(&random.gaussians(self.heads))?,
        })
    }

    fn call(&self, numbers: &Numbers, rows: PassRows, end: usize, variation: Variation) -> Call {
        let sinks = if variation.sinks { numbers.sinks.ptr() } else { DevicePtr::null() };
        let (q, heads) = (numbers.q.ptr(), self.heads);
        // More splits than an emulated GPU has a use for.
        let limit = (rows.kind == RowKind::Decode).then_some(24);
        Call {
            q,
            rows,
            heads,
            end,
            scale: 0.15,
            variation,
            sinks,
            relative: None,
            chosen: None,
            limit,
        }
    }
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Runs generated tokens of different sequences alone and together.
fn rows(context: &Context, element: KvType, form: Form) -> Result<Outcome> {
    let most = POSITIONS.into_iter().max().unwrap_or_default() + 1;
    let numbers = form.numbers(context, POSITIONS.len(), most)?;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for variation in variations() {
        let shape = form.shape(element, 1000);
        let ring = variation.window.map(|window| shape.blocks_for_window(window, 1));
        let cache = PagedCache::new(context, shape, POSITIONS.len(), ring)?;
        // Every sequence has a part of the same keys, from another one on.
        for (sequence, position) in POSITIONS.into_iter().enumerate() {
            let from = most - 1 - position;
            let keys = numbers.keys.ptr::<f32>().offset(from * form.kv_heads * form.dim_k);
            let values = numbers.values.ptr::<f32>().offset(from * form.kv_heads * form.dim_v);
            cache.fill(context, sequence, 0..position + 1, keys, values)?;
        }
        let places: Vec<(usize, usize)> = POSITIONS.into_iter().enumerate().collect();
        let all = Rows::new(context, RowKind::Decode, &places)?;
        let q_width = form.heads * form.dim_k;
        let run = |from: usize, to: usize| {
            let end = POSITIONS[from..to].iter().max().copied().unwrap_or_default() + 1;
            let mut call = form.call(&numbers, all.part(from..to), end, variation);
            call.q = call.q.offset(from * q_width);
            attend(context, &call, &cache.layer())
        };
        let alone: Vec<f32> =
            (0..POSITIONS.len()).map(|row| run(row, row + 1)).collect::<Result<Vec<_>>>()?.concat();
        anyhow::ensure!(alone.iter().all(|x| x.is_finite()), "not finite: {form:?} {variation:?}");
        let width = form.heads * form.dim_v;
        for batch in BATCHES {
            for from in (0..POSITIONS.len()).step_by(batch) {
                let to = (from + batch).min(POSITIONS.len());
                let same =
                    Outcome::same(&bits(&run(from, to)?), &bits(&alone[from * width..to * width]));
                let label = format!("{form:?} {variation:?}, rows {from}..{to} together");
                outcome = outcome.worse(same.at(&label));
            }
        }
    }
    Ok(outcome)
}

/// Runs prompts of different sequences alone and together.
fn prompts(context: &Context, element: KvType, form: Form) -> Result<Outcome> {
    let most = PROMPTS.into_iter().map(|(from, count)| from + count).max().unwrap_or_default();
    let count = PROMPTS.into_iter().map(|(_, count)| count).sum();
    let numbers = form.numbers(context, count, most)?;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for variation in variations() {
        let shape = form.shape(element, most + 9);
        let longest = PROMPTS.into_iter().map(|(_, count)| count).max().unwrap_or(1);
        let ring = variation.window.map(|window| shape.blocks_for_window(window, longest));
        let cache = PagedCache::new(context, shape, PROMPTS.len(), ring)?;
        // Every sequence has a part of the same keys, from another one on.
        for (sequence, (from, count)) in PROMPTS.into_iter().enumerate() {
            let first = most - from - count;
            let keys = numbers.keys.ptr::<f32>().offset(first * form.kv_heads * form.dim_k);
            let values = numbers.values.ptr::<f32>().offset(first * form.kv_heads * form.dim_v);
            cache.fill(context, sequence, 0..from + count, keys, values)?;
        }
        let run = |sequences: std::ops::Range<usize>| -> Result<Vec<f32>> {
            let before = PROMPTS[..sequences.start].iter().map(|(_, count)| count).sum::<usize>();
            let places: Vec<(usize, usize)> = sequences
                .flat_map(|sequence| {
                    let (from, count) = PROMPTS[sequence];
                    (from..from + count).map(move |position| (sequence, position))
                })
                .collect();
            let rows = Rows::new(context, RowKind::Prompt, &places)?;
            let tiles = rows.tiles(context, &shape, form.heads)?;
            let pass = PassRows { tiles: tiles.on_device(), ..rows.pass() };
            let mut call = form.call(&numbers, pass, most, variation);
            call.q = call.q.offset(before * form.heads * form.dim_k);
            attend(context, &call, &cache.layer())
        };
        let each = (0..PROMPTS.len()).map(|sequence| run(sequence..sequence + 1));
        let alone = each.collect::<Result<Vec<_>>>()?.concat();
        anyhow::ensure!(alone.iter().all(|x| x.is_finite()), "not finite: {form:?} {variation:?}");
        let same = Outcome::same(&bits(&run(0..PROMPTS.len())?), &bits(&alone));
        outcome = outcome.worse(same.at(&format!("{form:?} {variation:?}")));
    }
    Ok(outcome)
}

/// Runs a prompt at once and in several batches.
fn cuts(context: &Context, element: KvType, form: Form) -> Result<Outcome> {
    let numbers = form.numbers(context, PROMPT, PROMPT)?;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for variation in variations() {
        let shape = form.shape(element, PROMPT + 9);
        let run = |cuts: &[usize]| -> Result<Vec<f32>> {
            let ends: Vec<usize> = cuts.iter().copied().chain([PROMPT]).collect();
            let starts = [0].into_iter().chain(cuts.iter().copied());
            let spans: Vec<(usize, usize)> = starts.zip(ends).collect();
            let longest = spans.iter().map(|(from, to)| to - from).max().unwrap_or(1);
            let ring = variation.window.map(|window| shape.blocks_for_window(window, longest));
            let cache = PagedCache::new(context, shape, 1, ring)?;
            let mut out = Vec::new();
            for (from, to) in spans {
                let keys = numbers.keys.ptr::<f32>().offset(from * form.kv_heads * form.dim_k);
                let values = numbers.values.ptr::<f32>().offset(from * form.kv_heads * form.dim_v);
                cache.fill(context, 0, from..to, keys, values)?;
                let rows = Rows::run(context, RowKind::Prompt, 0, from..to)?;
                let tiles = rows.tiles(context, &shape, form.heads)?;
                let pass = PassRows { tiles: tiles.on_device(), ..rows.pass() };
                let mut call = form.call(&numbers, pass, to, variation);
                call.q = call.q.offset(from * form.heads * form.dim_k);
                out.extend(attend(context, &call, &cache.layer())?);
            }
            Ok(out)
        };
        let whole = run(&[])?;
        anyhow::ensure!(whole.iter().all(|x| x.is_finite()), "not finite: {form:?} {variation:?}");
        for cuts in CUTS {
            let same = Outcome::same(&bits(&run(cuts)?), &bits(&whole));
            outcome = outcome.worse(same.at(&format!("{form:?} {variation:?}, cut at {cuts:?}")));
        }
    }
    Ok(outcome)
}
