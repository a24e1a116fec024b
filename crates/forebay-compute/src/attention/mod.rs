//! Causal attention over the key/value cache, for groups of query heads that share a key/value
//! head (Ainslie et al. 2023, "GQA").
//!
//! There are two kernels. A single token reads the cache once and is bound by memory, so [`decode`]
//! computes dot products on the rows as they are stored. A prompt uses every key for many queries,
//! so [`prompt`] works on tiles that are widened to f32 once. Both divide their work by the shape
//! of the problem, never by the number of threads.

mod decode;
mod prompt;
#[cfg(test)]
mod tests;

pub(crate) use decode::CHUNK;

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
    /// Position of the first query token. The others follow one by one.
    pub first_position: usize,
    /// Factor applied to every score, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Number of positions that a token sees: itself and the `window - 1` before it. `None` means
    /// all positions before it.
    pub window: Option<usize>,
    /// Limit of the scores, which become `cap * tanh(score / cap)` (Gemma 2).
    pub softcap: Option<f32>,
    /// One score per query head that takes its share of the softmax and carries no value (gpt-oss).
    pub sinks: Option<&'a [f32]>,
}

impl Attention<'static> {
    /// Returns plain causal attention over all earlier positions.
    pub fn causal(layer: usize, heads: usize, first_position: usize, scale: f32) -> Self {
        let (window, softcap, sinks) = (None, None, None);
        Attention { layer, heads, first_position, scale, window, softcap, sinks }
    }
}

impl Attention<'_> {
    /// Returns the first position that a token at `position` sees.
    fn first_visible(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[head])
    }
}

impl Cpu {
    /// Computes `out = softmax(scale * q k^T, masked) v` for every query token and head. `q` is
    /// `[tokens, heads, head_dim_k]` and `out` is `[tokens, heads, head_dim_v]`. The tokens' own
    /// keys and values must already be in the cache. Scores and sums are f32.
    ///
    /// # Panics
    /// Panics in these cases:
    ///
    /// - The lengths do not fit together.
    /// - `heads` is not a multiple of the cache's heads.
    /// - The window is 0, or the layer does not keep all positions that a token sees.
    /// - The cache holds fewer positions than the last token needs.
    pub fn attention(&self, q: &[f32], cache: &KvCache, what: &Attention<'_>, out: &mut [f32]) {
        let shape = cache.shape(what.layer);
        assert!(
            shape.kv_heads > 0 && what.heads > 0 && what.heads.is_multiple_of(shape.kv_heads),
            "attention: {} query heads over {} key/value heads",
            what.heads,
            shape.kv_heads
        );
        assert!(shape.head_dim_k > 0 && shape.head_dim_v > 0, "attention: empty heads");
        let row = what.heads * shape.head_dim_k;
        let tokens = q.len() / row;
        assert_eq!(q.len(), tokens * row, "attention: q is not [tokens, heads, head_dim_k]");
        assert_eq!(
            out.len(),
            tokens * what.heads * shape.head_dim_v,
            "attention: out is not [tokens, heads, head_dim_v]"
        );
        assert!(what.window != Some(0), "attention: a window of 0 sees nothing");
        assert!(what.sinks.is_none_or(|sinks| sinks.len() == what.heads), "attention: sinks");
        let sees_no_more = what.window.is_some_and(|window| shape.window >= Some(window));
        assert!(shape.rows >= shape.context || sees_no_more, "attention: {what:?} over {shape:?}");
        if tokens > 0 {
            shape.check_run(tokens);
        }
        assert!(
            what.first_position + tokens <= cache.layer_len(what.layer),
            "attention: the cache of layer {} ends before the last token",
            what.layer
        );
        match tokens {
            0 => {}
            1 => decode::run(self, q, cache, what, out),
            _ => prompt::run(self, q, cache, what, out),
        }
    }
}
