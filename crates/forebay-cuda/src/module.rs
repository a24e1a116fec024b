//! Modules, loaded when one of their kernels is first asked for: the driver compiles PTX then, which takes time, so
//! that only what a model needs is loaded.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Mutex;

use cudarc::driver::{result, sys};

use crate::ptx::MODULES;
use crate::{CudaError, Gpu};

/// A function that runs on the GPU. Valid as long as its [`Gpu`].
#[derive(Clone, Copy)]
pub(crate) struct Kernel(pub(crate) sys::CUfunction);

// SAFETY: handles of the driver may be used from every thread.
unsafe impl Send for Kernel {}

struct Module(sys::CUmodule);

// SAFETY: handles of the driver may be used from every thread.
unsafe impl Send for Module {}

/// What has been loaded. Modules stay until the context goes.
#[derive(Default)]
pub(crate) struct Modules(Mutex<Loaded>);

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Module>,
    kernels: HashMap<(&'static str, &'static str), Kernel>,
}

impl Gpu {
    /// Loads a module now, so that no later launch has to: loading is not allowed while a graph is captured.
    ///
    /// # Errors
    /// Whatever the driver says about the module.
    ///
    /// # Panics
    /// When there is no such module.
    pub fn load_module(&self, module: &'static str) -> Result<(), CudaError> {
        self.bind()?;
        let mut loaded = self.modules.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        loaded.module(module).map(|_| ())
    }

    /// The kernel `name` of `module`.
    pub(crate) fn kernel(
        &self,
        module: &'static str,
        name: &'static str,
    ) -> Result<Kernel, CudaError> {
        let mut loaded = self.modules.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(kernel) = loaded.kernels.get(&(module, name)) {
            return Ok(*kernel);
        }
        self.bind()?;
        let handle = loaded.module(module)?;
        let c_name = CString::new(name).expect("kernel names hold no NUL");
        // SAFETY: the module is loaded and stays so.
        let function = unsafe { result::module::get_function(handle, c_name) }
            .map_err(|error| named(CudaError::of("finding a kernel")(error), module, name))?;
        allow_large_shared_memory(function)?;
        loaded.kernels.insert((module, name), Kernel(function));
        Ok(Kernel(function))
    }
}

impl Loaded {
    fn module(&mut self, name: &'static str) -> Result<sys::CUmodule, CudaError> {
        if let Some(module) = self.modules.get(name) {
            return Ok(module.0);
        }
        let (_, ptx) = MODULES
            .iter()
            .find(|(module, _)| *module == name)
            .unwrap_or_else(|| panic!("there is no module {name}"));
        let text = CString::new(*ptx).expect("PTX is text");
        // SAFETY: a NUL-terminated PTX text, as the driver expects.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) }
            .map_err(|error| named(CudaError::of("loading a module")(error), name, ""))?;
        self.modules.insert(name, Module(module));
        Ok(module)
    }
}

/// Lets a kernel ask for as much dynamic shared memory as a multiprocessor has to give; without this call the driver
/// refuses more than 48 KiB.
fn allow_large_shared_memory(function: sys::CUfunction) -> Result<(), CudaError> {
    use sys::CUfunction_attribute as Attribute;
    let setting = CudaError::of("setting a kernel's shared memory");
    let mut fixed = 0;
    // SAFETY: a function of a loaded module, and a live integer.
    unsafe {
        sys::cuFuncGetAttribute(
            &mut fixed,
            Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            function,
        )
    }
    .result()
    .map_err(CudaError::of("asking for a kernel's shared memory"))?;
    // What compute capability 8.6, the least generous, gives one block.
    let dynamic = 99 * 1024 - fixed;
    let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: a function of a loaded module.
    unsafe { result::function::set_function_attribute(function, attribute, dynamic) }
        .map_err(setting)
}

fn named(error: CudaError, module: &str, kernel: &str) -> CudaError {
    match error {
        CudaError::Driver { call, message } => {
            CudaError::Driver { call, message: format!("{module} {kernel}: {message}") }
        }
        other => other,
    }
}
