//! Memory of large requests.
//!
//! A request of 30 MB may need a gigabyte while its JSON is read and its prompt is rendered. The allocator would keep most of that for
//! later requests, in an area for each thread, so a thread gives it back to the system.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use forebay_engine::{give_back_free_memory, keep_little_free_memory};
use hyper::body::Body as _;

/// Size from which a request is large.
const LARGE_BYTES: u64 = 1 << 20;
/// Time between two times that memory is given back.
const EVERY: Duration = Duration::from_secs(2);
/// How long memory is given back after the last large request. Work for a client that has gone ends later.
const AFTER: Duration = Duration::from_secs(60);

/// Large requests that run, and when the last one ended.
pub struct LargeRequests {
    started: Instant,
    running: AtomicUsize,
    /// Milliseconds between the start and the end of the last one, and 0 before the first.
    last_ms: AtomicU64,
}

impl LargeRequests {
    pub fn new() -> LargeRequests {
        LargeRequests {
            started: Instant::now(),
            running: AtomicUsize::new(0),
            last_ms: AtomicU64::new(0),
        }
    }

    /// Returns true if there may be memory to give back.
    fn is_due(&self) -> bool {
        let last_ms = self.last_ms.load(Ordering::Relaxed);
        let since = self.started.elapsed().saturating_sub(Duration::from_millis(last_ms));
        self.running.load(Ordering::Relaxed) > 0 || last_ms > 0 && since < AFTER
    }
}

/// A large request that runs.
struct Running(Arc<LargeRequests>);

impl Drop for Running {
    fn drop(&mut self) {
        let elapsed = self.0.started.elapsed().as_millis() as u64;
        self.0.last_ms.store(elapsed.max(1), Ordering::Relaxed);
        self.0.running.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Notes large requests. One whose size is not known counts as large.
pub async fn note(State(all): State<Arc<LargeRequests>>, request: Request, next: Next) -> Response {
    let is_large = request.body().size_hint().upper().is_none_or(|bytes| bytes >= LARGE_BYTES);
    let _running = is_large.then(|| {
        all.running.fetch_add(1, Ordering::Relaxed);
        Running(all)
    });
    next.run(request).await
}

/// The thread that gives memory back. It ends with this value.
pub struct Cleaner {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Cleaner {
    /// Starts the thread, and makes the allocator keep little for the whole process.
    ///
    /// # Errors
    /// Returns an error if the system starts no thread.
    pub fn start(requests: Arc<LargeRequests>) -> std::io::Result<Cleaner> {
        keep_little_free_memory();
        let (stop, stopped) = channel::<()>();
        let clean = move || {
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                if requests.is_due() {
                    give_back_free_memory();
                }
            }
        };
        let thread = thread::Builder::new().name("memory".into()).spawn(clean)?;
        Ok(Cleaner { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that gives memory back has panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_while_large_requests_run_and_after_them() {
        let all = Arc::new(LargeRequests::new());
        assert!(!all.is_due());
        all.running.fetch_add(1, Ordering::Relaxed);
        let running = Running(all.clone());
        assert!(all.is_due());
        drop(running);
        assert!(all.is_due() && all.running.load(Ordering::Relaxed) == 0);
        let long_ago = Instant::now().checked_sub(2 * AFTER).expect("the clock began before");
        let ended = LargeRequests { started: long_ago, running: 0.into(), last_ms: 1.into() };
        assert!(!ended.is_due());
    }
}
