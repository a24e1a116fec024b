//! Errors of measuring a machine.

use std::path::PathBuf;

use forebay_compute::ComputeError;
use forebay_options::BadOption;
use forebay_store::StoreError;

#[cfg(feature = "cuda")]
use crate::gpu_error::{GpuError, through_gpu_error};
#[cfg(feature = "cuda")]
use crate::load::LoadError;

/// Errors of measuring a machine.
#[derive(Debug, thiserror::Error)]
pub enum DoctorError {
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    #[error(transparent)]
    Store(StoreError),
    #[error(transparent)]
    Option(#[from] BadOption),
    #[error(transparent)]
    Compute(#[from] ComputeError),
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// A load to a GPU that is measured fails.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("{}: the disk cannot be measured there: {source}", folder.display())]
    Unmeasurable { folder: PathBuf, source: std::io::Error },
}

forebay_store::keep_interrupts!(DoctorError { Store(StoreError) });
#[cfg(feature = "cuda")]
through_gpu_error!(DoctorError);
