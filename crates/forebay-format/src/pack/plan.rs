//! Plans the layout of a new pack. The module reads and writes no files.

use std::collections::HashMap;
use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

use forebay_codec::{CHUNK_WEIGHTS, Codec, Compact, Encoding};

use super::chunks::CodedChunk;
use super::tensors::TensorRow;
use super::{
    Block, BlockKind, CHUNK_BYTES_MAX, CODED_CHUNK_BYTES_MAX, Chunk, ChunkIndex, Conversion,
    Embedded, Origin, PAGE_BYTES, PackSpan, StoredChunk, TENSOR_ALIGNMENT, encode, head_rows,
};
use crate::{Catalog, FormatError, Source, TensorInfo, TensorType};

/// Block of a new pack and the tensors that it contains, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlannedBlock {
    pub kind: BlockKind,
    pub layer: Option<u32>,
    pub expert: Option<u32>,
    pub pieces: Vec<PlannedPiece>,
}

/// Tensor, or one entry of its outermost dimension.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlannedPiece {
    /// Index into [`Catalog::tensors`] of the source.
    pub tensor: usize,
    /// Index of the entry, or `None` for a whole tensor. The entries of one tensor go to successive
    /// blocks, starting with 0.
    pub entry: Option<u64>,
}

/// A tensor, or an entry of it, in a block that may be coded.
struct CodedPiece {
    /// Offset in the block.
    at: u64,
    bytes: u64,
    encoding: Encoding,
    /// Chunks end after multiples of so many bytes.
    unit: u64,
    /// Readers take so many bytes at a time, so no chunk goes on behind a multiple of them.
    section: u64,
}

/// Alignment of chunks in coded blocks, so that a GPU can decode them where they lie.
const CODED_ALIGNMENT: u64 = 16;

/// How the bytes of a tensor are stored in a pack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TensorStorage {
    /// Blocks of a BF16 tensor that becomes compact.
    pub compact: Option<Compact>,
    /// Encoding of the tensor's chunks, if it lies in a block that is read whole. Other blocks are stored raw.
    pub encoding: Encoding,
}

impl Default for TensorStorage {
    /// The tensor is stored as it is.
    fn default() -> TensorStorage {
        TensorStorage { compact: None, encoding: Encoding::Raw }
    }
}

/// Plan of a new pack, complete except for its data, the sizes of coded chunks, and checksums.
#[derive(Debug)]
pub struct PackPlan {
    pub(super) origin: Origin,
    pub(super) documents: Vec<Embedded>,
    pub(super) rows: Vec<TensorRow>,
    pub(super) blocks: Vec<Block>,
    pub(super) index: ChunkIndex,
    /// Encoding of each chunk of a coded block, by the chunk's number.
    encodings: HashMap<u64, Encoding>,
    spans: Vec<PackSpan>,
    decoded_bytes: u64,
}

impl PackPlan {
    /// Lays out `blocks` of the tensors of `source`, after tables and `documents`. `storage` has an entry for each tensor of the source; none
    /// means that all are stored as they are.
    ///
    /// # Errors
    /// Returns [`FormatError::WriteTensor`] if the blocks do not contain every tensor exactly once,
    /// or not as the format can express it, or if a tensor cannot become compact.
    pub fn new(
        source: &Catalog,
        blocks: &[PlannedBlock],
        documents: Vec<Embedded>,
        storage: &[TensorStorage],
    ) -> Result<PackPlan, FormatError> {
        let origin = match source.source {
            Source::Gguf(_) => Origin::Gguf,
            Source::HuggingFace(_) => Origin::HuggingFace,
        };
        let mut plan = PackPlan {
            origin,
            documents,
            rows: Vec::new(),
            blocks: Vec::new(),
            index: ChunkIndex::new(Vec::new(), Vec::new(), Vec::new()),
            encodings: HashMap::new(),
            spans: Vec::new(),
            decoded_bytes: 0,
        };
        let (row_of, coded) = (HashMap::new(), Vec::new());
        let mut builder = Builder { source, storage, row_of, coded, plan: &mut plan, end: 0 };
        for block in blocks.iter().filter(|block| !block.pieces.is_empty()) {
            builder.add(block)?;
        }
        builder.check_complete()?;
        let (data_bytes, mut coded) = (builder.end, builder.coded);
        let data_offset = encode::front_bytes(&plan);
        plan.blocks.iter_mut().for_each(|block| block.offset += data_offset);
        plan.spans.iter_mut().for_each(|span| span.to += data_offset);
        coded.iter_mut().for_each(|chunk| chunk.offset += data_offset);
        let chunks = plan.blocks.last().map_or(0, |block| block.first_chunk + block.chunks);
        plan.index = ChunkIndex::new(plan.blocks.clone(), vec![0; chunks as usize], coded);
        plan.decoded_bytes = data_offset + data_bytes;
        Ok(plan)
    }

    /// Returns the size of the file in bytes if nothing becomes smaller by coding.
    pub fn decoded_bytes(&self) -> u64 {
        self.decoded_bytes
    }

    /// Returns the offset of the first block. Everything before it is [`Self::front`].
    pub fn data_offset(&self) -> u64 {
        self.blocks.first().map_or(self.decoded_bytes, |block| block.offset)
    }

    /// Returns the blocks in file order, without gaps.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns true if any block is coded.
    pub fn is_coded(&self) -> bool {
        self.index.is_coded()
    }

    /// Returns the chunks, with their places after decoding. Checksums and places in the file are not known yet.
    pub fn chunk_index(&self) -> &ChunkIndex {
        &self.index
    }

    /// Returns the encoding of a chunk.
    pub fn encoding(&self, chunk: &Chunk) -> Encoding {
        self.encodings.get(&chunk.number).copied().unwrap_or(Encoding::Raw)
    }

    /// Returns how a chunk is stored from `stored_offset` on, given its encoded bytes. In a coded block, zeros follow it up to the next multiple
    /// of [`CODED_ALIGNMENT`], or up to the next page if it is the last one of its block.
    pub fn stored(
        &self,
        chunk: &Chunk,
        codec: Codec,
        encoded: &[u8],
        stored_offset: u64,
    ) -> StoredChunk {
        let end = stored_offset + encoded.len() as u64;
        let block = self.index.block_at(chunk.offset);
        let alignment = match block {
            Some(block) if block.end() == chunk.end() => PAGE_BYTES,
            Some(block) if block.is_coded() => CODED_ALIGNMENT,
            _ => 1,
        };
        let padding = end.next_multiple_of(alignment) - end;
        let mut hasher = XxHash3_64::default();
        hasher.write(encoded);
        hasher.write(&[0; PAGE_BYTES as usize][..padding as usize]);
        StoredChunk {
            codec,
            bytes: (encoded.len() as u64 + padding) as u32,
            padding: padding as u32,
            checksum: hasher.finish(),
        }
    }

    /// Returns what to copy from the source, in the order of the pack. The gaps are zeros.
    pub fn spans(&self) -> &[PackSpan] {
        &self.spans
    }

    /// Returns the header, documents and tables, given all chunks in order as they were stored. Its length does not depend on them.
    ///
    /// # Panics
    /// Panics if their number differs from that of the plan's chunks.
    pub fn front(&self, chunks: &[StoredChunk]) -> Vec<u8> {
        encode::front(self, chunks)
    }
}

struct Builder<'a> {
    source: &'a Catalog,
    storage: &'a [TensorStorage],
    /// Index of each tensor's row, by the tensor's index.
    row_of: HashMap<usize, usize>,
    /// Chunks of the coded blocks so far.
    coded: Vec<CodedChunk>,
    plan: &'a mut PackPlan,
    /// Number of bytes of all blocks so far.
    end: u64,
}

impl Builder<'_> {
    fn add(&mut self, planned: &PlannedBlock) -> Result<(), FormatError> {
        let start = self.end;
        let mut at = 0_u64;
        let mut pieces: Vec<CodedPiece> = Vec::with_capacity(planned.pieces.len());
        for piece in &planned.pieces {
            let Some(tensor) = self.source.tensors().get(piece.tensor) else { continue };
            let extent = match piece.entry {
                None if tensor.is_contiguous() => tensor.extent,
                None => return Err(self.refuse(tensor, "its bytes do not lie in one piece")),
                Some(entry) => tensor
                    .outer_slice(entry, 1)
                    .ok_or_else(|| self.refuse(tensor, "it has no such entry"))?,
            };
            let TensorStorage { compact, encoding } =
                self.storage.get(piece.tensor).copied().unwrap_or_default();
            let ty = compact.map_or(tensor.ty, TensorType::from_compact);
            let columns = tensor.shape.last().copied().unwrap_or(0);
            if compact.is_some()
                && (tensor.ty != TensorType::BF16 || ty.row_bytes(columns).is_none())
            {
                return Err(self.refuse(tensor, &format!("it cannot become {ty}")));
            }
            at = at.next_multiple_of(TENSOR_ALIGNMENT);
            self.row(piece, (tensor, ty), at)?;
            let conversion = compact.map(Conversion::Compact);
            let span = PackSpan { to: start + at, from: extent, tensor: piece.tensor, conversion };
            let unit = coding_unit(ty);
            let section = match (planned.kind, ty.row_bytes(columns)) {
                (BlockKind::Head, Some(row)) if row > 0 => row.saturating_mul(head_rows(row)),
                _ => u64::MAX,
            };
            pieces.push(CodedPiece { at, bytes: span.bytes(), encoding, unit, section });
            at += span.bytes();
            self.plan.spans.push(span);
        }
        let bytes = at.next_multiple_of(PAGE_BYTES);
        let first_chunk =
            self.plan.blocks.last().map_or(0, |block| block.first_chunk + block.chunks);
        let first_coded = self.coded.len() as u64;
        let is_coded = planned.kind.may_be_coded()
            && pieces.iter().any(|piece| piece.encoding.codec() != Codec::Raw);
        let (chunk_bytes, chunks) = match is_coded {
            true => (0, self.code(start, bytes, first_chunk, &pieces)),
            false => {
                let size = chunk_bytes(planned.kind, bytes);
                (size, bytes.div_ceil(size.into()))
            }
        };
        self.plan.blocks.push(Block {
            kind: planned.kind,
            layer: planned.layer,
            expert: planned.expert,
            offset: start,
            bytes,
            stored_offset: 0,
            stored_bytes: 0,
            chunk_bytes,
            first_chunk,
            chunks,
            first_coded,
        });
        self.end += bytes;
        Ok(())
    }

    /// Cuts a block of `bytes` bytes from `start` on into chunks, and returns their number. Every piece begins with a chunk of its own, and so does
    /// the padding behind it.
    fn code(&mut self, start: u64, bytes: u64, first_chunk: u64, pieces: &[CodedPiece]) -> u64 {
        let before = self.coded.len() as u64;
        let mut add = |at: u64, encoding: Encoding| {
            let number = self.coded.len() as u64 - before + first_chunk;
            self.plan.encodings.insert(number, encoding);
            let (codec, offset) = (encoding.codec(), start + at);
            self.coded.push(CodedChunk { codec, offset, stored_offset: 0, padding: 0 });
        };
        for (index, piece) in pieces.iter().enumerate() {
            let end = piece.at + piece.bytes;
            let mut next = piece.at;
            while next < end {
                let end = next.saturating_add(piece.section).min(end);
                let number = (end - next).div_ceil(CODED_CHUNK_BYTES_MAX).max(1);
                let size = (end - next).div_ceil(number).next_multiple_of(piece.unit);
                while next < end {
                    add(next, piece.encoding);
                    next += size;
                    // What is less than a unit would hardly be coded.
                    next = if end.saturating_sub(next) < piece.unit { end } else { next };
                }
            }
            if end < pieces.get(index + 1).map_or(bytes, |next| next.at) {
                add(end, Encoding::Raw);
            }
        }
        self.coded.len() as u64 - before
    }

    /// Creates the table row of a piece's tensor, or checks the existing one.
    fn row(
        &mut self,
        piece: &PlannedPiece,
        (tensor, ty): (&TensorInfo, TensorType),
        offset: u64,
    ) -> Result<(), FormatError> {
        let block = self.plan.blocks.len() as u32;
        let pieces = piece.entry.map_or(1, |_| tensor.shape[0]);
        let (rows, row_of) = (&mut self.plan.rows, &mut self.row_of);
        let fits = match (row_of.get(&piece.tensor), piece.entry) {
            (None, None | Some(0)) => {
                row_of.insert(piece.tensor, rows.len());
                rows.push(TensorRow {
                    name: tensor.name.clone(),
                    ty,
                    shape: tensor.shape.clone(),
                    block,
                    pieces: u32::try_from(pieces).unwrap_or(0),
                    offset,
                });
                true
            }
            (Some(&row), Some(entry)) => {
                let row = &rows[row];
                row.offset == offset && u64::from(row.block) + entry == u64::from(block)
            }
            _ => false,
        };
        match fits {
            true => Ok(()),
            false => Err(self.refuse(tensor, "its pieces do not lie in successive blocks")),
        }
    }

    /// Returns an error unless every tensor is placed with all its pieces, in blocks of one size.
    fn check_complete(&self) -> Result<(), FormatError> {
        let placed: u64 = self.plan.rows.iter().map(|row| u64::from(row.pieces)).sum();
        let missing =
            (0..self.source.tensors().len()).find(|index| !self.row_of.contains_key(index));
        if let Some(index) = missing {
            return Err(self.refuse(&self.source.tensors()[index], "no block takes it"));
        }
        let blocks = &self.plan.blocks;
        for (&tensor, &row) in &self.row_of {
            let row = &self.plan.rows[row];
            let first = row.block as usize;
            let of_row = blocks.get(first..first + row.pieces as usize);
            let even = of_row.is_some_and(|all| all.iter().all(|b| b.bytes == all[0].bytes));
            if !even || row.pieces == 0 || placed != self.plan.spans.len() as u64 {
                let tensor = &self.source.tensors()[tensor];
                return Err(self.refuse(tensor, "its pieces do not lie in blocks of one size"));
            }
        }
        Ok(())
    }

    fn refuse(&self, tensor: &TensorInfo, why: &str) -> FormatError {
        FormatError::WriteTensor {
            path: self.source.files.first().cloned().unwrap_or_default(),
            tensor: tensor.name.clone(),
            why: format!("it cannot be packed: {why}"),
        }
    }
}

/// Returns the chunk size of a block. Blocks that are read whole get equal chunks of at most one
/// read request. Other blocks get chunks of one page.
fn chunk_bytes(kind: BlockKind, bytes: u64) -> u32 {
    if !kind.is_read_whole() {
        return PAGE_BYTES as u32;
    }
    let chunks = bytes.div_ceil(CHUNK_BYTES_MAX).max(1);
    bytes.div_ceil(chunks).next_multiple_of(PAGE_BYTES).max(PAGE_BYTES) as u32
}

/// Returns the number of bytes after which chunks of weights of this type may end: what their encoders code together.
fn coding_unit(ty: TensorType) -> u64 {
    (CHUNK_WEIGHTS.div_ceil(ty.block_elements()) * ty.block_bytes()) as u64
}
