//! The scheduler that all engines share. It handles priorities, queue depth, retries, stalls and cancellation. It
//! returns no buffer while the device may write to it or the checker uses it.

mod checking;
mod recording;
mod relayout;
mod stages;

use std::collections::VecDeque;
use std::time::Duration;

use forebay_format::FileIndex;

use crate::arena::SLOT_ALIGNMENT;
use crate::checker::{Answer, Checker};
use crate::device::{Device, Finished, Transfer};
use crate::engine::{
    BlockRead, Completion, EngineInfo, EngineOptions, IoStatistics, Priority, ReadDone, ReadEngine,
};
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::interrupt::{DRAIN, END_EARLY, LOOK};
use crate::job::{CODED_REQUEST_BYTES, Circumstances, Job, Request, Verdict, judge};
use crate::relayout::Scratch;
use crate::trace::{IoRecorder, ReadEnd};
use stages::Stages;

/// Number of finished requests for which the scheduler wakes up if their bytes must be verified.
const CHECKED_AT_A_TIME: usize = 4;

pub(crate) struct Scheduler<D: Device> {
    device: D,
    /// Checker of the arrived bytes. It is declared before `stages`, `scratch` and `jobs`, so that its threads have ended before
    /// that memory is freed.
    checker: Checker,
    stages: Stages,
    scratch: Scratch,
    /// The job that uses the scratch memory. The jobs in `to_relayout` wait for it.
    relayouts: Option<u32>,
    to_relayout: VecDeque<u32>,
    files: FileSet,
    options: EngineOptions,
    jobs: Vec<Option<Job>>,
    free_jobs: Vec<u32>,
    /// Number of jobs whose callers wait for an answer.
    live_jobs: usize,
    /// Jobs that have more to request, by priority.
    queues: [VecDeque<u32>; Priority::COUNT],
    /// Requests at the device, by transfer key.
    requests: Vec<Option<Request>>,
    free_requests: Vec<u32>,
    /// Number of requests at the device that count against the background depth.
    background: usize,
    ready: Vec<Completion>,
    finished: Vec<Finished>,
    answers: Vec<Answer>,
    statistics: IoStatistics,
    busy_before: Duration,
    busy_since: Option<Duration>,
    /// Device time at which `poll` looks for stalled requests again.
    stall_check: Duration,
    /// A failure of the device that `submit` could not report.
    broken: Option<StoreError>,
    recorder: Option<IoRecorder>,
    /// Difference from the device's clock to the recorder's clock.
    recorder_ahead: Duration,
}

/// Returns the size of the memory for one read of coded bytes of these files, or 0 if there are none.
fn stage_bytes(files: &FileSet) -> usize {
    let chunks = files.files().iter().filter_map(|file| file.chunks.as_ref());
    let largest = chunks.map(|chunks| chunks.coded_bytes_max()).max().unwrap_or(0);
    if largest == 0 {
        return 0;
    }
    // A coded chunk has at most as many bytes as after decoding, and padding. Reads begin and end at whole pages.
    let bytes = largest.max(CODED_REQUEST_BYTES) as usize + 3 * SLOT_ALIGNMENT;
    bytes.next_multiple_of(SLOT_ALIGNMENT)
}

impl<D: Device> Scheduler<D> {
    pub(crate) fn new(
        device: D,
        checker: Checker,
        files: FileSet,
        options: EngineOptions,
    ) -> Scheduler<D> {
        let depth = options.queue_depth;
        let recorder = files.recorder().cloned();
        let stages = Stages::new(stage_bytes(&files));
        let ahead = |recorder: &IoRecorder| recorder.now().saturating_sub(device.now());
        let recorder_ahead = recorder.as_ref().map_or(Duration::ZERO, ahead);
        Scheduler {
            device,
            checker,
            stages,
            scratch: Scratch::new(options.relayout_bytes),
            relayouts: None,
            to_relayout: VecDeque::new(),
            files,
            options,
            jobs: Vec::new(),
            free_jobs: Vec::new(),
            live_jobs: 0,
            queues: Default::default(),
            requests: vec![None; depth],
            free_requests: (0..depth as u32).rev().collect(),
            background: 0,
            ready: Vec::new(),
            finished: Vec::with_capacity(depth),
            answers: Vec::with_capacity(depth),
            statistics: IoStatistics::default(),
            busy_before: Duration::ZERO,
            busy_since: None,
            stall_check: Duration::ZERO,
            broken: None,
            recorder,
            recorder_ahead,
        }
    }

    fn at_device(&self) -> usize {
        self.requests.len() - self.free_requests.len()
    }

    /// Returns an error if the read cannot succeed. This is checked before anything is requested.
    fn check(&self, read: &BlockRead) -> Result<(), ReadError> {
        let (layout, block) = (&read.layout, read.label);
        if read.buffer.len() < layout.slot_bytes {
            return Err(ReadError::SlotTooSmall {
                needed_bytes: layout.slot_bytes,
                given_bytes: read.buffer.len(),
                block,
            });
        }
        let needed_bytes = layout.relayout.as_ref().map_or(0, |relayout| relayout.to.len());
        if self.scratch.bytes() < needed_bytes {
            let given_bytes = self.scratch.bytes();
            return Err(ReadError::ScratchTooSmall { needed_bytes, given_bytes, block });
        }
        for region in layout.regions.iter() {
            let Some(file) = self.files.file(region.file) else {
                let files = self.files.len();
                return Err(ReadError::UnknownFile { index: region.file.0, files, block });
            };
            let needed = file.read_alignment(self.options.direct);
            if layout.alignment < needed && file.coded(region.offset).is_none() {
                let planned = layout.alignment;
                return Err(ReadError::Misaligned {
                    file: file.path.clone(),
                    planned,
                    needed,
                    block,
                });
            }
            let wanted = region.wanted();
            let is_coded = file.coded(region.offset).is_some();
            if file.chunks.as_ref().is_some_and(|chunks| {
                // Bytes without checksums that are stored as they are can be read alone, but not together with coded ones.
                !chunks.is_whole(wanted.clone())
                    || chunks.end_of_kind(wanted.start) < wanted.end
                    || is_coded && region.length != wanted.end - wanted.start
            }) {
                let (file, offset) = (file.path.clone(), region.offset);
                return Err(ReadError::PartOfChunk { file, offset, block });
            }
            if region.wanted_end > file.end() {
                return Err(ReadError::UnexpectedEnd {
                    file: file.path.clone(),
                    file_end: file.end(),
                    wanted_end: region.wanted_end,
                    block,
                });
            }
        }
        Ok(())
    }

    /// Starts requests while the queue depths allow it.
    fn pump(&mut self) {
        while !self.free_requests.is_empty() && !self.stages.is_exhausted() {
            let Some(key) = self.next_job() else { break };
            let Some(job) = self.jobs[key as usize].as_mut() else { continue };
            let priority = job.read.priority;
            let chunks = |file| self.files.file(file).and_then(|file| file.chunks.as_ref());
            let next = job.next_request(key, self.options.largest_request(priority), chunks);
            if !job.is_pending() {
                self.queues[priority as usize].pop_front();
            }
            let Some(mut request) = next else {
                // `check` refuses layouts that no request can read.
                let (block, place) = (job.read.label, job.place());
                let (index, offset) = place.unwrap_or((FileIndex(0), 0));
                let file = self.files.file(index).map(|file| file.path.clone());
                let file = file.unwrap_or_default();
                self.fail(key, ReadError::PartOfChunk { file, offset, block });
                self.conclude(key);
                continue;
            };
            if let Some(span) = request.coded.as_mut() {
                span.stage = self.stages.take(request.length);
                if span.stage.is_none() {
                    let (needed_bytes, block) = (request.length as usize, job.read.label);
                    let given_bytes = self.stages.stage_bytes();
                    self.fail(key, ReadError::SlotTooSmall { needed_bytes, given_bytes, block });
                    self.conclude(key);
                    continue;
                }
            }
            let Some(slot) = self.free_requests.pop() else { break };
            job.in_flight += 1;
            request.background = priority != Priority::Demand;
            self.background += usize::from(request.background);
            self.start(slot, request);
        }
        if let Err(error) = self.device.flush() {
            self.broken = Some(error);
        }
    }

    fn has_queued(&self) -> bool {
        self.queues.iter().any(|queue| !queue.is_empty())
    }

    /// Returns the job whose request is started next. The job stays at the front of its queue.
    fn next_job(&self) -> Option<u32> {
        let [demand, read_ahead, prefetch, load] = &self.queues;
        if let Some(&job) = demand.front() {
            return Some(job);
        }
        if self.background >= self.options.background_depth {
            return None;
        }
        let prefetch = prefetch.front().filter(|_| !self.is_demand_at_device());
        read_ahead.front().or(prefetch).or(load.front()).copied()
    }

    /// Returns true if a demand request is at the device and its caller still waits for it. Callers of stalled requests
    /// no longer wait.
    fn is_demand_at_device(&self) -> bool {
        let is_demand = |request: &Request| !request.background && self.is_waited_for(request);
        self.at_device() > self.background && self.requests.iter().flatten().any(is_demand)
    }

    fn is_waited_for(&self, request: &Request) -> bool {
        self.jobs[request.job as usize].as_ref().is_some_and(|job| !job.abandoned)
    }

    /// Starts a request: lends a span of the job's buffer to the device.
    fn start(&mut self, slot: u32, mut request: Request) {
        let now = self.device.now();
        self.busy_since.get_or_insert(now);
        request.started = now;
        self.requests[slot as usize] = Some(request);
        let Some(job) = self.jobs[request.job as usize].as_mut() else { return };
        job.done.requests += 1;
        self.statistics.requests += 1;
        let memory = match request.coded {
            None => job.read.buffer.pointer(),
            Some(span) => {
                span.stage.map_or(std::ptr::null_mut(), |stage| self.stages.pointer(stage))
            }
        };
        // SAFETY: a span of a coded block lies inside the stage that `pump` took for it and that it keeps until it is back. Any other span
        // lies inside the slot, because `check` compared the slot with the layout and requests stay
        // inside their region. Regions do not overlap, and neither do requests. The job owns the buffer and keeps it
        // until all its requests are back. `drop` waits for them or leaks the buffer.
        let started = unsafe {
            self.device.start(Transfer {
                key: slot,
                file: request.file,
                offset: request.offset,
                length: request.length as u32,
                memory: memory.add(request.at),
                priority: job.read.priority,
            })
        };
        if let Err(error) = started {
            let path = self.files.file(request.file).map(|file| file.path.clone());
            let outcome = ReadError::Io {
                file: path.unwrap_or_default(),
                offset: request.offset,
                block: job.read.label,
                attempts: request.attempts + 1,
                source: std::io::Error::other(error),
            };
            self.record(slot, ReadEnd::Lost, 0);
            self.fail(request.job, outcome);
            self.release(slot);
        }
    }

    /// Handles all requests in `finished`.
    fn settle(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        for end in finished.drain(..) {
            self.settle_one(end);
        }
        self.finished = finished;
        if self.at_device() == 0
            && let Some(since) = self.busy_since.take()
        {
            self.busy_before += self.device.now().saturating_sub(since);
        }
    }

    fn settle_one(&mut self, end: Finished) {
        let Some(request) = self.requests.get(end.key as usize).copied().flatten() else { return };
        self.record_finished(&end);
        let Some(job) = self.jobs[request.job as usize].as_mut() else { return };
        let count = u64::from(end.result.unwrap_or(0));
        tracing::trace!(
            block = %job.read.label,
            offset = request.offset,
            bytes = count,
            seconds = self.device.now().saturating_sub(request.started).as_secs_f64(),
            "read"
        );
        job.done.bytes_read += count;
        self.statistics.bytes_read += count;
        if job.abandoned || job.outcome.is_some() {
            return self.release(end.key);
        }
        let Some(file) = self.files.file(request.file) else { return };
        let about = Circumstances {
            path: &file.path,
            file_bytes: file.bytes,
            alignment: file.read_alignment(self.options.direct) as u64,
            retries: self.options.retries,
            block: job.read.label,
        };
        let failure = end.result.err().and_then(|_| self.device.take_failure(end.key));
        let verdict = match failure {
            None => judge(request, end.result, &about),
            Some((attempts, source)) => Verdict::Failed(ReadError::Io {
                file: file.path.clone(),
                offset: request.offset,
                block: job.read.label,
                attempts,
                source,
            }),
        };
        match verdict {
            Verdict::Complete => {
                match request.coded {
                    None => self.begin_check(&request),
                    Some(_) => self.begin_decoding(end.key),
                }
                self.release(end.key);
            }
            Verdict::Again(mut next) => {
                self.statistics.retries += 1;
                next.again += 1;
                self.start(end.key, next);
            }
            Verdict::Failed(error) => {
                tracing::warn!(%error, "a read failed");
                self.fail(request.job, error);
                self.release(end.key);
            }
        }
    }

    /// Records why a job fails, and drops the requests that it has not started yet.
    fn fail(&mut self, key: u32, error: ReadError) {
        let Some(job) = self.jobs[key as usize].as_mut() else { return };
        job.outcome.get_or_insert(error);
        self.queues[job.read.priority as usize].retain(|&queued| queued != key);
    }

    /// Frees the slot of a request. If it was the job's last one, concludes the job.
    fn release(&mut self, slot: u32) {
        let Some(request) = self.requests[slot as usize].take() else { return };
        self.free_requests.push(slot);
        if let Some(stage) = request.coded.and_then(|span| span.stage) {
            self.stages.give_back(stage);
        }
        self.background -= usize::from(request.background);
        if let Some(job) = self.jobs[request.job as usize].as_mut() {
            job.in_flight -= 1;
            self.conclude(request.job);
        }
    }

    /// Answers the caller if no part of the job is at the device or at the checker, or waits to go there.
    fn conclude(&mut self, key: u32) {
        let place = self.jobs[key as usize].as_ref();
        if !place.is_some_and(|job| job.is_here() && job.checking == 0) {
            return;
        }
        if self.begin_last_checks(key) || self.reads_again(key) || self.relayout(key) {
            return;
        }
        let Some(job) = self.jobs[key as usize].take() else { return };
        self.free_jobs.push(key);
        if job.abandoned {
            return;
        }
        self.live_jobs -= 1;
        if job.outcome.is_none() {
            self.statistics.bytes_requested += job.read.layout.wanted_bytes();
        }
        let result = job.outcome.map_or(Ok(job.done), Err);
        self.ready.push(Completion { id: job.read.id, buffer: Some(job.read.buffer), result });
    }

    fn find(&self, id: u64) -> Option<u32> {
        let is_it = |job: &Job| job.read.id == id && !job.abandoned;
        self.jobs.iter().position(|job| job.as_ref().is_some_and(is_it)).map(|key| key as u32)
    }

    /// Ends the reads whose requests are at the device for too long. Their callers get an error, and the scheduler
    /// keeps their buffers.
    fn end_stalled(&mut self) {
        let now = self.device.now();
        for slot in 0..self.requests.len() {
            let Some(request) = self.requests[slot] else { continue };
            let waited = now.saturating_sub(request.started);
            let stalled = waited >= self.options.stall_timeout;
            let Some(job) = self.jobs[request.job as usize].as_mut().filter(|_| stalled) else {
                continue;
            };
            if job.abandoned {
                continue;
            }
            job.abandoned = true;
            let block = job.read.label;
            let (id, priority) = (job.read.id, job.read.priority);
            self.queues[priority as usize].retain(|&queued| queued != request.job);
            self.live_jobs -= 1;
            self.forget_background(request.job);
            let path = self.files.file(request.file).map(|file| file.path.clone());
            let error = ReadError::Stalled {
                file: path.unwrap_or_default(),
                offset: request.offset,
                block,
                waited,
            };
            tracing::warn!(%error, "a read stalled");
            self.ready.push(Completion { id, buffer: None, result: Err(error) });
        }
        self.end_starved();
    }

    /// Calls [`end_stalled`](Self::end_stalled) at intervals. `poll` uses this, because it runs between computations
    /// and must be cheap.
    fn end_stalled_sometimes(&mut self) {
        let now = self.device.now();
        if now >= self.stall_check {
            self.stall_check = now + self.options.stall_timeout / 16;
            self.end_stalled();
        }
    }

    /// Stops counting a stalled job's requests against the background depth. Otherwise they would block read-ahead
    /// forever.
    fn forget_background(&mut self, job: u32) {
        for request in self.requests.iter_mut().flatten() {
            if request.job == job && request.background {
                request.background = false;
                self.background -= 1;
            }
        }
    }

    /// Fails all waiting jobs if stalled requests fill the whole queue depth, because then no waiting request can ever
    /// start.
    fn end_starved(&mut self) {
        let has_room = !self.free_requests.is_empty() && !self.stages.is_exhausted();
        if has_room || self.checker.open() > 0 || self.queues.iter().all(VecDeque::is_empty) {
            return;
        }
        let is_abandoned = |request: &Request| {
            self.jobs[request.job as usize].as_ref().is_some_and(|job| job.abandoned)
        };
        if !self.requests.iter().flatten().all(is_abandoned) {
            return;
        }
        while let Some(key) = self.queues.iter_mut().find_map(VecDeque::pop_front) {
            let Some(job) = &self.jobs[key as usize] else { continue };
            let block = job.read.label;
            let (index, offset) = job.place().unwrap_or((FileIndex(0), 0));
            let path = self.files.file(index).map(|file| file.path.clone());
            let waited = self.options.stall_timeout;
            let file = path.unwrap_or_default();
            self.fail(key, ReadError::Stalled { file, offset, block, waited });
            self.conclude(key);
        }
    }

    /// Returns how long to wait for the device before the oldest request counts as stalled.
    fn until_stall(&self) -> Duration {
        let now = self.device.now();
        let active = self.requests.iter().flatten().filter(|request| self.is_waited_for(request));
        let oldest = active.map(|request| request.started).min().unwrap_or(now);
        (oldest + self.options.stall_timeout).saturating_sub(now)
    }

    /// Returns how many finished requests to wait for. A job cannot be complete before all its requests at the device
    /// have finished. But the queue must not stay partly empty for long while requests wait.
    fn worth_waking(&self) -> usize {
        let whole = |job: &&Job| !job.is_pending() && !job.abandoned;
        let jobs = self.jobs.iter().flatten().filter(whole);
        let first = jobs.map(|job| job.in_flight as usize).min().unwrap_or(usize::MAX);
        let refill = match self.queues.iter().all(VecDeque::is_empty) {
            true => self.at_device(),
            false => self.at_device() / 4,
        };
        // Checksums should be verified while the remaining requests run, not after them.
        let checked = if self.files.is_checked() || self.files.is_coded() {
            CHECKED_AT_A_TIME
        } else {
            usize::MAX
        };
        first.min(refill).min(checked).max(1)
    }

    /// Waits until something is ready, nothing is in flight, or the device's clock shows `deadline`.
    fn wait_until(
        &mut self,
        deadline: Option<Duration>,
        done: &mut Vec<Completion>,
    ) -> Result<(), StoreError> {
        let mut waited_since = None;
        loop {
            self.files.check_interrupt()?;
            self.settle_checks();
            self.pump();
            if !self.ready.is_empty() || self.live_jobs == 0 || self.broken.is_some() {
                self.record_wait(waited_since);
                return self.collect(done);
            }
            if self.recorder.is_some() && waited_since.is_none() {
                waited_since = self.most_urgent().map(|why| (self.device.now(), why));
            }
            let began = self.device.now();
            if self.checker.run_one() {
                self.count_check_wait(began);
                // Collect finished requests, so that the next ones start during verification.
                self.device.reap(&mut self.finished)?;
                self.settle();
                continue;
            }
            if self.waits_for_checker() {
                self.checker.wait()?;
                self.count_check_wait(began);
                continue;
            }
            let left = deadline.map(|deadline| deadline.saturating_sub(self.device.now()));
            if left.is_some_and(|left| left.is_zero()) {
                self.record_wait(waited_since);
                return self.collect(done);
            }
            let stall = self.until_stall().min(left.unwrap_or(Duration::MAX));
            let timeout = self.files.interrupt().map_or(stall, |_| stall.min(LOOK));
            self.device.wait(self.worth_waking(), timeout, &mut self.finished)?;
            self.settle();
            self.end_stalled();
        }
    }

    fn collect(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        if let Some(error) = self.broken.take() {
            return Err(error);
        }
        done.append(&mut self.ready);
        Ok(())
    }
}

impl<D: Device> ReadEngine for Scheduler<D> {
    fn submit(&mut self, read: BlockRead) {
        self.queue(read);
        self.pump();
    }

    fn queue(&mut self, mut read: BlockRead) {
        let refused = self.check(&read).err();
        if refused.is_some() || read.layout.regions.is_empty() {
            let result = refused.map_or(Ok(ReadDone::default()), Err);
            self.ready.push(Completion { id: read.id, buffer: Some(read.buffer), result });
            return;
        }
        if self.files.is_remote() {
            read.layout = read.layout.exact();
        }
        let priority = read.priority;
        let key = self.free_jobs.pop().unwrap_or_else(|| {
            self.jobs.push(None);
            self.jobs.len() as u32 - 1
        });
        self.jobs[key as usize] = Some(Job::new(read));
        self.live_jobs += 1;
        self.queues[priority as usize].push_back(key);
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        if self.at_device() > 0 || self.checker.open() > 0 {
            self.device.reap(&mut self.finished)?;
            self.settle();
            self.settle_checks();
            self.end_stalled_sometimes();
        }
        if self.has_queued() {
            self.pump();
        }
        self.collect(done)
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        self.wait_until(None, done)
    }

    fn wait_for(
        &mut self,
        patience: Duration,
        done: &mut Vec<Completion>,
    ) -> Result<(), StoreError> {
        self.wait_until(Some(self.device.now() + patience), done)
    }

    fn cancel(&mut self, id: u64) {
        let Some(key) = self.find(id) else { return };
        let Some(job) = self.jobs[key as usize].as_ref().filter(|job| job.is_pending()) else {
            return;
        };
        let block = job.read.label;
        self.fail(key, ReadError::Cancelled { block });
        self.conclude(key);
    }

    fn promote(&mut self, id: u64) {
        let Some(key) = self.find(id) else { return };
        let Some(job) = self.jobs[key as usize].as_mut() else { return };
        let before = std::mem::replace(&mut job.read.priority, Priority::Demand);
        if before != Priority::Demand && job.is_pending() {
            self.queues[before as usize].retain(|&queued| queued != key);
            self.queues[Priority::Demand as usize].push_back(key);
            self.pump();
        }
    }

    fn in_flight(&self) -> usize {
        self.live_jobs + self.ready.len()
    }

    fn compares(&self) -> bool {
        self.files.is_checked()
    }

    fn describe(&self) -> EngineInfo {
        self.device.describe()
    }

    fn io_statistics(&self) -> IoStatistics {
        let now = self.device.now();
        let running = self.busy_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
        let busy_seconds = (self.busy_before + running).as_secs_f64();
        IoStatistics { busy_seconds, ..self.statistics }
    }
}

impl<D: Device> Drop for Scheduler<D> {
    /// Waits until the device has stopped writing. If it does not stop in time, the memory is leaked and never reused.
    fn drop(&mut self) {
        let interrupted = self.files.check_interrupt().is_err();
        let ends_early = self.device.writing() > 0 && self.device.end_early();
        let patience = match (ends_early, interrupted) {
            (true, _) => END_EARLY,
            (false, true) => DRAIN,
            (false, false) => self.options.stall_timeout,
        };
        let deadline = self.device.now() + patience;
        while self.device.writing() > 0 {
            let left = deadline.saturating_sub(self.device.now());
            let waited = self.device.wait(self.device.writing(), left, &mut self.finished);
            self.record_all_finished();
            if left.is_zero() || waited.is_err() {
                break;
            }
        }
        for slot in 0..self.requests.len() as u32 {
            self.record(slot, ReadEnd::Lost, 0);
        }
        if self.device.writing() > 0 {
            let writing = self.device.writing();
            tracing::warn!(writing, "requests did not end; their memory is not given back");
            std::mem::forget(std::mem::take(&mut self.jobs));
            self.stages.forget();
        }
    }
}
