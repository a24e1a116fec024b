//! Requests of Anthropic's interface.

use super::messages::CACHES;
use super::samplers::OWN;
use super::{Field, Form, Kind, Tagged, Variant, harmless, honoured, refused, required};

const ONLY_TEXT: &str = "this model reads text only: images and documents are not supported";
const ONLY_CLAUDE: &str = "only Claude has it, and clients send it to every model";
const NO_IDENTITY: &str = "blocks have no identity here";

pub static ANTHROPIC: Form = Form {
    name: "AnthropicRequest",
    paths: &["/v1/messages", "/v1/messages/count_tokens"],
    groups: &[
        &[
            honoured("model", Kind::Text, r#""demo""#),
            required(
                "messages",
                Kind::List(&Kind::Object(&TURN)),
                r#"[{"role":"user","content":"A"}]"#,
            ),
            honoured("max_tokens", Kind::Integer, "2"),
            honoured("system", Kind::OneOf(&CONTENT), r#""Be brief.""#),
            honoured("stream", Kind::Flag, "false"),
            honoured("temperature", Kind::Number, "0.7"),
            honoured("top_p", Kind::Number, "0.9"),
            honoured("top_k", Kind::Count, "40"),
            honoured("stop_sequences", Kind::List(&Kind::Text), r#"["END"]"#),
            honoured(
                "tools",
                Kind::List(&Kind::Tagged(&TOOL)),
                r#"[{"name":"look","input_schema":{"type":"object"}}]"#,
            ),
            honoured("tool_choice", Kind::Object(&TOOL_CHOICE), r#"{"type":"auto"}"#),
            honoured(
                "output_format",
                Kind::Object(&OUTPUT_FORMAT),
                r#"{"type":"json_schema","schema":{"type":"object"}}"#,
            ),
            honoured("output_config", Kind::Object(&OUTPUT_CONFIG), r#"{"effort":"low"}"#),
            honoured("thinking", Kind::Object(&super::openai::THINKING), r#"{"type":"disabled"}"#),
            harmless("metadata", r#"{"user_id":"me"}"#, "it says who asks"),
            harmless("service_tier", r#""auto""#, "it is about the order of requests"),
            harmless("inference_geo", r#""eu""#, "there is one server"),
            harmless("speed", r#""fast""#, "it is about speed"),
            harmless("context_management", "{}", "the conversation is used as it is sent"),
            harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
            harmless("anthropic_version", r#""2023-06-01""#, "the header says it"),
            harmless("anthropic_beta", "[]", "the header says it"),
            harmless("betas", "[]", "the header says it"),
            refused("container", r#""c""#, "this server runs no code"),
            refused("mcp_servers", r#"[{"url":"x"}]"#, "this server calls no tools itself"),
            refused("stop", r#"["x"]"#, "it is stop_sequences here"),
        ],
        &OWN,
    ],
};

static TURN: Form = Form {
    name: "AnthropicTurn",
    paths: &[],
    groups: &[&[
        required("role", Kind::Word(&["user", "assistant", "system"]), r#""user""#),
        required("content", Kind::OneOf(&CONTENT), r#""Hello""#),
        harmless("id", r#""msg_1""#, NO_IDENTITY),
        harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
    ]],
};

/// A text or a list of blocks. Blocks may hold content, so this is no constant.
static CONTENT: [Kind; 2] = [Kind::Text, Kind::List(&BLOCK_KIND)];
static BLOCK_KIND: Kind = Kind::Tagged(&BLOCK);

static BLOCK: Tagged = Tagged {
    name: "AnthropicBlock",
    tag: "type",
    default: None,
    variants: &[
        ("text", Variant::Form(&TEXT)),
        ("thinking", Variant::Form(&THINKING_BLOCK)),
        ("redacted_thinking", Variant::LeftOut("only Anthropic's servers can read it")),
        ("tool_use", Variant::Form(&TOOL_USE)),
        ("server_tool_use", Variant::Form(&TOOL_USE)),
        ("mcp_tool_use", Variant::Form(&TOOL_USE)),
        ("tool_result", Variant::Form(&TOOL_RESULT)),
        ("mcp_tool_result", Variant::Form(&TOOL_RESULT)),
        ("web_search_tool_result", Variant::Form(&SERVER_RESULT)),
        ("web_fetch_tool_result", Variant::Form(&SERVER_RESULT)),
        ("code_execution_tool_result", Variant::Form(&SERVER_RESULT)),
        ("bash_code_execution_tool_result", Variant::Form(&SERVER_RESULT)),
        ("text_editor_code_execution_tool_result", Variant::Form(&SERVER_RESULT)),
        ("tool_search_tool_result", Variant::Form(&SERVER_RESULT)),
        ("search_result", Variant::Form(&SEARCH_RESULT)),
        ("tool_reference", Variant::LeftOut("all tools are in the prompt")),
        ("image", Variant::Refused(ONLY_TEXT)),
        ("document", Variant::Refused(ONLY_TEXT)),
        ("container_upload", Variant::Refused("this server runs no code")),
    ],
    others: Variant::Refused("this server does not know blocks of this type"),
};

static BLOCKS: [Field; 2] = [
    harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
    harmless("citations", "[]", "answers have no citations"),
];

static TEXT: Form = Form {
    name: "AnthropicText",
    paths: &[],
    groups: &[&[required("text", Kind::Text, r#""Hello""#)], &BLOCKS],
};

static THINKING_BLOCK: Form = Form {
    name: "AnthropicThinkingBlock",
    paths: &[],
    groups: &[
        &[
            required("thinking", Kind::Text, r#""Hm.""#),
            harmless("signature", r#""x""#, "thinking is not checked"),
        ],
        &BLOCKS,
    ],
};

static TOOL_USE: Form = Form {
    name: "AnthropicToolUse",
    paths: &[],
    groups: &[
        &[
            required("id", Kind::Text, r#""toolu_1""#),
            required("name", Kind::Text, r#""look""#),
            required("input", Kind::Any, "{}"),
            harmless("server_name", r#""s""#, NO_IDENTITY),
            harmless("caller", r#"{"type":"direct"}"#, NO_IDENTITY),
        ],
        &BLOCKS,
    ],
};

static TOOL_RESULT: Form = Form {
    name: "AnthropicToolResult",
    paths: &[],
    groups: &[
        &[
            required("tool_use_id", Kind::Text, r#""toolu_1""#),
            honoured("content", Kind::OneOf(&CONTENT), r#""42""#),
            harmless("is_error", "true", "the text of the result says it"),
        ],
        &BLOCKS,
    ],
};

static SERVER_RESULT: Form = Form {
    name: "AnthropicServerResult",
    paths: &[],
    groups: &[
        &[
            required("tool_use_id", Kind::Text, r#""srvtoolu_1""#),
            honoured("content", Kind::Any, "[]"),
            harmless("caller", r#"{"type":"direct"}"#, NO_IDENTITY),
        ],
        &BLOCKS,
    ],
};

static SEARCH_RESULT: Form = Form {
    name: "AnthropicSearchResult",
    paths: &[],
    groups: &[
        &[
            honoured("source", Kind::Text, r#""https://example.com""#),
            honoured("title", Kind::Text, r#""Foxes""#),
            required(
                "content",
                Kind::OneOf(&CONTENT),
                r#"[{"type":"text","text":"Foxes are red."}]"#,
            ),
        ],
        &BLOCKS,
    ],
};

static TOOL: Tagged = Tagged {
    name: "AnthropicOffer",
    tag: "type",
    default: Some("custom"),
    variants: &[("custom", Variant::Form(&CUSTOM))],
    others: Variant::LeftOut(ONLY_CLAUDE),
};

static CUSTOM: Form = Form {
    name: "AnthropicTool",
    paths: &[],
    groups: &[&[
        required("name", Kind::Text, r#""look""#),
        honoured("description", Kind::Text, r#""Looks.""#),
        honoured("input_schema", Kind::Any, r#"{"type":"object"}"#),
        harmless("strict", "true", super::messages::STRICT),
        harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
        harmless("defer_loading", "true", "all tools are in the prompt"),
        harmless("input_examples", "[]", "chat templates have no place for them"),
        harmless("allowed_callers", r#"["direct"]"#, "the model calls tools directly"),
        harmless("eager_input_streaming", "true", "arguments are streamed as they come"),
    ]],
};

static TOOL_CHOICE: Form = Form {
    name: "AnthropicToolChoice",
    paths: &[],
    groups: &[&[
        required("type", Kind::Word(&["auto", "any", "tool", "none"]), r#""auto""#),
        honoured("name", Kind::Text, r#""look""#),
        honoured("disable_parallel_tool_use", Kind::Flag, "true"),
    ]],
};

static OUTPUT_FORMAT: Form = Form {
    name: "AnthropicOutputFormat",
    paths: &[],
    groups: &[&[
        required("type", Kind::Word(&["json_schema"]), r#""json_schema""#),
        required("schema", Kind::Any, r#"{"type":"object"}"#),
        harmless("name", r#""answer""#, "the name of a schema is a label"),
    ]],
};

static OUTPUT_CONFIG: Form = Form {
    name: "AnthropicOutputConfig",
    paths: &[],
    groups: &[&[
        honoured("format", Kind::Object(&OUTPUT_FORMAT), r#"{"type":"json_schema","schema":{}}"#),
        honoured("effort", Kind::Text, r#""low""#),
        refused("task_budget", r#"{"total":1}"#, "use max_tokens"),
    ]],
};
