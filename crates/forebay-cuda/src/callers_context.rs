//! Leaving a thread as it was found: which context is current is the thread's, and other libraries rely on theirs.

use cudarc::driver::sys;

/// Remembers the calling thread's current context and makes it current again when dropped. For code that uses a GPU on
/// threads of a program that uses GPUs itself: PyTorch's current device is this very setting.
pub struct CallersContext {
    /// `None` without a driver: then nothing can change.
    context: Option<sys::CUcontext>,
}

impl CallersContext {
    /// Remembers the context of this thread; none is one, too.
    pub fn remember() -> CallersContext {
        // SAFETY: loading the driver's library runs its initialisers, which expect nothing of us.
        if !unsafe { sys::is_culib_present() } {
            return CallersContext { context: None };
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is that of a live value. Before `cuInit` the driver refuses, and there is no context.
        let asked = unsafe { sys::cuCtxGetCurrent(&mut context) }.result();
        CallersContext { context: Some(asked.map_or(std::ptr::null_mut(), |()| context)) }
    }
}

impl Drop for CallersContext {
    fn drop(&mut self) {
        if let Some(context) = self.context {
            // SAFETY: the context was this thread's; should its owner have destroyed it, the driver refuses.
            let _ = unsafe { sys::cuCtxSetCurrent(context) };
        }
    }
}
