//! Slot layouts: where the extents of a block are put in a slot, and which aligned spans are read for them.

use std::ops::Range;
use std::sync::Arc;

use forebay_format::{Block, Extent, FileIndex, Relayout};

use crate::arena::SLOT_ALIGNMENT;
use crate::relayout::RelayoutBuffer;

/// One extent of a block and its offset in the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub extent: Extent,
    /// Offset of the extent's first byte in the slot, in bytes.
    pub at: usize,
}

/// An aligned span of one file that is read as a whole. It covers one part or several adjacent ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    pub file: FileIndex,
    /// Offset of the first byte in the decoded file, a multiple of the alignment unless the bytes are coded.
    pub offset: u64,
    /// Number of bytes to read, a multiple of the alignment unless the bytes are coded. The span may extend past the end of the file.
    pub length: u64,
    /// Offset of the span in the slot, a multiple of the alignment unless the bytes are coded.
    pub at: usize,
    /// Offset of the first byte that a part needs, with all of its chunk.
    pub wanted_start: u64,
    /// Offset after the last byte that a part needs, with all of its chunk.
    pub wanted_end: u64,
}

impl Region {
    /// Returns the wanted bytes of the file.
    pub fn wanted(&self) -> Range<u64> {
        self.wanted_start..self.wanted_end
    }

    /// Returns the range of the slot that holds the wanted bytes.
    pub fn wanted_in_slot(&self) -> Range<usize> {
        let from = |offset| self.at + (offset - self.offset) as usize;
        from(self.wanted_start)..from(self.wanted_end)
    }
}

/// Bytes that must be read for an extent of a pack: whole chunks.
pub(crate) struct Covered {
    pub range: Range<u64>,
    /// True if the bytes are decoded when they are read. They then need no alignment.
    pub is_coded: bool,
}

/// The plan of one block's slot. Clones share its lists.
#[derive(Clone, Debug)]
pub struct BlockLayout {
    /// The extents in the order in which they were given.
    pub parts: Arc<[Part]>,
    /// Ranges of the held parts in the slot: the extents, except that a relayout replaces some of them by what it
    /// makes.
    pub held: Arc<[Range<usize>]>,
    pub(crate) relayout: Option<Arc<RelayoutBuffer>>,
    /// Size of the slot in bytes, a multiple of 4096.
    pub slot_bytes: usize,
    pub(crate) regions: Arc<[Region]>,
    pub(crate) alignment: usize,
    pub(crate) wanted_bytes: u64,
}

impl BlockLayout {
    /// Plans a slot for `extents`, with room for the extra bytes that aligned reads return at the head and tail.
    ///
    /// `alignment` is [`crate::FileSet::alignment`], a power of two up to 4096. Extents of one file whose aligned spans
    /// touch are read as one. As long as none are merged, `slot_bytes` depends only on the lengths and not on the
    /// offsets, so equal experts get equal slots. Extents that cannot exist, because they pass the end of the 64-bit
    /// range, give a slot that no arena can hold. The engine refuses them too.
    pub fn plan(extents: &[Extent], alignment: usize) -> BlockLayout {
        Self::plan_covering(extents, None, alignment, &|_| None)
    }

    /// Plans a slot like [`BlockLayout::plan`] for a block, which may have a relayout of some of its extents.
    pub fn plan_block(block: &Block, alignment: usize) -> BlockLayout {
        Self::plan_covering(&block.extents, block.relayout.as_ref(), alignment, &|_| None)
    }

    /// Plans a slot like [`BlockLayout::plan_block`], for files in which some bytes must be read together. `cover`
    /// returns the range that must be read for an extent, or `None` if the extent has no such constraint.
    pub(crate) fn plan_covering(
        extents: &[Extent],
        relayout: Option<&Relayout>,
        alignment: usize,
        cover: &dyn Fn(&Extent) -> Option<Covered>,
    ) -> BlockLayout {
        let alignment = alignment.clamp(1, SLOT_ALIGNMENT).next_power_of_two();
        let unit = alignment as u64;
        let mut order: Vec<usize> = (0..extents.len()).filter(|&i| extents[i].length > 0).collect();
        order.sort_by_key(|&i| (extents[i].file.0, extents[i].offset));

        let mut spans: Vec<Span> = Vec::new();
        for index in order {
            let extent = extents[index];
            let covered = cover(&extent);
            let (in_place, is_coded) =
                (covered.is_some(), covered.as_ref().is_some_and(|covered| covered.is_coded));
            let Range { start, end } =
                covered.map_or(extent.offset..extent.end(), |covered| covered.range);
            match spans.last_mut() {
                Some(last)
                    if last.is_coded == is_coded && last.touches(extent.file, start, unit) =>
                {
                    last.start = last.start.min(start);
                    last.end = last.end.max(end);
                    last.members.push(index);
                    last.in_place &= in_place;
                }
                _ => {
                    let (file, members) = (extent.file, vec![index]);
                    spans.push(Span { file, start, end, members, in_place, is_coded });
                }
            }
        }
        let layout = place(extents, &spans, alignment);
        match relayout {
            Some(relayout) => layout.relayout(relayout),
            None => layout,
        }
    }

    /// Adds the ranges of the parts that `relayout` makes. A relayout replaces either one extent, whose range the parts
    /// take, or all extents of the block. The parts begin where the first of these extents is. If they need more bytes
    /// than the extents have, and other extents stay as they are, the parts go after everything else.
    fn relayout(mut self, relayout: &Relayout) -> BlockLayout {
        let replaced = &self.parts[relayout.extents.clone()];
        let range = |part: &Part| part.at..part.at.saturating_add(part.extent.length as usize);
        let read: u64 = replaced.iter().map(|part| part.extent.length).sum();
        let others_stay = replaced.len() < self.parts.len();
        let first = match relayout.bytes() as u64 > read && others_stay {
            true => self.slot_bytes,
            false => replaced.iter().map(|part| part.at).min().unwrap_or(0),
        };
        let mut end = first;
        let made = relayout.part_bytes().map(|bytes| {
            let start = end;
            end = end.saturating_add(bytes as usize);
            start..end
        });
        let (before, behind) =
            (&self.held[..relayout.extents.start], &self.held[relayout.extents.end..]);
        let held: Vec<_> =
            before.iter().cloned().chain(made).chain(behind.iter().cloned()).collect();
        let from = replaced.iter().map(range).collect();
        // If the parts take the range of their extents, the slot grows only if extents overlap in their file.
        let room = aligned_up(end as u64, SLOT_ALIGNMENT as u64) as usize;
        self.slot_bytes = self.slot_bytes.max(room);
        self.held = held.into();
        let relayout = relayout.clone();
        self.relayout = Some(Arc::new(RelayoutBuffer { relayout, from, to: first..end }));
        self
    }

    /// Returns the same layout with everything `bytes` bytes further back in a slot that is larger by as much.
    ///
    /// # Panics
    /// Panics if `bytes` is no multiple of 4096, or if there is a relayout.
    pub fn moved(mut self, bytes: usize) -> BlockLayout {
        assert!(bytes.is_multiple_of(SLOT_ALIGNMENT), "reads go to aligned memory");
        assert!(self.relayout.is_none(), "a relayout has places of its own");
        self.parts = self.parts.iter().map(|part| Part { at: part.at + bytes, ..*part }).collect();
        self.held = self.held.iter().map(|held| held.start + bytes..held.end + bytes).collect();
        let regions = self.regions.iter();
        self.regions = regions.map(|region| Region { at: region.at + bytes, ..*region }).collect();
        self.slot_bytes = self.slot_bytes.saturating_add(bytes);
        self
    }

    /// Returns the same layout without the bytes that aligned reads add around the wanted ones.
    pub(crate) fn exact(mut self) -> BlockLayout {
        let exact = |region: &Region| {
            let head = region.wanted_start.saturating_sub(region.offset);
            let (offset, at) = (region.offset + head, region.at + head as usize);
            Region { offset, at, length: region.wanted_end.saturating_sub(offset), ..*region }
        };
        self.regions = self.regions.iter().map(exact).collect();
        self
    }

    /// Returns the same layout without its relayout.
    pub(crate) fn as_read(&self) -> BlockLayout {
        BlockLayout { relayout: None, ..self.clone() }
    }

    /// Returns the number of bytes that the parts need, without the extra bytes of aligned reads.
    pub fn wanted_bytes(&self) -> u64 {
        self.wanted_bytes
    }
}

/// A range of one file that one read covers, with its extents.
struct Span {
    file: FileIndex,
    start: u64,
    end: u64,
    members: Vec<usize>,
    /// True if the span begins at an aligned byte wherever its extents lie, as the chunks of a pack do.
    in_place: bool,
    is_coded: bool,
}

impl Span {
    fn touches(&self, file: FileIndex, start: u64, unit: u64) -> bool {
        // Between tensors of a coded block may be padding, which is then read along.
        let unit = if self.is_coded { SLOT_ALIGNMENT as u64 } else { unit };
        self.file == file && start / unit * unit <= aligned_up(self.end, unit)
    }
}

fn place(extents: &[Extent], spans: &[Span], alignment: usize) -> BlockLayout {
    let unit = alignment as u64;
    let mut parts: Vec<Part> = extents.iter().map(|&extent| Part { extent, at: 0 }).collect();
    let mut regions = Vec::with_capacity(spans.len());
    let mut at = 0_u64;
    for span in spans {
        // Parts keep their position within an aligned unit. Only reads that are not decoded begin at one.
        let aligned = span.start / unit * unit;
        let offset = if span.is_coded { span.start } else { aligned };
        let first = at.saturating_add(offset - aligned);
        for &member in &span.members {
            parts[member].at = first.saturating_add(extents[member].offset - offset) as usize;
        }
        regions.push(Region {
            file: span.file,
            offset,
            length: if span.is_coded {
                span.end - offset
            } else {
                aligned_up(span.end - offset, unit)
            },
            at: first as usize,
            wanted_start: span.start,
            wanted_end: span.end,
        });
        // Leave room for the longest possible head, so that the size does not depend on where the span begins.
        let head = if span.in_place { span.start - aligned } else { unit - 1 };
        let room = aligned_up((span.end - span.start).saturating_add(head), unit);
        at = at.saturating_add(room);
    }
    let range = |part: &Part| part.at..part.at.saturating_add(part.extent.length as usize);
    BlockLayout {
        held: parts.iter().map(range).collect(),
        relayout: None,
        parts: parts.into(),
        slot_bytes: aligned_up(at, SLOT_ALIGNMENT as u64) as usize,
        regions: regions.into(),
        alignment,
        wanted_bytes: extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.length)),
    }
}

/// Rounds up to a multiple of `unit`. If that would exceed the 64-bit range, returns the largest multiple instead.
fn aligned_up(value: u64, unit: u64) -> u64 {
    value.div_ceil(unit).checked_mul(unit).unwrap_or(u64::MAX / unit * unit)
}

#[cfg(test)]
mod tests {
    use forebay_format::{Step, TensorType};
    use proptest::prelude::*;

    use super::*;

    fn extent(file: u32, offset: u64, length: u64) -> Extent {
        Extent { file: FileIndex(file), offset, length }
    }

    #[test]
    fn adjacent_extents_become_one_read() {
        let layout = BlockLayout::plan(
            &[extent(0, 1100, 400), extent(0, 1000, 100), extent(1, 1500, 10)],
            512,
        );
        assert_eq!(layout.regions.len(), 2);
        assert_eq!(layout.parts[1].at, 1000 % 512);
        assert_eq!(layout.parts[0].at, 1000 % 512 + 100);
        assert_eq!(layout.wanted_bytes(), 510);
    }

    #[test]
    fn equal_lengths_make_equal_slots_wherever_they_lie() {
        let sizes: Vec<usize> = (0..600)
            .map(|offset| {
                let far = 1 << 20;
                BlockLayout::plan(&[extent(0, offset, 5000), extent(0, far + offset, 512)], 512)
                    .slot_bytes
            })
            .collect();
        assert!(sizes.iter().all(|&size| size == sizes[0]), "{sizes:?}");
    }

    #[test]
    fn nothing_to_read_needs_no_slot() {
        assert_eq!(BlockLayout::plan(&[], 512).slot_bytes, 0);
        let empty = BlockLayout::plan(&[extent(0, 77, 0)], 512);
        assert_eq!((empty.slot_bytes, empty.regions.len()), (0, 0));
    }

    /// Returns a block with three extents, adjacent in their file. The middle one has `bytes` bytes and a relayout.
    fn heads_among_others(rank: usize, ty: TensorType, bytes: u64) -> Block {
        let mut block = Block::default();
        block.push(extent(0, 1000, 300));
        let heads = Step::Heads { extent: 0, heads: 2, plain: 3, value: 5, rank, ty };
        block.push_relayout(&[extent(0, 1300, bytes)], vec![heads]);
        block.push(extent(0, 1300 + bytes, 50));
        block
    }

    #[test]
    fn parts_that_are_made_take_the_place_of_their_extents() {
        let block = heads_among_others(100, TensorType::F16, 3200);
        for unit in [1, 512, 4096] {
            let layout = BlockLayout::plan_block(&block, unit);
            let lengths: Vec<usize> = layout.held.iter().map(Range::len).collect();
            assert_eq!(lengths, [300, 1200, 2000, 50]);
            let mut places = layout.held.to_vec();
            places.sort_by_key(|place| place.start);
            assert!(places.windows(2).all(|pair| pair[0].end <= pair[1].start), "{places:?}");
            assert!(places[3].end <= layout.slot_bytes);
            let relayout = layout.relayout.as_ref().unwrap();
            assert_eq!(relayout.from[0].len(), 3200);
            assert_eq!(relayout.from[0], relayout.to);
            assert_eq!(relayout.to, layout.held[1].start..layout.held[2].end);
        }
    }

    #[test]
    fn parts_that_need_more_than_their_extents_go_behind_all() {
        let block = heads_among_others(64, TensorType::Q8_0, 1088);
        for unit in [1, 512, 4096] {
            let layout = BlockLayout::plan_block(&block, unit);
            let lengths: Vec<usize> = layout.held.iter().map(Range::len).collect();
            assert_eq!(lengths, [300, 768, 680, 50]);
            let relayout = layout.relayout.as_ref().unwrap();
            assert_eq!(relayout.to, layout.held[1].start..layout.held[2].end);
            let read = layout.regions.iter().map(|region| region.at + region.length as usize);
            assert!(read.max() <= Some(relayout.to.start) && relayout.to.end <= layout.slot_bytes);
        }
    }

    #[test]
    fn a_relaid_out_expert_fits_its_slot_wherever_its_extents_lie() {
        let step = |blocks, turns| Step::Mxfp4 {
            blocks,
            scales: blocks + 2,
            rows: 64,
            row_blocks: 3,
            turns,
        };
        for shift in 0..700 {
            let extents = [(0, 3072), (1 << 20, 3072), (1 << 21, 192), (1 << 22, 192)];
            let extents = extents.map(|(at, length)| extent(0, at + 7 * shift, length));
            let mut block = Block::default();
            block.push_relayout(&extents, vec![step(0, 2), step(1, 1)]);
            for unit in [1, 512, 4096] {
                let layout = BlockLayout::plan_block(&block, unit);
                assert_eq!(layout.slot_bytes, BlockLayout::plan(&extents, unit).slot_bytes);
                let lengths: Vec<usize> = layout.held.iter().map(Range::len).collect();
                assert_eq!(lengths, [1632, 1632, 3264]);
                assert!(layout.held[2].end <= layout.slot_bytes);
            }
        }
    }

    #[test]
    fn impossible_extents_do_not_overflow() {
        let layout =
            BlockLayout::plan(&[extent(0, u64::MAX - 3, u64::MAX), extent(1, 5, u64::MAX)], 4096);
        assert!(layout.slot_bytes > isize::MAX as usize);
    }

    proptest! {
        #[test]
        fn parts_lie_apart_inside_their_regions(
            given in prop::collection::vec((0_u32..3, 0_u64..100_000, 0_u64..9000), 0..12),
            shift in 0_u32..=12,
        ) {
            let unit = 1_usize << shift;
            let extents: Vec<Extent> = given.iter().map(|&(f, o, l)| extent(f, o, l)).collect();
            let layout = BlockLayout::plan(&extents, unit);
            prop_assert_eq!(layout.slot_bytes % SLOT_ALIGNMENT, 0);

            let mut end = 0;
            for region in layout.regions.iter() {
                prop_assert!(region.at >= end, "regions overlap in the slot");
                prop_assert_eq!(region.at % unit, 0);
                prop_assert_eq!(region.offset % unit as u64, 0);
                prop_assert_eq!(region.length % unit as u64, 0);
                prop_assert!(region.wanted_end <= region.offset + region.length);
                prop_assert!(region.offset + region.length < region.wanted_end + unit as u64);
                end = region.at + region.length as usize;
            }
            prop_assert!(end <= layout.slot_bytes);

            for (part, extent) in layout.parts.iter().zip(&extents) {
                prop_assert_eq!(part.extent, *extent);
                if extent.length == 0 {
                    continue;
                }
                prop_assert_eq!(part.at % unit, (extent.offset % unit as u64) as usize);
                let covering = layout.regions.iter().filter(|region| {
                    region.file == extent.file
                        && region.offset <= extent.offset
                        && region.wanted_end >= extent.offset + extent.length
                        && region.at as u64 + (extent.offset - region.offset) == part.at as u64
                });
                prop_assert_eq!(covering.count(), 1);
            }
        }
    }
}
