//! Causal attention over the KV cache: choice of the kernel and the number of parts of a split context.

use super::latent;
use super::{AttentionInputs, KvElement, KvLayer, KvLayerShape, Rotation, RoundedActivations};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Largest number of tokens for which the context is split, because so few queries do not fill the GPU.
const DECODE_TOKENS_MAX: usize = 8;
/// Maximum number of parts of a context; the same as in the kernels, which have room for twice as many. Joining more
/// parts costs more than it gains.
const SPLITS_MAX: usize = 64;
/// Query rows that share one read of the cache, and positions that a block processes at once; the same as in the
/// decode kernel.
const COLUMNS: usize = 8;
const DECODE_STEP: usize = 64;
/// Largest context that is not split, because joining the parts takes longer than a few steps.
const ALONE: usize = 256;
/// Number of positions that a block of the general kernel processes at once.
const GENERAL_STEP: usize = 16;
/// Number of query rows of a block of the prompt kernel.
const PROMPT_ROWS: usize = 64;
const THREADS: u32 = 128;
/// Largest number of elements of a head.
const DIM_MAX: usize = 576;

/// Arguments of attention: the queries, the part of the cache that they see, and the form of scores. The CPU's type of
/// the same name has the same meaning.
#[derive(Clone, Copy)]
pub struct Attention {
    /// Queries `[tokens, heads, dim_k]`.
    pub q: DevicePtr<f32>,
    /// Outputs `[tokens, heads, dim_v]`.
    pub out: DevicePtr<f32>,
    /// Position of the first token; the others follow one by one. The keys and values of all tokens are in the cache
    /// already.
    pub first_position: DevicePtr<u32>,
    pub tokens: usize,
    /// Number of query heads, a multiple of the cache's heads.
    pub heads: usize,
    /// Factor that multiplies every score.
    pub scale: f32,
    /// Number of positions that a token sees: itself and the `window - 1` before it.
    pub window: Option<usize>,
    /// Cap that limits scores to `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// One more score per query head, which takes its share of the softmax and carries no value. Null if there is
    /// none.
    pub sinks: DevicePtr<f32>,
    /// Inputs on which attention first does the work of [`Gpu::attention_inputs`], if [`takes_inputs`] allows it. `q`
    /// is then their projection.
    pub inputs: Option<AttentionInputs>,
    /// Second output that gets `out` rounded, if [`rounds_outputs`] allows it.
    pub rounded: Option<RoundedActivations>,
}

/// Returns true if attention of `tokens` tokens does the work of [`Gpu::attention_inputs`] by itself.
pub fn takes_inputs(shape: &KvLayerShape, tokens: usize) -> bool {
    tokens == 1 && !shape.values_in_keys && Family::of(shape, tokens) == Family::Decode
}

/// Returns true if attention of `tokens` tokens can round its results for products in integers.
pub fn rounds_outputs(shape: &KvLayerShape, tokens: usize) -> bool {
    Family::of(shape, tokens) == Family::Decode && shape.dim_v.is_multiple_of(32)
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

/// Families of attention kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    /// Few tokens, elements other than f32, heads up to 256.
    Decode,
    /// Many tokens, elements other than f32, heads up to 256.
    Prompt,
    /// Rows of DeepSeek's latent space, elements other than f32.
    Latent,
    /// All other cases.
    General,
}

impl Family {
    fn of(shape: &KvLayerShape, tokens: usize) -> Family {
        if latent::fits(shape) {
            Family::Latent
        } else if shape.element == KvElement::F32 || shape.dim_k.max(shape.dim_v) > 256 {
            Family::General
        } else if tokens <= DECODE_TOKENS_MAX {
            Family::Decode
        } else {
            Family::Prompt
        }
    }
}

/// Returns the number of blocks that share a context, and the number of columns of each.
fn units(shape: &KvLayerShape, heads: usize, tokens: usize) -> (usize, usize) {
    match Family::of(shape, tokens) {
        Family::Latent => latent::units(tokens * heads),
        Family::Decode => {
            let rows = tokens * (heads / shape.kv_heads);
            (shape.kv_heads * rows.div_ceil(COLUMNS), COLUMNS)
        }
        Family::Prompt | Family::General => (tokens * heads, 1),
    }
}

impl AttentionScratchSize {
    /// Returns the size for `tokens` tokens of `heads` query heads over a context cut into `splits` parts.
    pub fn of(
        shape: &KvLayerShape,
        heads: usize,
        tokens: usize,
        splits: usize,
    ) -> AttentionScratchSize {
        let family = Family::of(shape, tokens);
        if family == Family::Prompt || family == Family::General && splits == 1 {
            return AttentionScratchSize::default();
        }
        if family == Family::Latent && splits == 1 {
            return AttentionScratchSize::default();
        }
        let (units, columns) = units(shape, heads, tokens);
        let parts = units * splits * columns;
        let floats = parts * (shape.dim_v.next_multiple_of(4) + 2);
        // A GPU with little shared memory runs the general kernel on latent rows, which needs these tickets.
        let tickets = if family == Family::Latent { tokens * heads } else { units };
        AttentionScratchSize { floats, tickets }
    }
}

impl Attention {
    /// Passes the last arguments of the decode kernel.
    fn pass_fused(&self, launch: Launch, shape: &KvLayerShape) -> Launch {
        let launch = match self.rounded {
            Some(rounded) => {
                let values = self.tokens * self.heads * shape.dim_v;
                launch.ptr(rounded.codes, values).ptr(rounded.scales, values / 32)
            }
            None => launch.null().null(),
        };
        let Some(inputs) = self.inputs else { return (0..12).fold(launch, |l, _| l.u64(0)) };
        inputs.check(shape);
        assert_eq!(inputs.key_norm_dim, shape.dim_k, "keys that are normed in part");
        assert_eq!(inputs.q.projected.address(), self.q.address(), "other queries");
        assert_eq!(inputs.heads, self.heads, "other heads");
        let rotation = inputs.rotation.unwrap_or(Rotation::none());
        launch
            .ptr(inputs.k.projected, self.tokens * shape.kv_heads * shape.dim_k)
            .ptr(inputs.v.projected, self.tokens * shape.kv_heads * shape.dim_v)
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
    }
}

/// Returns the number of parts into which a GPU with `multiprocessors` cuts a context of up to `capacity` positions,
/// for `tokens` tokens. The same number is used for every shorter context, so that a captured CUDA graph stays valid.
/// The last bits of the results depend on it.
pub fn attention_splits(
    multiprocessors: u32,
    shape: &KvLayerShape,
    heads: usize,
    tokens: usize,
    capacity: usize,
) -> usize {
    let family = Family::of(shape, tokens);
    if tokens > DECODE_TOKENS_MAX {
        return 1;
    }
    if family == Family::Latent {
        return latent::splits(multiprocessors, tokens * heads, capacity);
    }
    let step = if family == Family::Decode { DECODE_STEP } else { GENERAL_STEP };
    // Three blocks fit one multiprocessor.
    let blocks = 3 * multiprocessors as usize;
    let most = match family {
        Family::Decode if capacity <= ALONE => 1,
        _ => capacity.div_ceil(step).clamp(1, SPLITS_MAX),
    };
    (blocks / units(shape, heads, tokens).0).clamp(1, most)
}

impl Gpu {
    /// Returns [`attention_splits`] for this GPU.
    pub fn attention_splits(
        &self,
        shape: &KvLayerShape,
        heads: usize,
        tokens: usize,
        capacity: usize,
    ) -> usize {
        attention_splits(self.multiprocessors(), shape, heads, tokens, capacity)
    }

    /// Computes `out = softmax(scale * q k^T, masked) v` for every query token and head, over a context cut into
    /// `splits` parts.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, `heads` is not a multiple of the cache's heads, or heads are longer than 576.
    /// Panics if the window is 0, or if it is missing or too large when rows wrap. Panics if `splits` is 0 or too
    /// large, the scratch memory is too small, or a grid's limits are exceeded.
    pub fn attention(
        &self,
        what: &Attention,
        layer: &KvLayer,
        splits: usize,
        scratch: &AttentionScratch,
    ) -> Result<(), CudaError> {
        layer.check();
        let shape = &layer.shape;
        let Attention { tokens, heads, .. } = *what;
        assert!(heads > 0 && heads.is_multiple_of(shape.kv_heads), "{heads} heads over {shape:?}");
        assert!(shape.dim_k.max(shape.dim_v) <= DIM_MAX, "{shape:?} has too long heads");
        assert!(what.window != Some(0), "a window of 0 sees nothing");
        let fits = |window: usize| window.saturating_add(tokens) <= shape.rows + 1;
        assert!(
            shape.rows == shape.context || what.window.is_some_and(fits),
            "{tokens} tokens with a window of {:?} in {shape:?}",
            what.window
        );
        let family = match Family::of(shape, tokens) {
            Family::Latent if !latent::runs_on(self) => Family::General,
            family => family,
        };
        let most = if latent::fits(shape) { latent::SPLITS_MAX } else { SPLITS_MAX };
        assert!((1..=most).contains(&splits), "{splits} splits");
        let needed = AttentionScratchSize::of(shape, heads, tokens, splits);
        assert!(
            needed.max(scratch.size) == scratch.size,
            "attention needs scratch memory of {needed:?}, has {:?}",
            scratch.size
        );
        if tokens == 0 {
            return Ok(());
        }
        if family == Family::Latent {
            return latent::launch(self, what, layer, splits, scratch);
        }
        let (module, kernel) = kernel_of(shape, family);
        let units = units(shape, heads, tokens).0;
        let grid = match family {
            Family::Decode => (splits, units, 1),
            Family::Prompt => (tokens.div_ceil(PROMPT_ROWS), heads, 1),
            Family::General => (splits, heads, tokens),
            Family::Latent => unreachable!("launched by itself"),
        };
        assert!(grid.1 < 65_536 && grid.2 < 65_536, "attention: a grid of {grid:?}");
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        let mut launch = Launch::new(self.kernel(module, kernel)?, grid, (THREADS, 1, 1))
            .ptr(what.q, tokens * heads * shape.dim_k)
            .planes(layer)
            .ptr(what.first_position, 1)
            .optional(what.sinks, heads)
            .ptr(what.out, tokens * heads * shape.dim_v);
        if family != Family::Prompt {
            launch = launch
                .optional(scratch.parts, needed.floats)
                .optional(scratch.tickets, needed.tickets);
        }
        assert!(what.rounded.is_none() || rounds_outputs(shape, tokens), "not rounded: {shape:?}");
        assert!(what.inputs.is_none() || takes_inputs(shape, tokens), "{tokens} tokens' inputs");
        launch = launch
            .int(tokens)
            .int(heads)
            .int(shape.kv_heads)
            .int(shape.dim_k)
            .int(shape.dim_v)
            .int(shape.context)
            .int(shape.rows)
            .int(what.window.map_or(0, |window| window.min(shape.context)))
            .float(what.scale)
            .float(what.softcap.unwrap_or(0.0));
        if family == Family::Decode {
            launch = what.pass_fused(launch, shape);
        }
        launch.run(self)
    }
}

/// Returns the modules that passes of few and of many tokens need.
pub(super) fn attention_modules(shape: &KvLayerShape) -> [&'static str; 2] {
    if latent::fits(shape) {
        return latent::modules(shape.element);
    }
    [1, DECODE_TOKENS_MAX + 1].map(|tokens| kernel_of(shape, Family::of(shape, tokens)).0)
}

/// Returns the names of the module and the kernel.
fn kernel_of(shape: &KvLayerShape, family: Family) -> (&'static str, &'static str) {
    let dim = shape.dim_k.max(shape.dim_v);
    if family == Family::General {
        let module = match shape.element {
            KvElement::F16 => "attention_general_f16",
            KvElement::F32 => "attention_general_f32",
            KvElement::Q8_0 => "attention_general_q8_0",
            KvElement::Q4_0 => "attention_general_q4_0",
        };
        let kernel = match dim {
            0..=128 => "attention_general_128",
            129..=256 => "attention_general_256",
            _ => "attention_general_576",
        };
        return (module, kernel);
    }
    // Selects the module by element type and by the longest head that it supports.
    macro_rules! module {
        ($kernel:literal) => {
            match (shape.element, dim) {
                (KvElement::F16, 0..=64) => concat!($kernel, "_f16_64"),
                (KvElement::F16, 65..=96) => concat!($kernel, "_f16_96"),
                (KvElement::F16, 97..=128) => concat!($kernel, "_f16_128"),
                (KvElement::F16, _) => concat!($kernel, "_f16_256"),
                (KvElement::Q8_0, 0..=64) => concat!($kernel, "_q8_0_64"),
                (KvElement::Q8_0, 65..=96) => concat!($kernel, "_q8_0_96"),
                (KvElement::Q8_0, 97..=128) => concat!($kernel, "_q8_0_128"),
                (KvElement::Q8_0, _) => concat!($kernel, "_q8_0_256"),
                (KvElement::Q4_0, 0..=64) => concat!($kernel, "_q4_0_64"),
                (KvElement::Q4_0, 65..=96) => concat!($kernel, "_q4_0_96"),
                (KvElement::Q4_0, 97..=128) => concat!($kernel, "_q4_0_128"),
                (KvElement::Q4_0, _) => concat!($kernel, "_q4_0_256"),
                (KvElement::F32, _) => unreachable!("the general kernel computes in f32"),
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

    #[test]
    fn every_shape_has_a_module_that_exists() {
        for element in [KvElement::F16, KvElement::F32, KvElement::Q8_0, KvElement::Q4_0] {
            for dim in [8, 64, 65, 96, 100, 128, 129, 256, 257, 576] {
                for tokens in [1, 8, 9, 500] {
                    let shape = KvLayerShape {
                        element,
                        kv_heads: 2,
                        dim_k: dim,
                        dim_v: 8,
                        values_in_keys: false,
                        context: 99,
                        rows: 99,
                    };
                    let family = Family::of(&shape, tokens);
                    let (module, kernel) = kernel_of(&shape, family);
                    let ptx = crate::ptx::text(module);
                    assert!(ptx.is_some_and(|text| text.contains(&format!("{kernel}("))));
                }
            }
        }
    }

    #[test]
    fn latent_rows_have_modules_and_scratch_of_their_own() {
        let (kv_heads, dim_k, dim_v, values_in_keys, context) = (1, 576, 512, true, 16_384);
        for element in [KvElement::F16, KvElement::Q8_0, KvElement::Q4_0] {
            let shape = KvLayerShape {
                element,
                kv_heads,
                dim_k,
                dim_v,
                values_in_keys,
                context,
                rows: context,
            };
            for module in attention_modules(&shape) {
                let ptx = crate::ptx::text(module);
                assert!(ptx.is_some_and(|text| text.contains("attention_latent_join(")));
            }
            // One block per multiprocessor, with 16 or 64 query rows.
            let splits = |heads, tokens| attention_splits(132, &shape, heads, tokens, context);
            assert_eq!((splits(16, 1), splits(128, 1), splits(16, 8)), (128, 66, 66));
            assert_eq!((splits(16, 9), attention_splits(132, &shape, 16, 1, 128)), (1, 1));
            let size = AttentionScratchSize::of(&shape, 16, 1, 128);
            assert_eq!(size, AttentionScratchSize { floats: 16 * 128 * 514, tickets: 16 });
        }
        let exact = KvElement::F32;
        let shape = KvLayerShape {
            element: exact,
            kv_heads,
            dim_k,
            dim_v,
            values_in_keys,
            context,
            rows: context,
        };
        assert_eq!(attention_modules(&shape), ["attention_general_f32"; 2]);
    }

    #[test]
    fn scratch_is_counted_by_sub_layer() {
        let (element, kv_heads, dim) = (KvElement::F16, 8, 128);
        let (dim_k, dim_v, values_in_keys, context) = (dim, dim, false, 99);
        let shape = KvLayerShape {
            element,
            kv_heads,
            dim_k,
            dim_v,
            values_in_keys,
            context,
            rows: context,
        };
        let size = |tokens, splits| AttentionScratchSize::of(&shape, 32, tokens, splits);
        assert_eq!(size(1, 5), AttentionScratchSize { floats: 8 * 5 * 8 * 130, tickets: 8 });
        assert_eq!(size(3, 5).tickets, 16);
        assert_eq!(size(9, 1), AttentionScratchSize::default());
        let exact = KvLayerShape { element: KvElement::F32, ..shape };
        assert_eq!(AttentionScratchSize::of(&exact, 32, 9, 1), AttentionScratchSize::default());
        assert_eq!(AttentionScratchSize::of(&exact, 32, 2, 5).tickets, 64);
    }
}
