//! Reusable buffers that start on a cache line.

use std::marker::PhantomData;

/// Number of bytes in a cache line, and in the widest vector register.
const LINE_BYTES: usize = 64;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; LINE_BYTES]);

mod sealed {
    /// A number type for which every bit pattern is a value and zero bits mean zero.
    pub trait Plain: Copy {}
    impl Plain for i8 {}
    impl Plain for u8 {}
    impl Plain for i16 {}
    impl Plain for f32 {}
}

/// A buffer of numbers that grows to the largest length requested and never shrinks.
pub(crate) struct AlignedVec<T> {
    lines: Vec<Line>,
    elements: PhantomData<T>,
}

impl<T> Default for AlignedVec<T> {
    fn default() -> AlignedVec<T> {
        AlignedVec { lines: Vec::new(), elements: PhantomData }
    }
}

impl<T: sealed::Plain> AlignedVec<T> {
    /// Returns the first `len` elements. They hold the values of earlier use, or zero if never
    /// used.
    pub(crate) fn first(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(LINE_BYTES);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0; LINE_BYTES]));
        }
        // SAFETY: the lines hold at least `len` elements, are aligned for every T of `Plain`, and
        // are initialised. Any bits are a valid T. The borrow of self makes the slice exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<T>(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_keeps_its_contents_and_starts_on_a_line() {
        let mut buffer = AlignedVec::<f32>::default();
        assert!(buffer.first(0).is_empty());
        buffer.first(3).copy_from_slice(&[1.0, 2.0, 3.0]);
        assert_eq!(buffer.first(100)[..4], [1.0, 2.0, 3.0, 0.0]);
        assert_eq!(buffer.first(100).as_ptr() as usize % LINE_BYTES, 0);
        assert_eq!(buffer.first(2), [1.0, 2.0]);
    }
}
