//! Parser of one safetensors file's header. A file holds the header's length in 8 bytes, then the
//! header as JSON, then the data.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io::Read;
use std::path::Path;

use safetensors::tensor::{Dtype, Metadata, TensorInfo as TableEntry};
use serde::Deserializer;
use serde::de::{IgnoredAny, MapAccess, Visitor};

use crate::tensor_type::checked_bytes;
use crate::{Disk, Extent, FileIndex, FormatError, Storage, TensorInfo, TensorType};

/// Largest header that the format allows, in bytes.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Bytes of the header's length, which comes before the header.
const LENGTH_BYTES: u64 = 8;

/// Tensor table of one safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub struct SafetensorsHeader {
    /// Tensors in the order of their data, without those that have no elements. The format allows no gaps and no overlap.
    pub tensors: Vec<TensorInfo>,
    /// Names of the tensors that have no elements.
    pub empty: Vec<String>,
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
    let (file, file_bytes) = Disk.open(path).map_err(FormatError::io(path))?;
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

/// Reads the table of the file at `path`. Also returns the start of its data and the file's size.
pub(crate) fn read_table(
    storage: &dyn Storage,
    path: &Path,
) -> Result<(Metadata, u64, u64), FormatError> {
    let (file, file_bytes) = storage.open(path).map_err(FormatError::io(path))?;
    let (table, data_offset) = table(file, path, file_bytes)?;
    Ok((table, data_offset, file_bytes))
}

fn parse(
    reader: impl Read,
    path: &Path,
    file_bytes: u64,
    index: FileIndex,
) -> Result<SafetensorsHeader, FormatError> {
    let (table, data_offset) = table(reader, path, file_bytes)?;
    let is_empty = |name: &String| table.info(name).is_some_and(|info| info.shape.contains(&0));
    let (empty, names): (Vec<_>, Vec<_>) = table.offset_keys().into_iter().partition(is_empty);
    let tensors = names.into_iter().map(|name| tensor(path, index, data_offset, &table, name));
    let tensors = tensors.collect::<Result<Vec<_>, _>>()?;
    Ok(SafetensorsHeader { tensors, empty, data_offset })
}

/// Reads the table of a file, and returns it with the start of the file's data.
fn table(
    mut reader: impl Read,
    path: &Path,
    file_bytes: u64,
) -> Result<(Metadata, u64), FormatError> {
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
    Ok((table, data_offset))
}

/// Encodes the header of a file of these tensors: name, type as the format writes it, shape and bytes. `path` is only used
/// in errors. Also returns the names in the order of their data, which is that of the reference implementation: the
/// largest elements first, then by name. Equal tensors and metadata give equal bytes.
///
/// # Errors
/// Returns [`FormatError::UnsupportedDtype`] if the format has no such type or the bytes do not match the shape, and
/// [`FormatError::DuplicateTensor`].
pub fn encode_header(
    path: &Path,
    tensors: Vec<(String, String, Vec<usize>, usize)>,
    metadata: Option<HashMap<String, String>>,
) -> Result<(Vec<u8>, Vec<String>), FormatError> {
    let mut known = Vec::with_capacity(tensors.len());
    for (tensor, dtype, shape, bytes) in tensors {
        let parsed = serde_json::from_value::<Dtype>(serde_json::Value::String(dtype.clone()));
        let elements = shape.iter().try_fold(1_usize, |product, &dim| product.checked_mul(dim));
        let fits = |of: &Dtype| {
            let bits = elements.and_then(|elements| elements.checked_mul(of.bitsize()));
            bits.is_some_and(|bits| bytes.checked_mul(8) == Some(bits))
        };
        let Some(parsed) = parsed.ok().filter(fits) else {
            let (path, dtype) = (path.to_owned(), format!("{dtype} in {bytes} bytes of {shape:?}"));
            return Err(FormatError::UnsupportedDtype { path, tensor, dtype });
        };
        known.push((tensor, parsed, shape, bytes));
    }
    known.sort_by(|(a, a_type, ..), (b, b_type, ..)| b_type.cmp(a_type).then(a.cmp(b)));
    let (mut end, mut table) = (0, Vec::with_capacity(known.len()));
    for (name, dtype, shape, bytes) in known {
        let data_offsets = (end, end + bytes);
        end += bytes;
        table.push((name, TableEntry { dtype, shape, data_offsets }));
    }
    let order: Vec<String> = table.iter().map(|(name, _)| name.clone()).collect();
    let mut names: Vec<&String> = order.iter().collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let (path, tensor) = (path.to_owned(), pair[0].clone());
        return Err(FormatError::DuplicateTensor { path, tensor });
    }
    let encoded = Metadata::new(metadata, table).map_err(serde::ser::Error::custom);
    let encoded = encoded.and_then(|table| {
        let mut table = serde_json::to_value(&table)?;
        if let Some(texts) = table.get_mut("__metadata__").and_then(|texts| texts.as_object_mut()) {
            texts.sort_keys();
        }
        serde_json::to_vec(&table)
    });
    let mut text = encoded
        .map_err(|source| FormatError::SafetensorsHeader { path: path.to_owned(), source })?;
    text.resize(text.len().next_multiple_of(LENGTH_BYTES as usize), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    Ok((header, order))
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

/// Returns the entry of a tensor in the table of the file at `path`.
pub(crate) fn entry<'a>(
    table: &'a Metadata,
    path: &Path,
    name: &str,
) -> Result<&'a TableEntry, FormatError> {
    table.info(name).ok_or_else(|| FormatError::MissingTensor {
        path: path.to_owned(),
        tensor: name.to_owned(),
        shard: path.display().to_string(),
    })
}

fn tensor(
    path: &Path,
    index: FileIndex,
    data_offset: u64,
    table: &Metadata,
    name: String,
) -> Result<TensorInfo, FormatError> {
    let info = entry(table, path, &name)?;
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

pub(crate) fn tensor_type(dtype: Dtype) -> Option<TensorType> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_headers_are_read_again() {
        let tensor = |name: &str, ty: &str, shape: &[usize], bytes| {
            (name.to_owned(), ty.to_owned(), shape.to_vec(), bytes)
        };
        let all = vec![
            tensor("b", "U8", &[3], 3),
            tensor("z", "F32", &[], 4),
            tensor("a", "F32", &[2, 1], 8),
        ];
        let texts: HashMap<String, String> =
            (0..9).map(|number| (number.to_string(), "text".to_owned())).collect();
        let path = Path::new("a.safetensors");
        let (header, order) = encode_header(path, all.clone(), Some(texts.clone())).unwrap();
        assert_eq!(order, ["a", "z", "b"]);
        assert_eq!(encode_header(path, all.clone(), Some(texts)).unwrap().0, header);
        let file = [&header[..], &[0; 15]].concat();
        let parsed = parse_safetensors_bytes(&file).unwrap();
        let names: Vec<&str> = parsed.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!((names, parsed.data_offset), (vec!["a", "z", "b"], header.len() as u64));

        let refused = |tensors| encode_header(path, tensors, None).unwrap_err();
        assert!(matches!(
            refused(vec![all[0].clone(), all[0].clone()]),
            FormatError::DuplicateTensor { .. }
        ));
        for wrong in [
            tensor("w", "F33", &[], 4),
            tensor("w", "F32", &[], 3),
            tensor("w", "U8", &[usize::MAX, 2], 4),
        ] {
            assert!(matches!(refused(vec![wrong]), FormatError::UnsupportedDtype { .. }));
        }
    }
}
