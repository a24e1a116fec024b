//! Activations of latent attention.

use std::collections::BTreeSet;

use forebay_cuda::DECODE_ROWS;

/// Elements of a token.
pub struct LatentWidths {
    /// Compressed queries.
    pub q_a: usize,
    pub q: usize,
    pub kv_a: usize,
    pub heads: usize,
}

/// Offsets of activations that only latent attention needs.
#[derive(Debug, Clone, Default)]
pub struct LatentLayout {
    /// Compressed queries `[batch, query rank]`, if the model has them.
    pub q_a: u64,
    /// Queries `[batch, heads, plain + rotary]`.
    pub q: u64,
    /// Latent vectors and the parts of keys that rotate `[batch, rank + rotary]`.
    pub kv_a: u64,
    /// Before attention, the parts of queries that do not rotate `[batch, heads, plain]`. After attention, values
    /// `[batch, heads, value]`.
    pub heads: u64,
    /// 0, 1 ... heads, with the most heads of a layer. For a single token, this is both `starts` and `rows`.
    pub single: u64,
    /// Tables for every number of heads that layers have.
    pub tables: Vec<HeadTables>,
}

/// Offsets of tables for layers that have so many heads, or groups of heads, with a matrix for each.
#[derive(Debug, Clone, Copy)]
pub struct HeadTables {
    pub count: usize,
    /// Head of each entry for few tokens: 0, 1 ... for each token.
    pub ids: u64,
    pub ids_count: usize,
    /// For many tokens, the index of each head's first entry `[count + 1]`.
    pub starts: u64,
    /// For many tokens, the row of each entry.
    pub rows: u64,
}

impl LatentLayout {
    /// Returns the layout for layers with these numbers of heads.
    pub fn new(
        counts: &BTreeSet<usize>,
        width: &LatentWidths,
        batch: usize,
        words: &mut impl FnMut(usize) -> u64,
    ) -> LatentLayout {
        let Some(most) = counts.last() else { return LatentLayout::default() };
        LatentLayout {
            q_a: words(batch * width.q_a),
            q: words(batch * width.q),
            kv_a: words(batch * width.kv_a),
            heads: words(batch * width.heads),
            single: words(most + 1),
            tables: counts.iter().map(|count| HeadTables::new(*count, batch, words)).collect(),
        }
    }

    /// Returns the tables for layers with so many heads.
    pub fn tables_of(&self, heads: usize) -> &HeadTables {
        let own = self.tables.iter().find(|tables| tables.count == heads);
        own.expect("there are tables for the layers of the model")
    }

    /// Returns the layout for the rows of the second lane, which begin with row `first`.
    pub fn second_lane(&self, width: &LatentWidths, first: usize) -> LatentLayout {
        let behind = |at: u64, width: usize| at + 4 * (first * width) as u64;
        LatentLayout {
            q_a: behind(self.q_a, width.q_a),
            q: behind(self.q, width.q),
            kv_a: behind(self.kv_a, width.kv_a),
            heads: behind(self.heads, width.heads),
            ..self.clone()
        }
    }
}

impl HeadTables {
    fn new(count: usize, batch: usize, words: &mut impl FnMut(usize) -> u64) -> HeadTables {
        let ids_count = batch.min(DECODE_ROWS) * count;
        HeadTables {
            count,
            ids: words(ids_count),
            ids_count,
            starts: words(count + 1),
            rows: words(batch * count),
        }
    }
}
