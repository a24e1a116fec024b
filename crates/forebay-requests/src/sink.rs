//! Turns what the engine generates into the parts of an answer.

use std::ops::ControlFlow;
use std::sync::Arc;

use forebay_chat::{AnswerStream, Event as ChatEvent};
use forebay_engine::engine::{Event, GeneratedToken, Sink};
use forebay_text::Tokenizer;

use crate::answer::Choice;
use crate::prepare::Prepared;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    Reasoning(String),
    Content(String),
    /// A tool call begins. `index` counts the calls of the answer from 0.
    ToolCall {
        index: usize,
        name: String,
    },
    /// More of the arguments of that call.
    Arguments {
        index: usize,
        text: String,
    },
}

impl Piece {
    fn of(event: ChatEvent<'_>) -> Piece {
        match event {
            ChatEvent::Reasoning(text) => Piece::Reasoning(text.to_owned()),
            ChatEvent::Content(text) => Piece::Content(text.to_owned()),
            ChatEvent::ToolCall { index, name } => Piece::ToolCall { index, name: name.to_owned() },
            ChatEvent::Arguments { index, text } => {
                Piece::Arguments { index, text: text.to_owned() }
            }
        }
    }
}

/// A generated token with its probability.
#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    pub bytes: Vec<u8>,
    /// Logarithm of the probability before filters and temperature.
    pub logprob: f32,
    pub likeliest: Vec<Likely>,
}

/// One of the likeliest tokens.
#[derive(Clone, Debug)]
pub struct Likely {
    pub id: u32,
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

impl Token {
    /// Returns a generated token with its probabilities, if they were asked for.
    pub fn of(token: &GeneratedToken, tokenizer: &Tokenizer) -> Option<Token> {
        let bytes = |id| tokenizer.token_bytes(id, true);
        let likely = |&(id, logprob): &(u32, f32)| Likely { id, bytes: bytes(id), logprob };
        Some(Token {
            id: token.id,
            bytes: bytes(token.id),
            logprob: token.logprob?,
            likeliest: token.likeliest.iter().map(likely).collect(),
        })
    }
}

/// Something that happened to one of the answers to a request.
#[derive(Debug)]
pub enum Update {
    /// A token was generated, which completed these pieces of the answer.
    Token { choice: usize, id: u32, pieces: Vec<Piece>, token: Option<Token> },
    /// The answer ended, after these last pieces.
    Done { choice: usize, pieces: Vec<Piece>, answer: Box<Choice> },
}

/// Returns the sink of one of the answers to a request. It gives `send` every update, and ends the request when a stop text is
/// complete or `send` returns false.
pub fn sink(
    choice: usize,
    tokenizer: &Arc<Tokenizer>,
    prepared: &Prepared,
    send: impl FnMut(Update) -> bool + Send + 'static,
) -> Sink {
    let Prepared { text, format, continues, stops, .. } = prepared;
    let mut stream = AnswerStream::new(tokenizer.clone(), format, text, *continues, stops);
    if let Some(continued) = &prepared.continued {
        stream = stream.with_continued(format, text, continued);
    }
    if prepared.whole_calls {
        stream = stream.with_whole_calls();
    }
    let tokenizer = tokenizer.clone();
    let mut answer = Answer { choice, stream: Some(stream), tokenizer, send };
    Box::new(move |event| answer.take(event))
}

/// One answer on the engine's thread.
struct Answer<F> {
    choice: usize,
    stream: Option<AnswerStream<Arc<Tokenizer>>>,
    tokenizer: Arc<Tokenizer>,
    send: F,
}

impl<F: FnMut(Update) -> bool> Answer<F> {
    /// Takes an event of the engine. The request ends if a stop text is complete or nobody listens.
    fn take(&mut self, event: Event) -> ControlFlow<()> {
        let choice = self.choice;
        let mut pieces = Vec::new();
        let mut add = |event: ChatEvent<'_>| pieces.push(Piece::of(event));
        let (update, stopped) = match event {
            Event::Token(token) => {
                let stream = self.stream.as_mut();
                let stopped = stream.is_none_or(|stream| stream.push(token.id, &mut add));
                let id = token.id;
                let token = Token::of(&token, &self.tokenizer);
                (Update::Token { choice, id, pieces, token }, stopped)
            }
            Event::Finished { end, statistics, .. } => {
                let Some(stream) = self.stream.take() else { return ControlFlow::Break(()) };
                let (message, stop) = stream.finish(&mut add);
                let answer = Choice { message, end, stop, statistics, tokens: Vec::new() };
                (Update::Done { choice, pieces, answer: Box::new(answer) }, true)
            }
        };
        match (self.send)(update) && !stopped {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }
}
