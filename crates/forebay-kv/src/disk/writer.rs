//! The thread that writes.

use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::folder::{Folder, now};
use super::format::{self, HEADER_BYTES, Meta, Record};
use super::{Operation, Shared};
use crate::buffers::{Lent, PAGE};

/// While weights are read from the same disk, writes take at most one part in so many of the time.
const SHARE_OF_TIME: u32 = 20;

/// Failed writes in a row after which the store writes no more.
const FAILURES_MAX: u32 = 3;

/// Bytes of a segment: one part in so many of the store's size, within these limits.
const SEGMENTS: u64 = 16;
const SEGMENT_BYTES: std::ops::RangeInclusive<u64> = 1 << 20..=256 << 20;

/// A block on its way to the disk. The buffer has room for a record's header before the block's bytes.
#[derive(Debug)]
pub struct Queued {
    pub meta: Meta,
    pub len: usize,
    pub buffer: Lent,
}

/// State of the writing thread.
pub struct Writer {
    shared: Arc<Shared>,
    /// The segment that grows.
    active: Option<u64>,
    segment_bytes: u64,
    failures: u32,
}

/// Returns the bytes that a buffer needs for a block of `len` bytes.
pub fn buffer_bytes(len: usize, is_sealed: bool) -> usize {
    HEADER_BYTES + format::payload_bytes(len, is_sealed)
}

impl Writer {
    pub fn new(shared: Arc<Shared>) -> Writer {
        let segment = shared.options.bytes / SEGMENTS / PAGE as u64 * PAGE as u64;
        let segment_bytes = segment.clamp(*SEGMENT_BYTES.start(), *SEGMENT_BYTES.end());
        Writer { shared, active: None, segment_bytes, failures: 0 }
    }

    /// Writes what is queued until the store closes.
    pub fn run(mut self) {
        while let Some(queued) = self.shared.next_to_write() {
            let (started, key) = (Instant::now(), queued.meta.key);
            match self.write(queued) {
                Ok(()) => self.failures = 0,
                Err(error) => {
                    self.shared.state().index.dequeue(key);
                    self.shared.warn_once(Operation::Write, &error);
                    self.failures += 1;
                    // What was written at this place is unknown, so nothing else is written there.
                    self.end_segment();
                    if self.failures == FAILURES_MAX {
                        self.shared.stops_writing.store(true, Ordering::Relaxed);
                    }
                }
            }
            self.shared.note_written();
            if self.shared.shares_disk.load(Ordering::Relaxed) {
                self.shared.rest(started.elapsed() * (SHARE_OF_TIME - 1));
            }
        }
        self.end_segment();
    }

    fn write(&mut self, Queued { meta, len, mut buffer }: Queued) -> io::Result<()> {
        let shared = self.shared.clone();
        let stored = buffer_bytes(len, shared.folder.is_sealed()) as u64;
        if !self.make_room(stored)? {
            shared.state().index.dequeue(meta.key);
            return Ok(());
        }
        let number = self.active_segment(stored)?;
        let (file, tag, cipher, offset) = {
            let state = shared.state();
            let segment = state.index.segment(number).ok_or(ErrorKind::NotFound)?;
            (segment.file.clone(), segment.tag, segment.cipher.clone(), segment.bytes)
        };
        let meta = Meta { checksum: format::checksum(&buffer[HEADER_BYTES..][..len]), ..meta };
        let record = Record { offset, len: len as u64, meta };
        let bytes = format::write_record(&mut buffer, &tag, &record, cipher.as_deref());
        let write = || {
            let started = Instant::now();
            let written = shared
                .inject(Operation::Write)
                .and_then(|()| file.write_all_at(&buffer[..bytes], offset));
            let place = (number, offset, bytes as u64);
            shared.tell_watch(Operation::Write, place, started, &written);
            written
        };
        match write() {
            // The disk is full, although the store's own limit is not reached.
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                if !self.remove_oldest()? {
                    return Err(error);
                }
                write()?;
            }
            written => written?,
        }
        let mut state = shared.state();
        state.index.append(number, record, bytes as u64);
        state.statistics.written_blocks += 1;
        state.statistics.written_bytes += bytes as u64;
        state.wear = state.wear.today();
        state.wear.bytes += bytes as u64;
        Ok(())
    }

    /// Removes segments until `bytes` more fit. Returns false if they never do.
    fn make_room(&mut self, bytes: u64) -> io::Result<bool> {
        let most = self.shared.options.bytes;
        loop {
            let used = self.shared.state().index.bytes();
            if used + bytes <= most {
                return Ok(true);
            }
            if !self.remove_oldest()? {
                if self.active.is_none() {
                    return Ok(false);
                }
                // The segment that grows is all there is.
                self.end_segment();
            }
        }
    }

    fn remove_oldest(&mut self) -> io::Result<bool> {
        let removed = self.shared.state().index.remove_oldest(self.active);
        let Some(segment) = removed else { return Ok(false) };
        Folder::remove(&segment)?;
        self.shared.state().statistics.removed_blocks += segment.records.len() as u64;
        Ok(true)
    }

    /// Returns the segment to which `bytes` are appended.
    fn active_segment(&mut self, bytes: u64) -> io::Result<u64> {
        if let Some(number) = self.active {
            let used = self.shared.state().index.segment(number).map_or(0, |of| of.bytes);
            if used == 0 || used + bytes <= self.segment_bytes {
                return Ok(number);
            }
            self.end_segment();
        }
        let number = self.shared.new_segment_number();
        let segment = self.shared.folder.make_segment(number)?;
        self.shared.state().index.add_segment(number, segment);
        self.active = Some(number);
        Ok(number)
    }

    /// Completes the segment that grows: writes its index, or removes it if it is empty.
    fn end_segment(&mut self) {
        let Some(number) = self.active.take() else { return };
        let shared = &self.shared;
        let is_empty = shared.state().index.segment(number).is_none_or(|of| of.bytes == 0);
        let ended = if is_empty {
            let removed = shared.state().index.remove_segment(number);
            removed.map_or(Ok(()), |segment| Folder::remove(&segment))
        } else {
            let state = shared.state();
            let written = state.index.segment(number).map(|of| {
                // A failed write may have left bytes behind the last record.
                of.file.set_len(of.bytes).and_then(|()| shared.folder.write_index(number, of))
            });
            written.unwrap_or(Ok(()))
        };
        let wear = shared.state().wear;
        let ended = ended.and_then(|()| shared.folder.write_wear(wear).map_err(io::Error::other));
        if let Err(error) = ended {
            // The next start scans the segment.
            tracing::debug!("{}: {error}", shared.folder.path().display());
        }
    }
}

impl Shared {
    /// Returns the next block to write, or `None` if the store closes and nothing is left.
    fn next_to_write(&self) -> Option<Queued> {
        let mut state = self.state();
        loop {
            if let Some(queued) = state.to_write.pop_front() {
                state.writing = true;
                return Some(queued);
            }
            if state.closing {
                return None;
            }
            state = self.wait(state);
        }
    }

    fn note_written(&self) {
        self.state().writing = false;
        self.changed.notify_all();
    }

    /// Waits, but not if the store closes.
    fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.state();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.closing || left.is_zero() {
                return;
            }
            state = self.wait_within(state, left);
        }
    }

    fn new_segment_number(&self) -> u64 {
        let mut state = self.state();
        let number = state.index.next_number().max(state.last_number + 1);
        state.last_number = number;
        number
    }

    /// Returns true if the limit of bytes per day allows a block.
    pub fn may_wear(&self, bytes: u64, wear: super::folder::Wear) -> bool {
        let most = self.options.bytes_per_day;
        most.is_none_or(|most| wear.today().bytes + bytes <= most)
    }
}

/// Returns the description of a block to write. Its checksum is computed later.
pub fn meta(key: crate::BlockKey, link: crate::Link, model: u64) -> Meta {
    Meta { key, link, model, written: now(), checksum: 0 }
}
