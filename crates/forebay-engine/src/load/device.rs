//! Weights on a GPU: every file's weights in one piece of device memory, at the distances that they have in the file.
//! So a piece of a file is one copy, however small its tensors are, and they keep the file's alignment, which is
//! enough for every kernel.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_cuda::{CopyStream, DevicePtr, Direction, Gpu, InFlight, Pinned, WeightsPool};
use forebay_format::Catalog;
use forebay_store::{
    Arena, BlockLabel, EngineInfo, Extent, FileIndex, FileSet, IoKind, LoadOptions, LoadStatistics,
    Loader, ReadEngine, ReadError, SLOT_ALIGNMENT, SlotBuffer, Upload, UploadError, UploadItem,
    Uploading, open_engine,
};
use serde::Serialize;

use super::{Destination, Sources, contents};
use crate::EngineError;
use crate::doctor::ReadChoice;

/// At 2 MiB PCIe is within a few percent of its best.
const PIECE_BYTES: usize = 2 << 20;
/// Pinning costs a quarter of a second per GiB, and a small ring stays in the processor's last cache.
const RING_BYTES: usize = 128 << 20;
/// Device memory is mapped in pieces of this size.
const CHUNK_BYTES: usize = 64 << 20;
/// Memory before the first weight and behind the last: kernels read up to 15 bytes beside a matrix.
const MARGIN: usize = SLOT_ALIGNMENT;
/// How long copies to the device are measured.
const COPY_TIME: Duration = Duration::from_millis(200);
/// Memory that these copies go through.
const COPY_SPAN: usize = 32 << 20;
/// What is read back at a time.
const CHECK_BYTES: u64 = 16 << 20;
/// What device memory holds before a load that is to be checked.
const POISON: u8 = 0xa5;

/// Which GPU, and how.
#[derive(Debug, Clone, Copy)]
pub struct DeviceRequest {
    /// Counted from 0.
    pub ordinal: usize,
    /// All device memory that may be in use when the weights are there, what the driver needs included.
    pub vram_bytes: Option<u64>,
    /// Read everything back after the last run and compare it with the files.
    pub check: bool,
    /// What is read or copied at a time, a multiple of 4096.
    pub piece_bytes: usize,
    /// Pinned memory that everything goes through: room for four pieces at least.
    pub ring_bytes: usize,
}

impl DeviceRequest {
    /// For GPU `ordinal`, without a bound and without a check.
    pub fn new(ordinal: usize) -> DeviceRequest {
        let (piece_bytes, ring_bytes) = (PIECE_BYTES, RING_BYTES);
        DeviceRequest { ordinal, vram_bytes: None, check: false, piece_bytes, ring_bytes }
    }
}

/// The GPU's part in a load.
#[derive(Debug, Clone, Serialize)]
pub struct DeviceReport {
    pub name: String,
    pub ordinal: usize,
    pub compute_capability: (i32, i32),
    pub memory_bytes: u64,
    /// In use on the GPU before there was memory for weights, by the driver's count: the context, other programs.
    pub used_before_bytes: u64,
    /// In use with all weights there.
    pub used_bytes: u64,
    /// Device memory of the weights.
    pub pool_bytes: u64,
    /// Whether this memory can be given back in parts; else the driver cannot map memory.
    pub pool_is_elastic: bool,
    /// Host memory that the GPU copies from.
    pub pinned_bytes: u64,
    /// Of this at a time.
    pub piece_bytes: usize,
    /// Opening the GPU, pinning the ring, mapping device memory: once per process, and not in the runs.
    pub open_seconds: f64,
    pub pin_seconds: f64,
    pub map_seconds: f64,
    /// Pinned copies as large as those of the load, alone.
    pub copy_bytes_per_second: f64,
    /// What was read back; `None` if nothing was to be.
    pub read_back: Option<ReadBack>,
}

/// A comparison of device memory with the files; differences are errors.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct ReadBack {
    pub bytes: u64,
    pub seconds: f64,
}

/// A weight, and its place on the device.
struct Weight {
    name: String,
    extent: Extent,
    at: u64,
}

/// Device memory for all weights, and what fills it. Fields are dropped in order: nothing is unpinned or freed that
/// something before it uses.
pub(super) struct Device<'a> {
    engine: Box<dyn ReadEngine>,
    ring: Vec<SlotBuffer>,
    copies: CopyStream,
    pinned: Pinned,
    pool: WeightsPool,
    gpu: Gpu,
    sources: &'a Sources,
    io: IoKind,
    choice: &'a ReadChoice,
    request: DeviceRequest,
    ring_arena: Arena,
    options: LoadOptions,
    items: Vec<UploadItem>,
    weights: Vec<Weight>,
    pool_bytes: usize,
    used_before_bytes: u64,
    /// Of opening the GPU, pinning and mapping.
    seconds: [f64; 3],
}

impl<'a> Device<'a> {
    pub fn new(
        catalog: &Catalog,
        sources: &'a Sources,
        request: DeviceRequest,
        io: IoKind,
        choice: &'a ReadChoice,
    ) -> Result<Device<'a>, EngineError> {
        let (items, weights, pool_bytes) = plan(catalog, &sources.checked);
        let (gpu, open_seconds) = timed(|| Ok(Gpu::open(request.ordinal)?))?;
        let used_before_bytes = fits(&gpu, request.vram_bytes, pool_bytes as u64)?;
        let (pool, map_seconds) = timed(|| {
            let mut pool = gpu.weights_pool(pool_bytes, CHUNK_BYTES)?;
            pool.grow(&gpu, pool_bytes)?;
            Ok(pool)
        })?;
        // A piece that is a whole block has a slot with room for unaligned ends.
        let slot_bytes = request.piece_bytes + 2 * SLOT_ALIGNMENT;
        let slots = (request.ring_bytes / slot_bytes).max(4);
        let ring_arena = Arena::reserve(slots * slot_bytes)?;
        let carve = |_| ring_arena.carve(slot_bytes);
        let ring = (0..slots).map(carve).collect::<Result<_, _>>()?;
        let (pinned, pin_seconds) =
            timed(|| Ok(gpu.pin(ring_arena.addresses(), ring_arena.clone())?))?;
        let depth_bytes = (choice.queue_depth * choice.request_bytes) as u64;
        let mut options = LoadOptions {
            piece_bytes: request.piece_bytes as u64,
            engine_bytes: depth_bytes + (8 << 20),
            ..LoadOptions::default()
        };
        if io == IoKind::Mmap {
            // All reading is the kernel's.
            options.copy_threads = 0;
        }
        Ok(Device {
            engine: open_reader(io, sources, &ring_arena, choice)?,
            ring,
            copies: gpu.copy_stream()?,
            pinned,
            pool,
            gpu,
            sources,
            io,
            choice,
            request,
            ring_arena,
            options,
            items,
            weights,
            pool_bytes,
            used_before_bytes,
            seconds: [open_seconds, pin_seconds, map_seconds],
        })
    }

    /// What is known when all runs are done.
    pub fn report(&self, files: &FileSet) -> Result<DeviceReport, EngineError> {
        let read_back = match self.request.check {
            true => Some(self.read_back(files)?),
            false => None,
        };
        let (free_bytes, memory_bytes) = self.gpu.memory_bytes()?;
        let to_device = Direction::ToDevice;
        let piece_bytes = self.request.piece_bytes;
        let [open_seconds, pin_seconds, map_seconds] = self.seconds;
        Ok(DeviceReport {
            name: self.gpu.name().to_owned(),
            ordinal: self.request.ordinal,
            compute_capability: self.gpu.compute_capability(),
            memory_bytes,
            used_before_bytes: self.used_before_bytes,
            used_bytes: memory_bytes - free_bytes,
            pool_bytes: self.pool.bytes() as u64,
            pool_is_elastic: self.pool.is_elastic(),
            pinned_bytes: self.pinned.bytes() as u64,
            piece_bytes,
            open_seconds,
            pin_seconds,
            map_seconds,
            copy_bytes_per_second: self.gpu.pinned_copy_rate(
                to_device,
                piece_bytes,
                COPY_SPAN,
                COPY_TIME,
            )?,
            read_back,
        })
    }

    /// Compares all weights with the files.
    fn read_back(&self, files: &FileSet) -> Result<ReadBack, EngineError> {
        let started = Instant::now();
        let (mut bytes, mut expected) = (0, Vec::new());
        for weight in &self.weights {
            let mut done = 0;
            while done < weight.extent.length {
                let length = CHECK_BYTES.min(weight.extent.length - done);
                let offset = weight.extent.offset + done;
                expected.resize(length as usize, 0);
                files.read_exact(Extent { offset, length, ..weight.extent }, &mut expected)?;
                let from: DevicePtr<u8> = self.pool.ptr().offset((weight.at + done) as usize);
                let found = self.gpu.download(from, length as usize)?;
                // Whole first: that is a comparison at the speed of memory.
                if found != expected {
                    let pairs = || found.iter().zip(&expected);
                    let at = pairs().position(|(found, expected)| found != expected);
                    return Err(EngineError::ReadBack {
                        place: weight.name.clone(),
                        file: files.path(weight.extent.file).unwrap_or_default(),
                        offset: offset + at.unwrap_or(0) as u64,
                    });
                }
                done += length;
            }
            bytes += weight.extent.length;
        }
        Ok(ReadBack { bytes, seconds: started.elapsed().as_secs_f64() })
    }

    /// Names what could not be read.
    fn failure(&self, cause: ReadError) -> EngineError {
        let at = match &cause {
            ReadError::Io { file, offset, .. }
            | ReadError::Stalled { file, offset, .. }
            | ReadError::Corrupt { file, offset, .. }
            | ReadError::PartOfChunk { file, offset, .. } => Some((file, *offset)),
            ReadError::UnexpectedEnd { file, file_end, .. } => Some((file, *file_end)),
            _ => None,
        };
        let place = at.and_then(|(file, offset)| self.weight_at(file, offset));
        let place = place.map_or_else(|| "weights".to_owned(), |weight| weight.name.clone());
        EngineError::Load { place, cause }
    }

    fn weight_at(&self, file: &PathBuf, offset: u64) -> Option<&Weight> {
        self.weights.iter().find(|weight| {
            let Extent { offset: start, length, .. } = weight.extent;
            let here = (start..start + length).contains(&offset);
            here && self.sources.checked.path(weight.extent.file).as_ref() == Some(file)
        })
    }
}

impl Destination for Device<'_> {
    fn before_cold_run(&mut self) -> Result<(), EngineError> {
        if self.io == IoKind::Mmap {
            // What a mapping brought into the page cache stays there until it is gone.
            self.engine = open_reader(self.io, self.sources, &self.ring_arena, self.choice)?;
        }
        Ok(())
    }

    fn fill(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<LoadStatistics, EngineError> {
        if self.request.check {
            // What an earlier run or another program left must not pass for what was loaded.
            self.gpu.fill(self.pool.ptr(), POISON, self.pool_bytes)?;
            self.gpu.synchronize()?;
        }
        let target = Target { copies: &self.copies, start: self.pool.ptr() };
        let (engine, options) = (self.engine.as_mut(), self.options);
        let loader = Loader { engine, files: &self.sources.checked, options, ring: &mut self.ring };
        let (results, statistics) = loader.upload(&self.items, &target, progress)?;
        let mut failures = results.into_iter().filter_map(Result::err).collect::<Vec<_>>();
        // A failure says more than the cancellations that it caused.
        failures.sort_by_key(|error| matches!(error, ReadError::Cancelled { .. }));
        match failures.into_iter().next() {
            None => Ok(statistics),
            Some(cause) => Err(self.failure(cause)),
        }
    }

    fn engine(&self) -> EngineInfo {
        self.engine.describe()
    }

    fn bytes(&self) -> (u64, u64) {
        let weights = self.items.iter().map(|item| item.layout.wanted_bytes()).sum();
        (weights, self.pool_bytes as u64)
    }
}

/// The pool, as the loader sees it.
struct Target<'a> {
    copies: &'a CopyStream,
    start: DevicePtr<u8>,
}

struct Copy(InFlight<SlotBuffer>);

impl Upload for Target<'_> {
    fn begin(
        &self,
        slot: SlotBuffer,
        range: Range<usize>,
        to: u64,
    ) -> Result<Box<dyn Uploading>, UploadError> {
        let copy = self.copies.upload(slot, range, self.start.offset(to as usize))?;
        Ok(Box::new(Copy(copy)))
    }
}

impl Uploading for Copy {
    fn is_done(&self) -> Result<bool, UploadError> {
        Ok(self.0.is_done()?)
    }

    fn finish(self: Box<Self>) -> Result<SlotBuffer, UploadError> {
        Ok(self.0.finish()?)
    }
}

/// One item for each file, the places of all weights, and how much memory they take.
fn plan(catalog: &Catalog, files: &FileSet) -> (Vec<UploadItem>, Vec<Weight>, usize) {
    let contents = contents(catalog);
    let (mut items, mut weights) = (Vec::new(), Vec::new());
    let mut end = MARGIN as u64;
    for file in (0..files.len() as u32).map(FileIndex) {
        let here = contents.iter().filter(|(_, extent)| extent.file == file);
        let (names, extents): (Vec<&String>, Vec<Extent>) =
            here.map(|(name, extent)| (name, *extent)).unzip();
        let layout = files.plan(&extents, SLOT_ALIGNMENT);
        for (name, part) in names.into_iter().zip(layout.parts.iter()) {
            let at = end + part.at as u64;
            weights.push(Weight { name: name.clone(), extent: part.extent, at });
        }
        let to = end;
        end = end.saturating_add(layout.slot_bytes as u64);
        items.push(UploadItem { label: BlockLabel::Other(u64::from(file.0)), layout, to });
    }
    (items, weights, end.saturating_add(MARGIN as u64) as usize)
}

/// Whether there is room; gives the bytes in use now.
fn fits(gpu: &Gpu, vram_bytes: Option<u64>, bytes: u64) -> Result<u64, EngineError> {
    let (free_bytes, total_bytes) = gpu.memory_bytes()?;
    let used_bytes = total_bytes - free_bytes;
    // The pool takes whole chunks.
    let needed_bytes = bytes.checked_next_multiple_of(CHUNK_BYTES as u64).unwrap_or(u64::MAX);
    let name = || gpu.name().to_owned();
    if let Some(budget_bytes) = vram_bytes
        && used_bytes.saturating_add(needed_bytes) > budget_bytes
    {
        return Err(EngineError::OverBudget {
            gpu: name(),
            needed_bytes,
            used_bytes,
            budget_bytes,
        });
    }
    if needed_bytes > free_bytes {
        return Err(EngineError::DoesNotFitDevice {
            gpu: name(),
            needed_bytes,
            free_bytes,
            total_bytes,
        });
    }
    Ok(used_bytes)
}

/// What reads into the ring. It compares with checksums itself: nothing is on its way to the device before.
fn open_reader(
    io: IoKind,
    sources: &Sources,
    ring: &Arena,
    choice: &ReadChoice,
) -> Result<Box<dyn ReadEngine>, EngineError> {
    let kind = if io == IoKind::Auto { choice.kind } else { io };
    Ok(open_engine(kind, &sources.checked, ring, &choice.engine_options())?)
}

fn timed<T>(work: impl FnOnce() -> Result<T, EngineError>) -> Result<(T, f64), EngineError> {
    let started = Instant::now();
    let done = work()?;
    Ok((done, started.elapsed().as_secs_f64()))
}
