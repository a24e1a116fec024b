//! Compares rows that a kernel also writes as halves with the same rows converted afterwards.

use anyhow::Result;
use forebay_cuda::{DeviceMemory, DevicePtr, NarrowActivations, NarrowForm};

use crate::harness::{Context, Outcome};

/// Memory for rows as halves, beside rows of the same values that are converted by themselves.
pub struct Halves {
    memory: DeviceMemory,
    rows: usize,
    width: usize,
}

impl Halves {
    pub fn new(context: &Context, rows: usize, width: usize) -> Result<Halves> {
        let memory = context.poisoned(2 * (rows * width).next_multiple_of(8) + 2 * rows)?;
        Ok(Halves { memory, rows, width })
    }

    fn place(&self, index: usize) -> NarrowActivations {
        let values = (self.rows * self.width).next_multiple_of(8);
        NarrowActivations {
            high: self.memory.ptr::<u16>().offset(index * values),
            low: DevicePtr::null(),
            scales: self.memory.ptr::<f32>().offset(values + index * self.rows),
        }
    }

    /// Returns where the kernel that is checked writes.
    pub fn checked(&self) -> NarrowActivations {
        self.place(0)
    }

    /// Compares what that kernel has written with a conversion of its rows `x`.
    pub fn compare(&self, context: &Context, x: DevicePtr<f32>) -> Result<Outcome> {
        let (gpu, &Halves { rows, width, .. }) = (&context.gpu, self);
        gpu.narrow(NarrowForm::Half, x, self.place(1), rows, width)?;
        let [got, expected] = [0, 1].map(|index| -> Result<(Vec<u16>, Vec<u32>)> {
            let place = self.place(index);
            let scales = gpu.download::<u32>(place.scales.cast(), rows)?;
            Ok((gpu.download(place.high, rows * width)?, scales))
        });
        let (got, expected) = (got?, expected?);
        Ok(Outcome::same(&got.0, &expected.0).worse(Outcome::same(&got.1, &expected.1)))
    }
}
