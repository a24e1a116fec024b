//! Threads that call `pread`: works everywhere, and shows what io_uring gains.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::device::{Device, Finished, Transfer, why_not_direct};
use crate::engine::{EngineInfo, EngineOptions};
use crate::error::StoreError;
use crate::files::FileSet;

pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    started: Instant,
    writing: usize,
    info: EngineInfo,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    finished: Condvar,
    descriptors: Vec<RawFd>,
    /// Keeps the descriptors open, also for a thread that outlives the pool in a read that never
    /// ends.
    _files: FileSet,
}

#[derive(Default)]
struct State {
    /// One queue per priority.
    queues: [VecDeque<Transfer>; 3],
    finished: Vec<Finished>,
    /// How many finished transfers the waiting owner wants; 0 when it does not wait.
    wanted: usize,
    closing: bool,
}

impl Pool {
    /// `refused` says why a faster engine is not used, if one was tried.
    pub(crate) fn open(
        files: &FileSet,
        options: &EngineOptions,
        refused: Option<String>,
    ) -> Result<Pool, StoreError> {
        let descriptors: Option<Vec<RawFd>> =
            files.files().iter().map(|file| file.descriptor(options.direct)).collect();
        let Some(descriptors) = descriptors else {
            let why = "files in memory can be read by the simulated engine only".to_owned();
            return Err(StoreError::Unavailable { engine: "pread", why });
        };
        let not_direct = why_not_direct(files, options.direct);
        let info = EngineInfo {
            name: "pread",
            direct: not_direct.is_none(),
            registered_buffers: false,
            why: [refused, not_direct].into_iter().flatten().collect::<Vec<_>>().join("; "),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(State::default()),
            work: Condvar::new(),
            finished: Condvar::new(),
            descriptors,
            _files: files.clone(),
        });
        let mut pool =
            Pool { shared, threads: Vec::new(), started: Instant::now(), writing: 0, info };
        for index in 0..options.threads.min(options.queue_depth) {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new()
                .name(format!("forebay-read-{index}"))
                .spawn(move || shared.serve())
                .map_err(|source| StoreError::Engine { engine: "pread", source })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock, so the state is whole even if the lock is
        // poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        while let Some(transfer) = self.next() {
            let finished = Finished { key: transfer.key, result: self.read(&transfer) };
            let mut state = self.lock();
            state.finished.push(finished);
            let enough = state.wanted > 0 && state.finished.len() >= state.wanted;
            drop(state);
            if enough {
                self.finished.notify_one();
            }
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

    fn read(&self, transfer: &Transfer) -> Result<u32, i32> {
        let Some(&descriptor) = self.descriptors.get(transfer.file.0 as usize) else {
            return Err(libc::EBADF);
        };
        // SAFETY: `_files` keeps the descriptor open for as long as `self` lives.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        // SAFETY: `Device::start` was promised that the memory is valid for this many bytes and
        // untouched by others until the transfer is reported; arena memory is always initialised.
        let memory =
            unsafe { std::slice::from_raw_parts_mut(transfer.memory, transfer.length as usize) };
        match rustix::io::pread(descriptor, memory, transfer.offset) {
            Ok(count) => Ok(count as u32),
            Err(errno) => Err(errno.raw_os_error()),
        }
    }
}

impl Device for Pool {
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
        let mut state = self.shared.lock();
        self.writing -= state.finished.len();
        finished.append(&mut state.finished);
        Ok(())
    }

    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError> {
        let mut state = self.shared.lock();
        state.wanted = want.max(1);
        let missing = |state: &mut State| state.finished.len() < state.wanted;
        let waited = self.shared.finished.wait_timeout_while(state, timeout, missing);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.wanted = 0;
        self.writing -= state.finished.len();
        finished.append(&mut state.finished);
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
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        // A thread whose read never ends cannot be joined; it keeps what it needs alive by itself.
        if self.writing == 0 {
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}
