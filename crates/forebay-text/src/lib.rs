//! Conversion of text to token ids and back, and of conversations to prompts.
//!
//! A [`Tokenizer`] is built from a model's catalog. For the metadata of a GGUF, this crate
//! implements byte pair encoding and SentencePiece. For a `tokenizer.json`, the `tokenizers`
//! library encodes. [`TextStream`] turns generated tokens into text as they arrive. A
//! [`ChatTemplate`] renders messages into the prompt format that the model was trained with.
//!
//! Vocabularies and templates are untrusted input. Whatever they hold, the result is an error and
//! not a panic, and rendering is bounded in steps and depth.

#![forbid(unsafe_code)]

mod bpe;
mod byte_level;
mod content;
mod endings;
mod error;
mod gguf;
mod huggingface;
mod infill;
mod limits;
mod merge;
mod pieces;
mod pretokenize;
mod sentencepiece;
mod special;
mod stream;
mod template;
mod tiktoken;
mod tokenizer;
mod vocabulary;
mod warnings;

pub use content::{ContentMarks, Prompt};
pub use error::TextError;
pub use infill::InfillTokens;
pub use pretokenize::known_names as known_pre_tokenizers;
pub use stream::TextStream;
pub use template::{
    ChatTemplate, CivilTime, RenderInput, isolate_templates, serve_template_within_limits,
};
pub use tokenizer::Tokenizer;
