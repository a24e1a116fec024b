//! Filling in the middle as llama.cpp's server does it: `POST /infill`, which editors use.
//!
//! Source: the documentation of llama.cpp's server, "POST /infill". Fields that mean nothing here are ignored.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_chat::{ExtraText, Gap};
use forebay_engine::engine::RequestEnd;
use forebay_model::sampling::Sampling;
use forebay_requests::{Choice, Input, Piece, Update, Wanted};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::app::App;
use crate::body::{Received, read};
use crate::caller::Caller;
use crate::error::ApiError;
use crate::models::{Entry, Lease};
use crate::openai::{Failure, error_body};
use crate::run::Answers;
use crate::statistics;
use crate::stream::{self, Encode};

/// Name of a file whose request gives none, as in llama.cpp.
const FILENAME: &str = "tmp";

#[derive(Deserialize, ToSchema)]
#[schema(as = InfillRequest)]
pub struct Body {
    model: Option<String>,
    /// Text before the gap.
    input_prefix: String,
    /// Text behind the gap.
    input_suffix: String,
    /// Parts of other files, the most important one last.
    #[serde(default)]
    input_extra: Vec<Extra>,
    /// More text before the gap, such as the line with the cursor.
    prompt: Option<String>,
    /// Most tokens of the answer; negative numbers set no limit.
    n_predict: Option<i64>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    seed: Option<i64>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    #[serde(default)]
    stop: Vec<String>,
    #[serde(default)]
    stream: bool,
    /// Fields of the answer that are wanted, as in `timings/predicted_ms`. None are all of them.
    #[serde(default)]
    response_fields: Vec<String>,
    /// Number of likeliest tokens to report, which must be 0.
    #[serde(default)]
    n_probs: usize,
    /// True to report what the request needed of the weights, and how long it waited.
    #[serde(default)]
    include_statistics: bool,
}

/// A part of another file.
#[derive(Deserialize, ToSchema)]
#[schema(as = InfillExtra)]
pub struct Extra {
    text: String,
    filename: Option<String>,
}

/// Reads a request.
fn wanted(body: &Body) -> Result<Wanted, ApiError> {
    if body.n_probs > 0 {
        let why = "n_probs is not supported: logprobs of /v1/completions reports probabilities";
        return Err(bad("n_probs", why));
    }
    let mut prefix = body.input_prefix.clone();
    prefix.push_str(body.prompt.as_deref().unwrap_or_default());
    let extra = |extra: &Extra| ExtraText {
        text: extra.text.clone(),
        filename: extra.filename.clone().unwrap_or_else(|| FILENAME.to_owned()),
    };
    let gap = Gap {
        prefix,
        suffix: body.input_suffix.clone(),
        extra: body.input_extra.iter().map(extra).collect(),
        most_tokens: None,
    };
    Ok(Wanted {
        input: Input::Infill(gap),
        max_tokens: body.n_predict.and_then(|most| usize::try_from(most).ok()),
        sampling: sampling(body)?,
        has_seed: body.seed.is_some_and(|seed| seed >= 0),
        stops: body.stop.clone(),
        stream: body.stream,
        statistics: body.include_statistics,
        model: body.model.clone(),
        ..Wanted::default()
    })
}

fn bad(param: &'static str, why: impl Into<String>) -> ApiError {
    ApiError { param: Some(param), ..ApiError::bad(why) }
}

/// Returns how tokens are chosen, by the defaults of llama.cpp's server.
fn sampling(body: &Body) -> Result<Sampling, ApiError> {
    let numbers = [
        ("temperature", body.temperature, 0.0),
        ("top_p", body.top_p, 0.0),
        ("min_p", body.min_p, 0.0),
        ("repeat_penalty", body.repeat_penalty, f32::MIN_POSITIVE),
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
        repeat_penalty: body.repeat_penalty.unwrap_or(1.0),
        repeat_window: body.repeat_last_n.map_or(64, |last| last.clamp(0, 4096) as usize),
        presence_penalty: body.presence_penalty.unwrap_or(0.0),
        frequency_penalty: body.frequency_penalty.unwrap_or(0.0),
        logit_bias: Vec::new(),
    })
}

/// `POST /infill`.
pub async fn infill(
    State(app): State<Arc<App>>,
    caller: Caller,
    Received(body): Received,
) -> Result<Response, Failure> {
    let own = app.clone();
    let read = move || {
        let body: Body = read(&body)?;
        let wanted = wanted(&body)?;
        Ok((own.models.entry(wanted.model.as_deref())?, body.response_fields, wanted))
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
        gap.most_tokens = Some(lease.context.saturating_sub(most.unwrap_or(0)));
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
        return Ok(stream::response(answers, parts, app.ping));
    }
    let choices = answers.all().await?;
    let choice = choices.first().ok_or_else(ApiError::stopped)?;
    Ok(Json(parts.last(choice, &choice.message.content)).into_response())
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
        wanted(&serde_json::from_value(value).unwrap())
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
            assert_eq!(of(body).unwrap_err().param, Some(name));
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
