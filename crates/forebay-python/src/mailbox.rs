//! Things that threads without the GIL leave for a thread or an event loop of Python.

use std::io::{self, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A list whose file descriptor is readable while something waits in it.
pub struct Mailbox<T> {
    items: Mutex<Vec<T>>,
    reader: UnixStream,
    writer: UnixStream,
}

impl<T> Mailbox<T> {
    pub fn new() -> io::Result<Mailbox<T>> {
        let (reader, writer) = UnixStream::pair()?;
        reader.set_nonblocking(true)?;
        writer.set_nonblocking(true)?;
        Ok(Mailbox { items: Mutex::default(), reader, writer })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<T>> {
        self.items.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn fileno(&self) -> i32 {
        self.reader.as_raw_fd()
    }

    /// Adds an item, unless there are `most` of them. Returns false if there are.
    pub fn add(&self, item: T, most: usize) -> bool {
        let mut items = self.lock();
        if items.len() >= most {
            return false;
        }
        items.push(item);
        if items.len() == 1 {
            let _ = (&self.writer).write(&[1]);
        }
        true
    }

    /// Takes all items.
    pub fn take(&self) -> Vec<T> {
        let mut items = self.lock();
        // There is a byte at most: the first of some items brings it. Without one, this is an error that means nothing.
        let _ = (&self.reader).read(&mut [0; 1]);
        std::mem::take(&mut *items)
    }
}
