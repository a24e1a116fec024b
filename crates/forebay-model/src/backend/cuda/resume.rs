//! Finishes a token after its CUDA graph stopped waiting for the host.
//!
//! On a GPU with a watchdog, a kernel of the graph waits for missing experts only for a bounded time and then gives up. The
//! residual stream of the layer that gave up is intact; later results of the graph are invalid, and this code overwrites them.
//! From that layer on, the host queues the same kernels one by one. It provides the experts of each layer before it queues
//! the kernel that needs them, so no kernel waits. The output has the same bits as without the timeout.

use super::CudaBackend;
use crate::ModelError;
use crate::backend::{Backend, End, NextBlock, Step};
use crate::decoder::{feed_forward_step, layer_step};
use forebay_store::Interrupt;

impl CudaBackend {
    /// Finishes the current pass if its graph gave up. Waits for the graph if it may give up.
    ///
    /// # Errors
    /// Returns an error for values that were not finite before the graph gave up, a failed read, or a failed device.
    pub(super) fn resume(&mut self, step: &Step<'_>, end: End) -> Result<(), ModelError> {
        let Some(first) = self.source.given_up(&self.gpu)? else { return Ok(()) };
        self.exchange.queue_down(&self.gpu, End::Nothing, 0)?;
        self.exchange.wait(&self.gpu, &mut self.flags)?;
        self.report_flags(step, first)?;
        self.queue_rest(step, first, end)?;
        let given_up = self.source.given_up(&self.gpu)?;
        assert_eq!(given_up, None, "no kernel waits for experts that are in VRAM");
        Ok(())
    }

    /// Queues the feed-forward of layer `first` and everything after it.
    fn queue_rest(&mut self, step: &Step<'_>, first: usize, end: End) -> Result<(), ModelError> {
        self.lanes.begin(&self.gpu);
        let (source, on) = self.source_and_device();
        source.resume(on)?;
        self.exchange.use_again();
        self.exchange.queue_up(&self.gpu)?;
        let interrupt = Interrupt::new();
        for layer in first..step.architecture.main_layers() {
            let step = Step { layer, ..*step };
            // The residual stream of a parallel block has no output of attention yet, so its layer begins again. That writes the same
            // keys and values.
            let begins_again = layer == first && step.has_parallel_blocks();
            if layer > first || begins_again {
                layer_step(self, &step, !begins_again, None, &interrupt)?;
                continue;
            }
            // The residual stream already has the output of this layer's attention.
            self.norm(&step, NextBlock::FeedForward, false)?;
            feed_forward_step(self, &step, None, &interrupt)?;
        }
        let step = Step { layer: step.architecture.main_layers(), ..*step };
        self.queue_end(&step, end)
    }
}
