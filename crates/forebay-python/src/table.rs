//! The table of tensors of files, opened for loads.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use forebay_format::{FormatError, WeightsTable};
use forebay_store::{Extent, Interrupt, Storage};
use pyo3::prelude::*;

use crate::errors::{of_engine, of_format, raise};
use crate::tensor::shape_of_bytes;
use crate::watch::LOOK;

/// The tensors of safetensors files, of a GGUF file or of a pack. Only headers are read.
#[pyclass(frozen, module = "forebay._native")]
pub struct Table {
    pub inner: Arc<WeightsTable>,
    /// Place of the files.
    pub storage: Storage,
}

/// Name of the type, shape in elements, shape in memory, and bytes.
type Facts = (&'static str, Vec<u64>, Vec<u64>, u64);

#[pymethods]
impl Table {
    #[new]
    #[pyo3(signature = (paths, storage_options = None))]
    fn new(
        py: Python<'_>,
        paths: Vec<PathBuf>,
        storage_options: Option<HashMap<String, String>>,
    ) -> PyResult<Table> {
        let interrupt = Interrupt::new();
        let settings = storage_options.unwrap_or_default();
        let found = py.detach(|| Storage::of(&paths, settings, &interrupt));
        let (storage, names) = found.map_err(|error| of_engine(py, &error.into(), None))?;
        let opened = match &storage {
            Storage::Disk => py.detach(|| WeightsTable::open(&names)),
            #[allow(unreachable_patterns, reason = "without object stores, there is only the disk")]
            _ => open_remote(py, &storage, names, &interrupt)?,
        };
        let inner = Arc::new(opened.map_err(|error| of_format(py, error))?);
        Ok(Table { inner, storage })
    }

    /// Returns the names in the order of the data.
    fn names(&self) -> Vec<&str> {
        self.inner.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
    }

    /// Returns the `__metadata__` of a single safetensors file, or None.
    fn metadata(&self) -> Option<BTreeMap<String, String>> {
        self.inner.metadata.clone()
    }

    fn files(&self) -> Vec<PathBuf> {
        self.inner.files.clone()
    }

    /// Returns the name of the type, the shape in elements, the shape in memory, and the bytes of a tensor.
    fn facts(&self, py: Python<'_>, name: &str) -> PyResult<Facts> {
        let tensor = &self.inner.tensors()[self.index(py, name)?];
        let (ty, shape) = (tensor.ty, tensor.shape.clone());
        Ok((ty.name(), shape, shape_of_bytes(ty, &tensor.shape), tensor.bytes()))
    }

    /// Returns the number of the file of a tensor, its first byte there, and its bytes.
    fn place(&self, py: Python<'_>, name: &str) -> PyResult<(u32, u64, u64)> {
        let Extent { file, offset, length } = self.inner.tensors()[self.index(py, name)?].extent;
        Ok((file.0, offset, length))
    }
}

/// Opens files on a thread of their own, because servers may answer late or never. This one looks at the signals of the
/// interpreter.
fn open_remote(
    py: Python<'_>,
    storage: &Storage,
    names: Vec<PathBuf>,
    interrupt: &Interrupt,
) -> PyResult<Result<WeightsTable, FormatError>> {
    let (tell, told) = mpsc::channel();
    let storage = storage.clone();
    let open = move || {
        // Nobody listens after an interrupt.
        let _ = tell.send(WeightsTable::open_in(&storage, &names));
    };
    thread::Builder::new().name("open-table".into()).spawn(open)?;
    let told = Mutex::new(told);
    loop {
        let told = || told.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(LOOK);
        match py.detach(told) {
            Ok(opened) => return Ok(opened),
            Err(RecvTimeoutError::Timeout) => {
                py.check_signals().inspect_err(|_| interrupt.request())?;
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(raise(py, "Error", "opening the files has failed".into()));
            }
        }
    }
}

impl Table {
    pub fn index(&self, py: Python<'_>, name: &str) -> PyResult<usize> {
        self.inner.find(name).ok_or_else(|| {
            let files: Vec<String> =
                self.inner.files.iter().take(3).map(|file| file.display().to_string()).collect();
            let more = if self.inner.files.len() > 3 { ", ..." } else { "" };
            let words = format!("there is no tensor {name:?} in {}{more}", files.join(", "));
            raise(py, "TensorNotFoundError", words)
        })
    }
}
