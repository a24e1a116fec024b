//! Recurrent layers: their rules and shapes.

use serde::Serialize;

/// How a token changes the state of a head, and how the head's output is normed and gated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum DeltaRule {
    /// Gated delta rule (Yang et al. 2025, "Gated Delta Networks"): the state decays by one factor, and the key's old value is
    /// replaced as far as the share says. Queries and keys have length 1. The output is normed, then multiplied by `silu(z)`.
    GatedDelta,
    /// Kimi Delta Attention (Kimi Team 2025, "Kimi Linear"): the same, but each element of the key decays by its own factor, and
    /// the output is multiplied by `sigmoid(z)`.
    KimiDelta,
    /// Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"): the state decays by one factor, and the value is added to it, times
    /// the length of the step. The output is multiplied by `silu(z)`, then normed.
    Mamba2,
    /// Mamba (Gu and Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces"), whose heads are its values:
    /// every value has a state of `key_dim` numbers, of which each decays by its own rate. Values alone pass through the
    /// convolution, and steps, keys and queries are products of what comes out.
    Mamba,
    /// Lightning attention (Qin et al. 2024, "Various Lengths, Constant Speed"): the state decays by a fixed factor, whose
    /// logarithm is the head's rate of decay, and the value is added to it. The outputs of all heads are normed together, then
    /// multiplied by `sigmoid(z)`.
    Lightning,
    /// A gated short convolution (LFM2), which has no keys and no state matrices: the values are multiplied by `b`, mixed by the
    /// convolution without an activation, and multiplied by `z`.
    ShortConvolution,
}

/// Shape of a recurrent layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaShape {
    pub rule: DeltaRule,
    pub key_heads: usize,
    /// A multiple of `key_heads`.
    pub value_heads: usize,
    /// Number of elements of a key, a multiple of 8 on the CPU; 0 with [`DeltaRule::ShortConvolution`].
    pub key_dim: usize,
    /// Number of elements of a value, a multiple of 8 on the CPU.
    pub value_dim: usize,
    /// Number of tokens that the convolution sees, at least 2; 1 or more with [`DeltaRule::Lightning`].
    pub convolution: usize,
    /// True if value head `j` uses key head `j % key_heads`, otherwise consecutive value heads share one.
    pub tiled: bool,
    /// Number of elements of the output that are normed together: `value_dim`, or with [`DeltaRule::Mamba2`] those of several
    /// heads, or 0 if outputs are not normed. Not read with [`DeltaRule::Mamba`], which has no such norm.
    pub norm_width: usize,
    /// True if the sigmoid of `z` gates the output, and not `silu(z)`. Read with [`DeltaRule::GatedDelta`], [`DeltaRule::KimiDelta`]
    /// and [`DeltaRule::Lightning`] only.
    pub sigmoid_gate: bool,
    /// Logarithm of the fastest decay, with [`DeltaRule::KimiDelta`]; 0 if there is none. The logarithm of a decay is then this
    /// number times the logistic function of the step times the rate (GLM-5-Next), and not the softplus of the step times the
    /// rate.
    pub decay_bound: f32,
    /// Factor of the share of replacement, with [`DeltaRule::GatedDelta`]; 1 with other rules. With 2, a state may lose twice what it
    /// holds for a key, so its transition has eigenvalues down to -1 (Grazzi et al. 2025).
    pub share_scale: f32,
}

impl DeltaShape {
    /// Returns the number of channels of the convolution: queries, keys, values.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.mixed_key_dim() + self.value_width()
    }

    /// Returns the number of elements of a key that pass through the convolution.
    pub fn mixed_key_dim(&self) -> usize {
        if self.rule == DeltaRule::Mamba { 0 } else { self.key_dim }
    }

    /// Returns the number of elements of a token's output.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Returns the number of factors by which a head's state decays.
    pub fn decay_width(&self) -> usize {
        match self.rule {
            DeltaRule::KimiDelta | DeltaRule::Mamba => self.key_dim,
            DeltaRule::GatedDelta
            | DeltaRule::Mamba2
            | DeltaRule::Lightning
            | DeltaRule::ShortConvolution => 1,
        }
    }

    /// Returns how many steps of decay have a number that is added to them.
    pub fn steps(&self) -> usize {
        if self.rule == DeltaRule::Lightning { 0 } else { self.value_heads * self.decay_width() }
    }

    /// Returns the number of weights of the norm of the outputs. Norms of a single head share them.
    pub fn norm_weights(&self) -> usize {
        match self.rule {
            DeltaRule::GatedDelta | DeltaRule::KimiDelta => self.value_dim,
            DeltaRule::Lightning => self.value_width(),
            DeltaRule::Mamba2 if self.norm_width > 0 => self.value_width(),
            DeltaRule::Mamba2 | DeltaRule::Mamba | DeltaRule::ShortConvolution => 0,
        }
    }

    /// Returns the number of floats of a state: the last inputs of the convolution `[convolution - 1, channels]`, then the state
    /// matrices `[value_heads, value_dim, key_dim]`.
    pub fn state_floats(&self) -> usize {
        self.tail_floats() + self.value_width() * self.key_dim
    }

    /// Returns the number of floats that the CPU needs for a token besides.
    pub fn scratch_floats(&self) -> usize {
        match self.rule {
            DeltaRule::Mamba | DeltaRule::ShortConvolution => self.channels(),
            _ => self.channels() + self.value_heads * (self.decay_width() + 1),
        }
    }

    /// Returns true if queries and keys are divided by their lengths.
    pub fn norms_keys(&self) -> bool {
        matches!(self.rule, DeltaRule::GatedDelta | DeltaRule::KimiDelta)
    }

    /// Returns the number of inputs of the convolution that a state keeps.
    pub fn tail_floats(&self) -> usize {
        (self.convolution - 1) * self.channels()
    }

    /// Returns the number of value heads that a key head serves.
    pub fn values_per_key(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Returns the key head that serves a value head.
    pub fn key_head(&self, value_head: usize) -> usize {
        match self.tiled {
            true => value_head % self.key_heads,
            false => value_head / self.values_per_key(),
        }
    }
}

/// Columns of a product that belong to the heads. Those of a key head are consecutive, and those of the value heads that it
/// serves, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadColumns {
    /// The first column of the first key head.
    pub first: usize,
    /// Number of columns from one key head to the next.
    pub step: usize,
}

impl HeadColumns {
    /// Returns the first column of a value head, of which each has `width`.
    pub fn of_value_head(&self, shape: &DeltaShape, head: usize, width: usize) -> usize {
        let (group, inside) = (head / shape.values_per_key(), head % shape.values_per_key());
        self.first + group * self.step + inside * width
    }
}
