//! Requests of Ollama's interface.

use super::messages::{ROLES, TOOL};
use super::samplers::{LLAMA_CPP, OWN, USUAL};
use super::{Field, Form, Kind, TEXTS, alias, harmless, honoured, refused, required};

const ONLY_TEXT: &str = "this model reads text only: images are not supported";
const MACHINE: &str = "the options of the server decide how a model uses the machine";

static SHARED: [Field; 12] = [
    honoured("model", Kind::Text, r#""demo""#),
    honoured("stream", Kind::Flag, "false"),
    honoured("format", Kind::Any, r#""json""#),
    honoured("options", Kind::Object(&OPTIONS), r#"{"num_predict":2}"#),
    honoured("keep_alive", Kind::Any, r#""5m""#),
    honoured("think", THINK, "false"),
    honoured("logprobs", Kind::Flag, "true"),
    honoured("top_logprobs", Kind::Natural, "0"),
    refused("images", r#"["x"]"#, ONLY_TEXT),
    harmless("truncate", "true", "a prompt that is too long is refused"),
    harmless("shift", "true", "the context is never shifted"),
    refused(
        "template",
        r#""{{ .Prompt }}""#,
        "the template is the model's own; raw sends a prompt as it is",
    ),
];

/// Whether and how much a model thinks.
const THINK: Kind = Kind::OneOf(&[Kind::Flag, Kind::Text]);

pub static OLLAMA_CHAT: Form = Form {
    name: "OllamaChatRequest",
    paths: &["/api/chat"],
    groups: &[
        &[
            honoured(
                "messages",
                Kind::List(&Kind::Object(&MESSAGE)),
                r#"[{"role":"user","content":"A"}]"#,
            ),
            honoured("tools", Kind::List(&Kind::Tagged(&TOOL)), "[]"),
            refused("prompt", r#""x""#, "a prompt is for /api/generate"),
        ],
        &SHARED,
        &OWN,
    ],
};

pub static OLLAMA_GENERATE: Form = Form {
    name: "OllamaGenerateRequest",
    paths: &["/api/generate"],
    groups: &[
        &[
            honoured("prompt", Kind::Text, r#""A""#),
            honoured("suffix", Kind::Text, r#""""#),
            honoured("system", Kind::Text, r#""Be brief.""#),
            honoured("raw", Kind::Flag, "true"),
            refused("context", "[1]", "send the conversation to /api/chat"),
            refused("messages", r#"[{"role":"user","content":"x"}]"#, "messages are for /api/chat"),
        ],
        &SHARED,
        &OWN,
    ],
};

static MESSAGE: Form = Form {
    name: "OllamaMessage",
    paths: &[],
    groups: &[&[
        required("role", ROLES, r#""user""#),
        honoured("content", Kind::Text, r#""Hello""#),
        honoured("tool_calls", Kind::List(&Kind::Object(&CALL)), "[]"),
        honoured("reasoning_content", Kind::Text, r#""Hm.""#),
        alias("thinking", "reasoning_content", Kind::Text, r#""Hm.""#),
        honoured("name", Kind::Text, r#""look""#),
        alias("tool_name", "name", Kind::Text, r#""look""#),
        honoured("tool_call_id", Kind::Text, r#""call_1""#),
        refused("images", r#"["x"]"#, ONLY_TEXT),
    ]],
};

static CALL: Form = Form {
    name: "OllamaToolCall",
    paths: &[],
    groups: &[&[
        required("function", Kind::Object(&FUNCTION), r#"{"name":"look","arguments":{}}"#),
        honoured("id", Kind::Text, r#""call_1""#),
        harmless("type", r#""function""#, "calls are of functions"),
    ]],
};

static FUNCTION: Form = Form {
    name: "OllamaFunctionCall",
    paths: &[],
    groups: &[&[
        required("name", Kind::Text, r#""look""#),
        honoured("arguments", Kind::Any, "{}"),
        harmless("index", "0", "calls have an order"),
        harmless("description", r#""x""#, "the tool has it"),
    ]],
};

static OPTIONS: Form = Form {
    name: "OllamaOptions",
    paths: &[],
    groups: &[
        &USUAL,
        &LLAMA_CPP,
        &[
            honoured("num_predict", Kind::Limit, "2"),
            honoured("seed", Kind::Integer, "1"),
            honoured("repeat_penalty", Kind::Number, "1.1"),
            honoured("repeat_last_n", Kind::Integer, "64"),
            honoured("stop", TEXTS, r#"["END"]"#),
            harmless(
                "num_ctx",
                "4096",
                "the server decides the length of the context; a prompt that is too long is refused",
            ),
            harmless("num_keep", "4", "the context is never shifted"),
            harmless("num_batch", "512", MACHINE),
            harmless("num_gpu", "99", MACHINE),
            harmless("num_gqa", "1", MACHINE),
            harmless("main_gpu", "0", MACHINE),
            harmless("num_thread", "4", MACHINE),
            harmless("low_vram", "true", MACHINE),
            harmless("numa", "true", MACHINE),
            harmless("use_mmap", "true", MACHINE),
            harmless("use_mlock", "true", MACHINE),
            harmless("f16_kv", "true", MACHINE),
            harmless("vocab_only", "false", MACHINE),
            harmless("logits_all", "false", MACHINE),
            harmless("embedding_only", "false", MACHINE),
            harmless("rope_frequency_base", "0", "the model's file says it"),
            harmless("rope_frequency_scale", "0", "the model's file says it"),
        ],
    ],
};

pub static OLLAMA_EMBED: Form = Form {
    name: "OllamaEmbedRequest",
    paths: &["/api/embed", "/api/embeddings"],
    groups: &[&[
        honoured("model", Kind::Text, r#""demo""#),
        honoured("input", super::openai::PROMPT, r#""A""#),
        honoured("prompt", Kind::Text, r#""A""#),
        honoured("truncate", Kind::Flag, "true"),
        honoured("dimensions", Kind::Natural, "4"),
        honoured("keep_alive", Kind::Any, r#""5m""#),
        harmless(
            "options",
            r#"{"num_ctx":4096}"#,
            "nothing is sampled, and the server decides the length of the context",
        ),
    ]],
};

pub static OLLAMA_NAME: Form = Form {
    name: "OllamaNameRequest",
    paths: &["/api/show", "/api/pull", "/api/delete"],
    groups: &[&[
        honoured("model", Kind::Text, r#""demo""#),
        alias("name", "model", Kind::Text, r#""demo""#),
        honoured("stream", Kind::Flag, "false"),
        harmless("verbose", "true", "the description is always whole"),
        harmless("insecure", "true", "models come over HTTPS"),
        harmless("username", r#""me""#, "the server has its own token"),
        harmless("password", r#""x""#, "the server has its own token"),
        refused("system", r#""x""#, "a description is that of the model"),
        refused("template", r#""x""#, "a description is that of the model"),
        refused("options", r#"{"seed":1}"#, "a description is that of the model"),
    ]],
};

pub static OLLAMA_COPY: Form = Form {
    name: "OllamaCopyRequest",
    paths: &["/api/copy"],
    groups: &[&[
        required("source", Kind::Text, r#""demo""#),
        required("destination", Kind::Text, r#""copy""#),
    ]],
};
