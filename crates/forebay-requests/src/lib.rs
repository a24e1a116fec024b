//! Requests for an engine on a thread of its own, and their answers.
//!
//! [`wanted`] reads a request in the form of the OpenAI API. [`Text::prepare`] makes it tokens and a grammar, [`Worker`] runs it
//! beside others, and [`sink`] turns what the engine generates into reasoning, content and tool calls. HTTP is no part of this:
//! the server, the command line and the Python package use it.

#![forbid(unsafe_code)]

pub mod answer;
mod bias;
mod body;
mod choice;
pub mod effort;
pub mod embed;
pub mod fields;
mod prepare;
mod rates;
mod request;
mod sink;
mod text;
mod worker;

pub use answer::{AnswerFailure, Choice, Identity};
pub use bias::{read as read_bias, texts as biased_texts};
pub use body::{OneOrMore, at_most_likeliest, choices, one_or_several, wanted, window};
pub use choice::{Choosing, choosing};
pub use forebay_grammar::Place;
pub use prepare::{Preparation, Prepared};
pub use rates::{Collected, Rates};
pub use request::{Ending, Endpoint, Ends, Input, MustCall, NOT_NOW, Refusal, TOO_LONG, Wanted};
pub use sink::{Likely, Piece, Token, Update, sink};
pub use text::{TemplateError, Text};
pub use worker::{Caller, Report, Ticket, Worker};
