//! Tools for models whose chat template does not describe them. The system message describes them, and if the template has
//! no calls either, the model writes them in the form of Hermes.

use forebay_text::ContentMarks;
use serde_json::{Value, json};

use crate::{Message, ToolCall, ToolSyntax};

/// Form of a call in the syntax of Hermes.
const HERMES: &str = "<tool_call>\n{\"name\": \"the function's name\", \"arguments\": {\"parameter\": \"value\"}}\n</tool_call>\n\
                      The result follows between <tool_response> and </tool_response>.";

/// Form of a call of DeepSeek V3.1, whose template leaves the description of the tools to the caller.
const DEEPSEEK: &str = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>the function's name<｜tool▁sep｜>{\"parameter\": \
                        \"value\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";

/// Form of a call of DeepSeek V3 and R1.
const DEEPSEEK_FENCED: &str = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>the function's name\n\
                               ```json\n{\"parameter\": \"value\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";

/// Form of a call of LFM2.
const LFM2: &str = "<|tool_call_start|>[the_function(parameter=\"value\")]<|tool_call_end|>";

/// Form of a call of Granite 3.
const MARKED_LIST: &str =
    "<|tool_call|>[{\"name\": \"the function's name\", \"arguments\": {\"parameter\": \"value\"}}]";

/// Returns the form of a call, for a template that writes calls of this syntax but does not describe tools.
pub(crate) fn form(syntax: Option<ToolSyntax>) -> Option<&'static str> {
    match syntax {
        None | Some(ToolSyntax::Json) => Some(HERMES),
        Some(ToolSyntax::DeepSeek { fenced: true }) => Some(DEEPSEEK_FENCED),
        Some(ToolSyntax::DeepSeek { fenced: false }) => Some(DEEPSEEK),
        Some(ToolSyntax::Lfm2) => Some(LFM2),
        Some(ToolSyntax::MarkedList(_)) => Some(MARKED_LIST),
        Some(_) => None,
    }
}

/// Describes tools in the system message. `form` is that of a call.
pub(crate) fn describe(messages: &mut Vec<Message>, tools: &Value, form: &str) {
    let text = description(tools, form);
    match messages.first_mut().filter(|first| first.is_instruction()) {
        Some(first) => first.content = format!("{}\n\n{text}", first.content),
        None => messages.insert(0, Message::new("system", text)),
    }
}

/// Writes calls and results as text.
pub(crate) fn as_text(messages: Vec<Message>, marks: &ContentMarks) -> Vec<Message> {
    let mut all: Vec<Message> = Vec::with_capacity(messages.len() + 1);
    let mut behind_result = false;
    for mut message in messages {
        let is_result = message.role == "tool";
        for call in std::mem::take(&mut message.tool_calls) {
            let arguments = serde_json::from_str::<Value>(&call.arguments);
            let arguments = arguments.map(|parsed| marks.value_again(parsed));
            let arguments = arguments.unwrap_or_else(|_| json!(call.arguments));
            let text = ToolCall::text_of(&json!({ "name": call.name, "arguments": arguments }));
            let gap = if message.content.is_empty() { "" } else { "\n" };
            message.content += &format!("{gap}<tool_call>\n{text}\n</tool_call>");
        }
        if is_result {
            let text = format!("<tool_response>\n{}\n</tool_response>", message.content);
            message = Message::new("user", text);
        }
        match all.last_mut() {
            // Many of these templates take turns of user and assistant only.
            Some(last) if behind_result && last.role == "user" && message.role == "user" => {
                last.content += "\n";
                last.content += &message.content;
            }
            _ => all.push(message),
        }
        behind_result = is_result;
    }
    all
}

fn description(tools: &Value, form: &str) -> String {
    let list = tools.as_array().into_iter().flatten();
    let tools: String = list.map(|tool| format!("{tool}\n")).collect();
    format!(
        "# Tools\n\nYou may call one or more of these functions to answer the user. Each line describes a function \
         and the JSON schema of its parameters:\n<tools>\n{tools}</tools>\n\nTo call a function, write exactly \
         this, with its name and its arguments as JSON:\n{form}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_and_results_are_text() {
        let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
        let call = ToolCall { name: "f".into(), arguments: "{\"x\":  1}".into(), id: None };
        let conversation = || {
            vec![
                Message::new("system", "Be brief."),
                Message::new("user", "Go"),
                Message {
                    tool_calls: vec![call.clone(), call.clone()],
                    ..Message::new("assistant", "Well.")
                },
                Message::new("tool", "7"),
                Message::new("tool", "8"),
                Message::new("user", "Now?"),
            ]
        };
        let mut all = as_text(conversation(), &ContentMarks::default());
        describe(&mut all, &tools, HERMES);
        let roles: Vec<&str> = all.iter().map(|message| message.role.as_str()).collect();
        assert_eq!(roles, ["system", "user", "assistant", "user"]);
        assert!(all[0].content.starts_with("Be brief.\n\n# Tools"), "{}", all[0].content);
        assert!(
            all[0]
                .content
                .contains("{\"type\":\"function\",\"function\":{\"name\":\"f\"}}\n</tools>")
        );
        let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        assert_eq!(all[2].content, format!("Well.\n{text}\n{text}"));
        let results =
            "<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response>\nNow?";
        assert_eq!(all[3].content, results);
        // Without instructions, the description is a message of its own.
        let mut all = vec![Message::new("user", "x")];
        describe(&mut all, &tools, HERMES);
        assert_eq!((all.len(), all[0].role.as_str()), (2, "system"));
    }
}
