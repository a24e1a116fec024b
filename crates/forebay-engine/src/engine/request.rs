//! Requests, and the events that report their results.

use std::ops::ControlFlow;

use forebay_grammar::Grammar;
use serde::{Deserialize, Serialize};

use crate::{GenerateOptions, WeightUse};

/// A prompt and how to continue it.
#[derive(Debug, Clone, Default)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub options: GenerateOptions,
    /// Waiting requests with a higher priority begin first. Equal ones begin in the order in which they came.
    pub priority: i32,
    /// Number of the likeliest tokens to report with every generated token, with their logarithmic probabilities. `None`
    /// reports no probabilities.
    pub logprobs: Option<usize>,
    /// Number of the likeliest tokens to report with every token of the prompt, at the end. `None` reports nothing about them.
    /// Such a prompt is read whole, whatever is cached.
    pub prompt_logprobs: Option<usize>,
    /// True to report the text of the tokens too. The model must have a tokenizer.
    pub text: bool,
    /// Rules that the answer follows. The tokens that they force are computed together and reported without probabilities.
    pub grammar: Option<Grammar>,
    /// Requests share keys and values of equal prefixes only with requests of the same namespace, because the time of an answer
    /// tells whether its prefix was known.
    pub namespace: Vec<u8>,
    /// Number of the caller. Callers are served in turn, and 0 is that of a process with only one.
    pub share: u64,
    /// Asks for the embedding of the prompt instead of an answer.
    pub pooling: Option<Pooling>,
}

impl Request {
    /// Returns true if no row of the prompt may come from another request.
    pub(super) fn reads_all(&self) -> bool {
        self.pooling.is_some() || self.prompt_logprobs.is_some()
    }
}

/// How the states of a prompt's tokens behind the last layer become one embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// The state of the last token.
    Last,
}

/// Number of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub(super) u64);

/// Receiver of a request's events. After `ControlFlow::Break`, the request ends with [`RequestEnd::Stopped`].
pub type Sink = Box<dyn FnMut(Event) -> ControlFlow<()> + Send>;

/// Something that happened to a request.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "events are handed over one at a time, never stored")]
pub enum Event {
    Token(GeneratedToken),
    /// The last event.
    Finished {
        end: RequestEnd,
        /// Rest of the text: a character that the last token began and no other ended, as U+FFFD.
        text: String,
        /// The embedding of the prompt if the request asked for one and was not cut off: one number for each hidden dimension,
        /// not normalised.
        embedding: Option<Vec<f32>>,
        /// The tokens of the prompt from the second one on, as far as it was read, if the request asked for their probabilities.
        prompt: Vec<PromptToken>,
        /// The token by which the model ended the answer. It is no part of the answer.
        end_token: Option<GeneratedToken>,
        statistics: RequestStatistics,
    },
}

/// A token of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptToken {
    /// Logarithm of its probability behind the tokens before it.
    pub logprob: f32,
    /// Its place among all tokens by their probability, from 1.
    pub rank: usize,
    /// The likeliest tokens with the logarithms of their probabilities, likeliest first.
    pub likeliest: Vec<(u32, f32)>,
}

/// A token that the model generated.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    pub id: u32,
    /// Text that this token completes. Empty if it only begins a character, or if no text was asked for.
    pub text: String,
    /// Logarithm of the token's probability before filters and temperature, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens with the logarithms of their probabilities, likeliest first.
    pub likeliest: Vec<(u32, f32)>,
}

/// Reason why a request ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestEnd {
    /// The model chose an end token or a stop id.
    End,
    MaxTokens,
    ContextFull,
    /// The sink asked to stop.
    Stopped,
    /// [`Engine::cancel`](super::Engine::cancel) was called.
    Cancelled,
    /// The request's own values were not finite, or its mask was not computed.
    Failed(String),
    /// No token can follow by the request's grammar, or its parser ran into a limit. This is the request's fault.
    GrammarStuck(String),
}

fn yes() -> bool {
    true
}

/// Counts and times of a request.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RequestStatistics {
    /// False if the last bits may depend on other requests: with [`CpuOffload::Always`](crate::CpuOffload) on a GPU, and with
    /// [`KvDiskType::Q8_0`](crate::KvDiskType).
    #[serde(default = "yes")]
    pub exact: bool,
    pub prompt_tokens: usize,
    /// Tokens of the prompt whose keys and values were there already.
    pub cached_tokens: usize,
    /// Those of them that came from RAM, and not from the device that computes.
    #[serde(default)]
    pub cached_tokens_from_ram: usize,
    /// Those of them that came from the disk.
    #[serde(default)]
    pub cached_tokens_from_disk: usize,
    /// Seconds for which the request waited for the disk to bring keys and values.
    #[serde(default)]
    pub kv_read_seconds: f64,
    /// Estimated seconds that computing the cached tokens again would have taken, less
    /// [`RequestStatistics::kv_read_seconds`].
    #[serde(default)]
    pub saved_seconds: f64,
    pub generated_tokens: usize,
    /// Seconds from the call of [`Engine::submit`](super::Engine::submit) until the request began.
    pub waited_seconds: f64,
    /// Seconds from the call of [`Engine::submit`](super::Engine::submit) to the first token.
    pub first_token_seconds: Option<f64>,
    pub total_seconds: f64,
    /// Number of times that the request was suspended for others.
    pub suspended: usize,
    /// Number of passes that the request had rows in.
    pub passes: usize,
    /// The request's share of what these passes needed of the weights: by its part of their rows.
    pub weights: WeightUse,
}
