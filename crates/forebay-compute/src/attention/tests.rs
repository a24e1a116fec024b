//! Comparison of both kernels with plain f64 attention.

use super::{Attention, decode, prompt};
use crate::cpu::{Arithmetic, Cpu, Isa};
use crate::kv::tests::stored;
use crate::kv::{KvCache, KvShape, KvType};
use crate::testing::{cpus, random};

/// A problem, its inputs, and a cache filled with them.
struct Case {
    heads: usize,
    shape: KvShape,
    kind: KvType,
    q: Vec<f32>,
    /// Keys as they are stored.
    k: Vec<f32>,
    v: Vec<f32>,
    cache: KvCache,
}

fn shape(kv_heads: usize, (head_dim_k, head_dim_v): (usize, usize), context: usize) -> KvShape {
    let (values_in_keys, window, rows) = (false, None, context);
    KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys, context, window, rows }
}

const KINDS: [KvType; 4] = [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0];

impl Case {
    fn new(
        heads: usize,
        kv_heads: usize,
        dims: (usize, usize),
        context: usize,
        kind: KvType,
    ) -> Case {
        let (head_dim_k, head_dim_v) = dims;
        Case::of(heads, shape(kv_heads, (head_dim_k, head_dim_v), context), kind)
    }

    fn of(heads: usize, shape: KvShape, kind: KvType) -> Case {
        let KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys, context, .. } = shape;
        let q = random(1, context * heads * head_dim_k).iter().map(|x| x * 3.0).collect();
        let k = random(2, context * kv_heads * head_dim_k);
        let v = if values_in_keys { 0 } else { context * kv_heads * head_dim_v };
        let v = random(3, v);
        let mut cache = KvCache::new(&[shape; 2], kind).unwrap();
        let cpu = Cpu::new(1, Isa::detect(), Arithmetic::Fast);
        cache.append(&cpu, 1, 0, &k, &v).unwrap();
        let k: Vec<f32> = k.chunks(head_dim_k).flat_map(|row| stored(row, kind)).collect();
        let v = match values_in_keys {
            true => k.chunks(head_dim_k).flat_map(|k| &k[..head_dim_v]).copied().collect(),
            false => v.chunks(head_dim_v).flat_map(|row| stored(row, kind)).collect(),
        };
        Case { heads, shape, kind, q, k, v, cache }
    }

    fn what(&self, first_position: usize) -> Attention<'static> {
        Attention::causal(1, self.heads, first_position, 0.3)
    }

    fn run(&self, cpu: &Cpu, what: &Attention<'_>, tokens: usize) -> Vec<f32> {
        let row = self.heads * self.shape.head_dim_k;
        let q = &self.q[what.first_position * row..][..tokens * row];
        let mut out = vec![f32::NAN; tokens * self.heads * self.shape.head_dim_v];
        cpu.attention(q, &self.cache, what, &mut out);
        out
    }

    /// Computes the same from the definition, in f64.
    fn reference(&self, what: &Attention<'_>, tokens: usize) -> Vec<f64> {
        let KvShape { kv_heads, head_dim_k, head_dim_v, .. } = self.shape;
        let mut out = Vec::new();
        for (token, head) in (0..tokens).flat_map(|t| (0..self.heads).map(move |h| (t, h))) {
            let position = what.first_position + token;
            let kv_head = head / (self.heads / kv_heads);
            let q = &self.q[(position * self.heads + head) * head_dim_k..][..head_dim_k];
            let sees = |other: usize| what.window.is_none_or(|window| other + window > position);
            let seen: Vec<usize> = (0..=position).filter(|&other| sees(other)).collect();
            let scores: Vec<f64> = seen
                .iter()
                .map(|other| {
                    let k = &self.k[(other * kv_heads + kv_head) * head_dim_k..][..head_dim_k];
                    let dot: f64 =
                        q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                    let score = dot * f64::from(what.scale);
                    what.softcap
                        .map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
                })
                .collect();
            let sink = what.sinks.map(|sinks| f64::from(sinks[head]).exp());
            let sum = scores.iter().map(|s| s.exp()).sum::<f64>() + sink.unwrap_or(0.0);
            for i in 0..head_dim_v {
                let weighted = seen.iter().zip(&scores).map(|(other, score)| {
                    let v = self.v[(other * kv_heads + kv_head) * head_dim_v + i];
                    score.exp() / sum * f64::from(v)
                });
                out.push(weighted.sum());
            }
        }
        out
    }

    /// Checks every backend against one reference.
    fn check(&self, cpus: &[Cpu], what: &Attention<'_>, tokens: usize) {
        let reference = self.reference(what, tokens);
        for cpu in cpus {
            let out = self.run(cpu, what, tokens);
            assert_eq!(out.len(), reference.len());
            for (i, (&x, exact)) in out.iter().zip(&reference).enumerate() {
                assert!(
                    (f64::from(x) - exact).abs() < 1e-5,
                    "{} kernels, {:?}, {:?}, {tokens} tokens, {what:?}: out[{i}] = {x}, not {exact}",
                    cpu.isa(),
                    self.shape,
                    self.kind
                );
            }
        }
    }
}

#[test]
fn every_group_window_and_tail_agrees_with_f64() {
    let cpus = cpus();
    let shapes = [
        (1, 1, (8, 8)),
        (4, 4, (64, 64)),
        (4, 2, (16, 24)),
        (6, 2, (20, 12)),
        (14, 2, (64, 64)),
        (9, 1, (40, 33)),
    ];
    for (heads, kv_heads, dims) in shapes {
        for kind in KINDS {
            let case = Case::new(heads, kv_heads, dims, 100, kind);
            for window in [None, Some(1), Some(16), Some(70)] {
                for (first, tokens) in [(0, 1), (99, 1), (0, 2), (3, 5), (60, 30), (0, 100)] {
                    case.check(&cpus, &Attention { window, ..case.what(first) }, tokens);
                }
            }
        }
    }
}

#[test]
fn values_in_keys_agree_with_f64() {
    let cpus = cpus();
    // The shape of DeepSeek, and lengths that do not fill vectors.
    for (heads, kv_heads, dims) in
        [(16, 1, (576, 512)), (3, 1, (44, 37)), (6, 2, (20, 20)), (2, 1, (12, 3))]
    {
        for kind in KINDS {
            let shape = KvShape { values_in_keys: true, ..shape(kv_heads, dims, 300) };
            let case = Case::of(heads, shape, kind);
            for (first, tokens) in [(0, 1), (299, 1), (3, 5), (250, 30)] {
                let scale = 1.0 / (dims.0 as f32).sqrt();
                case.check(&cpus, &Attention { scale, ..case.what(first) }, tokens);
                let window = Some(70);
                case.check(&cpus, &Attention { scale, window, ..case.what(first) }, tokens);
            }
        }
    }
}

#[test]
fn a_cache_that_keeps_a_window_gives_the_bits_of_one_that_keeps_all() {
    let (window, context) = (150, 1400);
    for kind in KINDS {
        let case = Case::new(4, 2, (40, 24), context, kind);
        let rows = KvShape::rows_for_window(window, 100, context);
        assert!(rows < 300);
        let shape = KvShape { window: Some(window), rows, ..case.shape };
        let (k, v) = (random(2, context * 2 * 40), random(3, context * 2 * 24));
        for cpu in cpus() {
            let mut cache = KvCache::new(&[shape; 2], kind).unwrap();
            let mut first = 0;
            // Alternating prompts and single tokens that cross the ends of rows and of chunks.
            for tokens in [100, 1, 77, 70, 1, 1, 5, 1].into_iter().cycle() {
                let end = first + tokens;
                if end > context {
                    break;
                }
                cache
                    .append(&cpu, 1, first, &k[first * 80..end * 80], &v[first * 48..end * 48])
                    .unwrap();
                let what = Attention { window: Some(window), ..case.what(first) };
                let mut out = vec![f32::NAN; tokens * 4 * 24];
                cpu.attention(&case.q[first * 160..end * 160], &cache, &what, &mut out);
                assert!(out == case.run(&cpu, &what, tokens), "{kind:?} {tokens} at {first}");
                first = end;
            }
            assert!(first > 4 * rows);
        }
    }
}

#[test]
fn groups_larger_than_a_tile_work() {
    let case = Case::new(prompt::ROWS + 5, 1, (8, 8), 20, KvType::F16);
    for (first, tokens) in [(19, 1), (0, 20), (5, 3)] {
        case.check(&cpus(), &case.what(first), tokens);
    }
}

#[test]
fn chunk_and_tile_edges_agree_with_f64() {
    let context = 2 * decode::CHUNK + 3;
    let case = Case::new(2, 1, (16, 16), context, KvType::F16);
    let edges = [prompt::KEYS, decode::CHUNK, 2 * decode::CHUNK];
    let cpus = cpus();
    for edge in edges {
        for position in edge - 2..edge + 2 {
            for window in [None, Some(edge), Some(edge - 1), Some(300), Some(7)] {
                let what = Attention { window, ..case.what(position) };
                case.check(&cpus, &what, 1);
                let start = position - prompt::KEYS / 2;
                let what = Attention { window, ..case.what(start) };
                case.check(&cpus, &what, prompt::KEYS / 2);
            }
        }
    }
}

#[test]
fn sinks_and_caps_agree_with_f64() {
    let case = Case::new(4, 2, (24, 16), 100, KvType::F32);
    let sinks = [-2.0, 0.0, 1.5, 30.0];
    for softcap in [None, Some(2.0), Some(50.0)] {
        for sinks in [None, Some(&sinks[..])] {
            for (first, tokens) in [(99, 1), (10, 90)] {
                case.check(&cpus(), &Attention { softcap, sinks, ..case.what(first) }, tokens);
            }
        }
    }
}

#[test]
fn a_prompt_gives_what_its_tokens_give_one_by_one() {
    let case = Case::new(8, 2, (32, 32), 300, KvType::F16);
    for cpu in cpus() {
        for window in [None, Some(33)] {
            let row = case.heads * case.shape.head_dim_v;
            let together = case.run(&cpu, &Attention { window, ..case.what(0) }, 300);
            for position in 0..300 {
                let alone = case.run(&cpu, &Attention { window, ..case.what(position) }, 1);
                for (a, b) in alone.iter().zip(&together[position * row..]) {
                    assert!((a - b).abs() < 1e-5);
                }
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let case = Case::new(8, 2, (64, 64), 700, KvType::F16);
    for isa in Isa::supported() {
        let run = |threads| {
            let cpu = Cpu::new(threads, isa, Arithmetic::Fast);
            (case.run(&cpu, &case.what(699), 1), case.run(&cpu, &case.what(100), 600))
        };
        let alone = run(1);
        for threads in [2, 3, 7] {
            assert!(run(threads) == alone);
        }
    }
}
