//! Attention of generated tokens that also finishes its inputs and rounds its results. Its results are bit-identical to
//! those of separate kernels.

use anyhow::Result;
use forebay_cuda::{
    AttentionInputs, AttentionScratch, Converted, DeviceAttention, DeviceMemory, DevicePtr,
    HeadInput, KvLayerShape, PassRows, Rotation, RoundedActivations,
};
use forebay_ops::{KvType, RowKind};

use super::attention_inputs::mixed;
use super::paged::{PagedCache, Rows};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-6;
/// Maximum number of positions.
const CAPACITY: usize = 704;

pub fn checks() -> Vec<Check> {
    let elements = [(KvType::F16, "f16"), (KvType::Q8_0, "q8_0"), (KvType::Q4_0, "q4_0")];
    let check = |(element, name): (KvType, &str)| {
        let run = move |context: &Context| all(context, element);
        Check::new(format!("attention with inputs {name}"), run)
    };
    let one = |(element, name): (KvType, &str)| {
        let run = move |context: &Context| one_sequence(context, element);
        Check::new(format!("attention after inputs {name}"), run)
    };
    elements.into_iter().map(check).chain(elements.into_iter().map(one)).collect()
}

#[derive(Clone, Copy, Debug)]
struct Case {
    element: KvType,
    heads: usize,
    kv_heads: usize,
    dim_k: usize,
    dim_v: usize,
    rotary_dim: usize,
    rotary_from: usize,
    interleaved: bool,
    bias: bool,
    norm: bool,
    norms_last: bool,
    sinks: bool,
    window: Option<usize>,
}

fn plain(element: KvType) -> Case {
    Case {
        element,
        heads: 32,
        kv_heads: 4,
        dim_k: 128,
        dim_v: 128,
        rotary_dim: 128,
        rotary_from: 0,
        interleaved: false,
        bias: false,
        norm: true,
        norms_last: false,
        sinks: false,
        window: None,
    }
}

fn all(context: &Context, element: KvType) -> Result<Outcome> {
    let plain = plain(element);
    let cases = [
        plain,
        Case { bias: true, norm: false, interleaved: true, ..plain },
        Case { heads: 5, kv_heads: 5, rotary_dim: 64, bias: true, sinks: true, ..plain },
        // More query heads share a key head than a block processes.
        Case { heads: 36, kv_heads: 2, dim_k: 64, dim_v: 64, rotary_dim: 32, ..plain },
        Case { dim_k: 96, dim_v: 96, rotary_dim: 96, window: Some(50), sinks: true, ..plain },
        Case { heads: 8, dim_k: 256, dim_v: 256, rotary_dim: 256, ..plain },
        Case { dim_k: 192, rotary_dim: 64, rotary_from: 128, norm: false, ..plain },
        Case { dim_k: 40, dim_v: 20, rotary_dim: 0, norm: false, ..plain },
        Case { norms_last: true, ..plain },
        Case { norms_last: true, dim_k: 96, dim_v: 96, rotary_dim: 64, bias: true, ..plain },
    ];
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    // Each position is that of another sequence.
    let passes: [&[usize]; 5] = [&[0], &[5, 300, 64], &[700], &[255, 63, 256, 0, 511], &[17, 16]];
    for case in cases {
        for positions in passes {
            for limit in [1, 4, 16] {
                let rows: Vec<(usize, usize)> = positions.iter().copied().enumerate().collect();
                let mut next = one(context, &case, &rows, limit)?;
                let words = format!("{case:?} positions {positions:?}, limit {limit}: ");
                next.place.insert_str(0, &words);
                outcome = outcome.worse(next);
            }
        }
    }
    Ok(outcome)
}

/// The numbers of a case on the device.
struct Numbers {
    /// Projections of the rows `[rows, heads, dim]`.
    q: Vec<f32>,
    k: DeviceMemory,
    v: DeviceMemory,
    /// Keys and values before the rows, of any sequence.
    keys: DeviceMemory,
    values: DeviceMemory,
    biases: DeviceMemory,
    norms: DeviceMemory,
    angles: DeviceMemory,
    sinks: DeviceMemory,
}

impl Case {
    fn shape(&self) -> KvLayerShape {
        let Case { element, kv_heads, dim_k, dim_v, .. } = *self;
        KvLayerShape::new(element, kv_heads, (dim_k, dim_v), CAPACITY)
    }

    fn numbers(&self, context: &Context, rows: usize) -> Result<Numbers> {
        let Case { heads, kv_heads, dim_k, dim_v, rotary_dim, .. } = *self;
        let mut random = Random::new((rows * dim_k + heads) as u64);
        let mut upload = |count: usize| context.upload(&random.gaussians(count));
        Ok(Numbers {
            k: upload(rows * kv_heads * dim_k)?,
            v: upload(rows * kv_heads * dim_v)?,
            keys: upload(CAPACITY * kv_heads * dim_k)?,
            values: upload(CAPACITY * kv_heads * dim_v)?,
            biases: upload(heads * dim_k)?,
            norms: upload(2 * dim_k)?,
            angles: upload(CAPACITY * rotary_dim.max(1))?,
            sinks: upload(heads)?,
            q: random.gaussians(rows * heads * dim_k),
        })
    }

    /// Returns a cache with the positions before the rows, each of which is given by its sequence and its position.
    fn cache(
        &self,
        context: &Context,
        numbers: &Numbers,
        rows: &[(usize, usize)],
    ) -> Result<PagedCache> {
        let shape = self.shape();
        let sequences = rows.iter().map(|row| row.0 + 1).max().unwrap_or(1);
        // A layer with a window keeps no more blocks than it needs.
        let ring = self.window.map(|window| shape.blocks_for_window(window, rows.len()));
        let cache = PagedCache::new(context, shape, sequences, ring)?;
        for sequence in 0..sequences {
            let of_sequence = rows.iter().filter(|row| row.0 == sequence).map(|row| row.1);
            let end = of_sequence.min().unwrap_or(0);
            cache.fill(context, sequence, 0..end, numbers.keys.ptr(), numbers.values.ptr())?;
        }
        Ok(cache)
    }

    /// Returns the inputs of rows from `first` on, whose queries are at `q`.
    fn inputs(&self, numbers: &Numbers, q: DevicePtr<f32>, first: usize) -> AttentionInputs {
        let Case { heads, kv_heads, dim_k, dim_v, rotary_dim, rotary_from, interleaved, .. } =
            *self;
        let optional = |wanted: bool, memory: &DeviceMemory, at: usize| {
            if wanted { memory.ptr::<f32>().offset(at) } else { DevicePtr::null() }
        };
        let rotation =
            Rotation { angles: numbers.angles.ptr(), rotary_dim, rotary_from, interleaved };
        let bias = optional(self.bias, &numbers.biases, 0);
        let input = |projected, norm| HeadInput { projected, bias, norm };
        let k = numbers.k.ptr::<f32>().offset(first * kv_heads * dim_k);
        let v = numbers.v.ptr::<f32>().offset(first * kv_heads * dim_v);
        AttentionInputs {
            q: input(q, optional(self.norm, &numbers.norms, 0)),
            k: input(k, optional(self.norm, &numbers.norms, dim_k)),
            key_norm_dims: [dim_k, 0],
            v: input(v, DevicePtr::null()),
            heads,
            norm_epsilon: EPSILON,
            norms_last: self.norms_last,
            mixed: mixed(self.element, (dim_k, self.dim_v)),
            rotation: (rotary_dim > 0).then_some(rotation),
        }
    }

    /// Computes attention of rows that end at `end` and whose queries are at `q`. Returns the results, and their
    /// rounded values if the kernel can round them.
    fn attend(
        &self,
        context: &Context,
        numbers: &Numbers,
        cache: &PagedCache,
        (q, rows): (DevicePtr<f32>, PassRows),
        inputs: Option<AttentionInputs>,
        (end, limit): (usize, usize),
    ) -> Result<(DeviceMemory, Option<Vec<u8>>)> {
        let (gpu, shape, heads) = (&context.gpu, self.shape(), self.heads);
        let splits = gpu.attention_splits_with(limit, &shape, end);
        let size = gpu.attention_scratch(&shape, heads, &rows, splits);
        let parts = context.poisoned(size.floats.max(1))?;
        let tickets = context.upload(&vec![0_u32; size.tickets.max(1)])?;
        let scratch = AttentionScratch { parts: parts.ptr(), tickets: tickets.ptr(), size };
        let width = heads * self.dim_v;
        let out = context.poisoned(rows.count * width)?;
        let (codes, scales) = RoundedActivations::bytes(rows.count, width.next_multiple_of(32));
        let memory = context.poisoned((codes + scales).div_ceil(4))?;
        let rounded = self.dim_v.is_multiple_of(32).then(|| rounded_at(&memory, codes));
        let what = DeviceAttention {
            q,
            out: out.ptr(),
            rows,
            heads,
            scale: 0.1,
            window: self.window,
            chunked: false,
            softcap: None,
            sinks: if self.sinks { numbers.sinks.ptr() } else { DevicePtr::null() },
            inputs,
            relative: None,
            chosen: None,
            also: rounded.map(Converted::Rounded),
        };
        gpu.attention(&what, &cache.layer(), splits, &scratch)?;
        let rounded = rounded.map(|_| gpu.download(memory.ptr(), codes + scales)).transpose()?;
        Ok((out, rounded))
    }
}

fn rounded_at(memory: &DeviceMemory, codes: usize) -> RoundedActivations {
    let scales = memory.ptr::<u8>().offset(codes).cast();
    RoundedActivations { codes: memory.ptr(), scales }
}

/// Compares attention of rows of different sequences, with and without its inputs.
fn one(context: &Context, case: &Case, rows: &[(usize, usize)], limit: usize) -> Result<Outcome> {
    let gpu = &context.gpu;
    let numbers = case.numbers(context, rows.len())?;
    let caches = [case.cache(context, &numbers, rows)?, case.cache(context, &numbers, rows)?];
    let places = Rows::new(context, RowKind::Decode, rows)?;
    let end = rows.iter().map(|row| row.1 + 1).max().unwrap_or(1);
    let q = [context.upload(&numbers.q)?, context.upload(&numbers.q)?];
    let inputs = [0, 1].map(|index: usize| case.inputs(&numbers, q[index].ptr(), 0));
    gpu.attention_inputs(&inputs[0], &caches[0].layer(), &places.pass())?;
    let on = (q[0].ptr(), places.pass());
    let (expected, _) = case.attend(context, &numbers, &caches[0], on, None, (end, limit))?;
    let on = (q[1].ptr(), places.pass());
    let fused = Some(inputs[1]);
    let (got, rounded) = case.attend(context, &numbers, &caches[1], on, fused, (end, limit))?;
    let width = case.heads * case.dim_v;
    let download = |memory: &DeviceMemory| gpu.download::<u32>(memory.ptr(), rows.len() * width);
    let mut outcome = Outcome::same(&download(&got)?, &download(&expected)?).at("results");
    if let Some(rounded) = rounded {
        let (codes, scales) = RoundedActivations::bytes(rows.len(), width);
        let memory = context.poisoned((codes + scales).div_ceil(4))?;
        gpu.quantize_q8(expected.ptr(), rounded_at(&memory, codes), rows.len(), width)?;
        let expected: Vec<u8> = gpu.download(memory.ptr(), codes + scales)?;
        outcome = outcome.worse(Outcome::same(&rounded, &expected).at("rounded"));
    }
    let cache = Outcome::same(&caches[1].bytes(gpu)?, &caches[0].bytes(gpu)?);
    Ok(outcome.worse(cache.at("cache")))
}

/// Compares several rows of one sequence in one pass, each of which sees those before it, with the same rows one after
/// another.
fn one_sequence(context: &Context, element: KvType) -> Result<Outcome> {
    let gpu = &context.gpu;
    let plain = plain(element);
    let cases = [
        Case { heads: 4, kv_heads: 2, dim_k: 64, dim_v: 64, rotary_dim: 64, ..plain },
        Case { heads: 10, kv_heads: 1, window: Some(18), sinks: true, ..plain },
    ];
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for case in cases {
        for first in [0, 13, 254, 509] {
            let rows: Vec<(usize, usize)> = (first..first + 5).map(|at| (0, at)).collect();
            let numbers = case.numbers(context, rows.len())?;
            let places = Rows::new(context, RowKind::Decode, &rows)?;
            let width = case.heads * case.dim_v;
            let cache = case.cache(context, &numbers, &rows)?;
            let q = context.upload(&numbers.q)?;
            let inputs = case.inputs(&numbers, q.ptr(), 0);
            gpu.attention_inputs(&inputs, &cache.layer(), &places.pass())?;
            let on = (q.ptr(), places.pass());
            let ends = (first + rows.len(), 8);
            let (together, _) = case.attend(context, &numbers, &cache, on, None, ends)?;
            let together: Vec<u32> = gpu.download(together.ptr(), rows.len() * width)?;

            let (cache, q) = (case.cache(context, &numbers, &rows)?, context.upload(&numbers.q)?);
            for row in 0..rows.len() {
                let own = q.ptr::<f32>().offset(row * case.heads * case.dim_k);
                let inputs = Some(case.inputs(&numbers, own, row));
                let on = (own, places.part(row..row + 1));
                let ends = (first + row + 1, 8);
                let (alone, _) = case.attend(context, &numbers, &cache, on, inputs, ends)?;
                let alone: Vec<u32> = gpu.download(alone.ptr(), width)?;
                let same = Outcome::same(&together[row * width..(row + 1) * width], &alone);
                outcome = outcome.worse(same.at(&format!("{case:?}, row {row} at {first}")));
            }
        }
    }
    Ok(outcome)
}
