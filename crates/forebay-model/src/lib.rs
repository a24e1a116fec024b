//! Architecture descriptions and the one decoder that they drive.
//!
//! A model family is data here ([`arch::Architecture`]): what differs between families is a value in
//! the description, and the decoder reads it. The decoder never sees a file or a device: it drives a backend, which
//! leases blocks from `forebay-stream` and computes on their bytes with `forebay-compute`, or computes on a GPU.

#![forbid(unsafe_code)]

pub mod arch;
mod backend;
pub mod decoder;
mod error;
pub mod sampling;
pub mod weights;

pub use arch::Architecture;
pub use backend::cpu::{CpuBackend, batch_tokens, cache_bytes};
pub use backend::cuda::{
    CudaBackend, CudaPlan, DeviceExperts, DeviceFacts, DeviceShare, DeviceUnits, HelpRates,
    HelpStatistics, HelpWanted, HelpingCpu, HostExperts, HostUnits, HostWeights, MissSplit,
    PassTimes, Unit, UnitCounts, UnitPlaces, UnitPlan, UnitRates, VramUse, WeightsToLoad,
};
pub use backend::{Backend, ComputeInfo, largest_context};
pub use decoder::{ChosenExperts, Decoder, LogitsWanted, Routing};
pub use error::ModelError;
pub use weights::Weights;
