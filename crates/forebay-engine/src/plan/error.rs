//! Errors of planning.

use forebay_format::{FormatError, at_least, at_most};
use forebay_model::ModelError;
use forebay_options::{BadOption, OptionName};
use forebay_store::StoreError;
use forebay_stream::StreamError;
use forebay_text::TextError;

use crate::gpu_error::{GpuError, through_gpu_error};
use crate::memory::DoesNotFit;

/// Errors of planning a model for a machine, or for this one.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
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
    Option(#[from] BadOption),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[error(transparent)]
    DoesNotFit(#[from] DoesNotFit),
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
        "the machine profile has no GPU: measure one with `forebay doctor`, or use {}",
        OptionName::Device.with("cpu")
    )]
    NoGpuInProfile,
    #[error("neither device can run it: on the GPU, {gpu}; on the CPU, {cpu}")]
    NoPlan { gpu: Box<PlanError>, cpu: Box<PlanError> },
}

forebay_store::keep_interrupts!(PlanError { Store(StoreError), Stream(StreamError), Model(ModelError) });
through_gpu_error!(PlanError);

impl PlanError {
    /// Returns the smallest budget that works, in bytes, if this error says that a budget is too small.
    pub fn needed_bytes(&self) -> Option<u64> {
        match self {
            PlanError::Model(error) => needed_by_model(error),
            PlanError::Stream(error) => needed_by_stream(error),
            _ => None,
        }
    }
}

/// Returns the smallest budget that works, in bytes, if this error says that a budget is too small.
pub(crate) fn needed_by_model(error: &ModelError) -> Option<u64> {
    match error {
        ModelError::VramTooSmall { needed_bytes, .. } => Some(*needed_bytes),
        ModelError::Stream(error) => needed_by_stream(error),
        _ => None,
    }
}

/// Returns the smallest budget that works, in bytes, if this error says that a budget is too small.
pub(crate) fn needed_by_stream(error: &StreamError) -> Option<u64> {
    match error {
        StreamError::BudgetTooSmall { needed_bytes, .. } => Some(*needed_bytes),
        _ => None,
    }
}
