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
mod row_kind;
mod scheduling;
mod short_convolution;
mod simd;
mod streams;
#[cfg(test)]
mod testing;

pub use attention::{
    Attention, AttentionRun, ChosenKeys, Compression, Entries, EntryScratch, KeyChoice, KeyPool,
    PoolScores, Pools, RelativeBias,
};
pub use cpu::{Arithmetic, Cpu, Isa, default_threads};
pub use error::ComputeError;
pub use kv::{KV_BLOCK, KvCache, KvLayer, KvShape, KvType, rows_for_window};
pub use matmul::{Activations, MatmulJob, Matrix};
pub use ngram::{NGramNorms, NGramShape};
pub use ops::{
    GateFunction, Gating, Growth, NEAR_LOGITS, NormForm, RopeConfig, RopeLayout, RopeScaling,
    RopeTable, RouterGroups, RouterRule, Scoring, Temperature,
};
pub use pool::Pool;
pub use recurrent::{
    DeltaColumns, DeltaInputs, DeltaRule, DeltaShape, DeltaVectors, HeadColumns, ProductRows,
    StateRun,
};
pub use row_kind::RowKind;
pub use scheduling::run_promptly;
pub use short_convolution::ShortConvolution;
pub use streams::{STREAMS_MAX, StreamMixing, StreamPrediction, StreamShape};
