//! Calls whose arguments are JSON.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::tools::Call;

/// Beginning of a list of calls that Phi-4-mini may write.
pub const FUNCTOOLS: &str = "functools[";

#[derive(Deserialize)]
struct Described<'a> {
    #[serde(borrow)]
    name: Option<&'a RawValue>,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
    /// Some models write the form of OpenAI's API.
    #[serde(borrow)]
    function: Option<&'a RawValue>,
}

/// Parses `{"name": "f", "arguments": {...}}`. The arguments stay as the model wrote them.
pub fn object(body: &str) -> Option<Call> {
    let described: Described<'_> = serde_json::from_str(body.trim()).ok()?;
    let Some(name) = described.name else {
        // A function within a function is no call.
        let inner = described.function?.get();
        let function: Described<'_> = serde_json::from_str(inner).ok()?;
        return call(function.name?, function.arguments);
    };
    call(name, described.arguments)
}

fn call(name: &RawValue, arguments: Option<&RawValue>) -> Option<Call> {
    let name: String = serde_json::from_str(name.get()).ok()?;
    let arguments = arguments.map_or("{}", RawValue::get);
    // Some models write the object as text.
    let inner = serde_json::from_str::<String>(arguments);
    Some(Call { name, arguments: inner.unwrap_or_else(|_| arguments.to_owned()) })
}

/// Parses one call, or a list of calls.
pub fn objects(body: &str) -> Option<Vec<Call>> {
    let body = body.trim();
    if !body.starts_with('[') {
        return Some(vec![object(body)?]);
    }
    let list: Vec<&RawValue> = serde_json::from_str(body).ok()?;
    let calls: Option<Vec<Call>> = list.into_iter().map(|value| object(value.get())).collect();
    calls.filter(|calls| !calls.is_empty())
}

/// Parses one call or a list of calls, with or without `functools` before it.
pub fn listed(body: &str) -> Option<Vec<Call>> {
    let body = body.trim_start();
    objects(body.strip_prefix(FUNCTOOLS.trim_end_matches('[')).unwrap_or(body))
}

/// Parses `f[ARGS]{...}` and `f[CALL_ID]id[ARGS]{...}`, or a list of calls.
pub fn mistral(body: &str) -> Option<Vec<Call>> {
    let body = body.trim();
    let begins_list = body.strip_prefix('[').is_some_and(|rest| rest.trim_start().starts_with('{'));
    if begins_list {
        return objects(body);
    }
    let (head, arguments) = match (body.find("[ARGS]"), body.find('{')) {
        (Some(at), object) if object.is_none_or(|object| at < object) => {
            (&body[..at], &body[at + "[ARGS]".len()..])
        }
        (_, Some(object)) => body.split_at(object),
        (_, None) => return None,
    };
    let name = head.split("[CALL_ID]").next().unwrap_or_default().trim();
    let arguments: &RawValue = serde_json::from_str(arguments.trim()).ok()?;
    named(name, arguments.get()).map(|call| vec![call])
}

#[derive(Deserialize)]
struct OfCohere<'a> {
    #[serde(borrow)]
    tool_name: &'a RawValue,
    #[serde(borrow, alias = "arguments")]
    parameters: Option<&'a RawValue>,
}

/// Parses `[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]`, or one such object.
pub fn cohere(body: &str) -> Option<Vec<Call>> {
    let body = body.trim();
    let list: Vec<OfCohere<'_>> = match body.starts_with('[') {
        true => serde_json::from_str(body).ok()?,
        false => vec![serde_json::from_str(body).ok()?],
    };
    let calls: Option<Vec<Call>> =
        list.into_iter().map(|described| call(described.tool_name, described.parameters)).collect();
    calls.filter(|calls| !calls.is_empty())
}

/// Parses `ID<|tool_call:name|>f<|tool_call:args|>{...}`.
pub fn solar(body: &str) -> Option<Call> {
    let (_, named_call) = body.split_once("<|tool_call:name|>")?;
    let (name, arguments) = named_call.split_once("<|tool_call:args|>")?;
    named(name.trim(), arguments.trim())
}

/// Parses `functions.f:0<|tool_call_argument_begin|>{...}`.
pub fn kimi(body: &str) -> Option<Call> {
    let (id, arguments) = body.split_once("<|tool_call_argument_begin|>")?;
    named(name_of_id(id.trim()), arguments.trim())
}

/// Returns the name in an id of Kimi K2.
pub fn name_of_id(id: &str) -> &str {
    let id = id.strip_prefix("functions.").unwrap_or(id);
    match id.rsplit_once(':') {
        Some((name, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => id,
    }
}

fn named(name: &str, arguments: &str) -> Option<Call> {
    let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
    is_name.then(|| Call { name: name.to_owned(), arguments: arguments.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(calls: Option<Vec<Call>>) -> Vec<(String, String)> {
        calls.into_iter().flatten().map(|call| (call.name, call.arguments)).collect()
    }

    fn one(name: &str, arguments: &str) -> Vec<(String, String)> {
        vec![(name.to_owned(), arguments.to_owned())]
    }

    #[test]
    fn calls_of_mistral() {
        assert_eq!(pairs(mistral("f[ARGS]{\"x\":  1}")), one("f", "{\"x\":  1}"));
        assert_eq!(pairs(mistral("f[CALL_ID]abcdefghi[ARGS]{}")), one("f", "{}"));
        assert_eq!(pairs(mistral("f{\"x\": \"[ARGS]\"}")), one("f", "{\"x\": \"[ARGS]\"}"));
        let list = " [{\"name\": \"f\", \"arguments\": {}, \"id\": \"abcdefghi\"}]";
        assert_eq!(pairs(mistral(list)), one("f", "{}"));
        for text in ["f[ARGS]{\"x\"", "f", "two words[ARGS]{}", "[ARGS]{}", "[1]"] {
            assert!(mistral(text).is_none(), "{text}");
        }
    }

    #[test]
    fn calls_of_kimi_and_llama() {
        let body = "functions.f:12<|tool_call_argument_begin|>{\"x\": 1}";
        assert_eq!(
            kimi(body).map(|call| vec![call]).map(Some).map(pairs),
            Some(one("f", "{\"x\": 1}"))
        );
        assert!(kimi("functions.f:0").is_none());
        let typed = "{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}";
        assert_eq!(pairs(objects(typed)), one("f", "{}"));
        let nested = "{\"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": {}}}";
        assert_eq!(pairs(objects(nested)), one("f", "{}"));
        assert!(objects("{\"name\": 1}").is_none() && objects("[]").is_none());
        let deep = "{\"function\": {\"function\": {\"name\": \"f\"}}}";
        assert!(objects(deep).is_none());
    }
}
