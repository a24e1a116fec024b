//! Tensors as Python objects, and their capsules for other libraries.

use std::ffi::{CStr, c_void};
use std::ptr::with_exposed_provenance_mut;

use forebay_dlpack::{
    DataType, Description, Unversioned, Versioned, data_type_of_stored, device_numbers,
    drop_unversioned, drop_versioned, strides,
};
use forebay_engine::load::LoadedTensor;
use forebay_format::{StoredType, TensorType};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::raise;

const VERSIONED: &CStr = c"dltensor_versioned";
const UNVERSIONED: &CStr = c"dltensor";

/// A tensor in memory. Other libraries take it through DLPack.
#[pyclass(frozen, module = "forebay._native")]
pub struct Tensor {
    pub inner: LoadedTensor,
}

/// Returns the shape in memory: rows of elements that share bytes are rows of bytes.
pub fn shape_of_bytes(ty: StoredType, shape: &[u64]) -> Vec<u64> {
    let mut shape = shape.to_vec();
    if let (true, Some(last)) = (ty.block_elements() > 1, shape.last_mut()) {
        *last = ty.row_bytes(*last).unwrap_or(0);
    }
    shape
}

#[pymethods]
impl Tensor {
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// Name of the type as in the format, such as "BF16" or "Q4_K".
    #[getter]
    fn dtype(&self) -> &'static str {
        self.inner.ty.name()
    }

    /// Shape in memory.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        shape_of_bytes(self.inner.ty, &self.inner.shape)
    }

    /// Shape in elements.
    #[getter]
    fn element_shape(&self) -> Vec<u64> {
        self.inner.shape.clone()
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes
    }

    /// Bytes of the memory that this tensor keeps alive.
    #[getter]
    fn memory_bytes(&self) -> u64 {
        self.inner.memory.bytes()
    }

    /// "cpu" or "cuda:N".
    #[getter]
    fn device(&self) -> String {
        self.inner.device.map_or("cpu".to_owned(), |gpu| format!("cuda:{gpu}"))
    }

    /// Returns the same memory with elements of another type of the same size.
    fn view(&self, py: Python<'_>, dtype: &str) -> PyResult<Tensor> {
        let ty = match dtype {
            "BOOL" => Some(TensorType::Bool),
            name => TensorType::from_name(name),
        };
        let old = data_type_of_stored(self.inner.ty).bits;
        let ty = ty.map(StoredType::Tensor).filter(|ty| data_type_of_stored(*ty).bits == old);
        let Some(ty) = ty.filter(|ty| ty.block_elements() == 1) else {
            let words = format!(
                "tensor {:?} of type {} cannot be seen as {dtype}",
                self.inner.name,
                self.inner.ty.name()
            );
            return Err(raise(py, "OptionError", words));
        };
        let shape = shape_of_bytes(self.inner.ty, &self.inner.shape);
        Ok(Tensor { inner: LoadedTensor { ty, shape, ..self.inner.clone() } })
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        device_numbers(self.inner.device)
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // A load is complete when it returns, so there is nothing to wait for on any stream.
        drop(stream);
        if copy == Some(true) {
            let words = "a copy was asked for; copy the tensor that shares this memory";
            return Err(PyBufferError::new_err(words));
        }
        if dl_device.is_some_and(|device| device != self.__dlpack_device__()) {
            let words = format!("the tensor is on {}; move it after the import", self.device());
            return Err(PyBufferError::new_err(words));
        }
        let description = self.description()?;
        let memory = self.inner.memory.clone();
        match max_version.is_some_and(|(major, _)| major >= 1) {
            true => {
                let managed = description.versioned(memory);
                // SAFETY: the capsule holds a new managed tensor, and its destructor matches.
                unsafe { capsule(py, managed.cast(), VERSIONED, free_versioned) }
                    // SAFETY: without a capsule, nothing else refers to the managed tensor.
                    .inspect_err(|_| unsafe { drop_versioned(managed) })
            }
            false => {
                let managed = description.unversioned(memory);
                // SAFETY: the capsule holds a new managed tensor, and its destructor matches.
                unsafe { capsule(py, managed.cast(), UNVERSIONED, free_unversioned) }
                    // SAFETY: without a capsule, nothing else refers to the managed tensor.
                    .inspect_err(|_| unsafe { drop_unversioned(managed) })
            }
        }
    }

    fn __repr__(&self) -> String {
        let (name, shape) = (&self.inner.name, self.shape());
        format!(
            "forebay.Tensor({name:?}, dtype={:?}, shape={shape:?}, device={:?})",
            self.dtype(),
            self.device()
        )
    }
}

impl Tensor {
    fn description(&self) -> PyResult<Description> {
        let LoadedTensor { ty, address, stride, device, .. } = &self.inner;
        let shape: Box<[i64]> = self.shape().iter().map(|&dim| dim as i64).collect();
        let data_type: DataType = data_type_of_stored(*ty);
        let element_bytes = u64::from(data_type.bits) / 8;
        let inner = shape.iter().skip(1).fold(element_bytes, |bytes, dim| bytes * *dim as u64);
        let strides = strides(&shape, stride.unwrap_or(inner), element_bytes).ok_or_else(|| {
            let words = "the entries of the tensor are no whole number of elements apart";
            PyBufferError::new_err(words)
        })?;
        // On the host, the loader has exposed the provenance of this memory. On a GPU, the address is the device's.
        let data = with_exposed_provenance_mut::<c_void>(*address as usize);
        Ok(Description { data, gpu: *device, data_type, shape, strides })
    }
}

/// # Safety
/// `pointer` is what `destructor` frees if the capsule keeps its name.
unsafe fn capsule<'py>(
    py: Python<'py>,
    pointer: *mut c_void,
    name: &'static CStr,
    destructor: unsafe extern "C" fn(*mut ffi::PyObject),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the name lives forever, and the pointer is not null.
    let made = unsafe { ffi::PyCapsule_New(pointer, name.as_ptr(), Some(destructor)) };
    // SAFETY: the call returns a new reference, or null with an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, made) }
}

/// Returns the pointer of a capsule that no consumer has renamed.
///
/// # Safety
/// `capsule` is a capsule.
unsafe fn untaken(capsule: *mut ffi::PyObject, name: &CStr) -> Option<*mut c_void> {
    // Neither call touches an exception that is in flight, as the capsule is valid.
    // SAFETY: as promised.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return None;
    }
    // SAFETY: it is a valid capsule of this name.
    Some(unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) })
}

/// # Safety
/// Python calls it once, for a capsule that [`capsule`] made with the name [`VERSIONED`].
unsafe extern "C" fn free_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as promised.
    if let Some(managed) = unsafe { untaken(capsule, VERSIONED) } {
        // SAFETY: no consumer has taken it, so it was not deleted.
        unsafe { drop_versioned(managed.cast::<Versioned>()) };
    }
}

/// # Safety
/// Python calls it once, for a capsule that [`capsule`] made with the name [`UNVERSIONED`].
unsafe extern "C" fn free_unversioned(capsule: *mut ffi::PyObject) {
    // SAFETY: as promised.
    if let Some(managed) = unsafe { untaken(capsule, UNVERSIONED) } {
        // SAFETY: no consumer has taken it, so it was not deleted.
        unsafe { drop_unversioned(managed.cast::<Unversioned>()) };
    }
}
