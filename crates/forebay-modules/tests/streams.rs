//! Streams of weights through a simulated device, whose queues run in a random order: a missing wait shows as wrong weights.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use forebay_modules::{
    ALIGNMENT, Device, DeviceError, GroupOptions, Outside, StreamError, StreamStatistics, Streamer,
    StreamerOptions, WeightSource, aligned,
};

/// Queue of the copies.
const COPIES: usize = 0;

type Queue = usize;

/// The point behind so many pieces of work of a queue.
#[derive(Clone, Debug)]
struct Point(Queue, usize);

enum Work {
    Wait(Point),
    Write(Range<u64>, u8),
    Check(Range<u64>, u8),
}

struct Simulated {
    state: Mutex<State>,
    /// Free slots for staged weights, and all of them.
    slots: Arc<AtomicUsize>,
    slots_max: usize,
    /// One load of so many fails, if any.
    fails: Option<usize>,
}

struct State {
    random: fastrand::Rng,
    memory: Vec<u8>,
    queues: Vec<VecDeque<Work>>,
    done: Vec<usize>,
    wrong: usize,
    checked: usize,
    lost: bool,
    /// Seconds of each check, and of all so far.
    seconds: f64,
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
            Work::Check(range, byte) => {
                self.checked += 1;
                self.wrong += usize::from(self.memory[bounds(range)].iter().any(|of| *of != byte));
            }
        }
        self.done[queue] += 1;
        true
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
fn slots_of(seed: u64) -> usize {
    fastrand::Rng::with_seed(seed).usize(..8)
}

impl Simulated {
    fn new(seed: u64, bytes: u64, queues: usize, fails: Option<usize>) -> Arc<Simulated> {
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
    fn check(&self, queue: Queue, range: Range<u64>, byte: u8) {
        let mut state = self.state.lock().unwrap();
        assert!(range.end <= state.memory.len() as u64);
        state.queues[queue].push_back(Work::Check(range, byte));
        state.clock += state.seconds;
        state.run_some(6);
    }

    /// Does all work, and returns how many checks there were. None may have failed.
    fn finish(&self) -> usize {
        let mut state = self.state.lock().unwrap();
        state.run_until(|state| state.queues.iter().all(VecDeque::is_empty));
        assert_eq!(state.wrong, 0, "of {} checks", state.checked);
        assert_eq!(self.slots.load(Ordering::SeqCst), self.slots_max, "all slots are back");
        state.checked
    }
}

/// Weights are ranges of one byte.
struct Weights {
    bytes: u64,
    byte: u8,
}

/// Weights of which some are in slots, which come back when this is dropped.
struct Staged {
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

/// The bytes of each group.
struct Sizes(Vec<u64>);

impl WeightSource<Weights> for Sizes {
    fn take(&self, group: usize) -> Result<Weights, DeviceError> {
        Ok(Weights { bytes: self.0[group], byte: group as u8 + 1 })
    }

    fn outside(&self, groups: &[usize], _: u64) -> Vec<Outside> {
        groups.iter().map(|group| Outside { bytes: self.0[*group], read_bytes: 0 }).collect()
    }
}

impl Device for Simulated {
    type Weights = Weights;
    type Staged = Staged;
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

    fn load(&self, staged: Staged, to: Range<u64>, after: &[Point]) -> Result<Point, DeviceError> {
        let weights = &staged.weights;
        assert_eq!(to.end - to.start, weights.bytes);
        self.fail_sometimes()?;
        let mut state = self.state.lock().unwrap();
        let middle = to.start + state.random.u64(..=weights.bytes);
        let copies = &mut state.queues[COPIES];
        copies.extend(after.iter().map(|point| Work::Wait(point.clone())));
        copies.push_back(Work::Write(to.start..middle, weights.byte));
        copies.push_back(Work::Write(middle..to.end, weights.byte));
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

/// Modules and their weights.
struct Modules {
    sizes: Vec<u64>,
    stays: Vec<bool>,
    units: Vec<Vec<usize>>,
}

impl Modules {
    /// Returns modules of which some share weights, and some have weights that stay.
    fn random(random: &mut fastrand::Rng) -> Modules {
        let groups = random.usize(1..20);
        let sizes = (0..groups).map(|_| random.u64(1..6 * ALIGNMENT)).collect();
        let stays = (0..groups).map(|_| random.u8(..8) == 0).collect();
        let unit = |first: usize| {
            let mut unit = vec![first];
            for _ in 0..random.usize(..3) {
                let more = random.usize(..groups);
                if !unit.contains(&more) {
                    unit.push(more);
                }
            }
            unit
        };
        Modules { sizes, stays, units: (0..groups).map(unit).collect() }
    }

    /// `count` modules, each with weights of its own of so many bytes.
    fn equal(count: usize, bytes: u64) -> Modules {
        let units = (0..count).map(|at| vec![at]).collect();
        Modules { sizes: vec![bytes; count], stays: vec![false; count], units }
    }

    fn needed(&self) -> u64 {
        let sum = |groups: &mut dyn Iterator<Item = usize>| -> u64 {
            groups.map(|group| aligned(self.sizes[group])).sum()
        };
        let come =
            |unit: &Vec<usize>| sum(&mut unit.iter().copied().filter(|group| !self.stays[*group]));
        sum(&mut (0..self.sizes.len()).filter(|group| self.stays[*group]))
            + self.units.iter().map(come).max().unwrap_or(0)
    }

    fn stream(
        &self,
        device: &Arc<Simulated>,
        bytes: u64,
        roots: usize,
    ) -> Result<Streamer<Simulated>, StreamError> {
        let group =
            |(at, bytes): (usize, &u64)| GroupOptions { bytes: *bytes, stays: self.stays[at] };
        let groups = self.sizes.iter().enumerate().map(group).collect();
        let predictions = vec![(0..self.units.len()).collect(); roots];
        let options = StreamerOptions { groups, units: self.units.clone(), predictions, bytes };
        Streamer::new(device.clone(), Arc::new(Sizes(self.sizes.clone())), options)
    }

    fn use_unit(
        &self,
        stream: &Streamer<Simulated>,
        device: &Simulated,
        unit: usize,
        queue: Queue,
    ) -> Result<(), StreamError> {
        let places = stream.acquire(unit, queue, &mut || true)?;
        assert_eq!(places.len(), self.units[unit].len());
        for (group, at) in self.units[unit].iter().zip(places) {
            device.check(queue, at..at + self.sizes[*group], *group as u8 + 1);
        }
        stream.release(unit, queue)
    }
}

#[test]
fn every_use_finds_its_weights_whatever_the_order() {
    for seed in 0..150 {
        let mut random = fastrand::Rng::with_seed(seed);
        let modules = Modules::random(&mut random);
        let bytes = modules.needed() + random.u64(..30 * ALIGNMENT) * random.u64(..2);
        let device = Simulated::new(seed, bytes, 3, None);
        let stream = modules.stream(&device, bytes, 2).unwrap();
        let count = modules.units.len();
        let mut orders = [0, 1].map(|_| (0..count).collect::<Vec<_>>());
        orders.iter_mut().for_each(|order| random.shuffle(order));
        let mut uses = 0;
        for _ in 0..20 {
            let root = random.usize(..2);
            let order = &mut orders[root];
            if random.u8(..4) == 0 {
                random.shuffle(order);
            }
            stream.begin(root);
            for unit in order.iter() {
                // Some modules are skipped, and some are used twice.
                for _ in 0..[1, 1, 1, 1, 1, 1, 0, 2][random.usize(..8)] {
                    modules.use_unit(&stream, &device, *unit, 1 + root).unwrap();
                    uses += modules.units[*unit].len();
                }
            }
            // Some passes fail.
            if random.u8(..5) > 0 {
                stream.end();
            }
        }
        stream.close().unwrap();
        assert_eq!(device.finish(), uses, "seed {seed}");
    }
}

#[test]
fn threads_share_the_memory() {
    for seed in 0..15 {
        let mut random = fastrand::Rng::with_seed(seed);
        let modules = Modules::random(&mut random);
        let threads = 8;
        let bytes = modules.needed() + random.u64(..20 * ALIGNMENT);
        let device = Simulated::new(seed, bytes, 1 + threads, None);
        let stream = modules.stream(&device, bytes, 1).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (modules, stream, device) = (&modules, &stream, &device);
                scope.spawn(move || {
                    let mut random = fastrand::Rng::with_seed(seed * 100 + thread as u64);
                    for _ in 0..5 {
                        stream.begin(0);
                        for _ in 0..30 {
                            let unit = random.usize(..modules.units.len());
                            modules.use_unit(stream, device, unit, 1 + thread).unwrap();
                        }
                        stream.end();
                    }
                });
            }
        });
        drop(stream);
        assert!(device.finish() >= threads * 5 * 30);
    }
}

#[test]
fn failed_loads_are_errors_of_their_use_and_the_next_one_works() {
    let (mut failed, mut worked) = (0, 0);
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let modules = Modules::random(&mut random);
        let bytes = modules.needed() + random.u64(..10 * ALIGNMENT);
        let device = Simulated::new(seed, bytes, 2, Some(4));
        let stream = modules.stream(&device, bytes, 1).unwrap();
        for _ in 0..10 {
            stream.begin(0);
            for unit in 0..modules.units.len() {
                while let Err(error) = modules.use_unit(&stream, &device, unit, 1) {
                    assert_eq!(error, DeviceError::Source("the disk stalls".into()).into());
                    failed += 1;
                }
                worked += 1;
            }
            stream.end();
        }
        stream.close().unwrap();
        device.finish();
    }
    assert!(failed > 20 && worked > 1000, "{failed} {worked}");
}

/// Runs passes in the order of the modules, and returns what each has done.
fn passes(modules: &Modules, room: u64, count: usize) -> Vec<StreamStatistics> {
    let device = Simulated::new(1, room, 2, None);
    let stream = modules.stream(&device, room, 1).unwrap();
    let mut before = StreamStatistics::default();
    let mut each = Vec::new();
    for _ in 0..count {
        stream.begin(0);
        for unit in 0..modules.units.len() {
            modules.use_unit(&stream, &device, unit, 1).unwrap();
        }
        stream.end();
        let now = stream.statistics();
        each.push(StreamStatistics {
            loads: now.loads - before.loads,
            loaded_bytes: now.loaded_bytes - before.loaded_bytes,
            deviations: now.deviations - before.deviations,
            ..now
        });
        before = now;
    }
    drop(stream);
    device.finish();
    each
}

#[test]
fn passes_load_what_does_not_fit_and_little_more() {
    let modules = Modules::equal(40, ALIGNMENT);
    for room in [2, 10, 20, 30, 39] {
        let each = passes(&modules, room * ALIGNMENT, 20);
        assert_eq!(each.last().unwrap().passes, 20);
        // All but what stays, for which there is room beside three modules.
        let most = if room < 4 { 40 } else { 40 - (room - 3) };
        let loads: u64 = each[4..].iter().map(|of| of.loads).sum();
        // Some loads are those of the next pass.
        let expected = ((40 - room) * 16).saturating_sub(room)..=most * 16 + room;
        assert!(expected.contains(&loads), "{loads} loads with room for {room}, not {expected:?}");
        assert!(each.iter().all(|of| of.deviations == 0));
    }
}

#[test]
fn weights_are_staged_while_there_is_no_room() {
    for seed in (0..20).filter(|seed| slots_of(*seed) > 0) {
        let modules = Modules::equal(40, ALIGNMENT);
        let device = Simulated::new(seed, 2 * ALIGNMENT, 2, None);
        let stream = modules.stream(&device, 2 * ALIGNMENT, 1).unwrap();
        stream.begin(0);
        for unit in 0..20 {
            modules.use_unit(&stream, &device, unit, 1).unwrap();
        }
        // These have all of the memory.
        let units = [20, 21].map(|unit| {
            stream.acquire(unit, 1, &mut || true).unwrap();
            unit
        });
        while device.can_stage() {
            std::thread::yield_now();
        }
        // One that was not expected comes as well.
        units.iter().for_each(|unit| stream.release(*unit, 1).unwrap());
        modules.use_unit(&stream, &device, 5, 1).unwrap();
        (22..40).for_each(|unit| modules.use_unit(&stream, &device, unit, 1).unwrap());
        stream.end();
        drop(stream);
        device.finish();
    }
}

#[test]
fn groups_stay_where_passes_have_no_time_for_loads() {
    let modules = Modules::equal(40, ALIGNMENT);
    let seed = (0..).find(|seed| slots_of(*seed) == 2).unwrap();
    let device = Simulated::new(seed, 23 * ALIGNMENT, 2, None);
    let stream = modules.stream(&device, 23 * ALIGNMENT, 1).unwrap();
    let mut predicted = Vec::new();
    for _ in 0..6 {
        stream.begin(0);
        for unit in 0..40 {
            device.state.lock().unwrap().seconds = if unit < 20 { 0.0 } else { 2.0 };
            modules.use_unit(&stream, &device, unit, 1).unwrap();
        }
        stream.end();
        predicted.extend(stream.predict(0, 0, 0).unwrap().map(|of| of.seconds));
    }
    drop(stream);
    device.finish();
    // A load takes a second. 20 of 40 come, first as many in the first half as in the second, where all can come meanwhile.
    let (first, last) = (predicted[0], predicted[predicted.len() - 1]);
    assert!(first > 44.0 && (40.0..40.5).contains(&last), "{predicted:?}");
}

#[test]
fn what_fits_is_loaded_once() {
    let modules = Modules::equal(40, 3 * ALIGNMENT - 5);
    let each = passes(&modules, 120 * ALIGNMENT, 5);
    assert_eq!(each[0].loads + each[1].loads, 40);
    assert!(each[2..].iter().all(|of| of.loads == 0));
    assert_eq!(each[0].loaded_bytes + each[1].loaded_bytes, 40 * (3 * ALIGNMENT - 5));
}

#[test]
fn what_is_used_more_often_stays_after_some_passes() {
    let modules = Modules::equal(40, ALIGNMENT);
    for seed in 0..10 {
        let device = Simulated::new(seed, 16 * ALIGNMENT, 2, None);
        let stream = modules.stream(&device, 16 * ALIGNMENT, 2).unwrap();
        let pass = |root: usize, units: std::ops::Range<usize>| {
            stream.begin(root);
            units.for_each(|unit| modules.use_unit(&stream, &device, unit, 1).unwrap());
            stream.end();
        };
        // The second root uses 12 modules, and 20 times as often. The first prediction was that both use all.
        for round in 0..3 {
            pass(0, 0..28);
            let before = stream.statistics().loads;
            (0..20).for_each(|_| pass(1, 28..40));
            let loads = stream.statistics().loads - before;
            assert!(round == 0 || loads <= 16, "{loads} loads with seed {seed}");
        }
        drop(stream);
        device.finish();
    }
}

#[test]
fn passes_are_predicted_from_their_work_and_their_loads() {
    let modules = Modules::equal(40, ALIGNMENT);
    let device = Simulated::new(1, 20 * ALIGNMENT, 2, None);
    let stream = modules.stream(&device, 20 * ALIGNMENT, 1).unwrap();
    let pass = |units: &mut dyn Iterator<Item = usize>| {
        stream.begin(0);
        units.for_each(|unit| modules.use_unit(&stream, &device, unit, 1).unwrap());
        stream.end();
    };
    pass(&mut (0..40));
    assert_eq!(stream.predict(0, 0, 0).unwrap(), None, "the first pass is not measured");
    pass(&mut (0..40));
    // A use takes a quarter of a second, and a load one; 17 of the 40 groups stay.
    let found = stream.predict(0, 0, 0).unwrap().unwrap();
    assert_eq!((found.compute_seconds, found.load_seconds), (10.0, 23.0));
    assert!((23.0..24.0).contains(&found.seconds), "{found:?}");
    let more = stream.predict(0, 10 * ALIGNMENT, 0).unwrap().unwrap();
    assert_eq!(more.load_seconds, 13.0);
    let all = stream.predict(0, 30 * ALIGNMENT, 0).unwrap().unwrap();
    assert_eq!((all.seconds, all.load_seconds), (10.0, 0.0));
    // A pass in another order, which is not measured.
    pass(&mut (0..40).rev());
    assert_eq!(stream.predict(0, 0, 0).unwrap(), None);
    drop(stream);
    device.finish();
}

#[test]
fn modules_that_are_too_large_are_refused() {
    let modules = Modules { stays: vec![true, false], ..Modules::equal(2, ALIGNMENT) };
    let device = Simulated::new(1, 2 * ALIGNMENT, 1, None);
    let error = modules.stream(&device, 2 * ALIGNMENT - 1, 1).err().unwrap();
    assert_eq!(error, StreamError::TooSmall { needed: 2 * ALIGNMENT, has: 2 * ALIGNMENT - 1 });
    assert!(modules.stream(&device, 2 * ALIGNMENT, 1).is_ok());
}

#[test]
fn a_module_within_another_one_gets_weights_or_an_error() {
    let modules = Modules::equal(3, 4 * ALIGNMENT);
    let device = Simulated::new(1, 10 * ALIGNMENT, 2, None);
    let stream = modules.stream(&device, 10 * ALIGNMENT, 1).unwrap();
    let first = stream.acquire(0, 1, &mut || true).unwrap()[0];
    modules.use_unit(&stream, &device, 1, 1).unwrap();
    let second = stream.acquire(1, 1, &mut || true).unwrap()[0];
    // The caller that asks for more memory holds all of it, so none would ever become free.
    let error = stream.acquire(2, 1, &mut || true).unwrap_err();
    assert_eq!(error, StreamError::InUse { needed: 4 * ALIGNMENT });
    for (group, at) in [(0, first), (1, second)] {
        device.check(1, at..at + 4 * ALIGNMENT, group + 1);
        stream.release(group.into(), 1).unwrap();
    }
    modules.use_unit(&stream, &device, 2, 1).unwrap();
    drop(stream);
    device.finish();
}

#[test]
fn nothing_is_used_after_the_end_or_without_the_device() {
    let modules = Modules::equal(3, ALIGNMENT);
    let device = Simulated::new(1, ALIGNMENT, 2, None);
    let stream = modules.stream(&device, ALIGNMENT, 1).unwrap();
    modules.use_unit(&stream, &device, 2, 1).unwrap();
    stream.close().unwrap();
    assert_eq!(stream.acquire(2, 1, &mut || true), Err(StreamError::Closed));
    device.finish();

    let stream = modules.stream(&device, ALIGNMENT, 1).unwrap();
    stream.acquire(0, 1, &mut || true).unwrap();
    device.state.lock().unwrap().lost = true;
    let gone = StreamError::Device(DeviceError::Device("the GPU is gone".into()));
    assert_eq!(stream.release(0, 1), Err(gone.clone()));
    assert_eq!(stream.acquire(1, 1, &mut || true), Err(gone.clone()));
    assert_eq!(stream.close(), Err(gone));
}
