//! Grammar of calls in the form of Python: `[f(a=1, b="x"), g()]`.

use serde_json::Value;

use super::writer::{Form, Tool, Writer, sequence};

impl Writer<'_> {
    /// `[f(k="v", n=1), g()]`. Texts, numbers, lists and dictionaries are JSON, truth values are those of Python.
    pub fn python(&self, tools: &[Tool<'_>]) -> Form {
        let mut rules = String::new();
        for (number, tool) in tools.iter().enumerate() {
            let parameters = tool.parameters().into_iter();
            let items = parameters.map(|parameter| {
                let value = value(tool, parameter.schema);
                let key = self.literal(&format!("{}=", parameter.key));
                (format!("{key} {value}"), parameter.is_required)
            });
            let items: Vec<(String, bool)> = items.collect();
            let name = format!("arguments{number}");
            rules += &self.rule(number, &format!("{}(", tool.name), &name, ")");
            rules += &sequence(&name, &items);
        }
        rules += "space: \" \"\n";
        Form { rules, open: "[", close: "]", separator: ", " }
    }
}

/// Returns a value as a part of a rule.
fn value(tool: &Tool<'_>, schema: &Value) -> String {
    match schema.get("type").and_then(Value::as_str) {
        Some("boolean") => "(\"True\" | \"False\")".to_owned(),
        Some("null") => "\"None\"".to_owned(),
        _ => tool.inline(schema),
    }
}
