//! cuFile, NVIDIA's library that reads files to device memory. Where nvidia-fs is loaded, it reads directly from the
//! disk (GPUDirect Storage). Otherwise it reads through host memory of its own.
//!
//! `sys` holds the raw functions. This file holds the types that own what the functions return. These are our own
//! bindings, because cudarc's panic when a function is missing and cannot represent answers of newer libraries.

mod error;
mod sys;

use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaContext;

use crate::error::bind;
use crate::{CudaError, DeviceMemory, DevicePtr, Gpu};
pub use error::CuFileError;
use sys::{Description, DescriptionHandle, Functions, Handle, Properties, Status};

/// Path of the bytes from the disk to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CuFileMode {
    /// The disk writes to device memory through nvidia-fs of this version.
    Gds { nvfs: (u32, u32) },
    /// The disk writes to device memory by the kernel's own means (PCI peer to peer), without nvidia-fs.
    PeerToPeer,
    /// The library reads to host memory and copies from there.
    Compatibility,
}

impl fmt::Display for CuFileMode {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CuFileMode::Gds { nvfs: (major, minor) } => {
                write!(out, "GPUDirect Storage, with nvidia-fs {major}.{minor}")
            }
            CuFileMode::PeerToPeer => {
                out.write_str("from disk to GPU by the kernel's peer-to-peer copies")
            }
            CuFileMode::Compatibility => {
                out.write_str("compatibility mode, through host memory: nvidia-fs is not loaded")
            }
        }
    }
}

/// `CU_FILE_NVME_P2P_SUPPORTED` of the status flags, until CUDA 12.
const PEER_TO_PEER_STATUS: u32 = 1 << 11;
/// `CU_FILE_P2P_SUPPORTED` of the features, since CUDA 13.
const PEER_TO_PEER_FEATURE: u32 = 1 << 4;
/// Time limit for starting the library; a second is usual. Version 1.20 looks for nvidia-fs in /proc/modules. If that
/// file is missing, as with a kernel without modules, it never stops reading.
const START_TIME: Duration = Duration::from_secs(10);

/// The library, open for one GPU.
#[derive(Clone)]
pub struct CuFile {
    driver: Arc<Driver>,
}

struct Driver {
    functions: Functions,
    context: Arc<CudaContext>,
    mode: CuFileMode,
    version: Option<i32>,
    /// True if other code in the process opened the library and therefore closes it.
    was_open: bool,
}

impl Drop for Driver {
    fn drop(&mut self) {
        if !self.was_open && bind(&self.context).is_ok() {
            // SAFETY: `CuFile::open` opened it, and it is closed once, after every file and all memory.
            let _ = unsafe { (self.functions.driver_close)() };
        }
    }
}

impl Driver {
    fn bind(&self) -> Result<(), CudaError> {
        bind(&self.context)
    }
}

fn check(call: &'static str, status: Status) -> Result<(), CuFileError> {
    CuFileError::check(call, status.code, status.cuda)
}

impl CuFile {
    /// Loads the library and starts it. The library writes a log of its own: `cufile.log` in the current folder,
    /// unless the variable CUFILE_LOGFILE_PATH names another file. There is no other way to set its path.
    ///
    /// # Errors
    /// Returns an error if there is no library, it is too old, it does not return in time, or it reports one.
    pub fn open(gpu: &Gpu) -> Result<CuFile, CuFileError> {
        gpu.bind()?;
        let functions = Functions::load()?;
        let context = gpu.shared_context();
        let opened = start(functions, Arc::clone(&context))?;
        let was_open = opened.code == error::ALREADY_OPEN;
        if !was_open {
            check("cuFileDriverOpen", opened)?;
        }
        let version = functions.get_version.and_then(|get_version| {
            let mut version = 0;
            // SAFETY: the pointer is to a live integer.
            let status = unsafe { get_version(&mut version) };
            (status.code == 0).then_some(version)
        });
        let mode = CuFileMode::Compatibility;
        let mut driver = Driver { functions, context, mode, version, was_open };
        driver.mode = mode_of(&driver.functions)?;
        Ok(CuFile { driver: Arc::new(driver) })
    }

    pub fn mode(&self) -> CuFileMode {
        self.driver.mode
    }

    /// Returns the library's version, such as `1.15.1`, or `None` if the library does not tell.
    pub fn version(&self) -> Option<String> {
        let version = self.driver.version?;
        Some(format!("{}.{}.{}", version / 1000, version % 1000 / 10, version % 10))
    }

    /// Registers a file, which must be open with `O_DIRECT`.
    ///
    /// # Errors
    /// Returns an error if the library does, most often because it refuses the file system.
    pub fn register_file(&self, file: OwnedFd) -> Result<CuFileHandle, CuFileError> {
        self.driver.bind()?;
        let descriptor = file.as_raw_fd();
        let mut description = Description {
            kind: sys::DESCRIPTOR,
            handle: DescriptionHandle { handle: std::ptr::null_mut() },
            operations: std::ptr::null(),
        };
        description.handle.descriptor = descriptor;
        let mut handle = std::ptr::null_mut();
        // SAFETY: both pointers are to live values; the descriptor stays open as long as the handle.
        let status =
            unsafe { (self.driver.functions.handle_register)(&mut handle, &mut description) };
        check("cuFileHandleRegister", status)?;
        Ok(CuFileHandle { handle, driver: Arc::clone(&self.driver), _file: file })
    }

    /// Allocates `bytes` of device memory to read to. The memory is registered where the disk can reach it, which
    /// saves a copy on the device. In compatibility mode registering would gain nothing.
    ///
    /// The library may refuse memory because of its size or because the GPU's window is too small. It can then still
    /// be read to, and [`CuFileMemory::is_registered`] returns false.
    ///
    /// # Errors
    /// Returns [`CudaError::OutOfMemory`], or another error if a driver call fails.
    pub fn allocate(&self, gpu: &Gpu, bytes: usize) -> Result<CuFileMemory, CuFileError> {
        let memory = gpu.allocate(bytes)?;
        let driver = Arc::clone(&self.driver);
        let base = memory.ptr::<u8>().address() as *const c_void;
        let registered = driver.mode != CuFileMode::Compatibility && {
            // SAFETY: the memory is ours, and `CuFileMemory` deregisters it before it is freed.
            unsafe { (driver.functions.memory_register)(base, bytes, 0) }.code == 0
        };
        Ok(CuFileMemory { memory, registered, driver })
    }
}

/// Starts the library on a thread that is left behind if the library does not return.
fn start(functions: Functions, context: Arc<CudaContext>) -> Result<Status, CuFileError> {
    let (answer, answered) = std::sync::mpsc::sync_channel(1);
    let work = move || {
        if bind(&context).is_ok() {
            // SAFETY: a context is current, which is the only precondition.
            let _ = answer.send(unsafe { (functions.driver_open)() });
        }
    };
    // If the thread cannot be started, the channel closes and `recv_timeout` fails at once.
    let _ = std::thread::Builder::new().spawn(work);
    answered.recv_timeout(START_TIME).map_err(|_| CuFileError::NoAnswer { after: START_TIME })
}

/// Returns the mode that the library reports on this machine.
fn mode_of(functions: &Functions) -> Result<CuFileMode, CuFileError> {
    // SAFETY: the structure holds only numbers, for which zero is a valid value.
    let mut properties: Properties = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live value that is larger than the library's structure.
    check("cuFileDriverGetProperties", unsafe { (functions.get_properties)(&mut properties) })?;
    let nvfs = (properties.nvfs_major, properties.nvfs_minor);
    let peer_to_peer = properties.status_flags & PEER_TO_PEER_STATUS != 0
        || properties.features & PEER_TO_PEER_FEATURE != 0;
    Ok(match nvfs {
        (0, 0) if peer_to_peer => CuFileMode::PeerToPeer,
        (0, 0) => CuFileMode::Compatibility,
        _ => CuFileMode::Gds { nvfs },
    })
}

/// A file that the library reads.
pub struct CuFileHandle {
    handle: Handle,
    driver: Arc<Driver>,
    _file: OwnedFd,
}

// SAFETY: several threads may call the library's functions for one handle.
unsafe impl Send for CuFileHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for CuFileHandle {}

impl Drop for CuFileHandle {
    fn drop(&mut self) {
        if self.driver.bind().is_ok() {
            // SAFETY: the handle came from the library and is deregistered once. Every read borrowed it and has ended.
            unsafe { (self.driver.functions.handle_deregister)(self.handle) };
        }
    }
}

/// Device memory that the library reads to.
pub struct CuFileMemory {
    memory: DeviceMemory,
    registered: bool,
    driver: Arc<Driver>,
}

impl Drop for CuFileMemory {
    fn drop(&mut self) {
        if self.registered && self.driver.bind().is_ok() {
            // SAFETY: `CuFile::allocate` registered it. It is deregistered once and freed afterwards.
            let _ = unsafe { (self.driver.functions.memory_deregister)(self.base()) };
        }
    }
}

impl CuFileMemory {
    pub fn ptr(&self) -> DevicePtr<u8> {
        self.memory.ptr()
    }

    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Returns true if the disk writes to this memory directly.
    pub fn is_registered(&self) -> bool {
        self.registered
    }

    fn base(&self) -> *mut c_void {
        self.memory.ptr::<u8>().address() as *mut c_void
    }

    /// Reads up to `length` bytes from byte `offset` of a file to device address `to`, and waits for them. Returns the
    /// number of bytes read, which may be less than `length` and is 0 at the end of the file.
    ///
    /// # Errors
    /// Returns errors of the system by their number. Other errors hold a [`CuFileError`].
    ///
    /// # Panics
    /// Panics if the bytes do not lie in this memory.
    pub fn read(
        &self,
        file: &CuFileHandle,
        offset: u64,
        length: usize,
        to: u64,
    ) -> std::io::Result<usize> {
        // The check is needed because the library also writes to host memory if it is given such an address.
        let at = to.checked_sub(self.ptr().address()).map(|at| at as usize);
        let at = at.filter(|&at| at <= self.bytes() && length <= self.bytes() - at);
        let at = at.unwrap_or_else(|| panic!("{length} bytes at {to:#x} are not of this memory"));
        self.driver.bind().map_err(std::io::Error::other)?;
        let read = self.driver.functions.read;
        // SAFETY: the range is our own device memory, by the check above; the handle is alive.
        let count = unsafe { read(file.handle, self.base(), length, offset as i64, at as i64) };
        match count {
            0.. => Ok(count as usize),
            -1 => Err(std::io::Error::last_os_error()),
            _ => {
                let code = c_int::try_from(-count).unwrap_or(c_int::MAX);
                let call = "cuFileRead";
                Err(std::io::Error::other(CuFileError::Refused { call, code }))
            }
        }
    }
}
