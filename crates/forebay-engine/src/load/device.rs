//! Weights on a GPU: every file's weights in one piece of device memory, at the distances that they have in the file.
//! So a piece of a file is one copy, however small its tensors are, and they keep the file's alignment, which is
//! enough for every kernel.

use std::time::{Duration, Instant};

use forebay_cuda::{Direction, Gpu, WeightsPool};
use forebay_format::Catalog;
use forebay_store::{
    BlockLabel, EngineInfo, Extent, FileIndex, FileSet, IoKind, LoadStatistics, SLOT_ALIGNMENT,
    UploadPart,
};
use serde::Serialize;

use super::read_back::{ReadBack, name_of, poison, read_back};
use super::ring::{GpuRing, PIECE_BYTES, RING_BYTES, RingRequest, named};
use super::{Destination, Sources, contents};
use crate::EngineError;
use crate::doctor::ReadChoice;

/// Device memory is mapped in pieces of this size.
pub(super) const CHUNK_BYTES: usize = 64 << 20;
/// Memory before the first weight and behind the last: kernels read up to 15 bytes beside a matrix.
pub(super) const MARGIN: usize = SLOT_ALIGNMENT;
/// How long copies to the device are measured.
const COPY_TIME: Duration = Duration::from_millis(200);
/// Memory that these copies go through.
const COPY_SPAN: usize = 32 << 20;
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

/// Device memory for all weights, and what fills it. The ring goes first: it may still copy.
pub(super) struct Device<'a> {
    ring: GpuRing<'a>,
    pool: WeightsPool,
    gpu: Gpu,
    io: IoKind,
    request: DeviceRequest,
    /// Names by place in the files, and where each weight is.
    contents: Vec<(String, Extent)>,
    parts: Vec<UploadPart>,
    files: &'a FileSet,
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
        choice: &ReadChoice,
    ) -> Result<Device<'a>, EngineError> {
        let files = &sources.checked;
        let contents = contents(catalog);
        let (mut parts, pool_bytes) = plan(&contents, files);
        let (gpu, open_seconds) = timed(|| Ok(Gpu::open(request.ordinal)?))?;
        let used_before_bytes = fits(&gpu, request.vram_bytes, pool_bytes as u64)?;
        let (pool, map_seconds) = timed(|| {
            let mut pool = gpu.weights_pool(pool_bytes, CHUNK_BYTES)?;
            pool.grow(&gpu, pool_bytes)?;
            Ok(pool)
        })?;
        for part in &mut parts {
            part.to += pool.ptr().address();
        }
        let DeviceRequest { piece_bytes, ring_bytes, .. } = request;
        let through =
            RingRequest { piece_bytes, ring_bytes, ..RingRequest::new(files, io, choice) };
        let ring = GpuRing::open(&gpu, through, &parts)?;
        let seconds = [open_seconds, ring.pin_time().as_secs_f64(), map_seconds];
        Ok(Device {
            ring,
            pool,
            gpu,
            io,
            request,
            contents,
            parts,
            files,
            pool_bytes,
            used_before_bytes,
            seconds,
        })
    }

    /// What is known when all runs are done.
    pub fn report(&self, files: &FileSet) -> Result<DeviceReport, EngineError> {
        let read_back = match self.request.check {
            true => Some(read_back(&self.gpu, files, &self.parts, &|extent| {
                name_of(&self.contents, extent)
            })?),
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
            pinned_bytes: self.ring.pinned_bytes(),
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
}

impl Destination for Device<'_> {
    fn before_cold_run(&mut self) -> Result<(), EngineError> {
        if self.io == IoKind::Mmap {
            // What a mapping brought into the page cache stays there until it is gone.
            self.ring.reopen_engine()?;
        }
        Ok(())
    }

    fn fill(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<LoadStatistics, EngineError> {
        if self.request.check {
            poison(&self.gpu, &self.parts)?;
        }
        let filled = self.ring.fill(progress);
        filled.map_err(|error| named(error, &self.contents, self.files))
    }

    fn engine(&self) -> EngineInfo {
        self.ring.engine()
    }

    fn bytes(&self) -> (u64, u64) {
        (self.ring.bytes(), self.pool_bytes as u64)
    }
}

/// The places of all weights in a pool, and how much memory they take: each file's lie as in the file.
fn plan(contents: &[(String, Extent)], files: &FileSet) -> (Vec<UploadPart>, usize) {
    let (mut parts, mut end) = (Vec::new(), MARGIN as u64);
    for file in (0..files.len() as u32).map(FileIndex) {
        let here = contents.iter().enumerate().filter(|(_, (_, extent))| extent.file == file);
        let (numbers, extents): (Vec<usize>, Vec<Extent>) =
            here.map(|(number, (_, extent))| (number, *extent)).unzip();
        let layout = files.plan(&extents, SLOT_ALIGNMENT);
        for (number, part) in numbers.into_iter().zip(layout.parts.iter()) {
            let label = BlockLabel::Other(number as u64);
            parts.push(UploadPart { label, extent: part.extent, to: end + part.at as u64 });
        }
        end = end.saturating_add(layout.slot_bytes as u64);
    }
    (parts, end.saturating_add(MARGIN as u64) as usize)
}

/// Whether there is room; gives the bytes in use now.
pub(super) fn fits(gpu: &Gpu, vram_bytes: Option<u64>, bytes: u64) -> Result<u64, EngineError> {
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

pub(super) fn timed<T>(
    work: impl FnOnce() -> Result<T, EngineError>,
) -> Result<(T, f64), EngineError> {
    let started = Instant::now();
    let done = work()?;
    Ok((done, started.elapsed().as_secs_f64()))
}
