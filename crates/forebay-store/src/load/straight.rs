//! Loads that pass host memory by, as far as the caller can see: threads that each ask another library to bring a span of
//! a file to the device, and wait. What reads is the caller's; that all bytes come, once, is checked here.

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

/// Brings spans of files to memory of a device. Called by many threads at a time.
///
/// It owns the device's memory: a load that is given up because a read hangs leaves a thread behind, which holds it.
pub trait DeviceReader: Send + Sync {
    /// What errors and statistics call it.
    fn name(&self) -> &'static str;

    /// Reads as much as it can of a span, from its first byte, and waits until it is on the device. Gives the number of
    /// bytes: 0 at the end of the file alone.
    ///
    /// # Errors
    /// Whatever the system or the device says. [`io::ErrorKind::Interrupted`] is no failure.
    fn read(&self, span: DeviceSpan) -> io::Result<usize>;
}

/// Bytes of a file and their place on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpan {
    pub file: FileIndex,
    pub offset: u64,
    pub length: usize,
    /// Address of the first byte, as the [`DeviceReader`] counts addresses.
    pub to: u64,
}

/// How such a load works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StraightOptions {
    /// Threads that read, each one span at a time; at least 1.
    pub threads: usize,
    /// How often a read that failed is repeated.
    pub retries: u32,
    /// How long one read may take.
    pub stall_timeout: Duration,
}

impl Default for StraightOptions {
    fn default() -> StraightOptions {
        let engine = crate::EngineOptions::default();
        let (retries, stall_timeout) = (engine.retries, engine.stall_timeout);
        StraightOptions { threads: 16, retries, stall_timeout }
    }
}

/// What the threads share, and what stays with one that hangs.
struct Work {
    reader: Arc<dyn DeviceReader>,
    files: FileSet,
    spans: Vec<(BlockLabel, DeviceSpan)>,
    retries: u32,
    /// The span that is begun next; none is when this is past the last.
    next: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    done_bytes: u64,
    /// What each thread reads, and since when.
    reading: Vec<Option<(Instant, usize)>>,
    /// Threads that have not ended.
    running: usize,
    failure: Option<ReadError>,
}

/// Brings everything of `plan`, which was made for these files, to a device. `progress` gets the bytes that are done and
/// those of the plan.
///
/// # Errors
/// [`StoreError::Interrupted`] when the files' [`crate::Interrupt`] says so; the first read that failed ([`StoreError::Block`]), and [`StoreError::Unavailable`] for files that are to be compared
/// with checksums: nobody here sees their bytes.
pub fn load_straight(
    reader: &Arc<dyn DeviceReader>,
    files: &FileSet,
    plan: &UploadPlan,
    options: StraightOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<LoadStatistics, StoreError> {
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
        // All of them have ended, or are about to.
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
            seconds: started.elapsed().as_secs_f64(),
            cpu_seconds: process_seconds() - processor,
            ..LoadStatistics::default()
        }),
    }
}

impl Work {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets no thread begin anything any more.
    fn stop(&self) {
        self.next.store(self.spans.len(), Ordering::Relaxed);
    }

    /// Waits until all threads have ended, or one has read for too long.
    ///
    /// # Errors
    /// [`ReadError::Stalled`]; [`StoreError::Interrupted`]. Threads that still read then end by themselves.
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
            // The callback may take its time.
            drop(state);
            progress(done);
            state = self.lock();
        }
        Ok(())
    }

    fn path(&self, file: FileIndex) -> std::path::PathBuf {
        self.files.path(file).unwrap_or_default()
    }

    /// Brings one span, in as many reads as it takes.
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
                    // Nobody knows what lies behind the span now.
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

/// One thread's part. That it has ended is noticed even if it panics.
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
