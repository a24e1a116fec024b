//! The threads that wait for servers. Nothing outside of this folder is asynchronous.

use std::io;
use std::num::NonZero;

use tokio::runtime::{Builder, Handle};

use crate::interrupt::{Interrupt, LOOK};

/// Most threads. They decrypt and copy, so few are enough for a network.
const THREADS_MAX: usize = 8;

/// Threads that run requests. Dropping it ends all requests at once.
pub(crate) struct Runtime {
    /// `None` only while this is dropped.
    inner: Option<tokio::runtime::Runtime>,
    interrupt: Interrupt,
}

impl Runtime {
    pub fn start(interrupt: Interrupt) -> io::Result<Runtime> {
        let threads = std::thread::available_parallelism().map_or(2, NonZero::get);
        let inner = Builder::new_multi_thread()
            .worker_threads(threads.clamp(2, THREADS_MAX))
            .thread_name("forebay-objects")
            .enable_all()
            .build()?;
        Ok(Runtime { inner: Some(inner), interrupt })
    }

    pub fn handle(&self) -> Handle {
        self.inner.as_ref().expect("it is there until it is dropped").handle().clone()
    }

    /// Waits for `work` on this thread, unless the interrupt is requested.
    pub fn wait<T>(&self, work: impl Future<Output = T>) -> io::Result<T> {
        self.handle().block_on(async {
            let mut work = std::pin::pin!(work);
            loop {
                if self.interrupt.is_requested() {
                    // Readers try again after an error of the kind `Interrupted`.
                    return Err(io::Error::other("interrupted"));
                }
                if let Ok(done) = tokio::time::timeout(LOOK, &mut work).await {
                    return Ok(done);
                }
            }
        })
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.take() {
            // The last user may be a request on one of these threads, which must not wait for itself.
            inner.shutdown_background();
        }
    }
}
