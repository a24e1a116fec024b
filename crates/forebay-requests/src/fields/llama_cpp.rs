//! Requests of llama.cpp's server.

use super::samplers::{ENDS, LLAMA_CPP, LLAMA_OTHERS, OWN, REPEAT, SLOTS, USUAL};
use super::{Field, Form, IDS, Kind, alias, harmless, honoured, refused, refused_unless, required};

/// Fields of completions and of filling in the middle.
static SHARED: [Field; 13] = [
    honoured("model", Kind::Text, r#""demo""#),
    honoured("n_predict", Kind::Limit, "2"),
    alias("max_tokens", "n_predict", Kind::Limit, "2"),
    alias("max_completion_tokens", "n_predict", Kind::Limit, "2"),
    honoured("seed", Kind::Integer, "1"),
    honoured("stream", Kind::Flag, "false"),
    honoured("response_fields", Kind::List(&Kind::Text), r#"["content"]"#),
    honoured("n_probs", Kind::Natural, "2"),
    alias("logprobs", "n_probs", Kind::Natural, "2"),
    refused("post_sampling_probs", "true", "probabilities are those before all filters"),
    honoured("return_tokens", Kind::Flag, "true"),
    harmless("timings_per_token", "true", "the last part has the times"),
    harmless("return_progress", "true", "the last part has the times"),
];

/// A prompt or several. Each of several has its own answers.
const PROMPTS: Kind = Kind::OneOf(&[
    Kind::Text,
    Kind::Object(&PROMPT),
    IDS,
    Kind::List(&Kind::OneOf(&[Kind::Text, Kind::Object(&PROMPT), IDS])),
]);

static PROMPT: Form = Form {
    name: "LlamaPrompt",
    paths: &[],
    groups: &[&[
        required("prompt_string", Kind::Text, r#""A""#),
        refused("multimodal_data", r#"["x"]"#, "this model reads text only"),
    ]],
};

pub static COMPLETION: Form = Form {
    name: "LlamaCompletionRequest",
    paths: &["/completion"],
    groups: &[
        &[
            required("prompt", PROMPTS, r#""A""#),
            honoured("json_schema", Kind::Any, r#"{"type":"object"}"#),
            honoured("grammar", Kind::Text, r#""root ::= \"a\"""#),
            honoured("n_cmpl", Kind::Natural, "1"),
            alias("n", "n_cmpl", Kind::Natural, "1"),
            refused("samplers", r#"["top_k"]"#, "the order of the filters is fixed"),
            refused("n_indent", "4", "it is for /infill"),
            refused_unless(
                "t_max_predict_ms",
                &["-1", "0"],
                "500",
                "there is no limit of time: use n_predict",
            ),
            refused("image_data", r#"["x"]"#, "this model reads text only"),
        ],
        &SHARED,
        &USUAL,
        &REPEAT,
        &ENDS,
        &OWN,
        &LLAMA_CPP,
        &SLOTS,
        &LLAMA_OTHERS,
    ],
};

pub static INFILL: Form = Form {
    name: "InfillRequest",
    paths: &["/infill"],
    groups: &[
        &[
            required("input_prefix", Kind::Text, r#""A""#),
            required("input_suffix", Kind::Text, r#""B""#),
            honoured("input_extra", Kind::List(&Kind::Object(&EXTRA)), r#"[{"text":"x"}]"#),
            honoured("prompt", Kind::Text, r#""A""#),
            harmless(
                "samplers",
                r#"["top_k","top_p","infill"]"#,
                "editors send it; the order of the filters is fixed",
            ),
            harmless("n_indent", "4", "editors send it; lines are indented as the model does"),
            harmless("t_max_predict_ms", "500", "editors send it; n_predict limits the time"),
            refused("grammar", r#""root ::= \"a\"""#, "it is for /completion"),
            refused("json_schema", r#"{"type":"object"}"#, "it is for /completion"),
        ],
        &SHARED,
        &USUAL,
        &REPEAT,
        &ENDS,
        &OWN,
        &LLAMA_CPP,
        &SLOTS,
        &LLAMA_OTHERS,
    ],
};

static EXTRA: Form = Form {
    name: "InfillExtra",
    paths: &[],
    groups: &[&[
        required("text", Kind::Text, r#""x""#),
        honoured("filename", Kind::Text, r#""a.rs""#),
        harmless("time", "1", "parts of files have an order"),
    ]],
};

pub static TOKENIZE: Form = Form {
    name: "TokenizeRequest",
    paths: &["/tokenize"],
    groups: &[&[
        honoured("model", Kind::Text, r#""demo""#),
        honoured("content", Kind::Text, r#""A""#),
        alias("prompt", "content", Kind::Text, r#""A""#),
        honoured("add_special", Kind::Flag, "true"),
        alias("add_special_tokens", "add_special", Kind::Flag, "true"),
        honoured("parse_special", Kind::Flag, "true"),
        honoured("with_pieces", Kind::Flag, "true"),
        refused("return_token_strs", "true", "use with_pieces"),
        refused("messages", r#"[{"role":"user","content":"x"}]"#, "use /apply-template first"),
    ]],
};

pub static DETOKENIZE: Form = Form {
    name: "DetokenizeRequest",
    paths: &["/detokenize"],
    groups: &[&[honoured("model", Kind::Text, r#""demo""#), required("tokens", IDS, "[1]")]],
};

/// A conversation whose prompt is asked for: a chat.
pub static APPLY_TEMPLATE: Form =
    Form { name: "ApplyTemplateRequest", paths: &["/apply-template"], groups: super::CHAT.groups };
