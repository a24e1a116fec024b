//! Loads all weights of a model into the memory of the host or of a GPU. It compares the speed with the limits of the
//! disk, the page cache and the bus to the device.

mod chosen;
#[cfg(feature = "cuda")]
mod cufile;
#[cfg(feature = "cuda")]
pub(crate) mod device;
mod error;
mod expansion;
#[cfg(feature = "cuda")]
mod gpu_decoding;
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
use forebay_options::{BadOption, OptionName};
use forebay_store::{
    EngineInfo, EngineOptions, Extent, FileIndex, FileSet, Interrupt, IoKind, IoRecorder,
    LoadStatistics, Storage,
};
use serde::Serialize;

use crate::doctor::{MachineProfile, ReadChoice};
use crate::statistics::{Checks, ReadPath};
use crate::traced::TracedModel;
use crate::{gpu, peak_resident_bytes};
#[cfg(not(feature = "cuda"))]
pub(crate) use chosen::ChosenPlan;
#[cfg(feature = "cuda")]
pub(crate) use chosen::hold_chosen;
pub use chosen::{
    Choice, ChosenRequest, DimensionSlice, LoadedTensor, Next, StreamOrder, TensorMemory,
    TensorStream, load_chosen,
};
#[cfg(feature = "cuda")]
pub(crate) use cufile::CuFileReader;
pub use error::LoadError;
pub use hold::{HeldTensor, HeldWeights, HoldRequest, hold};
use host::Host;
use limit::Beside;
pub use limit::{DiskReading, LoadLimit};
#[cfg(feature = "cuda")]
pub(crate) use read_back::{as_read, name_of, poison, read_back};
pub use request::{CuFileRequests, CuFileUse, DecodedBy, DeviceReport, DeviceRequest, ReadBack};
#[cfg(feature = "cuda")]
pub(crate) use ring::{GpuRing, RingMemory, RingRequest, named};

/// Options of a load that a user may choose.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// Read engine for data that is not in the page cache. [`IoKind::Auto`] means the engine that the machine profile
    /// found best. Without a profile it means io_uring if that works, otherwise threads. [`IoKind::Mmap`] is the
    /// baseline: the kernel reads page by page.
    pub io: IoKind,
    /// True if the files are dropped from the page cache before every run.
    pub cold: bool,
    /// True if the limits of the disk, the page cache and the bus to the device are measured between the runs. Each
    /// measurement is short, except that beside cold runs the disk is measured for as long as a run takes.
    pub limit: bool,
    /// Number of runs. The memory is resident from the second run on.
    pub repeat: usize,
    /// True if blocks of a pack are verified against their checksums.
    pub verify: bool,
    /// True if compact weights of a pack are decoded to BF16, as part of every run. Sessions use them as they are.
    pub decode: bool,
    /// GPU to load to. `None` means host memory.
    pub device: Option<DeviceRequest>,
    /// Recorder of every read of the runs. Reads that measure the limits are not recorded.
    pub recorder: Option<IoRecorder>,
    /// Interrupt that ends the load early.
    pub interrupt: Interrupt,
}

/// Results of one run.
#[derive(Debug, Clone, Serialize)]
pub struct LoadRun {
    /// Bytes of the files that were in the page cache when the run began.
    pub cached_before_bytes: u64,
    /// True if the destination was resident because an earlier run had touched its pages.
    pub memory_was_resident: bool,
    #[serde(flatten)]
    pub statistics: LoadStatistics,
    pub bytes_per_second: f64,
    pub cpu_seconds_per_gigabyte: f64,
    /// Disk rate of the plain readings that this run is compared with.
    pub disk_bytes_per_second: Option<f64>,
    /// Seconds that the disk and the page cache would need at their limits, working side by side. A run that needed less
    /// is its own limit.
    pub limit_seconds: Option<f64>,
    /// Ratio of `limit_seconds` to the run's seconds, at most 1.
    pub share_of_limit: Option<f64>,
    /// True if the run was faster than the readings beside it allow. The disk's rate has then changed in between.
    pub faster_than_readings: bool,
}

/// Report of [`load`].
#[derive(Debug, Clone, Serialize)]
pub struct LoadReport {
    pub path: PathBuf,
    pub files: usize,
    pub weights_bytes: u64,
    /// Bytes of memory reserved for the weights, in whole pages.
    pub arena_bytes: u64,
    pub engine: ReadPath,
    pub checks: Checks,
    pub request_bytes: usize,
    pub queue_depth: usize,
    /// Source of the engine, the request size and the queue depth.
    pub chosen_by: String,
    pub limit: LoadLimit,
    pub runs: Vec<LoadRun>,
    /// GPU that the weights are on. `None` means host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceReport>,
    /// Largest resident set of the process up to the end of the last run.
    pub peak_resident_bytes: Option<u64>,
    /// Model that a trace of the runs is about. `None` without a recorder.
    #[serde(skip)]
    pub traced: Option<TracedModel>,
}

/// Files of a load, in variants for different readers.
pub(crate) struct Sources {
    /// Files for an engine that verifies checksums.
    checked: FileSet,
    /// Files for an engine that does not verify checksums.
    unchecked: FileSet,
    /// Files for comparisons after a run.
    unrecorded: FileSet,
    /// Files whose bytes are not decoded, for measurements.
    as_stored: FileSet,
}

impl Sources {
    /// Opens the files of a model.
    fn open(
        storage: &Storage,
        catalog: &Catalog,
        verify: bool,
        interrupt: Option<&Interrupt>,
        recorder: Option<&IoRecorder>,
    ) -> Result<Sources, LoadError> {
        let interruptible = |files: FileSet| match interrupt {
            Some(interrupt) => files.interruptible(interrupt),
            None => files,
        };
        let recorded = |files: FileSet| match recorder {
            Some(recorder) => files.recorded(recorder),
            None => files,
        };
        let checked = interruptible(FileSet::of_catalog_in(storage, catalog, verify)?);
        let unrecorded = interruptible(FileSet::of_catalog_in(storage, catalog, false)?);
        let as_stored = interruptible(FileSet::open_in(storage, &catalog.files)?);
        // An engine that decodes must verify, because only it sees the bytes that have checksums.
        let unchecked = if checked.is_coded() { checked.clone() } else { as_stored.clone() };
        let (checked, unchecked) = (recorded(checked), recorded(unchecked));
        Ok(Sources { checked, unchecked, unrecorded, as_stored })
    }
}

impl Sources {
    /// Opens files that are no pack.
    fn of_files(
        storage: &Storage,
        files: &[PathBuf],
        interrupt: Option<&Interrupt>,
        recorder: Option<&IoRecorder>,
    ) -> Result<Sources, LoadError> {
        let mut unrecorded = FileSet::open_in(storage, files)?;
        if let Some(interrupt) = interrupt {
            unrecorded = unrecorded.interruptible(interrupt);
        }
        let mut recorded = unrecorded.clone();
        if let Some(recorder) = recorder {
            recorded = recorded.recorded(recorder);
        }
        let as_stored = unrecorded.clone();
        Ok(Sources { checked: recorded.clone(), unchecked: recorded, unrecorded, as_stored })
    }
}

/// Results of all runs together.
pub(crate) struct Loaded {
    pub engine: EngineInfo,
    /// Bytes of the weights, and of the memory reserved for them.
    pub bytes: (u64, u64),
    pub runs: Vec<LoadRun>,
    pub device: Option<DeviceReport>,
    /// Requests to cuFile, if it was used.
    pub cufile: Option<CuFileRequests>,
    pub peak_resident_bytes: Option<u64>,
}

/// Memory that weights are loaded into.
trait Destination {
    /// Prepares for a run that must find nothing in the page cache.
    fn before_cold_run(&mut self) -> Result<(), LoadError>;

    /// Loads all weights once.
    fn fill(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<LoadStatistics, LoadError>;

    fn engine(&self) -> EngineInfo;

    /// Returns the bytes of the weights, and of the memory reserved for them.
    fn bytes(&self) -> (u64, u64);
}

/// Loads all weights of a model, once or several times. `progress` is called with the bytes that are done and the bytes
/// in total.
///
/// # Errors
/// Returns an error if the model is damaged or does not fit into memory, if the page cache cannot be dropped, or if a
/// read fails. Returns [`LoadError::Interrupted`] if the load was interrupted.
pub fn load(
    model: &Path,
    request: &LoadRequest,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<LoadReport, LoadError> {
    let catalog = Catalog::open(model)?;
    let checks = Checks::requested(&catalog, request.verify)?;
    if request.decode && catalog.tensors().iter().all(|tensor| tensor.ty.compact().is_none()) {
        return Err(LoadError::Option(BadOption {
            name: OptionName::Decode,
            value: "on".into(),
            expected: format!("{} has no compact weights", model.display()),
        }));
    }
    let (interrupt, recorder) = (Some(&request.interrupt), request.recorder.as_ref());
    let sources = Sources::open(&Storage::Disk, &catalog, request.verify, interrupt, recorder)?;
    let files = sources.checked.clone();
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
            let mut host =
                Host::new(&catalog, None, &sources, request.io, &choice, request.decode)?;
            let runs = repeat(request, &sources, &mut limit, &mut host, progress)?;
            // Taken before the page cache is measured, because that needs memory of its own.
            let peak_resident_bytes = peak_resident_bytes();
            limit.measure_again(&sources.as_stored, &runs)?;
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

/// Performs all runs. Their limits are filled in later.
fn repeat(
    request: &LoadRequest,
    sources: &Sources,
    limit: &mut LoadLimit,
    destination: &mut dyn Destination,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<LoadRun>, LoadError> {
    let mut runs = Vec::with_capacity(request.repeat);
    for run in 0..request.repeat {
        forebay_store::reached("load begun");
        request.interrupt.check()?;
        if request.cold {
            destination.before_cold_run()?;
            sources.checked.drop_cached()?;
        }
        let (cached_before_bytes, _) = sources.checked.cached_bytes()?;
        limit.measure_disk(&sources.as_stored, cached_before_bytes, run)?;
        let mut statistics = destination.fill(progress)?;
        if request.io == IoKind::Mmap {
            // With a mapping, bytes that were in the page cache came from there, whichever component asked for them.
            let stored_bytes = statistics.engine_stored_bytes + statistics.cached_stored_bytes;
            statistics.cached_stored_bytes = cached_before_bytes.min(stored_bytes);
            statistics.engine_stored_bytes = stored_bytes - statistics.cached_stored_bytes;
            let share = statistics.cached_stored_bytes as f64 / stored_bytes.max(1) as f64;
            statistics.cached_bytes = (statistics.bytes as f64 * share) as u64;
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
            faster_than_readings: false,
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
        let seconds = self.statistics.seconds;
        let by_readings = limit.seconds(&self.statistics, disk_bytes_per_second);
        let limit_seconds = by_readings.map(|least| least.min(seconds));
        let share_of_limit = limit_seconds.map(|least| least / seconds);
        let faster_than_readings = by_readings.is_some_and(|least| least > seconds);
        LoadRun {
            disk_bytes_per_second,
            limit_seconds,
            share_of_limit,
            faster_than_readings,
            ..self
        }
    }
}

/// Returns the names and extents of what is loaded: the blocks of a pack, or the tensors of other files.
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

/// Bytes of a read of an object. The device joins reads to larger requests.
#[cfg(feature = "objects")]
const OBJECT_READ_BYTES: usize = 2 << 20;

impl ReadChoice {
    /// Returns the settings for files in this place. Those on a disk are in `folder`.
    fn for_files(storage: &Storage, folder: &Path) -> ReadChoice {
        match storage {
            Storage::Disk => MachineProfile::choice_for(folder),
            #[cfg(feature = "objects")]
            Storage::Objects(_) => ReadChoice {
                kind: IoKind::Auto,
                request_bytes: OBJECT_READ_BYTES,
                // Many tensors are small. `FileSet::remote_bytes` limits the bytes.
                queue_depth: 4096,
                staging_bytes: 0,
                cufile: None,
                chosen_by: "the options of the store".to_owned(),
            },
        }
    }

    /// Returns the engine's options for a load, where no caller waits for a single block.
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
