//! Streams of the weights of PyTorch's modules. `forebay.torch` has the hooks that drive them.

use std::sync::{Arc, Mutex, PoisonError};

use forebay_codec::{Float, Weights};
#[cfg(feature = "cuda")]
use forebay_cuda::{CallersContext, ForeignStream};
use forebay_engine::load::{LoadedTensor, TensorMemory};
use forebay_format::{StoredType, TensorType};
use forebay_modules::{
    CodedGroup, DeviceError, GroupOptions, GroupTensor, HostDevice, StreamError, Streamer,
    StreamerOptions, encode,
};
#[cfg(feature = "cuda")]
use forebay_modules::{CudaDevice, CudaOptions};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::raise;
use crate::tensor::Tensor;

/// Weights of modules in RAM, coded without loss.
#[pyclass(frozen, module = "forebay._native")]
pub struct CodedModules {
    groups: Mutex<Vec<Group>>,
    threads: usize,
}

#[derive(Clone)]
struct Group {
    coded: Arc<CodedGroup>,
    stays: bool,
}

/// Returns how the elements of a type are coded.
fn weights_of(dtype: &str) -> Option<Weights> {
    let float = match dtype {
        "bfloat16" => Float::Bf16,
        "float16" => Float::F16,
        "float8_e4m3fn" => Float::F8E4M3,
        "float8_e5m2" => Float::F8E5M2,
        _ => return None,
    };
    Some(Weights::Plain(float))
}

fn failed(py: Python<'_>, error: &dyn std::fmt::Display) -> PyErr {
    raise(py, "Error", error.to_string())
}

fn of_stream(py: Python<'_>, error: &StreamError) -> PyErr {
    let class = match error {
        StreamError::TooSmall { .. } | StreamError::InUse { .. } => "OutOfMemoryError",
        StreamError::Closed => "Error",
        StreamError::Device(_) => "DeviceError",
    };
    raise(py, class, error.to_string())
}

impl CodedModules {
    fn group(&self, py: Python<'_>, group: usize) -> PyResult<Group> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let found = groups.get(group).cloned();
        found.ok_or_else(|| failed(py, &format!("there is no group {group} of weights")))
    }
}

#[pymethods]
impl CodedModules {
    #[new]
    fn new(threads: usize) -> CodedModules {
        CodedModules { groups: Mutex::default(), threads }
    }

    /// Codes tensors that are used together: their bytes and PyTorch's names of their types. With `codes` false, they stay plain. Returns
    /// the number of the group.
    fn add(
        &self,
        py: Python<'_>,
        tensors: Vec<(PyBuffer<u8>, String)>,
        stays: bool,
        codes: bool,
    ) -> PyResult<usize> {
        let copies = tensors.iter().map(|(buffer, dtype)| {
            let weights = weights_of(dtype).filter(|_| codes);
            Ok((buffer.to_vec(py)?, weights))
        });
        let copies = copies.collect::<PyResult<Vec<_>>>()?;
        drop(tensors);
        let coded = py.detach(|| {
            let tensors =
                copies.iter().map(|(bytes, weights)| GroupTensor { bytes, weights: *weights });
            encode(&tensors.collect::<Vec<_>>(), self.threads)
        });
        let coded = Arc::new(coded.map_err(|error| failed(py, &error))?);
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.push(Group { coded, stays });
        Ok(groups.len() - 1)
    }

    /// Returns where each tensor of a group begins in it, in bytes.
    fn places(&self, py: Python<'_>, group: usize) -> PyResult<Vec<u64>> {
        let group = self.group(py, group)?;
        Ok(group.coded.tensors().iter().map(|of| of.at).collect())
    }

    /// Returns the bytes of one tensor.
    fn read<'py>(
        &self,
        py: Python<'py>,
        group: usize,
        tensor: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let group = self.group(py, group)?;
        let decoded = py.detach(|| group.coded.decode_tensor(tensor));
        Ok(PyBytes::new(py, &decoded.map_err(|error| failed(py, &error))?))
    }

    /// Returns the bytes of all groups when they are decoded, and those in RAM.
    fn sizes(&self) -> (u64, u64) {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |of: fn(&CodedGroup) -> u64| groups.iter().map(|group| of(&group.coded)).sum();
        (sum(CodedGroup::bytes), sum(CodedGroup::coded_bytes))
    }
}

enum Stream {
    Host(Streamer<HostDevice>),
    #[cfg(feature = "cuda")]
    Cuda(Streamer<CudaDevice>, usize),
}

/// Calls the same for a stream on each kind of device.
macro_rules! with_stream {
    ($of:expr, $stream:ident => $call:expr) => {
        match &*$of {
            Stream::Host($stream) => $call,
            #[cfg(feature = "cuda")]
            Stream::Cuda($stream, _) => $call,
        }
    };
}

/// The weights of modules in the memory of a device, a part of them at a time.
#[pyclass(frozen, module = "forebay._native")]
pub struct ModuleStream(Arc<Stream>);

#[pymethods]
impl ModuleStream {
    /// `units` are the groups of each module, `orders` the modules of each root in a likely order, `gpu` the number of a GPU or None
    /// for RAM, and `memory` the bytes there.
    #[new]
    fn new(
        py: Python<'_>,
        weights: &CodedModules,
        units: Vec<Vec<usize>>,
        orders: Vec<Vec<usize>>,
        gpu: Option<usize>,
        memory: u64,
        pinned: u64,
    ) -> PyResult<ModuleStream> {
        let groups = weights.groups.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let groups = groups.into_iter().map(|group| {
            let (bytes, stays) = (group.coded.bytes(), group.stays);
            GroupOptions { weights: group.coded, bytes, stays }
        });
        let options =
            StreamerOptions { groups: groups.collect(), units, predictions: orders, bytes: memory };
        let threads = weights.threads;
        let made = py.detach(move || match gpu {
            None => {
                let device = Arc::new(HostDevice::new());
                Ok(Stream::Host(Streamer::new(device, options)?))
            }
            Some(ordinal) => on_gpu(ordinal, options, pinned, threads),
        });
        Ok(ModuleStream(Arc::new(made.map_err(|error| of_stream(py, &error))?)))
    }

    fn begin(&self, root: usize) {
        with_stream!(self.0, stream => stream.begin(root));
    }

    fn end(&self) {
        with_stream!(self.0, stream => stream.end());
    }

    /// Returns where the groups of a module begin in the memory, which work of `queue` may use until `release`.
    fn acquire(&self, py: Python<'_>, unit: usize, queue: u64) -> PyResult<Vec<u64>> {
        let places = py.detach(|| match &*self.0 {
            Stream::Host(stream) => stream.acquire(unit, queue),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream, _) => {
                let _context = CallersContext::remember();
                stream.acquire(unit, queue_of(queue))
            }
        });
        places.map_err(|error| of_stream(py, &error))
    }

    fn release(&self, py: Python<'_>, unit: usize, queue: u64) -> PyResult<()> {
        let released = py.detach(|| match &*self.0 {
            Stream::Host(stream) => stream.release(unit, queue),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream, _) => {
                let _context = CallersContext::remember();
                stream.release(unit, queue_of(queue))
            }
        });
        released.map_err(|error| of_stream(py, &error))
    }

    /// Returns memory as a tensor of bytes: of the group at this place in RAM, or all memory of a GPU.
    fn memory(&self, at: u64) -> Tensor {
        let (address, bytes, device, memory) = match &*self.0 {
            Stream::Host(stream) => {
                let memory = stream.device().memory(at);
                let bytes = memory.bytes().len() as u64;
                // DLPack turns the number into a pointer again.
                let address = memory.bytes().as_ptr().expose_provenance() as u64;
                (address, bytes, None, TensorMemory::of_owner(memory, bytes))
            }
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream, ordinal) => {
                let memory = stream.device().memory().clone();
                let (address, bytes) = (memory.ptr::<u8>().address(), memory.bytes() as u64);
                (address, bytes, Some(*ordinal), TensorMemory::of_owner(memory, bytes))
            }
        };
        let (ty, shape) = (StoredType::Tensor(TensorType::U8), vec![bytes]);
        let (name, memory) = ("weights".to_owned(), Arc::new(memory));
        Tensor {
            inner: LoadedTensor { name, ty, shape, address, bytes, stride: None, device, memory },
        }
    }

    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let of = with_stream!(self.0, stream => stream.statistics());
        let all = PyDict::new(py);
        all.set_item("passes", of.passes)?;
        all.set_item("deviations", of.deviations)?;
        all.set_item("loads", of.loads)?;
        all.set_item("loaded_bytes", of.loaded_bytes)?;
        all.set_item("late_loads", of.late_loads)?;
        all.set_item("waited_seconds", of.waited.as_secs_f64())?;
        Ok(all)
    }

    /// Stops, and waits until the device no longer uses the memory.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let closed = py.detach(|| match &*self.0 {
            Stream::Host(stream) => stream.close(),
            #[cfg(feature = "cuda")]
            Stream::Cuda(stream, _) => {
                let _context = CallersContext::remember();
                stream.close()?;
                match stream.device().is_damaged()? {
                    false => Ok(()),
                    true => Err(DeviceError("weights in RAM were damaged".into()).into()),
                }
            }
        });
        closed.map_err(|error| of_stream(py, &error))
    }
}

#[cfg(feature = "cuda")]
fn queue_of(handle: u64) -> ForeignStream {
    // SAFETY: `forebay.torch` passes PyTorch's current stream of the same GPU, which PyTorch never destroys.
    unsafe { ForeignStream::of_handle(handle) }
}

#[cfg(feature = "cuda")]
fn on_gpu(
    ordinal: usize,
    options: StreamerOptions<Arc<CodedGroup>>,
    pinned_bytes: u64,
    threads: usize,
) -> Result<Stream, StreamError> {
    let _context = CallersContext::remember();
    let bytes = options.bytes;
    let device = CudaDevice::open(&CudaOptions { ordinal, bytes, pinned_bytes, threads })?;
    Ok(Stream::Cuda(Streamer::new(Arc::new(device), options)?, ordinal))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(
    _: usize,
    _: StreamerOptions<Arc<CodedGroup>>,
    _: u64,
    _: usize,
) -> Result<Stream, StreamError> {
    Err(DeviceError("forebay was built without support for GPUs".into()).into())
}
