//! An NVIDIA GPU as a device: weights go through a ring of pinned memory, and are decoded in VRAM.

mod ring;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use forebay_codec::{Codec, Container};
use forebay_compute::Pool;
use forebay_cuda::{
    CodedContainer, ContainerDecoder, ContainerInRange, CopyStream, CudaError, DeviceMemory,
    DevicePtr, ForeignStream, Gpu, StreamMoment, StreamPoint,
};
use forebay_format::TensorType;
use forebay_store::{SLOT_ALIGNMENT, copy_past_cache};

use crate::coded::CodedChunk;
use crate::device::{Device, DeviceError, Loaded};
use crate::expansion::Expansion;
use crate::rate::Rate;
use crate::stored::damaged;
use crate::weights::Arriving;
use ring::{Ring, RingSlot};

/// Bytes of a slot of the ring, which has some chunks: a part of the pinned memory within bounds. Each slot costs calls of the driver.
const SLOT_BYTES_MIN: usize = 8 << 20;
const SLOT_BYTES_MAX: usize = 32 << 20;
const SLOT_SHARE: u64 = 16;
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
/// Bytes that one thread copies at a time. On 16 cores, pieces of 1 MiB were copied at three quarters of this rate.
const PIECE_BYTES: usize = 256 << 10;
/// Time for which copying threads wait for the next slot before they sleep. With a millisecond, they took the cores from the thread that queues the
/// work of modules: on 16 cores, passes with few loads took 0.09 instead of 0.05 s.
const SPIN: Duration = Duration::from_micros(100);

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

/// VRAM for decoded weights. A copy stream brings them near, coded or plain, and another one decodes.
pub struct CudaDevice {
    // Fields are dropped in this order: what uses memory, then memory.
    ring: Arc<Ring>,
    decoder: ContainerDecoder,
    copies: CopyStream,
    decodes: CopyStream,
    /// Set to 1 if a chunk was damaged.
    damaged: DeviceMemory,
    memory: Arc<DeviceMemory>,
    pool: Pool,
    /// Rate of copies to pinned memory, and of some from there to the GPU.
    filled: Rate,
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

/// A slot with the chunks of a batch.
struct FilledSlot {
    slot: RingSlot,
    batch: Batch,
}

/// A slot whose chunks are copied to the GPU.
struct NearSlot {
    slot: RingSlot,
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
        let slot_bytes = (options.pinned_bytes / SLOT_SHARE) as usize;
        let slot_bytes =
            slot_bytes.clamp(SLOT_BYTES_MIN, SLOT_BYTES_MAX).next_multiple_of(SLOT_ALIGNMENT);
        let slots = ((options.pinned_bytes / slot_bytes as u64) as usize).max(SLOTS_MIN);
        let memory = gpu.allocate(options.bytes as usize).map_err(failed)?;
        let pool = Pool::new(options.threads);
        pool.set_spin(SPIN);
        Ok(CudaDevice {
            ring: Ring::new(&gpu, slots, slot_bytes)?,
            decoder: gpu.container_decoder().map_err(failed)?,
            copies: gpu.copy_stream().map_err(failed)?,
            decodes: gpu.copy_stream().map_err(failed)?,
            damaged: gpu.allocate_with(&[0_u32]).map_err(failed)?,
            memory: Arc::new(memory),
            pool,
            filled: Rate::default(),
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
        self.ring.slot_bytes() - DESCRIPTIONS
    }

    /// Copies chunks to a slot with all threads. This one runs `first` before.
    fn fill(
        &self,
        mut slot: RingSlot,
        batch: Batch,
        first: &mut dyn FnMut(),
    ) -> Result<FilledSlot, DeviceError> {
        let mut buffer = slot.take_memory()?;
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
        let mut began = Instant::now();
        let mut first = || {
            // Another caller may have filled its slot until now.
            began = Instant::now();
            first();
        };
        self.pool.run_after(&mut first, &|_| {
            while let Some((to, from)) = next() {
                copy_past_cache(to, from);
            }
        });
        self.filled.add(batch.end as u64, began.elapsed());
        slot.give_memory(buffer);
        Ok(FilledSlot { slot, batch })
    }

    /// Queues the copies of a slot to the GPU.
    fn send(&self, filled: FilledSlot) -> Result<NearSlot, DeviceError> {
        let FilledSlot { mut slot, batch } = filled;
        let by_type = batch.containers()?;
        let mut buffer = slot.take_memory()?;
        let mut at = batch.end.next_multiple_of(CHUNK_ALIGNMENT);
        let mut coded = Vec::new();
        for (ty, containers) in by_type {
            let first = at;
            for container in &containers {
                let end = at + CodedContainer::DESCRIPTION_BYTES;
                container.describe(&mut buffer.as_mut_slice()[at..end]);
                at = end;
            }
            coded.push((ty, containers, first));
        }
        let (end, plain) = (batch.end, batch.plain());
        let chunks = NearChunks { coded, plain, end, descriptions_end: at };
        if let Some(used) = slot.used.take() {
            self.copies.wait_for_point(&used).map_err(failed)?;
        }
        self.note_rates(&mut slot)?;
        // Small copies would measure their overhead.
        let measures = self.measures(batch.end);
        let moment = || self.copies.moment().map_err(failed);
        let began = measures.then(moment).transpose()?;
        let copies = [(0..at, slot.staged(&(0..at)))];
        slot.send_memory(self.copies.upload(buffer, copies).map_err(failed)?);
        if let Some(began) = began {
            slot.copied = Some((began, moment()?, batch.end as u64));
        }
        let copied = self.copies.point().map_err(failed)?;
        Ok(NearSlot { slot, chunks, copied })
    }

    /// Returns true if work with so many bytes is measured: some of what is not small.
    fn measures(&self, bytes: usize) -> bool {
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        turn.is_multiple_of(MEASURED) && bytes >= SLOT_BYTES_MIN / 2
    }

    /// Notes the rates that were measured when a slot was used the last time.
    fn note_rates(&self, slot: &mut RingSlot) -> Result<(), DeviceError> {
        if let Some((first, second, bytes)) = slot.copied.take() {
            let seconds = first.seconds_to(&second).map_err(failed)?;
            self.copied.add(bytes, Duration::from_secs_f64(seconds.max(0.0)));
        }
        if let Some((first, second, bytes)) = slot.decoded.take() {
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
        let measures = !chunks.coded.is_empty() && self.measures(chunks.end);
        let mut queue = || -> Result<_, CudaError> {
            let moment = || self.decodes.moment();
            self.decodes.wait_for_point(&copied)?;
            let began = measures.then(moment).transpose()?;
            self.decode_chunks(&chunks, slot.stage, to)?;
            let ended = measures.then(moment).transpose()?;
            let kept = keep.as_mut().and_then(|keep| keep.take(chunks.descriptions_end));
            if let Some(kept) = kept {
                self.decodes.copy(slot.stage, kept, chunks.descriptions_end)?;
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
                slot.lose();
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

    /// Fills slot after slot, and sends each while the next one is filled. Returns false if it may not wait for a slot, and only those of loads are
    /// left. `sent` gets what is near.
    fn bring(
        &self,
        weights: &mut CudaWeights,
        waits: bool,
        sent: &mut dyn FnMut(NearSlot) -> Result<(), DeviceError>,
    ) -> Result<bool, DeviceError> {
        let mut filled: Option<FilledSlot> = None;
        let mut send = |filled: &mut Option<FilledSlot>| match filled.take() {
            Some(filled) => sent(self.send(filled)?),
            None => Ok(()),
        };
        while !weights.is_whole() {
            let slot = match waits {
                true => Some(self.ring.take()?),
                false => self.ring.take_if_more_than(SLOTS_OF_LOADS)?,
            };
            let Some(slot) = slot else { break };
            let batch = weights.next_batch(self.slot_room())?;
            let mut queued = Ok(());
            let now = self.fill(slot, batch, &mut || queued = send(&mut filled))?;
            queued?;
            filled = Some(now);
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

    fn stage_bytes(&self) -> u64 {
        // Groups share no slots, so these are not full.
        let slots = self.ring.count().saturating_sub(SLOTS_OF_LOADS);
        (slots * self.slot_room() / 2) as u64
    }

    fn can_stage(&self) -> bool {
        self.ring.has_more_than(SLOTS_OF_LOADS)
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
        let (filled, copied) = (self.filled.bytes_per_second()?, self.copied.bytes_per_second());
        Some(copied.map_or(filled, |copied| filled.min(copied)))
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
