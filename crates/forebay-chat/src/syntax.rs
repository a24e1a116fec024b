//! Syntax of reasoning and of tool calls, and its recognition from a chat template.

use forebay_text::ChatTemplate;

use crate::probe;

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
}

impl ThinkMarks {
    /// Returns the marks that a template uses. `has_token` tells which tokens the vocabulary has.
    pub fn recognise(source: &str, has_token: impl Fn(&str) -> bool) -> Option<ThinkMarks> {
        if source.contains("[/THINK]") {
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
        }
    }

    /// Returns the token that [`open`](ThinkMarks::open) begins with.
    pub fn open_token(self) -> &'static str {
        match self {
            ThinkMarks::Channel => "<|channel>",
            other => other.open(),
        }
    }

    pub fn close(self) -> &'static str {
        match self {
            ThinkMarks::Tags | ThinkMarks::Response | ThinkMarks::Answer => "</think>",
            ThinkMarks::Brackets => "[/THINK]",
            ThinkMarks::Channel => "<channel|>",
            ThinkMarks::MiniMax => "</mm:think>",
        }
    }

    /// Returns the marks around the answer that follows the reasoning.
    pub fn around_answer(self) -> Option<[&'static str; 2]> {
        match self {
            ThinkMarks::Response => Some(["<response>", "</response>"]),
            ThinkMarks::Answer => Some(["<answer>", "</answer>"]),
            _ => None,
        }
    }
}

/// Returns true if the template has the marks of Hunyuan's messages: those of A13B, or those of the dense models.
fn is_hunyuan(source: &str) -> bool {
    let has = |text: &str| source.contains(text);
    has("<|startoftext|>") && has("<|extra_0|>") || has("<｜hy_Assistant｜>")
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
    /// DeepSeek V3.2 and V4: `<｜DSML｜function_calls><｜DSML｜invoke name="NAME">...`. `renamed` says that the block is
    /// called `tool_calls`, as in V4.
    Dsml { renamed: bool },
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
    /// Hunyuan-A13B: `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`.
    Hunyuan,
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
        has_token: impl Fn(&str) -> bool,
    ) -> Option<ToolSyntax> {
        let source = template.source();
        let has = |text: &str| source.contains(text);
        let is_lfm2 = || has_token("<|tool_call_start|>") && has_token("<|tool_call_end|>");
        if has("<｜tool▁call▁begin｜>") {
            Some(ToolSyntax::DeepSeek { fenced: has("```json") })
        } else if has("｜DSML｜") && has("invoke name=") {
            Some(ToolSyntax::Dsml { renamed: !has("function_calls") })
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

    /// Returns the syntax of calls without marks, which only the rendered prompt shows.
    fn bare(template: &ChatTemplate) -> Option<ToolSyntax> {
        let prompt = probe::prompt_of_calls(template, &serde_json::json!({ "needle": "x" }), 1)?;
        let squeezed: String = prompt.chars().filter(|c| !c.is_whitespace()).collect();
        if squeezed.contains("{\"name\":\"probe0\",\"parameters\":{") {
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
            ToolSyntax::Dsml { renamed } => Tags {
                open: if renamed { "<｜DSML｜tool_calls>" } else { "<｜DSML｜function_calls>" },
                close: Some(if renamed {
                    "</｜DSML｜tool_calls>"
                } else {
                    "</｜DSML｜function_calls>"
                }),
                wrappers: &[],
                inner: &["｜DSML｜"],
            },
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
        }
    }
}
