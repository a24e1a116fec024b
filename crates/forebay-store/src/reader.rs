//! Reads spans of any offset and length into the caller's memory, with any engine. This is the library's interface for
//! programs that bring their own buffers.
//!
//! If file offset, length and memory address have the alignment that direct reads of the file need, the disk writes
//! directly to the destination. All other reads go through a bounded ring of aligned staging slots, and only the wanted
//! bytes are copied out of them.

mod owned;

use std::collections::VecDeque;
use std::path::Path;
use std::thread::ThreadId;

use forebay_format::{Extent, FileIndex};

use crate::arena::{Arena, SLOT_ALIGNMENT, SlotBuffer};
use crate::engine::{
    BlockLabel, BlockRead, Completion, EngineInfo, EngineOptions, IoKind, IoStatistics, Priority,
    ReadEngine, open_engine,
};
use crate::error::{ReadError, StoreError};
use crate::files::FileSet;
use crate::layout::BlockLayout;

pub use owned::{BlockAnswer, BlockReader, ReaderError};

/// Minimum number of bytes for which a span is split so that its aligned part is read without a copy. For a shorter
/// part, a second request costs more than the copy.
const WORTH_SPLITTING: usize = 128 << 10;

/// Options of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReaderOptions {
    pub io: IoKind,
    pub engine: EngineOptions,
    /// Size of the memory for reads that cannot go directly to their destination, in bytes.
    pub staging_bytes: usize,
    /// Maximum number of requests without an answer.
    pub requests_max: usize,
}

impl Default for ReaderOptions {
    fn default() -> ReaderOptions {
        ReaderOptions {
            io: IoKind::Auto,
            engine: EngineOptions { background_depth: 32, ..EngineOptions::default() },
            staging_bytes: 16 << 20,
            requests_max: 1 << 16,
        }
    }
}

/// One span to read.
#[derive(Clone, Copy, Debug)]
pub struct ReadRequest {
    /// Number chosen by the caller. The answer contains it, and errors name the request by it.
    pub tag: u64,
    pub file: FileIndex,
    /// Offset from the start of the file in bytes, of any alignment.
    pub offset: u64,
    /// Number of bytes, of any alignment.
    pub length: usize,
    pub priority: Priority,
}

/// A [`ReadRequest`] with the memory that it fills.
#[derive(Clone, Copy, Debug)]
pub struct RawRequest {
    pub read: ReadRequest,
    /// Start of `read.length` bytes, of any alignment.
    pub destination: *mut u8,
}

/// Outcome of a request.
#[derive(Debug)]
pub enum ReaderEnd {
    /// All bytes have arrived.
    Done,
    /// The read failed, and the contents of the destination are undefined.
    Failed(ReadError),
}

/// The answer to one request.
#[derive(Debug)]
pub struct ReadAnswer {
    pub tag: u64,
    /// Number of bytes requested.
    pub bytes: u64,
    pub end: ReaderEnd,
    /// False if the disk never answered and may still write to the destination. The destination must then stay
    /// allocated until the process ends.
    pub destination_is_free: bool,
}

struct Operation {
    /// Unique number of the operation. Unlike its index in `operations`, it is never reused.
    ticket: u64,
    request: RawRequest,
    /// Number of bytes for which pieces were made.
    cut: usize,
    /// Number of pieces in the engine.
    in_flight: u32,
    failure: Option<ReadError>,
    destination_is_free: bool,
    /// True if the disk must never write to the destination, so that every piece is staged.
    is_staged: bool,
    /// Buffer that owns the destination, if the request came through the safe interface.
    owner: Option<SlotBuffer>,
}

impl Operation {
    fn is_cut(&self) -> bool {
        self.failure.is_some() || self.cut == self.request.read.length
    }
}

/// A part of an operation that the engine reads.
#[derive(Clone, Copy)]
struct Piece {
    operation: u32,
    /// Copy out of the staging slot, or `None` if the piece was read directly to its destination.
    copy: Option<Copying>,
}

#[derive(Clone, Copy)]
struct Copying {
    at: usize,
    length: usize,
    to: *mut u8,
}

/// The unsafe reader on which [`BlockReader`] and the C interface are built. Destinations are plain addresses.
///
/// It may move to another thread while nothing is in flight. With io_uring, a new ring is then set up.
pub struct RawReader {
    // This is the first field, so that the engine closes before the memory it writes to is freed.
    engine: Box<dyn ReadEngine>,
    files: FileSet,
    options: ReaderOptions,
    staging: Vec<SlotBuffer>,
    staging_slot_bytes: usize,
    operations: Vec<Option<Operation>>,
    free_operations: Vec<u32>,
    unanswered: usize,
    tickets: u64,
    /// Operations that need more pieces, by priority.
    queues: [VecDeque<u32>; Priority::COUNT],
    pieces: Vec<Option<Piece>>,
    free_pieces: Vec<u32>,
    /// Answers that were not handed out yet, each with its ticket and the owner of its destination.
    ready: VecDeque<(u64, ReadAnswer, Option<SlotBuffer>)>,
    completions: Vec<Completion>,
    /// The thread that last used the reader. Other threads must not use an io_uring that holds its requests.
    owner: Option<ThreadId>,
    has_owner: bool,
}

// SAFETY: the addresses in operations and pieces are lent to this reader by the contract of `submit`, which does not
// depend on the thread.
unsafe impl Send for RawReader {}

impl RawReader {
    /// Opens the files and an engine for them.
    ///
    /// # Errors
    /// Returns an error if a file cannot be opened, an option is out of range, or the engine does not work here.
    pub fn open<P: AsRef<Path>>(
        paths: &[P],
        options: &ReaderOptions,
    ) -> Result<RawReader, StoreError> {
        RawReader::over(FileSet::open(paths)?, options)
    }

    fn over(files: FileSet, options: &ReaderOptions) -> Result<RawReader, StoreError> {
        let mut options = *options;
        if options.io == IoKind::Mmap {
            options.engine.direct = false;
        }
        let slot = options.engine.request_bytes.saturating_add(2 * SLOT_ALIGNMENT);
        let slots = (options.staging_bytes / slot).max(1);
        let arena = Arena::reserve(slots.saturating_mul(slot))?;
        let engine = open_engine(options.io, &files, &arena, &options.engine)?;
        let staging = (0..slots).map(|_| arena.carve(slot)).collect::<Result<Vec<_>, _>>()?;
        let pieces_max = options.engine.queue_depth * 2;
        let has_owner = engine.describe().name == "io_uring";
        Ok(RawReader {
            engine,
            files,
            options,
            staging,
            staging_slot_bytes: slot,
            operations: Vec::new(),
            free_operations: Vec::new(),
            unanswered: 0,
            tickets: 0,
            queues: Default::default(),
            pieces: vec![None; pieces_max],
            free_pieces: (0..pieces_max as u32).rev().collect(),
            ready: VecDeque::new(),
            completions: Vec::new(),
            owner: None,
            has_owner,
        })
    }

    /// Returns the size that a file had when it was opened, in bytes.
    pub fn file_bytes(&self, file: FileIndex) -> Option<u64> {
        self.files.file_bytes(file)
    }

    /// Returns the number of files.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Returns the alignment of offset, length and memory with which this file is read without a copy.
    pub fn alignment(&self, file: FileIndex) -> Option<usize> {
        self.files.file(file).map(|file| file.read_alignment(self.options.engine.direct))
    }

    pub fn describe(&self) -> EngineInfo {
        self.engine.describe()
    }

    pub fn io_statistics(&self) -> IoStatistics {
        self.engine.io_statistics()
    }

    /// Returns the number of requests whose answers have not been handed out yet.
    pub fn in_flight(&self) -> usize {
        self.unanswered
    }

    /// Returns true if another request may be submitted.
    pub fn has_room(&self) -> bool {
        self.unanswered < self.options.requests_max
    }

    /// Makes the calling thread the one that uses the reader.
    ///
    /// # Errors
    /// Returns [`StoreError::WrongThread`] while io_uring has requests of another thread. The reader is then unchanged.
    pub fn claim(&mut self) -> Result<(), StoreError> {
        let here = std::thread::current().id();
        let writing = self.engine.in_flight();
        if self.has_owner && writing > 0 && self.owner != Some(here) {
            return Err(StoreError::WrongThread { writing });
        }
        self.owner = Some(here);
        Ok(())
    }

    /// Accepts a request. Returns false if there [is no room](RawReader::has_room). If the request is invalid, its
    /// answer contains the error. The request may not start before the next [`RawReader::poll`] or [`RawReader::wait`],
    /// so that a batch starts with one call.
    ///
    /// # Safety
    /// `destination` must be valid for writes of `length` bytes. It must not be used elsewhere until the answer was
    /// handed out with `destination_is_free`. If no answer was handed out, it must not be used before
    /// [`RawReader::close`] has returned `Ok(true)`.
    pub unsafe fn submit(&mut self, request: RawRequest) -> bool {
        self.take(request, None, false).is_some()
    }

    fn take(
        &mut self,
        request: RawRequest,
        owner: Option<SlotBuffer>,
        is_staged: bool,
    ) -> Option<u64> {
        if !self.has_room() {
            return None;
        }
        self.unanswered += 1;
        self.tickets += 1;
        let ticket = self.tickets;
        let failure = self.refuse(&request.read);
        let operation = Operation {
            ticket,
            request,
            cut: 0,
            in_flight: 0,
            failure,
            destination_is_free: true,
            is_staged,
            owner,
        };
        let key = self.free_operations.pop().unwrap_or_else(|| {
            self.operations.push(None);
            self.operations.len() as u32 - 1
        });
        let is_cut = operation.is_cut();
        self.operations[key as usize] = Some(operation);
        match is_cut {
            true => self.conclude(key),
            false => self.queues[request.read.priority as usize].push_back(key),
        }
        Some(ticket)
    }

    fn refuse(&self, read: &ReadRequest) -> Option<ReadError> {
        let block = BlockLabel::Other(read.tag);
        let Some(file) = self.files.file(read.file) else {
            let files = self.files.len();
            return Some(ReadError::UnknownFile { index: read.file.0, files, block });
        };
        let wanted_end = read.offset.saturating_add(read.length as u64);
        (wanted_end > file.bytes).then(|| ReadError::UnexpectedEnd {
            file: file.path.clone(),
            file_end: file.bytes,
            wanted_end,
            block,
        })
    }

    /// Submits pieces to the engine while there is room for them.
    fn pump(&mut self) {
        while let Some(&key) = self.queues.iter().find_map(VecDeque::front) {
            let Some(operation) = self.operations[key as usize].as_ref() else { break };
            let priority = operation.request.read.priority;
            if !operation.is_cut() && !self.start_piece(key) {
                return;
            }
            if self.operations[key as usize].as_ref().is_none_or(Operation::is_cut) {
                self.queues[priority as usize].pop_front();
            }
        }
    }

    /// Starts the next piece of an operation. Returns false if there is no room for it now.
    fn start_piece(&mut self, key: u32) -> bool {
        let Some(operation) = self.operations[key as usize].as_mut() else { return true };
        let RawRequest { read, destination } = operation.request;
        let unit = self
            .files
            .file(read.file)
            .map_or(SLOT_ALIGNMENT, |file| file.read_alignment(self.options.engine.direct));
        let offset = read.offset + operation.cut as u64;
        // SAFETY: `cut` is less than the length of the destination.
        let to = unsafe { destination.add(operation.cut) };
        let left = read.length - operation.cut;
        let (length, is_direct) = match operation.is_staged {
            true => (left.min(self.staging_slot_bytes - 2 * SLOT_ALIGNMENT), false),
            false => cut(offset, to.addr(), left, unit, self.staging_slot_bytes),
        };
        if self.free_pieces.is_empty() || (!is_direct && self.staging.is_empty()) {
            return false;
        }
        let Some(id) = self.free_pieces.pop() else { return false };
        operation.cut += length;
        operation.in_flight += 1;
        let extent = Extent { file: read.file, offset, length: length as u64 };
        let mut layout = BlockLayout::plan(&[extent], unit);
        let (buffer, copy) = if is_direct {
            // The plan reserves room for a head and tail around an unaligned span. This span is aligned and has none.
            layout.slot_bytes = length;
            // SAFETY: the caller of `submit` promised memory that is valid and not used elsewhere until the answer is
            // handed out. That does not happen before the engine returns this slot.
            (unsafe { SlotBuffer::foreign(to, length) }, None)
        } else {
            let Some(slot) = self.staging.pop() else { return false };
            (slot, Some(Copying { at: layout.parts[0].at, length, to }))
        };
        self.pieces[id as usize] = Some(Piece { operation: key, copy });
        let label = BlockLabel::Other(read.tag);
        let priority = read.priority;
        self.engine.submit(BlockRead { id: u64::from(id), label, layout, buffer, priority });
        true
    }

    fn settle(&mut self) {
        for completion in std::mem::take(&mut self.completions) {
            let id = completion.id as u32;
            let Some(piece) = self.pieces.get_mut(id as usize).and_then(Option::take) else {
                continue;
            };
            self.free_pieces.push(id);
            let Some(operation) = self.operations[piece.operation as usize].as_mut() else {
                continue;
            };
            operation.in_flight -= 1;
            match (&completion.result, &completion.buffer, piece.copy) {
                (Ok(_), Some(slot), Some(copy)) => {
                    let wanted = &slot.as_slice()[copy.at..copy.at + copy.length];
                    // SAFETY: `to` is the start of `length` bytes of the destination that no other piece has. They are
                    // valid by the contract of `submit`. The staging slot belongs to this reader, so the two do not
                    // overlap.
                    unsafe { copy.to.copy_from_nonoverlapping(wanted.as_ptr(), copy.length) };
                }
                // The engine kept a direct buffer: the disk may still write to the destination.
                (_, None, None) => operation.destination_is_free = false,
                _ => {}
            }
            if let (Some(slot), Some(_)) = (completion.buffer, piece.copy) {
                self.staging.push(slot);
            }
            if let Err(error) = completion.result {
                operation.failure.get_or_insert(error);
            }
            self.conclude(piece.operation);
        }
    }

    /// Makes the answer of an operation if no piece of it is left.
    fn conclude(&mut self, key: u32) {
        let place = &mut self.operations[key as usize];
        let finished = |operation: &mut Operation| operation.is_cut() && operation.in_flight == 0;
        let Some(operation) = place.take_if(finished) else { return };
        let queue = &mut self.queues[operation.request.read.priority as usize];
        if queue.front() == Some(&key) {
            queue.pop_front();
        } else {
            queue.retain(|&queued| queued != key);
        }
        self.free_operations.push(key);
        let destination_is_free = operation.destination_is_free;
        let mut owner = operation.owner;
        if !destination_is_free {
            // Leak the buffer: the disk may still write to it.
            std::mem::forget(owner.take());
        }
        let end = operation.failure.map_or(ReaderEnd::Done, ReaderEnd::Failed);
        let ReadRequest { tag, length, .. } = operation.request.read;
        let answer = ReadAnswer { tag, bytes: length as u64, end, destination_is_free };
        self.ready.push_back((operation.ticket, answer, owner));
    }

    /// Starts waiting requests and collects finished ones, without waiting.
    ///
    /// # Errors
    /// Returns a [`StoreError`] if the engine as a whole has failed.
    pub fn progress(&mut self) -> Result<(), StoreError> {
        self.claim()?;
        self.pump();
        self.engine.poll(&mut self.completions)?;
        self.settle();
        self.pump();
        Ok(())
    }

    /// Returns the oldest answer that is ready, without waiting.
    ///
    /// # Errors
    /// Returns the errors of [`RawReader::progress`].
    pub fn poll(&mut self) -> Result<Option<ReadAnswer>, StoreError> {
        if self.ready.is_empty() {
            self.progress()?;
        }
        Ok(self.hand_out().map(|(answer, _)| answer))
    }

    /// Waits for the next answer and returns it. Returns `None` if nothing is in flight.
    ///
    /// # Errors
    /// Returns the errors of [`RawReader::progress`].
    pub fn wait(&mut self) -> Result<Option<ReadAnswer>, StoreError> {
        self.wait_until(|reader| !reader.ready.is_empty())?;
        Ok(self.hand_out().map(|(answer, _)| answer))
    }

    /// Reads one span and waits for it. Returns `None` if the reader has no room. Answers of other requests are kept
    /// for later calls.
    ///
    /// # Errors
    /// Returns the errors of [`RawReader::progress`]. The destination then belongs to the reader until it is closed.
    ///
    /// # Safety
    /// The requirements of [`RawReader::submit`] apply.
    pub unsafe fn read(&mut self, request: RawRequest) -> Result<Option<ReadAnswer>, StoreError> {
        let Some(ticket) = self.take(request, None, false) else { return Ok(None) };
        self.wait_for(ticket)
    }

    fn wait_for(&mut self, ticket: u64) -> Result<Option<ReadAnswer>, StoreError> {
        let place = |reader: &RawReader| reader.ready.iter().position(|(of, ..)| *of == ticket);
        self.wait_until(|reader| place(reader).is_some())?;
        let answer = place(self).and_then(|index| self.ready.remove(index));
        self.unanswered -= usize::from(answer.is_some());
        Ok(answer.map(|(_, answer, _)| answer))
    }

    /// Makes sure that nothing more is copied to the destination of a staged operation.
    fn disown(&mut self, ticket: u64) {
        let is_it = |place: &Option<Operation>| place.as_ref().is_some_and(|o| o.ticket == ticket);
        let Some(key) = self.operations.iter().position(is_it) else { return };
        let of_it = |piece: &&mut Piece| piece.operation as usize == key;
        for piece in self.pieces.iter_mut().flatten().filter(of_it) {
            piece.copy = piece.copy.map(|copy| Copying { length: 0, ..copy });
        }
        if let Some(operation) = self.operations[key].as_mut() {
            let block = BlockLabel::Other(operation.request.read.tag);
            operation.failure.get_or_insert(ReadError::Cancelled { block });
        }
    }

    fn wait_until(&mut self, enough: impl Fn(&RawReader) -> bool) -> Result<(), StoreError> {
        self.claim()?;
        while !enough(self) && self.unanswered > self.ready.len() {
            self.pump();
            if self.engine.in_flight() == 0 {
                // Reads that never end hold every staging slot, so the waiting requests cannot start.
                self.fail_what_waits();
                continue;
            }
            self.engine.wait(&mut self.completions)?;
            self.settle();
        }
        self.pump();
        Ok(())
    }

    fn fail_what_waits(&mut self) {
        while let Some(key) = self.queues.iter_mut().find_map(VecDeque::pop_front) {
            if let Some(operation) = self.operations[key as usize].as_mut() {
                let read = operation.request.read;
                let path = self.files.file(read.file).map(|file| file.path.clone());
                operation.failure.get_or_insert(ReadError::Stalled {
                    file: path.unwrap_or_default(),
                    offset: read.offset,
                    block: BlockLabel::Other(read.tag),
                    waited: self.options.engine.stall_timeout,
                });
            }
            self.conclude(key);
        }
    }

    fn hand_out(&mut self) -> Option<(ReadAnswer, Option<SlotBuffer>)> {
        let (_, answer, owner) = self.ready.pop_front()?;
        self.unanswered -= 1;
        Some((answer, owner))
    }

    /// Cancels all requests with this tag. They still get an answer: [`ReadError::Cancelled`], or success if nothing
    /// was left to cancel.
    pub fn cancel(&mut self, tag: u64) {
        let has_tag = |operation: &Operation| operation.request.read.tag == tag;
        self.cancel_where(has_tag);
    }

    fn cancel_where(&mut self, chosen: impl Fn(&Operation) -> bool) {
        for key in 0..self.operations.len() as u32 {
            let Some(operation) = self.operations[key as usize].as_mut().filter(|o| chosen(o))
            else {
                continue;
            };
            if !operation.is_cut() {
                let block = BlockLabel::Other(operation.request.read.tag);
                operation.failure = Some(ReadError::Cancelled { block });
            }
            let of_it = |piece: &Option<Piece>| piece.is_some_and(|piece| piece.operation == key);
            for id in 0..self.pieces.len() {
                if of_it(&self.pieces[id]) {
                    self.engine.cancel(id as u64);
                }
            }
            self.conclude(key);
        }
    }

    /// Cancels all requests and waits until the disk has stopped writing.
    ///
    /// # Errors
    /// Returns an error if the engine has failed or this is the wrong thread. In the second case the caller should call
    /// again on the right thread.
    pub fn drain(&mut self) -> Result<(), StoreError> {
        self.claim()?;
        self.cancel_where(|_| true);
        self.wait_until(|_| false)
    }

    /// Cancels all requests as [`RawReader::drain`] does, and discards the answers that were not handed out. Returns
    /// true if all destinations of these answers are free. Returns false if the disk never answered for one of them.
    /// That destination must then stay allocated until the process ends.
    ///
    /// # Errors
    /// Returns the errors of [`RawReader::drain`]. The reader then stays open.
    pub fn close(&mut self) -> Result<bool, StoreError> {
        self.drain()?;
        let all_free = self.ready.iter().all(|(_, answer, _)| answer.destination_is_free);
        self.unanswered -= self.ready.len();
        self.ready.clear();
        Ok(all_free)
    }
}

impl Drop for RawReader {
    fn drop(&mut self) {
        if self.drain().is_err() {
            // The disk may still write to buffers that the operations own. Leak them.
            std::mem::forget(std::mem::take(&mut self.operations));
        }
    }
}

/// Returns how many of the next bytes to read with one piece, and true if they go directly to their destination.
fn cut(offset: u64, to: usize, left: usize, unit: usize, staging_bytes: usize) -> (usize, bool) {
    let head = (offset % unit as u64) as usize;
    let staged = left.min(staging_bytes - 2 * SLOT_ALIGNMENT);
    if to % unit != head {
        return (staged, false);
    }
    if head == 0 {
        let whole = left / unit * unit;
        let direct = whole == left || whole >= WORTH_SPLITTING;
        return if direct { (whole, true) } else { (staged, false) };
    }
    // Read up to the next aligned byte, if the rest is long enough for a direct read.
    match left > WORTH_SPLITTING + unit {
        true => (unit - head, false),
        false => (staged, false),
    }
}
