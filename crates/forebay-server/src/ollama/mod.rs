//! The interface of Ollama.
//!
//! Source: Ollama's documentation, "API". Durations are in nanoseconds.

mod library;
mod lists;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_chat::{Gap, Message, Think};
use forebay_engine::engine::RequestEnd;
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use forebay_requests::fields::{OLLAMA_CHAT, OLLAMA_GENERATE};
use forebay_requests::{
    Choice, Input, Likely, OneOrMore, Piece, Token, Update, Wanted, effort, window,
};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::{self, ApiError, ErrorForm};
use crate::models::{Entry, KeepAlive, Lease};
use crate::remarks;
use crate::run::Answers;
use crate::statistics;
use crate::stream::{self, Encode};

use self::library::Named;
pub use self::library::{PULLS_MAX, copy, delete, pull};
pub use self::lists::{not_implemented, ps, show, tags, version};

/// The form of errors of Ollama.
pub struct Form;

impl ErrorForm for Form {
    fn body(error: &ApiError) -> Value {
        json!({ "error": error.message })
    }
}

/// An error in this form.
pub type Failure = error::Failure<Form>;

/// The fields of both requests that are followed. The table of fields has removed the others.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: Option<String>,
    messages: Option<Vec<Value>>,
    prompt: Option<String>,
    suffix: Option<String>,
    system: Option<String>,
    #[serde(default)]
    raw: bool,
    stream: Option<bool>,
    format: Option<Value>,
    think: Option<Value>,
    tools: Option<Value>,
    keep_alive: Option<Value>,
    #[serde(default)]
    logprobs: bool,
    top_logprobs: Option<usize>,
    #[serde(default)]
    include_statistics: bool,
    #[serde(default)]
    options: Options,
}

/// Options that are followed.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    num_predict: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<i64>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    stop: Option<OneOrMore<String>>,
}

/// Largest number of the likeliest tokens that are reported.
const LIKELIEST_MAX: usize = 20;

/// Which of the two endpoints answers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Endpoint {
    Chat,
    Generate,
}

/// `POST /api/chat`.
pub async fn chat(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    answer(app, caller, Endpoint::Chat, body).await
}

/// `POST /api/generate`.
pub async fn generate(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    answer(app, caller, Endpoint::Generate, body).await
}

async fn answer(
    app: Arc<App>,
    caller: Caller,
    endpoint: Endpoint,
    body: Bytes,
) -> Result<Response, Failure> {
    let own = app.clone();
    let read = move || {
        let form = match endpoint {
            Endpoint::Chat => &OLLAMA_CHAT,
            Endpoint::Generate => &OLLAMA_GENERATE,
        };
        let mut body: Body = read(form, &body)?;
        let keep_alive = keep_alive(body.keep_alive.as_ref())?;
        let wanted = wanted(endpoint, &mut body)?;
        Ok((own.models.entry(body.model.as_deref())?, keep_alive, wanted))
    };
    let (entry, keep_alive, wanted) = app.work(&caller, read).await?;
    let Some(wanted) = wanted else {
        return load_or_unload(&app, &caller, endpoint, entry, keep_alive).await;
    };
    let asked = Instant::now();
    let lease = app.models.get(&caller, entry, keep_alive).await?;
    let load_time = asked.elapsed();
    let (streams, statistics) = (wanted.stream, wanted.statistics);
    let mut prepared = app.prepared(&caller, &lease, wanted).await?;
    prepared.whole_calls = true;
    let answers = Answers::start(&caller, &lease, &prepared).await?;
    let (call, ended) = (None, false);
    let lines = Lines { lease, endpoint, load_time, statistics, call, ended };
    if streams {
        return Ok(remarks::add(&prepared.remarks, stream::response(answers, lines, app.ping)));
    }
    let choices = answers.all().await?;
    let choice = choices.first().ok_or_else(ApiError::stopped)?;
    let shown = Shown {
        content: choice.message.content.clone(),
        thinking: choice.message.reasoning.clone().unwrap_or_default(),
        calls: choice.message.tool_calls.iter().map(|c| call_body(&c.name, &c.arguments)).collect(),
        logprobs: logprobs(&choice.tokens),
    };
    Ok(remarks::add(&prepared.remarks, Json(lines.last(choice, &shown)).into_response()))
}

/// Reads `keep_alive` of a request.
///
/// # Errors
/// Returns an error if it is neither a number nor a time.
pub fn keep_alive(value: Option<&Value>) -> Result<Option<KeepAlive>, ApiError> {
    let keep_alive = KeepAlive::of_json(value.unwrap_or(&Value::Null));
    keep_alive.map_err(|why| ApiError::bad(format!("keep_alive {why}")))
}

/// Answers a request without a prompt: it loads the model, or unloads it if it shall not stay.
async fn load_or_unload(
    app: &App,
    caller: &Caller,
    endpoint: Endpoint,
    entry: Entry,
    keep_alive: Option<KeepAlive>,
) -> Result<Response, Failure> {
    let name = entry.name.clone();
    let reason = match keep_alive {
        Some(KeepAlive::For(Duration::ZERO)) => {
            app.models.unload(&entry).await;
            "unload"
        }
        _ => {
            drop(app.models.get(caller, entry, keep_alive).await?);
            "load"
        }
    };
    let mut done = part(&name, endpoint, &Shown::default());
    (done["done"], done["done_reason"]) = (true.into(), reason.into());
    Ok(Json(done).into_response())
}

/// Reads a request. Returns `None` if it has no prompt.
fn wanted(endpoint: Endpoint, body: &mut Body) -> Result<Option<Wanted>, ApiError> {
    let rules = match &body.format {
        None => None,
        Some(Value::String(name)) => match name.to_lowercase().as_str() {
            "" => None,
            "json" => Some(Rules::JsonObject),
            _ => return Err(ApiError::bad("format must be \"json\" or a JSON schema")),
        },
        Some(schema) => Some(Rules::JsonSchema(schema.clone())),
    };
    let likeliest = body.top_logprobs.unwrap_or(0);
    if likeliest > LIKELIEST_MAX || likeliest > 0 && !body.logprobs {
        let why = "top_logprobs must be at most 20, and needs logprobs to be true";
        return Err(ApiError::bad(why));
    }
    let think = think(body.think.as_ref())?;
    let input = match endpoint {
        Endpoint::Chat => {
            let messages = messages(body.messages.as_deref().unwrap_or_default())?;
            if messages.is_empty() {
                return Ok(None);
            }
            let tools = body.tools.clone().filter(|t| t.as_array().is_some_and(|t| !t.is_empty()));
            Input::Chat { messages, tools, think, variables: Map::new() }
        }
        Endpoint::Generate => {
            let Some(prompt) = body.prompt.clone().filter(|prompt| !prompt.is_empty()) else {
                return Ok(None);
            };
            let suffix = body.suffix.clone().filter(|suffix| !suffix.is_empty());
            if let Some(suffix) = suffix {
                Input::Infill(Gap { prefix: prompt, suffix, ..Gap::default() })
            } else if body.raw {
                Input::Text(prompt)
            } else {
                let system = body.system.as_ref().map(|system| Message::new("system", system));
                let messages = system.into_iter().chain([Message::new("user", prompt)]).collect();
                Input::Chat { messages, tools: None, think, variables: Map::new() }
            }
        }
    };
    let options = &mut body.options;
    Ok(Some(Wanted {
        input,
        // 0 has no limit, too: an answer of no tokens would be no answer.
        max_tokens: options.num_predict.filter(|most| *most > 0),
        sampling: sampling(options)?,
        has_seed: options.seed.is_some_and(|seed| seed >= 0),
        stops: options.stop.take().map_or_else(Vec::new, OneOrMore::all),
        logprobs: body.logprobs.then_some(likeliest),
        rules,
        stream: body.stream.unwrap_or(true),
        statistics: body.include_statistics,
        ..Wanted::default()
    }))
}

/// Returns how tokens are chosen, by the defaults of Ollama.
fn sampling(options: &Options) -> Result<Sampling, ApiError> {
    let numbers = [
        ("temperature", options.temperature),
        ("top_p", options.top_p),
        ("min_p", options.min_p),
        ("repeat_penalty", options.repeat_penalty),
        ("presence_penalty", options.presence_penalty),
        ("frequency_penalty", options.frequency_penalty),
    ];
    for (name, value) in numbers {
        let may_be_negative = name.starts_with("presence") || name.starts_with("frequency");
        if value.is_some_and(|value| !value.is_finite() || value < 0.0 && !may_be_negative) {
            return Err(ApiError::bad(format!("options.{name} must be a number from 0 on")));
        }
    }
    let repeat_penalty = options.repeat_penalty.filter(|penalty| *penalty > 0.0);
    Ok(Sampling {
        seed: options.seed.unwrap_or(0) as u64,
        temperature: options.temperature.unwrap_or(0.8),
        top_k: options.top_k.unwrap_or(40),
        top_p: options.top_p.unwrap_or(0.9),
        min_p: options.min_p.unwrap_or(0.0),
        repeat_penalty: repeat_penalty.unwrap_or(1.1),
        repeat_window: options.repeat_last_n.map_or(64, |last| window(last) as usize),
        presence_penalty: options.presence_penalty.unwrap_or(0.0),
        frequency_penalty: options.frequency_penalty.unwrap_or(0.0),
        ..Sampling::default()
    })
}

fn think(think: Option<&Value>) -> Result<Option<Think>, ApiError> {
    match think {
        Some(Value::Bool(on)) => Ok(Some(if *on { Think::On } else { Think::Off })),
        Some(Value::String(text)) => {
            let think = effort::think(&text.to_lowercase());
            Ok(Some(think.map_err(|why| ApiError::bad(format!("think {why}")))?))
        }
        _ => Ok(None),
    }
}

/// Reads messages.
fn messages(list: &[Value]) -> Result<Vec<Message>, ApiError> {
    let of = |(value, number): (&Value, usize)| {
        Message::from_json(value, number).map_err(|error| ApiError::bad(error.to_string()))
    };
    list.iter().zip(1..).map(of).collect()
}

/// Returns the probabilities of tokens.
fn logprobs(tokens: &[Token]) -> Vec<Value> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let likely = |of: &Likely| json!({ "token": text(&of.bytes), "logprob": of.logprob.max(-9999.0), "bytes": of.bytes });
    let of = |token: &Token| {
        let logprob = token.logprob.unwrap_or_default().max(-9999.0);
        let mut entry =
            json!({ "token": text(&token.bytes), "logprob": logprob, "bytes": token.bytes });
        if !token.likeliest.is_empty() {
            entry["top_logprobs"] = token.likeliest.iter().map(likely).collect();
        }
        entry
    };
    tokens.iter().map(of).collect()
}

/// The parts of an answer that a line shows.
#[derive(Default)]
struct Shown {
    content: String,
    thinking: String,
    calls: Vec<Value>,
    logprobs: Vec<Value>,
}

/// Returns true if arguments are a whole object.
fn is_complete(arguments: &str) -> bool {
    arguments.trim_end().ends_with('}') && serde_json::from_str::<IgnoredAny>(arguments).is_ok()
}

fn call_body(name: &str, arguments: &str) -> Value {
    let arguments: Value = serde_json::from_str(arguments).unwrap_or_else(|_| json!({}));
    json!({ "function": { "name": name, "arguments": arguments } })
}

/// Returns a line that is not the last one.
fn part(model: &str, endpoint: Endpoint, shown: &Shown) -> Value {
    let mut line = json!({ "model": model, "created_at": jiff::Timestamp::now().to_string() });
    match endpoint {
        Endpoint::Chat => {
            let mut message = json!({ "role": "assistant", "content": shown.content });
            if !shown.thinking.is_empty() {
                message["thinking"] = shown.thinking.as_str().into();
            }
            if !shown.calls.is_empty() {
                message["tool_calls"] = shown.calls.clone().into();
            }
            line["message"] = message;
        }
        Endpoint::Generate => {
            line["response"] = shown.content.as_str().into();
            if !shown.thinking.is_empty() {
                line["thinking"] = shown.thinking.as_str().into();
            }
        }
    }
    line["done"] = false.into();
    if !shown.logprobs.is_empty() {
        line["logprobs"] = shown.logprobs.clone().into();
    }
    line
}

/// The lines of an answer.
struct Lines {
    lease: Lease,
    endpoint: Endpoint,
    /// Time that the request waited for its model to be loaded.
    load_time: Duration,
    /// True to add statistics to the last line.
    statistics: bool,
    /// Name and arguments of the call that may not be complete.
    call: Option<(String, String)>,
    ended: bool,
}

impl Lines {
    /// Returns what pieces show. In Ollama's form, arguments are an object, so that each call is shown when it is complete.
    fn shown(&mut self, pieces: &[Piece]) -> Shown {
        let mut shown = Shown::default();
        for piece in pieces {
            if !matches!(piece, Piece::Arguments { .. }) {
                self.end_call(&mut shown);
            }
            match piece {
                Piece::Content(text) => shown.content.push_str(text),
                Piece::Reasoning(text) => shown.thinking.push_str(text),
                Piece::ToolCall { name, .. } => self.call = Some((name.clone(), String::new())),
                Piece::Arguments { text, .. } => {
                    if let Some((_, arguments)) = &mut self.call {
                        arguments.push_str(text);
                    }
                }
            }
        }
        if self.call.as_ref().is_some_and(|(_, arguments)| is_complete(arguments)) {
            self.end_call(&mut shown);
        }
        shown
    }

    /// Shows the call that was begun, if one was.
    fn end_call(&mut self, shown: &mut Shown) {
        let call = self.call.take();
        shown.calls.extend(call.map(|(name, arguments)| call_body(&name, &arguments)));
    }

    fn line(&self, shown: &Shown, out: &mut String) {
        let Shown { content, thinking, calls, logprobs } = shown;
        let is_empty = content.is_empty() && thinking.is_empty();
        if !is_empty || !calls.is_empty() || !logprobs.is_empty() {
            stream::line(&part(&self.lease.name, self.endpoint, shown), out);
        }
    }

    /// Returns the last line.
    fn last(&self, choice: &Choice, shown: &Shown) -> Value {
        let mut line = part(&self.lease.name, self.endpoint, shown);
        let reason = match choice.end {
            RequestEnd::MaxTokens | RequestEnd::ContextFull => "length",
            _ => "stop",
        };
        let statistics = &choice.statistics;
        let nanoseconds = |seconds: f64| (seconds * 1e9) as u64;
        let load_seconds = self.load_time.as_secs_f64();
        let first = statistics.first_token_seconds.unwrap_or(statistics.total_seconds);
        let fields = json!({
            "done": true,
            "done_reason": reason,
            "total_duration": nanoseconds(load_seconds + statistics.total_seconds),
            "load_duration": nanoseconds(load_seconds),
            "prompt_eval_count": statistics.prompt_tokens,
            "prompt_eval_duration": nanoseconds(first - statistics.waited_seconds),
            "eval_count": statistics.generated_tokens,
            "eval_duration": nanoseconds(statistics.total_seconds - first),
        });
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        if self.statistics {
            line["statistics"] = statistics::of(&self.lease, choice);
        }
        line
    }

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        self.ended = true;
        stream::line(&json!({ "error": error.message }), out);
    }
}

impl Encode for Lines {
    const TYPE: &'static str = stream::LINES;

    fn begin(&mut self, _out: &mut String) {}

    fn update(&mut self, update: Update, out: &mut String) {
        match update {
            Update::Token { pieces, token, .. } => {
                let mut shown = self.shown(&pieces);
                shown.logprobs = logprobs(token.as_slice());
                self.line(&shown, out);
            }
            Update::Done { pieces, answer, .. } => {
                let mut shown = self.shown(&pieces);
                self.end_call(&mut shown);
                self.line(&shown, out);
                if answer.has_failed() {
                    let error = self.lease.failure_of(std::slice::from_ref(&*answer));
                    return self.failed(&error, out);
                }
                stream::line(&self.last(&answer, &Shown::default()), out);
                self.ended = true;
            }
        }
    }

    fn end(&mut self, out: &mut String) {
        if !self.ended {
            self.failed(&ApiError::stopped(), out);
        }
    }
}
