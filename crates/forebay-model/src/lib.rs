//! Model architectures and the decoder that they drive.
//!
//! A model family is data here ([`arch::Architecture`]): each difference between families is a value in the
//! description, which the decoder reads. The decoder never accesses a file or a device itself. It drives a backend,
//! which computes on the CPU or on a GPU. The CPU backend leases blocks from `forebay-stream` and computes on their
//! bytes with `forebay-compute`.

#![forbid(unsafe_code)]
#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, unused_imports, reason = "what GPUs share with the CPU has no other user")
)]

pub mod arch;
mod backend;
pub mod decoder;
mod error;
mod ngrams;
mod prediction;
mod rows;
pub mod sampling;
mod sharing;
mod states;
mod statistics;
pub mod weights;

pub use arch::{Architecture, KvCapacity, KvInVram};
pub use backend::cpu::{CacheSize, CpuBackend, batch_tokens, cache_bytes};
#[cfg(feature = "cuda")]
pub use backend::cuda::{
    CudaBackend, CudaPlan, DeviceFacts, HostExperts, HostSubLayers, HostWeights, OffloadCpu,
    WeightsToLoad,
};
pub use backend::{
    Backend, BlockContent, CHANGES_MAX, ChosenExperts, ComputeInfo, HostMemory, HostReserver,
    KvGroup, Restoring, RowSelection, Run, Selector, largest_context,
};
pub use decoder::{Decoder, Output, Pass, PassWatch, Paused, Routing};
pub use error::ModelError;
pub use prediction::Prediction;
pub use sharing::{
    CpuOffloadMode, CpuOffloadRates, CpuOffloadStatistics, DeviceShare, MissSplit, SubLayer,
    SubLayerCounts, SubLayerPlacement, SubLayerPlan, SubLayerRates,
};
pub use statistics::{DeviceExperts, DeviceSubLayers, PassTimes, VramUse};
pub use weights::Weights;
