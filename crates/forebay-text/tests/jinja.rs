//! What Jinja2 makes of short templates, and what this crate makes of them.

mod common;

use forebay_text::{ChatTemplate, CivilTime, RenderInput};
use serde_json::Value;

/// Templates whose results differ, and why.
const DIFFERENT: &[(&str, &str)] = &[(
    "{% macro m(a) %}{{ varargs | length }}{% endmacro %}{{ m(1, 2, 3) }}",
    "the engine's macros take no further arguments",
)];

#[test]
fn templates_render_as_in_jinja() {
    let Some(path) = common::fixture("templates/jinja.json") else { return };
    let all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut variables = all["variables"].as_object().unwrap().clone();
    let input = RenderInput {
        messages: variables.remove("messages").unwrap(),
        variables,
        now: CivilTime::parse("2025-07-26T12:34:56"),
        ..RenderInput::default()
    };
    let mut wrong = Vec::new();
    for case in all["cases"].as_array().unwrap() {
        let source = case["template"].as_str().unwrap();
        let rendered =
            ChatTemplate::from_source(source, "", "").and_then(|template| template.render(&input));
        let agrees = match (&rendered, case["expected"].as_str()) {
            (Ok(found), Some(expected)) => found == expected,
            (Err(_), None) => true,
            _ => false,
        };
        let known = DIFFERENT.iter().any(|(known, _)| *known == source);
        if agrees == known {
            wrong.push(format!(
                "{source}\n  jinja2:  {:?} {}\n  forebay: {rendered:?}",
                case["expected"], case["error"]
            ));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
