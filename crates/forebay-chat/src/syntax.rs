//! Syntax of reasoning and of tool calls, and its recognition from a chat template.

use forebay_text::ChatTemplate;
use serde_json::{Value, json};

use crate::{SuffixedMarks, probe};

/// Marks around reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThinkMarks {
    /// `<think>...</think>`
    Tags,
    /// Mistral: `[THINK]...[/THINK]`
    Brackets,
    /// Gemma 4: `<|channel>thought\n...<channel|>`
    Channel,
    /// MiniMax M3: `<mm:think>...</mm:think>`
    MiniMax,
    /// ERNIE 4.5 and Granite 3: `<think>...</think>`, and `<response>...</response>` around the answer
    Response,
    /// Hunyuan: `<think>...</think>`, and `<answer>...</answer>` around the answer
    Answer,
    /// Seed-OSS: `<seed:think>...</seed:think>`
    Seed,
    /// Hy3 and Hy4: `<think:SUFFIX>...</think:SUFFIX>`
    Suffixed(&'static SuffixedMarks),
    /// Command A+: `<|START_THINKING|>...<|END_THINKING|>`, and `<|START_TEXT|>...<|END_TEXT|>` around the answer
    Cohere,
    /// Kimi K3: `<|open|>think<|sep|>...<|close|>think<|sep|>`, and the same around the `response`
    Kimi3,
    /// Solar Open: `<|think|>...<|end|>`, then `<|begin|>assistant<|content|>...<|end|>`
    Solar,
}

impl ThinkMarks {
    /// Returns the marks that a template uses. `has_token` tells which tokens the vocabulary has.
    pub fn recognise(
        source: &str,
        suffixed: Option<&'static SuffixedMarks>,
        has_token: impl Fn(&str) -> bool,
    ) -> Option<ThinkMarks> {
        if let Some(marks) = suffixed.filter(|marks| !marks.suffix.is_empty()) {
            Some(ThinkMarks::Suffixed(marks))
        } else if source.contains("<seed:think>") {
            Some(ThinkMarks::Seed)
        } else if source.contains("<|START_THINKING|>") && source.contains("<|START_TEXT|>") {
            Some(ThinkMarks::Cohere)
        } else if is_kimi3(source) {
            Some(ThinkMarks::Kimi3)
        } else if source.contains("<|think|>") && source.contains("<|tool_call:begin|>") {
            Some(ThinkMarks::Solar)
        } else if source.contains("[/THINK]") {
            Some(ThinkMarks::Brackets)
        } else if source.contains("<channel|>") {
            Some(ThinkMarks::Channel)
        } else if source.contains("</mm:think>") {
            Some(ThinkMarks::MiniMax)
        } else if source.contains("</think>") && has_response(source) {
            Some(ThinkMarks::Response)
        } else if source.contains("<think>")
            || source.contains("</think>")
            || has_token("<think>") && has_token("</think>")
        {
            Some(if is_hunyuan(source) { ThinkMarks::Answer } else { ThinkMarks::Tags })
        } else if suffixed.is_some() && source.contains("think") {
            // The template puts its marks together.
            Some(ThinkMarks::Tags)
        } else {
            None
        }
    }

    /// Returns the text that begins reasoning.
    pub fn open(self) -> &'static str {
        match self {
            ThinkMarks::Tags | ThinkMarks::Response | ThinkMarks::Answer => "<think>",
            ThinkMarks::Brackets => "[THINK]",
            ThinkMarks::Channel => "<|channel>thought",
            ThinkMarks::MiniMax => "<mm:think>",
            ThinkMarks::Seed => "<seed:think>",
            ThinkMarks::Suffixed(marks) => marks.think[0],
            ThinkMarks::Cohere => "<|START_THINKING|>",
            ThinkMarks::Kimi3 => "<|open|>think<|sep|>",
            ThinkMarks::Solar => "<|think|>",
        }
    }

    /// Returns the token that [`open`](ThinkMarks::open) begins with.
    pub fn open_token(self) -> &'static str {
        match self {
            ThinkMarks::Channel => "<|channel>",
            ThinkMarks::Kimi3 => "<|open|>",
            other => other.open(),
        }
    }

    pub fn close(self) -> &'static str {
        match self {
            ThinkMarks::Tags | ThinkMarks::Response | ThinkMarks::Answer => "</think>",
            ThinkMarks::Brackets => "[/THINK]",
            ThinkMarks::Channel => "<channel|>",
            ThinkMarks::MiniMax => "</mm:think>",
            ThinkMarks::Seed => "</seed:think>",
            ThinkMarks::Suffixed(marks) => marks.think[1],
            ThinkMarks::Cohere => "<|END_THINKING|>",
            ThinkMarks::Kimi3 => "<|close|>think<|sep|>",
            ThinkMarks::Solar => "<|end|>",
        }
    }

    /// Returns the marks around the answer that follows the reasoning.
    pub fn around_answer(self) -> Option<[&'static str; 2]> {
        match self {
            ThinkMarks::Response => Some(["<response>", "</response>"]),
            ThinkMarks::Answer => Some(["<answer>", "</answer>"]),
            ThinkMarks::Cohere => Some(["<|START_TEXT|>", "<|END_TEXT|>"]),
            ThinkMarks::Kimi3 => Some(["<|open|>response<|sep|>", "<|close|>response<|sep|>"]),
            _ => None,
        }
    }

    /// Returns the mark that is before the text of every answer.
    pub fn begins_answer(self) -> Option<&'static str> {
        match self {
            ThinkMarks::Cohere => Some("<|START_TEXT|>"),
            ThinkMarks::Kimi3 => Some("<|open|>response<|sep|>"),
            ThinkMarks::Solar => Some("<|content|>"),
            _ => None,
        }
    }

    /// Returns the texts between the end of the reasoning and the first call, with others between them.
    pub fn before_calls(self) -> &'static [&'static str] {
        match self {
            ThinkMarks::Kimi3 => &["<|close|>response<|sep|>"],
            ThinkMarks::Solar => &["<|begin|>assistant"],
            _ => &[],
        }
    }

    /// Returns marks of an answer that are no part of its text, besides those around it.
    pub fn dropped(self) -> &'static [&'static str] {
        match self {
            ThinkMarks::Kimi3 => &["<|close|>message<|sep|>", "<|end_of_msg|>"],
            ThinkMarks::Solar => &["<|begin|>assistant", "<|content|>", "<|end|>"],
            _ => &[],
        }
    }

    /// Returns the variable that turns thinking off and on, and its values for both, if it is one that only this
    /// family has.
    pub fn switch(self) -> Option<(&'static str, [Value; 2])> {
        match self {
            ThinkMarks::Seed => Some(("thinking_budget", [json!(0), json!(-1)])),
            ThinkMarks::Suffixed(_) => {
                Some(("reasoning_effort", [json!("no_think"), json!("high")]))
            }
            ThinkMarks::Cohere => Some(("reasoning", [json!(false), json!(true)])),
            _ => None,
        }
    }

    /// Returns true if a token is a mark, or a part of one.
    pub fn has_token(self, token: &str) -> bool {
        let parts: &[&str] = match self {
            ThinkMarks::Kimi3 => &["<|close|>", "<|sep|>"],
            ThinkMarks::Solar => &["<|begin|>"],
            _ => &[],
        };
        token == self.open_token()
            || token == self.close()
            || self.around_answer().is_some_and(|around| around.contains(&token))
            || self.dropped().contains(&token)
            || parts.contains(&token)
    }
}

/// Returns true if the template has the marks of Hunyuan's messages: those of A13B, or those of the dense models.
fn is_hunyuan(source: &str) -> bool {
    let has = |text: &str| source.contains(text);
    has("<|startoftext|>") && has("<|extra_0|>") || has("<｜hy_Assistant｜>")
}

/// Returns true if the template has the marks of Kimi K3.
fn is_kimi3(source: &str) -> bool {
    ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"].iter().all(|mark| source.contains(mark))
}

/// Returns true if answers are between `<response>` and `</response>`. MiniMax has these marks around results of tools.
fn has_response(source: &str) -> bool {
    let has = |text: &str| source.contains(text);
    has("<response>") && has("</response>") && !has("minimax")
}

/// Syntax of a family's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolSyntax {
    /// Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    Json,
    /// Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron 3:
    /// `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
    FunctionTags,
    /// GLM: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`. `compact` says that there
    /// are no line ends between the tags, as since GLM-4.7.
    ArgumentTags { compact: bool },
    /// DeepSeek V3, R1 and V3.1: `<｜tool▁call▁begin｜>...<｜tool▁call▁end｜>`. `fenced` says that the arguments are in a
    /// code block, as in V3 and R1.
    DeepSeek { fenced: bool },
    /// DeepSeek V3.2 and V4: `<｜DSML｜function_calls><｜DSML｜invoke name="NAME">...`.
    Dsml(DsmlNames),
    /// MiniMax M2: `<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>...`.
    MiniMax,
    /// MiniMax M3: as M2, with a mark before each tag, the parameter's name as the tag, and tags within lists and objects.
    MiniMax3,
    /// Kimi K2 and Kimi Linear: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.
    Kimi,
    /// FunctionGemma: `<start_function_call>call:NAME{KEY:<escape>TEXT<escape>}<end_function_call>`.
    FunctionGemma,
    /// Gemma 4: `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>}<tool_call|>`.
    Gemma4,
    /// Mistral until 2025: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`. `spaced` says that a space follows the mark.
    MistralList { spaced: bool },
    /// Mistral since 2025: `[TOOL_CALLS]NAME[ARGS]{...}`. `call_id` says that `[CALL_ID]` and an id follow the name.
    MistralArguments { call_id: bool },
    /// Llama 3 and 4: `{"name": ..., "parameters": {...}}` without marks.
    Llama,
    /// Calls in the form of Python without marks: `[NAME(KEY="TEXT"), ...]`.
    Python,
    /// LFM2: `<|tool_call_start|>[NAME(KEY="TEXT"), ...]<|tool_call_end|>`. The list may also be of JSON objects.
    Lfm2,
    /// OLMo 3: `<function_calls>NAME(KEY="TEXT")</function_calls>`, one call in each line, with values in JSON.
    Olmo3,
    /// A list of JSON objects that needs no closing mark: `<|tool_call|>[{"name": ..., "arguments": {...}}]`.
    MarkedList(ListMarks),
    /// Nemotron Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`.
    Nemotron2,
    /// Hunyuan-A13B and Jamba: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`.
    Hunyuan,
    /// Seed-OSS: `<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>`.
    Seed,
    /// Hy3 and Hy4: `<tool_call:SUFFIX>NAME<arg_key:SUFFIX>KEY</arg_key:SUFFIX><arg_value:SUFFIX>...`.
    Suffixed(&'static SuffixedMarks),
    /// Command A+: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`.
    Cohere,
    /// Kimi K3: `<|open|>call tool="NAME" index="1"<|sep|><|open|>argument key="KEY" type="string"<|sep|>VALUE...`.
    Kimi3,
    /// Solar Open: `<|tool_call:begin|>ID<|tool_call:name|>NAME<|tool_call:args|>{...}<|tool_call:end|>`.
    Solar,
    /// Muse: `<atem:function_calls><atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter>...`.
    Atem,
    /// Newer dots models: as MiniMax M2, within `<dots_function_call>`.
    Dots,
}

/// Names of the elements of a [`ToolSyntax::Dsml`] block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DsmlNames {
    /// DeepSeek V3.2: `function_calls`, `invoke` and `parameter`.
    V32,
    /// DeepSeek V4: `tool_calls`, `invoke` and `parameter`.
    V4,
    /// DeepSeek V4.1: ` calls`, ` invoke` and ` parameter`, with a space before each.
    V41,
}

impl DsmlNames {
    fn recognise(source: &str) -> DsmlNames {
        let has = |text: &str| source.contains(text);
        if has("｜DSML｜ calls") || has("' calls>") || has("\" calls>") {
            DsmlNames::V41
        } else if has("function_calls") {
            DsmlNames::V32
        } else {
            DsmlNames::V4
        }
    }

    /// Returns the marks around the block.
    pub(crate) fn block(self) -> [&'static str; 2] {
        match self {
            DsmlNames::V32 => ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>"],
            DsmlNames::V4 => ["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"],
            DsmlNames::V41 => ["<｜DSML｜ calls>", "</｜DSML｜ calls>"],
        }
    }

    /// Returns what the tags within the block begin with.
    pub(crate) fn tags(self) -> [&'static str; 2] {
        match self {
            DsmlNames::V32 | DsmlNames::V4 => ["<｜DSML｜", "</｜DSML｜"],
            DsmlNames::V41 => ["<｜DSML｜ ", "</｜DSML｜ "],
        }
    }
}

/// Marks of a [`ToolSyntax::MarkedList`]. Answers may have any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListMarks {
    /// Phi-4-mini: `<|tool_call|>[...]<|/tool_call|>`.
    Phi,
    /// Phi-4-mini by vLLM's template: `functools[...]`.
    Functools,
    /// Granite 3: `<|tool_call|>[...]`.
    Granite,
}

/// Mark of MiniMax M3 before each tag.
pub(crate) const MINIMAX3: &str = "]<]minimax[>[";

impl ListMarks {
    fn recognise(source: &str) -> Option<ListMarks> {
        let has = |text: &str| source.contains(text);
        if has("functools") {
            Some(ListMarks::Functools)
        } else if has("<|/tool_call|>") || has("<|tool|>") && has("<|/tool|>") {
            Some(ListMarks::Phi)
        } else {
            has("<|tool_call|>").then_some(ListMarks::Granite)
        }
    }
}

/// Marks of a syntax.
#[derive(Clone, Copy)]
pub(crate) struct Tags {
    /// Mark that begins a call or a block of calls. Calls without marks have none.
    pub open: &'static str,
    /// Mark that ends it. Without one, the call ends where its value ends.
    pub close: Option<&'static str>,
    /// Marks around all calls of an answer. They carry no information.
    pub wrappers: &'static [&'static str],
    /// Marks within a call.
    pub inner: &'static [&'static str],
}

impl Tags {
    /// Returns all marks.
    pub fn all(&self) -> impl Iterator<Item = &'static str> {
        let others = self.wrappers.iter().chain(self.inner).copied();
        [self.open].into_iter().chain(self.close).chain(others).filter(|mark| !mark.is_empty())
    }
}

const TOOL_CALL: Tags =
    Tags { open: "<tool_call>", close: Some("</tool_call>"), wrappers: &[], inner: &[] };

const BARE: Tags = Tags {
    open: "",
    close: None,
    wrappers: &["<|python_tag|>", "<|python_start|>", "<|python_end|>"],
    inner: &[],
};

const MARKED_LIST: Tags =
    Tags { open: "", close: None, wrappers: &["<|tool_call|>", "<|/tool_call|>"], inner: &[] };

const MISTRAL: Tags =
    Tags { open: "[TOOL_CALLS]", close: None, wrappers: &[], inner: &["[ARGS]", "[CALL_ID]"] };

impl ToolSyntax {
    /// Returns the syntax of the tool calls that a template writes, or `None` if it is not known. `has_token` tells which
    /// tokens the vocabulary has: the templates of LFM2 do not write calls.
    pub(crate) fn recognise(
        template: &ChatTemplate,
        suffixed: Option<&'static SuffixedMarks>,
        has_token: impl Fn(&str) -> bool,
    ) -> Option<ToolSyntax> {
        let source = template.source();
        let has = |text: &str| source.contains(text);
        let is_lfm2 = || has_token("<|tool_call_start|>") && has_token("<|tool_call_end|>");
        if let Some(marks) = suffixed {
            Some(ToolSyntax::Suffixed(marks))
        } else if let Some(syntax) = ToolSyntax::newer(source) {
            Some(syntax)
        } else if has("<｜tool▁call▁begin｜>") {
            Some(ToolSyntax::DeepSeek { fenced: has("```json") })
        } else if has("｜DSML｜") && has("invoke name=") {
            Some(ToolSyntax::Dsml(DsmlNames::recognise(source)))
        } else if has("<|tool_call_begin|>") {
            Some(ToolSyntax::Kimi)
        } else if has(MINIMAX3) {
            Some(ToolSyntax::MiniMax3)
        } else if has("<minimax:tool_call>") {
            Some(ToolSyntax::MiniMax)
        } else if has("<|tool_call>call:") {
            Some(ToolSyntax::Gemma4)
        } else if has("<start_function_call>") {
            Some(ToolSyntax::FunctionGemma)
        } else if has("[TOOL_CALLS]") {
            Some(match has("[ARGS]") {
                true => ToolSyntax::MistralArguments { call_id: has("[CALL_ID]") },
                false => ToolSyntax::MistralList { spaced: has("[TOOL_CALLS] [") },
            })
        } else if has("<|tool_call_start|>") || has("<|tool_list_start|>") {
            Some(ToolSyntax::Lfm2)
        } else if has("<tool_call>") {
            ToolSyntax::tagged(source)
        } else if has("<TOOLCALL>") {
            Some(ToolSyntax::Nemotron2)
        } else if has("<tool_calls>[") {
            Some(ToolSyntax::Hunyuan)
        } else if has("<function_calls>") && has("<functions>") {
            Some(ToolSyntax::Olmo3)
        } else if let Some(marks) = ListMarks::recognise(source) {
            Some(ToolSyntax::MarkedList(marks))
        } else {
            ToolSyntax::bare(template).or_else(|| is_lfm2().then_some(ToolSyntax::Lfm2))
        }
    }

    /// Returns the syntax of families with marks that no other family has.
    fn newer(source: &str) -> Option<ToolSyntax> {
        let has = |text: &str| source.contains(text);
        if has("<seed:tool_call>") {
            Some(ToolSyntax::Seed)
        } else if has("<|START_ACTION|>") && has("<|START_TEXT|>") {
            Some(ToolSyntax::Cohere)
        } else if is_kimi3(source) {
            Some(ToolSyntax::Kimi3)
        } else if has("<|tool_call:begin|>") {
            Some(ToolSyntax::Solar)
        } else if has("<atem:function_calls>") {
            Some(ToolSyntax::Atem)
        } else {
            has("<dots_function_call>").then_some(ToolSyntax::Dots)
        }
    }

    /// Returns the syntax between `<tool_call>` and `</tool_call>`.
    fn tagged(source: &str) -> Option<ToolSyntax> {
        let has = |text: &str| source.contains(text);
        if has("<arg_key>") {
            Some(ToolSyntax::ArgumentTags { compact: has("</arg_key><arg_value>") })
        } else if has("<function=") {
            Some(ToolSyntax::FunctionTags)
        } else if has("<invoke name=") {
            // Not known: MiniMax has other marks.
            None
        } else {
            Some(ToolSyntax::Json)
        }
    }

    /// Returns the syntax of calls that only the rendered prompt shows.
    fn bare(template: &ChatTemplate) -> Option<ToolSyntax> {
        let prompt = probe::prompt_of_calls(template, &serde_json::json!({ "needle": "x" }), 1)?;
        let squeezed: String = prompt.chars().filter(|c| !c.is_whitespace()).collect();
        if squeezed.contains("<tool_calls>[{\"name\":\"probe0\",\"arguments\":{") {
            Some(ToolSyntax::Hunyuan)
        } else if squeezed.contains("{\"name\":\"probe0\",\"parameters\":{") {
            Some(ToolSyntax::Llama)
        } else if squeezed.contains("[probe0(needle=") {
            Some(ToolSyntax::Python)
        } else {
            None
        }
    }

    /// Returns what the model writes before an answer without calls, if tools are offered. It is no part of the answer: the template
    /// writes it again.
    pub(crate) fn before_text(self) -> Option<&'static str> {
        (self == ToolSyntax::Hunyuan).then_some("助手：")
    }

    /// Returns true if calls have no marks, so that only a call of a tool that is offered is one.
    pub(crate) fn is_bare(self) -> bool {
        matches!(self, ToolSyntax::Llama | ToolSyntax::Python | ToolSyntax::MarkedList(_))
    }

    pub(crate) fn tags(self) -> Tags {
        match self {
            ToolSyntax::Json | ToolSyntax::FunctionTags => TOOL_CALL,
            ToolSyntax::ArgumentTags { .. } => Tags {
                inner: &["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
                ..TOOL_CALL
            },
            ToolSyntax::DeepSeek { .. } => Tags {
                open: "<｜tool▁call▁begin｜>",
                close: Some("<｜tool▁call▁end｜>"),
                wrappers: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
                inner: &["<｜tool▁sep｜>"],
            },
            ToolSyntax::Dsml(names) => {
                let [open, close] = names.block();
                Tags { open, close: Some(close), wrappers: &[], inner: &["｜DSML｜"] }
            }
            ToolSyntax::MiniMax => Tags {
                open: "<minimax:tool_call>",
                close: Some("</minimax:tool_call>"),
                wrappers: &[],
                inner: &[],
            },
            ToolSyntax::MiniMax3 => Tags {
                open: "]<]minimax[>[<tool_call>",
                close: Some("]<]minimax[>[</tool_call>"),
                wrappers: &[],
                inner: &[MINIMAX3, "<tool_call>", "</tool_call>"],
            },
            ToolSyntax::Kimi => Tags {
                open: "<|tool_call_begin|>",
                close: Some("<|tool_call_end|>"),
                wrappers: &["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
                inner: &["<|tool_call_argument_begin|>"],
            },
            ToolSyntax::FunctionGemma => Tags {
                open: "<start_function_call>",
                close: Some("<end_function_call>"),
                wrappers: &[],
                inner: &["<escape>"],
            },
            ToolSyntax::Gemma4 => Tags {
                open: "<|tool_call>",
                close: Some("<tool_call|>"),
                wrappers: &[],
                inner: &["<|\"|>"],
            },
            ToolSyntax::MistralList { .. } | ToolSyntax::MistralArguments { .. } => MISTRAL,
            ToolSyntax::Llama | ToolSyntax::Python => BARE,
            ToolSyntax::Lfm2 => Tags {
                open: "<|tool_call_start|>",
                close: Some("<|tool_call_end|>"),
                wrappers: &[],
                inner: &[],
            },
            ToolSyntax::Olmo3 => Tags {
                open: "<function_calls>",
                close: Some("</function_calls>"),
                wrappers: &[],
                inner: &[],
            },
            ToolSyntax::MarkedList(_) => MARKED_LIST,
            ToolSyntax::Nemotron2 => {
                Tags { open: "<TOOLCALL>", close: Some("</TOOLCALL>"), wrappers: &[], inner: &[] }
            }
            ToolSyntax::Hunyuan => Tags {
                open: "<tool_calls>",
                close: Some("</tool_calls>"),
                wrappers: &[],
                inner: &[],
            },
            newer => newer.newer_tags(),
        }
    }
    /// Returns the marks of the syntaxes that [`newer`](ToolSyntax::newer) recognises, and of suffixed ones.
    fn newer_tags(self) -> Tags {
        let around = |open, close| Tags { open, close: Some(close), wrappers: &[], inner: &[] };
        match self {
            ToolSyntax::Suffixed(marks) => Tags {
                wrappers: &marks.calls,
                inner: &marks.inner,
                ..around(marks.call[0], marks.call[1])
            },
            ToolSyntax::Seed => around("<seed:tool_call>", "</seed:tool_call>"),
            ToolSyntax::Cohere => around("<|START_ACTION|>", "<|END_ACTION|>"),
            ToolSyntax::Kimi3 => Tags {
                inner: &["<|open|>", "<|close|>", "<|sep|>"],
                ..around("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
            },
            ToolSyntax::Solar => Tags {
                wrappers: &["<|tool_calls|>", "<|calls|>"],
                inner: &["<|tool_call:name|>", "<|tool_call:args|>"],
                ..around("<|tool_call:begin|>", "<|tool_call:end|>")
            },
            ToolSyntax::Dots => around("<dots_function_call>", "</dots_function_call>"),
            _ => around("<atem:function_calls>", "</atem:function_calls>"),
        }
    }
}
