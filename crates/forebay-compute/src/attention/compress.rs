//! Compression of positions into entries (DeepSeek-AI 2026, "DeepSeek-V4").
//!
//! Every position has projections of its input in a layer of the cache: values, in place of keys, and gates of the same length,
//! in place of values. An entry stands for `ratio` consecutive positions. It is a mean of their values, weighted for every element
//! by the softmax of the gates over the positions, then normed and rotated as of its first position. With an overlap, projections
//! have two halves: an entry takes the first halves of the positions of the entry before it, and the second halves of its own.
//!
//! An entry is computed by the pass with its last position, from what the cache holds. So it is the same however the positions were
//! divided into passes, and it needs no state beside the cache.

use forebay_ops::KV_BLOCK;

use super::AttentionRun;
use super::pooled::GatedMean;
use crate::cpu::Cpu;
use crate::kv::{KvCache, KvShape, widen};
use crate::ops::RopeTable;
use crate::simd::{LANES, dispatch};

/// Parameters of one compression.
#[derive(Debug, Clone, Copy)]
pub struct Compression<'a> {
    /// Layer of the cache with the positions' projections. Its keys are values of positions, and its values are gates.
    pub projections: usize,
    /// Layer of the cache with the entries. Its rows' span is the ratio.
    pub entries: usize,
    /// True if an entry also takes the positions of the entry before it.
    pub overlap: bool,
    /// Numbers `[ratio, gates]` that are added to the gates.
    pub bias: &'a [f32],
    /// Weight of the norm of entries.
    pub norm: &'a [f32],
    pub epsilon: f32,
    pub rope: &'a RopeTable,
}

/// Memory for the entries of a pass.
#[derive(Debug, Default)]
pub struct EntryScratch {
    entries: Vec<f32>,
    /// First position of every entry.
    positions: Vec<u32>,
}

impl EntryScratch {
    /// Reserves memory for this many entries of `dim` elements.
    pub fn reserve(entries: usize, dim: usize) -> EntryScratch {
        EntryScratch {
            entries: Vec::with_capacity(entries * dim),
            positions: Vec::with_capacity(entries),
        }
    }
}

/// Returns the entries that end within a run.
fn ending(run: &AttentionRun<'_>, ratio: usize) -> std::ops::Range<usize> {
    run.first_position / ratio..(run.first_position + run.tokens) / ratio
}

impl Cpu {
    /// Computes the entries that end within `runs` and writes them to the cache. The runs have the blocks of the projections, and
    /// `tables` has those of the entries for each run. The rows' own projections must already be in the cache.
    ///
    /// # Panics
    /// Panics if lengths do not fit together, if an entry's length is no multiple of 8, or if a table has no entry for a position.
    pub fn compress(
        &self,
        cache: &mut KvCache,
        what: &Compression<'_>,
        runs: &[AttentionRun<'_>],
        tables: &[&[u32]],
        memory: &mut EntryScratch,
    ) {
        let (dim, ratio) = (cache.shape(what.entries).head_dim_k, cache.span(what.entries));
        let width = if what.overlap { 2 * dim } else { dim };
        let KvShape { kv_heads, head_dim_k, head_dim_v, values_in_keys } =
            *cache.shape(what.projections);
        assert!(dim > 0 && dim.is_multiple_of(LANES), "compress: entries of {dim} elements");
        let fits = kv_heads == 1 && [head_dim_k, head_dim_v] == [width; 2] && !values_in_keys;
        assert!(fits, "compress: projections of {head_dim_k} and {head_dim_v} elements");
        assert_eq!(what.bias.len(), ratio * width, "compress: bias is not [ratio, gates]");
        assert_eq!(runs.len(), tables.len(), "compress: a table of entries for each run");
        let EntryScratch { entries, positions } = memory;
        positions.clear();
        for run in runs {
            positions.extend(ending(run, ratio).map(|entry| (entry * ratio) as u32));
        }
        if positions.is_empty() {
            return;
        }
        entries.resize(positions.len() * dim, 0.0);
        let of_entry = |index: usize| {
            let mut left = index;
            for run in runs {
                let own = ending(run, ratio);
                if left < own.len() {
                    return (run, own.start + left);
                }
                left -= own.len();
            }
            unreachable!("there are as many entries as the runs have")
        };
        self.pool.for_each_chunk_mut(entries, dim, |worker, at, out| {
            for (index, out) in out.chunks_exact_mut(dim).enumerate() {
                let (run, entry) = of_entry(at / dim + index);
                self.entry(worker, cache, what, run.table, entry, out);
            }
        });
        self.rms_norm_in_place(entries, what.norm, what.epsilon);
        self.rope(entries, dim, positions, what.rope);
        let mut rows = entries.chunks_exact(dim);
        for (run, table) in runs.iter().zip(tables) {
            let ending = ending(run, ratio);
            for (entry, row) in ending.zip(&mut rows) {
                cache.write(self, what.entries, table, (entry + 1) * ratio - 1, row, &[]);
            }
        }
    }

    /// Computes the weighted mean of one entry.
    fn entry(
        &self,
        worker: usize,
        cache: &KvCache,
        what: &Compression<'_>,
        table: &[u32],
        entry: usize,
        out: &mut [f32],
    ) {
        let (dim, ratio) = (out.len(), cache.span(what.entries));
        let width = if what.overlap { 2 * dim } else { dim };
        let parts = width / dim;
        let strides = [cache.key_stride(what.projections), cache.value_stride(what.projections)];
        // The first entry of a sequence has none before it.
        let before = if parts == 2 && entry > 0 { ratio } else { 0 };
        let slots = before + ratio;
        let mut scratch = self.worker_scratch(worker);
        let rows = scratch.floats(slots * 2 * dim);
        for (slot, row) in rows.chunks_exact_mut(2 * dim).enumerate() {
            let position = entry * ratio + slot - before;
            let part = if slot < before { 0 } else { parts - 1 };
            let block = table[position / KV_BLOCK];
            let from = strides.map(|stride| position % KV_BLOCK * stride + part * dim);
            let (values, gates) = row.split_at_mut(dim);
            widen(self, cache.keys(what.projections, block, 0), from[0], values);
            widen(self, cache.values(what.projections, block, 0), from[1], gates);
            let bias = &what.bias[position % ratio * width + part * dim..][..dim];
            gates.iter_mut().zip(bias).for_each(|(gate, bias)| *gate += bias);
        }
        dispatch(self, GatedMean { rows, stride: 2 * dim, out });
    }
}
