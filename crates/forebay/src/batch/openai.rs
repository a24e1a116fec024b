//! Requests and answers in the form of OpenAI's batch files.
//!
//! Source: the OpenAI API reference, "The request input object" and "The request output object" of batches, completions and
//! chat completions. A field that has no effect here is refused, except those that only describe a request.

use std::collections::HashMap;

use forebay_chat::{Message, Think, ToolCall};
use forebay_engine::engine::{RequestEnd, RequestStatistics};
use forebay_model::sampling::Sampling;
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Tokens of a completion whose request names no limit, as in the OpenAI API.
const COMPLETION_TOKENS: usize = 16;
/// Largest number of answers to one request.
const CHOICES_MAX: usize = 128;
const STOPS_MAX: usize = 4;

/// Endpoint that a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Completions,
    Chat,
}

/// A line of the input.
#[derive(Debug)]
pub struct Line {
    pub custom_id: String,
    pub endpoint: Endpoint,
    pub body: Value,
}

/// Reads the lines of a batch. Empty lines are ignored.
///
/// # Errors
/// Returns the number of the first wrong line, and what is wrong with it.
pub fn lines(text: &str) -> Result<Vec<Line>, String> {
    let mut lines = Vec::new();
    let mut ids: HashMap<String, usize> = HashMap::new();
    for (number, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
        let line = line(text).map_err(|why| format!("line {number}: {why}"))?;
        if let Some(first) = ids.insert(line.custom_id.clone(), number) {
            return Err(format!(
                "line {number}: custom_id {:?} is that of line {first}",
                line.custom_id
            ));
        }
        lines.push(line);
    }
    Ok(lines)
}

fn line(text: &str) -> Result<Line, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    let Value::Object(mut object) = value else { return Err("must be a JSON object".to_owned()) };
    let Some(Value::String(custom_id)) = object.remove("custom_id") else {
        return Err("custom_id must be text".to_owned());
    };
    if object.get("method").is_some_and(|method| method != "POST") {
        return Err("method must be \"POST\"".to_owned());
    }
    let endpoint = match object.get("url").and_then(Value::as_str) {
        Some("/v1/completions") => Endpoint::Completions,
        Some("/v1/chat/completions") => Endpoint::Chat,
        _ => return Err("url must be /v1/completions or /v1/chat/completions".to_owned()),
    };
    match object.remove("body") {
        Some(body @ Value::Object(_)) => Ok(Line { custom_id, endpoint, body }),
        _ => Err("body must be a JSON object".to_owned()),
    }
}

/// Reason why a request is refused.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub message: String,
    pub param: Option<&'static str>,
    pub code: Option<&'static str>,
}

impl Refusal {
    /// Creates a refusal because of a field of the body.
    pub fn of(param: &'static str, message: impl Into<String>) -> Refusal {
        Refusal { message: message.into(), param: Some(param), code: None }
    }

    fn to_json(&self) -> Value {
        let kind = "invalid_request_error";
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }
}

/// Text or ids to continue.
#[derive(Debug, PartialEq)]
pub enum Input {
    Text(String),
    Ids(Vec<u32>),
    Chat {
        messages: Vec<Message>,
        tools: Option<Value>,
        think: Option<Think>,
        variables: Map<String, Value>,
    },
}

/// A request that can be run.
#[derive(Debug)]
pub struct Wanted {
    pub input: Input,
    /// `None` if the request names no limit.
    pub max_tokens: Option<usize>,
    /// Options for the next token. The seed is 0 if the request has none.
    pub sampling: Sampling,
    pub has_seed: bool,
    pub stops: Vec<String>,
    pub choices: usize,
    /// Name of the model, as the request gives it.
    pub model: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Many(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Body {
    model: Option<String>,
    prompt: Option<Prompt>,
    messages: Option<Value>,
    max_tokens: Option<usize>,
    max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    n: Option<usize>,
    stop: Option<OneOrMore<String>>,
    seed: Option<i64>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    reasoning_effort: Option<String>,
    chat_template_kwargs: Option<Map<String, Value>>,
    // Accepted with the value that changes nothing.
    stream: Option<bool>,
    echo: Option<bool>,
    best_of: Option<usize>,
    suffix: Option<String>,
    logprobs: Option<Value>,
    top_logprobs: Option<usize>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<Map<String, Value>>,
    response_format: Option<Value>,
    // Fields that only describe a request.
    #[serde(rename = "user")]
    _user: Option<Value>,
    #[serde(rename = "metadata")]
    _metadata: Option<Value>,
    #[serde(rename = "store")]
    _store: Option<Value>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Value>,
    #[serde(rename = "parallel_tool_calls")]
    _parallel_tool_calls: Option<Value>,
}

/// Reads the body of a request.
///
/// # Errors
/// Returns why the request cannot be run.
pub fn wanted(line: &Line) -> Result<Wanted, Refusal> {
    let mut body = Body::deserialize(&line.body).map_err(|error| Refusal {
        message: format!("body: {error}"),
        param: None,
        code: None,
    })?;
    without_effect(&body)?;
    let in_range = |name: &'static str, value: Option<f32>, default: f32, most: f32| match value {
        Some(value) if !(0.0..=most).contains(&value) => {
            Err(Refusal::of(name, format!("{name} must be between 0 and {most}")))
        }
        value => Ok(value.unwrap_or(default)),
    };
    let sampling = Sampling {
        seed: body.seed.unwrap_or(0) as u64,
        temperature: in_range("temperature", body.temperature, 1.0, 2.0)?,
        top_p: in_range("top_p", body.top_p, 1.0, 1.0)?,
        min_p: in_range("min_p", body.min_p, 0.0, 1.0)?,
        top_k: body.top_k.unwrap_or(0),
        repeat_penalty: match body.repetition_penalty {
            Some(penalty) if !(penalty > 0.0 && penalty.is_finite()) => {
                let why = "repetition_penalty must be greater than 0";
                return Err(Refusal::of("repetition_penalty", why));
            }
            penalty => penalty.unwrap_or(1.0),
        },
        ..Sampling::default()
    };
    let choices = body.n.unwrap_or(1);
    if !(1..=CHOICES_MAX).contains(&choices) {
        return Err(Refusal::of("n", format!("n must be between 1 and {CHOICES_MAX}")));
    }
    let stops = match body.stop.take() {
        None => Vec::new(),
        Some(OneOrMore::One(stop)) => vec![stop],
        Some(OneOrMore::More(stops)) => stops,
    };
    if stops.len() > STOPS_MAX {
        return Err(Refusal::of("stop", format!("stop may name {STOPS_MAX} texts at most")));
    }
    let limit = match body.max_completion_tokens {
        Some(limit) => Some(("max_completion_tokens", limit)),
        None => body.max_tokens.map(|limit| ("max_tokens", limit)),
    };
    if let Some((name, 0)) = limit {
        return Err(Refusal::of(name, format!("{name} must be at least 1")));
    }
    let limit = limit.map(|(_, limit)| limit);
    let is_chat = line.endpoint == Endpoint::Chat;
    let input = match is_chat {
        true => chat(&body)?,
        false => completion(body.prompt.take(), body.messages.is_some())?,
    };
    Ok(Wanted {
        input,
        max_tokens: if is_chat { limit } else { Some(limit.unwrap_or(COMPLETION_TOKENS)) },
        sampling,
        has_seed: body.seed.is_some(),
        stops,
        choices,
        model: body.model,
    })
}

/// Refuses fields that would have no effect.
fn without_effect(body: &Body) -> Result<(), Refusal> {
    let is_text = |format: &Value| format.get("type").and_then(Value::as_str) == Some("text");
    let is_off = |value: &Value| matches!(value, Value::Null | Value::Bool(false));
    let given = [
        ("stream", body.stream == Some(true)),
        ("echo", body.echo == Some(true)),
        ("best_of", body.best_of.is_some_and(|best| best != body.n.unwrap_or(1))),
        ("suffix", body.suffix.is_some()),
        ("logprobs", body.logprobs.as_ref().is_some_and(|value| !is_off(value))),
        ("top_logprobs", body.top_logprobs.is_some_and(|count| count > 0)),
        ("presence_penalty", body.presence_penalty.is_some_and(|penalty| penalty != 0.0)),
        ("frequency_penalty", body.frequency_penalty.is_some_and(|penalty| penalty != 0.0)),
        ("logit_bias", body.logit_bias.as_ref().is_some_and(|bias| !bias.is_empty())),
        ("response_format", body.response_format.as_ref().is_some_and(|format| !is_text(format))),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((name, _)) => Err(Refusal::of(name, format!("{name} is not supported in a batch"))),
        None => Ok(()),
    }
}

fn completion(prompt: Option<Prompt>, has_messages: bool) -> Result<Input, Refusal> {
    if has_messages {
        return Err(Refusal::of("messages", "messages are for /v1/chat/completions"));
    }
    let several = || Refusal::of("prompt", "several prompts need a line each");
    match prompt {
        None => Err(Refusal::of("prompt", "prompt is missing")),
        Some(Prompt::Text(text)) => Ok(Input::Text(text)),
        Some(Prompt::Ids(ids)) => Ok(Input::Ids(ids)),
        Some(Prompt::Texts(mut texts)) => match (texts.pop(), texts.is_empty()) {
            (Some(text), true) => Ok(Input::Text(text)),
            _ => Err(several()),
        },
        Some(Prompt::Many(mut all)) => match (all.pop(), all.is_empty()) {
            (Some(ids), true) => Ok(Input::Ids(ids)),
            _ => Err(several()),
        },
    }
}

fn chat(body: &Body) -> Result<Input, Refusal> {
    if body.prompt.is_some() {
        return Err(Refusal::of("prompt", "a prompt is for /v1/completions"));
    }
    let messages = Message::list_from_json(body.messages.as_ref().unwrap_or(&Value::Null))
        .map_err(|error| Refusal::of("messages", error.to_string()))?;
    if messages.is_empty() {
        return Err(Refusal::of("messages", "there is no message"));
    }
    let tools = match body.tool_choice.as_ref().map(|choice| choice.as_str().unwrap_or("")) {
        None | Some("auto") => body.tools.clone(),
        Some("none") => None,
        Some(_) => {
            return Err(Refusal::of("tool_choice", "tool_choice may be \"auto\" or \"none\""));
        }
    };
    let tools = tools.filter(|tools| tools.as_array().is_none_or(|tools| !tools.is_empty()));
    if tools.as_ref().is_some_and(|tools| !tools.is_array()) {
        return Err(Refusal::of("tools", "tools must be a list"));
    }
    let think = body.reasoning_effort.as_deref().map(str::parse).transpose();
    let think = think.map_err(|why| Refusal::of("reasoning_effort", why))?;
    let variables = body.chat_template_kwargs.clone().unwrap_or_default();
    Ok(Input::Chat { messages, tools, think, variables })
}

/// An answer to a request.
pub struct Choice {
    pub message: Message,
    pub end: RequestEnd,
    pub statistics: RequestStatistics,
}

/// Identity of an answer.
pub struct Identity<'a> {
    /// A text that is different for every line of every input.
    pub unique: &'a str,
    /// Seconds since 1970.
    pub created: u64,
    /// Name of the model, if the request gives none.
    pub model: &'a str,
}

/// Returns the output line of a request that ran.
pub fn answered(
    line: &Line,
    wanted_model: Option<&str>,
    identity: &Identity<'_>,
    choices: &[Choice],
) -> Value {
    let failed = choices.iter().find_map(|choice| match &choice.end {
        RequestEnd::Failed(why) => Some(why),
        _ => None,
    });
    if let Some(why) = failed {
        let error = json!({ "message": why, "type": "server_error", "param": null, "code": null });
        return output(line, identity, 500, json!({ "error": error }));
    }
    let prompt_tokens = choices.first().map_or(0, |choice| choice.statistics.prompt_tokens);
    let generated: usize = choices.iter().map(|choice| choice.statistics.generated_tokens).sum();
    let (object, prefix) = match line.endpoint {
        Endpoint::Completions => ("text_completion", "cmpl"),
        Endpoint::Chat => ("chat.completion", "chatcmpl"),
    };
    let choices: Vec<Value> = choices
        .iter()
        .enumerate()
        .map(|(index, choice)| match line.endpoint {
            Endpoint::Completions => json!({
                "index": index,
                "text": choice.message.content,
                "logprobs": null,
                "finish_reason": finish_reason(choice),
            }),
            Endpoint::Chat => json!({
                "index": index,
                "message": message(identity.unique, index, &choice.message),
                "logprobs": null,
                "finish_reason": finish_reason(choice),
            }),
        })
        .collect();
    let body = json!({
        "id": format!("{prefix}-{}", identity.unique),
        "object": object,
        "created": identity.created,
        "model": wanted_model.unwrap_or(identity.model),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
        },
    });
    output(line, identity, 200, body)
}

/// Returns the output line of a request that was refused.
pub fn refused(line: &Line, identity: &Identity<'_>, refusal: &Refusal) -> Value {
    output(line, identity, 400, refusal.to_json())
}

fn output(line: &Line, identity: &Identity<'_>, status: u16, body: Value) -> Value {
    json!({
        "id": format!("batch_req_{}", identity.unique),
        "custom_id": line.custom_id,
        "response": { "status_code": status, "request_id": identity.unique, "body": body },
        "error": null,
    })
}

/// Returns true if an output line has an error instead of an answer.
pub fn is_error(line: &[u8]) -> bool {
    let line: Option<Value> = serde_json::from_slice(line).ok();
    let status = line.as_ref().and_then(|line| line.pointer("/response/status_code"));
    status.and_then(Value::as_u64) != Some(200)
}

/// Returns a message whose tool calls all have an id.
fn message(unique: &str, index: usize, message: &Message) -> Value {
    let mut message = message.clone();
    for (number, ToolCall { id, .. }) in message.tool_calls.iter_mut().enumerate() {
        id.get_or_insert_with(|| format!("call_{unique}_{index}_{number}"));
    }
    message.to_json()
}

fn finish_reason(choice: &Choice) -> &'static str {
    match choice.end {
        RequestEnd::MaxTokens | RequestEnd::ContextFull => "length",
        _ if !choice.message.tool_calls.is_empty() => "tool_calls",
        _ => "stop",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str, body: Value) -> Result<Wanted, Refusal> {
        let text = json!({ "custom_id": "a", "method": "POST", "url": url, "body": body });
        wanted(&line(&text.to_string()).unwrap())
    }

    #[test]
    fn lines_are_checked_before_any_work() {
        let good = r#"{"custom_id":"a","url":"/v1/completions","body":{}}"#;
        assert_eq!(lines(&format!("{good}\n\n")).unwrap().len(), 1);
        for (text, why) in [
            (format!("{good}\n{good}"), "line 2: custom_id \"a\" is that of line 1"),
            ("{".to_owned(), "line 1: not JSON"),
            ("\n[]".to_owned(), "line 2: must be a JSON object"),
            (good.replace("\"a\"", "1"), "line 1: custom_id must be text"),
            (good.replace("completions", "images"), "line 1: url must be"),
            (good.replace("{}", "1"), "line 1: body must be"),
            (good.replace("{}", "{},\"method\":\"GET\""), "line 1: method must be"),
        ] {
            let error = lines(&text).unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_api() {
        let wanted = of("/v1/completions", json!({ "prompt": "x" })).unwrap();
        assert_eq!((wanted.max_tokens, wanted.choices, wanted.has_seed), (Some(16), 1, false));
        assert_eq!((wanted.sampling.temperature, wanted.sampling.top_p), (1.0, 1.0));
        assert_eq!((wanted.sampling.top_k, wanted.sampling.min_p), (0, 0.0));
        let messages = json!([{ "role": "user", "content": "x" }]);
        let wanted = of("/v1/chat/completions", json!({ "messages": messages })).unwrap();
        assert_eq!(wanted.max_tokens, None);
    }

    #[test]
    fn what_would_have_no_effect_is_refused() {
        let prompt = |name: &str, value: Value| {
            let mut body = json!({ "prompt": "x" });
            body[name] = value;
            of("/v1/completions", body)
        };
        for (name, value) in [
            ("stream", json!(true)),
            ("echo", json!(true)),
            ("logprobs", json!(2)),
            ("presence_penalty", json!(0.5)),
            ("logit_bias", json!({ "1": 2 })),
            ("response_format", json!({ "type": "json_object" })),
            ("n", json!(0)),
            ("max_tokens", json!(0)),
            ("temperature", json!(3)),
            ("top_p", json!(-1)),
            ("stop", json!(["a", "b", "c", "d", "e"])),
            ("messages", json!([])),
        ] {
            assert_eq!(prompt(name, value).unwrap_err().param, Some(name));
        }
        for (name, value) in [
            ("stream", json!(false)),
            ("logprobs", Value::Null),
            ("presence_penalty", json!(0)),
            ("response_format", json!({ "type": "text" })),
            ("user", json!("me")),
        ] {
            assert!(prompt(name, value).is_ok(), "{name}");
        }
        let unknown = prompt("heat", json!(1)).unwrap_err();
        assert!(unknown.message.contains("heat"), "{}", unknown.message);
    }

    #[test]
    fn prompts_have_several_forms() {
        let input =
            |prompt: Value| of("/v1/completions", json!({ "prompt": prompt })).map(|w| w.input);
        assert_eq!(input(json!("x")), Ok(Input::Text("x".into())));
        assert_eq!(input(json!(["x"])), Ok(Input::Text("x".into())));
        assert_eq!(input(json!([1, 2])), Ok(Input::Ids(vec![1, 2])));
        assert_eq!(input(json!([[1, 2]])), Ok(Input::Ids(vec![1, 2])));
        for several in [json!(["x", "y"]), json!([[1], [2]])] {
            assert_eq!(input(several).unwrap_err().param, Some("prompt"));
        }
        assert!(of("/v1/completions", json!({})).is_err());
    }
}
