//! Plans the layout of a new pack. The module reads and writes no files.

use std::collections::HashMap;

use forebay_codec::Compact;

use super::tensors::TensorRow;
use super::{
    Block, BlockKind, CHUNK_BYTES_MAX, ChunkIndex, Conversion, Embedded, Origin, PAGE_BYTES,
    PackSpan, TENSOR_ALIGNMENT, encode,
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

/// Plan of a new pack, complete except for its data and checksums.
#[derive(Debug)]
pub struct PackPlan {
    pub(super) origin: Origin,
    pub(super) documents: Vec<Embedded>,
    pub(super) rows: Vec<TensorRow>,
    pub(super) blocks: Vec<Block>,
    spans: Vec<PackSpan>,
    file_bytes: u64,
}

impl PackPlan {
    /// Lays out `blocks` of the tensors of `source`, after tables and `documents`. The tensors for which `compact` has blocks are
    /// BF16, and become compact. `compact` has an entry for each tensor of the source.
    ///
    /// # Errors
    /// Returns [`FormatError::WriteTensor`] if the blocks do not contain every tensor exactly once,
    /// or not as the format can express it, or if a tensor cannot become compact.
    pub fn new(
        source: &Catalog,
        blocks: &[PlannedBlock],
        documents: Vec<Embedded>,
        compact: &[Option<Compact>],
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
            spans: Vec::new(),
            file_bytes: 0,
        };
        let row_of = HashMap::new();
        let mut builder = Builder { source, compact, row_of, plan: &mut plan, end: 0 };
        for block in blocks.iter().filter(|block| !block.pieces.is_empty()) {
            builder.add(block)?;
        }
        builder.check_complete()?;
        let data_bytes = builder.end;
        let data_offset = encode::front_bytes(&plan);
        plan.blocks.iter_mut().for_each(|block| block.offset += data_offset);
        plan.spans.iter_mut().for_each(|span| span.to += data_offset);
        plan.file_bytes = data_offset + data_bytes;
        Ok(plan)
    }

    /// Returns the size of the finished file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Returns the offset of the first block. Everything before it is [`Self::front`].
    pub fn data_offset(&self) -> u64 {
        self.blocks.first().map_or(self.file_bytes, |block| block.offset)
    }

    /// Returns the blocks in file order, without gaps.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the chunks, with zeros in place of their checksums.
    pub fn chunk_index(&self) -> ChunkIndex {
        let chunks = self.blocks.last().map_or(0, |block| block.first_chunk + block.chunks());
        ChunkIndex::new(self.blocks.clone(), vec![0; chunks as usize])
    }

    /// Returns what to copy from the source, in the order of the pack. The gaps are zeros.
    pub fn spans(&self) -> &[PackSpan] {
        &self.spans
    }

    /// Returns the header, documents and tables, with the checksums of all chunks in order.
    ///
    /// # Panics
    /// Panics if the number of checksums differs from the number of chunks.
    pub fn front(&self, checksums: &[u64]) -> Vec<u8> {
        encode::front(self, checksums)
    }
}

struct Builder<'a> {
    source: &'a Catalog,
    compact: &'a [Option<Compact>],
    /// Index of each tensor's row, by the tensor's index.
    row_of: HashMap<usize, usize>,
    plan: &'a mut PackPlan,
    /// Number of bytes of all blocks so far.
    end: u64,
}

impl Builder<'_> {
    fn add(&mut self, planned: &PlannedBlock) -> Result<(), FormatError> {
        let start = self.end;
        let mut at = 0_u64;
        for piece in &planned.pieces {
            let Some(tensor) = self.source.tensors().get(piece.tensor) else { continue };
            let extent = match piece.entry {
                None if tensor.is_contiguous() => tensor.extent,
                None => return Err(self.refuse(tensor, "its bytes do not lie in one piece")),
                Some(entry) => tensor
                    .outer_slice(entry, 1)
                    .ok_or_else(|| self.refuse(tensor, "it has no such entry"))?,
            };
            let compact = self.compact.get(piece.tensor).copied().flatten();
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
            at += span.bytes();
            self.plan.spans.push(span);
        }
        let bytes = at.next_multiple_of(PAGE_BYTES);
        let previous = self.plan.blocks.last();
        self.plan.blocks.push(Block {
            kind: planned.kind,
            layer: planned.layer,
            expert: planned.expert,
            offset: start,
            bytes,
            chunk_bytes: chunk_bytes(planned.kind, bytes),
            first_chunk: previous.map_or(0, |block| block.first_chunk + block.chunks()),
        });
        self.end += bytes;
        Ok(())
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
