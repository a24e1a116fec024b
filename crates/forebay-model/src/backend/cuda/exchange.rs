//! What the host and the device exchange with every batch: tokens and positions there, flags and one row of logits back.

use forebay_cuda::{CudaError, DevicePtr, Gpu, HostWords, TOP_K_MAX};

use super::layout::ExchangeLayout;
use crate::backend::End;

/// Pinned copies of [`ExchangeLayout`]: first what goes to the device, then what comes back.
pub struct Exchange {
    words: HostWords,
    layout: ExchangeLayout,
    /// Of the places.
    device: DevicePtr<u32>,
    /// Work is queued that may use the words.
    in_use: bool,
}

impl Exchange {
    pub fn new(
        gpu: &Gpu,
        layout: ExchangeLayout,
        device: DevicePtr<u32>,
    ) -> Result<Exchange, CudaError> {
        let mut words = gpu.host_words(layout.up_words() + layout.down_words())?;
        // Flags are down until a kernel raises them.
        words.write(layout.batch_words, &vec![u32::MAX; layout.flag_words]);
        Ok(Exchange { words, layout, device, in_use: false })
    }

    pub fn tokens(&self) -> DevicePtr<u32> {
        self.device
    }

    pub fn positions(&self) -> DevicePtr<u32> {
        self.device.offset(self.layout.batch)
    }

    /// Word 0 is for the residual stream and the logits, then one for each layer's router.
    pub fn flags(&self) -> DevicePtr<u32> {
        self.device.offset(self.layout.batch_words)
    }

    /// Ids of the largest logits; their values follow.
    pub fn largest(&self) -> DevicePtr<u32> {
        self.device.offset(self.layout.up_words())
    }

    /// Rows of logits.
    pub fn logits(&self) -> DevicePtr<f32> {
        self.largest().offset(2 * TOP_K_MAX).cast()
    }

    /// Takes the tokens of a batch, which stand at `position` and after it.
    ///
    /// # Errors
    /// A failed device: an earlier batch may have to be waited for.
    pub fn take(&mut self, gpu: &Gpu, tokens: &[u32], position: usize) -> Result<(), CudaError> {
        if self.in_use {
            gpu.synchronize()?;
        }
        self.in_use = true;
        self.words.write(0, tokens);
        for row in 0..tokens.len() {
            self.words.write(self.layout.batch + row, &[(position + row) as u32]);
        }
        Ok(())
    }

    /// The words of the batch at hand are used once more.
    pub fn use_again(&mut self) {
        self.in_use = true;
    }

    /// Queues the way of tokens, positions and lowered flags to the device: by a kernel, since units on their way to the next pass
    /// would hold up a copy for many milliseconds.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue_up(&self, gpu: &Gpu) -> Result<(), CudaError> {
        gpu.read_words(&self.words, 0..self.layout.up_words(), self.device)
    }

    /// Queues the way of the flags, and of what a batch that ends so leaves, to the host.
    ///
    /// # Errors
    /// Whatever the driver says.
    pub fn queue_down(&self, gpu: &Gpu, end: End) -> Result<(), CudaError> {
        let words = match end {
            End::Nothing => self.layout.flag_words,
            End::Largest(count) => self.layout.flag_words + 2 * count,
            End::Logits => self.layout.down_words(),
        };
        let first = self.layout.up_words();
        gpu.queue_download(self.flags(), &self.words, first..first + words)
    }

    /// Waits for all that is queued, and gives the flags.
    ///
    /// # Errors
    /// What went wrong in queued work.
    pub fn wait(&mut self, gpu: &Gpu, flags: &mut [u32]) -> Result<(), CudaError> {
        gpu.synchronize()?;
        self.in_use = false;
        self.words.read(self.layout.up_words(), flags);
        Ok(())
    }

    /// Appends the row of logits that came with the last flags.
    pub fn append_row(&self, logits: &mut Vec<f32>) {
        let first = self.layout.up_words() + self.layout.flag_words + 2 * TOP_K_MAX;
        self.words.append(first, self.layout.vocabulary, logits);
    }

    /// Appends the `count` largest logits that came with the last flags.
    pub fn append_largest(&self, count: usize, largest: &mut Vec<(f32, u32)>) {
        let (mut ids, mut values) = ([0_u32; TOP_K_MAX], [0.0_f32; TOP_K_MAX]);
        let first = self.layout.up_words() + self.layout.flag_words;
        self.words.read(first, &mut ids[..count]);
        self.words.read(first + count, &mut values[..count]);
        largest.extend(values.into_iter().zip(ids).take(count));
    }
}
