//! Verifies the bytes of finished requests against their checksums before the block is complete.

use std::time::Duration;

use super::Scheduler;
use crate::checker::{Answer, Compared, Decoding, Done, Span, Work};
use crate::chunks::BadChunk;
use crate::device::Device;
use crate::error::ReadError;
use crate::job::{Job, Request};
use crate::layout::Region;

impl<D: Device> Scheduler<D> {
    /// Sends the bytes of one request to the checker, if they are whole chunks. Other bytes are verified when the whole
    /// block has arrived.
    pub(super) fn begin_check(&mut self, request: &Request) {
        let Some(file) = self.files.file(request.file) else { return };
        let span = request.offset.wrapping_add(request.behind)
            ..request.wanted_end.wrapping_add(request.behind);
        let Some(chunks) = file.checks(span.start) else { return };
        if !chunks.is_whole(span.clone()) {
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
                chunks: chunks.clone(),
                offset: span.start,
                memory: job.read.buffer.pointer().add(request.at),
                bytes: (span.end - span.start) as usize,
            };
            self.checker.begin(request.job, Work::Compare(span));
        }
    }

    /// Sends the bytes of a coded request to the checker, with the memory that they were read to.
    pub(super) fn begin_decoding(&mut self, slot: u32) {
        let Some(request) = self.requests[slot as usize].as_mut() else { return };
        let Some((span, stage)) =
            request.coded.as_mut().and_then(|span| span.stage.take().map(|stage| (*span, stage)))
        else {
            return;
        };
        let chunks = self.files.file(request.file).and_then(|file| file.chunks.clone());
        let (Some(chunks), Some(job)) = (chunks, self.jobs[request.job as usize].as_mut()) else {
            self.stages.give_back(stage);
            return;
        };
        job.checking += 1;
        // SAFETY: `check` compared the slot with the layout, so the decoded bytes lie inside the slot, and no other request writes there.
        // `next_request` made `skip + stored_bytes` at most the request's length, for which `pump` found the stage large enough. The request
        // has ended. Stage and slot belong to this task until its answer has arrived or the checker is dropped.
        unsafe {
            let decoding = Decoding {
                file: request.file,
                chunks,
                range: span.start..span.end,
                stored: self.stages.pointer(stage).add(span.skip),
                stored_bytes: span.stored_bytes,
                to: job.read.buffer.pointer().add(span.at),
                stage,
            };
            self.checker.begin(request.job, Work::Decode(decoding));
        }
    }

    /// Sends the bytes that could not be verified request by request to the checker. Returns false if there are none.
    pub(super) fn begin_last_checks(&mut self, key: u32) -> bool {
        let Some(job) = self.jobs[key as usize].as_mut() else { return false };
        let regions = job.read.layout.regions.iter();
        let checked =
            |region: &Region| self.files.file(region.file).and_then(|it| it.checks(region.offset));
        let all = regions.clone().filter(|region| checked(region).is_some());
        let all = all.map(|region| region.wanted_end - region.wanted_start).sum::<u64>();
        let ended = job.outcome.is_some() || job.abandoned || job.bad.is_some();
        if job.checked_bytes == all || ended {
            return false;
        }
        self.statistics.bytes_checked -= job.checked_bytes;
        job.checked_bytes = 0;
        for region in regions {
            let Some(chunks) = checked(region) else { continue };
            job.checking += 1;
            // SAFETY: the reasons in `begin_check` apply: the span lies inside the slot, no request of the job is at
            // the device, and the job keeps the buffer.
            unsafe {
                let span = Span {
                    file: region.file,
                    chunks: chunks.clone(),
                    offset: region.wanted_start,
                    memory: job.read.buffer.pointer().add(region.wanted_in_slot().start),
                    bytes: region.wanted_in_slot().len(),
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
        let Answer { job: key, done, took } = answer;
        if let Done::Decoded(_, stage) = done {
            self.stages.give_back(stage);
        }
        let Some(job) = self.jobs[key as usize].as_mut() else { return };
        job.checking -= 1;
        let seconds = took.as_secs_f64();
        let block = job.read.label;
        match done {
            Done::Relayout => {
                tracing::trace!(%block, seconds, "relayout");
                self.statistics.relayout_seconds += seconds;
            }
            Done::Compared(Compared { file, bytes, bad }) => {
                tracing::trace!(%block, bytes, seconds, "verify");
                self.statistics.check_seconds += seconds;
                self.statistics.bytes_checked += bytes;
                job.checked_bytes += bytes;
                job.bad = job.bad.take().or(bad.map(|bad| (file, bad)));
            }
            Done::Decoded(Compared { file, bytes, bad }, _) => {
                tracing::trace!(%block, bytes, seconds, "decode");
                self.statistics.decode_seconds += seconds;
                self.statistics.bytes_checked += bytes;
                job.bad = job.bad.take().or(bad.map(|bad| (file, bad)));
            }
        }
        self.conclude(key);
    }

    /// Returns true if a block has arrived completely and only lacks answers of the checker's threads, or if nothing else goes on.
    pub(super) fn waits_for_checker(&self) -> bool {
        let waits = |job: &Job| job.checking > 0 && job.is_here();
        // Requests may wait for memory that is being decoded from.
        let idle = self.at_device() == 0;
        self.checker.open() > 0 && (idle || self.jobs.iter().flatten().any(waits))
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
        let BadChunk { offset, place, damage } = bad;
        self.statistics.checksum_mismatches += 1;
        let block = job.read.label;
        if job.rereads == 0 {
            // The bytes may be correct on the disk and have changed on the way to memory.
            tracing::warn!(%block, offset, "{damage}; reading again");
            job.read_again();
            self.statistics.retries += 1;
            let priority = job.read.priority;
            self.queues[priority as usize].push_front(key);
            return true;
        }
        let file = self.files.file(file).map(|file| file.path.clone()).unwrap_or_default();
        job.outcome = Some(ReadError::Corrupt { file, offset, place, block, damage });
        false
    }
}
