//! Attention of one token. The context is cut into chunks of fixed length. Every pair of a
//! key/value head and a chunk is a task, and the partial results are joined in order.

use super::Attention;
use crate::cpu::Cpu;
use crate::kv::{KvCache, Read, with_rows};
use crate::simd::{Kernel, LANES, Simd, dispatch};

/// Number of positions in a chunk: 64 KiB of half-precision rows of 128 elements, which take some
/// microseconds.
pub(crate) const CHUNK: usize = 256;

/// Number of multiply-adds below which a parallel region costs more than it saves.
const SERIAL_WORK: usize = 128 * 1024;

/// Number of accumulators of a block, enough to hide the latency of a multiply-add.
const BLOCK: usize = 8;

pub(super) fn run(cpu: &Cpu, q: &[f32], cache: &KvCache, what: &Attention<'_>, out: &mut [f32]) {
    let shape = cache.shape(what.layer);
    let group = what.heads / shape.kv_heads;
    let (key_stride, value_stride) = (cache.key_stride(what.layer), cache.value_stride(what.layer));
    let width = cache.value_width(what.layer);
    let end = what.first_position + 1;
    let start = what.first_visible(what.first_position);
    let first_chunk = start / CHUNK;
    let chunks = (end - 1) / CHUNK - first_chunk + 1;

    // The output of one task: the largest score and the sum of each query head, then their values.
    // It is rounded up to whole cache lines, so that workers do not share one.
    let part_len = (group * (2 + width)).next_multiple_of(16);
    let tasks = shape.kv_heads * chunks;
    let mut shared = cpu.shared_scratch();
    let parts = shared.floats(tasks * part_len);

    let work = shape.kv_heads * (end - start) * group * (key_stride + width);
    let tasks_at_once = if work < SERIAL_WORK { tasks } else { 1 };
    cpu.pool.for_each_chunk_mut(parts, tasks_at_once * part_len, |worker, at, parts| {
        let mut scratch = cpu.worker_scratch(worker);
        let scratch = scratch.floats(group * (key_stride + CHUNK));
        let (queries, scores) = scratch.split_at_mut(group * key_stride);
        for (task, part) in parts.chunks_exact_mut(part_len).enumerate() {
            let task = at / part_len + task;
            let (kv_head, chunk) = (task / chunks, first_chunk + task % chunks);
            let heads = &q[kv_head * group * shape.head_dim_k..][..group * shape.head_dim_k];
            scale_queries(heads, shape.head_dim_k, what.scale, key_stride, queries);
            let (from, to) = (start.max(chunk * CHUNK), end.min((chunk + 1) * CHUNK));
            let keys = cache.keys(what.layer, kv_head);
            let values = cache.values(what.layer, kv_head);
            let (queries, scores, softcap) = (&*queries, &mut *scores, what.softcap);
            let positions = to - from;
            // Rows wrap around only at whole chunks, so the rows of this chunk are contiguous.
            let row = from % shape.rows;
            with_rows!((keys, values) => {
                let (stride, value_stride) = (key_stride / LANES, value_stride / LANES);
                let inputs = Inputs {
                    queries,
                    keys: keys.vectors(row * stride, positions * stride),
                    values: values.vectors(row * value_stride, positions * value_stride),
                    key_stride,
                    value_stride,
                    positions,
                    group,
                    width,
                    softcap,
                };
                dispatch(cpu, Chunk { inputs, scores, part });
            });
        }
    });
    for (head, out) in out.chunks_exact_mut(shape.head_dim_v).enumerate() {
        let (kv_head, member) = (head / group, head % group);
        let parts = parts[kv_head * chunks * part_len..].chunks_exact(part_len).take(chunks);
        join(parts, member, group, width, what.sink(head), out);
    }
}

/// Copies query heads, multiplied by `scale` and padded with zeroes to `stride`.
fn scale_queries(heads: &[f32], dim: usize, scale: f32, stride: usize, out: &mut [f32]) {
    for (head, out) in heads.chunks_exact(dim).zip(out.chunks_exact_mut(stride)) {
        let (data, padding) = out.split_at_mut(dim);
        data.iter_mut().zip(head).for_each(|(out, x)| *out = x * scale);
        padding.fill(0.0);
    }
}

/// Joins the chunks of one query head. Each chunk was normalised by its own largest score.
fn join<'a>(
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

/// Queries of one key/value head and one chunk of positions.
struct Inputs<'a, R> {
    /// `[group, key stride]`, scaled.
    queries: &'a [f32],
    /// `[positions, key stride]`
    keys: R,
    /// `[positions, value stride]`
    values: R,
    key_stride: usize,
    /// Number of vectors from one value to the next.
    value_stride: usize,
    positions: usize,
    group: usize,
    /// Number of leading elements of a value that are needed, in whole vectors.
    width: usize,
    softcap: Option<f32>,
}

/// Attention of one key/value head within one chunk.
struct Chunk<'a, R> {
    inputs: Inputs<'a, R>,
    /// Scratch `[group, CHUNK]`.
    scores: &'a mut [f32],
    /// Output: largest scores `[group]`, sums `[group]`, values `[group, width]`.
    part: &'a mut [f32],
}

impl<R: Read> Kernel for Chunk<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Chunk { inputs, scores, part } = self;
        let Inputs { queries, keys, values, key_stride, positions, group, width, .. } = inputs;
        let (value_stride, softcap) = (inputs.value_stride, inputs.softcap);
        let mut head = 0;
        while head < group {
            let rows = row_block(group - head);
            let q = &queries[head * key_stride..(head + rows) * key_stride];
            let s = &mut scores[head * CHUNK..(head + rows) * CHUNK];
            match rows {
                4 => dot_rows::<S, R, 4, 2>(simd, q, keys, s, positions),
                2 => dot_rows::<S, R, 2, 4>(simd, q, keys, s, positions),
                _ => dot_rows::<S, R, 1, 8>(simd, q, keys, s, positions),
            }
            head += rows;
        }
        let (largest, rest) = part.split_at_mut(group);
        let (sums, sums_of_values) = rest.split_at_mut(group);
        for (head, scores) in scores.chunks_exact_mut(CHUNK).take(group).enumerate() {
            (largest[head], sums[head]) = weigh(simd, scores, positions, softcap);
        }
        let mut head = 0;
        while head < group {
            let rows = row_block(group - head);
            let p = &scores[head * CHUNK..(head + rows) * CHUNK];
            let o = &mut sums_of_values[head * width..(head + rows) * width];
            match rows {
                4 => sum_rows::<S, R, 4, 2>(simd, p, values, value_stride, o, positions),
                2 => sum_rows::<S, R, 2, 4>(simd, p, values, value_stride, o, positions),
                _ => sum_rows::<S, R, 1, 8>(simd, p, values, value_stride, o, positions),
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

/// Computes scores of `ROWS` queries with every key, `KEYS` keys at a time. `ROWS * KEYS` is
/// [`BLOCK`].
#[inline(always)]
fn dot_rows<S: Simd, R: Read, const ROWS: usize, const KEYS: usize>(
    simd: S,
    queries: &[f32],
    keys: R,
    scores: &mut [f32],
    positions: usize,
) {
    let vectors = queries.len() / ROWS / LANES;
    let queries = queries.as_chunks::<LANES>().0;
    let mut position = 0;
    while position < positions {
        let mut sums = [simd.splat(0.0); BLOCK];
        // Past the end the last key is repeated. Those scores are not used.
        let mut rows = [keys; KEYS];
        for (key, row) in rows.iter_mut().enumerate() {
            let at = (position + key).min(positions - 1) * vectors;
            *row = keys.vectors(at, vectors);
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
            // CHUNK is a multiple of KEYS, so a block that extends past the end stays in its row.
            scores[row * CHUNK + position..][..KEYS].copy_from_slice(block);
        }
        position += KEYS;
    }
}

/// Turns scores into weights `e^(score - largest)`. Returns the largest score and the sum of the
/// weights.
#[inline(always)]
fn weigh<S: Simd>(
    simd: S,
    scores: &mut [f32],
    positions: usize,
    softcap: Option<f32>,
) -> (f32, f32) {
    let padded = positions.next_multiple_of(LANES);
    scores[positions..padded].fill(f32::NEG_INFINITY);
    let blocks = scores[..padded].as_chunks_mut::<LANES>().0;
    if let Some(cap) = softcap {
        for block in &mut *blocks {
            let x = simd.tanh(simd.mul(simd.load(block), simd.splat(1.0 / cap)));
            simd.store(simd.mul(x, simd.splat(cap)), block);
        }
        // The softcap made the padding finite, so it is reset to -inf.
        scores[positions..padded].fill(f32::NEG_INFINITY);
    }
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

/// Computes weighted sums of the values for `ROWS` queries, `VECTORS` vectors at a time. `ROWS *
/// VECTORS` is [`BLOCK`].
#[inline(always)]
fn sum_rows<S: Simd, R: Read, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    weights: &[f32],
    values: R,
    value_stride: usize,
    out: &mut [f32],
    positions: usize,
) {
    let vectors = out.len() / ROWS / LANES;
    let out = out.as_chunks_mut::<LANES>().0;
    let mut vector = 0;
    while vector + VECTORS <= vectors {
        let columns = Columns { values, value_stride, vector };
        sum_block::<S, R, ROWS, VECTORS>(simd, weights, columns, out, positions);
        vector += VECTORS;
    }
    while vector < vectors {
        let columns = Columns { values, value_stride, vector };
        sum_block::<S, R, ROWS, 1>(simd, weights, columns, out, positions);
        vector += 1;
    }
}

/// Vectors of all values, starting at vector `vector` of each value.
struct Columns<R> {
    values: R,
    value_stride: usize,
    vector: usize,
}

#[inline(always)]
fn sum_block<S: Simd, R: Read, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    weights: &[f32],
    columns: Columns<R>,
    out: &mut [[f32; LANES]],
    positions: usize,
) {
    let Columns { values, value_stride, vector } = columns;
    let vectors = out.len() / ROWS;
    let mut sums = [[simd.splat(0.0); VECTORS]; ROWS];
    let mut weights_of = [weights; ROWS];
    for (row, weights_of) in weights_of.iter_mut().enumerate() {
        *weights_of = &weights[row * CHUNK..][..positions];
    }
    let rows = (0..positions).map(|position| position * value_stride + vector);
    for (position, first) in rows.enumerate() {
        let value = values.vectors(first, VECTORS);
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
    for (row, sums) in sums.into_iter().enumerate() {
        for (i, sum) in sums.into_iter().enumerate() {
            simd.store(sum, &mut out[row * vectors + vector + i]);
        }
    }
}
