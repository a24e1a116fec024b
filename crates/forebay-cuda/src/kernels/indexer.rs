//! Indexers: scores of all keys of a row, or of pools of keys, and the choice of those with the largest ones.

use forebay_ops::{ChosenKeys, KvType, Pools, RowKind};

use super::attention_inputs::Rotation;
use super::{DeviceKvLayer, PassRows};
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

/// Shape of an indexer, whose heads share one key for each position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Indexer {
    pub heads: usize,
    /// Number of elements of a query and of a key.
    pub dim: usize,
    /// True if gates follow the keys in the cache.
    pub gated: bool,
    /// True if every head chooses pools by the largest product of its query with a key. Otherwise a pool has one key, at its last
    /// position, and its score is the sum over the heads of a weight times the positive part of the product.
    pub by_head: bool,
    pub pools: Pools,
}

impl Indexer {
    /// Largest number of elements of a query and of a key.
    pub const DIM_MAX: usize = 128;

    /// Returns the number of lists of a row.
    pub fn lists(&self) -> usize {
        if self.by_head { self.heads } else { 1 }
    }

    /// Returns the number of elements of a row of the cache.
    fn width(&self) -> usize {
        if self.gated { 2 * self.dim } else { self.dim }
    }

    /// Returns the number of scores of a list if a row sees the whole context.
    pub fn scores(&self, context: usize) -> usize {
        self.pools.candidates_of(context).max(1)
    }
}

/// Inputs that become queries and keys of an indexer. A pointer is null if there is no such input.
#[derive(Clone, Copy)]
pub struct IndexerInputs {
    /// Queries `[rows, heads, dim]`, which are changed in place.
    pub q: DevicePtr<f32>,
    /// Keys `[rows, dim]`, which go to the cache.
    pub k: DevicePtr<f32>,
    /// Gates of keys `[rows, dim]`, which go to the cache with the keys.
    pub gates: DevicePtr<f32>,
    /// Weight of the norm of queries.
    pub q_norm: DevicePtr<f32>,
    /// Weight of the norm of keys. With a bias it is a layer norm.
    pub norm: DevicePtr<f32>,
    pub bias: DevicePtr<f32>,
    /// Epsilons of norms and of layer norms.
    pub epsilon: f32,
    pub layer_epsilon: f32,
    /// Rotation of queries and keys. Keys of pools rotate from their first element on.
    pub rotation: Option<Rotation>,
    /// Keys of pools, if a pool has one that is made of those of its positions. Then keys are neither normed nor rotated before,
    /// unless they have a layer norm.
    pub pooled: Option<PooledKeys>,
}

/// The rule that makes the key of a pool. Without gates it is the mean of the keys, normed with [`IndexerInputs::norm`] and rotated like a
/// key at the pool's first position.
#[derive(Clone, Copy)]
pub struct PooledKeys {
    /// Numbers `[length, dim]` that are added to the gates, if keys have gates. Null otherwise.
    pub gate_bias: DevicePtr<f32>,
}

/// Scores of keys, and the queries and weights from which they are computed.
#[derive(Clone, Copy)]
pub struct IndexerScores {
    /// Queries `[rows, heads, dim]`.
    pub q: DevicePtr<f32>,
    /// Weights of the heads `[rows, heads]`. Null if they are all 1, or if every head chooses by itself.
    pub weights: DevicePtr<f32>,
    /// Room for the scores of some rows at a time. It must be enough for one.
    pub scores: DevicePtr<f32>,
    pub room: usize,
}

/// Returns the modules of an indexer whose keys are stored so.
pub fn indexer_modules(element: KvType) -> [&'static str; 2] {
    [scores_module(element), "indexer_choice"]
}

fn scores_module(element: KvType) -> &'static str {
    match element {
        KvType::F16 => "indexer_f16",
        KvType::F32 => "indexer_f32",
        KvType::Q8_0 => "indexer_q8_0",
        KvType::Q4_0 => "indexer_q4_0",
    }
}

fn check(of: &Indexer, layer: &DeviceKvLayer) {
    layer.check();
    let (shape, pools) = (&layer.shape, &of.pools);
    assert!(of.heads > 0 && pools.most > 0 && pools.length > 0, "{of:?} chooses nothing");
    assert!(pools.before_own <= pools.most, "{of:?}");
    assert!(pools.length > 1 || !pools.own_seen, "{of:?} has blocks of one position");
    assert!(of.dim <= Indexer::DIM_MAX, "{of:?} has too long heads");
    let fits = shape.kv_heads == 1 && shape.dim_k == of.width() && shape.values_in_keys;
    assert!(fits, "{of:?} with keys of {shape:?}");
    let fits = !of.by_head || pools.length.is_power_of_two() && pools.length <= TILE;
    assert!(fits, "{of:?} has pools that do not divide a tile");
    assert!(shape.span == 1 || pools.length == 1, "{of:?} with pools of entries");
}

impl Gpu {
    /// Norms and rotates queries and keys, and writes the keys to the cache, whose shape has one head and values in keys. Then
    /// makes the keys of the pools that the rows complete, if pools have such.
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
        layer: &DeviceKvLayer,
        rows: &PassRows,
    ) -> Result<(), CudaError> {
        check(of, layer);
        assert_eq!(layer.shape.span, 1, "keys of entries have other inputs");
        let (heads, dim, context) = (of.heads, of.dim, layer.shape.context);
        let Rotation { angles, rotary_dim, rotary_from, interleaved } =
            inputs.rotation.unwrap_or(Rotation::none());
        let fits = rotary_from + rotary_dim <= dim && rotary_dim.is_multiple_of(2);
        assert!(fits && (rotary_from == 0 || inputs.pooled.is_none()), "{of:?}");
        assert!(rows.count < 65_536, "{} rows", rows.count);
        assert_eq!(of.gated, !inputs.gates.is_null(), "gates of {of:?}");
        let is_mean = inputs.pooled.is_some() && !of.gated;
        let module = scores_module(layer.shape.element);
        let kernel = self.kernel(module, "indexer_inputs")?;
        let grid = ((heads + 1).div_ceil(WARPS) as u32, rows.count as u32, 1);
        let shared = (WARPS * of.width() * size_of::<f32>()) as u32;
        let norm = if is_mean { DevicePtr::null() } else { inputs.norm };
        Launch::new(kernel, grid, (WARPS as u32 * 32, 1, 1))
            .shared(shared)
            .ptr(inputs.q, rows.count * heads * dim)
            .ptr(inputs.k, rows.count * dim)
            .optional(inputs.gates, rows.count * dim)
            .optional(inputs.q_norm, dim)
            .optional(norm, dim)
            .optional(inputs.bias, dim)
            .optional(angles, context * rotary_dim)
            .cache(layer, rows)
            .int(heads)
            .int(dim)
            .int(rotary_dim)
            .int(rotary_from)
            .int(usize::from(interleaved))
            .int(usize::from(!is_mean))
            .int(context)
            .float(inputs.epsilon)
            .float(inputs.layer_epsilon)
            .run(self)?;
        let Some(pooled) = &inputs.pooled else { return Ok(()) };
        assert_eq!(of.gated, !pooled.gate_bias.is_null(), "gates of {of:?}");
        let kernel = self.kernel(module, "indexer_pool")?;
        let grid = (rows.count.div_ceil(WARPS) as u32, 1, 1);
        Launch::new(kernel, grid, (WARPS as u32 * 32, 1, 1))
            .shared(shared)
            .optional(pooled.gate_bias, of.pools.length * dim)
            .optional(inputs.norm, dim)
            .optional(angles, context * rotary_dim)
            .cache(layer, rows)
            .int(rows.count)
            .int(of.pools.length)
            .int(dim)
            .int(rotary_dim)
            .int(usize::from(interleaved))
            .int(context)
            .float(inputs.epsilon)
            .run(self)
    }

    /// Chooses the keys of every row. The rows' own keys must already be in the cache. If keys are those of compressed entries, lists
    /// name entries. The choice does not depend on the other rows or on the room for scores.
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
        layer: &DeviceKvLayer,
        rows: &PassRows,
        lists: DevicePtr<u32>,
    ) -> Result<(), CudaError> {
        check(of, layer);
        let (heads, dim, most) = (of.heads, of.dim, of.pools.most);
        let (context, lists_of_row, span) = (layer.shape.context, of.lists(), layer.shape.span);
        let stride = of.scores(context / span);
        let at_once = (inputs.room / (lists_of_row * stride)).min(65_535);
        assert!(at_once > 0, "no room for the scores of {context} keys");
        assert!(lists_of_row < 65_536, "{lists_of_row} lists");
        let scores_of = match (of.by_head, dim) {
            (false, 0..=64) => "indexer_scores_64",
            (false, _) => "indexer_scores_128",
            (true, 0..=64) => "indexer_pools_64",
            (true, _) => "indexer_pools_128",
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
                let keys = if of.by_head { stride * of.pools.length } else { stride };
                let tiles = keys.div_ceil(TILE).min(BLOCKS_OF_ROW);
                let grid = (tiles as u32, count.div_ceil(of_block) as u32, 1);
                let launch = Launch::new(scores_of, grid, (TILE as u32, 1, 1))
                    .ptr(inputs.q.offset(first * heads * dim), count * heads * dim);
                let launch = match of.by_head {
                    true => launch,
                    false if inputs.weights.is_null() => launch.null(),
                    false => launch.ptr(inputs.weights.offset(first * heads), count * heads),
                };
                let launch = launch
                    .cache(layer, &part)
                    .ptr(inputs.scores, count * lists_of_row * stride)
                    .int(count)
                    .int(of_block)
                    .int(heads)
                    .int(dim)
                    .int(of.width())
                    .int(context)
                    .int(stride);
                let launch = if of.by_head { launch } else { launch.int(span) };
                launch.pools(&of.pools).run(self)?;
            }
            let lists_of_part = count * lists_of_row;
            Launch::new(choice, (count as u32, lists_of_row as u32, 1), (CHOICE_THREADS, 1, 1))
                .ptr(inputs.scores, lists_of_part * stride)
                .ptr(part.positions, count)
                .ptr(lists.offset(first * lists_of_row * most), lists_of_part * most)
                .int(stride)
                .int(context)
                .int(span)
                .pools(&of.pools)
                .run(self)?;
        }
        Ok(())
    }
}

impl Launch {
    /// Passes pools.
    fn pools(self, of: &Pools) -> Launch {
        self.int(of.length).int(of.most).int(usize::from(of.own_seen)).int(of.before_own)
    }

    /// Passes the lists of chosen pools of `rows` rows, the number of lists of a row and the pools, or null and zeroes.
    pub(super) fn lists(self, chosen: Option<ChosenKeys<DevicePtr<u32>>>, rows: usize) -> Launch {
        match chosen {
            Some(ChosenKeys { lists, lists_of_row, pools }) => {
                self.ptr(lists, rows * lists_of_row * pools.most).int(lists_of_row).pools(&pools)
            }
            None => self.null().int(0).pools(&Pools::positions(0)),
        }
    }

    /// Passes the lists of chosen positions of `rows` rows and their length, or null and 0.
    pub(super) fn position_lists(
        self,
        chosen: Option<ChosenKeys<DevicePtr<u32>>>,
        rows: usize,
    ) -> Launch {
        let Some(ChosenKeys { lists, lists_of_row, pools }) = chosen else {
            return self.null().int(0);
        };
        let plain = lists_of_row == 1 && pools == Pools::positions(pools.most);
        assert!(plain, "attention to pools by a kernel that takes positions: {pools:?}");
        self.ptr(lists, rows * pools.most).int(pools.most)
    }
}
