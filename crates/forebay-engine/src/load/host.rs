//! Weights in host memory. Every block has a slot of its own.

use std::ops::ControlFlow;

use forebay_format::Catalog;
use forebay_store::{
    Arena, BlockLabel, BlockLayout, EngineInfo, FileSet, IoKind, LoadItem, LoadOptions,
    LoadStatistics, Loaded, Loader, ReadEngine, ReadError, SLOT_ALIGNMENT, SlotBuffer, open_engine,
};

use super::{Destination, Sources, contents};
use crate::EngineError;
use crate::doctor::ReadChoice;
use crate::memory::free_bytes;

/// Number of bytes read at a time through a ring.
const PIECE_BYTES: u64 = 1 << 20;

/// Host memory for all weights, and the reader that fills it.
pub(super) struct Host<'a> {
    sources: &'a Sources,
    io: IoKind,
    choice: &'a ReadChoice,
    arena: Arena,
    blocks: Blocks,
    reader: Reader,
}

/// Blocks of weights and their memory.
struct Blocks {
    /// Names of the blocks, indexed by their labels.
    names: Vec<String>,
    layouts: Vec<BlockLayout>,
    buffers: Vec<SlotBuffer>,
}

/// Read engine and its settings.
struct Reader {
    engine: Box<dyn ReadEngine>,
    options: LoadOptions,
    ring: Vec<SlotBuffer>,
}

impl<'a> Host<'a> {
    pub fn new(
        catalog: &Catalog,
        sources: &'a Sources,
        io: IoKind,
        choice: &'a ReadChoice,
    ) -> Result<Host<'a>, EngineError> {
        let arena = Arena::map(arena_bytes(&plan(catalog, &sources.checked))?)?;
        let blocks = Blocks::new(catalog, &sources.checked, &arena)?;
        let reader = Reader::open(io, sources, &arena, choice)?;
        Ok(Host { sources, io, choice, arena, blocks, reader })
    }

    /// Reads all weights into memory once. If `progress` ends the load, the buffers are freed and this cannot be filled
    /// again.
    pub fn fill_while(
        &mut self,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<LoadStatistics, EngineError> {
        let items = self.blocks.items();
        let (loaded, statistics) = self.reader.load(&self.sources.checked, items, progress)?;
        self.blocks.take_back(loaded)?;
        Ok(statistics)
    }

    /// Returns every block's memory and the position of its bytes there, in the order of [`contents`].
    pub fn into_memory(self) -> Vec<(SlotBuffer, BlockLayout)> {
        self.blocks.buffers.into_iter().zip(self.blocks.layouts).collect()
    }
}

impl Destination for Host<'_> {
    fn before_cold_run(&mut self) -> Result<(), EngineError> {
        if self.io == IoKind::Mmap {
            // Pages that a mapping brought into the page cache stay there until the mapping is dropped.
            self.reader = Reader::open(self.io, self.sources, &self.arena, self.choice)?;
        }
        Ok(())
    }

    fn fill(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<LoadStatistics, EngineError> {
        self.fill_while(&mut |done, total| {
            progress(done, total);
            ControlFlow::Continue(())
        })
    }

    fn engine(&self) -> EngineInfo {
        self.reader.engine.describe()
    }

    fn bytes(&self) -> (u64, u64) {
        let weights = self.blocks.layouts.iter().map(BlockLayout::wanted_bytes).sum();
        (weights, self.arena.bytes() as u64)
    }
}

fn plan(catalog: &Catalog, files: &FileSet) -> Vec<(String, BlockLayout)> {
    let layout = |(name, extent)| (name, files.plan(&[extent], SLOT_ALIGNMENT));
    contents(catalog).into_iter().map(layout).collect()
}

/// Returns the bytes of memory for all weights, or an error if that much is not free.
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

/// Reserves a ring to read into, of the size that the machine profile recommends (possibly empty).
fn ring_of(choice: &ReadChoice) -> Result<(Arena, Vec<SlotBuffer>), EngineError> {
    // A slot has extra room because a piece that is a whole block may have unaligned ends.
    let slot_bytes = PIECE_BYTES as usize + 2 * SLOT_ALIGNMENT;
    let slots = choice.staging_bytes / PIECE_BYTES as usize;
    let arena = Arena::reserve(slots * slot_bytes)?;
    let ring = (0..slots).map(|_| arena.carve(slot_bytes)).collect::<Result<_, _>>()?;
    Ok((arena, ring))
}

impl Reader {
    /// Opens the read engine, and a ring if the profile recommends one.
    fn open(
        io: IoKind,
        sources: &Sources,
        arena: &Arena,
        choice: &ReadChoice,
    ) -> Result<Reader, EngineError> {
        let kind = if io == IoKind::Auto { choice.kind } else { io };
        // With a mapping the kernel does the reading, so a ring would only be a detour.
        let (ring_arena, ring) = match kind {
            IoKind::Mmap => (Arena::reserve(0)?, Vec::new()),
            _ => ring_of(choice)?,
        };
        // With a ring, the loader verifies checksums as it copies out of the ring, where that is nearly free.
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
        Ok(Reader { engine, options, ring })
    }

    fn load(
        &mut self,
        files: &FileSet,
        items: Vec<LoadItem>,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(Vec<Loaded>, LoadStatistics), EngineError> {
        let (engine, options, ring) = (self.engine.as_mut(), self.options, &mut self.ring);
        Ok(Loader { engine, files, options, ring }.load_while(items, progress)?)
    }
}
