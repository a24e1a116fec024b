//! Grammars of calls in the form of Python: `[f(a=1, b="x"), g()]`.

use serde_json::Value;

use super::writer::{Form, Tool, Writer, sequence};

/// How values without quotation marks are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Literals {
    /// `True`, `False` and `None`.
    Python,
    /// `true`, `false` and `null`.
    Json,
}

/// Text around all calls, and between two of them.
pub struct Around {
    pub around: [&'static str; 2],
    pub separator: &'static str,
}

impl Writer<'_> {
    /// `f(k="v", n=1)`. Texts, numbers, lists and dictionaries are JSON.
    pub fn python(&self, tools: &[Tool<'_>], literals: Literals, around: Around) -> Form {
        let mut rules = String::new();
        for (number, tool) in tools.iter().enumerate() {
            let parameters = tool.parameters().into_iter();
            let items = parameters.map(|parameter| {
                let value = self.value(tool, parameter.schema, literals);
                let key = self.literal(&format!("{}=", parameter.key));
                (format!("{key} {value}"), parameter.is_required)
            });
            let items: Vec<(String, bool)> = items.collect();
            let name = format!("arguments{number}");
            rules += &self.rule(number, &format!("{}(", tool.name), &name, ")");
            rules += &sequence(&name, &items);
        }
        rules += "space: \" \"\n";
        let Around { around: [open, close], separator } = around;
        Form { rules, open, close, separator }
    }

    /// Returns a value as a part of a rule.
    fn value(&self, tool: &Tool<'_>, schema: &Value, literals: Literals) -> String {
        match schema.get("type").and_then(Value::as_str) {
            _ if literals == Literals::Json => self.inline(tool, schema),
            Some("boolean") => "(\"True\" | \"False\")".to_owned(),
            Some("null") => "\"None\"".to_owned(),
            _ => self.inline(tool, schema),
        }
    }
}
