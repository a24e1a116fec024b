//! What can go wrong between us and the driver, in words.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

/// Errors of the driver, of the choice of a GPU, and of device memory.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    #[error("no NVIDIA driver was found (the library libcuda.so.1 cannot be loaded)")]
    NoDriver,
    #[error(
        "the NVIDIA driver is too old: it supports CUDA {}.{}, CUDA {}.{} is needed (driver 550.54 or newer)",
        has.0, has.1, needs.0, needs.1
    )]
    DriverTooOld { has: (i32, i32), needs: (i32, i32) },
    #[error("the NVIDIA driver finds no GPU")]
    NoGpu,
    #[error("there is no GPU {ordinal}: the driver finds {count}, counted from 0")]
    NoSuchGpu { ordinal: usize, count: usize },
    #[error(
        "{name} has compute capability {}.{}; 8.0 is needed (Ampere, 2020, or newer)",
        capability.0, capability.1
    )]
    CapabilityTooLow { name: String, capability: (i32, i32) },
    #[error("the GPU has not enough free memory for {bytes} bytes ({free_bytes} are free)")]
    OutOfMemory { bytes: u64, free_bytes: u64 },
    #[error("{call}: {message}")]
    Driver { call: &'static str, message: String },
}

impl CudaError {
    /// For `map_err`: what the driver answered to `call`.
    pub(crate) fn of(call: &'static str) -> impl FnOnce(DriverError) -> CudaError {
        move |error| CudaError::Driver { call, message: describe(error) }
    }
}

fn describe(error: DriverError) -> String {
    let text = |words: Result<&std::ffi::CStr, DriverError>| {
        words.map_or_else(|_| "unknown".to_owned(), |words| words.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}

pub(crate) fn is_out_of_memory(error: &DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}
