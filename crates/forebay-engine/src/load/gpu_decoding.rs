//! Decodes coded blocks on the GPU while they are loaded: their bytes in the file go through pinned memory to memory of the GPU, and a kernel
//! decodes them to their place.

use std::ops::Range;

use forebay_codec::{Codec, Container};
use forebay_cuda::{
    CodedContainer, CodedStream, CodedStreams, ContainerDecoder, CopyStream, DeviceMemory,
    DevicePtr, GdeflateDecoder, Gpu,
};
use forebay_format::TensorType;
use forebay_format::pack::Chunk;
use forebay_store::{Extent, FileSet, SlotBuffer, UploadCopy, UploadError, UploadPart};

use super::read_back::place_in;
use crate::load::error::LoadError;

/// Parts whose blocks the GPU decodes are said to go to this plus their offset in the file.
const CODED: u64 = 1 << 63;
/// Alignment of chunks in the file, and of what they decode to, that kernels need.
const ALIGNMENT: u64 = 16;

/// Most bytes that describe a chunk to kernels.
const DESCRIPTION_BYTES: usize = STREAM_BYTES;
const STREAM_BYTES: usize = 8 * CodedStream::WORDS;
const _: () = assert!(CodedContainer::DESCRIPTION_BYTES <= DESCRIPTION_BYTES);

/// A chunk of the file, and where its bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PlacedChunk {
    chunk: Chunk,
    /// Address of the first byte after decoding.
    to: u64,
    /// Number of bytes after decoding that belong to the part. Those of padding behind it do not.
    wanted: usize,
}

/// Parts of a load in terms of the file itself, with the chunks that the GPU decodes.
#[derive(Debug)]
pub(super) struct CodedParts {
    pub parts: Vec<UploadPart>,
    /// The chunks in the order of the file.
    chunks: Vec<PlacedChunk>,
    /// Bytes of all parts after decoding.
    pub decoded_bytes: u64,
}

impl CodedParts {
    /// Returns the parts of a load from `files` if the GPU is to decode all their blocks: none is coded with `zstd`, which CPUs decode faster
    /// because few chunks are in the ring at a time, no part begins or ends inside of a coded chunk, and there is something to decode.
    pub fn new(files: &FileSet, parts: &[UploadPart]) -> Option<CodedParts> {
        if !files.is_coded() {
            return None;
        }
        let (mut stored, mut placed) = (Vec::with_capacity(parts.len()), Vec::new());
        for part in parts {
            let chunks = files.coded_chunks(part.extent);
            let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else {
                stored.push(UploadPart { extent: files.stored(part.extent), ..*part });
                continue;
            };
            let (offset, end) = (first.stored_offset, last.stored_end());
            let extent = Extent { file: part.extent.file, offset, length: end - offset };
            stored.push(UploadPart { label: part.label, extent, to: CODED + offset });
            for chunk in chunks {
                let at = chunk.offset.checked_sub(part.extent.offset)?;
                let (to, wanted) =
                    (part.to + at, chunk.end().min(part.extent.end()) - chunk.offset);
                let can_decode = match chunk.codec {
                    Codec::Raw => true,
                    Codec::Exponents | Codec::Gdeflate => {
                        let aligned = [to, chunk.stored_offset].map(|of| of % ALIGNMENT == 0);
                        wanted == chunk.bytes && aligned == [true; 2]
                    }
                    Codec::Zstd => false,
                };
                if !can_decode {
                    return None;
                }
                placed.push(PlacedChunk { chunk, to, wanted: wanted as usize });
            }
        }
        if placed.iter().all(|placed| placed.chunk.codec == Codec::Raw) {
            return None;
        }
        placed.sort_by_key(|placed| placed.chunk.stored_offset);
        let decoded_bytes = parts.iter().map(|part| part.extent.length).sum();
        Some(CodedParts { parts: stored, chunks: placed, decoded_bytes })
    }

    /// Returns the most chunks that lie within any `bytes` bytes of the file.
    fn most_within(&self, bytes: u64) -> usize {
        let (mut first, mut most) = (0, 0);
        for (index, placed) in self.chunks.iter().enumerate() {
            while placed.chunk.stored_end() - self.chunks[first].chunk.stored_offset > bytes {
                first += 1;
            }
            most = most.max(index + 1 - first);
        }
        most
    }

    /// Returns the bytes behind a piece of `piece_bytes` in a slot, in which its chunks are described to kernels.
    pub fn description_bytes(&self, piece_bytes: usize) -> usize {
        self.most_within(piece_bytes as u64).max(1) * DESCRIPTION_BYTES
    }

    /// Returns true if a chunk has this codec.
    fn has(&self, codec: Codec) -> bool {
        self.chunks.iter().any(|placed| placed.chunk.codec == codec)
    }

    fn within(&self, range: Range<u64>) -> &[PlacedChunk] {
        let from = self.chunks.partition_point(|of| of.chunk.stored_offset < range.start);
        let to = self.chunks.partition_point(|of| of.chunk.stored_offset < range.end);
        &self.chunks[from..to]
    }
}

/// Number of streams. While one decodes a piece, others copy theirs.
const STREAMS: usize = 4;

/// Decodes the pieces of a load.
pub(super) struct GpuDecoding {
    coded: CodedParts,
    containers: ContainerDecoder,
    /// Decoder of `gdeflate`, if it occurs.
    gdeflate: Option<GdeflateDecoder>,
    /// Streams of slots, in turn.
    streams: Vec<CopyStream>,
    /// A stage for each slot of the ring, which has the slot's bytes, and behind all a word for each chunk that a slot may have. Kernels set
    /// words there if something is damaged.
    memory: DeviceMemory,
    damaged: usize,
    /// Addresses of the ring's slots, bytes of a slot, and offset of the descriptions in it.
    slots: Range<usize>,
    slot_bytes: usize,
    descriptions: usize,
}

/// Copies and decoding of one slot.
#[derive(Default)]
struct Work {
    copies: Vec<(Range<usize>, DevicePtr<u8>)>,
    /// Containers by type, with the offset in the slot of their descriptions.
    containers: Vec<(TensorType, usize, Vec<CodedContainer>)>,
    /// Chunks of codec `gdeflate`, by the memory that they go to.
    streams: Vec<StreamWork>,
}

/// Chunks of codec `gdeflate` that go to one piece of memory.
struct StreamWork {
    memory: DevicePtr<u8>,
    /// Chunks, as offsets from the stage and from the memory.
    chunks: Vec<CodedStream>,
    tiles: u64,
    /// Offset in the slot of their descriptions.
    descriptions: usize,
}

impl GpuDecoding {
    /// Reserves memory for stages of the slots that lie at `slots`.
    ///
    /// # Errors
    /// Returns an error if there is not enough memory.
    pub fn new(
        gpu: &Gpu,
        coded: CodedParts,
        slots: Range<usize>,
        slot_bytes: usize,
        descriptions: usize,
    ) -> Result<GpuDecoding, LoadError> {
        let damaged = (slot_bytes - descriptions).div_ceil(DESCRIPTION_BYTES).max(1);
        let memory = gpu.allocate(slots.len() + 4 * damaged)?;
        let containers = gpu.container_decoder()?;
        let gdeflate = coded.has(Codec::Gdeflate).then(|| gpu.gdeflate_decoder()).transpose()?;
        let streams = (0..STREAMS).map(|_| gpu.copy_stream()).collect::<Result<_, _>>()?;
        Ok(GpuDecoding {
            coded,
            containers,
            gdeflate,
            streams,
            memory,
            damaged,
            slots,
            slot_bytes,
            descriptions,
        })
    }

    pub fn decoded_bytes(&self) -> u64 {
        self.coded.decoded_bytes
    }

    /// Returns the words `[damaged]` that kernels set.
    fn words(&self) -> DevicePtr<u32> {
        self.memory.ptr::<u8>().offset(self.slots.len()).cast()
    }

    /// Prepares for a load.
    pub fn begin(&self, copies: &CopyStream) -> Result<(), UploadError> {
        let bytes = 4 * self.damaged;
        copies.upload(vec![0; bytes], [(0..bytes, self.words().cast())])?.finish()?;
        Ok(())
    }

    /// Checks, when all copies are done, that everything could be decoded.
    pub fn end(&self, copies: &CopyStream) -> Result<(), UploadError> {
        let bytes = 4 * self.damaged;
        let words = copies.download(vec![0; bytes], [(self.words().cast(), 0..bytes)])?.finish()?;
        if words.iter().any(|&byte| byte != 0) {
            return Err("a block of the pack cannot be decoded: forebay verify names it".into());
        }
        Ok(())
    }

    /// Starts to copy and decode what is in a slot.
    pub fn upload(
        &self,
        memory: &[DevicePtr<u8>],
        mut slot: SlotBuffer,
        wanted: &[UploadCopy],
    ) -> Result<forebay_cuda::InFlight<SlotBuffer>, UploadError> {
        let address = slot.as_slice().as_ptr().addr();
        let at = address.checked_sub(self.slots.start).filter(|at| at % self.slot_bytes == 0);
        let at = at.filter(|at| at + self.slot_bytes <= self.slots.len());
        let at = at.ok_or("a slot of another ring")?;
        let copies = &self.streams[at / self.slot_bytes % self.streams.len()];
        let stage = self.memory.ptr::<u8>().offset(at);
        let mut work = Work::default();
        for copy in wanted {
            match copy.to.checked_sub(CODED) {
                None => {
                    let to = place(memory, copy.to, copy.range.len())?;
                    work.copies.push((copy.range.clone(), to));
                }
                Some(stored) => self.plan(&mut work, memory, &slot, stage, &copy.range, stored)?,
            }
        }
        let mut end = self.descriptions;
        let mut describe = |bytes: usize| {
            let range = end..end + bytes;
            end = range.end;
            range
        };
        for (_, at, containers) in &mut work.containers {
            let all = describe(containers.len() * CodedContainer::DESCRIPTION_BYTES);
            *at = all.start;
            let out = slot.as_mut_slice().get_mut(all).ok_or("too many chunks")?;
            let places = out.chunks_exact_mut(CodedContainer::DESCRIPTION_BYTES);
            containers.iter().zip(places).for_each(|(container, out)| container.describe(out));
        }
        let mut words = Vec::new();
        for of in &mut work.streams {
            let all = describe(of.chunks.len() * STREAM_BYTES);
            of.descriptions = all.start;
            of.tiles = CodedStream::describe(&of.chunks, &mut words);
            let out = slot.as_mut_slice().get_mut(all).ok_or("too many chunks")?;
            for (out, word) in out.chunks_exact_mut(8).zip(&words) {
                out.copy_from_slice(&word.to_le_bytes());
            }
        }
        if end > self.descriptions {
            work.copies.push((self.descriptions..end, stage.offset(self.descriptions)));
        }
        let Work { copies: all, containers, streams } = work;
        let decode = || {
            containers.iter().try_for_each(|(ty, at, containers)| {
                let descriptions = stage.offset(*at).cast();
                self.containers.decode(copies, *ty, containers, descriptions, self.words())
            })?;
            streams.iter().try_for_each(|of| {
                let streams = CodedStreams {
                    from: stage,
                    from_bytes: self.descriptions,
                    to: of.memory,
                    to_bytes: of.memory.len(),
                    count: of.chunks.len(),
                    words: stage.offset(of.descriptions).cast(),
                    tiles: of.tiles,
                };
                let decoder = self.gdeflate.as_ref().expect("it is there because chunks are");
                decoder.decode(copies, &streams, self.words())
            })
        };
        Ok(copies.upload_then(slot, all, decode)?)
    }

    /// Adds what a range of a slot needs, which begins at `stored` in the file.
    fn plan(
        &self,
        work: &mut Work,
        memory: &[DevicePtr<u8>],
        slot: &SlotBuffer,
        stage: DevicePtr<u8>,
        range: &Range<usize>,
        stored: u64,
    ) -> Result<(), UploadError> {
        let mut coded: Option<Range<usize>> = None;
        for placed in self.coded.within(stored..stored + range.len() as u64) {
            let PlacedChunk { chunk, to, wanted } = *placed;
            let at = range.start + (chunk.stored_offset - stored) as usize;
            let own = at..at + (chunk.stored_bytes - chunk.padding) as usize;
            if own.end > range.end {
                return Err("a piece ends inside of a chunk".into());
            }
            match chunk.codec {
                Codec::Raw => {
                    if wanted > 0 {
                        work.copies.push((at..at + wanted, place(memory, to, wanted)?));
                    }
                    continue;
                }
                Codec::Exponents => {
                    let container = Container::read(&slot.as_slice()[own.clone()], wanted)?;
                    work.add_container(&container, &own, stage, place(memory, to, wanted)?);
                }
                Codec::Gdeflate => {
                    let piece =
                        memory.iter().find(|piece| place_in(&[**piece], to, wanted).is_some());
                    let piece = *piece.ok_or(OUTSIDE)?;
                    work.add_gdeflate(&own, piece, to - piece.address(), wanted);
                }
                Codec::Zstd => return Err("the GPU does not decode zstd in loads".into()),
            }
            let first = coded.map_or(own.start, |coded| coded.start);
            coded = Some(first..own.end);
        }
        if let Some(coded) = coded {
            work.copies.push((coded.clone(), stage.offset(coded.start)));
        }
        Ok(())
    }
}

impl Work {
    /// Adds a container that lies at `own` in the slot and in its stage.
    fn add_container(
        &mut self,
        container: &Container<'_>,
        own: &Range<usize>,
        stage: DevicePtr<u8>,
        to: DevicePtr<u8>,
    ) {
        let ty = TensorType::from_weights(container.weights());
        let decoded_bytes = container.decoded_bytes();
        let blocks = decoded_bytes / ty.block_bytes();
        let weights = (blocks * ty.block_elements()) as u64;
        let at = self.containers.iter().position(|(of, ..)| *of == ty).unwrap_or_else(|| {
            self.containers.push((ty, 0, Vec::new()));
            self.containers.len() - 1
        });
        let (from, bytes) = (stage.offset(own.start), own.len());
        self.containers[at].2.push(CodedContainer { ty, from, bytes, to, weights });
        // Bytes behind the last whole weight are at the end of the container, as they are.
        let rest = decoded_bytes - blocks * ty.block_bytes();
        if rest > 0 {
            self.copies.push((own.end - rest..own.end, to.offset(decoded_bytes - rest)));
        }
    }

    /// Adds a chunk of codec `gdeflate` that lies at `own` in the slot, and goes to offset `to` of `memory`.
    fn add_gdeflate(
        &mut self,
        own: &Range<usize>,
        memory: DevicePtr<u8>,
        to: u64,
        decoded_bytes: usize,
    ) {
        let of = |of: &StreamWork| of.memory.address() == memory.address();
        let at = self.streams.iter().position(of).unwrap_or_else(|| {
            self.streams.push(StreamWork { memory, chunks: Vec::new(), tiles: 0, descriptions: 0 });
            self.streams.len() - 1
        });
        self.streams[at].chunks.push(CodedStream {
            at: own.start as u64,
            bytes: own.len() as u32,
            to,
            decoded_bytes: decoded_bytes as u32,
        });
    }
}

const OUTSIDE: &str = "a copy to what is not memory of the weights";

fn place(memory: &[DevicePtr<u8>], to: u64, bytes: usize) -> Result<DevicePtr<u8>, UploadError> {
    place_in(memory, to, bytes).ok_or_else(|| OUTSIDE.into())
}
