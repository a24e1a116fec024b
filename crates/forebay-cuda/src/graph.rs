//! Recorded work: a sequence of kernels and copies that is queued with one call.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, result, sys};

use crate::error::bind;
use crate::lifetime::{Owner, while_alive};
use crate::module::Modules;
use crate::{CudaError, Gpu};

/// Work as it was recorded: the same kernels with the same arguments. It can be queued only while all memory that they use exists.
pub struct Graph {
    executable: sys::CUgraphExec,
    context: Arc<CudaContext>,
    /// Whose memory it uses.
    owners: Vec<Owner>,
    /// Its kernels' code.
    _modules: Arc<Modules>,
}

// SAFETY: handles of the driver may be used from every thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if bind(&self.context).is_ok() {
            // SAFETY: destroyed once. The driver finishes what is queued of it first.
            let _ = unsafe { result::graph::exec_destroy(self.executable) };
        }
    }
}

impl Gpu {
    /// From here on, what this thread queues is written down instead of done. Nothing may be waited for, reserved or
    /// loaded until [`Gpu::end_capture`].
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        self.bind()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        unsafe { result::stream::begin_capture(self.stream().cu_stream(), mode) }
            .map_err(CudaError::of("capturing a graph"))?;
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
        self.is_capturing.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Ends a recording.
    ///
    /// # Errors
    /// Something was recorded that cannot be, or whatever the driver says. The recording has ended all the same.
    pub fn end_capture(&self) -> Result<Graph, CudaError> {
        let _span = tracing::debug_span!("graph_capture").entered();
        let owners = self.take_recorded();
        self.bind()?;
        // SAFETY: the stream is alive and records.
        let graph = unsafe { result::stream::end_capture(self.stream().cu_stream()) }
            .map_err(CudaError::of("ending a capture"))?;
        // SAFETY: the graph is alive.
        let executable = unsafe { result::graph::instantiate(graph, CUgraphInstantiate_flags(0)) };
        // SAFETY: destroyed once; what was instantiated does not need it.
        let _ = unsafe { result::graph::destroy(graph) };
        let executable = executable.map_err(CudaError::of("preparing recorded work"))?;
        let (context, modules) = (self.shared_context(), self.modules.clone());
        Ok(Graph { executable, context, owners, _modules: modules })
    }

    /// Ends what [`Gpu::note_recorded`] does.
    fn take_recorded(&self) -> Vec<Owner> {
        self.is_capturing.store(false, Ordering::Relaxed);
        let recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner).take();
        recorded.unwrap_or_default()
    }

    /// If work is being recorded, notes whose memory the work that was queued last uses.
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

    /// Ends a recording and forgets it.
    pub fn abort_capture(&self) {
        self.take_recorded();
        if self.bind().is_err() {
            return;
        }
        // SAFETY: the stream is alive; a recording that failed leaves no graph.
        if let Ok(graph) = unsafe { result::stream::end_capture(self.stream().cu_stream()) }
            && !graph.is_null()
        {
            // SAFETY: destroyed once.
            let _ = unsafe { result::graph::destroy(graph) };
        }
    }

    /// Queues all of `graph`.
    ///
    /// # Errors
    /// Whatever the driver says.
    ///
    /// # Panics
    /// When memory that it uses was freed.
    pub fn queue_graph(&self, graph: &Graph) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: graph and stream are alive, and so is all memory that it uses.
        while_alive(&graph.owners, || unsafe {
            result::graph::launch(graph.executable, self.stream().cu_stream())
        })
        .map_err(CudaError::of("queueing recorded work"))?;
        self.note_queued();
        Ok(())
    }
}
