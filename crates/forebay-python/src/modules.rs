//! Streams of the weights of PyTorch's modules. `forebay.torch` has the hooks that drive them.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

#[cfg(feature = "cuda")]
use forebay_cuda::{CallersContext, ForeignStream};
use forebay_engine::load::{LoadedTensor, TensorMemory};
use forebay_format::{FileIndex, StoredType, TensorType};
#[cfg(feature = "cuda")]
use forebay_modules::{CudaDevice, CudaOptions};
use forebay_modules::{
    Device as _, DeviceError, Expansion, FileForm, GroupOptions, GroupTensor, HostDevice,
    ModuleWeights, StreamError, Streamer, StreamerOptions, TensorFile, TensorFrom, WeightOptions,
    WeightsBuilder,
};
use forebay_store::{Extent, FileSet};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes, PyDict};

use crate::errors::{of_engine, raise};
use crate::table::Table;
use crate::tensor::Tensor;

/// Weights of modules outside of the device: in RAM, coded without loss, and in files.
#[pyclass(frozen, module = "forebay._native")]
pub struct CodedModules {
    /// The groups, until all are known.
    builder: Mutex<Option<WeightsBuilder>>,
    weights: OnceLock<Arc<ModuleWeights>>,
    threads: usize,
}

/// Where a tensor comes from: the numbers of a source and of its file, the first byte there and the number of bytes, or memory.
#[derive(FromPyObject)]
enum Origin {
    File((usize, u32, u64, u64)),
    Memory(PyBuffer<u8>),
}

/// The same, with a copy of the memory.
enum Copied {
    File(TensorFile),
    Memory(Vec<u8>),
}

fn of_stream(py: Python<'_>, error: &StreamError) -> PyErr {
    let class = match error {
        StreamError::TooSmall { .. } | StreamError::InUse { .. } => "OutOfMemoryError",
        StreamError::Closed | StreamError::Interrupted => "Error",
        StreamError::Device(error) => return of_device(py, error),
    };
    raise(py, class, error.to_string())
}

fn of_device(py: Python<'_>, error: &DeviceError) -> PyErr {
    let class = match error {
        DeviceError::Device(_) => "DeviceError",
        DeviceError::Source(_) => "ReadError",
        DeviceError::Ram { .. } => "OutOfMemoryError",
    };
    raise(py, class, error.to_string())
}

impl CodedModules {
    fn builder(&self) -> MutexGuard<'_, Option<WeightsBuilder>> {
        self.builder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the weights, once all groups are known.
    fn weights(&self, py: Python<'_>) -> PyResult<&Arc<ModuleWeights>> {
        self.weights.get().ok_or_else(|| raise(py, "Error", "the weights are not complete".into()))
    }
}

#[pymethods]
impl CodedModules {
    /// `ram` is the bytes of RAM for weights, or None for as much as they need.
    #[new]
    fn new(threads: usize, codes: bool, ram: Option<u64>) -> CodedModules {
        let options = WeightOptions { ram: ram.unwrap_or(u64::MAX), threads, codes };
        let builder = Mutex::new(Some(WeightsBuilder::new(options)));
        CodedModules { builder, weights: OnceLock::new(), threads }
    }

    /// Adds files that weights come from. Returns the number of the source.
    fn add_source(&self, py: Python<'_>, table: &Table) -> PyResult<usize> {
        let files = match &table.inner.pack {
            Some(catalog) => FileSet::of_catalog_in(&table.storage, catalog, true),
            None => FileSet::open_in(&table.storage, &table.inner.files),
        };
        let files = files.map_err(|error| of_engine(py, &error.into(), None))?;
        let mut builder = self.builder();
        let builder = builder.as_mut();
        let builder =
            builder.ok_or_else(|| raise(py, "Error", "the weights are complete".into()))?;
        Ok(builder.add_source(files))
    }

    /// Adds tensors that are used together: where they come from, the names of their types, which may be ones that forebay does not know, and
    /// of the types that they become. Returns the number of the group and where each tensor begins in it, in bytes.
    fn add(
        &self,
        py: Python<'_>,
        tensors: Vec<(Origin, String, Option<String>)>,
    ) -> PyResult<(usize, Vec<u64>)> {
        let copies = tensors.iter().map(|(origin, ty, becomes)| {
            let ty = TensorType::from_name(ty);
            let becomes = becomes.as_ref().and_then(|becomes| TensorType::from_name(becomes));
            let from = match origin {
                Origin::File((source, file, offset, length)) => {
                    let file = FileIndex(*file);
                    let extent = Extent { file, offset: *offset, length: *length };
                    let expansion = ty.zip(becomes).and_then(|(ty, to)| Expansion::new(ty, to));
                    let form = match (ty.and_then(TensorType::compact), expansion) {
                        (Some(compact), _) => FileForm::Compact(compact),
                        (None, Some(expansion)) => FileForm::Other(expansion),
                        (None, None) => FileForm::Plain,
                    };
                    Copied::File(TensorFile { source: *source, extent, form })
                }
                Origin::Memory(buffer) => Copied::Memory(buffer.to_vec(py)?),
            };
            // Weights are coded as those that they become.
            Ok((from, becomes.or(ty).and_then(|ty| ty.plain().weights())))
        });
        let copies = copies.collect::<PyResult<Vec<_>>>()?;
        drop(tensors);
        let added = py.detach(|| {
            let tensors: Vec<GroupTensor<'_>> = copies
                .iter()
                .map(|(from, weights)| {
                    let from = match from {
                        Copied::File(file) => TensorFrom::File(*file),
                        Copied::Memory(bytes) => TensorFrom::Ram(bytes),
                    };
                    GroupTensor { from, weights: *weights }
                })
                .collect();
            let mut builder = self.builder();
            let Some(builder) = builder.as_mut() else {
                return Err(DeviceError::Source("the weights are complete".into()));
            };
            let group = builder.add(&tensors)?;
            Ok((group, builder.tensors(group).iter().map(|of| of.at).collect()))
        });
        added.map_err(|error| of_device(py, &error))
    }

    /// Returns true if weights of one type can become those of the other one where they are used.
    #[staticmethod]
    fn can_become(from_: &str, to: &str) -> bool {
        let types = TensorType::from_name(from_).zip(TensorType::from_name(to));
        types.is_some_and(|(from, to)| Expansion::new(from, to).is_some())
    }

    /// Notes that all groups are known.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        let finished = py.detach(|| {
            let mut builder = self.builder();
            let Some(own) = builder.as_mut() else { return Ok(()) };
            let _ = self.weights.set(Arc::new(own.finish()?));
            *builder = None;
            Ok(())
        });
        finished.map_err(|error| of_device(py, &error))
    }

    /// Returns the bytes of one tensor.
    fn read<'py>(
        &self,
        py: Python<'py>,
        group: usize,
        tensor: usize,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let read = py.detach(|| match (self.builder().as_ref(), self.weights.get()) {
            (Some(builder), _) => builder.read_tensor(group, tensor),
            (None, Some(weights)) => weights.read_tensor(group, tensor),
            (None, None) => Err(DeviceError::Source("there are no weights".into())),
        });
        Ok(PyBytes::new(py, &read.map_err(|error| of_device(py, &error))?))
    }

    /// Gives one tensor other bytes.
    fn change(
        &self,
        py: Python<'_>,
        group: usize,
        tensor: usize,
        bytes: PyBuffer<u8>,
    ) -> PyResult<()> {
        let (weights, bytes) = (self.weights(py)?, bytes.to_vec(py)?);
        let changed = py.detach(|| weights.change_tensor(group, tensor, &bytes));
        changed.map_err(|error| of_device(py, &error))
    }

    /// Returns what the weights take up, and what was read.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let of = self.weights(py)?.statistics();
        let all = [
            ("weight_bytes", of.weight_bytes),
            ("ram_bytes", of.ram_bytes),
            ("buffer_bytes", of.buffer_bytes),
            ("file_bytes", of.file_bytes),
            ("read_bytes", of.read_bytes),
        ];
        all.into_py_dict(py)
    }
}

enum Stream {
    Host(Streamer<HostDevice>),
    #[cfg(feature = "cuda")]
    Cuda(Streamer<CudaDevice>, usize),
}

/// Calls the same for a stream on each kind of device. The caller's CUDA context stays what it is.
macro_rules! with_stream {
    ($of:expr, $stream:ident => $call:expr) => {
        match &*$of {
            Stream::Host($stream) => $call,
            #[cfg(feature = "cuda")]
            Stream::Cuda($stream, _) => {
                let _context = CallersContext::remember();
                $call
            }
        }
    };
}

/// A queue of a device, which Python has as a number.
trait Queue {
    fn numbered(number: u64) -> Self;
}

impl Queue for u64 {
    fn numbered(number: u64) -> u64 {
        number
    }
}

#[cfg(feature = "cuda")]
impl Queue for ForeignStream {
    fn numbered(handle: u64) -> ForeignStream {
        // SAFETY: `forebay.torch` passes PyTorch's current stream of the same GPU, which PyTorch never destroys.
        unsafe { ForeignStream::of_handle(handle) }
    }
}

/// The weights of modules in the memory of a device, a part of them at a time.
#[pyclass(frozen, module = "forebay._native")]
pub struct ModuleStream(Arc<Stream>);

#[pymethods]
impl ModuleStream {
    /// `units` are the groups of each module, `stays` the groups that stay in the device, `orders` the modules of each root in a likely order,
    /// `gpu` the number of a GPU or None for RAM, and `memory` the bytes there. A GPU has `stage` more for weights that wait, and `pinned` in RAM.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "Python passes them by position")]
    fn new(
        py: Python<'_>,
        weights: &CodedModules,
        units: Vec<Vec<usize>>,
        stays: Vec<usize>,
        orders: Vec<Vec<usize>>,
        gpu: Option<usize>,
        memory: u64,
        stage: u64,
        pinned: u64,
    ) -> PyResult<ModuleStream> {
        let threads = weights.threads;
        let weights = Arc::clone(weights.weights(py)?);
        let group =
            |at| GroupOptions { bytes: weights.group_bytes(at), stays: stays.contains(&at) };
        let groups = (0..weights.groups()).map(group).collect();
        let options = StreamerOptions { groups, units, predictions: orders, bytes: memory };
        let made = py.detach(move || match gpu {
            None => {
                let device = Arc::new(HostDevice::new());
                Ok(Stream::Host(Streamer::new(device, weights, options)?))
            }
            Some(ordinal) => on_gpu(ordinal, weights, options, (stage, pinned), threads),
        });
        Ok(ModuleStream(Arc::new(made.map_err(|error| of_stream(py, &error))?)))
    }

    fn begin(&self, root: usize) {
        with_stream!(self.0, stream => stream.begin(root));
    }

    fn end(&self, py: Python<'_>) {
        py.detach(|| with_stream!(self.0, stream => stream.end()));
    }

    /// Returns where the groups of a module begin in the memory, which work of `queue` may use until `release`.
    fn acquire(&self, py: Python<'_>, unit: usize, queue: u64) -> PyResult<Vec<u64>> {
        let mut interrupt = None;
        let places = py.detach(|| {
            let mut waits = || {
                Python::attach(|py| py.check_signals())
                    .map_err(|error| interrupt = Some(error))
                    .is_ok()
            };
            with_stream!(self.0, stream => stream.acquire(unit, Queue::numbered(queue), &mut waits))
        });
        match interrupt {
            Some(error) => Err(error),
            None => places.map_err(|error| of_stream(py, &error)),
        }
    }

    fn release(&self, py: Python<'_>, unit: usize, queue: u64) -> PyResult<()> {
        let released = py.detach(
            || with_stream!(self.0, stream => stream.release(unit, Queue::numbered(queue))),
        );
        released.map_err(|error| of_stream(py, &error))
    }

    /// Notes that a group that is in use has other weights from now on.
    fn change(&self, py: Python<'_>, group: usize) {
        py.detach(|| with_stream!(self.0, stream => stream.change(group)));
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
        let (device_bytes, pinned_bytes) =
            with_stream!(self.0, stream => stream.device().reserved_bytes());
        let all = [
            ("passes", of.passes),
            ("deviations", of.deviations),
            ("loads", of.loads),
            ("loaded_bytes", of.loaded_bytes),
            ("decoded", of.decoded),
            ("late_loads", of.late_loads),
            ("device_bytes", device_bytes),
            ("pinned_bytes", pinned_bytes),
        ];
        let all = all.into_py_dict(py)?;
        all.set_item("waited_seconds", of.waited.as_secs_f64())?;
        Ok(all)
    }

    /// Predicts a pass of this root with so many more bytes of memory in the device and of RAM: seconds of the pass, of its work, of its loads
    /// and of its reads. None until a pass was measured.
    fn predict(
        &self,
        py: Python<'_>,
        root: usize,
        more: u64,
        more_ram: u64,
    ) -> PyResult<Option<(f64, f64, f64, f64)>> {
        let found =
            py.detach(|| with_stream!(self.0, stream => stream.predict(root, more, more_ram)));
        let found = found.map_err(|error| of_stream(py, &error))?;
        Ok(found.map(|of| (of.seconds, of.compute_seconds, of.load_seconds, of.read_seconds)))
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
                    true => Err(DeviceError::Source("weights were damaged".into()).into()),
                }
            }
        });
        closed.map_err(|error| of_stream(py, &error))
    }
}

#[cfg(feature = "cuda")]
fn on_gpu(
    ordinal: usize,
    weights: Arc<ModuleWeights>,
    options: StreamerOptions,
    (stage_bytes, pinned_bytes): (u64, u64),
    threads: usize,
) -> Result<Stream, StreamError> {
    let _context = CallersContext::remember();
    let bytes = options.bytes;
    // The others are for Python, which queues the work, and for threads that queue loads.
    let threads = (3 * threads / 4).max(1);
    let options_of_device = CudaOptions { ordinal, bytes, stage_bytes, pinned_bytes, threads };
    let device = CudaDevice::open(&options_of_device)?;
    Ok(Stream::Cuda(Streamer::new(Arc::new(device), weights, options)?, ordinal))
}

#[cfg(not(feature = "cuda"))]
fn on_gpu(
    _: usize,
    _: Arc<ModuleWeights>,
    _: StreamerOptions,
    _: (u64, u64),
    _: usize,
) -> Result<Stream, StreamError> {
    Err(DeviceError::Device("forebay was built without support for GPUs".into()).into())
}

/// Returns three quarters of the RAM that this process can allocate, in bytes.
#[pyfunction]
pub fn default_ram() -> u64 {
    forebay_engine::default_budget_bytes()
}
