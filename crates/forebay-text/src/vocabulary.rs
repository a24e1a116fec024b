//! Tokens of a model: text, kind, and lookup of ids by text.

use std::collections::hash_map::Entry;
use std::sync::Arc;

use ahash::AHashMap;

use crate::{TextError, warnings};

/// Limit of the number of tokens. It is more than any model has (the largest vocabularies have
/// 262,144), but small enough that a hostile file cannot request an absurd table.
pub const TOKENS_MAX: u64 = 1 << 22;

/// Kind of a token (`tokenizer.ggml.token_type` of GGUF).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenKind {
    Normal,
    Unknown,
    /// A token that steers the model and is not part of the text, such as BOS.
    Control,
    /// A token added by hand and matched in any text.
    UserDefined,
    Unused,
    /// A token that stands for one byte and is written `<0xXX>`.
    Byte,
}

impl TokenKind {
    /// Returns the kind for a GGUF token type number. Unknown numbers are tokens that are never
    /// produced.
    pub fn from_gguf(number: i64) -> Self {
        match number {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Unused,
        }
    }

    /// Returns true if the token is part of the conversation's frame and hidden from its text.
    pub fn is_hidden(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::Unused)
    }
}

/// All tokens. If two have the same text, a text becomes the first of them.
pub struct Vocabulary {
    tokens: Vec<Arc<[u8]>>,
    kinds: Vec<TokenKind>,
    ids: AHashMap<Arc<[u8]>, u32>,
    longest_bytes: usize,
    /// Bytes of tokens that stand for another text than theirs.
    written: AHashMap<u32, Box<[u8]>>,
}

impl Vocabulary {
    /// Builds the table from texts (raw bytes) and one kind per text. Empty texts are allowed and
    /// stand for ids that have no token.
    ///
    /// # Errors
    /// Returns an error if there is no token, there are too many, or the number of kinds differs from
    /// the number of texts.
    pub fn new<'a>(
        texts: impl ExactSizeIterator<Item = &'a [u8]>,
        kinds: Vec<TokenKind>,
    ) -> Result<Self, TextError> {
        let count = texts.len();
        if count == 0 {
            return Err(TextError::EmptyVocabulary);
        }
        if count as u64 > TOKENS_MAX {
            return Err(TextError::VocabularyTooLarge { tokens: count as u64, limit: TOKENS_MAX });
        }
        if kinds.len() != count {
            let key = "tokenizer.ggml.token_type";
            return Err(TextError::WrongLength { key, expected: count, found: kinds.len() });
        }
        let mut tokens = Vec::with_capacity(count);
        let mut ids = AHashMap::with_capacity(count);
        let mut longest_bytes = 0;
        let mut repeated: Option<(u32, u32)> = None;
        for (id, text) in (0u32..).zip(texts) {
            let token: Arc<[u8]> = text.into();
            longest_bytes = longest_bytes.max(text.len());
            if !text.is_empty() {
                match ids.entry(token.clone()) {
                    Entry::Vacant(entry) => {
                        entry.insert(id);
                    }
                    Entry::Occupied(first) => {
                        repeated.get_or_insert((*first.get(), id));
                    }
                }
            }
            tokens.push(token);
        }
        if let Some((first, second)) = repeated {
            let text = String::from_utf8_lossy(&tokens[first as usize]).into_owned();
            warnings::warn(format!(
                "token {second} of the vocabulary repeats the text of token {first}, {text:?}: texts become the first one"
            ));
        }
        Ok(Self { tokens, kinds, ids, longest_bytes, written: AHashMap::new() })
    }

    /// Sets the bytes that a token stands for, if they are not those of its text.
    pub fn set_written(&mut self, id: u32, bytes: Vec<u8>) {
        self.written.insert(id, bytes.into());
    }

    /// Returns the bytes that a token stands for, if they are not those of its text.
    pub fn written(&self, id: u32) -> Option<&[u8]> {
        self.written.get(&id).map(|bytes| &**bytes)
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the token with exactly this text.
    pub fn id(&self, text: &[u8]) -> Option<u32> {
        // Merging looks up ever longer texts. Hashing texts beyond the longest token would be
        // waste.
        if text.len() > self.longest_bytes {
            return None;
        }
        self.ids.get(text).copied()
    }

    /// Returns the raw bytes of the token's text.
    pub fn text(&self, id: u32) -> Option<&[u8]> {
        self.tokens.get(id as usize).map(|token| &token[..])
    }

    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub fn set_kind(&mut self, id: u32, kind: TokenKind) {
        if let Some(slot) = self.kinds.get_mut(id as usize) {
            *slot = kind;
        }
    }

    /// Returns all tokens of the kinds that `wanted` accepts, in the order of ids.
    pub fn of_kind(&self, wanted: impl Fn(TokenKind) -> bool) -> impl Iterator<Item = u32> {
        (0u32..).zip(&self.kinds).filter(move |(_, kind)| wanted(**kind)).map(|(id, _)| id)
    }

    /// Returns the token that is written `<0xXX>` for every byte.
    pub fn byte_tokens(&self) -> [Option<u32>; 256] {
        std::array::from_fn(|byte| self.id(format!("<0x{byte:02X}>").as_bytes()))
    }
}

/// Returns the byte that a token of the form `<0xXX>` stands for.
pub fn byte_of_token(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    if digits.len() != 2 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary(texts: &[&str]) -> Result<Vocabulary, TextError> {
        Vocabulary::new(
            texts.iter().map(|text| text.as_bytes()),
            vec![TokenKind::Normal; texts.len()],
        )
    }

    #[test]
    fn the_first_of_equal_texts_counts_and_holes_are_not_found() {
        assert!(matches!(vocabulary(&[]), Err(TextError::EmptyVocabulary)));
        let twice = vocabulary(&["a", "b", "a"]).unwrap();
        assert_eq!((twice.id(b"a"), twice.text(2), twice.len()), (Some(0), Some(&b"a"[..]), 3));
        let holes = vocabulary(&["", "b", ""]).unwrap();
        assert_eq!((holes.id(b""), holes.id(b"b"), holes.id(b"bb")), (None, Some(1), None));
    }

    #[test]
    fn byte_tokens_are_two_hex_digits() {
        assert_eq!(byte_of_token(b"<0x0A>"), Some(10));
        for text in ["<0x+A>", "<0xA>", "0x0A", "<0x0A", "<0x00A>"] {
            assert_eq!(byte_of_token(text.as_bytes()), None, "{text}");
        }
    }
}
