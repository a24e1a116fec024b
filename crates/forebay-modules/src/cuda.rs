//! An NVIDIA GPU as a device: weights go through a ring of pinned memory, and are decoded in VRAM.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_codec::{Codec, Container, Float, Weights};
use forebay_compute::Pool;
use forebay_cuda::{
    CodedContainer, ContainerDecoder, CopyStream, CudaError, DeviceMemory, DevicePtr,
    ForeignStream, Gpu, InFlight, Pinned, StreamPoint,
};
use forebay_format::TensorType;
use forebay_store::{Arena, SlotBuffer};

use crate::coded::{CodedChunk, CodedGroup};
use crate::device::{Device, DeviceError};

/// Bytes of a slot of the ring: some chunks.
const SLOT_BYTES: usize = 16 << 20;
/// Most chunks that are decoded from a slot, and room for what describes them.
const CODED_MAX: usize = 1024;
const DESCRIPTIONS: usize = CODED_MAX * CodedContainer::DESCRIPTION_BYTES;
/// Bytes at the end of a slot of which chunks take none.
const SLOT_ROOM: usize = SLOT_BYTES - DESCRIPTIONS;
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
    pool: Pool,
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
}

/// Chunks of a group that go through one slot.
#[derive(Default)]
struct Batch<'a> {
    coded: Vec<(&'a CodedChunk, Range<usize>)>,
    plain: Vec<(&'a CodedChunk, Range<usize>)>,
    end: usize,
}

impl<'a> Batch<'a> {
    /// Cuts a group into batches.
    fn cut(group: &'a CodedGroup) -> Vec<Batch<'a>> {
        let mut batches: Vec<Batch<'a>> = Vec::new();
        for chunk in group.chunks() {
            let bytes = chunk.coded.len();
            let fits = |batch: &&mut Batch<'a>| {
                batch.end + bytes <= SLOT_ROOM && batch.coded.len() < CODED_MAX
            };
            let batch = match batches.last_mut().filter(fits) {
                Some(batch) => batch,
                None => {
                    batches.push(Batch::default());
                    batches.last_mut().expect("it was added")
                }
            };
            let range = batch.end..batch.end + bytes;
            batch.end = range.end.next_multiple_of(CHUNK_ALIGNMENT);
            match chunk.codec {
                Codec::Exponents => batch.coded.push((chunk, range)),
                _ => batch.plain.push((chunk, range)),
            }
        }
        batches
    }
}

fn error(source: CudaError) -> DeviceError {
    DeviceError(source.to_string())
}

fn failed(error: impl std::fmt::Display) -> DeviceError {
    DeviceError(error.to_string())
}

/// Returns the type of decoded weights.
fn type_of(weights: Weights) -> Option<TensorType> {
    match weights {
        Weights::Plain(Float::Bf16) => Some(TensorType::BF16),
        Weights::Plain(Float::F16) => Some(TensorType::F16),
        Weights::Plain(Float::F8E4M3) => Some(TensorType::F8_E4M3),
        Weights::Plain(Float::F8E5M2) => Some(TensorType::F8_E5M2),
        Weights::Compact(_) => None,
    }
}

impl CudaDevice {
    /// Opens a GPU, and reserves all memory.
    ///
    /// # Errors
    /// Returns an error if there is no such GPU, or if memory is missing.
    pub fn open(options: &CudaOptions) -> Result<CudaDevice, DeviceError> {
        let gpu = Gpu::open(options.ordinal).map_err(error)?;
        let slots = (options.pinned_bytes / SLOT_BYTES as u64).max(2) as usize;
        let memory = gpu.allocate(options.bytes as usize).map_err(error)?;
        let stage = gpu.allocate(slots * SLOT_BYTES).map_err(error)?;
        let arena = Arena::map(slots * SLOT_BYTES).map_err(failed)?;
        arena.make_resident().map_err(failed)?;
        let pinned = gpu.pin(arena.addresses(), arena.clone()).map_err(error)?;
        let slot = |at: usize| -> Result<Slot, DeviceError> {
            let buffer = Some(arena.carve(SLOT_BYTES).map_err(failed)?);
            let stage = stage.ptr::<u8>().offset(at * SLOT_BYTES);
            Ok(Slot { flight: None, buffer, stage, decoded: None })
        };
        let slots = (0..slots).map(slot).collect::<Result<_, _>>()?;
        let pool = Pool::new(options.threads);
        pool.set_spin(SPIN);
        Ok(CudaDevice {
            ring: Mutex::new(Ring { slots, _pinned: pinned, _stage: stage }),
            decoder: gpu.container_decoder().map_err(error)?,
            copies: gpu.copy_stream().map_err(error)?,
            decodes: gpu.copy_stream().map_err(error)?,
            damaged: gpu.allocate_with(&[0_u32]).map_err(error)?,
            memory: Arc::new(memory),
            pool,
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
        let words = self.gpu.download::<u32>(self.damaged.ptr(), 1).map_err(error)?;
        Ok(words != [0])
    }

    /// Copies chunks to a slot with all threads.
    fn fill(&self, buffer: &mut SlotBuffer, batch: &Batch<'_>) {
        let mut rest = buffer.as_mut_slice();
        let (mut pieces, mut done) = (Vec::new(), 0);
        let mut chunks: Vec<_> = batch.coded.iter().chain(&batch.plain).collect();
        chunks.sort_unstable_by_key(|(_, range)| range.start);
        for (chunk, range) in chunks {
            let (_, from) = std::mem::take(&mut rest).split_at_mut(range.start - done);
            let (own, behind) = from.split_at_mut(range.len());
            (rest, done) = (behind, range.end);
            pieces.extend(own.chunks_mut(PIECE_BYTES).zip(chunk.coded.chunks(PIECE_BYTES)));
        }
        let pieces = Mutex::new(pieces);
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).pop();
        self.pool.run(&|_| {
            while let Some((to, from)) = next() {
                to.copy_from_slice(from);
            }
        });
    }

    /// Queues the copies and the decoding of a batch.
    fn queue(
        &self,
        slot: &mut Slot,
        batch: &Batch<'_>,
        to: DevicePtr<u8>,
        after: &[StreamPoint],
    ) -> Result<(), DeviceError> {
        let mut buffer = match slot.flight.take() {
            Some(flight) => flight.finish().map_err(error)?,
            None => slot.buffer.take().expect("a slot has its memory or is under way"),
        };
        self.fill(&mut buffer, batch);
        let mut by_type: Vec<(TensorType, Vec<CodedContainer>)> = Vec::new();
        for (chunk, range) in &batch.coded {
            let container = Container::read(&chunk.coded, chunk.bytes).map_err(failed)?;
            let ty = type_of(container.weights()).filter(|_| container.rest().is_empty());
            let ty = ty.ok_or_else(|| failed("a chunk is of another type"))?;
            let of = CodedContainer {
                ty,
                from: slot.stage.offset(range.start),
                bytes: range.len(),
                to: to.offset(chunk.at as usize),
                weights: chunk.bytes as u64 / ty.block_bytes() as u64,
            };
            match by_type.iter_mut().find(|(other, _)| *other == ty) {
                Some((_, all)) => all.push(of),
                None => by_type.push((ty, vec![of])),
            }
        }
        let mut copies: Vec<(Range<usize>, DevicePtr<u8>)> = Vec::new();
        let mut at = SLOT_ROOM;
        let mut described = Vec::new();
        for (_, containers) in &by_type {
            described.push(at);
            for container in containers {
                let end = at + CodedContainer::DESCRIPTION_BYTES;
                container.describe(&mut buffer.as_mut_slice()[at..end]);
                at = end;
            }
        }
        if at > SLOT_ROOM {
            copies.push((SLOT_ROOM..at, slot.stage.offset(SLOT_ROOM)));
        }
        // Chunks beside each other are one copy.
        for (_, range) in &batch.coded {
            match copies
                .last_mut()
                .filter(|(last, _)| last.end.next_multiple_of(CHUNK_ALIGNMENT) == range.start)
            {
                Some((last, _)) => last.end = range.end,
                None => copies.push((range.clone(), slot.stage.offset(range.start))),
            }
        }
        let plain = batch.plain.iter();
        copies.extend(plain.map(|(chunk, range)| (range.clone(), to.offset(chunk.at as usize))));
        if let Some(decoded) = slot.decoded.take() {
            self.copies.wait_for_point(&decoded).map_err(error)?;
        }
        if !batch.plain.is_empty() {
            after.iter().try_for_each(|point| self.copies.wait_for_point(point)).map_err(error)?;
        }
        slot.flight = Some(self.copies.upload(buffer, copies).map_err(error)?);
        self.decodes.wait_for_point(&self.copies.point().map_err(error)?).map_err(error)?;
        for ((ty, containers), at) in by_type.iter().zip(described) {
            let descriptions = slot.stage.offset(at).cast();
            let flag = self.damaged.ptr();
            self.decoder
                .decode(&self.decodes, *ty, containers, descriptions, flag)
                .map_err(error)?;
        }
        slot.decoded = Some(self.decodes.point().map_err(error)?);
        Ok(())
    }
}

impl Device for CudaDevice {
    type Weights = Arc<CodedGroup>;
    type Queue = ForeignStream;
    type Point = StreamPoint;

    fn load(
        &self,
        weights: &Arc<CodedGroup>,
        to: Range<u64>,
        after: &[StreamPoint],
    ) -> Result<StreamPoint, DeviceError> {
        let to = self.memory.ptr::<u8>().offset(to.start as usize);
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        after.iter().try_for_each(|point| self.decodes.wait_for_point(point)).map_err(error)?;
        for batch in Batch::cut(weights) {
            let mut slot = ring.slots.pop_front().ok_or_else(|| failed("the ring is lost"))?;
            // After an error, the slot's memory may be in use, so it does not come back.
            self.queue(&mut slot, &batch, to, after)?;
            ring.slots.push_back(slot);
        }
        self.decodes.point().map_err(error)
    }

    fn wait(&self, queue: ForeignStream, point: &StreamPoint) -> Result<(), DeviceError> {
        self.decodes.hold_stream(queue, point).map_err(error)
    }

    fn mark(&self, queue: ForeignStream) -> Result<StreamPoint, DeviceError> {
        self.decodes.point_of(queue).map_err(error)
    }

    fn is_reached(&self, point: &StreamPoint) -> bool {
        // What failed is seen where it is waited for.
        point.is_reached().unwrap_or(true)
    }

    fn reach(&self, point: &StreamPoint) -> Result<(), DeviceError> {
        point.reach().map_err(error)
    }
}
