//! The layout of a block on the disk and in memory.

use std::ops::Range;

use crate::convert::{RowsTaken, halves_transposed, mxfp4_blocks, transpose, transposed_rows};
use crate::quant::can_dequantize;
use crate::{Extent, TensorType};

/// A group of extents that is read, moved and evicted as one piece.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Extents that are read. In memory they are also the block's parts, in this order. The
    /// relayout, if there is one, replaces its extents with other parts.
    pub extents: Vec<Extent>,
    pub relayout: Option<Relayout>,
}

/// A conversion of one extent of a block, or of all of them, into parts with another layout after
/// reading. Files of other programs hold some weights in an order that no kernel reads. The parts
/// together take at least as many bytes as the extents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relayout {
    /// Extents of the block that are converted.
    pub extents: Range<usize>,
    /// Steps that make the parts, in the order of the parts.
    pub steps: Vec<Step>,
}

/// One step of a relayout, which makes one or a few parts. Extent numbers count from the relayout's
/// first extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Converts gpt-oss's MXFP4 as safetensors files hold it, see [`mxfp4_blocks`]. Row `i` goes to
    /// part `i % turns`, because gate and up rows are interleaved.
    Mxfp4 { blocks: usize, scales: usize, rows: usize, row_blocks: usize, turns: usize },
    /// Splits DeepSeek's `kv_b_proj`, `[heads, plain + value, rank]` of type `ty`, into two parts.
    /// The first is `[heads, rank, plain]` of type [`Step::transposed`], which projects queries
    /// into the latent space. The second is `[heads, value, rank]` of type `ty`.
    Heads { extent: usize, heads: usize, plain: usize, value: usize, rank: usize, ty: TensorType },
    /// Transposes a matrix `[rows, cols]` of type `ty`, whose elements stand alone, and divides the rows of the
    /// result into `parts` equal parts (Llama 4's experts).
    Transposed { extent: usize, rows: usize, cols: usize, parts: usize, ty: TensorType },
}

/// A share of a relayout's output, which can be made independently of the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayoutShare {
    /// Byte range of the share in the concatenation of all parts.
    pub out: Range<usize>,
    step: usize,
    /// Index of the part among the step's parts.
    part: usize,
    /// Range of rows or heads of the part.
    units: Range<usize>,
}

impl From<Vec<Extent>> for Block {
    fn from(extents: Vec<Extent>) -> Block {
        Block { extents, relayout: None }
    }
}

impl Block {
    /// Returns the number of bytes on the disk.
    pub fn bytes(&self) -> u64 {
        self.extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.length))
    }

    /// Returns the number of bytes of every part in memory, in order.
    pub fn part_bytes(&self) -> Vec<u64> {
        let lengths = |range: Range<usize>| self.extents[range].iter().map(|extent| extent.length);
        let all = self.extents.len();
        let Some(relayout) = &self.relayout else { return lengths(0..all).collect() };
        let Range { start, end } = relayout.extents;
        lengths(0..start).chain(relayout.part_bytes()).chain(lengths(end..all)).collect()
    }

    /// Returns the given parts, and the extents that make them, as a block of their own.
    ///
    /// # Panics
    /// Panics if the range is out of bounds, or if it separates parts of one relayout.
    pub fn slice(&self, parts: Range<usize>) -> Block {
        let Some(relayout) = &self.relayout else {
            return Block { extents: self.extents[parts].to_vec(), relayout: None };
        };
        let made = relayout.parts();
        let extent_of = |part: usize| {
            let before = part.min(relayout.extents.start);
            let behind = part.checked_sub(relayout.extents.start + made);
            assert!(
                part <= relayout.extents.start || behind.is_some(),
                "a slice keeps the extents of one relayout together"
            );
            behind.map_or(before, |behind| relayout.extents.end + behind)
        };
        let extents = extent_of(parts.start)..extent_of(parts.end);
        let holds = parts.start <= relayout.extents.start && !extents.is_empty();
        let holds = holds && extents.end >= relayout.extents.end;
        let first = extents.start;
        let moved = |relayout: &Relayout| Relayout {
            extents: relayout.extents.start - first..relayout.extents.end - first,
            steps: relayout.steps.clone(),
        };
        Block { extents: self.extents[extents].to_vec(), relayout: holds.then(|| moved(relayout)) }
    }

    /// Adds an extent that is not converted. Returns the number of its part.
    ///
    /// # Panics
    /// Panics if the block has a relayout of several extents.
    pub fn push(&mut self, extent: Extent) -> usize {
        let several = self.relayout.as_ref().is_some_and(|relayout| relayout.extents.len() > 1);
        assert!(!several, "a relayout of several extents takes the whole block");
        let part = self.parts();
        self.extents.push(extent);
        part
    }

    /// Adds extents that are converted by `steps`. Returns the number of the first part.
    ///
    /// # Panics
    /// Panics if the block already has a relayout, or if the parts have fewer bytes than the
    /// extents. Panics also if there are several extents and the block is not empty.
    pub fn push_relayout(&mut self, extents: &[Extent], steps: Vec<Step>) -> usize {
        let alone = extents.len() == 1 || self.extents.is_empty();
        assert!(self.relayout.is_none() && alone, "a relayout takes one extent or the whole block");
        let (part, first) = (self.parts(), self.extents.len());
        self.extents.extend(extents);
        let relayout = Relayout { extents: first..self.extents.len(), steps };
        let read: u64 = extents.iter().map(|extent| extent.length).sum();
        assert!(
            relayout.bytes() as u64 >= read,
            "the output of a relayout holds at least what is read"
        );
        self.relayout = Some(relayout);
        part
    }

    fn parts(&self) -> usize {
        match &self.relayout {
            None => self.extents.len(),
            Some(relayout) => self.extents.len() - relayout.extents.len() + relayout.parts(),
        }
    }
}

impl Relayout {
    /// Returns the number of parts that the relayout makes.
    pub fn parts(&self) -> usize {
        self.steps.iter().map(|step| step.layout().0).sum()
    }

    /// Returns the number of bytes of every part that the relayout makes.
    pub fn part_bytes(&self) -> impl Iterator<Item = u64> + '_ {
        self.steps.iter().flat_map(|step| {
            let (parts, ..) = step.layout();
            (0..parts).map(|part| step.part_bytes(part) as u64)
        })
    }

    /// Returns the number of bytes of all parts, which is at least that of all extents.
    pub fn bytes(&self) -> usize {
        self.part_bytes().sum::<u64>() as usize
    }

    /// Divides the output into shares of at most about `share_bytes` bytes each.
    pub fn shares(&self, share_bytes: usize) -> Vec<RelayoutShare> {
        let (mut shares, mut at) = (Vec::new(), 0);
        for (step, of) in self.steps.iter().enumerate() {
            let (parts, units) = of.layout();
            for part in 0..parts {
                let sub_layer_bytes = of.part_bytes(part) / units.max(1);
                let count = (share_bytes / sub_layer_bytes.max(1)).clamp(1, units.max(1));
                for first in (0..units).step_by(count) {
                    let units = first..(first + count).min(units);
                    let end = at + units.len() * sub_layer_bytes;
                    shares.push(RelayoutShare { out: at..end, step, part, units });
                    at = end;
                }
            }
        }
        shares
    }

    /// Makes one share from the bytes of the relayout's extents.
    ///
    /// # Panics
    /// Panics if `from` or `out` has the wrong number of bytes.
    pub fn make(&self, share: &RelayoutShare, from: &[&[u8]], out: &mut [u8]) {
        assert_eq!(out.len(), share.out.len(), "a share has its place");
        let units = share.units.clone();
        match self.steps[share.step] {
            Step::Mxfp4 { blocks, scales, row_blocks, turns, .. } => {
                let first = share.part + turns * units.start;
                let taken = RowsTaken { first, step: turns };
                mxfp4_blocks(from[blocks], from[scales], row_blocks, taken, out);
            }
            Step::Heads { extent, plain, value, rank, ty, .. } => {
                let row = row_bytes(ty, rank);
                let heads = from[extent].chunks_exact((plain + value) * row);
                let heads = heads.skip(units.start).take(units.len());
                let unit = out.len() / units.len().max(1);
                for (head, out) in heads.zip(out.chunks_exact_mut(unit.max(1))) {
                    let (to_transpose, as_is) = head.split_at(plain * row);
                    match share.part {
                        0 if Step::transposed(ty) == ty => {
                            transpose(to_transpose, plain, rank, ty.block_bytes(), out);
                        }
                        0 => halves_transposed(ty, to_transpose, plain, rank, out),
                        _ => out.copy_from_slice(as_is),
                    }
                }
            }
            Step::Transposed { extent, rows, cols, parts, ty } => {
                let first = share.part * (cols / parts) + units.start;
                transposed_rows(from[extent], rows, cols, ty.block_bytes(), first, out);
            }
        }
    }
}

impl Step {
    /// Returns the number of parts that the step makes, and the number of rows or heads in each.
    fn layout(&self) -> (usize, usize) {
        match *self {
            Step::Mxfp4 { rows, turns, .. } => (turns, rows / turns),
            Step::Heads { heads, .. } => (2, heads),
            Step::Transposed { cols, parts, .. } => (parts, cols / parts),
        }
    }

    /// Returns the number of bytes of one of the step's parts.
    pub fn part_bytes(&self, part: usize) -> usize {
        match *self {
            Step::Mxfp4 { rows, row_blocks, turns, .. } => {
                rows / turns * row_blocks * crate::convert::BLOCK
            }
            Step::Heads { heads, plain, rank, ty, .. } if part == 0 => {
                heads * rank * row_bytes(Step::transposed(ty), plain)
            }
            Step::Heads { heads, value, rank, ty, .. } => heads * value * row_bytes(ty, rank),
            Step::Transposed { rows, cols, parts, ty, .. } => {
                cols / parts * rows * ty.block_bytes()
            }
        }
    }

    /// Returns the type of the transposed part of [`Step::Heads`]. F32, F16 and BF16 are kept, and
    /// all other types become [`TensorType::F16`].
    pub fn transposed(ty: TensorType) -> TensorType {
        match ty {
            TensorType::F32 | TensorType::F16 | TensorType::BF16 => ty,
            _ => TensorType::F16,
        }
    }

    /// Returns true if [`Step::Transposed`] can transpose matrices of this type.
    pub fn transposes(ty: TensorType) -> bool {
        ty.block_elements() == 1 && Step::transposed(ty) == ty
    }

    /// Returns true if [`Step::Heads`] can convert rows of `rank` elements of this type.
    pub fn divides_heads(ty: TensorType, rank: usize) -> bool {
        can_dequantize(ty) && ty.row_bytes(rank as u64).is_some()
    }
}

/// Returns the number of bytes of a row. The caller that made the step has checked that rows are
/// whole blocks.
fn row_bytes(ty: TensorType, cols: usize) -> usize {
    cols / ty.block_elements() * ty.block_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FileIndex;

    fn extent(length: u64) -> Extent {
        Extent { file: FileIndex(0), offset: 0, length }
    }

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 31 % 251) as u8).collect()
    }

    /// Makes all parts, share by share.
    fn made(relayout: &Relayout, from: &[&[u8]], share_bytes: usize) -> Vec<u8> {
        let (mut out, mut end) = (vec![0; relayout.bytes()], 0);
        for share in relayout.shares(share_bytes) {
            assert_eq!(share.out.start, end, "shares follow one another");
            end = share.out.end;
            relayout.make(&share, from, &mut out[share.out.clone()]);
        }
        assert_eq!(end, out.len());
        out
    }

    #[test]
    fn an_expert_of_gpt_oss_becomes_gate_up_and_down() {
        let (rows, row_blocks) = (6, 2);
        let (blocks, scales) = (bytes(rows * row_blocks * 16), bytes(rows * row_blocks));
        let mut block = Block::default();
        let steps = vec![
            Step::Mxfp4 { blocks: 0, scales: 2, rows, row_blocks, turns: 2 },
            Step::Mxfp4 { blocks: 1, scales: 3, rows, row_blocks, turns: 1 },
        ];
        let lengths = [blocks.len(), blocks.len(), scales.len(), scales.len()];
        let part = block.push_relayout(&lengths.map(|length| extent(length as u64)), steps);
        let relayout = block.relayout.clone().unwrap();
        assert_eq!(part, 0);
        assert_eq!(block.part_bytes(), [102, 102, 204]);
        assert_eq!(block.bytes(), 408);
        assert!(std::panic::catch_unwind(move || block.push(extent(7))).is_err());
        let from = [&blocks[..], &blocks[..], &scales[..], &scales[..]];
        let whole = made(&relayout, &from, usize::MAX);
        let mut expected = vec![0; 408];
        let taken = |first, step| RowsTaken { first, step };
        mxfp4_blocks(&blocks, &scales, row_blocks, taken(0, 2), &mut expected[..102]);
        mxfp4_blocks(&blocks, &scales, row_blocks, taken(1, 2), &mut expected[102..204]);
        mxfp4_blocks(&blocks, &scales, row_blocks, RowsTaken::ALL, &mut expected[204..]);
        assert!(whole == expected);
        for share_bytes in [1, 35, 100] {
            assert!(made(&relayout, &from, share_bytes) == expected, "{share_bytes}");
        }
    }

    #[test]
    fn quantised_heads_become_a_stack_of_halves_and_one_of_rows() {
        let (heads, plain, value, rank) = (2, 3, 2, 64);
        let row = 2 * 34;
        // Scales of 1, 2 and 0.5.
        let mut from = bytes(heads * (plain + value) * row);
        for (index, block) in from.chunks_exact_mut(34).enumerate() {
            block[..2].copy_from_slice(&[0x3c00_u16, 0x4000, 0x3800][index % 3].to_le_bytes());
        }
        let step = Step::Heads { extent: 0, heads, plain, value, rank, ty: TensorType::Q8_0 };
        assert_eq!(step.part_bytes(0), heads * rank * plain * 2);
        let mut block = Block::default();
        block.push_relayout(&[extent(from.len() as u64)], vec![step]);
        let relayout = block.relayout.unwrap();
        assert!(relayout.bytes() > from.len());
        let mut expected = Vec::<u8>::new();
        for head in from.chunks_exact((plain + value) * row) {
            for col in 0..rank {
                for row in head.chunks_exact(row).take(plain) {
                    let block = &row[col / 32 * 34..][..34];
                    let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
                    let value = scale * f32::from(block[2 + col % 32] as i8);
                    expected.extend(half::f16::from_f32(value).to_le_bytes());
                }
            }
        }
        for head in from.chunks_exact((plain + value) * row) {
            expected.extend(&head[plain * row..]);
        }
        for share_bytes in [usize::MAX, 1, 400] {
            assert!(made(&relayout, &[&from], share_bytes) == expected, "{share_bytes}");
        }
    }

    #[test]
    fn heads_become_two_stacks() {
        let (heads, plain, value, rank, size) = (3, 4, 5, 2, 2);
        let step = Step::Heads { extent: 0, heads, plain, value, rank, ty: TensorType::BF16 };
        let from = bytes(heads * (plain + value) * rank * size);
        let relayout = Relayout { extents: 0..1, steps: vec![step] };
        let element = |head: usize, row: usize, col: usize| {
            let at = ((head * (plain + value) + row) * rank + col) * size;
            &from[at..at + size]
        };
        let mut expected = Vec::<u8>::new();
        for head in 0..heads {
            for col in 0..rank {
                (0..plain).for_each(|row| expected.extend(element(head, row, col)));
            }
        }
        for head in 0..heads {
            for row in plain..plain + value {
                (0..rank).for_each(|col| expected.extend(element(head, row, col)));
            }
        }
        for share_bytes in [usize::MAX, 1, 40] {
            assert!(made(&relayout, &[&from], share_bytes) == expected, "{share_bytes}");
        }
    }

    #[test]
    fn a_transposed_matrix_is_divided_into_parts() {
        let (rows, cols, size) = (70, 6, 2);
        let from = bytes(rows * cols * size);
        let step = Step::Transposed { extent: 0, rows, cols, parts: 2, ty: TensorType::BF16 };
        let relayout = Relayout { extents: 0..1, steps: vec![step] };
        let mut block = Block::default();
        block.push_relayout(&[extent(from.len() as u64)], relayout.steps.clone());
        assert_eq!(block.part_bytes(), [420, 420]);
        let mut expected = Vec::<u8>::new();
        for col in 0..cols {
            (0..rows).for_each(|row| expected.extend(&from[(row * cols + col) * size..][..size]));
        }
        for share_bytes in [usize::MAX, 1, 300] {
            assert!(made(&relayout, &[&from], share_bytes) == expected, "{share_bytes}");
        }
    }

    #[test]
    fn a_slice_keeps_the_extents_of_one_relayout_together() {
        let step =
            Step::Heads { extent: 0, heads: 1, plain: 1, value: 1, rank: 4, ty: TensorType::BF16 };
        let mut block = Block::from(vec![extent(1), extent(2)]);
        block.push_relayout(&[extent(16)], vec![step]);
        block.push(extent(3));
        block.push(extent(4));
        // Parts: 1, 2, 8, 8, 3, 4.
        let attention = block.slice(0..5);
        assert_eq!(attention.part_bytes(), [1, 2, 8, 8, 3]);
        assert_eq!(attention.relayout, block.relayout);
        let behind = block.slice(4..6);
        assert_eq!((behind.part_bytes(), behind.relayout), (vec![3, 4], None));
        let later = block.slice(1..4);
        assert_eq!(later.part_bytes(), [2, 8, 8]);
        assert_eq!(later.relayout.unwrap().extents, 1..2);
        let before = block.slice(0..2);
        assert_eq!((before.part_bytes(), before.relayout), (vec![1, 2], None));
        assert!(std::panic::catch_unwind(|| block.slice(0..3)).is_err());
    }
}
