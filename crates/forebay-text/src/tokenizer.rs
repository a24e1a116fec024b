use std::borrow::Cow;
use std::fmt;

use forebay_format::{Catalog, GgufMetadata, HfMetadata, Source};

use crate::bpe::Bpe;
use crate::content::Prompt;
use crate::huggingface::HuggingFace;
use crate::infill::InfillTokens;
use crate::merge::Merger;
use crate::pieces::Spelling;
use crate::sentencepiece::SentencePiece;
use crate::special::{Fragment, SpecialTokens};
use crate::vocabulary::Vocabulary;
use crate::{TextError, TextStream, gguf, huggingface};

/// Length limit of a text to encode. No model reads that much at once, and merging takes about 60
/// bytes of memory per byte of text.
const TEXT_BYTES_MAX: u64 = 64 << 20;

/// Conversion between text and token ids, as the model's files define it.
pub struct Tokenizer {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) encoder: Encoder,
    pub(crate) specials: SpecialTokens,
    pub(crate) spelling: Spelling,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) affixes: Affixes,
    /// Tokens that end a generation, in ascending order.
    pub(crate) eog: Vec<u32>,
    pub(crate) infill: Option<InfillTokens>,
    pub(crate) kind: String,
    /// Most bytes of a text that one token stands for; `None` if that is not known.
    pub(crate) longest: Option<usize>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Tokenizer({}, {} tokens)", self.kind, self.vocab_size())
    }
}

pub(crate) enum Encoder {
    Bpe(Bpe),
    SentencePiece(SentencePiece),
    /// The library finds special tokens and adds those around the text itself.
    HuggingFace(HuggingFace),
}

/// Tokens around a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Affixes {
    pub before: Option<u32>,
    pub after: Option<u32>,
}

impl Tokenizer {
    /// Builds the tokenizer of a model.
    ///
    /// # Errors
    /// Returns an error in these cases:
    ///
    /// - A GGUF has no vocabulary or a broken one.
    /// - A folder has no `tokenizer.json`.
    /// - The kind of tokenizer is unknown.
    pub fn from_catalog(catalog: &Catalog) -> Result<Self, TextError> {
        match &catalog.source {
            Source::Gguf(metadata) => gguf::tokenizer(metadata),
            Source::HuggingFace(metadata) => huggingface::tokenizer(metadata),
        }
    }

    /// Builds the tokenizer that GGUF metadata describes.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::from_catalog`].
    pub fn from_gguf(metadata: &GgufMetadata) -> Result<Self, TextError> {
        gguf::tokenizer(metadata)
    }

    /// Builds the tokenizer of a Hugging Face folder.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::from_catalog`].
    pub fn from_hugging_face(metadata: &HfMetadata) -> Result<Self, TextError> {
        huggingface::tokenizer(metadata)
    }

    /// Returns the ids of `text`. With `add_special`, BOS and EOS are added if the model requires
    /// them. With `parse_special`, the texts of control tokens become those tokens. Without it they
    /// are ordinary text, as they must be in user input.
    ///
    /// # Errors
    /// Returns an error if the text is longer than 64 MiB or has bytes that no token stands for.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        if text.len() as u64 > TEXT_BYTES_MAX {
            return Err(TextError::TextTooLong { limit: TEXT_BYTES_MAX });
        }
        if let Encoder::HuggingFace(tokenizer) = &self.encoder {
            return tokenizer.encode(text, add_special, parse_special);
        }
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        ids.extend(self.affixes.before.filter(|_| add_special));
        self.encode_fragments(self.specials.split(text, parse_special), &mut ids)?;
        ids.extend(self.affixes.after.filter(|_| add_special));
        Ok(ids)
    }

    /// Returns the ids of a prompt without tokens around it. The texts of control tokens become those tokens, except in the
    /// text of messages, which stays text.
    ///
    /// # Errors
    /// Returns the errors of [`Tokenizer::encode`].
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, TextError> {
        let text = prompt.text();
        let by_library = match &self.encoder {
            Encoder::HuggingFace(library) => {
                let changes = prompt.guards() && library.normalizes_specials();
                !changes && !self.specials.are_in_messages(prompt)
            }
            _ => !prompt.guards(),
        };
        if by_library {
            return self.encode(text, false, true);
        }
        if text.len() as u64 > TEXT_BYTES_MAX {
            return Err(TextError::TextTooLong { limit: TEXT_BYTES_MAX });
        }
        let with_text = !matches!(self.encoder, Encoder::HuggingFace(_));
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        self.encode_fragments(self.specials.split_prompt(prompt, with_text), &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text that is cut at special tokens.
    fn encode_fragments(
        &self,
        fragments: Vec<Fragment<'_>>,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let mut merger = Merger::default();
        let mut before = None;
        for fragment in fragments {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => self.encode_text(text, before, &mut merger, ids)?,
            }
            before = Some(fragment);
        }
        Ok(())
    }

    /// Returns the texts of the tokens that the text of messages must not become.
    pub(crate) fn guarded_texts(&self) -> impl Iterator<Item = &str> {
        let texts = self.specials.guarded().filter_map(|id| self.vocabulary.text(id));
        texts.filter_map(|text| std::str::from_utf8(text).ok())
    }

    fn encode_text(
        &self,
        text: &str,
        before: Option<Fragment<'_>>,
        merger: &mut Merger,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        let follows_special = !matches!(before, Some(Fragment::Text(_)));
        match &self.encoder {
            Encoder::Bpe(bpe) => bpe.encode(&self.vocabulary, text, merger, ids),
            Encoder::SentencePiece(pieces) => {
                pieces.encode(&self.vocabulary, text, follows_special, merger, ids)
            }
            Encoder::HuggingFace(library) => {
                ids.extend(library.encode_part(text, before.is_none())?);
                Ok(())
            }
        }
    }

    /// Returns the text of `ids`. With `keep_special`, control tokens are included. Invalid UTF-8
    /// becomes U+FFFD, and ids outside the vocabulary are ignored.
    pub fn decode(&self, ids: &[u32], keep_special: bool) -> String {
        let mut stream = TextStream::new(self).keep_special(keep_special);
        let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// Returns the bytes of one token in the middle of a text. They need not be whole characters.
    /// For control tokens the result is empty unless `keep_special` is set.
    pub fn token_bytes(&self, id: u32, keep_special: bool) -> Vec<u8> {
        self.spelling.bytes(&self.vocabulary, id, keep_special)
    }

    /// Returns the text of a control token, such as `<|im_end|>`, or `None` for a token that is
    /// text.
    pub fn control_text(&self, id: u32) -> Option<Cow<'_, str>> {
        self.vocabulary.kind(id).filter(|kind| kind.is_hidden())?;
        self.token_text(id)
    }

    /// Returns the token as the vocabulary writes it, with invalid UTF-8 replaced.
    pub fn token_text(&self, id: u32) -> Option<Cow<'_, str>> {
        self.vocabulary.text(id).map(String::from_utf8_lossy)
    }

    /// Returns the token that the vocabulary writes as `text`.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocabulary.id(text.as_bytes())
    }

    /// Returns the number of ids, including holes and unused ones. Models may have more rows of
    /// logits.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    /// Returns a number of tokens that no text of so many bytes falls below. It takes no time, so it can refuse a text that
    /// is much too long before its tokens are made. It is 0 if nothing is known.
    pub fn tokens_min(&self, text_bytes: usize) -> usize {
        self.longest.map_or(0, |longest| text_bytes / longest)
    }

    /// Returns a number of bytes that no text of so many tokens exceeds, if it is known.
    pub fn bytes_max(&self, tokens: usize) -> Option<usize> {
        self.longest.map(|longest| tokens.saturating_mul(longest))
    }

    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    /// Returns true if [`Tokenizer::encode`] with `add_special` begins with BOS.
    pub fn adds_bos(&self) -> bool {
        self.affixes.before.is_some()
    }

    /// Returns true if this token ends the model's turn or text.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// Returns all tokens that end a generation, in ascending order.
    pub fn eog_ids(&self) -> &[u32] {
        &self.eog
    }

    /// Returns the tokens for filling in the middle, if the vocabulary has them.
    pub fn infill(&self) -> Option<&InfillTokens> {
        self.infill.as_ref()
    }

    /// Returns the kind of this tokenizer: `bpe (qwen2)`, `spm`, `hf (BPE)`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Returns true if encoding puts a space before a text, so that a part of a text has other tokens than within it.
    pub fn adds_first_space(&self) -> bool {
        self.drops_first_space()
    }

    /// Returns true if decoding must remove a space that encoding put before the text.
    pub(crate) fn drops_first_space(&self) -> bool {
        self.spelling.drops_first_space()
    }
}
