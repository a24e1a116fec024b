//! What can go wrong in this crate for reasons that lie outside the calling code.

use crate::cpu::Isa;

/// An error of the compute layer. Mismatched slice lengths are mistakes of the calling code and
/// panic instead; each operation's documentation says which.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// `FOREBAY_ISA` holds a word that names no instruction set.
    #[error("FOREBAY_ISA={name} names no instruction set; use portable, avx2 or avx512")]
    UnknownIsa { name: String },
    /// The instruction set that was asked for does not run on this machine.
    #[error("this machine cannot run {isa}; it can run: {}", names(.supported))]
    UnsupportedIsa { isa: Isa, supported: Vec<Isa> },
    /// A router logit is NaN or infinite: the weights or the activations are broken.
    #[error("router logit of token {token}, expert {expert} is {value}")]
    RouterLogit { token: usize, expert: usize, value: f32 },
    /// A router rule that cannot be applied to the number of experts it meets.
    #[error("router rule does not fit {experts} experts: {why}")]
    RouterRule { experts: usize, why: &'static str },
    /// A rotary embedding that cannot be tabulated.
    #[error("rotary embedding: {why}")]
    Rope { why: String },
    /// A key/value cache whose size cannot be represented or reserved.
    #[error("a key/value cache of {bytes:?} bytes cannot be reserved")]
    CacheTooLarge { bytes: Option<u64> },
    /// Positions beyond the end of the key/value cache.
    #[error("positions {first}..{end} do not fit a context of {context}")]
    ContextFull { first: usize, end: usize, context: usize },
}

fn names(isas: &[Isa]) -> String {
    isas.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ")
}
