//! Times passes of a streamed image model on a simulated GPU, whose clock is the real one: bus, decoding and the work of modules end when their rates
//! say. The stream, its loaders and their waits are real, so this shows what the order of loads costs, without a GPU.
//!
//! `cargo run --release -p forebay-modules --no-default-features --example simulated_passes -- [VRAM GiB] [seconds of work]`
//!
//! The model has the layers of Flux.1-dev at 1024 x 1024; the rates are those of an H200 (`bench/results/2026-11-30-h200-image-modules.md`).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forebay_modules::{
    Device, DeviceError, GroupOptions, Loaded, Outside, Streamer, StreamerOptions, WeightSource,
};

/// Bytes of coded weights for each of the others.
const CODED: f64 = 0.68;
/// Bytes a second: copies to pinned memory, copies to the GPU, and coded bytes that are decoded.
const FILL_RATE: f64 = 100e9;
const BUS_RATE: f64 = 55.2e9;
const DECODE_RATE: f64 = 900e9;
/// Time that each piece of work on the GPU takes besides.
const LAUNCH: Duration = Duration::from_micros(10);
/// Time for which Python queues a module's work.
const PYTHON: Duration = Duration::from_micros(50);
/// Pinned memory: slots, and those that loads with a place can always use.
const SLOT_BYTES: u64 = 32 << 20;
const SLOTS: usize = 32;
const SLOTS_OF_LOADS: usize = 4;

/// Points and moments are times since the start.
struct Simulated {
    start: Instant,
    ends: Mutex<Ends>,
    /// One slot is filled at a time.
    filling: Mutex<()>,
    free: Arc<AtomicUsize>,
}

/// When everything is done that was queued so far.
#[derive(Default)]
struct Ends {
    work: Duration,
    copies: Duration,
    decodes: Duration,
    /// Ends of the copies of late, whose pinned memory may be in use.
    slots: VecDeque<Duration>,
    /// Time of decoding since the last work, which takes longer by as much.
    decoding: Duration,
}

fn time(bytes: u64, rate: f64) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate)
}

fn coded(bytes: u64) -> u64 {
    (bytes as f64 * CODED) as u64
}

impl Simulated {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, time: Duration) {
        thread::sleep(time.saturating_sub(self.now()));
    }

    /// Fills a slot and queues its copy.
    fn bring(&self, weights: &mut Near) {
        let bytes = weights.left.min(SLOT_BYTES);
        let oldest = {
            let mut ends = self.ends();
            if ends.slots.len() < SLOTS { None } else { ends.slots.pop_front() }
        };
        self.wait_until(oldest.unwrap_or_default());
        {
            let _turn = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
            self.wait_until(self.now() + time(bytes, FILL_RATE));
        }
        let mut ends = self.ends();
        ends.copies = ends.copies.max(self.now()) + time(bytes, BUS_RATE);
        let copied = ends.copies;
        ends.slots.push_back(copied);
        weights.near.push((bytes, copied));
        weights.left -= bytes;
    }

    /// Queues decoding behind these points.
    fn decode_behind(&self, parts: &[(u64, Duration)], after: &[Duration]) -> Duration {
        let after = after.iter().copied().max().unwrap_or_default();
        let mut ends = self.ends();
        for (bytes, copied) in parts {
            let takes = time(*bytes, DECODE_RATE) + LAUNCH;
            ends.decodes = ends.decodes.max(*copied).max(after).max(self.now()) + takes;
            ends.decoding += takes;
        }
        ends.decodes
    }

    /// Queues the work of a module, and takes as long as Python does.
    fn work(&self, seconds: f64) {
        let began = Instant::now();
        while began.elapsed() < PYTHON {
            std::hint::spin_loop();
        }
        let mut ends = self.ends();
        let decoding = std::mem::take(&mut ends.decoding);
        ends.work = ends.work.max(self.now()) + Duration::from_secs_f64(seconds) + decoding;
    }
}

/// Coded bytes of a group, and those in slots with the time at which they are on the GPU.
struct Near {
    left: u64,
    near: Vec<(u64, Duration)>,
    taken: usize,
    free: Option<Arc<AtomicUsize>>,
}

impl From<u64> for Near {
    fn from(left: u64) -> Near {
        Near { left, near: Vec::new(), taken: 0, free: None }
    }
}

impl Drop for Near {
    fn drop(&mut self) {
        if let Some(free) = &self.free {
            free.fetch_add(self.taken, Ordering::SeqCst);
        }
    }
}

/// Bytes of each group.
struct Sizes(Vec<u64>);

impl WeightSource<u64> for Sizes {
    fn take(&self, group: usize) -> Result<u64, DeviceError> {
        Ok(coded(self.0[group]))
    }

    fn coded_bytes(&self, group: usize) -> Option<u64> {
        Some(coded(self.0[group]) + (self.0[group] >> 20) * 64)
    }

    fn outside(&self, groups: &[usize], _: u64) -> Vec<Outside> {
        groups.iter().map(|of| Outside { bytes: coded(self.0[*of]), read_bytes: 0 }).collect()
    }
}

impl Device for Simulated {
    type Weights = u64;
    type Staged = Near;
    type Coded = u64;
    type Queue = ();
    type Point = Duration;
    type Moment = Duration;

    fn stage_bytes(&self) -> u64 {
        (SLOTS - SLOTS_OF_LOADS) as u64 * SLOT_BYTES / 2
    }

    fn can_stage(&self) -> bool {
        self.free.load(Ordering::SeqCst) > SLOTS_OF_LOADS
    }

    fn stage(&self, weights: &mut Near) -> Result<bool, DeviceError> {
        weights.free = Some(Arc::clone(&self.free));
        while weights.left > 0 && self.can_stage() {
            self.free.fetch_sub(1, Ordering::SeqCst);
            weights.taken += 1;
            self.bring(weights);
        }
        Ok(weights.left == 0)
    }

    fn load(
        &self,
        mut weights: Near,
        _: Range<u64>,
        keep: Option<Range<u64>>,
        after: &[Duration],
    ) -> Result<Loaded<Simulated>, DeviceError> {
        while weights.left > 0 {
            self.bring(&mut weights);
        }
        let bytes = weights.near.iter().map(|(bytes, _)| bytes).sum();
        let ready = self.decode_behind(&weights.near, after);
        Ok(Loaded { ready, coded: keep.map(|_| bytes) })
    }

    fn can_keep_coded(&self) -> bool {
        true
    }

    fn decode(
        &self,
        coded: &u64,
        _: Range<u64>,
        after: &[Duration],
    ) -> Result<Duration, DeviceError> {
        Ok(self.decode_behind(&[(*coded, Duration::ZERO)], after))
    }

    fn wait(&self, (): (), point: &Duration) -> Result<(), DeviceError> {
        let mut ends = self.ends();
        ends.work = ends.work.max(*point);
        Ok(())
    }

    fn mark(&self, (): ()) -> Result<Duration, DeviceError> {
        Ok(self.ends().work)
    }

    fn moment(&self, (): ()) -> Result<Duration, DeviceError> {
        Ok(self.ends().work)
    }

    fn seconds_between(&self, first: &Duration, second: &Duration) -> Result<f64, DeviceError> {
        Ok(second.saturating_sub(*first).as_secs_f64())
    }

    fn bytes_per_second(&self) -> Option<f64> {
        Some(BUS_RATE)
    }

    fn decoded_bytes_per_second(&self) -> Option<f64> {
        Some(DECODE_RATE)
    }

    fn is_reached(&self, point: &Duration) -> bool {
        self.now() >= *point
    }

    fn reach(&self, point: &Duration) -> Result<(), DeviceError> {
        self.wait_until(*point);
        Ok(())
    }
}

/// Returns the bytes of the layers of Flux.1-dev in the order of their use, and how much each computes, in any unit.
fn layers() -> Vec<(u64, f64)> {
    const WIDTH: u64 = 3072;
    let (picture, text) = (4096.0, 512.0);
    let matrix = |wide: u64, tokens: f64| {
        let bytes = 2 * wide * WIDTH * WIDTH;
        (bytes, bytes as f64 * tokens)
    };
    let mut layers = Vec::new();
    for _ in 0..19 {
        layers.extend([matrix(6, 0.0); 2]);
        for tokens in [picture, text] {
            layers.extend([matrix(1, tokens); 3]);
        }
        // Attention.
        layers.push((0, matrix(1, picture + text).1 * 1.2));
        layers.extend([matrix(1, picture), matrix(1, text)]);
        for tokens in [picture, text] {
            layers.extend([matrix(4, tokens); 2]);
        }
    }
    for _ in 0..38 {
        layers.extend([matrix(3, 0.0), matrix(4, picture + text)]);
        layers.extend([matrix(1, picture + text); 3]);
        layers.push((0, matrix(1, picture + text).1 * 1.2));
        layers.push(matrix(5, picture + text));
    }
    layers
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|of| of.parse::<f64>().expect("a number"));
    let vram = arguments.next().unwrap_or(8.0);
    let work = arguments.next().unwrap_or(0.175);
    let layers = layers();
    let sum: f64 = layers.iter().map(|(_, work)| work).sum();
    let units: Vec<u64> = layers.iter().map(|(bytes, _)| *bytes).filter(|of| *of > 0).collect();
    let device = Arc::new(Simulated {
        start: Instant::now(),
        ends: Mutex::default(),
        filling: Mutex::default(),
        free: Arc::new(AtomicUsize::new(SLOTS)),
    });
    let options = StreamerOptions {
        groups: units.iter().map(|of| GroupOptions { bytes: *of, stays: false }).collect(),
        units: (0..units.len()).map(|unit| vec![unit]).collect(),
        predictions: vec![(0..units.len()).collect()],
        bytes: (vram * f64::from(1 << 30)) as u64,
    };
    let source = Arc::new(Sizes(units));
    let stream = Streamer::new(device.clone(), source, options).expect("the memory is enough");
    println!(
        "pass, seconds | coded over the bus, seconds | decoded from VRAM | predicted, seconds"
    );
    let mut before = stream.statistics();
    for _ in 0..10 {
        let began = Instant::now();
        stream.begin(0);
        let mut unit = 0;
        for (bytes, part) in &layers {
            if *bytes == 0 {
                device.work(work * part / sum);
                continue;
            }
            stream.acquire(unit, (), &mut || true).expect("weights arrive");
            device.work(work * part / sum);
            stream.release(unit, ()).expect("the device is simulated");
            unit += 1;
        }
        stream.end();
        let end = device.ends().work;
        device.wait_until(end);
        let now = stream.statistics();
        let bus = time(coded(now.loaded_bytes - before.loaded_bytes), BUS_RATE).as_secs_f64();
        let decoded = now.decoded - before.decoded;
        let predicted = stream.predict(0, 0, 0).expect("the device is simulated");
        let predicted = predicted.map_or(String::new(), |of| format!("{:.3}", of.seconds));
        println!("{:.3} | {bus:.3} | {decoded} | {predicted}", began.elapsed().as_secs_f64());
        before = now;
    }
}
