//! One request on the engine, as Python sees it.
//!
//! The engine's thread never takes the GIL. It puts updates into a queue and wakes their reader: a thread by a condition
//! variable, an event loop by a byte in a socket.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_engine::EngineError;
use forebay_engine::engine::{Request, Sink};
use forebay_requests::{
    AnswerFailure, Caller, Choice, Piece, Prepared, Text, Ticket, Token, Update, Worker, answer,
    embed, sink,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::errors::{of_engine, raise};
use crate::mailbox::Mailbox;
use crate::watch::LOOK;

/// Something that a request has brought.
enum Item {
    Update(Update),
    /// The state of a text, not normalised. It is the only item of its request.
    Embedding(Result<Vec<f32>, Option<AnswerFailure>>),
}

/// What the engine's thread and the caller of a request share.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    wake: Option<(Arc<Mailbox<u64>>, u64)>,
}

#[derive(Default)]
struct State {
    updates: VecDeque<Item>,
    ticket: Option<Ticket>,
    refused: Option<EngineError>,
    /// The engine has taken or refused the request.
    is_replied: bool,
    /// No update follows.
    is_finished: bool,
    is_cancelled: bool,
    /// The caller waits for the end only, so updates before it wake nobody.
    waits_for_end: bool,
    /// The event loop knows that there is something to take.
    is_told: bool,
}

impl State {
    fn is_over(&self) -> bool {
        self.is_replied && self.is_finished
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes the caller.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        change(&mut state);
        if state.waits_for_end && !state.is_over() {
            return;
        }
        self.changed.notify_all();
        if let (Some((numbers, id)), false) = (&self.wake, state.is_told) {
            state.is_told = true;
            drop(state);
            numbers.add(*id, usize::MAX);
        }
    }
}

/// Tells the caller that no update follows, when the engine drops the sink.
struct Finishes(Arc<Shared>);

impl Finishes {
    /// Adds an item. Returns false if the request was cancelled.
    fn take(&self, item: Item) -> bool {
        let mut goes_on = true;
        self.0.change(|state| {
            goes_on = !state.is_cancelled;
            state.updates.push_back(item);
        });
        goes_on
    }
}

impl Drop for Finishes {
    fn drop(&mut self) {
        self.0.change(|state| state.is_finished = true);
    }
}

/// Tells the caller that the engine has replied, or has ended and never will.
struct Replies(Arc<Shared>);

impl Drop for Replies {
    fn drop(&mut self) {
        self.0.change(|state| state.is_replied = true);
    }
}

/// Numbers of the requests of an event loop that have something to take. The loop watches the file descriptor.
#[pyclass(frozen, module = "forebay._native")]
pub struct Wake {
    numbers: Arc<Mailbox<u64>>,
}

#[pymethods]
impl Wake {
    #[new]
    fn new() -> io::Result<Wake> {
        Ok(Wake { numbers: Arc::new(Mailbox::new()?) })
    }

    /// Returns the file descriptor that becomes readable.
    fn fileno(&self) -> i32 {
        self.numbers.fileno()
    }

    /// Returns the numbers of the requests that have something to take.
    fn take(&self) -> Vec<u64> {
        self.numbers.take()
    }
}

/// Returns why the engine has failed.
pub type Failure = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// A request. Dropping it cancels it.
#[pyclass(frozen, module = "forebay._native")]
pub struct Run {
    shared: Arc<Shared>,
    failure: Failure,
}

impl Run {
    /// Queues a prepared request.
    pub fn start(
        worker: &Worker,
        text: &Text,
        prepared: &Prepared,
        wake: Option<(&Wake, u64)>,
        failure: Failure,
    ) -> Run {
        let request = prepared.request_of(0);
        Run::queue(worker, request, wake, failure, |finishes| {
            sink(0, &text.tokenizer, prepared, move |update| finishes.take(Item::Update(update)))
        })
    }

    /// Queues a request for an embedding.
    pub fn embed(
        worker: &Worker,
        request: Request,
        wake: Option<(&Wake, u64)>,
        failure: Failure,
    ) -> Run {
        Run::queue(worker, request, wake, failure, |finishes| {
            embed::sink(move |state| {
                finishes.take(Item::Embedding(state));
            })
        })
    }

    fn queue(
        worker: &Worker,
        request: Request,
        wake: Option<(&Wake, u64)>,
        failure: Failure,
        sink: impl FnOnce(Finishes) -> Sink,
    ) -> Run {
        let wake = wake.map(|(wake, number)| (wake.numbers.clone(), number));
        let shared = Arc::new(Shared { wake, ..Shared::default() });
        let (finishes, replies) = (Finishes(shared.clone()), Replies(shared.clone()));
        worker.submit(&Caller::only(), request, sink(finishes), move |submitted| {
            let mut state = replies.0.lock();
            match submitted {
                // A ticket that is dropped cancels the request.
                Ok(ticket) if !state.is_cancelled => state.ticket = Some(ticket),
                Ok(_) => {}
                Err(error) => state.refused = Some(error),
            }
            drop(state);
        });
        Run { shared, failure }
    }

    fn cancel_now(&self) {
        let mut state = self.shared.lock();
        state.is_cancelled = true;
        // Cancelling sends a message, and does not wait.
        state.ticket = None;
    }

    /// Returns the updates that have come, or `None` if all were taken.
    fn take_updates(&self, py: Python<'_>, mut state: MutexGuard<'_, State>) -> PyResult<Taken> {
        if let (Some(error), true) = (state.refused.take(), state.is_over()) {
            state.is_cancelled = true;
            drop(state);
            return Err(of_engine(py, &error, None));
        }
        state.is_told = false;
        let (updates, is_over) = (std::mem::take(&mut state.updates), state.is_over());
        drop(state);
        Ok(Taken { updates, is_over })
    }

    fn to_python<'py>(
        &self,
        py: Python<'py>,
        taken: Taken,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let Taken { updates, is_over } = taken;
        if updates.is_empty() && is_over {
            let why = (self.failure)();
            let why =
                why.unwrap_or_else(|| "the engine was closed before the request ended".into());
            return Err(raise(py, "EngineError", why));
        }
        let list = PyList::empty(py);
        for update in updates {
            match update {
                Item::Update(Update::Token { id, pieces, token, .. }) => {
                    list.append((id, of_pieces(pieces), token.map(|token| of_token(py, token))))?;
                }
                Item::Update(Update::Done { pieces, answer, .. }) => {
                    list.append((None::<u32>, of_pieces(pieces), self.of_choice(py, *answer)?))?;
                }
                Item::Embedding(Ok(state)) => {
                    let bytes: Vec<u8> = state.iter().flat_map(|x| x.to_ne_bytes()).collect();
                    list.append(PyBytes::new(py, &bytes))?;
                }
                Item::Embedding(Err(failure)) => return Err(self.of_failure(py, failure)),
            }
        }
        Ok(Some(list))
    }

    /// Returns the exception of a request that failed by itself, or else by the engine.
    fn of_failure(&self, py: Python<'_>, failure: Option<AnswerFailure>) -> PyErr {
        let Some(AnswerFailure { message, is_of_request }) = failure else {
            let why = (self.failure)();
            return raise(
                py,
                "EngineError",
                why.unwrap_or_else(|| "the request was cancelled".into()),
            );
        };
        raise(py, if is_of_request { "OptionError" } else { "EngineError" }, message)
    }

    /// Returns the end of an answer: message as JSON, reason, text of the stop, and statistics as JSON.
    fn of_choice(&self, py: Python<'_>, choice: Choice) -> PyResult<End> {
        let failure = choice.failure();
        if failure.is_some() || choice.has_failed() {
            return Err(self.of_failure(py, failure));
        }
        let statistics = serde_json::to_string(&choice.statistics).unwrap_or_default();
        let unique = format!("{:016x}", fastrand::u64(..));
        let message = answer::message(&unique, 0, &choice).to_string();
        Ok((message, answer::finish_reason(&choice), choice.stop, statistics))
    }
}

/// Updates that were taken, and if there are no more.
struct Taken {
    updates: VecDeque<Item>,
    is_over: bool,
}

type End = (String, &'static str, Option<usize>, String);

#[pymethods]
impl Run {
    /// Waits for updates and returns them.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.wait(py, |state| !state.updates.is_empty() || state.is_over())
    }

    /// Makes updates before the end wake nobody.
    fn wait_for_end(&self) {
        self.shared.lock().waits_for_end = true;
    }

    /// Waits for the end and returns all updates.
    fn all<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        self.shared.lock().waits_for_end = true;
        self.wait(py, State::is_over)
    }

    /// Returns the updates that have come, or None if there are none yet.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyList>>> {
        let taken = self.take_updates(py, self.shared.lock())?;
        if taken.updates.is_empty() && !taken.is_over {
            return Ok(None);
        }
        self.to_python(py, taken)
    }

    /// Ends the request.
    fn cancel(&self) {
        self.cancel_now();
    }
}

impl Run {
    fn wait<'py>(
        &self,
        py: Python<'py>,
        is_enough: impl Fn(&State) -> bool + Sync,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        loop {
            let is_there = py.detach(|| {
                let state = self.shared.lock();
                if is_enough(&state) {
                    return true;
                }
                let waited = self.shared.changed.wait_timeout(state, LOOK);
                let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
                is_enough(&state)
            });
            if is_there {
                let taken = self.take_updates(py, self.shared.lock())?;
                return self.to_python(py, taken);
            }
            if let Err(error) = py.check_signals() {
                self.cancel_now();
                return Err(error);
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.cancel_now();
    }
}

/// Kind, text, and number of the tool call.
fn of_pieces(pieces: Vec<Piece>) -> Vec<(&'static str, String, usize)> {
    let one = |piece| match piece {
        Piece::Content(text) => ("content", text, 0),
        Piece::Reasoning(text) => ("reasoning", text, 0),
        Piece::ToolCall { index, name } => ("call", name, index),
        Piece::Arguments { index, text } => ("arguments", text, index),
    };
    pieces.into_iter().map(one).collect()
}

type Logprob = (u32, Py<PyBytes>, f32, Vec<(u32, Py<PyBytes>, f32)>);

fn of_token(py: Python<'_>, token: Token) -> Logprob {
    let bytes = |bytes: &[u8]| PyBytes::new(py, bytes).unbind();
    let likeliest = token.likeliest.iter();
    let likeliest = likeliest.map(|of| (of.id, bytes(&of.bytes), of.logprob)).collect();
    (token.id, bytes(&token.bytes), token.logprob.unwrap_or_default(), likeliest)
}
