//! The lines of OpenAI's batch files.
//!
//! Source: the OpenAI API reference, "The request input object" and "The request output object" of batches.

use std::collections::HashMap;

use forebay_engine::engine::RequestEnd;
use forebay_server::openai::answer::{self, Choice, Identity};
use forebay_server::openai::{Endpoint, Refusal};
use serde_json::{Value, json};

/// A line of the input.
#[derive(Debug)]
pub struct Line {
    pub custom_id: String,
    pub endpoint: Endpoint,
    pub body: Value,
}

/// Reads the lines of a batch. Empty lines are ignored.
///
/// # Errors
/// Returns the number of the first wrong line, and what is wrong with it.
pub fn lines(text: &str) -> Result<Vec<Line>, String> {
    let mut lines = Vec::new();
    let mut ids: HashMap<String, usize> = HashMap::new();
    for (number, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
        let line = line(text).map_err(|why| format!("line {number}: {why}"))?;
        if let Some(first) = ids.insert(line.custom_id.clone(), number) {
            return Err(format!(
                "line {number}: custom_id {:?} is that of line {first}",
                line.custom_id
            ));
        }
        lines.push(line);
    }
    Ok(lines)
}

fn line(text: &str) -> Result<Line, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    let Value::Object(mut object) = value else { return Err("must be a JSON object".to_owned()) };
    let Some(Value::String(custom_id)) = object.remove("custom_id") else {
        return Err("custom_id must be text".to_owned());
    };
    if object.get("method").is_some_and(|method| method != "POST") {
        return Err("method must be \"POST\"".to_owned());
    }
    let endpoint = match object.get("url").and_then(Value::as_str) {
        Some("/v1/completions") => Endpoint::Completions,
        Some("/v1/chat/completions") => Endpoint::Chat,
        _ => return Err("url must be /v1/completions or /v1/chat/completions".to_owned()),
    };
    match object.remove("body") {
        Some(body @ Value::Object(_)) => Ok(Line { custom_id, endpoint, body }),
        _ => Err("body must be a JSON object".to_owned()),
    }
}

/// Returns the output line of a request that ran.
pub fn answered(
    line: &Line,
    wanted_model: Option<&str>,
    identity: &Identity<'_>,
    choices: &[Choice],
) -> Value {
    let identity = Identity { model: wanted_model.unwrap_or(identity.model), ..*identity };
    let failed = choices.iter().find_map(|choice| match &choice.end {
        RequestEnd::Failed(why) => Some(why),
        _ => None,
    });
    if let Some(why) = failed {
        let error = json!({ "message": why, "type": "server_error", "param": null, "code": null });
        return output(line, &identity, 500, json!({ "error": error }));
    }
    output(line, &identity, 200, answer::whole(line.endpoint, &identity, choices))
}

/// Returns the output line of a request that was refused.
pub fn refused(line: &Line, identity: &Identity<'_>, refusal: &Refusal) -> Value {
    output(line, identity, 400, refusal.to_json())
}

fn output(line: &Line, identity: &Identity<'_>, status: u16, body: Value) -> Value {
    json!({
        "id": format!("batch_req_{}", identity.unique),
        "custom_id": line.custom_id,
        "response": { "status_code": status, "request_id": identity.unique, "body": body },
        "error": null,
    })
}

/// Returns true if an output line has an error instead of an answer.
pub fn is_error(line: &[u8]) -> bool {
    let line: Option<Value> = serde_json::from_slice(line).ok();
    let status = line.as_ref().and_then(|line| line.pointer("/response/status_code"));
    status.and_then(Value::as_u64) != Some(200)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_checked_before_any_work() {
        let good = r#"{"custom_id":"a","url":"/v1/completions","body":{}}"#;
        assert_eq!(lines(&format!("{good}\n\n")).unwrap().len(), 1);
        for (text, why) in [
            (format!("{good}\n{good}"), "line 2: custom_id \"a\" is that of line 1"),
            ("{".to_owned(), "line 1: not JSON"),
            ("\n[]".to_owned(), "line 2: must be a JSON object"),
            (good.replace("\"a\"", "1"), "line 1: custom_id must be text"),
            (good.replace("completions", "images"), "line 1: url must be"),
            (good.replace("{}", "1"), "line 1: body must be"),
            (good.replace("{}", "{},\"method\":\"GET\""), "line 1: method must be"),
        ] {
            let error = lines(&text).unwrap_err();
            assert!(error.starts_with(why), "{error}");
        }
    }
}
