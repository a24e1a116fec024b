//! Requests of OpenAI's interface, with the fields of vLLM and llama.cpp's server that have become usual.

use super::messages::{FORMS_OF_ANSWER, MESSAGE, OLD_TOOLS, TOOL, TOOL_CHOICE};
use super::samplers::{ENDS, LLAMA_CPP, LLAMA_OTHERS, NO_BUDGET, OWN, REPEAT, SLOTS, USUAL};
use super::{Field, Form, IDS, Kind, alias, harmless, honoured, refused, refused_unless, required};

pub static CHAT: Form = Form {
    name: "ChatRequest",
    paths: &["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/input_tokens"],
    groups: &[
        &CHAT_OWN,
        &OLD_TOOLS,
        &FORMS_OF_ANSWER,
        &SHARED,
        &USUAL,
        &REPEAT,
        &ENDS,
        &OWN,
        &DESCRIBING,
        &VLLM,
        &LLAMA_CPP,
        &SLOTS,
        &LLAMA_OTHERS,
        &LLAMA_SERVER,
    ],
};

pub static COMPLETIONS: Form = Form {
    name: "CompletionsRequest",
    paths: &["/v1/completions", "/completions"],
    groups: &[
        &COMPLETIONS_OWN,
        &FORMS_OF_ANSWER,
        &SHARED,
        &USUAL,
        &REPEAT,
        &ENDS,
        &OWN,
        &DESCRIBING,
        &VLLM,
        &LLAMA_CPP,
        &SLOTS,
        &LLAMA_OTHERS,
        &LLAMA_SERVER,
    ],
};

const HEARS_NOTHING: &str = "this server answers with text only";
const TEMPLATE_IS_FIXED: &str = "the chat template is the model's own";
const NO_SEARCH: &str = "this server does not search the web";

static CHAT_OWN: [Field; 32] = [
    required("messages", Kind::List(&Kind::Object(&MESSAGE)), r#"[{"role":"user","content":"A"}]"#),
    honoured(
        "tools",
        Kind::List(&Kind::Tagged(&TOOL)),
        r#"[{"type":"function","function":{"name":"look"}}]"#,
    ),
    honoured("tool_choice", TOOL_CHOICE, r#""auto""#),
    honoured("parallel_tool_calls", Kind::Flag, "false"),
    honoured("max_completion_tokens", Kind::Limit, "2"),
    honoured("reasoning_effort", Kind::Text, r#""low""#),
    honoured("reasoning", Kind::Object(&REASONING), r#"{"effort":"low"}"#),
    honoured("thinking", Kind::Object(&THINKING), r#"{"type":"disabled"}"#),
    honoured("enable_thinking", Kind::Flag, "false"),
    honoured("chat_template_kwargs", Kind::Map(&Kind::Any), r#"{"enable_thinking":false}"#),
    honoured("logprobs", Kind::Flag, "true"),
    honoured("top_logprobs", Kind::Natural, "0"),
    refused_unless("modalities", &[r#"["text"]"#], r#"["audio"]"#, HEARS_NOTHING),
    refused("audio", r#"{"voice":"alloy"}"#, HEARS_NOTHING),
    refused_unless(
        "verbosity",
        &[r#""medium""#],
        r#""low""#,
        "ask for a short or long answer in a message",
    ),
    refused("web_search_options", r#"{"search_context_size":"low"}"#, NO_SEARCH),
    harmless(
        "prediction",
        r#"{"type":"content","content":"x"}"#,
        "it is about speed, and never changes the answer",
    ),
    refused("chat_template", r#""x""#, TEMPLATE_IS_FIXED),
    refused("documents", r#"[{"text":"x"}]"#, "put the documents into a message"),
    refused("echo", "true", "echo is for completions"),
    refused("suffix", r#""x""#, "a suffix is for completions"),
    refused("prompt", r#""x""#, "a prompt is for completions"),
    refused("input", r#""x""#, "a chat has messages; input is for /v1/responses"),
    harmless("mm_processor_kwargs", "{}", "it is about images"),
    refused_unless(
        "include_reasoning",
        &["true"],
        "false",
        "reasoning is always sent, apart from the answer",
    ),
    refused_unless("thinking_token_budget", &["-1"], "10", NO_BUDGET),
    refused_unless(
        "reasoning_format",
        &[r#""auto""#, r#""deepseek""#],
        r#""none""#,
        "reasoning is always sent, apart from the answer",
    ),
    refused("thinking_forced_open", "true", TEMPLATE_IS_FIXED),
    refused_unless("parse_tool_calls", &["true"], "false", "calls are always parsed"),
    harmless("parse_response", "true", "answers are always parsed"),
    honoured("continue_final_message", Kind::Flag, "false"),
    honoured("add_generation_prompt", Kind::Flag, "true"),
];

/// Amount of reasoning as OpenRouter names it.
static REASONING: Form = Form {
    name: "ChatReasoning",
    paths: &[],
    groups: &[&[
        honoured("effort", Kind::Text, r#""low""#),
        honoured("enabled", Kind::Flag, "true"),
        refused("exclude", "true", "reasoning is always sent, apart from the answer"),
        refused("max_tokens", "10", NO_BUDGET),
        harmless("summary", r#""auto""#, "reasoning is sent as it is"),
    ]],
};

/// Reasoning as DeepSeek and Zhipu name it.
pub(super) static THINKING: Form = Form {
    name: "ChatThinking",
    paths: &[],
    groups: &[&[
        required("type", Kind::Word(&["enabled", "disabled", "adaptive"]), r#""enabled""#),
        harmless(
            "budget_tokens",
            "1024",
            "a model thinks for as long as it does; max_tokens limits all of it",
        ),
        harmless("clear_thinking", "true", "the template decides which earlier reasoning stays"),
        harmless("display", r#""summarized""#, "reasoning is sent as it is"),
    ]],
};

static COMPLETIONS_OWN: [Field; 7] = [
    required("prompt", PROMPT, r#""A""#),
    honoured("suffix", Kind::Text, r#""""#),
    honoured("echo", Kind::Flag, "true"),
    honoured("logprobs", Kind::OneOf(&[Kind::Natural, Kind::Flag]), "1"),
    refused("top_logprobs", "2", "it is for chats: give logprobs a number"),
    refused("messages", r#"[{"role":"user","content":"x"}]"#, "messages are for chats"),
    refused("tools", r#"[{}]"#, "tools are for chats"),
];

/// A text, token ids, or several of these.
pub(super) const PROMPT: Kind =
    Kind::OneOf(&[Kind::Text, IDS, Kind::List(&Kind::Text), Kind::List(&IDS)]);

/// Fields of chats and completions.
static SHARED: [Field; 10] = [
    honoured("model", Kind::Text, r#""demo""#),
    honoured("max_tokens", Kind::Limit, "2"),
    alias("n_predict", "max_tokens", Kind::Limit, "2"),
    honoured("n", Kind::Natural, "1"),
    honoured("seed", Kind::Integer, "1"),
    honoured("stream", Kind::Flag, "false"),
    honoured("stream_options", Kind::Object(&STREAM_OPTIONS), r#"{"include_usage":true}"#),
    honoured("prompt_logprobs", Kind::Limit, "1"),
    refused_unless("best_of", &["1"], "2", "answers are not ranked: use n"),
    refused("use_beam_search", "true", "there is no beam search"),
];

static STREAM_OPTIONS: Form = Form {
    name: "StreamOptions",
    paths: &[],
    groups: &[&[
        honoured("include_usage", Kind::Flag, "true"),
        refused("continuous_usage_stats", "true", "usage is sent at the end"),
        harmless("include_obfuscation", "false", "parts are never padded"),
    ]],
};

const IDENTITY: &str = "it says who asks";
const ORDER: &str = "it is about the order of requests";

/// Fields that describe a request.
static DESCRIBING: [Field; 10] = [
    harmless("user", r#""me""#, IDENTITY),
    harmless("safety_identifier", r#""me""#, IDENTITY),
    harmless("metadata", r#"{"a":"b"}"#, "it is a label of the request"),
    harmless("store", "true", "answers to chats and completions are never stored"),
    harmless("service_tier", r#""auto""#, ORDER),
    harmless("prompt_cache_key", r#""k""#, super::messages::CACHES),
    harmless("prompt_cache_retention", r#""24h""#, super::messages::CACHES),
    harmless("prompt_cache_options", "{}", super::messages::CACHES),
    harmless("usage", r#"{"include":true}"#, "usage is always in the answer"),
    harmless("request_id", r#""r""#, "the header x-request-id says it"),
];

const SPECIAL: &str = "special tokens are never in the answer's text";

/// Fields of vLLM and SGLang.
static VLLM: [Field; 18] = [
    harmless("length_penalty", "1", "it belongs to beam search, which is off"),
    harmless("early_stopping", "true", "it belongs to beam search, which is off"),
    refused_unless("skip_special_tokens", &["true"], "false", SPECIAL),
    harmless("spaces_between_special_tokens", "true", SPECIAL),
    refused_unless("truncate_prompt_tokens", &["-1"], "5", "a prompt that is too long is refused"),
    refused("allowed_token_ids", "[7]", "use a grammar, or logit_bias"),
    refused_unless(
        "add_special_tokens",
        &["true"],
        "false",
        "the tokenizer and the template decide it",
    ),
    harmless("priority", "0", ORDER),
    harmless("cache_salt", r#""s""#, "the server decides who shares prompts"),
    harmless("kv_transfer_params", "{}", "there is one server"),
    refused("logits_processors", r#"["x"]"#, "this server runs no code of clients"),
    refused("vllm_xargs", r#"{"a":1}"#, "this server has no plugins"),
    refused("return_tokens_as_token_ids", "true", "tokens are texts"),
    refused("return_token_ids", "true", "use logprobs, or /tokenize"),
    refused("repetition_detection", r#"{"max_pattern_size":3}"#, "it is not supported"),
    refused("return_hidden_states", "true", "hidden states are not sent"),
    refused_unless("separate_reasoning", &["true"], "false", "reasoning is always sent apart"),
    harmless("stream_reasoning", "true", "reasoning is always streamed"),
];

/// Fields of llama.cpp's server.
static LLAMA_SERVER: [Field; 12] = [
    harmless("timings_per_token", "true", "include_statistics reports times"),
    harmless("return_progress", "true", "include_statistics reports times"),
    refused("return_tokens", "true", "use logprobs, or /tokenize"),
    refused("n_probs", "2", "logprobs reports probabilities"),
    refused("post_sampling_probs", "true", "probabilities are those of the model"),
    refused("samplers", r#"["top_k"]"#, "the order of the filters is fixed"),
    refused("response_fields", r#"["content"]"#, "it is for /completion and /infill"),
    refused_unless(
        "t_max_predict_ms",
        &["-1", "0"],
        "500",
        "there is no limit of time: use max_tokens",
    ),
    refused("n_indent", "4", "it is for /infill"),
    refused_unless("n_cmpl", &["1"], "2", "use n"),
    refused_unless("reasoning_budget", &["-1"], "100", NO_BUDGET),
    harmless("speculative.n_max", "0", "it is about speed, and never changes the answer"),
];

pub static EMBEDDINGS: Form = Form {
    name: "EmbeddingsRequest",
    paths: &["/v1/embeddings", "/embeddings"],
    groups: &[&[
        honoured("model", Kind::Text, r#""demo""#),
        required("input", PROMPT, r#""A""#),
        honoured("encoding_format", Kind::Word(&["float", "base64"]), r#""float""#),
        honoured("dimensions", Kind::Natural, "4"),
        honoured("pooling", Kind::Word(&["mean", "last"]), r#""mean""#),
        harmless("user", r#""me""#, IDENTITY),
        harmless("priority", "0", ORDER),
        harmless("request_id", r#""r""#, "the header x-request-id says it"),
        refused_unless("embd_normalize", &["2"], "-1", "embeddings have the length 1"),
        refused_unless("normalize", &["true"], "false", "embeddings have the length 1"),
        refused_unless(
            "truncate_prompt_tokens",
            &["-1"],
            "5",
            "a text that is too long is refused",
        ),
        refused_unless("add_special_tokens", &["true"], "false", "the tokenizer decides it"),
        refused("messages", r#"[{"role":"user","content":"x"}]"#, "give the text as input"),
        refused("content", r#""x""#, "give the text as input"),
        refused("input_type", r#""query""#, "put the model's words for it in front of the text"),
    ]],
};

pub static BATCH: Form = Form {
    name: "BatchRequest",
    paths: &["/v1/batches"],
    groups: &[&[
        required("input_file_id", Kind::Text, r#""file-1""#),
        required("endpoint", Kind::Text, r#""/v1/completions""#),
        required("completion_window", Kind::Text, r#""24h""#),
        honoured("metadata", Kind::Map(&Kind::Any), r#"{"a":"b"}"#),
        honoured(
            "output_expires_after",
            Kind::Map(&Kind::Any),
            r#"{"anchor":"created_at","seconds":3600}"#,
        ),
    ]],
};
