//! The NVIDIA GPU backend.
//!
//! If the whole model is in VRAM, every step queues kernels, and the host waits only for the copy of the logits. The
//! work of decode rows is captured once as a CUDA graph and then queued with one call.
//!
//! If not all experts fit, the host sees every router's choice and brings the missing experts. If a dense model does
//! not fit, its sub-layers pass through a ring, and the CPU computes some of them. The steps are the same in each case:
//! they ask the `WeightSource` for weights.

mod attention;
mod backend;
mod beginning;
mod blocks;
mod convolutions;
mod cpu_sub_layers;
mod delta;
mod embedding;
mod ending;
mod exchange;
mod exchange_layout;
mod expert_cache;
mod expert_inputs;
mod experts;
mod graphs;
mod in_lanes;
mod indexer;
mod indexer_layout;
mod kv_layout;
mod kv_size;
mod lanes;
mod latent_layout;
mod layer_embeddings;
mod layer_ring;
mod layout;
mod memory;
mod ngram_layout;
mod ngram_tables;
mod ngrams;
mod on_cpu;
mod pass_times;
mod placed;
mod plan;
mod predicted;
mod prediction;
mod prediction_layout;
mod products;
mod relayout;
mod relayout_kernels;
mod resume;
mod ring;
mod selections;
mod shared_keys;
mod shared_keys_layout;
mod source;
mod stream_layout;
mod streams;
mod vectors;

pub use backend::CudaBackend;
pub use expert_cache::HostExperts;
pub use layer_ring::HostSubLayers;
pub use memory::DeviceFacts;
pub use on_cpu::OffloadCpu;
pub use plan::{CudaPlan, WeightsToLoad};
pub use source::HostWeights;
