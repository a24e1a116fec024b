//! Attention over the keys of a window and over compressed entries in one softmax (DeepSeek-AI 2026, "DeepSeek-V4").
//!
//! An entry stands for several consecutive positions. A row sees those that end at its own position or before it: all, or chosen
//! ones. Keys are values, and all heads share them. A row's keys are brought together as f32 in a fixed order, the window and then
//! the entries, and are cut into chunks as in [`decode`](super::decode). So a row's result depends on its position and its own
//! sequence, and on nothing else.

use std::ops::Range;

use forebay_ops::{ChosenKeys, KV_BLOCK};

use super::decode::{CHUNK, ChunkWork, blocks_of, join, part_len, scale_queries};
use super::{Attention, AttentionRun};
use crate::cpu::Cpu;
use crate::kv::{KvCache, widen};
use crate::ops::share;

/// Most heads of a task. More share the work of bringing keys together, and fewer keep more threads busy.
const HEADS: usize = 16;

/// Number of floats of the parts that are in memory at once, if one row has no more.
const PARTS: usize = 4 << 20;

/// Compressed entries that rows see beside the keys of their windows.
#[derive(Debug, Clone, Copy)]
pub struct Entries<'a> {
    /// Layer of the cache with the entries, of the same shape as the layer of the keys.
    pub layer: usize,
    /// The blocks of each run's sequence in that layer's group.
    pub tables: &'a [&'a [u32]],
    /// The entries that rows see, if they do not see all before them. Rows with no more entries than a list has see all of them.
    pub chosen: Option<ChosenKeys<&'a [u32]>>,
}

/// One query row.
struct Row<'a> {
    window: Range<usize>,
    /// Number of entries that it sees.
    entries: usize,
    /// The entries, if they are chosen ones.
    list: Option<&'a [u32]>,
    tables: [&'a [u32]; 2],
}

impl Row<'_> {
    fn seen(&self) -> usize {
        self.window.len() + self.entries
    }

    /// Returns number `at` of what the row sees: 0 and a position, or 1 and an entry.
    fn at(&self, at: usize) -> (usize, usize) {
        match at.checked_sub(self.window.len()) {
            None => (0, self.window.start + at),
            Some(entry) => (1, self.list.map_or(entry, |list| list[entry] as usize)),
        }
    }
}

/// The rows of one operation.
struct Rows<'a> {
    runs: &'a [AttentionRun<'a>],
    what: &'a Attention<'a>,
    entries: &'a Entries<'a>,
    span: usize,
}

impl<'a> Rows<'a> {
    fn row(&self, index: usize) -> Row<'a> {
        let mut token = index;
        for (run, entries) in self.runs.iter().zip(self.entries.tables) {
            if token >= run.tokens {
                token -= run.tokens;
                continue;
            }
            let position = run.first_position + token;
            let all = (position + 1) / self.span;
            let chosen = self.entries.chosen.filter(|chosen| all > chosen.pools.most);
            let list = chosen.map(|of| &of.lists[index * of.pools.most..][..of.pools.most]);
            return Row {
                window: self.what.first_visible(position)..position + 1,
                entries: list.map_or(all, <[u32]>::len),
                list,
                tables: [run.table, entries],
            };
        }
        unreachable!("there are as many rows as the runs have")
    }
}

impl Cpu {
    /// Computes attention as [`Cpu::attention`] does, over the keys of a window and over `entries`. The rows' own keys, and the
    /// entries that end with them, must already be in the cache.
    ///
    /// # Panics
    /// Panics if the lengths do not fit together, if the keys are not values that all heads share, if scores are capped, or if a table
    /// has no entry for what a row sees.
    pub fn attention_with_entries(
        &self,
        q: &[f32],
        cache: &KvCache,
        what: &Attention<'_>,
        entries: &Entries<'_>,
        runs: &[AttentionRun<'_>],
        out: &mut [f32],
    ) {
        let shape = cache.shape(what.layer);
        let (heads, dim) = (what.heads, shape.head_dim_k);
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        assert!(heads > 0 && what.window != Some(0), "attention: {what:?}");
        let shares = shape.kv_heads == 1 && shape.values_in_keys && shape.head_dim_v == dim;
        assert!(shares && dim > 0 && cache.shape(entries.layer) == shape, "attention: {shape:?}");
        assert!(what.softcap.is_none() && what.chosen.is_none(), "attention: {what:?}");
        assert!(what.sinks.is_none_or(|sinks| sinks.len() == heads), "attention: sinks");
        assert_eq!(q.len(), tokens * heads * dim, "attention: q is not [tokens, heads, dim]");
        assert_eq!(out.len(), q.len(), "attention: out is not [tokens, heads, dim]");
        assert_eq!(runs.len(), entries.tables.len(), "attention: a table of entries for each run");
        let listed = entries.chosen.is_none_or(|of| of.lists.len() >= tokens * of.pools.most);
        assert!(listed, "attention: missing lists");
        let rows = Rows { runs, what, entries, span: cache.span(entries.layer) };
        let most = (0..tokens).map(|row| rows.row(row).seen()).max().unwrap_or(0);
        let (chunks, width) = (most.div_ceil(CHUNK), cache.value_width(what.layer));
        let of_row = chunks * heads.div_ceil(HEADS) * part_len(heads.min(HEADS), width);
        let at_once = (PARTS / of_row.max(1)).max(1);
        for (piece, out) in out.chunks_mut(at_once * heads * dim).enumerate() {
            let first = piece * at_once;
            let q = &q[first * heads * dim..][..out.len()];
            self.entries_piece(q, cache, &rows, (first, chunks), out);
        }
    }

    /// Computes the rows from number `first` on. None sees more than `chunks` chunks.
    fn entries_piece(
        &self,
        q: &[f32],
        cache: &KvCache,
        rows: &Rows<'_>,
        (first, chunks): (usize, usize),
        out: &mut [f32],
    ) {
        let Attention { layer, heads, scale, .. } = *rows.what;
        let dim = cache.shape(layer).head_dim_k;
        let (stride, width) = (cache.key_stride(layer), cache.value_width(layer));
        let (group, groups) = (heads.min(HEADS), heads.div_ceil(HEADS));
        let part_len = part_len(group, width);
        let count = q.len() / (heads * dim);
        let mut shared = self.shared_scratch();
        let parts = shared.floats(count * groups * chunks * part_len);
        self.pool.for_each_chunk_mut(parts, part_len, |worker, at, parts| {
            let mut scratch = self.worker_scratch(worker);
            let lengths = [group * stride, group * CHUNK, CHUNK * stride];
            let mut rest = scratch.floats(lengths.iter().sum());
            let [queries, scores, keys] =
                lengths.map(|len| rest.split_off_mut(..len).unwrap_or_default());
            for (task, part) in parts.chunks_exact_mut(part_len).enumerate() {
                let task = at / part_len + task;
                let (index, head, chunk) =
                    (task / (groups * chunks), task / chunks % groups * HEADS, task % chunks);
                let row = rows.row(first + index);
                let seen = chunk * CHUNK..row.seen().min((chunk + 1) * CHUNK);
                if seen.is_empty() {
                    continue;
                }
                let members = group.min(heads - head);
                let own = &q[(index * heads + head) * dim..][..members * dim];
                scale_queries(own, dim, scale, stride, queries);
                self.gather(cache, rows, &row, seen.clone(), keys);
                let work = ChunkWork {
                    cpu: self,
                    cache,
                    layer,
                    table: row.tables[0],
                    kv_head: 0,
                    queries: &queries[..members * stride],
                    group: members,
                    width,
                    softcap: None,
                    biases: &[],
                };
                let blocks = &blocks_of(keys, stride)[..seen.len().div_ceil(KV_BLOCK)];
                work.compute(blocks, blocks, 0..seen.len(), scores, part);
            }
        });
        let parts = &*parts;
        self.pool.for_each_chunk_mut(out, share(out.len(), dim), |_, start, out| {
            for (at, out) in out.chunks_exact_mut(dim).enumerate() {
                let (index, head) = ((start / dim + at) / heads, (start / dim + at) % heads);
                let used = rows.row(first + index).seen().div_ceil(CHUNK);
                let (of, member) = (head / HEADS, head % HEADS);
                let members = group.min(heads - of * HEADS);
                let own = parts[(index * groups + of) * chunks * part_len..]
                    .chunks_exact(part_len)
                    .take(used);
                join(own, member, members, width, rows.what.sink(head), out);
            }
        });
    }

    /// Widens the keys and entries with these numbers among those that a row sees.
    fn gather(
        &self,
        cache: &KvCache,
        rows: &Rows<'_>,
        row: &Row<'_>,
        seen: Range<usize>,
        out: &mut [f32],
    ) {
        let layers = [rows.what.layer, rows.entries.layer];
        let stride = cache.key_stride(layers[0]);
        for (at, out) in seen.zip(out.chunks_exact_mut(stride)) {
            let (of, number) = row.at(at);
            let (block, place) = cache.place(layers[of], number);
            let keys = cache.keys(layers[of], row.tables[of][block], 0);
            widen(self, keys, place * stride, out);
        }
    }
}
