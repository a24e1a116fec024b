//! Queueing a kernel.

use std::ffi::c_void;

use cudarc::driver::sys;
use forebay_device::{Owner, while_alive};

use crate::module::Kernel;
use crate::{CopyStream, CudaError, DevicePtr, Gpu, SideStream};

/// Maximum number of arguments of a kernel.
const ARGUMENTS_MAX: usize = 40;

/// A kernel with its grid and its arguments, in the order of its declaration.
pub(crate) struct Launch {
    kernel: Kernel,
    grid: (u32, u32, u32),
    block: (u32, u32, u32),
    shared_bytes: u32,
    /// Arguments, each in the low bytes of a word. The driver gets their addresses and knows their lengths.
    arguments: [u64; ARGUMENTS_MAX],
    count: usize,
    /// Owners of the memory that the pointers among them point to.
    owners: [Owner; ARGUMENTS_MAX],
    owner_count: usize,
}

impl Launch {
    pub(crate) fn new(kernel: Kernel, grid: (u32, u32, u32), block: (u32, u32, u32)) -> Launch {
        Launch {
            kernel,
            grid,
            block,
            shared_bytes: 0,
            arguments: [0; ARGUMENTS_MAX],
            count: 0,
            owners: [Owner::nothing(); ARGUMENTS_MAX],
            owner_count: 0,
        }
    }

    /// Sets the dynamic shared memory of each block.
    pub(crate) fn shared(mut self, bytes: u32) -> Launch {
        self.shared_bytes = bytes;
        self
    }

    /// Passes a `T*` for a kernel that reaches at most `elements` of them.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub(crate) fn ptr<T>(self, pointer: DevicePtr<T>, elements: usize) -> Launch {
        pointer.check(elements);
        self.owned(pointer.owner()).u64(pointer.address())
    }

    /// Passes a `T*` as [`Launch::ptr`] does, or null if `pointer` is null.
    pub(crate) fn optional<T>(self, pointer: DevicePtr<T>, elements: usize) -> Launch {
        if pointer.is_null() { self.null() } else { self.ptr(pointer, elements) }
    }

    /// Passes a `T*` that is null.
    pub(crate) fn null(self) -> Launch {
        self.u64(0)
    }

    /// Notes that the kernel reaches memory of `owner`.
    pub(crate) fn owned(mut self, owner: Owner) -> Launch {
        if !self.owners[..self.owner_count].contains(&owner) {
            self.owners[self.owner_count] = owner;
            self.owner_count += 1;
        }
        self
    }

    /// Passes an `unsigned long long`.
    pub(crate) fn u64(mut self, value: u64) -> Launch {
        self.arguments[self.count] = value;
        self.count += 1;
        self
    }

    /// Passes an `int` for a size or an index, which is never negative.
    pub(crate) fn int(self, value: usize) -> Launch {
        let value = i32::try_from(value).expect("a kernel's argument fits 32 bits");
        self.u64(value as u64)
    }

    /// Passes an `int` that may be negative.
    pub(crate) fn signed(self, value: i32) -> Launch {
        self.u64(u64::from(value.cast_unsigned()))
    }

    /// Passes a `float`.
    pub(crate) fn float(self, value: f32) -> Launch {
        self.u64(u64::from(value.to_bits()))
    }

    /// Queues the kernel. Does nothing if the grid is empty.
    pub(crate) fn run(self, gpu: &Gpu) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        // A kernel that waits for two streams does not start early.
        let starts_early = self.kernel.waits && !gpu.lanes().takes_join();
        self.queue(gpu, gpu.stream().cu_stream(), starts_early)
    }

    /// Queues the kernel on `side`, or on the compute stream if there is none. Does nothing if the grid is empty.
    pub(crate) fn run_beside(self, gpu: &Gpu, side: Option<&SideStream>) -> Result<(), CudaError> {
        match side {
            Some(side) => self.queue(gpu, side.handle(), false),
            None => self.run(gpu),
        }
    }

    fn is_empty(&self) -> bool {
        self.grid.0 == 0 || self.grid.1 == 0 || self.grid.2 == 0
    }

    fn queue(
        mut self,
        gpu: &Gpu,
        stream: sys::CUstream,
        starts_early: bool,
    ) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        gpu.bind()?;
        self.launch(stream, starts_early)?;
        gpu.note_queued();
        gpu.note_recorded(&self.owners[..self.owner_count]);
        Ok(())
    }

    /// Queues the kernel behind the copies that `copies` has started. Does nothing if the grid is empty.
    pub(crate) fn run_behind(mut self, copies: &CopyStream) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        copies.bind()?;
        self.launch(copies.handle(), false)
    }

    fn launch(&mut self, stream: sys::CUstream, starts_early: bool) -> Result<(), CudaError> {
        let mut pointers = [std::ptr::null_mut::<c_void>(); ARGUMENTS_MAX];
        for (pointer, argument) in pointers.iter_mut().zip(&mut self.arguments) {
            *pointer = std::ptr::from_mut(argument).cast();
        }
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: self.grid.0,
            gridDimY: self.grid.1,
            gridDimZ: self.grid.2,
            blockDimX: self.block.0,
            blockDimY: self.block.1,
            blockDimZ: self.block.2,
            sharedMemBytes: self.shared_bytes,
            hStream: stream,
            attrs: &mut overlap,
            numAttrs: u32::from(starts_early),
        };
        let owners = &self.owners[..self.owner_count];
        // SAFETY: the driver reads the arguments before it returns, and none is longer than its word. The launchers of
        // `kernels` pass every kernel as many arguments as it declares. Pointers were checked to have as many elements
        // behind them as the kernel reaches, and their memory exists.
        while_alive(owners, || unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.kernel.function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
        .result()
        .map_err(CudaError::of("launching a kernel"))
    }
}

const _: () = assert!(cfg!(target_endian = "little"), "arguments lie in the low bytes of words");
