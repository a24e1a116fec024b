//! Addresses of device memory.

use std::marker::PhantomData;

use bytemuck::Pod;

use crate::Owner;

/// The address of a `T`, or of several in a row, in memory that kernels reach. This is device memory, or pinned host
/// memory that is never borrowed. The address knows how many bytes follow it and whether the memory still exists.
/// Every use checks both, so nothing else can be reached through it.
pub struct DevicePtr<T> {
    address: u64,
    /// Number of bytes from here to the end of the memory.
    bytes: u64,
    owner: Owner,
    element: PhantomData<fn() -> T>,
}

// Derived implementations would require the same traits of `T`.
impl<T> Clone for DevicePtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for DevicePtr<T> {}

impl<T> DevicePtr<T> {
    /// Returns the address of the first of `bytes` bytes.
    ///
    /// # Safety
    /// The bytes must be memory that kernels reach and that no Rust reference ever points to. They must stay valid
    /// until the [`Lifetime`] of `owner` is dropped and all work queued by then has ended.
    pub unsafe fn of_memory(address: u64, bytes: usize, owner: Owner) -> DevicePtr<T> {
        DevicePtr { address, bytes: bytes as u64, owner, element: PhantomData }
    }

    /// Returns the null address, the value of an optional argument that is absent.
    pub fn null() -> DevicePtr<T> {
        DevicePtr { address: 0, bytes: 0, owner: Owner::nothing(), element: PhantomData }
    }

    /// Returns the number that kernels see. The only way back is [`DevicePtr::at`].
    pub fn address(self) -> u64 {
        self.address
    }

    pub fn is_null(self) -> bool {
        self.address == 0
    }

    /// Returns the number of elements from here to the end of the memory.
    pub fn len(self) -> usize {
        self.bytes as usize / size_of::<T>()
    }

    /// Returns true if no element follows.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Returns the memory that this is an address of.
    pub fn owner(self) -> Owner {
        self.owner
    }

    /// Returns the address `elements` further on.
    ///
    /// # Panics
    /// Panics if it is beyond the end of the memory.
    pub fn offset(self, elements: usize) -> DevicePtr<T> {
        assert!(elements <= self.len(), "element {elements} of {} of the device", self.len());
        let bytes = (elements * size_of::<T>()) as u64;
        DevicePtr { address: self.address + bytes, bytes: self.bytes - bytes, ..self }
    }

    /// Returns the element at `address`, a number computed from [`DevicePtr::address`]. Returns `None` if it does not
    /// lie at or behind this one in the same memory.
    pub fn at(self, address: u64) -> Option<DevicePtr<T>> {
        let bytes = address.checked_sub(self.address)?;
        let is_inside = bytes <= self.bytes;
        is_inside.then(|| DevicePtr { address, bytes: self.bytes - bytes, ..self })
    }

    /// Returns the same address with only `elements` behind it.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn first(self, elements: usize) -> DevicePtr<T> {
        self.check(elements);
        DevicePtr { bytes: (elements * size_of::<T>()) as u64, ..self }
    }

    /// Returns the same address as an address of any other type.
    ///
    /// # Safety
    /// Everything that kernels write through the new address must be valid values of `T`, as far as kernels use them
    /// as such.
    pub unsafe fn cast_any<U>(self) -> DevicePtr<U> {
        let DevicePtr { address, bytes, owner, .. } = self;
        DevicePtr { address, bytes, owner, element: PhantomData }
    }

    /// Checks that at least `elements` elements follow.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn check(self, elements: usize) {
        let bytes = (elements as u64).checked_mul(size_of::<T>() as u64);
        assert!(
            bytes.is_some_and(|bytes| bytes <= self.bytes),
            "{elements} elements in a buffer of {} of the device",
            self.len()
        );
    }
}

impl<T: Pod> DevicePtr<T> {
    /// Returns the same address as an address of another type.
    pub fn cast<U: Pod>(self) -> DevicePtr<U> {
        let DevicePtr { address, bytes, owner, .. } = self;
        DevicePtr { address, bytes, owner, element: PhantomData }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::{DeviceId, Lifetime};

    #[test]
    fn addresses_know_what_follows_them() {
        let lifetime = Lifetime::new(DeviceId::new("some", 0));
        // SAFETY: no work uses the address.
        let ptr = unsafe { DevicePtr::<u32>::of_memory(4096, 40, lifetime.owner()) };
        assert_eq!((ptr.len(), ptr.address(), ptr.is_null()), (10, 4096, false));
        let third = ptr.offset(3);
        assert_eq!((third.len(), third.address()), (7, 4108));
        assert!(third.owner() == lifetime.owner());
        assert_eq!(ptr.offset(10).len(), 0);
        assert!(ptr.offset(10).is_empty());
        assert_eq!(
            (third.first(2).len(), third.cast::<u8>().len(), third.cast::<u64>().len()),
            (2, 28, 3)
        );
        third.check(7);
        assert_eq!(ptr.at(4108).map(DevicePtr::len), Some(7));
        assert!(ptr.at(4092).is_none() && ptr.at(4140).is_none() && third.at(4096).is_none());
        assert!(catch_unwind(|| ptr.offset(11)).is_err());
        assert!(catch_unwind(|| third.check(8)).is_err());
        assert!(catch_unwind(|| third.first(8)).is_err());
        assert!(catch_unwind(|| third.check(usize::MAX / 2)).is_err());
    }

    #[test]
    fn the_null_address_has_no_device() {
        let null = DevicePtr::<f32>::null();
        assert!(null.is_null() && null.is_empty() && null.owner() == Owner::nothing());
        assert_eq!(null.owner().device(), None);
    }
}
