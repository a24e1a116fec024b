//! Grammar of calls of MiniMax M3: tags with a mark before each of them, also within lists and objects.

use serde_json::Value;

use super::writer::{DEPTH_MAX, Form, Tool, Writer, is_text, parameters, texts};
use crate::syntax::MINIMAX3;

impl Writer<'_> {
    /// `@<tool_call>\n@<invoke name="f">@<k>v@</k>@</invoke>\n@</tool_call>`, with `@` for the mark
    pub fn minimax3(&self, tools: &[Tool<'_>]) -> Form {
        let mut rules = String::new();
        for (number, tool) in tools.iter().enumerate() {
            let mut values = Values { writer: self, tool, number, rules: String::new(), count: 0 };
            let members = values.members(&tool.schema, 0);
            let open = format!("{MINIMAX3}<invoke name=\"{}\">", tool.name);
            rules += &self.rule(number, &open, &members, &format!("{MINIMAX3}</invoke>\n"));
            rules += &values.rules;
        }
        Form {
            rules,
            open: "]<]minimax[>[<tool_call>\n",
            close: "]<]minimax[>[</tool_call>",
            ..Form::default()
        }
    }
}

/// Rules of the values of a tool's arguments.
struct Values<'a> {
    writer: &'a Writer<'a>,
    tool: &'a Tool<'a>,
    number: usize,
    rules: String,
    count: usize,
}

impl Values<'_> {
    /// Returns the members of an object as a part of a rule, in the order of the schema.
    fn members(&mut self, schema: &Value, depth: usize) -> String {
        let mut parts = Vec::new();
        for member in parameters(schema) {
            let element = self.element(member.key, member.schema, depth + 1);
            parts.push(format!("{element}{}", if member.is_required { "" } else { "?" }));
        }
        parts.join(" ")
    }

    /// Adds the rule of an element, and returns its name.
    fn element(&mut self, tag: &str, schema: &Value, depth: usize) -> String {
        self.count += 1;
        let name = format!("element{}_{}", self.number, self.count);
        let open = self.writer.literal(&format!("{MINIMAX3}<{tag}>"));
        let value = self.value(&name, tag, schema, depth);
        self.rules += &format!("{name}: {open} {value}\n");
        name
    }

    /// Returns a value and the tag behind it as a part of a rule. Beyond the bounds, a value is any text up to its tag.
    fn value(&mut self, name: &str, tag: &str, schema: &Value, depth: usize) -> String {
        let end = format!("{MINIMAX3}</{tag}>");
        let (writer, tool) = (self.writer, self.tool);
        let is_open = depth > DEPTH_MAX || writer.is_full();
        if let Some(texts) = texts(schema) {
            let texts: Vec<String> = texts.iter().map(|text| writer.literal(text)).collect();
            return format!("({}) {}", texts.join(" | "), writer.literal(&end));
        }
        if let Some(target) = tool.target(schema).filter(|_| !is_open) {
            return self.value(name, tag, target, depth + 1);
        }
        match schema.get("type").and_then(Value::as_str) {
            _ if is_text(schema) || is_open => {}
            Some("integer" | "number" | "boolean" | "null") => {
                return format!("{} {}", writer.inline(tool, schema), writer.literal(&end));
            }
            Some("array") => {
                let any = Value::Null;
                let items = schema.get("items").unwrap_or(&any);
                let item = self.element("item", items, depth + 1);
                return format!("{item}* {}", writer.literal(&end));
            }
            Some("object") if schema.get("properties").is_some() => {
                return format!("{} {}", self.members(schema, depth), writer.literal(&end));
            }
            _ => {}
        }
        let text = format!("{name}_value");
        self.rules += &self.writer.text_until(&text, &end);
        text
    }
}
