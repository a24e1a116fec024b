//! What follows when a token's recorded work has given up waiting for the host, on a GPU whose watchdog would have ended it.
//!
//! The work has kept the residual stream of the layer that waited in vain; what came behind it means nothing and has been
//! overwritten when this returns. From that layer on the same kernels are queued one by one, and the host gives each answer before
//! it queues the kernel that asks, so that none waits. Experts are chosen, brought and computed as they would have been: the
//! same bits come out.

use forebay_cuda::CudaError;

use super::CudaBackend;
use crate::ModelError;
use crate::backend::{Backend, End, NextBlock, Step};
use crate::weights::FeedForwardWeights;

impl CudaBackend {
    /// Waits for a token's recorded work if it may have given up, and does what is left of it then.
    ///
    /// # Errors
    /// Values that were not finite before it gave up, a failed read or device.
    pub(super) fn resume(&mut self, step: &Step<'_>, end: End) -> Result<(), ModelError> {
        let Some(first) = self.given_up()? else { return Ok(()) };
        self.exchange.wait(&self.gpu, &mut self.flags)?;
        self.report_flags(step, first)?;
        self.resuming = true;
        let resumed = self.queue_rest(step, first, end);
        self.resuming = false;
        resumed?;
        assert_eq!(self.given_up()?, None, "answers that are there are not waited for");
        Ok(())
    }

    /// The layer in which the work at hand gave up.
    fn given_up(&self) -> Result<Option<usize>, CudaError> {
        let streamed = self.streamed.as_ref().filter(|_| self.served);
        let layer = streamed.map_or(Ok(None), |streamed| streamed.given_up(&self.gpu))?;
        Ok(layer.map(|layer| layer.0 as usize))
    }

    /// Queues everything from the feed-forward of layer `first` on.
    fn queue_rest(&mut self, step: &Step<'_>, first: usize, end: End) -> Result<(), ModelError> {
        (self.inputs, self.outputs) = (None, None);
        let CudaBackend { gpu, plan, arena, streamed, .. } = self;
        streamed.as_mut().expect("experts are missing").go_on(gpu, plan, arena)?;
        self.exchange.use_again();
        self.exchange.queue_up(&self.gpu)?;
        for layer in first..step.architecture.layers.len() {
            let step = Step { layer, ..*step };
            if layer > first {
                self.norm(&step, NextBlock::Attention, true)?;
                self.project(&step)?;
                self.attend(&step)?;
                self.project_output(&step)?;
            }
            // What is added to the first one's is in the stream already.
            self.norm(&step, NextBlock::FeedForward, layer > first)?;
            match step.layer_weights().feed_forward {
                FeedForwardWeights::Dense { .. } => self.dense_feed_forward(&step)?,
                FeedForwardWeights::Experts { .. } => {
                    self.route(&step, None)?;
                    self.experts(&step)?;
                }
            }
        }
        let step = Step { layer: step.architecture.layers.len(), ..*step };
        self.queue_end(&step, end)
    }
}
