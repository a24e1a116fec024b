//! Errors of measuring a machine.

use std::path::PathBuf;

use forebay_compute::ComputeError;
#[cfg(feature = "cuda")]
use forebay_cuda::CudaError;
use forebay_options::BadOption;
use forebay_store::StoreError;

#[cfg(feature = "cuda")]
use crate::gpu_error::GpuError;
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

impl From<StoreError> for DoctorError {
    fn from(error: StoreError) -> DoctorError {
        match error {
            StoreError::Interrupted => DoctorError::Interrupted,
            error => DoctorError::Store(error),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<CudaError> for DoctorError {
    fn from(error: CudaError) -> DoctorError {
        GpuError::Cuda(error).into()
    }
}
