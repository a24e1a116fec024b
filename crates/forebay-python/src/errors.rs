//! Exceptions for errors of loads and of engines.

use std::error::Error;
use std::io;
use std::path::Path;

use forebay_engine::load::LoadError;
use forebay_engine::plan::PlanError;
use forebay_engine::{EngineError, KvDiskError, KvFolderError, RoutingError};
use forebay_format::FormatError;
use forebay_library::Error as LibraryError;
use forebay_model::ModelError;
use forebay_store::{OutputError, ReadError, StoreError};
use pyo3::exceptions::{PyKeyboardInterrupt, PyOSError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Returns an exception of a class of `forebay._errors`.
pub fn raise(py: Python<'_>, class: &str, words: String) -> PyErr {
    let found = py.import("forebay._errors").and_then(|module| module.getattr(class));
    match found.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
        Ok(class) => PyErr::from_type(class, words),
        Err(error) => error,
    }
}

/// Returns an error in words, with its causes unless they are in the words already.
fn words(error: &dyn Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !words.contains(&more) {
            words = format!("{words}: {more}");
        }
        cause = error.source();
    }
    words
}

/// Numbers of errors, the same on every Linux.
mod errno {
    pub const NOT_FOUND: i32 = 2;
    pub const DENIED: i32 = 13;
}

/// Returns the exception of an error of the system about a file, such as `FileNotFoundError`.
fn of_system(file: &Path, source: &io::Error) -> Option<PyErr> {
    // Object stores have no numbers.
    let number = source.raw_os_error().or(match source.kind() {
        io::ErrorKind::NotFound => Some(errno::NOT_FOUND),
        io::ErrorKind::PermissionDenied => Some(errno::DENIED),
        _ => None,
    })?;
    let words = source.to_string();
    let words = words.split(" (os error").next().unwrap_or_default().to_owned();
    // Python chooses the subclass of OSError by the number.
    Some(PyOSError::new_err((number, words, file.as_os_str().to_owned())))
}

/// Returns the exception for an error of a load. A load that was stopped has the reason in `stopped`.
pub fn of_engine(py: Python<'_>, error: &EngineError, stopped: Option<PyErr>) -> PyErr {
    let about_file = match error {
        EngineError::Format(FormatError::Io { path, source })
        | EngineError::Store(StoreError::Open { file: path, source }) => of_system(path, source),
        _ => None,
    };
    if let Some(error) = about_file {
        return error;
    }
    let class = match error {
        EngineError::Interrupted => {
            return stopped.unwrap_or_else(|| PyKeyboardInterrupt::new_err(()));
        }
        EngineError::Format(FormatError::Io { .. }) => "ReadError",
        EngineError::Format(_) => "FormatError",
        EngineError::Option(_)
        | EngineError::Store(StoreError::Url { .. } | StoreError::Option { .. })
        | EngineError::EmptyPrompt
        | EngineError::Model(
            ModelError::ContextFull { .. }
            | ModelError::TokenOutOfRange { .. }
            | ModelError::NoMtp { .. },
        ) => "OptionError",
        EngineError::KvDisk(error) => return of_kv_disk(py, error),
        EngineError::Queue(_) => "QueueFullError",
        EngineError::DoesNotFit(_) | EngineError::Store(StoreError::Memory { .. }) => {
            "OutOfMemoryError"
        }
        EngineError::Store(StoreError::Corrupt { .. }) => "FormatError",
        EngineError::Store(StoreError::Upload { .. }) => "DeviceError",
        EngineError::Store(_) => "ReadError",
        EngineError::Gpu(_) => "DeviceError",
        EngineError::Load(error) => match &**error {
            LoadError::InPieces { .. }
            | LoadError::Read { cause: ReadError::Corrupt { .. }, .. } => "FormatError",
            LoadError::DoesNotFitDevice { .. } | LoadError::OverBudget { .. } => "OutOfMemoryError",
            LoadError::Read { .. } => "ReadError",
            _ => "DeviceError",
        },
        EngineError::Plan(error) if matches!(**error, PlanError::CacheDoesNotFit { .. }) => {
            "OutOfMemoryError"
        }
        EngineError::DenseModel { .. } | EngineError::Routing(RoutingError::NoExperts) => {
            "OptionError"
        }
        EngineError::NoTokenizer { .. } => "FormatError",
        error if error.needed_bytes().is_some() => "OutOfMemoryError",
        _ => "Error",
    };
    raise(py, class, words(error))
}

fn of_kv_disk(py: Python<'_>, error: &KvDiskError) -> PyErr {
    let about_file = match error {
        KvDiskError::Io { path, source } => of_system(path, source),
        _ => None,
    };
    let class = match error {
        KvDiskError::Io { .. } | KvDiskError::InUse { .. } => "WriteError",
        KvDiskError::Version { .. } => "FormatError",
        KvDiskError::OthersMayRead { .. }
        | KvDiskError::NotAStore { .. }
        | KvDiskError::Encrypted { .. }
        | KvDiskError::NotEncrypted { .. }
        | KvDiskError::WrongSecret { .. } => "OptionError",
    };
    about_file.unwrap_or_else(|| raise(py, class, words(error)))
}

/// Returns the exception of a folder of KV blocks, or of its key.
pub fn of_kv_folder(py: Python<'_>, error: &KvFolderError) -> PyErr {
    match error {
        KvFolderError::Disk(error) => of_kv_disk(py, error),
        KvFolderError::KeyUnreadable { path, source } => {
            of_system(path, source).unwrap_or_else(|| raise(py, "ReadError", words(error)))
        }
        KvFolderError::NoRam
        | KvFolderError::NotF16
        | KvFolderError::OthersMayReadKey { .. }
        | KvFolderError::KeyTooShort { .. } => raise(py, "OptionError", words(error)),
    }
}

/// Returns the exception of the model library for the name of a model.
pub fn of_library(py: Python<'_>, model: &Path, error: &LibraryError) -> PyErr {
    let class = match error {
        LibraryError::Io { path, source } => {
            return of_system(path, source).unwrap_or_else(|| raise(py, "ReadError", words(error)));
        }
        error if error.is_not_found() => return no_model(model, error.to_string()),
        LibraryError::Damaged { .. } => "FormatError",
        _ => "OptionError",
    };
    raise(py, class, words(error))
}

/// Returns a `FileNotFoundError` with words of its own.
pub fn no_model(model: &Path, words: String) -> PyErr {
    PyOSError::new_err((errno::NOT_FOUND, words, model.as_os_str().to_owned()))
}

pub fn of_format(py: Python<'_>, error: FormatError) -> PyErr {
    of_engine(py, &EngineError::Format(error), None)
}

pub fn of_output(py: Python<'_>, error: &OutputError) -> PyErr {
    raise(py, "WriteError", words(error))
}
