//! Attention over rows of DeepSeek's latent space. A row has 576 elements and is shared by all query heads; its first
//! 512 elements are the value.

use super::{Attention, AttentionScratch, AttentionScratchSize, KvElement, KvLayer, KvLayerShape};
use crate::launch::Launch;
use crate::{CudaError, Gpu};

/// Number of elements of a key and of a value; the same as in the kernel.
const DIMS: (usize, usize) = (576, 512);
/// Query rows of a block: `FEW` for one token with 16 heads, `MANY` for more rows.
const FEW: usize = 16;
const MANY: usize = 64;
/// Maximum number of parts of a context, about the number of multiprocessors of a GPU. Few heads make only one block
/// per part.
pub(super) const SPLITS_MAX: usize = 128;
/// Smallest number of positions that is worth a part.
const STEP: usize = 64;
/// Largest context that is not split, because joining the parts takes one more launch.
const ALONE: usize = 128;
/// Columns of a block that joins parts, and its threads.
const JOIN_COLUMNS: usize = 128;
const JOIN_THREADS: u32 = 256;

/// Returns true if the kernel supports this cache.
pub(super) fn fits(shape: &KvLayerShape) -> bool {
    shape.values_in_keys
        && shape.kv_heads == 1
        && (shape.dim_k, shape.dim_v) == DIMS
        && shape.rows == shape.context
        && shape.element != KvElement::F32
}

/// Returns true if the GPU has enough shared memory for a block; compute capabilities 8.6 and 8.9 have 99 KiB.
pub(super) fn runs_on(gpu: &Gpu) -> bool {
    shared_bytes(FEW) <= gpu.shared_memory()
}

/// Returns the bytes of shared memory of a block with `rows` query rows. It holds queries, three tiles of 32
/// positions, four slices of scores, weights and factors.
fn shared_bytes(rows: usize) -> usize {
    let row = 2 * DIMS.0;
    rows * row + 3 * 32 * row + 4 * rows * 36 * 4 + rows * 40 * 2 + rows * 4
}

/// Returns the number of blocks that share a context, and the number of columns of each, if shared memory is ample.
/// Otherwise blocks are smaller and more numerous.
pub(super) fn units(rows: usize) -> (usize, usize) {
    let columns = if rows <= FEW { FEW } else { MANY };
    (rows.div_ceil(columns), columns)
}

/// Returns the number of parts into which a context of up to `capacity` positions is cut. One block fits one
/// multiprocessor.
pub(super) fn splits(multiprocessors: u32, rows: usize, capacity: usize) -> usize {
    if capacity <= ALONE {
        return 1;
    }
    let most = capacity.div_ceil(STEP).clamp(1, SPLITS_MAX);
    (multiprocessors as usize / units(rows).0).clamp(1, most)
}

pub(super) fn modules(element: KvElement) -> [&'static str; 2] {
    match element {
        KvElement::F16 => ["attention_latent_f16_16", "attention_latent_f16_64"],
        KvElement::Q8_0 => ["attention_latent_q8_0_16", "attention_latent_q8_0_64"],
        KvElement::Q4_0 => ["attention_latent_q4_0_16", "attention_latent_q4_0_64"],
        KvElement::F32 => unreachable!("the general kernel computes in f32"),
    }
}

/// Queues the kernel, and the kernel that joins parts if there are several.
pub(super) fn launch(
    gpu: &Gpu,
    what: &Attention,
    layer: &KvLayer,
    splits: usize,
    scratch: &AttentionScratch,
) -> Result<(), CudaError> {
    let Attention { tokens, heads, .. } = *what;
    assert!(what.rounded.is_none() && what.inputs.is_none(), "latent rows are not fused");
    assert!(what.q.address().is_multiple_of(16) && what.out.address().is_multiple_of(16));
    let rows = tokens * heads;
    let few = rows <= FEW || shared_bytes(MANY) > gpu.shared_memory();
    let modules = modules(layer.shape.element);
    let (module, columns, threads) =
        if few { (modules[0], FEW, 128) } else { (modules[1], MANY, 256) };
    let units = rows.div_ceil(columns);
    assert!(rows < 65_536 || splits == 1 && units < 65_536, "attention of {rows} rows");
    let floats = AttentionScratchSize::of(&layer.shape, heads, tokens, splits).floats;
    let context = layer.shape.context;
    let window = what.window.map_or(0, |window| window.min(context));
    Launch::new(
        gpu.kernel(module, "attention_latent")?,
        (splits as u32, units as u32, 1),
        (threads, 1, 1),
    )
    .shared(shared_bytes(columns) as u32)
    .ptr(what.q, rows * DIMS.0)
    .ptr(layer.keys, layer.shape.key_bytes() as usize)
    .ptr(what.first_position, 1)
    .optional(what.sinks, heads)
    .ptr(what.out, rows * DIMS.1)
    .ptr(scratch.parts, floats)
    .int(tokens)
    .int(heads)
    .int(context)
    .int(window)
    .float(what.scale)
    .float(what.softcap.unwrap_or(0.0))
    .run(gpu)?;
    if splits == 1 {
        return Ok(());
    }
    let grid = ((DIMS.1 / JOIN_COLUMNS) as u32, rows as u32, 1);
    Launch::new(gpu.kernel(module, "attention_latent_join")?, grid, (JOIN_THREADS, 1, 1))
        .ptr(what.first_position, 1)
        .optional(what.sinks, heads)
        .ptr(what.out, rows * DIMS.1)
        .ptr(scratch.parts, floats)
        .int(splits)
        .int(tokens)
        .int(heads)
        .int(context)
        .int(window)
        .run(gpu)
}
