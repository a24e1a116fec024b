//! Runs a prepared request on the engine, and delivers its answers as they are generated.

use std::sync::Arc;
use std::time::Instant;

use forebay_engine::engine::{Request, Sink};
use forebay_requests::{Choice, Prepared, Ticket, Token, Update, Worker, sink};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;

use crate::access_log::Note;
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::Lease;

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
    note: Arc<Note>,
}

impl Answers {
    /// Submits every choice of a request.
    ///
    /// # Errors
    /// Returns an error if the queue is full or the prompt does not fit the context.
    pub async fn start(
        caller: &Caller,
        lease: &Lease,
        prepared: &Prepared,
    ) -> Result<Answers, ApiError> {
        let tokenizer = &lease.text.tokenizer;
        // What a slow client has not taken yet is bounded by the length of the answer.
        let (sender, updates) = unbounded_channel();
        let mut tickets = Vec::new();
        for choice in 0..prepared.choices {
            let sender = sender.clone();
            let sink = sink(choice, tokenizer, prepared, move |update| sender.send(update).is_ok());
            let request = prepared.request_of(choice);
            tickets.push(submit(caller, &lease.worker, request, sink).await?);
        }
        let (left, last) = (prepared.choices, vec![None; prepared.choices]);
        let (_tickets, lease) = (tickets, lease.clone());
        let note = caller.note().clone();
        note.prompt(prepared.request.prompt.len());
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
                self.note.token(now);
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

/// Queues a request.
///
/// # Errors
/// Returns an error if the queue is full, the prompt does not fit, or the engine has ended.
pub async fn submit(
    caller: &Caller,
    worker: &Worker,
    request: Request,
    sink: Sink,
) -> Result<Ticket, ApiError> {
    let (reply, submitted) = oneshot::channel();
    // A ticket that nobody waits for any more is dropped, which cancels the request.
    worker.submit(caller.engine(), request, sink, move |submitted| drop(reply.send(submitted)));
    submitted.await.map_err(|_| ApiError::stopped())?.map_err(ApiError::of_engine)
}
