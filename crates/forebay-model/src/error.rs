//! Errors between a catalog and its logits.

use forebay_compute::ComputeError;
#[cfg(feature = "cuda")]
use forebay_cuda::CudaError;
use forebay_format::{FormatError, at_least, at_most};
use forebay_options::OptionName;
use forebay_store::StoreError;
use forebay_stream::StreamError;

/// Errors of architectures, weights and the decoder.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(
        "the architecture '{name}' is not supported: forebay runs {known}. Choose a model of one of these, or look for a \
         newer forebay"
    )]
    UnknownArchitecture { name: String, known: String },
    #[error(
        "forebay runs '{name}' from Hugging Face folders (safetensors) only, not from GGUF files, because there is no reference to \
         check its GGUF form with: download a repository with the safetensors of this model"
    )]
    FolderOnly { name: String },
    #[error(
        "forebay runs '{name}' from GGUF files only, not from Hugging Face folders (safetensors): download a GGUF \
         file of this model"
    )]
    GgufOnly { name: String },
    #[error(
        "forebay generates text token by token, but a '{name}' model {instead}: take another model"
    )]
    NoNextToken { name: String, instead: &'static str },
    #[error("{source_name} has no '{key}', which the {family} architecture needs")]
    MissingKey { source_name: String, key: String, family: &'static str },
    #[error("'{key}' is {value}, but {expected}")]
    BadValue { key: String, value: String, expected: String },
    #[error("multi-token prediction: {why}: leave out {}", OptionName::Mtp)]
    NoMtp { why: String },
    #[error("the model has no tensor '{name}', which the {family} architecture needs")]
    MissingTensor { name: String, family: &'static str },
    #[error(
        "tensor '{name}' has the shape {found:?}, but the model's metadata asks for {expected:?}"
    )]
    TensorShape { name: String, found: Vec<u64>, expected: Vec<u64> },
    #[error("tensor '{name}' has no elements, but the model needs it; get the file again")]
    NoElements { name: String },
    #[error(
        "the files have no output projection '{head}', and config.json does not say that the embedding table stands for it: \
         {said}. Add the tensor, or set tie_word_embeddings to true"
    )]
    NoHead { head: String, said: String },
    #[error("tensor '{name}' is of type {found}, which cannot be used as a weight matrix")]
    TensorType { name: String, found: &'static str },
    #[error("tensor '{name}' lies in several pieces, which only experts may; pack the model again")]
    TensorInPieces { name: String },
    #[error(
        "tensor '{name}' holds a value that is not finite at index {index}; the file is damaged"
    )]
    NotFinite { name: String, index: usize },
    #[error(
        "the context is full: {used} of {context} positions are used and {wanted} more are asked for; \
         give a larger {} or a shorter prompt",
        OptionName::Context
    )]
    ContextFull { used: usize, context: usize, wanted: usize },
    #[error(
        "the recurrent layers have no state after position {position} of this sequence; read it again from its beginning"
    )]
    NoState { position: usize },
    #[error("token id {id} is outside of the vocabulary of {vocabulary} tokens")]
    TokenOutOfRange { id: u32, vocabulary: usize },
    #[error(
        "layer {layer} produced values that are not finite at token {token}; \
         the weights hold NaN or infinite scales: check the file against its source"
    )]
    NumericFailure { layer: usize, token: usize },
    #[error(
        "keys and values need at least {} of VRAM with this context, but {kv_vram} allows {}; give a larger {kv_vram} \
         or a smaller {ctx}",
        at_least(*bytes_min),
        at_most(*given_bytes),
        kv_vram = OptionName::KvVram,
        ctx = OptionName::Context
    )]
    KvVramTooSmall { given_bytes: u64, bytes_min: u64 },
    #[error(
        "the model needs {} of VRAM, but {} may be used: {why}; give {}a larger {vram}, or use {cpu}",
        at_least(*needed_bytes),
        at_most(*given_bytes),
        match largest_context {
            Some(positions) => format!("a {} of at most {positions} or ", OptionName::Context),
            None => String::new(),
        },
        vram = OptionName::Vram,
        cpu = OptionName::Device.with("cpu")
    )]
    VramTooSmall {
        needed_bytes: u64,
        given_bytes: u64,
        why: String,
        /// Largest context that fits the available memory; `None` if none does.
        largest_context: Option<usize>,
    },
    #[error("the GPU has no kernels for {what}: use {}", OptionName::Device.with("cpu"))]
    NotOnGpu { what: String },
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Compute(#[from] ComputeError),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Store(StoreError),
    #[error(transparent)]
    Stream(StreamError),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
}

forebay_store::keep_interrupts!(ModelError { Store(StoreError), Stream(StreamError) });
