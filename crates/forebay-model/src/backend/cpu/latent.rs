//! Activations of latent attention.

use forebay_compute::MatmulJob;

use crate::arch::{Architecture, Latent};

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
    /// Rows of each head, for every number of heads that layers have.
    pub(super) rows: Vec<RowsOfHeads>,
    pub(super) batch: usize,
    /// Always empty between calls; kept for its memory.
    pub(super) jobs: Vec<MatmulJob<'static>>,
}

/// Rows of each head of layers with so many heads, `[heads, batch]`: `token * heads + head`.
pub(super) struct RowsOfHeads {
    heads: usize,
    rows: Vec<u32>,
}

impl RowsOfHeads {
    fn new(heads: usize, batch: usize) -> RowsOfHeads {
        let of = |head| (0..batch).map(move |token| (token * heads + head) as u32);
        RowsOfHeads { heads, rows: (0..heads).flat_map(of).collect() }
    }
}

/// Returns the rows of each head of a layer with `heads` heads.
pub(super) fn rows_of_heads(of: &[RowsOfHeads], heads: usize) -> &[u32] {
    let own = of.iter().find(|of| of.heads == heads);
    &own.expect("there are rows for the layers of the model").rows
}

impl LatentScratch {
    pub fn reserve(architecture: &Architecture, batch: usize) -> LatentScratch {
        let counts = architecture.latent_head_counts();
        let rows = counts.iter().map(|heads| RowsOfHeads::new(*heads, batch)).collect();
        let widths = Widths::of(architecture);
        let floats = |width: usize| vec![0.0; batch * width];
        LatentScratch {
            q_a: floats(widths.q_a),
            q: floats(widths.q_rotary + widths.q_plain),
            q_rotary: floats(widths.q_rotary),
            q_plain: floats(widths.q_plain),
            kv_a: floats(widths.kv_a),
            k_rotary: floats(widths.k_rotary),
            by_head: floats(widths.by_head),
            values: floats(widths.values),
            rows,
            batch,
            jobs: Vec::with_capacity(2 * counts.last().copied().unwrap_or(0)),
        }
    }

    /// Returns the number of floats for one token of a batch.
    pub fn floats_per_token(architecture: &Architecture) -> usize {
        let Widths { q_a, q_rotary, q_plain, kv_a, k_rotary, by_head, values } =
            Widths::of(architecture);
        let heads = architecture.most_of_latents(|_, heads| heads);
        q_a + 2 * (q_rotary + q_plain) + kv_a + k_rotary + by_head + values + heads
    }
}

/// Elements of one token in each buffer.
struct Widths {
    q_a: usize,
    q_rotary: usize,
    q_plain: usize,
    kv_a: usize,
    k_rotary: usize,
    by_head: usize,
    values: usize,
}

impl Widths {
    fn of(architecture: &Architecture) -> Widths {
        let most = |of: fn(Latent, usize) -> usize| architecture.most_of_latents(of);
        Widths {
            q_a: most(|of, _| of.query_rank.unwrap_or(0)),
            q_rotary: most(|of, heads| heads * of.rotary),
            q_plain: most(|of, heads| heads * of.plain),
            kv_a: most(|of, _| of.rank + of.rotary),
            k_rotary: most(|of, _| of.rotary),
            by_head: most(|of, heads| heads * of.rank.max(of.value)),
            values: most(|of, heads| heads * of.value),
        }
    }
}
