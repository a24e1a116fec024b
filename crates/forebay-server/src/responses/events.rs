//! The items of a response, and the events that report them.

use std::collections::BTreeSet;

use forebay_chat::{Message, ToolCall};
use forebay_requests::answer::{call_id, finish_reason};
use forebay_requests::{Choice, Piece, Update};
use serde_json::{Value, json};

use super::custom::Input;
use crate::error::ApiError;
use crate::stream;

/// The kind of an item.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call(usize),
}

/// An item that is being written.
struct Open {
    kind: Kind,
    text: String,
    /// Name of the function.
    name: String,
    /// Input of the call, if it is one of a custom tool.
    input: Option<Input>,
}

/// A response that is being written.
pub struct Writer {
    unique: String,
    /// The response with everything but its status, items and usage.
    head: Value,
    /// Names of the custom tools.
    custom: BTreeSet<String>,
    items: Vec<Value>,
    open: Option<Open>,
    number: u64,
    reasoning_tokens: usize,
    /// The answer, once it is complete.
    choice: Option<Choice>,
}

impl Writer {
    pub fn new(unique: String, head: Value, custom: BTreeSet<String>) -> Writer {
        Writer {
            unique,
            head,
            custom,
            items: Vec::new(),
            open: None,
            number: 0,
            reasoning_tokens: 0,
            choice: None,
        }
    }

    /// Returns the answer, once it is complete.
    pub fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    /// Adds a field to the response.
    pub fn add_to_head(&mut self, name: &str, value: Value) {
        self.head[name] = value;
    }

    fn event(&mut self, name: &str, mut value: Value, out: &mut String) {
        value["type"] = name.into();
        value["sequence_number"] = self.number.into();
        self.number += 1;
        stream::event(name, &value, out);
    }

    /// Writes what comes before the first item.
    pub fn begin(&mut self, out: &mut String) {
        for name in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress");
            self.event(name, json!({ "response": response }), out);
        }
    }

    pub fn update(&mut self, update: Update, out: &mut String) {
        let (pieces, done) = match update {
            Update::Token { pieces, .. } => (pieces, None),
            Update::Done { pieces, answer, .. } => (pieces, Some(answer)),
        };
        let reasons = |piece: &Piece| matches!(piece, Piece::Reasoning(_));
        self.reasoning_tokens += usize::from(done.is_none() && pieces.iter().any(reasons));
        for piece in &pieces {
            self.piece(piece, out);
        }
        if let Some(choice) = done {
            self.close("completed", out);
            self.choice = Some(*choice);
        }
    }

    fn piece(&mut self, piece: &Piece, out: &mut String) {
        match piece {
            Piece::Reasoning(text) => {
                self.open(Kind::Reasoning, "", out);
                self.delta("response.reasoning_text.delta", text, out);
            }
            Piece::Content(text) => {
                self.open(Kind::Message, "", out);
                self.delta("response.output_text.delta", text, out);
            }
            Piece::ToolCall { index, name } => self.open(Kind::Call(*index), name, out),
            Piece::Arguments { index, text } => {
                self.open(Kind::Call(*index), "", out);
                let input = self.open.as_mut().and_then(|open| open.input.as_mut());
                match input.map(|input| input.push(text).to_owned()) {
                    None => self.delta("response.function_call_arguments.delta", text, out),
                    Some(new) if new.is_empty() => {}
                    Some(new) => self.delta("response.custom_tool_call_input.delta", &new, out),
                }
            }
        }
    }

    /// Begins an item, unless it is the one that is open.
    fn open(&mut self, kind: Kind, name: &str, out: &mut String) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", out);
        let input = self.custom.contains(name).then(Input::default);
        self.open = Some(Open { kind, text: String::new(), name: name.to_owned(), input });
        let (index, item) = (self.items.len(), self.item("in_progress"));
        let added = json!({ "output_index": index, "item": item });
        self.event("response.output_item.added", added, out);
        if let Some(part) = self.part("") {
            let place = self.place(json!({ "content_index": 0, "part": part }));
            self.event("response.content_part.added", place, out);
        }
    }

    fn delta(&mut self, name: &str, text: &str, out: &mut String) {
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let mut value = json!({ "delta": text });
        match open.kind {
            Kind::Message => (value["content_index"], value["logprobs"]) = (0.into(), json!([])),
            Kind::Reasoning => value["content_index"] = 0.into(),
            Kind::Call(_) => {}
        }
        let value = self.place(value);
        self.event(name, value, out);
    }

    /// Ends the open item.
    fn close(&mut self, status: &str, out: &mut String) {
        let Some(open) = &self.open else { return };
        let text = open.text.clone();
        match open.kind {
            Kind::Reasoning | Kind::Message => {
                let name = match open.kind {
                    Kind::Reasoning => "response.reasoning_text.done",
                    _ => "response.output_text.done",
                };
                let mut value = json!({ "content_index": 0, "text": text });
                if open.kind == Kind::Message {
                    value["logprobs"] = json!([]);
                }
                let value = self.place(value);
                self.event(name, value, out);
                let part = self.part(&text);
                let value = self.place(json!({ "content_index": 0, "part": part }));
                self.event("response.content_part.done", value, out);
            }
            Kind::Call(_) => {
                let (name, value) = match &open.input {
                    Some(input) => {
                        let value = json!({ "input": input.whole() });
                        ("response.custom_tool_call_input.done", value)
                    }
                    None => {
                        let value = json!({ "name": open.name, "arguments": text });
                        ("response.function_call_arguments.done", value)
                    }
                };
                let value = self.place(value);
                self.event(name, value, out);
            }
        }
        let (index, item) = (self.items.len(), self.item(status));
        let value = json!({ "output_index": index, "item": item });
        self.event("response.output_item.done", value, out);
        self.items.push(item);
        self.open = None;
    }

    /// Adds the place of the open item.
    fn place(&self, mut value: Value) -> Value {
        value["item_id"] = self.item_id().into();
        value["output_index"] = self.items.len().into();
        value
    }

    fn item_id(&self) -> String {
        let prefix = match self.open.as_ref().map(|open| (open.kind, &open.input)) {
            Some((Kind::Reasoning, _)) => "rs",
            Some((Kind::Call(_), None)) => "fc",
            Some((Kind::Call(_), Some(_))) => "ctc",
            _ => "msg",
        };
        format!("{prefix}_{}_{}", self.unique, self.items.len())
    }

    /// Returns the part of the open item's content, if it has content.
    fn part(&self, text: &str) -> Option<Value> {
        match self.open.as_ref()?.kind {
            Kind::Reasoning => Some(json!({ "type": "reasoning_text", "text": text })),
            Kind::Message => Some(
                json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": [] }),
            ),
            Kind::Call(_) => None,
        }
    }

    /// Returns the open item. One in progress has no content yet.
    fn item(&self, status: &str) -> Value {
        let Some(open) = &self.open else { return Value::Null };
        let content = match status {
            "in_progress" => json!([]),
            _ => json!([self.part(&open.text)]),
        };
        let mut item = json!({ "id": self.item_id(), "status": status });
        match open.kind {
            Kind::Reasoning => {
                item["type"] = "reasoning".into();
                (item["summary"], item["content"]) = (json!([]), content);
            }
            Kind::Message => {
                (item["type"], item["role"]) = ("message".into(), "assistant".into());
                item["content"] = content;
            }
            Kind::Call(number) => {
                item["name"] = open.name.as_str().into();
                item["call_id"] = call_id(&self.unique, 0, number).into();
                match &open.input {
                    Some(input) => {
                        (item["type"], item["input"]) =
                            ("custom_tool_call".into(), input.whole().into());
                    }
                    None => {
                        item["type"] = "function_call".into();
                        item["arguments"] = open.text.as_str().into();
                    }
                }
            }
        }
        item
    }

    /// Writes the end of the stream. `failure` says why the answer failed, if it did. Returns the response.
    pub fn end(&mut self, failure: Option<&ApiError>, out: &mut String) -> Value {
        self.close("incomplete", out);
        let is_cut = self.choice.as_ref().is_some_and(|choice| finish_reason(choice) == "length");
        let status = match failure {
            Some(_) => "failed",
            None if is_cut => "incomplete",
            None => "completed",
        };
        let mut response = self.response(status);
        if let Some(error) = failure {
            // Of the codes that OpenAI's libraries know, this is the one for errors of clients.
            let is_of_client = error.status.is_client_error();
            let code = if is_of_client { "invalid_prompt" } else { "server_error" };
            response["error"] = json!({ "code": code, "message": error.message });
        } else if is_cut {
            response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        self.event(&format!("response.{status}"), json!({ "response": response }), out);
        response
    }

    /// Returns the response so far.
    fn response(&self, status: &str) -> Value {
        let mut response = self.head.clone();
        response["status"] = status.into();
        response["output"] = self.items.clone().into();
        response["usage"] = match &self.choice {
            None if status == "in_progress" => Value::Null,
            None => json!({
                "input_tokens": 0,
                "input_tokens_details": { "cached_tokens": 0 },
                "output_tokens": 0,
                "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": 0,
            }),
            Some(Choice { statistics, .. }) => json!({
                "input_tokens": statistics.prompt_tokens,
                "input_tokens_details": { "cached_tokens": statistics.cached_tokens },
                "output_tokens": statistics.generated_tokens,
                "output_tokens_details": { "reasoning_tokens": self.reasoning_tokens },
                "total_tokens": statistics.prompt_tokens + statistics.generated_tokens,
            }),
        };
        response
    }

    /// Returns the answer as a message whose calls have the ids that the client got.
    pub fn message(&self) -> Option<Message> {
        let mut message = self.choice.as_ref()?.message.clone();
        for (number, ToolCall { id, .. }) in message.tool_calls.iter_mut().enumerate() {
            id.get_or_insert_with(|| call_id(&self.unique, 0, number));
        }
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn custom_tools_get_their_input_as_a_text() {
        let custom = BTreeSet::from(["patch".to_owned()]);
        let mut writer = Writer::new("u".into(), json!({ "id": "resp_u" }), custom);
        let mut out = String::new();
        let arguments = |text: &str| Piece::Arguments { index: 0, text: text.into() };
        let call = Piece::ToolCall { index: 0, name: "patch".into() };
        let pieces = vec![call, arguments("{\"input\": \"a\\"), arguments("nb"), arguments("\"}")];
        writer.update(Update::Token { choice: 0, id: 0, pieces, token: None }, &mut out);
        let response = writer.end(None, &mut out);
        let item = &response["output"][0];
        assert_eq!((&item["type"], &item["input"]), (&json!("custom_tool_call"), &json!("a\nb")));
        let data = out.lines().filter_map(|line| line.strip_prefix("data: "));
        let events: Vec<Value> = data.map(|data| serde_json::from_str(data).unwrap()).collect();
        let of = |name: &'static str| events.iter().filter(move |event| event["type"] == name);
        let deltas = of("response.custom_tool_call_input.delta");
        let deltas: Vec<&str> = deltas.map(|event| event["delta"].as_str().unwrap()).collect();
        assert_eq!(deltas, ["a", "\nb"]);
        let mut done = of("response.custom_tool_call_input.done");
        assert_eq!(done.next().unwrap()["input"], "a\nb");
    }

    #[test]
    fn a_stream_that_fails_ends_with_the_error_and_usage() {
        let head = json!({ "id": "resp_u", "error": null });
        let mut writer = Writer::new("u".into(), head, BTreeSet::new());
        let mut out = String::new();
        writer.begin(&mut out);
        let pieces = vec![Piece::Content("Half".into())];
        writer.update(Update::Token { choice: 0, id: 0, pieces, token: None }, &mut out);
        let response = writer.end(Some(&ApiError::stopped()), &mut out);
        assert_eq!(
            (&response["status"], &response["error"]["code"]),
            (&"failed".into(), &"server_error".into())
        );
        assert_eq!(response["usage"]["total_tokens"], 0);
        // What was sent is there, and marked as not complete.
        assert_eq!(response["output"][0]["content"][0]["text"], "Half");
        assert_eq!(response["output"][0]["status"], "incomplete");
        let last = out.lines().rfind(|line| line.starts_with("event: "));
        assert_eq!(last, Some("event: response.failed"));
    }
}
