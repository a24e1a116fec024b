//! Tools that a request offers, and those that its answer must call.

use serde_json::{Value, json};

use crate::request::{MustCall, Refusal};

/// Tools that a request offers, and what it says about calling them.
#[derive(Debug, Default, PartialEq)]
pub struct Choosing {
    /// `None` if no tool may be called.
    pub tools: Option<Value>,
    pub must_call: Option<MustCall>,
    /// True if the request has `functions`, the form from before `tools`.
    pub function_form: bool,
}

/// Reads the tools of a chat, which the table of fields has checked.
///
/// # Errors
/// Returns an error if fields exclude each other, or if a choice names no tool.
pub fn of_chat(
    tools: Option<Value>,
    choice: Option<Value>,
    functions: Option<Vec<Value>>,
    function_call: Option<Value>,
) -> Result<Choosing, Refusal> {
    let Some(functions) = functions.filter(|functions| !functions.is_empty()) else {
        let named = function_call.is_some_and(|call| call.is_object());
        if named {
            return Err(Refusal::of("function_call", "function_call needs functions"));
        }
        return choosing(tools, choice);
    };
    if tools.is_some() || choice.is_some() {
        return Err(Refusal::of("functions", "functions and tools exclude each other"));
    }
    let of = |function: Value| json!({ "type": "function", "function": function });
    let tools = functions.into_iter().map(of).collect();
    Ok(Choosing { function_form: true, ..choosing(Some(tools), function_call)? })
}

/// Reads tools and `tool_choice`, which the table of fields has checked.
///
/// # Errors
/// Returns an error if a choice names no tool.
pub fn choosing(tools: Option<Value>, choice: Option<Value>) -> Result<Choosing, Refusal> {
    let tools = tools.filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()));
    let Some(choice) = choice else { return Ok(Choosing { tools, ..Choosing::default() }) };
    let mode = choice.as_str().or_else(|| choice.get("type")?.as_str()).unwrap_or("function");
    let must_call = match mode {
        "none" => return Ok(Choosing::default()),
        "auto" => None,
        "required" | "any" => Some(MustCall::Any),
        "allowed_tools" => return allowed(tools, choice.get("allowed_tools").unwrap_or(&choice)),
        _ => Some(MustCall::Named(name_of(&choice).ok_or_else(unnamed)?.to_owned())),
    };
    Ok(Choosing { tools, must_call, function_form: false })
}

fn unnamed() -> Refusal {
    let why = "tool_choice must be \"none\", \"auto\", \"required\" or the function to call";
    Refusal::of("tool_choice", why)
}

/// Returns the name of the function of a tool or a choice.
fn name_of(value: &Value) -> Option<&str> {
    value.pointer("/function/name").or_else(|| value.get("name"))?.as_str()
}

/// Offers some of the tools only.
fn allowed(tools: Option<Value>, set: &Value) -> Result<Choosing, Refusal> {
    let listed = set.get("tools").and_then(Value::as_array);
    let names: Option<Vec<&str>> = listed.map(|tools| tools.iter().filter_map(name_of).collect());
    let names = names.ok_or_else(|| {
        Refusal::of("tool_choice", "tool_choice.allowed_tools needs a list of tools")
    })?;
    let mut tools = tools;
    if let Some(Value::Array(tools)) = &mut tools {
        let offered = |name: &&&str| !tools.iter().any(|tool| name_of(tool) == Some(**name));
        if let Some(unknown) = names.iter().find(offered) {
            let why = format!("tool_choice allows {unknown:?}, which is none of the tools");
            return Err(Refusal::of("tool_choice", why));
        }
        tools.retain(|tool| name_of(tool).is_some_and(|name| names.contains(&name)));
    }
    let must_call = set.get("mode").is_some_and(|mode| mode == "required").then_some(MustCall::Any);
    let tools = tools.filter(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()));
    Ok(Choosing { tools, must_call, function_form: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(choosing: &Choosing) -> Vec<&str> {
        choosing
            .tools
            .iter()
            .flat_map(|tools| tools.as_array().unwrap())
            .filter_map(name_of)
            .collect()
    }

    #[test]
    fn choices_have_several_forms() {
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let tools = json!([tool("a"), tool("b")]);
        let of = |choice: Value| choosing(Some(tools.clone()), Some(choice));
        assert_eq!(of(json!("none")).unwrap(), Choosing::default());
        assert_eq!(of(json!("required")).unwrap().must_call, Some(MustCall::Any));
        let named = Some(MustCall::Named("b".into()));
        for choice in [
            tool("b"),
            json!({ "type": "function", "name": "b" }),
            json!({ "type": "tool", "name": "b" }),
        ] {
            assert_eq!(of(choice).unwrap().must_call, named);
        }
        let set = json!({ "mode": "required", "tools": [tool("b")] });
        let mut flat = set.clone();
        flat["type"] = "allowed_tools".into();
        for choice in [json!({ "type": "allowed_tools", "allowed_tools": set }), flat] {
            let chosen = of(choice).unwrap();
            assert_eq!(names(&chosen), ["b"]);
            assert_eq!(chosen.must_call, Some(MustCall::Any));
        }
        for wrong in [
            json!({ "type": "function" }),
            json!({ "type": "allowed_tools", "tools": [tool("c")] }),
        ] {
            assert_eq!(of(wrong).unwrap_err().param.as_deref(), Some("tool_choice"));
        }
    }

    #[test]
    fn functions_are_tools() {
        let functions = || Some(vec![json!({ "name": "a" })]);
        let chosen = of_chat(None, None, functions(), Some(json!({ "name": "a" }))).unwrap();
        assert!(names(&chosen) == ["a"] && chosen.function_form);
        assert_eq!(chosen.must_call, Some(MustCall::Named("a".into())));
        assert!(of_chat(Some(json!([])), None, functions(), None).is_err());
        assert!(of_chat(None, None, None, Some(json!({ "name": "a" }))).is_err());
    }
}
