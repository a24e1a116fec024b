//! The threads that read.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use super::format::{self, HEADER_BYTES};
use super::{Damage, Operation, Shared};
use crate::block::BlockKey;
use crate::buffers::{Lent, PAGE};

/// Longest time that a reader waits for a buffer before it looks whether the fetch still lives.
const LOOK: Duration = Duration::from_millis(50);

/// A block that a fetch wants.
#[derive(Debug)]
pub struct Wanted {
    pub key: BlockKey,
    pub to: Sender<Fetched>,
    pub is_cancelled: Arc<AtomicBool>,
}

/// A block that was read, or why it was not.
#[derive(Debug)]
pub struct Fetched {
    pub key: BlockKey,
    pub block: Result<Block, Damage>,
}

/// The bytes of a block.
#[derive(Debug)]
pub struct Block {
    buffer: Lent,
    bytes: Range<usize>,
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.bytes.clone()]
    }
}

/// Blocks that are being read. Dropping it cancels the reads that have not begun.
#[derive(Debug)]
pub struct Fetch {
    pub(super) arrived: Receiver<Fetched>,
    pub(super) is_cancelled: Arc<AtomicBool>,
    pub(super) left: usize,
}

impl Fetch {
    /// Returns the number of blocks that have not been returned yet.
    pub fn left(&self) -> usize {
        self.left
    }

    /// Returns a block that has arrived, in any order. Waits for one up to `limit`. Returns `None` if none has come.
    pub fn next_within(&mut self, limit: Duration) -> Option<Fetched> {
        if self.left == 0 {
            return None;
        }
        let arrived = if limit.is_zero() {
            self.arrived.try_recv().map_err(|error| error == TryRecvError::Disconnected)
        } else {
            self.arrived
                .recv_timeout(limit)
                .map_err(|error| error == RecvTimeoutError::Disconnected)
        };
        match arrived {
            Ok(fetched) => {
                self.left -= 1;
                Some(fetched)
            }
            // The store has closed, so nothing more arrives.
            Err(true) => {
                self.left = 0;
                None
            }
            Err(false) => None,
        }
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    /// Reads what fetches want until the store closes.
    pub fn read_all(&self) {
        while let Some(Wanted { key, to, is_cancelled }) = self.next_to_read() {
            if is_cancelled.load(Ordering::Relaxed) {
                continue;
            }
            if let Some(block) = self.read(key, &is_cancelled) {
                if let Err(damage) = &block {
                    self.note_damage(key, damage);
                }
                // Nobody waits any more if this fails.
                let _ = to.send(Fetched { key, block });
            }
        }
    }

    fn next_to_read(&self) -> Option<Wanted> {
        let mut state = self.state();
        loop {
            if state.closing {
                state.to_read.clear();
                return None;
            }
            if let Some(wanted) = state.to_read.pop_front() {
                return Some(wanted);
            }
            state = self.wait(state);
        }
    }

    /// Reads a block. Returns `None` if the fetch is cancelled.
    fn read(&self, key: BlockKey, is_cancelled: &AtomicBool) -> Option<Result<Block, Damage>> {
        let found = {
            let mut state = self.state();
            let place = state.index.find(key);
            place.and_then(|place| {
                let segment = state.index.segment(place.segment)?;
                Some((
                    place.segment,
                    place.record,
                    segment.file.clone(),
                    segment.cipher.clone(),
                    segment.path.clone(),
                ))
            })
        };
        let Some((segment, record, file, cipher, path)) = found else {
            return Some(Err(Damage::Gone));
        };
        let (len, is_sealed) = (record.len as usize, self.folder.is_sealed());
        let stored = format::payload_bytes(len, is_sealed);
        let mut buffer = loop {
            if let Some(buffer) = self.read_buffers.take_within(stored, LOOK) {
                break buffer;
            }
            if is_cancelled.load(Ordering::Relaxed) || self.state().closing {
                return None;
            }
        };
        let started = Instant::now();
        let from = record.offset + HEADER_BYTES as u64;
        let read = self
            .inject(Operation::Read)
            .and_then(|()| read_exact_at(&file, &mut buffer[..stored], from));
        self.tell_watch(Operation::Read, (segment, from, stored as u64), started, &read);
        let mut state = self.state();
        state.statistics.read_seconds += started.elapsed().as_secs_f64();
        state.statistics.read_bytes += stored as u64;
        state.statistics.read_blocks += 1;
        drop(state);
        Some(match read {
            Err(source) => Err(Damage::Unreadable { path, offset: from, source }),
            Ok(()) if !format::check_payload(&record, &mut buffer[..stored], cipher.as_deref()) => {
                Err(Damage::WrongBytes { path, offset: from })
            }
            Ok(()) => Ok(Block { buffer, bytes: 0..len }),
        })
    }
}

/// Reads like [`FileExt::read_exact_at`]. Direct I/O can only go on at a multiple of a page.
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(count) if count == 0 || done + count < bytes.len() && count < PAGE => {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            Ok(count) if done + count == bytes.len() => return Ok(()),
            Ok(count) => done += count / PAGE * PAGE,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
