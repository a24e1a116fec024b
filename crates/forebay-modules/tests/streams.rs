//! Streams of weights through a simulated device.

mod simulated;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use forebay_modules::{
    ALIGNMENT, Device as _, DeviceError, GroupOptions, StreamError, StreamStatistics, Streamer,
    StreamerOptions, aligned,
};
use simulated::{Queue, Simulated, Sizes, Work, slots_of};

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
        self.stream_of(Sizes::new(&self.sizes), device, bytes, roots)
    }

    fn stream_of(
        &self,
        sizes: Arc<Sizes>,
        device: &Arc<Simulated>,
        bytes: u64,
        roots: usize,
    ) -> Result<Streamer<Simulated>, StreamError> {
        let group =
            |(at, bytes): (usize, &u64)| GroupOptions { bytes: *bytes, stays: self.stays[at] };
        let groups = self.sizes.iter().enumerate().map(group).collect();
        let predictions = vec![(0..self.units.len()).collect(); roots];
        let options = StreamerOptions { groups, units: self.units.clone(), predictions, bytes };
        Streamer::new(device.clone(), sizes, options)
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
fn weights_stay_coded_where_loads_take_longest() {
    let modules = Modules::equal(40, 30 * ALIGNMENT);
    let bytes = 600 * ALIGNMENT;
    for seed in 0..8 {
        let device = Simulated::new(seed, bytes, 2, None);
        let sizes = Sizes::new(&modules.sizes);
        let stream = modules.stream_of(sizes.clone(), &device, bytes, 1).unwrap();
        let mut predicted = Vec::new();
        for pass in 0..12 {
            stream.begin(0);
            for unit in 0..40 {
                let at = stream.acquire(unit, 1, &mut || true).unwrap()[0];
                let (range, byte) = (at..at + 30 * ALIGNMENT, &sizes.bytes[unit]);
                device.check(1, range.clone(), byte.load(Ordering::SeqCst));
                if pass > 5 && unit % 9 == pass % 9 {
                    // The module changes its weights, and says so.
                    let other = byte.fetch_xor(0x40, Ordering::SeqCst) ^ 0x40;
                    let queues = &mut device.state.lock().unwrap().queues;
                    queues[1].push_back(Work::Write(range, other));
                    stream.change(unit);
                }
                stream.release(unit, 1).unwrap();
            }
            stream.end();
            predicted.extend(stream.predict(0, 0, 0).unwrap().map(|of| of.seconds));
        }
        // 17 of 40 stay if they are decoded.
        let (first, last) = (predicted[0], predicted[predicted.len() - 1]);
        assert!(last < 0.8 * first, "{predicted:?}");
        assert!(stream.statistics().decoded > 100, "{:?}", stream.statistics());
        drop(stream);
        device.finish();
    }
}

#[test]
fn what_stays_coded_is_not_expected_of_the_source() {
    let modules = Modules::equal(40, 30 * ALIGNMENT);
    let device = Simulated::new(2, 600 * ALIGNMENT, 2, None);
    let mut sizes = Sizes::new(&modules.sizes);
    Arc::get_mut(&mut sizes).unwrap().expects = true;
    let stream = modules.stream_of(sizes.clone(), &device, 600 * ALIGNMENT, 1).unwrap();
    for pass in 0..12 {
        if pass == 9 {
            sizes.expected.lock().unwrap().clear();
            sizes.taken.lock().unwrap().clear();
        }
        stream.begin(0);
        (0..40).for_each(|unit| modules.use_unit(&stream, &device, unit, 1).unwrap());
        stream.end();
    }
    assert!(stream.statistics().decoded > 100, "{:?}", stream.statistics());
    drop(stream);
    device.finish();
    let (expected, taken) = (sizes.expected.lock().unwrap(), sizes.taken.lock().unwrap());
    assert!(!taken.is_empty() && taken.len() < 30, "{taken:?}");
    assert!(expected.is_subset(&taken), "{expected:?} {taken:?}");
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
