//! Activations of feed-forward layers, and functions of gates.

/// Activation that combines `gate` and `up` (Shazeer 2020, "GLU Variants Improve Transformer").
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gating {
    /// `silu(g) * u`, with `silu(g) = g / (1 + e^-g)`.
    Silu,
    /// `gelu(g) * u`, with the approximation
    /// `gelu(g) = g/2 * (1 + tanh(sqrt(2/pi) * (g + 0.044715 g^3)))` (Hendrycks and Gimpel 2016).
    GeluTanh,
    /// `(u + 1) * g / (1 + e^(-alpha g))`, with `g` capped at `limit` and `u` clamped to
    /// `-limit..limit` (gpt-oss).
    Clamped { alpha: f32, limit: f32 },
    /// `silu(g) * u`, with `g` capped at `limit` and `u` clamped to `-limit..limit` (DeepSeek-V4, GLM-5-Next).
    ClampedSilu { limit: f32 },
    /// `silu(g) * u`, with `silu(g)` capped at `limit` and `u` clamped to `-limit..limit` (Step 3.5).
    SiluClamped { limit: f32 },
    /// `limit tanh(g / limit) / (1 + e^-g) * up_limit tanh(u / up_limit)` (Kimi K3, "SiTU").
    Situ { limit: f32, up_limit: f32 },
    /// `max(g, 0) * u` (SmallThinker).
    Relu,
    /// `max(u, 0)^2`, without a gate (So et al. 2021, "Primer").
    SquaredRelu,
    /// `gelu(u)`, without a gate: `u` times the probability that a normal number is less.
    PlainGelu,
    /// The same with the approximation of [`Gating::GeluTanh`].
    PlainGeluTanh,
    /// `positive u^2 + slope u` for positive `u`, and `negative (e^min(u, floor) - 1 - u) + slope u` for others, without a gate (Huang
    /// and Schlag 2024, "xIELU").
    Xielu { positive: f32, negative: f32, slope: f32, floor: f32 },
}

impl Gating {
    /// Returns true if feed-forwards have a gate matrix beside the up matrix.
    pub fn has_gate(self) -> bool {
        !matches!(
            self,
            Gating::SquaredRelu | Gating::PlainGelu | Gating::PlainGeluTanh | Gating::Xielu { .. }
        )
    }
}

/// Function that makes a factor of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateFunction {
    /// `1 / (1 + e^-g)`
    Sigmoid,
    /// `ln(1 + e^g)`
    Softplus,
}

impl GateFunction {
    /// Returns the factor of a gate.
    pub fn of(self, gate: f32) -> f32 {
        match self {
            GateFunction::Sigmoid => 1.0 / (1.0 + (-gate).exp()),
            // The exponential would overflow for large numbers, for which the function is the number itself.
            GateFunction::Softplus if gate > 20.0 => gate,
            GateFunction::Softplus => gate.exp().ln_1p(),
        }
    }
}
