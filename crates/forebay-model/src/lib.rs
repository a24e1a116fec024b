//! Architecture descriptions and the one decoder that they drive.
//!
//! A model family is data here ([`arch::Architecture`]): what differs between families is a value in
//! the description, and the decoder reads it. The decoder never sees a file: it leases blocks from
//! `forebay-stream` and computes on their bytes with `forebay-compute`.

#![forbid(unsafe_code)]

pub mod arch;
pub mod decoder;
mod error;
mod moe;
pub mod sampling;
pub mod weights;

pub use arch::Architecture;
pub use decoder::{Decoder, LogitsWanted};
pub use error::ModelError;
pub use weights::Weights;
