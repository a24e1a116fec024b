//! Streams the weights of modules that another library runs, such as those of PyTorch, through bounded memory of a device.
//!
//! The library computes, and says before each use of a module which one it is. This crate brings its weights, ahead of the use, and
//! in the place of others. It does not know what the weights mean.
//!
//! - [`UseOrder`] records the order of use, and says what comes next. [`Room`] cuts the memory into ranges, and chooses whose weights leave.
//! - [`Streamer`] does both while modules run. Its rule is that of Cao, Felten, Karlin and Li ("A study of integrated prefetching and caching
//!   strategies", 1995): always bring what is missing next, in the place of what is used last, and never in the place of what is used before.
//!   What has no room yet is brought near the device. What stays from pass to pass is chosen by the time of its uses ([`Kept`]).
//! - A [`WeightSource`] has all weights. [`ModuleWeights`] has those of RAM coded without loss, and reads others from files ahead of their use.
//! - A [`Device`] has the memory. [`HostDevice`] is RAM, for modules that run on the CPU, and `CudaDevice` an NVIDIA GPU.
//!
//! A stream never changes results. If a pass uses modules in another order, their weights come at once, and later.

#![forbid(unsafe_code)]

mod buffers;
mod coded;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod expansion;
mod host;
mod order;
mod plan;
mod prediction;
mod rate;
mod reading;
mod room;
mod source;
mod stored;
mod streamer;
mod timing;
mod weights;

#[cfg(feature = "cuda")]
pub use cuda::{CodedInVram, CudaDevice, CudaOptions, CudaWeights};
pub use device::{Device, DeviceError, Loaded};
pub use expansion::Expansion;
pub use host::{HostDevice, HostMemory};
pub use order::{Root, Unit, UseOrder};
pub use plan::{Kept, PlanInput};
pub use prediction::PassPrediction;
pub use room::{ALIGNMENT, Choice, Group, Room, aligned};
pub use source::{Outside, WeightSource};
pub use stored::{FileForm, GroupTensor, TensorFile, TensorFrom, TensorPlace};
pub use streamer::{GroupOptions, StreamError, StreamStatistics, Streamer, StreamerOptions};
pub use weights::{Arriving, ModuleWeights, WeightOptions, WeightStatistics, WeightsBuilder};
