//! Fault injection: a wrapper around any device, so that every engine is tested with the same disk faults.

use std::ops::Range;
use std::time::Duration;

use forebay_format::FileIndex;

use crate::device::{Device, Finished, Transfer};
use crate::engine::EngineInfo;
use crate::error::StoreError;
use crate::trace::PageFaults;

/// Kind of fault that hits a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The request fails with this errno.
    Error(i32),
    /// The request returns at most this many bytes. The memory after them is garbage.
    Short(u32),
    /// The request succeeds with one wrong bit. The bit is in the first byte of the fault's range that the request
    /// reads. For a random fault, it is in the middle of the request.
    Flip,
    /// The request ends only after this time.
    Delay(Duration),
    /// The request does not end.
    Never,
}

/// A fault for requests that touch a range of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub file: FileIndex,
    /// Byte range of the file.
    pub range: Range<u64>,
    pub kind: FaultKind,
    /// Number of requests in the range that succeed before the fault hits the first one.
    pub spares: u32,
    /// Number of requests that the fault hits. `u32::MAX` means all of them.
    pub times: u32,
}

/// The faults of a run. If several apply to a request, the first one happens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FaultPlan {
    pub faults: Vec<Fault>,
    /// One in this many of the other requests fails with EIO, is short or is late, as chosen from the seed. 0 means
    /// none.
    pub random_one_in: u32,
    /// True if some of the random faults are a wrong bit, which only checksums detect.
    pub random_flips: bool,
    /// One in this many requests begins an outage. It and the requests after it fail with EIO, more often than retries
    /// can make up for. 0 means none.
    pub outage_one_in: u32,
    pub seed: u64,
}

/// Number of requests that fail in an outage.
const OUTAGE_REQUESTS: u32 = 12;

impl FaultPlan {
    /// Creates a plan with one fault that hits every request in `range`.
    pub fn always(file: FileIndex, range: Range<u64>, kind: FaultKind) -> FaultPlan {
        FaultPlan::hitting(Fault { file, range, kind, spares: 0, times: u32::MAX })
    }

    /// Creates a plan with one fault that hits the first request in `range`.
    pub fn once(file: FileIndex, range: Range<u64>, kind: FaultKind) -> FaultPlan {
        FaultPlan::hitting(Fault { file, range, kind, spares: 0, times: 1 })
    }

    /// Creates a plan with a single fault.
    pub fn hitting(fault: Fault) -> FaultPlan {
        FaultPlan { faults: vec![fault], ..FaultPlan::default() }
    }

    fn next(&mut self, transfer: &Transfer) -> Option<FaultKind> {
        let end = transfer.offset.saturating_add(u64::from(transfer.length));
        let hits = |fault: &&mut Fault| {
            fault.times > 0
                && fault.file == transfer.file
                && fault.range.start < end
                && fault.range.end > transfer.offset
        };
        let is_due = |fault: &mut Fault| {
            let is_spared = fault.spares > 0;
            fault.spares -= u32::from(is_spared);
            !is_spared
        };
        let mut hitting = self.faults.iter_mut().filter(hits);
        if let Some(fault) = hitting.find_map(|fault| is_due(fault).then_some(fault)) {
            if fault.times != u32::MAX {
                fault.times -= 1;
            }
            return Some(fault.kind);
        }
        if !self.is_hit(self.random_one_in) {
            return None;
        }
        let kinds = if self.random_flips { 4 } else { 3 };
        Some(match next_random(&mut self.seed) % kinds {
            0 => FaultKind::Error(libc::EIO),
            1 => {
                // Return at least one aligned unit. Otherwise the request makes no progress and counts as failed.
                let room = u64::from(transfer.length).saturating_sub(4096).max(1);
                FaultKind::Short(4096 + (next_random(&mut self.seed) % room) as u32)
            }
            2 => FaultKind::Delay(Duration::from_micros(next_random(&mut self.seed) % 500)),
            _ => FaultKind::Flip,
        })
    }

    fn begins_outage(&mut self) -> bool {
        self.is_hit(self.outage_one_in)
    }

    /// Returns true with probability 1 in `one_in`, or never if that is 0.
    fn is_hit(&mut self, one_in: u32) -> bool {
        one_in > 0 && next_random(&mut self.seed).is_multiple_of(one_in.into())
    }
}

/// Returns the next number of SplitMix64 (Steele, Lea, Flood 2014). It is good enough for tests, and the same on every
/// machine.
pub(crate) fn next_random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

pub(crate) struct Faulty<D: Device> {
    inner: D,
    plan: FaultPlan,
    /// Number of requests that the current outage will still fail.
    outage: u32,
    /// Fault of each transfer in progress, by key.
    pending: Vec<Option<(FaultKind, Transfer)>>,
    /// Delayed answers and the times at which they are due.
    held: Vec<(Duration, Finished)>,
    scratch: Vec<Finished>,
}

impl<D: Device> Faulty<D> {
    pub(crate) fn new(inner: D, plan: FaultPlan) -> Faulty<D> {
        Faulty {
            inner,
            plan,
            outage: 0,
            pending: Vec::new(),
            held: Vec::new(),
            scratch: Vec::new(),
        }
    }

    fn next_fault(&mut self, transfer: &Transfer) -> Option<FaultKind> {
        if self.outage == 0 && self.plan.begins_outage() {
            self.outage = OUTAGE_REQUESTS;
        }
        match self.outage.checked_sub(1) {
            Some(left) => {
                self.outage = left;
                Some(FaultKind::Error(libc::EIO))
            }
            None => self.plan.next(transfer),
        }
    }

    /// Reports what the inner device reported, changed by the faults, and the delayed answers that are due.
    fn pass_on(&mut self, finished: &mut Vec<Finished>) {
        let now = self.inner.now();
        for mut end in self.scratch.drain(..) {
            match self.pending.get_mut(end.key as usize).and_then(Option::take) {
                None | Some((FaultKind::Never, _)) => finished.push(end),
                Some((FaultKind::Error(errno), _)) => {
                    end.result = Err(errno);
                    finished.push(end);
                }
                Some((FaultKind::Delay(delay), _)) => self.held.push((now + delay, end)),
                Some((FaultKind::Short(limit), transfer)) => {
                    end.result = end.result.map(|count| count.min(limit));
                    if let Ok(count) = end.result {
                        spoil(&transfer, count);
                    }
                    finished.push(end);
                }
                Some((FaultKind::Flip, transfer)) => {
                    flip(&transfer, &self.plan);
                    finished.push(end);
                }
            }
        }
        self.held.retain(|&(due, end)| {
            let is_due = due <= now;
            if is_due {
                finished.push(end);
            }
            !is_due
        });
    }
}

/// Overwrites the bytes that a short read did not return, so that tests detect code that uses them.
fn spoil(transfer: &Transfer, given: u32) {
    let given = given.min(transfer.length) as usize;
    // SAFETY: the memory is lent to the device until the transfer is reported, which has not happened yet. The inner
    // device has finished with it. `given <= length` keeps the range inside.
    unsafe {
        let rest = transfer.memory.add(given);
        rest.write_bytes(0xA5, transfer.length as usize - given);
    }
}

/// Flips one bit of the bytes that a request read.
fn flip(transfer: &Transfer, plan: &FaultPlan) {
    let start = plan
        .faults
        .iter()
        .find(|fault| fault.kind == FaultKind::Flip)
        .map(|fault| fault.range.start);
    // For a random fault, flip a bit in the middle: the edges of a request may belong to other blocks.
    let middle = transfer.offset + u64::from(transfer.length / 2);
    let at = start.unwrap_or(middle).saturating_sub(transfer.offset);
    let at = at.min(u64::from(transfer.length).saturating_sub(1)) as usize;
    // SAFETY: the memory is lent to the device until the transfer is reported, which has not happened yet. The inner
    // device has finished with it, and `at` lies inside.
    unsafe {
        let byte = transfer.memory.add(at);
        byte.write(byte.read() ^ 0x10);
    }
}

impl<D: Device> Device for Faulty<D> {
    unsafe fn start(&mut self, transfer: Transfer) -> Result<(), StoreError> {
        let key = transfer.key as usize;
        if self.pending.len() <= key {
            self.pending.resize(key + 1, None);
        }
        let fault = self.next_fault(&transfer);
        self.pending[key] = fault.map(|kind| (kind, transfer));
        if fault == Some(FaultKind::Never) {
            return Ok(());
        }
        // SAFETY: the caller makes the same promise to this function.
        unsafe { self.inner.start(transfer) }
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        self.inner.flush()
    }

    fn reap(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError> {
        self.inner.reap(&mut self.scratch)?;
        self.pass_on(finished);
        Ok(())
    }

    fn wait(
        &mut self,
        want: usize,
        timeout: Duration,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StoreError> {
        let now = self.inner.now();
        let next_due = self.held.iter().map(|&(due, _)| due.saturating_sub(now)).min();
        let timeout = next_due.unwrap_or(timeout).min(timeout);
        // If answers are delayed, the inner device may have fewer than `want` transfers left to report.
        let want = if self.held.is_empty() { want } else { 1 };
        self.inner.wait(want, timeout, &mut self.scratch)?;
        self.pass_on(finished);
        Ok(())
    }

    fn writing(&self) -> usize {
        self.inner.writing()
    }

    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn describe(&self) -> EngineInfo {
        self.inner.describe()
    }

    fn take_failure(&mut self, key: u32) -> Option<(u32, std::io::Error)> {
        self.inner.take_failure(key)
    }

    fn end_early(&mut self) -> bool {
        self.inner.end_early()
    }

    fn page_faults(&self, key: u32) -> Option<PageFaults> {
        self.inner.page_faults(key)
    }
}
