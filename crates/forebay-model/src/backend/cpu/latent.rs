//! Activations of latent attention.

use forebay_compute::MatmulJob;

use crate::arch::Latent;

/// Activations of latent attention, for one batch.
#[derive(Default)]
pub struct LatentScratch {
    /// Output of the first query matrix `[tokens, query rank]`.
    pub(super) q_a: Vec<f32>,
    /// Queries `[tokens, heads, plain + rotary]`.
    pub(super) q: Vec<f32>,
    /// Rotating parts of queries `[tokens, heads, rotary]`, and the other parts `[tokens, heads, plain]`.
    pub(super) q_rotary: Vec<f32>,
    pub(super) q_plain: Vec<f32>,
    /// Output of the latent projection `[tokens, rank + rotary]`, and its rotating part.
    pub(super) kv_a: Vec<f32>,
    pub(super) k_rotary: Vec<f32>,
    /// Products of one matrix for each head `[heads, tokens, rows]`.
    pub(super) by_head: Vec<f32>,
    /// Outputs of all heads `[tokens, heads, value]`.
    pub(super) values: Vec<f32>,
    /// Rows of each head `[heads, batch]`: `token * heads + head`.
    pub(super) rows: Vec<u32>,
    pub(super) batch: usize,
    /// Always empty between calls; kept for its memory.
    pub(super) jobs: Vec<MatmulJob<'static>>,
}

impl LatentScratch {
    pub fn reserve(latent: Option<(Latent, usize)>, batch: usize) -> LatentScratch {
        let Some((latent, heads)) = latent else { return LatentScratch::default() };
        let floats = |width: usize| vec![0.0; batch * width];
        let rows = (0..heads).flat_map(|head| (0..batch).map(move |token| token * heads + head));
        LatentScratch {
            q_a: floats(latent.query_rank.unwrap_or(0)),
            q: floats(heads * (latent.plain + latent.rotary)),
            q_rotary: floats(heads * latent.rotary),
            q_plain: floats(heads * latent.plain),
            kv_a: floats(latent.rank + latent.rotary),
            k_rotary: floats(latent.rotary),
            by_head: floats(heads * latent.rank.max(latent.value)),
            values: floats(heads * latent.value),
            rows: rows.map(|row| row as u32).collect(),
            batch,
            jobs: Vec::with_capacity(2 * heads),
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(latent: Option<(Latent, usize)>) -> usize {
        latent.map_or(0, |(latent, heads)| {
            let Latent { query_rank, rank, plain, rotary, value } = latent;
            query_rank.unwrap_or(0)
                + rank
                + 2 * rotary
                + heads * (2 * (plain + rotary) + rank.max(value) + value + 1)
        })
    }
}
