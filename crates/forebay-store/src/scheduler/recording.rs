//! Writes the scheduler's events to the recorder, if there is one.

use std::time::Duration;

use super::Scheduler;
use crate::device::{Device, Finished};
use crate::engine::Priority;
use crate::trace::{ReadEnd, ReadRecord, WaitRecord, nanoseconds};

impl<D: Device> Scheduler<D> {
    pub(super) fn record_finished(&self, finished: &Finished) {
        match finished.result {
            Ok(count) => self.record(finished.key, ReadEnd::Done, count),
            Err(errno) => self.record(finished.key, ReadEnd::Failed(errno), 0),
        }
    }

    pub(super) fn record(&self, slot: u32, end: ReadEnd, bytes: u32) {
        let Some(recorder) = &self.recorder else { return };
        let Some(request) = self.requests.get(slot as usize).copied().flatten() else { return };
        let block = self.jobs[request.job as usize].as_ref().map(|job| job.read.label);
        let took = self.device.now().saturating_sub(request.started);
        recorder.read(ReadRecord {
            start_nanoseconds: nanoseconds(self.recorder_ahead + request.started),
            duration_nanoseconds: nanoseconds(took),
            file: request.file,
            offset: request.offset,
            length: request.length as u32,
            bytes,
            block,
            why: request.why.into(),
            attempt: request.again,
            end,
            faults: self.device.page_faults(slot),
        });
    }

    /// Records the requests that ended while the engine is being closed.
    pub(super) fn record_all_finished(&mut self) {
        for end in std::mem::take(&mut self.finished) {
            self.record_finished(&end);
            if let Some(request) = self.requests.get_mut(end.key as usize) {
                *request = None;
            }
        }
    }

    pub(super) fn record_wait(&self, since: Option<(Duration, Priority)>) {
        let (Some(recorder), Some((since, why))) = (&self.recorder, since) else { return };
        recorder.wait(WaitRecord {
            start_nanoseconds: nanoseconds(self.recorder_ahead + since),
            duration_nanoseconds: nanoseconds(self.device.now().saturating_sub(since)),
            why: why.into(),
        });
    }

    pub(super) fn most_urgent(&self) -> Option<Priority> {
        let live = self.jobs.iter().flatten().filter(|job| !job.abandoned);
        live.map(|job| job.read.priority).min()
    }
}
