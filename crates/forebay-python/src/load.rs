//! Loads to memory.

use std::collections::HashMap;
use std::ops::ControlFlow;

use forebay_engine::load::{Choice, ChosenRequest, DeviceRequest, DimensionSlice, load_chosen};
use pyo3::prelude::*;

use crate::errors::{of_engine, raise};
use crate::table::Table;
use crate::tensor::Tensor;
use crate::watch::Watch;

/// Ranges by name: dimension, start and stop.
pub type Slices = HashMap<String, Vec<(usize, u64, u64)>>;

/// Returns the tensors to load: those of `names`, or all. A tensor with ranges in `slices` comes once for each of them.
pub fn choices(
    py: Python<'_>,
    table: &Table,
    names: Option<Vec<String>>,
    slices: Option<Slices>,
) -> PyResult<Vec<Choice>> {
    let slices = slices.unwrap_or_default();
    let choices: Vec<Choice> = match names {
        Some(names) => {
            let find = |name: &String| Ok(Choice { tensor: table.index(py, name)?, slice: None });
            names.iter().map(find).collect::<PyResult<_>>()?
        }
        None => {
            let all = 0..table.inner.tensors().len();
            all.map(|tensor| Choice { tensor, slice: None }).collect()
        }
    };
    let mut ranges = HashMap::new();
    for (name, given) in slices {
        let tensor = table.index(py, &name)?;
        if !choices.iter().any(|choice| choice.tensor == tensor) {
            let words =
                format!("slices names tensor {name:?}, which is not among the tensors to load");
            return Err(raise(py, "OptionError", words));
        }
        ranges.insert(tensor, given);
    }
    let mut parts = Vec::with_capacity(choices.len());
    for choice in choices {
        match ranges.get(&choice.tensor) {
            None => parts.push(choice),
            Some(given) => parts.extend(given.iter().map(|&(dimension, start, stop)| {
                let slice = Some(DimensionSlice { dimension, start, stop });
                Choice { tensor: choice.tensor, slice }
            })),
        }
    }
    Ok(parts)
}

/// Returns the options of a load.
pub fn request(
    py: Python<'_>,
    table: &Table,
    device: &str,
    to_f32: bool,
) -> PyResult<ChosenRequest> {
    let gpu = match device.split_once(':') {
        None if device == "cpu" => None,
        None if device == "cuda" => Some(0),
        Some(("cuda", number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
            number.parse().ok().map(Some).ok_or(()).map_err(|()| bad_device(py, device))?
        }
        _ => return Err(bad_device(py, device)),
    };
    let device = gpu.map(DeviceRequest::new);
    let storage = table.storage.clone();
    Ok(ChosenRequest { storage, device, to_f32, ..ChosenRequest::default() })
}

fn bad_device(py: Python<'_>, device: &str) -> PyErr {
    let words = format!("device is {device:?}, but \"cpu\", \"cuda\" or \"cuda:N\" is needed");
    raise(py, "OptionError", words)
}

/// Loads tensors and returns them in the order of `names`, or of the files.
#[pyfunction]
#[pyo3(signature = (table, names, slices, device, to_f32, progress))]
pub fn load(
    py: Python<'_>,
    table: &Table,
    names: Option<Vec<String>>,
    slices: Option<Slices>,
    device: &str,
    to_f32: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<Vec<Tensor>> {
    let choices = choices(py, table, names, slices)?;
    let request = request(py, table, device, to_f32)?;
    let inner = &table.inner;
    let mut watch = Watch::new(progress.as_ref(), request.interrupt.clone());
    let loaded = py.detach(|| {
        let mut tell = |done, total| match watch.tell(done, total) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        };
        load_chosen(inner, &choices, &request, &mut tell)
    });
    match loaded {
        Ok(tensors) => {
            // A callback may have failed at the very end, when there was nothing left to stop.
            watch.stopped.map_or(Ok(()), Err)?;
            Ok(tensors.into_iter().map(|inner| Tensor { inner }).collect())
        }
        Err(error) => Err(of_engine(py, &error.into(), watch.stopped)),
    }
}
