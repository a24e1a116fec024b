//! Limits of the disk and the page cache, measured in the same run as the load that is compared with them.

use std::num::NonZero;
use std::time::Duration;

use forebay_format::FileIndex;
use forebay_options::OptionName;
use forebay_store::{DiskProbe, DiskRate, FileSet, IoKind, LoadStatistics, ProbeLength, copy_rate};
use serde::Serialize;

use super::LoadRun;
use crate::doctor::ReadChoice;
use crate::load::error::LoadError;
use crate::statistics::median;

/// Duration of one disk reading beside runs that are not cold, and the shortest duration beside cold runs.
const SHORT: Duration = Duration::from_millis(600);
/// Longest duration of the readings beside one cold run.
const LONG: Duration = Duration::from_secs(10);
/// Duration of the measurement of copies with one number of threads.
const COPY_TIME: Duration = Duration::from_millis(150);

/// Share of the files in the page cache above which the disk does not matter.
const MOSTLY: f64 = 0.95;

/// Measurements made beside the runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beside {
    Nothing,
    /// The page cache, and the disk for the shortest time that gives a rate.
    Short,
    /// The disk for as long as the runs, which are cold.
    AsLong,
}

/// One plain reading of the disk, with direct I/O into a small ring.
#[derive(Debug, Clone, Serialize)]
pub struct DiskReading {
    /// Number of runs that had ended when the reading began.
    pub after_runs: usize,
    pub bytes: u64,
    pub seconds: f64,
    pub bytes_per_second: f64,
}

/// Limits of this run.
///
/// Disks that are throttled by a token bucket, as those of virtual machines are, give twice their rate for some
/// gigabytes after a pause. A short reading sees such a burst, and a load does not. So the disk is read plainly before
/// each cold run and after the last one, in two halves. Together the halves read as much as a run, for up to ten
/// seconds. A run is compared with the half right before it and the half right after it, because these find the bucket
/// in the same state as the run does.
#[derive(Debug, Clone, Serialize)]
pub struct LoadLimit {
    /// Best of all plain readings. On a disk with bursts it is more than the disk sustains.
    pub disk: Option<DiskRate>,
    pub disk_request_bytes: usize,
    pub disk_queue_depth: usize,
    /// Worst of these readings, which shows how much the disk's rate varies by itself.
    pub disk_bytes_per_second_min: Option<f64>,
    /// Median of the readings. `None` unless the readings are as long as the runs, as they are beside cold runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_sustained_bytes_per_second: Option<f64>,
    /// All readings in order.
    pub disk_readings: Vec<DiskReading>,
    /// Rate of copies from the page cache into resident memory, with the best number of threads.
    pub copy_bytes_per_second: Option<f64>,
    pub copy_threads: Option<usize>,
    /// Rate of copies from pinned memory to the device, in pieces as large as those of the load.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_bytes_per_second: Option<f64>,
    /// Reason why something was not measured. It is empty if everything was.
    pub why: String,
    #[serde(skip)]
    kind: IoKind,
    #[serde(skip)]
    beside: Beside,
    /// Largest file, and its size in bytes.
    #[serde(skip)]
    file: (FileIndex, u64),
    #[serde(skip)]
    total_bytes: u64,
    /// Offset in the file where the disk is measured next.
    #[serde(skip)]
    next: u64,
}

impl LoadLimit {
    pub(super) fn new(files: &FileSet, choice: &ReadChoice, beside: Beside) -> LoadLimit {
        let sizes = (0..files.len() as u32).map(FileIndex);
        let sizes = sizes.map(|index| (index, files.file_bytes(index).unwrap_or(0)));
        LoadLimit {
            disk: None,
            disk_request_bytes: choice.request_bytes,
            disk_queue_depth: choice.queue_depth,
            disk_bytes_per_second_min: None,
            disk_sustained_bytes_per_second: None,
            disk_readings: Vec::new(),
            copy_bytes_per_second: None,
            copy_threads: None,
            device_bytes_per_second: None,
            why: String::new(),
            kind: choice.kind,
            beside,
            file: sizes.clone().max_by_key(|&(_, bytes)| bytes).unwrap_or((FileIndex(0), 0)),
            total_bytes: sizes.map(|(_, bytes)| bytes).sum(),
            next: 0,
        }
    }

    /// Reads the disk plainly after `after_runs` runs. Skips this if the page cache has nearly everything, or if
    /// nothing is to be measured.
    pub(super) fn measure_disk(
        &mut self,
        files: &FileSet,
        cached_bytes: u64,
        after_runs: usize,
    ) -> Result<(), LoadError> {
        let hardly = cached_bytes as f64 > MOSTLY * self.total_bytes as f64;
        if hardly || self.beside == Beside::Nothing {
            return Ok(());
        }
        if let Some(why) = files.why_not_direct() {
            self.why = format!("the disk's limit cannot be measured: {why}");
            return Ok(());
        }
        if self.file.1 < self.disk_request_bytes as u64 {
            self.why = "the file is too small to measure the disk with".to_owned();
            return Ok(());
        }
        if self.beside == Beside::Short {
            return self.read_plainly(files, ProbeLength::of_time(SHORT), after_runs);
        }
        let half =
            ProbeLength { bytes: self.total_bytes / 2, at_least: SHORT / 2, at_most: LONG / 2 };
        for _ in 0..2 {
            self.read_plainly(files, half, after_runs)?;
        }
        let rates = self.disk_readings.iter().map(|reading| reading.bytes_per_second);
        self.disk_sustained_bytes_per_second = Some(median(rates));
        Ok(())
    }

    fn read_plainly(
        &mut self,
        files: &FileSet,
        length: ProbeLength,
        after_runs: usize,
    ) -> Result<(), LoadError> {
        let probe = DiskProbe {
            kind: self.kind,
            request_bytes: self.disk_request_bytes,
            depth: self.disk_queue_depth,
            memory_bytes: 0,
        };
        let (file, bytes) = self.file;
        // Reads a part of the file that was not read a moment ago, because a layer below a virtual disk may still have
        // that in memory.
        let rate = probe.rate(files, file, self.next..bytes, length)?;
        self.next = self.next.saturating_add(rate.bytes) / 4096 * 4096;
        // Start again at the beginning if the rest of the file is so small that the probe would read it several times.
        if self.next.saturating_add(rate.bytes / 2) > bytes {
            self.next = 0;
        }
        self.disk_readings.push(DiskReading {
            after_runs,
            bytes: rate.bytes,
            seconds: rate.seconds,
            bytes_per_second: rate.bytes_per_second,
        });
        let least = self.disk_bytes_per_second_min.unwrap_or(f64::INFINITY);
        self.disk_bytes_per_second_min = Some(least.min(rate.bytes_per_second));
        let best = self.disk.as_ref().map_or(0.0, |disk| disk.bytes_per_second);
        if rate.bytes_per_second > best {
            self.disk = Some(rate);
        }
        Ok(())
    }

    /// Returns the disk rate for a run. If the readings are as long as the runs, it is the rate of the readings next to
    /// the run. Otherwise it is the best rate.
    pub(super) fn disk_for(&self, run: usize) -> Option<f64> {
        if self.disk_sustained_bytes_per_second.is_none() {
            return self.disk.as_ref().map(|disk| disk.bytes_per_second);
        }
        let before = self.disk_readings.iter().rfind(|reading| reading.after_runs == run);
        let after = self.disk_readings.iter().find(|reading| reading.after_runs == run + 1);
        let both = || before.iter().chain(&after);
        let seconds = both().map(|reading| reading.seconds).sum::<f64>();
        let bytes = both().map(|reading| reading.bytes).sum::<u64>();
        (bytes > 0).then(|| bytes as f64 / seconds)
    }

    /// Takes the measurements that are made when all runs are done.
    pub(super) fn measure_again(
        &mut self,
        files: &FileSet,
        runs: &[LoadRun],
    ) -> Result<(), LoadError> {
        // A cold run leaves nothing in the page cache, unless the kernel did the reading.
        let cold = self.beside == Beside::AsLong;
        let cached_bytes = if cold { 0 } else { files.cached_bytes()?.0 };
        self.measure_disk(files, cached_bytes, runs.len())?;
        if self.beside == Beside::Nothing {
            self.why = format!("not measured, as {} asks", OptionName::NoLimit);
            return Ok(());
        }
        if runs.iter().any(|run| run.statistics.cached_bytes > 0) {
            self.measure_copies(files)?;
        }
        Ok(())
    }

    /// Measures copies with 1, 2, 4, ... threads up to the number of processors. Parts of the file that are no longer
    /// cached are cached again.
    fn measure_copies(&mut self, files: &FileSet) -> Result<(), LoadError> {
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

    /// Returns the least time for a load: it reads from a disk of this rate and copies side by side. Returns `None` if
    /// a limit that the load needs was not measured.
    ///
    /// Weights on a device are compared with the disk and the device alone, because copies from the page cache are work
    /// of forebay itself.
    pub(super) fn seconds(&self, load: &LoadStatistics, disk: Option<f64>) -> Option<f64> {
        // Bytes in the files, as far as the engine and the copies are told apart.
        let stored_bytes = load.engine_stored_bytes + load.cached_stored_bytes;
        let share = load.engine_stored_bytes as f64 / load.engine_bytes.max(1) as f64;
        let engine_cached = (load.engine_cached_bytes as f64 * share) as u64;
        let mut from_cache = load.cached_stored_bytes + engine_cached;
        if disk.is_none() && from_cache as f64 > MOSTLY * stored_bytes as f64 {
            // The few bytes that were not cached make no difference to the limit.
            from_cache = stored_bytes;
        }
        let from_disk = stored_bytes.saturating_sub(from_cache);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns readings before, between and after two runs of 1 GB each. The disk gives 4 GB/s for its first 1.5 GB and
    /// 2 GB/s from then on.
    fn after_a_burst() -> LoadLimit {
        let reading = |after_runs, bytes_per_second: f64| DiskReading {
            after_runs,
            bytes: 500_000_000,
            seconds: 5e8 / bytes_per_second,
            bytes_per_second,
        };
        let readings = [(0, 4e9), (0, 4e9), (1, 2e9), (1, 2e9), (2, 1.9e9), (2, 2e9)];
        LoadLimit {
            disk: None,
            disk_request_bytes: 512 << 10,
            disk_queue_depth: 16,
            disk_bytes_per_second_min: Some(1.9e9),
            disk_sustained_bytes_per_second: Some(2e9),
            disk_readings: readings.map(|(after, rate)| reading(after, rate)).to_vec(),
            copy_bytes_per_second: None,
            copy_threads: None,
            device_bytes_per_second: None,
            why: String::new(),
            kind: IoKind::Auto,
            beside: Beside::AsLong,
            file: (FileIndex(0), 1_000_000_000),
            total_bytes: 1_000_000_000,
            next: 0,
        }
    }

    #[test]
    fn a_cold_run_is_held_against_the_readings_next_to_it() {
        let limit = after_a_burst();
        // Half of the bytes take 0.125 s and half take 0.25 s.
        let first = limit.disk_for(0).unwrap();
        assert!((first / (1e9 / 0.375) - 1.0).abs() < 1e-9, "{first}");
        let second = limit.disk_for(1).unwrap();
        assert!((second / (1e9 / (0.25 + 5e8 / 1.9e9)) - 1.0).abs() < 1e-9, "{second}");
        assert_eq!(limit.disk_for(7), None);
    }

    #[test]
    fn short_readings_tell_the_best_only() {
        let limit = LoadLimit { disk_sustained_bytes_per_second: None, ..after_a_burst() };
        assert_eq!(limit.disk_for(0), None);
    }
}
