//! Conversion of tokens back to text.

use crate::byte_level;
use crate::vocabulary::{TokenKind, Vocabulary, byte_of_token};

/// Encoding of bytes in the texts of normal tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spelling {
    /// One character of the byte-level alphabet per byte.
    ByteLevel,
    /// Plain text, with `▁` for the space.
    Underscore {
        /// True if the encoder puts a space before the text, so that decoding must remove it.
        space_prefix: bool,
    },
}

impl Spelling {
    /// Returns true if one space is removed from the beginning of a text.
    pub fn drops_first_space(self) -> bool {
        self == Spelling::Underscore { space_prefix: true }
    }

    /// Returns the bytes of one token. Returns nothing for a hidden token unless `keep_special` is
    /// set.
    pub fn bytes(self, vocabulary: &Vocabulary, id: u32, keep_special: bool) -> Vec<u8> {
        let (Some(text), Some(kind)) = (vocabulary.text(id), vocabulary.kind(id)) else {
            return Vec::new();
        };
        if let Some(bytes) = vocabulary.written(id) {
            return bytes.to_vec();
        }
        match kind {
            _ if kind.is_hidden() => {
                if keep_special {
                    text.to_vec()
                } else {
                    Vec::new()
                }
            }
            TokenKind::UserDefined => text.to_vec(),
            TokenKind::Byte => match byte_of_token(text) {
                Some(byte) => vec![byte],
                None => text.to_vec(),
            },
            _ => match self {
                Spelling::ByteLevel => byte_level::decode(text),
                Spelling::Underscore { .. } => with_spaces(text),
            },
        }
    }
}

const UNDERSCORE: &[u8] = "▁".as_bytes();

fn with_spaces(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, others)) = rest.split_first() {
        match rest.strip_prefix(UNDERSCORE) {
            Some(behind) => {
                out.push(b' ');
                rest = behind;
            }
            None => {
                out.push(*first);
                rest = others;
            }
        }
    }
    out
}
