//! An NVIDIA GPU. Where it holds the whole model, every step queues kernels and nothing waits for them until the logits
//! are copied to the host; what one token needs is recorded and queued with one call from then on. Where not all experts
//! fit, the host sees every router's choice and brings what is missing. Of a dense model that does not fit, units of layers
//! pass through a ring, and the CPU computes some.

mod attention;
mod backend;
mod beginning;
mod cpu_sub_layers;
mod embedding;
mod exchange;
mod experts;
mod graphs;
mod layout;
mod memory;
mod on_cpu;
mod pass_times;
mod placed;
mod plan;
mod products;
mod relayout;
mod resume;
mod ring;
mod streamed;
mod streamed_sub_layers;
mod sub_layer_steps;
mod vectors;

pub use backend::CudaBackend;
pub use memory::DeviceFacts;
pub use on_cpu::OffloadCpu;
pub use plan::{CudaPlan, HostWeights, WeightsToLoad};
pub use streamed::HostExperts;
pub use streamed_sub_layers::HostSubLayers;
