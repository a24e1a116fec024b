//! What is read of a chosen tensor, and what becomes of it.

use forebay_format::{StoredTensor, StoredType, TensorType, WeightsTable, can_dequantize};
use forebay_store::{Extent, FileIndex};

use super::Choice;
use crate::EngineError;

/// Range of one dimension of a tensor. The other dimensions are whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DimensionSlice {
    /// Number of the dimension, outermost first.
    pub dimension: usize,
    pub start: u64,
    /// Index after the last one.
    pub stop: u64,
}

/// A chosen tensor: equal runs of bytes at equal distances in one file.
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
    /// Bytes of a run.
    pub length: u64,
    /// Bytes from one run to the next.
    pub stride: u64,
}

impl Planned {
    pub fn new(
        table: &WeightsTable,
        choice: &Choice,
        to_f32: bool,
    ) -> Result<Planned, EngineError> {
        Planned::of(&table.tensors()[choice.tensor], choice.slice, to_f32)
    }

    pub fn of(
        tensor: &StoredTensor,
        slice: Option<DimensionSlice>,
        to_f32: bool,
    ) -> Result<Planned, EngineError> {
        let mut shape = tensor.shape.clone();
        let (mut first, mut count, mut length) = (tensor.extent.offset, 1, tensor.bytes());
        let mut stride = length;
        if let Some(slice) = slice {
            let runs = sliced(tensor, slice).map_err(|why| EngineError::BadOption {
                name: "slices",
                value: format!(
                    "{}:{} of dimension {} of tensor {:?}",
                    slice.start, slice.stop, slice.dimension, tensor.name
                ),
                expected: format!("{why} (shape {:?}, type {})", tensor.shape, tensor.ty.name()),
            })?;
            first += runs.0;
            (count, length, stride) = (runs.1, runs.2, runs.3);
            shape[slice.dimension] = slice.stop - slice.start;
        }
        if length == stride || count == 1 {
            length *= count;
            (count, stride) = (1, length);
        }
        if length == 0 || count == 0 {
            (count, length, stride) = (0, 0, 0);
        }
        let ty = match tensor.ty {
            StoredType::Tensor(ty) if to_f32 && can_dequantize(ty) => {
                StoredType::Tensor(TensorType::F32)
            }
            ty => ty,
        };
        let (name, stored, file) = (tensor.name.clone(), tensor.ty, tensor.extent.file);
        Ok(Planned { name, stored, ty, shape, file, first, count, length, stride })
    }

    /// Returns the bytes that are read and used.
    pub fn wanted_bytes(&self) -> u64 {
        self.count * self.length
    }

    /// Returns the bytes of the result.
    pub fn bytes(&self) -> u64 {
        self.result_bytes(self.wanted_bytes())
    }

    /// Returns the bytes in memory of `wanted` bytes of the file, which are whole blocks.
    pub fn result_bytes(&self, wanted: u64) -> u64 {
        match self.is_converted() {
            true => (wanted / self.stored.block_bytes() * self.stored.block_elements())
                .saturating_mul(4),
            false => wanted,
        }
    }

    pub fn is_converted(&self) -> bool {
        self.stored != self.ty
    }

    /// Returns run number `index`.
    pub fn run(&self, index: u64) -> Extent {
        Extent { file: self.file, offset: self.first + index * self.stride, length: self.length }
    }

    /// Returns the only run, if the bytes can be read to their place without any further step.
    pub fn direct(&self) -> Option<Extent> {
        (self.count == 1 && !self.is_converted()).then(|| self.run(0))
    }
}

/// Returns the offset of the first run, the number of runs, the bytes of a run, and the bytes between starts of runs.
fn sliced(
    tensor: &StoredTensor,
    slice: DimensionSlice,
) -> Result<(u64, u64, u64, u64), &'static str> {
    let DimensionSlice { dimension, start, stop } = slice;
    let Some(&size) = tensor.shape.get(dimension) else {
        return Err("the tensor has fewer dimensions");
    };
    if start > stop || stop > size {
        return Err("the range must be inside the dimension");
    }
    // The sizes of the whole tensor are known to fit.
    let count = tensor.shape[..dimension].iter().product();
    let inner = &tensor.shape[dimension + 1..];
    let bytes = |entries: u64| match inner.is_empty() {
        true => tensor.ty.row_bytes(entries),
        false => tensor.ty.tensor_bytes(inner).map(|bytes| bytes * entries),
    };
    match (bytes(start), bytes(stop - start), bytes(size)) {
        (Some(first), Some(length), Some(stride)) => Ok((first, count, length, stride)),
        _ => Err("the range must begin and end with whole blocks of the type"),
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

    #[test]
    fn runs_of_every_dimension() {
        let f16 = tensor(StoredType::Tensor(TensorType::F16), &[4, 6, 10]);
        let of = |dimension, start, stop| sliced(&f16, DimensionSlice { dimension, start, stop });
        assert_eq!(of(0, 1, 3), Ok((120, 1, 240, 480)));
        assert_eq!(of(1, 2, 3), Ok((40, 4, 20, 120)));
        assert_eq!(of(2, 9, 10), Ok((18, 24, 2, 20)));
        assert_eq!(of(2, 10, 10), Ok((20, 24, 0, 20)));
        assert!(of(2, 3, 11).is_err() && of(3, 0, 1).is_err() && of(0, 2, 1).is_err());
        assert!(of(0, u64::MAX, u64::MAX).is_err());
    }

    #[test]
    fn blocks_stay_whole() {
        let blocks = tensor(StoredType::Tensor(TensorType::Q8_0), &[3, 96]);
        let of =
            |dimension, start, stop| sliced(&blocks, DimensionSlice { dimension, start, stop });
        assert_eq!(of(1, 32, 96), Ok((34, 3, 68, 102)));
        assert_eq!(of(0, 1, 2), Ok((102, 1, 102, 306)));
        assert!(of(1, 16, 96).is_err());
        let packed = tensor(StoredType::F4, &[8]);
        assert!(sliced(&packed, DimensionSlice { dimension: 0, start: 1, stop: 3 }).is_err());
    }
}
