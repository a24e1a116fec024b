//! Opening a GPU: checks that return errors instead of panicking, the context and the compute stream.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use forebay_device::{DeviceId, Owner};

use crate::CudaError;
use crate::error::{bind, check_not_lost, is_not_ready};
use crate::lanes::Lanes;
use crate::module::Modules;

/// CUDA version that the shipped PTX needs (PTX ISA 8.4).
const NEEDED_CUDA: (i32, i32) = (12, 4);
const NEEDED_CAPABILITY: (i32, i32) = (8, 0);

/// Longest time that a kernel waits for the host on a GPU whose watchdog ends long-running kernels. It is well below
/// the half second that a display may stand still. It is longer than any answer that needs no disk.
const WAIT_UNDER_WATCHDOG: Duration = Duration::from_millis(250);

/// One GPU: its context, the streams that kernels run on, and the modules loaded so far. All users of the GPU share
/// the modules.
pub struct Gpu {
    context: Arc<CudaContext>,
    lanes: Lanes,
    pub(crate) modules: Arc<Modules>,
    name: String,
    capability: (i32, i32),
    multiprocessors: u32,
    shared_memory: usize,
    host_wait_bound: Option<Duration>,
    /// Number of work items queued so far; `finished` is the number of those known to have ended.
    queued: AtomicU64,
    finished: AtomicU64,
    /// True while a graph is captured; `recorded` then holds the owners of the memory that it uses.
    pub(crate) is_capturing: AtomicBool,
    pub(crate) recorded: Mutex<Option<Vec<Owner>>>,
}

impl Gpu {
    /// Returns the number of GPUs that the driver finds.
    ///
    /// # Errors
    /// Returns an error if there is no driver or if it is too old.
    pub fn count() -> Result<usize, CudaError> {
        check_driver()?;
        check_not_lost()?;
        match result::init() {
            Ok(()) => {}
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(0),
            Err(error) => return Err(CudaError::of("starting the driver")(error)),
        }
        let count = result::device::get_count().map_err(CudaError::of("counting GPUs"))?;
        Ok(count.max(0) as usize)
    }

    /// Opens GPU number `ordinal`, counted from 0.
    ///
    /// # Errors
    /// Returns an error if there is no driver, the driver is too old, there is no such GPU, the GPU is too old, or a
    /// driver call fails.
    pub fn open(ordinal: usize) -> Result<Gpu, CudaError> {
        let span =
            tracing::debug_span!("gpu_open", ordinal, name = tracing::field::Empty).entered();
        let count = Gpu::count()?;
        if count == 0 {
            return Err(CudaError::NoGpu);
        }
        if ordinal >= count {
            return Err(CudaError::NoSuchGpu { ordinal, count });
        }
        let open = CudaError::of("opening the GPU");
        let context = CudaContext::new(ordinal).map_err(open)?;
        let name = context.name().map_err(CudaError::of("asking for the GPU's name"))?;
        span.record("name", name.as_str());
        let ask = |attribute| context.attribute(attribute).map_err(CudaError::of("asking the GPU"));
        let capability = (
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        if capability < NEEDED_CAPABILITY {
            return Err(CudaError::CapabilityTooLow { name, capability });
        }
        let multiprocessors = ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let shared = ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let shared_memory = usize::try_from(shared).unwrap_or_default();
        let has_watchdog = ask(Attribute::CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT)? != 0;
        let host_wait_bound = has_watchdog.then_some(WAIT_UNDER_WATCHDOG);
        // SAFETY: this switches off the implicit synchronisation of cudarc's slices, and nothing uses those.
        unsafe { context.disable_event_tracking() };
        let lanes = Lanes::new(&context)?;
        let modules = Modules::of(&context);
        Ok(Gpu {
            context,
            lanes,
            modules,
            name,
            capability,
            multiprocessors,
            shared_memory,
            host_wait_bound,
            queued: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            is_capturing: AtomicBool::new(false),
            recorded: Mutex::new(None),
        })
    }

    /// Returns the name of the device.
    pub fn id(&self) -> DeviceId {
        DeviceId::new("cuda", self.context.ordinal())
    }

    /// Returns the longest time that one kernel waits for the host before it gives up. `None` means that it waits
    /// without a limit, because the GPU has no watchdog.
    pub fn host_wait_bound(&self) -> Option<Duration> {
        self.host_wait_bound
    }

    /// Makes kernels give up after `bound`, at most four seconds, even on a GPU without a watchdog.
    pub fn with_host_wait_bound(self, bound: Duration) -> Gpu {
        Gpu { host_wait_bound: Some(bound.min(Duration::from_secs(4))), ..self }
    }

    /// Returns the product's name, such as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the major and minor number of the compute capability.
    pub fn compute_capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Returns the number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Returns the most bytes of shared memory that a thread block may have.
    pub(crate) fn shared_memory(&self) -> usize {
        self.shared_memory
    }

    /// Returns the stream that every kernel and copy is queued on: that of the current lane.
    pub fn stream(&self) -> &CudaStream {
        self.lanes.current()
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.lanes
    }

    pub(crate) fn shared_stream(&self) -> Arc<CudaStream> {
        self.lanes.first().clone()
    }

    pub(crate) fn shared_context(&self) -> Arc<CudaContext> {
        self.context.clone()
    }

    /// Returns the free and the total bytes of device memory, as reported by the driver.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn memory_bytes(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (free, total) =
            self.context.mem_get_info().map_err(CudaError::of("asking for free memory"))?;
        Ok((free as u64, total as u64))
    }

    /// Waits until all queued work is done.
    ///
    /// # Errors
    /// Returns the error of queued work that failed: the GPU reports it here.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        let queued = self.queued();
        self.lanes.first().synchronize().map_err(CudaError::of("waiting for the GPU"))?;
        self.finished.fetch_max(queued, Ordering::Relaxed);
        Ok(())
    }

    /// Returns a number that grows with every queued work item.
    pub(crate) fn queued(&self) -> u64 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Returns the number up to which all queued work has ended.
    pub(crate) fn finished(&self) -> u64 {
        self.finished.load(Ordering::Relaxed)
    }

    /// Counts one more queued work item.
    pub(crate) fn note_queued(&self) {
        self.queued.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns true if all queued work is done. Does not wait.
    ///
    /// # Errors
    /// Returns the error of queued work that failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        self.bind()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.lanes.first().cu_stream()) }.result() {
            Ok(()) => Ok(true),
            Err(error) if is_not_ready(&error) => Ok(false),
            Err(error) => Err(CudaError::of("asking the GPU")(error)),
        }
    }

    /// Makes this GPU's context current on the calling thread, which every driver call needs.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        bind(&self.context)
    }
}

/// Returns true if the driver's library can be loaded.
pub(crate) fn has_driver() -> bool {
    // Looking for the library takes calls of the system each time, and every use of a module asks.
    static HAS_DRIVER: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading the driver's library runs its initialisers, which have no preconditions.
    *HAS_DRIVER.get_or_init(|| unsafe { sys::is_culib_present() })
}

/// Checks that there is a driver and that it is recent enough. Must come before any other call, because cudarc panics
/// without a driver.
fn check_driver() -> Result<(), CudaError> {
    if !has_driver() {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the pointer is to a live integer; this call is allowed before `cuInit`.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(CudaError::of("asking for the driver's version"))?;
    let has = (version / 1000, version % 1000 / 10);
    if has < NEEDED_CUDA {
        return Err(CudaError::DriverTooOld { has, needs: NEEDED_CUDA });
    }
    Ok(())
}
