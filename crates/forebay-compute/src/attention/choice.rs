//! The choice of the keys that a row attends to, by scores that are cheaper than attention's (DeepSeek-AI 2025,
//! "DeepSeek-V3.2", the lightning indexer).
//!
//! An indexer has heads of its own, which share one key per position. The score of a key is the sum over the heads of
//! the head's weight times the positive part of the dot product of its query and the key. A row sees the `most` keys with
//! the largest scores. Of equal scores, the lower position is taken first. Score and choice of a row depend on its own
//! query and on the keys, and on nothing else. Keys may be those of compressed entries, which stand for several positions each
//! ([`KvCache::span`]). Then a row sees the entries that end at its position or before it, and lists name entries.

use std::ops::Range;

use super::AttentionRun;
use super::prompt::{KEY_BLOCK, STRIP, score_block};
use crate::buffer::SharedSlice;
use crate::cpu::Cpu;
use crate::kv::{KV_BLOCK, KvCache, Widen, with_rows};
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Number of positions of a task, a multiple of [`KV_BLOCK`].
const SHARE: usize = 256;

/// Number of scores that are in memory at once, if one row has no more.
const SCORES: usize = 1 << 20;

/// Parameters of one choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyChoice {
    /// Layer of the cache with the indexer's keys, which has one key/value head.
    pub layer: usize,
    /// Number of the indexer's heads.
    pub heads: usize,
    /// Number of keys that a row sees.
    pub most: usize,
}

/// The positions that rows of attention see.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ChosenKeys<'a> {
    /// Ascending positions `[rows, most]`. Rows with no more than `most` positions up to their own see all of them, and
    /// their lists are not read.
    pub positions: &'a [u32],
    /// Number of positions of a list.
    pub most: usize,
}

impl<'a> ChosenKeys<'a> {
    /// Returns the list of a row at `position`, or `None` if it sees all positions.
    pub(super) fn of(&self, row: usize, position: usize) -> Option<&'a [u32]> {
        (position >= self.most).then(|| &self.positions[row * self.most..][..self.most])
    }

    /// Returns the lists from row `first` on.
    pub(super) fn rows_from(&self, first: usize) -> ChosenKeys<'a> {
        ChosenKeys { positions: &self.positions[first * self.most..], ..*self }
    }

    /// Returns the number of the run's first rows that see all positions.
    pub(super) fn rows_that_see_all(&self, run: &AttentionRun<'_>) -> usize {
        self.most.saturating_sub(run.first_position).min(run.tokens)
    }

    pub(super) fn check(&self, runs: &[AttentionRun<'_>]) {
        assert!(self.most > 0, "attention: rows that see nothing");
        let rows: usize = runs.iter().map(|run| run.tokens).sum();
        assert!(self.positions.len() >= rows * self.most, "attention: missing lists");
        let tokens = runs.iter().flat_map(|run| (0..run.tokens).map(|at| run.first_position + at));
        for (row, position) in tokens.enumerate() {
            let last = self.of(row, position).and_then(<[u32]>::last);
            assert!(last.is_none_or(|&last| last as usize <= position), "attention: a later key");
        }
    }
}

/// A row whose keys are chosen.
#[derive(Clone, Copy)]
struct Row<'a> {
    /// Number of the row in its pass.
    index: usize,
    /// Number of keys to choose from.
    end: usize,
    table: &'a [u32],
}

/// Returns the rows of all runs with more than `most` keys to choose from, each of which stands for `span` positions.
fn rows<'a>(
    runs: &'a [AttentionRun<'a>],
    most: usize,
    span: usize,
) -> impl Iterator<Item = Row<'a>> {
    let tokens = runs.iter().flat_map(|run| (0..run.tokens).map(move |token| (run, token)));
    let rows = tokens.enumerate().map(move |(index, (run, token))| Row {
        index,
        end: (run.first_position + token + 1) / span,
        table: run.table,
    });
    rows.filter(move |row| row.end > most)
}

impl Cpu {
    /// Chooses the keys of every row. `q` is `[rows, heads, dim]`, `weights` `[rows, heads]` and `chosen` `[rows, most]`, with
    /// the rows of all `runs` one after the other. The rows' own keys must already be in the cache. A list gets ascending
    /// positions. Those of rows that see all positions get zeroes.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together, if `most` or `heads` is 0, or if a table has no entry for a position that
    /// a row sees.
    pub fn choose_keys(
        &self,
        q: &[f32],
        weights: &[f32],
        cache: &KvCache,
        what: &KeyChoice,
        runs: &[AttentionRun<'_>],
        chosen: &mut [u32],
    ) {
        let KeyChoice { layer, heads, most } = *what;
        let (dim, span) = (cache.shape(layer).head_dim_k, cache.span(layer));
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        assert!(heads > 0 && most > 0, "choose_keys: {what:?}");
        assert_eq!(q.len(), tokens * heads * dim, "choose_keys: q is not [rows, heads, dim]");
        assert_eq!(weights.len(), tokens * heads, "choose_keys: weights are not [rows, heads]");
        assert!(chosen.len() >= tokens * most, "choose_keys: missing lists");
        // Lists of rows that are not reached, because the pool was told to stop, name a position that exists.
        chosen[..tokens * most].fill(0);
        let mut left = rows(runs, most, span).peekable();
        let mut shared = self.shared_scratch();
        while let Some(first) = left.next() {
            // As many rows as have room. They follow one another, except for rows that see all positions.
            let (mut last, mut end) = (first, first.end);
            let rows_of = |end: usize| SCORES / end.next_multiple_of(SHARE);
            let mut count = 1;
            while let Some(next) = left.peek() {
                let longer = end.max(next.end);
                if rows_of(longer) <= count {
                    break;
                }
                (last, end, count) = (*next, longer, count + 1);
                left.next();
            }
            let stride = end.next_multiple_of(SHARE);
            let indices = first.index..=last.index;
            let group = || rows(runs, most, span).filter(|row| indices.contains(&row.index));
            let scores = shared.floats(count * stride);
            self.score_keys(q, weights, cache, what, group, stride, scores);
            self.take_largest(group, stride, scores, most, chosen);
        }
    }

    /// Computes the scores `[rows, stride]` of a group of rows.
    #[expect(clippy::too_many_arguments, reason = "a step of one operation")]
    fn score_keys<'a, I: Iterator<Item = Row<'a>>>(
        &self,
        q: &[f32],
        weights: &[f32],
        cache: &KvCache,
        what: &KeyChoice,
        rows: impl Fn() -> I + Sync,
        stride: usize,
        scores: &mut [f32],
    ) {
        let (heads, key_stride) = (what.heads, cache.key_stride(what.layer));
        let dim = cache.shape(what.layer).head_dim_k;
        let strips = heads.div_ceil(STRIP);
        let shares = stride / SHARE;
        self.pool.for_each_chunk_mut(scores, SHARE, |worker, at, scores| {
            for (task, scores) in scores.chunks_exact_mut(SHARE).enumerate() {
                let task = at / SHARE + task;
                let row = rows().nth(task / shares).expect("every row has scores");
                let first = task % shares * SHARE;
                let count = row.end.saturating_sub(first).min(SHARE);
                if count == 0 {
                    continue;
                }
                let mut scratch = self.worker_scratch(worker);
                let lengths = [strips * STRIP * key_stride, strips * STRIP, KV_BLOCK * key_stride];
                let mut rest = scratch.floats(lengths.iter().sum());
                let [queries, shares, keys] =
                    lengths.map(|len| rest.split_off_mut(..len).unwrap_or_default());
                let own = &q[row.index * heads * dim..][..heads * dim];
                transpose(own, dim, key_stride, queries);
                shares.fill(0.0);
                shares[..heads].copy_from_slice(&weights[row.index * heads..][..heads]);
                for (block, scores) in scores[..count].chunks_mut(KV_BLOCK).enumerate() {
                    let from = first + block * KV_BLOCK;
                    self.widen_keys(cache, what.layer, row.table, from..first + count, keys);
                    let (queries, weights, keys) = (&*queries, &*shares, &*keys);
                    dispatch(self, Score { queries, weights, keys, scores });
                }
            }
        });
    }

    /// Widens the first keys of `keys`, as many as `out` has room for. Keys behind those hold anything.
    fn widen_keys(
        &self,
        cache: &KvCache,
        layer: usize,
        table: &[u32],
        keys: Range<usize>,
        out: &mut [f32],
    ) {
        let stride = cache.key_stride(layer);
        let of_block = cache.rows_of_block(layer) * stride;
        let firsts = keys.step_by(cache.rows_of_block(layer));
        for (first, out) in firsts.zip(out.chunks_exact_mut(of_block)) {
            let (block, _) = cache.place(layer, first);
            let rows = cache.keys(layer, table[block], 0);
            with_rows!(rows => {
                let rows = crate::kv::Read::vectors(rows, 0, of_block / LANES);
                dispatch(self, Widen { rows, out });
            });
        }
    }

    /// Writes the lists of a group of rows.
    fn take_largest<'a, I: Iterator<Item = Row<'a>>>(
        &self,
        rows: impl Fn() -> I + Sync,
        stride: usize,
        scores: &[f32],
        most: usize,
        chosen: &mut [u32],
    ) {
        let chosen = SharedSlice::new(chosen);
        let count = scores.len() / stride;
        self.pool.for_each_chunk_with_worker(count, 1, |worker, tasks| {
            for task in tasks {
                let row = rows().nth(task).expect("every row has a list");
                let scores = &scores[task * stride..][..row.end];
                let mut scratch = self.worker_scratch(worker);
                // SAFETY: every row is one task, so no other piece overlaps this one. It is last used in the next statement.
                let list = unsafe { chosen.piece(row.index * most, most) };
                largest(scores, scratch.floats(scores.len()), list);
            }
        });
    }
}

/// Writes the positions of the largest scores in ascending order. Of equal scores, the lower position is taken first.
/// There must be more scores than positions.
fn largest(scores: &[f32], copy: &mut [f32], list: &mut [u32]) {
    copy.copy_from_slice(scores);
    let (_, limit, _) = copy.select_nth_unstable_by(list.len() - 1, |a, b| b.total_cmp(a));
    let limit = *limit;
    let above = scores.iter().filter(|score| score.total_cmp(&limit).is_gt()).count();
    let mut equal = list.len() - above;
    let mut list = list.iter_mut();
    for (position, score) in scores.iter().enumerate() {
        let order = score.total_cmp(&limit);
        let taken = order.is_gt() || order.is_eq() && equal > 0;
        if !taken {
            continue;
        }
        equal -= usize::from(order.is_eq());
        let Some(to) = list.next() else { return };
        *to = position as u32;
    }
}

/// Writes queries as `[strips, stride, STRIP]`. Absent heads and padding are 0.
fn transpose(heads: &[f32], dim: usize, stride: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (head, query) in heads.chunks_exact(dim).enumerate() {
        let strip = &mut out[head / STRIP * stride * STRIP..][..stride * STRIP];
        for (x, column) in query.iter().zip(strip.chunks_exact_mut(STRIP)) {
            column[head % STRIP] = *x;
        }
    }
}

/// Scores of a row with the first keys of one block.
struct Score<'a> {
    /// `[strips, key stride, STRIP]`
    queries: &'a [f32],
    /// `[strips, STRIP]`
    weights: &'a [f32],
    /// `[KV_BLOCK, key stride]`
    keys: &'a [f32],
    scores: &'a mut [f32],
}

impl Kernel for Score<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let stride = self.keys.len() / KV_BLOCK;
        let zero = simd.splat(0.0);
        let blocks = self.keys.chunks_exact(KEY_BLOCK * stride);
        for (keys, scores) in blocks.zip(self.scores.chunks_mut(KEY_BLOCK)) {
            let mut sums = [zero; KEY_BLOCK];
            let strips = self.queries.chunks_exact(stride * STRIP);
            for (queries, weights) in strips.zip(self.weights.as_chunks::<STRIP>().0) {
                let mut dots = [0.0; KEY_BLOCK * STRIP];
                score_block(simd, queries, keys, &mut dots);
                let weights = weights.as_chunks::<LANES>().0;
                for (sum, dots) in sums.iter_mut().zip(dots.as_chunks::<STRIP>().0) {
                    for (weight, dots) in weights.iter().zip(dots.as_chunks::<LANES>().0) {
                        let positive = simd.max(simd.load(dots), zero);
                        *sum = simd.mul_add(simd.load(weight), positive, *sum);
                    }
                }
            }
            for (score, sum) in scores.iter_mut().zip(sums) {
                let sum = simd.sum(sum);
                // Adding 0 turns -0 into 0, so both are equal. NaN comes last.
                *score = if sum.is_nan() { f32::NEG_INFINITY } else { sum + 0.0 };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{KvLayer, KvShape, KvType};
    use crate::row_kind::RowKind;
    use crate::testing::{cpus, random};

    const DIM: usize = 40;
    const HEADS: usize = 5;
    const CONTEXT: usize = 700;

    /// Returns a cache with one layer of random keys, and its table. With `rounded`, elements are multiples of 1/2, so that
    /// sums are exact and many scores are equal.
    fn cache(cpu: &Cpu, kind: KvType, rounded: bool) -> (KvCache, Vec<u32>) {
        let shape = KvShape { kv_heads: 1, head_dim_k: DIM, head_dim_v: DIM, values_in_keys: true };
        let blocks = CONTEXT.div_ceil(KV_BLOCK);
        let layers = [KvLayer::new(shape, 0)];
        let mut cache = KvCache::new(&layers, &[blocks + 1], kind).unwrap();
        let table: Vec<u32> = (1..=blocks as u32).rev().collect();
        let mut keys = random(3, CONTEXT * DIM);
        if rounded {
            keys.iter_mut().for_each(|x| *x = (*x * 2.0).round() / 2.0);
        }
        cache.write(cpu, 0, &table, 0, &keys, &[]);
        (cache, table)
    }

    /// Returns the scores of one row in f64.
    fn exact(cpu: &Cpu, cache: &KvCache, run: &AttentionRun<'_>, q: &[f32], w: &[f32]) -> Vec<f64> {
        let score = |position| {
            let key = cache.key(cpu, 0, run.table, 0, position);
            let of_head = |(q, w): (&[f32], &f32)| {
                let dot: f64 = q.iter().zip(&key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                f64::from(*w) * dot.max(0.0)
            };
            q.chunks_exact(DIM).zip(w).map(of_head).sum()
        };
        (0..=run.first_position).map(score).collect()
    }

    #[test]
    fn the_largest_scores_are_taken_and_the_lower_position_of_equal_ones() {
        for cpu in cpus() {
            for kind in [KvType::F16, KvType::F32, KvType::Q8_0] {
                let (cache, table) = cache(&cpu, kind, kind != KvType::Q8_0);
                for (position, most) in [(20, 7), (255, 16), (256, 256), (699, 300), (699, 1)] {
                    let run = AttentionRun {
                        kind: RowKind::Decode,
                        first_position: position,
                        tokens: 1,
                        table: &table,
                    };
                    let round = |x: Vec<f32>| x.iter().map(|x| (x * 2.0).round() / 2.0).collect();
                    let (mut q, mut w): (Vec<f32>, Vec<f32>) =
                        (random(position as u64, HEADS * DIM), random(9, HEADS));
                    if kind != KvType::Q8_0 {
                        (q, w) = (round(q), round(w));
                    }
                    let mut chosen = vec![0; most];
                    let what = KeyChoice { layer: 0, heads: HEADS, most };
                    cpu.choose_keys(&q, &w, &cache, &what, &[run], &mut chosen);
                    let scores = exact(&cpu, &cache, &run, &q, &w);
                    let mut order: Vec<u32> = (0..=position as u32).collect();
                    order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
                    order.truncate(most);
                    order.sort_unstable();
                    assert_eq!(chosen, order, "{kind:?} {position} {most}");
                }
            }
        }
    }

    #[test]
    fn a_choice_does_not_depend_on_the_rows_beside_it() {
        for cpu in cpus() {
            let (cache, table) = cache(&cpu, KvType::F16, false);
            let most = 30;
            let what = KeyChoice { layer: 0, heads: HEADS, most };
            let run = |first_position, tokens| AttentionRun {
                kind: RowKind::Prompt,
                first_position,
                tokens,
                table: &table,
            };
            let runs = [run(10, 90), run(600, 3), run(5, 2)];
            let (q, w) = (random(1, 95 * HEADS * DIM), random(2, 95 * HEADS));
            let mut together = vec![u32::MAX; 95 * most];
            cpu.choose_keys(&q, &w, &cache, &what, &runs, &mut together);
            let positions = (10..100).chain(600..603).chain(5..7);
            for (row, position) in positions.enumerate() {
                let mut alone = vec![u32::MAX; most];
                let q = &q[row * HEADS * DIM..][..HEADS * DIM];
                let w = &w[row * HEADS..][..HEADS];
                cpu.choose_keys(q, w, &cache, &what, &[run(position, 1)], &mut alone);
                assert_eq!(alone, together[row * most..][..most], "row {row}");
                assert_eq!(alone.iter().all(|at| *at == 0), position < most, "row {row}");
            }
        }
    }

    #[test]
    fn numbers_that_are_none_come_last() {
        let scores = [f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY, 0.0, 0.0, -1.0];
        let mut list = [9; 4];
        largest(&scores, &mut [0.0; 6], &mut list);
        assert_eq!(list, [1, 3, 4, 5]);
        let mut list = [9; 5];
        largest(&scores, &mut [0.0; 6], &mut list);
        assert_eq!(list, [0, 1, 3, 4, 5]);
    }
}
