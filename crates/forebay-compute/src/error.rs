//! Errors of this crate that are not mistakes of the calling code.

use crate::cpu::Isa;

/// Error of the compute layer. Mismatched slice lengths are mistakes of the calling code and panic
/// instead. The documentation of each operation says when it panics.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// `FOREBAY_ISA` does not name an instruction set.
    #[error("FOREBAY_ISA={name} names no instruction set; use portable, avx2 or avx512")]
    UnknownIsa { name: String },
    /// This machine does not have the requested instruction set.
    #[error("this machine cannot run {isa}; it can run: {}", names(.supported))]
    UnsupportedIsa { isa: Isa, supported: Vec<Isa> },
    /// A router logit is NaN or infinite: the weights or the activations are broken.
    #[error("router logit of token {token}, expert {expert} is {value}")]
    RouterLogit { token: usize, expert: usize, value: f32 },
    /// The router rule cannot be applied to the number of experts.
    #[error("router rule does not fit {experts} experts: {why}")]
    RouterRule { experts: usize, why: &'static str },
    /// The rotary embedding cannot be tabulated.
    #[error("rotary embedding: {why}")]
    Rope { why: String },
    /// The size of the key/value cache cannot be represented or reserved.
    #[error("a key/value cache of {bytes:?} bytes cannot be reserved")]
    CacheTooLarge { bytes: Option<u64> },
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ")
}
