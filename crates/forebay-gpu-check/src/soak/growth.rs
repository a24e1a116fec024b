//! Resources that the process holds, and a check that they do not grow.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use forebay_cuda::Gpu;
use serde::Serialize;

/// Smallest number of samples from which growth can be judged.
const SAMPLES_MIN: usize = 8;
/// Threads and files of a session may end shortly after it. A sample waits at most this long for them.
const SETTLES_WITHIN: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Number of recent samples whose lowest counts a new sample waits for.
const RECENT_SAMPLES: usize = 4;
/// Host and device memory that may be added beyond 2 %, because allocators split and keep pieces of what they get.
const SLACK_BYTES: u64 = 4 << 20;

/// Resource use between two rounds, when only the lasting sessions are open.
#[derive(Clone, Copy, Serialize)]
struct Sample {
    pub seconds: f64,
    pub resident_bytes: u64,
    /// Memory that the operating system keeps in place for reads.
    pub pinned_bytes: u64,
    pub mappings: u64,
    pub descriptors: u64,
    pub threads: u64,
    /// VRAM in use as reported by the driver; 0 without a GPU.
    pub vram_bytes: u64,
}

impl Sample {
    /// Takes a sample once there are no more threads and files than in the lowest of the recent samples of `before`, or
    /// when their time to end is over. The last sample alone would not do: on a slow machine it may have been taken
    /// too early itself.
    fn settled(started: Instant, gpu: Option<&Gpu>, before: &[Sample]) -> Result<Sample> {
        let asked = Instant::now();
        let recent = &before[before.len().saturating_sub(RECENT_SAMPLES)..];
        loop {
            let sample = Sample::now(started.elapsed().as_secs_f64(), gpu)?;
            let is_more = |before: &Sample| {
                sample.threads > before.threads || sample.descriptors > before.descriptors
            };
            if !recent.iter().any(is_more) || asked.elapsed() > SETTLES_WITHIN {
                return Ok(sample);
            }
            sleep(LOOK_AGAIN);
        }
    }

    fn now(seconds: f64, gpu: Option<&Gpu>) -> Result<Sample> {
        let status = fs::read_to_string("/proc/self/status")?;
        let kib = |name: &str| -> Result<u64> {
            let line = status.lines().find(|line| line.starts_with(name));
            let line = line.with_context(|| format!("/proc/self/status has no {name}"))?;
            let number = line[name.len()..].trim().trim_end_matches(" kB").trim();
            Ok(1024 * number.parse::<u64>()?)
        };
        let entries =
            |folder: &str| Ok::<u64, std::io::Error>(fs::read_dir(folder)?.count() as u64);
        let vram = gpu.map(Gpu::memory_bytes).transpose()?;
        Ok(Sample {
            seconds,
            resident_bytes: kib("VmRSS:")?,
            pinned_bytes: kib("VmPin:")? + kib("VmLck:")?,
            mappings: fs::read_to_string("/proc/self/maps")?.lines().count() as u64,
            descriptors: entries("/proc/self/fd")?,
            threads: threads()?,
            vram_bytes: vram.map_or(0, |(free, total)| total - free),
        })
    }
}

/// Returns the number of the process's threads. It leaves out the workers that the kernel starts for io_uring requests that
/// would block: the kernel ends them after five idle seconds.
fn threads() -> Result<u64> {
    let mut count = 0;
    for task in fs::read_dir("/proc/self/task")? {
        // A thread that has just ended has no name any more.
        let Ok(name) = fs::read_to_string(task?.path().join("comm")) else { continue };
        count += u64::from(!name.starts_with("iou-"));
    }
    Ok(count)
}

/// Samples in chronological order.
#[derive(Default, Serialize)]
pub struct Growth {
    samples: Vec<Sample>,
}

/// One quantity at two times.
struct Compared {
    name: &'static str,
    warm: u64,
    end: u64,
    /// Largest value of `end` that does not count as growth.
    allowed: u64,
}

impl Growth {
    /// Takes the next sample.
    ///
    /// # Errors
    /// Returns an error if the system or the driver cannot be queried.
    pub fn sample(&mut self, started: Instant, gpu: Option<&Gpu>) -> Result<()> {
        let sample = Sample::settled(started, gpu, &self.samples)?;
        self.samples.push(sample);
        Ok(())
    }

    /// Compares the second quarter of the samples with the last quarter.
    fn compared(&self) -> Vec<Compared> {
        let quarters = self.samples.len() / 4;
        let values = |quarter: usize, of: fn(&Sample) -> u64| {
            let first = quarter * quarters;
            let mut values: Vec<u64> =
                self.samples[first..first + quarters].iter().map(of).collect();
            values.sort_unstable();
            values
        };
        let middle = |of: fn(&Sample) -> u64, exact: bool| {
            let (warm, end) = (values(1, of), values(3, of));
            // Counted resources are released some time after a session ends, so their minimum is compared. Memory
            // fluctuates, so its median is compared.
            let at = |values: &[u64]| match exact {
                true => values.first().copied().unwrap_or(0),
                false => values.get(values.len() / 2).copied().unwrap_or(0),
            };
            (at(&warm), at(&end))
        };
        let count = |name, of| {
            let (warm, end) = middle(of, true);
            Compared { name, warm, end, allowed: warm }
        };
        let memory = |name, of| {
            let (warm, end) = middle(of, false);
            Compared { name, warm, end, allowed: warm + warm / 50 + SLACK_BYTES }
        };
        // The operating system unpins a ring's memory some time after the ring is closed.
        let pinned = count("pinned bytes", |sample| sample.pinned_bytes);
        vec![
            memory("resident bytes", |sample| sample.resident_bytes),
            memory("VRAM bytes", |sample| sample.vram_bytes),
            Compared { allowed: pinned.allowed + SLACK_BYTES, ..pinned },
            count("open files", |sample| sample.descriptors),
            count("threads", |sample| sample.threads),
        ]
    }

    /// Returns a sentence for each quantity that has grown, or the reason why growth cannot be judged.
    pub fn grown(&self) -> Vec<String> {
        let beyond = |of: &Compared| {
            let Compared { name, warm, end, allowed } = of;
            (end > allowed).then(|| format!("{name} grew from {warm} to {end}"))
        };
        if self.samples.len() < SAMPLES_MIN {
            return vec![format!("{} rounds are too few to judge growth", self.samples.len())];
        }
        self.compared().iter().filter_map(beyond).collect()
    }
}

impl std::fmt::Display for Growth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} samples, second quarter and last:", self.samples.len())?;
        for Compared { name, warm, end, .. } in self.compared() {
            write!(f, " {name} {warm}, {end};")?;
        }
        let mappings = |sample: &Sample| sample.mappings;
        let (first, last) = (self.samples.first().map(mappings), self.samples.last().map(mappings));
        write!(f, " mappings {}, {}", first.unwrap_or(0), last.unwrap_or(0))
    }
}
