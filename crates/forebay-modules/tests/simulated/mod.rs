//! A simulated device, whose queues run in a random order: a missing wait shows as wrong weights.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forebay_modules::{ALIGNMENT, Device, DeviceError, Loaded, Outside, WeightSource};

/// Queue of the copies.
const COPIES: usize = 0;
/// Bits in which the bytes of coded weights differ from those of the others.
const CODED: u8 = 0x80;

pub type Queue = usize;

/// The point behind so many pieces of work of a queue.
#[derive(Clone, Debug)]
pub struct Point(Queue, usize);

pub enum Work {
    Wait(Point),
    Write(Range<u64>, u8),
    /// Reads what must be there. Those of modules are counted.
    Read(Range<u64>, u8),
    Check(Range<u64>, u8),
}

pub struct Simulated {
    pub state: Mutex<State>,
    /// Free slots for staged weights, and all of them.
    pub slots: Arc<AtomicUsize>,
    slots_max: usize,
    /// One load of so many fails, if any.
    fails: Option<usize>,
}

pub struct State {
    random: fastrand::Rng,
    memory: Vec<u8>,
    pub queues: Vec<VecDeque<Work>>,
    done: Vec<usize>,
    wrong: usize,
    checked: usize,
    pub lost: bool,
    /// Seconds of each check, and of all so far.
    pub seconds: f64,
    clock: f64,
}

impl State {
    fn is_reached(&self, point: &Point) -> bool {
        self.done[point.0] >= point.1
    }

    /// Does one piece of work of this queue, if it need not wait.
    fn step(&mut self, queue: Queue) -> bool {
        match self.queues[queue].front() {
            None => return false,
            Some(Work::Wait(point)) if !self.is_reached(point) => return false,
            _ => {}
        }
        match self.queues[queue].pop_front().unwrap() {
            Work::Wait(_) => {}
            Work::Write(range, byte) => self.memory[bounds(range)].fill(byte),
            Work::Read(range, byte) => self.expect(range, byte),
            Work::Check(range, byte) => {
                self.checked += 1;
                self.expect(range, byte);
            }
        }
        self.done[queue] += 1;
        true
    }

    fn expect(&mut self, range: Range<u64>, byte: u8) {
        self.wrong += usize::from(self.memory[bounds(range)].iter().any(|of| *of != byte));
    }

    /// Does some work of random queues.
    fn run_some(&mut self, most: usize) {
        for _ in 0..self.random.usize(..=most) {
            let queue = self.random.usize(..self.queues.len());
            self.step(queue);
        }
    }

    fn run_until(&mut self, done: impl Fn(&State) -> bool) {
        while !done(self) {
            let any = (0..self.queues.len()).filter(|queue| self.step(*queue)).count() > 0;
            assert!(any || done(self), "queues wait for each other");
        }
    }

    fn end_of(&self, queue: Queue) -> Point {
        Point(queue, self.done[queue] + self.queues[queue].len())
    }
}

fn bounds(range: Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Returns the number of slots for staged weights that a device with this seed has.
pub fn slots_of(seed: u64) -> usize {
    fastrand::Rng::with_seed(seed).usize(..8)
}

impl Simulated {
    pub fn new(seed: u64, bytes: u64, queues: usize, fails: Option<usize>) -> Arc<Simulated> {
        let state = State {
            random: fastrand::Rng::with_seed(seed),
            memory: vec![0; bytes as usize],
            queues: (0..queues).map(|_| VecDeque::new()).collect(),
            done: vec![0; queues],
            wrong: 0,
            checked: 0,
            lost: false,
            seconds: 0.25,
            clock: 0.0,
        };
        let slots_max = slots_of(seed);
        let slots = Arc::new(AtomicUsize::new(slots_max));
        Arc::new(Simulated { state: Mutex::new(state), slots, slots_max, fails })
    }

    fn fail_sometimes(&self) -> Result<(), DeviceError> {
        let mut state = self.state.lock().unwrap();
        match self.fails.is_some_and(|of| state.random.usize(..of) == 0) {
            true => Err(DeviceError::Source("the disk stalls".into())),
            false => Ok(()),
        }
    }

    /// Queues a check that a range has the bytes of a group.
    pub fn check(&self, queue: Queue, range: Range<u64>, byte: u8) {
        let mut state = self.state.lock().unwrap();
        assert!(range.end <= state.memory.len() as u64);
        state.queues[queue].push_back(Work::Check(range, byte));
        state.clock += state.seconds;
        state.run_some(6);
    }

    /// Does all work, and returns how many checks there were. None may have failed.
    pub fn finish(&self) -> usize {
        let mut state = self.state.lock().unwrap();
        state.run_until(|state| state.queues.iter().all(VecDeque::is_empty));
        assert_eq!(state.wrong, 0, "of {} checks", state.checked);
        assert_eq!(self.slots.load(Ordering::SeqCst), self.slots_max, "all slots are back");
        state.checked
    }
}

/// Weights are ranges of one byte.
pub struct Weights {
    bytes: u64,
    byte: u8,
}

/// Weights of which some are in slots, which come back when this is dropped.
pub struct Staged {
    weights: Weights,
    taken: usize,
    slots: Option<Arc<AtomicUsize>>,
}

impl From<Weights> for Staged {
    fn from(weights: Weights) -> Staged {
        Staged { weights, taken: 0, slots: None }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Some(slots) = &self.slots {
            slots.fetch_add(self.taken, Ordering::SeqCst);
        }
    }
}

/// Weights that stay in the device, two thirds as large.
pub struct CodedCopy {
    range: Range<u64>,
    byte: u8,
}

fn coded_bytes(bytes: u64) -> u64 {
    bytes * 2 / 3 + 1
}

/// The number of bytes of each group, and what they are.
pub struct Sizes {
    sizes: Vec<u64>,
    pub bytes: Vec<AtomicU8>,
    /// True if groups are to be expected, as those of files are.
    pub expects: bool,
    /// Groups that were expected, and that were taken.
    pub expected: Mutex<HashSet<usize>>,
    pub taken: Mutex<HashSet<usize>>,
}

impl Sizes {
    pub fn new(sizes: &[u64]) -> Arc<Sizes> {
        let bytes = (0..sizes.len()).map(|group| AtomicU8::new(group as u8 + 1)).collect();
        let (expected, taken) = (Mutex::default(), Mutex::default());
        Arc::new(Sizes { sizes: sizes.to_vec(), bytes, expects: false, expected, taken })
    }
}

impl WeightSource<Weights> for Sizes {
    fn take(&self, group: usize) -> Result<Weights, DeviceError> {
        self.taken.lock().unwrap().insert(group);
        Ok(Weights { bytes: self.sizes[group], byte: self.bytes[group].load(Ordering::SeqCst) })
    }

    fn expects_max(&self) -> usize {
        if self.expects { 8 } else { 0 }
    }

    fn expect(&self, groups: &[usize]) {
        self.expected.lock().unwrap().extend(groups);
    }

    fn coded_bytes(&self, group: usize) -> Option<u64> {
        // Some are not known, and some become larger.
        (group % 7 != 3).then(|| coded_bytes(self.sizes[group]))
    }

    fn outside(&self, groups: &[usize], _: u64) -> Vec<Outside> {
        groups.iter().map(|group| Outside { bytes: self.sizes[*group], read_bytes: 0 }).collect()
    }
}

impl Device for Simulated {
    type Weights = Weights;
    type Staged = Staged;
    type Coded = CodedCopy;
    type Queue = Queue;
    type Point = Point;
    type Moment = f64;

    fn stage_bytes(&self) -> u64 {
        self.slots_max as u64 * ALIGNMENT
    }

    fn can_stage(&self) -> bool {
        self.slots.load(Ordering::SeqCst) > 0
    }

    fn stage(&self, staged: &mut Staged) -> Result<bool, DeviceError> {
        staged.slots = Some(Arc::clone(&self.slots));
        let needed = staged.weights.bytes.div_ceil(ALIGNMENT) as usize;
        let take = |free: usize| free.checked_sub(1);
        while staged.taken < needed {
            if self.slots.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_err() {
                return Ok(false);
            }
            staged.taken += 1;
            self.fail_sometimes()?;
        }
        Ok(true)
    }

    fn load(
        &self,
        staged: Staged,
        to: Range<u64>,
        keep: Option<Range<u64>>,
        after: &[Point],
    ) -> Result<Loaded<Simulated>, DeviceError> {
        let weights = &staged.weights;
        assert_eq!(to.end - to.start, weights.bytes);
        self.fail_sometimes()?;
        let mut state = self.state.lock().unwrap();
        let middle = to.start + state.random.u64(..=weights.bytes);
        let copies = &mut state.queues[COPIES];
        copies.extend(after.iter().map(|point| Work::Wait(point.clone())));
        copies.push_back(Work::Write(to.start..middle, weights.byte));
        copies.push_back(Work::Write(middle..to.end, weights.byte));
        let byte = weights.byte;
        let coded = keep.filter(|keep| keep.end - keep.start >= coded_bytes(weights.bytes));
        let coded = coded.map(|range| CodedCopy { range, byte });
        if let Some(CodedCopy { range, .. }) = &coded {
            copies.push_back(Work::Write(range.clone(), byte ^ CODED));
        }
        let ready = state.end_of(COPIES);
        state.run_some(6);
        Ok(Loaded { ready, coded })
    }

    fn can_keep_coded(&self) -> bool {
        true
    }

    fn decode(
        &self,
        coded: &CodedCopy,
        to: Range<u64>,
        after: &[Point],
    ) -> Result<Point, DeviceError> {
        self.fail_sometimes()?;
        let mut state = self.state.lock().unwrap();
        let copies = &mut state.queues[COPIES];
        copies.extend(after.iter().map(|point| Work::Wait(point.clone())));
        copies.push_back(Work::Read(coded.range.clone(), coded.byte ^ CODED));
        copies.push_back(Work::Write(to, coded.byte));
        let point = state.end_of(COPIES);
        state.run_some(6);
        Ok(point)
    }

    fn wait(&self, queue: Queue, point: &Point) -> Result<(), DeviceError> {
        self.state.lock().unwrap().queues[queue].push_back(Work::Wait(point.clone()));
        Ok(())
    }

    fn mark(&self, queue: Queue) -> Result<Point, DeviceError> {
        let state = self.state.lock().unwrap();
        if state.lost {
            Err(DeviceError::Device("the GPU is gone".into()))
        } else {
            Ok(state.end_of(queue))
        }
    }

    fn moment(&self, _: Queue) -> Result<f64, DeviceError> {
        Ok(self.state.lock().unwrap().clock)
    }

    fn seconds_between(&self, first: &f64, second: &f64) -> Result<f64, DeviceError> {
        Ok(second - first)
    }

    fn bytes_per_second(&self) -> Option<f64> {
        Some(ALIGNMENT as f64)
    }

    fn is_reached(&self, point: &Point) -> bool {
        self.state.lock().unwrap().is_reached(point)
    }

    fn reach(&self, point: &Point) -> Result<(), DeviceError> {
        let mut state = self.state.lock().unwrap();
        state.run_until(|state| state.is_reached(point));
        Ok(())
    }
}
