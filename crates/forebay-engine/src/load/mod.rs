//! Bringing all weights of a model into memory of the host or of a GPU, and how fast that was against what disk, page
//! cache and the way to the device give.

#[cfg(feature = "cuda")]
mod cufile;
#[cfg(feature = "cuda")]
pub(crate) mod device;
mod hold;
#[cfg(feature = "cuda")]
pub(crate) mod hold_device;
mod host;
mod limit;
#[cfg(feature = "cuda")]
mod read_back;
mod request;
#[cfg(feature = "cuda")]
mod ring;

use std::path::{Path, PathBuf};

use forebay_format::Catalog;
use forebay_format::pack::Block;
use forebay_model::Architecture;
use forebay_store::{
    EngineInfo, EngineOptions, Extent, FileIndex, FileSet, Interrupt, IoKind, IoRecorder,
    LoadStatistics,
};
use serde::Serialize;

use crate::doctor::{MachineProfile, ReadChoice};
use crate::statistics::{Checks, ReadPath};
use crate::traced::TracedModel;
use crate::{EngineError, gpu, peak_resident_bytes};
#[cfg(feature = "cuda")]
pub(crate) use cufile::CuFileReader;
pub use hold::{HeldTensor, HeldWeights, HoldRequest, hold};
use host::Host;
use limit::Beside;
pub use limit::{DiskReading, LoadLimit};
#[cfg(feature = "cuda")]
pub(crate) use read_back::{name_of, poison, read_back};
pub use request::{CuFileRequests, CuFileUse, DeviceReport, DeviceRequest, ReadBack};
#[cfg(feature = "cuda")]
pub(crate) use ring::{GpuRing, RingRequest, named};

/// What a user may choose about a load.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// Who reads what is not in the page cache. [`IoKind::Auto`] is what the machine profile found
    /// best, else io_uring where it works, else threads; [`IoKind::Mmap`] is the kernel, page by page:
    /// the baseline.
    pub io: IoKind,
    /// Drop the files from the page cache before every run.
    pub cold: bool,
    /// Measure beside the runs what disk, page cache and the way to the device give: for moments, but beside cold runs the
    /// disk for as long as they take.
    pub limit: bool,
    /// Runs; the memory stays resident from the second on.
    pub repeat: usize,
    /// Compare what is read of a pack with its checksums.
    pub verify: bool,
    /// The GPU to load to; host memory without.
    pub device: Option<DeviceRequest>,
    /// Gets every read of the runs, not those that measure the limits.
    pub recorder: Option<IoRecorder>,
    /// Ends the load early.
    pub interrupt: Interrupt,
}

/// One run.
#[derive(Debug, Clone, Serialize)]
pub struct LoadRun {
    /// Bytes of the files that were in the page cache when it began.
    pub cached_before_bytes: u64,
    /// The destination was in memory already: its pages had come with an earlier run.
    pub memory_was_resident: bool,
    #[serde(flatten)]
    pub statistics: LoadStatistics,
    pub bytes_per_second: f64,
    pub cpu_seconds_per_gigabyte: f64,
    /// What the disk gave the plain readings that this run is held against.
    pub disk_bytes_per_second: Option<f64>,
    /// How long disk and page cache need at their limits, working side by side.
    pub limit_seconds: Option<f64>,
    /// `limit_seconds` of `seconds`.
    pub share_of_limit: Option<f64>,
}

/// What `load` did.
#[derive(Debug, Clone, Serialize)]
pub struct LoadReport {
    pub path: PathBuf,
    pub files: usize,
    pub weights_bytes: u64,
    /// Memory reserved for them, whole pages.
    pub arena_bytes: u64,
    pub engine: ReadPath,
    pub checks: Checks,
    pub request_bytes: usize,
    pub queue_depth: usize,
    /// Where engine, request size and depth come from.
    pub chosen_by: String,
    pub limit: LoadLimit,
    pub runs: Vec<LoadRun>,
    /// The GPU that the weights are on; `None` for host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceReport>,
    /// Largest resident set of the process up to the end of the last run.
    pub peak_resident_bytes: Option<u64>,
    /// What a trace of the runs is about; `None` without a recorder.
    #[serde(skip)]
    pub traced: Option<TracedModel>,
}

/// The files for an engine that compares with checksums and for one that does not.
pub(crate) struct Sources {
    checked: FileSet,
    unchecked: FileSet,
    /// For reads that are no part of a run: those that measure and those that compare.
    unrecorded: FileSet,
}

/// What all runs together did.
pub(crate) struct Loaded {
    pub engine: EngineInfo,
    /// Of weights, and of the memory that they get.
    pub bytes: (u64, u64),
    pub runs: Vec<LoadRun>,
    pub device: Option<DeviceReport>,
    /// How cuFile was asked, if it was.
    pub cufile: Option<CuFileRequests>,
    pub peak_resident_bytes: Option<u64>,
}

/// Where weights go.
trait Destination {
    /// Before a run of which nothing may be in the page cache.
    fn before_cold_run(&mut self) -> Result<(), EngineError>;

    /// Brings all weights there, once.
    fn fill(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<LoadStatistics, EngineError>;

    fn engine(&self) -> EngineInfo;

    /// Bytes of weights, and of the memory that they get.
    fn bytes(&self) -> (u64, u64);
}

/// Loads all weights of a model, one or several times. `progress` gets the bytes that are done and
/// those of the model.
///
/// # Errors
/// A model that is damaged or does not fit into memory, a page cache that cannot be dropped, failed
/// reads; [`EngineError::Interrupted`].
pub fn load(
    model: &Path,
    request: &LoadRequest,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<LoadReport, EngineError> {
    let catalog = Catalog::open(model)?;
    let checks = Checks::requested(&catalog, request.verify)?;
    let recorded = |files: FileSet| match &request.recorder {
        Some(recorder) => files.recorded(recorder),
        None => files,
    };
    let files = FileSet::of_catalog(&catalog, request.verify)?;
    let files = recorded(files.interruptible(&request.interrupt));
    // The limits are those of reading alone.
    let unchecked = FileSet::open(&catalog.files)?.interruptible(&request.interrupt);
    let sources = Sources {
        unchecked: recorded(unchecked.clone()),
        unrecorded: unchecked,
        checked: files.clone(),
    };
    let choice = MachineProfile::choice_for(&catalog.root);
    let mut limit = LoadLimit::new(&files, &choice, request.beside());
    let by_hand = request.io != IoKind::Auto
        || request.device.is_some_and(|device| device.cufile == CuFileUse::Always);
    let chosen_by = match by_hand {
        false => choice.chosen_by.clone(),
        true => format!("the command line; request size and depth: {}", choice.chosen_by),
    };
    let (mut request_bytes, mut queue_depth) = (choice.request_bytes, choice.queue_depth);
    let loaded = match request.device {
        None => {
            let mut host = Host::new(&catalog, &sources, request.io, &choice)?;
            let runs = repeat(request, &sources, &mut limit, &mut host, progress)?;
            // Before the page cache is measured, which takes memory of its own.
            let peak_resident_bytes = peak_resident_bytes();
            limit.measure_again(&sources.unrecorded, &runs)?;
            let (engine, bytes) = (host.engine(), host.bytes());
            Loaded { engine, bytes, runs, device: None, cufile: None, peak_resident_bytes }
        }
        Some(wanted) => {
            gpu::load(&catalog, &sources, wanted, request, &choice, &mut limit, progress)?
        }
    };
    let Loaded { engine, bytes, runs, device, cufile, peak_resident_bytes } = loaded;
    if let Some(requests) = cufile {
        (request_bytes, queue_depth) = (requests.request_bytes, requests.threads);
    }
    let runs = runs.into_iter().enumerate();
    let runs = runs.map(|(index, run)| run.against(&limit, index)).collect();
    let traced = request.recorder.as_ref().map(|_| {
        let family = Architecture::from_catalog(&catalog).map_or("", |known| known.family);
        TracedModel::new(&catalog, family, None, &engine)
    });
    Ok(LoadReport {
        path: model.to_path_buf(),
        files: files.len(),
        weights_bytes: bytes.0,
        arena_bytes: bytes.1,
        engine: engine.into(),
        checks,
        request_bytes,
        queue_depth,
        chosen_by,
        limit,
        runs,
        device,
        peak_resident_bytes,
        traced,
    })
}

/// Runs that follow each other, without their limits.
fn repeat(
    request: &LoadRequest,
    sources: &Sources,
    limit: &mut LoadLimit,
    destination: &mut dyn Destination,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<LoadRun>, EngineError> {
    let mut runs = Vec::with_capacity(request.repeat);
    for run in 0..request.repeat {
        request.interrupt.check()?;
        if request.cold {
            destination.before_cold_run()?;
            sources.checked.drop_cached()?;
        }
        let (cached_before_bytes, _) = sources.checked.cached_bytes()?;
        limit.measure_disk(&sources.unrecorded, cached_before_bytes, run)?;
        let mut statistics = destination.fill(progress)?;
        if request.io == IoKind::Mmap {
            // What the page cache had came from there, whichever way asked for it.
            statistics.cached_bytes = cached_before_bytes.min(statistics.bytes);
            statistics.engine_bytes = statistics.bytes - statistics.cached_bytes;
        }
        runs.push(LoadRun {
            cached_before_bytes,
            memory_was_resident: run > 0,
            statistics,
            bytes_per_second: statistics.bytes as f64 / statistics.seconds,
            cpu_seconds_per_gigabyte: statistics.cpu_seconds / (statistics.bytes as f64 * 1e-9),
            disk_bytes_per_second: None,
            limit_seconds: None,
            share_of_limit: None,
        });
    }
    Ok(runs)
}

impl LoadRequest {
    fn beside(&self) -> Beside {
        match (self.limit, self.cold) {
            (false, _) => Beside::Nothing,
            (true, false) => Beside::Short,
            (true, true) => Beside::AsLong,
        }
    }
}

impl LoadRun {
    fn against(self, limit: &LoadLimit, index: usize) -> LoadRun {
        let disk_bytes_per_second = limit.disk_for(index);
        let limit_seconds = limit.seconds(&self.statistics, disk_bytes_per_second);
        let share_of_limit = limit_seconds.map(|least| least / self.statistics.seconds);
        LoadRun { disk_bytes_per_second, limit_seconds, share_of_limit, ..self }
    }
}

/// What is loaded, and its name: the blocks of a pack, the tensors of other containers.
pub(crate) fn contents(catalog: &Catalog) -> Vec<(String, Extent)> {
    match &catalog.pack {
        Some(pack) => {
            let extent = |block: &Block| Extent {
                file: FileIndex(0),
                offset: block.offset,
                length: block.bytes,
            };
            let blocks = pack.chunks.blocks().iter();
            blocks.map(|block| (block.to_string(), extent(block))).collect()
        }
        None => {
            let tensors = catalog.tensors().iter();
            tensors.map(|it| (format!("tensor {}", it.name), it.extent)).collect()
        }
    }
}

impl ReadChoice {
    /// The engine's options for a load, where nobody waits for a single block.
    pub(crate) fn engine_options(&self) -> EngineOptions {
        EngineOptions {
            queue_depth: self.queue_depth,
            background_depth: self.queue_depth,
            request_bytes: self.request_bytes,
            threads: self.queue_depth.clamp(1, 64),
            ..EngineOptions::default()
        }
    }
}
