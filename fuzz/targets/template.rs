//! Fuzzes chat templates. An input is the template, optionally followed by a zero byte and the conversation as JSON.
//! Without one, a default conversation is used.
//!
//! The engine itself panics on some slices (minijinja 3.0: `''[::-1]`). [`ChatTemplate`] turns that into an error, so
//! panics inside the engine are not findings. Panics in this project's code are, also when the engine calls it.

#![no_main]

use forebay_text::{ChatTemplate, CivilTime, RenderInput};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

fn conversation() -> Value {
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is <b>two</b> and two?"},
        {"role": "assistant", "content": "<think>2 + 2</think>Four.", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
        ]},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": [{"type": "text", "text": "Thanks \u{1f600}"}]},
    ])
}

/// Panics that start in the engine unwind to where they are caught. All others end the run.
fn tolerate_the_engine() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !panic.location().is_some_and(|at| at.file().contains("/minijinja-")) {
            report(panic);
        }
    }));
}

fuzz_target!(init: tolerate_the_engine(), |data: &[u8]| {
    forebay_fuzz::bounded(data, |data| {
        let Ok(text) = std::str::from_utf8(data) else { return };
        let (source, messages) = text.split_once('\0').unwrap_or((text, ""));
        let Ok(template) = ChatTemplate::from_source(source, "<s>", "</s>") else { return };
        let messages = serde_json::from_str(messages).unwrap_or_else(|_| conversation());
        let tools = json!([{"type": "function", "function": {"name": "add", "parameters": {}}}]);
        for tools in [None, Some(tools)] {
            let input = RenderInput {
                messages: messages.clone(),
                tools,
                add_generation_prompt: true,
                now: CivilTime::parse("2023-11-14T22:13:20"),
                ..RenderInput::default()
            };
            let _ = template.render(&input);
        }
    });
});
