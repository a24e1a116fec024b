//! Calls in the text of a message, in the form of the family, for templates that describe tools but write no calls.

use forebay_text::ContentMarks;
use serde_json::{Value, json};

use crate::{ListMarks, Message, ToolCall, ToolSyntax};

/// Moves the calls of each message into its text. The results stay messages of their own. Syntaxes whose templates all write
/// calls are not changed.
pub(crate) fn in_content(messages: &mut [Message], syntax: ToolSyntax, marks: &ContentMarks) {
    for message in messages {
        if message.tool_calls.is_empty() {
            continue;
        }
        let calls = &message.tool_calls;
        let text = match syntax {
            ToolSyntax::Lfm2 => {
                let calls: Vec<String> =
                    calls.iter().map(|call| python_call(call, marks)).collect();
                format!("<|tool_call_start|>[{}]<|tool_call_end|>", calls.join(", "))
            }
            ToolSyntax::MarkedList(marks) => {
                let [open, close] = marks.around();
                let calls: Vec<String> = calls.iter().map(|call| json_call(call, marks)).collect();
                format!("{open}[{}]{close}", calls.join(", "))
            }
            _ => continue,
        };
        message.content += &text;
        message.tool_calls.clear();
    }
}

impl ListMarks {
    /// Returns the text before and behind the list.
    fn around(self) -> [&'static str; 2] {
        match self {
            ListMarks::Phi => ["<|tool_call|>", "<|/tool_call|>"],
            ListMarks::Functools => ["functools", ""],
            ListMarks::Granite => ["<|tool_call|>", ""],
        }
    }
}

/// Returns the arguments as JSON. Text that is not JSON, such as an answer that was cut, stays text.
fn arguments(call: &ToolCall, marks: &ContentMarks) -> Value {
    let parsed = serde_json::from_str(&call.arguments).map(|parsed| marks.value_again(parsed));
    parsed.unwrap_or_else(|_| json!(call.arguments))
}

fn json_call(call: &ToolCall, marks: &ContentMarks) -> String {
    ToolCall::text_of(&json!({ "name": call.name, "arguments": arguments(call, marks) }))
}

fn python_call(call: &ToolCall, marks: &ContentMarks) -> String {
    let arguments = match arguments(call, marks) {
        Value::Object(arguments) => arguments,
        other => [("arguments".to_owned(), other)].into_iter().collect(),
    };
    let arguments = arguments.iter().map(|(key, value)| format!("{key}={}", python_value(value)));
    format!("{}({})", call.name, arguments.collect::<Vec<_>>().join(", "))
}

/// Writes a value as Python does. Texts have the quotes and escapes of JSON, which Python reads, too.
fn python_value(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(python_value).collect::<Vec<_>>().join(", "))
        }
        Value::Object(items) => {
            let item = |(key, value): (&String, &Value)| {
                format!("{}: {}", json!(key), python_value(value))
            };
            format!("{{{}}}", items.iter().map(item).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(syntax: ToolSyntax, arguments: &str) -> String {
        let call =
            |name: &str| ToolCall { name: name.into(), arguments: arguments.into(), id: None };
        let tool_calls = vec![call("f"), call("g")];
        let mut all = [
            Message::new("user", "x"),
            Message { tool_calls, ..Message::new("assistant", "I look.") },
            Message::new("tool", "7"),
        ];
        in_content(&mut all, syntax, &ContentMarks::default());
        assert!(all[1].tool_calls.is_empty() && all[2] == Message::new("tool", "7"));
        all[1].content.clone()
    }

    #[test]
    fn each_form() {
        let arguments = r#"{"a": "it's\n\"x\"", "b": [true, null, 1.5], "c": {"d": false}}"#;
        let call = r#"(a="it's\n\"x\"", b=[True, None, 1.5], c={"d": False})"#;
        let expected = format!("I look.<|tool_call_start|>[f{call}, g{call}]<|tool_call_end|>");
        assert_eq!(text(ToolSyntax::Lfm2, arguments), expected);
        for (marks, [open, close]) in [
            (ListMarks::Phi, ["<|tool_call|>", "<|/tool_call|>"]),
            (ListMarks::Granite, ["<|tool_call|>", ""]),
            (ListMarks::Functools, ["functools", ""]),
        ] {
            let list = r#"[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]"#;
            let expected = format!("I look.{open}{list}{close}");
            assert_eq!(text(ToolSyntax::MarkedList(marks), "{}"), expected);
        }
    }

    #[test]
    fn arguments_that_are_no_object_are_not_lost() {
        assert!(text(ToolSyntax::Lfm2, "{\"a").contains("f(arguments=\"{\\\"a\")"));
        let marks = ToolSyntax::MarkedList(ListMarks::Phi);
        assert!(text(marks, "{\"a").contains("\"arguments\": \"{\\\"a\""));
    }
}
