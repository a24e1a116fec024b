//! Compares biases, norms of heads, rotation and storing in the cache with the CPU.

use anyhow::Result;
use forebay_compute::{KvCache, KvLayer, KvShape, RopeConfig, RopeLayout, RopeScaling, RopeTable};
use forebay_cuda::{AttentionInputs, DevicePtr, HeadInput, KvLayerShape, Rotation};
use forebay_ops::{KV_BLOCK, KvType, RowKind};
use half::f16;

use super::paged::{PagedCache, Rows};
use crate::bench::{Bench, Measured, median_seconds};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-6;

pub fn checks() -> Vec<Check> {
    let elements = [
        (KvType::F16, "f16"),
        (KvType::F32, "f32"),
        (KvType::Q8_0, "q8_0"),
        (KvType::Q4_0, "q4_0"),
    ];
    let check = |(element, name): (KvType, &str)| {
        Check::new(format!("attention_inputs {name}"), move |context: &Context| {
            all(context, element)
        })
    };
    let mixing = |(element, name): (KvType, &str)| {
        Check::new(format!("mix_sums {name}"), move |context: &Context| sums(context, element))
    };
    let rounding = elements.into_iter().filter(|(element, _)| element.rounds());
    elements.into_iter().map(check).chain(rounding.map(mixing)).collect()
}

pub fn benches() -> Vec<Bench> {
    [1, 512]
        .into_iter()
        .map(|tokens| {
            Bench::new(format!("attention_inputs f16 {tokens} tokens 32/8x128"), move |context| {
                measure(context, tokens)
            })
        })
        .collect()
}

#[derive(Clone, Copy, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    dim_k: usize,
    dim_v: usize,
    /// True if the first `dim_v` elements of keys are also the values. They are normed; queries are not.
    latent: bool,
    /// True if the other elements of such keys are normed, too.
    rest_normed: bool,
    rotary_dim: usize,
    rotary_from: usize,
    layout: RopeLayout,
    bias: bool,
    norm: bool,
    /// True if norms follow the rotation.
    norms_last: bool,
}

fn all(context: &Context, element: KvType) -> Result<Outcome> {
    let neox = Case {
        heads: 8,
        kv_heads: 2,
        dim_k: 128,
        dim_v: 128,
        latent: false,
        rest_normed: false,
        rotary_dim: 128,
        rotary_from: 0,
        layout: RopeLayout::Neox,
        bias: false,
        norm: true,
        norms_last: false,
    };
    let layout = RopeLayout::Interleaved;
    let latent = Case {
        heads: 3,
        kv_heads: 1,
        dim_k: 576,
        dim_v: 512,
        latent: true,
        rotary_dim: 64,
        rotary_from: 512,
        layout,
        ..neox
    };
    let cases = [
        neox,
        Case { layout, bias: true, norm: false, ..neox },
        Case { dim_k: 80, dim_v: 64, rotary_dim: 32, bias: true, ..neox },
        Case { heads: 5, kv_heads: 5, dim_k: 33, dim_v: 17, rotary_dim: 20, layout, ..neox },
        Case { heads: 3, kv_heads: 1, dim_k: 576, dim_v: 512, rotary_dim: 64, ..neox },
        latent,
        Case { heads: 4, dim_k: 40, dim_v: 32, rotary_dim: 8, rotary_from: 32, ..latent },
        Case { rest_normed: true, ..latent },
        Case { rest_normed: true, dim_k: 1088, dim_v: 1024, rotary_from: 1024, ..latent },
        Case { dim_k: 80, dim_v: 64, rotary_dim: 32, rotary_from: 48, ..neox },
        Case { dim_k: 64, dim_v: 64, rotary_dim: 0, norm: false, ..neox },
        Case { norms_last: true, ..neox },
        Case { norms_last: true, bias: true, dim_k: 80, dim_v: 64, rotary_dim: 32, ..neox },
        Case {
            norms_last: true,
            heads: 5,
            kv_heads: 5,
            dim_k: 40,
            dim_v: 17,
            layout,
            rotary_dim: 40,
            ..neox
        },
        Case { norms_last: true, dim_k: 64, dim_v: 64, rotary_dim: 0, ..neox },
    ];
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for case in cases {
        for (first, tokens) in [(0, 1), (9, 1), (4, 7)] {
            let mut next = one(context, element, &case, first, tokens)?;
            next.place.insert_str(0, &format!("{case:?} {tokens} tokens at {first}: "));
            outcome = outcome.worse(next);
        }
    }
    Ok(outcome)
}

/// A projection, and the result that the CPU computes from it.
struct Projection {
    projected: Vec<f32>,
    bias: Vec<f32>,
    norm: Vec<f32>,
    expected: Vec<f32>,
}

impl Projection {
    fn new(context: &Context, case: &Case, heads: usize, dim: usize, tokens: usize) -> Projection {
        let mut random = Random::new((heads * dim + tokens) as u64);
        let projected = random.gaussians(tokens * heads * dim);
        let (bias, norm) = (random.gaussians(heads * dim), random.gaussians(dim));
        let mut expected = projected.clone();
        if case.bias {
            context.cpu.add_bias_rows(&mut expected, &bias);
        }
        Projection { projected, bias, norm, expected }
    }

    /// Norms the first elements of each head of the expected result and those behind them, as many as `norm_dims` says, and rotates
    /// it.
    fn finish(
        &mut self,
        context: &Context,
        (norm_dims, norms_last): ([usize; 2], bool),
        rope: Option<&RopeTable>,
        first: usize,
    ) {
        let dim = self.norm.len();
        let (first_norm, rest_norm) = self.norm[..norm_dims.iter().sum()].split_at(norm_dims[0]);
        let normed = |heads: &mut [f32]| {
            for (first, norm) in [(0, first_norm), (norm_dims[0], rest_norm)] {
                if !norm.is_empty() {
                    context.cpu.rms_norm_columns(heads, dim, first, norm, EPSILON);
                }
            }
        };
        if !norms_last {
            normed(&mut self.expected);
        }
        if let Some(rope) = rope {
            let tokens = self.projected.len() / self.bias.len();
            let positions: Vec<u32> = (first as u32..(first + tokens) as u32).collect();
            context.cpu.rope(&mut self.expected, dim, &positions, rope);
        }
        if norms_last {
            normed(&mut self.expected);
        }
    }
}

fn rope(case: &Case, context: usize) -> Result<Option<RopeTable>> {
    if case.rotary_dim == 0 {
        return Ok(None);
    }
    Ok(Some(RopeTable::new(&RopeConfig {
        rotary_dim: case.rotary_dim,
        rotary_from: case.rotary_from,
        theta: 10_000.0,
        layout: case.layout,
        scaling: RopeScaling::None,
        frequency_factors: None,
        context,
    })?))
}

fn one(
    context: &Context,
    element: KvType,
    case: &Case,
    first: usize,
    tokens: usize,
) -> Result<Outcome> {
    let gpu = &context.gpu;
    // With several tokens, the cache has one position fewer than they need, so the last one must be skipped.
    let (capacity, spare) = if tokens > 1 { (first + tokens - 1, 1) } else { (first + 4, 0) };
    let Case { heads, kv_heads, dim_k, dim_v, .. } = *case;
    let table = rope(case, capacity + spare)?;
    let mut q = Projection::new(context, case, heads, dim_k, tokens);
    let mut k = Projection::new(context, case, kv_heads, dim_k, tokens);
    let mut v = Projection::new(context, case, kv_heads, dim_v, tokens);
    let if_normed = |dims: [usize; 2]| if case.norm { dims } else { [0; 2] };
    let of_q = if case.latent { [0; 2] } else { if_normed([dim_k, 0]) };
    q.finish(context, (of_q, case.norms_last), table.as_ref(), first);
    let key_norm_dims = match (case.latent, case.rest_normed) {
        (true, true) => [dim_v, dim_k - dim_v],
        (true, false) => [dim_v, 0],
        (false, _) => [dim_k, 0],
    };
    k.finish(context, (if_normed(key_norm_dims), case.norms_last), table.as_ref(), first);

    let mixed = mixed(element, (dim_k, dim_v));
    for of in [&mut q, &mut k, &mut v] {
        context.cpu.mix(&mut of.expected, mixed);
    }

    let shape = KvLayerShape::new(element, kv_heads, (dim_k, dim_v), capacity);
    let shape = KvLayerShape { values_in_keys: case.latent, ..shape };
    // The tokens are of the second of two sequences.
    let cache = PagedCache::new(context, shape, 2, None)?;
    let rows = Rows::run(context, RowKind::Prompt, 1, first..first + tokens)?;
    let angles = match &table {
        Some(table) => Some(context.upload(table.angles())?),
        None => None,
    };
    let mut kept = Vec::new();
    let mut input = |projection: &Projection, norm: bool| -> Result<HeadInput> {
        let memory = [&projection.projected, &projection.bias, &projection.norm]
            .map(|values| context.upload(values));
        let [projected, bias, weight] = memory;
        let (projected, bias, weight) = (projected?, bias?, weight?);
        let or_none = |wanted: bool, pointer| if wanted { pointer } else { DevicePtr::null() };
        let input = HeadInput {
            projected: projected.ptr(),
            bias: or_none(case.bias, bias.ptr()),
            norm: or_none(norm, weight.ptr()),
        };
        kept.extend([projected, bias, weight]);
        Ok(input)
    };
    let inputs = AttentionInputs {
        q: input(&q, case.norm && !case.latent)?,
        k: input(&k, case.norm)?,
        key_norm_dims,
        v: if case.latent { HeadInput::none() } else { input(&v, false)? },
        heads,
        norm_epsilon: EPSILON,
        norms_last: case.norms_last,
        mixed,
        rotation: angles.as_ref().map(|angles| Rotation {
            angles: angles.ptr(),
            rotary_dim: case.rotary_dim,
            rotary_from: case.rotary_from,
            interleaved: case.layout == RopeLayout::Interleaved,
        }),
    };
    gpu.attention_inputs(&inputs, &cache.layer(), &rows.pass())?;

    // Without a norm, the GPU rounds exactly as the CPU does. With one, sums differ in the last bits.
    let tolerance = if case.norm { 3e-6 } else { 0.0 };
    let written = tokens - spare;
    let got = gpu.download(inputs.q.projected, written * heads * dim_k)?;
    let mut outcome = compare(&got, &q.expected[..got.len()], tolerance, "q");
    let bytes = &cache.bytes(gpu)?;
    let planes = [("keys", 0, &k, dim_k), ("values", shape.key_bytes() as usize, &v, dim_v)];
    for (name, offset, projection, dim) in planes.into_iter().take(if case.latent { 1 } else { 2 })
    {
        let cache = Plane { bytes, cache: &cache, offset, dim };
        for (at, row) in projection.expected.chunks(dim).take(written * kv_heads).enumerate() {
            let (token, head) = (at / kv_heads, at % kv_heads);
            let got = cache.row(1, head, first + token);
            // The tolerance is half a step of the type, or of the block's scale.
            let largest = row.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            let step = match element {
                KvType::F32 => tolerance,
                KvType::F16 => 5e-4,
                KvType::Q8_0 => 4.5e-3 * f64::from(largest),
                // A value at the end of the range without its own code is a whole step away.
                KvType::Q4_0 => 0.13 * f64::from(largest),
            };
            let label = format!("{name} of token {token}, head {head}");
            outcome = outcome.worse(compare(&got[..dim], row, step, &label));
            // The same input must be stored as the same bits on both devices.
            if tolerance == 0.0 {
                let kept = kept_on_cpu(context, element, row)?;
                outcome = outcome.worse(compare(&got[..dim], &kept, 0.0, &label));
            }
            // The kernels read the padding, so it must be zero.
            outcome = outcome.worse(compare(&got[dim..], &vec![0.0; got.len() - dim], 0.0, &label));
        }
        for head in 0..kv_heads {
            let others = (0..first).chain(first + written..capacity).map(|at| (1, at));
            for (sequence, position) in others.chain((0..capacity).map(|at| (0, at))) {
                let row = cache.row(sequence, head, position);
                let untouched = row.iter().all(|x| x.is_nan());
                anyhow::ensure!(untouched, "{name} of position {position}, head {head}: {row:?}");
            }
        }
    }
    Ok(outcome)
}

/// Returns the number of elements that are mixed before they are stored.
pub fn mixed(element: KvType, (head_dim_k, head_dim_v): (usize, usize)) -> usize {
    let shape = KvShape { kv_heads: 1, head_dim_k, head_dim_v, values_in_keys: false };
    shape.mixed(element)
}

/// Compares sums that are mixed with the CPU's.
fn sums(context: &Context, element: KvType) -> Result<Outcome> {
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (mixed, count) in [(2, 6), (16, 48), (32, 32 * 33), (64, 64), (64, 64 * 1000)] {
        let mut expected = Random::new(3).gaussians(count);
        let sums = context.upload(&expected)?;
        context.gpu.mix_sums(sums.ptr(), count, mixed, element)?;
        context.cpu.mix(&mut expected, mixed);
        let got: Vec<f32> = context.gpu.download(sums.ptr(), count)?;
        outcome = outcome.worse(Outcome::same(&got, &expected));
    }
    Ok(outcome)
}

/// Returns a row as the CPU's cache stores it.
fn kept_on_cpu(context: &Context, element: KvType, row: &[f32]) -> Result<Vec<f32>> {
    let shape = KvShape { kv_heads: 1, head_dim_k: row.len(), head_dim_v: 1, values_in_keys: true };
    let layer = KvLayer::new(shape, 0);
    let mut cache = KvCache::new(&[layer], &[2], element)?;
    cache.write(&context.cpu, 0, &[1], 0, row, &[]);
    Ok(cache.key(&context.cpu, 0, &[1], 0, 0))
}

/// Compares with a tolerance relative to each number, or to 1 if the number is smaller.
fn compare(got: &[f32], expected: &[f32], tolerance: f64, label: &str) -> Outcome {
    if tolerance == 0.0 {
        let mut outcome = Outcome::same(got, expected);
        outcome.place.insert_str(0, &format!("{label}: "));
        return outcome;
    }
    let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
    let mut outcome = Outcome::of(got, &expected, |i| expected[i].abs().max(1.0), tolerance);
    outcome.place.insert_str(0, &format!("{label}: "));
    outcome
}

/// The keys or the values of a downloaded cache.
pub struct Plane<'a> {
    pub bytes: &'a [u8],
    pub cache: &'a PagedCache,
    /// Offset of the plane in the layer's part of a block.
    pub offset: usize,
    pub dim: usize,
}

impl Plane<'_> {
    /// Returns a row with its padding. Elements that were never written are NaN.
    pub fn row(&self, sequence: usize, head: usize, position: usize) -> Vec<f32> {
        let row = head * KV_BLOCK + position % KV_BLOCK;
        let bytes = &self.bytes[self.cache.block_at(sequence, position) + self.offset..];
        let shape = &self.cache.shape;
        let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        match shape.element {
            KvType::F16 => {
                let stride = self.dim.next_multiple_of(8);
                (0..stride).map(|i| half(2 * (row * stride + i))).collect()
            }
            KvType::F32 => {
                let stride = self.dim.next_multiple_of(8);
                let value = |i: usize| {
                    let at = 4 * (row * stride + i);
                    f32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
                };
                (0..stride).map(value).collect()
            }
            KvType::Q8_0 => {
                let stride = self.dim.next_multiple_of(32);
                let scales = shape.kv_heads * KV_BLOCK * stride;
                let value = |i: usize| {
                    let scale = half(scales + 2 * ((row * stride + i) / 32));
                    scale * f32::from(bytes[row * stride + i] as i8)
                };
                (0..stride).map(value).collect()
            }
            KvType::Q4_0 => {
                let stride = self.dim.next_multiple_of(32);
                let scales = shape.kv_heads * KV_BLOCK * stride / 2;
                let value = |i: usize| {
                    let at = row * stride + i;
                    let code = bytes[at / 2] >> (at % 2 * 4) & 15;
                    half(scales + 2 * (at / 32)) * (f32::from(code) - 8.0)
                };
                (0..stride).map(value).collect()
            }
        }
    }
}

fn measure(context: &Context, tokens: usize) -> Result<Measured> {
    let (heads, kv_heads, dim, capacity) = (32, 8, 128, 4096);
    let case = Case {
        heads,
        kv_heads,
        dim_k: dim,
        dim_v: dim,
        latent: false,
        rest_normed: false,
        rotary_dim: dim,
        rotary_from: 0,
        layout: RopeLayout::Neox,
        bias: false,
        norm: true,
        norms_last: false,
    };
    let table = rope(&case, capacity)?.expect("elements turn");
    let angles = context.upload(table.angles())?;
    let mut random = Random::new(4);
    let q = context.upload(&random.gaussians(tokens * heads * dim))?;
    let k = context.upload(&random.gaussians(tokens * kv_heads * dim))?;
    let v = context.upload(&random.gaussians(tokens * kv_heads * dim))?;
    let norm = context.upload(&random.gaussians(dim))?;
    let shape = KvLayerShape::new(KvType::F16, kv_heads, (dim, dim), capacity);
    let cache = PagedCache::new(context, shape, 1, None)?;
    let rows = Rows::run(context, RowKind::Prompt, 0, 0..tokens)?;
    let (layer, pass) = (cache.layer(), rows.pass());
    let input = |projected| HeadInput { norm: norm.ptr(), ..HeadInput::plain(projected) };
    let inputs = AttentionInputs {
        q: input(q.ptr()),
        k: input(k.ptr()),
        key_norm_dims: [dim, 0],
        v: HeadInput::plain(v.ptr()),
        heads,
        norm_epsilon: EPSILON,
        norms_last: false,
        mixed: 1,
        rotation: Some(Rotation {
            angles: angles.ptr(),
            rotary_dim: dim,
            rotary_from: 0,
            interleaved: false,
        }),
    };
    let seconds =
        median_seconds(context, |_| context.gpu.attention_inputs(&inputs, &layer, &pass))?;
    let bytes = tokens * dim * (heads * 8 + kv_heads * 2 * 6);
    Ok(Measured { seconds, bytes: bytes as f64, flops: 0.0 })
}
