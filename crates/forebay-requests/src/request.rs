//! Requests in the form of the OpenAI API.
//!
//! Source: the OpenAI API reference, "Create chat completion" and "Create completion". Fields of other servers that have become
//! usual (`top_k`, `min_p`, `repetition_penalty`, `chat_template_kwargs`) are read too. A field that this server knows and
//! cannot follow is refused.

use std::collections::HashMap;

use forebay_chat::{Gap, Message, PromptEnd, Think, continued_text};
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::effort;

/// Tokens of a completion whose request names no limit, as in the OpenAI API.
const COMPLETION_TOKENS: usize = 16;
/// Largest number of answers to one request.
const CHOICES_MAX: usize = 128;
/// Most texts that end an answer.
const STOPS_MAX: usize = 16;
/// Largest number of the likeliest tokens that are reported.
const LIKELIEST_MAX: usize = 20;

/// Endpoint of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Completions,
    Chat,
}

/// Code of a refusal that does not hold for long.
pub const NOT_NOW: &str = "server_busy";
/// Code of the error of a prompt that does not fit the context.
pub const TOO_LONG: &str = "context_length_exceeded";

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

    /// Returns the error in the form of the OpenAI API.
    pub fn to_json(&self) -> Value {
        let kind = "invalid_request_error";
        json!({ "error": { "message": self.message, "type": kind, "param": self.param, "code": self.code } })
    }
}

/// Text or ids to continue.
#[derive(Debug, PartialEq)]
pub enum Input {
    Text(String),
    Ids(Vec<u32>),
    /// Two texts with a gap between them, which the answer fills.
    Infill(Gap),
    Chat {
        messages: Vec<Message>,
        tools: Option<Value>,
        think: Option<Think>,
        variables: Map<String, Value>,
    },
}

/// What a request says about the end of its prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ending {
    /// Whether the answer continues the last message. `None` does so if it is one of the assistant with a text.
    pub continues: Option<bool>,
    /// True to leave out what the template writes before an answer.
    pub without_header: bool,
}

impl Ending {
    /// Returns where the prompt of a conversation ends.
    pub fn of(self, messages: &[Message]) -> PromptEnd {
        let continues = self.continues.unwrap_or_else(|| continued_text(messages).is_some());
        match (continues, self.without_header) {
            (true, _) => PromptEnd::Continued,
            (false, true) => PromptEnd::Nothing,
            (false, false) => PromptEnd::Answer,
        }
    }
}

/// A request that can be run.
#[derive(Debug)]
pub struct Wanted {
    pub input: Input,
    /// End of the prompt of a conversation.
    pub ending: Ending,
    /// `None` if the request names no limit.
    pub max_tokens: Option<usize>,
    /// Options for the next token. The seed is 0 if the request has none.
    pub sampling: Sampling,
    pub has_seed: bool,
    pub stops: Vec<String>,
    pub choices: usize,
    /// Number of the likeliest tokens to report with every token; `None` reports no probabilities.
    pub logprobs: Option<usize>,
    /// Form of the answer.
    pub rules: Option<Rules>,
    /// Tool calls that the answer must consist of.
    pub must_call: Option<MustCall>,
    /// True if an answer may have several tool calls.
    pub parallel_calls: bool,
    /// True to send the answer in parts as it is generated.
    pub stream: bool,
    /// True to send the numbers of tokens at the end of a stream.
    pub stream_usage: bool,
    /// True to report what the request needed of the weights, and how long it waited.
    pub statistics: bool,
    /// Name of the model, as the request gives it.
    pub model: Option<String>,
    /// Names of fields that mean nothing here.
    pub unknown: Vec<String>,
}

/// Tool calls that an answer must consist of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MustCall {
    Any,
    /// The tool of this name.
    Named(String),
}

impl Default for Wanted {
    fn default() -> Wanted {
        Wanted {
            input: Input::Text(String::new()),
            ending: Ending::default(),
            max_tokens: None,
            sampling: Sampling::default(),
            has_seed: false,
            stops: Vec::new(),
            choices: 1,
            logprobs: None,
            rules: None,
            must_call: None,
            parallel_calls: true,
            stream: false,
            stream_usage: false,
            statistics: false,
            model: None,
            unknown: Vec::new(),
        }
    }
}

#[derive(Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

#[derive(Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
#[cfg_attr(feature = "openapi", schema(as = CompletionPrompt))]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Many(Vec<Vec<u32>>),
}

#[derive(Deserialize, Default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct StreamOptions {
    include_usage: bool,
}

#[derive(Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(as = OpenAiRequest))]
pub struct Body {
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
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    include_statistics: Option<bool>,
    logprobs: Option<Value>,
    top_logprobs: Option<usize>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<HashMap<String, f32>>,
    // Accepted with the value that changes nothing.
    echo: Option<bool>,
    best_of: Option<usize>,
    suffix: Option<String>,
    response_format: Option<Value>,
    // Fields of other servers for the form of the answer.
    structured_outputs: Option<Value>,
    json_schema: Option<Value>,
    guided_json: Option<Value>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
    parallel_tool_calls: Option<bool>,
    // Fields that only describe a request.
    #[serde(rename = "user")]
    _user: Option<Value>,
    #[serde(rename = "metadata")]
    _metadata: Option<Value>,
    #[serde(rename = "store")]
    _store: Option<Value>,
    #[serde(rename = "service_tier")]
    _service_tier: Option<Value>,
    #[serde(flatten)]
    unknown: Map<String, Value>,
}

/// Reads the body of a request.
///
/// # Errors
/// Returns why the request cannot be run.
pub fn wanted(endpoint: Endpoint, body: &Value) -> Result<Wanted, Refusal> {
    let mut body = Body::deserialize(body).map_err(|error| Refusal {
        message: format!("body: {error}"),
        param: None,
        code: None,
    })?;
    without_effect(&body)?;
    let sampling = sampling(&body)?;
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
    let is_chat = endpoint == Endpoint::Chat;
    let logprobs = logprobs(&body, is_chat)?;
    let rules = rules(&mut body)?;
    let must_call = if is_chat { must_call(&body)? } else { None };
    let input = match is_chat {
        true => chat(&body)?,
        false => {
            let suffix = body.suffix.take().filter(|suffix| !suffix.is_empty());
            completion(body.prompt.take(), suffix, body.messages.is_some())?
        }
    };
    Ok(Wanted {
        input,
        ending: ending(body.continue_final_message, body.add_generation_prompt)?,
        max_tokens: if is_chat { limit } else { Some(limit.unwrap_or(COMPLETION_TOKENS)) },
        sampling,
        has_seed: body.seed.is_some(),
        stops,
        choices,
        logprobs,
        rules,
        must_call,
        parallel_calls: body.parallel_tool_calls != Some(false),
        stream: body.stream == Some(true),
        stream_usage: body.stream_options.is_some_and(|options| options.include_usage),
        statistics: body.include_statistics == Some(true),
        model: body.model,
        unknown: body.unknown.into_iter().map(|(name, _)| name).collect(),
    })
}

/// Reads the end of the prompt, by the rule of vLLM and llama.cpp: a last message of the assistant is continued unless the request
/// asks for a new answer.
fn ending(continues: Option<bool>, header: Option<bool>) -> Result<Ending, Refusal> {
    let continues = match (continues, header) {
        (Some(true), Some(true)) => {
            let why = "continue_final_message and add_generation_prompt exclude each other";
            return Err(Refusal::of("continue_final_message", why));
        }
        (None, Some(true)) => Some(false),
        (continues, _) => continues,
    };
    Ok(Ending { continues, without_header: header == Some(false) })
}

/// Reads how tokens are chosen. The filters that the OpenAI API lacks are off unless the request names them.
fn sampling(body: &Body) -> Result<Sampling, Refusal> {
    let within = |name, value: Option<f32>, default: f32, (least, most): (f32, f32)| match value {
        Some(value) if !(least..=most).contains(&value) => {
            Err(Refusal::of(name, format!("{name} must be between {least} and {most}")))
        }
        value => Ok(value.unwrap_or(default)),
    };
    if body.repetition_penalty.is_some_and(|penalty| !(penalty > 0.0 && penalty.is_finite())) {
        let why = "repetition_penalty must be greater than 0";
        return Err(Refusal::of("repetition_penalty", why));
    }
    let mut logit_bias = Vec::new();
    for (id, bias) in body.logit_bias.iter().flatten() {
        let id =
            id.parse().map_err(|_| Refusal::of("logit_bias", format!("{id:?} is no token id")))?;
        logit_bias.push((id, within("logit_bias", Some(*bias), 0.0, (-100.0, 100.0))?));
    }
    // A map has no order, and sums must not depend on one.
    logit_bias.sort_unstable_by_key(|(id, _)| *id);
    Ok(Sampling {
        seed: body.seed.unwrap_or(0) as u64,
        temperature: within("temperature", body.temperature, 1.0, (0.0, 2.0))?,
        top_p: within("top_p", body.top_p, 1.0, (0.0, 1.0))?,
        min_p: within("min_p", body.min_p, 0.0, (0.0, 1.0))?,
        top_k: body.top_k.unwrap_or(0),
        repeat_penalty: body.repetition_penalty.unwrap_or(1.0),
        presence_penalty: within("presence_penalty", body.presence_penalty, 0.0, (-2.0, 2.0))?,
        frequency_penalty: within("frequency_penalty", body.frequency_penalty, 0.0, (-2.0, 2.0))?,
        logit_bias,
        ..Sampling::default()
    })
}

/// Reads how many of the likeliest tokens are reported. A chat names them by `logprobs: true` and `top_logprobs`, a completion
/// by a number.
fn logprobs(body: &Body, is_chat: bool) -> Result<Option<usize>, Refusal> {
    let wrong =
        |name, most: usize| Refusal::of(name, format!("{name} must be between 0 and {most}"));
    let count = match (&body.logprobs, is_chat) {
        (None | Some(Value::Null | Value::Bool(false)), _)
            if body.top_logprobs.unwrap_or(0) == 0 =>
        {
            None
        }
        (Some(Value::Bool(true)), true) => Some(body.top_logprobs.unwrap_or(0)),
        (_, true) => {
            return Err(Refusal::of("top_logprobs", "top_logprobs needs logprobs to be true"));
        }
        (Some(value), false) => {
            let count = value.as_u64().ok_or_else(|| wrong("logprobs", LIKELIEST_MAX))?;
            Some(count as usize)
        }
        (None, false) => {
            return Err(Refusal::of(
                "top_logprobs",
                "top_logprobs is for chats: give logprobs a number",
            ));
        }
    };
    match count {
        Some(count) if count > LIKELIEST_MAX => {
            Err(wrong(if is_chat { "top_logprobs" } else { "logprobs" }, LIKELIEST_MAX))
        }
        count => Ok(count),
    }
}

/// Refuses fields that cannot be followed.
fn without_effect(body: &Body) -> Result<(), Refusal> {
    let given = [
        ("echo", body.echo == Some(true)),
        ("best_of", body.best_of.is_some_and(|best| best != body.n.unwrap_or(1))),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((name, _)) => Err(Refusal::of(name, format!("{name} is not supported"))),
        None => Ok(()),
    }
}

/// Reads the form that the answer must have.
fn rules(body: &mut Body) -> Result<Option<Rules>, Refusal> {
    let mut found = Vec::new();
    if let Some(format) = body.response_format.take().filter(|format| !format.is_null()) {
        let wrong = |why: &str| Refusal::of("response_format", why);
        let schema_in =
            |place: &Value| place.get("schema").filter(|schema| !schema.is_null()).cloned();
        match format.get("type").and_then(Value::as_str) {
            Some("text") => {}
            Some("json_object") => found.push(match schema_in(&format) {
                Some(schema) => ("response_format", Rules::JsonSchema(schema)),
                None => ("response_format", Rules::JsonObject),
            }),
            Some("json_schema") => {
                let place = format.get("json_schema").unwrap_or(&format);
                let schema = schema_in(place);
                let schema =
                    schema.ok_or_else(|| wrong("response_format has no json_schema.schema"))?;
                found.push(("response_format", Rules::JsonSchema(schema)));
            }
            _ => {
                return Err(wrong("response_format.type must be text, json_object or json_schema"));
            }
        }
    }
    if let Some(outputs) = body.structured_outputs.take() {
        let text = |name: &str| outputs.get(name).and_then(Value::as_str).map(str::to_owned);
        let json = outputs.get("json").cloned();
        let choice = outputs
            .get("choice")
            .and_then(Value::as_array)
            .map(|choices| Rules::one_of(choices.iter().filter_map(Value::as_str)));
        let all = [
            json.map(Rules::JsonSchema),
            text("regex").map(Rules::Regex),
            choice,
            text("grammar").map(Rules::Lark),
            outputs.get("json_object").filter(|on| **on == true).map(|_| Rules::JsonObject),
        ];
        found.extend(all.into_iter().flatten().map(|rules| ("structured_outputs", rules)));
    }
    let choice = body.guided_choice.take();
    let others = [
        ("json_schema", body.json_schema.take().map(Rules::JsonSchema)),
        ("guided_json", body.guided_json.take().map(Rules::JsonSchema)),
        ("guided_regex", body.guided_regex.take().map(Rules::Regex)),
        ("guided_choice", choice.map(|texts| Rules::one_of(texts.iter().map(String::as_str)))),
        ("guided_grammar", body.guided_grammar.take().map(Rules::Lark)),
    ];
    found.extend(others.into_iter().filter_map(|(name, rules)| Some((name, rules?))));
    match found.len() {
        0 | 1 => Ok(found.pop().map(|(_, rules)| rules)),
        _ => Err(Refusal::of(
            found[1].0,
            format!("{} and {} exclude each other", found[0].0, found[1].0),
        )),
    }
}

/// Reads the tool calls that the answer must consist of.
fn must_call(body: &Body) -> Result<Option<MustCall>, Refusal> {
    let wrong = || {
        let why = "tool_choice must be \"none\", \"auto\", \"required\" or the function to call";
        Refusal::of("tool_choice", why)
    };
    match &body.tool_choice {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" | "auto" => Ok(None),
            "required" | "any" => Ok(Some(MustCall::Any)),
            _ => Err(wrong()),
        },
        Some(choice) => {
            let name = choice.pointer("/function/name").or_else(|| choice.get("name"));
            let name = name.and_then(Value::as_str).ok_or_else(wrong)?;
            Ok(Some(MustCall::Named(name.to_owned())))
        }
    }
}

fn completion(
    prompt: Option<Prompt>,
    suffix: Option<String>,
    has_messages: bool,
) -> Result<Input, Refusal> {
    if has_messages {
        return Err(Refusal::of("messages", "messages are for /v1/chat/completions"));
    }
    let several = || Refusal::of("prompt", "several prompts need a request each");
    let input = match prompt {
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
    };
    match (input?, suffix) {
        (Input::Text(prefix), Some(suffix)) => {
            Ok(Input::Infill(Gap { prefix, suffix, ..Gap::default() }))
        }
        (_, Some(_)) => Err(Refusal::of("suffix", "suffix needs a prompt of text, not of tokens")),
        (input, None) => Ok(input),
    }
}

fn chat(body: &Body) -> Result<Input, Refusal> {
    if body.prompt.is_some() {
        return Err(Refusal::of("prompt", "a prompt is for /v1/completions"));
    }
    if body.suffix.is_some() {
        return Err(Refusal::of("suffix", "a suffix is for /v1/completions"));
    }
    let messages = Message::list_from_json(body.messages.as_ref().unwrap_or(&Value::Null))
        .map_err(|error| Refusal::of("messages", error.to_string()))?;
    if messages.is_empty() {
        return Err(Refusal::of("messages", "there is no message"));
    }
    let is_none = body.tool_choice.as_ref().is_some_and(|choice| choice == "none");
    let tools = body.tools.clone().filter(|_| !is_none);
    let tools = tools.filter(|tools| tools.as_array().is_none_or(|tools| !tools.is_empty()));
    if tools.as_ref().is_some_and(|tools| !tools.is_array()) {
        return Err(Refusal::of("tools", "tools must be a list"));
    }
    let think = body.reasoning_effort.as_deref().map(effort::think).transpose();
    let think = think.map_err(|why| Refusal::of("reasoning_effort", why))?;
    let variables = body.chat_template_kwargs.clone().unwrap_or_default();
    Ok(Input::Chat { messages, tools, think, variables })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(url: &str, body: Value) -> Result<Wanted, Refusal> {
        let endpoint = if url.contains("chat") { Endpoint::Chat } else { Endpoint::Completions };
        wanted(endpoint, &body)
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
    fn the_last_message_of_the_assistant_is_continued_unless_the_request_says_otherwise() {
        let end = |continues: Value, header: Value, role: &str| {
            let messages =
                json!([{ "role": "user", "content": "x" }, { "role": role, "content": "y" }]);
            let mut body = json!({ "messages": messages });
            for (name, value) in
                [("continue_final_message", continues), ("add_generation_prompt", header)]
            {
                if !value.is_null() {
                    body[name] = value;
                }
            }
            let wanted = of("/v1/chat/completions", body)?;
            let Input::Chat { messages, .. } = &wanted.input else { panic!() };
            Ok::<_, Refusal>(wanted.ending.of(messages))
        };
        let (yes, no, none) = (json!(true), json!(false), Value::Null);
        for (continues, header, of_assistant, of_user) in [
            (&none, &none, PromptEnd::Continued, PromptEnd::Answer),
            (&none, &yes, PromptEnd::Answer, PromptEnd::Answer),
            (&none, &no, PromptEnd::Continued, PromptEnd::Nothing),
            (&no, &none, PromptEnd::Answer, PromptEnd::Answer),
            (&no, &no, PromptEnd::Nothing, PromptEnd::Nothing),
            (&yes, &no, PromptEnd::Continued, PromptEnd::Continued),
            (&yes, &none, PromptEnd::Continued, PromptEnd::Continued),
        ] {
            assert_eq!(end(continues.clone(), header.clone(), "assistant"), Ok(of_assistant));
            assert_eq!(end(continues.clone(), header.clone(), "user"), Ok(of_user));
        }
        let refusal = end(yes.clone(), yes, "assistant").unwrap_err();
        assert_eq!(refusal.param, Some("continue_final_message"));
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        let prompt = |name: &str, value: Value| {
            let mut body = json!({ "prompt": "x" });
            body[name] = value;
            of("/v1/completions", body)
        };
        for (name, value) in [
            ("echo", json!(true)),
            ("logprobs", json!(21)),
            ("top_logprobs", json!(2)),
            ("presence_penalty", json!(2.5)),
            ("logit_bias", json!({ "1": 101 })),
            ("logit_bias", json!({ "one": 1 })),
            ("response_format", json!({ "type": "xml" })),
            ("response_format", json!({ "type": "json_schema" })),
            ("n", json!(0)),
            ("max_tokens", json!(0)),
            ("temperature", json!(3)),
            ("top_p", json!(-1)),
            ("stop", json!(vec!["a"; 17])),
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
        assert_eq!(prompt("heat", json!(1)).unwrap().unknown, ["heat"]);
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
        let with_suffix = |prompt: Value, suffix: Value| {
            of("/v1/completions", json!({ "prompt": prompt, "suffix": suffix })).map(|w| w.input)
        };
        let gap = Gap { prefix: "x".into(), suffix: "y".into(), ..Gap::default() };
        assert_eq!(with_suffix(json!("x"), json!("y")), Ok(Input::Infill(gap)));
        assert_eq!(with_suffix(json!("x"), json!("")), Ok(Input::Text("x".into())));
        assert_eq!(with_suffix(json!([1]), json!("y")).unwrap_err().param, Some("suffix"));
    }
}
