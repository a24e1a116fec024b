//! Causal attention over the key/value cache, for groups of query heads that share a key/value
//! head (Ainslie et al. 2023, "GQA").
//!
//! There are two kernels, one for each kind of row. A generated token reads the cache once and is
//! bound by memory, so [`decode`] computes dot products on the rows as they are stored. A prompt
//! uses every key for many queries, so [`prompt`] works on tiles that are widened to f32 once. Both
//! divide their work at absolute positions. So a row's result depends on its kind, its position and
//! its own sequence, and on nothing else.

mod choice;
mod compress;
mod decode;
mod entries;
#[cfg(test)]
mod entries_tests;
mod pooled;
mod prompt;
mod relative;
mod scores;
#[cfg(test)]
mod tests;

pub use choice::{KeyChoice, PoolScores};
pub use compress::{Compression, EntryScratch};
pub(crate) use decode::CHUNK;
pub use entries::Entries;
use forebay_ops::{ChosenKeys, KV_BLOCK, RowKind};
pub use pooled::KeyPool;
pub use relative::RelativeBias;

use self::choice::RowLists;
use crate::cpu::Cpu;
use crate::kv::KvCache;

/// Parameters of one attention operation: the cached positions that each query sees, and the form
/// of the scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attention<'a> {
    /// Layer of the cache.
    pub layer: usize,
    /// Number of query heads, a multiple of the cache's key/value heads. Query head `h` uses
    /// key/value head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Factor applied to every score, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Number of positions that a token sees: itself and the `window - 1` before it. `None` means
    /// all positions before it.
    pub window: Option<usize>,
    /// True if windows do not slide: positions are divided into chunks as long as the window, and a token
    /// sees those of its own chunk (Llama 4).
    pub chunked: bool,
    /// Limit of the scores, which become `cap * tanh(score / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// One score per query head that takes its share of the softmax and carries no value (gpt-oss).
    pub sinks: Option<&'a [f32]>,
    /// Biases of the scores by distance, which are added to them before the limit.
    pub relative: Option<RelativeBias<'a>>,
    /// The positions that rows see, if they do not see all before them.
    pub chosen: Option<ChosenKeys<&'a [u32]>>,
}

impl Attention<'static> {
    /// Returns plain causal attention over all earlier positions.
    pub fn causal(layer: usize, heads: usize, scale: f32) -> Self {
        Attention {
            layer,
            heads,
            scale,
            window: None,
            chunked: false,
            softcap: None,
            sinks: None,
            relative: None,
            chosen: None,
        }
    }
}

/// Consecutive query tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRun<'a> {
    pub kind: RowKind,
    /// Position of the first token. The others follow one by one.
    pub first_position: usize,
    pub tokens: usize,
    /// The sequence's blocks in the layer's group. Entries before a token's window may be 0.
    pub table: &'a [u32],
}

impl Attention<'_> {
    /// Returns the first position that a token at `position` sees.
    fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| match self.chunked {
            true => position - position % window,
            false => (position + 1).saturating_sub(window),
        })
    }

    fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[head])
    }

    /// Returns the same parameters for the rows from number `first` on.
    fn rows_from(&self, first: usize) -> Self {
        Attention {
            chosen: self.chosen.map(|chosen| chosen.rows_from(first)),
            relative: self.relative.map(|of| of.heads_from(first * self.heads)),
            ..*self
        }
    }
}

impl Cpu {
    /// Computes `out = softmax(scale * q k^T, masked) v` for every query token and head. `q` is
    /// `[tokens, heads, head_dim_k]` and `out` is `[tokens, heads, head_dim_v]`, with the tokens of all
    /// `runs` one after the other. The tokens' own keys and values must already be in the cache. Scores and
    /// sums are f32.
    ///
    /// # Panics
    /// Panics in these cases:
    ///
    /// - The lengths do not fit together.
    /// - `heads` is not a multiple of the cache's heads.
    /// - The window is 0, or given together with chosen positions.
    /// - A table has no entry for a position that a token sees.
    /// - A list of chosen positions is missing, or names a later position than its row's.
    /// - There are biases by distance together with chosen positions, or too few of them.
    pub fn attention(
        &self,
        q: &[f32],
        cache: &KvCache,
        what: &Attention<'_>,
        runs: &[AttentionRun<'_>],
        out: &mut [f32],
    ) {
        let shape = cache.shape(what.layer);
        assert!(
            shape.kv_heads > 0 && what.heads > 0 && what.heads.is_multiple_of(shape.kv_heads),
            "attention: {} query heads over {} key/value heads",
            what.heads,
            shape.kv_heads
        );
        assert!(shape.head_dim_k > 0 && shape.head_dim_v > 0, "attention: empty heads");
        let (row, out_row) = (what.heads * shape.head_dim_k, what.heads * shape.head_dim_v);
        let tokens: usize = runs.iter().map(|run| run.tokens).sum();
        assert_eq!(q.len(), tokens * row, "attention: q is not [tokens, heads, head_dim_k]");
        assert_eq!(
            out.len(),
            tokens * out_row,
            "attention: out is not [tokens, heads, head_dim_v]"
        );
        assert!(what.window != Some(0), "attention: a window of 0 sees nothing");
        assert!(what.sinks.is_none_or(|sinks| sinks.len() == what.heads), "attention: sinks");
        if let Some(chosen) = &what.chosen {
            assert!(what.window.is_none(), "attention: chosen positions within a window");
            chosen.check(runs, shape.kv_heads);
        }
        if let Some(relative) = &what.relative {
            assert!(what.chosen.is_none(), "attention: biases of chosen positions");
            relative.check(tokens * what.heads);
        }
        for run in runs {
            let blocks = (run.first_position + run.tokens).div_ceil(KV_BLOCK);
            assert!(run.table.len() >= blocks, "attention: {run:?} has no blocks");
        }
        let (mut q, mut out, mut runs, mut first) = (q, out, runs, 0);
        while let Some(run) = runs.first() {
            // Adjacent decode rows are computed together, however many sequences they belong to.
            let count = match run.kind {
                RowKind::Prompt => 1,
                RowKind::Decode => {
                    runs.iter().take_while(|run| run.kind == RowKind::Decode).count()
                }
            };
            let (together, rest) = runs.split_at(count);
            let tokens: usize = together.iter().map(|run| run.tokens).sum();
            let (own_q, rest_q) = q.split_at(tokens * row);
            let (own_out, rest_out) = out.split_at_mut(tokens * out_row);
            let what = what.rows_from(first);
            match run.kind {
                _ if tokens == 0 => {}
                RowKind::Prompt => self.prompt_attention(own_q, cache, &what, run, own_out),
                RowKind::Decode => decode::run(self, own_q, cache, &what, together, own_out),
            }
            (q, out, runs, first) = (rest_q, rest_out, rest, first + tokens);
        }
    }

    /// Computes the rows of a prompt. Rows that see chosen positions share no keys, so they are computed one by one.
    fn prompt_attention(
        &self,
        q: &[f32],
        cache: &KvCache,
        what: &Attention<'_>,
        run: &AttentionRun<'_>,
        out: &mut [f32],
    ) {
        let shape = cache.shape(what.layer);
        let (row, out_row) = (what.heads * shape.head_dim_k, what.heads * shape.head_dim_v);
        let all = what.chosen.map_or(run.tokens, |chosen| chosen.rows_that_see_all(run));
        let (own_q, q) = q.split_at(all * row);
        let (own_out, out) = out.split_at_mut(all * out_row);
        if all > 0 {
            prompt::run(self, own_q, cache, what, &AttentionRun { tokens: all, ..*run }, own_out);
        }
        if all == run.tokens {
            return;
        }
        // The parts of many rows would take much memory.
        let most = decode::rows_at_once(cache, what);
        let pieces = q.chunks(most * row).zip(out.chunks_mut(most * out_row));
        for (piece, (q, out)) in pieces.enumerate() {
            let first = all + piece * most;
            let tokens = q.len() / row;
            let rows = AttentionRun { tokens, first_position: run.first_position + first, ..*run };
            decode::run(self, q, cache, &what.rows_from(first), &[rows], out);
        }
    }
}
