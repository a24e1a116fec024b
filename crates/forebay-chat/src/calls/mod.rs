//! Grammars of tool calls, by which a model must call a tool, and of what comes before an answer's own text.

mod gemma;
mod json_forms;
mod minimax3;
mod python;
mod tag_forms;
mod writer;

use forebay_grammar::{Preamble, Rules};
use forebay_text::Tokenizer;
use serde_json::{Value, json};

use crate::format::Kind;
use crate::{ChatError, Format, Parser, ToolSyntax};
use python::{Around, Literals};
use writer::{Form, Tool, Writer};

/// Calls that an answer must consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallsWanted<'a> {
    /// Tools that may be called, as a list of `{"type": "function", "function": {"name": ..., "parameters": {...}}}`.
    pub tools: &'a Value,
    /// The only tool that may be called.
    pub name: Option<&'a str>,
    /// True if the answer may have several calls.
    pub several: bool,
}

/// Marks of gpt-oss.
const HARMONY: &[&str] =
    &["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>"];

/// Marks of Muse.
const MUSE: &[&str] = &["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"];

impl Format {
    /// Returns what may come before the text of an answer to `prompt`: reasoning, and headers.
    pub fn preamble(&self, prompt: &str) -> Option<Preamble> {
        let of = |open: Option<&str>, close: &[&str]| Preamble {
            open: open.map(str::to_owned),
            close: close.iter().map(|text| (*text).to_owned()).collect(),
        };
        match self.kind {
            Kind::Harmony => Some(of(None, &["<|channel|>final", "<|message|>"])),
            Kind::Muse => Some(of(None, &["to=user", "<|message|>"])),
            Kind::Tagged { thinking: Some(marks), .. } => {
                let prompt = prompt.trim_end();
                if let Some(begin) = marks.begins_answer() {
                    return (!prompt.ends_with(begin)).then(|| of(None, &[begin]));
                }
                match (prompt.ends_with(marks.open()), prompt.ends_with(marks.close())) {
                    (_, true) => None,
                    (true, false) => Some(of(None, &[marks.close()])),
                    (false, false) => Some(of(Some(marks.open_token()), &[marks.close()])),
                }
            }
            _ => None,
        }
    }

    /// Returns what may come before the text of an answer that continues `text`, with which `prompt` ends: the rest of the
    /// reasoning.
    pub fn preamble_of_continued(&self, prompt: &str, text: &str) -> Option<Preamble> {
        let is_thinking = Parser::continuing(self, prompt, text).is_thinking();
        let Kind::Tagged { thinking: Some(marks), .. } = self.kind else { return None };
        is_thinking.then(|| Preamble { open: None, close: vec![marks.close().to_owned()] })
    }

    /// Returns what may come before tool calls in an answer to `prompt`: reasoning.
    pub fn preamble_of_calls(&self, prompt: &str) -> Option<Preamble> {
        let of = |open: Option<&str>, close: Vec<&str>| Preamble {
            open: open.map(str::to_owned),
            close: close.into_iter().map(str::to_owned).collect(),
        };
        match self.kind {
            Kind::Harmony => Some(of(None, vec!["<|end|>"])),
            Kind::Muse => Some(of(None, vec!["<|eom|>"])),
            Kind::Tagged { thinking: Some(marks), .. } if marks.begins_answer().is_some() => {
                let prompt = prompt.trim_end();
                let begun = prompt.ends_with(marks.open());
                let answers = marks.around_answer().is_some_and(|[open, _]| prompt.ends_with(open));
                let before = marks.before_calls().iter().copied();
                match (begun, answers || prompt.ends_with(marks.close())) {
                    (false, true) if marks.before_calls().is_empty() => None,
                    (false, true) => Some(of(None, before.collect())),
                    (true, _) => {
                        Some(of(None, [marks.close()].into_iter().chain(before).collect()))
                    }
                    (false, false) => {
                        let close = [marks.close()].into_iter().chain(before).collect();
                        Some(of(Some(marks.open_token()), close))
                    }
                }
            }
            _ => self.preamble(prompt),
        }
    }

    /// Returns the rules of an answer that consists of tool calls, or of JSON by the schema `instead`.
    ///
    /// # Errors
    /// Returns an error if the format has no tool calls, if there is no such tool, or if the format cannot have `instead`.
    pub fn call_rules(
        &self,
        wanted: &CallsWanted<'_>,
        instead: Option<&Value>,
        tokenizer: &Tokenizer,
    ) -> Result<Rules, ChatError> {
        let tools = tools(wanted.tools, wanted.name)?;
        let writer = |marks: Vec<&'static str>| Writer::new(tokenizer, marks);
        let (writer, form) = match self.kind {
            Kind::Harmony | Kind::Muse if instead.is_some() => return Err(ChatError::CallOrJson),
            Kind::Muse => {
                let writer = writer(MUSE.to_vec());
                let form = writer.muse(&tools);
                (writer, form)
            }
            Kind::Harmony => {
                let writer = writer(HARMONY.to_vec());
                let form = writer.harmony(&tools);
                (writer, form)
            }
            Kind::Tagged { tools: Some(syntax), .. } => {
                let writer = writer(syntax.tags().all().collect());
                let form = writer.form(syntax, &tools);
                (writer, form)
            }
            Kind::Plain | Kind::Tagged { tools: None, .. } => return Err(ChatError::NoToolCalls),
        };
        let has_single_calls = matches!(self.kind, Kind::Harmony | Kind::Muse);
        let calls = match form.separator {
            _ if !wanted.several || has_single_calls => "call".to_owned(),
            "" => "call+".to_owned(),
            separator => format!("call ({} call)*", writer.literal(separator)),
        };
        let [open, close] = [form.open, form.close].map(|text| writer.literal(text));
        let instead =
            instead.map_or(String::new(), |schema| format!(" | {}", Rules::inline(schema)));
        let one: Vec<String> = (0..tools.len()).map(|number| format!("call{number}")).collect();
        Ok(Rules::Lark(format!(
            "start: calls{instead}\ncalls: {open} {calls} {close}\ncall: {}\n{}",
            one.join(" | "),
            form.rules
        )))
    }
}

impl Writer<'_> {
    /// Returns the form of calls in a syntax.
    fn form(&self, syntax: ToolSyntax, tools: &[Tool<'_>]) -> Form {
        match syntax {
            ToolSyntax::Json => self.json(tools),
            ToolSyntax::FunctionTags => self.function_tags(tools),
            ToolSyntax::ArgumentTags { compact } => self.argument_tags(tools, compact),
            ToolSyntax::DeepSeek { fenced } => self.deepseek(tools, fenced),
            ToolSyntax::Dsml(names) => self.dsml(tools, names),
            ToolSyntax::MiniMax => {
                self.invokes(tools, ["<minimax:tool_call>\n", "</minimax:tool_call>"])
            }
            ToolSyntax::Dots => {
                self.invokes(tools, ["<dots_function_call>\n", "</dots_function_call>"])
            }
            ToolSyntax::Atem => self.atem(tools),
            ToolSyntax::Seed => self.seed(tools),
            ToolSyntax::Suffixed(marks) => self.suffixed(tools, marks),
            ToolSyntax::Cohere => self.cohere(tools),
            ToolSyntax::Kimi3 => self.kimi3(tools),
            ToolSyntax::Solar => self.solar(tools),
            ToolSyntax::Kimi => self.kimi(tools),
            ToolSyntax::FunctionGemma => {
                self.gemma(tools, ["<start_function_call>", "<end_function_call>"], "<escape>")
            }
            ToolSyntax::Gemma4 => self.gemma(tools, ["<|tool_call>", "<tool_call|>"], "<|\"|>"),
            ToolSyntax::MistralList { spaced } => self.mistral_list(tools, spaced),
            ToolSyntax::MistralArguments { call_id } => self.mistral_arguments(tools, call_id),
            ToolSyntax::Llama => self.llama(tools),
            ToolSyntax::Python => {
                self.python(tools, Literals::Python, Around { around: ["[", "]"], separator: ", " })
            }
            ToolSyntax::MiniMax3 => self.minimax3(tools),
            ToolSyntax::Lfm2 => {
                let around = ["<|tool_call_start|>[", "]<|tool_call_end|>"];
                self.python(tools, Literals::Python, Around { around, separator: ", " })
            }
            ToolSyntax::Olmo3 => {
                let around = ["<function_calls>", "</function_calls>"];
                self.python(tools, Literals::Json, Around { around, separator: "\n" })
            }
            ToolSyntax::MarkedList(marks) => self.marked_list(tools, marks),
            ToolSyntax::Nemotron2 => self.enclosed_list(tools, ["<TOOLCALL>[", "]</TOOLCALL>"]),
            ToolSyntax::Hunyuan => self.enclosed_list(tools, ["<tool_calls>[", "]</tool_calls>"]),
        }
    }
}

/// Reads the list of tools.
fn tools<'a>(tools: &'a Value, wanted: Option<&str>) -> Result<Vec<Tool<'a>>, ChatError> {
    let functions = tools.as_array().into_iter().flatten().filter_map(|tool| tool.get("function"));
    let named = functions.filter_map(|function| {
        let name = function.get("name")?.as_str()?;
        let schema = function.get("parameters").filter(|schema| schema.is_object()).cloned();
        let mut schema = schema.unwrap_or_else(|| json!({}));
        let says = |key: &&str| schema.get(*key).is_some_and(|value| !value.is_null());
        // Arguments are an object, also if the schema does not say so.
        let kinds = ["type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"];
        if !kinds.iter().any(says) {
            schema["type"] = "object".into();
        }
        Some(Tool { name, schema })
    });
    let found: Vec<Tool<'_>> =
        named.filter(|tool| wanted.is_none_or(|wanted| wanted == tool.name)).collect();
    match (found.is_empty(), wanted) {
        (false, _) => Ok(found),
        (true, Some(name)) => Err(ChatError::UnknownTool(name.to_owned())),
        (true, None) => Err(ChatError::NoTools),
    }
}
