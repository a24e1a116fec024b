//! A pool of reader threads, each of which reads one span at a time. Devices whose calls block
//! until the disk answers share it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{Device, Finished, Transfer};
use crate::engine::{EngineInfo, Priority};
use crate::error::StoreError;
use crate::reports::Reports;
use crate::trace::PageFaults;

/// The way in which one reader thread reads one span.
pub(crate) trait SpanReader: Send + Sync + 'static {
    /// Reads the span. Returns the number of bytes or an errno, and the page faults if the device
    /// copies out of a memory map.
    ///
    /// # Safety
    /// The requirements of [`Device::start`] apply: nothing else may use the transfer's memory, and
    /// it must be initialised.
    unsafe fn read(&self, transfer: &Transfer) -> (Result<u32, i32>, Option<PageFaults>);
}

pub(crate) struct Pool<R> {
    shared: Arc<Shared<R>>,
    threads: Vec<JoinHandle<()>>,
    started: Instant,
    writing: usize,
    info: EngineInfo,
    /// Page faults of the last transfer with each key.
    faults: Vec<Option<PageFaults>>,
}

/// A finished transfer, and the page faults that it met.
type Report = (Finished, Option<PageFaults>);

struct Shared<R> {
    state: Mutex<State>,
    work: Condvar,
    finished: Reports<Report>,
    /// The reader with its descriptors and mappings. It stays alive for a thread that outlives the
    /// pool because its read never ends.
    reader: R,
}

#[derive(Default)]
struct State {
    /// One queue per priority.
    queues: [VecDeque<Transfer>; Priority::COUNT],
    closing: bool,
}

impl<R: SpanReader> Pool<R> {
    pub(crate) fn start(
        reader: R,
        info: EngineInfo,
        threads: usize,
        queue_depth: usize,
    ) -> Result<Pool<R>, StoreError> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::default()),
            work: Condvar::new(),
            finished: Reports::default(),
            reader,
        });
        let mut pool = Pool {
            shared,
            threads: Vec::with_capacity(threads),
            started: Instant::now(),
            writing: 0,
            info,
            faults: vec![None; queue_depth],
        };
        for index in 0..threads.min(queue_depth) {
            let shared = Arc::clone(&pool.shared);
            let engine = pool.info.name;
            let thread = std::thread::Builder::new()
                .name(format!("forebay-{engine}-{index}"))
                .spawn(move || shared.serve())
                .map_err(|source| StoreError::Engine { engine, source })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Returns the number of threads, which is also the number of spans read at a time.
    pub(crate) fn threads(&self) -> usize {
        self.threads.len()
    }
}

impl<R: SpanReader> Shared<R> {
    fn serve(&self) {
        while let Some(transfer) = self.next() {
            // SAFETY: the caller of `Device::start` made this promise, and only this thread has the
            // transfer.
            let (result, faults) = unsafe { self.reader.read(&transfer) };
            self.finished.add((Finished { key: transfer.key, result }, faults));
        }
    }

    fn next(&self) -> Option<Transfer> {
        let mut state = self.lock();
        loop {
            if state.closing {
                return None;
            }
            if let Some(transfer) = state.queues.iter_mut().find_map(VecDeque::pop_front) {
                return Some(transfer);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<R> Shared<R> {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, so the state is consistent even if the lock is
        // poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<R> Pool<R> {
    /// Moves reported transfers to the owner's list and updates the counts.
    fn pass_on(&mut self, reported: Vec<Report>, finished: &mut Vec<Finished>) {
        self.writing -= reported.len();
        for (end, met) in reported {
            self.faults[end.key as usize] = met;
            finished.push(end);
        }
    }
}

impl<R: SpanReader> Device for Pool<R> {
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError> {
        self.shared.lock().queues[transfer.priority as usize].push_back(transfer);
        self.writing += 1;
        self.shared.work.notify_one();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        Ok(())
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError> {
        self.pass_on(self.shared.finished.take(), finished);
        Ok(())
    }

    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError> {
        self.pass_on(self.shared.finished.wait(want, timeout), finished);
        Ok(())
    }

    fn writing(&self) -> usize {
        self.writing
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn describe(&self) -> EngineInfo {
        self.info.clone()
    }

    fn page_faults(&self, key: u32) -> Option<PageFaults> {
        self.faults.get(key as usize).copied().flatten()
    }
}

impl<R> Drop for Pool<R> {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        // A thread whose read never ends cannot be joined. It holds `shared`, so what it uses stays
        // alive.
        if self.writing == 0 {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}
