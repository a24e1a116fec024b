//! Contents of a model file: the tensor table and the model's description.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use tracing::field::Empty;

use crate::pack::{self, Pack};
use crate::{
    Disk, FormatError, GgufMetadata, HfMetadata, Storage, TensorType, gguf, huggingface, seems,
};

/// Number of one of a model's files: an index into [`Catalog::files`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct FileIndex(pub u32);

/// Range of bytes of a file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct Extent {
    pub file: FileIndex,
    /// Offset from the start of the file, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

impl Extent {
    /// Returns the offset of the byte after the last one.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// Returns `length` bytes that start `offset` bytes into this extent, such as one row of a
    /// matrix or one expert of a stack. Returns `None` if they are not all inside.
    pub fn slice(&self, offset: u64, length: u64) -> Option<Extent> {
        let end = offset.checked_add(length)?;
        let start = self.offset.checked_add(offset)?;
        (end <= self.length).then_some(Extent { file: self.file, offset: start, length })
    }
}

/// Name, encoding, shape and location of one tensor.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TensorInfo {
    pub name: String,
    pub ty: TensorType,
    /// Outermost dimension first, regardless of the file's own order. A matrix is `[rows, cols]`
    /// with the elements of a row contiguous, and a stack of experts is `[experts, rows, cols]`. No
    /// dimension is zero, and the innermost is a whole number of blocks.
    pub shape: Vec<u64>,
    /// Range from the tensor's first byte to its last one, checked to lie inside the file. It
    /// includes bytes of other tensors if the tensor [is not contiguous](Self::is_contiguous).
    pub extent: Extent,
    /// Bytes from the start of one entry of the outermost dimension to the start of the next. In a
    /// pack, the experts of a stack are not adjacent: each is stored beside the other matrices of
    /// the same expert.
    pub stride: u64,
}

impl TensorInfo {
    /// Creates a tensor whose bytes are exactly those of `extent`.
    pub fn contiguous(name: String, ty: TensorType, shape: Vec<u64>, extent: Extent) -> TensorInfo {
        let stride = extent.length / shape.first().copied().unwrap_or(1).max(1);
        TensorInfo { name, ty, shape, extent, stride }
    }

    /// Returns the number of bytes of the tensor's elements.
    pub fn bytes(&self) -> u64 {
        // A checked tensor has a size. The fallback only avoids a panic.
        self.ty.tensor_bytes(&self.shape).unwrap_or(self.extent.length)
    }

    /// Returns true if the tensor's bytes are one extent.
    pub fn is_contiguous(&self) -> bool {
        self.bytes() == self.extent.length
    }

    /// Returns the extents that hold the tensor's bytes, in order.
    pub fn extents(&self) -> impl Iterator<Item = Extent> + '_ {
        let apart = if self.is_contiguous() { 1 } else { self.shape[0] };
        let length = self.bytes() / apart;
        (0..apart).map(move |entry| Extent {
            file: self.extent.file,
            offset: self.extent.offset + entry * self.stride,
            length,
        })
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        // A checked tensor never saturates: no type takes less than one bit per element, and the
        // bytes are known to lie in a file.
        self.shape.iter().fold(1, |product, dim| product.saturating_mul(*dim))
    }

    /// Returns the bytes of `count` entries of the outermost dimension from `first` on, such as
    /// rows of a matrix or experts of a stack. Returns `None` if there are fewer entries, if an
    /// entry is not a whole number of blocks, or if `count` is above 1 and the entries are not
    /// adjacent.
    pub fn outer_slice(&self, first: u64, count: u64) -> Option<Extent> {
        let (outer, inner) = self.shape.split_first()?;
        let entry_bytes = self.ty.tensor_bytes(inner).filter(|_| {
            // The entries of a vector are elements, which have bytes of their own only in plain
            // types.
            !inner.is_empty() || !self.ty.is_quantized()
        })?;
        let whole = self.is_contiguous();
        if first.checked_add(count)? > *outer || (count > 1 && !whole) {
            return None;
        }
        let step = if whole { entry_bytes } else { self.stride };
        self.extent.slice(first.checked_mul(step)?, count.checked_mul(entry_bytes)?)
    }
}

/// Container that the model came in, with its metadata.
#[derive(Clone, Debug)]
pub enum Source {
    Gguf(GgufMetadata),
    HuggingFace(Box<HfMetadata>),
}

/// Model as its files describe it. Opening reads headers only, never weights.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// Folder that contains the files.
    pub root: PathBuf,
    /// Files that hold weights, in the order of [`FileIndex`].
    pub files: Vec<PathBuf>,
    /// Size of each file, in bytes.
    pub file_bytes: Vec<u64>,
    pub source: Source,
    /// Blocks and checksums of a pack. `None` for other containers.
    pub pack: Option<Arc<Pack>>,
    /// Tensors that the files name but do not hold. A reader that needs one of them has to say so.
    pub absent: Vec<Absent>,
    tensors: Vec<TensorInfo>,
    /// Indices into `tensors`, sorted by name.
    by_name: Vec<u32>,
}

/// Returns the folder that contains a file.
pub(crate) fn folder_of(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Replaces an error about wrong or missing first bytes by one that says what the file seems to be.
fn not_gguf(storage: &dyn Storage, path: &Path, error: FormatError) -> FormatError {
    match error {
        FormatError::WrongMagic { path: wrong, .. }
        | FormatError::Truncated { path: wrong, file_bytes: 0..4, .. }
            if wrong == path =>
        {
            FormatError::NotGguf { seems: seems::describe(storage, path), path: wrong }
        }
        error => error,
    }
}

/// A tensor that a model's files name but do not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Absent {
    pub tensor: String,
    /// The file that should have the tensor, according to the folder's index. `None` if the tensor is there, but has no elements.
    pub shard: Option<String>,
}

/// Path of a file and its size in bytes.
pub(crate) type SizedFile = (PathBuf, u64);

/// An entry of a tensor table.
pub(crate) trait Named {
    fn name(&self) -> &str;
    fn extent(&self) -> Extent;
}

impl Named for TensorInfo {
    fn name(&self) -> &str {
        &self.name
    }

    fn extent(&self) -> Extent {
        self.extent
    }
}

/// Sorts tensors into file order, and returns their indices sorted by name. Returns an error if two
/// have the same name.
pub(crate) fn sort_tensors<T: Named>(
    files: &[SizedFile],
    tensors: &mut [T],
) -> Result<Vec<u32>, FormatError> {
    tensors.sort_by_key(T::extent);
    let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
    let name = |index: &u32| tensors[*index as usize].name();
    by_name.sort_by(|a, b| name(a).cmp(name(b)));
    if let Some(pair) = by_name.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
        let tensor = &tensors[pair[1] as usize];
        return Err(FormatError::DuplicateTensor {
            path: files[tensor.extent().file.0 as usize].0.clone(),
            tensor: tensor.name().to_owned(),
        });
    }
    Ok(by_name)
}

/// Returns the index of the tensor of this name. `by_name` is the result of [`sort_tensors`].
pub(crate) fn find_tensor<T: Named>(tensors: &[T], by_name: &[u32], name: &str) -> Option<usize> {
    let found = by_name.binary_search_by(|index| tensors[*index as usize].name().cmp(name));
    found.ok().map(|at| by_name[at] as usize)
}

impl Catalog {
    /// Returns the error that the weights of a tensor cannot be decoded. `tensor` is its index.
    ///
    /// # Panics
    /// Panics if there is no such tensor.
    pub fn damaged(&self, tensor: usize) -> FormatError {
        let tensor = &self.tensors()[tensor];
        FormatError::PackDamaged {
            path: self.files[tensor.extent.file.0 as usize].clone(),
            offset: tensor.extent.offset,
            what: format!("tensor {:?} has a block that is not {}", tensor.name, tensor.ty),
        }
    }

    /// Opens a model. `path` is a GGUF file (any file of a split set opens the whole set), a pack,
    /// a Hugging Face folder, or that folder's `config.json`, index or one of its safetensors
    /// files.
    ///
    /// # Errors
    /// Returns a [`FormatError`] if anything makes the tables unusable.
    pub fn open(path: &Path) -> Result<Catalog, FormatError> {
        let (tensors, bytes) = (Empty, Empty);
        let span =
            tracing::debug_span!("catalog", path = %path.display(), tensors, bytes).entered();
        let catalog = Catalog::open_any(path)?;
        span.record("tensors", catalog.tensors.len());
        span.record("bytes", catalog.total_bytes());
        Ok(catalog)
    }

    fn open_any(path: &Path) -> Result<Catalog, FormatError> {
        let kind = std::fs::metadata(path).map_err(FormatError::io(path))?;
        if !kind.is_dir() && !kind.is_file() {
            let why = "it is neither a file nor a folder".to_owned();
            return Err(FormatError::NoModel { path: path.to_owned(), why });
        }
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        if kind.is_dir() || ["json", "safetensors"].contains(&extension) {
            huggingface::open(path)
        } else {
            Catalog::open_file(&Disk, path)
        }
    }

    /// Opens a GGUF file or a pack.
    pub(crate) fn open_file(storage: &dyn Storage, path: &Path) -> Result<Catalog, FormatError> {
        let is_named_pack = path.extension().is_some_and(|found| found == pack::EXTENSION);
        if is_named_pack || pack::is_pack(storage, path)? {
            pack::open(storage, path)
        } else {
            gguf::open(storage, path).map_err(|error| not_gguf(storage, path, error))
        }
    }

    /// Opens a container for its tensors alone. Unlike [`Catalog::open`], it needs no `config.json`
    /// beside safetensors files, and opens a named safetensors file alone. From a folder with
    /// neither an index nor `model.safetensors`, it opens all safetensors files.
    ///
    /// # Errors
    /// Returns the errors of [`Catalog::open`].
    pub fn open_weights(path: &Path) -> Result<Catalog, FormatError> {
        let kind = std::fs::metadata(path).map_err(FormatError::io(path))?;
        let named = |extension: &str| path.extension().is_some_and(|found| found == extension);
        match kind.is_dir() || kind.is_file() && named("safetensors") {
            true => huggingface::open_weights(path),
            false => Catalog::open(path),
        }
    }

    /// Sorts the tensors into file order. Returns an error if two tensors have the same name.
    pub(crate) fn new(
        root: PathBuf,
        files: Vec<SizedFile>,
        source: Source,
        mut tensors: Vec<TensorInfo>,
    ) -> Result<Catalog, FormatError> {
        let by_name = sort_tensors(&files, &mut tensors)?;
        let (files, file_bytes) = files.into_iter().unzip();
        let (pack, absent) = (None, Vec::new());
        Ok(Catalog { root, files, file_bytes, source, pack, absent, tensors, by_name })
    }

    /// Returns the tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensor_index(name).map(|index| &self.tensors[index])
    }

    /// Returns the index of the tensor of this name.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        find_tensor(&self.tensors, &self.by_name, name)
    }

    /// Returns all tensors in file order.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the number of bytes of all tensors together, without headers and padding.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(TensorInfo::bytes).sum()
    }

    /// Returns the extent of the file that stores an extent. They differ in packs with coded blocks.
    pub fn stored(&self, extent: Extent) -> Extent {
        self.pack.as_ref().map_or(extent, |pack| pack.stored(extent))
    }

    /// Returns the GGUF metadata, if the model is a GGUF.
    pub fn gguf(&self) -> Option<&GgufMetadata> {
        match &self.source {
            Source::Gguf(metadata) => Some(metadata),
            Source::HuggingFace(_) => None,
        }
    }

    /// Returns the folder's configuration, if the model is a Hugging Face folder.
    pub fn hugging_face(&self) -> Option<&HfMetadata> {
        match &self.source {
            Source::HuggingFace(metadata) => Some(metadata),
            Source::Gguf(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(ty: TensorType, shape: &[u64]) -> TensorInfo {
        let length = ty.tensor_bytes(shape).unwrap();
        let extent = Extent { file: FileIndex(1), offset: 1000, length };
        TensorInfo::contiguous("t".into(), ty, shape.to_vec(), extent)
    }

    #[test]
    fn experts_that_lie_apart() {
        let mut experts = tensor(TensorType::Q8_0, &[4, 3, 64]);
        experts.stride = 4096;
        experts.extent.length = 3 * 4096 + 204;
        assert_eq!((experts.bytes(), experts.is_contiguous()), (816, false));
        let third = experts.outer_slice(3, 1).unwrap();
        assert_eq!((third.offset, third.length), (1000 + 3 * 4096, 204));
        assert_eq!(experts.outer_slice(0, 2), None);
        assert_eq!(experts.extents().collect::<Vec<_>>()[3], third);
        assert_eq!(experts.extents().count(), 4);
    }

    #[test]
    fn outer_slices_are_experts_and_rows() {
        let experts = tensor(TensorType::Q8_0, &[4, 3, 64]);
        let extent = experts.outer_slice(1, 2).unwrap();
        assert_eq!((extent.file.0, extent.offset, extent.length), (1, 1000 + 204, 408));
        assert_eq!(experts.outer_slice(0, 4), Some(experts.extent));
        assert_eq!(experts.outer_slice(3, 2), None);
        assert_eq!(experts.outer_slice(u64::MAX, 2), None);
        assert_eq!(tensor(TensorType::F32, &[8]).outer_slice(2, 1).unwrap().offset, 1008);
        assert_eq!(tensor(TensorType::Q8_0, &[32]).outer_slice(0, 1), None);
    }

    #[test]
    fn extents_slice_only_inside() {
        let extent = Extent { file: FileIndex(0), offset: 10, length: 5 };
        assert_eq!(extent.slice(1, 4).unwrap().offset, 11);
        assert_eq!(extent.slice(2, 4), None);
        assert_eq!(extent.slice(u64::MAX, 1), None);
    }

    #[test]
    fn a_bare_file_name_is_in_the_current_folder() {
        assert_eq!(folder_of(Path::new("model.gguf")), Path::new("."));
        assert_eq!(folder_of(Path::new("a/model.gguf")), Path::new("a"));
    }
}
