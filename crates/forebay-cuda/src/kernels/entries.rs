//! Compressed entries, and attention over a window and entries (DeepSeek-V4).

use forebay_ops::{ChosenKeys, KvType, RowKind};

use super::attention_inputs::Rotation;
use super::{AttentionScratchSize, DeviceKvLayer, KvLayerShape, PassRows};
use crate::launch::Launch;
use crate::{AttentionScratch, CudaError, DevicePtr, Gpu};

/// Threads of a block, heads that share a tile, and its keys; the same as in the kernels.
const THREADS: u32 = 256;
const HEADS: usize = 16;
const KEYS: usize = 16;
/// Largest number of elements of a key that all heads share, and of an entry.
pub const SHARED_KEY_DIM_MAX: usize = 512;
/// Largest number of parts into which the list of a generated token is cut. More parts need more memory and gain little, because
/// groups of heads are blocks of their own.
const PARTS_MAX: usize = 16;
/// Smallest number of keys that is worth a part; the same as in the kernel.
const STEP: usize = 64;

/// Computes entries of one kind.
#[derive(Clone, Copy)]
pub struct Compressor {
    /// Numbers `[span, parts * dim]` that are added to the gates.
    pub bias: DevicePtr<f32>,
    /// Weight of the norm of entries.
    pub norm: DevicePtr<f32>,
    pub epsilon: f32,
    /// Rotation of entries, whose last elements rotate in interleaved pairs.
    pub rotation: Rotation,
    /// Number of parts of values and gates: 2 if an entry also takes the positions of the entry before it.
    pub parts: usize,
}

/// Attention whose heads share keys that are values.
#[derive(Clone, Copy)]
pub struct SharedKeyAttention {
    /// Queries `[rows, heads, dim]`.
    pub q: DevicePtr<f32>,
    /// Outputs `[rows, heads, dim]`, rotated back.
    pub out: DevicePtr<f32>,
    pub rows: PassRows,
    pub heads: usize,
    pub scale: f32,
    /// Number of positions that a token sees, beside entries.
    pub window: usize,
    /// One score per head, as in [`super::DeviceAttention`]; null if there is none.
    pub sinks: DevicePtr<f32>,
    /// The rotation that is undone.
    pub rotation: Rotation,
    /// The entries that rows see, if these are chosen.
    pub chosen: Option<ChosenKeys<DevicePtr<u32>>>,
}

/// Returns the modules of attention with such keys, and with entries.
pub fn shared_key_modules(element: KvType) -> [&'static str; 2] {
    match element {
        KvType::F16 => ["compress_f16", "attention_entries_f16"],
        KvType::F32 => ["compress_f32", "attention_entries_f32"],
        KvType::Q8_0 => ["compress_q8_0", "attention_entries_q8_0"],
        KvType::Q4_0 => ["compress_q4_0", "attention_entries_q4_0"],
    }
}

fn check_rotation(rotation: &Rotation, dim: usize) {
    let Rotation { rotary_dim, rotary_from, interleaved, .. } = *rotation;
    assert!(interleaved && rotary_dim.is_multiple_of(2), "{rotary_dim} elements turn");
    assert_eq!(rotary_from + rotary_dim, dim, "the last elements turn");
}

fn check_rows(shape: &KvLayerShape) {
    let shared = shape.kv_heads == 1 && shape.values_in_keys && shape.dim_k == shape.dim_v;
    assert!(
        shared && shape.dim_k <= SHARED_KEY_DIM_MAX && shape.dim_k.is_multiple_of(8),
        "{shape:?}"
    );
}

/// Returns the floats and tickets that [`Gpu::attention_with_entries`] needs for so many generated tokens.
pub fn entries_scratch(heads: usize, dim: usize, rows: usize) -> AttentionScratchSize {
    let units = rows * heads.div_ceil(HEADS);
    AttentionScratchSize { floats: units * PARTS_MAX * HEADS * (dim + 2), tickets: units }
}

/// Returns the bytes of shared memory of a block for keys of up to `dim` elements.
fn shared_bytes(dim: usize) -> usize {
    4 * ((HEADS + KEYS) * (dim + 4) + KEYS * HEADS + HEADS + 128 + HEADS)
}

impl Gpu {
    /// Computes the entries that end with rows of a pass, and writes them to `entries`. The rows' values and gates must already be
    /// in `projections`, as keys and values of one head.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or the caches do not fit.
    pub fn compress(
        &self,
        of: &Compressor,
        projections: &DeviceKvLayer,
        entries: &DeviceKvLayer,
        rows: &PassRows,
    ) -> Result<(), CudaError> {
        projections.check();
        entries.check();
        let (from, to) = (&projections.shape, &entries.shape);
        check_rows(to);
        check_rotation(&of.rotation, to.dim_k);
        let (dim, width) = (to.dim_k, of.parts * to.dim_k);
        let fits = from.kv_heads == 1
            && !from.values_in_keys
            && [from.dim_k, from.dim_v] == [width; 2]
            && from.context == to.context
            && from.element == to.element;
        assert!(fits && (1..=2).contains(&of.parts), "{to:?} of {from:?}");
        let [module, _] = shared_key_modules(to.element);
        Launch::new(self.kernel(module, "compress")?, (rows.count as u32, 1, 1), (THREADS, 1, 1))
            .cache(projections, rows)
            .spanned(Some(entries))
            .ptr(of.bias, to.span * width)
            .ptr(of.norm, dim)
            .ptr(of.rotation.angles, to.context * of.rotation.rotary_dim)
            .int(dim)
            .int(of.parts)
            .int(of.rotation.rotary_dim)
            .int(to.context)
            .float(of.epsilon)
            .run(self)
    }

    /// Computes attention over the keys of a window and over entries in one softmax, and rotates the output back. The rows' own
    /// keys, and the entries that end with them, must already be in the caches.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, the caches do not fit, or a grid's limits are exceeded.
    pub fn attention_with_entries(
        &self,
        what: &SharedKeyAttention,
        layer: &DeviceKvLayer,
        entries: Option<&DeviceKvLayer>,
        scratch: &AttentionScratch,
    ) -> Result<(), CudaError> {
        layer.check();
        let (shape, SharedKeyAttention { rows, heads, .. }) = (&layer.shape, *what);
        check_rows(shape);
        check_rotation(&what.rotation, shape.dim_k);
        assert!(heads > 0 && what.window > 0, "{heads} heads, a window of {}", what.window);
        if let Some(entries) = entries {
            entries.check();
            let KvLayerShape { span, chosen, .. } = entries.shape;
            assert_eq!(entries.shape, KvLayerShape { span, chosen, ..*shape }, "other entries");
        }
        let aligned = what.q.address().is_multiple_of(16) && what.out.address().is_multiple_of(16);
        assert!(aligned, "heads are written by 16 bytes");
        let (dim, context) = (shape.dim_k, shape.context);
        // Prompts have enough rows, so their lists are not cut.
        let limit = if rows.kind == RowKind::Prompt { 1 } else { PARTS_MAX };
        let needed = match limit {
            1 => AttentionScratchSize::default(),
            _ => entries_scratch(heads, dim, rows.count),
        };
        assert!(needed.max(scratch.size) == scratch.size, "attention needs {needed:?}");
        let all = entries.map_or(0, |entries| context / entries.shape.span);
        let most = what.window.min(context) + what.chosen.map_or(all, |of| of.pools.most.min(all));
        let parts = limit.min(most / STEP).max(1);
        let groups = heads.div_ceil(HEADS);
        assert!(rows.count < 65_536 && groups < 65_536, "{} rows", rows.count);
        let grid = (parts as u32, groups as u32, rows.count as u32);
        let [_, module] = shared_key_modules(shape.element);
        let (kernel, width) = match dim {
            0..=128 => ("attention_entries_128", 128),
            _ => ("attention_entries_512", 512),
        };
        Launch::new(self.kernel(module, kernel)?, grid, (THREADS, 1, 1))
            .shared(shared_bytes(width) as u32)
            .ptr(what.q, rows.count * heads * dim)
            .cache(layer, &rows)
            .spanned(entries)
            .optional(what.sinks, heads)
            .ptr(what.out, rows.count * heads * dim)
            .optional(scratch.parts, needed.floats)
            .optional(scratch.tickets, needed.tickets)
            .ptr(what.rotation.angles, context * what.rotation.rotary_dim)
            .int(limit)
            .int(heads)
            .int(dim)
            .int(context)
            .int(what.window.min(context))
            .int(what.rotation.rotary_dim)
            .float(what.scale)
            .position_lists(what.chosen, rows.count)
            .run(self)
    }
}
