//! Buffers for reads, which come back when nothing uses them any more.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use forebay_store::SlotBuffer;

/// Tells a thread that something has changed.
#[derive(Default)]
pub struct Bell {
    rung: Mutex<u64>,
    changed: Condvar,
}

impl Bell {
    pub fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.changed.notify_all();
    }

    /// Returns how often the bell was rung.
    pub fn rung(&self) -> u64 {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it was rung more often than this.
    pub fn wait_past(&self, rung: u64) {
        let now = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(now, |now| *now == rung);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// Buffers that are free.
pub struct Buffers {
    free: Mutex<Vec<SlotBuffer>>,
    /// Rung when one becomes free.
    bell: Arc<Bell>,
}

impl Buffers {
    pub fn new(free: Vec<SlotBuffer>, bell: Arc<Bell>) -> Arc<Buffers> {
        Arc::new(Buffers { free: Mutex::new(free), bell })
    }

    pub fn take(&self) -> Option<SlotBuffer> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    pub fn put(&self, buffer: SlotBuffer) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
        self.bell.ring();
    }
}

/// A buffer with bytes of a file.
pub struct Filled {
    buffer: Option<SlotBuffer>,
    home: Arc<Buffers>,
}

impl Filled {
    pub fn new(buffer: SlotBuffer, home: &Arc<Buffers>) -> Filled {
        Filled { buffer: Some(buffer), home: Arc::clone(home) }
    }
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], SlotBuffer::as_slice)
    }
}

impl Drop for Filled {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.home.put(buffer);
        }
    }
}
