//! Aligned memory for direct I/O, and buffers of such memory with a bound.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Alignment of memory, offsets and lengths for direct I/O, in bytes. No file system that Linux mounts needs more for
/// blocks of up to 4 KiB.
pub const PAGE: usize = 4096;

/// Bytes that begin at a multiple of [`PAGE`].
#[derive(Debug, Default)]
pub struct Aligned {
    memory: Vec<u8>,
    first: usize,
    len: usize,
}

impl Aligned {
    /// Returns `len` bytes, all 0.
    pub fn new(len: usize) -> Aligned {
        let memory = vec![0; len + PAGE];
        let first = memory.as_ptr().align_offset(PAGE);
        Aligned { memory, first, len }
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.first..self.first + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.first..self.first + self.len]
    }
}

/// Buffers that together have a bounded size. Buffers that come back are lent again.
#[derive(Debug)]
pub(crate) struct Buffers {
    bytes_max: usize,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Aligned>,
    /// Bytes of all buffers, free and lent.
    bytes: usize,
    lent: usize,
}

/// A buffer that returns to the others on drop.
#[derive(Debug)]
pub(crate) struct Lent {
    buffer: Aligned,
    home: Arc<Buffers>,
}

impl Buffers {
    /// Creates no buffers yet. Together they will have up to `bytes_max`; one buffer is always possible.
    pub fn new(bytes_max: usize) -> Arc<Buffers> {
        Arc::new(Buffers { bytes_max, state: Mutex::default(), returned: Condvar::new() })
    }

    /// Takes a buffer of at least `len` bytes, if there is room.
    pub fn try_take(self: &Arc<Self>, len: usize) -> Option<Lent> {
        let buffer = self.pop(&mut self.lock(), len)?;
        Some(Lent { buffer, home: self.clone() })
    }

    /// Waits up to `limit` for a buffer of at least `len` bytes.
    pub fn take_within(self: &Arc<Self>, len: usize, limit: Duration) -> Option<Lent> {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(buffer) = self.pop(&mut state, len) {
                return Some(Lent { buffer, home: self.clone() });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.returned.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn pop(&self, state: &mut State, len: usize) -> Option<Aligned> {
        let fits = state.free.iter().position(|buffer| buffer.len() >= len);
        let buffer = match fits {
            Some(at) => state.free.swap_remove(at),
            None => {
                // Buffers that are too short make room for a longer one.
                while state.bytes + len > self.bytes_max
                    && let Some(short) = state.free.pop()
                {
                    state.bytes -= short.len();
                }
                if state.bytes + len > self.bytes_max && state.lent > 0 {
                    return None;
                }
                state.bytes += len;
                Aligned::new(len)
            }
        };
        state.lent += 1;
        Some(buffer)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        let mut state = self.home.lock();
        state.lent -= 1;
        state.free.push(buffer);
        drop(state);
        self.home.returned.notify_all();
    }
}

impl Deref for Lent {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_bounded() {
        let buffers = Buffers::new(4 * PAGE);
        let (first, second) = (buffers.try_take(PAGE).unwrap(), buffers.try_take(PAGE).unwrap());
        assert!(first.as_ptr().addr().is_multiple_of(PAGE) && second.len() == PAGE);
        assert!(buffers.try_take(3 * PAGE).is_none());
        assert!(buffers.take_within(3 * PAGE, Duration::from_millis(1)).is_none());
        drop((first, second));
        let larger = buffers.take_within(3 * PAGE, Duration::from_millis(1)).unwrap();
        assert_eq!(larger.len(), 3 * PAGE);
        assert!(buffers.try_take(2 * PAGE).is_none());
        drop(larger);
        // Larger than all together, but nothing else is lent.
        assert_eq!(buffers.try_take(9 * PAGE).unwrap().len(), 9 * PAGE);
    }
}
