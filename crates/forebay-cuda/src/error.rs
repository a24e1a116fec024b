//! Errors of the driver and of the GPU, as messages.

use std::sync::OnceLock;

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, DriverError};

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
    /// The driver refused a call, or work queued before has failed.
    #[error("{call}: {message} ({name}){}", if is_sticky(*code) { RESTART } else { "" })]
    Driver {
        call: &'static str,
        /// The driver's `CUresult`.
        code: u32,
        /// The name of the `CUresult`, such as `CUDA_ERROR_ILLEGAL_ADDRESS`.
        name: String,
        message: String,
    },
}

/// Text that a sticky error adds to the driver's message.
const RESTART: &str = "; the GPU can do no more work for this process, which must be restarted";

/// The first sticky error of the process. Afterwards every driver call gives the same answer, so none is made.
static LOST: OnceLock<CudaError> = OnceLock::new();

impl CudaError {
    /// Returns a function for `map_err` that turns the driver's answer to `call` into an error.
    pub(crate) fn of(call: &'static str) -> impl FnOnce(DriverError) -> CudaError {
        move |error| {
            let text = |words: Result<&std::ffi::CStr, DriverError>| {
                let text = words.map(|words| words.to_string_lossy().into_owned());
                text.unwrap_or_else(|_| "unknown".to_owned())
            };
            let (name, message) = (text(error.error_name()), text(error.error_string()));
            let error = CudaError::Driver { call, code: error.0 as u32, name, message };
            if error.is_sticky() {
                return LOST.get_or_init(|| error).clone();
            }
            error
        }
    }

    /// Returns the driver's `CUresult` and its name, if the driver refused a call.
    pub fn driver_code(&self) -> Option<(u32, &str)> {
        match self {
            CudaError::Driver { code, name, .. } => Some((*code, name)),
            _ => None,
        }
    }

    /// Returns true if the GPU's context is lost: no later call can succeed, and the process must be restarted.
    pub fn is_sticky(&self) -> bool {
        self.driver_code().is_some_and(|(code, _)| is_sticky(code))
    }
}

/// Returns true if, as NVIDIA documents, all further work of the process fails after this error.
fn is_sticky(code: u32) -> bool {
    const STICKY: [CUresult; 12] = [
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
        CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
        CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
        CUresult::CUDA_ERROR_ASSERT,
        CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
        CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUresult::CUDA_ERROR_INVALID_PC,
        CUresult::CUDA_ERROR_LAUNCH_FAILED,
        CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
    ];
    STICKY.iter().any(|&sticky| sticky as u32 == code)
}

/// Checks that the process has met no sticky error.
///
/// # Errors
/// Returns the sticky error that the process has met, if any.
pub(crate) fn check_not_lost() -> Result<(), CudaError> {
    LOST.get().map_or(Ok(()), |lost| Err(lost.clone()))
}

/// Makes `context` current on the calling thread, which every driver call needs.
///
/// # Errors
/// Returns the sticky error that the process has met, if any, without another driver call. Returns an error if the
/// driver call fails.
pub(crate) fn bind(context: &CudaContext) -> Result<(), CudaError> {
    check_not_lost()?;
    context.bind_to_thread().map_err(CudaError::of("binding the GPU to the thread"))
}

pub(crate) fn is_not_ready(error: &DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_NOT_READY
}

pub(crate) fn is_out_of_memory(error: &DriverError) -> bool {
    error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(code: CUresult) -> CudaError {
        let (name, message) = (format!("{code:?}"), "in the driver's words".to_owned());
        CudaError::Driver { call: "launching a kernel", code: code as u32, name, message }
    }

    #[test]
    fn sticky_errors_ask_for_a_restart() {
        let lost = driver(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(lost.is_sticky());
        assert_eq!(lost.driver_code(), Some((700, "CUDA_ERROR_ILLEGAL_ADDRESS")));
        let text = lost.to_string();
        assert!(text.starts_with("launching a kernel: in the driver's words (CUDA_ERROR_ILLEGAL"));
        assert!(text.ends_with("must be restarted"), "{text}");
    }

    #[test]
    fn other_errors_do_not() {
        for code in [CUresult::CUDA_ERROR_INVALID_VALUE, CUresult::CUDA_ERROR_OUT_OF_MEMORY] {
            let error = driver(code);
            assert!(!error.is_sticky() && !error.to_string().contains("restart"), "{error}");
        }
        assert!(!CudaError::NoGpu.is_sticky());
    }
}
