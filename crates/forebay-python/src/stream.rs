//! Tensors one after the other, with bounded memory.

use std::sync::{Arc, Mutex, PoisonError};

use forebay_engine::load::{Next, StreamOrder, TensorStream};
use pyo3::prelude::*;

use crate::errors::{of_engine, raise};
use crate::load::{Slices, choices, request};
use crate::table::Table;
use crate::tensor::Tensor;
use crate::watch::{LOOK, Looks};

/// Tensors in the order of the files or of their names in the call. A thread reads ahead.
#[pyclass(frozen, module = "forebay._native")]
pub struct Stream {
    /// `None` once the stream is closed.
    inner: Mutex<Option<TensorStream>>,
    /// Gets the bytes that are done and those in total.
    progress: Option<Py<PyAny>>,
    told: Mutex<Told>,
}

/// The last report of progress.
#[derive(Default)]
struct Told {
    looks: Looks,
    done: Option<u64>,
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (table, names, slices, device, to_f32, budget, in_order_of_names=false, progress=None))]
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
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Stream> {
        let choices = choices(py, table, names, slices)?;
        let request = request(py, table, device, to_f32)?;
        let table = Arc::clone(&table.inner);
        let order = if in_order_of_names { StreamOrder::Choices } else { StreamOrder::Files };
        let started = py.detach(|| TensorStream::start(table, choices, request, order, budget));
        let started = started.map_err(|error| of_engine(py, &error.into(), None))?;
        Ok(Stream { inner: Mutex::new(Some(started)), progress, told: Mutex::default() })
    }

    /// Returns the next tensors, or None at the end.
    fn next_batch(&self, py: Python<'_>) -> PyResult<Option<Vec<Tensor>>> {
        loop {
            let next = py.detach(|| {
                let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
                inner.as_mut().map(|stream| (stream.next(LOOK), stream.progress()))
            });
            let Some((next, progress)) = next else {
                return Err(raise(py, "Error", "the stream of tensors is closed".into()));
            };
            if next.is_ok()
                && let Err(error) = self.tell(py, progress)
            {
                self.close(py);
                return Err(error);
            }
            match next.map_err(|error| of_engine(py, &error.into(), None))? {
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

impl Stream {
    /// Calls the function for progress, if there is one and it is time.
    fn tell(&self, py: Python<'_>, (done, total): (u64, u64)) -> PyResult<()> {
        let Some(progress) = &self.progress else { return Ok(()) };
        {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            if told.done == Some(done) || !told.looks.is_due(done >= total) {
                return Ok(());
            }
            told.done = Some(done);
        }
        progress.call1(py, (done, total)).map(drop)
    }
}
