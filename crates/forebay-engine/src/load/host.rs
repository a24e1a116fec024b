//! Weights in host memory. Every block has a slot of its own.

use std::ops::ControlFlow;
use std::time::Instant;

use forebay_format::{Catalog, TensorInfo};
use forebay_store::{
    Arena, BlockLabel, BlockLayout, EngineInfo, Extent, FileSet, IoKind, LoadItem, LoadOptions,
    LoadStatistics, Loaded, Loader, Part, ReadEngine, ReadError, SLOT_ALIGNMENT, SlotBuffer,
    open_engine,
};

use super::expansion::{Expansion, expand_all, expansions};
use super::hold::DEVICE_ALIGNMENT;
use super::{Destination, Sources, contents};
use crate::doctor::ReadChoice;
use crate::load::error::LoadError;
use crate::memory::DoesNotFit;
use crate::memory::free_bytes;

/// Number of bytes read at a time through a ring.
const PIECE_BYTES: u64 = 1 << 20;

/// Host memory for all weights, and the reader that fills it.
pub(super) struct Host<'a> {
    catalog: &'a Catalog,
    sources: &'a Sources,
    io: IoKind,
    choice: &'a ReadChoice,
    arena: Arena,
    blocks: Blocks,
    reader: Reader,
}

/// Blocks of weights and their memory.
struct Blocks {
    planned: Vec<PlannedBlock>,
    buffers: Vec<SlotBuffer>,
}

/// A block of weights; its label is its index.
struct PlannedBlock {
    name: String,
    extent: Extent,
    layout: BlockLayout,
    /// What becomes of the block after it was read, if it has compact tensors that are to be decoded.
    expansion: Option<Expansion>,
}

/// Read engine and its settings.
pub(super) struct Reader {
    engine: Box<dyn ReadEngine>,
    options: LoadOptions,
    ring: Vec<SlotBuffer>,
}

impl<'a> Host<'a> {
    /// Reserves memory for all weights, or for the blocks of a pack that hold some of the tensors `only`. Compact ones
    /// become BF16 if `decode` is true.
    pub fn new(
        catalog: &'a Catalog,
        only: Option<&[TensorInfo]>,
        sources: &'a Sources,
        io: IoKind,
        choice: &'a ReadChoice,
        decode: bool,
    ) -> Result<Host<'a>, LoadError> {
        let mut planned = plan(catalog, &sources.checked, decode);
        if let Some(only) = only {
            keep_blocks_of(only, &mut planned);
        }
        let arena = Arena::map(arena_bytes(&planned)?)?;
        let blocks = Blocks::new(planned, &arena)?;
        let reader = Reader::open(io, sources, &arena, choice)?;
        Ok(Host { catalog, sources, io, choice, arena, blocks, reader })
    }

    /// Reads all weights into memory once. If `progress` ends the load, the buffers are freed and this cannot be filled
    /// again.
    pub fn fill_while(
        &mut self,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<LoadStatistics, LoadError> {
        let items = self.blocks.items();
        let (loaded, mut statistics) = self.reader.load(&self.sources.checked, items, progress)?;
        self.blocks.take_back(loaded)?;
        let started = Instant::now();
        let expanded = self.blocks.expand();
        expanded.map_err(|tensor| self.catalog.damaged(tensor))?;
        statistics.seconds += started.elapsed().as_secs_f64();
        Ok(statistics)
    }

    /// Returns all memory, and the extents with their addresses there.
    pub fn into_memory(self) -> (Vec<SlotBuffer>, Vec<(Extent, u64)>) {
        let Blocks { planned, mut buffers } = self.blocks;
        let mut places = Vec::new();
        for (block, buffer) in planned.iter().zip(&mut buffers) {
            let first = buffer.as_mut_slice().as_mut_ptr().expose_provenance() as u64;
            match &block.expansion {
                Some(expansion) => {
                    places.extend(expansion.places().map(|(of, at)| (of, first + at as u64)));
                }
                None => places.push((block.extent, first + block.at() as u64)),
            }
        }
        (buffers, places)
    }

    /// Moves every tensor to an address that is aligned for its elements, in files other than packs, whose tensors are the blocks. A read
    /// without a copy leaves a tensor at its offset in the file, which is nearly always aligned already.
    pub fn align(&mut self) {
        let blocks = self.blocks.planned.iter_mut().zip(&mut self.blocks.buffers);
        for (tensor, (block, slot)) in self.catalog.tensors().iter().zip(blocks) {
            let Some(part) = block.layout.parts.first().copied() else { continue };
            if tensor.ty.is_quantized() || part.at.is_multiple_of(tensor.ty.block_bytes()) {
                continue;
            }
            let to = part.at / DEVICE_ALIGNMENT as usize * DEVICE_ALIGNMENT as usize;
            let bytes = part.at..part.at + part.extent.length as usize;
            slot.as_mut_slice().copy_within(bytes, to);
            block.layout.parts = [Part { at: to, ..part }].into();
        }
    }
}

impl Destination for Host<'_> {
    fn before_cold_run(&mut self) -> Result<(), LoadError> {
        if self.io == IoKind::Mmap {
            // Pages that a mapping brought into the page cache stay there until the mapping is dropped.
            self.reader = Reader::open(self.io, self.sources, &self.arena, self.choice)?;
        }
        Ok(())
    }

    fn fill(&mut self, progress: &mut dyn FnMut(u64, u64)) -> Result<LoadStatistics, LoadError> {
        self.fill_while(&mut |done, total| {
            progress(done, total);
            ControlFlow::Continue(())
        })
    }

    fn engine(&self) -> EngineInfo {
        self.reader.engine.describe()
    }

    fn bytes(&self) -> (u64, u64) {
        let weights = self.blocks.planned.iter().map(|block| block.layout.wanted_bytes()).sum();
        (weights, self.arena.bytes() as u64)
    }
}

/// Removes the blocks of a pack that hold no part of a tensor in `wanted`.
fn keep_blocks_of(wanted: &[TensorInfo], planned: &mut Vec<PlannedBlock>) {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for extent in wanted.iter().flat_map(TensorInfo::extents) {
        ranges.push((extent.offset, extent.end()));
    }
    ranges.sort_unstable();
    // Extents of tensors do not overlap, so their ends ascend, too.
    planned.retain(|block| {
        let next = ranges.partition_point(|&(_, end)| end <= block.extent.offset);
        ranges.get(next).is_some_and(|&(start, _)| start < block.extent.end())
    });
}

fn plan(catalog: &Catalog, files: &FileSet, decode: bool) -> Vec<PlannedBlock> {
    let contents = contents(catalog);
    let expansions = match &catalog.pack {
        Some(pack) if decode => expansions(catalog, pack.chunks.blocks()),
        _ => contents.iter().map(|_| None).collect(),
    };
    let block = |((name, extent), expansion): ((String, Extent), Option<Expansion>)| {
        let layout = files.plan(&[extent], SLOT_ALIGNMENT);
        let shift = expansion.as_ref().map_or(0, |expansion| expansion.shift);
        PlannedBlock { name, extent, layout: layout.moved(shift), expansion }
    };
    contents.into_iter().zip(expansions).map(block).collect()
}

/// Returns the bytes of memory for all weights, or an error if that much is not free.
fn arena_bytes(planned: &[PlannedBlock]) -> Result<usize, LoadError> {
    let slots = planned.iter().map(|block| block.layout.slot_bytes as u64);
    let needed = slots.fold(0_u64, u64::saturating_add);
    let free = free_bytes();
    match usize::try_from(needed) {
        Ok(bytes) if needed <= free => Ok(bytes),
        _ => Err(DoesNotFit { needed_bytes: needed, free_bytes: free }.into()),
    }
}

impl PlannedBlock {
    /// Returns the offset in the slot at which the block's bytes are read.
    fn at(&self) -> usize {
        self.layout.parts.first().map_or(0, |part| part.at)
    }
}

impl Blocks {
    fn new(planned: Vec<PlannedBlock>, arena: &Arena) -> Result<Blocks, LoadError> {
        let carve = |block: &PlannedBlock| arena.carve(block.layout.slot_bytes);
        Ok(Blocks { buffers: planned.iter().map(carve).collect::<Result<_, _>>()?, planned })
    }

    fn items(&mut self) -> Vec<LoadItem> {
        let buffers = self.buffers.drain(..).zip(&self.planned).enumerate();
        let item = |(index, (buffer, block)): (usize, (SlotBuffer, &PlannedBlock))| LoadItem {
            label: BlockLabel::Other(index as u64),
            layout: block.layout.clone(),
            buffer,
        };
        buffers.map(item).collect()
    }

    /// Decodes compact tensors. Returns the index of a damaged one as an error.
    fn expand(&mut self) -> Result<(), usize> {
        let blocks = self.planned.iter().zip(&mut self.buffers);
        let with_expansion = blocks.filter_map(|(block, buffer)| {
            let expansion = block.expansion.as_ref()?;
            Some((expansion, buffer.as_mut_slice(), block.at()))
        });
        expand_all(with_expansion.collect())
    }

    fn take_back(&mut self, loaded: Vec<Loaded>) -> Result<(), LoadError> {
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
            Err(LoadError::Read { place: self.planned[index].name.clone(), cause })
        })
    }
}

/// Reserves a ring to read into, of the size that the machine profile recommends (possibly empty).
fn ring_of(choice: &ReadChoice) -> Result<(Arena, Vec<SlotBuffer>), LoadError> {
    // A slot has extra room because a piece that is a whole block may have unaligned ends.
    let slot_bytes = PIECE_BYTES as usize + 2 * SLOT_ALIGNMENT;
    let slots = choice.staging_bytes / PIECE_BYTES as usize;
    let arena = Arena::reserve(slots * slot_bytes)?;
    let ring = (0..slots).map(|_| arena.carve(slot_bytes)).collect::<Result<_, _>>()?;
    Ok((arena, ring))
}

impl Reader {
    /// Opens the read engine, and a ring if the profile recommends one.
    pub(super) fn open(
        io: IoKind,
        sources: &Sources,
        arena: &Arena,
        choice: &ReadChoice,
    ) -> Result<Reader, LoadError> {
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
        let depth_bytes = files.remote_bytes().unwrap_or(depth_bytes);
        let mut options =
            LoadOptions { engine_bytes: depth_bytes + (8 << 20), ..LoadOptions::default() };
        if kind == IoKind::Mmap || files.is_remote() {
            options.copy_threads = 0;
        }
        if !ring.is_empty() {
            options.piece_bytes = PIECE_BYTES;
        }
        Ok(Reader { engine, options, ring })
    }

    pub(super) fn load(
        &mut self,
        files: &FileSet,
        items: Vec<LoadItem>,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<(Vec<Loaded>, LoadStatistics), LoadError> {
        let (engine, options, ring) = (self.engine.as_mut(), self.options, &mut self.ring);
        Ok(Loader { engine, files, options, ring }.load_while(items, progress)?)
    }
}
