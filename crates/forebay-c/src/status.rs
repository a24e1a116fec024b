//! Errors as numbers.

#[cfg(feature = "cuda")]
use forebay_cuda::CudaError;
use forebay_engine::load::LoadError;
use forebay_engine::{DoesNotFit, GpuError};
use forebay_format::{FormatError, at_least, at_most};
use forebay_store::{ReadError, StoreError};

/// `forebay_status` of the header.
pub type Status = i32;

pub const OK: Status = 0;
pub const INVALID_ARGUMENT: Status = 1;
pub const BAD_READER: Status = 2;
pub const CANNOT_OPEN: Status = 3;
pub const UNAVAILABLE: Status = 4;
pub const UNKNOWN_FILE: Status = 5;
pub const BEYOND_END: Status = 6;
pub const IO_ERROR: Status = 7;
pub const STALLED: Status = 8;
pub const CANCELLED: Status = 9;
pub const FULL: Status = 10;
pub const WRONG_THREAD: Status = 11;
pub const ENGINE_FAILED: Status = 12;
pub const OUT_OF_MEMORY: Status = 13;
pub const PANIC: Status = 14;
pub const BAD_WEIGHTS: Status = 15;
pub const BAD_FILES: Status = 16;
pub const NO_DEVICE: Status = 17;
pub const DEVICE_FAILED: Status = 18;
pub const UNKNOWN_TENSOR: Status = 19;

/// Names of the statuses, indexed by number.
pub const NAMES: [&std::ffi::CStr; 20] = [
    c"FOREBAY_OK",
    c"FOREBAY_INVALID_ARGUMENT",
    c"FOREBAY_BAD_READER",
    c"FOREBAY_CANNOT_OPEN",
    c"FOREBAY_UNAVAILABLE",
    c"FOREBAY_UNKNOWN_FILE",
    c"FOREBAY_BEYOND_END",
    c"FOREBAY_IO_ERROR",
    c"FOREBAY_STALLED",
    c"FOREBAY_CANCELLED",
    c"FOREBAY_FULL",
    c"FOREBAY_WRONG_THREAD",
    c"FOREBAY_ENGINE_FAILED",
    c"FOREBAY_OUT_OF_MEMORY",
    c"FOREBAY_PANIC",
    c"FOREBAY_BAD_WEIGHTS",
    c"FOREBAY_BAD_FILES",
    c"FOREBAY_NO_DEVICE",
    c"FOREBAY_DEVICE_FAILED",
    c"FOREBAY_UNKNOWN_TENSOR",
];

/// A status and its error message.
#[derive(Debug)]
pub struct Failure {
    pub status: Status,
    pub words: String,
}

impl Failure {
    pub fn new(status: Status, words: impl Into<String>) -> Failure {
        Failure { status, words: words.into() }
    }

    pub fn argument(words: &str) -> Failure {
        Failure::new(INVALID_ARGUMENT, words)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        let status = match &error {
            StoreError::Open { .. } | StoreError::NotAFile { .. } => CANNOT_OPEN,
            StoreError::Option { .. } => INVALID_ARGUMENT,
            StoreError::Unavailable { .. } => UNAVAILABLE,
            StoreError::UnknownFile { .. } => UNKNOWN_FILE,
            StoreError::UnexpectedEnd { .. } => BEYOND_END,
            StoreError::Read { .. } => IO_ERROR,
            StoreError::Memory { .. } | StoreError::ArenaFull { .. } => OUT_OF_MEMORY,
            StoreError::WrongThread { .. } => WRONG_THREAD,
            StoreError::Corrupt { .. } => BAD_FILES,
            StoreError::Upload { .. } => DEVICE_FAILED,
            StoreError::Interrupted => CANCELLED,
            StoreError::Block(error) => of_read(error).0,
            _ => ENGINE_FAILED,
        };
        Failure::new(status, error.to_string())
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Failure {
        let words = match &error {
            // What a C program can do is less than what these errors advise, and it gives bytes.
            #[cfg(feature = "cuda")]
            LoadError::Gpu(GpuError::Cuda(error)) => error.to_string(),
            LoadError::Gpu(GpuError::NoCuda) => {
                "this build of the library has no CUDA support".to_owned()
            }
            LoadError::DoesNotFit(DoesNotFit { needed_bytes, free_bytes }) => {
                let (needed, free) = (at_least(*needed_bytes), at_most(*free_bytes));
                format!("all weights need {needed} of memory, but {free} are free")
            }
            LoadError::DoesNotFitDevice { gpu, needed_bytes, free_bytes, total_bytes } => {
                let (needed, free) = (at_least(*needed_bytes), at_most(*free_bytes));
                let total = at_most(*total_bytes);
                format!(
                    "all weights need {needed} of device memory, but {free} of {total} are free on {gpu}"
                )
            }
            LoadError::OverBudget { gpu, needed_bytes, used_bytes, budget_bytes } => {
                let (needed, used) = (at_least(*needed_bytes), at_least(*used_bytes));
                // The caller gives this number in bytes.
                let smallest = needed_bytes + used_bytes;
                format!(
                    "all weights need {needed} of device memory beside the {used} that are in use on {gpu} without them, \
                     so vram_bytes must be at least {smallest}; it is {budget_bytes}"
                )
            }
            other => other.to_string(),
        };
        let status = match error {
            LoadError::Format(FormatError::Io { .. }) => CANNOT_OPEN,
            LoadError::Format(_) | LoadError::InPieces { .. } => BAD_FILES,
            LoadError::Interrupted => CANCELLED,
            LoadError::Store(error) => Failure::from(error).status,
            #[cfg(feature = "cuda")]
            LoadError::Gpu(GpuError::Cuda(error)) => of_cuda(&error),
            LoadError::Gpu(GpuError::NoCuda) => NO_DEVICE,
            LoadError::DoesNotFit(_)
            | LoadError::DoesNotFitDevice { .. }
            | LoadError::OverBudget { .. } => OUT_OF_MEMORY,
            LoadError::ReadBack { .. } => DEVICE_FAILED,
            LoadError::Read { cause, .. } => of_read(&cause).0,
            LoadError::Option(_) => INVALID_ARGUMENT,
            #[cfg(feature = "cuda")]
            LoadError::CuFile(_) => ENGINE_FAILED,
        };
        Failure { status, words }
    }
}

#[cfg(feature = "cuda")]
fn of_cuda(error: &CudaError) -> Status {
    match error {
        CudaError::OutOfMemory { .. } => OUT_OF_MEMORY,
        CudaError::Driver { .. } => DEVICE_FAILED,
        _ => NO_DEVICE,
    }
}

/// Returns the status and errno of one block's failure.
pub fn of_read(error: &ReadError) -> (Status, i32) {
    match error {
        ReadError::Io { source, .. } => (IO_ERROR, source.raw_os_error().unwrap_or(0)),
        ReadError::UnexpectedEnd { .. } => (BEYOND_END, 0),
        ReadError::Stalled { .. } => (STALLED, 0),
        ReadError::Cancelled { .. } => (CANCELLED, 0),
        ReadError::UnknownFile { .. } => (UNKNOWN_FILE, 0),
        ReadError::Corrupt { .. } => (BAD_FILES, 0),
        _ => (ENGINE_FAILED, 0),
    }
}
