//! An NVIDIA GPU as a device: weights go through a ring of pinned memory, and are decoded in VRAM.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_codec::{Codec, Container};
use forebay_compute::Pool;
use forebay_cuda::{
    CodedContainer, ContainerDecoder, CopyStream, DeviceMemory, DevicePtr, ForeignStream, Gpu,
    InFlight, Pinned, StreamMoment, StreamPoint,
};
use forebay_format::TensorType;
use forebay_store::{Arena, SLOT_ALIGNMENT, SlotBuffer, copy_past_cache};

use crate::coded::CodedChunk;
use crate::device::{Device, DeviceError};
use crate::rate::Rate;
use crate::stored::damaged;
use crate::weights::Arriving;

/// Bytes of a slot of the ring, which has some chunks: a part of the pinned memory within bounds. Each slot costs calls of the driver.
const SLOT_BYTES_MIN: usize = 8 << 20;
const SLOT_BYTES_MAX: usize = 32 << 20;
const SLOT_SHARE: u64 = 16;
/// Fewest slots: for each of two callers one that is filled and one that is queued, and two that are copied.
const SLOTS_MIN: usize = 6;
/// Most chunks that are decoded from a slot, and room for what describes them.
const CODED_MAX: usize = 1024;
const DESCRIPTIONS: usize = CODED_MAX * CodedContainer::DESCRIPTION_BYTES;
/// One of so many copies is measured.
const MEASURED: usize = 16;
/// Chunks begin at multiples of this in a slot.
const CHUNK_ALIGNMENT: usize = 16;
/// Bytes that one thread copies at a time. On 16 cores, pieces of 1 MiB were copied at three quarters of this rate.
const PIECE_BYTES: usize = 256 << 10;
/// Time for which copying threads wait for the next slot before they sleep.
const SPIN: Duration = Duration::from_millis(1);

/// Memory of a GPU for the weights of modules.
pub struct CudaOptions {
    /// Number of the GPU.
    pub ordinal: usize,
    /// Bytes of VRAM for decoded weights.
    pub bytes: u64,
    /// Bytes of pinned memory at most. As much VRAM takes coded weights.
    pub pinned_bytes: u64,
    /// Threads that copy to pinned memory.
    pub threads: usize,
}

/// VRAM for decoded weights. A copy stream brings them, coded or plain, and another one decodes.
pub struct CudaDevice {
    // Fields are dropped in this order: what uses memory, then memory.
    ring: Mutex<Ring>,
    decoder: ContainerDecoder,
    copies: CopyStream,
    decodes: CopyStream,
    /// Set to 1 if a chunk was damaged.
    damaged: DeviceMemory,
    memory: Arc<DeviceMemory>,
    /// Bytes of a slot that chunks may take. Descriptions are behind them.
    slot_room: usize,
    pool: Pool,
    /// Rate of copies to pinned memory, and of some from there to the GPU.
    filled: Rate,
    copied: Rate,
    /// Slots that were queued.
    turns: AtomicUsize,
    gpu: Arc<Gpu>,
}

/// Slots in the order in which they were used.
struct Ring {
    slots: VecDeque<Slot>,
    _pinned: Pinned,
    /// As large as all slots.
    _stage: DeviceMemory,
}

struct Slot {
    /// What is under way from it. The memory comes back with it.
    flight: Option<InFlight<SlotBuffer>>,
    buffer: Option<SlotBuffer>,
    /// Memory of the GPU for its coded chunks.
    stage: DevicePtr<u8>,
    /// The point at which they are decoded.
    decoded: Option<StreamPoint>,
    /// When its copies began and ended, and their bytes, if this is measured.
    measured: Option<(StreamMoment, StreamMoment, u64)>,
}

/// Chunks of a group that go through one slot, and where they are in it.
#[derive(Default)]
struct Batch {
    chunks: Vec<(CodedChunk, Range<usize>)>,
    end: usize,
}

/// A slot with the chunks of a batch.
struct FilledSlot {
    slot: Slot,
    buffer: SlotBuffer,
    batch: Batch,
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
}

fn failed(error: impl std::fmt::Display) -> DeviceError {
    DeviceError::of_device(&error)
}

/// Returns what the GPU is to decode of a slot, by type.
fn containers(
    filled: &FilledSlot,
    to: DevicePtr<u8>,
) -> Result<Vec<(TensorType, Vec<CodedContainer>)>, DeviceError> {
    let mut by_type: Vec<(TensorType, Vec<CodedContainer>)> = Vec::new();
    for (chunk, range) in filled.batch.coded(true) {
        let container = Container::read(&chunk.coded, chunk.bytes);
        let container = container.map_err(|error| damaged(&error))?;
        let ty = TensorType::from_weights(container.weights());
        if ty.compact().is_some() || !container.rest().is_empty() {
            return Err(damaged(&"a chunk is of another type"));
        }
        let of = CodedContainer {
            ty,
            from: filled.slot.stage.offset(range.start),
            bytes: range.len(),
            to: to.offset(chunk.at as usize),
            weights: chunk.bytes as u64 / ty.block_bytes() as u64,
        };
        match by_type.iter_mut().find(|(other, _)| *other == ty) {
            Some((_, all)) => all.push(of),
            None => by_type.push((ty, vec![of])),
        }
    }
    Ok(by_type)
}

impl CudaDevice {
    /// Opens a GPU, and reserves all memory.
    ///
    /// # Errors
    /// Returns an error if there is no such GPU, or if memory is missing.
    pub fn open(options: &CudaOptions) -> Result<CudaDevice, DeviceError> {
        let gpu = Gpu::open(options.ordinal).map_err(failed)?;
        let slot_bytes = (options.pinned_bytes / SLOT_SHARE) as usize;
        let slot_bytes =
            slot_bytes.clamp(SLOT_BYTES_MIN, SLOT_BYTES_MAX).next_multiple_of(SLOT_ALIGNMENT);
        let slots = ((options.pinned_bytes / slot_bytes as u64) as usize).max(SLOTS_MIN);
        let memory = gpu.allocate(options.bytes as usize).map_err(failed)?;
        let stage = gpu.allocate(slots * slot_bytes).map_err(failed)?;
        let arena = Arena::map(slots * slot_bytes).map_err(failed)?;
        arena.make_resident().map_err(failed)?;
        let pinned = gpu.pin(arena.addresses(), arena.clone()).map_err(failed)?;
        let slot = |at: usize| -> Result<Slot, DeviceError> {
            let buffer = Some(arena.carve(slot_bytes).map_err(failed)?);
            let stage = stage.ptr::<u8>().offset(at * slot_bytes);
            Ok(Slot { flight: None, buffer, stage, decoded: None, measured: None })
        };
        let slots = (0..slots).map(slot).collect::<Result<_, _>>()?;
        let pool = Pool::new(options.threads);
        pool.set_spin(SPIN);
        Ok(CudaDevice {
            ring: Mutex::new(Ring { slots, _pinned: pinned, _stage: stage }),
            decoder: gpu.container_decoder().map_err(failed)?,
            copies: gpu.copy_stream().map_err(failed)?,
            decodes: gpu.copy_stream().map_err(failed)?,
            damaged: gpu.allocate_with(&[0_u32]).map_err(failed)?,
            memory: Arc::new(memory),
            slot_room: slot_bytes - DESCRIPTIONS,
            pool,
            filled: Rate::default(),
            copied: Rate::default(),
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

    /// Copies chunks to a slot with all threads. This one runs `first` before.
    fn fill(&self, buffer: &mut SlotBuffer, batch: &Batch, first: &mut dyn FnMut()) {
        let mut rest = buffer.as_mut_slice();
        let (mut pieces, mut done) = (Vec::new(), 0);
        for (chunk, range) in &batch.chunks {
            let (_, from) = std::mem::take(&mut rest).split_at_mut(range.start - done);
            let (own, behind) = from.split_at_mut(range.len());
            (rest, done) = (behind, range.end);
            pieces.extend(own.chunks_mut(PIECE_BYTES).zip(chunk.coded.chunks(PIECE_BYTES)));
        }
        let pieces = Mutex::new(pieces);
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).pop();
        self.pool.run_after(first, &|_| {
            while let Some((to, from)) = next() {
                copy_past_cache(to, from);
            }
        });
    }

    /// Fills the slot that was used first, and queues `before` meanwhile.
    fn fill_slot(
        &self,
        batch: Batch,
        before: Option<FilledSlot>,
        to: DevicePtr<u8>,
        after: &[StreamPoint],
    ) -> Result<FilledSlot, DeviceError> {
        let slot = self.ring.lock().unwrap_or_else(PoisonError::into_inner).slots.pop_front();
        let mut slot = slot.ok_or_else(|| failed("the ring is lost"))?;
        let mut buffer = match slot.flight.take() {
            Some(flight) => flight.finish().map_err(failed)?,
            None => slot.buffer.take().expect("a slot has its memory or is under way"),
        };
        let (mut before, mut queued) = (before, Ok(()));
        let mut began = Instant::now();
        self.fill(&mut buffer, &batch, &mut || {
            // Another caller may have filled its slot until now.
            began = Instant::now();
            queued = before.take().map_or(Ok(()), |before| self.queue(before, to, after));
        });
        self.filled.add(batch.end as u64, began.elapsed());
        queued?;
        Ok(FilledSlot { slot, buffer, batch })
    }

    /// Takes a slot back that was not queued.
    fn give_back(&self, filled: FilledSlot) {
        let FilledSlot { mut slot, buffer, .. } = filled;
        slot.buffer = Some(buffer);
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).slots.push_front(slot);
    }

    /// Queues the copies and the decoding of a batch. After an error, the slot's memory may be in use, so it does not come back.
    fn queue(
        &self,
        filled: FilledSlot,
        to: DevicePtr<u8>,
        after: &[StreamPoint],
    ) -> Result<(), DeviceError> {
        let by_type = match containers(&filled, to) {
            Ok(by_type) => by_type,
            Err(error) => {
                self.give_back(filled);
                return Err(error);
            }
        };
        let FilledSlot { mut slot, mut buffer, batch } = filled;
        let mut copies: Vec<(Range<usize>, DevicePtr<u8>)> = Vec::new();
        let mut at = self.slot_room;
        let mut described = Vec::new();
        for (_, containers) in &by_type {
            described.push(at);
            for container in containers {
                let end = at + CodedContainer::DESCRIPTION_BYTES;
                container.describe(&mut buffer.as_mut_slice()[at..end]);
                at = end;
            }
        }
        if at > self.slot_room {
            copies.push((self.slot_room..at, slot.stage.offset(self.slot_room)));
        }
        // Chunks beside each other are one copy.
        for (_, range) in batch.coded(true) {
            match copies
                .last_mut()
                .filter(|(last, _)| last.end.next_multiple_of(CHUNK_ALIGNMENT) == range.start)
            {
                Some((last, _)) => last.end = range.end,
                None => copies.push((range.clone(), slot.stage.offset(range.start))),
            }
        }
        let mut has_plain = false;
        for (chunk, range) in batch.coded(false) {
            copies.push((range.clone(), to.offset(chunk.at as usize)));
            has_plain = true;
        }
        if let Some(decoded) = slot.decoded.take() {
            self.copies.wait_for_point(&decoded).map_err(failed)?;
        }
        if has_plain {
            after.iter().try_for_each(|point| self.copies.wait_for_point(point)).map_err(failed)?;
        }
        if let Some((first, second, bytes)) = slot.measured.take() {
            let seconds = first.seconds_to(&second).map_err(failed)?;
            self.copied.add(bytes, Duration::from_secs_f64(seconds.max(0.0)));
        }
        // Small copies would measure their overhead.
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        let measures = turn.is_multiple_of(MEASURED) && batch.end >= SLOT_BYTES_MIN / 2;
        let moment = || self.copies.moment().map_err(failed);
        let began = measures.then(moment).transpose()?;
        slot.flight = Some(self.copies.upload(buffer, copies).map_err(failed)?);
        if let Some(began) = began {
            slot.measured = Some((began, moment()?, batch.end as u64));
        }
        self.decodes.wait_for_point(&self.copies.point().map_err(failed)?).map_err(failed)?;
        for ((ty, containers), at) in by_type.iter().zip(described) {
            let descriptions = slot.stage.offset(at).cast();
            let flag = self.damaged.ptr();
            self.decoder
                .decode(&self.decodes, *ty, containers, descriptions, flag)
                .map_err(failed)?;
        }
        slot.decoded = Some(self.decodes.point().map_err(failed)?);
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).slots.push_back(slot);
        Ok(())
    }

    /// Fills and queues slot after slot with the chunks of a group.
    fn load_all(
        &self,
        mut weights: Arriving,
        to: DevicePtr<u8>,
        after: &[StreamPoint],
    ) -> Result<(), DeviceError> {
        let (mut batch, mut filled) = (Batch::default(), None);
        while let Some(chunk) = weights.next() {
            let chunk = match chunk {
                Ok(chunk) => chunk,
                Err(error) => {
                    if let Some(filled) = filled {
                        self.give_back(filled);
                    }
                    return Err(error);
                }
            };
            if !batch.has_room(&chunk, self.slot_room) {
                let full = std::mem::take(&mut batch);
                filled = Some(self.fill_slot(full, filled.take(), to, after)?);
            }
            batch.push(chunk);
            // What has arrived need not wait for the disk, which may need its buffers.
            if weights.is_late() {
                let some = std::mem::take(&mut batch);
                self.queue(self.fill_slot(some, filled.take(), to, after)?, to, after)?;
            }
        }
        if !batch.chunks.is_empty() {
            filled = Some(self.fill_slot(batch, filled.take(), to, after)?);
        }
        filled.map_or(Ok(()), |filled| self.queue(filled, to, after))
    }
}

impl Device for CudaDevice {
    type Weights = Arriving;
    type Queue = ForeignStream;
    type Point = StreamPoint;
    type Moment = StreamMoment;

    fn load(
        &self,
        weights: Arriving,
        to: Range<u64>,
        after: &[StreamPoint],
    ) -> Result<StreamPoint, DeviceError> {
        let to = self.memory.ptr::<u8>().offset(to.start as usize);
        after.iter().try_for_each(|point| self.decodes.wait_for_point(point)).map_err(failed)?;
        let loaded = self.load_all(weights, to, after);
        let point = self.decodes.point().map_err(failed)?;
        if let Err(error) = loaded {
            // What was queued so far writes to the range.
            point.reach().map_err(failed)?;
            return Err(error);
        }
        Ok(point)
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
        let (filled, copied) = (self.filled.bytes_per_second()?, self.copied.bytes_per_second());
        Some(copied.map_or(filled, |copied| filled.min(copied)))
    }

    fn is_reached(&self, point: &StreamPoint) -> bool {
        // What failed is seen where it is waited for.
        point.is_reached().unwrap_or(true)
    }

    fn reach(&self, point: &StreamPoint) -> Result<(), DeviceError> {
        point.reach().map_err(failed)
    }
}
