//! Compares compressed entries, their choice, and attention over a window and entries with the CPU.

use anyhow::Result;
use forebay_compute::{
    Attention, AttentionRun, Compression, Entries, EntryScratch, KeyChoice, KvCache, KvLayer,
    KvShape, PoolScores, RopeConfig, RopeLayout, RopeScaling, RopeTable,
};
use forebay_cuda::{
    AttentionScratch, AttentionScratchSize, Compressor, Indexer, IndexerScores, KvLayerShape,
    PassRows, Rotation, SharedKeyAttention, entries_scratch,
};
use forebay_ops::{ChosenKeys, KV_BLOCK, KvType, Pools, RowKind};
use half::f16;

use super::paged::{PagedCache, Rows};
use crate::harness::{Check, Context, Outcome};
use crate::random::Random;

const ELEMENTS: [(KvType, &str); 4] =
    [(KvType::F16, "f16"), (KvType::F32, "f32"), (KvType::Q8_0, "q8_0"), (KvType::Q4_0, "q4_0")];

/// Number of positions of a sequence, and of sequences.
const CONTEXT: usize = 600;
const SEQUENCES: usize = 2;
const EPSILON: f32 = 1e-6;

/// Sizes of one case.
#[derive(Clone, Copy, Debug)]
struct Form {
    heads: usize,
    dim: usize,
    ratio: usize,
    overlap: bool,
    window: usize,
    /// Number of entries that rows see, if these are chosen.
    most: Option<usize>,
}

const FORMS: [Form; 5] = [
    Form { heads: 4, dim: 64, ratio: 4, overlap: true, window: 16, most: Some(5) },
    Form { heads: 20, dim: 512, ratio: 4, overlap: true, window: 128, most: Some(70) },
    Form { heads: 17, dim: 512, ratio: 128, overlap: false, window: 128, most: None },
    Form { heads: 5, dim: 40, ratio: 2, overlap: true, window: 300, most: None },
    Form { heads: 4, dim: 64, ratio: 128, overlap: false, window: 16, most: None },
];

/// Returns the factor of scores.
fn scale(dim: usize) -> f32 {
    1.0 / (dim as f32).sqrt()
}

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for (element, name) in ELEMENTS {
        for form in FORMS {
            let Form { heads, dim, ratio, .. } = form;
            let label = format!("entries attention {name} {heads}x{dim} of {ratio}");
            checks.push(Check::new(label, move |context: &Context| check(context, element, form)));
        }
    }
    checks
}

/// Caches of keys, projections and entries on the GPU and on the CPU.
struct Case {
    form: Form,
    element: KvType,
    caches: [PagedCache; 3],
    cpu: KvCache,
    /// The CPU's blocks of each sequence, the same in both groups.
    tables: Vec<Vec<u32>>,
    rope: RopeTable,
    rotation: Rotation,
    _angles: forebay_cuda::DeviceMemory,
}

impl Case {
    fn new(context: &Context, element: KvType, form: Form) -> Result<Case> {
        let Form { dim, ratio, overlap, .. } = form;
        let width = if overlap { 2 * dim } else { dim };
        let shape = |dim: usize, values_in_keys: bool, span: usize| KvLayerShape {
            values_in_keys,
            span,
            ..KvLayerShape::new(element, 1, (dim, dim), CONTEXT)
        };
        let cache = |shape| PagedCache::new(context, shape, SEQUENCES, None);
        let keys = cache(shape(dim, true, 1))?;
        let projections = cache(shape(width, false, 1))?;
        let entries = cache(shape(dim, true, ratio))?;
        let of = |dim: usize, values_in_keys: bool| KvShape {
            kv_heads: 1,
            head_dim_k: dim,
            head_dim_v: dim,
            values_in_keys,
        };
        let layers = [
            KvLayer::new(of(dim, true), 0),
            KvLayer::new(of(width, false), 0),
            KvLayer { shape: of(dim, true), group: 1, span: ratio },
        ];
        let blocks = CONTEXT.div_ceil(KV_BLOCK);
        let mut cpu = KvCache::new(&layers, &[1 + SEQUENCES * blocks; 2], element)?;
        let table = |sequence: usize| {
            (0..blocks).map(|block| (1 + sequence * blocks + block) as u32).collect::<Vec<u32>>()
        };
        let tables: Vec<Vec<u32>> = (0..SEQUENCES).map(table).collect();
        let mut random = Random::new((dim + ratio) as u64);
        for (sequence, table) in tables.iter().enumerate() {
            let numbers: Vec<Vec<f32>> = [dim, width, width]
                .map(|width| random.gaussians(CONTEXT * width))
                .into_iter()
                .collect();
            let [k, value, gate] = [0, 1, 2].map(|at| context.upload(&numbers[at]));
            let [k, value, gate] = [k?, value?, gate?];
            keys.fill(context, sequence, 0..CONTEXT, k.ptr(), k.ptr())?;
            projections.fill(context, sequence, 0..CONTEXT, value.ptr(), gate.ptr())?;
            cpu.write(&context.cpu, 0, table, 0, &numbers[0], &[]);
            cpu.write(&context.cpu, 1, table, 0, &numbers[1], &numbers[2]);
        }
        let rotary_dim = dim / 8 * 2;
        let rope = RopeTable::new(&RopeConfig {
            rotary_dim,
            rotary_from: dim - rotary_dim,
            theta: 10_000.0,
            layout: RopeLayout::Interleaved,
            scaling: RopeScaling::None,
            frequency_factors: None,
            context: CONTEXT,
        })?;
        let angles = context.upload(rope.angles())?;
        let rotation = Rotation {
            angles: angles.ptr(),
            rotary_dim,
            rotary_from: dim - rotary_dim,
            interleaved: true,
        };
        let caches = [keys, projections, entries];
        Ok(Case { form, element, caches, cpu, tables, rope, rotation, _angles: angles })
    }

    /// Compresses all positions, on the GPU in passes that end anywhere.
    fn compress(&mut self, context: &Context) -> Result<()> {
        let Form { dim, ratio, overlap, .. } = self.form;
        let parts = if overlap { 2 } else { 1 };
        let mut random = Random::new(9);
        let (bias, norm) = (random.gaussians(ratio * parts * dim), random.gaussians(dim));
        let [device_bias, device_norm] = [context.upload(&bias)?, context.upload(&norm)?];
        let of = Compressor {
            bias: device_bias.ptr(),
            norm: device_norm.ptr(),
            epsilon: EPSILON,
            rotation: self.rotation,
            parts,
        };
        let [_, projections, entries] = &self.caches;
        for sequence in 0..SEQUENCES {
            let cuts = [0, 1, 7, 130, 131, 400, CONTEXT];
            for cut in cuts.windows(2) {
                let rows = Rows::run(context, RowKind::Prompt, sequence, cut[0]..cut[1])?;
                context.gpu.compress(&of, &projections.layer(), &entries.layer(), &rows.pass())?;
            }
            let table = &self.tables[sequence];
            let what = Compression {
                projections: 1,
                entries: 2,
                overlap,
                bias: &bias,
                norm: &norm,
                epsilon: EPSILON,
                rope: &self.rope,
            };
            let run =
                AttentionRun { kind: RowKind::Prompt, first_position: 0, tokens: CONTEXT, table };
            let mut memory = EntryScratch::default();
            context.cpu.compress(&mut self.cpu, &what, &[run], &[table], &mut memory);
        }
        Ok(())
    }

    /// Returns an entry of the GPU's cache, whose elements have no scales.
    fn entry(&self, pool: &[u8], sequence: usize, entry: usize) -> Vec<f32> {
        let (cache, ratio) = (&self.caches[2], self.form.ratio);
        let last = (entry + 1) * ratio - 1;
        let stride = self.form.dim.next_multiple_of(8);
        let row = last % KV_BLOCK / ratio;
        let at = cache.block_at(sequence, last);
        let element = |i: usize| match self.element {
            KvType::F32 => {
                let at = at + 4 * (row * stride + i);
                f32::from_le_bytes(pool[at..at + 4].try_into().expect("four bytes"))
            }
            _ => {
                let at = at + 2 * (row * stride + i);
                f16::from_le_bytes([pool[at], pool[at + 1]]).to_f32()
            }
        };
        (0..self.form.dim).map(element).collect()
    }

    /// Compares entries with the CPU's, and makes the CPU's equal.
    fn compare_entries(&mut self, context: &Context) -> Result<Outcome> {
        let mut outcome = Outcome::same::<f32>(&[], &[]);
        if !matches!(self.element, KvType::F16 | KvType::F32) {
            return Ok(outcome);
        }
        let tolerance = if self.element == KvType::F32 { 1e-5 } else { 2e-3 };
        let pool = self.caches[2].bytes(&context.gpu)?;
        for sequence in 0..SEQUENCES {
            for entry in 0..CONTEXT / self.form.ratio {
                let got = self.entry(&pool, sequence, entry);
                let (table, last) = (&self.tables[sequence], (entry + 1) * self.form.ratio - 1);
                let own = self.cpu.key(&context.cpu, 2, table, 0, last);
                let expected: Vec<f64> = own.iter().map(|x| f64::from(*x)).collect();
                let of = Outcome::of(&got, &expected, |_| 4.0, tolerance);
                outcome = outcome.worse(of.at(&format!("entry {entry} of {sequence}")));
                self.cpu.write(&context.cpu, 2, table, last, &got, &[]);
            }
        }
        Ok(outcome)
    }

    /// Returns lists of entries for rows at these places: those that an indexer with the entries as keys chooses, if their elements
    /// have no scales, or any.
    fn lists(
        &self,
        context: &Context,
        places: &[(usize, usize)],
        rows: &PassRows,
        most: usize,
    ) -> Result<(Vec<u32>, Outcome)> {
        let dim = self.form.dim;
        let mut random = Random::new(most as u64);
        let mut outcome = Outcome::same::<f32>(&[], &[]);
        let mut lists = Vec::new();
        for (_, position) in places {
            let all = (position + 1) / self.form.ratio;
            let mut order: Vec<u32> = (0..all as u32).collect();
            for at in 0..most.min(all) {
                let left = order.len() - at;
                order.swap(at, at + random.next() as usize % left);
            }
            order.truncate(most);
            order.sort_unstable();
            order.resize(most, 0);
            lists.extend(order);
        }
        let exact = matches!(self.element, KvType::F16 | KvType::F32);
        if !exact || dim > Indexer::DIM_MAX {
            return Ok((lists, outcome));
        }
        let heads = self.form.heads;
        let (q, weights) =
            (random.gaussians(places.len() * heads * dim), random.gaussians(places.len() * heads));
        let runs: Vec<AttentionRun<'_>> = places
            .iter()
            .map(|&(sequence, first_position)| AttentionRun {
                kind: RowKind::Decode,
                first_position,
                tokens: 1,
                table: &self.tables[sequence],
            })
            .collect();
        let what = KeyChoice {
            layer: 2,
            heads,
            dim,
            pools: Pools::positions(most),
            scores: PoolScores::Weighted,
        };
        context.cpu.choose_keys(&q, Some(&weights), &self.cpu, &what, &runs, &mut lists);
        for ((_, position), list) in places.iter().zip(lists.chunks_mut(most)) {
            let all = (position + 1) / self.form.ratio;
            if all <= most {
                (0..all).for_each(|at| list[at] = at as u32);
            }
        }
        let [device_q, device_weights] = [context.upload(&q)?, context.upload(&weights)?];
        let pools = Pools::positions(most);
        let of = Indexer { heads, dim, gated: false, by_head: false, pools };
        for together in [places.len(), 1] {
            let room = together * (CONTEXT / self.form.ratio);
            let scores = context.poisoned(room)?;
            let out = context.poisoned(lists.len())?;
            let inputs = IndexerScores {
                q: device_q.ptr(),
                weights: device_weights.ptr(),
                scores: scores.ptr(),
                room,
            };
            let layer = self.caches[2].layer();
            context.gpu.choose_keys(&of, &inputs, &layer, rows, out.ptr())?;
            let got: Vec<u32> = context.gpu.download(out.ptr(), lists.len())?;
            outcome = outcome.worse(Outcome::same(&got, &lists).at("choice"));
        }
        Ok((lists, outcome))
    }
}

fn check(context: &Context, element: KvType, form: Form) -> Result<Outcome> {
    let Form { heads, dim, window, most, .. } = form;
    let mut case = Case::new(context, element, form)?;
    case.compress(context)?;
    let mut outcome = case.compare_entries(context)?;
    let mut random = Random::new(77);
    let sinks = random.gaussians(heads);
    let device_sinks = context.upload(&sinks)?;
    let mut places = vec![(1, 0), (0, 3), (1, CONTEXT - 1), (0, 127), (0, 300), (1, 255)];
    places.extend((20..30).map(|position| (0, position)));
    let q = random.gaussians(places.len() * heads * dim);
    let device_q = context.upload(&q)?;
    for kind in [RowKind::Decode, RowKind::Prompt] {
        for with_entries in [true, false] {
            let rows = Rows::new(context, kind, &places)?;
            let lists = match most.filter(|_| with_entries) {
                Some(most) => {
                    let (lists, of) = case.lists(context, &places, &rows.pass(), most)?;
                    outcome = outcome.worse(of);
                    Some((context.upload(&lists)?, lists, most))
                }
                None => None,
            };
            let attend = |range: std::ops::Range<usize>| -> Result<Vec<f32>> {
                let count = range.len() * heads * dim;
                let out = context.poisoned(count)?;
                let size = match kind {
                    RowKind::Decode => entries_scratch(heads, dim, range.len()),
                    RowKind::Prompt => AttentionScratchSize::default(),
                };
                let parts = context.poisoned(size.floats.max(1))?;
                let tickets = context.upload(&vec![0_u32; size.tickets.max(1)])?;
                let scratch = AttentionScratch { parts: parts.ptr(), tickets: tickets.ptr(), size };
                let what = SharedKeyAttention {
                    q: device_q.ptr::<f32>().offset(range.start * heads * dim),
                    out: out.ptr(),
                    rows: rows.part(range.clone()),
                    heads,
                    scale: scale(dim),
                    window,
                    sinks: device_sinks.ptr(),
                    rotation: case.rotation,
                    chosen: lists.as_ref().map(|(lists, _, most)| ChosenKeys {
                        lists: lists.ptr::<u32>().offset(range.start * most),
                        lists_of_row: 1,
                        pools: Pools::positions(*most),
                    }),
                };
                let [keys, _, entries] = &case.caches;
                let entries = entries.layer();
                let entries = with_entries.then_some(&entries);
                context.gpu.attention_with_entries(&what, &keys.layer(), entries, &scratch)?;
                let left = context.gpu.download::<u32>(scratch.tickets, size.tickets)?;
                anyhow::ensure!(left.iter().all(|ticket| *ticket == 0), "tickets are left");
                Ok(context.gpu.download(out.ptr(), count)?)
            };
            let got = attend(0..places.len())?;
            let label = format!("{kind:?} {with_entries}");
            for row in 0..places.len() {
                let same =
                    Outcome::same(&attend(row..row + 1)?, &got[row * heads * dim..][..heads * dim]);
                outcome = outcome.worse(same.at(&format!("{label} row {row} alone")));
            }
            let runs: Vec<AttentionRun<'_>> = places
                .iter()
                .map(|&(sequence, first_position)| AttentionRun {
                    kind: RowKind::Decode,
                    first_position,
                    tokens: 1,
                    table: &case.tables[sequence],
                })
                .collect();
            let what = Attention {
                window: Some(window),
                sinks: Some(&sinks),
                ..Attention::causal(0, heads, scale(dim))
            };
            let mut expected = vec![0.0; q.len()];
            if with_entries {
                let tables: Vec<&[u32]> =
                    places.iter().map(|(sequence, _)| &case.tables[*sequence][..]).collect();
                let chosen = lists.as_ref().map(|(_, lists, most)| ChosenKeys {
                    lists: &lists[..],
                    lists_of_row: 1,
                    pools: Pools::positions(*most),
                });
                let entries = Entries { layer: 2, tables: &tables, chosen };
                let cpu = &context.cpu;
                cpu.attention_with_entries(&q, &case.cpu, &what, &entries, &runs, &mut expected);
            } else {
                context.cpu.attention(&q, &case.cpu, &what, &runs, &mut expected);
            }
            let at: Vec<u32> = places.iter().map(|(_, position)| *position as u32).collect();
            context.cpu.rope_back(&mut expected, dim, &at, &case.rope);
            let expected: Vec<f64> = expected.iter().map(|x| f64::from(*x)).collect();
            // Entries that are stored with scales may differ by a step where they were rounded.
            let tolerance = match element {
                KvType::Q8_0 if with_entries => 1e-2,
                KvType::Q4_0 if with_entries => 0.1,
                _ => 2e-5,
            };
            // Some sums are far larger than 1.
            outcome = outcome.worse(Outcome::of(&got, &expected, |_| 4.0, tolerance).at(&label));
        }
    }
    Ok(outcome)
}
