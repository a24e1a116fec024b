//! Decoding of a pack's compact BF16 in the host memory that it was read into.
//!
//! A block is read to the end of its slot. Its tensors then move to the front, one after the other, and compact ones become BF16 as they
//! do. So the slot needs no more memory than the result, and tensors of one layout in equal blocks are at equal distances.

use std::num::NonZero;
use std::ops::Range;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use forebay_codec::decode_compact;
use forebay_format::pack::{Block, TENSOR_ALIGNMENT};
use forebay_format::{Catalog, TensorType};
use forebay_store::{Extent, SLOT_ALIGNMENT};

/// The tensors of a block of a pack, some of which are compact.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Expansion {
    /// Offset in the slot at which the block's bytes are read, a multiple of [`SLOT_ALIGNMENT`].
    pub shift: usize,
    pieces: Vec<Piece>,
}

/// A tensor, or an entry of a stack.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    tensor: usize,
    extent: Extent,
    /// Offset in the block, as read.
    from: usize,
    /// Offset in the slot.
    to: usize,
    ty: TensorType,
}

impl Piece {
    fn end(&self) -> usize {
        let read = self.extent.length as usize;
        self.to + read / self.ty.block_bytes() * plain_block_bytes(self.ty)
    }
}

/// Returns the bytes of a block of this type without compression.
fn plain_block_bytes(ty: TensorType) -> usize {
    match ty.compact() {
        Some(of) => of.plain_bytes(),
        None => ty.block_bytes(),
    }
}

/// Returns the expansion of every block that has compact tensors, in the order of `blocks`.
pub(super) fn expansions(catalog: &Catalog, blocks: &[Block]) -> Vec<Option<Expansion>> {
    let mut pieces: Vec<Vec<Piece>> = blocks.iter().map(|_| Vec::new()).collect();
    for (tensor, info) in catalog.tensors().iter().enumerate() {
        for extent in info.extents() {
            let after = blocks.partition_point(|block| block.offset <= extent.offset);
            let Some(block) = after.checked_sub(1) else { continue };
            let from = (extent.offset - blocks[block].offset) as usize;
            pieces[block].push(Piece { tensor, extent, from, to: 0, ty: info.ty });
        }
    }
    pieces.into_iter().map(Expansion::of).collect()
}

impl Expansion {
    fn of(mut pieces: Vec<Piece>) -> Option<Expansion> {
        if pieces.iter().all(|piece| piece.ty.compact().is_none()) {
            return None;
        }
        pieces.sort_by_key(|piece| piece.from);
        let (mut end, mut shift) = (0_usize, 0);
        for piece in &mut pieces {
            piece.to = end.next_multiple_of(TENSOR_ALIGNMENT as usize);
            end = piece.end();
            // A tensor must not be written over bytes behind it that are still to be read.
            shift = shift.max(end.saturating_sub(piece.from + piece.extent.length as usize));
        }
        Some(Expansion { shift: shift.next_multiple_of(SLOT_ALIGNMENT), pieces })
    }

    /// Returns every piece's tensor and extent, and its offset in the slot.
    pub fn places(&self) -> impl Iterator<Item = (Extent, usize)> + '_ {
        self.pieces.iter().map(|piece| (piece.extent, piece.to))
    }

    /// Moves and decodes all tensors of the block, whose first byte is at `read_at`.
    ///
    /// # Errors
    /// Returns the index of a tensor that has a damaged block.
    fn expand(&self, slot: &mut [u8], read_at: usize) -> Result<(), usize> {
        for piece in &self.pieces {
            let Range { start, end } =
                read_at + piece.from..read_at + piece.from + piece.extent.length as usize;
            let Some(of) = piece.ty.compact() else {
                slot.copy_within(start..end, piece.to);
                continue;
            };
            // A block is moved away before it is decoded, because it may lie where its weights go.
            let mut compact = [0; COMPACT_BYTES_MAX];
            let compact = &mut compact[..of.bytes()];
            let plain = plain_block_bytes(piece.ty);
            for (block, from) in (start..end).step_by(of.bytes()).enumerate() {
                compact.copy_from_slice(&slot[from..from + of.bytes()]);
                let to = piece.to + block * plain;
                decode_compact(of, compact, &mut slot[to..to + plain]).map_err(|_| piece.tensor)?;
            }
        }
        Ok(())
    }
}

/// Size of the largest compact block.
const COMPACT_BYTES_MAX: usize = forebay_codec::Compact::C2048.bytes();

/// Expands blocks with all cores. Each has its slot, and the offset at which the block was read.
///
/// # Errors
/// Returns the index of a tensor that has a damaged block.
pub(super) fn expand_all(blocks: Vec<(&Expansion, &mut [u8], usize)>) -> Result<(), usize> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(blocks.len());
    let (blocks, damaged) = (Mutex::new(blocks.into_iter()), OnceLock::new());
    let next = || blocks.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((expansion, slot, read_at)) = next() {
                    if let Err(tensor) = expansion.expand(slot, read_at) {
                        damaged.get_or_init(|| tensor);
                        return;
                    }
                }
            });
        }
    });
    damaged.into_inner().map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use forebay_codec::{Compact, encode_compact};
    use forebay_format::FileIndex;

    use super::*;

    #[test]
    fn tensors_move_to_the_front_of_their_slot() {
        let plain: Vec<u8> =
            (0..3 * 2048_u16).flat_map(|i| (0x3c00 | i & 0x80ff).to_le_bytes()).collect();
        let encoded = |of: Compact, plain: &[u8]| {
            let mut out = vec![0; plain.len() / of.plain_bytes() * of.bytes()];
            assert_eq!(encode_compact(of, plain, &mut out), Ok(true));
            out
        };
        let of_type = [
            (TensorType::F32, plain[..100].to_vec(), plain[..100].to_vec()),
            (TensorType::BF16_C2048, encoded(Compact::C2048, &plain), plain.clone()),
            (TensorType::U8, plain[7..1000].to_vec(), plain[7..1000].to_vec()),
            (TensorType::BF16_C256, encoded(Compact::C256, &plain[..1024]), plain[..1024].to_vec()),
        ];
        let (mut block, mut pieces) = (Vec::new(), Vec::new());
        for (tensor, (ty, bytes, _)) in of_type.iter().enumerate() {
            block.resize(block.len().next_multiple_of(TENSOR_ALIGNMENT as usize), 0);
            let (from, length) = (block.len(), bytes.len() as u64);
            let extent = Extent { file: FileIndex(0), offset: 8192 + from as u64, length };
            pieces.push(Piece { tensor, extent, from, to: 0, ty: *ty });
            block.extend(bytes);
        }
        let expansion = Expansion::of(pieces).unwrap();
        assert!(expansion.shift.is_multiple_of(SLOT_ALIGNMENT) && expansion.shift > 0);
        let mut slot = vec![0xaa; expansion.shift];
        slot.extend(&block);
        expand_all(vec![(&expansion, &mut slot, expansion.shift)]).unwrap();
        for ((extent, to), (ty, _, expected)) in expansion.places().zip(&of_type) {
            assert_eq!(to % TENSOR_ALIGNMENT as usize, 0, "{extent:?}");
            assert!(slot[to..].starts_with(expected), "{ty}");
        }
        // A block with more exceptions than its list has room for.
        let mut slot = vec![0; expansion.shift];
        slot.extend(&block);
        slot[expansion.shift + 256 + Compact::C2048.header() + 1] = 200;
        assert_eq!(expand_all(vec![(&expansion, &mut slot, expansion.shift)]), Err(1));
    }

    #[test]
    fn blocks_without_compact_tensors_stay() {
        let extent = Extent { file: FileIndex(0), offset: 4096, length: 64 };
        let piece = Piece { tensor: 0, extent, from: 0, to: 0, ty: TensorType::F32 };
        assert_eq!(Expansion::of(vec![piece]), None);
    }
}
