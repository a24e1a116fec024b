//! Requests in the form that all interfaces share.

use std::borrow::Cow;

use forebay_chat::{Gap, Message, PromptEnd, Think, continued_text};
use forebay_grammar::Rules;
use forebay_model::sampling::Sampling;
use serde_json::{Map, Value, json};

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
    /// The field of the request that is wrong, as in `messages[1].content`.
    pub param: Option<Cow<'static, str>>,
    pub code: Option<&'static str>,
}

impl Refusal {
    /// Creates a refusal because of a field of the body.
    pub fn of(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Refusal {
        Refusal { message: message.into(), param: Some(param.into()), code: None }
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
    /// Several texts or ids, each of which is continued by itself.
    Several(Vec<Input>),
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
    pub ends: Ends,
    /// Number of answers to each prompt.
    pub choices: usize,
    /// Number of the likeliest tokens to report with every token; `None` reports no probabilities.
    pub logprobs: Option<usize>,
    /// Number of the likeliest tokens to report with every token of the prompt; `None` reports none.
    pub prompt_logprobs: Option<usize>,
    /// True to begin the answer with the text of the prompt.
    pub echo: bool,
    /// Form of the answer.
    pub rules: Option<Rules>,
    /// Texts whose tokens are made likelier or less likely, beside the tokens of [`Sampling::logit_bias`].
    pub biased_texts: Vec<(String, f32)>,
    /// Tool calls that the answer must consist of.
    pub must_call: Option<MustCall>,
    /// True if an answer may have several tool calls.
    pub parallel_calls: bool,
    /// True if a tool call is reported as `function_call`, as before `tools`.
    pub function_form: bool,
    /// True to send the answer in parts as it is generated.
    pub stream: bool,
    /// True to send the numbers of tokens at the end of a stream.
    pub stream_usage: bool,
    /// True to report what the request needed of the weights, and how long it waited.
    pub statistics: bool,
    /// Name of the model, as the request gives it.
    pub model: Option<String>,
}

impl Wanted {
    /// Returns true if the answer has a form, so that a grammar must be compiled.
    pub fn has_form(&self) -> bool {
        self.rules.is_some() || self.must_call.is_some()
    }

    /// Returns the request for its prompt alone, whatever the form of its answer.
    pub fn without_form(self) -> Wanted {
        Wanted { rules: None, must_call: None, ..self }
    }
}

/// What ends an answer, or may not be in it, beside the texts of [`Wanted::stops`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ends {
    /// Tokens that end the answer, in addition to those of the model.
    pub stop_ids: Vec<u32>,
    /// True if the model may not end the answer.
    pub ignores_end: bool,
    /// Tokens before which the model may not end the answer.
    pub least: usize,
    /// Texts that the answer may not have.
    pub bad_words: Vec<String>,
    /// True if the text that ends the answer is a part of it.
    pub keeps_stop: bool,
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
            ends: Ends::default(),
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            echo: false,
            rules: None,
            biased_texts: Vec::new(),
            must_call: None,
            parallel_calls: true,
            function_form: false,
            stream: false,
            stream_usage: false,
            statistics: false,
            model: None,
        }
    }
}
