//! Attention over rows of DeepSeek's latent space. A row has 576 elements and is shared by all query heads; its first
//! 512 elements are the value.

use forebay_ops::{KvType, RowKind};

use super::attention::{Family, SplitRule};
use super::{
    AttentionScratch, AttentionSplits, DeviceAttention, DeviceKvLayer, KvLayerShape, PromptTiles,
};
use crate::launch::Launch;
use crate::{CudaError, Gpu};

/// Number of elements of a key and of a value; the same as in the kernel.
const DIMS: (usize, usize) = (576, 512);
/// Query rows of a block: `FEW` for generated tokens with up to 16 heads, `MANY` for others.
pub(super) const FEW: usize = 16;
const MANY: usize = 64;
/// How contexts are cut. There are as many parts as a GPU has multiprocessors, because few heads make only one block per
/// part. Even short contexts are worth the launch that joins their parts.
pub(super) const SPLITS: SplitRule = SplitRule { step: 64, alone: 0, most: 128 };
/// Columns of a block that joins parts, and its threads.
const JOIN_COLUMNS: usize = 128;
const JOIN_THREADS: u32 = 256;

/// Returns true if the kernel supports this cache.
pub(super) fn fits(shape: &KvLayerShape) -> bool {
    shape.values_in_keys
        && shape.kv_heads == 1
        && (shape.dim_k, shape.dim_v) == DIMS
        && shape.element != KvType::F32
}

/// Returns true if the GPU has enough shared memory for a block; compute capabilities 8.6 and 8.9 have 99 KiB.
pub(super) fn runs_on(gpu: &Gpu) -> bool {
    shared_bytes(FEW) <= gpu.shared_memory()
}

/// Returns the number of query rows of a block.
pub(super) fn columns(gpu: &Gpu, heads: usize, kind: RowKind) -> usize {
    let is_small = shared_bytes(MANY) > gpu.shared_memory();
    if kind == RowKind::Decode && heads <= FEW || is_small { FEW } else { MANY }
}

/// Returns the bytes of shared memory of a block with `rows` query rows. It holds queries, three tiles of 32
/// positions, four slices of scores, weights, factors, and the places of the rows of two tiles.
fn shared_bytes(rows: usize) -> usize {
    let row = 2 * DIMS.0;
    rows * row + 3 * 32 * row + 4 * rows * 36 * 4 + rows * 40 * 2 + rows * 4 + 2 * 32 * 4
}

/// Returns the number of blocks that share the context of a generated token, and the number of columns of each, if shared
/// memory is ample. Otherwise blocks are smaller and more numerous.
pub(super) fn units(heads: usize) -> (usize, usize) {
    let columns = if heads <= FEW { FEW } else { MANY };
    (heads.div_ceil(columns), columns)
}

pub(super) fn modules(element: KvType) -> [&'static str; 2] {
    match element {
        KvType::F16 => ["attention_latent_f16_16", "attention_latent_f16_64"],
        KvType::Q8_0 => ["attention_latent_q8_0_16", "attention_latent_q8_0_64"],
        KvType::Q4_0 => ["attention_latent_q4_0_16", "attention_latent_q4_0_64"],
        KvType::F32 => unreachable!("the general kernel computes in f32"),
    }
}

/// Queues the kernel, and the kernel that joins parts if there are several.
pub(super) fn launch(
    gpu: &Gpu,
    what: &DeviceAttention,
    layer: &DeviceKvLayer,
    splits: AttentionSplits,
    scratch: &AttentionScratch,
) -> Result<(), CudaError> {
    let (tokens, heads, kind) = (what.rows.count, what.heads, what.rows.kind);
    assert!(what.also.is_none() && what.inputs.is_none(), "latent rows are not fused");
    assert!(what.q.address().is_multiple_of(16) && what.out.address().is_multiple_of(16));
    let rows = tokens * heads;
    let columns = columns(gpu, heads, kind);
    let modules = modules(layer.shape.element);
    let (module, threads) = if columns == FEW { (modules[0], 128) } else { (modules[1], 256) };
    let of_tiles = kind == RowKind::Prompt && what.chosen.is_none();
    let units = match of_tiles {
        true => what.rows.tiles.count,
        false => tokens * heads.div_ceil(columns),
    };
    let kernel = match what.chosen {
        None => "attention_latent",
        Some(_) => "attention_latent_listed",
    };
    assert!(rows < 65_536 || splits.most == 1 && units < 65_536, "attention of {rows} rows");
    let floats = Family::Latent.scratch(&layer.shape, heads, &what.rows, splits.limit).floats;
    let context = layer.shape.context;
    let window = what.window_argument(context);
    let launch = Launch::new(
        gpu.kernel(module, kernel)?,
        (splits.most as u32, units as u32, 1),
        (threads, 1, 1),
    )
    .shared(shared_bytes(columns) as u32)
    .ptr(what.q, rows * DIMS.0)
    .cache(layer, &what.rows)
    .optional(what.sinks, heads)
    .ptr(what.out, rows * DIMS.1)
    .optional(scratch.parts, floats)
    .int(splits.limit);
    let tiles = what.rows.tiles;
    let launch = match what.chosen {
        Some(_) => launch.position_lists(what.chosen, tokens),
        None if of_tiles => launch.ptr(tiles.words, tiles.count * PromptTiles::WORDS),
        None => launch.null(),
    };
    let launch = launch.int(heads).int(context);
    let launch = if what.chosen.is_none() { launch.signed(window) } else { launch };
    launch.float(what.scale).float(what.softcap.unwrap_or(0.0)).run(gpu)?;
    if splits.most == 1 {
        return Ok(());
    }
    let grid = ((DIMS.1 / JOIN_COLUMNS) as u32, rows as u32, 1);
    Launch::new(gpu.kernel(module, "attention_latent_join")?, grid, (JOIN_THREADS, 1, 1))
        .ptr(what.rows.positions, tokens)
        .optional(what.sinks, heads)
        .ptr(what.out, rows * DIMS.1)
        .ptr(scratch.parts, floats)
        .int(splits.limit)
        .int(tokens)
        .int(heads)
        .int(context)
        .signed(window)
        .int(what.chosen.map_or(0, |chosen| chosen.pools.most))
        .run(gpu)
}
