//! Custom tools, whose input is a text. The model calls each as a function with one parameter.

use std::collections::BTreeSet;

use serde_json::{Value, json};

/// Parameter with the input.
const PARAMETER: &str = "input";

/// Returns the names of the custom tools.
pub fn names(tools: &[Value]) -> BTreeSet<String> {
    let custom = tools.iter().filter(|tool| is_custom(tool));
    custom.filter_map(|tool| tool.get("name")?.as_str().map(str::to_owned)).collect()
}

pub fn is_custom(tool: &Value) -> bool {
    tool.get("type").is_some_and(|kind| kind == "custom")
}

/// Returns the function by which the model calls a custom tool. The grammar of its input becomes a part of the description.
pub fn function(tool: &Value) -> Option<Value> {
    let name = tool.get("name")?.as_str()?;
    let mut description =
        tool.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    let definition = tool.pointer("/format/definition").and_then(Value::as_str);
    if let Some(definition) = definition {
        let syntax = tool.pointer("/format/syntax").and_then(Value::as_str).unwrap_or("lark");
        description += &format!("\n\nThe input follows this grammar ({syntax}):\n{definition}");
    }
    let input = json!({ PARAMETER: { "type": "string" } });
    let parameters = json!({ "type": "object", "properties": input, "required": [PARAMETER] });
    let function = json!({ "name": name, "description": description, "parameters": parameters });
    Some(json!({ "type": "function", "function": function }))
}

/// The input of a call, read from the arguments as they come.
#[derive(Default)]
pub struct Input {
    arguments: String,
    /// Bytes of the arguments that were read.
    read: usize,
    is_begun: bool,
    text: String,
}

impl Input {
    /// Takes more of the arguments. Returns what they add to the input.
    pub fn push(&mut self, arguments: &str) -> &str {
        self.arguments.push_str(arguments);
        let before = self.text.len();
        if !self.is_begun
            && let Some(begin) = begin(&self.arguments)
        {
            (self.is_begun, self.read) = (true, begin);
        }
        if !self.is_begun {
            return "";
        }
        loop {
            let rest = &self.arguments[self.read..];
            let plain = rest.find(['"', '\\']).unwrap_or(rest.len());
            self.text.push_str(&rest[..plain]);
            self.read += plain;
            let Some((escaped, length)) = escape(&rest[plain..]) else { break };
            self.text.push_str(&escaped);
            self.read += length;
        }
        &self.text[before..]
    }

    /// Returns the whole input. Arguments that cannot be read are the input themselves.
    pub fn whole(&self) -> String {
        let arguments = serde_json::from_str::<Value>(&self.arguments).ok();
        let input = arguments.as_ref().and_then(|of| of.get(PARAMETER)?.as_str());
        match (input, self.is_begun) {
            (Some(input), _) => input.to_owned(),
            (None, true) => self.text.clone(),
            (None, false) => self.arguments.clone(),
        }
    }
}

/// Returns where the text of the input begins.
fn begin(arguments: &str) -> Option<usize> {
    let mut rest = arguments.trim_start();
    for part in ["{", "\"input\"", ":", "\""] {
        rest = rest.trim_start().strip_prefix(part)?;
    }
    Some(arguments.len() - rest.len())
}

/// Reads an escape at the beginning of a text. Returns its text and length, or `None` if it is not complete or if the text ends.
fn escape(text: &str) -> Option<(String, usize)> {
    let read = |length: usize| {
        let escaped = text.get(..length)?;
        let read = serde_json::from_str::<String>(&format!("\"{escaped}\"")).ok()?;
        Some((read, length))
    };
    match text.as_bytes() {
        // A pair of surrogates has two escapes.
        [b'\\', b'u', ..] => read(6).or_else(|| read(12)),
        [b'\\', ..] => read(2),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_input_is_read_as_it_comes() {
        let text = "*** Begin\n\t\"é\" \\ 😀 </a>";
        let escaped = json!({ "input": text }).to_string().replace('é', "\\u00e9");
        for arguments in [escaped.clone(), escaped.replace('😀', "\\ud83d\\ude00")] {
            let mut input = Input::default();
            let mut sum = String::new();
            for character in arguments.chars() {
                sum += input.push(character.encode_utf8(&mut [0; 4]));
            }
            assert_eq!((sum.as_str(), input.whole().as_str()), (text, text));
        }
        let mut cut = Input::default();
        cut.push("{ \"input\" : \"a\\n");
        assert_eq!(cut.whole(), "a\n");
        let mut other = Input::default();
        assert_eq!(other.push("{\"x\": 1}"), "");
        assert_eq!(other.whole(), "{\"x\": 1}");
    }

    #[test]
    fn custom_tools_are_functions_for_the_model() {
        let format = json!({ "type": "grammar", "syntax": "lark", "definition": "start: \"x\"" });
        let tool = json!({ "type": "custom", "name": "patch", "description": "Patches.", "format": format });
        let function = function(&tool).unwrap();
        assert_eq!(function["function"]["name"], "patch");
        let description = function["function"]["description"].as_str().unwrap();
        assert!(description.starts_with("Patches.") && description.ends_with("start: \"x\""));
        let tools = [tool, json!({ "type": "function", "name": "f" })];
        assert_eq!(names(&tools).into_iter().collect::<Vec<_>>(), ["patch"]);
    }
}
