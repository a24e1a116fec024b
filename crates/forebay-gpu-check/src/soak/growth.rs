//! What the process holds, and whether it grows.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use forebay_cuda::Gpu;
use serde::Serialize;

/// With fewer samples nothing can be said.
const SAMPLES_MIN: usize = 8;
/// What ends with a session may end a little after it: so long is waited for it.
const SETTLES_WITHIN: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Host and device memory that may come beside a fiftieth: allocators cut and keep pieces of what they get.
const SLACK_BYTES: u64 = 4 << 20;

/// Between two rounds, when only the lasting sessions are open.
#[derive(Clone, Copy, Serialize)]
struct Sample {
    pub seconds: f64,
    pub resident_bytes: u64,
    /// Memory that the kernel keeps in its place, for reads.
    pub pinned_bytes: u64,
    pub mappings: u64,
    pub descriptors: u64,
    pub threads: u64,
    /// By the driver's count; 0 without a GPU.
    pub vram_bytes: u64,
}

impl Sample {
    /// When there are no more threads and files than in the sample before, or they have had their time to end.
    fn settled(started: Instant, gpu: Option<&Gpu>, before: Option<&Sample>) -> Result<Sample> {
        let asked = Instant::now();
        loop {
            let sample = Sample::now(started.elapsed().as_secs_f64(), gpu)?;
            let is_more = |before: &Sample| {
                sample.threads > before.threads || sample.descriptors > before.descriptors
            };
            if !before.is_some_and(is_more) || asked.elapsed() > SETTLES_WITHIN {
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
            threads: entries("/proc/self/task")?,
            vram_bytes: vram.map_or(0, |(free, total)| total - free),
        })
    }
}

/// Samples in the order of time.
#[derive(Default, Serialize)]
pub struct Growth {
    samples: Vec<Sample>,
}

/// One quantity, at two times.
struct Compared {
    name: &'static str,
    warm: u64,
    end: u64,
    /// What the end may have.
    allowed: u64,
}

impl Growth {
    /// Takes the next sample.
    ///
    /// # Errors
    /// What the system says when it is asked.
    pub fn sample(&mut self, started: Instant, gpu: Option<&Gpu>) -> Result<()> {
        let sample = Sample::settled(started, gpu, self.samples.last())?;
        self.samples.push(sample);
        Ok(())
    }

    /// The second quarter of the samples beside the last.
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
            // What is counted is given back some time after a session, so its floor tells; memory swings.
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
        // The kernel unpins what a ring had some time after its end.
        let pinned = count("pinned bytes", |sample| sample.pinned_bytes);
        vec![
            memory("resident bytes", |sample| sample.resident_bytes),
            memory("VRAM bytes", |sample| sample.vram_bytes),
            Compared { allowed: pinned.allowed + SLACK_BYTES, ..pinned },
            count("open files", |sample| sample.descriptors),
            count("threads", |sample| sample.threads),
        ]
    }

    /// What has grown, in words, or why that cannot be told.
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
