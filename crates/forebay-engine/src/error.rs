//! Errors of sessions and of engines.

use std::path::PathBuf;

use forebay_compute::ComputeError;
use forebay_format::FormatError;
use forebay_model::ModelError;
use forebay_options::{BadOption, OptionName};
use forebay_store::StoreError;
use forebay_stream::StreamError;
use forebay_text::TextError;

use crate::engine::{QueueError, SnapshotError};
use crate::gpu_error::{GpuError, through_gpu_error};
use crate::kv_file::KvFileError;
use crate::load::LoadError;
use crate::memory::DoesNotFit;
use crate::plan::{PlanError, needed_by_model, needed_by_stream};
use crate::routing_error::RoutingError;

/// Errors of opening and using a session. What several parts of the engine return has one variant here, whichever returned it.
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
    Stream(StreamError),
    #[error(transparent)]
    Model(ModelError),
    #[error(transparent)]
    Compute(#[from] ComputeError),
    #[error(transparent)]
    Option(#[from] BadOption),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    DoesNotFit(#[from] DoesNotFit),
    #[error(transparent)]
    Load(Box<LoadError>),
    #[error(transparent)]
    Plan(Box<PlanError>),
    #[error(transparent)]
    Queue(#[from] QueueError),
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    #[error(transparent)]
    Routing(#[from] RoutingError),
    #[error(transparent)]
    KvDisk(#[from] forebay_kv::DiskError),
    #[error(transparent)]
    KvFile(#[from] KvFileError),
    #[error("the KV cache is full: {0}; give a larger {ctx} or run fewer sequences at a time", ctx = OptionName::Context)]
    OutOfBlocks(#[from] crate::kv::OutOfBlocks),
    #[error("{}: cannot be read to tell the model from others: {source}", path.display())]
    CannotIdentify { path: PathBuf, source: std::io::Error },
    #[error("there is nothing to continue: the prompt has no tokens; give a longer prompt")]
    EmptyPrompt,
    #[error("no token can be chosen: no logit is a number")]
    NoChoice,
    #[error("{}: the model has no tokenizer; only token ids can be used with it", path.display())]
    NoTokenizer { path: PathBuf },
    #[error(
        "{}: is a dense model: it has no experts that could be cached, every token uses all of its weights",
        path.display()
    )]
    DenseModel { path: PathBuf },
}

forebay_store::keep_interrupts!(EngineError { Store(StoreError), Stream(StreamError), Model(ModelError) });
through_gpu_error!(EngineError);

impl From<LoadError> for EngineError {
    fn from(error: LoadError) -> EngineError {
        match error {
            LoadError::Format(error) => EngineError::Format(error),
            LoadError::Interrupted => EngineError::Interrupted,
            LoadError::Store(error) => EngineError::Store(error),
            LoadError::Option(error) => EngineError::Option(error),
            LoadError::Gpu(error) => EngineError::Gpu(error),
            LoadError::DoesNotFit(error) => EngineError::DoesNotFit(error),
            error => EngineError::Load(Box::new(error)),
        }
    }
}

impl From<PlanError> for EngineError {
    fn from(error: PlanError) -> EngineError {
        match error {
            PlanError::Format(error) => EngineError::Format(error),
            PlanError::Text(error) => EngineError::Text(error),
            PlanError::Interrupted => EngineError::Interrupted,
            PlanError::Store(error) => EngineError::Store(error),
            PlanError::Stream(error) => EngineError::Stream(error),
            PlanError::Model(error) => EngineError::Model(error),
            PlanError::Option(error) => EngineError::Option(error),
            PlanError::Gpu(error) => EngineError::Gpu(error),
            PlanError::DoesNotFit(error) => EngineError::DoesNotFit(error),
            error => EngineError::Plan(Box::new(error)),
        }
    }
}

impl EngineError {
    /// Returns the smallest budget that works, in bytes, if this error says that a budget is too small.
    pub fn needed_bytes(&self) -> Option<u64> {
        match self {
            EngineError::Model(error) => needed_by_model(error),
            EngineError::Stream(error) => needed_by_stream(error),
            _ => None,
        }
    }
}
