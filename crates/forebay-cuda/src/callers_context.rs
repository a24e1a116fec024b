//! Restoring a thread's current CUDA context. The context belongs to the thread, and other libraries rely on it.

use cudarc::driver::sys;

use crate::gpu::has_driver;

/// Guard that remembers the calling thread's current context and makes it current again when dropped. It is for code
/// that uses a GPU on threads of a program which uses GPUs itself: PyTorch's current device is this setting.
pub struct CallersContext {
    /// `None` if there is no driver, because then nothing can change.
    context: Option<sys::CUcontext>,
}

impl CallersContext {
    /// Remembers the current context of this thread, even if there is none.
    pub fn remember() -> CallersContext {
        if !has_driver() {
            return CallersContext { context: None };
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the pointer is to a live value. Before `cuInit` the driver refuses the call, and there is no
        // context.
        let asked = unsafe { sys::cuCtxGetCurrent(&mut context) }.result();
        CallersContext { context: Some(asked.map_or(std::ptr::null_mut(), |()| context)) }
    }
}

impl Drop for CallersContext {
    fn drop(&mut self) {
        if let Some(context) = self.context {
            // SAFETY: the context was this thread's. If its owner has destroyed it, the driver refuses the call.
            let _ = unsafe { sys::cuCtxSetCurrent(context) };
        }
    }
}
