//! Architecture descriptions and the one decoder that they drive.
//!
//! A model family is data here ([`arch::Architecture`]): what differs between families is a value in
//! the description, and the decoder reads it. The decoder never sees a file or a device: it drives a backend, which
//! leases blocks from `forebay-stream` and computes on their bytes with `forebay-compute`, or computes on a GPU.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, unused_imports, reason = "what GPUs share with the CPU has no other user")
)]

pub mod arch;
mod backend;
pub mod decoder;
mod error;
pub mod sampling;
mod sharing;
mod statistics;
pub mod weights;

pub use arch::Architecture;
pub use backend::cpu::{CpuBackend, batch_tokens, cache_bytes};
#[cfg(feature = "cuda")]
pub use backend::cuda::{
    CudaBackend, CudaPlan, DeviceFacts, HostExperts, HostSubLayers, HostWeights, OffloadCpu,
    WeightsToLoad,
};
pub use backend::{Backend, ChosenExperts, ComputeInfo, largest_context};
pub use decoder::{Decoder, LogitsWanted, PromptWatch, Routing};
pub use error::ModelError;
pub use sharing::{
    CpuOffloadMode, CpuOffloadRates, CpuOffloadStatistics, DeviceShare, MissSplit, SubLayer,
    SubLayerCounts, SubLayerPlacement, SubLayerPlan, SubLayerRates,
};
pub use statistics::{DeviceExperts, DeviceSubLayers, PassTimes, VramUse};
pub use weights::Weights;
