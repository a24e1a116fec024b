//! The table of tensors of files, opened for loads.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use forebay_format::WeightsTable;
use pyo3::prelude::*;

use crate::errors::{of_format, raise};
use crate::tensor::shape_of_bytes;

/// The tensors of safetensors files, of a GGUF file or of a pack. Only headers are read.
#[pyclass(frozen, module = "forebay._native")]
pub struct Table {
    pub inner: Arc<WeightsTable>,
}

/// Name of the type, shape in elements, shape in memory, and bytes.
type Facts = (&'static str, Vec<u64>, Vec<u64>, u64);

#[pymethods]
impl Table {
    #[new]
    fn new(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Table> {
        let opened = py.detach(|| WeightsTable::open(&paths));
        let inner = Arc::new(opened.map_err(|error| of_format(py, error))?);
        Ok(Table { inner })
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
