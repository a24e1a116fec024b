//! Loads weights to a GPU through a ring of pinned memory. Copy threads and the read engine fill the ring, and the GPU
//! empties it.

use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_cuda::{CopyStream, CudaError, DevicePtr, Gpu, InFlight, Pinned, Pinner};
use forebay_store::{
    Arena, COPIED_BYTES, EngineInfo, EngineOptions, Extent, FaultPlan, FileSet, IoKind,
    LoadOptions, LoadStatistics, ReadEngine, ReadError, ReadSide, SLOT_ALIGNMENT, SlotBuffer,
    StoreError, Upload, UploadCopy, UploadError, UploadPart, UploadPlan, Uploader, Uploading,
    open_engine, open_faulty_engine,
};

use super::gpu_decoding::{CodedParts, GpuDecoding};
use super::read_back::place_in;
use super::request::{PIECE_BYTES, RING_BYTES};
use crate::doctor::ReadChoice;
use crate::load::error::LoadError;

/// Bytes queued for the engine beyond its queue depth, so that its next piece is ready.
const AHEAD_BYTES: usize = 8 << 20;
/// Smallest number of slots of a ring.
const SLOTS_MIN: usize = 4;
/// Number of slots for copies with which a load begins. Others follow when they are pinned.
const COPIED_FIRST: usize = 3;

/// Settings of the ring and of its readers.
#[derive(Debug, Clone)]
pub(crate) struct RingRequest<'a> {
    pub files: &'a FileSet,
    /// Kind of read engine. It is not [`IoKind::Auto`] if a profile has found something better.
    pub io: IoKind,
    pub engine: EngineOptions,
    /// Fault plan that makes reads fail on purpose.
    pub faults: Option<FaultPlan>,
    /// True if copy threads may copy pieces that are in the page cache, beside the engine.
    pub copies: bool,
    /// Number of bytes that are read or copied at a time, a multiple of 4096.
    pub piece_bytes: usize,
    /// Bytes of pinned memory at most. The ring has room for at least four pieces.
    pub ring_bytes: usize,
    /// True if the GPU may decode coded blocks, for which it needs as much memory as the ring has.
    pub gpu_decodes: bool,
    /// True if loads of the same files will use the ring's memory after this one. The ring then has its full size, however small
    /// this load is.
    pub is_for_several: bool,
}

impl<'a> RingRequest<'a> {
    /// Returns the fastest settings that are known, with the engine `io` or the one that `choice` found best.
    pub fn new(files: &'a FileSet, io: IoKind, choice: &ReadChoice) -> RingRequest<'a> {
        let io = if io == IoKind::Auto { choice.kind } else { io };
        RingRequest {
            files,
            io,
            engine: choice.engine_options(),
            faults: None,
            // With a mapping, the kernel does all the reading. Objects are not in the page cache.
            copies: io != IoKind::Mmap && !files.is_remote(),
            piece_bytes: PIECE_BYTES,
            ring_bytes: RING_BYTES,
            gpu_decodes: false,
            is_for_several: false,
        }
    }

    /// Returns the bytes that the engine has in flight.
    fn engine_bytes(&self) -> usize {
        self.engine
            .queue_depth
            .saturating_mul(self.engine.request_bytes)
            .saturating_add(AHEAD_BYTES)
    }

    /// Returns the number of slots for copies of cached pieces, and of those that the engine reads into, of a ring for `plan`.
    fn slots(&self, plan: &UploadPlan, slot_bytes: usize) -> [usize; 2] {
        let most = (self.ring_bytes / slot_bytes).max(SLOTS_MIN);
        // A small model needs at most one slot of each kind for each piece.
        let pieces = if self.is_for_several { most } else { plan.pieces() };
        // While the engine fills its slots, the device empties two more.
        let read = self.engine_bytes().saturating_add(2 * self.piece_bytes) / slot_bytes;
        if !self.copies {
            return [0, read.min(most).min(pieces).max(SLOTS_MIN)];
        }
        let copied = (COPIED_BYTES / slot_bytes).min(most / 2).min(pieces).max(SLOTS_MIN / 2);
        [copied, read.min(most - copied).min(pieces).max(SLOTS_MIN / 2)]
    }
}

/// What a ring needs and what does not depend on the weights to load: pinned memory, and what reads into it and copies out of it.
/// Pinning takes longer than copying as many bytes, so loads of the same files one after the other share this.
///
/// Fields are dropped in order, so memory is unpinned and freed only after everything that uses it.
pub(crate) struct RingMemory {
    /// `None` until the first load.
    engine: Option<Box<dyn ReadEngine>>,
    /// Slots that copy threads fill. They come first in the memory.
    copied: Vec<SlotBuffer>,
    /// Further ones, which are not pinned before the first load.
    more_copied: Vec<SlotBuffer>,
    /// Slots that the engine reads into.
    read: Vec<SlotBuffer>,
    copies: CopyStream,
    pinned: Vec<Pinned>,
    pinner: Pinner,
    arena: Arena,
    slot_bytes: usize,
    /// Numbers of slots that the memory has of both kinds. Those that failed loads keep are missing in `copied` and `read`.
    counts: [usize; 2],
}

impl RingMemory {
    /// Makes slots of `slot_bytes` bytes and pins the first of those for copies. [`Reads`] pins the others.
    fn pin(gpu: &Gpu, counts: [usize; 2], slot_bytes: usize) -> Result<RingMemory, StoreError> {
        let arena = Arena::map((counts[0] + counts[1]) * slot_bytes)?;
        let carve = |count| (0..count).map(|_| arena.carve(slot_bytes)).collect::<Result<_, _>>();
        let (mut copied, read): (Vec<SlotBuffer>, _) = (carve(counts[0])?, carve(counts[1])?);
        let more_copied = copied.split_off(counts[0].min(COPIED_FIRST));
        let copies = gpu.copy_stream().map_err(upload_error)?;
        let (pinner, pinned) = (gpu.pinner(), Vec::with_capacity(2));
        let mut ring = RingMemory {
            engine: None,
            copied,
            more_copied,
            read,
            copies,
            pinned,
            pinner,
            arena,
            slot_bytes,
            counts,
        };
        if counts[0] > 0 {
            let bytes = ring.copied.len() * slot_bytes;
            ring.pinned.push(pin(&ring.pinner, &ring.arena, 0..bytes)?);
        }
        Ok(ring)
    }

    /// Returns true if all slots are there, and are large enough.
    fn has(&self, slot_bytes: usize) -> bool {
        [self.copied.len(), self.read.len()] == self.counts && self.slot_bytes >= slot_bytes
    }

    /// Returns the bytes of all slots.
    fn bytes(&self) -> usize {
        (self.counts[0] + self.counts[1]) * self.slot_bytes
    }

    /// Returns the slots for copies, the stream that empties them, and what the engine needs.
    fn split<'a>(
        &'a mut self,
        request: &'a RingRequest<'_>,
        files: &'a FileSet,
    ) -> (&'a mut Vec<SlotBuffer>, &'a CopyStream, Reads<'a>) {
        let slots = self.counts[0] * self.slot_bytes..self.bytes();
        let RingMemory { engine, copied, more_copied, read, copies, pinned, pinner, arena, .. } =
            self;
        let reads =
            Reads { engine, more_copied, read, pinned, pinner, arena, slots, request, files };
        (copied, copies, reads)
    }
}

/// What a ring makes after its first slots.
struct Reads<'a> {
    engine: &'a mut Option<Box<dyn ReadEngine>>,
    more_copied: &'a mut Vec<SlotBuffer>,
    read: &'a mut Vec<SlotBuffer>,
    pinned: &'a mut Vec<Pinned>,
    pinner: &'a Pinner,
    arena: &'a Arena,
    /// Place of the engine's slots in the arena.
    slots: Range<usize>,
    request: &'a RingRequest<'a>,
    files: &'a FileSet,
}

impl ReadSide for Reads<'_> {
    fn more_copied(&mut self) -> Result<Vec<SlotBuffer>, StoreError> {
        if !self.more_copied.is_empty() {
            // They come before those of the engine.
            let bytes: usize = self.more_copied.iter().map(SlotBuffer::len).sum();
            let range = self.slots.start - bytes..self.slots.start;
            self.pinned.push(pin(self.pinner, self.arena, range)?);
        }
        Ok(std::mem::take(self.more_copied))
    }

    fn open(&mut self) -> Result<(&mut dyn ReadEngine, &mut Vec<SlotBuffer>), StoreError> {
        let engine = match self.engine.take() {
            Some(engine) => engine,
            None => {
                self.pinned.push(pin(self.pinner, self.arena, self.slots.clone())?);
                open_reader(self.request, self.files, self.arena)?
            }
        };
        Ok((self.engine.insert(engine).as_mut(), self.read))
    }
}

/// Returns the files that the engine reads: as they are stored, if the GPU decodes.
fn files_to_read<'a>(
    request: &RingRequest<'a>,
    decoding: Option<&'a (GpuDecoding, FileSet)>,
) -> &'a FileSet {
    decoding.map_or(request.files, |(_, stored)| stored)
}

/// Pins a part of an arena.
fn pin(pinner: &Pinner, arena: &Arena, range: Range<usize>) -> Result<Pinned, StoreError> {
    let _span = tracing::debug_span!("pin", bytes = range.len()).entered();
    arena.make_resident_in(range.clone())?;
    let first = arena.addresses().start;
    let addresses = first + range.start..first + range.end;
    pinner.pin(addresses, arena.clone()).map_err(upload_error)
}

fn upload_error(source: CudaError) -> StoreError {
    StoreError::Upload { source: source.into() }
}

/// Ring that fills one set of parts.
pub(crate) struct GpuRing<'a> {
    ring: RingMemory,
    plan: UploadPlan,
    /// Decoding of coded blocks, and the files as they are stored, if the GPU does it.
    decoding: Option<(GpuDecoding, FileSet)>,
    /// Memory that contains all parts.
    memory: Vec<DevicePtr<u8>>,
    request: RingRequest<'a>,
    pin_time: Duration,
}

impl<'a> GpuRing<'a> {
    /// Pins memory for loading `parts`, which lie in `memory`, to `gpu`, and opens the engine. The ring can be filled many times.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory, if a limit on pinned memory is exceeded, or if the engine does
    /// not work here.
    pub fn open(
        gpu: &Gpu,
        request: RingRequest<'a>,
        parts: &[UploadPart],
        memory: &[DevicePtr<u8>],
    ) -> Result<GpuRing<'a>, LoadError> {
        let started = Instant::now();
        let mut ring = GpuRing::open_with(None, gpu, request, parts, memory)?;
        ring.open_engine()?;
        ring.pin_time = started.elapsed();
        Ok(ring)
    }

    /// Does the same as [`GpuRing::open`], with the memory that an earlier ring for the same GPU, request and files left, if it is
    /// enough. If not, the first load opens the engine and pins the memory that it reads into, beside copies of cached pieces.
    ///
    /// # Errors
    /// Returns the same errors as [`GpuRing::open`].
    pub fn open_with(
        kept: Option<RingMemory>,
        gpu: &Gpu,
        request: RingRequest<'a>,
        parts: &[UploadPart],
        memory: &[DevicePtr<u8>],
    ) -> Result<GpuRing<'a>, LoadError> {
        let started = Instant::now();
        // Pieces consist of whole chunks only if checksums are verified.
        let may_decode = request.gpu_decodes && request.files.is_checked();
        let coded = may_decode.then(|| CodedParts::new(request.files, parts)).flatten();
        let stored = coded.as_ref().map(|_| request.files.as_stored());
        let (parts, files) = match (&coded, &stored) {
            (Some(coded), Some(stored)) => (&coded.parts[..], stored),
            _ => (parts, request.files),
        };
        let plan = UploadPlan::new(parts, files, request.piece_bytes as u64);
        let piece_bytes = plan.slot_bytes().max(SLOT_ALIGNMENT);
        let more = coded.as_ref().map_or(0, |coded| coded.description_bytes(piece_bytes));
        let slot_bytes = match more {
            0 => piece_bytes,
            more => (piece_bytes + more).next_multiple_of(SLOT_ALIGNMENT),
        };
        let ring = match kept {
            Some(kept) if coded.is_none() && kept.has(slot_bytes) => kept,
            too_small => {
                drop(too_small);
                RingMemory::pin(gpu, request.slots(&plan, slot_bytes), slot_bytes)?
            }
        };
        let decoding = match (coded, stored) {
            (Some(coded), Some(stored)) => {
                let first = ring.arena.addresses().start;
                let slots = first..first + ring.bytes();
                let of = GpuDecoding::new(gpu, coded, slots, slot_bytes, piece_bytes)?;
                Some((of, stored))
            }
            _ => None,
        };
        let pin_time = started.elapsed();
        Ok(GpuRing { ring, plan, decoding, memory: memory.to_vec(), request, pin_time })
    }

    /// Returns what another load of the same files can use, or `None` if the engine reads stored blocks.
    pub fn into_memory(self) -> Option<RingMemory> {
        self.decoding.is_none().then_some(self.ring)
    }

    /// Opens the engine anew, because pages that a mapping brought into the page cache stay there until it is dropped.
    pub fn reopen_engine(&mut self) -> Result<(), LoadError> {
        let files = files_to_read(&self.request, self.decoding.as_ref());
        self.ring.engine = Some(open_reader(&self.request, files, &self.ring.arena)?);
        Ok(())
    }

    fn open_engine(&mut self) -> Result<(), StoreError> {
        let files = files_to_read(&self.request, self.decoding.as_ref());
        let (copied, _, mut reads) = self.ring.split(&self.request, files);
        copied.extend(reads.more_copied()?);
        reads.open().map(drop)
    }

    /// Loads all parts to their addresses. `progress` is called with the bytes that are done and the bytes in total.
    ///
    /// # Errors
    /// Returns the error of the first read or copy that failed. No copies are in flight then.
    pub fn fill(
        &mut self,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<LoadStatistics, StoreError> {
        self.fill_while(&mut |done, total| {
            progress(done, total);
            ControlFlow::Continue(())
        })
    }

    /// Does the same as [`GpuRing::fill`], but `progress` may end the load.
    ///
    /// # Errors
    /// Returns the same errors as [`GpuRing::fill`], and [`StoreError::Interrupted`] if `progress` ended the load.
    pub fn fill_while(
        &mut self,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<LoadStatistics, StoreError> {
        let decoding = self.decoding.as_ref();
        let files = files_to_read(&self.request, decoding);
        let mut options = LoadOptions {
            piece_bytes: self.request.piece_bytes as u64,
            engine_bytes: self.request.engine_bytes() as u64,
            ..LoadOptions::default()
        };
        if !self.request.copies {
            options.copy_threads = 0;
        }
        let (copied, stream, mut reads) = self.ring.split(&self.request, files);
        let loader = Uploader { files, options, copied, reads: &mut reads };
        let decoding = decoding.map(|(decoding, _)| decoding);
        let target = Target { copies: stream, memory: &self.memory, decoding };
        let Some(decoding) = decoding else {
            return loader.upload(&self.plan, &target, progress);
        };
        let failed = |source| StoreError::Upload { source };
        decoding.begin(stream).map_err(failed)?;
        let statistics = loader.upload(&self.plan, &target, progress)?;
        decoding.end(stream).map_err(failed)?;
        Ok(decoded(statistics, decoding.decoded_bytes()))
    }

    /// Returns true if the GPU decodes coded blocks.
    pub fn gpu_decodes(&self) -> bool {
        self.decoding.is_some()
    }

    /// Describes the engine. `None` if it was not needed yet. After [`GpuRing::open`] it is there.
    pub fn engine(&self) -> Option<EngineInfo> {
        self.ring.engine.as_ref().map(|engine| engine.describe())
    }

    /// Returns the bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.decoding.as_ref().map_or(self.plan.bytes(), |(of, _)| of.decoded_bytes())
    }

    /// Returns the bytes of memory that are pinned by now.
    pub fn pinned_bytes(&self) -> u64 {
        self.ring.pinned.iter().map(|pinned| pinned.bytes() as u64).sum()
    }

    /// Returns the bytes of memory that loads pin at most.
    pub fn pinned_bytes_max(&self) -> u64 {
        self.ring.bytes() as u64
    }

    /// Returns how long it took to plan the load, pin memory and open the engine.
    pub fn pin_time(&self) -> Duration {
        self.pin_time
    }
}

/// Opens the engine that reads into the ring. The engine verifies checksums itself, so no data is copied to the device
/// before that.
fn open_reader(
    request: &RingRequest<'_>,
    files: &FileSet,
    arena: &Arena,
) -> Result<Box<dyn ReadEngine>, StoreError> {
    let RingRequest { io, engine, faults, .. } = request;
    match faults.clone() {
        None => open_engine(*io, files, arena, engine),
        Some(faults) => open_faulty_engine(*io, files, arena, engine, faults),
    }
}

/// Returns the statistics of a load of `bytes` bytes after decoding, given those of the bytes in the files.
fn decoded(of: LoadStatistics, bytes: u64) -> LoadStatistics {
    let share = |part: u64| (part as f64 / of.bytes.max(1) as f64 * bytes as f64) as u64;
    let cached_bytes = share(of.cached_bytes);
    LoadStatistics {
        bytes,
        cached_bytes,
        engine_bytes: bytes - cached_bytes,
        engine_cached_bytes: share(of.engine_cached_bytes),
        engine_stored_bytes: of.engine_bytes,
        cached_stored_bytes: of.cached_bytes,
        ..of
    }
}

/// Device memory as the loader addresses it.
struct Target<'a> {
    copies: &'a CopyStream,
    memory: &'a [DevicePtr<u8>],
    decoding: Option<&'a GpuDecoding>,
}

struct Copies(InFlight<SlotBuffer>);

impl Upload for Target<'_> {
    fn begin(
        &self,
        slot: SlotBuffer,
        copies: &[UploadCopy],
    ) -> Result<Box<dyn Uploading>, UploadError> {
        if let Some(decoding) = self.decoding {
            let uploading = decoding.upload(self.memory, slot, copies)?;
            return Ok(Box::new(Copies(uploading)));
        }
        let place = |copy: &UploadCopy| {
            let place = place_in(self.memory, copy.to, copy.range.len());
            place.map(|place| (copy.range.clone(), place))
        };
        if copies.iter().any(|copy| place(copy).is_none()) {
            return Err("a copy to what is not memory of the weights".into());
        }
        Ok(Box::new(Copies(self.copies.upload(slot, copies.iter().filter_map(place))?)))
    }
}

impl Uploading for Copies {
    fn is_done(&self) -> Result<bool, UploadError> {
        Ok(self.0.is_done()?)
    }

    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError> {
        Ok(self.0.finish()?)
    }
}

/// Converts an error of [`GpuRing::fill`], and adds the name of the weight that could not be read.
pub(crate) fn named(
    error: StoreError,
    contents: &[(String, Extent)],
    files: &FileSet,
) -> LoadError {
    let StoreError::Block(cause) = error else { return error.into() };
    let at = match &cause {
        ReadError::Io { file, offset, .. }
        | ReadError::Stalled { file, offset, .. }
        | ReadError::Corrupt { file, offset, .. }
        | ReadError::PartOfChunk { file, offset, .. } => Some((file, *offset)),
        ReadError::UnexpectedEnd { file, file_end, .. } => Some((file, *file_end)),
        _ => None,
    };
    let here = |extent: &Extent, file: &PathBuf, offset: u64| {
        let stored = files.stored(*extent);
        (stored.offset..stored.end()).contains(&offset)
            && files.path(extent.file).as_ref() == Some(file)
    };
    let place = at.and_then(|(file, offset)| {
        let found = contents.iter().find(|(_, extent)| here(extent, file, offset));
        found.map(|(name, _)| name.clone())
    });
    LoadError::Read { place: place.unwrap_or_else(|| "weights".to_owned()), cause }
}
