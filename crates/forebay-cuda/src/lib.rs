//! Tensor operations on NVIDIA GPUs: driver access, device memory, and kernels with their launchers.
//!
//! The crate needs only the driver, and only at run time. Kernels are shipped as PTX, which the driver compiles for
//! the GPU when a module is first used. Nothing here knows of files or of models.
//!
//! Launchers take addresses that know how much memory follows them, and check it against the given shapes. They queue
//! work on the one compute stream; they never wait and never allocate.

mod callers_context;
mod copy_rate;
mod copy_stream;
mod cufile;
mod describe;
mod error;
mod gpu;
mod graph;
mod host_bytes;
mod host_words;
mod kernels;
mod lanes;
mod launch;
mod memory;
mod module;
mod pinned;
mod ptx;
mod side_stream;
mod stream_point;
mod tables;
mod timer;
mod weights_pool;

pub use bytemuck::Pod;
pub use callers_context::CallersContext;
pub use copy_rate::Direction;
pub use copy_stream::{CopyStream, InFlight, Marker};
pub use cufile::{CuFile, CuFileError, CuFileHandle, CuFileMemory, CuFileMode};
pub use describe::PcieLink;
pub use error::CudaError;
pub use forebay_device::{DeviceId, DevicePtr};
pub use gpu::Gpu;
pub use graph::Graph;
pub use host_bytes::{HostBytes, HostPinner, HostUploads};
pub use host_words::HostWords;
pub use kernels::*;
pub use lanes::LANES;
pub use memory::DeviceMemory;
pub use pinned::{Pinned, Pinner};
pub use side_stream::SideStream;
pub use stream_point::{ForeignStream, StreamMoment, StreamPoint};
pub use tables::{AddressTable, AddressTables, SlotAddress, TableSize, TableStaging};
pub use timer::Timer;
pub use weights_pool::WeightsPool;
