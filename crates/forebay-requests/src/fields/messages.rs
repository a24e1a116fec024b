//! Messages and tools in OpenAI's form.

use super::{
    Field, Form, Kind, Tagged, Variant, alias, harmless, honoured, refused, refused_unless,
    required,
};

const ONLY_TEXT: &str = "this model reads text only: images, sound and files are not supported";
const COPY: &str = "it repeats what other fields say";
pub(super) const CACHES: &str = "prompts that begin alike are always shared";

/// Roles of messages.
pub(super) const ROLES: Kind =
    Kind::Word(&["system", "developer", "user", "assistant", "tool", "function"]);

const CONTENT: Kind = Kind::OneOf(&[Kind::Text, Kind::List(&Kind::Tagged(&PART))]);

pub(super) static MESSAGE: Form = Form {
    name: "OpenAiMessage",
    paths: &[],
    groups: &[&[
        required("role", ROLES, r#""user""#),
        honoured("content", CONTENT, r#""Hello""#),
        honoured("name", Kind::Text, r#""Ada""#),
        honoured("tool_calls", Kind::List(&Kind::Object(&CALL)), "[]"),
        honoured("tool_call_id", Kind::Text, r#""call_1""#),
        honoured("reasoning_content", Kind::Text, r#""Hm.""#),
        alias("reasoning", "reasoning_content", Kind::Text, r#""Hm.""#),
        honoured("refusal", Kind::Text, r#""No.""#),
        honoured("prefix", Kind::Flag, "false"),
        honoured(
            "function_call",
            Kind::Object(&FUNCTION_CALL),
            r#"{"name":"look","arguments":"{}"}"#,
        ),
        harmless("reasoning_details", "[]", COPY),
        harmless("thinking_blocks", "[]", COPY),
        harmless("provider_specific_fields", "{}", COPY),
        harmless("parsed", "{}", COPY),
        harmless("annotations", "[]", "they point at sources of the text"),
        harmless("id", r#""msg_1""#, "messages have no identity"),
        harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
        harmless("weight", "1", "it is for training"),
        refused("audio", r#"{"id":"a"}"#, ONLY_TEXT),
        refused("images", r#"["x"]"#, ONLY_TEXT),
    ]],
};

/// Parts of a message's content.
static PART: Tagged = Tagged {
    name: "OpenAiPart",
    tag: "type",
    default: None,
    variants: &[
        ("text", Variant::Form(&TEXT_PART)),
        ("input_text", Variant::Form(&TEXT_PART)),
        ("output_text", Variant::Form(&TEXT_PART)),
        ("refusal", Variant::Form(&REFUSAL_PART)),
    ],
    others: Variant::Refused(ONLY_TEXT),
};

pub(super) static TEXT_PART: Form = Form {
    name: "TextPart",
    paths: &[],
    groups: &[&[
        required("text", Kind::Text, r#""Hello""#),
        harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
        harmless("annotations", "[]", "they point at sources of the text"),
        harmless("logprobs", "[]", "they say how the text came about"),
    ]],
};

pub(super) static REFUSAL_PART: Form = Form {
    name: "RefusalPart",
    paths: &[],
    groups: &[&[required("refusal", Kind::Text, r#""No.""#)]],
};

static CALL: Form = Form {
    name: "ToolCall",
    paths: &[],
    groups: &[&[
        honoured("id", Kind::Text, r#""call_1""#),
        honoured("type", Kind::Word(&["function"]), r#""function""#),
        honoured("function", Kind::Object(&FUNCTION_CALL), r#"{"name":"look","arguments":"{}"}"#),
        honoured("name", Kind::Text, r#""look""#),
        honoured("arguments", Kind::Any, r#""{}""#),
        harmless("index", "0", "calls have an order"),
        harmless("extra_content", "{}", COPY),
        harmless("provider_specific_fields", "{}", COPY),
        harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
    ]],
};

static FUNCTION_CALL: Form = Form {
    name: "FunctionCall",
    paths: &[],
    groups: &[&[
        required("name", Kind::Text, r#""look""#),
        honoured("arguments", Kind::Any, r#""{}""#),
        harmless("index", "0", "calls have an order"),
        harmless("provider_specific_fields", "{}", COPY),
    ]],
};

/// Tools of a chat.
pub(super) static TOOL: Tagged = Tagged {
    name: "OpenAiTool",
    tag: "type",
    default: Some("function"),
    variants: &[("function", Variant::Form(&TOOL_FUNCTION))],
    others: Variant::Refused("tools must be functions"),
};

static TOOL_FUNCTION: Form = Form {
    name: "Tool",
    paths: &[],
    groups: &[&[
        honoured("function", Kind::Object(&FUNCTION), r#"{"name":"look"}"#),
        honoured("name", Kind::Text, r#""look""#),
        honoured("description", Kind::Text, r#""Looks.""#),
        honoured("parameters", Kind::Any, r#"{"type":"object"}"#),
        harmless("strict", "true", STRICT),
        harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
    ]],
};

pub(super) const STRICT: &str =
    "the arguments of a call that `tool_choice` requires always follow the schema";

pub(super) static FUNCTION: Form = Form {
    name: "Function",
    paths: &[],
    groups: &[&[
        required("name", Kind::Text, r#""look""#),
        honoured("description", Kind::Text, r#""Looks.""#),
        honoured("parameters", Kind::Any, r#"{"type":"object"}"#),
        harmless("strict", "true", STRICT),
        harmless("cache_control", r#"{"type":"ephemeral"}"#, CACHES),
    ]],
};

/// Which tool must be called.
pub(super) const TOOL_CHOICE: Kind =
    Kind::OneOf(&[Kind::Word(&["none", "auto", "required", "any"]), Kind::Tagged(&CHOSEN)]);

static CHOSEN: Tagged = Tagged {
    name: "ToolChoice",
    tag: "type",
    default: Some("function"),
    variants: &[
        ("function", Variant::Form(&CHOSEN_FUNCTION)),
        ("tool", Variant::Form(&CHOSEN_FUNCTION)),
        ("custom", Variant::Form(&CHOSEN_FUNCTION)),
        ("allowed_tools", Variant::Form(&ALLOWED)),
        ("none", Variant::Form(&NOTHING)),
        ("auto", Variant::Form(&NOTHING)),
        ("any", Variant::Form(&NOTHING)),
        ("required", Variant::Form(&NOTHING)),
    ],
    others: Variant::Refused("only functions can be called"),
};

static NOTHING: Form = Form { name: "ToolChoiceMode", paths: &[], groups: &[] };

static CHOSEN_FUNCTION: Form = Form {
    name: "ChosenFunction",
    paths: &[],
    groups: &[&[
        honoured("function", Kind::Object(&NAMED), r#"{"name":"look"}"#),
        honoured("name", Kind::Text, r#""look""#),
    ]],
};

static NAMED: Form = Form {
    name: "NamedFunction",
    paths: &[],
    groups: &[&[required("name", Kind::Text, r#""look""#)]],
};

static ALLOWED: Form = Form {
    name: "AllowedTools",
    paths: &[],
    groups: &[&[
        honoured("allowed_tools", Kind::Object(&ALLOWED_SET), r#"{"tools":[]}"#),
        honoured("mode", Kind::Word(&["auto", "required"]), r#""auto""#),
        honoured("tools", Kind::List(&Kind::Tagged(&ALLOWED_TOOL)), "[]"),
    ]],
};

static ALLOWED_SET: Form = Form {
    name: "AllowedSet",
    paths: &[],
    groups: &[&[
        honoured("mode", Kind::Word(&["auto", "required"]), r#""auto""#),
        honoured("tools", Kind::List(&Kind::Tagged(&ALLOWED_TOOL)), "[]"),
    ]],
};

static ALLOWED_TOOL: Tagged = Tagged {
    name: "AllowedTool",
    tag: "type",
    default: Some("function"),
    variants: &[
        ("function", Variant::Form(&CHOSEN_FUNCTION)),
        ("custom", Variant::Form(&CHOSEN_FUNCTION)),
    ],
    others: Variant::LeftOut("this server offers functions and custom tools only"),
};

/// Tools in the form from before `tools`.
pub(super) static OLD_TOOLS: [Field; 2] = [
    honoured("functions", Kind::List(&Kind::Object(&FUNCTION)), r#"[{"name":"look"}]"#),
    honoured(
        "function_call",
        Kind::OneOf(&[Kind::Word(&["none", "auto"]), Kind::Object(&NAMED)]),
        r#""auto""#,
    ),
];

/// The form that an answer must have.
pub(super) static RESPONSE_FORMAT: Form = Form {
    name: "ResponseFormat",
    paths: &[],
    groups: &[&[
        required("type", Kind::Word(&["text", "json_object", "json_schema"]), r#""text""#),
        honoured("schema", Kind::Any, r#"{"type":"object"}"#),
        honoured("json_schema", Kind::Object(&NAMED_SCHEMA), r#"{"schema":{"type":"object"}}"#),
        harmless("name", r#""answer""#, "the name of a schema is a label"),
        harmless("description", r#""An answer.""#, "the description of a schema is a label"),
        harmless("strict", "true", "answers always follow the schema"),
    ]],
};

static NAMED_SCHEMA: Form = Form {
    name: "NamedSchema",
    paths: &[],
    groups: &[&[
        honoured("schema", Kind::Any, r#"{"type":"object"}"#),
        harmless("name", r#""answer""#, "the name of a schema is a label"),
        harmless("description", r#""An answer.""#, "the description of a schema is a label"),
        harmless("strict", "true", "answers always follow the schema"),
    ]],
};

/// Forms of an answer, by the fields of other servers.
pub(super) static FORMS_OF_ANSWER: [Field; 11] = [
    honoured("response_format", Kind::Object(&RESPONSE_FORMAT), r#"{"type":"text"}"#),
    honoured("structured_outputs", Kind::Object(&OUTPUTS), r#"{"regex":"a"}"#),
    honoured("json_schema", Kind::Any, r#"{"type":"object"}"#),
    honoured("grammar", Kind::Text, r#""root ::= \"a\"""#),
    honoured("guided_json", Kind::Any, r#"{"type":"object"}"#),
    honoured("guided_regex", Kind::Text, r#""a""#),
    honoured("guided_choice", Kind::List(&Kind::Text), r#"["yes","no"]"#),
    honoured("guided_grammar", Kind::Text, r#""start: \"a\"""#),
    harmless("guided_decoding_backend", r#""auto""#, "there is one parser"),
    refused("guided_whitespace_pattern", r#""[ ]*""#, "white space between parts of JSON is fixed"),
    refused("structural_tag", r#"{"type":"structural_tag"}"#, "use tools or a grammar"),
];

static OUTPUTS: Form = Form {
    name: "StructuredOutputs",
    paths: &[],
    groups: &[&[
        honoured("json", Kind::Any, r#"{"type":"object"}"#),
        honoured("regex", Kind::Text, r#""a""#),
        honoured("choice", Kind::List(&Kind::Text), r#"["yes","no"]"#),
        honoured("grammar", Kind::Text, r#""start: \"a\"""#),
        honoured("json_object", Kind::Flag, "true"),
        harmless("disable_fallback", "true", "there is one parser"),
        refused("disable_any_whitespace", "true", "white space between parts of JSON is fixed"),
        refused("whitespace_pattern", r#""[ ]*""#, "white space between parts of JSON is fixed"),
        refused_unless(
            "disable_additional_properties",
            &[],
            "true",
            "say additionalProperties in the schema",
        ),
        refused("structural_tag", r#""x""#, "use tools or a grammar"),
    ]],
};
