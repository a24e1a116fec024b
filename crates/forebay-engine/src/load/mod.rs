//! Bringing all weights of a model into host memory, and how fast that was against what disk and
//! page cache give.

mod limit;

use std::path::{Path, PathBuf};

use forebay_format::Catalog;
use forebay_format::pack::Block;
use forebay_model::Architecture;
use forebay_store::{
    Arena, BlockLabel, BlockLayout, EngineOptions, Extent, FileIndex, FileSet, IoKind, IoRecorder,
    LoadItem, LoadOptions, LoadStatistics, Loaded, Loader, ReadEngine, ReadError, SLOT_ALIGNMENT,
    SlotBuffer, open_engine,
};
use serde::Serialize;

use crate::doctor::{MachineProfile, ReadChoice};
use crate::memory::free_bytes;
use crate::statistics::{Checks, ReadPath};
use crate::trace_io::TraceHeader;
use crate::{EngineError, peak_resident_bytes};
pub use limit::LoadLimit;

/// What is read at a time through a ring.
const PIECE_BYTES: u64 = 1 << 20;

/// What a user may choose about a load.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    /// Who reads what is not in the page cache. [`IoKind::Auto`] is what the machine profile found
    /// best, else io_uring where it works, else threads; [`IoKind::Mmap`] is the kernel, page by page:
    /// the baseline.
    pub io: IoKind,
    /// Drop the files from the page cache before every run.
    pub cold: bool,
    /// Runs; the memory stays resident from the second on.
    pub repeat: usize,
    /// Compare what is read of a pack with its checksums.
    pub verify: bool,
    /// Gets every read of the runs, not those that measure the limits.
    pub recorder: Option<IoRecorder>,
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
    pub peak_resident_bytes: Option<u64>,
    /// What a trace of the runs is about; `None` without a recorder.
    #[serde(skip)]
    pub trace_header: Option<TraceHeader>,
}

/// The weights and their places in memory.
struct Blocks {
    /// What each is, by their labels.
    names: Vec<String>,
    layouts: Vec<BlockLayout>,
    buffers: Vec<SlotBuffer>,
}

/// The files for an engine that compares with checksums and for one that does not.
struct Sources {
    checked: FileSet,
    unchecked: FileSet,
}

/// How blocks are read.
struct Reader {
    engine: Box<dyn ReadEngine>,
    options: LoadOptions,
    ring: Vec<SlotBuffer>,
}

/// Loads all weights of a model, one or several times. `progress` gets the bytes that are done and
/// those of the model.
///
/// # Errors
/// A model that is damaged or does not fit into memory, a page cache that cannot be dropped, failed
/// reads.
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
    let files = recorded(FileSet::of_catalog(&catalog, request.verify)?);
    // The limits are those of reading alone.
    let unchecked = FileSet::open(&catalog.files)?;
    let sources = Sources { unchecked: recorded(unchecked.clone()), checked: files.clone() };
    let choice = MachineProfile::choice_for(&catalog.root);
    let arena = Arena::map(arena_bytes(&plan(&catalog, &files))?)?;
    let mut blocks = Blocks::new(&catalog, &files, &arena)?;
    let (mut reader, chosen_by) = Reader::open(request.io, &sources, &arena, &choice)?;
    let mut limit = LoadLimit::new(&files, &choice);
    let mut runs = Vec::with_capacity(request.repeat);
    for run in 0..request.repeat {
        if request.cold {
            if request.io == IoKind::Mmap {
                // What a mapping brought into the page cache stays there until it is gone.
                (reader, _) = Reader::open(request.io, &sources, &arena, &choice)?;
            }
            files.drop_cached()?;
        }
        let (cached_before_bytes, _) = files.cached_bytes()?;
        limit.measure_disk(&unchecked, cached_before_bytes)?;
        let (loaded, mut statistics) = reader.load(&files, blocks.items(), progress)?;
        if request.io == IoKind::Mmap {
            // What the page cache had came from there, whoever asked for it.
            statistics.cached_bytes = cached_before_bytes.min(statistics.bytes);
            statistics.engine_bytes = statistics.bytes - statistics.cached_bytes;
        }
        blocks.take_back(loaded)?;
        runs.push(LoadRun {
            cached_before_bytes,
            memory_was_resident: run > 0,
            statistics,
            bytes_per_second: statistics.bytes as f64 / statistics.seconds,
            cpu_seconds_per_gigabyte: statistics.cpu_seconds / (statistics.bytes as f64 * 1e-9),
            limit_seconds: None,
            share_of_limit: None,
        });
    }
    limit.measure_disk(&unchecked, files.cached_bytes()?.0)?;
    if runs.iter().any(|run| run.statistics.cached_bytes > 0) {
        limit.measure_copies(&unchecked)?;
    }
    for run in &mut runs {
        run.limit_seconds = limit.seconds(&run.statistics);
        run.share_of_limit = run.limit_seconds.map(|least| least / run.statistics.seconds);
    }
    let trace_header = request.recorder.as_ref().map(|_| {
        let family = Architecture::from_catalog(&catalog).map_or("", |known| known.family);
        TraceHeader::new(&catalog, family, None, &reader.engine.describe())
    });
    Ok(LoadReport {
        path: model.to_path_buf(),
        files: files.len(),
        weights_bytes: blocks.layouts.iter().map(BlockLayout::wanted_bytes).sum(),
        arena_bytes: arena.bytes() as u64,
        engine: reader.engine.describe().into(),
        checks,
        request_bytes: choice.request_bytes,
        queue_depth: choice.queue_depth,
        chosen_by,
        limit,
        runs,
        peak_resident_bytes: peak_resident_bytes(),
        trace_header,
    })
}

/// What is loaded, and its name: the blocks of a pack, the tensors of other containers.
fn plan(catalog: &Catalog, files: &FileSet) -> Vec<(String, BlockLayout)> {
    let layout = |extent: Extent| files.plan(&[extent], SLOT_ALIGNMENT);
    match &catalog.pack {
        Some(pack) => {
            let extent = |block: &Block| Extent {
                file: FileIndex(0),
                offset: block.offset,
                length: block.bytes,
            };
            let blocks = pack.chunks.blocks().iter();
            blocks.map(|block| (block.to_string(), layout(extent(block)))).collect()
        }
        None => {
            let tensors = catalog.tensors().iter();
            tensors.map(|it| (format!("tensor {}", it.name), layout(it.extent))).collect()
        }
    }
}

/// Memory for all weights, if there is so much.
fn arena_bytes(plan: &[(String, BlockLayout)]) -> Result<usize, EngineError> {
    let needed = plan.iter().fold(0_u64, |sum, it| sum.saturating_add(it.1.slot_bytes as u64));
    let free = free_bytes();
    match usize::try_from(needed) {
        Ok(bytes) if needed <= free => Ok(bytes),
        _ => Err(EngineError::DoesNotFit { needed_bytes: needed, free_bytes: free }),
    }
}

impl Blocks {
    fn new(catalog: &Catalog, files: &FileSet, arena: &Arena) -> Result<Blocks, EngineError> {
        let (names, layouts): (_, Vec<BlockLayout>) = plan(catalog, files).into_iter().unzip();
        let carve = |layout: &BlockLayout| arena.carve(layout.slot_bytes);
        Ok(Blocks { names, buffers: layouts.iter().map(carve).collect::<Result<_, _>>()?, layouts })
    }

    fn items(&mut self) -> Vec<LoadItem> {
        let buffers = self.buffers.drain(..).zip(&self.layouts).enumerate();
        let item = |(index, (buffer, layout)): (usize, (SlotBuffer, &BlockLayout))| LoadItem {
            label: BlockLabel::Other(index as u64),
            layout: layout.clone(),
            buffer,
        };
        buffers.map(item).collect()
    }

    fn take_back(&mut self, loaded: Vec<Loaded>) -> Result<(), EngineError> {
        let mut failure: Option<(usize, ReadError)> = None;
        for (index, loaded) in loaded.into_iter().enumerate() {
            self.buffers.extend(loaded.buffer);
            let Err(error) = loaded.result else { continue };
            let only_followed = matches!(failure, Some((_, ReadError::Cancelled { .. })) | None);
            if only_followed {
                failure = Some((index, error));
            }
        }
        failure.map_or(Ok(()), |(index, cause)| {
            Err(EngineError::Load { place: self.names[index].clone(), cause })
        })
    }
}

/// Memory to read into where the profile says that it pays.
fn ring_of(choice: &ReadChoice) -> Result<(Arena, Vec<SlotBuffer>), EngineError> {
    // A piece that is a whole block has a slot with room for unaligned ends.
    let slot_bytes = PIECE_BYTES as usize + 2 * SLOT_ALIGNMENT;
    let slots = choice.staging_bytes / PIECE_BYTES as usize;
    let arena = Arena::reserve(slots * slot_bytes)?;
    let ring = (0..slots).map(|_| arena.carve(slot_bytes)).collect::<Result<_, _>>()?;
    Ok((arena, ring))
}

impl Reader {
    /// Opens what reads, and says who chose it.
    fn open(
        io: IoKind,
        sources: &Sources,
        arena: &Arena,
        choice: &ReadChoice,
    ) -> Result<(Reader, String), EngineError> {
        let kind = if io == IoKind::Auto { choice.kind } else { io };
        // What others do has no detours.
        let (ring_arena, ring) = match kind {
            IoKind::Mmap => (Arena::reserve(0)?, Vec::new()),
            _ => ring_of(choice)?,
        };
        // The loader compares on the way out of the ring, where that is nearly free.
        let (target, files) = match ring.is_empty() {
            true => (arena, &sources.checked),
            false => (&ring_arena, &sources.unchecked),
        };
        let engine = open_engine(kind, files, target, &choice.engine_options())?;
        let depth_bytes = (choice.queue_depth * choice.request_bytes) as u64;
        let mut options =
            LoadOptions { engine_bytes: depth_bytes + (8 << 20), ..LoadOptions::default() };
        if kind == IoKind::Mmap {
            options.copy_threads = 0;
        }
        if !ring.is_empty() {
            options.piece_bytes = PIECE_BYTES;
        }
        let chosen_by = match io {
            IoKind::Auto => choice.chosen_by.clone(),
            _ => format!("the command line; request size and depth: {}", choice.chosen_by),
        };
        Ok((Reader { engine, options, ring }, chosen_by))
    }

    fn load(
        &mut self,
        files: &FileSet,
        items: Vec<LoadItem>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(Vec<Loaded>, LoadStatistics), EngineError> {
        let (engine, options, ring) = (self.engine.as_mut(), self.options, &mut self.ring);
        Ok(Loader { engine, files, options, ring }.load(items, progress)?)
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
