//! Compressed entries, their choice and attention over them, compared with the formulas in f64.

use forebay_ops::{ChosenKeys, KV_BLOCK, KvType, Pools, RowKind};

use super::{Attention, AttentionRun, Compression, Entries, EntryScratch, KeyChoice, PoolScores};
use crate::cpu::Cpu;
use crate::kv::{KvCache, KvLayer, KvShape};
use crate::ops::{RopeConfig, RopeLayout, RopeScaling, RopeTable};
use crate::testing::{cpus, random};

const DIM: usize = 40;
const HEADS: usize = 18;
const CONTEXT: usize = 300;
const ROTARY: usize = 8;
const EPSILON: f32 = 1e-6;

/// Layers of the cache of one case.
const KEYS: usize = 0;
const PROJECTIONS: usize = 1;
const ENTRIES: usize = 2;

/// A sequence with random keys and projections.
struct Case {
    ratio: usize,
    overlap: bool,
    cache: KvCache,
    /// Blocks of the keys and projections, and of the entries.
    tables: [Vec<u32>; 2],
    /// Values and gates of the positions.
    projections: [Vec<f32>; 2],
    bias: Vec<f32>,
    norm: Vec<f32>,
    rope: RopeTable,
}

fn shared(dim: usize) -> KvShape {
    KvShape { kv_heads: 1, head_dim_k: dim, head_dim_v: dim, values_in_keys: true }
}

impl Case {
    fn new(cpu: &Cpu, ratio: usize, overlap: bool) -> Case {
        let width = if overlap { 2 * DIM } else { DIM };
        let blocks = CONTEXT.div_ceil(KV_BLOCK);
        let layers = [
            KvLayer::new(shared(DIM), 0),
            KvLayer::new(KvShape { values_in_keys: false, ..shared(width) }, 0),
            KvLayer { shape: shared(DIM), group: 1, span: ratio },
        ];
        let mut cache = KvCache::new(&layers, &[blocks + 1, blocks + 1], KvType::F32).unwrap();
        let keys: Vec<u32> = (1..=blocks as u32).rev().collect();
        let mut entries = keys.clone();
        entries.rotate_left(3);
        let projections = [5, 15].map(|seed| random(seed, CONTEXT * width));
        cache.write(cpu, KEYS, &keys, 0, &random(4, CONTEXT * DIM), &[]);
        cache.write(cpu, PROJECTIONS, &keys, 0, &projections[0], &projections[1]);
        let rope = RopeTable::new(&RopeConfig {
            rotary_dim: ROTARY,
            rotary_from: DIM - ROTARY,
            theta: 10_000.0,
            layout: RopeLayout::Interleaved,
            scaling: RopeScaling::None,
            frequency_factors: None,
            context: CONTEXT,
        });
        Case {
            ratio,
            overlap,
            cache,
            tables: [keys, entries],
            projections,
            bias: random(6, ratio * width),
            norm: random(7, DIM),
            rope: rope.unwrap(),
        }
    }

    fn run(&self, first_position: usize, tokens: usize) -> AttentionRun<'_> {
        AttentionRun { kind: RowKind::Prompt, first_position, tokens, table: &self.tables[0] }
    }

    /// Compresses the positions in pieces that end before `cuts`.
    fn compress(&mut self, cpu: &Cpu, cuts: &[usize]) {
        let mut memory = EntryScratch::default();
        let (mut cache, mut first) = (self.take_cache(), 0);
        for &cut in cuts {
            let what = Compression {
                projections: PROJECTIONS,
                entries: ENTRIES,
                overlap: self.overlap,
                bias: &self.bias,
                norm: &self.norm,
                epsilon: EPSILON,
                rope: &self.rope,
            };
            let runs = [self.run(first, cut - first)];
            cpu.compress(&mut cache, &what, &runs, &[&self.tables[1]], &mut memory);
            first = cut;
        }
        self.cache = cache;
    }

    fn take_cache(&mut self) -> KvCache {
        let empty = KvCache::new(&[], &[], KvType::F32).unwrap();
        std::mem::replace(&mut self.cache, empty)
    }

    fn entry(&self, cpu: &Cpu, entry: usize) -> Vec<f32> {
        self.cache.key(cpu, ENTRIES, &self.tables[1], 0, (entry + 1) * self.ratio - 1)
    }

    /// Returns an entry by the formula.
    fn expected(&self, entry: usize) -> Vec<f64> {
        let parts = if self.overlap { 2 } else { 1 };
        let width = parts * DIM;
        let first = (entry + 1).saturating_sub(parts) * self.ratio;
        let mean = |element: usize| {
            let weighted = (first..(entry + 1) * self.ratio).map(|position| {
                let part = if position < entry * self.ratio { 0 } else { parts - 1 };
                let at = part * DIM + element;
                let [value, gate] =
                    [0, 1].map(|of: usize| f64::from(self.projections[of][position * width + at]));
                let bias = self.bias[position % self.ratio * width + at];
                ((gate + f64::from(bias)).exp(), value)
            });
            let (sum, mean) = weighted.fold((0.0, 0.0), |(s, m), (w, v)| (s + w, m + w * v));
            mean / sum
        };
        let means: Vec<f64> = (0..DIM).map(mean).collect();
        let square = means.iter().map(|x| x * x).sum::<f64>() / DIM as f64;
        let root = (square + f64::from(EPSILON)).sqrt();
        let mut out: Vec<f64> =
            means.iter().zip(&self.norm).map(|(x, w)| x / root * f64::from(*w)).collect();
        for pair in 0..ROTARY / 2 {
            let exponent = -2.0 * pair as f64 / ROTARY as f64;
            let angle = (entry * self.ratio) as f64 * 10_000_f64.powf(exponent);
            let at = DIM - ROTARY + 2 * pair;
            let (a, b) = (out[at], out[at + 1]);
            out[at] = a * angle.cos() - b * angle.sin();
            out[at + 1] = a * angle.sin() + b * angle.cos();
        }
        out
    }
}

#[test]
fn entries_are_weighted_means_however_positions_are_cut() {
    for cpu in cpus() {
        for (ratio, overlap) in [(4, true), (2, true), (16, false), (64, false), (128, true)] {
            let mut whole = Case::new(&cpu, ratio, overlap);
            whole.compress(&cpu, &[CONTEXT]);
            let mut cut = Case::new(&cpu, ratio, overlap);
            let mut cuts: Vec<usize> = (1..=17).collect();
            cuts.extend([18, 40, 41, 127, 128, 130, 255, 299, CONTEXT]);
            cut.compress(&cpu, &cuts);
            for entry in 0..CONTEXT / ratio {
                let found = whole.entry(&cpu, entry);
                assert_eq!(found, cut.entry(&cpu, entry), "{ratio} {overlap} {entry}");
                for (found, expected) in found.iter().zip(whole.expected(entry)) {
                    let off = (f64::from(*found) - expected).abs();
                    assert!(off < 2e-5, "{ratio} {overlap} {entry}: {found} {expected}");
                }
            }
        }
    }
}

/// Returns attention of one row by the formula.
fn attended(
    case: &Case,
    cpu: &Cpu,
    what: &Attention<'_>,
    (position, list): (usize, &[u32]),
    q: &[f32],
) -> Vec<f64> {
    let window = what.first_visible(position)..position + 1;
    let keys = window.map(|at| case.cache.key(cpu, KEYS, &case.tables[0], 0, at));
    let keys: Vec<Vec<f32>> =
        keys.chain(list.iter().map(|entry| case.entry(cpu, *entry as usize))).collect();
    let of_head = |(head, q): (usize, &[f32])| {
        let dot = |key: &Vec<f32>| {
            let products = q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
            products.sum::<f64>() * f64::from(what.scale)
        };
        let weights: Vec<f64> = keys.iter().map(|key| dot(key).exp()).collect();
        let sink = what.sink(head).map_or(0.0, |sink| f64::from(sink).exp());
        let sum = weights.iter().sum::<f64>() + sink;
        let element = |at: usize| {
            let sums = weights.iter().zip(&keys).map(|(w, key)| w * f64::from(key[at]));
            sums.sum::<f64>() / sum
        };
        (0..DIM).map(element).collect::<Vec<f64>>()
    };
    q.chunks_exact(DIM).enumerate().flat_map(of_head).collect()
}

#[test]
fn attention_sees_the_window_and_the_entries() {
    let sinks = random(8, HEADS);
    for cpu in cpus() {
        for (ratio, overlap, window, most) in
            [(4, true, 20, Some(5)), (4, true, 300, None), (128, false, 16, None)]
        {
            let mut case = Case::new(&cpu, ratio, overlap);
            case.compress(&cpu, &[CONTEXT]);
            let what = Attention {
                window: Some(window),
                sinks: Some(&sinks),
                ..Attention::causal(KEYS, HEADS, 0.3)
            };
            let runs = [case.run(299, 1), case.run(0, 40), case.run(120, 12)];
            let tokens: usize = runs.iter().map(|run| run.tokens).sum();
            let positions: Vec<usize> = runs
                .iter()
                .flat_map(|run| (0..run.tokens).map(|at| run.first_position + at))
                .collect();
            let (q, w) = (random(1, tokens * HEADS * DIM), random(2, tokens * HEADS));
            let lists = most.map(|most| {
                let mut lists = vec![u32::MAX; tokens * most];
                let (pools, scores) = (Pools::positions(most), PoolScores::Weighted);
                let what = KeyChoice { layer: ENTRIES, heads: HEADS, dim: DIM, pools, scores };
                let own = runs.map(|run| AttentionRun { table: &case.tables[1], ..run });
                cpu.choose_keys(&q, Some(&w), &case.cache, &what, &own, &mut lists);
                (lists, most)
            });
            let tables = [&case.tables[1][..]; 3];
            let chosen = lists.as_ref().map(|(lists, most)| ChosenKeys {
                lists: &lists[..],
                lists_of_row: 1,
                pools: Pools::positions(*most),
            });
            let entries = Entries { layer: ENTRIES, tables: &tables, chosen };
            let mut out = vec![0.0; q.len()];
            cpu.attention_with_entries(&q, &case.cache, &what, &entries, &runs, &mut out);
            for (row, &position) in positions.iter().enumerate() {
                let q = &q[row * HEADS * DIM..][..HEADS * DIM];
                let all = ((position + 1) / ratio) as u32;
                let list: Vec<u32> = match &lists {
                    Some((lists, most)) if all as usize > *most => {
                        let list = &lists[row * most..][..*most];
                        assert_eq!(list, largest(&case, &cpu, all, q, &w[row * HEADS..], *most));
                        list.to_vec()
                    }
                    _ => (0..all).collect(),
                };
                let found = &out[row * HEADS * DIM..][..HEADS * DIM];
                let expected = attended(&case, &cpu, &what, (position, &list), q);
                for (found, expected) in found.iter().zip(expected) {
                    let off = (f64::from(*found) - expected).abs();
                    assert!(off < 2e-5, "{ratio} {position}: {found} {expected}");
                }
                // Alone, the row has the same bits.
                let mut alone = vec![0.0; HEADS * DIM];
                let positions = chosen.map(|of| &of.lists[row * of.pools.most..][..of.pools.most]);
                let chosen = chosen.zip(positions).map(|(of, lists)| ChosenKeys { lists, ..of });
                let own = Entries { tables: &tables[..1], chosen, ..entries };
                cpu.attention_with_entries(
                    q,
                    &case.cache,
                    &what,
                    &own,
                    &[case.run(position, 1)],
                    &mut alone,
                );
                assert_eq!(alone, found, "{ratio} {position}");
            }
        }
    }
}

/// Returns the entries with the largest scores of an indexer, by the formula.
fn largest(case: &Case, cpu: &Cpu, all: u32, q: &[f32], w: &[f32], most: usize) -> Vec<u32> {
    let score = |entry: &u32| {
        let key = case.entry(cpu, *entry as usize);
        let of_head = |(q, w): (&[f32], &f32)| {
            let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            f64::from(*w) * dot.max(0.0)
        };
        q.chunks_exact(DIM).zip(w).map(of_head).sum::<f64>()
    };
    let mut order: Vec<(f64, u32)> = (0..all).map(|entry| (score(&entry), entry)).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut list: Vec<u32> = order[..most].iter().map(|(_, entry)| *entry).collect();
    list.sort_unstable();
    list
}

#[test]
fn a_rotation_back_undoes_a_rotation() {
    for cpu in cpus() {
        let case = Case::new(&cpu, 4, true);
        let x = random(3, 3 * 2 * DIM);
        let mut turned = x.clone();
        cpu.rope(&mut turned, DIM, &[0, 7, 299], &case.rope);
        assert_ne!(turned, x);
        cpu.rope_back(&mut turned, DIM, &[0, 7, 299], &case.rope);
        assert!(turned.iter().zip(&x).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
