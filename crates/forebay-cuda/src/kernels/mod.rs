//! Kernel launchers, one file per family of kernels. They check shapes, choose the kernel variant and queue it.

mod attention;
mod attention_inputs;
mod bandwidth;
mod bank;
mod coded_streams;
mod columns;
mod compact;
mod convert;
mod convolutions;
mod delta;
mod elementwise;
mod embedding;
mod entries;
mod exponents;
mod fetch;
mod gating;
mod indexer;
mod kv;
mod latent;
mod layer_embeddings;
mod matmul;
mod matvec;
mod needed;
mod ngrams;
mod norm;
mod predicted_streams;
mod prompts;
mod quantize;
mod router;
mod row_gate;
mod rows;
mod selective;
mod streams;
mod top_k;
mod weights;

pub use attention::{
    ATTENTION_DIM_MAX, AttentionScratch, AttentionScratchSize, AttentionSplits, DeviceAttention,
    RelativeBiases, converts_outputs, prompt_tiles_max, takes_inputs,
};
pub use attention_inputs::{AttentionInputs, HeadInput, Rotation};
pub use bank::BankRows;
pub use coded_streams::{CodedStream, CodedStreams, GdeflateDecoder};
pub use columns::Columns;
pub use compact::compact_workspace_bytes;
pub use convert::{Matrices, SplitMxfp4};
pub use convolutions::RowConvolution;
pub use delta::{
    Delta, DeltaRuns, DeltaStates, NO_STATE, ProductColumns, delta_module, takes_delta,
};
pub use elementwise::{ExpertOutputs, FiniteFlag};
pub use embedding::EmbeddingTable;
pub use entries::{
    Compressor, SHARED_KEY_DIM_MAX, SharedKeyAttention, entries_scratch, shared_key_modules,
};
pub use exponents::{CodedContainer, CodedExponents, ContainerDecoder, ContainerInRange};
pub use fetch::{
    ExpertAnswer, ExpertFetch, ExpertMailbox, ExpertMiss, ExpertQuestion, ExpertReturn,
    FETCHED_PAIRS_MAX, FetchedLayer, GivingUp,
};
pub use gating::{Gate, GateBiases, is_alone};
pub use indexer::{Indexer, IndexerInputs, IndexerScores, PooledKeys, indexer_modules};
pub use kv::{DeviceKvLayer, KvElsewhere, KvLayerShape, KvPool, KvTables};
pub use layer_embeddings::RowEmbeddings;
pub use matmul::{
    DeviceMatmul, MatmulInput, MatmulWeights, NarrowActivations, NarrowForm, TileSize, narrow_form,
};
pub use matvec::{DECODE_ROWS, Pairing};
pub use needed::{ModelKernels, modules_needed};
pub use ngrams::NGramRows;
pub use norm::{Added, Converted, Norm, NormForm, Normed};
pub use predicted_streams::StreamPrediction;
pub use quantize::{RoundedActivations, TiledActivations};
pub use router::{RouterChoice, RouterMatrix, RouterOutputs, SortedPairs, TokenExperts};
pub use row_gate::{HeadGates, RowTemperature};
pub use rows::{CutPrompts, PassRows, PromptRun, PromptTiles};
pub use selective::CompressedParts;
pub use streams::{MixedProducts, STREAMS, StreamCoefficients, StreamFactors, StreamRows};
pub use top_k::{Selections, TOP_K_MAX, TopK, TopKBuffers};
pub use weights::{
    DeviceMatrix, ExpertPairs, ExpertPart, ExpertTable, MatvecInput, NO_EXPERT, decode_modules,
    shares_reads, supports_weights, takes_rounded, takes_tiles, weight_alignment,
};
