//! The choice of the keys that a row attends to, by scores that are cheaper than attention's (DeepSeek-AI 2025,
//! "DeepSeek-V3.2", the lightning indexer).
//!
//! An indexer has heads of its own, which share one key per position. Rows choose among pools of consecutive positions
//! ([`Pools`]), which may have one position each: those with the largest scores ([`PoolScores`]). Of equal scores, the lower
//! pool is taken first. Score and choice of a row depend on its own query and on the keys, and on nothing else. Keys may be
//! those of compressed entries, which stand for several positions each ([`KvCache::span`]). Then a row sees the entries that end
//! at its position or before it, and lists name entries.

use std::ops::Range;

use forebay_ops::{ChosenKeys, KV_BLOCK, Pools};

use super::AttentionRun;
use super::prompt::STRIP;
use super::scores::{Largest, Score, take_heads, transpose};
use crate::buffer::SharedSlice;
use crate::cpu::Cpu;
use crate::kv::{HeadRows, KvCache, widen};
use crate::simd::{LANES, dispatch};

/// Number of scores of one list in a task, a multiple of [`KV_BLOCK`].
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
    /// Number of leading elements of a cached row that are the key.
    pub dim: usize,
    pub pools: Pools,
    pub scores: PoolScores,
}

/// How pools are scored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolScores {
    /// A pool has one key, at its last position. Its score is the sum over the heads of a weight times the positive part of the
    /// product of query and key. A row has one list.
    Weighted,
    /// Every position has a key. Every head has a list of its own. The score of a pool is the largest product of the head's
    /// query and a key.
    Largest,
}

impl KeyChoice {
    /// Returns the number of lists of a row.
    pub fn lists(&self) -> usize {
        match self.scores {
            PoolScores::Weighted => 1,
            PoolScores::Largest => self.heads,
        }
    }

    /// Returns the number of scores of one list in a task.
    fn share(&self) -> usize {
        match self.scores {
            PoolScores::Weighted => SHARE,
            PoolScores::Largest => SHARE.div_ceil(self.pools.length),
        }
    }

    /// Checks the parameters of a choice among keys in rows of `row_dim` elements, which stand for `span` positions each.
    fn check(&self, row_dim: usize, span: usize) {
        let KeyChoice { heads, dim, pools, scores, .. } = *self;
        pools.check();
        let whole = pools.length == 1 || scores == PoolScores::Largest;
        let fits = if whole { dim == row_dim } else { dim <= row_dim };
        assert!(heads > 0 && fits, "choose_keys: {self:?} with rows of {row_dim}");
        let fits = scores != PoolScores::Largest || pools.length.is_power_of_two();
        assert!(fits && (span == 1 || pools.length == 1), "choose_keys: {self:?}");
    }
}

/// Reads the lists of [`ChosenKeys`].
pub(super) trait RowLists<'a>: Sized {
    /// Returns the lists of a row at `position`, or `None` if it sees all positions.
    fn of(&self, row: usize, position: usize) -> Option<RowChoice<'a>>;

    /// Returns the number of elements of a row's lists.
    fn row_length(&self) -> usize;

    /// Returns the lists from row `first` on.
    fn rows_from(&self, first: usize) -> Self;

    /// Returns the number of the run's first rows that see all positions.
    fn rows_that_see_all(&self, run: &AttentionRun<'_>) -> usize;

    /// Checks that there are lists for these runs.
    fn check(&self, runs: &[AttentionRun<'_>], kv_heads: usize);
}

impl<'a> RowLists<'a> for ChosenKeys<&'a [u32]> {
    fn of(&self, row: usize, position: usize) -> Option<RowChoice<'a>> {
        let (pools, length) = (self.pools, self.row_length());
        let lists = || &self.lists[row * length..][..length];
        (!pools.sees_all(position)).then(|| RowChoice { lists: lists(), position, pools })
    }

    fn row_length(&self) -> usize {
        self.lists_of_row * self.pools.most
    }

    fn rows_from(&self, first: usize) -> Self {
        ChosenKeys { lists: &self.lists[first * self.row_length()..], ..*self }
    }

    fn rows_that_see_all(&self, run: &AttentionRun<'_>) -> usize {
        let sees_all = |token: &usize| self.pools.sees_all(run.first_position + token);
        (0..run.tokens).take_while(sees_all).count()
    }

    fn check(&self, runs: &[AttentionRun<'_>], kv_heads: usize) {
        self.pools.check();
        let lists = self.lists_of_row;
        assert!(lists == 1 || lists == kv_heads, "attention: {lists} lists of a row");
        let rows: usize = runs.iter().map(|run| run.tokens).sum();
        assert!(self.lists.len() >= rows * self.row_length(), "attention: missing lists");
        let tokens = runs.iter().flat_map(|run| (0..run.tokens).map(|at| run.first_position + at));
        for (row, position) in tokens.enumerate() {
            let Some(choice) = self.of(row, position) else { continue };
            let end = self.pools.candidates(position);
            let mut last = choice.lists.chunks_exact(self.pools.most).filter_map(<[u32]>::last);
            assert!(last.all(|&last| (last as usize) < end), "attention: a later key");
        }
    }
}

/// The positions that one row sees.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowChoice<'a> {
    lists: &'a [u32],
    position: usize,
    pools: Pools,
}

impl RowChoice<'_> {
    /// Returns the number of positions that the row sees.
    pub fn seen(&self) -> usize {
        self.pools.seen(self.position)
    }

    /// Returns those of the positions that key/value head `head` sees which have these numbers.
    pub fn positions(
        &self,
        head: usize,
        numbers: Range<usize>,
    ) -> impl ExactSizeIterator<Item = usize> {
        let most = self.pools.most;
        let list = if self.lists.len() == most { 0 } else { head };
        let list = &self.lists[list * most..][..most];
        numbers.map(move |index| self.pools.position_of(list, self.position, index))
    }
}

/// A row whose keys are chosen.
#[derive(Clone, Copy)]
struct Row<'a> {
    /// Number of the row in its pass.
    index: usize,
    /// Number of pools that it may choose.
    candidates: usize,
    table: &'a [u32],
}

/// Returns the rows of all runs that may choose more pools than they take. Each key stands for `span` positions.
fn rows<'a>(
    runs: &'a [AttentionRun<'a>],
    pools: Pools,
    span: usize,
) -> impl Iterator<Item = Row<'a>> {
    let tokens = runs.iter().flat_map(|run| (0..run.tokens).map(move |token| (run, token)));
    let rows = tokens.enumerate().map(move |(index, (run, token))| Row {
        index,
        candidates: pools.candidates_of((run.first_position + token + 1) / span),
        table: run.table,
    });
    rows.filter(move |row| row.candidates > pools.most)
}

impl Cpu {
    /// Chooses the pools of every row. `q` is `[rows, heads, dim]`, `weights` `[rows, heads]` and `chosen` `[rows, lists, most]`,
    /// with the rows of all `runs` one after the other. The rows' own keys must already be in the cache. A list gets ascending
    /// numbers of pools. Those of rows that see all positions get zeroes. Without weights they are all 1.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together, if `most` or `heads` is 0, or if a table has no entry for a position that
    /// a row sees.
    pub fn choose_keys(
        &self,
        q: &[f32],
        weights: Option<&[f32]>,
        cache: &KvCache,
        what: &KeyChoice,
        runs: &[AttentionRun<'_>],
        chosen: &mut [u32],
    ) {
        let KeyChoice { layer, heads, dim, pools, .. } = *what;
        let (lists, most, span) = (what.lists(), pools.most, cache.span(layer));
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        what.check(cache.shape(layer).head_dim_k, span);
        assert_eq!(q.len(), tokens * heads * dim, "choose_keys: q is not [rows, heads, dim]");
        let fits = weights.is_none_or(|weights| weights.len() == tokens * heads);
        assert!(fits, "choose_keys: weights are not [rows, heads]");
        assert!(chosen.len() >= tokens * lists * most, "choose_keys: missing lists");
        // Lists of rows that are not reached, because the pool was told to stop, name a pool that exists.
        chosen[..tokens * lists * most].fill(0);
        let mut left = rows(runs, pools, span).peekable();
        let mut shared = self.shared_scratch();
        // Scores of all lists of a row.
        let stride_of = |candidates: usize| candidates.next_multiple_of(what.share()) * lists;
        while let Some(first) = left.next() {
            // As many rows as have room. They follow one another, except for rows that see all positions.
            let (mut last, mut end) = (first, first.candidates);
            let mut count = 1;
            while let Some(next) = left.peek() {
                let longer = end.max(next.candidates);
                if SCORES / stride_of(longer) <= count {
                    break;
                }
                (last, end, count) = (*next, longer, count + 1);
                left.next();
            }
            let stride = stride_of(end);
            let indices = first.index..=last.index;
            let group = || rows(runs, pools, span).filter(|row| indices.contains(&row.index));
            let scores = shared.floats(count * stride);
            self.score_keys((q, weights), cache, what, group, stride, scores);
            self.take_largest(group, stride, scores, what, chosen);
        }
    }

    /// Computes the scores `[rows, shares, lists, share]` of a group of rows.
    fn score_keys<'a, I: Iterator<Item = Row<'a>>>(
        &self,
        (q, weights): (&[f32], Option<&[f32]>),
        cache: &KvCache,
        what: &KeyChoice,
        rows: impl Fn() -> I + Sync,
        stride: usize,
        scores: &mut [f32],
    ) {
        let KeyChoice { layer, heads, dim, pools, .. } = *what;
        let row_stride = cache.key_stride(layer);
        // A key may be the first part of a row.
        let key_stride = match what.scores {
            PoolScores::Weighted if pools.length > 1 => dim.next_multiple_of(LANES),
            _ => row_stride,
        };
        let strips = heads.div_ceil(STRIP);
        let (share, lists) = (what.share(), what.lists());
        let task_len = lists * share;
        let shares = stride / task_len;
        self.pool.for_each_chunk_mut(scores, task_len, |worker, at, scores| {
            for (task, scores) in scores.chunks_exact_mut(task_len).enumerate() {
                let task = at / task_len + task;
                let row = rows().nth(task / shares).expect("every row has scores");
                let first = task % shares * share;
                let count = row.candidates.saturating_sub(first).min(share);
                if count == 0 {
                    continue;
                }
                let mut scratch = self.worker_scratch(worker);
                let largest_len = share * strips * STRIP;
                let lengths = [
                    strips * STRIP * key_stride,
                    strips * STRIP,
                    KV_BLOCK * key_stride,
                    if what.scores == PoolScores::Largest { largest_len } else { 0 },
                ];
                let mut rest = scratch.floats(lengths.iter().sum());
                let [queries, of_heads, keys, largest] =
                    lengths.map(|len| rest.split_off_mut(..len).unwrap_or_default());
                let own = &q[row.index * heads * dim..][..heads * dim];
                transpose(own, dim, key_stride, queries);
                if what.scores == PoolScores::Largest {
                    largest.fill(f32::NEG_INFINITY);
                    let first = first * pools.length;
                    for at in (0..count * pools.length).step_by(KV_BLOCK) {
                        let from = first + at;
                        self.widen_keys(cache, layer, row.table, from..from + KV_BLOCK, keys);
                        let (queries, keys) = (&*queries, &*keys);
                        let rule = Largest { queries, keys, at, length: pools.length, largest };
                        dispatch(self, rule);
                    }
                    take_heads(largest, strips, share, count, scores);
                    continue;
                }
                of_heads.fill(0.0);
                match weights {
                    Some(weights) => {
                        of_heads[..heads].copy_from_slice(&weights[row.index * heads..][..heads])
                    }
                    None => of_heads[..heads].fill(1.0),
                }
                for (at, scores) in scores[..count].chunks_mut(KV_BLOCK).enumerate() {
                    let from = first + at * KV_BLOCK;
                    match pools.length {
                        1 => self.widen_keys(cache, layer, row.table, from..first + count, keys),
                        length => {
                            let last = |pool: usize| (from + pool + 1) * length - 1;
                            let pools = (0..scores.len()).map(last);
                            let of = |block| cache.keys(layer, block, 0);
                            self.gather_rows(pools, row.table, [row_stride, key_stride], of, keys);
                        }
                    }
                    let (queries, weights, keys) = (&*queries, &*of_heads, &*keys);
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
            widen(self, cache.keys(layer, table[block], 0), 0, out);
        }
    }

    /// Widens the first `taken` elements of the rows at these positions. `rows_of` returns the rows of a block.
    pub(super) fn gather_rows<'a>(
        &self,
        positions: impl Iterator<Item = usize>,
        table: &[u32],
        [stride, taken]: [usize; 2],
        rows_of: impl Fn(u32) -> HeadRows<'a>,
        out: &mut [f32],
    ) {
        for (position, out) in positions.zip(out.chunks_exact_mut(taken)) {
            let rows = rows_of(table[position / KV_BLOCK]);
            widen(self, rows, position % KV_BLOCK * stride, out);
        }
    }

    /// Writes the lists of a group of rows.
    fn take_largest<'a, I: Iterator<Item = Row<'a>>>(
        &self,
        rows: impl Fn() -> I + Sync,
        stride: usize,
        scores: &[f32],
        what: &KeyChoice,
        chosen: &mut [u32],
    ) {
        let chosen = SharedSlice::new(chosen);
        let (lists, share, pools) = (what.lists(), what.share(), what.pools);
        let count = scores.len() / stride * lists;
        self.pool.for_each_chunk_with_worker(count, 1, |worker, tasks| {
            for task in tasks {
                let (row, list) = (task / lists, task % lists);
                let scores = &scores[row * stride..][..stride];
                let row = rows().nth(row).expect("every row has lists");
                let candidates = row.candidates;
                let mut scratch = self.worker_scratch(worker);
                let (own, copy) = scratch.floats(2 * candidates).split_at_mut(candidates);
                let own = if lists == 1 && pools.before_own == 0 {
                    // The scores lie in order.
                    &scores[..candidates]
                } else {
                    let pieces = scores.chunks_exact(share).skip(list).step_by(lists);
                    for (own, piece) in own.chunks_mut(share).zip(pieces) {
                        own.copy_from_slice(&piece[..own.len()]);
                    }
                    own[candidates - pools.before_own.min(candidates)..].fill(f32::INFINITY);
                    own
                };
                // SAFETY: every list is one task, so no other piece overlaps this one. It is last used in the next statement.
                let list =
                    unsafe { chosen.piece((row.index * lists + list) * pools.most, pools.most) };
                largest(own, copy, list);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{KvLayer, KvShape};
    use crate::testing::{cpus, random};
    use forebay_ops::KvType;
    use forebay_ops::RowKind;

    const DIM: usize = 40;
    const HEADS: usize = 5;
    const CONTEXT: usize = 700;

    fn by_position(most: usize) -> KeyChoice {
        let (pools, scores) = (Pools::positions(most), PoolScores::Weighted);
        KeyChoice { layer: 0, heads: HEADS, dim: DIM, pools, scores }
    }

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
                    let what = by_position(most);
                    cpu.choose_keys(&q, Some(&w), &cache, &what, &[run], &mut chosen);
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
            let what = by_position(most);
            let run = |first_position, tokens| AttentionRun {
                kind: RowKind::Prompt,
                first_position,
                tokens,
                table: &table,
            };
            let runs = [run(10, 90), run(600, 3), run(5, 2)];
            let (q, w) = (random(1, 95 * HEADS * DIM), random(2, 95 * HEADS));
            let mut together = vec![u32::MAX; 95 * most];
            cpu.choose_keys(&q, Some(&w), &cache, &what, &runs, &mut together);
            let positions = (10..100).chain(600..603).chain(5..7);
            for (row, position) in positions.enumerate() {
                let mut alone = vec![u32::MAX; most];
                let q = &q[row * HEADS * DIM..][..HEADS * DIM];
                let w = &w[row * HEADS..][..HEADS];
                cpu.choose_keys(q, Some(w), &cache, &what, &[run(position, 1)], &mut alone);
                assert_eq!(alone, together[row * most..][..most], "row {row}");
                assert_eq!(alone.iter().all(|at| *at == 0), position < most, "row {row}");
            }
        }
    }

    /// Returns the pools that a row chooses in each of its lists, with scores in f64.
    fn expected(
        cpu: &Cpu,
        cache: &KvCache,
        run: &AttentionRun<'_>,
        what: &KeyChoice,
        (q, w): (&[f32], &[f32]),
    ) -> Vec<u32> {
        let KeyChoice { pools, dim, .. } = *what;
        let key = |position| cache.key(cpu, 0, run.table, 0, position);
        let dot = |q: &[f32], position| -> f64 {
            q.iter().zip(&key(position)).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
        };
        let heads: Vec<&[f32]> = q.chunks_exact(dim).collect();
        let score = |list: usize, pool: usize| match what.scores {
            PoolScores::Weighted => {
                let at = (pool + 1) * pools.length - 1;
                heads.iter().zip(w).map(|(q, w)| f64::from(*w) * dot(q, at).max(0.0)).sum()
            }
            PoolScores::Largest => {
                let all = pool * pools.length..(pool + 1) * pools.length;
                all.map(|at| dot(heads[list], at)).fold(f64::NEG_INFINITY, f64::max)
            }
        };
        let candidates = pools.candidates(run.first_position);
        let list = |list: usize| {
            let mut scores: Vec<f64> = (0..candidates).map(|pool| score(list, pool)).collect();
            scores[candidates - pools.before_own..].fill(f64::INFINITY);
            let mut order: Vec<u32> = (0..candidates as u32).collect();
            order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            order.truncate(pools.most);
            order.sort_unstable();
            order
        };
        (0..what.lists()).flat_map(list).collect()
    }

    #[test]
    fn pools_are_chosen_by_one_key_or_by_the_largest_product_of_each_head() {
        for cpu in cpus() {
            for kind in [KvType::F16, KvType::F32, KvType::Q8_0] {
                let (cache, table) = cache(&cpu, kind, false);
                let complete =
                    |length, most| Pools { length, most, own_seen: false, before_own: 0 };
                let apart = |length, most, before_own| Pools {
                    own_seen: true,
                    before_own,
                    ..complete(length, most)
                };
                // The first elements of a row may be the key.
                for (pools, scores, dim) in [
                    (complete(4, 5), PoolScores::Weighted, DIM),
                    (complete(4, 30), PoolScores::Weighted, 24),
                    (complete(3, 9), PoolScores::Weighted, DIM),
                    (apart(8, 2, 0), PoolScores::Largest, DIM),
                    (apart(8, 5, 2), PoolScores::Largest, DIM),
                    (apart(128, 1, 0), PoolScores::Largest, DIM),
                    (apart(2, 40, 1), PoolScores::Largest, DIM),
                    (apart(512, 1, 0), PoolScores::Largest, DIM),
                ] {
                    let what = KeyChoice { layer: 0, heads: HEADS, dim, pools, scores };
                    let positions: Vec<usize> = [130, 131, 255, 256, 600, 602, 699].into();
                    for position in positions.into_iter().filter(|at| !pools.sees_all(*at)) {
                        let run = AttentionRun {
                            kind: RowKind::Decode,
                            first_position: position,
                            tokens: 1,
                            table: &table,
                        };
                        let (q, w) = (random(position as u64, HEADS * dim), random(9, HEADS));
                        let mut chosen = vec![0; what.lists() * pools.most];
                        cpu.choose_keys(&q, Some(&w), &cache, &what, &[run], &mut chosen);
                        let expected = expected(&cpu, &cache, &run, &what, (&q, &w));
                        assert_eq!(chosen, expected, "{what:?} {kind:?} {position}");
                    }
                }
            }
        }
    }

    #[test]
    fn lists_of_heads_do_not_depend_on_the_rows_beside_them() {
        for cpu in cpus() {
            let (cache, table) = cache(&cpu, KvType::F16, false);
            let pools = Pools { length: 8, most: 4, own_seen: true, before_own: 0 };
            let scores = PoolScores::Largest;
            let what = KeyChoice { layer: 0, heads: HEADS, dim: DIM, pools, scores };
            let run = |first_position, tokens| AttentionRun {
                kind: RowKind::Prompt,
                first_position,
                tokens,
                table: &table,
            };
            let (q, row) = (random(1, 95 * HEADS * DIM), HEADS * pools.most);
            let mut together = vec![u32::MAX; 95 * row];
            let runs = [run(10, 90), run(600, 3), run(5, 2)];
            cpu.choose_keys(&q, None, &cache, &what, &runs, &mut together);
            let positions = (10..100).chain(600..603).chain(5..7);
            for (index, position) in positions.enumerate() {
                let mut alone = vec![u32::MAX; row];
                let q = &q[index * HEADS * DIM..][..HEADS * DIM];
                cpu.choose_keys(q, None, &cache, &what, &[run(position, 1)], &mut alone);
                assert_eq!(alone, together[index * row..][..row], "row {index}");
                assert_eq!(alone.iter().all(|at| *at == 0), pools.sees_all(position));
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
