use std::ops::Deref;

use crate::Tokenizer;

/// Converts tokens to text as they arrive, without ever returning a part of a character.
///
/// All pieces together, including [`TextStream::finish`], equal [`Tokenizer::decode`] of all
/// tokens.
pub struct TextStream<T> {
    /// A reference to a tokenizer, borrowed or shared.
    tokenizer: T,
    /// Bytes that do not form a whole character yet. There are at most 3 between calls.
    pending: Vec<u8>,
    keep_special: bool,
    /// True if the next space begins the text and is dropped.
    drop_space: bool,
}

impl<T: Deref<Target = Tokenizer>> TextStream<T> {
    /// Creates a stream whose first token begins a text. A space that the tokenizer puts before
    /// every text is removed.
    pub fn new(tokenizer: T) -> Self {
        let drop_space = tokenizer.drops_first_space();
        Self { tokenizer, pending: Vec::new(), keep_special: false, drop_space }
    }

    /// Creates a stream that continues after other text, so that a leading space is kept. This fits
    /// the text that a model appends to a prompt of plain text.
    pub fn continuing(tokenizer: T) -> Self {
        Self { drop_space: false, ..Self::new(tokenizer) }
    }

    /// Sets whether special tokens are written out. They are hidden by default.
    pub fn keep_special(mut self, keep_special: bool) -> Self {
        self.keep_special = keep_special;
        self
    }

    /// Adds a token and returns the text that it completes. Ids outside the vocabulary are ignored.
    pub fn push(&mut self, id: u32) -> String {
        let bytes = self.tokenizer.token_bytes(id, self.keep_special);
        self.push_bytes(&bytes)
    }

    fn push_bytes(&mut self, bytes: &[u8]) -> String {
        let mut bytes = bytes;
        if self.drop_space && !bytes.is_empty() {
            self.drop_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut used = 0;
        // This replaces invalid bytes exactly as `String::from_utf8_lossy` does, so that the text
        // does not depend on where the bytes are cut.
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            used += chunk.valid().len();
            let invalid = chunk.invalid();
            if used + invalid.len() == self.pending.len() && may_go_on(invalid) {
                break;
            }
            if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                used += invalid.len();
            }
        }
        self.pending.drain(..used);
        text
    }

    /// Returns the bytes of an unfinished character as U+FFFD. The caller uses it before something
    /// that is not text.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// Returns the rest at the end of the stream. A cut-off character becomes U+FFFD.
    pub fn finish(mut self) -> String {
        self.flush()
    }
}

/// Returns true if `bytes` are the beginning of a character that more bytes can complete.
fn may_go_on(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
