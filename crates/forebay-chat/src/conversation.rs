//! A conversation in the form that a chat template takes.
//!
//! Templates differ in more than their marks. Some have no system message, some take one call in a message, some want ids of
//! a certain form. A conversation that the template would refuse or shorten is changed so that nothing is lost.

use forebay_text::{ChatTemplate, ContentMarks};
use serde_json::{Map, Value, json};

use crate::ids::{self, Ids};
use crate::{
    DsmlNames, ListMarks, Message, ToolCall, ToolSyntax, generic_tools, probe, text_calls,
};

/// Names under which templates look for the reasoning of a message.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Form that a template needs of the messages of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Fields of a message that the template reads reasoning from.
    reasoning_fields: Vec<&'static str>,
    /// True if the template reads reasoning from a block of the content, as Mistral's do.
    reasoning_blocks: bool,
    /// True if reasoning replaces the text before a call. The template of gpt-oss uses one of them, never both. The model
    /// was trained to see its reasoning.
    reasoning_instead: bool,
    /// True if the template writes a tool call's arguments as they are. It then gets the model's own text.
    arguments_as_text: bool,
    /// True if a message can have one call only.
    single_calls: bool,
    /// True if the template writes calls. Otherwise, calls and results are written as text.
    own_calls: bool,
    /// Syntax of the calls, if the template describes tools but writes no calls. They then become a part of the content.
    calls_in_content: Option<ToolSyntax>,
    /// True if the template reads the tools from the system message, as the text of a list.
    tools_in_system: bool,
    /// True if text before calls of the current turn must be a part of the reasoning.
    text_in_reasoning: bool,
    /// True if results must be in the order of their calls.
    results_in_order: bool,
    /// Form of a call, if the template does not describe tools. The system message then describes them.
    form_of_calls: Option<&'static str>,
    /// True if results of tools are a part of the message with the calls, as in the first templates of Gemma 4.
    responses_in_call: bool,
    /// True if the template does not write system messages.
    no_system: bool,
    /// True if the template reads the role `developer`.
    has_developer: bool,
    ids: Ids,
    /// True if the name of the tool belongs to each result.
    names: bool,
}

impl Needs {
    /// Finds out what a template needs. `syntax` is that of its tool calls. A template `for_tools` writes tools, calls and
    /// results itself, in whatever form.
    pub fn of(
        template: &ChatTemplate,
        syntax: Option<ToolSyntax>,
        is_harmony: bool,
        for_tools: bool,
    ) -> Needs {
        let source = template.source();
        let gemma = matches!(syntax, Some(ToolSyntax::Gemma4 | ToolSyntax::FunctionGemma));
        let own = match syntax {
            Some(ToolSyntax::Lfm2 | ToolSyntax::MarkedList(_)) => !probe::writes_calls(template),
            _ => false,
        };
        let tools_in_system = syntax == Some(ToolSyntax::MarkedList(ListMarks::Phi))
            && !probe::describes_tools(template);
        Needs {
            calls_in_content: syntax.filter(|_| own),
            tools_in_system,
            text_in_reasoning: gemma && probe::text_ends_turn(template)
                || matches!(
                    syntax,
                    Some(ToolSyntax::Cohere | ToolSyntax::Solar | ToolSyntax::Atem)
                ) && !probe::writes_text_of_calls(template),
            results_in_order: matches!(
                syntax,
                Some(ToolSyntax::Dsml(DsmlNames::V4 | DsmlNames::V41))
            ),
            reasoning_fields: REASONING_FIELDS
                .into_iter()
                .filter(|name| reads(source, name))
                .collect(),
            reasoning_blocks: source.contains("[THINK]") && source.contains("'thinking'"),
            reasoning_instead: is_harmony,
            // The templates of Gemma write a text as it is, but the model's own form is not JSON.
            // That of Kimi K3 would write it as JSON in one element, which is not the model's own form either.
            arguments_as_text: !gemma
                && syntax != Some(ToolSyntax::Kimi3)
                && probe::writes_arguments_verbatim(template),
            single_calls: probe::has_single_calls(template),
            own_calls: syntax.is_some() || is_harmony || for_tools,
            form_of_calls: match is_harmony || probe::describes_tools(template) && syntax.is_some()
            {
                true => None,
                false if tools_in_system || for_tools => None,
                false => generic_tools::form(syntax),
            },
            responses_in_call: syntax == Some(ToolSyntax::Gemma4)
                && !probe::reads_tool_messages(template),
            no_system: !probe::takes_system(template),
            has_developer: source.contains("developer"),
            ids: match syntax {
                Some(ToolSyntax::MistralList { .. } | ToolSyntax::MistralArguments { .. }) => {
                    Ids::Nine
                }
                Some(ToolSyntax::Kimi) => Ids::Numbered,
                Some(ToolSyntax::Solar) => Ids::Ten,
                _ => Ids::Own,
            },
            names: gemma,
        }
    }

    /// Returns the messages and the tools as the template takes them, with their text marked. The template decides which past
    /// reasoning stays in the prompt.
    pub fn apply(
        &self,
        messages: &[Message],
        tools: Option<&Value>,
        marks: &ContentMarks,
    ) -> (Value, Option<Value>) {
        let mut all: Vec<Message> = messages.iter().map(|message| marked(message, marks)).collect();
        let tools = tools.map(|tools| marks.value(tools));
        if !self.has_developer {
            all.iter_mut().filter(|m| m.role == "developer").for_each(|m| m.role = "system".into());
        }
        join_instructions(&mut all);
        if !self.own_calls {
            all = generic_tools::as_text(all, marks);
        }
        if self.text_in_reasoning {
            text_in_reasoning(&mut all);
        }
        if self.results_in_order {
            in_order_of_calls(&mut all);
        }
        if let Some(syntax) = self.calls_in_content {
            text_calls::in_content(&mut all, syntax, marks);
        }
        let mut tools =
            tools.as_ref().filter(|tools| tools.as_array().is_none_or(|list| !list.is_empty()));
        if let (Some(form), Some(described)) = (self.form_of_calls, tools) {
            generic_tools::describe(&mut all, described, form);
            tools = None;
        }
        if self.single_calls {
            all = one_call_each(all);
        }
        if self.no_system {
            all = system_in_user(all);
        }
        ids::complete(&mut all, self.ids, self.names);
        let mut values: Vec<Value> =
            all.iter().map(|message| self.for_template(message, marks)).collect();
        if self.responses_in_call {
            values = responses_in_call(values);
        }
        if let Some(list) = tools.filter(|_| self.tools_in_system) {
            tools_in_system(&mut values, list);
        }
        (Value::Array(values), tools.cloned())
    }

    /// Returns a message with the fields that the template reads.
    fn for_template(&self, message: &Message, marks: &ContentMarks) -> Value {
        let mut value = message.to_json();
        let Some(object) = value.as_object_mut() else { return value };
        object.remove("reasoning_content");
        if let Some(reasoning) = &message.reasoning {
            self.add_reasoning(object, message, reasoning);
        }
        if !self.arguments_as_text
            && let Some(Value::Array(calls)) = object.get_mut("tool_calls")
        {
            calls.iter_mut().for_each(|call| arguments_to_value(call, marks));
        }
        value
    }

    fn add_reasoning(&self, object: &mut Map<String, Value>, message: &Message, reasoning: &str) {
        if self.reasoning_blocks {
            let mut blocks = vec![json!({ "type": "thinking", "thinking": reasoning })];
            if !message.content.is_empty() {
                blocks.push(json!({ "type": "text", "text": message.content }));
            }
            object.insert("content".into(), blocks.into());
            return;
        }
        for field in &self.reasoning_fields {
            object.insert((*field).to_owned(), json!(reasoning));
        }
        if self.reasoning_instead && !message.tool_calls.is_empty() {
            object.insert("content".into(), json!(""));
        }
    }
}

/// Returns true if a template reads a field `name`, as `.name`, `['name']` or `'name' in`.
fn reads(source: &str, name: &str) -> bool {
    source.match_indices(name).any(|(at, _)| {
        let before = source[..at].chars().next_back();
        let after = source[at + name.len()..].chars().next();
        before.is_some_and(|c| matches!(c, '.' | '\'' | '"'))
            && after.is_none_or(|c| !c.is_alphanumeric() && c != '_')
    })
}

/// Replaces the text of a call's arguments by the JSON that it holds. Text that is not JSON, such as an answer that was
/// cut, stays text.
fn arguments_to_value(call: &mut Value, marks: &ContentMarks) {
    let Some(arguments) = call.pointer_mut("/function/arguments") else { return };
    let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
    if let Some(parsed) = parsed {
        *arguments = marks.value_again(parsed);
    }
}

/// Returns a message whose text cannot become control tokens. Its role is one of a few words.
fn marked(message: &Message, marks: &ContentMarks) -> Message {
    let optional = |text: &Option<String>| text.as_ref().map(|text| marks.text(text));
    let call = |call: &ToolCall| ToolCall {
        id: optional(&call.id),
        name: marks.text(&call.name),
        arguments: marks.json_text(&call.arguments),
    };
    Message {
        role: message.role.clone(),
        content: marks.text(&message.content),
        reasoning: optional(&message.reasoning),
        tool_calls: message.tool_calls.iter().map(call).collect(),
        tool_call_id: optional(&message.tool_call_id),
        name: optional(&message.name),
    }
}

/// Makes one message of the instructions at the beginning that have the same role. Many templates take only one, and clients
/// such as Codex send several.
fn join_instructions(messages: &mut Vec<Message>) {
    let is_joined =
        |first: &Message, next: &Message| first.is_instruction() && first.role == next.role;
    while messages.len() > 1 && is_joined(&messages[0], &messages[1]) {
        let next = messages.remove(1);
        messages[0].content += "\n\n";
        messages[0].content += &next.content;
    }
}

/// Gives each call a message of its own, with the call's result behind it.
fn one_call_each(messages: Vec<Message>) -> Vec<Message> {
    let mut all = Vec::with_capacity(messages.len());
    let mut rest = messages.into_iter().peekable();
    while let Some(mut message) = rest.next() {
        if message.tool_calls.len() < 2 {
            all.push(message);
            continue;
        }
        let mut results = Vec::new();
        while let Some(result) = rest.next_if(|next| next.role == "tool") {
            results.push(result);
        }
        let calls: Vec<ToolCall> = std::mem::take(&mut message.tool_calls);
        for call in calls {
            let of_call = |result: &Message| call.id.is_some() && result.tool_call_id == call.id;
            let found = results.iter().position(of_call);
            // Results without ids are in the order of the calls.
            let by_order = || results.iter().position(|result| result.tool_call_id.is_none());
            let result = found.or_else(by_order).map(|at| results.remove(at));
            let text = std::mem::take(&mut message.content);
            all.push(Message {
                reasoning: message.reasoning.take(),
                tool_calls: vec![call],
                ..Message::new("assistant", text)
            });
            all.extend(result);
        }
        all.extend(results);
    }
    all
}

/// Writes the instructions before the text of the first user message.
fn system_in_user(messages: Vec<Message>) -> Vec<Message> {
    let (instructions, mut others): (Vec<Message>, Vec<Message>) =
        messages.into_iter().partition(Message::is_instruction);
    let texts = instructions.into_iter().map(|message| message.content);
    let texts: Vec<String> = texts.filter(|text| !text.is_empty()).collect();
    if texts.is_empty() {
        return others;
    }
    let text = texts.join("\n\n");
    match others.iter_mut().find(|message| message.role == "user") {
        Some(user) => user.content = format!("{text}\n\n{}", user.content),
        None => others.insert(0, Message::new("user", text)),
    }
    others
}

/// Moves text before calls into the reasoning, behind the last question. Earlier turns are over, and keep their text.
fn text_in_reasoning(messages: &mut [Message]) {
    let is_question = |message: &Message| message.role == "user";
    let turn = messages.iter().rposition(is_question).map_or(0, |at| at + 1);
    let calls = messages[turn..].iter_mut().filter(|message| !message.tool_calls.is_empty());
    for message in calls.filter(|message| !message.content.is_empty()) {
        let text = std::mem::take(&mut message.content);
        let reasoning = message.reasoning.take().map(|reasoning| format!("{reasoning}\n\n{text}"));
        message.reasoning = Some(reasoning.unwrap_or(text));
    }
}

/// Sorts the results that follow each other by the calls that they belong to. Results of unknown calls come first.
fn in_order_of_calls(messages: &mut [Message]) {
    let mut order: Vec<Option<String>> = Vec::new();
    for group in messages.chunk_by_mut(|a, b| a.role == "tool" && b.role == "tool") {
        match group {
            [message] if !message.tool_calls.is_empty() => {
                order = message.tool_calls.iter().map(|call| call.id.clone()).collect();
            }
            results if results.len() > 1 => results.sort_by_key(|result| {
                order.iter().position(|id| id.is_some() && *id == result.tool_call_id)
            }),
            _ => {}
        }
    }
}

/// Writes the tools into the system message, as Phi-4-mini's template reads them.
fn tools_in_system(values: &mut Vec<Value>, tools: &Value) {
    let functions = tools.as_array().into_iter().flatten();
    let list: Value = functions.map(|tool| tool.get("function").unwrap_or(tool).clone()).collect();
    let is_system = |value: &Value| value.get("role").is_some_and(|role| role == "system");
    if !values.first().is_some_and(is_system) {
        values.insert(0, Message::new("system", "You can use tools.").to_json());
    }
    if let Some(system) = values.first_mut().and_then(Value::as_object_mut) {
        system.insert("tools".to_owned(), ToolCall::text_of(&list).into());
    }
}

/// Moves the results of tools into the messages with the calls.
fn responses_in_call(values: Vec<Value>) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::with_capacity(values.len());
    for value in values {
        let is_result = value.get("role").is_some_and(|role| role == "tool");
        let caller = all.last_mut().filter(|last| is_result && last.get("tool_calls").is_some());
        match caller.and_then(Value::as_object_mut) {
            Some(caller) => {
                let response =
                    json!({ "name": value.get("name"), "response": value.get("content") });
                let responses = caller.entry("tool_responses").or_insert_with(|| json!([]));
                if let Some(responses) = responses.as_array_mut() {
                    responses.push(response);
                }
            }
            None => all.push(value),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str) -> ToolCall {
        ToolCall { id: Some(id.into()), name: format!("f_{id}"), arguments: "{}".into() }
    }

    fn result(id: &str) -> Message {
        Message { tool_call_id: Some(id.into()), ..Message::new("tool", format!("result {id}")) }
    }

    #[test]
    fn calls_and_their_results_become_pairs() {
        let calls = Message {
            reasoning: Some("why".into()),
            tool_calls: vec![call("a"), call("b")],
            ..Message::new("assistant", "I look.")
        };
        let all = one_call_each(vec![calls, result("b"), result("a"), Message::new("user", "x")]);
        let texts: Vec<&str> = all.iter().map(|message| message.content.as_str()).collect();
        assert_eq!(texts, ["I look.", "result a", "", "result b", "x"]);
        assert_eq!((all[0].reasoning.as_deref(), all[2].reasoning.as_deref()), (Some("why"), None));
        assert_eq!(all[2].tool_calls, [call("b")]);
    }

    #[test]
    fn results_follow_the_order_of_their_calls() {
        let calls = Message {
            tool_calls: vec![call("a"), call("b"), call("c")],
            ..Message::new("assistant", "")
        };
        let results = [result("c"), Message::new("tool", "none"), result("b"), result("a")];
        let mut all = vec![calls.clone()];
        all.extend(results);
        all.extend([Message::new("user", "x"), calls, result("b"), result("a")]);
        in_order_of_calls(&mut all);
        let texts: Vec<&str> = all.iter().map(|message| message.content.as_str()).collect();
        let expected =
            ["", "none", "result a", "result b", "result c", "x", "", "result a", "result b"];
        assert_eq!(texts, expected);
    }

    #[test]
    fn instructions_of_one_role_become_one_message() {
        let roles = ["system", "system", "developer", "user", "system"];
        let mut all: Vec<Message> = roles.iter().map(|role| Message::new(role, "x")).collect();
        join_instructions(&mut all);
        let texts: Vec<(&str, &str)> =
            all.iter().map(|m| (m.role.as_str(), m.content.as_str())).collect();
        let expected = [("system", "x\n\nx"), ("developer", "x"), ("user", "x"), ("system", "x")];
        assert_eq!(texts, expected);
    }

    #[test]
    fn instructions_move_into_the_first_question() {
        let all = system_in_user(vec![
            Message::new("system", "A"),
            Message::new("assistant", "hi"),
            Message::new("developer", "B"),
            Message::new("user", "x"),
        ]);
        assert_eq!(all, [Message::new("assistant", "hi"), Message::new("user", "A\n\nB\n\nx")]);
        let all = system_in_user(vec![Message::new("system", "A")]);
        assert_eq!(all, [Message::new("user", "A")]);
    }
}
