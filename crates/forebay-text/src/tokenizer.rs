use std::borrow::Cow;

use forebay_format::{Catalog, GgufMetadata, HfMetadata, Source};

use crate::bpe::Bpe;
use crate::huggingface::HuggingFace;
use crate::merge::Merger;
use crate::pieces::Spelling;
use crate::sentencepiece::SentencePiece;
use crate::special::{Fragment, SpecialTokens};
use crate::vocabulary::Vocabulary;
use crate::{TextError, TextStream, gguf, huggingface};

/// Longest text that can be encoded. No model reads so much at once, and merging takes about 60
/// bytes of memory per byte of text.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Text to token ids and back, as the model's files define it.
pub struct Tokenizer {
    pub(crate) vocabulary: Vocabulary,
    pub(crate) encoder: Encoder,
    pub(crate) specials: SpecialTokens,
    pub(crate) spelling: Spelling,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) affixes: Affixes,
    /// Ascending.
    pub(crate) eog: Vec<u32>,
    pub(crate) kind: String,
}

pub(crate) enum Encoder {
    Bpe(Bpe),
    SentencePiece(SentencePiece),
    /// Finds special tokens and adds the ones around the text itself.
    HuggingFace(HuggingFace),
}

/// The tokens that go around a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Affixes {
    pub before: Option<u32>,
    pub after: Option<u32>,
}

impl Tokenizer {
    /// The tokenizer of a model.
    ///
    /// # Errors
    /// A GGUF without or with a broken vocabulary, a folder without `tokenizer.json`, or a
    /// tokenizer of an unknown kind.
    pub fn from_catalog(catalog: &Catalog) -> Result<Self, TextError> {
        match &catalog.source {
            Source::Gguf(metadata) => gguf::tokenizer(metadata),
            Source::HuggingFace(metadata) => huggingface::tokenizer(metadata),
        }
    }

    /// The tokenizer that GGUF metadata describes.
    ///
    /// # Errors
    /// As [`Tokenizer::from_catalog`].
    pub fn from_gguf(metadata: &GgufMetadata) -> Result<Self, TextError> {
        gguf::tokenizer(metadata)
    }

    /// The tokenizer of a Hugging Face folder.
    ///
    /// # Errors
    /// As [`Tokenizer::from_catalog`].
    pub fn from_hugging_face(metadata: &HfMetadata) -> Result<Self, TextError> {
        huggingface::tokenizer(metadata)
    }

    /// The ids of `text`. `add_special`: with BOS and EOS where the model wants them.
    /// `parse_special`: the texts of control tokens become those tokens; without it they are
    /// ordinary text, as they must be in what a user typed.
    ///
    /// # Errors
    /// A text longer than 64 MiB, or bytes that no token stands for.
    pub fn encode(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<u32>, TextError> {
        if text.len() as u64 > MAX_TEXT_BYTES {
            return Err(TextError::TextTooLong { limit: MAX_TEXT_BYTES });
        }
        if let Encoder::HuggingFace(tokenizer) = &self.encoder {
            return tokenizer.encode(text, add_special, parse_special);
        }
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        ids.extend(self.affixes.before.filter(|_| add_special));
        let mut merger = Merger::default();
        let mut follows_special = true;
        for fragment in self.specials.split(text, parse_special) {
            match fragment {
                Fragment::Token(id) => ids.push(id),
                Fragment::Text(text) => {
                    self.encode_text(text, follows_special, &mut merger, &mut ids)?;
                }
            }
            follows_special = matches!(fragment, Fragment::Token(_));
        }
        ids.extend(self.affixes.after.filter(|_| add_special));
        Ok(ids)
    }

    fn encode_text(
        &self,
        text: &str,
        follows_special: bool,
        merger: &mut Merger,
        ids: &mut Vec<u32>,
    ) -> Result<(), TextError> {
        match &self.encoder {
            Encoder::Bpe(bpe) => bpe.encode(&self.vocabulary, text, merger, ids),
            Encoder::SentencePiece(pieces) => {
                pieces.encode(&self.vocabulary, text, follows_special, merger, ids)
            }
            Encoder::HuggingFace(tokenizer) => {
                ids.extend(tokenizer.encode(text, false, false)?);
                Ok(())
            }
        }
    }

    /// The text of `ids`; `keep_special` writes control tokens out. Bytes that are no UTF-8 become
    /// U+FFFD, ids outside the vocabulary nothing.
    pub fn decode(&self, ids: &[u32], keep_special: bool) -> String {
        let mut stream = TextStream::new(self).keep_special(keep_special);
        let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// The bytes that one token stands for in the middle of a text; they need not be whole
    /// characters. Nothing for control tokens, unless `keep_special`.
    pub fn token_bytes(&self, id: u32, keep_special: bool) -> Vec<u8> {
        self.spelling.bytes(&self.vocabulary, id, keep_special)
    }

    /// The text of a control token, such as `<|im_end|>`; `None` for every token that is text.
    pub fn control_text(&self, id: u32) -> Option<Cow<'_, str>> {
        self.vocabulary.kind(id).filter(|kind| kind.is_hidden())?;
        self.token_text(id)
    }

    /// The token as the vocabulary writes it; invalid UTF-8 is replaced.
    pub fn token_text(&self, id: u32) -> Option<Cow<'_, str>> {
        self.vocabulary.text(id).map(String::from_utf8_lossy)
    }

    /// The token that the vocabulary writes as `text`.
    pub fn token_id(&self, text: &str) -> Option<u32> {
        self.vocabulary.id(text.as_bytes())
    }

    /// Number of ids, holes and unused ones included. Models may have more rows of logits.
    pub fn vocab_size(&self) -> usize {
        self.vocabulary.len()
    }

    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    /// Whether [`Tokenizer::encode`] with `add_special` begins with BOS.
    pub fn adds_bos(&self) -> bool {
        self.affixes.before.is_some()
    }

    /// Whether a model that gives this token has ended its turn or text.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.eog.binary_search(&id).is_ok()
    }

    /// All tokens that end a generation, ascending.
    pub fn eog_ids(&self) -> &[u32] {
        &self.eog
    }

    /// What kind of tokenizer this is: `bpe (qwen2)`, `spm`, `hf (BPE)`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Whether a text begins with a space that its tokens have and it does not.
    pub(crate) fn drops_first_space(&self) -> bool {
        self.spelling.drops_first_space()
    }
}
