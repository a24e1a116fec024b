//! What is read of a chosen tensor, and what becomes of it.

use std::ops::Range;

use forebay_format::{StoredTensor, StoredType, TensorType, WeightsTable, can_dequantize};
use forebay_options::{BadOption, OptionName};
use forebay_store::{Extent, FileIndex};

use super::Choice;
use crate::load::error::LoadError;

/// Range of one dimension of a tensor. The other dimensions are whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DimensionSlice {
    /// Number of the dimension, outermost first.
    pub dimension: usize,
    pub start: u64,
    /// Index after the last one.
    pub stop: u64,
}

/// A chosen tensor: equal runs of bytes in one file, in groups at equal distances.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Planned {
    pub name: String,
    /// Type in the file.
    pub stored: StoredType,
    /// Type in memory.
    pub ty: StoredType,
    /// Shape of what is loaded.
    pub shape: Vec<u64>,
    file: FileIndex,
    first: u64,
    /// Number of runs. It is 0 if there are no elements, and 1 if all bytes are adjacent.
    pub count: u64,
    /// Bytes of a run, in whole blocks.
    pub length: u64,
    /// Bytes from one run to the next of its group.
    pub stride: u64,
    /// Number of runs of a group. Each entry of a stack in a pack is a group: it is in another block, so runs of several entries are not
    /// read together.
    pub group: u64,
    /// Bytes from one group to the next.
    group_stride: u64,
    /// Elements of a run that are kept after decoding, if it begins or ends inside a block of compact weights.
    pub kept: Option<Range<u64>>,
}

/// Equal runs of bytes at equal distances.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Runs {
    /// Bytes from the first byte of the tensor to the first run.
    first: u64,
    count: u64,
    length: u64,
    stride: u64,
    kept: Option<Range<u64>>,
}

impl Planned {
    pub fn new(table: &WeightsTable, choice: &Choice, to_f32: bool) -> Result<Planned, LoadError> {
        let tensor = &table.tensors()[choice.tensor];
        let in_pack = table.pack.as_ref().and_then(|pack| pack.tensor(&tensor.name));
        let apart = in_pack.filter(|info| !info.is_contiguous()).map(|info| info.stride);
        Planned::of(tensor, apart, choice.slice, to_f32)
    }

    /// `apart` is the distance of the entries of the outermost dimension, if they are not adjacent.
    pub fn of(
        tensor: &StoredTensor,
        apart: Option<u64>,
        slice: Option<DimensionSlice>,
        to_f32: bool,
    ) -> Result<Planned, LoadError> {
        let refused = |why: &str, slice: DimensionSlice| {
            LoadError::Option(BadOption {
                name: OptionName::Slices,
                value: format!(
                    "{}:{} of dimension {} of tensor {:?}",
                    slice.start, slice.stop, slice.dimension, tensor.name
                ),
                expected: format!("{why} (shape {:?}, type {})", tensor.shape, tensor.ty.name()),
            })
        };
        let mut shape = tensor.shape.clone();
        // Entries that are apart are cut like tensors of their own.
        let (entries, inner) = match apart {
            Some(_) => (tensor.shape.first().copied().unwrap_or(1), &tensor.shape[1..]),
            None => (1, &tensor.shape[..]),
        };
        let entry_stride = apart.unwrap_or(0);
        let (mut of_entries, mut of_inner) = (0..entries, slice);
        if let Some(slice) = slice {
            let Some(size) = shape.get_mut(slice.dimension) else {
                return Err(refused("the tensor has fewer dimensions", slice));
            };
            if slice.start > slice.stop || slice.stop > *size {
                return Err(refused("the range must be inside the dimension", slice));
            }
            *size = slice.stop - slice.start;
            if apart.is_some() {
                let DimensionSlice { dimension, start, stop } = slice;
                of_inner = dimension.checked_sub(1).map(|dimension| DimensionSlice {
                    dimension,
                    start,
                    stop,
                });
                if of_inner.is_none() {
                    of_entries = start..stop;
                }
            }
        }
        let runs = Runs::of(tensor.ty, inner, of_inner);
        let runs = runs.map_err(|why| match slice {
            Some(slice) => refused(why, slice),
            None => LoadError::Option(BadOption {
                name: OptionName::Tensors,
                value: format!("{:?}", tensor.name),
                expected: why.into(),
            }),
        })?;
        let Runs { first, count: mut group, mut length, mut stride, kept } = runs;
        let entries = of_entries.end - of_entries.start;
        let first = tensor.extent.offset + of_entries.start * entry_stride + first;
        let mut count = entries * group;
        if length == 0 || count == 0 {
            (count, length, stride, group) = (0, 0, 0, 0);
        }
        let ty = match tensor.ty {
            StoredType::Tensor(ty) if to_f32 && can_dequantize(ty) => {
                StoredType::Tensor(TensorType::F32)
            }
            StoredType::Tensor(ty) => StoredType::Tensor(ty.plain()),
            ty => ty,
        };
        let (name, stored, file) = (tensor.name.clone(), tensor.ty, tensor.extent.file);
        let group_stride = entry_stride;
        Ok(Planned {
            name,
            stored,
            ty,
            shape,
            file,
            first,
            count,
            length,
            stride,
            group,
            group_stride,
            kept,
        })
    }

    /// Returns the bytes that are read and used.
    pub fn wanted_bytes(&self) -> u64 {
        self.count * self.length
    }

    /// Returns the bytes of the result.
    pub fn bytes(&self) -> u64 {
        self.result_bytes(self.wanted_bytes())
    }

    /// Returns the bytes in memory of `wanted` bytes of the file, which are whole blocks, and whole runs if parts of them are
    /// kept.
    pub fn result_bytes(&self, wanted: u64) -> u64 {
        let elements = match &self.kept {
            Some(kept) => wanted / self.length.max(1) * (kept.end - kept.start),
            None => wanted / self.stored.block_bytes() * self.stored.block_elements(),
        };
        match self.is_converted() {
            true => elements.saturating_mul(self.ty.block_bytes()),
            false => wanted,
        }
    }

    pub fn is_converted(&self) -> bool {
        self.stored != self.ty
    }

    /// Returns run number `index`.
    pub fn run(&self, index: u64) -> Extent {
        let (group, within) = (index / self.group.max(1), index % self.group.max(1));
        let offset = self.first + group * self.group_stride + within * self.stride;
        Extent { file: self.file, offset, length: self.length }
    }

    /// Returns the only run, if the bytes can be read to their place without any further step.
    pub fn direct(&self) -> Option<Extent> {
        (self.count == 1 && !self.is_converted()).then(|| self.run(0))
    }
}

impl Runs {
    /// Returns the runs of adjacent bytes of a tensor that are inside a slice.
    fn of(
        ty: StoredType,
        shape: &[u64],
        slice: Option<DimensionSlice>,
    ) -> Result<Runs, &'static str> {
        let wrong = "the range must begin and end with whole blocks of the type";
        let all =
            DimensionSlice { dimension: 0, start: 0, stop: shape.first().map_or(1, |size| *size) };
        let DimensionSlice { dimension, start, stop } = slice.unwrap_or(all);
        // A single number is a row of one.
        let shape = if shape.is_empty() { &[1] } else { shape };
        // The sizes of the whole tensor are known to fit.
        let count = shape[..dimension].iter().product();
        let (size, inner) = (shape[dimension], &shape[dimension + 1..]);
        let is_compact = matches!(ty, StoredType::Tensor(ty) if ty.compact().is_some());
        let mut kept = None;
        let (mut from, mut to) = (start, stop);
        if inner.is_empty() && is_compact {
            let block = ty.block_elements();
            (from, to) = (start / block * block, stop.div_ceil(block) * block);
            kept = ((from, to) != (start, stop) && start < stop).then(|| start - from..stop - from);
        }
        let bytes = |entries: u64| match inner.is_empty() {
            true => ty.row_bytes(entries),
            false => ty.tensor_bytes(inner).map(|bytes| bytes * entries),
        };
        let length = if start == stop { Some(0) } else { bytes(to - from) };
        let bounds = (bytes(from), length, bytes(size));
        let (Some(first), Some(length), Some(stride)) = bounds else { return Err(wrong) };
        let mut runs = Runs { first, count, length, stride, kept };
        if runs.kept.is_none() && (length == stride || count == 1) {
            runs.length *= count;
            (runs.count, runs.stride) = (1, runs.length);
        }
        Ok(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(ty: StoredType, shape: &[u64]) -> StoredTensor {
        let length = ty.tensor_bytes(shape).unwrap();
        let extent = Extent { file: FileIndex(0), offset: 100, length };
        StoredTensor { name: "t".into(), ty, shape: shape.to_vec(), extent }
    }

    /// Returns the offset from the tensor's begin, the number of runs, and the bytes of each and from one to the next.
    fn cut(
        tensor: &StoredTensor,
        (dimension, start, stop): (usize, u64, u64),
    ) -> Result<(u64, u64, u64, u64), LoadError> {
        let slice = DimensionSlice { dimension, start, stop };
        let planned = Planned::of(tensor, None, Some(slice), false)?;
        let Planned { first, count, length, stride, .. } = planned;
        Ok((first - tensor.extent.offset, count, length, stride))
    }

    #[test]
    fn runs_of_every_dimension() {
        let f16 = tensor(StoredType::Tensor(TensorType::F16), &[4, 6, 10]);
        let of = |dimension, start, stop| cut(&f16, (dimension, start, stop));
        assert_eq!(of(0, 1, 3).unwrap(), (120, 1, 240, 240));
        assert_eq!(of(1, 2, 3).unwrap(), (40, 4, 20, 120));
        assert_eq!(of(2, 9, 10).unwrap(), (18, 24, 2, 20));
        assert_eq!(of(2, 10, 10).unwrap(), (20, 0, 0, 0));
        assert!(of(2, 3, 11).is_err() && of(3, 0, 1).is_err() && of(0, 2, 1).is_err());
        assert!(of(0, u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn blocks_stay_whole() {
        let blocks = tensor(StoredType::Tensor(TensorType::Q8_0), &[3, 96]);
        let of = |dimension, start, stop| cut(&blocks, (dimension, start, stop));
        assert_eq!(of(1, 32, 96).unwrap(), (34, 3, 68, 102));
        assert_eq!(of(0, 1, 2).unwrap(), (102, 1, 102, 102));
        assert!(of(1, 16, 96).is_err());
        let packed = tensor(StoredType::F4, &[8]);
        assert!(cut(&packed, (0, 1, 3)).is_err());
    }

    /// Compact blocks that a slice begins or ends in are read whole, and the rest of them is left out.
    #[test]
    fn compact_blocks_are_cut_after_decoding() {
        let compact = tensor(StoredType::Tensor(TensorType::BF16_C256), &[3, 1024]);
        let of = |start, stop| {
            let slice = DimensionSlice { dimension: 1, start, stop };
            let planned = Planned::of(&compact, None, Some(slice), false).unwrap();
            let bytes = planned.bytes();
            (planned.run(1).offset - compact.extent.offset, planned.length, planned.kept, bytes)
        };
        let block = TensorType::BF16_C256.block_bytes() as u64;
        assert_eq!(of(256, 512), (5 * block, block, None, 3 * 256 * 2));
        assert_eq!(of(300, 600), (5 * block, 2 * block, Some(44..344), 3 * 300 * 2));
        assert_eq!(of(0, 1), (4 * block, block, Some(0..1), 3 * 2));
        assert_eq!(of(1, 1024), (4 * block, 4 * block, Some(1..1024), 3 * 1023 * 2));
    }

    /// The entries of a stack in a pack are apart.
    #[test]
    fn entries_that_are_apart_are_cut_like_tensors() {
        let stack = tensor(StoredType::Tensor(TensorType::F16), &[4, 6, 10]);
        let of = |slice: Option<(usize, u64, u64)>| {
            let slice =
                slice.map(|(dimension, start, stop)| DimensionSlice { dimension, start, stop });
            let planned = Planned::of(&stack, Some(1000), slice, false).unwrap();
            let runs = (0..planned.count).map(|index| planned.run(index).offset - 100);
            (planned.length, runs.collect::<Vec<_>>())
        };
        assert_eq!(of(None), (120, vec![0, 1000, 2000, 3000]));
        assert_eq!(of(Some((0, 1, 3))), (120, vec![1000, 2000]));
        assert_eq!(of(Some((0, 2, 3))), (120, vec![2000]));
        assert_eq!(of(Some((1, 2, 4))), (40, vec![40, 1040, 2040, 3040]));
        let (length, runs) = of(Some((2, 1, 4)));
        assert_eq!((length, runs.len()), (6, 24));
        assert_eq!(runs[..8], [2, 22, 42, 62, 82, 102, 1002, 1022]);
        assert_eq!(of(Some((2, 4, 4))), (0, vec![]));
        assert_eq!(of(Some((0, 4, 4))), (0, vec![]));
    }
}
