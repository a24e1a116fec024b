//! Tracking of whether the memory behind an address still exists.
//!
//! Addresses of device memory are copied freely and stay in captured graphs, so they cannot borrow what they point
//! into. Instead, each allocation has a generation. Its addresses remember the generation, which changes before the
//! memory is freed. Code that queues work holds [`FREEING`] for reading while it compares generations and passes the
//! work to the driver. Freeing memory then waits for the device.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use crate::DeviceId;

/// Lock that is held for writing while a generation changes.
static FREEING: RwLock<()> = RwLock::new(());
/// Records that no memory uses at present. They are never freed, because addresses may read them at any time.
static UNUSED: Mutex<Vec<&'static Record>> = Mutex::new(Vec::new());
/// The record of the null address, which no device has.
static NOTHING: Record = Record { generation: AtomicU64::new(0), device: AtomicU32::new(u32::MAX) };

/// What addresses of the same memory read: the generation that exists now, and its device.
struct Record {
    generation: AtomicU64,
    /// [`DeviceId::number`].
    device: AtomicU32,
}

/// The part of an allocation that tracks its existence. After its drop, no work that uses an address of the memory can
/// be queued.
pub struct Lifetime(Owner);

impl Lifetime {
    /// Begins the existence of memory of a device.
    pub fn new(device: DeviceId) -> Lifetime {
        let unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let now = unused.unwrap_or_else(|| {
            let (generation, number) = (AtomicU64::new(0), AtomicU32::new(device.number()));
            Box::leak(Box::new(Record { generation, device: number }))
        });
        // Addresses of the memory before have another generation, so they do not look.
        now.device.store(device.number(), Ordering::Release);
        Lifetime(Owner { now, generation: now.generation.load(Ordering::Acquire) })
    }

    /// Returns what addresses of the memory remember.
    pub fn owner(&self) -> Owner {
        self.0
    }
}

impl Drop for Lifetime {
    fn drop(&mut self) {
        let freeing = FREEING.write().unwrap_or_else(PoisonError::into_inner);
        self.0.now.generation.fetch_add(1, Ordering::Release);
        drop(freeing);
        UNUSED.lock().unwrap_or_else(PoisonError::into_inner).push(self.0.now);
    }
}

/// Identity of the memory that an address belongs to.
#[derive(Clone, Copy)]
pub struct Owner {
    now: &'static Record,
    generation: u64,
}

impl PartialEq for Owner {
    fn eq(&self, other: &Owner) -> bool {
        std::ptr::eq(self.now, other.now) && self.generation == other.generation
    }
}

impl Owner {
    /// Returns the owner of the null address.
    pub fn nothing() -> Owner {
        Owner { now: &NOTHING, generation: 0 }
    }

    /// Returns the device that has the memory, as long as that exists; `None` for the null address.
    pub fn device(self) -> Option<DeviceId> {
        DeviceId::numbered(self.now.device.load(Ordering::Acquire))
    }

    fn is_alive(self) -> bool {
        self.now.generation.load(Ordering::Acquire) == self.generation
    }
}

/// Runs `work`, which passes addresses of memory of all `owners` to the driver of one device.
///
/// # Panics
/// Panics if some of the memory was freed, or if several devices have it.
pub fn while_alive<R>(owners: &[Owner], work: impl FnOnce() -> R) -> R {
    let _freeing = FREEING.read().unwrap_or_else(PoisonError::into_inner);
    assert!(owners.iter().all(|owner| owner.is_alive()), "device memory that was freed");
    let mut devices = owners.iter().filter_map(|owner| owner.device());
    if let Some(first) = devices.next() {
        let other = devices.find(|device| *device != first);
        assert!(other.is_none(), "one piece of work with memory of {first} and {other:?}");
    }
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_know_when_their_memory_was_freed() {
        let device = DeviceId::new("some", 0);
        let (first, second) = (Lifetime::new(device), Lifetime::new(device));
        let (one, two) = (first.owner(), second.owner());
        assert!(one != two && one == first.owner());
        while_alive(&[one, two, Owner::nothing()], || {});
        drop(first);
        // Later memory may reuse the generation's counter and is different all the same.
        let third = Lifetime::new(device);
        assert!(third.owner() != one);
        while_alive(&[two, third.owner()], || {});
        assert!(std::panic::catch_unwind(|| while_alive(&[two, one], || {})).is_err());
    }
    #[test]
    fn memory_of_several_devices_is_no_piece_of_work() {
        let one = Lifetime::new(DeviceId::new("some", 0));
        let other = Lifetime::new(DeviceId::new("some", 1));
        for owners in [[one.owner(), one.owner()], [other.owner(), Owner::nothing()]] {
            while_alive(&owners, || {});
        }
        let both = [one.owner(), Owner::nothing(), other.owner()];
        assert!(std::panic::catch_unwind(|| while_alive(&both, || {})).is_err());
        assert_eq!(one.owner().device(), Some(DeviceId::new("some", 0)));
    }
}
