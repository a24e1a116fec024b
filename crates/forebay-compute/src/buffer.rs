//! Zeroed memory at cache-line alignment. The system supplies its pages when they are first
//! touched.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::marker::PhantomData;
use std::ptr::NonNull;

/// Alignment of a buffer's first element in bytes.
const ALIGNMENT: usize = 64;

/// Types for which zeroed memory is a value and which need no drop.
///
/// # Safety
/// All-zero bytes must be a valid value, and the alignment must divide [`ALIGNMENT`].
pub(crate) unsafe trait Plain: Copy + Send + Sync {}
// SAFETY: +0.0 is all zeroes; alignment 4.
unsafe impl Plain for f32 {}
// SAFETY: 0 is all zeroes; alignment 2.
unsafe impl Plain for u16 {}
// SAFETY: 0 is all zeroes; alignment 1.
unsafe impl Plain for i8 {}
// SAFETY: 0 is all zeroes; alignment 1.
unsafe impl Plain for u8 {}

/// A fixed run of `T`, zeroed at creation.
pub(crate) struct Buffer<T: Plain> {
    block: NonNull<u8>,
    layout: Layout,
    first: NonNull<T>,
    len: usize,
    _owns: PhantomData<T>,
}

// SAFETY: a buffer owns its memory like a `Box<[T]>`, and `T: Plain` is Send.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: shared access gives only `&[T]`, and `T: Plain` is Sync.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    /// Allocates `len` zeroes. Returns `None` if the system refuses that much memory.
    pub(crate) fn zeroed(len: usize) -> Option<Buffer<T>> {
        // Requesting the alignment itself would make the allocator write the zeroes and so touch
        // every page. A little slack keeps fresh pages untouched.
        let bytes = len.checked_mul(size_of::<T>())?.checked_add(ALIGNMENT)?;
        let layout = Layout::from_size_align(bytes, 16).ok()?;
        // SAFETY: the layout is not empty, since it holds at least the slack.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let slack = block.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        // SAFETY: at most ALIGNMENT bytes in, which the block has beyond the elements.
        let first = unsafe { block.add(slack) }.cast();
        Some(Buffer { block, layout, first, len, _owns: PhantomData })
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: `len` elements from `first` lie in the block, aligned and initialised by the
        // zeroing (`Plain`); `&self` keeps writers out.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: `block` came from `alloc_zeroed` with this layout and is freed only here.
        unsafe { dealloc(self.block.as_ptr(), self.layout) }
    }
}

/// A mutable slice that the workers of one region write in disjoint pieces.
pub(crate) struct SharedSlice<'a, T> {
    first: *mut T,
    len: usize,
    _borrows: PhantomData<&'a mut [T]>,
}

// SAFETY: handing out pieces is `unsafe`, and the caller promises that they are disjoint.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> SharedSlice<'a, T> {
        SharedSlice { first: slice.as_mut_ptr(), len: slice.len(), _borrows: PhantomData }
    }

    /// Returns the elements `start..start + len`.
    ///
    /// # Safety
    /// No other piece that overlaps this one may be alive.
    ///
    /// # Panics
    /// Panics if the range is not inside the slice.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that pieces are disjoint")]
    pub(crate) unsafe fn piece(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "piece outside the slice");
        // SAFETY: inside the borrowed slice (asserted), and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_zeroed_and_writable() {
        for len in [0, 1, 17, 100_000] {
            let mut buffer = Buffer::<f32>::zeroed(len).unwrap();
            assert_eq!(buffer.as_slice().as_ptr().addr() % ALIGNMENT, 0);
            assert!(buffer.as_slice().iter().all(|&x| x == 0.0));
            buffer.as_mut_slice().fill(1.0);
            assert_eq!(buffer.as_slice().len(), len);
        }
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert!(Buffer::<f32>::zeroed(usize::MAX).is_none());
        assert!(Buffer::<u16>::zeroed(isize::MAX as usize / 2).is_none());
    }
}
