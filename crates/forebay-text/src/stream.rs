use crate::Tokenizer;

/// Turns tokens into text as they come, never giving out a part of a character.
///
/// All pieces together, with [`TextStream::finish`], equal [`Tokenizer::decode`] of all tokens.
pub struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    /// Bytes that do not make a whole character yet: at most 3, between calls.
    pending: Vec<u8>,
    keep_special: bool,
    /// The next space begins the text and is dropped.
    drop_space: bool,
}

impl<'t> TextStream<'t> {
    /// A stream whose first token begins a text: a space that the tokenizer puts before every text
    /// is taken off.
    pub fn new(tokenizer: &'t Tokenizer) -> Self {
        let drop_space = tokenizer.drops_first_space();
        Self { tokenizer, pending: Vec::new(), keep_special: false, drop_space }
    }

    /// A stream that goes on where other text ended, so that a leading space belongs to it: what a
    /// model appends to a prompt that was given as plain text.
    pub fn continuing(tokenizer: &'t Tokenizer) -> Self {
        Self { drop_space: false, ..Self::new(tokenizer) }
    }

    /// Whether special tokens are written out; they are hidden at first.
    pub fn keep_special(mut self, keep_special: bool) -> Self {
        self.keep_special = keep_special;
        self
    }

    /// The text that is whole with this token. Ids outside the vocabulary give nothing.
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
        // The same replacement of invalid bytes as `String::from_utf8_lossy`, so that cutting the
        // bytes elsewhere cannot change the text.
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

    /// The bytes of an unfinished character as U+FFFD, where something that is not text follows.
    pub fn flush(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// What is left at the end: a cut-off character becomes U+FFFD.
    pub fn finish(mut self) -> String {
        self.flush()
    }
}

/// Whether bytes are the beginning of a character that more bytes can complete.
fn may_go_on(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
