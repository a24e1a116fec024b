//! Launchers: one file for each family of kernels. They check shapes, choose the variant, and queue it.

mod bandwidth;
mod matmul;
mod matvec;
mod quantize;
mod weights;

pub use matmul::{
    MatmulInput, MatmulJob, MatmulWeights, NarrowActivations, NarrowForm, narrow_form,
};
pub use matvec::{MATVEC_TOKENS, Pairing};
pub use quantize::RoundedActivations;
pub use weights::{
    DeviceMatrix, ExpertPart, ExpertTable, MatvecInput, supports_weights, takes_rounded,
    weight_alignment,
};
