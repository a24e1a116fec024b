//! What a model file holds: the tensor table and the description beside it.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::{FormatError, GgufMetadata, HfMetadata, TensorType, gguf, huggingface};

/// Which of a model's files: an index into [`Catalog::files`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct FileIndex(pub u32);

/// A range of bytes on disk.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
pub struct Extent {
    pub file: FileIndex,
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Extent {
    /// The byte after the last one.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.length)
    }

    /// `length` bytes that start `offset` bytes into this extent, such as one row of a matrix or
    /// one expert of a stack; `None` if they are not all inside.
    pub fn slice(&self, offset: u64, length: u64) -> Option<Extent> {
        let end = offset.checked_add(length)?;
        let start = self.offset.checked_add(offset)?;
        (end <= self.length).then_some(Extent { file: self.file, offset: start, length })
    }
}

/// One tensor: its name, encoding, shape and place.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TensorInfo {
    pub name: String,
    pub ty: TensorType,
    /// Outermost dimension first, whatever the file's own order: a matrix is `[rows, cols]` with
    /// the elements of a row contiguous, a stack of experts `[experts, rows, cols]`. No dimension
    /// is zero, and the innermost is a whole number of blocks.
    pub shape: Vec<u64>,
    /// Exactly the tensor's bytes; checked to lie inside the file.
    pub extent: Extent,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> u64 {
        // No type takes less than one bit per element and the bytes are known to lie in a file, so
        // a checked tensor never saturates.
        self.shape.iter().fold(1, |product, dim| product.saturating_mul(*dim))
    }
}

/// The container that the model came in, with what it says about the model.
#[derive(Clone, Debug)]
pub enum Source {
    Gguf(GgufMetadata),
    HuggingFace(HfMetadata),
}

/// A model as its files describe it. Opening reads headers only, never weights.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// The folder that the files are in.
    pub root: PathBuf,
    /// The files that hold weights, in the order that [`FileIndex`] counts.
    pub files: Vec<PathBuf>,
    /// Size of each file.
    pub file_bytes: Vec<u64>,
    pub source: Source,
    tensors: Vec<TensorInfo>,
    /// Indices into `tensors`, sorted by name.
    by_name: Vec<u32>,
}

/// A file and its size in bytes.
pub(crate) type SizedFile = (PathBuf, u64);

impl Catalog {
    /// Opens a model: a GGUF file (any file of a split set opens the whole set), a Hugging Face
    /// folder, or that folder's `config.json`, index or one of its safetensors files.
    ///
    /// # Errors
    /// Everything that makes the tables unusable: see [`FormatError`].
    pub fn open(path: &Path) -> Result<Catalog, FormatError> {
        let kind = std::fs::metadata(path).map_err(FormatError::io(path))?;
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or("");
        if kind.is_dir() || ["json", "safetensors"].contains(&extension) {
            huggingface::open(path)
        } else {
            gguf::open(path)
        }
    }

    /// Sorts the tensors into file order and refuses doubled names.
    pub(crate) fn new(
        root: PathBuf,
        files: Vec<SizedFile>,
        source: Source,
        mut tensors: Vec<TensorInfo>,
    ) -> Result<Catalog, FormatError> {
        tensors.sort_by_key(|tensor| tensor.extent);
        let mut by_name: Vec<u32> = (0..tensors.len() as u32).collect();
        let name = |index: &u32| tensors[*index as usize].name.as_str();
        by_name.sort_by(|a, b| name(a).cmp(name(b)));
        if let Some(pair) = by_name.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
            let tensor = &tensors[pair[1] as usize];
            return Err(FormatError::DuplicateTensor {
                path: files[tensor.extent.file.0 as usize].0.clone(),
                tensor: tensor.name.clone(),
            });
        }
        let (files, file_bytes) = files.into_iter().unzip();
        Ok(Catalog { root, files, file_bytes, source, tensors, by_name })
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        let found = self
            .by_name
            .binary_search_by(|index| self.tensors[*index as usize].name.as_str().cmp(name));
        found.ok().map(|at| &self.tensors[self.by_name[at] as usize])
    }

    /// All tensors in the order in which they lie in the files.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Bytes of all tensors together, without headers and padding.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.extent.length).sum()
    }

    /// The GGUF metadata, if the model is a GGUF.
    pub fn gguf(&self) -> Option<&GgufMetadata> {
        match &self.source {
            Source::Gguf(metadata) => Some(metadata),
            Source::HuggingFace(_) => None,
        }
    }

    /// The folder's configuration, if the model is a Hugging Face folder.
    pub fn hugging_face(&self) -> Option<&HfMetadata> {
        match &self.source {
            Source::HuggingFace(metadata) => Some(metadata),
            Source::Gguf(_) => None,
        }
    }
}
