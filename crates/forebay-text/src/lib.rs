//! Text in, token ids out, and back; and conversations into prompts.
//!
//! A [`Tokenizer`] comes from a model's catalog: from the metadata of a GGUF, where byte pair
//! encoding and SentencePiece are done here, or from a `tokenizer.json`, where the `tokenizers`
//! library encodes. [`TextStream`] turns generated tokens into text as they come. A
//! [`ChatTemplate`] renders messages into the prompt that the model was trained with.
//!
//! Vocabularies and templates come from strangers: whatever they hold, the answer is an error, not
//! a panic, and rendering is bounded in steps and depth.

#![forbid(unsafe_code)]

mod bpe;
mod byte_level;
mod endings;
mod error;
mod gguf;
mod huggingface;
mod merge;
mod pieces;
mod pretokenize;
mod sentencepiece;
mod special;
mod stream;
mod template;
mod tokenizer;
mod vocabulary;

pub use error::TextError;
pub use pretokenize::known_names as known_pre_tokenizers;
pub use stream::TextStream;
pub use template::{ChatTemplate, CivilTime, RenderInput};
pub use tokenizer::Tokenizer;
