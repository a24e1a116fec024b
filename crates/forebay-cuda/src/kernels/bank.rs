//! A bank of earlier states of the residual stream.

use super::elementwise::{THREADS, blocks};
use super::norm::aligned;
use super::{Added, FiniteFlag};
use crate::launch::Launch;
use crate::{CudaError, DevicePtr, Gpu};

/// Rows `[rows, streams, width]`, of which the first stream is the state and the others are the bank. `x` is aligned to 16 bytes.
#[derive(Clone, Copy)]
pub struct BankRows {
    pub x: DevicePtr<f32>,
    pub rows: usize,
    /// Number of streams, at most [`BankRows::STREAMS_MAX`].
    pub streams: usize,
    /// Number of elements of a stream, a multiple of 4.
    pub width: usize,
}

fn check_aligned(pointers: &[DevicePtr<f32>]) {
    assert!(aligned(pointers), "kernels of a bank read 16 bytes at once");
}

impl BankRows {
    /// Most streams of a row; the same as in the kernels.
    pub const STREAMS_MAX: usize = 16;

    fn count(&self) -> usize {
        let BankRows { x, rows, streams, width } = *self;
        assert!(width > 0 && width.is_multiple_of(4), "streams of {width}");
        assert!((1..=BankRows::STREAMS_MAX).contains(&streams), "{streams} streams");
        check_aligned(&[x]);
        rows * streams * width
    }

    /// Returns the grid of kernels whose threads compute four elements of a stream.
    fn grid(&self) -> (u32, u32, u32) {
        (self.rows as u32, blocks(self.width / 4), 1)
    }
}

impl Gpu {
    /// Copies rows `[rows, width]` to the states of rows with a bank.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if a buffer is too small or not aligned.
    pub fn begin_bank(&self, from: DevicePtr<f32>, to: &BankRows) -> Result<(), CudaError> {
        check_aligned(&[from]);
        Launch::new(self.kernel("bank", "begin_bank")?, to.grid(), (THREADS as u32, 1, 1))
            .ptr(from, to.rows * to.width)
            .ptr(to.x, to.count())
            .int(to.streams)
            .int(to.width)
            .run(self)
    }

    /// Adds the output of a block to the states of rows. If a `place` is given, the states move to the stream of this number, and
    /// the output replaces them. `flag`, if given, records rows that are not finite.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if there is nothing to add, if experts' outputs are incomplete or have another width, if the place is no other
    /// stream, or if a buffer is too small or not aligned.
    pub fn add_to_bank(
        &self,
        to: &BankRows,
        added: Added,
        place: Option<usize>,
        flag: Option<FiniteFlag>,
    ) -> Result<(), CudaError> {
        assert!(!matches!(added, Added::Nothing), "nothing is added to a state");
        assert!(place.is_none_or(|place| (1..to.streams).contains(&place)), "{place:?}");
        let (add, experts) = added.parts(to.width);
        let flag = flag.unwrap_or(FiniteFlag::none());
        check_aligned(&[add, experts.parts, experts.bias]);
        let kernel = if experts.bias.is_null() { "add_to_bank" } else { "add_to_bank_biased" };
        Launch::new(self.kernel("bank", kernel)?, to.grid(), (THREADS as u32, 1, 1))
            .ptr(to.x, to.count())
            .added((add, experts), to.rows)
            .int(to.streams)
            .int(place.unwrap_or(0))
            .int(to.width)
            .optional(flag.flag, 1)
            .int(flag.first_tag)
            .run(self)
    }

    /// Writes a mixture of the first `seen` streams of every row to `out` `[rows, width]`. The weights are the softmax of the
    /// products of `scores` `[width]` with the streams, each stream divided by its root mean square.
    ///
    /// # Errors
    /// Returns an error if a driver call fails.
    ///
    /// # Panics
    /// Panics if no stream or more than there are would be seen, or if a buffer is too small or not aligned.
    pub fn mix_bank(
        &self,
        from: &BankRows,
        seen: usize,
        (scores, epsilon): (DevicePtr<f32>, f32),
        out: DevicePtr<f32>,
    ) -> Result<(), CudaError> {
        assert!((1..=from.streams).contains(&seen), "{seen} of {} streams", from.streams);
        check_aligned(&[scores, out]);
        // The order of a row's sums depends on the number of threads, so it follows from the width alone.
        let threads = (from.width / 4).next_power_of_two().clamp(32, THREADS) as u32;
        let grid = (from.rows as u32, 1, 1);
        Launch::new(self.kernel("bank", "mix_bank")?, grid, (threads, 1, 1))
            .ptr(from.x, from.count())
            .int(from.streams)
            .int(seen)
            .ptr(scores, from.width)
            .float(epsilon)
            .ptr(out, from.rows * from.width)
            .int(from.width)
            .run(self)
    }
}
