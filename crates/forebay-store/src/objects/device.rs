//! A device that reads objects with many requests at a time.
//!
//! A request costs a latency, however short it is. So transfers that are adjacent in a file, which the scheduler makes
//! for each tensor, share a request, and its body is distributed to their memory as it arrives.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_format::FileIndex;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::{Failure, NAME, Object, ObjectOptions, Objects};
use crate::device::{Device, Finished, Transfer};
use crate::engine::{EngineInfo, Priority};
use crate::error::StoreError;
use crate::reports::Reports;

/// Largest gap in bytes between two transfers that is read along.
const READ_OVER: u64 = 64 << 10;
/// Smallest request if there are more transfers, even if other connections are free.
const REQUEST_BYTES_MIN: u64 = 1 << 20;
/// Time that a connection waits before its first request. Transfers come one by one, and all that come in this time are
/// divided among the connections.
const GATHERING: Duration = Duration::from_millis(1);

pub(crate) struct ObjectDevice {
    shared: Arc<Shared>,
    /// Objects by the number of their file.
    objects: Arc<[Arc<Object>]>,
    requests: JoinSet<()>,
    handle: Handle,
    /// Kept so that the threads of the requests live as long as this.
    _objects: Arc<Objects>,
    started: Instant,
    writing: usize,
    /// Reasons why transfers failed, by key.
    failures: HashMap<u32, Failure>,
}

struct Shared {
    state: Mutex<State>,
    finished: Reports<(u32, Result<u32, Failure>)>,
    options: ObjectOptions,
}

#[derive(Default)]
struct State {
    /// Transfers that wait, in the order of the files.
    waiting: BTreeMap<(Priority, FileIndex, u64, u32), Transfer>,
    waiting_bytes: u64,
    /// Number of connections in use.
    busy: usize,
}

impl ObjectDevice {
    /// Opens the device for the objects of a set of files, in their order.
    pub fn open(source: Arc<Objects>, objects: Arc<[Arc<Object>]>) -> ObjectDevice {
        let options = source.options();
        let state = Mutex::default();
        ObjectDevice {
            shared: Arc::new(Shared { state, finished: Reports::default(), options }),
            objects,
            requests: JoinSet::new(),
            handle: source.handle(),
            _objects: source,
            started: Instant::now(),
            writing: 0,
            failures: HashMap::new(),
        }
    }

    fn pass_on(
        &mut self,
        reported: Vec<(u32, Result<u32, Failure>)>,
        finished: &mut Vec<Finished>,
    ) {
        self.writing -= reported.len();
        for (key, result) in reported {
            let result = result.map_err(|failure| {
                self.failures.insert(key, failure);
                libc::EIO
            });
            finished.push(Finished { key, result });
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, so the state is consistent even if the lock is poisoned.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the transfers of the next request. Gives the connection back if nothing waits.
    fn next(&self) -> Option<Run<'_>> {
        let mut state = self.lock();
        let transfers = state.next(&self.options);
        if transfers.is_empty() {
            // In the same moment, so that a transfer that comes now finds the connection free.
            state.busy -= 1;
            return None;
        }
        let at = transfers[0].offset;
        Some(Run { shared: self, transfers, current: 0, done: 0, at, failure: None })
    }

    fn finish(&self, key: u32, result: Result<u32, Failure>) {
        self.finished.add((key, result));
    }
}

impl State {
    /// Takes the transfers of the next request. Nothing waits if there are none.
    fn next(&mut self, options: &ObjectOptions) -> Vec<Transfer> {
        // Every connection gets a share of what waits, also those that are in use: near the end of a load, requests become
        // smaller, so that all connections end at about the same time.
        let most = options.request_bytes as u64;
        let share = (self.waiting_bytes / options.connections as u64).max(REQUEST_BYTES_MIN);
        let mut run: Vec<Transfer> = Vec::new();
        let mut bytes = 0;
        while let Some(entry) = self.waiting.first_entry() {
            let next = entry.get();
            let length = u64::from(next.length);
            if let Some(last) = run.last() {
                let end = last.offset + u64::from(last.length);
                let gap = next.offset.checked_sub(end).filter(|gap| *gap <= READ_OVER);
                let is_near = last.file == next.file && last.priority == next.priority;
                if !is_near || gap.is_none() || bytes >= share || bytes + length > most {
                    break;
                }
            }
            bytes += length;
            run.push(entry.remove());
        }
        self.waiting_bytes -= bytes;
        run
    }
}

/// Runs requests one after the other until nothing waits.
async fn serve(shared: Arc<Shared>, objects: Arc<[Arc<Object>]>) {
    tokio::time::sleep(GATHERING).await;
    loop {
        let Some(run) = shared.next() else { return };
        let object = run.transfers.first().and_then(|first| objects.get(first.file.0 as usize));
        // Without an object, dropping the run says that it has failed.
        if let Some(object) = object.cloned() {
            run.read(&object).await;
        }
    }
}

/// Transfers of a request. Those that have not ended when this is dropped have failed.
struct Run<'a> {
    shared: &'a Shared,
    transfers: Vec<Transfer>,
    /// Index of the transfer whose bytes come next, and how many of them have arrived.
    current: usize,
    done: u64,
    /// Offset of the next byte in the object.
    at: u64,
    failure: Option<Failure>,
}

impl Run<'_> {
    async fn read(mut self, object: &Object) {
        let end = self.transfers.last().map_or(0, |last| last.offset + u64::from(last.length));
        // The scheduler has compared the wanted bytes with the size. Only reads of coded blocks, which are of whole
        // pages, may go beyond the end.
        let range = self.at..end.min(object.bytes());
        if let Err(failure) = object.read(range, &mut |bytes| self.take(bytes)).await {
            self.failure = Some(failure);
            return;
        }
        if let Some(transfer) = self.transfers.get(self.current) {
            self.shared.finish(transfer.key, Ok(self.done as u32));
            self.current += 1;
        }
    }

    /// Puts bytes where they belong.
    fn take(&mut self, mut bytes: &[u8]) {
        while let Some(transfer) = self.transfers.get(self.current) {
            // What lies between two transfers is not wanted.
            let gap = (transfer.offset + self.done).saturating_sub(self.at).min(bytes.len() as u64);
            bytes = &bytes[gap as usize..];
            self.at += gap;
            if bytes.is_empty() {
                return;
            }
            let left = u64::from(transfer.length) - self.done;
            let count = left.min(bytes.len() as u64);
            // SAFETY: `Device::start` promises that the memory is valid for the transfer's length, and nothing else
            // uses it until the transfer is reported as finished, which happens below or when `self` is dropped. The
            // count is at most what is left of the length.
            unsafe {
                let to = transfer.memory.add(self.done as usize);
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, count as usize);
            }
            bytes = &bytes[count as usize..];
            self.at += count;
            self.done += count;
            if self.done == u64::from(transfer.length) {
                self.current += 1;
                self.done = 0;
                self.shared.finish(transfer.key, Ok(transfer.length));
            }
        }
    }
}

// SAFETY: the memory of the transfers is lent to whichever thread has this.
unsafe impl Send for Run<'_> {}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        for transfer in self.transfers.get(self.current..).unwrap_or_default() {
            let failure = match &self.failure {
                None => {
                    Failure { attempts: 1, source: std::io::Error::other("the read was ended") }
                }
                Some(Failure { attempts, source }) => {
                    let source = std::io::Error::new(source.kind(), source.to_string());
                    Failure { attempts: *attempts, source }
                }
            };
            self.shared.finish(transfer.key, Err(failure));
        }
    }
}

impl Device for ObjectDevice {
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError> {
        self.failures.remove(&transfer.key);
        let mut state = self.shared.lock();
        let place = (transfer.priority, transfer.file, transfer.offset, transfer.key);
        state.waiting_bytes += u64::from(transfer.length);
        state.waiting.insert(place, transfer);
        self.writing += 1;
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        let mut state = self.shared.lock();
        let free = self.shared.options.connections.saturating_sub(state.busy);
        let wanted = free.min(state.waiting.len());
        state.busy += wanted;
        drop(state);
        while self.requests.try_join_next().is_some() {}
        for _ in 0..wanted {
            let serve = serve(Arc::clone(&self.shared), Arc::clone(&self.objects));
            self.requests.spawn_on(serve, &self.handle);
        }
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
        let why = String::new();
        EngineInfo { name: NAME, direct: true, registered_buffers: false, why }
    }

    fn take_failure(&mut self, key: u32) -> Option<(u32, std::io::Error)> {
        self.failures.remove(&key).map(|failure| (failure.attempts, failure.source))
    }

    fn end_early(&mut self) -> bool {
        let mut state = self.shared.lock();
        let waiting = std::mem::take(&mut state.waiting);
        state.waiting_bytes = 0;
        drop(state);
        for transfer in waiting.into_values() {
            let source = std::io::Error::other("the read was ended");
            self.shared.finish(transfer.key, Err(Failure { attempts: 0, source }));
        }
        self.requests.abort_all();
        true
    }
}
