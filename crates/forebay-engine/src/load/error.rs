//! Errors of loading weights.

use std::path::PathBuf;

#[cfg(feature = "cuda")]
use forebay_cuda::CuFileError;
use forebay_format::{FormatError, at_least, at_most};
use forebay_options::{BadOption, OptionName};
use forebay_store::{ReadError, StoreError};

use crate::gpu_error::{GpuError, through_gpu_error};
use crate::memory::DoesNotFit;

/// Errors of loading weights into memory.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Store(StoreError),
    #[error(transparent)]
    Option(#[from] BadOption),
    #[error(transparent)]
    Gpu(#[from] GpuError),
    #[cfg(feature = "cuda")]
    #[error("{of}: {0}", of = OptionName::Io.with("cufile"))]
    CuFile(#[from] CuFileError),
    #[error(transparent)]
    DoesNotFit(#[from] DoesNotFit),
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
    /// A weight cannot be read.
    #[error("{place}: {cause}")]
    Read { place: String, cause: ReadError },
    #[error(
        "{}: tensor {tensor:?} is in blocks that are not contiguous, so it cannot be one range of host memory; \
         pack the model again, or load it to a GPU",
        path.display()
    )]
    InPieces { path: PathBuf, tensor: String },
}

forebay_store::keep_interrupts!(LoadError { Store(StoreError) });
through_gpu_error!(LoadError);
