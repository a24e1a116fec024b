//! Comparison of published chat templates with transformers, byte for byte.

mod common;

use std::path::Path;

use common::fixture;
use forebay_text::{ChatTemplate, CivilTime, RenderInput, TextError};
use serde_json::Value;

/// Reads the JSON file `path`.
fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn check(case: &Value, now: CivilTime, source: &str) -> Result<(), String> {
    let mut variables = case["variables"].as_object().unwrap().clone();
    let token = |name: &str| variables[name].as_str().unwrap_or_default().to_owned();
    let template = ChatTemplate::from_source(source, &token("bos_token"), &token("eos_token"))
        .map_err(|error| error.to_string())?;
    variables.retain(|name, _| name != "bos_token" && name != "eos_token");
    let input = RenderInput {
        messages: case["messages"].clone(),
        tools: Some(case["tools"].clone()).filter(|tools| !tools.is_null()),
        add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
        variables,
        now: Some(now),
    };
    match (template.render(&input), case["expected"].as_str(), case["expected_error"].as_str()) {
        (Ok(found), Some(expected), _) if found == expected => Ok(()),
        (Err(TextError::TemplateRefused { message }), _, Some(expected)) if message == expected => {
            Ok(())
        }
        (found, expected, error) => {
            Err(format!("found {found:?}\nexpected {expected:?} or error {error:?}"))
        }
    }
}

#[test]
fn published_templates() {
    let Some(path) = fixture("templates/cases.json") else { return };
    let all = json(&path);
    let now = CivilTime::parse(all["now"].as_str().unwrap()).unwrap();
    let cases = all["cases"].as_array().unwrap();
    let mut failed = Vec::new();
    for case in cases {
        let (name, title) = (case["template"].as_str().unwrap(), &case["title"]);
        let Some(template) = fixture(&format!("templates/{name}")) else { continue };
        let source = std::fs::read_to_string(template).unwrap();
        if let Err(reason) = check(case, now, &source) {
            failed.push(format!("{name} {title}: {reason}"));
        }
    }
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), cases.len(), failed.join("\n"));
}
