//! Launchers: one file for each family of kernels. They check shapes, choose the variant, and queue it.

mod bandwidth;
mod quantize;

pub use quantize::RoundedActivations;
