//! Turns what the engine generates into the parts of an answer.

use std::ops::ControlFlow;
use std::sync::Arc;

use forebay_chat::{AnswerStream, Event as ChatEvent};
use forebay_engine::engine::{Event, GeneratedToken, PromptToken, Sink};
use forebay_text::Tokenizer;

use crate::answer::{About, Choice};
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

/// A token with its probability.
#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    pub bytes: Vec<u8>,
    /// Logarithm of the probability before filters and temperature. The first token of a prompt has none.
    pub logprob: Option<f32>,
    /// Place of the token among all by their probability, from 1, if it is known.
    pub rank: Option<usize>,
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
        Some(Token {
            id: token.id,
            bytes: tokenizer.token_bytes(token.id, true),
            logprob: Some(token.logprob?),
            rank: None,
            likeliest: Likely::all(&token.likeliest, tokenizer),
        })
    }

    /// Returns the tokens of a prompt with their probabilities. The first token has none.
    fn of_prompt(ids: &[u32], of: &[PromptToken], tokenizer: &Tokenizer) -> Vec<Token> {
        let token = |(index, id): (usize, &u32)| {
            let of = index.checked_sub(1).and_then(|index| of.get(index));
            Token {
                id: *id,
                bytes: tokenizer.token_bytes(*id, true),
                logprob: of.map(|of| of.logprob),
                rank: of.map(|of| of.rank),
                likeliest: of.map_or_else(Vec::new, |of| Likely::all(&of.likeliest, tokenizer)),
            }
        };
        ids.iter().enumerate().map(token).collect()
    }
}

impl Likely {
    fn all(tokens: &[(u32, f32)], tokenizer: &Tokenizer) -> Vec<Likely> {
        let of = |&(id, logprob): &(u32, f32)| Likely {
            id,
            bytes: tokenizer.token_bytes(id, true),
            logprob,
        };
        tokens.iter().map(of).collect()
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
    let Prepared { format, continues, stops, .. } = prepared;
    let text = prepared.text_of(choice);
    let mut stream = AnswerStream::new(tokenizer.clone(), format, text, *continues, stops);
    if let Some(continued) = &prepared.continued {
        stream = stream.with_continued(format, text, continued);
    }
    if prepared.whole_calls {
        stream = stream.with_whole_calls();
    }
    if prepared.keeps_stop {
        stream.keep_stop();
    }
    let tokenizer = tokenizer.clone();
    let echo = prepared.echo.then(|| text.to_owned());
    let ids = match prepared.request.prompt_logprobs {
        Some(_) => prepared.ids_of(choice).to_vec(),
        None => Vec::new(),
    };
    let about = About {
        prompt: prepared.prompt_of(choice),
        function_form: prepared.function_form,
        reports_prompt: prepared.reports_prompt,
        reports_tokens: prepared.request.logprobs.is_some(),
        echo,
    };
    let mut answer = Answer { choice, stream: Some(stream), tokenizer, about, ids, send };
    Box::new(move |event| answer.take(event))
}

/// One answer on the engine's thread.
struct Answer<F> {
    choice: usize,
    stream: Option<AnswerStream<Arc<Tokenizer>>>,
    tokenizer: Arc<Tokenizer>,
    about: About,
    /// Tokens of the prompt, if their probabilities are reported.
    ids: Vec<u32>,
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
            Event::Finished { end, statistics, prompt, end_token, .. } => {
                let Some(stream) = self.stream.take() else { return ControlFlow::Break(()) };
                let (message, stop) = stream.finish(&mut add);
                let prompt = Token::of_prompt(&self.ids, &prompt, &self.tokenizer);
                let (about, tokens) = (self.about.clone(), Vec::new());
                let end_token = end_token.and_then(|token| Token::of(&token, &self.tokenizer));
                let answer =
                    Choice { message, end, stop, statistics, tokens, prompt, end_token, about };
                (Update::Done { choice, pieces, answer: Box::new(answer) }, true)
            }
        };
        match (self.send)(update) && !stopped {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }
}
