//! Errors of a session.

use std::path::PathBuf;

use forebay_compute::ComputeError;
#[cfg(feature = "cuda")]
use forebay_cuda::{CuFileError, CudaError};
use forebay_format::{Catalog, FormatError, at_least, at_most};
use forebay_model::ModelError;
use forebay_options::OptionName;
use forebay_store::{OutputError, ReadError, StoreError};
use forebay_stream::StreamError;
use forebay_text::TextError;

/// Errors of opening and using a session.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Text(#[from] TextError),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Store(StoreError),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(transparent)]
    Stream(StreamError),
    #[error("the queue is full: try again later (waiting requests: {waiting})")]
    QueueFull { waiting: usize },
    #[error(
        "your part of the queue is full: try again later (your waiting requests: {waiting}; places left for others: {left})"
    )]
    QueueShareFull { waiting: usize, left: usize },
    #[error(
        "a request with a grammar or for an embedding cannot be copied: its state has no form that could be written"
    )]
    NoSnapshot,
    #[error("{}: cannot be read to tell the model from others: {source}", path.display())]
    CannotIdentify { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    KvDisk(#[from] forebay_kv::DiskError),
    #[error("this snapshot cannot be restored: {why}")]
    BadSnapshot { why: String },
    #[error("these keys and values cannot be used: {why}")]
    BadKvFile { why: String },
    #[error("keys and values cannot be read or written: {0}")]
    KvFile(std::io::Error),
    #[error("the KV cache is full: {0}; give a larger {ctx} or run fewer sequences at a time", ctx = OptionName::Context)]
    OutOfBlocks(#[from] crate::kv::OutOfBlocks),
    #[error(transparent)]
    Model(ModelError),
    #[error(transparent)]
    Compute(#[from] ComputeError),
    #[cfg(feature = "cuda")]
    #[error("{of}: {0}", of = OptionName::Device.with("cuda"))]
    Cuda(#[from] CudaError),
    #[cfg(feature = "cuda")]
    #[error("{of}: {0}", of = OptionName::Io.with("cufile"))]
    CuFile(#[from] CuFileError),
    #[error(
        "this build has no CUDA support: use {}, or build forebay with its cargo feature `cuda`",
        OptionName::Device.with("cpu")
    )]
    NoCuda,
    #[error(
        "all weights need {} of memory, but {} are free: end other programs, or run the model with a \
         budget ({ram}), which streams the rest",
        at_least(*needed_bytes),
        at_most(*free_bytes),
        ram = OptionName::Ram
    )]
    DoesNotFit { needed_bytes: u64, free_bytes: u64 },
    #[error(
        "keys and values of {context} positions need {} of RAM beside {} of weights, but {} are free: give {}a smaller \
         {ram}, or end other programs",
        at_least(*cache_bytes),
        at_least(*weights_bytes),
        at_most(*free_bytes),
        match largest_context {
            Some(positions) => format!(
                "a {} of at most {positions}, a smaller {}, ",
                OptionName::Context,
                OptionName::KvType
            ),
            None => String::new(),
        },
        ram = OptionName::Ram
    )]
    CacheDoesNotFit {
        context: usize,
        cache_bytes: u64,
        weights_bytes: u64,
        free_bytes: u64,
        /// The largest context whose keys and values fit beside these weights, or `None` if none does.
        largest_context: Option<usize>,
    },
    #[error(
        "all weights need {} of device memory, but {} of {} are free on {gpu}: end other programs that use it, or load \
         to host memory ({cpu})",
        at_least(*needed_bytes),
        at_most(*free_bytes),
        at_most(*total_bytes),
        cpu = OptionName::Device.with("cpu")
    )]
    DoesNotFitDevice { gpu: String, needed_bytes: u64, free_bytes: u64, total_bytes: u64 },
    #[error(
        "all weights need {} of device memory beside the {} that are in use on {gpu} without them, so {vram} must be at \
         least {}; it is {}",
        at_least(*needed_bytes),
        at_least(*used_bytes),
        at_least(needed_bytes + used_bytes),
        at_most(*budget_bytes),
        vram = OptionName::Vram
    )]
    OverBudget { gpu: String, needed_bytes: u64, used_bytes: u64, budget_bytes: u64 },
    #[error(
        "{place} on the device differs from the file, first at byte {offset} of {}: \
         a copy went wrong; load again, and check the GPU if this repeats",
        file.display()
    )]
    ReadBack { place: String, file: PathBuf, offset: u64 },
    #[error("{}: the disk cannot be measured there: {source}", folder.display())]
    Unmeasurable { folder: PathBuf, source: std::io::Error },
    #[error("{place}: {cause}")]
    Load { place: String, cause: ReadError },
    #[error(
        "{}: tensor {tensor:?} is in blocks that are not contiguous, so it cannot be one range of host memory; \
         pack the model again, or load it to a GPU",
        path.display()
    )]
    InPieces { path: PathBuf, tensor: String },
    #[error("the routing trace cannot be written: {0}")]
    RoutingTrace(std::io::Error),
    /// The routing trace has another shape than this model's routers, so it cannot replace them.
    #[error("the routing trace has {trace}, the model {model}: they must be the same")]
    OtherRouting { trace: String, model: String },
    #[error("{0}")]
    Profile(String),
    #[error("{}: this model has no experts to choose; leave it out", OptionName::TraceRouting)]
    NoExperts,
    #[error(
        "{}: only the CPU gives the routers' scores; use {}, or leave it out",
        OptionName::TraceScores,
        OptionName::Device.with("cpu")
    )]
    NoScores,
    #[error("there is nothing to continue: the prompt has no tokens; give a longer prompt")]
    EmptyPrompt,
    #[error("no token can be chosen: no logit is a number")]
    NoChoice,
    #[error("{name} is {value}, but {expected}")]
    BadOption { name: OptionName, value: String, expected: String },
    #[error("{}: is a pack already", path.display())]
    IsPack { path: PathBuf },
    #[error("{}: is no pack; only packs (.fbay) can be verified or turned back", path.display())]
    NoPack { path: PathBuf },
    #[error("{}: {source}", path.display())]
    Folder { path: PathBuf, source: std::io::Error },
    #[error("{}: the model has no tokenizer; only token ids can be used with it", path.display())]
    NoTokenizer { path: PathBuf },
    #[error(
        "{}: is a dense model: it has no experts that could be cached, every token uses all of its weights",
        path.display()
    )]
    DenseModel { path: PathBuf },
    #[error(
        "the machine profile has no GPU: measure one with `forebay doctor`, or use {}",
        OptionName::Device.with("cpu")
    )]
    NoGpuInProfile,
    #[error("neither device can run it: on the GPU, {gpu}; on the CPU, {cpu}")]
    NoPlan { gpu: Box<EngineError>, cpu: Box<EngineError> },
}

impl From<StoreError> for EngineError {
    fn from(error: StoreError) -> EngineError {
        match error {
            StoreError::Interrupted => EngineError::Interrupted,
            error => EngineError::Store(error),
        }
    }
}

impl From<StreamError> for EngineError {
    fn from(error: StreamError) -> EngineError {
        match error {
            StreamError::Interrupted => EngineError::Interrupted,
            error => EngineError::Stream(error),
        }
    }
}

impl From<ModelError> for EngineError {
    fn from(error: ModelError) -> EngineError {
        match error {
            ModelError::Interrupted => EngineError::Interrupted,
            error => EngineError::Model(error),
        }
    }
}

impl EngineError {
    /// Returns the error that a tensor's compressed weights cannot be decoded. `tensor` is its index.
    pub(crate) fn damaged_tensor(catalog: &Catalog, tensor: usize) -> EngineError {
        let tensor = &catalog.tensors()[tensor];
        EngineError::Format(FormatError::PackDamaged {
            path: catalog.files[tensor.extent.file.0 as usize].clone(),
            offset: tensor.extent.offset,
            what: format!("tensor {:?} has a block that is not {}", tensor.name, tensor.ty),
        })
    }

    /// Returns the smallest budget that works, in bytes, if this error says that a budget is too small.
    pub fn needed_bytes(&self) -> Option<u64> {
        match self {
            EngineError::Model(ModelError::VramTooSmall { needed_bytes, .. })
            | EngineError::Stream(StreamError::BudgetTooSmall { needed_bytes, .. })
            | EngineError::Model(ModelError::Stream(StreamError::BudgetTooSmall {
                needed_bytes,
                ..
            })) => Some(*needed_bytes),
            _ => None,
        }
    }
}
