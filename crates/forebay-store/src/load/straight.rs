//! Loads that bypass host memory, as far as the caller can see. Each thread asks another library to bring a span of a
//! file to the device, and waits for it. The caller provides the [`DeviceReader`] that reads. This module ensures that
//! every byte is read exactly once.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forebay_format::{Extent, FileIndex};

use super::{LoadStatistics, PROGRESS_PAUSE, UploadPlan, process_seconds};
use crate::engine::BlockLabel;
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;

/// Reads spans of files into memory of a device. Many threads call it at the same time.
///
/// It owns the device's memory. If a load is abandoned because a read hangs, the thread that it leaves behind still
/// holds that memory.
pub trait DeviceReader: Send + Sync {
    /// Returns the name used in errors and statistics.
    fn name(&self) -> &'static str;

    /// Reads as much of a span as it can, from its first byte, and waits until the bytes are on the device. Returns the
    /// number of bytes, which is 0 only at the end of the file.
    ///
    /// # Errors
    /// Returns any error of the system or the device. [`io::ErrorKind::Interrupted`] does not count as a failure.
    fn read(&self, span: DeviceSpan) -> io::Result<usize>;
}

/// A span of a file and its address on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpan {
    pub file: FileIndex,
    pub offset: u64,
    pub length: usize,
    /// Address of the first byte, as the [`DeviceReader`] counts addresses.
    pub to: u64,
}

/// Options of a load with a [`DeviceReader`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StraightOptions {
    /// Number of threads, each of which reads one span at a time. 0 counts as 1.
    pub threads: usize,
    /// Number of times that the failed reads of one span are repeated.
    pub retries: u32,
    /// Longest time that one read may take.
    pub stall_timeout: Duration,
}

impl Default for StraightOptions {
    fn default() -> StraightOptions {
        let engine = crate::EngineOptions::default();
        let (retries, stall_timeout) = (engine.retries, engine.stall_timeout);
        StraightOptions { threads: 16, retries, stall_timeout }
    }
}

/// State that the threads share. A thread that hangs keeps it alive.
struct Work {
    reader: Arc<dyn DeviceReader>,
    files: FileSet,
    spans: Vec<(BlockLabel, DeviceSpan)>,
    retries: u32,
    /// Index of the span to begin next. No span begins once it is past the last.
    next: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    done_bytes: u64,
    /// For each thread: the start time of its current read, and the index of the span.
    reading: Vec<Option<(Instant, usize)>>,
    /// Number of threads that have not ended.
    running: usize,
    failure: Option<ReadError>,
}

/// Loads everything in `plan`, which must have been made for these files, to a device. `progress` is called with the
/// number of bytes done and the total.
///
/// # Errors
/// Returns [`StoreError::Interrupted`] if the files' [`crate::Interrupt`] was requested, and [`StoreError::Block`] for
/// the first read that failed. Returns [`StoreError::Unavailable`] for files whose checksums must be verified, because
/// the host never sees their bytes.
pub fn load_straight(
    reader: &Arc<dyn DeviceReader>,
    files: &FileSet,
    plan: &UploadPlan,
    options: StraightOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<LoadStatistics, StoreError> {
    if files.is_coded() {
        let why = "what it reads cannot be decoded".to_owned();
        return Err(StoreError::Unavailable { engine: reader.name(), why });
    }
    if files.is_checked() {
        let why = "what it reads cannot be compared with the checksums of a pack".to_owned();
        return Err(StoreError::Unavailable { engine: reader.name(), why });
    }
    let (started, processor, bytes) = (Instant::now(), process_seconds(), plan.bytes());
    let threads = options.threads.max(1);
    let work = Arc::new(Work {
        reader: Arc::clone(reader),
        files: files.clone(),
        spans: plan.straight(),
        retries: options.retries,
        next: AtomicUsize::new(0),
        state: Mutex::new(State {
            done_bytes: 0,
            reading: vec![None; threads],
            running: 0,
            failure: None,
        }),
        changed: Condvar::new(),
    });
    progress(0, bytes);
    let mut handles = Vec::with_capacity(threads);
    for number in 0..threads.min(work.spans.len()) {
        let worker = Running::new(&work, number);
        let spawned = thread::Builder::new().spawn(move || worker.read_all());
        handles.push(spawned.map_err(|source| {
            work.stop();
            StoreError::Engine { engine: reader.name(), source }
        })?);
    }
    work.watch(options.stall_timeout, &mut |done| progress(done, bytes))?;
    for handle in handles {
        // `watch` has returned, so every thread has ended or is about to.
        handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
    let (done, failure) = {
        let mut state = work.lock();
        (state.done_bytes, state.failure.take())
    };
    progress(done, bytes);
    match failure {
        Some(error) => Err(error.into()),
        None => Ok(LoadStatistics {
            bytes,
            engine_bytes: bytes,
            engine_stored_bytes: bytes,
            seconds: started.elapsed().as_secs_f64(),
            cpu_seconds: process_seconds() - processor,
            ..LoadStatistics::default()
        }),
    }
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prevents all threads from beginning another span.
    fn stop(&self) {
        self.next.store(self.spans.len(), Ordering::Relaxed);
    }

    /// Waits until all threads have ended.
    ///
    /// # Errors
    /// Returns [`ReadError::Stalled`] if a read takes longer than `patience`, and [`StoreError::Interrupted`]. Threads
    /// that are still reading then end by themselves.
    fn watch(&self, patience: Duration, progress: &mut dyn FnMut(u64)) -> Result<(), StoreError> {
        let mut state = self.lock();
        while state.running > 0 {
            if let Err(interrupted) = self.files.check_interrupt() {
                self.stop();
                return Err(interrupted);
            }
            let waited = self.changed.wait_timeout(state, PROGRESS_PAUSE.min(patience));
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            let oldest = state.reading.iter().flatten().min_by_key(|(since, _)| *since).copied();
            if let Some((since, index)) = oldest
                && since.elapsed() > patience
            {
                self.stop();
                let (block, span) = self.spans[index];
                let (file, offset) = (self.path(span.file), span.offset);
                return Err(ReadError::Stalled { file, offset, block, waited: patience }.into());
            }
            let done = state.done_bytes;
            // The callback may be slow, so do not hold the lock while it runs.
            drop(state);
            progress(done);
            state = self.lock();
        }
        Ok(())
    }

    fn path(&self, file: FileIndex) -> std::path::PathBuf {
        self.files.path(file).unwrap_or_default()
    }

    /// Reads one whole span, in as many reads as it takes. Calls `began` before each of them.
    fn bring(
        &self,
        block: BlockLabel,
        whole: DeviceSpan,
        began: &mut dyn FnMut(),
    ) -> Result<(), ReadError> {
        let (mut span, mut attempts, mut number) = (whole, 0, 0);
        while span.length > 0 {
            began();
            let extent =
                Extent { file: span.file, offset: span.offset, length: span.length as u64 };
            let result =
                self.files.record_straight(extent, block, number, || self.reader.read(span));
            number += 1;
            let failed = |source, attempts| {
                let (file, offset) = (self.path(span.file), span.offset);
                ReadError::Io { file, offset, block, attempts, source }
            };
            match result {
                Ok(0) => {
                    let wanted_end = span.offset + span.length as u64;
                    let (file, file_end) = (self.path(span.file), span.offset);
                    return Err(ReadError::UnexpectedEnd { file, file_end, wanted_end, block });
                }
                Ok(count) if count <= span.length => {
                    span.offset += count as u64;
                    span.to += count as u64;
                    span.length -= count;
                }
                Ok(_) => {
                    // The bytes after the span on the device may have been overwritten.
                    let source = io::Error::other("more bytes came than were asked for");
                    return Err(failed(source, attempts + 1));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    attempts += 1;
                    if attempts > self.retries {
                        return Err(failed(source, attempts));
                    }
                }
            }
        }
        Ok(())
    }
}

/// One running thread. Dropping it reports the end of the thread, even if the thread panics.
struct Running {
    work: Arc<Work>,
    number: usize,
}

impl Running {
    fn new(work: &Arc<Work>, number: usize) -> Running {
        work.lock().running += 1;
        Running { work: Arc::clone(work), number }
    }

    fn read_all(self) {
        let Running { work, number } = &self;
        loop {
            let index = work.next.fetch_add(1, Ordering::Relaxed);
            let Some(&(block, span)) = work.spans.get(index) else { return };
            let mut began = || work.lock().reading[*number] = Some((Instant::now(), index));
            let result = work.bring(block, span, &mut began);
            let mut state = work.lock();
            state.reading[*number] = None;
            match result {
                Ok(()) => state.done_bytes += span.length as u64,
                Err(error) => {
                    state.failure.get_or_insert(error);
                    work.stop();
                }
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut state = self.work.lock();
        state.running -= 1;
        state.reading[self.number] = None;
        drop(state);
        self.work.changed.notify_all();
    }
}
