//! The layout of a block on the disk and in memory.

use std::ops::Range;

use crate::convert::{RowsTaken, halves_transposed, mxfp4_blocks, transpose, transposed_rows};
use crate::quant::can_dequantize;
use crate::quantized::{Form, Quantized, fp8_transposed};
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
    /// Divides a matrix of `rows` rows into `turns` parts: row `i` goes to part `i % turns`, because gate and up rows are
    /// interleaved (Inkling).
    Turns { extent: usize, rows: usize, row_bytes: usize, turns: usize },
    /// Takes an extent of `rows` rows as it is. Blocks that are converted as a whole have this step for
    /// tensors that need no conversion.
    Copy { extent: usize, rows: usize, row_bytes: usize },
    /// Joins codes, scales and zero points, the extents from `first` on.
    Quantized { first: usize, of: Quantized },
    /// Does the same as [`Step::Heads`] for quantised heads, [`Form::Fp8`]. The first part has the type
    /// `transposed`, and the same values.
    QuantizedHeads {
        first: usize,
        of: Quantized,
        transposed: TensorType,
        heads: usize,
        plain: usize,
    },
}

/// A relayout's steps that can be made without the others: its extents and parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepGroup {
    /// Extents, counted from the block's first.
    pub extents: Range<usize>,
    /// Parts, counted from the block's first.
    pub parts: Range<usize>,
    /// The steps alone. Their extents are those of the group.
    pub relayout: Relayout,
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
        if relayout.extents == (0..self.extents.len()) && parts != (0..made) {
            return self.slice_of_steps(&parts);
        }
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
    /// Panics if the block has a relayout of several extents that takes the whole block.
    pub fn push(&mut self, extent: Extent) -> usize {
        let part = self.parts();
        if self.is_whole() {
            let step = copy_step(self.extents.len(), &extent);
            self.extents.push(extent);
            let all = self.extents.len();
            if let Some(relayout) = &mut self.relayout {
                relayout.extents.end = all;
                relayout.steps.push(step);
            }
            return part;
        }
        let several = self.relayout.as_ref().is_some_and(|relayout| relayout.extents.len() > 1);
        assert!(!several, "a relayout of several extents takes the whole block");
        self.extents.push(extent);
        part
    }

    /// Adds the extents of a step that joins tensors. All of the block is then converted: other extents
    /// are copied. Returns the number of the step's first part.
    ///
    /// # Panics
    /// Panics if the step makes fewer bytes than it reads, or if the block has a relayout of several
    /// extents with other steps.
    pub fn push_quantized(&mut self, extents: &[Extent], step: Step) -> usize {
        let part = self.parts();
        self.make_whole();
        let read: u64 = extents.iter().map(|extent| extent.length).sum();
        let (parts, ..) = step.layout();
        let made: usize = (0..parts).map(|part| step.part_bytes(part)).sum();
        assert!(made as u64 >= read, "a step makes at least what it reads");
        let first = self.extents.len();
        self.extents.extend(extents);
        let all = self.extents.len();
        let relayout = self.relayout.get_or_insert(Relayout { extents: 0..all, steps: Vec::new() });
        relayout.extents = 0..all;
        relayout.steps.push(step.renumbered(|extent| first + extent));
        part
    }

    /// Returns true if all of the block is converted, step by step.
    fn is_whole(&self) -> bool {
        let all = 0..self.extents.len();
        let is_joined = |step: &Step| !matches!(step, Step::Heads { .. }) && step.reads().is_some();
        self.relayout
            .as_ref()
            .is_some_and(|relayout| relayout.extents == all && relayout.steps.iter().any(is_joined))
    }

    /// Converts all of the block, with steps that copy what is not converted yet.
    fn make_whole(&mut self) {
        if self.is_whole() || self.extents.is_empty() {
            return;
        }
        let (range, made) = match self.relayout.take() {
            Some(relayout) => (relayout.extents, relayout.steps),
            None => (0..0, Vec::new()),
        };
        assert!(range.len() <= 1, "a relayout of several extents takes the whole block");
        let copies = |of: Range<usize>| of.map(|index| copy_step(index, &self.extents[index]));
        let mut steps: Vec<Step> = copies(0..range.start).collect();
        steps.extend(made.into_iter().map(|step| step.renumbered(|extent| range.start + extent)));
        steps.extend(copies(range.end..self.extents.len()));
        self.relayout = Some(Relayout { extents: 0..self.extents.len(), steps });
    }

    /// Returns the parts of whole steps as a block of their own.
    fn slice_of_steps(&self, parts: &Range<usize>) -> Block {
        let mut block = Block::default();
        let mut next = parts.start;
        let groups = self.relayout.iter().flat_map(|relayout| relayout.groups());
        for group in groups.filter(|group| group.parts.start >= parts.start) {
            if group.parts.end > parts.end {
                break;
            }
            assert_eq!(next, group.parts.start, "a slice takes whole steps");
            next = group.parts.end;
            let extents = &self.extents[group.extents];
            for step in group.relayout.steps {
                match step {
                    Step::Copy { .. } => block.push(extents[0]),
                    Step::Heads { .. } => block.push_heads(extents, step),
                    step => block.push_quantized(extents, step),
                };
            }
        }
        assert_eq!(next, parts.end, "a slice takes whole steps");
        block
    }

    /// Adds the matrix that `step` turns into stacks of matrices of heads. Returns the number of the first part.
    ///
    /// # Panics
    /// Panics as [`Block::push_relayout`] does.
    pub fn push_heads(&mut self, extents: &[Extent], step: Step) -> usize {
        match self.relayout {
            None => self.push_relayout(extents, vec![step]),
            Some(_) => self.push_quantized(extents, step),
        }
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

    /// Returns the steps in groups that read different extents. Parts and extents of a group are
    /// adjacent.
    pub fn groups(&self) -> Vec<StepGroup> {
        let (mut part, start) = (self.extents.start, self.extents.start);
        let alone = self.steps.iter().all(|step| step.reads().is_some());
        if !alone {
            let parts = part..part + self.parts();
            let relayout = Relayout { extents: 0..self.extents.len(), steps: self.steps.clone() };
            return vec![StepGroup { extents: self.extents.clone(), parts, relayout }];
        }
        let group = |step: &Step| {
            let reads = step.reads().expect("just looked");
            let parts = part..part + step.layout().0;
            part = parts.end;
            let steps = vec![step.clone().renumbered(|extent| extent - reads.start)];
            let relayout = Relayout { extents: 0..reads.len(), steps };
            StepGroup { extents: start + reads.start..start + reads.end, parts, relayout }
        };
        self.steps.iter().map(group).collect()
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
            Step::Turns { extent, row_bytes, turns, .. } => {
                let rows = from[extent].chunks_exact(row_bytes);
                let rows = rows.skip(share.part + turns * units.start).step_by(turns);
                for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes)) {
                    out.copy_from_slice(row);
                }
            }
            Step::Copy { extent, row_bytes, .. } => {
                let bytes = units.start * row_bytes..units.end * row_bytes;
                out.copy_from_slice(&from[extent][bytes]);
            }
            Step::Quantized { first, ref of } => of.make(&from[first..], units, out),
            Step::QuantizedHeads { first, ref of, transposed, heads, plain } => {
                let (from, all) = (&from[first..], of.rows / heads);
                let unit = out.len() / units.len().max(1);
                for (head, out) in units.zip(out.chunks_exact_mut(unit.max(1))) {
                    let rows = head * all..(head + 1) * all;
                    let middle = rows.start + plain;
                    match (share.part, of.form) {
                        (0, Form::Fp8 { scales }) => {
                            let rows = rows.start..middle;
                            fp8_transposed(transposed, scales, from, rows, of.cols, out);
                        }
                        (0, _) => unreachable!("heads are of codes with 8 bits"),
                        _ => of.make(from, middle..rows.end, out),
                    }
                }
            }
        }
    }
}

impl Step {
    /// Returns the number of parts that the step makes, and the number of rows or heads in each.
    fn layout(&self) -> (usize, usize) {
        match *self {
            Step::Mxfp4 { rows, turns, .. } => (turns, rows / turns),
            Step::Heads { heads, .. } | Step::QuantizedHeads { heads, .. } => (2, heads),
            Step::Turns { rows, turns, .. } => (turns, rows / turns),
            Step::Copy { rows, .. } => (1, rows),
            Step::Quantized { ref of, .. } => (1, of.rows),
            Step::Transposed { cols, parts, .. } => (parts, cols / parts),
        }
    }

    /// Returns the extents that the step reads, if it alone reads them and they are adjacent.
    fn reads(&self) -> Option<Range<usize>> {
        match *self {
            Step::Mxfp4 { blocks, scales, .. } if scales == blocks + 1 => Some(blocks..scales + 1),
            Step::Mxfp4 { .. } => None,
            Step::Heads { extent, .. }
            | Step::Transposed { extent, .. }
            | Step::Turns { extent, .. }
            | Step::Copy { extent, .. } => Some(extent..extent + 1),
            Step::Quantized { first, ref of } | Step::QuantizedHeads { first, ref of, .. } => {
                Some(first..first + of.extents())
            }
        }
    }

    /// Returns the same step for extents with other numbers.
    fn renumbered(mut self, number: impl Fn(usize) -> usize) -> Step {
        match &mut self {
            Step::Mxfp4 { blocks, scales, .. } => {
                *blocks = number(*blocks);
                *scales = number(*scales);
            }
            Step::Heads { extent: first, .. }
            | Step::Transposed { extent: first, .. }
            | Step::Turns { extent: first, .. }
            | Step::Copy { extent: first, .. }
            | Step::Quantized { first, .. }
            | Step::QuantizedHeads { first, .. } => *first = number(*first),
        }
        self
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
            Step::Turns { rows, row_bytes, turns, .. } => rows / turns * row_bytes,
            Step::Copy { rows, row_bytes, .. } => rows * row_bytes,
            Step::Quantized { ref of, .. } => of.rows * of.row_bytes(),
            Step::QuantizedHeads { ref of, transposed, heads, plain, .. } if part == 0 => {
                heads * of.cols * row_bytes(transposed, plain)
            }
            Step::QuantizedHeads { ref of, heads, plain, .. } => {
                (of.rows - heads * plain) * of.row_bytes()
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

/// Returns the step that copies extent number `index`. Its rows are pieces of a size that threads can
/// share.
fn copy_step(index: usize, extent: &Extent) -> Step {
    let bytes = extent.length as usize;
    let rows = (1..=64).rev().find(|rows| bytes.is_multiple_of(*rows)).unwrap_or(1);
    Step::Copy { extent: index, rows, row_bytes: bytes / rows }
}

/// Returns the number of bytes of a row. The caller has checked that rows are whole blocks.
pub(crate) fn row_bytes(ty: TensorType, cols: usize) -> usize {
    cols / ty.block_elements() * ty.block_bytes()
}

#[cfg(test)]
mod tests;
