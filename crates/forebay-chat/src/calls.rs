//! Grammars of tool calls, by which a model must call a tool, and of what comes before an answer's own text.

use forebay_grammar::{Preamble, Rules};
use forebay_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::format::Kind;
use crate::{ChatError, Format, ToolSyntax};

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

/// A tool as the grammar needs it.
struct Tool<'a> {
    name: &'a str,
    /// JSON schema of the arguments.
    schema: Value,
}

impl Format {
    /// Returns what may come before the text of an answer to `prompt`: reasoning, and headers.
    pub fn preamble(&self, prompt: &str) -> Option<Preamble> {
        let of = |open: Option<&str>, close: &[&str]| Preamble {
            open: open.map(str::to_owned),
            close: close.iter().map(|text| (*text).to_owned()).collect(),
        };
        match self.kind {
            Kind::Harmony => Some(of(None, &["<|channel|>final", "<|message|>"])),
            Kind::Tagged { thinking: true, .. } => {
                let prompt = prompt.trim_end();
                match (prompt.ends_with("<think>"), prompt.ends_with("</think>")) {
                    (_, true) => None,
                    (true, false) => Some(of(None, &["</think>"])),
                    (false, false) => Some(of(Some("<think>"), &["</think>"])),
                }
            }
            _ => None,
        }
    }

    /// Returns what may come before tool calls in an answer to `prompt`: reasoning.
    pub fn preamble_of_calls(&self, prompt: &str) -> Option<Preamble> {
        match self.kind {
            Kind::Harmony => Some(Preamble { open: None, close: vec!["<|end|>".into()] }),
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
        let writer = Writer { tokenizer };
        let repeat = if wanted.several { "+" } else { "" };
        let (call, around) = match self.kind {
            Kind::Harmony if instead.is_some() => return Err(ChatError::CallOrJson),
            Kind::Harmony => (writer.harmony(&tools), ["", ""]),
            Kind::Tagged { tools: Some(syntax), .. } => match syntax {
                ToolSyntax::Json => (writer.json(&tools), ["", ""]),
                ToolSyntax::FunctionTags => (writer.function_tags(&tools), ["", ""]),
                ToolSyntax::ArgumentTags => (writer.argument_tags(&tools), ["", ""]),
                ToolSyntax::DeepSeek => (
                    writer.deepseek(&tools, self.fenced_arguments),
                    ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
                ),
            },
            Kind::Plain | Kind::Tagged { tools: None, .. } => return Err(ChatError::NoToolCalls),
        };
        // gpt-oss ends its turn with a call.
        let repeat = if self.kind == Kind::Harmony { "" } else { repeat };
        let [open, close] = around.map(|text| writer.literal(text));
        let instead =
            instead.map_or(String::new(), |schema| format!(" | {}", Rules::inline(schema)));
        let calls: Vec<String> = (0..tools.len()).map(|number| format!("call{number}")).collect();
        Ok(Rules::Lark(format!(
            "start: calls{instead}\ncalls: {open} call{repeat} {close}\ncall: {}\n{call}",
            calls.join(" | ")
        )))
    }
}

/// Reads the list of tools.
fn tools<'a>(tools: &'a Value, wanted: Option<&str>) -> Result<Vec<Tool<'a>>, ChatError> {
    let functions = tools.as_array().into_iter().flatten().filter_map(|tool| tool.get("function"));
    let named = functions.filter_map(|function| {
        let name = function.get("name")?.as_str()?;
        let schema = function.get("parameters").filter(|schema| schema.is_object()).cloned();
        Some(Tool { name, schema: schema.unwrap_or_else(|| json!({ "type": "object" })) })
    });
    let found: Vec<Tool<'_>> =
        named.filter(|tool| wanted.is_none_or(|wanted| wanted == tool.name)).collect();
    match (found.is_empty(), wanted) {
        (false, _) => Ok(found),
        (true, Some(name)) => Err(ChatError::UnknownTool(name.to_owned())),
        (true, None) => Err(ChatError::NoTools),
    }
}

/// Writes the rules `call0`, `call1` and so on, one for each tool.
struct Writer<'a> {
    tokenizer: &'a Tokenizer,
}

impl Writer<'_> {
    /// Returns a text as a part of a rule. Marks that the vocabulary has as control tokens become these tokens.
    fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, mark, after)) = next_mark(rest) {
            let control = self.control(mark);
            match control {
                Some(token) => {
                    parts.extend((!before.is_empty()).then(|| quoted(before)));
                    parts.push(token);
                }
                None => parts.push(quoted(&format!("{before}{mark}"))),
            }
            rest = after;
        }
        parts.extend((!rest.is_empty()).then(|| quoted(rest)));
        parts.join(" ")
    }

    fn control(&self, mark: &str) -> Option<String> {
        let id = self.tokenizer.token_id(mark)?;
        Some(format!("<[{id}]>"))
    }

    /// Returns rules of any text up to the mark that `close` begins with, and the rest of `close`. `name` names the rule.
    fn text_until(&self, name: &str, close: &str) -> (String, String) {
        let mark = next_mark(close).map(|(before, mark, _)| (before, mark));
        match mark.and_then(|(before, mark)| Some((before, self.control(mark)?))) {
            Some(_) => (
                name.to_owned(),
                format!("{name}: {name}_text {}\n{name}_text: /(?s:.*)/\n", self.literal(close)),
            ),
            None => {
                let close = regex_literal(close);
                (name.to_owned(), format!("{name}[lazy]: /(?s:.*){close}/\n"))
            }
        }
    }

    /// `<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>`
    fn json(&self, tools: &[Tool<'_>]) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let open = format!("<tool_call>\n{{\"name\": {}, \"arguments\": ", json!(tool.name));
            self.rule(number, &open, &Rules::inline(&tool.schema), "}\n</tool_call>\n")
        };
        tools.iter().enumerate().map(rule).collect()
    }

    fn rule(&self, number: usize, open: &str, middle: &str, close: &str) -> String {
        format!("call{number}: {} {middle} {}\n", self.literal(open), self.literal(close))
    }

    /// `f<｜tool▁sep｜>{...}`, or with `fenced`, `function<｜tool▁sep｜>f` and a code block.
    fn deepseek(&self, tools: &[Tool<'_>], fenced: bool) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let (name, json) = (tool.name, Rules::inline(&tool.schema));
            let open = match fenced {
                true => format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"),
                false => format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"),
            };
            let close =
                if fenced { "\n```<｜tool▁call▁end｜>" } else { "<｜tool▁call▁end｜>" };
            self.rule(number, &open, &json, close)
        };
        tools.iter().enumerate().map(rule).collect()
    }

    /// `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`
    fn harmony(&self, tools: &[Tool<'_>]) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let name = tool.name;
            let open = format!(
                "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            );
            self.rule(number, &open, &Rules::inline(&tool.schema), "<|call|>")
        };
        tools.iter().enumerate().map(rule).collect()
    }

    /// `<tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n</tool_call>`
    fn function_tags(&self, tools: &[Tool<'_>]) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let open = format!("<tool_call>\n<function={}>\n", tool.name);
            let (middle, values) = self.parameters(number, tool, "\n</parameter>\n", |key| {
                self.literal(&format!("<parameter={key}>\n"))
            });
            self.rule(number, &open, &middle, "</function>\n</tool_call>\n") + &values
        };
        tools.iter().enumerate().map(rule).collect()
    }

    /// `<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>`
    fn argument_tags(&self, tools: &[Tool<'_>]) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let open = format!("<tool_call>{}\n", tool.name);
            let (middle, values) = self.parameters(number, tool, "</arg_value>\n", |key| {
                self.literal(&format!("<arg_key>{key}</arg_key>\n<arg_value>"))
            });
            self.rule(number, &open, &middle, "</tool_call>\n") + &values
        };
        tools.iter().enumerate().map(rule).collect()
    }

    /// Returns the parameters of a tool in the order of its schema, and the rules that they use. Texts are not quoted, other
    /// values are JSON.
    fn parameters(
        &self,
        number: usize,
        tool: &Tool<'_>,
        close: &str,
        open: impl Fn(&str) -> String,
    ) -> (String, String) {
        let (mut all, mut rules) = (Vec::new(), String::new());
        let none = Map::new();
        let fields = tool.schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let required = tool.schema.get("required").and_then(Value::as_array);
        for (index, (key, schema)) in fields.iter().enumerate() {
            let is_required = required.is_some_and(|names| names.iter().any(|name| name == key));
            let texts: Option<Vec<&str>> = schema
                .get("enum")
                .and_then(Value::as_array)
                .and_then(|values| values.iter().map(Value::as_str).collect());
            let is_text = schema.get("type").and_then(Value::as_str) == Some("string");
            let value = match texts {
                Some(texts) if !texts.is_empty() => {
                    let texts: Vec<String> = texts.into_iter().map(quoted).collect();
                    format!("({}) {}", texts.join(" | "), self.literal(close))
                }
                _ if is_text => {
                    let (name, rule) = self.text_until(&format!("text{number}_{index}"), close);
                    rules += &rule;
                    name
                }
                _ => {
                    let mut schema = schema.clone();
                    // References are to definitions of the whole schema.
                    for place in ["$defs", "definitions"] {
                        if let (Some(own), Some(all)) =
                            (schema.as_object_mut(), tool.schema.get(place))
                        {
                            own.entry(place).or_insert_with(|| all.clone());
                        }
                    }
                    format!("{} {}", Rules::inline(&schema), self.literal(close))
                }
            };
            let optional = if is_required { "" } else { "?" };
            all.push(format!("parameter{number}_{index}{optional}"));
            rules += &format!("parameter{number}_{index}: {} {value}\n", open(key));
        }
        (all.join(" "), rules)
    }
}

/// Returns a text as a literal of a Lark grammar.
fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// Returns a text as a part of a regular expression between slashes.
fn regex_literal(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            c if c.is_ascii_punctuation() && c != '<' && c != '>' => {
                escaped.push('\\');
                escaped.push(c);
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// Returns the first mark such as `<tool_call>` in a text, with what is before and after it.
fn next_mark(text: &str) -> Option<(&str, &str, &str)> {
    let begin = text.find('<')?;
    let end = begin + text[begin..].find('>')? + 1;
    Some((&text[..begin], &text[begin..end], &text[end..]))
}
