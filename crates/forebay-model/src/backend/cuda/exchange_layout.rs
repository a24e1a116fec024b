//! Layout of the words that the host and the device exchange with every batch.

use forebay_cuda::{DeltaRuns, LANES, PromptTiles, TOP_K_MAX, prompt_tiles_max};

use super::kv_size::{HEAD_ROWS, KvSize};
use crate::arch::{Architecture, Attention};
use crate::sharing::ALIGNMENT;

/// Layout of the words exchanged with the host. They are contiguous, so one copy each way is enough: ids `[batch]`,
/// positions `[batch]`, numbers of KV tables `[batch]`, runs of recurrent layers, flags, ids and values of the largest logits `[2, rows, TOP_K_MAX]`, logits
/// `[HEAD_ROWS, vocabulary]`. The words that only prompts need follow: tiles for attention, and rows whose logits are wanted.
#[derive(Debug, Clone, Copy)]
pub struct ExchangeLayout {
    pub batch: usize,
    /// Words of ids, positions, table numbers and runs, padded to the alignment.
    pub batch_words: usize,
    /// Most runs of a pass whose states recurrent layers need; 0 without such layers.
    pub state_runs: usize,
    /// Words of a lane's flags: one for the residual stream and the logits, then one for each layer's router.
    pub lane_flags: usize,
    /// Words of all flags, padded to the alignment.
    pub flag_words: usize,
    /// Words of ids and values of the largest logits, and of the rows' totals.
    pub largest_words: usize,
    pub vocabulary: usize,
    /// Words that the host sends for prompts only.
    pub prompt_words: usize,
    /// Total number of words.
    pub words: usize,
}

impl ExchangeLayout {
    pub fn new(
        architecture: &Architecture,
        cache: &KvSize,
        batch: usize,
        decode_rows: usize,
    ) -> ExchangeLayout {
        let whole = |words: usize| words.next_multiple_of(ALIGNMENT as usize / 4);
        let lane_flags = 1 + architecture.layers.len();
        let state_runs = if architecture.has_states() { decode_rows } else { 0 };
        let batch_words = whole(3 * batch + state_runs * DeltaRuns::WORDS);
        let flag_words = whole(LANES * lane_flags);
        let vocabulary = architecture.vocabulary;
        let rows = batch.min(HEAD_ROWS);
        let largest_words = (2 * TOP_K_MAX + 1) * decode_rows;
        // Every decode row, and so every run of prompts, is of another sequence.
        let of_shape =
            |of: &Attention| prompt_tiles_max(&cache.shape(of), of.heads, batch, decode_rows);
        let tiles: usize = architecture.attentions.iter().map(of_shape).sum();
        let prompt_words = tiles * PromptTiles::WORDS + batch;
        let before = whole(batch_words + flag_words + largest_words + rows * vocabulary);
        let words = before + prompt_words;
        ExchangeLayout {
            batch,
            batch_words,
            state_runs,
            lane_flags,
            flag_words,
            largest_words,
            vocabulary,
            prompt_words,
            words,
        }
    }

    /// Returns the first of the words that only prompts need.
    pub fn prompts(&self) -> usize {
        self.words - self.prompt_words
    }

    /// Returns the number of words that the host sends.
    pub fn up_words(&self) -> usize {
        self.batch_words + self.flag_words
    }

    /// Returns the maximum number of words that the host receives: flags, the largest logits, and one row of logits.
    pub fn down_words(&self) -> usize {
        self.flag_words + self.largest_words + self.vocabulary
    }
}
