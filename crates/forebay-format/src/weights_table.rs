//! Table of everything that files of weights hold, also of what no model uses: empty tensors and types without kernels.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::tensor::Dtype;

use crate::catalog::{Named, SizedFile, find_tensor, folder_of, sort_tensors};
use crate::huggingface::folder::{is_safetensors, open_each, weights_files};
use crate::huggingface::safetensors::{entry, read_table, tensor_type};
use crate::{
    Catalog, Disk, Extent, FileIndex, FormatError, PathKind, Storage, TensorInfo, TensorType,
};

/// Type of elements in a file. It includes the types of safetensors that no [`TensorType`] stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoredType {
    Tensor(TensorType),
    /// Two E2M1 values in a byte.
    F4,
    /// Four values in three bytes.
    F6E2M3,
    /// Four values in three bytes.
    F6E3M2,
    /// E4M3 without infinities and negative zero, as some AMD GPUs have it.
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    /// Complex numbers of two f32.
    C64,
}

impl StoredType {
    fn of_safetensors(dtype: Dtype) -> Option<StoredType> {
        Some(match dtype {
            Dtype::F4 => StoredType::F4,
            Dtype::F6_E2M3 => StoredType::F6E2M3,
            Dtype::F6_E3M2 => StoredType::F6E3M2,
            Dtype::F8_E4M3FNUZ => StoredType::F8E4M3Fnuz,
            Dtype::F8_E5M2FNUZ => StoredType::F8E5M2Fnuz,
            Dtype::C64 => StoredType::C64,
            other => StoredType::Tensor(tensor_type(other)?),
        })
    }

    /// Returns the name that the format uses, such as `BF16`, `F4` or `Q4_K`.
    pub fn name(self) -> &'static str {
        match self {
            StoredType::Tensor(TensorType::Bool) => "BOOL",
            StoredType::Tensor(ty) => ty.name(),
            StoredType::F4 => "F4",
            StoredType::F6E2M3 => "F6_E2M3",
            StoredType::F6E3M2 => "F6_E3M2",
            StoredType::F8E4M3Fnuz => "F8_E4M3FNUZ",
            StoredType::F8E5M2Fnuz => "F8_E5M2FNUZ",
            StoredType::C64 => "C64",
        }
    }

    /// Returns the number of elements that share bytes.
    pub fn block_elements(self) -> u64 {
        match self {
            StoredType::Tensor(ty) => ty.block_elements() as u64,
            StoredType::F4 => 2,
            StoredType::F6E2M3 | StoredType::F6E3M2 => 4,
            StoredType::F8E4M3Fnuz | StoredType::F8E5M2Fnuz | StoredType::C64 => 1,
        }
    }

    /// Returns the number of bytes of [`StoredType::block_elements`] elements.
    pub fn block_bytes(self) -> u64 {
        match self {
            StoredType::Tensor(ty) => ty.block_bytes() as u64,
            StoredType::F4 | StoredType::F8E4M3Fnuz | StoredType::F8E5M2Fnuz => 1,
            StoredType::F6E2M3 | StoredType::F6E3M2 => 3,
            StoredType::C64 => 8,
        }
    }

    /// Returns the bytes of a row of `cols` elements, or `None` if it ends inside a block or the number overflows.
    pub fn row_bytes(self, cols: u64) -> Option<u64> {
        let blocks = cols.is_multiple_of(self.block_elements());
        blocks.then(|| (cols / self.block_elements()).checked_mul(self.block_bytes())).flatten()
    }

    /// Returns the bytes of a tensor of this shape, or `None` in the same cases as [`StoredType::row_bytes`].
    pub fn tensor_bytes(self, shape: &[u64]) -> Option<u64> {
        let (cols, outer) = shape.split_last().unwrap_or((&1, &[]));
        outer.iter().try_fold(self.row_bytes(*cols)?, |bytes, dim| bytes.checked_mul(*dim))
    }
}

/// A tensor in a file. Unlike a [`TensorInfo`], it may have no elements.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredTensor {
    pub name: String,
    pub ty: StoredType,
    /// Outermost dimension first.
    pub shape: Vec<u64>,
    /// Range of the tensor's bytes. In a pack it may include bytes of other tensors.
    pub extent: Extent,
}

impl StoredTensor {
    /// Returns the number of bytes of the tensor's elements.
    pub fn bytes(&self) -> u64 {
        // A checked tensor has a size. The fallback only avoids a panic.
        self.ty.tensor_bytes(&self.shape).unwrap_or(self.extent.length)
    }
}

impl Named for StoredTensor {
    fn name(&self) -> &str {
        &self.name
    }

    fn extent(&self) -> Extent {
        self.extent
    }
}

/// The tensors of safetensors files, of a GGUF file or of a pack. Opening reads headers only.
#[derive(Clone, Debug)]
pub struct WeightsTable {
    /// Folder that contains the files.
    pub root: PathBuf,
    /// Files in the order of [`FileIndex`].
    pub files: Vec<PathBuf>,
    /// The `__metadata__` of a single safetensors file.
    pub metadata: Option<BTreeMap<String, String>>,
    /// The pack's catalog, if the file is a pack. Its extents are those of the decoded file.
    pub pack: Option<Arc<Catalog>>,
    tensors: Vec<StoredTensor>,
    by_name: Vec<u32>,
}

impl WeightsTable {
    /// Opens what [`Catalog::open_weights`] opens, or several safetensors files together.
    ///
    /// # Errors
    /// Returns a [`FormatError`] if there is no path, if a table is unusable, or if two tensors have the same name.
    pub fn open(paths: &[PathBuf]) -> Result<WeightsTable, FormatError> {
        WeightsTable::open_in(&Disk, paths)
    }

    /// Opens files like [`WeightsTable::open`], in any place.
    ///
    /// # Errors
    /// Returns the errors of [`WeightsTable::open`].
    pub fn open_in(storage: &dyn Storage, paths: &[PathBuf]) -> Result<WeightsTable, FormatError> {
        let [path] = paths else {
            let Some(first) = paths.first() else {
                let why = "the list of files is empty".to_owned();
                return Err(FormatError::NoModel { path: PathBuf::new(), why });
            };
            let other = paths.iter().find(|path| !is_safetensors(path));
            if let Some(other) = other {
                let why = "only safetensors files can be opened together".to_owned();
                return Err(FormatError::NoModel { path: other.clone(), why });
            }
            let mut read = |file: &Path, index| Ok(read_file(storage, file, index)?.0);
            let (files, tensors) = open_each(storage, paths, &mut read)?;
            return WeightsTable::new(folder_of(first).to_owned(), files, tensors);
        };
        let kind = storage.kind(path).map_err(FormatError::io(path))?;
        let is_folder = kind == PathKind::Folder;
        if kind == PathKind::Other {
            let why = "it is neither a file nor a folder".to_owned();
            return Err(FormatError::NoModel { path: path.clone(), why });
        }
        if !is_folder && !is_safetensors(path) {
            return WeightsTable::of_catalog(Catalog::open_file(storage, path)?);
        }
        let root = if is_folder { path.as_path() } else { folder_of(path) };
        let mut texts = None;
        let mut read = |file: &Path, index| {
            let (read, metadata) = read_file(storage, file, index)?;
            texts = metadata;
            Ok(read)
        };
        let (files, tensors) = weights_files(storage, path, is_folder, &mut read)?;
        let table = WeightsTable::new(root.to_owned(), files, tensors)?;
        let metadata = texts.filter(|_| table.files.len() == 1);
        Ok(WeightsTable { metadata, ..table })
    }

    fn new(
        root: PathBuf,
        files: Vec<SizedFile>,
        mut tensors: Vec<StoredTensor>,
    ) -> Result<WeightsTable, FormatError> {
        let by_name = sort_tensors(&files, &mut tensors)?;
        let files = files.into_iter().map(|(path, _)| path).collect();
        Ok(WeightsTable { root, files, metadata: None, pack: None, tensors, by_name })
    }

    fn of_catalog(catalog: Catalog) -> Result<WeightsTable, FormatError> {
        let stored = |info: &TensorInfo| StoredTensor {
            name: info.name.clone(),
            ty: StoredType::Tensor(info.ty),
            shape: info.shape.clone(),
            extent: info.extent,
        };
        let tensors = catalog.tensors().iter().map(stored).collect();
        let files = catalog.files.iter().cloned().zip(catalog.file_bytes.iter().copied());
        let table = WeightsTable::new(catalog.root.clone(), files.collect(), tensors)?;
        let pack = catalog.pack.is_some().then(|| Arc::new(catalog));
        Ok(WeightsTable { pack, ..table })
    }

    /// Returns all tensors in the order of the files.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// Returns the index of the tensor of this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        find_tensor(&self.tensors, &self.by_name, name)
    }
}

/// The `__metadata__` of a safetensors file.
type Texts = Option<BTreeMap<String, String>>;

/// Returns the tensors of a safetensors file with the file's size, and its metadata.
fn read_file(
    storage: &dyn Storage,
    path: &Path,
    index: FileIndex,
) -> Result<((Vec<StoredTensor>, u64), Texts), FormatError> {
    let (table, data_offset, file_bytes) = read_table(storage, path)?;
    let tensor = |name: String| {
        let info = entry(&table, path, &name)?;
        let shape: Vec<u64> = info.shape.iter().map(|&dim| dim as u64).collect();
        let (start, end) = info.data_offsets;
        let length = (end - start) as u64;
        let ty = StoredType::of_safetensors(info.dtype);
        let ty = ty.filter(|ty| ty.tensor_bytes(&shape) == Some(length)).ok_or_else(|| {
            // A row of sub-byte elements that ends inside a byte, or a type of a later version of the format.
            let dtype = format!("{:?} in rows of {}", info.dtype, shape.last().unwrap_or(&1));
            FormatError::UnsupportedDtype { path: path.to_owned(), tensor: name.clone(), dtype }
        })?;
        let extent = Extent { file: index, offset: data_offset + start as u64, length };
        Ok(StoredTensor { name, ty, shape, extent })
    };
    let tensors = table.offset_keys().into_iter().map(tensor).collect::<Result<_, _>>()?;
    let texts = table.metadata().clone().map(|texts| texts.into_iter().collect());
    Ok(((tensors, file_bytes), texts))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, header: &str, data: &[u8]) -> PathBuf {
        let path = folder.join(name);
        let length = (header.len() as u64).to_le_bytes();
        std::fs::write(&path, [&length[..], header.as_bytes(), data].concat()).unwrap();
        path
    }

    #[test]
    fn tensors_that_no_model_has() {
        let folder = tempfile::tempdir().unwrap();
        let header = r#"{"__metadata__":{"format":"pt"},
            "f4":{"dtype":"F4","shape":[3,4],"data_offsets":[0,6]},
            "f6":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[6,9]},
            "none":{"dtype":"F32","shape":[0,7],"data_offsets":[9,9]},
            "one":{"dtype":"BOOL","shape":[],"data_offsets":[9,10]},
            "z":{"dtype":"C64","shape":[1],"data_offsets":[10,18]}}"#;
        let file = write(folder.path(), "a.safetensors", header, &[7; 18]);
        let table = WeightsTable::open(std::slice::from_ref(&file)).unwrap();
        let of = |name: &str| {
            let tensor = &table.tensors()[table.find(name).unwrap()];
            (tensor.ty.name(), tensor.shape.clone(), tensor.bytes())
        };
        assert_eq!(of("f4"), ("F4", vec![3, 4], 6));
        assert_eq!(of("f6"), ("F6_E2M3", vec![4], 3));
        assert_eq!(of("none"), ("F32", vec![0, 7], 0));
        assert_eq!(of("one"), ("BOOL", vec![], 1));
        assert_eq!(of("z"), ("C64", vec![1], 8));
        assert_eq!(table.metadata.as_ref().unwrap()["format"], "pt");
        assert!(matches!(
            WeightsTable::open(&[file.clone(), file]),
            Err(FormatError::DuplicateTensor { .. })
        ));
        let odd = r#"{"f4":{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}}"#;
        let odd = write(folder.path(), "b.safetensors", odd, &[7; 3]);
        assert!(matches!(WeightsTable::open(&[odd]), Err(FormatError::UnsupportedDtype { .. })));
        assert!(matches!(WeightsTable::open(&[]), Err(FormatError::NoModel { .. })));
    }
}
