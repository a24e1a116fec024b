//! Writes the blocks of a pack: encodes chunks on several threads, and puts them into the file in order.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use forebay_codec::{Codec, Encoder, Encoding};
use forebay_format::pack::{Chunk, PackPlan, StoredChunk};
use forebay_store::{Arena, OutputFile, Sink, SlotBuffer, StoreError};

/// Size of one write in bytes.
const WRITE_BYTES: usize = 4 << 20;

/// Bytes of memory for a window besides those before encoding.
const ROOM_BYTES: usize = 256 << 10;

thread_local! {
    /// An encoder for each encoding that this thread has used.
    static ENCODERS: RefCell<Vec<Encoder>> = const { RefCell::new(Vec::new()) };
}

/// Appends the encoded bytes of a chunk to `out`, and returns their codec. Bytes that do not become fewer are stored as they are.
pub(super) fn encode(
    encoding: Encoding,
    bytes: &[u8],
    out: &mut Vec<u8>,
) -> Result<Codec, StoreError> {
    let start = out.len();
    if encoding != Encoding::Raw {
        ENCODERS
            .with_borrow_mut(|encoders| {
                let found = encoders.iter().position(|of| of.encoding() == encoding);
                let at = found.unwrap_or_else(|| {
                    encoders.push(Encoder::new(encoding));
                    encoders.len() - 1
                });
                encoders[at].encode(bytes, out)
            })
            .map_err(|error| StoreError::Engine {
                engine: encoding.codec().name(),
                source: std::io::Error::other(error),
            })?;
        if out.len() - start < bytes.len() {
            return Ok(encoding.codec());
        }
        out.truncate(start);
    }
    out.extend_from_slice(bytes);
    Ok(Codec::Raw)
}

/// A window of the pack after encoding.
struct Encoded {
    /// The window's chunks, each with its codec and where its bytes are.
    chunks: Vec<(Chunk, Codec, Range<usize>)>,
    bytes: Vec<u8>,
}

/// Sink that encodes the windows of a pack and writes them.
pub(super) struct Packing<'a> {
    file: &'a OutputFile,
    plan: &'a PackPlan,
    /// Tensors that cannot become compact. If there are any, the file must be written again.
    refused: &'a Mutex<BTreeSet<usize>>,
    state: Mutex<State>,
    /// Signals that a buffer was written.
    freed: Condvar,
    arena: Arena,
}

/// What filling the write buffer led to.
enum Filled {
    /// A full buffer, and its place in the file.
    Full(SlotBuffer, u64),
    /// The next window has not arrived.
    Missing,
    /// All buffers are being written.
    NoBuffer,
}

struct State {
    /// Offset of the next window, before encoding.
    next: u64,
    /// Windows that arrived before an earlier one, by their offset. The number is bounded by how far reading runs ahead.
    early: BTreeMap<u64, Encoded>,
    /// The window that is put into the file, and how many of its chunks and bytes are.
    current: Option<(Encoded, usize, usize)>,
    /// Memory of windows that are in the file, so that later ones need no new memory.
    spare: Vec<Vec<u8>>,
    chunks: Vec<StoredChunk>,
    /// Zeros that are still to be written behind the last chunk.
    padding: usize,
    /// Bytes for the next write, of which `filled` are there. It is at `written` in the file.
    buffer: Option<SlotBuffer>,
    filled: usize,
    written: u64,
    free: Vec<SlotBuffer>,
}

impl<'a> Packing<'a> {
    pub fn new(
        file: &'a OutputFile,
        plan: &'a PackPlan,
        refused: &'a Mutex<BTreeSet<usize>>,
    ) -> Result<Packing<'a>, StoreError> {
        // One buffer that is filled, and some that are being written.
        let count = 5;
        let arena = Arena::reserve(count * WRITE_BYTES)?;
        let free = (0..count).map(|_| arena.carve(WRITE_BYTES)).collect::<Result<_, _>>()?;
        let state = State {
            next: plan.data_offset(),
            early: BTreeMap::new(),
            current: None,
            spare: Vec::new(),
            chunks: Vec::with_capacity(plan.chunk_index().len() as usize),
            padding: 0,
            buffer: None,
            filled: 0,
            written: plan.data_offset(),
            free,
        };
        Ok(Packing { file, plan, refused, state: Mutex::new(state), freed: Condvar::new(), arena })
    }

    /// Returns the bytes of memory for writes.
    pub fn memory_bytes(&self) -> u64 {
        self.arena.bytes() as u64
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Encodes a window to `memory`, which is empty.
    fn encode(&self, offset: u64, bytes: &[u8], memory: Vec<u8>) -> Result<Encoded, StoreError> {
        let index = self.plan.chunk_index();
        let mut encoded = Encoded { chunks: Vec::new(), bytes: memory };
        // Also for chunks that grow before they are stored as they are.
        encoded.bytes.reserve(bytes.len() + ROOM_BYTES);
        for chunk in index.chunks(offset, offset + bytes.len() as u64) {
            let start = encoded.bytes.len();
            let own = slice(bytes, offset, chunk.offset..chunk.end());
            let codec = encode(self.plan.encoding(&chunk), own, &mut encoded.bytes)?;
            encoded.chunks.push((chunk, codec, start..encoded.bytes.len()));
        }
        Ok(encoded)
    }

    /// Writes what is left, after all windows were taken. Returns all chunks and the size of the file.
    pub fn finish(self) -> Result<(Vec<StoredChunk>, u64), StoreError> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(buffer) = &state.buffer {
            self.file.write_at(state.written, &buffer.as_slice()[..state.filled])?;
        }
        Ok((state.chunks, state.written + state.filled as u64))
    }
}

impl State {
    /// Puts bytes that are next into the write buffer, until it is full or a window is missing.
    fn fill(&mut self, plan: &PackPlan) -> Filled {
        loop {
            let Some(mut buffer) = self.buffer.take().or_else(|| self.free.pop()) else {
                return Filled::NoBuffer;
            };
            if self.filled == WRITE_BYTES {
                let at = self.written;
                self.written += self.filled as u64;
                self.filled = 0;
                return Filled::Full(buffer, at);
            }
            let more = self.fill_more(plan, &mut buffer.as_mut_slice()[self.filled..]);
            self.buffer = Some(buffer);
            if more.is_none() {
                return Filled::Missing;
            }
        }
    }

    /// Puts bytes that are next into `room`, until it is full. Returns `None` if a window is missing.
    fn fill_more(&mut self, plan: &PackPlan, room: &mut [u8]) -> Option<()> {
        let mut room = room;
        while !room.is_empty() {
            if self.padding > 0 {
                let count = self.padding.min(room.len());
                room[..count].fill(0);
                room = &mut room[count..];
                self.padding -= count;
                self.filled += count;
                continue;
            }
            let (window, chunk, at) = match &mut self.current {
                Some(current) => current,
                none => none.insert((self.early.remove(&self.next)?, 0, 0)),
            };
            let Some((of, codec, range)) = window.chunks.get(*chunk) else {
                self.next = window.chunks.last().map_or(self.next, |(last, ..)| last.end());
                let mut memory = std::mem::take(&mut window.bytes);
                memory.clear();
                self.spare.push(memory);
                self.current = None;
                continue;
            };
            if *at == 0 {
                let place = self.written + self.filled as u64;
                self.chunks.push(plan.stored(of, *codec, &window.bytes[range.clone()], place));
            }
            let own = &window.bytes[range.start + *at..range.end];
            let count = own.len().min(room.len());
            room[..count].copy_from_slice(&own[..count]);
            room = &mut room[count..];
            self.filled += count;
            *at += count;
            if *at == range.len() {
                self.padding = self.chunks.last().map_or(0, |chunk| chunk.padding as usize);
                (*chunk, *at) = (*chunk + 1, 0);
            }
        }
        Some(())
    }
}

impl Sink for Packing<'_> {
    fn take(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        if !self.refused.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return Ok(());
        }
        let memory = self.lock().spare.pop().unwrap_or_default();
        let encoded = self.encode(offset, bytes, memory)?;
        let mut state = self.lock();
        state.early.insert(offset, encoded);
        loop {
            match state.fill(self.plan) {
                Filled::Missing => return Ok(()),
                // Otherwise windows would pile up if the disk writes more slowly than others encode.
                Filled::NoBuffer => {
                    state = self.freed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Filled::Full(full, at) => {
                    drop(state);
                    let written = self.file.write_at(at, full.as_slice());
                    state = self.lock();
                    state.free.push(full);
                    self.freed.notify_all();
                    written?;
                }
            }
        }
    }
}

/// Returns a range of the bytes of a window that begins at `offset`.
pub(super) fn slice(bytes: &[u8], offset: u64, range: Range<u64>) -> &[u8] {
    &bytes[(range.start - offset) as usize..(range.end - offset) as usize]
}
