//! Errors of a GPU, or of a build that has none.

#[cfg(feature = "cuda")]
use forebay_cuda::CudaError;
use forebay_options::OptionName;

/// Errors of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GpuError {
    #[cfg(feature = "cuda")]
    #[error("{of}: {0}", of = OptionName::Device.with("cuda"))]
    Cuda(#[from] CudaError),
    #[error(
        "this build has no CUDA support: use {}, or build forebay with its cargo feature `cuda`",
        OptionName::Device.with("cpu")
    )]
    NoCuda,
}

/// Makes an error from one of the GPU's driver, by way of [`GpuError`].
macro_rules! through_gpu_error {
    ($error:ident) => {
        #[cfg(feature = "cuda")]
        impl From<forebay_cuda::CudaError> for $error {
            fn from(error: forebay_cuda::CudaError) -> $error {
                GpuError::Cuda(error).into()
            }
        }
    };
}

pub(crate) use through_gpu_error;
