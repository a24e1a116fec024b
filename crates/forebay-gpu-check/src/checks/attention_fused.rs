//! A single token's attention that also finishes its inputs and rounds its results. Its results are bit-identical to
//! those of separate kernels.

use anyhow::Result;
use forebay_cuda::{
    Attention, AttentionInputs, AttentionScratch, AttentionScratchSize, DeviceMemory, DevicePtr,
    HeadInput, KvElement, KvLayer, KvLayerShape, Rotation, RoundedActivations,
};

use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const EPSILON: f32 = 1e-6;

pub fn checks() -> Vec<Check> {
    let elements = [(KvElement::F16, "f16"), (KvElement::Q8_0, "q8_0"), (KvElement::Q4_0, "q4_0")];
    let check = |(element, name): (KvElement, &str)| {
        let run = move |context: &Context| all(context, element);
        Check::new(format!("attention of one token at once {name}"), run)
    };
    elements.into_iter().map(check).collect()
}

#[derive(Clone, Copy, Debug)]
struct Case {
    element: KvElement,
    heads: usize,
    kv_heads: usize,
    dim_k: usize,
    dim_v: usize,
    rotary_dim: usize,
    rotary_from: usize,
    interleaved: bool,
    bias: bool,
    norm: bool,
    sinks: bool,
    window: Option<usize>,
}

fn all(context: &Context, element: KvElement) -> Result<Outcome> {
    let plain = Case {
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
        sinks: false,
        window: None,
    };
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
    ];
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for case in cases {
        for position in [0, 5, 63, 64, 255, 300, 700] {
            for splits in [1, 4, 16] {
                let mut next = one(context, &case, position, splits)?;
                let words = format!("{case:?} position {position}, {splits} splits: ");
                next.place.insert_str(0, &words);
                outcome = outcome.worse(next);
            }
        }
    }
    Ok(outcome)
}

/// A cache that holds `position` tokens.
struct Cache {
    keys: DeviceMemory,
    values: DeviceMemory,
}

impl Cache {
    fn new(context: &Context, shape: KvLayerShape) -> Result<Cache> {
        let bytes =
            [shape.key_bytes(), shape.value_bytes()].map(|bytes| bytes.div_ceil(4) as usize);
        Ok(Cache { keys: context.poisoned(bytes[0])?, values: context.poisoned(bytes[1])? })
    }

    fn layer(&self, shape: KvLayerShape) -> KvLayer {
        KvLayer { shape, keys: self.keys.ptr(), values: self.values.ptr() }
    }
}

fn one(context: &Context, case: &Case, position: usize, splits: usize) -> Result<Outcome> {
    let Case { element, heads, kv_heads, dim_k, dim_v, rotary_dim, .. } = *case;
    let (gpu, tokens) = (&context.gpu, position + 1);
    let (values_in_keys, capacity) = (false, 704);
    // A layer with a window keeps no more rows than it needs, so the rows wrap.
    let rows_of = |window| KvLayerShape::rows_for_window(window, 1, capacity);
    let rows = case.window.map_or(capacity, rows_of);
    let shape =
        KvLayerShape { element, kv_heads, dim_k, dim_v, values_in_keys, context: capacity, rows };
    let mut random = Random::new((position * dim_k + splits) as u64);
    let q_width = heads * dim_k;
    let q = random.gaussians(q_width);
    let k = context.upload(&random.gaussians(tokens * kv_heads * dim_k))?;
    let v = context.upload(&random.gaussians(tokens * kv_heads * dim_v))?;
    let many = context.upload(&random.gaussians(tokens * q_width))?;
    let biases = context.upload(&random.gaussians(q_width))?;
    let norms = context.upload(&random.gaussians(2 * dim_k))?;
    let angles = context.upload(&random.gaussians(shape.context * rotary_dim.max(1)))?;
    let sinks = context.upload(&random.gaussians(heads))?;
    let positions: Vec<u32> = (0..tokens as u32).chain([position as u32]).collect();
    let positions = context.upload(&positions)?;
    let optional = |wanted: bool, memory: &DeviceMemory, at: usize| {
        if wanted { memory.ptr::<f32>().offset(at) } else { DevicePtr::null() }
    };
    let Case { rotary_from, interleaved, .. } = *case;
    let rotation = Rotation { angles: angles.ptr(), rotary_dim, rotary_from, interleaved };
    let input =
        |projected, norm| HeadInput { projected, bias: optional(case.bias, &biases, 0), norm };
    let inputs = |q: DevicePtr<f32>, first: usize| AttentionInputs {
        q: input(q, optional(case.norm, &norms, 0)),
        k: input(
            k.ptr::<f32>().offset(first * kv_heads * dim_k),
            optional(case.norm, &norms, dim_k),
        ),
        key_norm_dim: dim_k,
        v: input(v.ptr::<f32>().offset(first * kv_heads * dim_v), DevicePtr::null()),
        heads,
        norm_epsilon: EPSILON,
        rotation: (rotary_dim > 0).then_some(rotation),
        positions: positions.ptr::<u32>().offset(first),
    };
    let caches = [Cache::new(context, shape)?, Cache::new(context, shape)?];
    for (cache, first) in caches
        .iter()
        .flat_map(|cache| (0..position).step_by(shape.rows).map(move |first| (cache, first)))
    {
        let run = (position - first).min(shape.rows);
        let q = many.ptr::<f32>().offset(first * q_width);
        gpu.attention_inputs(&inputs(q, first), &cache.layer(shape), run)?;
    }
    let queries = [context.upload(&q)?, context.upload(&q)?];
    let width = heads * dim_v;
    let out = [context.poisoned(width)?, context.poisoned(width)?];
    let (codes, scales) = RoundedActivations::bytes(1, width.next_multiple_of(32));
    let rounded = [context.poisoned(codes + scales)?, context.poisoned(codes + scales)?];
    let rounded_at = |index: usize| RoundedActivations {
        codes: rounded[index].ptr(),
        scales: rounded[index].ptr::<u8>().offset(codes).cast(),
    };
    let size = AttentionScratchSize::of(&shape, heads, 1, splits);
    let parts = context.poisoned(size.floats)?;
    let tickets = context.upload(&vec![0_u32; size.tickets])?;
    let scratch = AttentionScratch { parts: parts.ptr(), tickets: tickets.ptr(), size };
    let rounds = dim_v.is_multiple_of(32);
    let attention = |index: usize, fused: bool| Attention {
        q: queries[index].ptr(),
        out: out[index].ptr(),
        first_position: positions.ptr::<u32>().offset(position),
        tokens: 1,
        heads,
        scale: 0.1,
        window: case.window,
        softcap: None,
        sinks: optional(case.sinks, &sinks, 0),
        inputs: fused.then(|| inputs(queries[index].ptr(), position)),
        rounded: (fused && rounds).then(|| rounded_at(index)),
    };
    let layers = [caches[0].layer(shape), caches[1].layer(shape)];
    gpu.attention_inputs(&inputs(queries[0].ptr(), position), &layers[0], 1)?;
    gpu.attention(&attention(0, false), &layers[0], splits, &scratch)?;
    gpu.attention(&attention(1, true), &layers[1], splits, &scratch)?;
    let download = |memory: &[DeviceMemory; 2], bytes: usize| -> Result<Outcome> {
        let expected = gpu.download::<u8>(memory[0].ptr(), bytes)?;
        Ok(Outcome::same(&gpu.download::<u8>(memory[1].ptr(), bytes)?, &expected))
    };
    let mut outcome = download(&out, 4 * width)?.at("results");
    if rounds {
        gpu.quantize_q8(out[0].ptr(), rounded_at(0), 1, width)?;
        outcome = outcome.worse(download(&rounded, codes + scales)?.at("rounded"));
    }
    let planes = caches.iter().map(|cache| [&cache.keys, &cache.values]);
    let planes: Vec<[Vec<u8>; 2]> = planes
        .map(|[keys, values]| {
            let bytes = |plane: &DeviceMemory| gpu.download::<u8>(plane.ptr(), plane.bytes());
            Ok([bytes(keys)?, bytes(values)?])
        })
        .collect::<Result<_>>()?;
    for (expected, got) in planes[0].iter().zip(&planes[1]) {
        outcome = outcome.worse(Outcome::same(got, expected).at("cache"));
    }
    Ok(outcome)
}
