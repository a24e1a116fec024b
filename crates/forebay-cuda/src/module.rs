//! Modules of kernels. A module is loaded when one of its kernels is first used, or before.
//!
//! The driver compiles PTX while it loads it. That takes time, so only the modules that a model needs are loaded. All
//! concurrent users of a GPU share them.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{CudaContext, result, sys};

use crate::error::bind;
use crate::{CudaError, Gpu, ptx};

/// Prefix that hides instructions of compute capability 9.0 in the PTX, which is for 8.0.
const HIDDEN: &str = "// 90: ";
/// First instruction of a kernel that waits by itself for the kernel before it.
const WAITS: &str = "// 90: griddepcontrol.wait;";

/// A function that runs on the GPU. It is valid as long as its [`Gpu`].
#[derive(Clone, Copy)]
pub(crate) struct Kernel {
    pub function: sys::CUfunction,
    /// True if the kernel may start before the previous kernel has ended, because it waits for that by itself.
    pub waits: bool,
}

// SAFETY: every thread may use the driver's handles.
unsafe impl Send for Kernel {}
// SAFETY: as for `Send`.
unsafe impl Sync for Kernel {}

#[derive(Clone, Copy)]
struct Module {
    handle: sys::CUmodule,
    /// True if its kernels wait for the previous kernel by themselves.
    waits: bool,
}

// SAFETY: every thread may use the driver's handles.
unsafe impl Send for Module {}

/// Everything loaded to one GPU. Its modules take device memory, so they are unloaded when the GPU's last user is
/// dropped.
pub(crate) struct Modules {
    loaded: Mutex<Loaded>,
    context: Arc<CudaContext>,
}

/// Modules of the GPUs that are in use, by ordinal.
static IN_USE: Mutex<Vec<(usize, Weak<Modules>)>> = Mutex::new(Vec::new());

impl Modules {
    /// Returns the modules of the GPU of `context`, shared with its other users.
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
        // Every user that queued kernels held these modules, so no live user waits for queued work. Others may keep
        // using the context.
        if bind(&self.context).is_err() || self.context.synchronize().is_err() {
            return;
        }
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        for module in loaded.modules.values() {
            // SAFETY: it was loaded once, is unloaded once, and none of its kernels runs.
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
    /// Loads modules now, so that no later launch has to. The driver compiles a module that is not in its cache, which
    /// takes up to a second for a large one. Loading is not allowed while a graph is captured.
    ///
    /// Modules that are already loaded cost nothing. Copies may run meanwhile. Several threads do not compile faster:
    /// 15 modules took 4.6 s with one thread and with eight (driver 580).
    ///
    /// # Errors
    /// Returns an error if the driver refuses a module.
    ///
    /// # Panics
    /// Panics if there is no such module.
    pub fn load_modules(&self, modules: &[&'static str]) -> Result<(), CudaError> {
        let _span = tracing::debug_span!("load_modules", modules = modules.len()).entered();
        self.bind()?;
        let capability = self.compute_capability();
        modules.iter().try_for_each(|module| {
            let mut loaded = self.modules.lock();
            loaded.module(module, capability).map(|_| ())
        })
    }

    /// Returns the kernel `name` of `module`, and loads the module if necessary.
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
        // SAFETY: the module is loaded and is not unloaded while `modules` exists.
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
        // SAFETY: the text is NUL-terminated PTX, as the driver expects.
        let handle = unsafe { result::module::load_data(text.as_ptr().cast()) }
            .map_err(|error| named(CudaError::of("loading a module")(error), name, ""))?;
        let module = Module { handle, waits };
        self.modules.insert(name, module);
        Ok(module)
    }
}

/// Returns the PTX for a GPU, and true if its kernels wait by themselves for the kernel before. The instructions that
/// do so are uncovered if the GPU has them.
fn for_capability(ptx: String, capability: (i32, i32)) -> (String, bool) {
    let waits = capability >= (9, 0) && ptx.contains(WAITS);
    if !waits {
        return (ptx, false);
    }
    (ptx.replace(HIDDEN, "").replace(".target sm_80", ".target sm_90"), true)
}

/// Lets a kernel use as much dynamic shared memory as this GPU gives a block, `most` bytes less the kernel's static
/// part. Without this call, the driver refuses more than 48 KiB.
fn allow_large_shared_memory(function: sys::CUfunction, most: usize) -> Result<(), CudaError> {
    use sys::CUfunction_attribute as Attribute;
    let setting = CudaError::of("setting a kernel's shared memory");
    let mut fixed = 0;
    // SAFETY: the function belongs to a loaded module, and the integer is live.
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
    // SAFETY: the function belongs to a loaded module.
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
            // A kernel whose warps have different work may wait in several places.
            let waits: Vec<bool> =
                ptx.split(".entry ").skip(1).map(|of| of.contains(WAITS)).collect();
            let all = waits.iter().all(|waits| *waits);
            assert!(all || !waits.contains(&true), "{name}: only some kernels wait");
            waiting += usize::from(all);
        }
        assert!(waiting > 30, "{waiting} modules");
    }

    #[test]
    fn kernels_start_the_next_one_after_their_wait_and_never_wait_for_the_host() {
        let starts = "// 90: griddepcontrol.launch_dependents;";
        let mut starting = 0;
        for name in ptx::names() {
            let ptx = ptx::text(name).unwrap();
            for kernel in ptx.split(".entry ").skip(1).filter(|of| of.contains(starts)) {
                let entry = kernel.split('(').next().unwrap();
                assert!(kernel.find(WAITS) < kernel.find(starts), "{name} {entry}: starts first");
                assert!(!kernel.contains("ld.acquire.sys"), "{name} {entry}: waits for the host");
                starting += 1;
            }
        }
        assert!(starting > 50, "{starting} kernels");
    }

    #[test]
    fn instructions_are_uncovered_where_they_exist() {
        let ptx = ptx::text("norm").unwrap();
        assert_eq!(for_capability(ptx.clone(), (8, 9)), (ptx.clone(), false));
        let (text, waits) = for_capability(ptx, (9, 0));
        assert!(waits && !text.contains(HIDDEN) && text.contains("\n.target sm_90\n"));
        assert!(text.lines().any(|line| line.trim() == "griddepcontrol.wait;"));
        // The measurement of bandwidth does not wait, so its PTX is loaded unchanged.
        let ptx = ptx::text("bandwidth").unwrap();
        assert_eq!(for_capability(ptx.clone(), (9, 0)), (ptx, false));
    }
}
