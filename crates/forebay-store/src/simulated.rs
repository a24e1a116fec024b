//! A simulated disk on a virtual clock. For the same seed it gives the same answers at the same virtual times. It runs
//! at the speed of memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::checker::Checker;
use crate::device::{Device, Finished, Transfer};
use crate::engine::{EngineInfo, EngineOptions, ReadEngine, with_checker};
use crate::error::StoreError;
use crate::faults::{FaultPlan, next_random};
use crate::files::FileSet;

/// A clock that moves only when a thread waits or advances it. Clones share the time.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock {
    nanoseconds: Arc<AtomicU64>,
}

impl VirtualClock {
    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed))
    }

    /// Moves the clock forward, as a computation would.
    pub fn advance(&self, by: Duration) {
        let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(by, Ordering::Relaxed);
    }
}

/// Speed of the simulated disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskModel {
    pub bytes_per_second: f64,
    /// Time from the start of a request to its first byte.
    pub latency: Duration,
    /// Maximum additional latency. The value for each request is chosen from the seed.
    pub jitter: Duration,
    pub seed: u64,
}

impl Default for DiskModel {
    fn default() -> DiskModel {
        DiskModel {
            bytes_per_second: 3.5e9,
            latency: Duration::from_micros(80),
            jitter: Duration::from_micros(40),
            seed: 1,
        }
    }
}

/// Opens the simulated engine. It reads real bytes of `files` (on disk or in memory) in virtual time.
///
/// # Errors
/// Returns [`StoreError::Option`] if an option is out of range.
pub fn open_simulated_engine(
    files: &FileSet,
    options: &EngineOptions,
    model: DiskModel,
    clock: &VirtualClock,
    faults: FaultPlan,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    options.check()?;
    let device = Simulated {
        files: files.clone(),
        direct: options.direct,
        model,
        random: model.seed,
        clock: clock.clone(),
        free_at: Duration::ZERO,
        pending: Vec::new(),
    };
    Ok(with_checker(device, Checker::inline(), files, options, Some(faults)))
}

struct Simulated {
    files: FileSet,
    direct: bool,
    model: DiskModel,
    random: u64,
    clock: VirtualClock,
    /// Virtual time at which all started transfers are complete.
    free_at: Duration,
    /// Started transfers with their end times, in order.
    pending: Vec<(Duration, Transfer)>,
}

impl Simulated {
    fn perform(&self, transfer: &Transfer) -> Result<u32, i32> {
        let file = self.files.file(transfer.file).ok_or(libc::EBADF)?;
        // The simulation is as strict as a real disk, so that it reveals a wrong alignment.
        let unit = file.read_alignment(self.direct) as u64;
        let aligned = [transfer.offset, transfer.length.into(), transfer.memory.addr() as u64];
        if aligned.iter().any(|value| value % unit != 0) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller of `Device::start` promised valid memory of this length that nothing else touches until
        // the transfer is reported. Arena memory is always initialised.
        let memory =
            unsafe { std::slice::from_raw_parts_mut(transfer.memory, transfer.length as usize) };
        let mut done = 0;
        while done < memory.len() {
            match file.read_at(transfer.offset + done as u64, &mut memory[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) => return Err(error.raw_os_error().unwrap_or(libc::EIO)),
            }
        }
        Ok(done as u32)
    }
}

impl Device for Simulated {
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError> {
        let jitter = self.model.jitter.as_nanos() as u64;
        let extra = Duration::from_nanos(next_random(&mut self.random) % (jitter + 1));
        let seconds = f64::from(transfer.length) / self.model.bytes_per_second.max(1.0);
        let first_byte = self.clock.now() + self.model.latency + extra;
        self.free_at = self.free_at.max(first_byte) + Duration::from_secs_f64(seconds);
        self.pending.push((self.free_at, transfer));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        Ok(())
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError> {
        // Transfers end in the order in which they were started, because they share one disk.
        let now = self.clock.now();
        let ended = self.pending.iter().take_while(|(end, _)| *end <= now).count();
        for (_, transfer) in &self.pending[..ended] {
            finished.push(Finished { key: transfer.key, result: self.perform(transfer) });
        }
        self.pending.drain(..ended);
        Ok(())
    }

    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError> {
        let now = self.clock.now();
        let last = want.min(self.pending.len()).checked_sub(1);
        let wanted_at = last.map_or(Duration::MAX, |index| self.pending[index].0);
        // If fewer transfers are pending than the caller wants, only the timeout ends the wait.
        let until = match want > self.pending.len() {
            true => now + timeout,
            false => wanted_at.min(now + timeout),
        };
        self.clock.advance(until.saturating_sub(now));
        self.reap(finished)
    }

    fn writing(&self) -> usize {
        // Only `reap` writes to memory.
        0
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn describe(&self) -> EngineInfo {
        EngineInfo {
            name: "simulated",
            direct: self.direct,
            registered_buffers: false,
            why: "time and disk are simulated".to_owned(),
        }
    }
}
