//! Splits a block's read into pieces that can have different sources (page cache or disk), and
//! joins the slot again.

use std::sync::Arc;

use crate::arena::SlotBuffer;
use crate::engine::BlockLabel;
use crate::files::FileSet;
use crate::layout::{BlockLayout, Region};

/// A part of a block that is read separately, into its own part of the block's slot. If the block
/// needs a relayout, that happens after all pieces have arrived.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Number of the piece. Pieces are numbered by ascending address.
    pub index: usize,
    pub label: BlockLabel,
    pub layout: BlockLayout,
    pub buffer: SlotBuffer,
}

impl BlockLayout {
    /// Returns the offset in the slot and the layout of every piece. Together the pieces read the
    /// whole block. No piece reads more than `piece_bytes`, unless one chunk with a checksum is
    /// longer: chunks are never split.
    fn cut(&self, files: &FileSet, piece_bytes: u64) -> Vec<(usize, BlockLayout)> {
        let unit = self.alignment as u64;
        let step = (piece_bytes / unit * unit).max(unit);
        if self.regions.len() == 1 && self.regions[0].length <= step {
            return vec![(0, self.as_read())];
        }
        let mut cuts = Vec::new();
        for region in self.regions.iter() {
            // An aligned read may begin before the first part. These bytes are not wanted.
            let parts = self.parts.iter().map(|part| part.extent);
            let inside = parts.filter(|extent| {
                let range = region.offset..region.wanted_end;
                extent.file == region.file && extent.length > 0 && range.contains(&extent.offset)
            });
            let first = inside.map(|extent| extent.offset).min().unwrap_or(region.offset);
            let mut next = 0;
            while next < region.length {
                let start = next;
                next = next_cut(files, region, start, step);
                let length = next - start;
                let offset = region.offset + start;
                let end = (offset + length).min(region.wanted_end);
                let wanted_start = region.wanted_start.max(offset);
                // The first piece keeps the bytes of the slot before it, so that the pieces make the whole slot again.
                let before = if cuts.is_empty() { region.at } else { 0 };
                let piece =
                    Region { offset, length, at: before, wanted_start, wanted_end: end, ..*region };
                let layout = BlockLayout {
                    parts: Arc::default(),
                    held: Arc::default(),
                    relayout: None,
                    slot_bytes: before + length as usize,
                    regions: Arc::new([piece]),
                    wanted_bytes: end.saturating_sub(offset.max(first)),
                    ..self.clone()
                };
                cuts.push((region.at + start as usize - before, layout));
            }
        }
        cuts
    }
}

/// Returns the end of the piece that begins at `start`. Both are bytes from the region's start.
fn next_cut(files: &FileSet, region: &Region, start: u64, step: u64) -> u64 {
    let end = start + step;
    if end >= region.length {
        return region.length;
    }
    let Some(chunks) = files.file(region.file).and_then(|file| file.chunks.as_ref()) else {
        return end;
    };
    let at = region.offset + end;
    let chunk = chunks.cover(at..at + 1);
    match chunk.start > region.offset + start {
        true => chunk.start - region.offset,
        false => (chunk.end - region.offset).min(region.length),
    }
}

/// Splits one block into pieces. The first piece has the number `first`.
///
/// A block without bytes gives one empty piece. A block whose slot is too small gives one piece
/// with the whole layout, which the reader refuses with an error. In all other cases every piece
/// has exactly one region.
pub(crate) fn cut_block(
    first: usize,
    label: BlockLabel,
    layout: &BlockLayout,
    buffer: SlotBuffer,
    files: &FileSet,
    piece_bytes: u64,
) -> Vec<Piece> {
    let cuts = layout.cut(files, piece_bytes);
    if cuts.len() < 2 || buffer.len() < layout.slot_bytes {
        return vec![Piece { index: first, label, layout: layout.as_read(), buffer }];
    }
    let mut pieces = Vec::with_capacity(cuts.len());
    let mut rest = buffer;
    // Split from the end, so that each piece keeps the unused bytes behind it.
    for (number, (at, layout)) in cuts.into_iter().enumerate().rev() {
        let (head, buffer) = rest.split_at(at);
        pieces.push(Piece { index: first + number, label, layout, buffer });
        rest = head;
    }
    pieces.reverse();
    pieces
}

#[cfg(test)]
mod tests {
    use forebay_format::{Extent, FileIndex};
    use proptest::prelude::*;

    use super::*;
    use crate::arena::{Arena, SLOT_ALIGNMENT};

    proptest! {
        #[test]
        fn pieces_tile_the_slot_and_read_what_the_block_reads(
            given in prop::collection::vec((0_u64..200_000, 0_u64..60_000), 0..5),
            shift in 9_u32..=12,
            piece_bytes in 1_u64..40_000,
            moved in 0_usize..3,
        ) {
            let extents: Vec<Extent> = given
                .iter()
                .map(|&(offset, length)| Extent { file: FileIndex(0), offset, length })
                .collect();
            // Compact weights are read behind the front of their slot.
            let layout = BlockLayout::plan(&extents, 1 << shift).moved(moved * SLOT_ALIGNMENT);
            let files = FileSet::in_memory(vec![Vec::new()]);
            let arena = Arena::map(layout.slot_bytes).unwrap();
            let buffer = arena.carve(layout.slot_bytes).unwrap();
            let base = buffer.pointer().addr();
            let pieces = cut_block(7, BlockLabel::Dense(1), &layout, buffer, &files, piece_bytes);

            let mut read = Vec::new();
            for (number, piece) in pieces.iter().enumerate() {
                prop_assert_eq!(piece.index, 7 + number);
                prop_assert!(piece.layout.slot_bytes <= piece.buffer.len());
                for region in piece.layout.regions.iter() {
                    let at = piece.buffer.pointer().addr() - base + region.at;
                    prop_assert!(region.at + region.length as usize <= piece.buffer.len());
                    read.push((at as u64, region.offset, region.length, region.wanted_end));
                }
            }
            let mut expected = Vec::new();
            for region in layout.regions.iter() {
                let (mut at, mut offset) = (region.at as u64, region.offset);
                for &(_, _, length, end) in read.iter().filter(|piece| {
                    (region.offset..region.offset + region.length).contains(&piece.1)
                }) {
                    expected.push((at, offset, length, end));
                    (at, offset) = (at + length, offset + length);
                }
                prop_assert_eq!(offset, region.offset + region.length);
                prop_assert!(expected.last().is_some_and(|last| last.3 == region.wanted_end));
            }
            prop_assert_eq!(&read, &expected);

            let bytes: u64 = pieces.iter().map(|piece| piece.layout.wanted_bytes()).sum();
            prop_assert!(bytes <= layout.wanted_bytes() || pieces.len() > 1);
            let joined = pieces.into_iter().map(|piece| piece.buffer).reduce(SlotBuffer::join);
            prop_assert_eq!(joined.unwrap().len(), layout.slot_bytes);
        }
    }
}
