//! Compares the keys of pools, the choice of pools by an indexer, and attention to chosen pools with the CPU.

use anyhow::Result;
use forebay_compute::{
    Attention, AttentionRun, KeyChoice, KeyPool, KvCache, KvLayer, KvShape, PoolScores, RopeConfig,
    RopeLayout, RopeScaling, RopeTable,
};
use forebay_cuda::{
    DeviceKvLayer, DevicePtr, Indexer, IndexerInputs, IndexerScores, KvLayerShape, PassRows,
    PooledKeys, Rotation,
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
const CONTEXT: usize = 700;

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for (element, name) in ELEMENTS {
        for gated in [false, true] {
            let label = format!("pools keys {name} {}", if gated { "by gates" } else { "means" });
            checks.push(Check::new(label, move |context: &Context| keys(context, element, gated)));
        }
        for (heads, dim) in [(1, 64), (5, 40), (20, 128)] {
            let label = format!("pools choice {name} {heads}x{dim}");
            checks.push(Check::new(label, move |context: &Context| {
                choice(context, element, heads, dim)
            }));
        }
        checks.push(Check::new(format!("pools attention {name}"), move |context: &Context| {
            attention(context, element)
        }));
    }
    checks
}

fn shape(element: KvType, (kv_heads, dim): (usize, usize), in_keys: bool) -> KvLayerShape {
    let shape = KvLayerShape::new(element, kv_heads, (dim, dim), CONTEXT);
    KvLayerShape { values_in_keys: in_keys, ..shape }
}

/// Returns a cache of the CPU with one layer, and the table of its sequence.
fn cpu_cache(of: &KvLayerShape) -> Result<(KvCache, Vec<u32>)> {
    let KvLayerShape { kv_heads, dim_k, dim_v, values_in_keys, .. } = *of;
    let shape = KvShape { kv_heads, head_dim_k: dim_k, head_dim_v: dim_v, values_in_keys };
    let blocks = of.blocks();
    let layers = [KvLayer::new(shape, 0)];
    let cache = KvCache::new(&layers, &[1 + blocks], of.element)?;
    Ok((cache, (1..=blocks as u32).collect()))
}

/// Compares the keys of pools, with passes that end within a pool.
fn keys(context: &Context, element: KvType, gated: bool) -> Result<Outcome> {
    const DIM: usize = 64;
    const HEADS: usize = 3;
    let mut random = Random::new(3 + u64::from(gated));
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    let table = RopeTable::new(&RopeConfig {
        rotary_dim: 24,
        rotary_from: 0,
        theta: 10_000.0,
        layout: RopeLayout::Neox,
        scaling: RopeScaling::None,
        frequency_factors: None,
        context: CONTEXT,
    })?;
    let angles = context.upload(table.angles())?;
    for length in [4, 7] {
        let width = if gated { 2 * DIM } else { DIM };
        let of_cache = shape(element, (1, width), true);
        let cache = PagedCache::new(context, of_cache, 1, None)?;
        let (mut own, blocks) = cpu_cache(&of_cache)?;
        let end = 61;
        let (k, gates) = (random.gaussians(end * DIM), random.gaussians(end * DIM));
        let q = random.gaussians(end * HEADS * DIM);
        let [norm, bias, q_norm] = [0; 3].map(|_| random.gaussians(DIM));
        let gate_bias = random.gaussians(length * DIM);
        let [device_k, device_gates, device_q] =
            [context.upload(&k)?, context.upload(&gates)?, context.upload(&q)?];
        let [device_norm, device_bias, device_q_norm, device_gate_bias] = [
            context.upload(&norm)?,
            context.upload(&bias)?,
            context.upload(&q_norm)?,
            context.upload(&gate_bias)?,
        ];
        let pools = Pools { length, ..Pools::positions(9) };
        let of = Indexer { heads: HEADS, dim: DIM, gated, by_head: false, pools };
        let only = |when: bool, of: DevicePtr<f32>| if when { of } else { DevicePtr::null() };
        for (from, to) in [(0, 18), (18, 19), (19, end)] {
            let rows = Rows::run(context, RowKind::Prompt, 0, from..to)?;
            let inputs = IndexerInputs {
                q: device_q.ptr::<f32>().offset(from * HEADS * DIM),
                k: device_k.ptr::<f32>().offset(from * DIM),
                gates: only(gated, device_gates.ptr::<f32>().offset(from * DIM)),
                q_norm: only(!gated, device_q_norm.ptr()),
                norm: device_norm.ptr(),
                bias: only(gated, device_bias.ptr()),
                epsilon: 1e-3,
                layer_epsilon: 1e-6,
                rotation: (!gated).then(|| Rotation {
                    angles: angles.ptr(),
                    rotary_dim: 24,
                    rotary_from: 0,
                    interleaved: false,
                }),
                pooled: Some(PooledKeys { gate_bias: only(gated, device_gate_bias.ptr()) }),
            };
            context.gpu.indexer_inputs(&of, &inputs, &cache.layer(), &rows.pass())?;
        }
        let (mut own_q, mut own_k) = (q.clone(), k.clone());
        let positions: Vec<u32> = (0..end as u32).collect();
        if gated {
            context.cpu.layer_norm_in_place(&mut own_k, &norm, &bias, 1e-6);
        } else {
            context.cpu.rms_norm_in_place(&mut own_q, &q_norm, 1e-3);
            context.cpu.rope(&mut own_q, DIM, &positions, &table);
        }
        let stored: Vec<f32> = match gated {
            false => own_k,
            true => own_k
                .chunks_exact(DIM)
                .zip(gates.chunks_exact(DIM))
                .flat_map(|(key, gates)| [key, gates].concat())
                .collect(),
        };
        own.write(&context.cpu, 0, &blocks, 0, &stored, &[]);
        let what =
            KeyPool { layer: 0, length, dim: DIM, gate_bias: gated.then_some(&gate_bias[..]) };
        let count = end / length;
        let mut pooled = vec![0.0; count * DIM];
        context.cpu.pool_keys(&own, &what, &blocks, 0..count, &mut pooled);
        if !gated {
            context.cpu.rms_norm_in_place(&mut pooled, &norm, 1e-3);
            let firsts: Vec<u32> = (0..count).map(|pool| (pool * length) as u32).collect();
            context.cpu.rope(&mut pooled, DIM, &firsts, &table);
        }
        let got: Vec<f32> = context.gpu.download(device_q.ptr(), q.len())?;
        let expected: Vec<f64> = own_q.iter().map(|x| f64::from(*x)).collect();
        outcome = outcome.worse(Outcome::of(&got, &expected, |_| 1.0, 1e-5).at("queries"));
        // One step of the stored form. Keys of positions are rounded once more.
        let tolerance = match element {
            KvType::F32 => 1e-5,
            KvType::F16 => 2e-3,
            KvType::Q8_0 => 2e-2,
            KvType::Q4_0 => 0.3,
        };
        let pool = cache.bytes(&context.gpu)?;
        let plane = Plane { bytes: &pool, cache: &cache, offset: 0, dim: width };
        for position in 0..end {
            let got = &plane.row(0, 0, position)[..width];
            let pool = (position + 1) / length;
            let key = match (position + 1).is_multiple_of(length) {
                true => {
                    let key = &pooled[(pool - 1) * DIM..][..DIM];
                    key.iter().copied().chain([0.0; DIM]).take(width).collect()
                }
                false => stored[position * width..][..width].to_vec(),
            };
            let expected: Vec<f64> = key.iter().map(|x| f64::from(*x)).collect();
            let label = format!("{length} positions, key {position}");
            // The steps of a row follow from its largest element.
            let scale = expected.iter().fold(4.0, |most: f64, x| most.max(x.abs()));
            outcome = outcome.worse(Outcome::of(got, &expected, |_| scale, tolerance).at(&label));
        }
    }
    Ok(outcome)
}

fn pools_of(length: usize, most: usize, own_seen: bool, before_own: usize) -> Pools {
    Pools { length, most, own_seen, before_own }
}

/// Compares lists with the CPU's, alone and beside other rows. Elements are multiples of 1/2, so that sums are exact and many
/// scores are equal, unless the cache rounds them.
fn choice(context: &Context, element: KvType, heads: usize, dim: usize) -> Result<Outcome> {
    let mut random = Random::new((heads + dim) as u64);
    let exact = matches!(element, KvType::F16 | KvType::F32);
    let mut numbers = |count: usize| -> Vec<f32> {
        let x = random.gaussians(count);
        if exact { x.iter().map(|x| (x * 2.0).round() / 2.0).collect() } else { x }
    };
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for (by_head, gated, pools) in [
        (true, false, pools_of(8, 5, true, 0)),
        (true, false, pools_of(2, 40, true, 2)),
        (true, false, pools_of(64, 3, true, 1)),
        (true, false, pools_of(128, 2, true, 0)),
        (false, true, pools_of(4, 30, false, 0)),
        (false, false, pools_of(5, 7, false, 0)),
    ] {
        let width = if gated { 2 * dim } else { dim };
        let of_cache = shape(element, (1, width), true);
        let cache = PagedCache::new(context, of_cache, 1, None)?;
        let (mut own, table) = cpu_cache(&of_cache)?;
        let keys = numbers(CONTEXT * width);
        let device = context.upload(&keys)?;
        cache.fill(context, 0, 0..CONTEXT, device.ptr(), DevicePtr::null())?;
        own.write(&context.cpu, 0, &table, 0, &keys, &[]);
        let of = Indexer { heads, dim, gated, by_head, pools };
        let lists = of.lists();
        let row = lists * pools.most;
        for kind in [RowKind::Decode, RowKind::Prompt] {
            let mut positions = vec![0, 9, 255, 256, 400, CONTEXT - 2, CONTEXT - 1];
            if kind == RowKind::Prompt {
                positions.extend(300..320);
            }
            let places: Vec<(usize, usize)> = positions.iter().map(|at| (0, *at)).collect();
            let rows = Rows::new(context, kind, &places)?;
            let count = places.len();
            let (q, weights) = (numbers(count * heads * dim), numbers(count * heads));
            let [device_q, device_weights] = [context.upload(&q)?, context.upload(&weights)?];
            // One of the forms without heads of its own has no weights either.
            let weighted = gated && !by_head;
            let choose = |range: std::ops::Range<usize>, together: usize| -> Result<Vec<u32>> {
                let room = together * lists * of.scores(CONTEXT);
                let scores = context.poisoned(room)?;
                let out = context.poisoned(range.len() * row)?;
                let inputs = IndexerScores {
                    q: device_q.ptr::<f32>().offset(range.start * heads * dim),
                    weights: match weighted {
                        true => device_weights.ptr::<f32>().offset(range.start * heads),
                        false => DevicePtr::null(),
                    },
                    scores: scores.ptr(),
                    room,
                };
                let (layer, pass) = (cache.layer(), rows.part(range.clone()));
                context.gpu.choose_keys(&of, &inputs, &layer, &pass, out.ptr())?;
                Ok(context.gpu.download(out.ptr(), range.len() * row)?)
            };
            let runs: Vec<AttentionRun<'_>> = positions
                .iter()
                .map(|&first_position| AttentionRun {
                    kind: RowKind::Decode,
                    first_position,
                    tokens: 1,
                    table: &table,
                })
                .collect();
            let scores = if by_head { PoolScores::Largest } else { PoolScores::Weighted };
            let what = KeyChoice { layer: 0, heads, dim, pools, scores };
            let mut expected = vec![0; count * row];
            let own_weights = weighted.then_some(&weights[..]);
            context.cpu.choose_keys(&q, own_weights, &own, &what, &runs, &mut expected);
            for (position, lists) in positions.iter().zip(expected.chunks_mut(row)) {
                if pools.sees_all(*position) {
                    for list in lists.chunks_mut(pools.most) {
                        (0..pools.candidates(*position)).for_each(|at| list[at] = at as u32);
                    }
                }
            }
            for together in [count, 3] {
                let same = Outcome::same(&choose(0..count, together)?, &expected);
                outcome = outcome.worse(same.at(&format!("{of:?} {kind:?}, {together} at once")));
            }
            for at in 0..count {
                let same = Outcome::same(&choose(at..at + 1, 1)?, &expected[at * row..][..row]);
                outcome = outcome.worse(same.at(&format!("{of:?} {kind:?} row {at} alone")));
            }
        }
    }
    Ok(outcome)
}

/// Compares attention to chosen pools, with a list for each key/value head and with one for all.
fn attention(context: &Context, element: KvType) -> Result<Outcome> {
    let mut random = Random::new(11);
    let (heads, kv_heads) = (6, 2);
    let mut outcome = Outcome::same::<f32>(&[], &[]);
    for dim in [32, 48, 128] {
        let of_cache = shape(element, (kv_heads, dim), false);
        let cache = PagedCache::new(context, of_cache, 1, None)?;
        let (mut own, table) = cpu_cache(&of_cache)?;
        let row = kv_heads * dim;
        let (keys, values) = (random.gaussians(CONTEXT * row), random.gaussians(CONTEXT * row));
        let [device_keys, device_values] = [context.upload(&keys)?, context.upload(&values)?];
        cache.fill(context, 0, 0..CONTEXT, device_keys.ptr(), device_values.ptr())?;
        own.write(&context.cpu, 0, &table, 0, &keys, &values);
        for (lists_of_row, pools) in [
            (2, pools_of(8, 3, true, 0)),
            (2, pools_of(128, 2, true, 0)),
            (1, pools_of(4, 70, false, 0)),
            (1, pools_of(16, 2, true, 1)),
        ] {
            let positions: Vec<usize> = [3, 40, 99, 100, 103, 384, 385, 600, CONTEXT - 1].into();
            let count = positions.len();
            let q = random.gaussians(count * heads * dim);
            let device_q = context.upload(&q)?;
            let mut lists = Vec::new();
            for position in positions.iter().flat_map(|at| vec![*at; lists_of_row]) {
                let all = pools.candidates(position);
                let mut order: Vec<u32> = (0..all as u32).collect();
                for at in 0..all {
                    order.swap(at, at + random.next() as usize % (all - at));
                }
                order.truncate(pools.most);
                order.sort_unstable();
                order.resize(pools.most, 0);
                lists.extend(order);
            }
            let device_lists = context.upload(&lists)?;
            let runs: Vec<AttentionRun<'_>> = positions
                .iter()
                .map(|&first_position| AttentionRun {
                    kind: RowKind::Decode,
                    first_position,
                    tokens: 1,
                    table: &table,
                })
                .collect();
            let chosen = Some(ChosenKeys { lists: &lists[..], lists_of_row, pools });
            let what = Attention { chosen, ..Attention::causal(0, heads, 0.2) };
            let mut expected = vec![0.0; count * heads * dim];
            context.cpu.attention(&q, &own, &what, &runs, &mut expected);
            let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
            let places: Vec<(usize, usize)> = positions.iter().map(|at| (0, *at)).collect();
            let layer =
                DeviceKvLayer { shape: KvLayerShape { chosen: true, ..of_cache }, ..cache.layer() };
            for kind in [RowKind::Decode, RowKind::Prompt] {
                let rows = Rows::new(context, kind, &places)?;
                let run = |pass: PassRows, first: usize| {
                    let call = Call {
                        q: device_q.ptr::<f32>().offset(first * heads * dim),
                        rows: pass,
                        heads,
                        end: CONTEXT,
                        scale: 0.2,
                        variation: Variation {
                            window: None,
                            chunked: false,
                            softcap: None,
                            sinks: false,
                        },
                        sinks: DevicePtr::null(),
                        relative: None,
                        chosen: Some(ChosenKeys {
                            lists: device_lists
                                .ptr::<u32>()
                                .offset(first * lists_of_row * pools.most),
                            lists_of_row,
                            pools,
                        }),
                        limit: (kind == RowKind::Decode).then_some(24),
                    };
                    attend(context, &call, &layer)
                };
                let got = run(rows.pass(), 0)?;
                let label = format!("{dim} elements, {pools:?}, {kind:?}");
                outcome = outcome.worse(Outcome::of(&got, &expected, |_| 1.0, 2e-4).at(&label));
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                for row in 0..count {
                    let alone = run(rows.part(row..row + 1), row)?;
                    let beside = &got[row * heads * dim..][..heads * dim];
                    let same = Outcome::same(&bits(&alone), &bits(beside));
                    outcome = outcome.worse(same.at(&format!("{label}, row {row} alone")));
                }
            }
        }
    }
    Ok(outcome)
}
