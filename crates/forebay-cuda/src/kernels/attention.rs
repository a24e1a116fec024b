//! Causal attention over the KV cache: choice of the kernel and the number of parts of a split context.

use forebay_ops::{ChosenKeys, KvType, RowKind};

use super::{
    AttentionInputs, Converted, CutPrompts, DeviceKvLayer, KvLayerShape, PassRows, PromptRun,
    PromptTiles, Rotation,
};
use super::{latent, prompts};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Query rows that share one read of the cache; the same as in the decode kernel.
const COLUMNS: usize = 8;
/// Contexts up to this length are split in the same way. A longer context is split like one of the next power of two; the
/// same as in the kernels.
const SMALLEST_CAPACITY: usize = 256;
const THREADS: u32 = 128;
/// Largest number of elements of a head.
pub const ATTENTION_DIM_MAX: usize = 1088;

/// How a family of kernels cuts contexts into parts; the same as in the kernels.
pub(super) struct SplitRule {
    /// Smallest number of positions that is worth a part.
    pub step: usize,
    /// Largest capacity that is not split, because joining the parts takes longer than a few steps.
    pub alone: usize,
    /// Largest number of parts; the kernels have room for twice as many, or as many of latent rows. Joining more parts
    /// costs more than it gains.
    pub most: usize,
}

const DECODE_SPLITS: SplitRule = SplitRule { step: 64, alone: 256, most: 64 };
const GENERAL_SPLITS: SplitRule = SplitRule { step: 16, alone: 0, most: 64 };

/// Arguments of attention: the queries, the part of the cache that they see, and the form of scores. The CPU's type of
/// the same name has the same meaning.
#[derive(Clone, Copy)]
pub struct DeviceAttention {
    /// Queries `[rows, heads, dim_k]`.
    pub q: DevicePtr<f32>,
    /// Outputs `[rows, heads, dim_v]`.
    pub out: DevicePtr<f32>,
    /// The query rows, whose own keys and values are in the cache already, except for `inputs`. They may belong to any
    /// sequences.
    pub rows: PassRows,
    /// Number of query heads, a multiple of the cache's heads.
    pub heads: usize,
    /// Factor that multiplies every score.
    pub scale: f32,
    /// Number of positions that a token sees: itself and the `window - 1` before it.
    pub window: Option<usize>,
    /// True if windows do not slide, but are chunks as long as the window, of which a token sees its own.
    pub chunked: bool,
    /// Cap that limits scores to `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// One more score per query head, which takes its share of the softmax and carries no value. Null if there is
    /// none.
    pub sinks: DevicePtr<f32>,
    /// Inputs on which attention first does the work of [`Gpu::attention_inputs`], if [`takes_inputs`] allows it. `q`
    /// is then their projection. No two of the rows may belong to the same sequence, because a row would not wait for
    /// the keys of another.
    pub inputs: Option<AttentionInputs>,
    /// Biases of scores by distance, if the shape says that there are such ([`KvLayerShape::biased`]).
    pub relative: Option<RelativeBiases>,
    /// The positions that rows see, if the shape says that these are chosen ([`KvLayerShape::chosen`]).
    pub chosen: Option<ChosenKeys<DevicePtr<u32>>>,
    /// Second output that gets `out` converted, if [`converts_outputs`] allows it: rounded for generated tokens, as halves for
    /// prompts.
    pub also: Option<Converted>,
}

/// Biases of scores by the distance of the key. Keys that are at least `extent` positions away have none.
#[derive(Clone, Copy)]
pub struct RelativeBiases {
    /// What every head of the rows takes of each profile, divided by the factor of scores, `[rows, heads, rank]`.
    pub mixes: DevicePtr<f32>,
    /// Profiles `[rank, extent]`, from the farthest distance to the token itself.
    pub profiles: DevicePtr<f32>,
    pub rank: usize,
    pub extent: usize,
}

/// Returns true if attention of such rows does the work of [`Gpu::attention_inputs`] by itself.
pub fn takes_inputs(shape: &KvLayerShape, kind: RowKind) -> bool {
    !shape.values_in_keys && Family::of(shape, kind) == Family::Decode
}

/// Returns true if attention of such rows can also write its results in the form that products take.
pub fn converts_outputs(shape: &KvLayerShape, rows: &PassRows) -> bool {
    match Family::of(shape, rows.kind) {
        Family::Decode => shape.dim_v.is_multiple_of(32),
        // The kernel that joins the parts sees whole rows.
        Family::Prompt => rows.tiles.in_parts && shape.dim_v.is_multiple_of(4),
        Family::Latent | Family::General => false,
    }
}

/// Scratch memory for the parts of split contexts, shared by all layers.
#[derive(Clone, Copy)]
pub struct AttentionScratch {
    /// Partial results, aligned to 16 bytes.
    pub parts: DevicePtr<f32>,
    /// Counters that are 0 before the first call and after every call.
    pub tickets: DevicePtr<u32>,
    pub size: AttentionScratchSize,
}

/// Size of [`AttentionScratch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionScratchSize {
    pub floats: usize,
    pub tickets: usize,
}

impl AttentionScratchSize {
    /// Returns a size that is enough for both.
    pub fn max(self, other: AttentionScratchSize) -> AttentionScratchSize {
        AttentionScratchSize {
            floats: self.floats.max(other.floats),
            tickets: self.tickets.max(other.tickets),
        }
    }
}

/// The numbers of parts into which the contexts of a pass's rows are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSplits {
    /// Limit for every row. It follows from the GPU and the model, and the last bits of the results depend on it. The
    /// kernels compute a row's number of parts from the limit and the row's position.
    pub limit: usize,
    /// Largest number of any row of the pass. Results do not depend on it.
    pub most: usize,
}

impl AttentionSplits {
    /// Contexts of prompts are cut by the tiles ([`Gpu::prompt_tiles`]).
    const PROMPT: AttentionSplits = AttentionSplits { limit: 1, most: 1 };
}

/// Families of attention kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Generated tokens, elements other than f32, heads of an even number of elements up to 256.
    Decode,
    /// Prompts, with the same elements and heads.
    Prompt,
    /// Rows of DeepSeek's latent space, elements other than f32.
    Latent,
    /// All other cases, chosen positions of other rows than latent ones, and biases by distance.
    General,
}

impl Family {
    fn of(shape: &KvLayerShape, kind: RowKind) -> Family {
        if latent::fits(shape) {
            Family::Latent
        } else if shape.chosen
            || shape.biased
            || shape.element == KvType::F32
            || shape.dim_k.max(shape.dim_v) > 256
            || !shape.dim_k.is_multiple_of(2)
            || !shape.dim_v.is_multiple_of(2)
        {
            Family::General
        } else {
            match kind {
                RowKind::Decode => Family::Decode,
                RowKind::Prompt => Family::Prompt,
            }
        }
    }

    /// Returns the family that runs on a GPU, which may have too little shared memory for latent rows.
    fn on(gpu: &Gpu, shape: &KvLayerShape, kind: RowKind) -> Family {
        match Family::of(shape, kind) {
            Family::Latent if !latent::runs_on(gpu) => Family::General,
            family => family,
        }
    }

    /// Returns the number of blocks that share the context of a generated token, and the number of columns of each.
    fn units(self, shape: &KvLayerShape, heads: usize) -> (usize, usize) {
        match self {
            Family::Latent => latent::units(heads),
            Family::Decode => {
                (shape.kv_heads * (heads / shape.kv_heads).div_ceil(COLUMNS), COLUMNS)
            }
            Family::Prompt | Family::General => (heads, 1),
        }
    }

    fn split_rule(self) -> SplitRule {
        match self {
            Family::Latent => latent::SPLITS,
            Family::Decode | Family::Prompt => DECODE_SPLITS,
            Family::General => GENERAL_SPLITS,
        }
    }

    /// Returns the largest number of parts for which a GPU with `multiprocessors` has a use for one generated token.
    fn limit(self, multiprocessors: u32, shape: &KvLayerShape, heads: usize) -> usize {
        // Three blocks fit one multiprocessor, or one of latent rows.
        let blocks = if self == Family::Latent { 1 } else { 3 } * multiprocessors as usize;
        (blocks / self.units(shape, heads).0).clamp(1, self.split_rule().most)
    }

    /// Returns the number of parts into which the context of a generated token is cut that ends at `end`: `splits_of` of
    /// the kernels.
    fn splits(self, limit: usize, end: usize) -> usize {
        let SplitRule { step, alone, .. } = self.split_rule();
        let capacity = end.next_power_of_two().max(SMALLEST_CAPACITY);
        if capacity <= alone { 1 } else { limit.min(capacity / step) }
    }

    /// Returns the scratch memory for rows that have up to `limit` parts. A single part needs none.
    pub(super) fn scratch(
        self,
        shape: &KvLayerShape,
        heads: usize,
        rows: &PassRows,
        limit: usize,
    ) -> AttentionScratchSize {
        let part_floats = shape.dim_v.next_multiple_of(4) + 2;
        if self == Family::Prompt && prompts::is_spread(rows.count) {
            let floats = rows.count * heads * prompts::PARTS * part_floats;
            return AttentionScratchSize { floats, tickets: 0 };
        }
        if rows.kind == RowKind::Prompt || limit == 1 {
            return AttentionScratchSize::default();
        }
        let (units, columns) = self.units(shape, heads);
        let parts = rows.count * units * limit * columns;
        let floats = parts * part_floats;
        let tickets = if self == Family::Latent { 0 } else { rows.count * units };
        AttentionScratchSize { floats, tickets }
    }
}

impl AttentionScratchSize {
    /// Returns the size for passes of up to `rows` generated tokens or `batch` rows of prompts on a GPU with
    /// `multiprocessors`.
    pub fn of(
        multiprocessors: u32,
        shape: &KvLayerShape,
        heads: usize,
        rows: usize,
        batch: usize,
    ) -> AttentionScratchSize {
        let pass = |kind, count| PassRows {
            kind,
            count,
            positions: DevicePtr::null(),
            tables: DevicePtr::null(),
            tiles: PromptTiles::none(),
        };
        let of = |family: Family| {
            let limit = family.splits(family.limit(multiprocessors, shape, heads), shape.context);
            family.scratch(shape, heads, &pass(RowKind::Decode, rows), limit)
        };
        let family = Family::of(shape, RowKind::Decode);
        let decode = match family {
            // A GPU with little shared memory runs the general kernel on latent rows.
            Family::Latent => of(family).max(of(Family::General)),
            _ => of(family),
        };
        let prompt = pass(RowKind::Prompt, batch.min(prompts::SPREAD_ROWS));
        decode.max(Family::of(shape, RowKind::Prompt).scratch(shape, heads, &prompt, 1))
    }
}

impl DeviceAttention {
    /// Passes the last arguments of the decode kernel.
    fn pass_fused(&self, launch: Launch, shape: &KvLayerShape) -> Launch {
        let tokens = self.rows.count;
        let launch = match self.also {
            Some(Converted::Rounded(to)) => {
                let values = tokens * self.heads * shape.dim_v;
                launch.ptr(to.codes, values).ptr(to.scales, values / 32)
            }
            Some(Converted::Halves(_)) => unreachable!("halves of generated tokens"),
            None => launch.null().null(),
        };
        let Some(inputs) = self.inputs else { return (0..14).fold(launch, |l, _| l.u64(0)) };
        inputs.check(shape);
        assert_eq!(inputs.key_norm_dims, [shape.dim_k, 0], "keys that are normed in part");
        assert_eq!(inputs.q.projected.address(), self.q.address(), "other queries");
        assert_eq!(inputs.heads, self.heads, "other heads");
        let rotation = inputs.rotation.unwrap_or(Rotation::none());
        launch
            .ptr(inputs.k.projected, tokens * shape.kv_heads * shape.dim_k)
            .ptr(inputs.v.projected, tokens * shape.kv_heads * shape.dim_v)
            .optional(inputs.q.bias, self.heads * shape.dim_k)
            .optional(inputs.k.bias, shape.kv_heads * shape.dim_k)
            .optional(inputs.v.bias, shape.kv_heads * shape.dim_v)
            .optional(inputs.q.norm, shape.dim_k)
            .optional(inputs.k.norm, shape.dim_k)
            .optional(rotation.angles, shape.context * rotation.rotary_dim)
            .int(rotation.rotary_dim)
            .int(rotation.rotary_from)
            .int(usize::from(rotation.interleaved))
            .float(inputs.norm_epsilon)
            .int(usize::from(inputs.norms_last))
            .int(inputs.mixed)
    }
}

impl Gpu {
    /// Returns how the contexts of rows are cut, the longest of which ends at `end`. The limit covers every position of
    /// the shape's context.
    pub fn attention_splits(
        &self,
        shape: &KvLayerShape,
        heads: usize,
        kind: RowKind,
        end: usize,
    ) -> AttentionSplits {
        if kind == RowKind::Prompt {
            return AttentionSplits::PROMPT;
        }
        let family = Family::on(self, shape, kind);
        let limit = family.limit(self.multiprocessors(), shape, heads);
        self.attention_splits_with(limit, shape, end)
    }

    /// Returns what [`Gpu::attention_splits`] returns for generated tokens on a GPU with another limit. Checks use it.
    pub fn attention_splits_with(
        &self,
        limit: usize,
        shape: &KvLayerShape,
        end: usize,
    ) -> AttentionSplits {
        let family = Family::on(self, shape, RowKind::Decode);
        // No row has more parts than one at the end of the context, so parts beyond need no memory.
        let limit = family.splits(limit.clamp(1, family.split_rule().most), shape.context);
        AttentionSplits { limit, most: family.splits(limit, end) }
    }

    /// Returns the scratch memory that [`Gpu::attention`] needs.
    pub fn attention_scratch(
        &self,
        shape: &KvLayerShape,
        heads: usize,
        rows: &PassRows,
        splits: AttentionSplits,
    ) -> AttentionScratchSize {
        Family::on(self, shape, rows.kind).scratch(shape, heads, rows, splits.limit)
    }

    /// Cuts prompts into tiles. Those whose rows see the most positions come first, because they take the longest. Results
    /// do not depend on how prompts are cut. Returns nothing for kernels that take rows one by one.
    pub fn prompt_tiles(
        &self,
        shape: &KvLayerShape,
        heads: usize,
        runs: impl Iterator<Item = PromptRun>,
    ) -> CutPrompts {
        match Family::on(self, shape, RowKind::Prompt) {
            // Rows that see chosen positions are taken one by one.
            _ if shape.chosen => CutPrompts::default(),
            Family::Prompt => prompts::cut(runs.collect(), heads_of_block(shape, heads)),
            Family::Latent => {
                let rows = latent::columns(self, heads, RowKind::Prompt);
                CutPrompts { tiles: prompts::tiles(rows, heads, runs), in_parts: false }
            }
            Family::Decode | Family::General => CutPrompts::default(),
        }
    }

    /// Computes `out = softmax(scale * q k^T, masked) v` for every query row and head. `splits` comes from
    /// [`Gpu::attention_splits`], with at least the largest end of all rows.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, `heads` is not a multiple of the cache's heads, or heads are longer than
    /// [`ATTENTION_DIM_MAX`].
    /// Panics if the window is 0, if `splits` is 0 or too large, the scratch memory is too small, or a grid's limits are
    /// exceeded. Panics if chosen positions are missing, or are given together with a window.
    pub fn attention(
        &self,
        what: &DeviceAttention,
        layer: &DeviceKvLayer,
        splits: AttentionSplits,
        scratch: &AttentionScratch,
    ) -> Result<(), CudaError> {
        layer.check();
        let shape = &layer.shape;
        let DeviceAttention { rows, heads, .. } = *what;
        let (tokens, kind) = (rows.count, rows.kind);
        assert!(heads > 0 && heads.is_multiple_of(shape.kv_heads), "{heads} heads over {shape:?}");
        assert!(shape.dim_k.max(shape.dim_v) <= ATTENTION_DIM_MAX, "{shape:?} has too long heads");
        let aligned = |address: u64| address.is_multiple_of(8);
        assert!(
            aligned(what.q.address()) && aligned(what.out.address()),
            "heads are read by 8 bytes"
        );
        assert!(what.window != Some(0), "a window of 0 sees nothing");
        assert_eq!(what.chosen.is_some(), shape.chosen, "chosen positions of {shape:?}");
        assert!(what.chosen.is_none() || what.window.is_none(), "chosen positions in a window");
        assert_eq!(what.relative.is_some(), shape.biased, "biases of {shape:?}");
        let is_plain = what.chosen.is_none() && what.softcap.is_none();
        assert!(!shape.biased || is_plain, "biases beside chosen positions or a cap");
        let family = Family::on(self, shape, kind);
        let limits = 1..=if kind == RowKind::Prompt { 1 } else { family.split_rule().most };
        assert!(
            limits.contains(&splits.limit) && (1..=splits.limit).contains(&splits.most),
            "{splits:?}"
        );
        let needed = family.scratch(shape, heads, &rows, splits.limit);
        assert!(
            needed.max(scratch.size) == scratch.size,
            "attention needs scratch memory of {needed:?}, has {:?}",
            scratch.size
        );
        if tokens == 0 {
            return Ok(());
        }
        let takes_tiles = kind == RowKind::Prompt && family != Family::General && !shape.chosen;
        assert_eq!(takes_tiles, rows.tiles.count > 0, "tiles of {kind:?} rows");
        assert!(!rows.tiles.in_parts || prompts::is_spread(tokens), "parts of {tokens} rows");
        if family == Family::Latent {
            return latent::launch(self, what, layer, splits, scratch);
        }
        let (module, kernel) = kernel_of(shape, family);
        let grid = match family {
            Family::Decode => (splits.most, tokens * family.units(shape, heads).0, 1),
            Family::Prompt => (rows.tiles.count, heads / heads_of_block(shape, heads), 1),
            Family::General => (splits.most, heads, tokens),
            Family::Latent => unreachable!("launched by itself"),
        };
        assert!(grid.1 < 65_536 && grid.2 < 65_536, "attention: a grid of {grid:?}");
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        let mut launch = Launch::new(self.kernel(module, kernel)?, grid, (THREADS, 1, 1))
            .ptr(what.q, tokens * heads * shape.dim_k)
            .cache(layer, &rows)
            .optional(what.sinks, heads)
            .ptr(what.out, tokens * heads * shape.dim_v);
        launch = match family {
            Family::Prompt => launch
                .ptr(rows.tiles.words, rows.tiles.count * PromptTiles::WORDS)
                .optional(scratch.parts, needed.floats)
                .int(tokens),
            _ => launch
                .optional(scratch.parts, needed.floats)
                .optional(scratch.tickets, needed.tickets)
                .int(splits.limit),
        };
        assert!(what.also.is_none() || converts_outputs(shape, &rows), "not converted: {shape:?}");
        assert!(what.inputs.is_none() || takes_inputs(shape, kind), "inputs of {kind:?} rows");
        let window = what.window_argument(shape.context);
        launch = launch
            .int(heads)
            .int(shape.kv_heads)
            .int(shape.dim_k)
            .int(shape.dim_v)
            .int(shape.context)
            .signed(window)
            .float(what.scale)
            .float(what.softcap.unwrap_or(0.0));
        match family {
            Family::Decode => launch = what.pass_fused(launch, shape),
            Family::General => {
                launch = launch.lists(what.chosen, tokens);
                launch = match what.relative {
                    Some(RelativeBiases { mixes, profiles, rank, extent }) => launch
                        .ptr(mixes, tokens * heads * rank)
                        .ptr(profiles, rank * extent)
                        .int(rank)
                        .int(extent),
                    None => launch.null().null().int(0).int(0),
                };
            }
            Family::Prompt | Family::Latent => {}
        }
        launch.run(self)?;
        if !rows.tiles.in_parts {
            return Ok(());
        }
        let values = tokens * heads * shape.dim_v;
        let (halves, scales) = match what.also {
            Some(Converted::Halves(to)) => (to.high, to.scales),
            Some(Converted::Rounded(_)) => unreachable!("rounded prompts"),
            None => (DevicePtr::null(), DevicePtr::null()),
        };
        let (grid, block) = ((tokens as u32, 1, 1), (prompts::JOIN_THREADS, 1, 1));
        Launch::new(self.kernel(module, "attention_prompt_join")?, grid, block)
            .ptr(rows.positions, tokens)
            .optional(what.sinks, heads)
            .ptr(what.out, values)
            .ptr(scratch.parts, needed.floats)
            .optional(halves, values)
            .optional(scales, tokens)
            .int(tokens)
            .int(heads)
            .int(shape.dim_v)
            .int(shape.context)
            .signed(window)
            .run(self)
    }
}

impl DeviceAttention {
    /// Returns the window as kernels take it. A chunk as long as the context hides nothing.
    pub(super) fn window_argument(&self, context: usize) -> i32 {
        let length = self.window.map_or(0, |window| window.min(context));
        let length = i32::try_from(length).expect("a context has fewer than 2^31 positions");
        if self.chunked { -length } else { length }
    }
}

/// Returns the number of query heads that a block of the prompt kernel takes.
fn heads_of_block(shape: &KvLayerShape, heads: usize) -> usize {
    prompts::heads_of_block(heads / shape.kv_heads)
}

/// Returns the largest number of tiles of a pass with `rows` rows of `runs` runs, on any GPU.
pub fn prompt_tiles_max(shape: &KvLayerShape, heads: usize, rows: usize, runs: usize) -> usize {
    match Family::of(shape, RowKind::Prompt) {
        _ if shape.chosen => 0,
        Family::Prompt => prompts::tiles_max(rows, runs, heads_of_block(shape, heads)),
        Family::Latent => (rows * heads).div_ceil(latent::FEW) + runs,
        Family::Decode | Family::General => 0,
    }
}

/// Returns the modules that passes of both kinds need.
pub(super) fn attention_modules(shape: &KvLayerShape) -> [&'static str; 2] {
    if latent::fits(shape) {
        return latent::modules(shape.element);
    }
    [RowKind::Decode, RowKind::Prompt].map(|kind| kernel_of(shape, Family::of(shape, kind)).0)
}

/// Returns the names of the module and the kernel.
fn kernel_of(shape: &KvLayerShape, family: Family) -> (&'static str, &'static str) {
    let dim = shape.dim_k.max(shape.dim_v);
    if family == Family::General {
        let module = match shape.element {
            KvType::F16 => "attention_general_f16",
            KvType::F32 => "attention_general_f32",
            KvType::Q8_0 => "attention_general_q8_0",
            KvType::Q4_0 => "attention_general_q4_0",
        };
        let kernel = match dim {
            0..=128 => "attention_general_128",
            129..=256 => "attention_general_256",
            257..=576 => "attention_general_576",
            _ => "attention_general_1088",
        };
        return (module, kernel);
    }
    // Selects the module by element type and by the longest head that it supports.
    macro_rules! module {
        ($kernel:literal) => {
            match (shape.element, dim) {
                (KvType::F16, 0..=64) => concat!($kernel, "_f16_64"),
                (KvType::F16, 65..=96) => concat!($kernel, "_f16_96"),
                (KvType::F16, 97..=128) => concat!($kernel, "_f16_128"),
                (KvType::F16, _) => concat!($kernel, "_f16_256"),
                (KvType::Q8_0, 0..=64) => concat!($kernel, "_q8_0_64"),
                (KvType::Q8_0, 65..=96) => concat!($kernel, "_q8_0_96"),
                (KvType::Q8_0, 97..=128) => concat!($kernel, "_q8_0_128"),
                (KvType::Q8_0, _) => concat!($kernel, "_q8_0_256"),
                (KvType::Q4_0, 0..=64) => concat!($kernel, "_q4_0_64"),
                (KvType::Q4_0, 65..=96) => concat!($kernel, "_q4_0_96"),
                (KvType::Q4_0, 97..=128) => concat!($kernel, "_q4_0_128"),
                (KvType::Q4_0, _) => concat!($kernel, "_q4_0_256"),
                (KvType::F32, _) => unreachable!("the general kernel computes in f32"),
            }
        };
    }
    match family {
        Family::Decode => (module!("attention_decode"), "attention_decode"),
        _ => (module!("attention_prompt"), "attention_prompt"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ELEMENTS: [KvType; 4] = [KvType::F16, KvType::F32, KvType::Q8_0, KvType::Q4_0];

    fn shape(element: KvType, kv_heads: usize, dims: (usize, usize)) -> KvLayerShape {
        KvLayerShape::new(element, kv_heads, dims, 16_384)
    }

    fn latent_shape(element: KvType) -> KvLayerShape {
        KvLayerShape { values_in_keys: true, ..shape(element, 1, (576, 512)) }
    }

    #[test]
    fn every_shape_has_a_module_that_exists() {
        for element in ELEMENTS {
            for dim in [8, 64, 65, 96, 100, 128, 129, 256, 257, 576, 577, 1088] {
                for kind in [RowKind::Prompt, RowKind::Decode] {
                    let shape = shape(element, 2, (dim, 8));
                    let (module, kernel) = kernel_of(&shape, Family::of(&shape, kind));
                    let ptx = crate::ptx::text(module);
                    assert!(ptx.is_some_and(|text| text.contains(&format!("{kernel}("))));
                }
            }
        }
    }

    #[test]
    fn latent_rows_have_modules_and_scratch_of_their_own() {
        for element in [KvType::F16, KvType::Q8_0, KvType::Q4_0] {
            let shape = latent_shape(element);
            for module in attention_modules(&shape) {
                let ptx = crate::ptx::text(module);
                assert!(ptx.is_some_and(|text| text.contains("attention_latent_join(")));
            }
            // One block per multiprocessor, with 16 or 64 query rows.
            let limit = |heads| Family::Latent.limit(132, &shape, heads);
            assert_eq!((limit(16), limit(128)), (128, 66));
            // The tickets are for GPUs that run the general kernel.
            let size = AttentionScratchSize::of(132, &shape, 16, 2, 512);
            assert_eq!(size, AttentionScratchSize { floats: 2 * 16 * 128 * 514, tickets: 32 });
        }
        let exact = latent_shape(KvType::F32);
        assert_eq!(attention_modules(&exact), ["attention_general_f32"; 2]);
    }

    #[test]
    fn a_rows_splits_follow_from_its_position() {
        let shape = shape(KvType::F16, 8, (128, 128));
        let limit = Family::Decode.limit(132, &shape, 32);
        assert_eq!(limit, 49);
        let splits = |end| Family::Decode.splits(limit, end);
        let ends = [1, 256, 257, 512, 513, 1024, 2048, 4096, 16_384];
        assert_eq!(ends.map(splits), [1, 1, 8, 8, 16, 16, 32, 49, 49]);
        assert_eq!(
            [1, 256, 257, 2000].map(|end| Family::General.splits(20, end)),
            [16, 16, 20, 20]
        );
        assert_eq!([1, 256, 257, 9000].map(|end| Family::Latent.splits(66, end)), [4, 4, 8, 66]);
    }

    #[test]
    fn latent_rows_are_cut_into_tiles_of_rows_of_heads() {
        let most = prompt_tiles_max(&latent_shape(KvType::F16), 40, 6, 1);
        assert!((4..=16).contains(&most), "{most}");
    }

    #[test]
    fn scratch_is_counted_by_rows_and_limit() {
        let plain = shape(KvType::F16, 8, (128, 128));
        let size = |shape: &KvLayerShape, rows| AttentionScratchSize::of(132, shape, 32, rows, 0);
        let floats = 8 * 49 * 8 * 130;
        assert_eq!(size(&plain, 1), AttentionScratchSize { floats, tickets: 8 });
        assert_eq!(size(&plain, 3), AttentionScratchSize { floats: 3 * floats, tickets: 24 });
        // A context that is never cut needs none.
        let short = KvLayerShape { context: 99, ..plain };
        assert_eq!(size(&short, 1), AttentionScratchSize::default());
        // A pass of up to 128 prompt rows has parts, too.
        let prompts = AttentionScratchSize::of(132, &plain, 32, 1, 512);
        let floats = 128 * 32 * 8 * 130;
        assert_eq!(prompts, AttentionScratchSize { floats, tickets: 8 });
        let exact = KvLayerShape { element: KvType::F32, ..plain };
        assert_eq!(
            size(&exact, 2),
            AttentionScratchSize { floats: 2 * 32 * 12 * 130, tickets: 64 }
        );
    }
}
