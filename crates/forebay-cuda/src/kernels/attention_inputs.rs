//! What happens to queries, keys and values between their projections and attention, in one launch.

use super::{KvElement, KvLayer, KvLayerShape};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Heads of a block, a warp each; as in the kernel.
const WARPS: usize = 4;
/// Tokens that a grid's second dimension may count.
const TOKENS_MAX: usize = 65_535;

/// One projection `[tokens, heads, dim]`, and what it still lacks; null pointers where it lacks nothing.
#[derive(Clone, Copy)]
pub struct HeadInput {
    pub projected: DevicePtr<f32>,
    /// `[heads, dim]`
    pub bias: DevicePtr<f32>,
    /// Weight of the norm of every head, `[dim]`.
    pub norm: DevicePtr<f32>,
}

impl HeadInput {
    /// A projection that needs neither bias nor norm.
    pub fn plain(projected: DevicePtr<f32>) -> HeadInput {
        HeadInput { projected, bias: DevicePtr::null(), norm: DevicePtr::null() }
    }

    /// Values that lie in their keys.
    pub fn none() -> HeadInput {
        HeadInput::plain(DevicePtr::null())
    }
}

/// The rotary position embedding, tabulated.
#[derive(Clone, Copy)]
pub struct Rotation {
    /// `[positions, 2, rotary_dim / 2]`: a position's cosines, then its sines; as many positions as the cache has.
    pub angles: DevicePtr<f32>,
    /// Elements of each head that turn; even.
    pub rotary_dim: usize,
    /// The first of them.
    pub rotary_from: usize,
    /// Elements `2i` and `2i + 1` turn together, else `i` and `i + rotary_dim / 2`.
    pub interleaved: bool,
}

/// The projections of a run of tokens.
#[derive(Clone, Copy)]
pub struct AttentionInputs {
    /// Left in place, ready for attention.
    pub q: HeadInput,
    /// Ends in the cache; the projection stays as it is.
    pub k: HeadInput,
    /// How many elements of each key its norm covers, its first; all in most models, the latent ones in DeepSeek's.
    pub key_norm_dim: usize,
    /// Ends in the cache; has no norm and does not turn. [`HeadInput::none`] where values lie in the keys.
    pub v: HeadInput,
    pub heads: usize,
    pub norm_epsilon: f32,
    pub rotation: Option<Rotation>,
    /// Position of each token `[tokens]`; those beyond the cache are left out.
    pub positions: DevicePtr<u32>,
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
        assert!(
            (1..=shape.dim_k).contains(&self.key_norm_dim),
            "a norm of {} elements of {}",
            self.key_norm_dim,
            shape.dim_k
        );
        assert!(self.v.norm.is_null(), "values have no norm");
        assert!(
            self.heads == 0 || !self.q.projected.is_null(),
            "no queries of {} heads",
            self.heads
        );
        assert!(rotary_dim == 0 || !self.angles().is_null(), "no angles for {rotary_dim} elements");
        assert_eq!(self.v.projected.is_null(), shape.values_in_keys, "values of {shape:?}");
    }
}

pub(super) fn inputs_module(element: KvElement) -> &'static str {
    match element {
        KvElement::F16 => "attention_inputs_f16",
        KvElement::F32 => "attention_inputs_f32",
        KvElement::Q8_0 => "attention_inputs_q8_0",
        KvElement::Q4_0 => "attention_inputs_q4_0",
    }
}

impl Gpu {
    /// Adds biases, norms heads, turns queries and keys, and writes keys and values to the cache, for `tokens` tokens.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When a buffer is too small, the rotary part is odd or ends behind a head, the norm of keys covers none or too many elements, values have a
    /// norm or come beside keys that hold them, or there are more than 65,535 tokens or rows that wrap.
    pub fn attention_inputs(
        &self,
        inputs: &AttentionInputs,
        layer: &KvLayer,
        tokens: usize,
    ) -> Result<(), CudaError> {
        layer.check();
        let shape = &layer.shape;
        let AttentionInputs { q, k, v, heads, .. } = *inputs;
        inputs.check(shape);
        let rotation = inputs.rotation.unwrap_or(Rotation::none());
        assert!(tokens <= TOKENS_MAX, "attention_inputs: {tokens} tokens");
        assert!(
            shape.rows == shape.context || tokens <= shape.rows,
            "{tokens} tokens in {shape:?}"
        );
        let module = inputs_module(shape.element);
        let rows = heads + if shape.values_in_keys { 1 } else { 2 } * shape.kv_heads;
        let grid = (rows.div_ceil(WARPS) as u32, tokens as u32, 1);
        let shared = WARPS * shape.dim_k.max(shape.dim_v) * size_of::<f32>();
        Launch::new(self.kernel(module, "attention_inputs")?, grid, (WARPS as u32 * 32, 1, 1))
            .shared(shared as u32)
            .optional(q.projected, tokens * heads * shape.dim_k)
            .ptr(k.projected, tokens * shape.kv_heads * shape.dim_k)
            .optional(v.projected, tokens * shape.kv_heads * shape.dim_v)
            .optional(q.bias, heads * shape.dim_k)
            .optional(k.bias, shape.kv_heads * shape.dim_k)
            .optional(v.bias, shape.kv_heads * shape.dim_v)
            .optional(q.norm, shape.dim_k)
            .optional(k.norm, inputs.key_norm_dim)
            .optional(rotation.angles, shape.context * rotation.rotary_dim)
            .ptr(inputs.positions, tokens)
            .planes(layer)
            .int(heads)
            .int(shape.kv_heads)
            .int(shape.dim_k)
            .int(shape.dim_v)
            .int(inputs.key_norm_dim)
            .int(rotation.rotary_dim)
            .int(rotation.rotary_from)
            .int(usize::from(rotation.interleaved))
            .int(shape.context)
            .int(shape.rows)
            .float(inputs.norm_epsilon)
            .run(self)
    }
}
