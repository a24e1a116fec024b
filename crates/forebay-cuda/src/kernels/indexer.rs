//! The lightning indexer: scores of all keys of a row, and the choice of those with the largest ones.

use super::attention_inputs::Rotation;
use super::{KvElement, KvLayer, PassRows, RowKind};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Warps of a block of threads that finishes inputs, and positions of a block that computes scores; the same as in the
/// kernels.
const WARPS: usize = 4;
const TILE: usize = 128;
const CHOICE_THREADS: u32 = 1024;
/// Rows of a prompt that a block of threads takes, because they share keys.
const PROMPT_ROWS: usize = 8;
/// Blocks of threads for the keys of one row. Each takes several tiles if the context is long.
const BLOCKS_OF_ROW: usize = 512;

/// The positions that rows of attention see: ascending lists `[rows, most]`. A row with at most `most` positions up to its
/// own sees the first ones of its list, which are all of them.
#[derive(Clone, Copy)]
pub struct ChosenKeys {
    pub lists: DevicePtr<u32>,
    /// Number of positions of a list.
    pub most: usize,
}

/// Shape of an indexer, whose heads share one key for each position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indexer {
    pub heads: usize,
    /// Number of elements of a query and of a key.
    pub dim: usize,
    /// Number of keys that a row sees.
    pub most: usize,
}

impl Indexer {
    /// Largest number of elements of a query and of a key.
    pub const DIM_MAX: usize = 128;
}

/// What becomes queries and keys of an indexer.
#[derive(Clone, Copy)]
pub struct IndexerInputs {
    /// Queries `[rows, heads, dim]`, which are rotated in place.
    pub q: DevicePtr<f32>,
    /// Keys `[rows, dim]`, which go to the cache.
    pub k: DevicePtr<f32>,
    /// Weight and bias of the keys' layer norm, and its epsilon.
    pub norm: DevicePtr<f32>,
    pub bias: DevicePtr<f32>,
    pub epsilon: f32,
    /// Rotation of queries and keys, whose first elements rotate.
    pub rotation: Rotation,
}

/// Scores of keys, and what they are computed from.
#[derive(Clone, Copy)]
pub struct IndexerScores {
    /// Queries `[rows, heads, dim]`.
    pub q: DevicePtr<f32>,
    /// Weights of the heads `[rows, heads]`.
    pub weights: DevicePtr<f32>,
    /// Room for the scores of some rows at a time. It must be enough for one.
    pub scores: DevicePtr<f32>,
    pub room: usize,
}

/// Returns the modules of an indexer whose keys are stored so.
pub fn indexer_modules(element: KvElement) -> [&'static str; 2] {
    [scores_module(element), "indexer_choice"]
}

fn scores_module(element: KvElement) -> &'static str {
    match element {
        KvElement::F16 => "indexer_f16",
        KvElement::F32 => "indexer_f32",
        KvElement::Q8_0 => "indexer_q8_0",
        KvElement::Q4_0 => "indexer_q4_0",
    }
}

fn check(of: &Indexer, layer: &KvLayer) {
    layer.check();
    let shape = &layer.shape;
    assert!(of.heads > 0 && of.most > 0, "{of:?} chooses nothing");
    assert!(of.dim <= Indexer::DIM_MAX, "{of:?} has too long heads");
    let fits = shape.kv_heads == 1 && shape.dim_k == of.dim && shape.values_in_keys;
    assert!(fits, "{of:?} with keys of {shape:?}");
}

impl Gpu {
    /// Norms keys, rotates queries and keys, and writes the keys to the cache, whose shape has one head and values in keys.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, if the cache does not fit, or if the rotary part is odd or longer than a head.
    pub fn indexer_inputs(
        &self,
        of: &Indexer,
        inputs: &IndexerInputs,
        layer: &KvLayer,
        rows: &PassRows,
    ) -> Result<(), CudaError> {
        check(of, layer);
        assert_eq!(layer.shape.span, 1, "keys of entries have other inputs");
        let Indexer { heads, dim, .. } = *of;
        let Rotation { angles, rotary_dim, rotary_from, interleaved } = inputs.rotation;
        assert!(rotary_from == 0 && rotary_dim <= dim && rotary_dim.is_multiple_of(2), "{of:?}");
        assert!(rows.count < 65_536, "{} rows", rows.count);
        let kernel = self.kernel(scores_module(layer.shape.element), "indexer_inputs")?;
        let grid = ((heads + 1).div_ceil(WARPS) as u32, rows.count as u32, 1);
        Launch::new(kernel, grid, (WARPS as u32 * 32, 1, 1))
            .shared((WARPS * dim * size_of::<f32>()) as u32)
            .ptr(inputs.q, rows.count * heads * dim)
            .ptr(inputs.k, rows.count * dim)
            .ptr(inputs.norm, dim)
            .ptr(inputs.bias, dim)
            .ptr(angles, layer.shape.context * rotary_dim)
            .cache(layer, rows)
            .int(heads)
            .int(dim)
            .int(rotary_dim)
            .int(usize::from(interleaved))
            .int(layer.shape.context)
            .float(inputs.epsilon)
            .run(self)
    }

    /// Chooses the keys of every row. The rows' own keys must already be in the cache. If keys are those of compressed entries, lists
    /// name entries. The choice does not depend on the
    /// other rows or on the room for scores.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, if the cache does not fit, or if there is no room for the scores of one row.
    pub fn choose_keys(
        &self,
        of: &Indexer,
        inputs: &IndexerScores,
        layer: &KvLayer,
        rows: &PassRows,
        lists: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        check(of, layer);
        let Indexer { heads, dim, most } = *of;
        let context = layer.shape.context;
        // A row has as many scores as keys.
        let stride = (context / layer.shape.span).max(1);
        let at_once = (inputs.room / stride).min(65_535);
        assert!(at_once > 0, "no room for the scores of {stride} keys");
        let scores_of = match dim {
            0..=64 => "indexer_scores_64",
            _ => "indexer_scores_128",
        };
        let scores_of = self.kernel(scores_module(layer.shape.element), scores_of)?;
        let choice = self.kernel("indexer_choice", "indexer_choice")?;
        let of_block = match rows.kind {
            RowKind::Prompt => PROMPT_ROWS,
            RowKind::Decode => 1,
        };
        for first in (0..rows.count).step_by(at_once) {
            let count = at_once.min(rows.count - first);
            let part = PassRows {
                count,
                positions: rows.positions.offset(first),
                tables: rows.tables.offset(first),
                ..*rows
            };
            // No row needs scores if the whole context may be seen.
            if stride > most {
                let tiles = stride.div_ceil(TILE).min(BLOCKS_OF_ROW);
                let grid = (tiles as u32, count.div_ceil(of_block) as u32, 1);
                Launch::new(scores_of, grid, (TILE as u32, 1, 1))
                    .ptr(inputs.q.offset(first * heads * dim), count * heads * dim)
                    .ptr(inputs.weights.offset(first * heads), count * heads)
                    .cache(layer, &part)
                    .ptr(inputs.scores, count * stride)
                    .int(count)
                    .int(of_block)
                    .int(heads)
                    .int(dim)
                    .int(context)
                    .int(most)
                    .int(stride)
                    .int(layer.shape.span)
                    .run(self)?;
            }
            Launch::new(choice, (count as u32, 1, 1), (CHOICE_THREADS, 1, 1))
                .ptr(inputs.scores, count * stride)
                .ptr(part.positions, count)
                .ptr(lists.offset(first * most), count * most)
                .int(stride)
                .int(most)
                .int(context)
                .int(layer.shape.span)
                .run(self)?;
        }
        Ok(())
    }
}

impl Launch {
    /// Passes the lists of chosen positions of `rows` rows and their length, or null and 0.
    pub(super) fn lists(self, chosen: Option<ChosenKeys>, rows: usize) -> Launch {
        match chosen {
            Some(ChosenKeys { lists, most }) => self.ptr(lists, rows * most).int(most),
            None => self.null().int(0),
        }
    }
}
