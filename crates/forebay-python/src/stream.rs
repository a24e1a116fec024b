//! Tensors one after the other, with bounded memory.

use std::sync::{Arc, Mutex, PoisonError};

use forebay_engine::load::{Next, StreamOrder, TensorStream};
use pyo3::prelude::*;

use crate::errors::{of_engine, raise};
use crate::load::{LOOK, Slices, choices, request};
use crate::table::Table;
use crate::tensor::Tensor;

/// Tensors in the order of the files or of their names in the call. A thread reads ahead.
#[pyclass(frozen, module = "forebay._native")]
pub struct Stream {
    /// `None` once the stream is closed.
    inner: Mutex<Option<TensorStream>>,
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (table, names, slices, device, to_f32, budget, in_order_of_names=false))]
    #[expect(clippy::too_many_arguments, reason = "Python's wrapper passes them by name")]
    fn new(
        py: Python<'_>,
        table: &Table,
        names: Option<Vec<String>>,
        slices: Option<Slices>,
        device: &str,
        to_f32: bool,
        budget: u64,
        in_order_of_names: bool,
    ) -> PyResult<Stream> {
        let choices = choices(py, table, names, slices)?;
        let request = request(py, table, device, to_f32)?;
        let table = Arc::clone(&table.inner);
        let order = if in_order_of_names { StreamOrder::Choices } else { StreamOrder::Files };
        let started = py.detach(|| TensorStream::start(table, choices, request, order, budget));
        let started = started.map_err(|error| of_engine(py, &error, None))?;
        Ok(Stream { inner: Mutex::new(Some(started)) })
    }

    /// Returns the next tensors, or None at the end.
    fn next_batch(&self, py: Python<'_>) -> PyResult<Option<Vec<Tensor>>> {
        loop {
            let next = py.detach(|| {
                let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                inner.as_mut().map(|stream| stream.next(LOOK))
            });
            let Some(next) = next else {
                return Err(raise(py, "Error", "the stream of tensors is closed".into()));
            };
            match next.map_err(|error| of_engine(py, &error, None))? {
                Next::Tensors(tensors) => {
                    return Ok(Some(tensors.into_iter().map(|inner| Tensor { inner }).collect()));
                }
                Next::End => return Ok(None),
                Next::NotYet => py.check_signals()?,
            }
        }
    }

    /// Stops reading and frees what was read ahead.
    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            let taken = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(taken);
        });
    }
}
