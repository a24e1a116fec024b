//! Description of recurrent layers: layers that carry a state of fixed size from token to token instead of keys and values.

use forebay_ops::{DeltaRule, DeltaShape};
use serde::Serialize;

use super::check::{check, check_size};
use super::shapes::NormLayout;
use crate::ModelError;

/// Most projections of a recurrent layer.
pub(crate) const PRODUCTS_MAX: usize = 8;

/// Shape of the recurrent layers. It is the same in all of them.
///
/// Every such layer projects its input, mixes the last tokens of some channels with a causal convolution, and updates a state
/// matrix for each head.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Recurrent {
    pub rule: DeltaRule,
    /// Number of tokens that the convolution sees: the current one and those before it. 1 with [`DeltaRule::Lightning`].
    pub convolution: usize,
    /// Number of heads that have a query and a key. Each serves `value_heads / key_heads` value heads.
    pub key_heads: usize,
    /// Number of heads that have a value, an output and a state.
    pub value_heads: usize,
    /// Number of elements of a query and of a key.
    pub key_dim: usize,
    /// Number of elements of a value.
    pub value_dim: usize,
    pub head_order: HeadOrder,
    /// Width of the low-rank projection to decays, or to steps with [`DeltaRule::Mamba`]; 0 if there is one matrix.
    pub low_rank: usize,
    /// Width of the low-rank projection to gates of the output; 0 if there is one matrix.
    pub gate_rank: usize,
    /// Number of elements of the output that are normed together; 0 if outputs are not normed.
    pub norm_width: usize,
    pub factors: RecurrentFactors,
    /// True if the sigmoid of the gate gates the output of delta rules, and not its SiLU.
    pub sigmoid_gate: bool,
    /// Logarithm of the fastest decay, with [`DeltaRule::KimiDelta`]; 0 if there is none (GLM-5-Next).
    pub decay_bound: f32,
    /// Factor of the share of replacement, with [`DeltaRule::GatedDelta`]; 1 with other rules. With 2, transitions of the state have
    /// eigenvalues down to -1 (OLMo Hybrid).
    pub share_scale: f32,
    /// Number that the norm of outputs adds to the mean of squares, if it is not that of other norms.
    pub norm_epsilon: Option<f32>,
    /// Position of the norms in recurrent layers, if it is not that in other layers.
    pub norms: Option<NormLayout>,
}

/// Factors of a Mamba-2 recurrence (Falcon-H1). GGUF files have them in their weights.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RecurrentFactors {
    /// Factors of gates, values, keys, queries and steps, as the projection gives them.
    pub inputs: [f32; 5],
    /// Factor of the output of a recurrence beside attention.
    pub output: f32,
}

impl RecurrentFactors {
    /// No factors.
    pub const ONE: RecurrentFactors = RecurrentFactors { inputs: [1.0; 5], output: 1.0 };
}

/// Which value heads a key head serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum HeadOrder {
    /// Consecutive ones.
    Consecutive,
    /// Those with the key head's number modulo the number of key heads. GGUF's converter reorders the heads of some families
    /// so.
    Tiled,
}

impl RecurrentFactors {
    fn validate(&self, rule: DeltaRule) -> Result<(), ModelError> {
        for factor in self.inputs.into_iter().chain([self.output]) {
            let fits = factor.is_finite() && factor > 0.0;
            check("factors of recurrent layers", factor, fits, "they must be positive")?;
        }
        let fits = self.inputs == RecurrentFactors::ONE.inputs || rule == DeltaRule::Mamba2;
        check("factors of recurrent layers", "set", fits, "forebay knows them for Mamba-2")
    }
}

impl Recurrent {
    /// Returns the number of channels of the convolution: queries, keys and values of all heads, or values alone.
    pub fn channels(&self) -> usize {
        self.delta_shape().channels()
    }

    /// Returns the number of elements of a token's output before the output projection.
    pub fn value_width(&self) -> usize {
        self.delta_shape().value_width()
    }

    /// Returns the logarithms of the factors by which the states of the heads of layer `index` of `layers` decay, with
    /// [`DeltaRule::Lightning`].
    pub(crate) fn lightning_decays(&self, index: usize, layers: usize) -> Vec<f32> {
        let of_layer = 1.0 - index as f32 / (layers as f32 - 1.0 + 1e-5) + 1e-5;
        let slope = |head: usize| (-8.0 * (head + 1) as f32 / self.value_heads as f32).exp2();
        (0..self.value_heads).map(|head| -slope(head) * of_layer).collect()
    }

    /// Returns the number of inputs of the convolution that a layer keeps of the tokens before.
    pub fn tail_floats(&self) -> usize {
        self.delta_shape().tail_floats()
    }

    /// Returns the shape as operations have it.
    pub(crate) fn delta_shape(&self) -> DeltaShape {
        DeltaShape {
            rule: self.rule,
            key_heads: self.key_heads,
            value_heads: self.value_heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            convolution: self.convolution,
            tiled: self.head_order == HeadOrder::Tiled,
            norm_width: self.norm_width,
            sigmoid_gate: self.sigmoid_gate,
            decay_bound: self.decay_bound,
            share_scale: self.share_scale,
        }
    }

    /// Returns the number of elements of the state matrices of all heads.
    pub fn matrix_floats(&self) -> usize {
        self.value_width() * self.key_dim
    }

    /// Returns the number of factors by which a token decays the state of a head.
    pub fn decay_width(&self) -> usize {
        self.delta_shape().decay_width()
    }

    /// Returns the number of compressed steps, keys and queries of [`DeltaRule::Mamba`] together.
    pub fn compressed_width(&self) -> usize {
        self.low_rank + 2 * self.key_dim
    }

    /// Returns the number of elements of a token's products with all projections of a layer.
    pub fn projected_width(&self) -> usize {
        match self.rule {
            DeltaRule::ShortConvolution => return 3 * self.value_width(),
            DeltaRule::Lightning => return self.channels() + self.value_width(),
            // Values and gates, the compressed parts, steps, and compressed steps once more.
            DeltaRule::Mamba => {
                return 3 * self.value_width() + self.compressed_width() + self.low_rank;
            }
            _ => {}
        }
        let factors = self.value_heads * (1 + self.decay_width());
        self.channels() + self.value_width() + factors + self.low_rank + self.gate_rank
    }

    /// Returns the number of floats of the state of one sequence in one layer.
    pub fn state_floats(&self) -> usize {
        self.delta_shape().state_floats()
    }

    /// Returns the shape of Kimi Delta Attention, which has as many elements of a key as of a value. `ranks` are those of the
    /// projections to decays and to gates.
    pub(super) fn kimi(
        heads: usize,
        dim: usize,
        convolution: usize,
        [low_rank, gate_rank]: [usize; 2],
    ) -> Recurrent {
        Recurrent {
            rule: DeltaRule::KimiDelta,
            convolution,
            key_heads: heads,
            value_heads: heads,
            key_dim: dim,
            value_dim: dim,
            head_order: HeadOrder::Consecutive,
            low_rank,
            gate_rank,
            norm_width: dim,
            factors: RecurrentFactors::ONE,
            sigmoid_gate: true,
            decay_bound: 0.0,
            share_scale: 1.0,
            norm_epsilon: None,
            norms: None,
        }
    }

    /// Returns the shape of gated short convolutions.
    pub(super) fn short_convolution(channels: usize, convolution: usize) -> Recurrent {
        Recurrent {
            rule: DeltaRule::ShortConvolution,
            convolution,
            key_heads: 1,
            value_heads: 1,
            key_dim: 0,
            value_dim: channels,
            head_order: HeadOrder::Consecutive,
            low_rank: 0,
            gate_rank: 0,
            norm_width: channels,
            factors: RecurrentFactors::ONE,
            sigmoid_gate: false,
            decay_bound: 0.0,
            share_scale: 1.0,
            norm_epsilon: None,
            norms: None,
        }
    }

    /// Returns the shape of lightning attention. The norm covers the outputs of all heads.
    pub(super) fn lightning(heads: usize, dim: usize, norm_epsilon: Option<f32>) -> Recurrent {
        Recurrent {
            rule: DeltaRule::Lightning,
            convolution: 1,
            norm_width: heads.saturating_mul(dim),
            norm_epsilon,
            ..Recurrent::kimi(heads, dim, 1, [0; 2])
        }
    }

    /// Returns the shape of Mamba with this number of values, length of their states, and rank of the projection to steps.
    pub(super) fn mamba(values: usize, state: usize, rank: usize, convolution: usize) -> Recurrent {
        Recurrent {
            rule: DeltaRule::Mamba,
            key_dim: state,
            low_rank: rank,
            norm_width: 0,
            ..Recurrent::short_convolution(values, convolution)
        }
    }

    pub(super) fn validate(&self) -> Result<(), ModelError> {
        let fits = (2..=8).contains(&self.convolution) || self.rule == DeltaRule::Lightning;
        let expected = "forebay knows 2 to 8";
        check("width of the recurrent layers' convolution", self.convolution, fits, expected)?;
        if self.rule == DeltaRule::ShortConvolution {
            let width = self.value_width();
            check_size("channels of recurrent layers", width)?;
            let fits = width.is_multiple_of(8);
            return check(
                "channels of recurrent layers",
                width,
                fits,
                "it must be a multiple of 8",
            );
        }
        let sized = [
            ("key heads of recurrent layers", self.key_heads),
            ("value heads of recurrent layers", self.value_heads),
            ("key length of recurrent layers", self.key_dim),
            ("value length of recurrent layers", self.value_dim),
        ];
        for (key, value) in sized {
            check_size(key, value)?;
        }
        check(
            "value heads of recurrent layers",
            self.value_heads,
            self.value_heads.is_multiple_of(self.key_heads),
            "it must be a multiple of the key heads",
        )?;
        for (key, dim) in [
            ("key length of recurrent layers", self.key_dim),
            ("value length of recurrent layers", self.value_dim),
        ] {
            let is_head = self.rule != DeltaRule::Mamba || dim == self.key_dim;
            let fits = dim.is_multiple_of(8) && (dim <= 256 || !is_head);
            check(key, dim, fits, "it must be a multiple of 8, at most 256")?;
        }
        if self.rule == DeltaRule::KimiDelta {
            let rank = self.low_rank.max(self.gate_rank).max(1);
            check_size("rank of the projections of recurrent layers", rank)?;
            let bound = self.decay_bound;
            let fits = (-1000.0..=0.0).contains(&bound);
            check("gate_lower_bound", bound, fits, "it must be negative, at least -1000")?;
        }
        if self.rule == DeltaRule::Mamba {
            check_size("rank of the projection to steps", self.low_rank)?;
        }
        if self.rule == DeltaRule::Mamba2 {
            let (width, norm) = (self.value_width(), self.norm_width);
            let fits = norm == 0 || width.is_multiple_of(norm);
            check("groups of norms of recurrent layers", norm, fits, "it must divide the output")?;
        }
        self.factors.validate(self.rule)?;
        check_size("channels of recurrent layers", self.channels())?;
        check_size("products of recurrent layers", self.projected_width())?;
        check_size("state of a recurrent layer", self.state_floats())
    }
}

/// Number of states that are kept of every sequence: the one that a pass reads, and the one that it writes. A pass that fails
/// thus leaves the sequence as it was.
pub const STATES_PER_SEQUENCE: usize = 2;
