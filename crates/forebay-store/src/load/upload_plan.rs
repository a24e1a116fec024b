//! Plans of loads to a device: which bytes of which files go to which address. A plan is cut into pieces, each of
//! which is one read followed by a few copies.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use forebay_format::{Extent, FileIndex};

use super::remote::UploadCopy;
use super::straight::DeviceSpan;
use crate::arena::{SLOT_ALIGNMENT, SlotBuffer};
use crate::chunks::Chunks;
use crate::engine::BlockLabel;
use crate::files::FileSet;
use crate::layout::{BlockLayout, Region};
use crate::pieces::Piece;

/// Largest gap in bytes between two parts that is read along. Beginning another read costs more.
const READ_OVER: u64 = 64 << 10;
/// Largest gap in bytes between two parts that is copied along, if the same gap is between their device addresses.
const COPY_OVER: u64 = SLOT_ALIGNMENT as u64;
/// Smallest remainder of a part in bytes that a cut between pieces leaves. Smaller copies waste the bandwidth to the
/// device.
const COPY_MIN: u64 = 256 << 10;

/// An extent of a file and its address on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UploadPart {
    /// The block that the part belongs to, for errors and traces.
    pub label: BlockLabel,
    pub extent: Extent,
    /// Address of the first byte, as the [`super::Upload`] counts addresses.
    pub to: u64,
}

/// A load to a device, cut into pieces.
#[derive(Debug)]
pub struct UploadPlan {
    pieces: Vec<Planned>,
    bytes: u64,
}

#[derive(Clone, Debug)]
struct Planned {
    label: BlockLabel,
    layout: BlockLayout,
    copies: Arc<[UploadCopy]>,
}

/// Parts that are adjacent both in a file and on the device. They need one copy, unless that would be too long.
#[derive(Clone, Copy)]
struct Stretch {
    label: BlockLabel,
    file: FileIndex,
    start: u64,
    end: u64,
    to: u64,
}

impl UploadPlan {
    /// Plans the load of `parts` from `files`. The parts may be in any order. A piece reads at most `piece_bytes`, or
    /// one chunk with a checksum if that is longer.
    pub fn new(parts: &[UploadPart], files: &FileSet, piece_bytes: u64) -> UploadPlan {
        let unit = SLOT_ALIGNMENT as u64;
        let step = (piece_bytes / unit * unit).max(unit);
        let mut pieces = Vec::new();
        let stretches = stretches(parts);
        for run in stretches.chunk_by(|a, b| {
            let gap = b.start.checked_sub(a.end);
            a.file == b.file && gap.is_some_and(|gap| gap <= READ_OVER)
        }) {
            let chunks = files.file(run[0].file).and_then(|file| file.chunks.as_ref());
            let mut at = run[0].start;
            let (mut rest, end) = (run, run[run.len() - 1].end);
            while at < end {
                let next = match chunks {
                    Some(chunks) => chunk_cut(chunks, at, end, step),
                    None => part_cut(rest, at, end, step),
                };
                pieces.push(piece(rest, at..next, chunks));
                rest = &rest[rest.partition_point(|stretch| stretch.end <= next)..];
                at = rest.first().map_or(end, |stretch| stretch.start.max(next));
            }
        }
        let bytes = parts.iter().fold(0_u64, |sum, part| sum.saturating_add(part.extent.length));
        UploadPlan { pieces, bytes }
    }

    /// Returns the number of pieces: reads, or copies out of the page cache.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the number of bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of bytes that every slot of the ring must have room for.
    pub fn slot_bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.layout.slot_bytes).max().unwrap_or(0)
    }

    /// Returns the span of each copy, in the order of the files. The bytes that pieces read around and between the
    /// copies are left out.
    pub(super) fn straight(&self) -> Vec<(BlockLabel, DeviceSpan)> {
        let spans = self.pieces.iter().flat_map(|piece| {
            let region = piece.layout.regions[0];
            piece.copies.iter().map(move |copy| {
                let offset = region.offset + copy.range.start as u64;
                let (length, to) = (copy.range.len(), copy.to);
                (piece.label, DeviceSpan { file: region.file, offset, length, to })
            })
        });
        spans.collect()
    }

    /// Returns the label of the piece with this index.
    pub(super) fn label(&self, index: usize) -> BlockLabel {
        self.pieces[index].label
    }

    /// Returns the pieces, without slots, and the copies of each.
    pub(super) fn cut(&self) -> (Vec<Piece>, Vec<Arc<[UploadCopy]>>) {
        let piece = |(index, planned): (usize, &Planned)| Piece {
            index,
            label: planned.label,
            layout: planned.layout.clone(),
            buffer: SlotBuffer::empty(),
        };
        let copies = self.pieces.iter().map(|planned| Arc::clone(&planned.copies));
        (self.pieces.iter().enumerate().map(piece).collect(), copies.collect())
    }
}

/// Joins adjacent parts into stretches. The result is in the order of the files.
fn stretches(parts: &[UploadPart]) -> Vec<Stretch> {
    let mut parts: Vec<&UploadPart> = parts.iter().filter(|part| part.extent.length > 0).collect();
    // The gap between two device addresses may be overwritten only if it belongs to no other part.
    parts.sort_by_key(|part| part.to);
    let pairs = parts.windows(2).map(|pair| (pair[0].to, pair[1].to));
    let next_place: HashMap<u64, u64> = pairs.collect();
    parts.sort_by_key(|part| (part.extent.file.0, part.extent.offset));
    let mut stretches: Vec<Stretch> = Vec::new();
    let mut last_to = None;
    for part in parts {
        let Extent { file, offset, length } = part.extent;
        let end = offset.saturating_add(length);
        let follows = last_to.and_then(|to| next_place.get(&to)) == Some(&part.to);
        last_to = Some(part.to);
        if let Some(last) = stretches.last_mut().filter(|last| follows && last.file == file)
            && let Some(gap) = offset.checked_sub(last.end)
            && gap <= COPY_OVER
            && part.to == last.to + (offset - last.start)
        {
            last.end = end;
            continue;
        }
        let (label, to) = (part.label, part.to);
        stretches.push(Stretch { label, file, start: offset, end, to });
    }
    stretches
}

/// Returns the end of the piece that begins at `at`, in a file without checksums. The piece is as long as allowed, but
/// is not cut where a short remainder of a stretch would be left on either side. (Ending pieces with whole experts was
/// slower: 30 GB/s instead of 36 when a piece is two experts of 0.84 MiB.)
fn part_cut(run: &[Stretch], at: u64, end: u64, step: u64) -> u64 {
    let page = SLOT_ALIGNMENT as u64;
    let limit = (at / page * page).saturating_add(step);
    if end <= limit {
        return end;
    }
    let least = COPY_MIN.min(step / 8);
    let ends = run.iter().map(|stretch| stretch.end);
    let whole = ends.take_while(|&end| end <= limit).last();
    if let Some(whole) = whole.filter(|&whole| whole >= limit - least) {
        return whole;
    }
    let cut = run.iter().find(|stretch| stretch.end > limit);
    match cut {
        Some(cut) if cut.end - limit < least => (limit - least) / page * page,
        _ => limit,
    }
    .max(at / page * page + page)
}

/// Returns the end of the piece that begins at `at`, in a pack, where pieces consist of whole chunks.
fn chunk_cut(chunks: &Chunks, at: u64, end: u64, step: u64) -> u64 {
    let limit = chunks.cover(at..at + 1).start.saturating_add(step);
    // Coded blocks and others are read differently.
    let end = end.min(chunks.end_of_kind(at));
    if end <= limit {
        return end;
    }
    let chunk = chunks.cover(limit..limit + 1);
    if chunk.start > at { chunk.start } else { chunk.end.min(end) }
}

/// Plans the piece that reads `range` of a file. The first stretch of `run` is the one that the range begins in.
fn piece(run: &[Stretch], range: Range<u64>, chunks: Option<&Chunks>) -> Planned {
    let page = SLOT_ALIGNMENT as u64;
    let covered = chunks.map_or(range.clone(), |chunks| chunks.cover(range.clone()));
    let is_coded = chunks.is_some_and(|chunks| chunks.is_coded_at(range.start));
    let offset = if is_coded { covered.start } else { covered.start / page * page };
    let (mut wanted_bytes, mut label, mut most) = (0, run[0].label, 0);
    let inside = run.iter().take_while(|stretch| stretch.start < range.end);
    let copies = inside.map(|stretch| {
        let (start, end) = (stretch.start.max(range.start), stretch.end.min(range.end));
        wanted_bytes += end - start;
        if end - start > most {
            (label, most) = (stretch.label, end - start);
        }
        let range = (start - offset) as usize..(end - offset) as usize;
        UploadCopy { range, to: stretch.to + (start - stretch.start) }
    });
    let copies: Arc<[UploadCopy]> = copies.collect();
    // If the length overflows, use one beyond the end of every file, which the engine refuses.
    let room = (covered.end - offset).checked_next_multiple_of(page).unwrap_or(u64::MAX);
    let length = if is_coded { covered.end - offset } else { room };
    let Range { start: wanted_start, end: wanted_end } = covered;
    let region = Region { file: run[0].file, offset, length, at: 0, wanted_start, wanted_end };
    let layout = BlockLayout {
        parts: Arc::default(),
        held: Arc::default(),
        relayout: None,
        slot_bytes: room as usize,
        regions: Arc::new([region]),
        alignment: SLOT_ALIGNMENT,
        wanted_bytes,
    };
    Planned { label, layout, copies }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP: u64 = 2 << 20;

    fn part(offset: u64, length: u64, to: u64) -> UploadPart {
        let extent = Extent { file: FileIndex(0), offset, length };
        UploadPart { label: BlockLabel::Other(offset), extent, to }
    }

    /// Returns the lengths of all copies, piece by piece.
    fn copies(parts: &[UploadPart], piece_bytes: u64) -> Vec<Vec<usize>> {
        let files = FileSet::in_memory(vec![Vec::new()]);
        let plan = UploadPlan::new(parts, &files, piece_bytes);
        let lengths = |piece: &Planned| piece.copies.iter().map(|copy| copy.range.len()).collect();
        plan.pieces.iter().map(lengths).collect()
    }

    #[test]
    fn neighbours_on_both_sides_are_one_copy() {
        // In file order, with a gap that belongs to no part on the device.
        let parts = [part(1000, 500, 8000), part(1500, 20, 8500), part(1540, 60, 8540)];
        assert_eq!(copies(&parts, STEP), [[600]]);
        // The gap on the device belongs to a third part.
        let parts = [part(1000, 500, 8000), part(1540, 60, 8540), part(9000, 10, 8510)];
        assert_eq!(copies(&parts, STEP), [[500, 60, 10]]);
    }

    #[test]
    fn experts_of_a_stack_are_few_copies_and_none_is_short() {
        let bytes = 884_736;
        let parts: Vec<_> =
            (0..128).map(|i| part(4128 + i * bytes, bytes, i * 3 * bytes)).collect();
        let found = copies(&parts, STEP);
        assert!(found.len() as u64 <= 128 * bytes / (STEP * 7 / 8) + 1, "{} pieces", found.len());
        assert!(found.iter().all(|piece| piece.len() <= 4));
        assert!(found.concat().iter().all(|&length| length as u64 >= COPY_MIN), "{found:?}");
    }

    #[test]
    fn no_small_rest_is_left_of_a_long_part() {
        let found = copies(&[part(100, STEP + 5000, 0)], STEP);
        let lengths = found.concat();
        assert_eq!(lengths.iter().sum::<usize>() as u64, STEP + 5000);
        assert!(
            lengths.len() == 2 && lengths.iter().all(|&length| length >= 256 << 10),
            "{found:?}"
        );
    }

    proptest! {
        #[test]
        fn every_byte_goes_to_its_place_once(
            given in prop::collection::vec((0_u64..90_000, 1_u64..40_000, 0_u64..300), 1..12),
            piece_bytes in 1_u64..60_000,
        ) {
            let (mut parts, mut at, mut to) = (Vec::new(), 0, 5);
            for (number, &(gap, length, apart)) in given.iter().enumerate() {
                // Often without a gap, both in the file and on the device.
                at += if gap < 60_000 { gap % 50 } else { gap };
                to += if apart < 200 { 0 } else { apart };
                parts.push(UploadPart { label: BlockLabel::Other(number as u64), ..part(at, length, to) });
                (at, to) = (at + length, to + length);
            }
            let files = FileSet::in_memory(vec![Vec::new()]);
            let plan = UploadPlan::new(&parts, &files, piece_bytes);
            // The device memory after the load: for each byte, its file offset plus 1.
            let mut memory = vec![0_u64; to as usize];
            for piece in &plan.pieces {
                let region = piece.layout.regions[0];
                prop_assert_eq!(region.offset % 4096, 0);
                prop_assert_eq!(region.length % 4096, 0);
                prop_assert!(region.wanted_end <= region.offset + region.length);
                prop_assert!(region.length <= plan.slot_bytes() as u64);
                prop_assert!(region.length <= piece_bytes.max(4096) + 4096);
                for copy in piece.copies.iter() {
                    prop_assert!(region.offset + copy.range.end as u64 <= region.wanted_end);
                    for (byte, to) in copy.range.clone().zip(copy.to..) {
                        prop_assert_eq!(memory[to as usize], 0, "twice");
                        memory[to as usize] = region.offset + byte as u64 + 1;
                    }
                }
            }
            for part in &parts {
                for byte in 0..part.extent.length {
                    let found = memory[(part.to + byte) as usize];
                    prop_assert_eq!(found, part.extent.offset + byte + 1);
                }
            }
        }
    }
}
