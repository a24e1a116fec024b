//! Writer of GGUF files that are larger than memory: the header first, then the data as it arrives.
//!
//! ```
//! # use forebay_format::{TensorType, gguf::writer::GgufWriter};
//! # fn main() -> Result<(), forebay_format::FormatError> {
//! let mut writer = GgufWriter::new("model.gguf".as_ref());
//! writer.set("general.architecture", "llama")?;
//! writer.add_tensor("output_norm.weight", TensorType::F32, &[64])?;
//! let mut data = writer.start(Vec::new())?;
//! data.write(&[0; 256])?;
//! let file: Vec<u8> = data.finish()?;
//! # Ok(())
//! # }
//! ```

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::encode::header_bytes;
use super::metadata::GgufMetadata;
use super::parse::{DIMENSIONS_MAX, NESTING_MAX, alignment};
use super::value::{Array, Value};
use crate::tensor_type::checked_bytes;
use crate::{Extent, FileIndex, FormatError, TensorInfo, TensorType};

/// Longest tensor name that ggml can hold, in bytes.
const NAME_BYTES_MAX: usize = 63;

/// Description of a new GGUF file (version 3). Nothing is written before [`start`](Self::start).
#[derive(Clone, Debug)]
pub struct GgufWriter {
    path: PathBuf,
    metadata: GgufMetadata,
    /// Offsets count from the start of the data section until `place_tensors` adds that start.
    tensors: Vec<TensorInfo>,
    names: HashSet<String>,
}

impl GgufWriter {
    /// Creates an empty description. Errors name the file as `path`, but nothing is created there.
    pub fn new(path: &Path) -> Self {
        let metadata = GgufMetadata::new(3);
        Self { path: path.to_owned(), metadata, tensors: Vec::new(), names: HashSet::new() }
    }

    /// Sets a metadata key. Keys are written in the order in which they were first set.
    /// `general.alignment` applies to all tensors.
    ///
    /// # Errors
    /// Returns [`FormatError::WriteKey`] if the key is empty or arrays are nested too deeply.
    /// Returns [`FormatError::InvalidAlignment`] if `general.alignment` is not valid.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> Result<(), FormatError> {
        let value = value.into();
        let why = match &value {
            _ if key.is_empty() => Some("it is empty".to_owned()),
            Value::Array(array) if depth(array) > NESTING_MAX => {
                Some(format!("its arrays nest deeper than {NESTING_MAX}"))
            }
            _ => None,
        };
        if let Some(why) = why {
            return Err(FormatError::WriteKey { path: self.path.clone(), key: key.into(), why });
        }
        self.metadata.insert(key.to_owned(), value);
        alignment(&self.path, &self.metadata).map(|_| ())
    }

    /// Adds a tensor after those that were added before. `shape` is outermost first, as in
    /// [`TensorInfo::shape`].
    ///
    /// # Errors
    /// - Returns [`FormatError::WriteTensor`] if GGUF does not have the type, the shape does not have one to four
    ///   dimensions, or the name is empty or too long.
    /// - Returns [`FormatError::InvalidShape`] if the shape is not valid.
    /// - Returns [`FormatError::DuplicateTensor`] if a tensor of this name exists.
    pub fn add_tensor(
        &mut self,
        name: &str,
        ty: TensorType,
        shape: &[u64],
    ) -> Result<(), FormatError> {
        let why = if ty.ggml_id().is_none() {
            Some(format!("GGUF has no type {ty}"))
        } else if !(1..=DIMENSIONS_MAX as usize).contains(&shape.len()) {
            Some(format!("it has {} dimensions, GGUF allows 1 to {DIMENSIONS_MAX}", shape.len()))
        } else if !(1..=NAME_BYTES_MAX).contains(&name.len()) {
            Some(format!("its name has {} bytes, 1 to {NAME_BYTES_MAX} are allowed", name.len()))
        } else {
            None
        };
        if let Some(why) = why {
            let path = self.path.clone();
            return Err(FormatError::WriteTensor { path, tensor: name.to_owned(), why });
        }
        let length = checked_bytes(&self.path, name, ty, shape)?;
        if !self.names.insert(name.to_owned()) {
            let path = self.path.clone();
            return Err(FormatError::DuplicateTensor { path, tensor: name.to_owned() });
        }
        let extent = Extent { file: FileIndex(0), offset: 0, length };
        self.tensors.push(TensorInfo::contiguous(name.into(), ty, shape.to_vec(), extent));
        Ok(())
    }

    /// Returns the header, padded up to the tensor data, and the tensors with their final offsets.
    ///
    /// # Errors
    /// Returns [`FormatError::WriteFile`] if the file would be too large.
    pub fn into_header(mut self) -> Result<(Vec<u8>, Vec<TensorInfo>), FormatError> {
        let header = self.place_tensors()?;
        Ok((header, self.tensors))
    }

    /// Assigns every tensor its offset and returns the header.
    fn place_tensors(&mut self) -> Result<Vec<u8>, FormatError> {
        let alignment = alignment(&self.path, &self.metadata)?;
        let too_large = || FormatError::WriteFile {
            path: self.path.clone(),
            why: "its size does not fit in 64 bits".to_owned(),
        };
        let mut end = 0;
        for tensor in &mut self.tensors {
            tensor.extent.offset = end;
            end = end
                .checked_add(tensor.extent.length)
                .and_then(|end| end.checked_next_multiple_of(alignment))
                .ok_or_else(too_large)?;
        }
        let mut header = header_bytes(&self.metadata, &self.tensors);
        header.resize(header.len().next_multiple_of(alignment as usize), 0);
        let data_offset = header.len() as u64;
        end.checked_add(data_offset).ok_or_else(too_large)?;
        for tensor in &mut self.tensors {
            tensor.extent.offset += data_offset;
        }
        Ok(header)
    }

    /// Writes the header to `out`. Tensor data follows through the returned [`GgufData`].
    ///
    /// # Errors
    /// Returns [`FormatError::Io`] if writing fails, and [`FormatError::WriteFile`] if the file
    /// would be too large.
    pub fn start<W: Write>(mut self, out: W) -> Result<GgufData<W>, FormatError> {
        let alignment = alignment(&self.path, &self.metadata)?;
        let header = self.place_tensors()?;
        let mut data = GgufData {
            out,
            path: self.path,
            tensors: self.tensors,
            alignment,
            current: 0,
            written_bytes: 0,
        };
        data.put(&header)?;
        Ok(data)
    }
}

/// Returns the depth to which arrays are nested.
fn depth(array: &Array) -> u64 {
    match array {
        Array::Array(arrays) => 1 + arrays.iter().map(depth).max().unwrap_or(0),
        _ => 1,
    }
}

/// GGUF file whose header is written and whose tensor data is being streamed, tensor by tensor.
#[derive(Debug)]
pub struct GgufData<W> {
    out: W,
    path: PathBuf,
    tensors: Vec<TensorInfo>,
    alignment: u64,
    /// Index of the tensor that takes the next byte.
    current: usize,
    /// Number of bytes of that tensor that are already written.
    written_bytes: u64,
}

impl<W: Write> GgufData<W> {
    /// Returns all tensors with their final offsets, in the order in which data is expected.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// Returns the tensor that takes the next byte, and how many bytes it still lacks. Returns
    /// `None` when all tensors are complete.
    pub fn next_tensor(&self) -> Option<(&TensorInfo, u64)> {
        let tensor = self.tensors.get(self.current)?;
        Some((tensor, tensor.extent.length - self.written_bytes))
    }

    /// Appends bytes to the current tensor. After its last byte, the next tensor becomes the
    /// current one.
    ///
    /// # Errors
    /// Returns [`FormatError::WriteTensor`] if the bytes go beyond the tensor's end. Returns
    /// [`FormatError::WriteFile`] if all tensors are complete. Returns [`FormatError::Io`] if
    /// writing fails.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        let Some((tensor, missing_bytes)) = self.next_tensor() else {
            let why = format!("{} bytes too many after the last tensor", bytes.len());
            return Err(FormatError::WriteFile { path: self.path.clone(), why });
        };
        let bytes_left = (bytes.len() as u64).checked_sub(missing_bytes);
        if bytes_left.is_some_and(|left| left > 0) {
            let why = format!("{} bytes given, only {missing_bytes} are missing", bytes.len());
            let tensor = tensor.name.clone();
            return Err(FormatError::WriteTensor { path: self.path.clone(), tensor, why });
        }
        let complete = bytes_left == Some(0);
        let length = tensor.extent.length;
        self.put(bytes)?;
        self.written_bytes += bytes.len() as u64;
        if complete {
            let padding = length.next_multiple_of(self.alignment) - length;
            self.put(&vec![0; padding as usize])?;
            self.current += 1;
            self.written_bytes = 0;
        }
        Ok(())
    }

    /// Returns the writer that was passed to [`GgufWriter::start`].
    ///
    /// # Errors
    /// Returns [`FormatError::WriteTensor`] if data is missing.
    pub fn finish(self) -> Result<W, FormatError> {
        if let Some((tensor, missing_bytes)) = self.next_tensor() {
            let why = format!("{missing_bytes} of its bytes were never given");
            let tensor = tensor.name.clone();
            return Err(FormatError::WriteTensor { path: self.path.clone(), tensor, why });
        }
        Ok(self.out)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), FormatError> {
        self.out.write_all(bytes).map_err(FormatError::io(&self.path))
    }
}
