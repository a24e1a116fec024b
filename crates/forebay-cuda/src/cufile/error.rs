//! Errors of cuFile, as messages.

use std::time::Duration;

use crate::CudaError;

/// Reasons why cuFile cannot be used or a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CuFileError {
    #[error(
        "cuFile (GPUDirect Storage) is not there: {why}; it is part of the CUDA toolkit, and LD_LIBRARY_PATH must name \
         its folder unless that is the usual one"
    )]
    NotFound { why: String },
    #[error(
        "the library libcufile has no function {name}: it is too old, or something else has its name"
    )]
    MissingFunction { name: &'static str },
    #[error(
        "cuFile: starting it has not ended within {} s; version 1.20 never ends where there is no /proc/modules",
        after.as_secs()
    )]
    NoAnswer { after: Duration },
    #[error("cuFile: {call} failed: {} (error {code})", meaning(*code))]
    Refused { call: &'static str, code: i32 },
    /// The driver's own error number, where cuFile passes it on.
    #[error("cuFile: {call} failed: the driver answered error {code}")]
    Driver { call: &'static str, code: i32 },
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// `CU_FILE_CUDA_DRIVER_ERROR`; the driver's error number has the details.
const CUDA_DRIVER_ERROR: i32 = 5011;
/// `CU_FILE_DRIVER_ALREADY_OPEN`.
pub(super) const ALREADY_OPEN: i32 = 5026;

impl CuFileError {
    pub(super) fn check(call: &'static str, code: i32, cuda: i32) -> Result<(), CuFileError> {
        match code {
            0 => Ok(()),
            CUDA_DRIVER_ERROR if cuda != 0 => Err(CuFileError::Driver { call, code: cuda }),
            _ => Err(CuFileError::Refused { call, code }),
        }
    }
}

/// Returns the meaning of a `CUfileOpError` of cufile.h.
fn meaning(code: i32) -> &'static str {
    match code {
        5001 => {
            "its driver cannot be started: nvidia-fs is not loaded, and cufile.json (or the environment, \
             CUFILE_ALLOW_COMPAT_MODE) does not allow to do without"
        }
        5002 | 5003 => "it refuses its own settings (cufile.json)",
        5004 | 5005 => "nvidia-fs has another version than the library needs",
        5006 => "it is being closed",
        5007 => "this platform is not supported",
        5008 => "reads of this file are not supported: its file system or the disk under it",
        5009 => "this GPU is not supported",
        5010 => "nvidia-fs failed",
        5011 => "the GPU's driver failed",
        5012..=5014 => "an address is no device memory that it can reach",
        5015 => "the memory belongs to another context of the GPU",
        5016 | 5017 => "the memory cannot be mapped as a whole",
        5018 => "the file is neither a regular file nor a block device",
        5019 | 5020 => "the file has to be opened with O_DIRECT",
        5022 => "an argument is wrong",
        5023 => "the memory is registered already",
        5024 => "the memory is not registered",
        5025 => "it may not be used by this user",
        5026 => "it is open already",
        5027 => {
            "the file cannot be made known: cuFile asks udev what its disk is, and a container may have no /run/udev \
             (cufile.log says more)"
        }
        5028 => "the file is registered already",
        5029 => "the device was not found",
        5030 => "an error inside the library (cufile.log may say more)",
        5031 => "the file's descriptor cannot be used",
        5033 => "nvidia-fs could not be set up",
        5034 => "reads are switched off (cufile.json)",
        _ => "for a reason that only the library knows (cufile.log may say more)",
    }
}
