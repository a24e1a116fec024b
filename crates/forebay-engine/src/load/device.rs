//! Weights on a GPU. Each file's weights are in one piece of device memory, at the distances that they have in the
//! file.
//!
//! So a piece of a file is one copy, however small its tensors are. The weights keep the file's alignment, which is
//! enough for every kernel.

use std::time::{Duration, Instant};

use forebay_cuda::{DevicePtr, Direction, Gpu, WeightsPool};
use forebay_format::Catalog;
use forebay_store::{
    BlockLabel, EngineInfo, Extent, FileIndex, FileSet, IoKind, LoadStatistics, SLOT_ALIGNMENT,
    UploadPart, UploadPlan,
};

use super::cufile::{CuFileReader, choose};
use super::hold::HeldTensor;
use super::hold_device::{HoldPlan, decode_all, workspace_bytes};
use super::limit::LoadLimit;
use super::read_back::{as_decoded, as_read, name_of, poison, read_back};
use super::request::{CuFileRequests, CuFileUse, DecodedBy, DeviceReport, DeviceRequest};
use super::ring::{GpuRing, RingRequest, named};
use super::{Destination, LoadRequest, Loaded, Sources, contents, repeat};
use crate::doctor::ReadChoice;
use crate::load::error::LoadError;
use crate::peak_resident_bytes;

/// Unit in which a GPU maps memory, in bytes.
const GRANULARITY: u64 = 2 << 20;
/// Bytes of memory before the first weight and after the last one. Kernels read up to 15 bytes beside a matrix.
pub(super) const MARGIN: usize = SLOT_ALIGNMENT;
/// Duration of the measurement of copies to the device.
const COPY_TIME: Duration = Duration::from_millis(200);
/// Bytes of memory that these copies cycle through.
const COPY_SPAN: usize = 32 << 20;
/// Reader that fills device memory, and the owner of that memory.
enum DeviceReader<'a> {
    /// Ring and its memory. The ring is dropped first because it may still be copying.
    Ring(Box<GpuRing<'a>>, WeightsPool),
    CuFile(CuFileReader, UploadPlan, CuFileRequests),
}

/// Device memory for all weights, and its reader.
pub(super) struct Device<'a> {
    reader: DeviceReader<'a>,
    gpu: Gpu,
    io: IoKind,
    request: DeviceRequest,
    /// Names and extents of the weights.
    contents: Vec<(String, Extent)>,
    parts: Vec<UploadPart>,
    /// Tensors with addresses, if compact ones are decoded. Otherwise empty.
    tensors: Vec<HeldTensor>,
    files: &'a FileSet,
    pool_bytes: usize,
    used_before_bytes: u64,
    /// Reason why cuFile is not used although it might have been. It is empty if there is none.
    why_not_cufile: String,
    /// Seconds for opening the GPU, pinning memory and mapping memory.
    seconds: [f64; 3],
}

/// Loads weights to the GPU `wanted` as often as `request` says.
pub(crate) fn load(
    catalog: &Catalog,
    sources: &Sources,
    wanted: DeviceRequest,
    request: &LoadRequest,
    choice: &ReadChoice,
    limit: &mut LoadLimit,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Loaded, LoadError> {
    let mut device = Device::new(catalog, sources, wanted, request, choice)?;
    let runs = repeat(request, sources, limit, &mut device, progress)?;
    let peak_resident_bytes = peak_resident_bytes();
    limit.measure_again(&sources.as_stored, &runs)?;
    let report = device.report(&sources.unrecorded)?;
    limit.device_bytes_per_second = request.limit.then_some(report.copy_bytes_per_second);
    let (engine, bytes) = (device.engine(), device.bytes());
    let (cufile, device) = (device.cufile(), Some(report));
    Ok(Loaded { engine, bytes, runs, device, cufile, peak_resident_bytes })
}

impl<'a> Device<'a> {
    pub fn new(
        catalog: &Catalog,
        sources: &'a Sources,
        request: DeviceRequest,
        load: &LoadRequest,
        choice: &ReadChoice,
    ) -> Result<Device<'a>, LoadError> {
        let (files, io) = (&sources.checked, load.io);
        let contents = contents(catalog);
        let HoldPlan { mut tensors, mut parts, pool_bytes } = match load.decode {
            true => HoldPlan::new(catalog.tensors(), true),
            false => plan(&contents, files),
        };
        let (gpu, open_seconds) = timed(|| Ok(Gpu::open(request.ordinal)?))?;
        let chosen = choose(request.cufile, choice.cufile.as_ref(), &gpu, files, load.cold)?;
        let needed_bytes = pool_bytes + workspace_bytes(&tensors);
        let used_before_bytes = fits(&gpu, request.vram_bytes, needed_bytes as u64)?;
        // Decoding takes as much memory as the ring, whose slots may be a little larger than asked for.
        let with_stages = (needed_bytes + 2 * request.ring_bytes) as u64;
        let gpu_decodes = fits(&gpu, request.vram_bytes, with_stages).is_ok();
        let opened = match chosen {
            Err(why_not) => Err(why_not),
            Ok(requests) => match timed(|| CuFileReader::open(&gpu, files, pool_bytes)) {
                Ok((reader, seconds)) => Ok((requests, reader, seconds)),
                Err(error) if request.cufile == CuFileUse::Always => return Err(error),
                Err(error) => Err(format!("the faster way here does not work: {error}")),
            },
        };
        let (reader, why_not_cufile, [pin_seconds, map_seconds]) = match opened {
            Ok((requests, reader, seconds)) => {
                place(&mut parts, &mut tensors, reader.ptr().address());
                let plan = UploadPlan::new(&parts, files, requests.request_bytes as u64);
                (DeviceReader::CuFile(reader, plan, requests), String::new(), [seconds, 0.0])
            }
            Err(why_not) => {
                let (pool, map_seconds) = timed(|| whole_pool(&gpu, pool_bytes))?;
                place(&mut parts, &mut tensors, pool.ptr().address());
                let DeviceRequest { piece_bytes, ring_bytes, .. } = request;
                let through = RingRequest {
                    piece_bytes,
                    ring_bytes,
                    gpu_decodes,
                    ..RingRequest::new(files, io, choice)
                };
                let ring = GpuRing::open(&gpu, through, &parts, &[pool.ptr()])?;
                let seconds = [ring.pin_time().as_secs_f64(), map_seconds];
                (DeviceReader::Ring(Box::new(ring), pool), why_not, seconds)
            }
        };
        Ok(Device {
            reader,
            gpu,
            io,
            request,
            contents,
            parts,
            tensors,
            files,
            pool_bytes,
            used_before_bytes,
            why_not_cufile,
            seconds: [open_seconds, pin_seconds, map_seconds],
        })
    }

    /// Returns the memory that contains all parts.
    fn memory(&self) -> DevicePtr<u8> {
        match &self.reader {
            DeviceReader::Ring(_, pool) => pool.ptr(),
            DeviceReader::CuFile(reader, ..) => reader.ptr(),
        }
    }

    /// Returns the requests to cuFile, or `None` for the ring.
    pub fn cufile(&self) -> Option<CuFileRequests> {
        match &self.reader {
            DeviceReader::Ring(..) => None,
            DeviceReader::CuFile(_, _, requests) => Some(*requests),
        }
    }

    /// Returns the report, after all runs are done.
    pub fn report(&self, files: &FileSet) -> Result<DeviceReport, LoadError> {
        let (gpu, memory) = (&self.gpu, &[self.memory()][..]);
        let name = |extent: &Extent| name_of(&self.contents, extent);
        let read_back = match self.request.check {
            false => None,
            true if self.tensors.is_empty() => {
                Some(read_back(gpu, files, as_read(&self.parts), memory, &name)?)
            }
            true => Some(read_back(gpu, files, as_decoded(&self.tensors), memory, &name)?),
        };
        let (free_bytes, memory_bytes) = self.gpu.memory_bytes()?;
        let to_device = Direction::ToDevice;
        let (piece_bytes, pool_bytes, pool_is_elastic, pinned_bytes) = match &self.reader {
            DeviceReader::Ring(ring, pool) => {
                let elastic = pool.is_elastic();
                (self.request.piece_bytes, pool.bytes(), elastic, ring.pinned_bytes())
            }
            DeviceReader::CuFile(_, _, requests) => {
                (requests.request_bytes, self.pool_bytes, false, 0)
            }
        };
        let [open_seconds, pin_seconds, map_seconds] = self.seconds;
        let gpu_decodes = match &self.reader {
            DeviceReader::Ring(ring, _) => ring.gpu_decodes(),
            DeviceReader::CuFile(..) => false,
        };
        let by = if gpu_decodes { DecodedBy::Gpu } else { DecodedBy::Cpu };
        Ok(DeviceReport {
            name: self.gpu.name().to_owned(),
            ordinal: self.request.ordinal,
            compute_capability: self.gpu.compute_capability(),
            memory_bytes,
            used_before_bytes: self.used_before_bytes,
            used_bytes: memory_bytes - free_bytes,
            pool_bytes: pool_bytes as u64,
            pool_is_elastic,
            pinned_bytes,
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
            decoded_by: self.files.is_coded().then_some(by),
            read_back,
        })
    }
}

impl Destination for Device<'_> {
    fn before_cold_run(&mut self) -> Result<(), LoadError> {
        if let DeviceReader::Ring(ring, _) = &mut self.reader
            && self.io == IoKind::Mmap
        {
            // Pages that a mapping brought into the page cache stay there until the mapping is dropped.
            ring.reopen_engine()?;
        }
        Ok(())
    }

    fn fill(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<LoadStatistics, LoadError> {
        if self.request.check {
            poison(&self.gpu, &self.parts, &[self.memory()])?;
        }
        let filled = match &mut self.reader {
            DeviceReader::Ring(ring, _) => ring.fill(progress),
            DeviceReader::CuFile(reader, plan, requests) => {
                reader.fill(self.files, plan, requests.threads, progress)
            }
        };
        let mut statistics = filled.map_err(|error| named(error, &self.contents, self.files))?;
        statistics.seconds += decode_all(&self.gpu, &self.tensors, self.memory())?;
        Ok(statistics)
    }

    fn engine(&self) -> EngineInfo {
        match &self.reader {
            DeviceReader::Ring(ring, _) => {
                let mut engine = ring.engine().expect("the ring was opened with its engine");
                if engine.why.is_empty() {
                    engine.why.clone_from(&self.why_not_cufile);
                }
                engine
            }
            DeviceReader::CuFile(reader, ..) => reader.engine(),
        }
    }

    fn bytes(&self) -> (u64, u64) {
        let bytes = match &self.reader {
            DeviceReader::Ring(ring, _) => ring.bytes(),
            DeviceReader::CuFile(_, plan, _) => plan.bytes(),
        };
        (bytes, self.pool_bytes as u64)
    }
}

/// Returns the places of all weights in a pool. The weights of each file are laid out as
/// in the file.
fn plan(contents: &[(String, Extent)], files: &FileSet) -> HoldPlan {
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
    let pool_bytes = end.saturating_add(MARGIN as u64) as usize;
    HoldPlan { tensors: Vec::new(), parts, pool_bytes }
}

/// Moves parts and tensors whose positions count from 0 to the address of their memory.
fn place(parts: &mut [UploadPart], tensors: &mut [HeldTensor], address: u64) {
    parts.iter_mut().for_each(|part| part.to += address);
    tensors.iter_mut().for_each(|tensor| tensor.address += address);
}

/// Allocates a pool of `bytes` bytes. It is mapped in one piece: mapping takes as long for each piece, however large it is.
pub(super) fn whole_pool(gpu: &Gpu, bytes: usize) -> Result<WeightsPool, LoadError> {
    let _span = tracing::debug_span!("map", bytes).entered();
    let mut pool = gpu.weights_pool(bytes, bytes)?;
    pool.grow(gpu, bytes)?;
    Ok(pool)
}

/// Checks that `bytes` fit on the GPU and returns the bytes in use now.
pub(super) fn fits(gpu: &Gpu, vram_bytes: Option<u64>, bytes: u64) -> Result<u64, LoadError> {
    let (free_bytes, total_bytes) = gpu.memory_bytes()?;
    let used_bytes = total_bytes - free_bytes;
    let needed_bytes = bytes.checked_next_multiple_of(GRANULARITY).unwrap_or(u64::MAX);
    let name = || gpu.name().to_owned();
    if let Some(budget_bytes) = vram_bytes
        && used_bytes.saturating_add(needed_bytes) > budget_bytes
    {
        return Err(LoadError::OverBudget { gpu: name(), needed_bytes, used_bytes, budget_bytes });
    }
    if needed_bytes > free_bytes {
        return Err(LoadError::DoesNotFitDevice {
            gpu: name(),
            needed_bytes,
            free_bytes,
            total_bytes,
        });
    }
    Ok(used_bytes)
}

pub(super) fn timed<T>(work: impl FnOnce() -> Result<T, LoadError>) -> Result<(T, f64), LoadError> {
    let started = Instant::now();
    let done = work()?;
    Ok((done, started.elapsed().as_secs_f64()))
}
