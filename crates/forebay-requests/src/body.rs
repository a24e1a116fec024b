//! Requests in the form of the OpenAI API.
//!
//! Source: the OpenAI API reference, "Create chat completion" and "Create completion", and the documentation of vLLM and of
//! llama.cpp's server for the fields that they add.

use forebay_chat::{Gap, Message, Think};
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::choice::{self, Choosing};
use crate::fields::{CHAT, COMPLETIONS};
use crate::request::{Ending, Endpoint, Ends, Input, Refusal, Wanted};
use crate::{bias, effort};

/// Tokens of a completion whose request names no limit, as in the OpenAI API.
const COMPLETION_TOKENS: usize = 16;
/// Largest number of answers to one request.
const CHOICES_MAX: usize = 128;
/// Most texts that end an answer.
const STOPS_MAX: usize = 16;
/// Largest number of the likeliest tokens that are reported.
const LIKELIEST_MAX: usize = 20;
/// Most tokens that a penalty for recent tokens looks at.
const WINDOW_MAX: i64 = 4096;

/// One value or several.
#[derive(Deserialize)]
#[serde(untagged)]
pub enum OneOrMore<T> {
    One(T),
    More(Vec<T>),
}

impl<T> OneOrMore<T> {
    /// Returns all values.
    pub fn all(self) -> Vec<T> {
        match self {
            OneOrMore::One(one) => vec![one],
            OneOrMore::More(all) => all,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    Many(Vec<Vec<u32>>),
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct StreamOptions {
    include_usage: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reasoning {
    effort: Option<String>,
    enabled: Option<bool>,
}

/// The fields that are followed. The table of fields has removed the others.
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
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<Value>,
    n: Option<usize>,
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
    seed: Option<i64>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    functions: Option<Vec<Value>>,
    function_call: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    reasoning: Option<Reasoning>,
    thinking: Option<Thinking>,
    enable_thinking: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    stream_options: StreamOptions,
    #[serde(default)]
    include_statistics: bool,
    logprobs: Option<Value>,
    top_logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    #[serde(default)]
    echo: bool,
    suffix: Option<String>,
    // Forms of the answer.
    response_format: Option<Value>,
    structured_outputs: Option<Value>,
    json_schema: Option<Value>,
    grammar: Option<String>,
    guided_json: Option<Value>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
}

/// Reads the body of a request.
///
/// # Errors
/// Returns why the request cannot be run.
pub fn wanted(endpoint: Endpoint, body: &Value) -> Result<Wanted, Refusal> {
    let is_chat = endpoint == Endpoint::Chat;
    let form = if is_chat { &CHAT } else { &COMPLETIONS };
    let mut body: Body = form.read(body.clone())?;
    let sampling = sampling(&body)?;
    let choices = choices("n", body.n)?;
    let stops = body.stop.take().map_or_else(Vec::new, OneOrMore::all);
    if stops.len() > STOPS_MAX {
        return Err(Refusal::of("stop", format!("stop may name {STOPS_MAX} texts at most")));
    }
    let logprobs = logprobs(&body, is_chat)?;
    let prompt_logprobs = prompt_logprobs(&body, logprobs)?;
    let max_tokens = limit(&body, is_chat)?;
    let rules = rules(&mut body)?;
    let choosing = match is_chat {
        true => choice::of_chat(
            body.tools.take(),
            body.tool_choice.take(),
            body.functions.take(),
            body.function_call.take(),
        )?,
        false => Choosing::default(),
    };
    let ending = ending(&body)?;
    let input = match is_chat {
        true => chat(&mut body, choosing.tools)?,
        false => {
            let suffix = body.suffix.take().filter(|suffix| !suffix.is_empty());
            completion(body.prompt.take(), suffix, body.echo)?
        }
    };
    Ok(Wanted {
        input,
        ending,
        max_tokens,
        sampling,
        has_seed: body.seed.is_some(),
        stops,
        ends: Ends {
            stop_ids: body.stop_token_ids,
            ignores_end: body.ignore_eos,
            least: body.min_tokens,
            bad_words: body.bad_words,
            keeps_stop: body.include_stop_str_in_output,
        },
        choices,
        logprobs,
        prompt_logprobs,
        echo: body.echo,
        rules,
        biased_texts: bias::texts(body.logit_bias.as_ref())?,
        must_call: choosing.must_call,
        parallel_calls: body.parallel_tool_calls != Some(false) && !choosing.function_form,
        function_form: choosing.function_form,
        stream: body.stream,
        stream_usage: body.stream_options.include_usage,
        statistics: body.include_statistics,
        model: body.model,
    })
}

/// Reads the number of answers to each prompt.
///
/// # Errors
/// Returns an error if it is 0 or too large.
pub fn choices(name: &'static str, count: Option<usize>) -> Result<usize, Refusal> {
    let count = count.unwrap_or(1);
    match (1..=CHOICES_MAX).contains(&count) {
        true => Ok(count),
        false => Err(Refusal::of(name, format!("{name} must be between 1 and {CHOICES_MAX}"))),
    }
}

/// Returns the input of one prompt or of several.
///
/// # Errors
/// Returns an error if there is none, or if there are too many.
pub fn one_or_several(mut inputs: Vec<Input>) -> Result<Input, Refusal> {
    match inputs.len() {
        0 => Err(Refusal::of("prompt", "prompt is empty")),
        1 => Ok(inputs.remove(0)),
        2..=CHOICES_MAX => Ok(Input::Several(inputs)),
        _ => {
            let why = format!("prompt may have {CHOICES_MAX} prompts at most");
            Err(Refusal::of("prompt", why))
        }
    }
}

/// Reads the most tokens of the answer.
fn limit(body: &Body, is_chat: bool) -> Result<Option<usize>, Refusal> {
    let limit = match body.max_completion_tokens {
        Some(limit) => Some(("max_completion_tokens", limit)),
        None => body.max_tokens.map(|limit| ("max_tokens", limit)),
    };
    match limit {
        Some((name, 0)) if is_chat => Err(Refusal::of(name, format!("{name} must be at least 1"))),
        // A completion without any tokens may be asked for its prompt alone.
        Some((_, limit)) => Ok(Some(limit)),
        None if is_chat => Ok(None),
        None => Ok(Some(COMPLETION_TOKENS)),
    }
}

/// Reads the end of the prompt, by the rule of vLLM and llama.cpp: a last message of the assistant is continued unless the request
/// asks for a new answer. `prefix`, as DeepSeek and Mistral name it, asks to continue the message that has it.
fn ending(body: &Body) -> Result<Ending, Refusal> {
    let last = body.messages.as_ref().and_then(|messages| messages.as_array()?.last());
    let has_prefix = last.is_some_and(|last| last.get("prefix") == Some(&Value::Bool(true)));
    let continues = body.continue_final_message.or(has_prefix.then_some(true));
    let continues = match (continues, body.add_generation_prompt) {
        (Some(true), Some(true)) => {
            let (param, name) = match body.continue_final_message {
                Some(_) => ("continue_final_message", "continue_final_message"),
                None => ("messages", "prefix"),
            };
            let why = format!("{name} and add_generation_prompt exclude each other");
            return Err(Refusal::of(param, why));
        }
        (None, Some(true)) => Some(false),
        (continues, _) => continues,
    };
    Ok(Ending { continues, without_header: body.add_generation_prompt == Some(false) })
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
        let why = "repetition_penalty (repeat_penalty) must be greater than 0";
        return Err(Refusal::of("repetition_penalty", why));
    }
    let defaults = Sampling::default();
    let window = body.repeat_last_n.map(|last| window(last) as usize);
    Ok(Sampling {
        seed: body.seed.unwrap_or(0) as u64,
        temperature: within("temperature", body.temperature, 1.0, (0.0, 2.0))?,
        top_p: within("top_p", body.top_p, 1.0, (0.0, 1.0))?,
        min_p: within("min_p", body.min_p, 0.0, (0.0, 1.0))?,
        top_k: body.top_k.unwrap_or(0),
        repeat_penalty: body.repetition_penalty.unwrap_or(1.0),
        repeat_window: window.unwrap_or(defaults.repeat_window),
        presence_penalty: within("presence_penalty", body.presence_penalty, 0.0, (-2.0, 2.0))?,
        frequency_penalty: within("frequency_penalty", body.frequency_penalty, 0.0, (-2.0, 2.0))?,
        logit_bias: bias::read(body.logit_bias.as_ref())?,
        ..defaults
    })
}

/// Returns how many tokens a penalty for recent tokens looks at. A negative number is as many as there can be.
pub fn window(last: i64) -> i64 {
    if last < 0 { WINDOW_MAX } else { last.min(WINDOW_MAX) }
}

/// Reads how many of the likeliest tokens are reported. A chat names them by `logprobs: true` and `top_logprobs`, a completion
/// by a number.
fn logprobs(body: &Body, is_chat: bool) -> Result<Option<usize>, Refusal> {
    let count = match (&body.logprobs, is_chat) {
        (None | Some(Value::Bool(false)), _) if body.top_logprobs.unwrap_or(0) == 0 => None,
        (Some(Value::Bool(true)), true) => Some(body.top_logprobs.unwrap_or(0)),
        (Some(Value::Bool(true)), false) => Some(1),
        (Some(value), false) => value.as_u64().map(|count| count as usize),
        _ => return Err(Refusal::of("top_logprobs", "top_logprobs needs logprobs to be true")),
    };
    at_most_likeliest(if is_chat { "top_logprobs" } else { "logprobs" }, count)
}

/// Checks how many of the likeliest tokens a field asks for.
///
/// # Errors
/// Returns an error if there are too many.
pub fn at_most_likeliest(
    name: &'static str,
    count: Option<usize>,
) -> Result<Option<usize>, Refusal> {
    match count {
        Some(count) if count > LIKELIEST_MAX => {
            Err(Refusal::of(name, format!("{name} must be between 0 and {LIKELIEST_MAX}")))
        }
        count => Ok(count),
    }
}

/// Reads how many of the likeliest tokens are reported with those of the prompt: as `prompt_logprobs`, or beside an echo.
fn prompt_logprobs(body: &Body, logprobs: Option<usize>) -> Result<Option<usize>, Refusal> {
    let asked = at_most_likeliest("prompt_logprobs", body.prompt_logprobs)?;
    let echoed = logprobs.filter(|_| body.echo);
    let count = asked.max(echoed);
    match (count.is_some() && body.stream, asked.is_some()) {
        (true, true) => Err(Refusal::of("prompt_logprobs", "prompt_logprobs cannot be streamed")),
        (true, false) => Err(Refusal::of("echo", "echo with logprobs cannot be streamed")),
        (false, _) => Ok(count),
    }
}

/// Reads the form that the answer must have.
fn rules(body: &mut Body) -> Result<Option<Rules>, Refusal> {
    let mut found = Vec::new();
    if let Some(format) = body.response_format.take() {
        found.extend(of_format(&format)?.map(|rules| ("response_format", rules)));
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
            text("grammar").map(Rules::of_grammar),
            outputs.get("json_object").filter(|on| **on == true).map(|_| Rules::JsonObject),
        ];
        found.extend(all.into_iter().flatten().map(|rules| ("structured_outputs", rules)));
    }
    let choice = body.guided_choice.take();
    let others = [
        ("json_schema", body.json_schema.take().map(Rules::JsonSchema)),
        ("grammar", body.grammar.take().filter(|text| !text.is_empty()).map(Rules::of_grammar)),
        ("guided_json", body.guided_json.take().map(Rules::JsonSchema)),
        ("guided_regex", body.guided_regex.take().map(Rules::Regex)),
        ("guided_choice", choice.map(|texts| Rules::one_of(texts.iter().map(String::as_str)))),
        ("guided_grammar", body.guided_grammar.take().map(Rules::of_grammar)),
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

/// Reads `response_format`.
fn of_format(format: &Value) -> Result<Option<Rules>, Refusal> {
    let schema_in = |place: &Value| place.get("schema").cloned();
    Ok(match format.get("type").and_then(Value::as_str) {
        Some("json_object") => Some(schema_in(format).map_or(Rules::JsonObject, Rules::JsonSchema)),
        Some("json_schema") => {
            let place = format.get("json_schema").unwrap_or(format);
            let missing =
                || Refusal::of("response_format", "response_format has no json_schema.schema");
            Some(Rules::JsonSchema(schema_in(place).ok_or_else(missing)?))
        }
        _ => None,
    })
}

fn completion(
    prompt: Option<Prompt>,
    suffix: Option<String>,
    echo: bool,
) -> Result<Input, Refusal> {
    let inputs: Vec<Input> = match prompt {
        None => Vec::new(),
        Some(Prompt::Ids(ids)) if ids.is_empty() => Vec::new(),
        Some(Prompt::Text(text)) => vec![Input::Text(text)],
        Some(Prompt::Ids(ids)) => vec![Input::Ids(ids)],
        Some(Prompt::Texts(texts)) => texts.into_iter().map(Input::Text).collect(),
        Some(Prompt::Many(all)) => all.into_iter().map(Input::Ids).collect(),
    };
    match (one_or_several(inputs)?, suffix) {
        (Input::Text(prefix), Some(suffix)) if !echo => {
            Ok(Input::Infill(Gap { prefix, suffix, ..Gap::default() }))
        }
        (Input::Text(_), Some(_)) => Err(Refusal::of("echo", "echo has no meaning with a suffix")),
        (_, Some(_)) => Err(Refusal::of("suffix", "suffix needs a prompt of one text")),
        (input, None) => Ok(input),
    }
}

fn chat(body: &mut Body, tools: Option<Value>) -> Result<Input, Refusal> {
    let messages = Message::list_from_json(&body.messages.take().unwrap_or_default())
        .map_err(|error| Refusal::of("messages", error.to_string()))?;
    if messages.is_empty() {
        return Err(Refusal::of("messages", "there is no message"));
    }
    let think = think(body)?;
    let variables = body.chat_template_kwargs.take().unwrap_or_default();
    Ok(Input::Chat { messages, tools, think, variables })
}

/// Reads how much the model thinks. The first field that says it counts.
fn think(body: &Body) -> Result<Option<Think>, Refusal> {
    let turned = |on: bool| if on { Think::On } else { Think::Off };
    let by_effort = |name: &'static str, effort: Option<&str>| {
        effort
            .map(effort::think)
            .transpose()
            .map_err(|why| Refusal::of(name, format!("{name} {why}")))
    };
    let reasoning = body.reasoning.as_ref();
    let all = [
        by_effort("reasoning_effort", body.reasoning_effort.as_deref())?,
        by_effort("reasoning.effort", reasoning.and_then(|of| of.effort.as_deref()))?,
        reasoning.and_then(|of| of.enabled).map(turned),
        body.thinking.as_ref().map(|thinking| turned(thinking.kind != "disabled")),
        body.enable_thinking.map(turned),
    ];
    Ok(all.into_iter().flatten().next())
}

#[cfg(test)]
mod tests {
    use forebay_chat::PromptEnd;
    use serde_json::json;

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
        assert_eq!(refusal.param.as_deref(), Some("continue_final_message"));
        let last = json!({ "role": "assistant", "content": "y", "prefix": true });
        let with_prefix = json!({ "messages": [{ "role": "user", "content": "x" }, last] });
        let wanted = of("/v1/chat/completions", with_prefix).unwrap();
        assert_eq!(wanted.ending.continues, Some(true));
    }

    #[test]
    fn what_cannot_be_followed_is_refused() {
        let prompt = |name: &str, value: Value| {
            let mut body = json!({ "prompt": "x" });
            body[name] = value;
            of("/v1/completions", body)
        };
        for (name, value) in [
            ("logprobs", json!(21)),
            ("top_logprobs", json!(2)),
            ("presence_penalty", json!(2.5)),
            ("logit_bias", json!({ "1": 101 })),
            ("logit_bias", json!({ "one": 101 })),
            ("response_format", json!({ "type": "xml" })),
            ("response_format", json!({ "type": "json_schema" })),
            ("n", json!(0)),
            ("temperature", json!(3)),
            ("top_p", json!(-1)),
            ("stop", json!(vec!["a"; 17])),
            ("messages", json!([{ "role": "user", "content": "x" }])),
            ("heat", json!(1)),
        ] {
            let refused = prompt(name, value).unwrap_err();
            assert!(refused.param.as_deref().is_some_and(|of| of.starts_with(name)), "{refused:?}");
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
    }

    #[test]
    fn prompts_have_several_forms() {
        let input =
            |prompt: Value| of("/v1/completions", json!({ "prompt": prompt })).map(|w| w.input);
        assert_eq!(input(json!("x")), Ok(Input::Text("x".into())));
        assert_eq!(input(json!(["x"])), Ok(Input::Text("x".into())));
        assert_eq!(input(json!([1, 2])), Ok(Input::Ids(vec![1, 2])));
        assert_eq!(input(json!([[1, 2]])), Ok(Input::Ids(vec![1, 2])));
        let several = Input::Several(vec![Input::Ids(vec![1]), Input::Ids(vec![2])]);
        assert_eq!(input(json!([[1], [2]])), Ok(several));
        assert_eq!(input(json!([])).unwrap_err().param.as_deref(), Some("prompt"));
        assert!(of("/v1/completions", json!({})).is_err());
        let with_suffix = |prompt: Value, suffix: Value| {
            of("/v1/completions", json!({ "prompt": prompt, "suffix": suffix })).map(|w| w.input)
        };
        let gap = Gap { prefix: "x".into(), suffix: "y".into(), ..Gap::default() };
        assert_eq!(with_suffix(json!("x"), json!("y")), Ok(Input::Infill(gap)));
        assert_eq!(with_suffix(json!("x"), json!("")), Ok(Input::Text("x".into())));
        assert_eq!(
            with_suffix(json!([1]), json!("y")).unwrap_err().param.as_deref(),
            Some("suffix")
        );
    }
}
