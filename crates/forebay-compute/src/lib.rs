//! Tensor operations on the CPU: the thread pool, element-wise operations, attention with its
//! key/value cache, and products with quantised weights.
//!
//! This crate knows neither files nor models: its operations take slices and write slices. Every
//! operation gives the same bits for every number of threads.

mod attention;
mod buffer;
mod cpu;
mod error;
mod kv;
pub mod kv_rounding;
mod matmul;
mod ngram;
mod ops;
mod pool;
mod recurrent;
mod scheduling;
mod short_convolution;
mod simd;
mod streams;
#[cfg(test)]
mod testing;

pub use attention::{
    Attention, AttentionRun, Compression, Entries, EntryScratch, KeyChoice, KeyPool, PoolScores,
    RelativeBias,
};
pub use cpu::{Arithmetic, Cpu, Isa, default_threads};
pub use error::ComputeError;
pub use kv::{KvCache, KvLayer, KvShape, rows_for_window};
pub use matmul::{Activations, MatmulJob, Matrix};
pub use ngram::{NGramNorms, NGramShape};
pub use ops::{
    Growth, NormForm, RopeConfig, RopeLayout, RopeScaling, RopeTable, RouterRule, Temperature,
};
pub use pool::Pool;
pub use recurrent::{DeltaColumns, DeltaInputs, DeltaVectors, ProductRows, StateRun};
pub use scheduling::run_promptly;
pub use short_convolution::ShortConvolution;
pub use streams::{STREAMS_MAX, StreamPrediction, StreamShape};
