//! Prompts of every template of the reference data, rendered from messages as clients send them.

use std::path::{Path, PathBuf};

use forebay_chat::{Format, Message};
use forebay_text::{ChatTemplate, Prompt};
use serde_json::{Map, Value};

fn folder() -> PathBuf {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    std::env::var_os("FOREBAY_FIXTURES").map_or(project, PathBuf::from).join("templates")
}

/// Removes the date of today from the prompts of gpt-oss.
fn without_date(prompt: &str) -> String {
    const DATE: &str = "Current date: ";
    match prompt.find(DATE).map(|at| at + DATE.len()) {
        Some(at) => format!("{}{}", &prompt[..at], &prompt[at + "2025-01-01".len()..]),
        None => prompt.to_owned(),
    }
}

#[test]
fn prompts_are_those_of_the_reference() {
    let text = std::fs::read_to_string(folder().join("cases.json")).expect("cases.json");
    let cases: Value = serde_json::from_str(&text).unwrap();
    let (mut compared, mut described) = (0, 0);
    for case in cases["cases"].as_array().unwrap() {
        let [name, title] = ["template", "title"].map(|key| case[key].as_str().unwrap());
        if case["add_generation_prompt"] != true {
            continue;
        }
        let mut variables: Map<String, Value> = case["variables"].as_object().unwrap().clone();
        let mut token = |name| variables.remove(name).unwrap_or_default();
        let [bos, eos] =
            ["bos_token", "eos_token"].map(|name| token(name).as_str().unwrap_or("").to_owned());
        let source = std::fs::read_to_string(folder().join(name)).unwrap();
        let template = ChatTemplate::from_source(&source, &bos, &eos).unwrap();
        let format = Format::recognise(Some(&template), None).unwrap();
        let messages = Message::list_from_json(&case["messages"]).unwrap();
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let prompt = format.render(&template, &messages, tools, &variables);
        let prompt = prompt.map(Prompt::into_text);
        // Tools that the template does not describe are in the system message.
        if tools.is_some() && !source.contains("tools") {
            let prompt = prompt.unwrap_or_else(|error| panic!("{name}, {title}: {error}"));
            assert!(
                prompt.contains("<tools>\n{\"type\":\"function\""),
                "{name}, {title}: {prompt}"
            );
            described += 1;
            continue;
        }
        match case.get("expected").and_then(Value::as_str) {
            Some(expected) => {
                let prompt = prompt.unwrap_or_else(|error| panic!("{name}, {title}: {error}"));
                assert_eq!(without_date(&prompt), without_date(expected), "{name}, {title}");
                compared += 1;
            }
            // What a template refuses is refused, or has another form that it takes.
            None => {
                let fits = title.contains("system")
                    || title.contains("calls")
                    || title.contains("thinking");
                let fits = fits || messages.first().is_some_and(Message::is_instruction);
                assert_eq!(prompt.is_ok(), fits, "{name}, {title}: {prompt:?}");
            }
        }
    }
    assert!(compared > 100 && described > 5, "{compared} compared, {described} described");
}
