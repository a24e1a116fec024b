//! The CPU backend. It computes on leased blocks while others are being read.

mod attention;
mod backend;
mod branch;
mod cache_layers;
mod convolutions;
mod convolved;
mod delta;
mod delta_scratch;
mod embedding_rows;
mod embeddings;
mod expert_inputs;
mod head;
mod indexer;
mod latent;
mod latent_experts;
mod latent_norm;
mod moe;
mod ngram_scratch;
mod ngrams;
mod predicted;
mod prediction;
mod prefetch;
mod products;
mod scratch;
mod shared_attention;
mod shared_keys;
mod streams;

pub use backend::{CacheSize, CpuBackend, cache_bytes};
pub(in crate::backend) use products::{matmul_beside_reads, matrix, recycle};
pub use scratch::batch_tokens;
