//! Requests of OpenAI's Responses.

use super::messages::{REFUSAL_PART, STRICT, TEXT_PART, TOOL_CHOICE};
use super::samplers::OWN;
use super::{Form, Kind, Tagged, Variant, harmless, honoured, refused, refused_unless, required};

const ONLY_TEXT: &str = "this model reads text only: images and files are not supported";
const NO_IDENTITY: &str = "items have no identity here";
const CACHES: &str = super::messages::CACHES;
const IDENTITY: &str = "it says who asks";

pub static RESPONSES: Form = Form {
    name: "ResponsesRequest",
    paths: &["/v1/responses", "/v1/responses/input_tokens"],
    groups: &[
        &[
            honoured("model", Kind::Text, r#""demo""#),
            honoured(
                "input",
                Kind::OneOf(&[Kind::Text, Kind::List(&Kind::Tagged(&ITEM))]),
                r#""A""#,
            ),
            honoured("instructions", Kind::Text, r#""Be brief.""#),
            honoured(
                "tools",
                Kind::List(&Kind::Tagged(&TOOL)),
                r#"[{"type":"function","name":"look"}]"#,
            ),
            honoured("tool_choice", TOOL_CHOICE, r#""auto""#),
            honoured("parallel_tool_calls", Kind::Flag, "false"),
            honoured("temperature", Kind::Number, "0.7"),
            honoured("top_p", Kind::Number, "0.9"),
            honoured("max_output_tokens", Kind::Limit, "2"),
            honoured("stream", Kind::Flag, "false"),
            honoured("store", Kind::Flag, "false"),
            honoured("previous_response_id", Kind::Text, "null"),
            honoured("reasoning", Kind::Object(&REASONING), r#"{"effort":"low"}"#),
            honoured("text", Kind::Object(&TEXT), r#"{"format":{"type":"text"}}"#),
            honoured("metadata", Kind::Map(&Kind::Any), r#"{"a":"b"}"#),
            refused("top_logprobs", "2", "it is for /v1/chat/completions"),
            refused("background", "true", "leave it out, or use /v1/batches"),
            refused("prompt", r#"{"id":"p"}"#, "this server stores no prompts: send instructions"),
            refused("conversation", r#""conv_1""#, "use previous_response_id"),
            refused_unless(
                "truncation",
                &[r#""disabled""#],
                r#""auto""#,
                "a prompt that is too long is refused",
            ),
            refused(
                "context_management",
                r#"[{"type":"compaction"}]"#,
                "this server does not shorten conversations",
            ),
            harmless(
                "include",
                r#"["reasoning.encrypted_content"]"#,
                "reasoning is sent as it is, and there are no other tools",
            ),
            harmless("max_tool_calls", "3", "it is for tools that OpenAI's servers run"),
            harmless(
                "stream_options",
                r#"{"include_obfuscation":false}"#,
                "parts are never padded",
            ),
            harmless("prompt_cache_key", r#""k""#, CACHES),
            harmless("prompt_cache_retention", r#""24h""#, CACHES),
            harmless("safety_identifier", r#""me""#, IDENTITY),
            harmless("user", r#""me""#, IDENTITY),
            harmless("client_metadata", "{}", IDENTITY),
            harmless("service_tier", r#""auto""#, "it is about the order of requests"),
        ],
        &OWN,
    ],
};

static REASONING: Form = Form {
    name: "ResponsesReasoning",
    paths: &[],
    groups: &[&[
        honoured("effort", Kind::Text, r#""low""#),
        harmless("summary", r#""auto""#, "reasoning is sent as it is"),
        harmless("generate_summary", r#""auto""#, "reasoning is sent as it is"),
        harmless("context", r#""auto""#, "the template decides which earlier reasoning stays"),
    ]],
};

static TEXT: Form = Form {
    name: "ResponsesText",
    paths: &[],
    groups: &[&[
        honoured("format", Kind::Object(&super::messages::RESPONSE_FORMAT), r#"{"type":"text"}"#),
        refused_unless(
            "verbosity",
            &[r#""medium""#],
            r#""low""#,
            "ask for a short or long answer in the instructions",
        ),
    ]],
};

static TOOL: Tagged = Tagged {
    name: "ResponsesTool",
    tag: "type",
    default: Some("function"),
    variants: &[("function", Variant::Form(&FUNCTION)), ("custom", Variant::Form(&CUSTOM))],
    others: Variant::LeftOut("only OpenAI's servers run it, and clients send it to every model"),
};

static FUNCTION: Form = Form {
    name: "ResponsesFunction",
    paths: &[],
    groups: &[&[
        required("name", Kind::Text, r#""look""#),
        honoured("description", Kind::Text, r#""Looks.""#),
        honoured("parameters", Kind::Any, r#"{"type":"object"}"#),
        harmless("strict", "true", STRICT),
        harmless("defer_loading", "true", "all tools are in the prompt"),
        harmless("output_schema", "{}", "chat templates have no place for it"),
    ]],
};

/// A tool whose input is a text.
static CUSTOM: Form = Form {
    name: "ResponsesCustomTool",
    paths: &[],
    groups: &[&[
        required("name", Kind::Text, r#""patch""#),
        honoured("description", Kind::Text, r#""Patches.""#),
        honoured("format", Kind::Object(&CUSTOM_FORMAT), r#"{"type":"text"}"#),
        harmless("defer_loading", "true", "all tools are in the prompt"),
    ]],
};

/// What the input of a custom tool looks like. A grammar is shown to the model.
static CUSTOM_FORMAT: Form = Form {
    name: "ResponsesCustomFormat",
    paths: &[],
    groups: &[&[
        required("type", Kind::Word(&["text", "grammar"]), r#""text""#),
        honoured("syntax", Kind::Word(&["lark", "regex"]), r#""lark""#),
        honoured("definition", Kind::Text, r#""start: \"a\"""#),
    ]],
};

/// Items of a conversation. Calls of tools that are no functions are shown to the model as calls of functions.
static ITEM: Tagged = Tagged {
    name: "ResponsesItem",
    tag: "type",
    default: Some("message"),
    variants: &[
        ("message", Variant::Form(&MESSAGE)),
        ("reasoning", Variant::Form(&REASONING_ITEM)),
        ("function_call", Variant::Form(&FUNCTION_CALL)),
        ("function_call_output", Variant::Form(&OUTPUT)),
        ("custom_tool_call", Variant::Form(&CUSTOM_CALL)),
        ("custom_tool_call_output", Variant::Form(&OUTPUT)),
        ("local_shell_call", Variant::Form(&ACTION_CALL)),
        ("local_shell_call_output", Variant::Form(&OUTPUT)),
        ("shell_call", Variant::Form(&ACTION_CALL)),
        ("shell_call_output", Variant::Form(&OUTPUT)),
        ("apply_patch_call", Variant::Form(&ACTION_CALL)),
        ("apply_patch_call_output", Variant::Form(&OUTPUT)),
        ("mcp_call", Variant::Form(&ANSWERED_CALL)),
        ("code_interpreter_call", Variant::Form(&ANSWERED_CALL)),
        ("file_search_call", Variant::Form(&ANSWERED_CALL)),
        (
            "web_search_call",
            Variant::LeftOut(
                "it says only that OpenAI's server searched; what it found is in the answer",
            ),
        ),
        ("mcp_list_tools", Variant::LeftOut("it lists tools that only OpenAI's servers run")),
        ("item_reference", Variant::Refused("send the item itself")),
        ("image_generation_call", Variant::Refused(ONLY_TEXT)),
        ("computer_call", Variant::Refused(ONLY_TEXT)),
        ("computer_call_output", Variant::Refused(ONLY_TEXT)),
        ("compaction", Variant::Refused("only OpenAI's servers can read it")),
    ],
    others: Variant::Refused("this server does not know items of this type"),
};

static MESSAGE: Form = Form {
    name: "ResponsesMessage",
    paths: &[],
    groups: &[&[
        required("role", Kind::Word(&["user", "assistant", "system", "developer"]), r#""user""#),
        honoured("content", CONTENT, r#""Hello""#),
        harmless("id", r#""msg_1""#, NO_IDENTITY),
        harmless("status", r#""completed""#, NO_IDENTITY),
        harmless("phase", r#""final_answer""#, "it is about how clients show a message"),
        harmless("end_turn", "true", "turns end by the roles of messages"),
    ]],
};

const CONTENT: Kind = Kind::OneOf(&[Kind::Text, Kind::List(&Kind::Tagged(&PART))]);

static PART: Tagged = Tagged {
    name: "ResponsesPart",
    tag: "type",
    default: None,
    variants: &[
        ("input_text", Variant::Form(&TEXT_PART)),
        ("output_text", Variant::Form(&TEXT_PART)),
        ("text", Variant::Form(&TEXT_PART)),
        ("reasoning_text", Variant::Form(&TEXT_PART)),
        ("summary_text", Variant::Form(&TEXT_PART)),
        ("refusal", Variant::Form(&REFUSAL_PART)),
    ],
    others: Variant::Refused(ONLY_TEXT),
};

static REASONING_ITEM: Form = Form {
    name: "ReasoningItem",
    paths: &[],
    groups: &[&[
        honoured("content", CONTENT, "[]"),
        honoured("summary", CONTENT, "[]"),
        harmless("encrypted_content", r#""x""#, "only OpenAI's servers can read it"),
        harmless("id", r#""rs_1""#, NO_IDENTITY),
        harmless("status", r#""completed""#, NO_IDENTITY),
    ]],
};

static FUNCTION_CALL: Form = Form {
    name: "FunctionCallItem",
    paths: &[],
    groups: &[&[
        required("call_id", Kind::Text, r#""call_1""#),
        required("name", Kind::Text, r#""look""#),
        required("arguments", Kind::Text, r#""{}""#),
        harmless("namespace", r#""x""#, NO_IDENTITY),
        harmless("id", r#""fc_1""#, NO_IDENTITY),
        harmless("status", r#""completed""#, NO_IDENTITY),
    ]],
};

static OUTPUT: Form = Form {
    name: "CallOutputItem",
    paths: &[],
    groups: &[&[
        honoured("call_id", Kind::Text, r#""call_1""#),
        honoured("id", Kind::Text, r#""call_1""#),
        honoured("output", Kind::Any, r#""42""#),
        honoured("status", Kind::Text, r#""completed""#),
        harmless("name", r#""look""#, "the call says it"),
        harmless("max_output_length", "1000", "the client cut the output"),
        harmless("created_by", r#""me""#, NO_IDENTITY),
    ]],
};

static CUSTOM_CALL: Form = Form {
    name: "CustomCallItem",
    paths: &[],
    groups: &[&[
        required("call_id", Kind::Text, r#""call_1""#),
        required("name", Kind::Text, r#""patch""#),
        required("input", Kind::Text, r#""x""#),
        harmless("namespace", r#""x""#, NO_IDENTITY),
        harmless("id", r#""ctc_1""#, NO_IDENTITY),
        harmless("status", r#""completed""#, NO_IDENTITY),
    ]],
};

static ACTION_CALL: Form = Form {
    name: "ActionCallItem",
    paths: &[],
    groups: &[&[
        honoured("call_id", Kind::Text, r#""call_1""#),
        honoured("id", Kind::Text, r#""sh_1""#),
        honoured("action", Kind::Map(&Kind::Any), r#"{"type":"exec","command":["ls"]}"#),
        honoured("operation", Kind::Map(&Kind::Any), r#"{"type":"delete_file","path":"a"}"#),
        harmless("environment", "{}", "the client runs the call"),
        harmless("status", r#""completed""#, NO_IDENTITY),
        harmless("created_by", r#""me""#, NO_IDENTITY),
    ]],
};

static ANSWERED_CALL: Form = Form {
    name: "AnsweredCallItem",
    paths: &[],
    groups: &[&[
        honoured("id", Kind::Text, r#""mcp_1""#),
        honoured("name", Kind::Text, r#""look""#),
        honoured("arguments", Kind::Text, r#""{}""#),
        honoured("code", Kind::Text, r#""1+1""#),
        honoured("queries", Kind::List(&Kind::Text), r#"["x"]"#),
        honoured("output", Kind::Any, r#""42""#),
        honoured("outputs", Kind::Any, "[]"),
        honoured("results", Kind::Any, "[]"),
        honoured("error", Kind::Any, r#""no""#),
        harmless("server_label", r#""s""#, NO_IDENTITY),
        harmless("container_id", r#""c""#, NO_IDENTITY),
        harmless("approval_request_id", r#""a""#, NO_IDENTITY),
        harmless("status", r#""completed""#, NO_IDENTITY),
    ]],
};
