//! Grammars of calls whose arguments are JSON.

use serde_json::json;

use super::writer::{Form, Tool, Writer};
use crate::ListMarks;

/// Returns what is before and behind the arguments in `{"name": "f", "arguments": {...}}`.
fn described(name: &str) -> (String, &'static str) {
    (format!("{{\"name\": {}, \"arguments\": ", json!(name)), "}")
}

impl Writer<'_> {
    /// `<tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>`
    pub fn json(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| {
            let open = format!("<tool_call>\n{{\"name\": {}, \"arguments\": ", json!(name));
            (open, "}\n</tool_call>\n")
        };
        Form { rules: self.objects(tools, around), ..Form::default() }
    }

    /// `f<｜tool▁sep｜>{...}`, or with `fenced`, `function<｜tool▁sep｜>f` and a code block.
    pub fn deepseek(&self, tools: &[Tool<'_>], fenced: bool) -> Form {
        let around = |name: &str| match fenced {
            true => {
                let open = format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n");
                (open, "\n```<｜tool▁call▁end｜>")
            }
            false => {
                let open = format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>");
                (open, "<｜tool▁call▁end｜>")
            }
        };
        Form {
            rules: self.objects(tools, around),
            open: "<｜tool▁calls▁begin｜>",
            close: "<｜tool▁calls▁end｜>",
            ..Form::default()
        }
    }

    /// `<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>`
    pub fn harmony(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| {
            let open = format!(
                "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
            );
            (open, "<|call|>")
        };
        Form { rules: self.objects(tools, around), ..Form::default() }
    }

    /// `{"name": "f", "parameters": {...}}`
    pub fn llama(&self, tools: &[Tool<'_>]) -> Form {
        let around = |name: &str| (format!("{{\"name\": {}, \"parameters\": ", json!(name)), "}");
        Form { rules: self.objects(tools, around), separator: "; ", ..Form::default() }
    }

    /// `[TOOL_CALLS][{"name": "f", "arguments": {...}}]`
    pub fn mistral_list(&self, tools: &[Tool<'_>], spaced: bool) -> Form {
        Form {
            rules: self.objects(tools, described),
            open: if spaced { "[TOOL_CALLS] [" } else { "[TOOL_CALLS][" },
            close: "]",
            separator: ", ",
        }
    }

    /// `<|tool_call|>[{"name": "f", "arguments": {...}}]<|/tool_call|>`, or with other marks
    pub fn marked_list(&self, tools: &[Tool<'_>], marks: ListMarks) -> Form {
        let [open, close] = match marks {
            ListMarks::Phi => ["<|tool_call|>[", "]<|/tool_call|>"],
            ListMarks::Functools => ["functools[", "]"],
            ListMarks::Granite => ["<|tool_call|>[", "]"],
        };
        Form { rules: self.objects(tools, described), open, close, separator: ", " }
    }

    /// `[{"name": "f", "arguments": {...}}]` between two marks, which the brackets are a part of here
    pub fn enclosed_list(&self, tools: &[Tool<'_>], [open, close]: [&'static str; 2]) -> Form {
        let rules = self.objects(tools, described);
        Form { rules, open, close, separator: ", " }
    }

    /// `[TOOL_CALLS]f[ARGS]{...}`, or `[TOOL_CALLS]f[CALL_ID]id[ARGS]{...}`
    pub fn mistral_arguments(&self, tools: &[Tool<'_>], call_id: bool) -> Form {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let arguments = self.inline(tool, &tool.schema);
            let name = tool.name;
            match call_id {
                true => {
                    let id = format!("call_id {} {arguments}", self.literal("[ARGS]"));
                    self.rule(number, &format!("[TOOL_CALLS]{name}[CALL_ID]"), &id, "")
                }
                false => self.rule(number, &format!("[TOOL_CALLS]{name}[ARGS]"), &arguments, ""),
            }
        };
        let mut rules: String = tools.iter().enumerate().map(rule).collect();
        if call_id {
            rules += "call_id: /[a-zA-Z0-9]{9}/\n";
        }
        Form { rules, ..Form::default() }
    }

    /// `<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {...}}\n]<|END_ACTION|>`
    pub fn cohere(&self, tools: &[Tool<'_>]) -> Form {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let name = format!("\", \"tool_name\": {}, \"parameters\": ", json!(tool.name));
            let arguments = self.inline(tool, &tool.schema);
            let middle = format!("call_number {} {arguments}", self.literal(&name));
            self.rule(number, "\n    {\"tool_call_id\": \"", &middle, "}")
        };
        let rules: String = tools.iter().enumerate().map(rule).collect();
        Form {
            rules: rules + "call_number: /[0-9]{1,4}/\n",
            open: "<|START_ACTION|>[",
            close: "\n]<|END_ACTION|>",
            separator: ",",
        }
    }

    /// `<|tool_calls|><|tool_call:begin|>id<|tool_call:name|>f<|tool_call:args|>{...}<|tool_call:end|><|calls|>`
    pub fn solar(&self, tools: &[Tool<'_>]) -> Form {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let name = format!("<|tool_call:name|>{}<|tool_call:args|>", tool.name);
            let arguments = self.inline(tool, &tool.schema);
            let middle = format!("call_id {} {arguments}", self.literal(&name));
            self.rule(number, "<|tool_call:begin|>", &middle, "<|tool_call:end|>")
        };
        let rules: String = tools.iter().enumerate().map(rule).collect();
        Form {
            rules: rules + "call_id: /[a-z0-9]{10}/\n",
            open: "<|tool_calls|>",
            close: "<|calls|>",
            ..Form::default()
        }
    }

    /// `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`
    pub fn kimi(&self, tools: &[Tool<'_>]) -> Form {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let open = format!("<|tool_call_begin|>functions.{}:", tool.name);
            let begin = self.literal("<|tool_call_argument_begin|>");
            let middle = format!("call_number {begin} {}", self.inline(tool, &tool.schema));
            self.rule(number, &open, &middle, "<|tool_call_end|>")
        };
        let rules: String = tools.iter().enumerate().map(rule).collect();
        Form {
            rules: rules + "call_number: /[0-9]{1,4}/\n",
            open: "<|tool_calls_section_begin|>",
            close: "<|tool_calls_section_end|>",
            ..Form::default()
        }
    }
}
