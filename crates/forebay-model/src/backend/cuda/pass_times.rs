//! Time of passes over a dense model's sub-layers, as seen by the thread that drives the GPU and computes.

use std::time::{Duration, Instant};

use crate::statistics::PassTimes;

/// Activity of the thread.
#[derive(Clone, Copy, Default)]
enum Doing {
    #[default]
    Queueing,
    Computing,
    WaitingForCopies,
    WaitingForGpu,
    WaitingForDisk,
}

/// The clock of one pass. Its times count only when the pass has finished, because the times of a failed pass say
/// nothing.
#[derive(Default)]
pub struct PassClock {
    since: Option<Instant>,
    doing: Doing,
    /// Time spent, by activity.
    spent: [Duration; 5],
}

impl PassClock {
    pub fn started() -> PassClock {
        PassClock { since: Some(Instant::now()), ..PassClock::default() }
    }

    pub fn goes_on(&mut self) {
        self.turns_to(Doing::Queueing);
    }

    pub fn computes(&mut self) {
        self.turns_to(Doing::Computing);
    }

    pub fn waits_for_copies(&mut self) {
        self.turns_to(Doing::WaitingForCopies);
    }

    pub fn waits_for_gpu(&mut self) {
        self.turns_to(Doing::WaitingForGpu);
    }

    pub fn waits_for_disk(&mut self) {
        self.turns_to(Doing::WaitingForDisk);
    }

    fn turns_to(&mut self, next: Doing) {
        let now = Instant::now();
        if let Some(since) = self.since.replace(now) {
            self.spent[self.doing as usize] += now.duration_since(since);
        }
        self.doing = next;
    }

    /// Adds the pass to `times`.
    pub fn finish(&mut self, times: &mut PassTimes) {
        self.goes_on();
        let of = |doing: Doing| self.spent[doing as usize].as_secs_f64();
        times.passes += 1;
        times.seconds += self.spent.iter().sum::<Duration>().as_secs_f64();
        times.cpu_seconds += of(Doing::Computing);
        times.copy_wait_seconds += of(Doing::WaitingForCopies);
        times.gpu_wait_seconds += of(Doing::WaitingForGpu);
        times.disk_wait_seconds += of(Doing::WaitingForDisk);
        *self = PassClock::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_pass_are_told_apart() {
        let mut times = PassTimes::default();
        let mut clock = PassClock::started();
        let pause = Duration::from_millis(5);
        clock.computes();
        std::thread::sleep(pause);
        clock.waits_for_gpu();
        clock.waits_for_copies();
        std::thread::sleep(2 * pause);
        clock.goes_on();
        std::thread::sleep(pause);
        clock.finish(&mut times);
        let (pause, others) =
            (pause.as_secs_f64(), times.gpu_wait_seconds + times.disk_wait_seconds);
        assert!(times.passes == 1 && times.cpu_seconds >= pause && others < pause, "{times:?}");
        assert!(times.copy_wait_seconds >= 2.0 * pause, "{times:?}");
        let known = times.cpu_seconds + times.copy_wait_seconds + others;
        assert!(times.seconds >= known + pause, "queueing is part of the whole: {times:?}");
        let before = times.seconds;
        PassClock::default().finish(&mut times);
        assert!(times.seconds - before < pause, "nothing was begun");
    }
}
