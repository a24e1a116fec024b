//! The interface of OpenAI: models, chat completions and completions.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_requests::{Choice, Endpoint, Identity, Piece, Token, Update, Wanted, answer, wanted};
use serde_json::{Value, json};

use crate::app::App;
use crate::body::{self, Received, Segment};
use crate::caller::Caller;
use crate::error::{self, ApiError, ErrorForm};
use crate::models::{Entry, Lease, Status};
use crate::remarks;
use crate::run::Answers;
use crate::statistics;
use crate::stream::{self, Encode};

/// The form of errors of the OpenAI API.
pub struct Form;

impl ErrorForm for Form {
    fn body(error: &ApiError) -> Value {
        error_body(error)
    }
}

/// An error in this form.
pub type Failure = error::Failure<Form>;

/// Returns an error in the form of the OpenAI API.
pub fn error_body(error: &ApiError) -> Value {
    let ApiError { message, param, code, .. } = error;
    json!({ "error": { "message": message, "type": error.kind(), "param": param, "code": code } })
}

/// `GET /v1/models`.
pub async fn models(State(app): State<Arc<App>>, caller: Caller) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let list = move || {
        let (entries, loaded) = (own.models.list(), own.models.loaded());
        Ok(entries.iter().map(|entry| model_body(&own, &loaded, entry)).collect::<Value>())
    };
    Ok(Json(json!({ "object": "list", "data": app.work(&caller, list).await? })))
}

/// `GET /v1/models/{model}`. A name may have slashes.
pub async fn model(
    State(app): State<Arc<App>>,
    caller: Caller,
    Segment(name): Segment,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let describe = move || {
        let entry = own.models.entry(Some(&name))?;
        Ok(model_body(&own, &own.models.loaded(), &entry))
    };
    Ok(Json(app.work(&caller, describe).await?))
}

/// Describes a model. The length of its context is known while it is loaded.
fn model_body(app: &App, loaded: &[Status], entry: &Entry) -> Value {
    let status = loaded.iter().find(|status| status.name == entry.name);
    let mut body = json!({
        "id": entry.name,
        "object": "model",
        "created": app.created,
        "owned_by": "forebay",
        "loaded": status.is_some(),
    });
    if let Some(status) = status {
        body["context_length"] = status.context.into();
    }
    body
}

/// `POST /v1/chat/completions`.
pub async fn chat(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    answer(app, caller, Endpoint::Chat, body).await
}

/// `POST /v1/completions`.
pub async fn completions(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    answer(app, caller, Endpoint::Completions, body).await
}

/// `POST /v1/chat/completions/input_tokens`: the number of tokens of a chat's prompt, as llama.cpp's server has it.
pub async fn input_tokens(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Json<Value>, Failure> {
    let own = app.clone();
    let read = move || {
        let wanted = wanted(Endpoint::Chat, &body::json(&body)?)?;
        Ok((own.models.entry(wanted.model.as_deref())?, wanted))
    };
    let count = app.count_tokens(&caller, read).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": count })))
}

async fn answer(
    app: Arc<App>,
    caller: Caller,
    endpoint: Endpoint,
    body: Bytes,
) -> Result<Response, Failure> {
    let own = app.clone();
    let read = move || {
        let wanted = wanted(endpoint, &body::json(&body)?)?;
        Ok((own.models.entry(wanted.model.as_deref())?, wanted))
    };
    let (entry, wanted) = app.work(&caller, read).await?;
    let ping = app.ping.filter(|_| wanted.stream);
    let begins = begin(app, caller, endpoint, entry, wanted);
    Ok(stream::with_pings(ping, begins, stream_failed).await?)
}

/// Writes an error that comes after the first comments of a stream.
pub fn stream_failed(error: &ApiError, out: &mut String) {
    stream::data(&error_body(error), out);
    out.push_str("data: [DONE]\n\n");
}

/// Begins a stream, or returns the whole answer.
async fn begin(
    app: Arc<App>,
    caller: Caller,
    endpoint: Endpoint,
    entry: Entry,
    wanted: Wanted,
) -> Result<Response, ApiError> {
    let Wanted { stream: streams, stream_usage: usage, statistics, .. } = wanted;
    let lease = app.models.get(&caller, entry, None).await?;
    let prepared = app.prepared(&caller, &lease, wanted).await?;
    let answers = Answers::start(&caller, &lease, &prepared).await?;
    let head = Head { lease, endpoint, unique: stream::unique(), created: stream::now() };
    if streams {
        let choices = vec![None; prepared.choices];
        let echo = |choice| prepared.echo.then(|| prepared.text_of(choice).to_owned());
        let echoes: Vec<Option<String>> = (0..prepared.choices).map(echo).collect();
        let offset = |echo: &Option<String>| echo.as_ref().map_or(0, |text| text.chars().count());
        let offsets = echoes.iter().map(offset).collect();
        let function_form = prepared.function_form;
        let parts = Parts { head, usage, statistics, function_form, echoes, choices, offsets };
        return Ok(remarks::add(&prepared.remarks, stream::response(answers, parts, app.ping)));
    }
    let choices = answers.all().await?;
    let mut body = answer::whole(endpoint, &head.identity(), &choices);
    if statistics {
        body["statistics"] = statistics_of(&head.lease, &choices);
    }
    Ok(remarks::add(&prepared.remarks, Json(body).into_response()))
}

/// Returns the statistics of all choices.
fn statistics_of(lease: &Lease, choices: &[Choice]) -> Value {
    choices.iter().map(|choice| statistics::of(lease, choice)).collect()
}

/// What all parts of an answer have in common.
struct Head {
    lease: Lease,
    endpoint: Endpoint,
    unique: String,
    created: u64,
}

impl Head {
    fn identity(&self) -> Identity<'_> {
        Identity { unique: &self.unique, created: self.created, model: &self.lease.name }
    }
}

/// The parts of a streamed answer.
struct Parts {
    head: Head,
    usage: bool,
    statistics: bool,
    /// True if a tool call is sent as `function_call`.
    function_form: bool,
    /// Texts with which the answers begin.
    echoes: Vec<Option<String>>,
    /// The choices that have ended.
    choices: Vec<Option<Choice>>,
    /// Characters of each completion so far.
    offsets: Vec<usize>,
}

impl Parts {
    fn part(&self, choice: Option<Value>, usage: Option<Value>, out: &mut String) {
        let Head { endpoint, .. } = self.head;
        let part = answer::part(endpoint, &self.head.identity(), choice, usage);
        stream::data(&part, out);
    }

    /// Adds parts for pieces. All but the last have no probabilities.
    fn pieces(&mut self, choice: usize, pieces: &[Piece], tokens: &[Token], out: &mut String) {
        match self.head.endpoint {
            Endpoint::Chat => {
                let mut logprobs = match tokens {
                    [] => Value::Null,
                    _ => answer::chat_logprobs(tokens),
                };
                if pieces.is_empty() && !logprobs.is_null() {
                    let part = answer::choice_part(choice, json!({}), logprobs.take(), None);
                    self.part(Some(part), None, out);
                }
                for piece in pieces {
                    let mut delta = answer::delta(&self.head.unique, choice, piece);
                    if self.function_form {
                        delta = answer::function_delta(&delta);
                    }
                    let part = answer::choice_part(choice, delta, logprobs.take(), None);
                    self.part(Some(part), None, out);
                }
            }
            Endpoint::Completions => {
                let text: String = pieces.iter().filter_map(content).collect();
                if text.is_empty() && tokens.is_empty() {
                    return;
                }
                let logprobs = match tokens {
                    [] => Value::Null,
                    _ => answer::completion_logprobs(tokens, self.offsets[choice]),
                };
                self.offsets[choice] += text.chars().count();
                self.part(Some(completion_part(choice, &text, logprobs, None)), None, out);
            }
        }
    }
}

fn content(piece: &Piece) -> Option<&str> {
    match piece {
        Piece::Content(text) => Some(text),
        _ => None,
    }
}

fn completion_part(index: usize, text: &str, logprobs: Value, finish: Option<&str>) -> Value {
    json!({ "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish })
}

impl Encode for Parts {
    const TYPE: &'static str = stream::EVENTS;

    fn begin(&mut self, out: &mut String) {
        if self.head.endpoint == Endpoint::Chat {
            for choice in 0..self.choices.len() {
                let delta = json!({ "role": "assistant", "content": "" });
                let part = answer::choice_part(choice, delta, Value::Null, None);
                self.part(Some(part), None, out);
            }
        }
        for (choice, echo) in self.echoes.iter().enumerate() {
            if let Some(text) = echo {
                self.part(Some(completion_part(choice, text, Value::Null, None)), None, out);
            }
        }
    }

    fn update(&mut self, update: Update, out: &mut String) {
        match update {
            Update::Token { choice, pieces, token, .. } => {
                self.pieces(choice, &pieces, token.as_slice(), out);
            }
            Update::Done { choice, pieces, answer: done } => {
                self.pieces(choice, &pieces, &[], out);
                let choices = std::slice::from_ref(&*done);
                if done.has_failed() {
                    stream::data(&error_body(&self.head.lease.failure_of(choices)), out);
                } else {
                    let finish = Some(answer::finish_reason(&done));
                    let part = match self.head.endpoint {
                        Endpoint::Chat => {
                            answer::choice_part(choice, json!({}), Value::Null, finish)
                        }
                        Endpoint::Completions => completion_part(choice, "", Value::Null, finish),
                    };
                    self.part(Some(part), None, out);
                }
                self.choices[choice] = Some(*done);
            }
        }
    }

    fn end(&mut self, out: &mut String) {
        let choices: Vec<Choice> = self.choices.iter().flatten().cloned().collect();
        if choices.len() < self.choices.len() {
            stream::data(&error_body(&ApiError::stopped()), out);
        } else if self.usage || self.statistics {
            let identity = self.head.identity();
            let usage = Some(answer::usage(&choices)).filter(|_| self.usage);
            let mut part = answer::part(self.head.endpoint, &identity, None, usage);
            if self.statistics {
                part["statistics"] = statistics_of(&self.head.lease, &choices);
            }
            stream::data(&part, out);
        }
        out.push_str("data: [DONE]\n\n");
    }
}
