//! Walks through the beginning of a GGUF file that arrives in pieces.
//!
//! Nothing is interpreted but lengths. A caller that fetches a header over a network learns where it ends, and where its
//! parts lie. The header is checked by [`Catalog::open`](crate::Catalog::open) when all of it is there.

use super::parse::{DIMENSIONS_MAX, NESTING_MAX};
use super::reader::HEADER_BYTES_MAX;
use super::value::ValueType;
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, MAGIC};

/// Longest name of a key or tensor.
const NAME_BYTES_MAX: u64 = 1 << 16;

/// Reason why a walk ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// More bytes are needed.
    Short,
    /// These bytes are not a GGUF header.
    Bad,
}

/// Counts at the beginning of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    pub tensors: u64,
    pub keys: u64,
}

/// A metadata key with the place of its entry. Offsets count from the start of the walked bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyPlace {
    pub name: String,
    pub start: usize,
    pub end: usize,
    /// Number of items of an array.
    pub items: Option<u64>,
    /// Value of a 32-bit number.
    pub number: Option<u32>,
}

/// Places of the parts of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    pub counts: Counts,
    pub keys: Vec<KeyPlace>,
    /// Start of the tensor table.
    pub table: usize,
    /// End of the tensor table.
    pub end: usize,
}

impl Outline {
    /// Returns the alignment of the tensor data, in bytes.
    pub fn alignment(&self) -> u64 {
        let found = self.keys.iter().find(|key| key.name == ALIGNMENT_KEY);
        found.and_then(|key| key.number).map_or(DEFAULT_ALIGNMENT, u64::from).max(1)
    }
}

/// Number of bytes of the counts.
pub const COUNTS_BYTES: usize = 24;

/// Returns the counts at the beginning of a file.
///
/// # Errors
/// Returns [`Cut::Bad`] if this is no GGUF file of a known version.
pub fn counts(bytes: &[u8]) -> Result<Counts, Cut> {
    let mut walk = Walk { bytes, at: 0 };
    if walk.take(4)? != MAGIC || !matches!(walk.u32()?, 2 | 3) {
        return Err(Cut::Bad);
    }
    let (tensors, keys) = (walk.u64()?, walk.u64()?);
    match tensors.max(keys) > HEADER_BYTES_MAX {
        true => Err(Cut::Bad),
        false => Ok(Counts { tensors, keys }),
    }
}

/// Walks through a whole header.
///
/// # Errors
/// Returns [`Cut::Short`] while the header's end is not there.
pub fn outline(bytes: &[u8]) -> Result<Outline, Cut> {
    let counts = counts(bytes)?;
    let (mut at, mut keys) = (COUNTS_BYTES, Vec::new());
    for _ in 0..counts.keys {
        let key = key(bytes, at)?;
        at = key.end;
        keys.push(key);
    }
    let table = at;
    for _ in 0..counts.tensors {
        at = row(bytes, at)?;
    }
    Ok(Outline { counts, keys, table, end: at })
}

/// Walks over the metadata entry at an offset.
///
/// # Errors
/// Returns an error if there is no whole entry.
pub fn key(bytes: &[u8], start: usize) -> Result<KeyPlace, Cut> {
    let mut walk = Walk { bytes, at: start };
    let name = walk.name()?;
    let ty = walk.value_type()?;
    let (mut items, mut number) = (None, None);
    match ty {
        ValueType::Array => items = Some(walk.array(1)?),
        ValueType::U32 => number = Some(walk.u32()?),
        ty => walk.value(ty)?,
    }
    Ok(KeyPlace { name, start, end: walk.at, items, number })
}

/// Walks over the row of the tensor table at an offset. Returns the offset of the next one.
///
/// # Errors
/// Returns an error if there is no whole row.
pub fn row(bytes: &[u8], start: usize) -> Result<usize, Cut> {
    let mut walk = Walk { bytes, at: start };
    walk.name()?;
    let dimensions = walk.u32()?;
    if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
        return Err(Cut::Bad);
    }
    walk.take(u64::from(dimensions) * 8 + 4 + 8)?;
    Ok(walk.at)
}

/// Position in a header.
struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Walk<'a> {
    fn take(&mut self, length: u64) -> Result<&'a [u8], Cut> {
        if length > HEADER_BYTES_MAX {
            return Err(Cut::Bad);
        }
        let end = self.at + length as usize;
        let bytes = self.bytes.get(self.at..end).ok_or(Cut::Short)?;
        self.at = end;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Cut> {
        let bytes = self.take(4)?.try_into().map_err(|_| Cut::Short)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn u64(&mut self) -> Result<u64, Cut> {
        let bytes = self.take(8)?.try_into().map_err(|_| Cut::Short)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn name(&mut self) -> Result<String, Cut> {
        let length = self.u64()?;
        if length == 0 || length > NAME_BYTES_MAX {
            return Err(Cut::Bad);
        }
        let name = std::str::from_utf8(self.take(length)?).map_err(|_| Cut::Bad)?;
        Ok(name.to_owned())
    }

    fn value_type(&mut self) -> Result<ValueType, Cut> {
        ValueType::from_id(self.u32()?).ok_or(Cut::Bad)
    }

    fn value(&mut self, ty: ValueType) -> Result<(), Cut> {
        match ty {
            ValueType::String => {
                let length = self.u64()?;
                self.take(length).map(drop)
            }
            ValueType::Array => self.array(NESTING_MAX).map(drop),
            ty => self.take(ty.bytes_min()).map(drop),
        }
    }

    /// Walks over an array. Returns the number of its items.
    fn array(&mut self, depth: u64) -> Result<u64, Cut> {
        let (ty, count) = (self.value_type()?, self.u64()?);
        if count > HEADER_BYTES_MAX || depth > NESTING_MAX {
            return Err(Cut::Bad);
        }
        match ty {
            ValueType::String => (0..count).try_for_each(|_| self.value(ty))?,
            ValueType::Array => (0..count).try_for_each(|_| self.array(depth + 1).map(drop))?,
            ty => self.take(count * ty.bytes_min()).map(drop)?,
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorType;
    use crate::gguf::writer::GgufWriter;
    use crate::{Array, Value};

    fn header() -> Vec<u8> {
        let mut writer = GgufWriter::new("x".as_ref());
        writer.set("general.architecture", "llama").unwrap();
        writer.set("general.alignment", 64_u32).unwrap();
        writer.set("list", Value::Array(Array::U32(vec![1, 2, 3]))).unwrap();
        writer.add_tensor("a.weight", TensorType::F32, &[4, 8]).unwrap();
        writer.add_tensor("b.weight", TensorType::F32, &[8]).unwrap();
        writer.into_header().unwrap().0
    }

    #[test]
    fn every_piece_of_a_header_is_too_short_and_the_whole_is_not() {
        let header = header();
        let whole = outline(&header).unwrap();
        assert_eq!((whole.counts.tensors, whole.keys.len()), (2, 3));
        assert_eq!(whole.alignment(), 64);
        assert_eq!(whole.keys[2].items, Some(3));
        assert_eq!(whole.end.next_multiple_of(64), header.len());
        for length in 0..whole.end {
            assert_eq!(outline(&header[..length]), Err(Cut::Short), "{length}");
        }
        let mut at = whole.table;
        for _ in 0..2 {
            at = row(&header, at).unwrap();
        }
        assert_eq!(at, whole.end);
    }

    #[test]
    fn other_bytes_are_no_header() {
        let header = header();
        assert_eq!(outline(b"fewer bytes than a header"), Err(Cut::Bad));
        for (at, value) in [(0, 0), (4, 9), (15, 0xff), (23, 0xff), (31, 0xff)] {
            let mut wrong = header.clone();
            wrong[at] = value;
            assert_eq!(outline(&wrong), Err(Cut::Bad), "{at}");
        }
    }
}
