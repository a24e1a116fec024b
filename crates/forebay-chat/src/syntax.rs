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
}

impl ThinkMarks {
    /// Returns the marks that a template uses. `has_token` tells which tokens the vocabulary has.
    pub fn recognise(source: &str, has_token: impl Fn(&str) -> bool) -> Option<ThinkMarks> {
        if source.contains("[/THINK]") {
            Some(ThinkMarks::Brackets)
        } else if source.contains("<channel|>") {
            Some(ThinkMarks::Channel)
        } else if source.contains("</think>") || has_token("<think>") && has_token("</think>") {
            Some(ThinkMarks::Tags)
        } else {
            None
        }
    }

    /// Returns the text that begins reasoning.
    pub fn open(self) -> &'static str {
        match self {
            ThinkMarks::Tags => "<think>",
            ThinkMarks::Brackets => "[THINK]",
            ThinkMarks::Channel => "<|channel>thought",
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
            ThinkMarks::Tags => "</think>",
            ThinkMarks::Brackets => "[/THINK]",
            ThinkMarks::Channel => "<channel|>",
        }
    }
}

/// Syntax of a family's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolSyntax {
    /// Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
    Json,
    /// Qwen3-Coder, Qwen3.5, Nemotron 3:
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
    /// Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.
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

const MISTRAL: Tags =
    Tags { open: "[TOOL_CALLS]", close: None, wrappers: &[], inner: &["[ARGS]", "[CALL_ID]"] };

impl ToolSyntax {
    /// Returns the syntax of the tool calls that a template writes, or `None` if it is not known.
    pub(crate) fn recognise(template: &ChatTemplate) -> Option<ToolSyntax> {
        let source = template.source();
        let has = |text: &str| source.contains(text);
        if has("<｜tool▁call▁begin｜>") {
            Some(ToolSyntax::DeepSeek { fenced: has("```json") })
        } else if has("｜DSML｜") && has("invoke name=") {
            Some(ToolSyntax::Dsml { renamed: !has("function_calls") })
        } else if has("<|tool_call_begin|>") {
            Some(ToolSyntax::Kimi)
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
        } else if has("<tool_call>") {
            ToolSyntax::tagged(source)
        } else {
            ToolSyntax::bare(template)
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
            // MiniMax M3 has marks of its own within a call.
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

    /// Returns true if calls have no marks, so that only a call of a tool that is offered is one.
    pub(crate) fn is_bare(self) -> bool {
        matches!(self, ToolSyntax::Llama | ToolSyntax::Python)
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
        }
    }
}
