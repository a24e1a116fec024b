use std::path::PathBuf;

use forebay_format::at_most;

/// Error of building or applying a tokenizer or template.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    #[error("the model has no vocabulary: metadata key `{key}` is missing")]
    MissingKey { key: &'static str },

    #[error("metadata key `{key}` holds {found}, expected {expected}")]
    WrongType { key: &'static str, expected: &'static str, found: String },

    #[error("metadata key `{key}` has {found} entries for {expected} tokens")]
    WrongLength { key: &'static str, expected: usize, found: usize },

    #[error("the tokenizer model `{name}` is not supported (supported: {known})")]
    UnknownModel { name: String, known: String },

    #[error("the pre-tokenizer `{name}` is not known (known: {known})")]
    UnknownPreTokenizer { name: String, known: String },

    #[error("the vocabulary is empty")]
    EmptyVocabulary,

    #[error("the vocabulary has {tokens} tokens, more than the {limit} that are supported")]
    VocabularyTooLarge { tokens: u64, limit: u64 },

    #[error("the special tokens have {bytes} bytes, more than the {limit} that are supported")]
    SpecialTokensTooLong { bytes: usize, limit: usize },

    #[error("merge {index} ({merge:?}) names a token that is not in the vocabulary")]
    MergeOfUnknownToken { index: usize, merge: String },

    #[error("the score of token {id} is not a number")]
    ScoreNotANumber { id: usize },

    #[error("no token stands for byte 0x{byte:02X} and the vocabulary has no unknown token")]
    NoTokenForByte { byte: u8 },

    #[error("the text is longer than {}", at_most(*limit))]
    TextTooLong { limit: u64 },

    #[error("{path}: {reason}", path = path.display())]
    TokenizerFile { path: PathBuf, reason: String },

    #[error("the model folder has neither tokenizer.json nor tiktoken.model")]
    NoTokenizerFile,

    #[error("the tokenizer could not encode the text: {reason}")]
    Encode { reason: String },

    #[error("the chat template is not valid: {reason}")]
    TemplateSyntax { reason: String },

    /// The template called `raise_exception`, because the conversation does not suit this model.
    #[error("the chat template refuses this conversation: {message}")]
    TemplateRefused { message: String },

    #[error("the chat template failed: {reason}")]
    TemplateFailed { reason: String },
}
