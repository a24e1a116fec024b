//! The steps between the projections of queries, keys and values and attention, in one launch.

use forebay_ops::KvType;

use super::{DeviceKvLayer, KvLayerShape, PassRows};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Number of heads of a block, one warp each; the same as in the kernel.
const WARPS: usize = 4;
/// Most elements that are mixed with each other; the same as in the kernel.
const MIXED_MAX: usize = 64;
/// Most tokens that a grid's second dimension can count.
const TOKENS_MAX: usize = 65_535;

/// One projection `[tokens, heads, dim]`, with the bias and norm that are still to be applied. Null pointers stand for
/// none.
#[derive(Clone, Copy)]
pub struct HeadInput {
    pub projected: DevicePtr<f32>,
    /// `[heads, dim]`
    pub bias: DevicePtr<f32>,
    /// Weight `[dim]` of the norm of every head.
    pub norm: DevicePtr<f32>,
}

impl HeadInput {
    /// Returns a projection that needs neither bias nor norm.
    pub fn plain(projected: DevicePtr<f32>) -> HeadInput {
        HeadInput { projected, bias: DevicePtr::null(), norm: DevicePtr::null() }
    }

    /// Returns the input for values that lie in their keys, and for keys and values of another layer.
    pub fn none() -> HeadInput {
        HeadInput::plain(DevicePtr::null())
    }
}

/// The rotary position embedding as a table.
#[derive(Clone, Copy)]
pub struct Rotation {
    /// Table `[positions, 2, rotary_dim / 2]` with a position's cosines, then its sines. It has as many positions as
    /// the cache.
    pub angles: DevicePtr<f32>,
    /// Number of elements of each head that are rotated; even.
    pub rotary_dim: usize,
    /// First element that is rotated.
    pub rotary_from: usize,
    /// True if elements `2i` and `2i + 1` are rotated together; otherwise `i` and `i + rotary_dim / 2` are.
    pub interleaved: bool,
}

/// The projections of a pass's rows.
#[derive(Clone, Copy)]
pub struct AttentionInputs {
    /// Queries. They are updated in place, ready for attention.
    pub q: HeadInput,
    /// Keys. The result goes to the cache; the projection is not changed. [`HeadInput::none`] if the layer uses the keys and values
    /// of another.
    pub k: HeadInput,
    /// Number of leading elements of each key that are normed together, and of elements behind them that are normed together, which
    /// may be 0: all and 0 in most models, the latent ones and 0 in DeepSeek's. The weight has those of both.
    pub key_norm_dims: [usize; 2],
    /// Values. The result goes to the cache, without norm or rotation. [`HeadInput::none`] if values lie in the keys.
    pub v: HeadInput,
    pub heads: usize,
    pub norm_epsilon: f32,
    /// True if the norms follow the rotation.
    pub norms_last: bool,
    /// Number of adjacent elements of queries, keys and values that a Hadamard matrix mixes before they are rounded: a power of two
    /// up to 64 that divides their lengths, or 1. Caches that do not round take 1.
    pub mixed: usize,
    pub rotation: Option<Rotation>,
}

impl Rotation {
    pub(crate) fn none() -> Rotation {
        Rotation { angles: DevicePtr::null(), rotary_dim: 0, rotary_from: 0, interleaved: false }
    }
}

impl AttentionInputs {
    fn angles(&self) -> DevicePtr<f32> {
        self.rotation.map_or(DevicePtr::null(), |rotation| rotation.angles)
    }

    pub(crate) fn check(&self, shape: &KvLayerShape) {
        let Rotation { rotary_dim, rotary_from, .. } = self.rotation.unwrap_or(Rotation::none());
        assert!(
            rotary_dim.is_multiple_of(2) && rotary_from + rotary_dim <= shape.dim_k,
            "{rotary_dim} of {} elements turn, from {rotary_from} on",
            shape.dim_k
        );
        let [first, rest] = self.key_norm_dims;
        assert!(
            first > 0 && first + rest <= shape.dim_k,
            "norms of {first} and {rest} elements of {}",
            shape.dim_k
        );
        assert!(rest == 0 || !self.norms_last, "two norms of a key behind the rotation");
        assert!(self.v.norm.is_null(), "values have no norm");
        assert!(self.mixed == 1 || shape.element.rounds(), "{:?} is not rounded", shape.element);
        assert!(
            self.mixed.is_power_of_two() && self.mixed <= MIXED_MAX,
            "{} elements are mixed",
            self.mixed
        );
        assert!(
            (shape.dim_k | shape.dim_v).is_multiple_of(self.mixed),
            "{} mixed elements of {shape:?}",
            self.mixed
        );
        assert!(
            self.heads == 0 || !self.q.projected.is_null(),
            "no queries of {} heads",
            self.heads
        );
        assert!(rotary_dim == 0 || !self.angles().is_null(), "no angles for {rotary_dim} elements");
        let has_values = !shape.values_in_keys && !self.k.projected.is_null();
        assert_eq!(!self.v.projected.is_null(), has_values, "values of {shape:?}");
    }
}

pub(super) fn inputs_module(element: KvType) -> &'static str {
    match element {
        KvType::F16 => "attention_inputs_f16",
        KvType::F32 => "attention_inputs_f32",
        KvType::Q8_0 => "attention_inputs_q8_0",
        KvType::Q4_0 => "attention_inputs_q4_0",
    }
}

impl Gpu {
    /// Adds biases, norms heads, rotates queries and keys, and writes keys and values to the cache. Skips rows beyond the
    /// context. Keys and values without a block are not written.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small, if the rotary part is odd or ends beyond the head, or if the norm of keys
    /// covers no or too many elements. Panics if values have a norm or are given although the keys hold them. Panics
    /// if there are more than 65,535 rows.
    pub fn attention_inputs(
        &self,
        inputs: &AttentionInputs,
        layer: &DeviceKvLayer,
        pass: &PassRows,
    ) -> Result<(), CudaError> {
        layer.check();
        let (shape, tokens) = (&layer.shape, pass.count);
        let AttentionInputs { q, k, v, heads, .. } = *inputs;
        inputs.check(shape);
        let rotation = inputs.rotation.unwrap_or(Rotation::none());
        assert!(tokens <= TOKENS_MAX, "attention_inputs: {tokens} tokens");
        let module = inputs_module(shape.element);
        let planes = match (k.projected.is_null(), shape.values_in_keys) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => 2,
        };
        let rows = heads + planes * shape.kv_heads;
        let grid = (rows.div_ceil(WARPS) as u32, tokens as u32, 1);
        let of_warp = 2 * shape.dim_k.max(shape.dim_v) + rotation.rotary_dim;
        let shared = WARPS * of_warp * size_of::<f32>();
        Launch::new(self.kernel(module, "attention_inputs")?, grid, (WARPS as u32 * 32, 1, 1))
            .shared(shared as u32)
            .optional(q.projected, tokens * heads * shape.dim_k)
            .optional(k.projected, tokens * shape.kv_heads * shape.dim_k)
            .optional(v.projected, tokens * shape.kv_heads * shape.dim_v)
            .optional(q.bias, heads * shape.dim_k)
            .optional(k.bias, shape.kv_heads * shape.dim_k)
            .optional(v.bias, shape.kv_heads * shape.dim_v)
            .optional(q.norm, shape.dim_k)
            .optional(k.norm, inputs.key_norm_dims.iter().sum())
            .optional(rotation.angles, shape.context * rotation.rotary_dim)
            .cache(layer, pass)
            .int(heads)
            .int(shape.kv_heads)
            .int(shape.dim_k)
            .int(shape.dim_v)
            .int(inputs.key_norm_dims[0])
            .int(inputs.key_norm_dims[1])
            .int(rotation.rotary_dim)
            .int(rotation.rotary_from)
            .int(usize::from(rotation.interleaved))
            .int(shape.context)
            .float(inputs.norm_epsilon)
            .int(usize::from(inputs.norms_last))
            .int(inputs.mixed)
            .run(self)
    }

    /// Mixes every `mixed` adjacent elements of sums of values `[count]` in place, as [`AttentionInputs::mixed`] says. That undoes the
    /// mixing of the values.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if `mixed` is no power of two from 2 to 64 that divides `count`, if the cache does not round, or if there are too many
    /// sums.
    pub fn mix_sums(
        &self,
        sums: DevicePtr<f32>,
        count: usize,
        mixed: usize,
        element: KvType,
    ) -> Result<(), CudaError> {
        assert!(element.rounds(), "{element:?} is not rounded");
        assert!(mixed.is_power_of_two() && (2..=MIXED_MAX).contains(&mixed), "{mixed} are mixed");
        assert!(count.is_multiple_of(mixed), "{count} sums of {mixed}");
        let grid = (count.div_ceil(WARPS * MIXED_MAX) as u32, 1, 1);
        Launch::new(
            self.kernel(inputs_module(element), "mix_sums")?,
            grid,
            (WARPS as u32 * 32, 1, 1),
        )
        .ptr(sums, count)
        .int(count)
        .int(mixed)
        .run(self)
    }
}
