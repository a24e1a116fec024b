//! Verifies the bytes of finished requests against their checksums before the block is complete.

use std::time::Duration;

use super::Scheduler;
use crate::checker::{Answer, Span, Work};
use crate::checks::BadChunk;
use crate::device::Device;
use crate::error::ReadError;
use crate::job::{Job, Request};

impl<D: Device> Scheduler<D> {
    /// Sends the bytes of one request to the checker, if they are whole chunks. Other bytes are verified when the whole
    /// block has arrived.
    pub(super) fn begin_check(&mut self, request: &Request) {
        let Some(file) = self.files.file(request.file) else { return };
        let Some(checks) = &file.checks else { return };
        let span = request.offset..request.wanted_end;
        if !checks.is_whole(span.clone()) {
            return;
        }
        let Some(job) = self.jobs[request.job as usize].as_mut() else { return };
        job.checking += 1;
        // SAFETY: `check` compared the slot with the layout, so the span lies inside the slot. Its request has ended,
        // and no other request writes there. The job keeps the buffer until all answers have arrived or the checker is
        // dropped.
        unsafe {
            let span = Span {
                file: request.file,
                checks: checks.clone(),
                offset: span.start,
                memory: job.read.buffer.pointer().add(request.at),
                bytes: (span.end - span.start) as usize,
            };
            self.checker.begin(request.job, Work::Compare(span));
        }
    }

    /// Sends the bytes that could not be verified request by request to the checker. Returns false if there are none.
    pub(super) fn begin_last_checks(&mut self, key: u32) -> bool {
        let Some(job) = self.jobs[key as usize].as_mut() else { return false };
        let regions = job.read.layout.regions.iter();
        let checked = |file| self.files.file(file).and_then(|file| file.checks.as_ref());
        let all = regions.clone().filter(|region| checked(region.file).is_some());
        let all = all.map(|region| region.wanted_end - region.offset).sum::<u64>();
        let ended = job.outcome.is_some() || job.abandoned || job.bad.is_some();
        if job.checked_bytes == all || ended {
            return false;
        }
        self.statistics.bytes_checked -= job.checked_bytes;
        job.checked_bytes = 0;
        for region in regions {
            let Some(checks) = checked(region.file) else { continue };
            job.checking += 1;
            // SAFETY: the reasons in `begin_check` apply: the span lies inside the slot, no request of the job is at
            // the device, and the job keeps the buffer.
            unsafe {
                let span = Span {
                    file: region.file,
                    checks: checks.clone(),
                    offset: region.offset,
                    memory: job.read.buffer.pointer().add(region.at),
                    bytes: (region.wanted_end - region.offset) as usize,
                };
                self.checker.begin(key, Work::Compare(span));
            }
        }
        true
    }

    /// Handles the checker's answers that are ready.
    pub(super) fn settle_checks(&mut self) {
        let mut answers = std::mem::take(&mut self.answers);
        loop {
            self.checker.take(&mut answers);
            if answers.is_empty() {
                break;
            }
            answers.drain(..).for_each(|answer| self.settle_check(answer));
        }
        self.answers = answers;
    }

    fn settle_check(&mut self, answer: Answer) {
        let Answer { job: key, compared, took } = answer;
        let Some(job) = self.jobs[key as usize].as_mut() else { return };
        job.checking -= 1;
        match compared {
            None => {
                tracing::trace!(block = %job.read.label, seconds = took.as_secs_f64(), "relayout");
                self.statistics.relayout_seconds += took.as_secs_f64();
            }
            Some(compared) => {
                let (bytes, seconds) = (compared.bytes, took.as_secs_f64());
                tracing::trace!(block = %job.read.label, bytes, seconds, "verify");
                self.statistics.check_seconds += took.as_secs_f64();
                self.statistics.bytes_checked += compared.bytes;
                job.checked_bytes += compared.bytes;
                if let Some(bad) = compared.bad {
                    job.bad.get_or_insert((compared.file, bad));
                }
            }
        }
        self.conclude(key);
    }

    /// Returns true if a block has arrived completely and only lacks answers of the checker's threads.
    pub(super) fn waits_for_checker(&self) -> bool {
        let waits = |job: &Job| job.checking > 0 && job.is_here();
        self.checker.open() > 0 && self.jobs.iter().flatten().any(waits)
    }

    /// Adds the time since `began` to the time spent waiting for verification, if nothing was at the device meanwhile.
    pub(super) fn count_check_wait(&mut self, began: Duration) {
        if self.at_device() == 0 {
            let waited = self.device.now().saturating_sub(began);
            self.statistics.check_wait_seconds += waited.as_secs_f64();
        }
    }

    /// Handles a checksum mismatch of a job. Returns true if the job is read again.
    pub(super) fn reads_again(&mut self, key: u32) -> bool {
        let Some(job) = self.jobs[key as usize].as_mut() else { return false };
        if job.outcome.is_some() || job.abandoned {
            return false;
        }
        let Some((file, bad)) = job.bad.take() else { return false };
        let BadChunk { offset, place, expected, found } = bad;
        self.statistics.checksum_mismatches += 1;
        let block = job.read.label;
        if job.rereads == 0 {
            // The bytes may be correct on the disk and have changed on the way to memory.
            tracing::warn!(%block, offset, "a checksum does not match; reading again");
            job.read_again();
            self.statistics.retries += 1;
            let priority = job.read.priority;
            self.queues[priority as usize].push_front(key);
            return true;
        }
        let file = self.files.file(file).map(|file| file.path.clone()).unwrap_or_default();
        job.outcome = Some(ReadError::Corrupt { file, offset, place, block, expected, found });
        false
    }
}
