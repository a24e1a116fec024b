//! Comparison of both kernels with plain f64 attention.

use forebay_ops::{ChosenKeys, KV_BLOCK, KvType, Pools, RowKind};

use super::choice::RowLists;
use super::{Attention, AttentionRun, RelativeBias, decode, prompt};
use crate::cpu::{Arithmetic, Cpu, Isa};
use crate::kv::tests::stored;
use crate::kv::{KvCache, KvLayer, KvShape};
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
    /// Blocks of the only sequence, in no order.
    table: Vec<u32>,
}

fn shape(kv_heads: usize, (head_dim_k, head_dim_v): (usize, usize)) -> KvShape {
    KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys: false }
}

/// Returns a table whose blocks are in no order for `context` positions, and the number of blocks of its pool.
fn shuffled(context: usize) -> (Vec<u32>, usize) {
    let blocks = context.div_ceil(KV_BLOCK);
    let mut table: Vec<u32> = (1..=blocks as u32).rev().collect();
    table.rotate_left(blocks / 3);
    (table, blocks + 1)
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
        Case::of(heads, shape(kv_heads, (head_dim_k, head_dim_v)), context, kind)
    }

    fn of(heads: usize, shape: KvShape, context: usize, kind: KvType) -> Case {
        let KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys } = shape;
        let q = random(1, context * heads * head_dim_k).iter().map(|x| x * 3.0).collect();
        let k = random(2, context * kv_heads * head_dim_k);
        let v = if values_in_keys { 0 } else { context * kv_heads * head_dim_v };
        let v = random(3, v);
        let (table, blocks) = shuffled(context);
        let layer = KvLayer::new(shape, 0);
        let mut cache = KvCache::new(&[layer; 2], &[blocks], kind).unwrap();
        let cpu = Cpu::new(1, Isa::detect(), Arithmetic::Fast);
        cache.write(&cpu, 1, &table, 0, &k, &v);
        let k: Vec<f32> = k.chunks(head_dim_k).flat_map(|row| stored(row, kind)).collect();
        let v = match values_in_keys {
            true => k.chunks(head_dim_k).flat_map(|k| &k[..head_dim_v]).copied().collect(),
            false => v.chunks(head_dim_v).flat_map(|row| stored(row, kind)).collect(),
        };
        Case { heads, shape, kind, q, k, v, cache, table }
    }

    fn what(&self) -> Attention<'static> {
        Attention::causal(1, self.heads, 0.3)
    }

    /// Computes `tokens` rows from position `first` on.
    fn run(
        &self,
        cpu: &Cpu,
        what: &Attention<'_>,
        kind: RowKind,
        (first, tokens): (usize, usize),
    ) -> Vec<f32> {
        self.run_all(cpu, what, &[(kind, first, tokens)])
    }

    /// Computes several runs in one call.
    fn run_all(
        &self,
        cpu: &Cpu,
        what: &Attention<'_>,
        runs: &[(RowKind, usize, usize)],
    ) -> Vec<f32> {
        let row = self.heads * self.shape.head_dim_k;
        let q: Vec<f32> = runs
            .iter()
            .flat_map(|(_, first, tokens)| &self.q[first * row..][..tokens * row])
            .copied()
            .collect();
        let mut out = vec![f32::NAN; q.len() / row * self.heads * self.shape.head_dim_v];
        let table = &self.table[..];
        let run = |&(kind, first_position, tokens): &(RowKind, usize, usize)| AttentionRun {
            kind,
            first_position,
            tokens,
            table,
        };
        let runs: Vec<AttentionRun<'_>> = runs.iter().map(run).collect();
        cpu.attention(&q, &self.cache, what, &runs, &mut out);
        out
    }

    /// Computes the same from the definition, in f64.
    fn reference(&self, what: &Attention<'_>, (first, tokens): (usize, usize)) -> Vec<f64> {
        let KvShape { kv_heads, head_dim_k, head_dim_v, .. } = self.shape;
        let mut out = Vec::new();
        for (token, head) in (0..tokens).flat_map(|t| (0..self.heads).map(move |h| (t, h))) {
            let position = first + token;
            let kv_head = head / (self.heads / kv_heads);
            let q = &self.q[(position * self.heads + head) * head_dim_k..][..head_dim_k];
            let choice = what.chosen.and_then(|chosen| chosen.of(token, position));
            let list = choice.map(|of| of.positions(kv_head, 0..of.seen()).collect::<Vec<_>>());
            let sees = |other: usize| {
                what.window.is_none_or(|window| match what.chunked {
                    true => other / window == position / window,
                    false => other + window > position,
                }) && list.as_ref().is_none_or(|list| list.contains(&other))
            };
            let seen: Vec<usize> = (0..=position).filter(|&other| sees(other)).collect();
            let scores: Vec<f64> = seen
                .iter()
                .map(|other| {
                    let k = &self.k[(other * kv_heads + kv_head) * head_dim_k..][..head_dim_k];
                    let dot: f64 =
                        q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
                    let bias = what.relative.map_or(0.0, |of| {
                        let (extent, distance) = (of.profiles.len() / of.rank, position - other);
                        let number = token * self.heads + head;
                        let mixes = of.mixes[number * of.rank..][..of.rank].iter().enumerate();
                        let profile = |at: usize| of.profiles[(at + 1) * extent - 1 - distance];
                        let products =
                            mixes.map(|(at, mix)| f64::from(*mix) * f64::from(profile(at)));
                        if distance < extent { products.sum::<f64>() } else { 0.0 }
                    });
                    let score = dot * f64::from(what.scale) + bias;
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

    /// Checks both kinds of rows on every backend against one reference.
    fn check(&self, cpus: &[Cpu], what: &Attention<'_>, rows: (usize, usize)) {
        let reference = self.reference(what, rows);
        for (cpu, kind) in cpus.iter().flat_map(|cpu| ROW_KINDS.map(|kind| (cpu, kind))) {
            let out = self.run(cpu, what, kind, rows);
            assert_eq!(out.len(), reference.len());
            for (i, (&x, exact)) in out.iter().zip(&reference).enumerate() {
                assert!(
                    (f64::from(x) - exact).abs() < 1e-5,
                    "{} kernels, {:?}, {:?}, {kind:?} rows {rows:?}, {what:?}: out[{i}] = {x}, not {exact}",
                    cpu.isa(),
                    self.shape,
                    self.kind
                );
            }
        }
    }
}

const ROW_KINDS: [RowKind; 2] = [RowKind::Prompt, RowKind::Decode];

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
                for rows in [(0, 1), (99, 1), (0, 2), (3, 5), (60, 30), (0, 100)] {
                    case.check(&cpus, &Attention { window, ..case.what() }, rows);
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
            let shape = KvShape { values_in_keys: true, ..shape(kv_heads, dims) };
            let case = Case::of(heads, shape, 300, kind);
            for rows in [(0, 1), (299, 1), (3, 5), (250, 30)] {
                let scale = 1.0 / (dims.0 as f32).sqrt();
                case.check(&cpus, &Attention { scale, ..case.what() }, rows);
                let window = Some(70);
                case.check(&cpus, &Attention { scale, window, ..case.what() }, rows);
            }
        }
    }
}

#[test]
fn blocks_before_the_window_are_not_needed() {
    let (window, context) = (150, 1400);
    for kind in KINDS {
        let case = Case::new(4, 2, (40, 24), context, kind);
        for cpu in cpus() {
            for (row_kind, first, tokens) in [
                (RowKind::Prompt, 700, 100),
                (RowKind::Prompt, 933, 1),
                (RowKind::Decode, 700, 1),
                (RowKind::Decode, 1399, 1),
            ] {
                let what = Attention { window: Some(window), ..case.what() };
                let mut table = case.table.clone();
                table[..(first + 1 - window) / KV_BLOCK].fill(0);
                let run =
                    AttentionRun { kind: row_kind, first_position: first, tokens, table: &table };
                let mut out = vec![f32::NAN; tokens * 4 * 24];
                let q = &case.q[first * 160..(first + tokens) * 160];
                cpu.attention(q, &case.cache, &what, &[run], &mut out);
                let whole = case.run(&cpu, &what, row_kind, (first, tokens));
                assert!(out == whole, "{kind:?} {row_kind:?} {tokens} at {first}");
            }
        }
    }
}

#[test]
fn chunks_hide_what_is_before_them() {
    for kind in KINDS {
        let case = Case::new(4, 2, (40, 24), 700, kind);
        for window in [1, 7, 16, 64, 150, 512, 1000] {
            let what = Attention { window: Some(window), chunked: true, ..case.what() };
            for rows in [(0, 40), (149, 3), (500, 64), (699, 1)] {
                case.check(&cpus(), &what, rows);
            }
        }
    }
}

#[test]
fn groups_larger_than_a_tile_work() {
    let case = Case::new(prompt::ROWS + 5, 1, (8, 8), 20, KvType::F16);
    for rows in [(19, 1), (0, 20), (5, 3)] {
        case.check(&cpus(), &case.what(), rows);
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
                let what = Attention { window, ..case.what() };
                case.check(&cpus, &what, (position, 1));
                let start = position - prompt::KEYS / 2;
                case.check(&cpus, &what, (start, prompt::KEYS / 2));
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
            for rows in [(99, 1), (10, 90)] {
                case.check(&cpus(), &Attention { softcap, sinks, ..case.what() }, rows);
            }
        }
    }
}

#[test]
fn biases_by_distance_agree_with_f64_and_have_the_same_bits_wherever_a_prompt_is_cut() {
    let (context, rank) = (330, 3);
    for (heads, kv_heads, window) in [(4, 2, None), (6, 2, Some(70)), (3, 3, None)] {
        let case = Case::new(heads, kv_heads, (24, 16), context, KvType::F32);
        let mixes = random(11, context * heads * rank);
        for extent in [1, 20, 70, 400] {
            let profiles = random(12, rank * extent);
            let of = |first: usize| {
                let mixes = &mixes[first * heads * rank..];
                let relative = Some(RelativeBias { mixes, profiles: &profiles, rank });
                Attention { window, relative, ..case.what() }
            };
            for rows in [(0, 1), (329, 1), (3, 5), (250, 30), (0, 330)] {
                case.check(&cpus(), &of(rows.0), rows);
            }
            let row = heads * 16;
            for (cpu, kind) in cpus().iter().flat_map(|cpu| ROW_KINDS.map(|kind| (cpu, kind))) {
                let whole = case.run(cpu, &of(0), kind, (0, context));
                for (first, tokens) in [(0, 1), (1, 63), (64, 200), (264, 66)] {
                    let own = case.run(cpu, &of(first), kind, (first, tokens));
                    assert!(own == whole[first * row..][..tokens * row], "{kind:?} from {first}");
                }
                // Rows that are not the first of their call.
                let beside = [(kind, 0, 5), (kind, 5, 60)];
                assert!(case.run_all(cpu, &of(0), &beside) == whole[..65 * row], "{kind:?}");
            }
        }
    }
}

#[test]
fn rows_have_the_same_bits_wherever_a_prompt_is_cut_and_whatever_is_beside_them() {
    for kind in KINDS {
        let case = Case::new(6, 2, (40, 24), 700, kind);
        let row = case.heads * case.shape.head_dim_v;
        let sinks = [-2.0, 0.0, 1.5, 30.0, 1.0, 2.0];
        for cpu in cpus() {
            for (window, softcap, sinks) in [
                (None, None, None),
                (Some(33), None, Some(&sinks[..])),
                (Some(300), Some(5.0), None),
            ] {
                let what = Attention { window, softcap, sinks, ..case.what() };
                for row_kind in ROW_KINDS {
                    let whole = case.run(&cpu, &what, row_kind, (0, 700));
                    // Cuts inside tiles, at their ends, and single rows.
                    let cuts = [0, 1, 2, 47, 64, 65, 200, 256, 257, 511, 640, 699, 700];
                    let runs: Vec<_> =
                        cuts.windows(2).map(|cut| (row_kind, cut[0], cut[1] - cut[0])).collect();
                    for run in &runs {
                        let own = case.run_all(&cpu, &what, &[*run]);
                        assert!(own == whole[run.1 * row..][..own.len()], "{kind:?} {run:?}");
                    }
                    assert!(case.run_all(&cpu, &what, &runs) == whole, "{kind:?} {row_kind:?}");
                }
                // Rows of both kinds in one call.
                let mixed = [
                    (RowKind::Decode, 699, 1),
                    (RowKind::Decode, 5, 1),
                    (RowKind::Prompt, 100, 70),
                    (RowKind::Prompt, 300, 1),
                ];
                let alone: Vec<f32> =
                    mixed.iter().flat_map(|run| case.run_all(&cpu, &what, &[*run])).collect();
                assert!(case.run_all(&cpu, &what, &mixed) == alone, "{kind:?}");
            }
        }
    }
}

#[test]
fn both_kinds_of_rows_agree() {
    let case = Case::new(8, 2, (32, 32), 300, KvType::F16);
    for cpu in cpus() {
        for window in [None, Some(33)] {
            let what = Attention { window, ..case.what() };
            let [prompt, decode] = ROW_KINDS.map(|kind| case.run(&cpu, &what, kind, (0, 300)));
            for (a, b) in prompt.iter().zip(&decode) {
                assert!((a - b).abs() < 1e-5);
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
            let of = |kind, rows| case.run(&cpu, &case.what(), kind, rows);
            (of(RowKind::Decode, (690, 10)), of(RowKind::Prompt, (100, 600)))
        };
        let alone = run(1);
        for threads in [2, 3, 7] {
            assert!(run(threads) == alone);
        }
    }
}

fn by_position(lists: &[u32], most: usize) -> ChosenKeys<&[u32]> {
    ChosenKeys { lists, lists_of_row: 1, pools: Pools::positions(most) }
}

/// Returns lists of `most` positions for the rows from position `first` on. Rows that see all positions have zeroes.
fn lists(first: usize, tokens: usize, most: usize) -> Vec<u32> {
    let list = |position: usize| -> Vec<u32> {
        if position < most {
            return vec![0; most];
        }
        let step = (position + 1) / most;
        (0..most).map(|at| (at * step + position % step) as u32).collect()
    };
    (first..first + tokens).flat_map(list).collect()
}

#[test]
fn rows_see_the_chosen_positions_only() {
    for cpu in cpus() {
        for kind in KINDS {
            for values_in_keys in [false, true] {
                let shape = KvShape { values_in_keys, ..shape(2, (40, 24)) };
                let case = Case::of(6, shape, 600, kind);
                for (first, tokens, most) in [(0, 40, 5), (290, 20, 300), (590, 9, 270), (3, 2, 9)]
                {
                    let positions = lists(first, tokens, most);
                    let chosen = Some(by_position(&positions, most));
                    let what = Attention { chosen, ..case.what() };
                    let expected = case.reference(&what, (first, tokens));
                    for row in [RowKind::Prompt, RowKind::Decode] {
                        let out = case.run(&cpu, &what, row, (first, tokens));
                        for (a, b) in expected.iter().zip(&out) {
                            assert!((a - f64::from(*b)).abs() < 1e-4, "{kind:?} {first} {most}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn rows_with_few_positions_have_the_bits_of_rows_that_see_all() {
    for cpu in cpus() {
        let case = Case::new(4, 1, (32, 32), 300, KvType::F16);
        let zeroes = vec![0; 300 * 300];
        let chosen = Some(by_position(&zeroes, 300));
        for kind in [RowKind::Prompt, RowKind::Decode] {
            let run = |what: &Attention<'_>| case.run(&cpu, what, kind, (7, 290));
            assert_eq!(run(&Attention { chosen, ..case.what() }), run(&case.what()));
        }
    }
}

#[test]
fn chosen_positions_give_the_same_bits_wherever_a_prompt_is_cut() {
    for cpu in cpus() {
        let case = Case::new(4, 2, (32, 32), 700, KvType::F16);
        let most = 280;
        let run = |runs: &[(RowKind, usize, usize)]| {
            let lists: Vec<u32> =
                runs.iter().flat_map(|&(_, first, tokens)| lists(first, tokens, most)).collect();
            let chosen = Some(by_position(&lists, most));
            case.run_all(&cpu, &Attention { chosen, ..case.what() }, runs)
        };
        let (prompt, decode) = (RowKind::Prompt, RowKind::Decode);
        let whole = run(&[(prompt, 200, 450)]);
        assert_eq!(run(&[(prompt, 200, 79), (prompt, 279, 3), (prompt, 282, 368)]), whole);
        let beside =
            run(&[(decode, 500, 1), (decode, 20, 1), (prompt, 200, 450), (prompt, 600, 9)]);
        let row = 4 * 32;
        assert_eq!(beside[2 * row..][..450 * row], whole);
        assert_eq!(beside[..row], run(&[(decode, 500, 1)]));
    }
}

#[test]
fn chosen_positions_side_by_side_have_the_bits_of_a_shorter_context() {
    for cpu in cpus() {
        for values_in_keys in [false, true] {
            let shape = KvShape { values_in_keys, ..shape(1, (40, 40)) };
            let case = Case::of(5, shape, 500, KvType::F16);
            let most = 333;
            // The row at position 400 asks with the query of position 332.
            let positions: Vec<u32> = (0..most as u32).collect();
            let chosen = Some(by_position(&positions, most));
            let mut moved = Case::of(5, shape, 500, KvType::F16);
            let row = 5 * 40;
            let query = case.q[332 * row..][..row].to_vec();
            moved.q[400 * row..][..row].copy_from_slice(&query);
            let what = Attention { chosen, ..case.what() };
            let sparse = moved.run(&cpu, &what, RowKind::Decode, (400, 1));
            assert_eq!(sparse, case.run(&cpu, &case.what(), RowKind::Decode, (332, 1)));
        }
    }
}

#[test]
fn every_key_value_head_sees_the_pools_of_its_own_list() {
    for cpu in cpus() {
        let case = Case::of(6, shape(2, (40, 24)), 600, KvType::F32);
        for (length, own_seen, most) in [(8, true, 3), (4, false, 5), (16, true, 2), (128, true, 3)]
        {
            let pools = Pools { length, most, own_seen, before_own: 0 };
            for (first, tokens) in [(0, 40), (500, 70)] {
                // Lists of the two heads begin at different pools.
                let lists: Vec<u32> = (first..first + tokens)
                    .flat_map(|position| [(position, 0), (position, 1)])
                    .flat_map(|(position, head)| {
                        let left = pools.candidates(position).saturating_sub(most);
                        (0..most).map(move |at| (at + (position + 3 * head) % (left + 1)) as u32)
                    })
                    .collect();
                let chosen = Some(ChosenKeys { lists: &lists[..], lists_of_row: 2, pools });
                let what = Attention { chosen, ..case.what() };
                let expected = case.reference(&what, (first, tokens));
                for row in [RowKind::Prompt, RowKind::Decode] {
                    let out = case.run(&cpu, &what, row, (first, tokens));
                    for (a, b) in expected.iter().zip(&out) {
                        assert!((a - f64::from(*b)).abs() < 1e-4, "{pools:?} {first}");
                    }
                }
            }
        }
    }
}
