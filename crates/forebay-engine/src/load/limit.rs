//! What disk and page cache give at best, measured in the run that is compared with it.

use std::num::NonZero;
use std::time::Duration;

use forebay_format::FileIndex;
use forebay_store::{DiskProbe, DiskRate, FileSet, IoKind, LoadStatistics, ProbeLength, copy_rate};
use serde::Serialize;

use super::LoadRun;
use crate::EngineError;
use crate::doctor::ReadChoice;

/// How long the disk is measured at a time: before each run and after the last.
const DISK_TIME: Duration = Duration::from_millis(600);
/// How long copies with one number of threads are measured.
const COPY_TIME: Duration = Duration::from_millis(150);

/// With this share in the page cache the disk does not matter.
const MOSTLY: f64 = 0.95;

/// The limits of this run.
#[derive(Debug, Clone, Serialize)]
pub struct LoadLimit {
    /// Plain direct reads into a small ring: the best of several measurements around the runs.
    pub disk: Option<DiskRate>,
    pub disk_request_bytes: usize,
    pub disk_queue_depth: usize,
    /// The worst of these measurements: how much the disk's rate varies by itself.
    pub disk_bytes_per_second_min: Option<f64>,
    /// Copies from the page cache into memory that is resident: the best number of threads.
    pub copy_bytes_per_second: Option<f64>,
    pub copy_threads: Option<usize>,
    /// Copies from pinned memory to the device, in pieces as large as those of the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_bytes_per_second: Option<f64>,
    /// Why something is not measured; empty if everything is.
    pub why: String,
    #[serde(skip)]
    kind: IoKind,
    /// The largest file, and its bytes.
    #[serde(skip)]
    file: (FileIndex, u64),
    #[serde(skip)]
    total_bytes: u64,
    /// Where in the file the disk is measured next.
    #[serde(skip)]
    next: u64,
}

impl LoadLimit {
    pub(super) fn new(files: &FileSet, choice: &ReadChoice) -> LoadLimit {
        let sizes = (0..files.len() as u32).map(FileIndex);
        let sizes = sizes.map(|index| (index, files.file_bytes(index).unwrap_or(0)));
        LoadLimit {
            disk: None,
            disk_request_bytes: choice.request_bytes,
            disk_queue_depth: choice.queue_depth,
            disk_bytes_per_second_min: None,
            copy_bytes_per_second: None,
            copy_threads: None,
            device_bytes_per_second: None,
            why: String::new(),
            kind: choice.kind,
            file: sizes.clone().max_by_key(|&(_, bytes)| bytes).unwrap_or((FileIndex(0), 0)),
            total_bytes: sizes.map(|(_, bytes)| bytes).sum(),
            next: 0,
        }
    }

    /// Measures the disk, unless the load will hardly need it.
    pub(super) fn measure_disk(
        &mut self,
        files: &FileSet,
        cached_bytes: u64,
    ) -> Result<(), EngineError> {
        if cached_bytes as f64 > MOSTLY * self.total_bytes as f64 {
            return Ok(());
        }
        if let Some(why) = files.why_not_direct() {
            self.why = format!("the disk's limit cannot be measured: {why}");
            return Ok(());
        }
        let probe = DiskProbe {
            kind: self.kind,
            request_bytes: self.disk_request_bytes,
            depth: self.disk_queue_depth,
            memory_bytes: 0,
        };
        let (file, bytes) = self.file;
        if bytes < probe.request_bytes as u64 {
            self.why = "the file is too small to measure the disk with".to_owned();
            return Ok(());
        }
        // Not what was read a moment ago: somebody below a virtual disk may still have it in memory.
        let rate = probe.rate(files, file, self.next..bytes, ProbeLength::of_time(DISK_TIME))?;
        self.next = self.next.saturating_add(rate.bytes) / 4096 * 4096;
        if self.next.saturating_add(rate.bytes) > bytes {
            self.next = 0;
        }
        let least = self.disk_bytes_per_second_min.unwrap_or(f64::INFINITY);
        self.disk_bytes_per_second_min = Some(least.min(rate.bytes_per_second));
        let best = self.disk.as_ref().map_or(0.0, |disk| disk.bytes_per_second);
        if rate.bytes_per_second > best {
            self.disk = Some(rate);
        }
        Ok(())
    }

    /// What can be measured when all runs are done.
    pub(super) fn measure_again(
        &mut self,
        files: &FileSet,
        runs: &[LoadRun],
    ) -> Result<(), EngineError> {
        self.measure_disk(files, files.cached_bytes()?.0)?;
        if runs.iter().any(|run| run.statistics.cached_bytes > 0) {
            self.measure_copies(files)?;
        }
        Ok(())
    }

    /// Measures copies with 1, 2, 4, ... threads up to the number of processors. What is not cached
    /// any more becomes so.
    fn measure_copies(&mut self, files: &FileSet) -> Result<(), EngineError> {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let (file, bytes) = self.file;
        let mut threads = 1;
        loop {
            let rate = copy_rate(files, file, 0..bytes, threads, COPY_TIME)?;
            if rate > self.copy_bytes_per_second {
                (self.copy_bytes_per_second, self.copy_threads) = (rate, Some(threads));
            }
            if threads >= processors {
                return Ok(());
            }
            threads = (threads * 2).min(processors);
        }
    }

    /// The least time for what a load had to read and to copy, side by side; `None` when a limit
    /// that it needs was not measured. Weights on a device are held against disk and device alone: copies from the page
    /// cache are work of our own.
    pub(super) fn seconds(&self, load: &LoadStatistics) -> Option<f64> {
        let disk = self.disk.as_ref().map(|disk| disk.bytes_per_second);
        let mut from_cache = load.cached_bytes + load.engine_cached_bytes;
        if disk.is_none() && from_cache as f64 > MOSTLY * load.bytes as f64 {
            // The few bytes that were not cached would not show in a limit.
            from_cache = load.bytes;
        }
        let from_disk = load.bytes.saturating_sub(from_cache);
        let part = |bytes: u64, rate: Option<f64>| match bytes {
            0 => Some(0.0),
            _ => rate.map(|rate| bytes as f64 / rate),
        };
        let copies = match self.device_bytes_per_second {
            Some(_) => part(load.bytes, self.device_bytes_per_second)?,
            None => part(from_cache, self.copy_bytes_per_second)?,
        };
        let seconds = part(from_disk, disk)?.max(copies);
        (seconds > 0.0).then_some(seconds)
    }
}
