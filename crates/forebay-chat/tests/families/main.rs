//! Conversations of each family: what the model writes is parsed, and the prompt of the next turn has it in the form of the
//! template.
//!
//! A template is read from `templates/` of the reference data. Templates that are not there are replaced by short ones of
//! this test, which write messages in the published form.

mod conversations;
mod latest;
mod latest_templates;
mod newer;
mod newer_templates;
mod templates;

use std::path::{Path, PathBuf};

use forebay_chat::{Event, Format, Message, Parser, Think, ToolCall};
use forebay_text::ChatTemplate;
use serde_json::{Map, Value, json};

/// A conversation with one family of models.
struct Conversation<'a> {
    /// File of the template, and the short template that stands for it.
    file: &'static str,
    own: &'static str,
    eos: &'static str,
    /// Variables of the template.
    variables: &'static [(&'static str, bool)],
    /// How much the model is asked to think.
    think: Option<Think>,
    /// Output of the model: reasoning and calls. Control tokens have a `\u{1}` on both sides.
    writes: &'a str,
    reasoning: Option<&'static str>,
    content: &'a str,
    /// True if the answer has the second call, too.
    both: bool,
    /// The prompt behind the question, when the results are there.
    prompt: &'a str,
}

const NONE: Conversation<'static> = Conversation {
    file: "",
    own: "",
    eos: "",
    variables: &[],
    think: None,
    writes: "",
    reasoning: None,
    content: "",
    both: true,
    prompt: "",
};

fn folder() -> PathBuf {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    std::env::var_os("FOREBAY_FIXTURES").map_or(project, PathBuf::from).join("templates")
}

fn template(file: &str, own: &str, eos: &str) -> ChatTemplate {
    let source = match std::fs::read_to_string(folder().join(file)) {
        Ok(source) => source,
        Err(_) => {
            assert!(!own.is_empty(), "{file} is missing");
            own.to_owned()
        }
    };
    ChatTemplate::from_source(&source, "", eos).unwrap()
}

fn tools() -> Value {
    let of = |name: &str, parameters: Value| {
        let function = json!({ "name": name, "description": "d", "parameters": parameters });
        json!({ "type": "function", "function": function })
    };
    let properties = json!({ "city": { "type": "string" }, "days": { "type": "integer" } });
    json!([
        of("weather", json!({ "type": "object", "properties": properties, "required": ["city"] })),
        of("time", json!({ "type": "object", "properties": { "zone": { "type": "string" } } })),
    ])
}

/// Parses what a model writes. `cut` says how many characters come at a time, 0 for all.
fn parse(format: &Format, prompt: &str, writes: &str, cut: usize, controls: bool) -> Message {
    let mut parser = Parser::new(format, prompt);
    let mut sum = Message::new("assistant", "");
    let mut add = |event: Event<'_>| match event {
        Event::Reasoning(text) => sum.reasoning.get_or_insert_default().push_str(text),
        Event::Content(text) => sum.content.push_str(text),
        Event::ToolCall { index, name } => {
            assert_eq!(index, sum.tool_calls.len());
            sum.tool_calls.push(ToolCall { name: name.to_owned(), ..ToolCall::default() });
        }
        Event::Arguments { index, text } => sum.tool_calls[index].arguments.push_str(text),
    };
    let plain = writes.replace('\u{1}', "");
    let parts: Vec<&str> = if controls { writes.split('\u{1}').collect() } else { vec![&plain] };
    for (index, part) in parts.into_iter().enumerate() {
        let chars: Vec<char> = part.chars().collect();
        match (index % 2, cut) {
            (1, _) => parser.control(part, &mut add),
            (_, 0) => parser.text(part, &mut add),
            (_, _) => chars
                .chunks(cut)
                .for_each(|piece| parser.text(&piece.iter().collect::<String>(), &mut add)),
        }
    }
    let message = parser.finish(&mut add);
    assert_eq!(message, sum, "the events do not add up to the message");
    message
}

impl Conversation<'_> {
    fn expected(&self) -> Message {
        let call = |name: &str, arguments: &str| ToolCall {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
            id: None,
        };
        let mut calls = vec![call("weather", "{\"city\":\"Zürich\",\"days\":2}")];
        if self.both {
            calls.push(call("time", "{\"zone\":\"CET\"}"));
        }
        Message {
            reasoning: self.reasoning.map(str::to_owned),
            tool_calls: calls,
            ..Message::new("assistant", self.content)
        }
    }

    /// Leads the conversation.
    fn lead(&self) {
        let template = template(self.file, self.own, self.eos);
        let tools = tools();
        let recognised = Format::recognise(Some(&template), None).unwrap();
        let format = recognised.offering(Some(&tools));
        let variables =
            self.variables.iter().map(|(name, value)| ((*name).to_owned(), json!(value)));
        let mut variables: Map<String, Value> = variables.collect();
        variables.extend(self.think.into_iter().flat_map(|think| format.think(think).unwrap()));
        let render = |messages: &[Message]| {
            let prompt = format.render(&template, messages, Some(&tools), &variables);
            prompt.unwrap_or_else(|error| panic!("{}: {error}", self.file)).into_text()
        };
        let mut messages =
            vec![Message::new("system", "Be brief."), Message::new("user", "Weather?")];
        let prompt = render(&messages);
        assert!(prompt.contains("weather") && prompt.contains("Be brief."), "{prompt}");
        let mut message = parse(&format, &prompt, self.writes, 0, true);
        for cut in [1, 2, 3, 7] {
            assert_eq!(
                parse(&format, &prompt, self.writes, cut, true),
                message,
                "{}: {cut}",
                self.file
            );
        }
        if !["<|channel|>", "<|eom|>"].iter().any(|mark| self.writes.contains(mark)) {
            // The marks as text.
            for cut in [0, 1, 4] {
                let text = parse(&format, &prompt, self.writes, cut, false);
                assert_eq!(text, message, "{}: {cut}", self.file);
            }
        }
        let compact = |call: &mut ToolCall| {
            let value: Value = serde_json::from_str(&call.arguments).unwrap();
            call.arguments = value.to_string();
        };
        message.tool_calls.iter_mut().for_each(compact);
        assert_eq!(message, self.expected(), "{}", self.file);
        let ids = ["call00001", "call00002"];
        for (call, id) in message.tool_calls.iter_mut().zip(ids) {
            call.id = Some(id.to_owned());
        }
        let count = message.tool_calls.len();
        messages.push(message);
        for (id, result) in ids.into_iter().zip(["warm", "noon"]).take(count) {
            let id = Some(id.to_owned());
            messages.push(Message { tool_call_id: id, ..Message::new("tool", result) });
        }
        let prompt = render(&messages);
        let behind = prompt.rfind("Weather?").map(|at| &prompt[at + "Weather?".len()..]).unwrap();
        assert_eq!(behind, self.prompt, "{}", self.file);
        // The answer and the next question.
        messages.extend([Message::new("assistant", "Answered."), Message::new("user", "Thanks!")]);
        let prompt = render(&messages);
        let at = |text: &str| prompt.rfind(text).unwrap_or_else(|| panic!("{text}: {prompt}"));
        assert!(at("warm") < at("Answered.") && at("Answered.") < at("Thanks!"), "{prompt}");
        // Without tools, the same text is an answer.
        let message =
            parse(&recognised.offering(None), &prompt, "Well: {\"name\": \"weather\"}", 1, true);
        assert_eq!(message.tool_calls, []);
    }
}
