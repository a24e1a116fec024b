//! Parser of one GGUF file's header: metadata and tensor table.

use std::io::{BufReader, Read};
use std::path::Path;

use super::metadata::GgufMetadata;
use super::reader::Reader;
use super::value::{Array, ByteStrings, Value, ValueType};
use super::{ALIGNMENT_KEY, ALIGNMENT_MAX, DEFAULT_ALIGNMENT, MAGIC};
use crate::{Extent, FileIndex, FormatError, Storage, TensorInfo, TensorType};

/// Largest depth to which arrays may be nested. Files in the wild do not nest at all.
pub(super) const NESTING_MAX: u64 = 4;

/// Largest number of dimensions of a ggml tensor.
pub(super) const DIMENSIONS_MAX: u32 = 4;

/// The tables at the start of one GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufHeader {
    pub metadata: GgufMetadata,
    /// Tensors in the order of the file's table, without those that have no elements.
    pub tensors: Vec<TensorInfo>,
    /// Names of the tensors that have no elements.
    pub empty: Vec<String>,
    /// Start of the tensor data, in bytes from the start of the file.
    pub data_offset: u64,
    /// Alignment of every tensor's data, in bytes.
    pub alignment: u64,
}

/// Parses the header of a whole GGUF file that lies in memory. Tensors must lie inside `bytes`.
///
/// # Errors
/// Returns the errors of [`Catalog::open`](crate::Catalog::open), with empty paths.
pub fn parse_gguf_bytes(bytes: &[u8]) -> Result<GgufHeader, FormatError> {
    let file_bytes = bytes.len() as u64;
    parse(Reader::new(bytes, Path::new(""), file_bytes), FileIndex(0), file_bytes)
}

/// Parses a header that was cut from a file of `file_bytes` bytes. `path` is only used in errors.
pub(crate) fn parse_header(
    header: &[u8],
    path: &Path,
    file_bytes: u64,
) -> Result<GgufHeader, FormatError> {
    // Claimed lengths are checked against the header's own length. The file size passed by the
    // caller is itself only a claim.
    parse(Reader::new(header, path, header.len() as u64), FileIndex(0), file_bytes)
}

/// Parses the header of the file at `path`, which is file number `index` of its model. Also returns
/// the file's size. Only the header is read.
pub(crate) fn parse_file(
    storage: &dyn Storage,
    path: &Path,
    index: FileIndex,
) -> Result<(GgufHeader, u64), FormatError> {
    let (file, file_bytes) = storage.open(path).map_err(FormatError::io(path))?;
    let buffered = BufReader::with_capacity(256 << 10, file);
    Ok((parse(Reader::new(buffered, path, file_bytes), index, file_bytes)?, file_bytes))
}

/// Row of the tensor table whose absolute offset in the file is not known yet.
struct TensorRow {
    name: String,
    ty: TensorType,
    shape: Vec<u64>,
    /// Offset from the start of the data section.
    offset: u64,
    length: u64,
}

fn parse<R: Read>(
    mut reader: Reader<'_, R>,
    index: FileIndex,
    file_bytes: u64,
) -> Result<GgufHeader, FormatError> {
    let path = reader.path();
    let magic = reader.array("the magic number")?;
    if magic != MAGIC {
        return Err(FormatError::WrongMagic { path: path.to_owned(), found: magic });
    }
    let version = reader.u32("the version")?;
    if version != 2 && version != 3 {
        return Err(FormatError::UnsupportedVersion { path: path.to_owned(), version });
    }
    let tensor_count = reader.u64("the number of tensors")?;
    let key_count = reader.u64("the number of metadata keys")?;
    // A key has a length, one letter, a type and one byte of value. A tensor has a length, one
    // letter, a number of dimensions, one dimension, a type and an offset.
    reader.check_count("the metadata", key_count, 8 + 1 + 4 + 1)?;
    reader.check_count("the tensor table", tensor_count, 8 + 1 + 4 + 8 + 4 + 8)?;

    let mut metadata = GgufMetadata::new(version);
    for _ in 0..key_count {
        let key = reader.name("a metadata key")?;
        let value = read_value(&mut reader, &key)?;
        if metadata.get(&key).is_some() {
            return Err(FormatError::DuplicateKey { path: path.to_owned(), key });
        }
        metadata.insert(key, value);
    }
    let alignment = alignment(path, &metadata)?;

    let (mut rows, mut empty) = (Vec::new(), Vec::new());
    for _ in 0..tensor_count {
        match read_tensor_row(&mut reader)? {
            row if row.shape.contains(&0) => empty.push(row.name),
            row => rows.push(row),
        }
    }
    let data_offset = reader.position().next_multiple_of(alignment);
    let place = DataSection { path, index, data_offset, alignment, file_bytes };
    let tensors = rows.into_iter().map(|row| place.place(row)).collect::<Result<Vec<_>, _>>()?;
    check_distinct(path, &tensors)?;
    Ok(GgufHeader { metadata, tensors, empty, data_offset, alignment })
}

pub(super) fn alignment(path: &Path, metadata: &GgufMetadata) -> Result<u64, FormatError> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else {
        return Ok(DEFAULT_ALIGNMENT);
    };
    match value.as_u64() {
        Some(found) if found.is_power_of_two() && found <= ALIGNMENT_MAX => Ok(found),
        found => Err(FormatError::InvalidAlignment {
            path: path.to_owned(),
            found: found.map_or_else(|| value.describe(), |found| found.to_string()),
            limit: ALIGNMENT_MAX,
        }),
    }
}

fn read_value<R: Read>(reader: &mut Reader<'_, R>, key: &str) -> Result<Value, FormatError> {
    const WHAT: &str = "a metadata value";
    let value = match read_type(reader, key)? {
        ValueType::U8 => Value::U8(u8::from_le_bytes(reader.array(WHAT)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(reader.array(WHAT)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(reader.array(WHAT)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(reader.array(WHAT)?)),
        ValueType::U32 => Value::U32(u32::from_le_bytes(reader.array(WHAT)?)),
        ValueType::I32 => Value::I32(i32::from_le_bytes(reader.array(WHAT)?)),
        ValueType::U64 => Value::U64(u64::from_le_bytes(reader.array(WHAT)?)),
        ValueType::I64 => Value::I64(i64::from_le_bytes(reader.array(WHAT)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(reader.array(WHAT)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(reader.array(WHAT)?)),
        ValueType::Bool => Value::Bool(read_bool(reader, key)?),
        ValueType::String => Value::String(reader.string(WHAT)?),
        ValueType::Array => Value::Array(read_array(reader, key, 1)?),
    };
    Ok(value)
}

fn read_type<R: Read>(reader: &mut Reader<'_, R>, key: &str) -> Result<ValueType, FormatError> {
    let offset = reader.position();
    let id = reader.u32("the type of a metadata value")?;
    ValueType::from_id(id).ok_or_else(|| FormatError::UnknownValueType {
        path: reader.path().to_owned(),
        key: key.to_owned(),
        offset,
        id,
    })
}

fn read_bool<R: Read>(reader: &mut Reader<'_, R>, key: &str) -> Result<bool, FormatError> {
    let offset = reader.position();
    match reader.u8("a bool")? {
        0 => Ok(false),
        1 => Ok(true),
        found => Err(FormatError::InvalidBool {
            path: reader.path().to_owned(),
            key: key.to_owned(),
            offset,
            found,
        }),
    }
}

fn read_array<R: Read>(
    reader: &mut Reader<'_, R>,
    key: &str,
    depth: u64,
) -> Result<Array, FormatError> {
    if depth > NESTING_MAX {
        return Err(FormatError::LimitExceeded {
            path: reader.path().to_owned(),
            what: "the nesting of an array",
            offset: reader.position(),
            found: depth,
            limit: NESTING_MAX,
        });
    }
    let ty = read_type(reader, key)?;
    let count = reader.u64("the length of an array")?;
    let array = match ty {
        ValueType::U8 => Array::U8(read_numbers(reader, count, u8::from_le_bytes)?),
        ValueType::I8 => Array::I8(read_numbers(reader, count, i8::from_le_bytes)?),
        ValueType::U16 => Array::U16(read_numbers(reader, count, u16::from_le_bytes)?),
        ValueType::I16 => Array::I16(read_numbers(reader, count, i16::from_le_bytes)?),
        ValueType::U32 => Array::U32(read_numbers(reader, count, u32::from_le_bytes)?),
        ValueType::I32 => Array::I32(read_numbers(reader, count, i32::from_le_bytes)?),
        ValueType::U64 => Array::U64(read_numbers(reader, count, u64::from_le_bytes)?),
        ValueType::I64 => Array::I64(read_numbers(reader, count, i64::from_le_bytes)?),
        ValueType::F32 => Array::F32(read_numbers(reader, count, f32::from_le_bytes)?),
        ValueType::F64 => Array::F64(read_numbers(reader, count, f64::from_le_bytes)?),
        ValueType::Bool => {
            let count = reader.check_count("an array", count, 1)?;
            Array::Bool((0..count).map(|_| read_bool(reader, key)).collect::<Result<_, _>>()?)
        }
        ValueType::String => {
            let count = reader.check_count("an array of strings", count, ty.bytes_min())?;
            let mut strings = ByteStrings::with_capacity(count);
            for _ in 0..count {
                strings.read_from(reader)?;
            }
            Array::String(strings)
        }
        ValueType::Array => {
            let count = reader.check_count("an array of arrays", count, ty.bytes_min())?;
            let arrays = (0..count).map(|_| read_array(reader, key, depth + 1));
            Array::Array(arrays.collect::<Result<_, _>>()?)
        }
    };
    Ok(array)
}

fn read_numbers<R: Read, T, const N: usize>(
    reader: &mut Reader<'_, R>,
    count: u64,
    convert: fn([u8; N]) -> T,
) -> Result<Vec<T>, FormatError> {
    reader.check_count("an array", count, N as u64)?;
    let mut bytes = Vec::new();
    reader.bytes("an array", count * N as u64, &mut bytes)?;
    Ok(bytes.as_chunks().0.iter().map(|number| convert(*number)).collect())
}

fn read_tensor_row<R: Read>(reader: &mut Reader<'_, R>) -> Result<TensorRow, FormatError> {
    let name = reader.name("a tensor name")?;
    let offset = reader.position();
    let dimensions = reader.u32("the number of dimensions")?;
    if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
        return Err(FormatError::DimensionCount {
            path: reader.path().to_owned(),
            tensor: name,
            offset,
            found: dimensions,
            limit: DIMENSIONS_MAX,
        });
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        shape.push(reader.u64("a dimension")?);
    }
    // The file stores the contiguous dimension first.
    shape.reverse();
    let id = reader.u32("a tensor type")?;
    let Some(ty) = TensorType::from_ggml_id(id) else {
        let path = reader.path().to_owned();
        return Err(FormatError::UnknownTensorType { path, tensor: name, id });
    };
    let offset = reader.u64("a tensor offset")?;
    let length = match shape.contains(&0) {
        true => 0,
        false => crate::tensor_type::checked_bytes(reader.path(), &name, ty, &shape)?,
    };
    Ok(TensorRow { name, ty, shape, offset, length })
}

/// Position and limits of a file's tensor data.
struct DataSection<'p> {
    path: &'p Path,
    index: FileIndex,
    data_offset: u64,
    alignment: u64,
    file_bytes: u64,
}

impl DataSection<'_> {
    fn place(&self, row: TensorRow) -> Result<TensorInfo, FormatError> {
        if !row.offset.is_multiple_of(self.alignment) {
            return Err(FormatError::Misaligned {
                path: self.path.to_owned(),
                tensor: row.name,
                offset: row.offset,
                alignment: self.alignment,
            });
        }
        let offset = self.data_offset.saturating_add(row.offset);
        if offset.checked_add(row.length).is_none_or(|end| end > self.file_bytes) {
            return Err(FormatError::TensorOutOfRange {
                path: self.path.to_owned(),
                tensor: row.name,
                offset,
                length: row.length,
                file_bytes: self.file_bytes,
            });
        }
        let extent = Extent { file: self.index, offset, length: row.length };
        Ok(TensorInfo::contiguous(row.name, row.ty, row.shape, extent))
    }
}

/// Returns an error if two tensors share a name or a byte.
fn check_distinct(path: &Path, tensors: &[TensorInfo]) -> Result<(), FormatError> {
    let mut by_place: Vec<&TensorInfo> = tensors.iter().collect();
    by_place.sort_by_key(|tensor| tensor.extent);
    if let Some(pair) =
        by_place.windows(2).find(|pair| pair[0].extent.end() > pair[1].extent.offset)
    {
        return Err(FormatError::TensorsOverlap {
            path: path.to_owned(),
            tensor: pair[0].name.clone(),
            other: pair[1].name.clone(),
            offset: pair[1].extent.offset,
        });
    }
    let mut by_name = by_place;
    by_name.sort_by(|a, b| a.name.cmp(&b.name));
    match by_name.windows(2).find(|pair| pair[0].name == pair[1].name) {
        Some(pair) => Err(FormatError::DuplicateTensor {
            path: path.to_owned(),
            tensor: pair[0].name.clone(),
        }),
        None => Ok(()),
    }
}
