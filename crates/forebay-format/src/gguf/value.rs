//! Values of GGUF metadata.

use std::fmt;
use std::io::Read;

use super::reader::Reader;
use crate::FormatError;

/// Type of a metadata value, with the number that stands for it in the file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    pub(crate) fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        let all = [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        all.into_iter().find(|ty| *ty as u32 == id)
    }

    /// Returns the smallest number of bytes that a value of this type takes in a file.
    pub(crate) fn bytes_min(self) -> u64 {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | String => 8,
            Array => 12,
        }
    }
}

/// Metadata value. Strings are raw bytes, as files store them. [`Value::as_str`] checks for UTF-8.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(Vec<u8>),
    Array(Array),
}

/// An array of metadata values, all of one type.
#[derive(Clone, PartialEq, Debug)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Bool(Vec<bool>),
    String(ByteStrings),
    Array(Vec<Array>),
}

/// Many byte strings in one allocation, because vocabularies have hundreds of thousands of them.
///
/// The strings are raw bytes because tokens may be pieces of UTF-8 characters.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct ByteStrings {
    bytes: Vec<u8>,
    /// End of each string in `bytes`. A string starts where the one before it ends.
    ends: Vec<usize>,
}

impl ByteStrings {
    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Returns the bytes of string `index`.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        self.bytes.get(start..end)
    }

    /// Returns string `index`, if it exists and is valid UTF-8.
    pub fn get_str(&self, index: usize) -> Option<&str> {
        std::str::from_utf8(self.get(index)?).ok()
    }

    /// Returns an iterator over all strings in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        (0..self.len()).map(|index| self.get(index).unwrap_or_default())
    }

    pub fn push(&mut self, string: &[u8]) {
        self.bytes.extend_from_slice(string);
        self.ends.push(self.bytes.len());
    }

    pub(crate) fn with_capacity(strings: usize) -> Self {
        Self { bytes: Vec::new(), ends: Vec::with_capacity(strings) }
    }

    /// Reads the next string of a file and appends it.
    pub(crate) fn read_from<R: Read>(
        &mut self,
        reader: &mut Reader<'_, R>,
    ) -> Result<(), FormatError> {
        let length = reader.u64("the length of a string")?;
        reader.bytes("a string in an array", length, &mut self.bytes)?;
        self.ends.push(self.bytes.len());
        Ok(())
    }
}

impl fmt::Debug for ByteStrings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(String::from_utf8_lossy)).finish()
    }
}

impl<S: AsRef<[u8]>> FromIterator<S> for ByteStrings {
    fn from_iter<I: IntoIterator<Item = S>>(strings: I) -> Self {
        let mut all = Self::default();
        strings.into_iter().for_each(|string| all.push(string.as_ref()));
        all
    }
}

impl Value {
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F32(_) => ValueType::F32,
            Value::F64(_) => ValueType::F64,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
        }
    }

    /// Returns the value if it is a non-negative integer of any width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U64(value) => Some(value),
            _ => self.as_i64().and_then(|value| u64::try_from(value).ok()),
        }
    }

    /// Returns the value if it is an integer that fits an i64.
    pub fn as_i64(&self) -> Option<i64> {
        match *self {
            Value::U8(value) => Some(value.into()),
            Value::I8(value) => Some(value.into()),
            Value::U16(value) => Some(value.into()),
            Value::I16(value) => Some(value.into()),
            Value::U32(value) => Some(value.into()),
            Value::I32(value) => Some(value.into()),
            Value::U64(value) => i64::try_from(value).ok(),
            Value::I64(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the value as an f32 if it is a float of either width.
    pub fn as_f32(&self) -> Option<f32> {
        match *self {
            Value::F32(value) => Some(value),
            Value::F64(value) => Some(value as f32),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the string, if it is one and is valid UTF-8.
    pub fn as_str(&self) -> Option<&str> {
        std::str::from_utf8(self.as_bytes()?).ok()
    }

    /// Returns the bytes of the string, if it is one.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Value::String(bytes) => Some(bytes),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }

    /// Returns the strings, if the value is an array of strings.
    pub fn as_strings(&self) -> Option<&ByteStrings> {
        match self {
            Value::Array(Array::String(strings)) => Some(strings),
            _ => None,
        }
    }

    /// Describes the value's type for messages, such as `U32` or `an array of F32`.
    pub fn describe(&self) -> String {
        match self {
            Value::Array(array) => format!("an array of {:?}", array.element_type()),
            other => format!("{:?}", other.value_type()),
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Value::String(text.as_bytes().to_vec())
    }
}

/// Implements `From` for Rust types that correspond to one kind of value.
macro_rules! value_from {
    ($($from:ty => $convert:expr),* $(,)?) => {$(
        impl From<$from> for Value {
            fn from(value: $from) -> Self {
                $convert(value)
            }
        }
    )*};
}

value_from! {
    u32 => Value::U32,
    i32 => Value::I32,
    u64 => Value::U64,
    f32 => Value::F32,
    bool => Value::Bool,
    Array => Value::Array,
    ByteStrings => |strings| Value::Array(Array::String(strings)),
    Vec<f32> => |values| Value::Array(Array::F32(values)),
    Vec<i32> => |values| Value::Array(Array::I32(values)),
    Vec<u32> => |values| Value::Array(Array::U32(values)),
}

impl Array {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U8(values) => values.len(),
            Array::I8(values) => values.len(),
            Array::U16(values) => values.len(),
            Array::I16(values) => values.len(),
            Array::U32(values) => values.len(),
            Array::I32(values) => values.len(),
            Array::U64(values) => values.len(),
            Array::I64(values) => values.len(),
            Array::F32(values) => values.len(),
            Array::F64(values) => values.len(),
            Array::Bool(values) => values.len(),
            Array::String(values) => values.len(),
            Array::Array(values) => values.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn element_type(&self) -> ValueType {
        match self {
            Array::U8(_) => ValueType::U8,
            Array::I8(_) => ValueType::I8,
            Array::U16(_) => ValueType::U16,
            Array::I16(_) => ValueType::I16,
            Array::U32(_) => ValueType::U32,
            Array::I32(_) => ValueType::I32,
            Array::U64(_) => ValueType::U64,
            Array::I64(_) => ValueType::I64,
            Array::F32(_) => ValueType::F32,
            Array::F64(_) => ValueType::F64,
            Array::Bool(_) => ValueType::Bool,
            Array::String(_) => ValueType::String,
            Array::Array(_) => ValueType::Array,
        }
    }

    /// Returns all elements, if they are integers that fit an i64.
    pub fn to_i64s(&self) -> Option<Vec<i64>> {
        fn widen<T: Copy + Into<i64>>(values: &[T]) -> Option<Vec<i64>> {
            Some(values.iter().map(|value| (*value).into()).collect())
        }
        match self {
            Array::U8(values) => widen(values),
            Array::I8(values) => widen(values),
            Array::U16(values) => widen(values),
            Array::I16(values) => widen(values),
            Array::U32(values) => widen(values),
            Array::I32(values) => widen(values),
            Array::I64(values) => widen(values),
            Array::U64(values) => values.iter().map(|value| i64::try_from(*value).ok()).collect(),
            _ => None,
        }
    }

    /// Returns all elements, if they are non-negative integers.
    pub fn to_u64s(&self) -> Option<Vec<u64>> {
        match self {
            Array::U64(values) => Some(values.clone()),
            _ => self.to_i64s()?.into_iter().map(|value| u64::try_from(value).ok()).collect(),
        }
    }

    /// Returns all elements as f32, if they are floats.
    pub fn to_f32s(&self) -> Option<Vec<f32>> {
        match self {
            Array::F32(values) => Some(values.clone()),
            Array::F64(values) => Some(values.iter().map(|value| *value as f32).collect()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_strings_keep_raw_bytes() {
        let strings: ByteStrings = [&b"a"[..], b"", b"\xff\xfe", b"end"].into_iter().collect();
        assert_eq!(strings.len(), 4);
        assert_eq!(strings.get(1), Some(&b""[..]));
        assert_eq!(strings.get(2), Some(&b"\xff\xfe"[..]));
        assert_eq!(strings.get_str(2), None);
        assert_eq!(strings.get_str(3), Some("end"));
        assert_eq!(strings.get(4), None);
        assert_eq!(strings.iter().len(), 4);
    }

    #[test]
    fn numbers_convert_only_where_they_fit() {
        assert_eq!(Value::I32(-1).as_u64(), None);
        assert_eq!(Value::U64(u64::MAX).as_i64(), None);
        assert_eq!(Value::U64(u64::MAX).as_u64(), Some(u64::MAX));
        assert_eq!(Value::F32(1.0).as_u64(), None);
        assert_eq!(Array::U64(vec![u64::MAX]).to_i64s(), None);
        assert_eq!(Array::I32(vec![3, 4]).to_u64s(), Some(vec![3, 4]));
        assert_eq!(Array::I32(vec![3, -4]).to_u64s(), None);
    }
}
