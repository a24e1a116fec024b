//! Between a request's end and its block's: its bytes are compared with their checksums.

use std::time::Duration;

use super::Scheduler;
use crate::checker::{Answer, Span, Work};
use crate::checks::BadChunk;
use crate::device::Device;
use crate::error::ReadError;
use crate::job::{Job, Request};

impl<D: Device> Scheduler<D> {
    /// Hands over what one request brought, if it is made of whole chunks. The rest is compared when
    /// all of the block is there.
    pub(super) fn begin_check(&mut self, request: &Request) {
        let Some(file) = self.files.file(request.file) else { return };
        let Some(checks) = &file.checks else { return };
        let span = request.offset..request.wanted_end;
        if !checks.is_whole(span.clone()) {
            return;
        }
        let Some(job) = self.jobs[request.job as usize].as_mut() else { return };
        job.checking += 1;
        // SAFETY: `check` compared the slot with the layout, so the span lies inside. Its request has
        // ended, and no other one writes there; the job keeps the buffer until all answers are here
        // or the checker has been dropped.
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

    /// Hands over what could not be compared request by request. `false`: there is nothing.
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
            // SAFETY: as in `begin_check`; no request of the job is at the device.
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

    /// Takes in the answers that are there.
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

    /// Whether a block is here but for the answers of the checker's thread.
    pub(super) fn waits_for_checker(&self) -> bool {
        let waits = |job: &Job| job.checking > 0 && job.is_here();
        self.checker.open() > 0 && self.jobs.iter().flatten().any(waits)
    }

    /// Notes a wait for comparisons that ends now, if there was nothing else to wait for.
    pub(super) fn count_check_wait(&mut self, began: Duration) {
        if self.at_device() == 0 {
            let waited = self.device.now().saturating_sub(began);
            self.statistics.check_wait_seconds += waited.as_secs_f64();
        }
    }

    /// What a mismatch leads to. `true`: the job is read again.
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
            // What is wrong may be the way here and not the disk.
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
