//! The lines of OpenAI's batch files.
//!
//! Source: the OpenAI API reference, "The request input object" and "The request output object" of batches.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, Read as _};

use forebay_requests::{Choice, Endpoint, Identity, Refusal, Wanted, answer};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::error::ApiError;
use crate::openai;

/// Most bytes of a line.
const LINE_BYTES_MAX: u64 = 32 << 20;

/// Endpoint that a line names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Url {
    #[serde(rename = "/v1/completions")]
    Completions,
    #[serde(rename = "/v1/chat/completions")]
    Chat,
    #[serde(rename = "/v1/embeddings")]
    Embeddings,
}

impl Url {
    /// Returns the endpoint with this path, if batches support it.
    pub fn of(path: &str) -> Option<Url> {
        [Url::Completions, Url::Chat, Url::Embeddings].into_iter().find(|url| url.path() == path)
    }

    /// Returns the path.
    pub fn path(self) -> &'static str {
        match self {
            Url::Completions => "/v1/completions",
            Url::Chat => "/v1/chat/completions",
            Url::Embeddings => "/v1/embeddings",
        }
    }

    /// Returns the kind of answer, or `None` for embeddings.
    pub fn endpoint(self) -> Option<Endpoint> {
        match self {
            Url::Completions => Some(Endpoint::Completions),
            Url::Chat => Some(Endpoint::Chat),
            Url::Embeddings => None,
        }
    }
}

/// A line of the input.
#[derive(Debug)]
pub struct Line {
    pub custom_id: String,
    pub url: Url,
    pub body: Value,
}

/// Place of a line in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub offset: u64,
    pub length: u64,
}

/// Reason why a file is no batch.
#[derive(Debug)]
pub enum Unusable {
    Io(io::Error),
    /// A line is wrong. Lines count from 1.
    Line {
        number: u64,
        why: String,
    },
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::Io(error) => error.fmt(f),
            Unusable::Line { number, why } => write!(f, "line {number}: {why}"),
        }
    }
}

/// Reads the lines of a batch one after the other, and gives each to `take`, which returns why it refuses a line. Empty lines
/// are ignored. Lines may name the endpoints `urls`.
///
/// # Errors
/// Returns the number of the first wrong line, and what is wrong with it.
pub fn scan(
    mut input: impl BufRead,
    urls: &[Url],
    mut take: impl FnMut(Place, Line) -> Result<(), String>,
) -> Result<(), Unusable> {
    // Hashes take less memory than ids, which may be long.
    let mut ids: HashMap<[u8; 32], u64> = HashMap::new();
    let (mut offset, mut bytes) = (0, Vec::new());
    for number in 1.. {
        bytes.clear();
        let read = input.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut bytes);
        let length = read.map_err(Unusable::Io)? as u64;
        if length == 0 {
            break;
        }
        let wrong = |why| Unusable::Line { number, why };
        if length > LINE_BYTES_MAX {
            return Err(wrong("longer than 32 MiB".to_owned()));
        }
        let place = Place { offset, length };
        offset += length;
        let text = str::from_utf8(&bytes).map_err(|_| wrong("not UTF-8".to_owned()))?;
        if text.trim().is_empty() {
            continue;
        }
        let line = Line::read(text, urls).map_err(wrong)?;
        if let Some(first) = ids.insert(Sha256::digest(&line.custom_id).into(), number) {
            let why = format!("custom_id {:?} is that of line {first}", line.custom_id);
            return Err(wrong(why));
        }
        take(place, line).map_err(wrong)?;
    }
    Ok(())
}

impl Line {
    /// Reads a line, which may name the endpoints `urls`.
    ///
    /// # Errors
    /// Returns what is wrong with it.
    pub fn read(text: &str, urls: &[Url]) -> Result<Line, String> {
        let value: Value =
            serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
        let Value::Object(mut object) = value else {
            return Err("must be a JSON object".to_owned());
        };
        let Some(Value::String(custom_id)) = object.remove("custom_id") else {
            return Err("custom_id must be text".to_owned());
        };
        if object.get("method").is_some_and(|method| method != "POST") {
            return Err("method must be \"POST\"".to_owned());
        }
        let url = object.get("url").and_then(Value::as_str).and_then(Url::of);
        let Some(url) = url.filter(|url| urls.contains(url)) else {
            let names: Vec<&str> = urls.iter().map(|url| url.path()).collect();
            return Err(format!("url must be {}", names.join(" or ")));
        };
        match object.remove("body") {
            Some(body @ Value::Object(_)) => Ok(Line { custom_id, url, body }),
            _ => Err("body must be a JSON object".to_owned()),
        }
    }

    /// Reads the request for an answer, and refuses what makes no sense in a file.
    ///
    /// # Errors
    /// Returns why the request cannot be run.
    pub fn wanted(&self, endpoint: Endpoint) -> Result<Wanted, Refusal> {
        let wanted = forebay_requests::wanted(endpoint, &self.body)?;
        match wanted.stream {
            true => Err(Refusal::of("stream", "stream is not supported in a batch")),
            false => Ok(wanted),
        }
    }

    /// Returns the output line with this answer.
    pub fn answered(&self, unique: &str, status: u16, body: Value) -> Value {
        json!({
            "id": format!("batch_req_{unique}"),
            "custom_id": self.custom_id,
            "response": { "status_code": status, "request_id": unique, "body": body },
            "error": null,
        })
    }

    /// Returns the output line of a request that was not run.
    pub fn not_run(&self, unique: &str, code: &str, message: &str) -> Value {
        json!({
            "id": format!("batch_req_{unique}"),
            "custom_id": self.custom_id,
            "response": null,
            "error": { "code": code, "message": message },
        })
    }
}

/// Returns the output line of a request that ran.
pub fn answered(
    line: &Line,
    endpoint: Endpoint,
    wanted_model: Option<&str>,
    identity: &Identity<'_>,
    choices: &[Choice],
) -> Value {
    let identity = Identity { model: wanted_model.unwrap_or(identity.model), ..*identity };
    if let Some(error) = choices.iter().find_map(Choice::failure) {
        let error = ApiError::from(error);
        let body = openai::error_body(&error);
        return line.answered(identity.unique, error.status.as_u16(), body);
    }
    line.answered(identity.unique, 200, answer::whole(endpoint, &identity, choices))
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

    fn lines(text: &str) -> Result<Vec<Place>, Unusable> {
        let mut places = Vec::new();
        scan(text.as_bytes(), &[Url::Completions, Url::Chat], |place, _| {
            places.push(place);
            Ok(())
        })?;
        Ok(places)
    }

    #[test]
    fn lines_are_checked_before_any_work() {
        let good = r#"{"custom_id":"a","url":"/v1/completions","body":{}}"#;
        let length = good.len() as u64;
        let other = good.replace("\"a\"", "\"b\"");
        assert_eq!(
            lines(&format!("{good}\n\n{other}")).unwrap(),
            [Place { offset: 0, length: length + 1 }, Place { offset: length + 2, length }]
        );
        for (text, why) in [
            (format!("{good}\n{good}"), "line 2: custom_id \"a\" is that of line 1"),
            ("{".to_owned(), "line 1: not JSON"),
            ("\n[]".to_owned(), "line 2: must be a JSON object"),
            (good.replace("\"a\"", "1"), "line 1: custom_id must be text"),
            (good.replace("completions", "images"), "line 1: url must be"),
            (good.replace("completions", "embeddings"), "line 1: url must be"),
            (good.replace("{}", "1"), "line 1: body must be"),
            (good.replace("{}", "{},\"method\":\"GET\""), "line 1: method must be"),
        ] {
            let error = lines(&text).unwrap_err().to_string();
            assert!(error.starts_with(why), "{error}");
        }
        let mut wrong = good.as_bytes().to_vec();
        wrong.push(0xff);
        let error = scan(wrong.as_slice(), &[Url::Completions], |_, _| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "line 1: not UTF-8");
    }
}
