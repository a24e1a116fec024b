//! CUDA graphs: captured sequences of kernels and copies that are queued with one call.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, result, sys};
use forebay_device::{Owner, while_alive};

use crate::error::bind;
use crate::module::Modules;
use crate::{CudaError, Gpu};

/// A captured CUDA graph: the same kernels with the same arguments. It can be queued only while all memory that they
/// use exists.
pub struct Graph {
    executable: sys::CUgraphExec,
    context: Arc<CudaContext>,
    /// Owners of the memory that it uses.
    owners: Vec<Owner>,
    /// Keeps the code of its kernels loaded.
    _modules: Arc<Modules>,
}

// SAFETY: every thread may use the driver's handles.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: it is destroyed once. The driver first finishes what is queued of it.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}

impl Gpu {
    /// Starts a capture: work that this thread queues from here on becomes part of a graph and does not run. Until
    /// [`Gpu::end_capture`], the caller must not wait for the GPU, allocate memory or load modules.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        self.bind()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.lanes().first().cu_stream(), mode) }
            .map_err(CudaError::of("capturing a graph"))?;
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
        self.is_capturing.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Checks that no graph is captured. A wait for the GPU would invalidate the capture, but only if there is work to wait for,
    /// so code that may wait calls this even if there is none.
    ///
    /// # Panics
    /// Panics if a graph is captured.
    pub fn check_may_wait(&self) {
        assert!(!self.is_capturing.load(Ordering::Relaxed), "a wait for the GPU during a capture");
    }

    /// Ends a capture and returns its graph.
    ///
    /// # Errors
    /// Returns an error if the captured work cannot be part of a graph, or if a driver call fails. The capture has
    /// ended in either case.
    pub fn end_capture(&self) -> Result<Graph, CudaError> {
        let _span = tracing::debug_span!("graph_capture").entered();
        let owners = self.take_recorded();
        self.bind()?;
        // SAFETY: the stream is alive and captures.
        let graph = unsafe { result::stream::end_capture(self.lanes().first().cu_stream()) }
            .map_err(CudaError::of("ending a capture"))?;
        // SAFETY: the graph is alive.
        let executable = unsafe { result::graph::instantiate(graph, CUgraphInstantiate_flags(0)) };
        // SAFETY: it is destroyed once; the executable graph does not need it.
        let _ = unsafe { result::graph::destroy(graph) };
        let executable = executable.map_err(CudaError::of("preparing recorded work"))?;
        let (context, modules) = (self.shared_context(), self.modules.clone());
        Ok(Graph { executable, context, owners, _modules: modules })
    }

    /// Stops noting owners, and returns those that [`Gpu::note_recorded`] has noted.
    fn take_recorded(&self) -> Vec<Owner> {
        self.is_capturing.store(false, Ordering::Relaxed);
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner).take();
        recorded.unwrap_or_default()
    }

    /// Notes the owners of the memory that the last queued work uses, if a graph is captured.
    pub(crate) fn note_recorded(&self, owners: &[Owner]) {
        if !self.is_capturing.load(Ordering::Relaxed) {
            return;
        }
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(recorded) = &mut *recorded else { return };
        for owner in owners {
            if !recorded.contains(owner) {
                recorded.push(*owner);
            }
        }
    }

    /// Ends a capture and discards it.
    pub fn abort_capture(&self) {
        self.enter_lane(0);
        self.take_recorded();
        if self.bind().is_err() {
            return;
        }
        // SAFETY: the stream is alive; a failed capture leaves no graph.
        if let Ok(graph) = unsafe { result::stream::end_capture(self.lanes().first().cu_stream()) }
            && !graph.is_null()
        {
            // SAFETY: it is destroyed once.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }

    /// Queues all work of `graph`.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if memory that it uses was freed.
    pub fn queue_graph(&self, graph: &Graph) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: graph and stream are alive, and so is all memory that it uses.
        while_alive(&graph.owners, || unsafe {
            result::graph::launch(graph.executable, self.lanes().first().cu_stream())
        })
        .map_err(CudaError::of("queueing recorded work"))?;
        self.note_queued();
        Ok(())
    }
}
