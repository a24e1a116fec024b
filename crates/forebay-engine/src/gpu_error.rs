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
