//! An NVIDIA GPU as a device: weights go through a ring of pinned memory, and are decoded in VRAM.

mod copiers;
mod ring;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_codec::{Codec, Container};
use forebay_cuda::{
    CodedContainer, ContainerDecoder, ContainerInRange, CopyStream, CudaError, DeviceMemory,
    DevicePtr, ForeignStream, Gpu, StreamMoment, StreamPoint,
};
use forebay_format::TensorType;
use forebay_store::{SLOT_ALIGNMENT, last_cache_bytes};

use crate::coded::CodedChunk;
use crate::device::{Device, DeviceError, Loaded};
use crate::expansion::Expansion;
use crate::rate::Rate;
use crate::stored::damaged;
use crate::weights::Arriving;
use copiers::Copiers;
use ring::{Piece, PinnedPieces, Slot, Stage, Taken};

/// Bytes of a slot of the stage, which has some chunks: a part of the stage within bounds. Each slot costs calls of the driver.
const SLOT_BYTES_MIN: usize = 8 << 20;
const SLOT_BYTES_MAX: usize = 32 << 20;
const SLOT_SHARE: u64 = 16;
/// Bytes of a piece of pinned memory: a part of the memory within bounds. Threads begin and end each piece together, which costs more for small ones.
const PIECE_BYTES_MIN: usize = 1 << 20;
const PIECE_BYTES_MAX: usize = 8 << 20;
/// Fewest pieces: some are copied by the GPU while others are filled.
const PIECES_MIN: usize = 8;
/// Fewest slots.
const SLOTS_MIN: usize = 6;
/// Slots that weights which have a place can always use: of three loaders, each may have one and wait for another.
const SLOTS_OF_LOADS: usize = 4;
/// Most chunks that are decoded from a slot, and room for what describes them.
const CODED_MAX: usize = 1024;
const DESCRIPTIONS: usize = CODED_MAX * CodedContainer::DESCRIPTION_BYTES;
/// One of so many pieces of work is measured. It is odd, because copies and decoding mostly alternate.
const MEASURED: usize = 15;
/// Chunks begin at multiples of this in a slot.
const CHUNK_ALIGNMENT: usize = 16;
/// Memory of a GPU for the weights of modules.
pub struct CudaOptions {
    /// Number of the GPU.
    pub ordinal: usize,
    /// Bytes of VRAM for decoded weights.
    pub bytes: u64,
    /// Bytes of more VRAM, for weights that wait to be decoded. Some is always there.
    pub stage_bytes: u64,
    /// Bytes of pinned memory through which weights go to the GPU. Some is always there. What the last cache of the processor holds twice stays in it,
    /// so that main memory carries the weights once.
    pub pinned_bytes: u64,
    /// Threads that copy to pinned memory at most.
    pub threads: usize,
}

/// VRAM for decoded weights. A copy stream brings them near, coded or plain, and another one decodes.
pub struct CudaDevice {
    // Fields are dropped in this order: what uses memory, then memory.
    stage: Stage,
    pinned: PinnedPieces,
    decoder: ContainerDecoder,
    copies: CopyStream,
    decodes: CopyStream,
    /// Set to 1 if a chunk was damaged.
    damaged: DeviceMemory,
    memory: Arc<DeviceMemory>,
    copiers: Copiers,
    /// Rate of some copies from pinned memory to the GPU.
    copied: Rate,
    /// The highest rate at which coded bytes were decoded: others waited for the work of modules.
    decoded: Mutex<Option<f64>>,
    /// Copies and decoding that were queued.
    turns: AtomicUsize,
    gpu: Arc<Gpu>,
}

/// Weights of a group on their way to a GPU.
pub struct CudaWeights {
    /// What is not in a slot yet: a chunk for which the last one had no room, and those behind it.
    first: Batch,
    rest: Arriving,
    /// What is in memory of the GPU, or is copied there.
    near: Vec<NearSlot>,
}

/// Chunks of a group that go through one slot, and where they are in it.
#[derive(Default)]
struct Batch {
    chunks: Vec<(CodedChunk, Range<usize>)>,
    end: usize,
}

/// A piece of pinned memory with some bytes of a slot.
struct FilledPiece {
    piece: Taken<Piece>,
    bytes: usize,
    to: DevicePtr<u8>,
    /// The point at which they may be written, if they are the first ones of the slot.
    after: Option<StreamPoint>,
    /// The slot, if they are its last ones.
    whole: Option<(Taken<Slot>, NearChunks)>,
}

/// A slot whose chunks are copied to the GPU.
struct NearSlot {
    slot: Taken<Slot>,
    chunks: NearChunks,
    /// The point at which the copies are done.
    copied: StreamPoint,
}

/// Memory for weights that stay coded, and those that are there so far.
struct Keeping {
    next: DevicePtr<u8>,
    left: usize,
    batches: Vec<(DevicePtr<u8>, NearChunks)>,
}

impl Keeping {
    /// Returns memory for so many bytes, if they are left.
    fn take(&mut self, bytes: usize) -> Option<DevicePtr<u8>> {
        let bytes = bytes.next_multiple_of(CHUNK_ALIGNMENT);
        self.left = self.left.checked_sub(bytes)?;
        let at = self.next;
        self.next = at.offset(bytes);
        Some(at)
    }
}

/// What is in memory of the GPU, in a range for each batch.
struct NearChunks {
    /// What is decoded, by type, and where the descriptions of it are in the range.
    coded: Vec<(TensorType, Vec<ContainerInRange>, usize)>,
    /// What is plain, or becomes floats of another type: parts of the range, and where they go in the group.
    plain: Vec<(Range<usize>, u64, Option<Expansion>)>,
    /// The end of the chunks, and of the descriptions behind them.
    end: usize,
    descriptions_end: usize,
}

/// Weights of a group that stay coded: the places of batches.
pub struct CodedInVram(Vec<(DevicePtr<u8>, NearChunks)>);

impl From<Arriving> for CudaWeights {
    fn from(rest: Arriving) -> CudaWeights {
        CudaWeights { first: Batch::default(), rest, near: Vec::new() }
    }
}

impl CudaWeights {
    /// Returns true if all chunks are in slots.
    fn is_whole(&self) -> bool {
        self.first.chunks.is_empty() && self.rest.is_at_end()
    }

    /// Returns true if the next chunk is still on its way from the disk.
    fn is_late(&self) -> bool {
        self.first.chunks.is_empty() && self.rest.is_late()
    }

    /// Returns chunks for a slot: as many as have room, without those for which the disk lets wait.
    fn next_batch(&mut self, room: usize) -> Result<Batch, DeviceError> {
        let mut batch = std::mem::take(&mut self.first);
        while let Some(chunk) = self.rest.next().transpose()? {
            if !batch.has_room(&chunk, room) {
                self.first.push(chunk);
                break;
            }
            batch.push(chunk);
            if self.rest.is_late() {
                break;
            }
        }
        Ok(batch)
    }
}

impl Batch {
    fn has_room(&self, chunk: &CodedChunk, room: usize) -> bool {
        self.end + chunk.coded.len() <= room && self.chunks.len() < CODED_MAX
    }

    fn push(&mut self, chunk: CodedChunk) {
        let range = self.end..self.end + chunk.coded.len();
        self.end = range.end.next_multiple_of(CHUNK_ALIGNMENT);
        self.chunks.push((chunk, range));
    }

    /// Returns the chunks that the GPU decodes, or those that it does not.
    fn coded(&self, is_coded: bool) -> impl Iterator<Item = &(CodedChunk, Range<usize>)> {
        self.chunks.iter().filter(move |(chunk, _)| (chunk.codec == Codec::Exponents) == is_coded)
    }

    /// Returns what is in a slot, and descriptions of what is decoded there, which go behind the chunks.
    fn described(&self) -> Result<(NearChunks, Vec<u8>), DeviceError> {
        let first = self.end.next_multiple_of(CHUNK_ALIGNMENT);
        let (mut coded, mut descriptions) = (Vec::new(), Vec::new());
        for (ty, containers) in self.containers()? {
            let at = first + descriptions.len();
            for container in &containers {
                let before = descriptions.len();
                descriptions.resize(before + CodedContainer::DESCRIPTION_BYTES, 0);
                container.describe(&mut descriptions[before..]);
            }
            coded.push((ty, containers, at));
        }
        let descriptions_end = first + descriptions.len();
        let chunks = NearChunks { coded, plain: self.plain(), end: self.end, descriptions_end };
        Ok((chunks, descriptions))
    }

    /// Returns what the GPU is to decode, by type.
    fn containers(&self) -> Result<Vec<(TensorType, Vec<ContainerInRange>)>, DeviceError> {
        let mut by_type: Vec<(TensorType, Vec<ContainerInRange>)> = Vec::new();
        for (chunk, range) in self.coded(true) {
            let container = Container::read(&chunk.coded, chunk.bytes);
            let container = container.map_err(|error| damaged(&error))?;
            let ty = TensorType::from_weights(container.weights());
            if ty.compact().is_some() || !container.rest().is_empty() {
                return Err(damaged(&"a chunk is of another type"));
            }
            let of = ContainerInRange {
                ty,
                from: range.clone(),
                to: chunk.at,
                weights: chunk.bytes as u64 / ty.block_bytes() as u64,
            };
            match by_type.iter_mut().find(|(other, _)| *other == ty) {
                Some((_, all)) => all.push(of),
                None => by_type.push((ty, vec![of])),
            }
        }
        Ok(by_type)
    }

    /// Returns where the other chunks go. Those beside each other are one piece of work.
    fn plain(&self) -> Vec<(Range<usize>, u64, Option<Expansion>)> {
        let mut plain: Vec<(Range<usize>, u64, Option<Expansion>)> = Vec::new();
        // Where what is decoded ends in the group.
        let mut end = 0;
        for (chunk, range) in self.coded(false) {
            match plain.last_mut() {
                Some((last, _, expansion))
                    if last.end == range.start
                        && end == chunk.at
                        && *expansion == chunk.expansion =>
                {
                    last.end = range.end;
                }
                _ => plain.push((range.clone(), chunk.at, chunk.expansion)),
            }
            end = chunk.at + chunk.bytes as u64;
        }
        plain
    }
}

fn failed(error: impl std::fmt::Display) -> DeviceError {
    DeviceError::of_device(&error)
}

impl CudaDevice {
    /// Opens a GPU, and reserves all memory.
    ///
    /// # Errors
    /// Returns an error if there is no such GPU, or if memory is missing.
    pub fn open(options: &CudaOptions) -> Result<CudaDevice, DeviceError> {
        let gpu = Gpu::open(options.ordinal).map_err(failed)?;
        let memory = gpu.allocate(options.bytes as usize).map_err(failed)?;
        let slot_bytes = (options.stage_bytes / SLOT_SHARE) as usize;
        let slot_bytes =
            slot_bytes.clamp(SLOT_BYTES_MIN, SLOT_BYTES_MAX).next_multiple_of(SLOT_ALIGNMENT);
        let slots = ((options.stage_bytes / slot_bytes as u64) as usize).max(SLOTS_MIN);
        let piece_bytes = options.pinned_bytes as usize / PIECES_MIN;
        let piece_bytes =
            piece_bytes.clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX).next_multiple_of(SLOT_ALIGNMENT);
        let pieces = ((options.pinned_bytes / piece_bytes as u64) as usize).max(PIECES_MIN);
        let pinned = PinnedPieces::new(&gpu, pieces, piece_bytes)?;
        let stays_in_cache = 2 * pinned.bytes() <= last_cache_bytes();
        Ok(CudaDevice {
            stage: Stage::new(&gpu, slots, slot_bytes)?,
            pinned,
            decoder: gpu.container_decoder().map_err(failed)?,
            copies: gpu.copy_stream().map_err(failed)?,
            decodes: gpu.copy_stream().map_err(failed)?,
            damaged: gpu.allocate_with(&[0_u32]).map_err(failed)?,
            memory: Arc::new(memory),
            copiers: Copiers::new(options.threads, stays_in_cache),
            copied: Rate::default(),
            decoded: Mutex::new(None),
            turns: AtomicUsize::new(0),
            gpu: Arc::new(gpu),
        })
    }

    /// Returns the memory for decoded weights. Places of a stream count from its first byte.
    pub fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// Returns true if a chunk was damaged. Weights of it are then wrong.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn is_damaged(&self) -> Result<bool, DeviceError> {
        let words = self.gpu.download::<u32>(self.damaged.ptr(), 1).map_err(failed)?;
        Ok(words != [0])
    }

    /// Bytes of a slot that chunks may take. Descriptions are behind them.
    fn slot_room(&self) -> usize {
        self.stage.slot_bytes - DESCRIPTIONS
    }

    /// Copies those bytes of a slot that are in a window to a piece, with all threads. This one runs `first` before.
    fn fill(
        &self,
        piece: &mut Piece,
        parts: &[(usize, &[u8])],
        window: &Range<usize>,
        first: &mut dyn FnMut(),
    ) -> Result<(), DeviceError> {
        let mut buffer = piece.take_memory()?;
        if let Some((first, second, bytes)) = piece.copied.take() {
            let seconds = first.seconds_to(&second).map_err(failed)?;
            self.copied.add(bytes, Duration::from_secs_f64(seconds.max(0.0)));
        }
        let inside = parts.iter().filter_map(|(at, bytes)| {
            let (from, to) = (window.start.max(*at), window.end.min(at + bytes.len()));
            (from < to).then(|| (from - window.start, &bytes[from - at..to - at]))
        });
        self.copiers.copy(inside, buffer.as_mut_slice(), first);
        piece.give_memory(buffer);
        Ok(())
    }

    /// Queues the copy of a piece to the GPU. Returns its slot if that is whole then.
    fn send(&self, filled: FilledPiece) -> Result<Option<NearSlot>, DeviceError> {
        let FilledPiece { mut piece, bytes, to, after, whole } = filled;
        if let Some(after) = after {
            self.copies.wait_for_point(&after).map_err(failed)?;
        }
        let moment = || self.copies.moment().map_err(failed);
        // Small copies would measure their overhead.
        let measures = self.measures(bytes, self.pinned.piece_bytes / 2);
        let began = measures.then(moment).transpose()?;
        let buffer = piece.take_memory()?;
        piece.send_memory(self.copies.upload(buffer, [(0..bytes, to)]).map_err(failed)?);
        if let Some(began) = began {
            piece.copied = Some((began, moment()?, bytes as u64));
        }
        let near = |(slot, chunks)| -> Result<NearSlot, DeviceError> {
            Ok(NearSlot { slot, chunks, copied: self.copies.point().map_err(failed)? })
        };
        whole.map(near).transpose()
    }

    /// Returns true if work with so many bytes is measured: some of what has at least `least`.
    fn measures(&self, bytes: usize, least: usize) -> bool {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        turn.is_multiple_of(MEASURED) && bytes >= least
    }

    /// Notes the rate at which a slot was decoded the last time, if that was measured and has ended.
    fn note_decoded(&self, slot: &mut Slot) -> Result<(), DeviceError> {
        let is_done = slot.used.as_ref().is_none_or(|used| self.is_reached(used));
        if let Some((first, second, bytes)) = slot.decoded.take().filter(|_| is_done) {
            let seconds = first.seconds_to(&second).map_err(failed)?;
            if seconds > 0.0 {
                let mut best = self.decoded.lock().unwrap_or_else(PoisonError::into_inner);
                let rate = bytes as f64 / seconds;
                *best = Some(best.map_or(rate, |best| best.max(rate)));
            }
        }
        Ok(())
    }

    /// Queues the decoding of chunks that are in memory of the GPU.
    fn decode_chunks(
        &self,
        chunks: &NearChunks,
        from: DevicePtr<u8>,
        to: DevicePtr<u8>,
    ) -> Result<(), CudaError> {
        for (ty, containers, at) in &chunks.coded {
            let (described, flag) = (from.offset(*at).cast(), self.damaged.ptr());
            self.decoder.decode_range(&self.decodes, *ty, containers, from, to, described, flag)?;
        }
        for (range, at, expansion) in &chunks.plain {
            let (from, to) = (from.offset(range.start), to.offset(*at as usize));
            match expansion {
                Some(of) => {
                    let (ty, to_ty) = (of.from(), of.to());
                    let elements = range.len() / ty.block_bytes() * ty.block_elements();
                    self.gpu.expand(&self.decodes, ty, from, to_ty, to, elements)?;
                }
                None => self.decodes.copy(from, to, range.len())?,
            }
        }
        Ok(())
    }

    /// Queues the work that brings what is near into a range, and a copy of it to `keep`, if it has room. After an error, the GPU may use the slot for
    /// ever.
    fn place(
        &self,
        near: NearSlot,
        to: DevicePtr<u8>,
        keep: &mut Option<Keeping>,
    ) -> Result<(), DeviceError> {
        let NearSlot { mut slot, chunks, copied } = near;
        let measures = !chunks.coded.is_empty() && self.measures(chunks.end, SLOT_BYTES_MIN / 2);
        let mut queue = || -> Result<_, CudaError> {
            let moment = || self.decodes.moment();
            self.decodes.wait_for_point(&copied)?;
            let began = measures.then(moment).transpose()?;
            self.decode_chunks(&chunks, slot.memory(), to)?;
            let ended = measures.then(moment).transpose()?;
            let kept = keep.as_mut().and_then(|keep| keep.take(chunks.descriptions_end));
            if let Some(kept) = kept {
                self.decodes.copy(slot.memory(), kept, chunks.descriptions_end)?;
            }
            Ok((self.decodes.point()?, began.zip(ended), kept))
        };
        match queue() {
            Ok((point, measured, kept)) => {
                slot.used = Some(point);
                slot.decoded = measured.map(|(began, ended)| (began, ended, chunks.end as u64));
                match (&mut *keep, kept) {
                    (Some(keep), Some(at)) => keep.batches.push((at, chunks)),
                    _ => *keep = None,
                }
                Ok(())
            }
            Err(error) => {
                slot.is_lost = true;
                Err(failed(error))
            }
        }
    }

    /// Queues work that writes to a range behind these points. Returns the point behind it.
    fn after(
        &self,
        points: &[StreamPoint],
        queue: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<StreamPoint, DeviceError> {
        points.iter().try_for_each(|point| self.decodes.wait_for_point(point)).map_err(failed)?;
        let queued = queue();
        let point = self.decodes.point().map_err(failed)?;
        if let Err(error) = queued {
            // What was queued so far writes to the range.
            point.reach().map_err(failed)?;
            return Err(error);
        }
        Ok(point)
    }

    /// Fills slot after slot through pieces of pinned memory, and sends each piece while the next one is filled. Returns false if it may not wait for a
    /// slot, and only those of loads are left. `sent` gets what is near.
    fn bring(
        &self,
        weights: &mut CudaWeights,
        waits: bool,
        sent: &mut dyn FnMut(NearSlot) -> Result<(), DeviceError>,
    ) -> Result<bool, DeviceError> {
        let mut filled: Option<FilledPiece> = None;
        let mut send = |filled: &mut Option<FilledPiece>| {
            let near = filled.take().map(|filled| self.send(filled)).transpose()?.flatten();
            near.map_or(Ok(()), &mut *sent)
        };
        while !weights.is_whole() {
            let slot = match waits {
                true => Some(self.stage.slots.take()?),
                false => self.stage.slots.take_if_more_than(SLOTS_OF_LOADS)?,
            };
            let Some(mut slot) = slot else { break };
            self.note_decoded(&mut slot)?;
            let batch = weights.next_batch(self.slot_room())?;
            let (chunks, descriptions) = batch.described()?;
            let mut parts: Vec<(usize, &[u8])> =
                batch.chunks.iter().map(|(chunk, range)| (range.start, &*chunk.coded)).collect();
            let end = chunks.descriptions_end;
            parts.push((end - descriptions.len(), &descriptions));
            let memory = slot.memory();
            let mut after = slot.used.clone();
            let mut whole = Some((slot, chunks));
            for start in (0..end).step_by(self.pinned.piece_bytes) {
                let window = start..end.min(start + self.pinned.piece_bytes);
                let mut piece = match self.pinned.pieces.take_if_more_than(0)? {
                    Some(piece) => piece,
                    None => {
                        // Those that wait for a piece have none.
                        send(&mut filled)?;
                        self.pinned.pieces.take()?
                    }
                };
                let mut queued = Ok(());
                self.fill(&mut piece, &parts, &window, &mut || queued = send(&mut filled))?;
                queued?;
                filled = Some(FilledPiece {
                    piece,
                    bytes: window.len(),
                    to: memory.offset(start),
                    after: after.take(),
                    whole: if window.end == end { whole.take() } else { None },
                });
            }
            // What has arrived need not wait for the disk, which may need its buffers.
            if weights.is_late() {
                send(&mut filled)?;
            }
        }
        send(&mut filled)?;
        Ok(weights.is_whole())
    }
}

impl Device for CudaDevice {
    type Weights = Arriving;
    type Staged = CudaWeights;
    type Coded = CodedInVram;
    type Queue = ForeignStream;
    type Point = StreamPoint;
    type Moment = StreamMoment;

    fn reserved_bytes(&self) -> (u64, u64) {
        let stage = self.stage.slots.count() * self.stage.slot_bytes;
        (self.memory.bytes() as u64 + stage as u64, self.pinned.bytes() as u64)
    }

    fn stage_bytes(&self) -> u64 {
        // Groups share no slots, so these are not full.
        let slots = self.stage.slots.count().saturating_sub(SLOTS_OF_LOADS);
        (slots * self.slot_room() / 2) as u64
    }

    fn can_stage(&self) -> bool {
        self.stage.slots.has_more_than(SLOTS_OF_LOADS)
    }

    fn stage(&self, weights: &mut CudaWeights) -> Result<bool, DeviceError> {
        let mut near = std::mem::take(&mut weights.near);
        let staged = self.bring(weights, false, &mut |slot| {
            near.push(slot);
            Ok(())
        });
        weights.near = near;
        staged
    }

    fn load(
        &self,
        mut weights: CudaWeights,
        to: Range<u64>,
        keep: Option<Range<u64>>,
        after: &[StreamPoint],
    ) -> Result<Loaded<CudaDevice>, DeviceError> {
        let keeping = |range: Range<u64>| Keeping {
            next: self.memory.ptr::<u8>().offset(range.start as usize),
            left: (range.end - range.start) as usize,
            batches: Vec::new(),
        };
        let mut keep = keep.map(keeping);
        let to = self.memory.ptr::<u8>().offset(to.start as usize);
        let ready = self.after(after, || {
            let near = std::mem::take(&mut weights.near);
            near.into_iter().try_for_each(|slot| self.place(slot, to, &mut keep))?;
            self.bring(&mut weights, true, &mut |slot| self.place(slot, to, &mut keep)).map(drop)
        })?;
        Ok(Loaded { ready, coded: keep.map(|keep| CodedInVram(keep.batches)) })
    }

    fn can_keep_coded(&self) -> bool {
        true
    }

    fn decode(
        &self,
        coded: &CodedInVram,
        to: Range<u64>,
        after: &[StreamPoint],
    ) -> Result<StreamPoint, DeviceError> {
        let to = self.memory.ptr::<u8>().offset(to.start as usize);
        let decode = |(from, chunks): &(DevicePtr<u8>, NearChunks)| {
            self.decode_chunks(chunks, *from, to).map_err(failed)
        };
        self.after(after, || coded.0.iter().try_for_each(decode))
    }

    fn wait(&self, queue: ForeignStream, point: &StreamPoint) -> Result<(), DeviceError> {
        self.decodes.hold_stream(queue, point).map_err(failed)
    }

    fn mark(&self, queue: ForeignStream) -> Result<StreamPoint, DeviceError> {
        self.decodes.point_of(queue).map_err(failed)
    }

    fn moment(&self, queue: ForeignStream) -> Result<StreamMoment, DeviceError> {
        self.decodes.moment_of(queue).map_err(failed)
    }

    fn seconds_between(
        &self,
        first: &StreamMoment,
        second: &StreamMoment,
    ) -> Result<f64, DeviceError> {
        first.seconds_to(second).map_err(failed)
    }

    fn bytes_per_second(&self) -> Option<f64> {
        // Both work at the same time.
        let (filled, copied) = (self.copiers.bytes_per_second()?, self.copied.bytes_per_second());
        Some(copied.map_or(filled, |copied| filled.min(copied)))
    }

    fn pace(&self, part: f64) {
        self.copiers.pace(part);
    }

    fn decoded_bytes_per_second(&self) -> Option<f64> {
        *self.decoded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_reached(&self, point: &StreamPoint) -> bool {
        // What failed is seen where it is waited for.
        point.is_reached().unwrap_or(true)
    }

    fn reach(&self, point: &StreamPoint) -> Result<(), DeviceError> {
        point.reach().map_err(failed)
    }
}
