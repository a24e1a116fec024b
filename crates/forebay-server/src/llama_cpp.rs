//! Completions and filling in the middle as llama.cpp's server does them: `POST /completion` and `POST /infill`, which editors use.
//!
//! Source: the documentation of llama.cpp's server, "POST /completion" and "POST /infill".

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use forebay_chat::{ExtraText, Gap};
use forebay_engine::GenerateOptions;
use forebay_engine::engine::RequestEnd;
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use forebay_requests::answer::finite;
use forebay_requests::fields::{COMPLETION, INFILL};
use forebay_requests::{
    Choice, Ends, Input, OneOrMore, Piece, Prepared, Token, Update, Wanted, at_most_likeliest,
    biased_texts, choices, one_or_several, read_bias, window,
};
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
    prompt: Option<Prompts>,
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
    /// Number of answers to each prompt.
    n_cmpl: Option<usize>,
    /// Number of the likeliest tokens to report with every token; 0 reports no probabilities.
    #[serde(default)]
    n_probs: usize,
    /// True to report the token ids of the answer. Parts of a stream always have them.
    #[serde(default)]
    return_tokens: bool,
    /// Fields of the answer that are wanted, as in `timings/predicted_ms`. None are all of them.
    #[serde(default)]
    response_fields: Vec<String>,
    #[serde(default)]
    include_statistics: bool,
}

/// The prompts of a request.
#[derive(Deserialize)]
#[serde(untagged)]
enum Prompts {
    One(Prompt),
    Several(Vec<Prompt>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Object { prompt_string: String },
}

impl From<Prompt> for Input {
    fn from(prompt: Prompt) -> Input {
        match prompt {
            Prompt::Text(text) | Prompt::Object { prompt_string: text } => Input::Text(text),
            Prompt::Ids(ids) => Input::Ids(ids),
        }
    }
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

/// What a request says about the fields of its answer.
#[derive(Debug, Default)]
struct Shown {
    /// Paths of the fields. None are all of them.
    fields: Vec<String>,
    probabilities: bool,
    tokens: bool,
}

/// Reads a request, and what its answer shows.
fn request(endpoint: Endpoint, body: Value) -> Result<(Wanted, Shown), ApiError> {
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
    let probabilities = at_most_likeliest("n_probs", Some(body.n_probs))?;
    let shown = Shown {
        fields: body.response_fields,
        probabilities: body.n_probs > 0,
        tokens: body.return_tokens,
    };
    let input = match endpoint {
        Endpoint::Completion => one_or_several(inputs(body.prompt))?,
        Endpoint::Infill => {
            let extra = |extra: Extra| ExtraText {
                text: extra.text,
                filename: extra.filename.unwrap_or_else(|| FILENAME.to_owned()),
            };
            Input::Infill(Gap {
                prefix: body.input_prefix + &one_text(body.prompt)?,
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
        choices: choices("n_cmpl", body.n_cmpl)?,
        // The ids of tokens come with their probabilities.
        logprobs: probabilities.filter(|_| shown.probabilities || shown.tokens),
        rules,
        biased_texts: biased_texts(body.logit_bias.as_ref())?,
        stream: body.stream,
        statistics: body.include_statistics,
        model: body.model,
        ..Wanted::default()
    };
    Ok((wanted, shown))
}

/// Returns the prompts of a completion.
fn inputs(prompts: Option<Prompts>) -> Vec<Input> {
    match prompts {
        None => Vec::new(),
        Some(Prompts::One(Prompt::Ids(ids))) if ids.is_empty() => Vec::new(),
        Some(Prompts::One(prompt)) => vec![prompt.into()],
        Some(Prompts::Several(prompts)) => prompts.into_iter().map(Input::from).collect(),
    }
}

/// Returns a prompt that is one text, or nothing.
fn one_text(prompt: Option<Prompts>) -> Result<String, ApiError> {
    match prompt {
        None => Ok(String::new()),
        Some(Prompts::One(Prompt::Text(text))) => Ok(text),
        Some(_) => Err(bad("prompt", "prompt must be a text")),
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
        let (wanted, shown) = request(endpoint, body::json(&body)?)?;
        Ok((own.models.entry(wanted.model.as_deref())?, shown, wanted))
    };
    let (entry, shown, wanted) = app.work(&caller, read).await?;
    let failed: fn(&ApiError, &mut String) = |error, out| stream::data(&error_body(error), out);
    let ping = app.ping.filter(|_| wanted.stream);
    let begins = begin(app, caller, entry, shown, wanted);
    Ok(stream::with_pings(ping, begins, failed).await?)
}

/// Begins a stream, or returns the whole answer.
async fn begin(
    app: Arc<App>,
    caller: Caller,
    entry: Entry,
    shown: Shown,
    mut wanted: Wanted,
) -> Result<Response, ApiError> {
    let (streams, statistics) = (wanted.stream, wanted.statistics);
    let lease = app.models.get(&caller, entry, None).await?;
    if let Input::Infill(gap) = &mut wanted.input {
        let most = wanted.max_tokens.unwrap_or(0);
        gap.tokens_max = Some(lease.context.saturating_sub(most));
    }
    if !wanted.has_seed {
        // The answer tells the seed. All clients can read 32 bits.
        (wanted.sampling.seed, wanted.has_seed) = (fastrand::u32(..).into(), true);
    }
    let prepared = app.prepared(&caller, &lease, wanted).await?;
    let answers = Answers::start(&caller, &lease, &prepared).await?;
    let mut settings = settings(&prepared);
    settings["n_ctx"] = lease.context.into();
    settings["n_probs"] = match shown.probabilities {
        true => prepared.request.logprobs.into(),
        false => 0.into(),
    };
    let written = |choice| Written {
        prompt: prepared.text_of(choice).to_owned(),
        prompt_tokens: prepared.ids_of(choice).len(),
        seed: prepared.request_of(choice).options.sampling.seed,
        ..Written::default()
    };
    let written = (0..prepared.choices).map(written).collect();
    let stops = prepared.stops;
    let parts = Parts { lease, written, stops, settings, shown, statistics };
    if streams {
        return Ok(remarks::add(&prepared.remarks, stream::response(answers, parts, app.ping)));
    }
    let choices = answers.all().await?;
    let last = |(index, choice): (usize, &Choice)| {
        let mut answer = parts.last(index, choice, &choice.message.content);
        if parts.shown.tokens {
            answer["tokens"] = choice.tokens.iter().map(|token| token.id).collect();
        }
        if parts.shown.probabilities {
            answer["completion_probabilities"] = probabilities(&choice.tokens);
        }
        selected(&parts.shown.fields, answer)
    };
    let mut all: Vec<Value> = choices.iter().enumerate().map(last).collect();
    let answer = if all.len() == 1 { all.remove(0) } else { all.into() };
    Ok(remarks::add(&prepared.remarks, Json(answer).into_response()))
}

/// Returns what a request asks for, by the names of llama.cpp's server. The bias `null` forbids a token.
fn settings(prepared: &Prepared) -> Value {
    let GenerateOptions { max_tokens, sampling, .. } = &prepared.request.options;
    let biases = sampling.logit_bias.iter().map(|(id, bias)| (*id, *bias));
    let always = sampling.banned.iter().filter(|ban| ban.until.is_none() && ban.ids.len() == 1);
    let banned = always.map(|ban| (ban.ids[0], f32::NEG_INFINITY));
    let of =
        |(id, bias): (u32, f32)| json!({ "token": id, "bias": bias.is_finite().then_some(bias) });
    json!({
        "n_predict": max_tokens.map_or(-1, |most| most as i64),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.repeat_window,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": biases.chain(banned).map(of).collect::<Value>(),
        "stop": prepared.stops,
    })
}

/// Returns tokens with their probabilities, by the names of llama.cpp's server.
fn probabilities(tokens: &[Token]) -> Value {
    let of = |id: u32, bytes: &[u8], logprob: f32| {
        let text = String::from_utf8_lossy(bytes);
        json!({ "id": id, "token": text, "bytes": bytes, "logprob": finite(logprob) })
    };
    let entry = |token: &Token| {
        let mut entry = of(token.id, &token.bytes, token.logprob.unwrap_or_default());
        let likeliest = token.likeliest.iter();
        entry["top_logprobs"] =
            likeliest.map(|likely| of(likely.id, &likely.bytes, likely.logprob)).collect();
        entry
    };
    tokens.iter().map(entry).collect()
}

/// The answers to a request, which are being written.
struct Parts {
    lease: Lease,
    written: Vec<Written>,
    stops: Vec<String>,
    settings: Value,
    shown: Shown,
    statistics: bool,
}

/// What is written of one answer.
#[derive(Default)]
struct Written {
    prompt: String,
    prompt_tokens: usize,
    seed: u64,
    generated: usize,
    /// Tokens whose text is not in a part yet.
    ids: Vec<u32>,
    /// The same tokens with their probabilities, if they were asked for.
    tokens: Vec<Token>,
    ended: bool,
}

impl Parts {
    /// Returns a part of a stream with the tokens that are not in a part yet.
    fn part(&mut self, index: usize, text: &str) -> Value {
        let written = &mut self.written[index];
        let tokens = std::mem::take(&mut written.tokens);
        let mut part = json!({
            "index": index,
            "content": text,
            "tokens": std::mem::take(&mut written.ids),
            "stop": false,
            "id_slot": -1,
            "tokens_predicted": written.generated,
            "tokens_evaluated": written.prompt_tokens,
        });
        if self.shown.probabilities {
            part["completion_probabilities"] = probabilities(&tokens);
        }
        part
    }

    /// Returns a whole answer, or its last part, which has no `text` of its own.
    fn last(&self, index: usize, choice: &Choice, text: &str) -> Value {
        let (written, statistics) = (&self.written[index], &choice.statistics);
        let mut settings = self.settings.clone();
        settings["seed"] = written.seed.into();
        let (kind, word) = match choice.end {
            RequestEnd::MaxTokens | RequestEnd::ContextFull => ("limit", ""),
            _ => match choice.stop.and_then(|index| self.stops.get(index)) {
                Some(word) => ("word", word.as_str()),
                None => ("eos", ""),
            },
        };
        let mut answer = json!({
            "index": index,
            "content": text,
            "tokens": [],
            "id_slot": -1,
            "stop": true,
            "model": self.lease.name,
            "tokens_predicted": statistics.generated_tokens,
            "tokens_evaluated": statistics.prompt_tokens,
            "generation_settings": settings,
            "prompt": written.prompt,
            "has_new_line": choice.message.content.contains('\n'),
            "truncated": matches!(choice.end, RequestEnd::ContextFull),
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": statistics.prompt_tokens + statistics.generated_tokens,
            "timings": timings(choice),
        });
        if self.statistics {
            answer["statistics"] = statistics::of(&self.lease, choice);
        }
        answer
    }
}

/// Returns times by the names of llama.cpp's server.
fn timings(choice: &Choice) -> Value {
    let statistics = &choice.statistics;
    let first = statistics.first_token_seconds.unwrap_or(statistics.total_seconds);
    // Tokens are counted apart from those that take the time.
    let of = |name: &str, tokens: usize, timed: usize, seconds: f64| {
        let seconds = seconds.max(0.0);
        let per = |amount: f64, of: f64| if of > 0.0 { amount / of } else { 0.0 };
        let timed = timed as f64;
        [
            (format!("{name}_n"), json!(tokens)),
            (format!("{name}_ms"), json!(1e3 * seconds)),
            (format!("{name}_per_token_ms"), json!(per(1e3 * seconds, timed))),
            (format!("{name}_per_second"), json!(per(timed, seconds))),
        ]
    };
    let read = statistics.prompt_tokens - statistics.cached_tokens;
    let generated = statistics.generated_tokens;
    let mut timings = Map::new();
    timings.insert("cache_n".into(), statistics.cached_tokens.into());
    timings.extend(of("prompt", read, read, first - statistics.waited_seconds));
    // The first token comes with the end of the prompt.
    let later = generated.saturating_sub(1);
    timings.extend(of("predicted", generated, later, statistics.total_seconds - first));
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

fn content(piece: &Piece) -> Option<&str> {
    match piece {
        Piece::Content(text) => Some(text),
        _ => None,
    }
}

impl Encode for Parts {
    const TYPE: &'static str = stream::EVENTS;

    fn begin(&mut self, _out: &mut String) {}

    fn update(&mut self, update: Update, out: &mut String) {
        let (index, pieces, done) = match update {
            Update::Token { choice, id, pieces, token } => {
                let written = &mut self.written[choice];
                written.generated += 1;
                written.ids.push(id);
                written.tokens.extend(token);
                (choice, pieces, None)
            }
            Update::Done { choice, pieces, answer } => (choice, pieces, Some(answer)),
        };
        let text: String = pieces.iter().filter_map(content).collect();
        // The last tokens of an answer may have no text, such as a text that ends it.
        let has_rest = done.is_some() && !self.written[index].ids.is_empty();
        let shows_tokens = self.shown.probabilities || self.shown.tokens;
        if !text.is_empty() || has_rest && shows_tokens {
            stream::data(&self.part(index, &text), out);
        }
        let Some(choice) = done else { return };
        self.written[index].ended = true;
        if choice.has_failed() {
            let error = self.lease.failure_of(std::slice::from_ref(&*choice));
            return stream::data(&error_body(&error), out);
        }
        let last = self.last(index, &choice, "");
        stream::data(&selected(&self.shown.fields, last), out);
    }

    fn end(&mut self, out: &mut String) {
        if self.written.iter().any(|written| !written.ended) {
            stream::data(&error_body(&ApiError::stopped()), out);
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
            [("n_probs", json!(21)), ("temperature", json!(-1)), ("repeat_penalty", json!(0))]
        {
            let mut body = json!({ "input_prefix": "", "input_suffix": "" });
            body[name] = value;
            assert_eq!(of(body).unwrap_err().param.as_deref(), Some(name));
        }
    }

    #[test]
    fn prompts_have_several_forms() {
        let of = |prompt: Value| {
            request(Endpoint::Completion, json!({ "prompt": prompt }))
                .map(|(wanted, _)| wanted.input)
        };
        let (a, ids) = (|| Input::Text("a".into()), || Input::Ids(vec![1, 2]));
        for (prompt, expected) in [
            (json!("a"), a()),
            (json!(["a"]), a()),
            (json!({ "prompt_string": "a" }), a()),
            (json!([1, 2]), ids()),
            (json!([[1, 2]]), ids()),
            (json!([[1, 2], "a"]), Input::Several(vec![ids(), a()])),
            (json!([{ "prompt_string": "a" }, [1, 2]]), Input::Several(vec![a(), ids()])),
        ] {
            assert_eq!(of(prompt.clone()).unwrap(), expected, "{prompt}");
        }
        for (prompt, place) in [
            (json!([1, "a"]), "prompt[1]"),
            (json!(["a", 1]), "prompt[1]"),
            (json!([["a"]]), "prompt"),
            (json!([]), "prompt"),
            (json!({ "prompt_string": "a", "multimodal_data": ["x"] }), "prompt.multimodal_data"),
            (json!({}), "prompt.prompt_string"),
            (json!(vec!["a"; 129]), "prompt"),
        ] {
            assert_eq!(of(prompt.clone()).unwrap_err().param.as_deref(), Some(place), "{prompt}");
        }
    }

    #[test]
    fn answers_show_what_is_asked_for() {
        let of = |more: Value| {
            let mut body = json!({ "prompt": "a" });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            request(Endpoint::Completion, body).unwrap()
        };
        for (more, logprobs, probabilities, tokens) in [
            (json!({}), None, false, false),
            (json!({ "n_probs": 0 }), None, false, false),
            (json!({ "n_probs": 3 }), Some(3), true, false),
            (json!({ "logprobs": 3 }), Some(3), true, false),
            (json!({ "return_tokens": true }), Some(0), false, true),
            (json!({ "n_probs": 3, "return_tokens": true }), Some(3), true, true),
        ] {
            let (wanted, shown) = of(more.clone());
            let found = (wanted.logprobs, shown.probabilities, shown.tokens);
            assert_eq!(found, (logprobs, probabilities, tokens), "{more}");
        }
        assert_eq!(of(json!({ "n": 2 })).0.choices, 2);
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
