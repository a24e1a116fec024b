//! Parser of one safetensors file's header. A file holds the header's length in 8 bytes, then the
//! header as JSON, then the data.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata};
use serde::Deserializer;
use serde::de::{IgnoredAny, MapAccess, Visitor};

use crate::tensor_type::checked_bytes;
use crate::{Extent, FileIndex, FormatError, TensorInfo, TensorType};

/// Largest header that the format allows, in bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes of the header's length, which comes before the header.
const LENGTH_BYTES: u64 = 8;

/// Tensor table of one safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub struct SafetensorsHeader {
    /// Tensors in the order of their data. The format allows no gaps and no overlap.
    pub tensors: Vec<TensorInfo>,
    /// Start of the tensor data, in bytes from the start of the file.
    pub data_offset: u64,
}

/// Parses the header of a whole safetensors file that lies in memory.
///
/// # Errors
/// Returns the errors of [`Catalog::open`](crate::Catalog::open), with empty paths.
pub fn parse_safetensors_bytes(bytes: &[u8]) -> Result<SafetensorsHeader, FormatError> {
    parse(bytes, Path::new(""), bytes.len() as u64, FileIndex(0))
}

/// Parses the header of the file at `path`, which is file number `index` of its model. Also returns
/// the file's size. Only the header is read.
pub(crate) fn parse_file(
    path: &Path,
    index: FileIndex,
) -> Result<(SafetensorsHeader, u64), FormatError> {
    let file = File::open(path).map_err(FormatError::io(path))?;
    let file_bytes = file.metadata().map_err(FormatError::io(path))?.len();
    Ok((parse(file, path, file_bytes, index)?, file_bytes))
}

/// Parses a header that was cut from a file of `file_bytes` bytes. `path` is only used in errors.
pub(crate) fn parse_header(
    header: &[u8],
    path: &Path,
    file_bytes: u64,
) -> Result<SafetensorsHeader, FormatError> {
    let length = header.first_chunk().map_or(u64::MAX, |length| u64::from_le_bytes(*length));
    if length.checked_add(LENGTH_BYTES) != Some(header.len() as u64) {
        return Err(FormatError::Truncated {
            path: path.to_owned(),
            what: "the safetensors header",
            offset: LENGTH_BYTES,
            needed: length,
            file_bytes: header.len() as u64,
        });
    }
    parse(header, path, file_bytes, FileIndex(0))
}

fn parse(
    mut reader: impl Read,
    path: &Path,
    file_bytes: u64,
    index: FileIndex,
) -> Result<SafetensorsHeader, FormatError> {
    let truncated = |what, offset, needed| FormatError::Truncated {
        path: path.to_owned(),
        what,
        offset,
        needed,
        file_bytes,
    };
    if file_bytes < LENGTH_BYTES {
        return Err(truncated("the length of the safetensors header", 0, LENGTH_BYTES));
    }
    let mut length = [0; LENGTH_BYTES as usize];
    reader.read_exact(&mut length).map_err(FormatError::io(path))?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(FormatError::LimitExceeded {
            path: path.to_owned(),
            what: "the safetensors header",
            offset: 0,
            found: header_bytes,
            limit: HEADER_BYTES_MAX,
        });
    }
    let data_offset = LENGTH_BYTES + header_bytes;
    if data_offset > file_bytes {
        return Err(truncated("the safetensors header", LENGTH_BYTES, header_bytes));
    }
    let mut header = vec![0; header_bytes as usize];
    reader.read_exact(&mut header).map_err(FormatError::io(path))?;
    if let Some(tensor) = doubled_name(&header) {
        return Err(FormatError::DuplicateTensor { path: path.to_owned(), tensor });
    }
    // This checks dtypes, sizes against shapes, and that the tensors have no gap or overlap.
    let table: Metadata = serde_json::from_slice(&header)
        .map_err(|source| FormatError::SafetensorsHeader { path: path.to_owned(), source })?;

    let expected = data_offset.saturating_add(table.data_len() as u64);
    if expected != file_bytes {
        let path = path.to_owned();
        return Err(FormatError::SafetensorsSize { path, expected, found: file_bytes });
    }
    let tensors = table
        .offset_keys()
        .into_iter()
        .map(|name| tensor(path, index, data_offset, &table, name))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(SafetensorsHeader { tensors, data_offset })
}

/// Returns a name that appears twice in the header. JSON parsers would silently let the last one
/// win. Returns `None` if the header is not JSON, which the caller's parser reports.
fn doubled_name(header: &[u8]) -> Option<String> {
    struct Names(Option<String>);

    impl<'de> Visitor<'de> for Names {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map of tensors")
        }

        fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut seen = HashSet::new();
            while let Some((name, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                if let Some(name) = seen.replace(name) {
                    self.0.get_or_insert(name);
                }
            }
            Ok(self.0)
        }
    }

    serde_json::Deserializer::from_slice(header).deserialize_map(Names(None)).ok().flatten()
}

fn tensor(
    path: &Path,
    index: FileIndex,
    data_offset: u64,
    table: &Metadata,
    name: String,
) -> Result<TensorInfo, FormatError> {
    let missing = || FormatError::MissingTensor {
        path: path.to_owned(),
        tensor: name.clone(),
        shard: path.display().to_string(),
    };
    let info = table.info(&name).ok_or_else(missing)?;
    let Some(ty) = tensor_type(info.dtype) else {
        let dtype = format!("{:?}", info.dtype);
        return Err(FormatError::UnsupportedDtype { path: path.to_owned(), tensor: name, dtype });
    };
    let shape: Vec<u64> = info.shape.iter().map(|dim| *dim as u64).collect();
    let length = checked_bytes(path, &name, ty, &shape)?;
    // This cannot overflow: the offsets were checked to follow each other up to the end of the
    // file.
    let offset = data_offset + info.data_offsets.0 as u64;
    let extent = Extent { file: index, offset, length };
    Ok(TensorInfo::contiguous(name, ty, shape, extent))
}

fn tensor_type(dtype: Dtype) -> Option<TensorType> {
    Some(match dtype {
        Dtype::BOOL => TensorType::Bool,
        Dtype::U8 => TensorType::U8,
        Dtype::I8 => TensorType::I8,
        Dtype::F8_E4M3 => TensorType::F8_E4M3,
        Dtype::F8_E5M2 => TensorType::F8_E5M2,
        Dtype::F8_E8M0 => TensorType::F8_E8M0,
        Dtype::I16 => TensorType::I16,
        Dtype::U16 => TensorType::U16,
        Dtype::F16 => TensorType::F16,
        Dtype::BF16 => TensorType::BF16,
        Dtype::I32 => TensorType::I32,
        Dtype::U32 => TensorType::U32,
        Dtype::F32 => TensorType::F32,
        Dtype::F64 => TensorType::F64,
        Dtype::I64 => TensorType::I64,
        Dtype::U64 => TensorType::U64,
        _ => return None,
    })
}
