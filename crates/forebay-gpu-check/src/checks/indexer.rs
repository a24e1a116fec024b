//! Compares the indexer's keys and its choice with the CPU, and attention over chosen positions with attention over a context
//! that consists of these positions only.

use anyhow::Result;
use forebay_compute::{
    AttentionRun, KeyChoice, KvCache, KvLayer, KvShape, PoolScores, RopeConfig, RopeLayout,
    RopeScaling, RopeTable,
};
use forebay_cuda::{
    DeviceKvLayer, DevicePtr, Indexer, IndexerInputs, IndexerScores, KvLayerShape, PassRows,
    Rotation,
};
use forebay_ops::{ChosenKeys, KvType, Pools, RowKind};

use super::attention::Variation;
use super::attention_inputs::Plane;
use super::attention_rows::{Call, attend};
use super::paged::{PagedCache, Rows};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const ELEMENTS: [(KvType, &str); 4] =
    [(KvType::F16, "f16"), (KvType::F32, "f32"), (KvType::Q8_0, "q8_0"), (KvType::Q4_0, "q4_0")];

/// Number of positions of a sequence.
const CONTEXT: usize = 1500;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for (element, name) in ELEMENTS {
        for (heads, dim) in [(5, 40), (8, 64), (20, 128)] {
            let label = |what: &str| format!("indexer {what} {name} {heads}x{dim}");
            checks.push(Check::new(label("inputs"), move |context: &Context| {
                inputs(context, element, heads, dim)
            }));
            checks.push(Check::new(label("choice"), move |context: &Context| {
                choice(context, element, heads, dim)
            }));
        }
        for form in forms(element) {
            let label = format!("indexer attention {name} {}x{}", form.heads, form.dims.0);
            checks.push(Check::new(label, move |context: &Context| listed(context, element, form)));
        }
    }
    checks
}

/// Returns an indexer that chooses positions.
fn by_position(heads: usize, dim: usize, most: usize) -> Indexer {
    Indexer { heads, dim, gated: false, by_head: false, pools: Pools::positions(most) }
}

fn shape(element: KvType, dim: usize) -> KvLayerShape {
    KvLayerShape { values_in_keys: true, ..KvLayerShape::new(element, 1, (dim, dim), CONTEXT) }
}

/// Compares queries with the CPU's, and the keys in the cache by their products with other queries.
fn inputs(context: &Context, element: KvType, heads: usize, dim: usize) -> Result<Outcome> {
    let mut random = Random::new((heads * dim) as u64);
    let positions = [(0, 3), (1, 700), (1, 701), (0, 15), (1, CONTEXT - 1)];
    let count = positions.len();
    let (mut q, mut k) = (random.gaussians(count * heads * dim), random.gaussians(count * dim));
    let (norm, bias) = (random.gaussians(dim), random.gaussians(dim));
    let rotary_dim = dim / 8 * 4;
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let last = dim - rotary_dim;
    for (layout, rotary_from) in [(RopeLayout::Neox, 0), (RopeLayout::Interleaved, last)] {
        let table = RopeTable::new(&RopeConfig {
            rotary_dim,
            rotary_from,
            theta: 10_000.0,
            layout,
            scaling: RopeScaling::None,
            frequency_factors: None,
            context: CONTEXT,
        })?;
        let cache = PagedCache::new(context, shape(element, dim), 2, None)?;
        let rows = Rows::new(context, RowKind::Decode, &positions)?;
        let angles = context.upload(table.angles())?;
        let [device_q, device_k] = [context.upload(&q)?, context.upload(&k)?];
        let [device_norm, device_bias] = [context.upload(&norm)?, context.upload(&bias)?];
        let of = by_position(heads, dim, 1);
        let inputs = IndexerInputs {
            q: device_q.ptr(),
            k: device_k.ptr(),
            gates: DevicePtr::null(),
            q_norm: DevicePtr::null(),
            norm: device_norm.ptr(),
            bias: device_bias.ptr(),
            epsilon: 1e-3,
            layer_epsilon: 1e-6,
            rotation: Some(Rotation {
                angles: angles.ptr(),
                rotary_dim,
                rotary_from,
                interleaved: layout == RopeLayout::Interleaved,
            }),
            pooled: None,
        };
        context.gpu.indexer_inputs(&of, &inputs, &cache.layer(), &rows.pass())?;
        let got: Vec<f32> = context.gpu.download(device_q.ptr(), q.len())?;
        let at: Vec<u32> = positions.iter().map(|(_, position)| *position as u32).collect();
        let (mut own_q, mut own_k) = (q.clone(), k.clone());
        context.cpu.rope(&mut own_q, dim, &at, &table);
        context.cpu.layer_norm_in_place(&mut own_k, &norm, &bias, 1e-6);
        context.cpu.rope(&mut own_k, dim, &at, &table);
        let expected: Vec<f64> = own_q.iter().map(|x| f64::from(*x)).collect();
        outcome = outcome.worse(Outcome::of(&got, &expected, |_| 1.0, 1e-5).at("queries"));
        // One step of the stored form.
        let tolerance = match element {
            KvType::F32 => 1e-5,
            KvType::F16 => 2e-3,
            KvType::Q8_0 => 2e-2,
            KvType::Q4_0 => 0.3,
        };
        let pool = cache.bytes(&context.gpu)?;
        for (row, (sequence, position)) in positions.into_iter().enumerate() {
            let plane = Plane { bytes: &pool, cache: &cache, offset: 0, dim };
            let got = &plane.row(sequence, 0, position)[..dim];
            let key = &own_k[row * dim..][..dim];
            let expected: Vec<f64> = key.iter().map(|x| f64::from(*x)).collect();
            outcome = outcome
                .worse(Outcome::of(got, &expected, |_| 4.0, tolerance).at(&format!("key {row}")));
        }
        q.reverse();
        k.reverse();
    }
    Ok(outcome)
}

/// Compares the lists with the CPU's, alone and beside other rows. Elements are multiples of 1/2, so that sums are exact and
/// many scores are equal, unless the cache rounds them.
fn choice(context: &Context, element: KvType, heads: usize, dim: usize) -> Result<Outcome> {
    let mut random = Random::new((heads + dim) as u64);
    let exact = matches!(element, KvType::F16 | KvType::F32);
    let mut numbers = |count: usize| -> Vec<f32> {
        let x = random.gaussians(count);
        if exact { x.iter().map(|x| (x * 2.0).round() / 2.0).collect() } else { x }
    };
    let of_cache = shape(element, dim);
    let cache = PagedCache::new(context, of_cache, 2, None)?;
    let mut cpu_cache = {
        let shape = KvShape { kv_heads: 1, head_dim_k: dim, head_dim_v: dim, values_in_keys: true };
        let blocks = 1 + 2 * of_cache.blocks();
        KvCache::new(&[KvLayer::new(shape, 0)], &[blocks], element)?
    };
    let table = |sequence: usize| -> Vec<u32> {
        let blocks = of_cache.blocks();
        (0..blocks).map(|block| (1 + sequence * blocks + block) as u32).collect()
    };
    let tables = [table(0), table(1)];
    for (sequence, table) in tables.iter().enumerate() {
        let keys = numbers(CONTEXT * dim);
        let device = context.upload(&keys)?;
        cache.fill(context, sequence, 0..CONTEXT, device.ptr(), DevicePtr::null())?;
        cpu_cache.write(&context.cpu, 0, table, 0, &keys, &[]);
    }
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (kind, most) in [
        (RowKind::Decode, 7),
        (RowKind::Prompt, 100),
        (RowKind::Decode, 1024),
        (RowKind::Prompt, 1),
    ] {
        let mut places: Vec<(usize, usize)> =
            vec![(0, 0), (1, most - 1), (1, most), (0, 299), (1, CONTEXT - 1)];
        if kind == RowKind::Prompt {
            places.extend((90..110).map(|position| (0, position)));
            places.push((1, 640));
        }
        let rows = Rows::new(context, kind, &places)?;
        let count = places.len();
        let (q, weights) = (numbers(count * heads * dim), numbers(count * heads));
        let [device_q, device_weights] = [context.upload(&q)?, context.upload(&weights)?];
        let of = by_position(heads, dim, most);
        let choose = |range: std::ops::Range<usize>, together: usize| -> Result<Vec<u32>> {
            let scores = context.poisoned(together * CONTEXT)?;
            let lists = context.poisoned(range.len() * most)?;
            let inputs = IndexerScores {
                q: device_q.ptr::<f32>().offset(range.start * heads * dim),
                weights: device_weights.ptr::<f32>().offset(range.start * heads),
                scores: scores.ptr(),
                room: together * CONTEXT,
            };
            let (layer, pass) = (cache.layer(), rows.part(range.clone()));
            context.gpu.choose_keys(&of, &inputs, &layer, &pass, lists.ptr())?;
            Ok(context.gpu.download(lists.ptr(), range.len() * most)?)
        };
        let runs: Vec<AttentionRun<'_>> = places
            .iter()
            .map(|&(sequence, first_position)| AttentionRun {
                kind: RowKind::Decode,
                first_position,
                tokens: 1,
                table: &tables[sequence],
            })
            .collect();
        let mut expected = vec![0; count * most];
        let (pools, scores) = (Pools::positions(most), PoolScores::Weighted);
        let what = KeyChoice { layer: 0, heads, dim, pools, scores };
        context.cpu.choose_keys(&q, Some(&weights), &cpu_cache, &what, &runs, &mut expected);
        for ((_, position), list) in places.iter().zip(expected.chunks_mut(most)) {
            if *position < most {
                (0..=*position).for_each(|at| list[at] = at as u32);
            }
        }
        for together in [count, 3, 1] {
            let same = Outcome::same(&choose(0..count, together)?, &expected);
            let label = format!("{kind:?} {most} keys, {together} rows at once");
            outcome = outcome.worse(same.at(&label));
        }
        for row in 0..count {
            let same = Outcome::same(&choose(row..row + 1, 1)?, &expected[row * most..][..most]);
            outcome = outcome.worse(same.at(&format!("{kind:?} {most} keys, row {row} alone")));
        }
    }
    Ok(outcome)
}

/// Heads of attention over lists.
#[derive(Clone, Copy, Debug)]
struct Form {
    heads: usize,
    kv_heads: usize,
    dims: (usize, usize),
    latent: bool,
}

/// Returns forms whose rows take the same kernel with and without lists.
fn forms(element: KvType) -> Vec<Form> {
    let latent = |heads| Form { heads, kv_heads: 1, dims: (576, 512), latent: true };
    // An odd length has no other kernel than that for all lengths.
    let general = Form { heads: 4, kv_heads: 2, dims: (33, 17), latent: false };
    let mut forms = vec![general, latent(5)];
    if element == KvType::F16 {
        forms.push(latent(20));
    }
    forms
}

/// Compares the bits of rows over lists with those of rows whose whole context is the listed positions.
fn listed(context: &Context, element: KvType, form: Form) -> Result<Outcome> {
    const END: usize = 600;
    let Form { heads, kv_heads, dims: (dim_k, dim_v), latent } = form;
    let mut random = Random::new((heads + dim_k) as u64);
    let shape = KvLayerShape::new(element, kv_heads, (dim_k, dim_v), END);
    let shape = KvLayerShape { values_in_keys: latent, ..shape };
    let (row_k, row_v) = (kv_heads * dim_k, kv_heads * dim_v);
    let (keys, values) = (random.gaussians(END * row_k), random.gaussians(END * row_v));
    let positions = [3, 99, 100, 101, 250, 599];
    let places: Vec<(usize, usize)> = positions.iter().map(|position| (0, *position)).collect();
    let q = context.upload(&random.gaussians(places.len() * heads * dim_k))?;
    let cache = PagedCache::new(context, shape, 1, None)?;
    let [device_keys, device_values] = [context.upload(&keys)?, context.upload(&values)?];
    cache.fill(context, 0, 0..END, device_keys.ptr(), device_values.ptr())?;
    let plain = Variation { window: None, chunked: false, softcap: None, sinks: false };
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for most in [100, 260] {
        let lists: Vec<Vec<u32>> = positions
            .iter()
            .map(|&position| {
                if position < most {
                    return (0..=position as u32).collect();
                }
                let mut order: Vec<u32> = (0..=position as u32).collect();
                for at in 0..most {
                    let left = order.len() - at;
                    order.swap(at, at + random.next() as usize % left);
                }
                order.truncate(most);
                order.sort_unstable();
                order
            })
            .collect();
        let padded = |list: &Vec<u32>| {
            list.iter().copied().chain(std::iter::repeat(0)).take(most).collect::<Vec<u32>>()
        };
        let device_lists = context.upload(&lists.iter().flat_map(padded).collect::<Vec<u32>>())?;
        // Every row has a sequence of its own with the listed keys.
        let compact = PagedCache::new(context, shape, positions.len(), None)?;
        for (sequence, list) in lists.iter().enumerate() {
            let pick = |of: &[f32], row: usize| -> Vec<f32> {
                list.iter().flat_map(|at| &of[*at as usize * row..][..row]).copied().collect()
            };
            let [keys, values] =
                [context.upload(&pick(&keys, row_k))?, context.upload(&pick(&values, row_v))?];
            compact.fill(context, sequence, 0..list.len(), keys.ptr(), values.ptr())?;
        }
        let ends: Vec<(usize, usize)> =
            lists.iter().enumerate().map(|(row, list)| (row, list.len() - 1)).collect();
        for kind in [RowKind::Decode, RowKind::Prompt] {
            let call = |rows: PassRows, chosen: Option<ChosenKeys<DevicePtr<u32>>>| Call {
                q: q.ptr(),
                rows,
                heads,
                end: END,
                scale: 0.1,
                variation: plain,
                sinks: DevicePtr::null(),
                relative: None,
                chosen,
                limit: (kind == RowKind::Decode).then_some(24),
            };
            let rows = Rows::new(context, kind, &ends)?;
            let tiles = rows.tiles(context, &shape, heads)?;
            let pass = PassRows { tiles: tiles.on_device(), ..rows.pass() };
            let expected = attend(context, &call(pass, None), &compact.layer())?;
            anyhow::ensure!(expected.iter().all(|x| x.is_finite()), "not finite: {form:?}");
            let rows = Rows::new(context, kind, &places)?;
            let chosen = Some(ChosenKeys {
                lists: device_lists.ptr(),
                lists_of_row: 1,
                pools: Pools::positions(most),
            });
            let layer =
                DeviceKvLayer { shape: KvLayerShape { chosen: true, ..shape }, ..cache.layer() };
            let got = attend(context, &call(rows.pass(), chosen), &layer)?;
            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let same = Outcome::same(&bits(&got), &bits(&expected));
            outcome = outcome.worse(same.at(&format!("{form:?} {kind:?} {most}")));
        }
    }
    Ok(outcome)
}
