//! How a batch begins on a GPU: also one that has a model's last layers only, where another backend computes those before and
//! hands the residual stream on.

use forebay_cuda::{CudaError, Gpu, HostWords};

use super::super::{Batch, Begun, End, Step};
use super::CudaBackend;
use super::memory::DevicePlan;
use super::recording::Way;
use crate::ModelError;

/// Pinned words for the residual stream of a batch, if another backend hands it on.
///
/// # Errors
/// Whatever the driver says.
pub fn words(gpu: &Gpu, plan: &DevicePlan, hidden: usize) -> Result<Option<HostWords>, CudaError> {
    let words = plan.activations.batch * hidden;
    (plan.first_layer > 0).then(|| gpu.host_words(words)).transpose()
}

impl CudaBackend {
    /// The first layer that the GPU has.
    pub fn first_layer(&self) -> usize {
        self.plan.first_layer
    }

    /// Takes the tokens of a batch and finds out whether its work is recorded; if not, they are queued.
    pub fn begin_batch(&mut self, step: &Step<'_>, batch: &Batch<'_>) -> Result<Begun, ModelError> {
        // A batch that failed may have left what its next step would have taken.
        (self.inputs, self.outputs) = (None, None);
        self.exchange.take(&self.gpu, batch.tokens, step.position)?;
        self.served = false;
        let mut one = step.count == 1 && batch.end != End::Nothing;
        // Only work that asks the host tells it the experts and can be told which to take.
        one &= self.streamed.is_some() || !batch.routing && batch.chosen.is_none();
        let way = Way { splits: self.attention_splits(step), end: batch.end };
        let is_recorded = self.recordings.begin(&self.gpu, one.then_some(way))?;
        let asks = is_recorded || self.recordings.is_recording();
        let streamed = self.streamed.as_mut().filter(|_| asks);
        if let Some(streamed) = streamed {
            streamed.begin_token(batch.chosen);
            if !is_recorded {
                streamed.queue_token(&self.gpu, &self.plan, &self.arena)?;
            }
        }
        if is_recorded {
            return Ok(Begun::Recorded);
        }
        self.exchange.queue_up(&self.gpu)?;
        Ok(Begun::Layers)
    }

    /// Begins a batch at the GPU's first layer, which is that of `step`, as [`super::Backend::begin`] does at the model's: with
    /// the residual stream `x` `[tokens, hidden]` before it, to which nothing has to be added any more. A single token's
    /// recording begins with the way of `x` to the GPU.
    ///
    /// # Errors
    /// A failed device.
    ///
    /// # Panics
    /// Where the GPU has the model's first layer, too.
    pub fn begin_with(
        &mut self,
        step: &Step<'_>,
        batch: &Batch<'_>,
        x: &[f32],
    ) -> Result<Begun, ModelError> {
        // It waits for what an earlier batch may have left behind, so the words are free afterwards.
        let begun = self.begin_batch(step, batch)?;
        let words = self.handed.as_mut().expect("another backend has the first layer");
        words.write(0, x);
        if begun == Begun::Layers {
            let to = self.arena.activation(self.plan.activations.x);
            self.gpu.queue_upload(words, 0..x.len(), to)?;
        }
        Ok(begun)
    }
}
