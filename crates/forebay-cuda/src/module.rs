//! Modules, loaded when one of their kernels is first asked for, or before: the driver compiles PTX then, which takes
//! time, so that only what a model needs is loaded; once for all that use a GPU at a time.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{CudaContext, result, sys};

use crate::error::bind;
use crate::{CudaError, Gpu, ptx};

/// What hides instructions of compute capability 9.0 in the PTX, which is for 8.0.
const HIDDEN: &str = "// 90: ";
/// How a kernel begins that waits by itself for the kernel before it.
const WAITS: &str = "// 90: griddepcontrol.wait;";

/// A function that runs on the GPU. Valid as long as its [`Gpu`].
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub function: sys::CUfunction,
    /// It may be started before the kernel before it has ended: it waits for that by itself.
    pub waits: bool,
}

// SAFETY: handles of the driver may be used from every thread.
unsafe impl Send for Kernel {}

#[derive(Clone, Copy)]
struct Module {
    handle: sys::CUmodule,
    /// That of its kernels.
    waits: bool,
}

// SAFETY: handles of the driver may be used from every thread.
unsafe impl Send for Module {}

/// What has been loaded to a GPU. Modules stay until nobody uses it any more: their code takes device memory.
pub(crate) struct Modules {
    loaded: Mutex<Loaded>,
    context: Arc<CudaContext>,
}

/// Those of GPUs that somebody uses, by ordinal.
static IN_USE: Mutex<Vec<(usize, Weak<Modules>)>> = Mutex::new(Vec::new());

impl Modules {
    /// Those of the GPU of `context`.
    pub fn of(context: &Arc<CudaContext>) -> Arc<Modules> {
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.retain(|(_, modules)| modules.strong_count() > 0);
        let known = in_use.iter().find(|(ordinal, _)| *ordinal == context.ordinal());
        if let Some(modules) = known.and_then(|(_, modules)| modules.upgrade()) {
            return modules;
        }
        let modules = Arc::new(Modules { loaded: Mutex::default(), context: context.clone() });
        in_use.push((context.ordinal(), Arc::downgrade(&modules)));
        modules
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        // Whoever queued kernels had these, so nothing is queued that anybody waits for. The context may go on in others' hands.
        if bind(&self.context).is_err() || self.context.synchronize().is_err() {
            return;
        }
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        for module in loaded.modules.values() {
            // SAFETY: loaded once, unloaded once, and none of its kernels runs.
            let _ = unsafe { result::module::unload(module.handle) };
        }
    }
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Module>,
    kernels: HashMap<(&'static str, &'static str), Kernel>,
}

impl Gpu {
    /// Loads modules now, so that no later launch has to: the driver compiles what it does not have in its cache, which
    /// takes up to a second for a large one, and loading is not allowed while a graph is captured. Modules that are
    /// loaded already cost nothing. Copies may go on meanwhile, but several threads compile nothing faster: 15 modules
    /// took 4.6 s with one and with eight (driver 580).
    ///
    /// # Errors
    /// Whatever the driver says about a module.
    ///
    /// # Panics
    /// When there is no such module.
    pub fn load_modules(&self, modules: &[&'static str]) -> Result<(), CudaError> {
        let _span = tracing::debug_span!("load_modules", modules = modules.len()).entered();
        self.bind()?;
        let capability = self.compute_capability();
        modules.iter().try_for_each(|module| {
            let mut loaded = self.modules.lock();
            loaded.module(module, capability).map(|_| ())
        })
    }

    /// The kernel `name` of `module`.
    pub(crate) fn kernel(
        &self,
        module: &'static str,
        name: &'static str,
    ) -> Result<Kernel, CudaError> {
        let mut loaded = self.modules.lock();
        if let Some(kernel) = loaded.kernels.get(&(module, name)) {
            return Ok(*kernel);
        }
        self.bind()?;
        let Module { handle, waits } = loaded.module(module, self.compute_capability())?;
        let c_name = CString::new(name).expect("kernel names hold no NUL");
        // SAFETY: the module is loaded and stays so.
        let function = unsafe { result::module::get_function(handle, c_name) }
            .map_err(|error| named(CudaError::of("finding a kernel")(error), module, name))?;
        allow_large_shared_memory(function, self.shared_memory())?;
        let kernel = Kernel { function, waits };
        loaded.kernels.insert((module, name), kernel);
        Ok(kernel)
    }
}

impl Loaded {
    fn module(&mut self, name: &'static str, capability: (i32, i32)) -> Result<Module, CudaError> {
        if let Some(module) = self.modules.get(name) {
            return Ok(*module);
        }
        let ptx = ptx::text(name).unwrap_or_else(|| panic!("there is no module {name}"));
        let (text, waits) = for_capability(ptx, capability);
        let text = CString::new(text).expect("PTX is text");
        // SAFETY: a NUL-terminated PTX text, as the driver expects.
        let handle = unsafe { result::module::load_data(text.as_ptr().cast()) }
            .map_err(|error| named(CudaError::of("loading a module")(error), name, ""))?;
        let module = Module { handle, waits };
        self.modules.insert(name, module);
        Ok(module)
    }
}

/// The PTX for a GPU: where it has them, with the instructions by which a kernel waits for the one before. Whether it has.
fn for_capability(ptx: String, capability: (i32, i32)) -> (String, bool) {
    let waits = capability >= (9, 0) && ptx.contains(WAITS);
    if !waits {
        return (ptx, false);
    }
    (ptx.replace(HIDDEN, "").replace(".target sm_80", ".target sm_90"), true)
}

/// Lets a kernel ask for as much dynamic shared memory as this GPU gives a block, `most` bytes; without this call the
/// driver refuses more than 48 KiB.
fn allow_large_shared_memory(function: sys::CUfunction, most: usize) -> Result<(), CudaError> {
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
    let dynamic = most as i32 - fixed;
    let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: a function of a loaded module.
    unsafe { result::function::set_function_attribute(function, attribute, dynamic) }
        .map_err(setting)
}

fn named(error: CudaError, module: &str, kernel: &str) -> CudaError {
    match error {
        CudaError::Driver { call, code, name, message } => {
            let message = format!("{module} {kernel}: {message}");
            CudaError::Driver { call, code, name, message }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_kernels_of_a_module_wait_or_none() {
        let mut waiting = 0;
        for name in ptx::names() {
            let ptx = ptx::text(name).unwrap();
            let kernels = ptx.matches(".entry ").count();
            let waits = ptx.matches(WAITS).count();
            assert!(waits == 0 || waits == kernels, "{name}: {waits} of {kernels}");
            waiting += usize::from(waits > 0);
        }
        assert!(waiting > 30, "{waiting} modules");
    }

    #[test]
    fn instructions_are_uncovered_where_they_exist() {
        let ptx = ptx::text("norm").unwrap();
        assert_eq!(for_capability(ptx.clone(), (8, 9)), (ptx.clone(), false));
        let (text, waits) = for_capability(ptx, (9, 0));
        assert!(waits && !text.contains(HIDDEN) && text.contains("\n.target sm_90\n"));
        assert!(text.lines().any(|line| line.trim() == "griddepcontrol.wait;"));
        // Tensor cores' products do not wait: they are loaded as they are.
        let ptx = ptx::text("matmul_f16").unwrap();
        assert_eq!(for_capability(ptx.clone(), (9, 0)), (ptx, false));
    }
}
