//! Grammars that answers must follow: JSON schemas, regular expressions, and grammars of Lark and of llama.cpp.
//!
//! A [`Compiler`] belongs to a tokenizer. It makes a [`Grammar`] of a [`Rules`]. [`Grammar::begin`] starts an answer, whose
//! [`Matcher`] says which tokens may come next. The parser is that of the `llguidance` library.

#![forbid(unsafe_code)]

mod bounds;
mod compiler;
mod environment;
mod gbnf;
mod matcher;
mod schema;

pub use bounds::{COMPILING_STACK_BYTES, STACK_BYTES};
pub use compiler::{Compiler, Grammar, Place, Rules};
pub use matcher::{Matcher, Preamble};
pub use schema::{Loosened, loosen};

/// Reason why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The grammar is not valid, or larger than the limits.
    #[error("the grammar cannot be used: {0}")]
    Invalid(String),
    /// The grammar was not compiled, because others need too much time.
    #[error("the grammar cannot be compiled now: {0}")]
    Busy(String),
    /// The tokenizer has no token that ends an answer, or no tokens at all.
    #[error("the tokenizer cannot be used with a grammar: {0}")]
    Tokenizer(String),
    /// The parser ran into a limit in the middle of an answer, or no token of the vocabulary fits.
    #[error("the answer cannot continue by its grammar: {0}")]
    Stuck(String),
}
