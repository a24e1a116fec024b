//! What a process for templates and its parent say to each other: frames of bytes, and JSON values in them.
//!
//! JSON text would lose the last bits of some numbers, and its parser limits the nesting.

use std::io::{self, Read, Write};

use serde_json::{Map, Number, Value};

/// Writes a frame: its length, and its bytes.
pub fn send(to: &mut impl Write, frame: &[u8]) -> io::Result<()> {
    to.write_all(&(frame.len() as u64).to_le_bytes())?;
    to.write_all(frame)?;
    to.flush()
}

/// Reads the length of a frame. Returns `None` at the end of the input.
pub fn length(from: &mut impl Read) -> io::Result<Option<u64>> {
    let mut length = [0; 8];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        read => read.map(|()| Some(u64::from_le_bytes(length))),
    }
}

/// Reads the bytes of a frame.
pub fn receive(from: &mut impl Read, length: u64) -> io::Result<Vec<u8>> {
    let mut frame = Vec::new();
    match from.take(length).read_to_end(&mut frame)? as u64 == length {
        true => Ok(frame),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Appends a text.
pub fn put_text(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Appends a value.
pub fn put(value: &Value, out: &mut Vec<u8>) {
    let mut number = |tag: u8, bits: u64| {
        out.push(tag);
        out.extend(bits.to_le_bytes());
    };
    match value {
        Value::Null => out.push(0),
        Value::Bool(value) => out.push(1 + u8::from(*value)),
        Value::Number(value) => match (value.as_i64(), value.as_u64()) {
            (Some(value), _) => number(3, value as u64),
            (_, Some(value)) => number(4, value),
            _ => number(5, value.as_f64().unwrap_or(f64::NAN).to_bits()),
        },
        Value::String(text) => {
            out.push(6);
            put_text(text, out);
        }
        Value::Array(items) => {
            number(7, items.len() as u64);
            items.iter().for_each(|item| put(item, out));
        }
        Value::Object(entries) => {
            number(8, entries.len() as u64);
            for (key, value) in entries {
                put_text(key, out);
                put(value, out);
            }
        }
    }
}

/// The rest of a frame.
pub struct Rest<'a>(pub &'a [u8]);

impl Rest<'_> {
    fn bytes(&mut self, length: usize) -> Option<&[u8]> {
        let (bytes, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(bytes)
    }

    fn number(&mut self) -> Option<u64> {
        self.bytes(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    /// Takes a text.
    pub fn text(&mut self) -> Option<String> {
        let length = usize::try_from(self.number()?).ok()?;
        String::from_utf8(self.bytes(length)?.to_vec()).ok()
    }

    /// Takes a value.
    pub fn value(&mut self) -> Option<Value> {
        let tag = self.bytes(1)?[0];
        Some(match tag {
            0 => Value::Null,
            1 | 2 => Value::Bool(tag == 2),
            3 => Value::from(self.number()? as i64),
            4 => Value::from(self.number()?),
            5 => Number::from_f64(f64::from_bits(self.number()?)).map_or(Value::Null, Value::from),
            6 => Value::from(self.text()?),
            7 => {
                let count = self.number()?;
                Value::Array((0..count).map(|_| self.value()).collect::<Option<_>>()?)
            }
            8 => Value::Object(self.object()?),
            _ => return None,
        })
    }

    fn object(&mut self) -> Option<Map<String, Value>> {
        let count = self.number()?;
        (0..count).map(|_| Some((self.text()?, self.value()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_come_back_as_they_were() {
        let mut deep = Value::Null;
        for _ in 0..500 {
            deep = json!([deep]);
        }
        let value = json!({ "z": [1, -1, u64::MAX, i64::MIN, 0.1, 1e300, 5e-324, 1.0, true, false, null],
            "a": { "é": "<\n\u{1f600}", "": {} }, "deep": deep });
        let mut bytes = Vec::new();
        put(&value, &mut bytes);
        let mut rest = Rest(&bytes);
        let back = rest.value().unwrap();
        assert_eq!((back.to_string(), rest.0.len()), (value.to_string(), 0));
        for end in 0..bytes.len() {
            assert_eq!(Rest(&bytes[..end]).value(), None, "{end}");
        }
    }

    #[test]
    fn frames_come_back_as_they_were() {
        let mut bytes = Vec::new();
        send(&mut bytes, b"abc").unwrap();
        let mut from = bytes.as_slice();
        let length_of = length(&mut from).unwrap().unwrap();
        assert_eq!(receive(&mut from, length_of).unwrap(), b"abc");
        assert_eq!(length(&mut from).unwrap(), None);
        assert!(receive(&mut &bytes[8..10], 3).is_err());
    }
}
