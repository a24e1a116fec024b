//! How long a pass takes, by a simulation of its loads and uses.

use std::time::Duration;

use crate::room::Group;

/// What a pass is predicted from.
pub struct PassInput<'a> {
    /// The groups that each use of a module needs, in the order of a pass, and seconds from the moment at which they are there to the next
    /// use.
    pub uses: &'a [(&'a [Group], f64)],
    /// Bytes of each group in the device.
    pub bytes: &'a [u64],
    /// True for groups that stay in the device.
    pub kept: &'a [bool],
    /// Bytes of device memory for the others.
    pub room: u64,
    /// Seconds in which each group comes into the device once it is in RAM, and in which it is read before.
    pub loads: &'a [Load],
    /// Bytes that come near the device at most before they have memory of it.
    pub stage_bytes: u64,
    /// Bytes that are read ahead at most.
    pub buffer_bytes: u64,
}

/// The cost of bringing a group.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Load {
    pub seconds: f64,
    /// Bytes that come, as they are outside of the device.
    pub bytes: u64,
    pub read_seconds: f64,
    pub read_bytes: u64,
}

/// A predicted pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PassPrediction {
    pub seconds: f64,
    /// Seconds that the work itself takes.
    pub compute_seconds: f64,
    /// Seconds in which all loads of a pass come into the device, and in which they are read.
    pub load_seconds: f64,
    pub read_seconds: f64,
}

/// Passes that are simulated. The last one counts, because the first ones begin with nothing in the device.
const PASSES: usize = 4;

/// A load that is under way, or whose memory is in use.
struct Coming {
    bytes: u64,
    read_bytes: u64,
    outside_bytes: u64,
    /// When it is near the device, and when it is in its memory.
    loaded: Duration,
    placed: Duration,
    /// When its memory is free again.
    free: Duration,
}

/// Memory through which loads pass in their order.
struct Window {
    bytes: u64,
    live: u64,
    /// The first load that is not yet counted as gone.
    oldest: usize,
}

impl Window {
    fn new(bytes: u64) -> Window {
        Window { bytes, live: 0, oldest: 0 }
    }

    /// Takes so many bytes, and returns when they are there: when loads before have gone. `of` returns the bytes of one of these, and when it goes.
    fn take(
        &mut self,
        bytes: u64,
        before: &[Coming],
        of: impl Fn(&Coming) -> (u64, Duration),
    ) -> Duration {
        let mut from = Duration::ZERO;
        self.live += bytes;
        while self.live > self.bytes && self.oldest < before.len() {
            let (bytes, gone) = of(&before[self.oldest]);
            from = from.max(gone);
            self.live -= bytes;
            self.oldest += 1;
        }
        from
    }
}

/// Simulates passes one after the other, with whole nanoseconds, so that passes of equal work take equally long. Loads come in the order of their uses, each as soon as there is memory that earlier ones have left.
pub fn predict(input: &PassInput<'_>) -> PassPrediction {
    // At a very low rate, seconds could be more than a duration holds.
    let time = |seconds: f64| Duration::from_secs_f64(seconds.clamp(0.0, 1e9));
    let [mut pass, mut compute_sum, mut load_sum, mut read_sum] = [Duration::ZERO; 4];
    // The end of the last read, of the last load, and of the last use.
    let [mut read, mut loaded, mut placed, mut now] = [Duration::ZERO; 4];
    let mut all: Vec<Coming> = Vec::new();
    let [mut buffers, mut stage, mut room] =
        [input.buffer_bytes, input.stage_bytes, input.room].map(Window::new);
    for _ in 0..PASSES {
        let began = now;
        [compute_sum, load_sum, read_sum] = [Duration::ZERO; 3];
        for (groups, compute) in input.uses {
            let first = all.len();
            let mut ready = now;
            for group in groups.iter().copied().filter(|group| !input.kept[*group]) {
                let Load { seconds, bytes: outside_bytes, read_seconds, read_bytes } =
                    input.loads[group];
                let may_read = buffers.take(read_bytes, &all, |of| (of.read_bytes, of.loaded));
                if read_bytes > 0 {
                    read = read.max(may_read) + time(read_seconds);
                }
                let mut may_load =
                    stage.take(outside_bytes, &all, |of| (of.outside_bytes, of.placed));
                if read_bytes > 0 {
                    may_load = may_load.max(read);
                }
                let bytes = input.bytes[group];
                // Memory of the same use is not free before it.
                let may_place = room.take(bytes, &all[..first], |of| (of.bytes, of.free));
                if input.stage_bytes == 0 || outside_bytes > input.stage_bytes {
                    may_load = may_load.max(may_place);
                }
                loaded = loaded.max(may_load) + time(seconds);
                placed = placed.max(loaded).max(may_place);
                ready = ready.max(placed);
                let free = Duration::MAX;
                all.push(Coming { bytes, read_bytes, outside_bytes, loaded, placed, free });
                load_sum += time(seconds);
                read_sum += time(read_seconds);
            }
            now = ready + time(*compute);
            compute_sum += time(*compute);
            all[first..].iter_mut().for_each(|coming| coming.free = now);
        }
        pass = now - began;
    }
    PassPrediction {
        seconds: pass.as_secs_f64(),
        compute_seconds: compute_sum.as_secs_f64(),
        load_seconds: load_sum.as_secs_f64(),
        read_seconds: read_sum.as_secs_f64(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn predicted(
        count: usize,
        kept: &[Group],
        room: u64,
        compute: f64,
        load: Load,
    ) -> PassPrediction {
        predicted_staged(count, kept, [room, 0], compute, load)
    }

    fn predicted_staged(
        count: usize,
        kept: &[Group],
        [room, stage_bytes]: [u64; 2],
        compute: f64,
        load: Load,
    ) -> PassPrediction {
        let groups: Vec<Group> = (0..count).collect();
        let uses: Vec<(&[Group], f64)> = groups.chunks(1).map(|of| (of, compute)).collect();
        let is_kept: Vec<bool> = groups.iter().map(|group| kept.contains(group)).collect();
        let (bytes, loads) = (vec![10; count], vec![load; count]);
        predict(&PassInput {
            uses: &uses,
            bytes: &bytes,
            kept: &is_kept,
            room,
            loads: &loads,
            stage_bytes,
            buffer_bytes: 30,
        })
    }

    fn near(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-9 * expected.abs().max(1.0)
    }

    #[test]
    fn a_pass_takes_as_long_as_what_limits_it() {
        let load = |seconds, read_seconds| Load {
            seconds,
            bytes: 5,
            read_seconds,
            read_bytes: if read_seconds > 0.0 { 10 } else { 0 },
        };
        // The work takes longer than the loads, which come meanwhile.
        assert!(near(predicted(8, &[], 30, 1.0, load(0.5, 0.0)).seconds, 8.0));
        // The loads take longer; two in three groups come.
        assert!(near(predicted(9, &[0, 3, 6], 30, 1.0, load(3.0, 0.0)).seconds, 18.0));
        // The disk takes longest.
        let found = predicted(8, &[], 30, 1.0, load(0.5, 2.0));
        assert!(near(found.seconds, 16.0) && near(found.read_seconds, 16.0), "{found:?}");
        // All stay.
        assert!(near(predicted(3, &[0, 1, 2], 0, 1.0, load(9.0, 0.0)).seconds, 3.0));
        // With memory for one group, loads and work alternate.
        let found = predicted(8, &[], 10, 1.0, load(0.5, 0.0));
        assert!(near(found.seconds, 12.0) && near(found.compute_seconds, 8.0), "{found:?}");
        // They do not if the next one can be staged. One that is larger than all that can be staged comes when it has its place.
        let staged = |bytes| predicted_staged(8, &[], [10, bytes], 1.0, load(0.5, 0.0)).seconds;
        assert!(near(staged(5), 8.0) && near(staged(4), 12.0));
    }

    #[test]
    fn more_room_is_never_slower() {
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..100 {
            let count = random.usize(1..12);
            let load = Load { seconds: random.f64(), bytes: 5, read_seconds: 0.0, read_bytes: 0 };
            let (compute, stage) = (random.f64(), random.u64(..30));
            let mut before = f64::INFINITY;
            for room in 1..count as u64 + 1 {
                let found = predicted_staged(count, &[], [room * 10, stage], compute, load);
                assert!(found.seconds <= before + 1e-9);
                assert!(found.seconds + 1e-9 >= found.compute_seconds.max(found.load_seconds));
                before = found.seconds;
            }
        }
    }
}
