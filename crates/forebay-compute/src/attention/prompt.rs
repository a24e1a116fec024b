//! Attention of several tokens, tile by tile with a running softmax (Milakov and Gimelshein 2018,
//! "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention").
//!
//! Each key/value head is one problem. Its rows are the queries of all heads that use it, token by
//! token: row `r` is head `r % group` of token `r / group`. A task computes up to [`ROWS`] such
//! rows against everything that they see.
//!
//! Scores are kept transposed, with the rows across the lanes. Then only the queries need
//! transposing, once per task, and the softmax works lane by lane without sums across a vector.

use forebay_ops::KV_BLOCK;

use super::{Attention, AttentionRun};
use crate::buffer::SharedSlice;
use crate::cpu::Cpu;
use crate::kv::{HeadRows, KvCache, widen};
use crate::pool::tasks_at_once;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Number of rows in a strip: three vectors. Three vectors times four keys fill twelve of the
/// sixteen registers.
pub(super) const STRIP: usize = 3 * LANES;

/// Number of rows in a task, enough to pay for widening the keys and values.
pub(super) const ROWS: usize = 3 * STRIP;

/// Number of keys in a tile.
pub(super) const KEYS: usize = 64;

/// Number of keys in a score block.
pub(super) const KEY_BLOCK: usize = 4;

/// Number of rows in a value block of six rows times two vectors.
const ROW_BLOCK: usize = 6;

pub(super) fn run(
    cpu: &Cpu,
    q: &[f32],
    cache: &KvCache,
    what: &Attention<'_>,
    run: &AttentionRun<'_>,
    out: &mut [f32],
) {
    let shape = cache.shape(what.layer);
    let group = what.heads / shape.kv_heads;
    let rows = q.len() / shape.head_dim_k / shape.kv_heads;
    let tiles = rows.div_ceil(ROWS);
    let tasks = tiles * shape.kv_heads;
    let seen = run.first_position + run.tokens;
    let work = rows * shape.kv_heads * seen * (shape.head_dim_k + shape.head_dim_v);
    let tasks_at_once = tasks_at_once(tasks, work);
    let out = SharedSlice::new(out);
    cpu.pool.for_each_chunk_with_worker(tasks, tasks_at_once, |worker, tasks| {
        for task in tasks {
            // The last tiles see the most keys. They run first, so that the workers finish
            // together.
            let tile = tiles - 1 - task / shape.kv_heads;
            let first_row = tile * ROWS;
            let task = Task {
                cpu,
                cache,
                what,
                run,
                group,
                kv_head: task % shape.kv_heads,
                first_row,
                rows: ROWS.min(rows - first_row),
            };
            task.run(worker, q, &out);
        }
    });
}

/// Rows `first_row..first_row + rows` of one key/value head.
struct Task<'a> {
    cpu: &'a Cpu,
    cache: &'a KvCache,
    what: &'a Attention<'a>,
    run: &'a AttentionRun<'a>,
    group: usize,
    kv_head: usize,
    first_row: usize,
    rows: usize,
}

impl Task<'_> {
    fn run(&self, worker: usize, q: &[f32], out: &SharedSlice<'_, f32>) {
        let layer = self.what.layer;
        let shape = self.cache.shape(layer);
        let (key_stride, value_stride) =
            (self.cache.key_stride(layer), self.cache.value_stride(layer));
        let width = self.cache.value_width(layer);
        let strips = self.rows.div_ceil(STRIP);
        let padded = strips * STRIP;
        let mut scratch = self.cpu.worker_scratch(worker);
        let lengths = [
            padded * key_stride,
            KEYS * key_stride,
            if shape.values_in_keys { 0 } else { KEYS * value_stride },
            padded * KEYS,
            padded * width,
            padded,
            padded,
            padded,
            padded,
            padded,
            if self.what.relative.is_some() { padded * KEYS } else { 0 },
        ];
        let mut rest = scratch.floats(lengths.iter().sum());
        let [
            queries,
            keys,
            values,
            scores,
            sums_of_values,
            largest,
            sums,
            decay,
            first,
            last,
            biases,
        ] = lengths.map(|len| rest.split_off_mut(..len).unwrap_or_default());

        self.transpose_queries(q, key_stride, queries);
        largest.fill(f32::MIN);
        sums.fill(0.0);
        sums_of_values.fill(0.0);
        biases.fill(0.0);
        let end = self.position(self.rows - 1) + 1;
        // Tiles begin at absolute positions. So it does not matter with which rows a row is computed.
        let mut start = self.what.first_visible(self.position(0)) / KEYS * KEYS;
        while start < end {
            let positions = KEYS.min(end - start);
            let masked = self.visible(start, positions, first, last);
            self.write_biases(start, positions, biases);
            let keys_of = |block| self.cache.keys(layer, block, self.kv_head);
            self.widen(keys_of, start, positions, key_stride, keys);
            if !shape.values_in_keys {
                let values_of = |block| self.cache.values(layer, block, self.kv_head);
                self.widen(values_of, start, positions, value_stride, values);
            }
            let tile = Tile {
                queries,
                keys,
                values: if shape.values_in_keys { keys } else { values },
                positions,
                width,
                scores,
                sums_of_values,
                largest,
                sums,
                decay,
                visible: masked.then_some((&*first, &*last)),
                softcap: self.what.softcap,
                biases,
            };
            dispatch(self.cpu, tile);
            start += positions;
        }
        self.finish(largest, sums, sums_of_values, width, out);
    }

    /// Returns the position of this task's row `row`.
    fn position(&self, row: usize) -> usize {
        self.run.first_position + (self.first_row + row) / self.group
    }

    /// Returns the token and the query head of this task's row `row`.
    fn token_and_head(&self, row: usize) -> (usize, usize) {
        let row = self.first_row + row;
        (row / self.group, self.kv_head * self.group + row % self.group)
    }

    /// Writes the scaled queries as `[strips, key stride, STRIP]`. Absent rows and padding are 0.
    fn transpose_queries(&self, q: &[f32], key_stride: usize, queries: &mut [f32]) {
        let dim = self.cache.shape(self.what.layer).head_dim_k;
        queries.fill(0.0);
        for row in 0..self.rows {
            let (token, head) = self.token_and_head(row);
            let source = &q[(token * self.what.heads + head) * dim..][..dim];
            let strip = &mut queries[row / STRIP * key_stride * STRIP..][..key_stride * STRIP];
            for (x, column) in source.iter().zip(strip.chunks_exact_mut(STRIP)) {
                column[row % STRIP] = x * self.what.scale;
            }
        }
    }

    /// Writes the biases of the tile at `start` as `[strips, KEYS, STRIP]`, if there are any. Absent rows have none.
    fn write_biases(&self, start: usize, positions: usize, biases: &mut [f32]) {
        let Some(relative) = &self.what.relative else { return };
        let mut own = [0.0; KEYS];
        for row in 0..self.rows {
            let (token, head) = self.token_and_head(row);
            let number = token * self.what.heads + head;
            relative.write(number, self.position(row), start, &mut own[..positions]);
            let strip = &mut biases[row / STRIP * KEYS * STRIP..][..KEYS * STRIP];
            for (bias, keys) in own[..positions].iter().zip(strip.chunks_exact_mut(STRIP)) {
                keys[row % STRIP] = *bias;
            }
        }
    }

    /// Writes the first and the last key of the tile at `start` that each row sees, as indices
    /// within the tile. Returns false if every row sees the whole tile.
    fn visible(&self, start: usize, positions: usize, first: &mut [f32], last: &mut [f32]) -> bool {
        let end = start + positions;
        // Later rows see later keys, so the first and the last row decide.
        if positions == KEYS
            && self.position(0) + 1 >= end
            && self.what.first_visible(self.position(self.rows - 1)) <= start
        {
            return false;
        }
        for (row, (first, last)) in first.iter_mut().zip(last).enumerate() {
            // Absent rows repeat the last one.
            let position = self.position(row.min(self.rows - 1));
            let seen = self.what.first_visible(position)..(position + 1).min(end);
            *first = seen.start.saturating_sub(start).min(KEYS) as f32;
            // -1 if the row ends before the tile.
            *last = seen.end.saturating_sub(start) as f32 - 1.0;
        }
        true
    }

    /// Widens positions `start..start + positions` and clears the rest of the tile. `rows_of` returns the rows of a
    /// block. Tiles are whole blocks.
    fn widen<'a>(
        &'a self,
        rows_of: impl Fn(u32) -> HeadRows<'a>,
        start: usize,
        positions: usize,
        stride: usize,
        out: &mut [f32],
    ) {
        let (used, rest) = out.split_at_mut(positions * stride);
        let blocks = &self.run.table[start / KV_BLOCK..];
        for (out, block) in used.chunks_mut(KV_BLOCK * stride).zip(blocks) {
            widen(self.cpu, rows_of(*block), 0, out);
        }
        rest.fill(0.0);
    }

    /// Divides by the sums and writes the rows to their positions in `out`.
    fn finish(
        &self,
        largest: &[f32],
        sums: &[f32],
        sums_of_values: &[f32],
        width: usize,
        out: &SharedSlice<'_, f32>,
    ) {
        let dim = self.cache.shape(self.what.layer).head_dim_v;
        for (row, values) in sums_of_values.chunks_exact(width).take(self.rows).enumerate() {
            let (token, head) = self.token_and_head(row);
            let mut scale = 1.0 / sums[row];
            if let Some(sink) = self.what.sink(head) {
                let top = largest[row].max(sink);
                let own = (largest[row] - top).exp();
                scale = own / (sums[row] * own + (sink - top).exp());
            }
            // SAFETY: every (token, head) is one row of exactly one task, so no other piece
            // overlaps this one. This piece is last used in the next statement.
            let out = unsafe { out.piece((token * self.what.heads + head) * dim, dim) };
            out.iter_mut().zip(values).for_each(|(out, x)| *out = x * scale);
        }
    }
}

/// A task's rows against one tile of keys.
struct Tile<'a> {
    /// `[strips, key stride, STRIP]`
    queries: &'a [f32],
    /// `[KEYS, key stride]`
    keys: &'a [f32],
    /// `[KEYS, value stride]`
    values: &'a [f32],
    /// Number of keys present. The rest of the tile is 0.
    positions: usize,
    /// Number of leading elements of a value that are needed, in whole vectors.
    width: usize,
    /// Scratch `[strips, KEYS, STRIP]`: scores, then weights.
    scores: &'a mut [f32],
    /// Running weighted sums of values, `[rows, width]`.
    sums_of_values: &'a mut [f32],
    /// Largest score of each row so far.
    largest: &'a mut [f32],
    /// Sum of the weights of each row so far, relative to the largest score.
    sums: &'a mut [f32],
    /// Scratch: factor by which this tile's new largest score scales the sums so far.
    decay: &'a mut [f32],
    /// First and last visible key of each row, or `None` if every key is visible.
    visible: Option<(&'a [f32], &'a [f32])>,
    softcap: Option<f32>,
    /// Biases of the scores `[strips, KEYS, STRIP]`, or none.
    biases: &'a [f32],
}

impl Kernel for Tile<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let key_stride = self.keys.len() / KEYS;
        let width = self.width;
        let scores = self.scores.chunks_exact_mut(KEYS * STRIP);
        for (strip, (queries, scores)) in
            self.queries.chunks_exact(key_stride * STRIP).zip(scores).enumerate()
        {
            let rows = strip * STRIP..(strip + 1) * STRIP;
            let blocks = self.keys.chunks_exact(KEY_BLOCK * key_stride);
            let block_scores = scores.chunks_exact_mut(KEY_BLOCK * STRIP);
            for (keys, scores) in blocks.zip(block_scores).take(self.positions.div_ceil(KEY_BLOCK))
            {
                score_block(simd, queries, keys, scores);
            }
            let scores = &mut scores[..self.positions * STRIP];
            if !self.biases.is_empty() {
                let biases = &self.biases[strip * KEYS * STRIP..];
                scores.iter_mut().zip(biases).for_each(|(score, bias)| *score += bias);
            }
            let softmax = Softmax {
                scores,
                largest: &mut self.largest[rows.clone()],
                sums: &mut self.sums[rows.clone()],
                decay: &mut self.decay[rows.clone()],
                visible: self
                    .visible
                    .map(|(first, last)| (&first[rows.clone()], &last[rows.clone()])),
                softcap: self.softcap,
            };
            softmax.run(simd);
            let out = &mut self.sums_of_values[rows.start * width..rows.end * width];
            let decay = &self.decay[rows];
            let mut first = 0;
            while first < STRIP {
                let mut column = 0;
                while column + 2 * LANES <= width {
                    value_block::<S, 2>(simd, scores, self.values, decay, out, first, column);
                    column += 2 * LANES;
                }
                if column < width {
                    value_block::<S, 1>(simd, scores, self.values, decay, out, first, column);
                }
                first += ROW_BLOCK;
            }
        }
    }
}

/// Computes scores of one strip with [`KEY_BLOCK`] keys.
#[inline(always)]
pub(super) fn score_block<S: Simd>(simd: S, queries: &[f32], keys: &[f32], scores: &mut [f32]) {
    let stride = keys.len() / KEY_BLOCK;
    let (k0, rest) = keys.split_at(stride);
    let (k1, rest) = rest.split_at(stride);
    let (k2, k3) = rest.split_at(stride);
    let queries = queries.as_chunks::<STRIP>().0;
    let mut sums = [[simd.splat(0.0); 3]; KEY_BLOCK];
    for ((((q, k0), k1), k2), k3) in queries.iter().zip(k0).zip(k1).zip(k2).zip(k3) {
        let q = q.as_chunks::<LANES>().0;
        let q = [simd.load(&q[0]), simd.load(&q[1]), simd.load(&q[2])];
        let keys = [simd.splat(*k0), simd.splat(*k1), simd.splat(*k2), simd.splat(*k3)];
        for key in 0..KEY_BLOCK {
            for i in 0..3 {
                sums[key][i] = simd.mul_add(q[i], keys[key], sums[key][i]);
            }
        }
    }
    for (sums, scores) in sums.into_iter().zip(scores.as_chunks_mut::<STRIP>().0) {
        for (sum, score) in sums.into_iter().zip(scores.as_chunks_mut::<LANES>().0) {
            simd.store(sum, score);
        }
    }
}

/// State of the running softmax of one strip and tile.
struct Softmax<'a> {
    /// Scores as input and weights as output, `[keys, STRIP]`.
    scores: &'a mut [f32],
    largest: &'a mut [f32],
    sums: &'a mut [f32],
    decay: &'a mut [f32],
    visible: Option<(&'a [f32], &'a [f32])>,
    softcap: Option<f32>,
}

impl Softmax<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let scores = self.scores.as_chunks_mut::<LANES>().0;
        let vectors = STRIP / LANES;
        if let Some(cap) = self.softcap {
            for score in &mut *scores {
                let x = simd.tanh(simd.mul(simd.load(score), simd.splat(1.0 / cap)));
                simd.store(simd.mul(x, simd.splat(cap)), score);
            }
        }
        if let Some((first, last)) = self.visible {
            let (first, last) = (first.as_chunks::<LANES>().0, last.as_chunks::<LANES>().0);
            let hidden = simd.splat(f32::NEG_INFINITY);
            for (key, scores) in scores.chunks_exact_mut(vectors).enumerate() {
                let key = simd.splat(key as f32);
                for ((score, first), last) in scores.iter_mut().zip(first).zip(last) {
                    let x = simd.select_less(key, simd.load(first), hidden, simd.load(score));
                    simd.store(simd.select_less(simd.load(last), key, hidden, x), score);
                }
            }
        }
        let largest = self.largest.as_chunks_mut::<LANES>().0;
        let sums = self.sums.as_chunks_mut::<LANES>().0;
        let decay = self.decay.as_chunks_mut::<LANES>().0;
        for i in 0..vectors {
            let before = simd.load(&largest[i]);
            let mut top = before;
            for scores in scores.chunks_exact(vectors) {
                top = simd.max(top, simd.load(&scores[i]));
            }
            let factor = simd.exp(simd.sub(before, top));
            let mut sum = simd.mul(simd.load(&sums[i]), factor);
            for scores in scores.chunks_exact_mut(vectors) {
                let weight = simd.exp(simd.sub(simd.load(&scores[i]), top));
                simd.store(weight, &mut scores[i]);
                sum = simd.add(sum, weight);
            }
            simd.store(top, &mut largest[i]);
            simd.store(sum, &mut sums[i]);
            simd.store(factor, &mut decay[i]);
        }
    }
}

/// Adds the weighted values of one tile to [`ROW_BLOCK`] rows and `VECTORS` vectors of columns.
#[inline(always)]
fn value_block<S: Simd, const VECTORS: usize>(
    simd: S,
    weights: &[f32],
    values: &[f32],
    decay: &[f32],
    out: &mut [f32],
    first_row: usize,
    column: usize,
) {
    let (stride, width) = (values.len() / KEYS, out.len() / STRIP);
    let mut sums = [[simd.splat(0.0); VECTORS]; ROW_BLOCK];
    for row in 0..ROW_BLOCK {
        let factor = simd.splat(decay[first_row + row]);
        let out = &out[(first_row + row) * width + column..][..VECTORS * LANES];
        for (sum, out) in sums[row].iter_mut().zip(out.as_chunks::<LANES>().0) {
            *sum = simd.mul(simd.load(out), factor);
        }
    }
    for (weights, values) in weights.as_chunks::<STRIP>().0.iter().zip(values.chunks_exact(stride))
    {
        let weights = &weights[first_row..first_row + ROW_BLOCK];
        let values = values[column..column + VECTORS * LANES].as_chunks::<LANES>().0;
        for row in 0..ROW_BLOCK {
            let weight = simd.splat(weights[row]);
            for i in 0..VECTORS {
                sums[row][i] = simd.mul_add(weight, simd.load(&values[i]), sums[row][i]);
            }
        }
    }
    for row in 0..ROW_BLOCK {
        let out = &mut out[(first_row + row) * width + column..][..VECTORS * LANES];
        for (sum, out) in sums[row].iter().zip(out.as_chunks_mut::<LANES>().0) {
            simd.store(*sum, out);
        }
    }
}
