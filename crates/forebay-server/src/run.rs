//! Runs a prepared request on the engine, and delivers its answers as they are generated.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

use forebay_chat::{AnswerStream, Event as ChatEvent};
use forebay_engine::engine::{Event, GeneratedToken, Request, Sink};
use forebay_text::Tokenizer;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::access;
use crate::access_log::{self, Note};
use crate::error::ApiError;
use crate::models::Lease;
use crate::openai::answer::Choice;
use crate::prepare::Prepared;
use crate::worker::Ticket;

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
    pub bytes: Vec<u8>,
    /// Logarithm of the probability before filters and temperature.
    pub logprob: f32,
    pub likeliest: Vec<(Vec<u8>, f32)>,
}

impl Token {
    /// Returns a generated token with its probabilities, if they were asked for.
    pub fn of(token: &GeneratedToken, tokenizer: &Tokenizer) -> Option<Token> {
        let bytes = |id| tokenizer.token_bytes(id, true);
        Some(Token {
            bytes: bytes(token.id),
            logprob: token.logprob?,
            likeliest: token.likeliest.iter().map(|(id, p)| (bytes(*id), *p)).collect(),
        })
    }
}

/// Something that happened to one of the answers to a request.
#[derive(Debug)]
pub enum Update {
    /// A token was generated, which completed these pieces of the answer.
    Token { choice: usize, pieces: Vec<Piece>, token: Option<Token> },
    /// The answer ended, after these last pieces.
    Done { choice: usize, pieces: Vec<Piece>, answer: Box<Choice> },
}

/// The answers to a request. Dropping it ends them.
pub struct Answers {
    updates: UnboundedReceiver<Update>,
    _tickets: Vec<Ticket>,
    left: usize,
    /// When each answer got its last token.
    last: Vec<Option<Instant>>,
    /// Keeps the model in memory until the answers end.
    lease: Lease,
    /// What the access log learns of the request.
    note: Option<Arc<Note>>,
}

impl Answers {
    /// Submits every choice of a request.
    ///
    /// # Errors
    /// Returns an error if the queue is full or the prompt does not fit the context.
    pub async fn start(lease: &Lease, prepared: &Prepared) -> Result<Answers, ApiError> {
        let tokenizer = &lease.text.tokenizer;
        // What a slow client has not taken yet is bounded by the length of the answer.
        let (sender, updates) = unbounded_channel();
        let mut tickets = Vec::new();
        for choice in 0..prepared.choices {
            let sender = sender.clone();
            let sink = sink(choice, tokenizer, prepared, move |update| sender.send(update).is_ok());
            let request = prepared.request_of(choice);
            let request = Request { namespace: access::namespace(), ..request };
            tickets.push(lease.worker.submit(request, sink).await?);
        }
        let (left, last) = (prepared.choices, vec![None; prepared.choices]);
        let (_tickets, lease) = (tickets, lease.clone());
        let note = access_log::note();
        if let Some(note) = &note {
            note.prompt(prepared.request.prompt.len());
        }
        Ok(Answers { updates, _tickets, left, last, lease, note })
    }

    /// Waits for the next update. Returns `None` after the last one.
    pub async fn next(&mut self) -> Option<Update> {
        if self.left == 0 {
            return None;
        }
        let update = self.updates.recv().await;
        match &update {
            Some(Update::Done { answer, .. }) => {
                self.left -= 1;
                self.lease.counts.note_end(answer);
            }
            Some(Update::Token { choice, .. }) => {
                let now = Instant::now();
                if let Some(note) = &self.note {
                    note.token(now);
                }
                if let Some(last) = self.last[*choice].replace(now) {
                    self.lease.counts.note_gap((now - last).as_secs_f64());
                }
            }
            // The engine has ended.
            None => self.left = 0,
        }
        update
    }

    /// Waits for all answers.
    ///
    /// # Errors
    /// Returns an error if one of them failed, or if the engine ended before them.
    pub async fn all(mut self) -> Result<Vec<Choice>, ApiError> {
        let mut choices: Vec<Option<Choice>> = vec![None; self.left];
        let mut tokens: Vec<Vec<Token>> = vec![Vec::new(); self.left];
        while let Some(update) = self.next().await {
            match update {
                Update::Token { choice, token, .. } => tokens[choice].extend(token),
                Update::Done { choice, answer, .. } => choices[choice] = Some(*answer),
            }
        }
        let finished = choices.into_iter().zip(tokens).map(|(choice, tokens)| {
            let mut choice = choice.ok_or_else(ApiError::stopped)?;
            choice.tokens = tokens;
            Ok(choice)
        });
        let choices: Vec<Choice> = finished.collect::<Result<_, ApiError>>()?;
        match choices.iter().any(Choice::has_failed) {
            true => Err(self.lease.failure_of(&choices)),
            false => Ok(choices),
        }
    }
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
    let stream = AnswerStream::new(tokenizer.clone(), format, text, *continues, stops);
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
                let token = Token::of(&token, &self.tokenizer);
                (Update::Token { choice, pieces, token }, stopped)
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
