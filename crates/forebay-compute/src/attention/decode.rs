//! Attention of generated tokens. The context is cut into chunks of fixed length. For every token,
//! each pair of a key/value head and a chunk is a task, and the partial results are joined in order.

use std::ops::Range;

use forebay_ops::KV_BLOCK;

use super::choice::RowChoice;
use super::choice::RowLists;
use super::{Attention, AttentionRun};
use crate::cpu::Cpu;
use crate::kv::{KvCache, Read, with_rows};
use crate::pool::tasks_at_once;
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Number of positions in a chunk: 64 KiB of half-precision rows of 128 elements, which take some
/// microseconds.
pub(crate) const CHUNK: usize = 256;

/// Number of KV blocks in a chunk.
const BLOCKS: usize = CHUNK / KV_BLOCK;

/// Number of accumulators of a block, enough to hide the latency of a multiply-add.
const BLOCK: usize = 8;

pub(super) fn run(
    cpu: &Cpu,
    q: &[f32],
    cache: &KvCache,
    what: &Attention<'_>,
    runs: &[AttentionRun<'_>],
    out: &mut [f32],
) {
    let shape = cache.shape(what.layer);
    let group = what.heads / shape.kv_heads;
    let (key_stride, value_stride) = (cache.key_stride(what.layer), cache.value_stride(what.layer));
    let width = cache.value_width(what.layer);

    // The output of one task: the largest score and the sum of each query head, then their values.
    // It is rounded up to whole cache lines, so that workers do not share one.
    let part_len = part_len(group, width);
    let chunks: usize = rows(runs, what).map(|row| row.chunks()).sum();
    let mut shared = cpu.shared_scratch();
    let parts = shared.floats(shape.kv_heads * chunks * part_len);

    let positions: usize = rows(runs, what).map(|row| row.seen()).sum();
    let work = shape.kv_heads * positions * group * (key_stride + width);
    let tasks_at_once = tasks_at_once(shape.kv_heads * chunks, work);
    // Rows that are not neighbours in the cache are brought together.
    let [gathered_keys, gathered_values] = match what.chosen {
        None => [0, 0],
        Some(_) if shape.values_in_keys => [CHUNK * key_stride, 0],
        Some(_) => [CHUNK * key_stride, CHUNK * value_stride],
    };
    cpu.pool.for_each_chunk_mut(parts, tasks_at_once * part_len, |worker, at, parts| {
        let mut scratch = cpu.worker_scratch(worker);
        let biases = if what.relative.is_some() { group * CHUNK } else { 0 };
        let own = group * (key_stride + CHUNK) + biases;
        let (scratch, gathered) =
            scratch.floats(own + gathered_keys + gathered_values).split_at_mut(own);
        let (queries, scores) = scratch.split_at_mut(group * key_stride);
        let (scores, biases) = scores.split_at_mut(group * CHUNK);
        for (task, part) in parts.chunks_exact_mut(part_len).enumerate() {
            let (index, row, kv_head, chunk) =
                task_at(runs, what, shape.kv_heads, at / part_len + task);
            let heads = &q[index * what.heads * shape.head_dim_k..];
            let heads = &heads[kv_head * group * shape.head_dim_k..][..group * shape.head_dim_k];
            scale_queries(heads, shape.head_dim_k, what.scale, key_stride, queries);
            if let Some(relative) = &what.relative {
                let seen = row.start.max(chunk * CHUNK)..row.end.min((chunk + 1) * CHUNK);
                // Whole blocks are read.
                let first = seen.start / KV_BLOCK * KV_BLOCK;
                let head = index * what.heads + kv_head * group;
                for (member, biases) in biases.chunks_exact_mut(CHUNK).enumerate() {
                    let biases = &mut biases[..seen.end - first];
                    relative.write(head + member, row.end - 1, first, biases);
                }
            }
            let work = ChunkWork {
                cpu,
                cache,
                layer: what.layer,
                table: row.table,
                kv_head,
                queries,
                group,
                width,
                softcap: what.softcap,
                biases,
            };
            match &row.choice {
                None => {
                    let seen = row.start.max(chunk * CHUNK)..row.end.min((chunk + 1) * CHUNK);
                    work.run(seen, scores, part);
                }
                Some(choice) => {
                    let numbers = chunk * CHUNK..choice.seen().min((chunk + 1) * CHUNK);
                    let memory = gathered.split_at_mut(gathered_keys);
                    work.run_gathered(choice, numbers, memory, scores, part);
                }
            }
        }
    });
    let mut parts = &*parts;
    for (row, out) in rows(runs, what).zip(out.chunks_exact_mut(what.heads * shape.head_dim_v)) {
        let chunks = row.chunks();
        let (own, rest) = parts.split_at(shape.kv_heads * chunks * part_len);
        for (head, out) in out.chunks_exact_mut(shape.head_dim_v).enumerate() {
            let (kv_head, member) = (head / group, head % group);
            let of_head = own[kv_head * chunks * part_len..].chunks_exact(part_len).take(chunks);
            join(of_head, member, group, width, what.sink(head), out);
        }
        parts = rest;
    }
}

/// Returns the number of floats of the output of one task.
pub(super) fn part_len(group: usize, width: usize) -> usize {
    (group * (2 + width)).next_multiple_of(16)
}

/// Returns the number of rows with chosen positions whose parts take a few megabytes.
pub(super) fn rows_at_once(cache: &KvCache, what: &Attention<'_>) -> usize {
    let kv_heads = cache.shape(what.layer).kv_heads;
    let chunks = what.chosen.map_or(1, |chosen| chosen.pools.positions_max().div_ceil(CHUNK));
    let part = part_len(what.heads / kv_heads, cache.value_width(what.layer));
    ((4 << 20) / (kv_heads * chunks * part)).max(1)
}

/// One query row and the positions that it sees.
struct Row<'a> {
    start: usize,
    end: usize,
    table: &'a [u32],
    /// The positions, if they are chosen ones.
    choice: Option<RowChoice<'a>>,
}

impl Row<'_> {
    /// Returns the number of positions.
    fn seen(&self) -> usize {
        self.choice.map_or(self.end - self.start, |choice| choice.seen())
    }

    /// Returns the number of chunks that the visible positions touch. Chosen positions are counted through.
    fn chunks(&self) -> usize {
        match self.choice {
            None => (self.end - 1) / CHUNK - self.start / CHUNK + 1,
            Some(choice) => choice.seen().div_ceil(CHUNK),
        }
    }
}

/// Returns the rows of all runs.
fn rows<'a>(
    runs: &'a [AttentionRun<'a>],
    what: &'a Attention<'_>,
) -> impl Iterator<Item = Row<'a>> {
    let tokens = runs.iter().flat_map(|run| (0..run.tokens).map(move |token| (run, token)));
    tokens.enumerate().map(move |(index, (run, token))| {
        let position = run.first_position + token;
        Row {
            start: what.first_visible(position),
            end: position + 1,
            table: run.table,
            choice: what.chosen.as_ref().and_then(|chosen| chosen.of(index, position)),
        }
    })
}

/// Returns the row of task number `task` with its index, the key/value head and the number of the chunk. The tasks of a
/// row are `[kv_heads, chunks]`.
fn task_at<'a>(
    runs: &'a [AttentionRun<'a>],
    what: &'a Attention<'_>,
    kv_heads: usize,
    task: usize,
) -> (usize, Row<'a>, usize, usize) {
    let mut left = task;
    for (index, row) in rows(runs, what).enumerate() {
        let chunks = row.chunks();
        if left < kv_heads * chunks {
            let first = if row.choice.is_some() { 0 } else { row.start / CHUNK };
            let chunk = first + left % chunks;
            return (index, row, left / chunks, chunk);
        }
        left -= kv_heads * chunks;
    }
    unreachable!("there are tasks for the rows alone")
}

/// Copies query heads, multiplied by `scale` and padded with zeroes to `stride`.
pub(super) fn scale_queries(heads: &[f32], dim: usize, scale: f32, stride: usize, out: &mut [f32]) {
    for (head, out) in heads.chunks_exact(dim).zip(out.chunks_exact_mut(stride)) {
        let (data, padding) = out.split_at_mut(dim);
        data.iter_mut().zip(head).for_each(|(out, x)| *out = x * scale);
        padding.fill(0.0);
    }
}

/// Joins the chunks of one query head. Each chunk was normalised by its own largest score.
pub(super) fn join<'a>(
    parts: impl Iterator<Item = &'a [f32]> + Clone,
    member: usize,
    group: usize,
    width: usize,
    sink: Option<f32>,
    out: &mut [f32],
) {
    let largest = parts.clone().map(|part| part[member]).fold(f32::MIN, f32::max);
    let largest = sink.map_or(largest, |sink| largest.max(sink));
    let mut sum = sink.map_or(0.0, |sink| (sink - largest).exp());
    out.fill(0.0);
    for part in parts {
        let weight = (part[member] - largest).exp();
        sum += part[group + member] * weight;
        let values = &part[2 * group + member * width..];
        out.iter_mut().zip(values).for_each(|(out, x)| *out += weight * x);
    }
    out.iter_mut().for_each(|x| *x /= sum);
}

/// Returns the blocks of rows that were brought together.
pub(super) fn blocks_of(rows: &[f32], stride: usize) -> [&[[f32; LANES]]; BLOCKS] {
    let rows = rows.as_chunks::<LANES>().0;
    let block = KV_BLOCK * stride / LANES;
    std::array::from_fn(|at| &rows[at * block..][..block])
}

/// One key/value head of a row, for one chunk of the positions that the row sees.
pub(super) struct ChunkWork<'a> {
    pub(super) cpu: &'a Cpu,
    pub(super) cache: &'a KvCache,
    pub(super) layer: usize,
    pub(super) table: &'a [u32],
    pub(super) kv_head: usize,
    /// Scaled queries `[group, key stride]`.
    pub(super) queries: &'a [f32],
    pub(super) group: usize,
    pub(super) width: usize,
    pub(super) softcap: Option<f32>,
    /// Biases of the scores `[group, CHUNK]`, or none.
    pub(super) biases: &'a [f32],
}

impl ChunkWork<'_> {
    /// Computes the part for consecutive positions.
    fn run(&self, seen: Range<usize>, scores: &mut [f32], part: &mut [f32]) {
        // Whole blocks are read. The scores of positions before the first one are not used.
        let blocks = seen.start / KV_BLOCK..seen.end.div_ceil(KV_BLOCK);
        let table = &self.table[blocks.clone()];
        let first = blocks.start * KV_BLOCK;
        let seen = seen.start - first..seen.end - first;
        let keys = self.cache.keys(self.layer, table[0], self.kv_head);
        let values = self.cache.values(self.layer, table[0], self.kv_head);
        with_rows!((keys, values) => {
            let (mut key_blocks, mut value_blocks) = ([keys; BLOCKS], [values; BLOCKS]);
            for (at, &block) in table.iter().enumerate().skip(1) {
                key_blocks[at] = Read::of(self.cache.keys(self.layer, block, self.kv_head));
                value_blocks[at] = Read::of(self.cache.values(self.layer, block, self.kv_head));
            }
            let count = table.len();
            self.compute(&key_blocks[..count], &value_blocks[..count], seen, scores, part);
        });
    }

    /// Computes the part for chosen positions with these numbers. Their keys and values are brought together as f32, which
    /// changes no value, and no other row of the cache is read.
    fn run_gathered(
        &self,
        choice: &RowChoice<'_>,
        numbers: Range<usize>,
        (keys, values): (&mut [f32], &mut [f32]),
        scores: &mut [f32],
        part: &mut [f32],
    ) {
        let (cache, layer, kv_head) = (self.cache, self.layer, self.kv_head);
        let (key_stride, value_stride) = (cache.key_stride(layer), cache.value_stride(layer));
        let positions = || choice.positions(kv_head, numbers.clone());
        let keys_of = |block| cache.keys(layer, block, kv_head);
        self.cpu.gather_rows(positions(), self.table, [key_stride; 2], keys_of, keys);
        let values = if values.is_empty() {
            &*keys
        } else {
            let values_of = |block| cache.values(layer, block, kv_head);
            self.cpu.gather_rows(positions(), self.table, [value_stride; 2], values_of, values);
            &*values
        };
        let (keys, values) = (blocks_of(keys, key_stride), blocks_of(values, value_stride));
        let count = numbers.len().div_ceil(KV_BLOCK);
        self.compute(&keys[..count], &values[..count], 0..numbers.len(), scores, part);
    }

    pub(super) fn compute<'a, R: Read<'a>>(
        &self,
        keys: &[R],
        values: &[R],
        positions: Range<usize>,
        scores: &mut [f32],
        part: &mut [f32],
    ) {
        let inputs = Inputs {
            queries: self.queries,
            keys,
            values,
            key_stride: self.cache.key_stride(self.layer),
            value_stride: self.cache.value_stride(self.layer) / LANES,
            positions,
            group: self.group,
            width: self.width,
            softcap: self.softcap,
            biases: self.biases,
        };
        dispatch(self.cpu, Chunk { inputs, scores, part });
    }
}

/// Queries of one key/value head and one chunk of positions.
struct Inputs<'a, R> {
    /// `[group, key stride]`, scaled.
    queries: &'a [f32],
    /// The chunk's blocks, `[KV_BLOCK, key stride]` each.
    keys: &'a [R],
    /// The chunk's blocks, `[KV_BLOCK, value stride]` each.
    values: &'a [R],
    key_stride: usize,
    /// Number of vectors from one value to the next.
    value_stride: usize,
    /// The visible positions, counted from the first block on.
    positions: Range<usize>,
    group: usize,
    /// Number of leading elements of a value that are needed, in whole vectors.
    width: usize,
    softcap: Option<f32>,
    /// `[group, CHUNK]`, or empty.
    biases: &'a [f32],
}

/// Attention of one key/value head within one chunk.
struct Chunk<'a, R> {
    inputs: Inputs<'a, R>,
    /// Scratch `[group, CHUNK]`.
    scores: &'a mut [f32],
    /// Output: largest scores `[group]`, sums `[group]`, values `[group, width]`.
    part: &'a mut [f32],
}

impl<'a, R: Read<'a>> Kernel for Chunk<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Chunk { inputs, scores, part } = self;
        let Inputs { queries, keys, values, key_stride, positions, group, width, .. } = inputs;
        let (value_stride, softcap, biases) = (inputs.value_stride, inputs.softcap, inputs.biases);
        let mut head = 0;
        while head < group {
            let rows = row_block(group - head);
            let q = &queries[head * key_stride..(head + rows) * key_stride];
            let s = &mut scores[head * CHUNK..(head + rows) * CHUNK];
            match rows {
                4 => dot_rows::<S, R, 4, 2>(simd, q, keys, s, positions.end),
                2 => dot_rows::<S, R, 2, 4>(simd, q, keys, s, positions.end),
                _ => dot_rows::<S, R, 1, 8>(simd, q, keys, s, positions.end),
            }
            head += rows;
        }
        let biased = scores.chunks_exact_mut(CHUNK).zip(biases.chunks_exact(CHUNK));
        for (scores, biases) in biased.take(group) {
            let seen = scores[..positions.end].iter_mut().zip(biases);
            seen.for_each(|(score, bias)| *score += bias);
        }
        let (largest, rest) = part.split_at_mut(group);
        let (sums, sums_of_values) = rest.split_at_mut(group);
        for (head, scores) in scores.chunks_exact_mut(CHUNK).take(group).enumerate() {
            (largest[head], sums[head]) = weigh(simd, scores, positions.clone(), softcap);
        }
        let columns = Columns { values, value_stride, vector: 0, positions };
        let mut head = 0;
        while head < group {
            let rows = row_block(group - head);
            let p = &scores[head * CHUNK..(head + rows) * CHUNK];
            let o = &mut sums_of_values[head * width..(head + rows) * width];
            match rows {
                4 => sum_rows::<S, R, 4, 2>(simd, p, &columns, o),
                2 => sum_rows::<S, R, 2, 4>(simd, p, &columns, o),
                _ => sum_rows::<S, R, 1, 8>(simd, p, &columns, o),
            }
            head += rows;
        }
    }
}

/// Returns the number of rows in the next block if `left` rows remain. It is as large as possible,
/// so that many rows share a widened key.
#[inline(always)]
fn row_block(left: usize) -> usize {
    match left {
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Computes scores of `ROWS` queries with the first `positions` keys of the blocks, `KEYS` keys at a time. `ROWS * KEYS`
/// is [`BLOCK`].
#[inline(always)]
fn dot_rows<'a, S: Simd, R: Read<'a>, const ROWS: usize, const KEYS: usize>(
    simd: S,
    queries: &[f32],
    blocks: &[R],
    scores: &mut [f32],
    positions: usize,
) {
    let vectors = queries.len() / ROWS / LANES;
    let queries = queries.as_chunks::<LANES>().0;
    for (block, &keys) in blocks.iter().enumerate() {
        let first = block * KV_BLOCK;
        let last = (positions - first).min(KV_BLOCK) - 1;
        for position in (0..=last).step_by(KEYS) {
            let mut sums = [simd.splat(0.0); BLOCK];
            // Past the end the last key is repeated. Those scores are not used.
            let mut rows = [keys; KEYS];
            for (key, row) in rows.iter_mut().enumerate() {
                *row = keys.vectors((position + key).min(last) * vectors, vectors);
            }
            for vector in 0..vectors {
                let mut k = [simd.splat(0.0); KEYS];
                for key in 0..KEYS {
                    k[key] = rows[key].load(simd, vector);
                }
                for row in 0..ROWS {
                    let q = simd.load(&queries[row * vectors + vector]);
                    for key in 0..KEYS {
                        let sum = &mut sums[row * KEYS + key];
                        *sum = simd.mul_add(q, k[key], *sum);
                    }
                }
            }
            let mut block = [0.0; BLOCK];
            simd.store(simd.sums(sums), &mut block);
            for (row, block) in block.as_chunks::<KEYS>().0.iter().enumerate() {
                // A KV block is a multiple of KEYS, so what extends past the end stays in its row.
                scores[row * CHUNK + first + position..][..KEYS].copy_from_slice(block);
            }
        }
    }
}

/// Turns the scores of `positions` into weights `e^(score - largest)`, and those before them into 0. Returns the largest
/// score and the sum of the weights.
#[inline(always)]
fn weigh<S: Simd>(
    simd: S,
    scores: &mut [f32],
    positions: Range<usize>,
    softcap: Option<f32>,
) -> (f32, f32) {
    let padded = positions.end.next_multiple_of(LANES);
    if let Some(cap) = softcap {
        scores[positions.end..padded].fill(0.0);
        for block in scores[..padded].as_chunks_mut::<LANES>().0 {
            let x = simd.tanh(simd.mul(simd.load(block), simd.splat(1.0 / cap)));
            simd.store(simd.mul(x, simd.splat(cap)), block);
        }
    }
    scores[..positions.start].fill(f32::NEG_INFINITY);
    scores[positions.end..padded].fill(f32::NEG_INFINITY);
    let blocks = scores[..padded].as_chunks_mut::<LANES>().0;
    let mut largest = simd.splat(f32::MIN);
    for block in &*blocks {
        largest = simd.max(largest, simd.load(block));
    }
    let largest = simd.largest(largest);
    let mut sum = simd.splat(0.0);
    for block in blocks {
        let weight = simd.exp(simd.sub(simd.load(block), simd.splat(largest)));
        simd.store(weight, block);
        sum = simd.add(sum, weight);
    }
    (largest, simd.sum(sum))
}

/// Vectors of all values of a chunk, starting at vector `vector` of each value.
struct Columns<'a, R> {
    /// The chunk's blocks.
    values: &'a [R],
    value_stride: usize,
    vector: usize,
    /// The visible positions, counted from the first block on.
    positions: Range<usize>,
}

/// Computes weighted sums of the values for `ROWS` queries, `VECTORS` vectors at a time. `ROWS *
/// VECTORS` is [`BLOCK`].
#[inline(always)]
fn sum_rows<'a, S: Simd, R: Read<'a>, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    weights: &[f32],
    all: &Columns<'_, R>,
    out: &mut [f32],
) {
    let vectors = out.len() / ROWS / LANES;
    let out = out.as_chunks_mut::<LANES>().0;
    let columns = |vector| Columns { vector, positions: all.positions.clone(), ..*all };
    let mut vector = 0;
    while vector + VECTORS <= vectors {
        sum_block::<S, R, ROWS, VECTORS>(simd, weights, &columns(vector), out);
        vector += VECTORS;
    }
    while vector < vectors {
        sum_block::<S, R, ROWS, 1>(simd, weights, &columns(vector), out);
        vector += 1;
    }
}

#[inline(always)]
fn sum_block<'a, S: Simd, R: Read<'a>, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    weights: &[f32],
    columns: &Columns<'_, R>,
    out: &mut [[f32; LANES]],
) {
    let Columns { values: blocks, value_stride, vector, ref positions } = *columns;
    let vectors = out.len() / ROWS;
    let mut sums = [[simd.splat(0.0); VECTORS]; ROWS];
    for (block, values) in blocks.iter().enumerate() {
        let first = block * KV_BLOCK;
        // The first position of the first block may not be visible.
        let from = positions.start.saturating_sub(first);
        let to = (positions.end - first).min(KV_BLOCK);
        let mut weights_of = [weights; ROWS];
        for (row, weights_of) in weights_of.iter_mut().enumerate() {
            *weights_of = &weights[row * CHUNK + first..][..to];
        }
        #[allow(clippy::needless_range_loop, reason = "the index is that of the values, too")]
        for position in from..to {
            let value = values.vectors(position * value_stride + vector, VECTORS);
            let mut v = [simd.splat(0.0); VECTORS];
            for (i, v) in v.iter_mut().enumerate() {
                *v = value.load(simd, i);
            }
            for row in 0..ROWS {
                let weight = simd.splat(weights_of[row][position]);
                for i in 0..VECTORS {
                    sums[row][i] = simd.mul_add(weight, v[i], sums[row][i]);
                }
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (i, sum) in sums.into_iter().enumerate() {
            simd.store(sum, &mut out[row * vectors + vector + i]);
        }
    }
}
