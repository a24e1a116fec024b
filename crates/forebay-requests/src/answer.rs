//! Answers in the form of the OpenAI API, whole and in parts.

use forebay_chat::{Message, ToolCall};
use forebay_engine::engine::{RequestEnd, RequestStatistics};
use serde_json::{Map, Value, json};

use crate::request::Endpoint;
use crate::sink::{Piece, Token};

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerFailure {
    pub message: String,
    /// True if another request would have been answered.
    pub is_of_request: bool,
}

/// A finished answer.
#[derive(Clone, Debug)]
pub struct Choice {
    pub message: Message,
    pub end: RequestEnd,
    /// Index of the stop text that ended the answer.
    pub stop: Option<usize>,
    pub statistics: RequestStatistics,
    /// The generated tokens with their probabilities, if they were asked for.
    pub tokens: Vec<Token>,
    /// The tokens of the prompt with their probabilities, if they were asked for.
    pub prompt: Vec<Token>,
    /// The token by which the model ended the answer, if its probability was asked for. It is no part of the answer.
    pub end_token: Option<Token>,
    pub about: About,
}

/// What a request says about the form of an answer.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Number of the prompt, if the request has several.
    pub prompt: usize,
    /// Text of the prompt, if the answer begins with it.
    pub echo: Option<String>,
    /// True if a tool call is reported as `function_call`.
    pub function_form: bool,
    /// True if the probabilities of the prompt's tokens are reported by themselves.
    pub reports_prompt: bool,
    /// True if the probabilities of the answer's tokens are reported.
    pub reports_tokens: bool,
}

impl Choice {
    /// Returns true if there is no answer.
    pub fn has_failed(&self) -> bool {
        matches!(self.end, RequestEnd::Cancelled) || self.failure().is_some()
    }

    /// Returns why this answer failed, if it failed by itself. A grammar that cannot continue is the client's error.
    pub fn failure(&self) -> Option<AnswerFailure> {
        match &self.end {
            RequestEnd::Failed(why) => {
                Some(AnswerFailure { message: why.clone(), is_of_request: false })
            }
            RequestEnd::GrammarStuck(why) => {
                let count = self.statistics.generated_tokens;
                let tokens = if count == 1 { "token" } else { "tokens" };
                let message = format!(
                    "the answer cannot continue after {count} {tokens} by its grammar or schema: {why}"
                );
                Some(AnswerFailure { message, is_of_request: true })
            }
            _ => None,
        }
    }
}

/// What identifies an answer.
#[derive(Clone, Copy)]
pub struct Identity<'a> {
    /// A text that no other answer has.
    pub unique: &'a str,
    /// Seconds since 1970.
    pub created: u64,
    pub model: &'a str,
}

/// Returns the body of an answer, none of whose choices failed.
pub fn whole(endpoint: Endpoint, identity: &Identity<'_>, choices: &[Choice]) -> Value {
    let parts: Vec<Value> = choices
        .iter()
        .enumerate()
        .map(|(index, choice)| {
            let mut part = match endpoint {
                Endpoint::Completions => completion(index, choice),
                Endpoint::Chat => json!({
                    "index": index,
                    "message": message(identity.unique, index, choice),
                    "logprobs": choice.about.reports_tokens.then(|| chat_logprobs(&choice.tokens)),
                    "finish_reason": finish_reason(choice),
                }),
            };
            if choice.about.reports_prompt {
                part["prompt_logprobs"] = prompt_logprobs(&choice.prompt);
            }
            part
        })
        .collect();
    let object = match endpoint {
        Endpoint::Completions => "text_completion",
        Endpoint::Chat => "chat.completion",
    };
    let mut body = head(endpoint, object, identity);
    body.insert("choices".into(), parts.into());
    body.insert("usage".into(), usage(choices));
    body.into()
}

/// Returns a completion, which begins with its prompt if that was asked for.
fn completion(index: usize, choice: &Choice) -> Value {
    let echo = choice.about.echo.as_deref().unwrap_or_default();
    let echoed = choice.about.echo.is_some() && !choice.about.reports_prompt;
    let prompt = choice.prompt.iter().filter(|_| echoed);
    // Evaluation programs take the last token for a generated one, and those before it for the prompt.
    let end = choice.end_token.iter().filter(|_| echoed);
    let tokens: Vec<Token> = prompt.chain(&choice.tokens).chain(end).cloned().collect();
    json!({
        "index": index,
        "text": format!("{echo}{}", choice.message.content),
        "logprobs": choice.about.reports_tokens.then(|| completion_logprobs(&tokens, 0)),
        "finish_reason": finish_reason(choice),
    })
}

/// Returns the probabilities of a prompt's tokens as vLLM does: for each token an object by token ids, and null for the first one.
fn prompt_logprobs(tokens: &[Token]) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let of = |token: &Token| {
        let Some(logprob) = token.logprob else { return Value::Null };
        let mut entries = Map::new();
        for (likely, rank) in token.likeliest.iter().zip(1..) {
            let entry = json!({ "logprob": finite(likely.logprob), "rank": rank, "decoded_token": text(&likely.bytes) });
            entries.insert(likely.id.to_string(), entry);
        }
        let entry = json!({ "logprob": finite(logprob), "rank": token.rank, "decoded_token": text(&token.bytes) });
        entries.insert(token.id.to_string(), entry);
        entries.into()
    };
    tokens.iter().map(of).collect()
}

/// Returns the fields that begin an answer and each of its parts.
fn head(endpoint: Endpoint, object: &str, identity: &Identity<'_>) -> Map<String, Value> {
    let prefix = match endpoint {
        Endpoint::Completions => "cmpl",
        Endpoint::Chat => "chatcmpl",
    };
    let mut head = Map::new();
    head.insert("id".into(), format!("{prefix}-{}", identity.unique).into());
    head.insert("object".into(), object.into());
    head.insert("created".into(), identity.created.into());
    head.insert("model".into(), identity.model.into());
    head
}

/// Returns one part of a streamed answer. `choice` is `None` for the part that has only `usage`.
pub fn part(
    endpoint: Endpoint,
    identity: &Identity<'_>,
    choice: Option<Value>,
    usage: Option<Value>,
) -> Value {
    let object = match endpoint {
        Endpoint::Completions => "text_completion",
        Endpoint::Chat => "chat.completion.chunk",
    };
    let mut part = head(endpoint, object, identity);
    part.insert("choices".into(), choice.into_iter().collect());
    if let Some(usage) = usage {
        part.insert("usage".into(), usage);
    }
    part.into()
}

/// Returns a part of a choice.
pub fn choice_part(index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> Value {
    json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish })
}

/// Returns a piece of an answer as a `delta`.
pub fn delta(unique: &str, index: usize, piece: &Piece) -> Value {
    match piece {
        Piece::Reasoning(text) => json!({ "reasoning_content": text }),
        Piece::Content(text) => json!({ "content": text }),
        Piece::ToolCall { index: call, name } => json!({ "tool_calls": [{
            "index": call,
            "id": call_id(unique, index, *call),
            "type": "function",
            "function": { "name": name, "arguments": "" },
        }] }),
        Piece::Arguments { index: call, text } => {
            json!({ "tool_calls": [{ "index": call, "function": { "arguments": text } }] })
        }
    }
}

/// Returns the numbers of tokens of a request.
pub fn usage(choices: &[Choice]) -> Value {
    // Answers to the same prompt follow each other.
    let is_first =
        |index: usize| index == 0 || choices[index - 1].about.prompt != choices[index].about.prompt;
    let firsts = || choices.iter().enumerate().filter(|(index, _)| is_first(*index));
    let prompt: usize = firsts().map(|(_, choice)| choice.statistics.prompt_tokens).sum();
    let cached: usize = firsts().map(|(_, choice)| choice.statistics.cached_tokens).sum();
    let generated: usize = choices.iter().map(|choice| choice.statistics.generated_tokens).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

/// Returns the probabilities of a chat's tokens.
pub fn chat_logprobs(tokens: &[Token]) -> Value {
    let of = |text: &[u8], logprob: f32| json!({ "token": String::from_utf8_lossy(text), "logprob": finite(logprob), "bytes": text });
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut entry = of(&token.bytes, token.logprob.unwrap_or_default());
            let likeliest = token.likeliest.iter().map(|likely| of(&likely.bytes, likely.logprob));
            entry["top_logprobs"] = likeliest.collect();
            entry
        })
        .collect();
    json!({ "content": content, "refusal": null })
}

/// Returns the probabilities of a completion's tokens, whose text begins at `offset`.
pub fn completion_logprobs(tokens: &[Token], offset: usize) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut at = offset;
    let mut offsets = Vec::new();
    for token in tokens {
        offsets.push(at);
        at += text(&token.bytes).chars().count();
    }
    let likeliest = |token: &Token| -> Option<Map<String, Value>> {
        token.logprob?;
        let of = token.likeliest.iter();
        Some(of.map(|of| (text(&of.bytes), finite(of.logprob).into())).collect())
    };
    json!({
        "tokens": tokens.iter().map(|token| text(&token.bytes)).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| token.logprob.map(finite)).collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(likeliest).collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

/// Replaces the logarithm of 0, which JSON cannot express, by the value that the OpenAI API uses for unlikely tokens.
pub fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

/// Returns the message of an answer. Its tool calls all have an id.
pub fn message(unique: &str, index: usize, choice: &Choice) -> Value {
    let mut message = choice.message.clone();
    if let (true, [call, ..]) = (choice.about.function_form, message.tool_calls.as_slice()) {
        let call = json!({ "name": call.name, "arguments": call.arguments });
        message.tool_calls.clear();
        let mut value = message.to_json();
        value["function_call"] = call;
        return value;
    }
    for (number, ToolCall { id, .. }) in message.tool_calls.iter_mut().enumerate() {
        id.get_or_insert_with(|| call_id(unique, index, number));
    }
    message.to_json()
}

/// Returns the id of a tool call.
pub fn call_id(unique: &str, choice: usize, call: usize) -> String {
    format!("call_{unique}_{choice}_{call}")
}

/// Returns why an answer ended.
pub fn finish_reason(choice: &Choice) -> &'static str {
    match choice.end {
        RequestEnd::MaxTokens | RequestEnd::ContextFull => "length",
        _ if choice.message.tool_calls.is_empty() => "stop",
        _ if choice.about.function_form => "function_call",
        _ => "tool_calls",
    }
}

/// Returns a `delta` in the form from before tools.
pub fn function_delta(delta: &Value) -> Value {
    match delta.pointer("/tool_calls/0/function") {
        Some(function) => json!({ "function_call": function }),
        None => delta.clone(),
    }
}
