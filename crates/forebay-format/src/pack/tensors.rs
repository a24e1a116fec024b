//! Reads the tensor table of a pack, and checks that every tensor lies in its block and no two
//! overlap.

use std::io::Read;
use std::path::Path;

use super::parse::{u16_at, u32_at, u64_at};
use super::section::Section;
use super::{Block, TENSOR_ALIGNMENT};
use crate::tensor_type::checked_bytes;
use crate::{Extent, FileIndex, FormatError, TensorInfo, TensorType};

const TENSORS_MAX: u64 = 1 << 18;
const NAME_BYTES_MAX: u32 = 4096;
const DIMENSIONS_MAX: u8 = 8;

/// Row of the table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorRow {
    pub name: String,
    pub ty: TensorType,
    pub shape: Vec<u64>,
    /// Index of the block that holds the first piece.
    pub block: u32,
    /// Number of pieces: 1, or one for each entry of the outermost dimension. The pieces lie in
    /// successive blocks.
    pub pieces: u32,
    /// Offset of the piece from the start of its block, in bytes. It is the same for all pieces.
    pub offset: u64,
}

/// Reads the table. `place` checks the offsets later, when the blocks are known.
pub fn read_rows<R: Read>(section: &mut Section<'_, R>) -> Result<Vec<TensorRow>, FormatError> {
    if section.count() > TENSORS_MAX {
        return Err(section.damaged(format!("{} tensors are too many", section.count())));
    }
    let mut rows = Vec::new();
    for _ in 0..section.count() {
        let entry: [u8; 24] = section.array()?;
        let (name_bytes, type_bytes, dimensions) = (u32_at(&entry, 0), entry[4], entry[5]);
        let named = (1..=NAME_BYTES_MAX).contains(&name_bytes);
        if !named || dimensions > DIMENSIONS_MAX || u16_at(&entry, 6) != 0 {
            return Err(section.damaged("a tensor's entry makes no sense"));
        }
        let shape: Result<Vec<u64>, _> = (0..dimensions).map(|_| section.u64()).collect();
        let shape = shape?;
        let type_name = section.text(type_bytes.into())?;
        let name = section.text(name_bytes.into())?;
        let Some(ty) = TensorType::from_name(&type_name) else {
            let path = section.path().to_owned();
            return Err(FormatError::UnsupportedDtype { path, tensor: name, dtype: type_name });
        };
        rows.push(TensorRow {
            name,
            ty,
            shape,
            block: u32_at(&entry, 8),
            pieces: u32_at(&entry, 12),
            offset: u64_at(&entry, 16),
        });
    }
    Ok(rows)
}

/// Row whose position in its first block is checked.
struct Placed {
    row: TensorRow,
    piece_bytes: u64,
}

/// Checks every row against the blocks and makes catalog entries.
pub fn place(
    path: &Path,
    rows: Vec<TensorRow>,
    blocks: &[Block],
) -> Result<Vec<TensorInfo>, FormatError> {
    let mut placed = Vec::with_capacity(rows.len());
    let mut total_bytes = 0_u64;
    let data_bytes: u64 = blocks.iter().map(|block| block.bytes).sum();
    for row in rows {
        let bytes = checked_bytes(path, &row.name, row.ty, &row.shape)?;
        total_bytes = total_bytes.saturating_add(bytes);
        let pieces = u64::from(row.pieces);
        let regular = pieces == 1 || (pieces > 0 && row.shape.first() == Some(&pieces));
        let damaged = |what: &str| damaged(path, &row, blocks, what);
        if !regular || !bytes.is_multiple_of(pieces) {
            return Err(damaged("has an impossible number of pieces"));
        }
        // The row's blocks must all have one size, and each must have room for its piece.
        let first = row.block as usize;
        let of_row = first.checked_add(row.pieces as usize).and_then(|end| blocks.get(first..end));
        let of_row = of_row.ok_or_else(|| damaged("names blocks that do not exist"))?;
        let piece_bytes = bytes / pieces;
        let end = row.offset.checked_add(piece_bytes);
        if !row.offset.is_multiple_of(TENSOR_ALIGNMENT)
            || end.is_none_or(|end| end > of_row[0].bytes)
            || of_row.iter().any(|block| block.bytes != of_row[0].bytes)
        {
            return Err(damaged("does not fit its block"));
        }
        placed.push(Placed { row, piece_bytes });
    }
    if total_bytes > data_bytes {
        return Err(FormatError::PackDamaged {
            path: path.to_owned(),
            offset: 0,
            what: format!("tensors of {total_bytes} bytes are claimed in {data_bytes}"),
        });
    }
    placed.sort_by_key(|placed| (placed.row.block, placed.row.offset));
    check_distinct(path, &placed, blocks)?;
    Ok(placed.into_iter().map(|placed| info(placed, blocks)).collect())
}

fn damaged(path: &Path, row: &TensorRow, blocks: &[Block], what: &str) -> FormatError {
    FormatError::PackDamaged {
        path: path.to_owned(),
        offset: blocks.get(row.block as usize).map_or(0, |block| block.offset),
        what: format!("tensor {:?} {what}", row.name),
    }
}

/// Returns an error if two tensors share a byte. Visits the blocks in order, together with the
/// tensors that have a piece there. The work is bounded by the number of pieces, and each piece has
/// bytes of its own in the file.
fn check_distinct(path: &Path, placed: &[Placed], blocks: &[Block]) -> Result<(), FormatError> {
    let mut here: Vec<&Placed> = Vec::new();
    let mut coming = placed.iter().peekable();
    for index in 0..blocks.len() as u64 {
        let first = |placed: &Placed| u64::from(placed.row.block);
        here.retain(|placed| first(placed) + u64::from(placed.row.pieces) > index);
        let before = here.len();
        while let Some(next) = coming.next_if(|placed| first(placed) == index) {
            here.push(next);
        }
        if here.len() == before {
            continue;
        }
        here.sort_by_key(|placed| placed.row.offset);
        let overlap = here
            .windows(2)
            .find(|pair| pair[0].row.offset + pair[0].piece_bytes > pair[1].row.offset);
        if let Some([one, other]) = overlap {
            return Err(FormatError::TensorsOverlap {
                path: path.to_owned(),
                tensor: one.row.name.clone(),
                other: other.row.name.clone(),
                offset: blocks[index as usize].offset + other.row.offset,
            });
        }
    }
    Ok(())
}

fn info(placed: Placed, blocks: &[Block]) -> TensorInfo {
    let Placed { row, piece_bytes } = placed;
    let block = blocks[row.block as usize];
    let offset = block.offset + row.offset;
    let file = FileIndex(0);
    if row.pieces == 1 {
        let extent = Extent { file, offset, length: piece_bytes };
        return TensorInfo::contiguous(row.name, row.ty, row.shape, extent);
    }
    let length = u64::from(row.pieces - 1) * block.bytes + piece_bytes;
    let extent = Extent { file, offset, length };
    TensorInfo { name: row.name, ty: row.ty, shape: row.shape, extent, stride: block.bytes }
}
