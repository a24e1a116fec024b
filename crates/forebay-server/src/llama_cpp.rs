//! Completions and filling in the middle as llama.cpp's server does them: `POST /completion` and `POST /infill`, which editors use.
//!
//! Source: the documentation of llama.cpp's server, "POST /completion" and "POST /infill".

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_chat::{ExtraText, Gap};
use forebay_engine::engine::RequestEnd;
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use forebay_requests::fields::{COMPLETION, INFILL};
use forebay_requests::{Choice, Ends, Input, OneOrMore, Piece, Update, Wanted, read_bias, window};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::body::{self, Received};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::{Entry, Lease};
use crate::openai::{Failure, error_body};
use crate::remarks;
use crate::run::Answers;
use crate::statistics;
use crate::stream::{self, Encode};

/// Name of a file whose request gives none, as in llama.cpp.
const FILENAME: &str = "tmp";

/// The fields of both requests that are followed. The table of fields has removed the others.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: Option<String>,
    /// Text before the gap.
    #[serde(default)]
    input_prefix: String,
    /// Text after the gap.
    #[serde(default)]
    input_suffix: String,
    /// Parts of other files, the most important one last.
    #[serde(default)]
    input_extra: Vec<Extra>,
    /// The prompt of a completion, or more text before the gap, such as the line with the cursor.
    prompt: Option<Prompt>,
    json_schema: Option<Value>,
    grammar: Option<String>,
    n_predict: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<i64>,
    repetition_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<Value>,
    stop: Option<OneOrMore<String>>,
    #[serde(default)]
    stop_token_ids: Vec<u32>,
    #[serde(default)]
    ignore_eos: bool,
    #[serde(default)]
    min_tokens: usize,
    #[serde(default)]
    bad_words: Vec<String>,
    #[serde(default)]
    include_stop_str_in_output: bool,
    #[serde(default)]
    stream: bool,
    /// Fields of the answer that are wanted, as in `timings/predicted_ms`. None are all of them.
    #[serde(default)]
    response_fields: Vec<String>,
    #[serde(default)]
    include_statistics: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
}

/// A part of another file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Extra {
    text: String,
    filename: Option<String>,
}

/// The two endpoints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Endpoint {
    Completion,
    Infill,
}

/// Reads a request, and the fields of the answer that it wants.
fn request(endpoint: Endpoint, body: Value) -> Result<(Wanted, Vec<String>), ApiError> {
    let form = match endpoint {
        Endpoint::Completion => &COMPLETION,
        Endpoint::Infill => &INFILL,
    };
    let body: Body = form.read(body)?;
    let sampling = sampling(&body)?;
    let rules = match (body.json_schema, body.grammar.filter(|text| !text.is_empty())) {
        (Some(_), Some(_)) => {
            return Err(bad("grammar", "grammar and json_schema exclude each other"));
        }
        (schema, grammar) => schema.map(Rules::JsonSchema).or(grammar.map(Rules::of_grammar)),
    };
    let input = match (endpoint, body.prompt) {
        (Endpoint::Completion, Some(Prompt::Ids(ids))) => Input::Ids(ids),
        (Endpoint::Completion, prompt) => Input::Text(one_text(prompt)?),
        (Endpoint::Infill, prompt) => {
            let extra = |extra: Extra| ExtraText {
                text: extra.text,
                filename: extra.filename.unwrap_or_else(|| FILENAME.to_owned()),
            };
            Input::Infill(Gap {
                prefix: body.input_prefix + &one_text(prompt)?,
                suffix: body.input_suffix,
                extra: body.input_extra.into_iter().map(extra).collect(),
                tokens_max: None,
            })
        }
    };
    let wanted = Wanted {
        input,
        max_tokens: body.n_predict,
        sampling,
        has_seed: body.seed.is_some_and(|seed| seed >= 0),
        stops: body.stop.map_or_else(Vec::new, OneOrMore::all),
        ends: Ends {
            stop_ids: body.stop_token_ids,
            ignores_end: body.ignore_eos,
            least: body.min_tokens,
            bad_words: body.bad_words,
            keeps_stop: body.include_stop_str_in_output,
        },
        rules,
        stream: body.stream,
        statistics: body.include_statistics,
        model: body.model,
        ..Wanted::default()
    };
    Ok((wanted, body.response_fields))
}

/// Returns a prompt that is one text, or nothing.
fn one_text(prompt: Option<Prompt>) -> Result<String, ApiError> {
    match prompt {
        None => Ok(String::new()),
        Some(Prompt::Text(text)) => Ok(text),
        Some(Prompt::Texts(texts)) if texts.len() < 2 => Ok(texts.concat()),
        Some(Prompt::Texts(_)) => {
            let why = "prompt has several texts: ask for each, or use /v1/completions";
            Err(bad("prompt", why))
        }
        Some(Prompt::Ids(ids)) if ids.is_empty() => Ok(String::new()),
        Some(Prompt::Ids(_)) => Err(bad("prompt", "prompt must be a text")),
    }
}

fn bad(param: &'static str, why: impl Into<String>) -> ApiError {
    ApiError { param: Some(param.into()), ..ApiError::bad(why) }
}

/// Returns how tokens are chosen, by the defaults of llama.cpp's server.
fn sampling(body: &Body) -> Result<Sampling, ApiError> {
    let numbers = [
        ("temperature", body.temperature, 0.0),
        ("top_p", body.top_p, 0.0),
        ("min_p", body.min_p, 0.0),
        ("repeat_penalty", body.repetition_penalty, f32::MIN_POSITIVE),
        ("presence_penalty", body.presence_penalty, f32::MIN),
        ("frequency_penalty", body.frequency_penalty, f32::MIN),
    ];
    for (name, value, least) in numbers {
        if value.is_some_and(|value| !value.is_finite() || value < least) {
            return Err(bad(name, format!("{name} is too small or no number")));
        }
    }
    Ok(Sampling {
        seed: body.seed.unwrap_or(0) as u64,
        temperature: body.temperature.unwrap_or(0.8),
        top_k: body.top_k.unwrap_or(40),
        top_p: body.top_p.unwrap_or(0.95),
        min_p: body.min_p.unwrap_or(0.05),
        repeat_penalty: body.repetition_penalty.unwrap_or(1.0),
        repeat_window: body.repeat_last_n.map_or(64, |last| window(last) as usize),
        presence_penalty: body.presence_penalty.unwrap_or(0.0),
        frequency_penalty: body.frequency_penalty.unwrap_or(0.0),
        logit_bias: read_bias(body.logit_bias.as_ref())?,
        ..Sampling::default()
    })
}

/// `POST /infill`.
pub async fn infill(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    answer(app, caller, Endpoint::Infill, body).await
}

/// `POST /completion`.
pub async fn completion(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    answer(app, caller, Endpoint::Completion, body).await
}

async fn answer(
    app: Arc<App>,
    caller: Caller,
    endpoint: Endpoint,
    body: Bytes,
) -> Result<Response, Failure> {
    let own = app.clone();
    let read = move || {
        let (wanted, fields) = request(endpoint, body::json(&body)?)?;
        Ok((own.models.entry(wanted.model.as_deref())?, fields, wanted))
    };
    let (entry, fields, wanted) = app.work(&caller, read).await?;
    Ok(match wanted.stream {
        true => {
            let failed: fn(&ApiError, &mut String) =
                |error, out| stream::data(&error_body(error), out);
            let begins = begin(app.clone(), caller, entry, fields, wanted);
            stream::with_pings(app.ping, begins, failed).await?
        }
        false => begin(app, caller, entry, fields, wanted).await?,
    })
}

/// Begins a stream, or returns the whole answer.
async fn begin(
    app: Arc<App>,
    caller: Caller,
    entry: Entry,
    fields: Vec<String>,
    mut wanted: Wanted,
) -> Result<Response, ApiError> {
    let statistics = wanted.statistics;
    let (streams, sampling, most) = (wanted.stream, wanted.sampling.clone(), wanted.max_tokens);
    let settings = settings(&sampling, most, &wanted.stops);
    let lease = app.models.get(&caller, entry, None).await?;
    if let Input::Infill(gap) = &mut wanted.input {
        gap.tokens_max = Some(lease.context.saturating_sub(most.unwrap_or(0)));
    }
    let prepared = app.prepared(&caller, &lease, wanted).await?;
    let answers = Answers::start(&caller, &lease, &prepared).await?;
    let parts = Parts {
        lease,
        prompt: prepared.text,
        prompt_tokens: prepared.request.prompt.len(),
        stops: prepared.stops,
        settings,
        fields,
        statistics,
        generated: 0,
        ended: false,
    };
    if streams {
        return Ok(remarks::add(&prepared.remarks, stream::response(answers, parts, app.ping)));
    }
    let choices = answers.all().await?;
    let choice = choices.first().ok_or_else(ApiError::stopped)?;
    let answer = Json(parts.last(choice, &choice.message.content)).into_response();
    Ok(remarks::add(&prepared.remarks, answer))
}

fn settings(sampling: &Sampling, most: Option<usize>, stops: &[String]) -> Value {
    json!({
        "n_predict": most.map_or(-1, |most| most as i64),
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.repeat_window,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": stops,
    })
}

/// An answer that is being written.
struct Parts {
    lease: Lease,
    prompt: String,
    prompt_tokens: usize,
    stops: Vec<String>,
    settings: Value,
    fields: Vec<String>,
    statistics: bool,
    generated: usize,
    ended: bool,
}

impl Parts {
    fn part(&self, text: &str) -> Value {
        json!({
            "index": 0,
            "content": text,
            "tokens": [],
            "stop": false,
            "id_slot": -1,
            "tokens_predicted": self.generated,
            "tokens_evaluated": self.prompt_tokens,
        })
    }

    /// Returns the whole answer, or the last part, which has no `text` of its own.
    fn last(&self, choice: &Choice, text: &str) -> Value {
        let statistics = &choice.statistics;
        let (kind, word) = match choice.end {
            RequestEnd::MaxTokens | RequestEnd::ContextFull => ("limit", ""),
            _ => match choice.stop.and_then(|index| self.stops.get(index)) {
                Some(word) => ("word", word.as_str()),
                None => ("eos", ""),
            },
        };
        let mut answer = json!({
            "index": 0,
            "content": text,
            "tokens": [],
            "id_slot": -1,
            "stop": true,
            "model": self.lease.name,
            "tokens_predicted": statistics.generated_tokens,
            "tokens_evaluated": statistics.prompt_tokens,
            "generation_settings": self.settings,
            "prompt": self.prompt,
            "has_new_line": choice.message.content.contains('\n'),
            "truncated": false,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": statistics.prompt_tokens + statistics.generated_tokens,
            "timings": timings(choice),
        });
        if self.statistics {
            answer["statistics"] = statistics::of(&self.lease, choice);
        }
        selected(&self.fields, answer)
    }

    fn failed(&mut self, error: &ApiError, out: &mut String) {
        self.ended = true;
        stream::data(&error_body(error), out);
    }
}

/// Returns times by the names of llama.cpp's server.
fn timings(choice: &Choice) -> Value {
    let statistics = &choice.statistics;
    let first = statistics.first_token_seconds.unwrap_or(statistics.total_seconds);
    let of = |name: &str, tokens: usize, seconds: f64| {
        let per = |amount: f64, of: f64| if of > 0.0 { amount / of } else { 0.0 };
        [
            (format!("{name}_n"), json!(tokens)),
            (format!("{name}_ms"), json!(1e3 * seconds)),
            (format!("{name}_per_token_ms"), json!(per(1e3 * seconds, tokens as f64))),
            (format!("{name}_per_second"), json!(per(tokens as f64, seconds))),
        ]
    };
    let read = statistics.prompt_tokens - statistics.cached_tokens;
    let mut timings = Map::new();
    timings.insert("cache_n".into(), statistics.cached_tokens.into());
    timings.extend(of("prompt", read, first - statistics.waited_seconds));
    timings.extend(of("predicted", statistics.generated_tokens, statistics.total_seconds - first));
    timings.into()
}

/// Returns the fields that a request wants, each under its whole path. Unknown ones are left out.
fn selected(fields: &[String], answer: Value) -> Value {
    if fields.is_empty() {
        return answer;
    }
    let of = |path: &String| {
        let value = path.split('/').try_fold(&answer, |value, name| value.get(name))?;
        Some((path.clone(), value.clone()))
    };
    fields.iter().filter_map(of).collect::<Map<_, _>>().into()
}

impl Encode for Parts {
    const TYPE: &'static str = stream::EVENTS;

    fn begin(&mut self, _out: &mut String) {}

    fn update(&mut self, update: Update, out: &mut String) {
        let (pieces, done) = match update {
            Update::Token { pieces, .. } => (pieces, None),
            Update::Done { pieces, answer, .. } => (pieces, Some(answer)),
        };
        self.generated += usize::from(done.is_none());
        for piece in pieces {
            if let Piece::Content(text) = piece {
                stream::data(&self.part(&text), out);
            }
        }
        let Some(choice) = done else { return };
        if choice.has_failed() {
            let error = self.lease.failure_of(std::slice::from_ref(&*choice));
            return self.failed(&error, out);
        }
        stream::data(&self.last(&choice, ""), out);
        self.ended = true;
    }

    fn end(&mut self, out: &mut String) {
        if !self.ended {
            self.failed(&ApiError::stopped(), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(value: Value) -> Result<Wanted, ApiError> {
        request(Endpoint::Infill, value).map(|(wanted, _)| wanted)
    }

    #[test]
    fn the_prompt_goes_before_the_gap() {
        let wanted = of(json!({
            "input_prefix": "a\n", "prompt": "b = ", "input_suffix": "\nc", "n_predict": -1, "seed": -1,
            "input_extra": [{ "text": "x" }, { "text": "y", "filename": "y.py" }],
        }))
        .unwrap();
        let Input::Infill(gap) = wanted.input else { panic!("no gap") };
        assert_eq!((gap.prefix.as_str(), gap.suffix.as_str()), ("a\nb = ", "\nc"));
        let names: Vec<&str> = gap.extra.iter().map(|extra| extra.filename.as_str()).collect();
        assert_eq!(names, ["tmp", "y.py"]);
        assert_eq!((wanted.max_tokens, wanted.has_seed), (None, false));
        for (name, value) in
            [("n_probs", json!(2)), ("temperature", json!(-1)), ("repeat_penalty", json!(0))]
        {
            let mut body = json!({ "input_prefix": "", "input_suffix": "" });
            body[name] = value;
            assert_eq!(of(body).unwrap_err().param.as_deref(), Some(name));
        }
    }

    #[test]
    fn wanted_fields_have_their_whole_paths() {
        let answer = json!({ "content": "x", "timings": { "prompt_n": 3 } });
        let fields = ["content", "timings/prompt_n", "timings/none", "none"].map(str::to_owned);
        assert_eq!(
            selected(&fields, answer.clone()),
            json!({ "content": "x", "timings/prompt_n": 3 })
        );
        assert_eq!(selected(&[], answer.clone()), answer);
    }
}
