//! Tests of what agents rely on: arguments of calls that come while they are generated, answers that continue a text, and schemas with
//! odd parts.

use std::io::Read;

use serde_json::{Value, json};

use crate::server::Server;

/// Schema of a call with a long text.
fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {
            "path": { "type": "string", "maxLength": 10 },
            "content": { "type": "string", "minLength": 80, "maxLength": 100 },
        },
        "required": ["path", "content"],
        "additionalProperties": false,
    })
}

fn tool() -> Value {
    json!({ "type": "function", "function": { "name": "write_file", "parameters": parameters() } })
}

/// Returns the texts at a place in events.
fn texts<'a>(events: &'a [Value], pointer: &str) -> Vec<&'a str> {
    let found = events.iter().filter_map(|event| event.pointer(pointer)?.as_str());
    found.filter(|text| !text.is_empty()).collect()
}

fn is_written(arguments: &str) {
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert!(
        arguments["content"].as_str().is_some_and(|text| text.chars().count() >= 80),
        "{arguments}"
    );
}

#[test]
fn arguments_are_streamed_on_every_interface() {
    let server = Server::start(&[]);
    let question = json!([{ "role": "user", "content": "Write a file." }]);
    let mut body = json!({
        "messages": question, "tools": [tool()], "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 400,
        "temperature": 0,
    });
    let whole = server.post("/v1/chat/completions", &body);
    let call = &whole["choices"][0]["message"]["tool_calls"][0];
    let arguments = call["function"]["arguments"].as_str().unwrap();
    is_written(arguments);
    body["stream"] = true.into();
    let parts = server.events("/v1/chat/completions", &body);
    let pieces = texts(&parts, "/choices/0/delta/tool_calls/0/function/arguments");
    assert!(pieces.len() > 5, "{pieces:?}");
    assert_eq!(pieces.concat(), arguments);
    let places: Vec<&Value> =
        parts.iter().filter_map(|part| part.pointer("/choices/0/delta/tool_calls/0")).collect();
    assert!(places.iter().all(|place| place["index"] == 0));
    assert!(places[0]["id"].is_string() && places[0]["function"]["name"] == "write_file");
    assert!(places[1..].iter().all(|place| place.get("id").is_none()));
    // A limit of tokens leaves arguments that are not whole, in parts or not.
    body["max_tokens"] = (whole["usage"]["completion_tokens"].as_u64().unwrap() / 2 + 8).into();
    let parts = server.events("/v1/chat/completions", &body);
    let cut = texts(&parts, "/choices/0/delta/tool_calls/0/function/arguments").concat();
    assert!(!cut.is_empty() && arguments.starts_with(&cut), "{cut}");
    body["stream"] = false.into();
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"], cut);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");

    let body = json!({
        "messages": question, "tools": [{ "name": "write_file", "input_schema": parameters() }], "stream": true, "temperature": 0,
        "tool_choice": { "type": "any", "disable_parallel_tool_use": true }, "max_tokens": 400,
    });
    let events = server.events("/v1/messages", &body);
    let pieces = texts(&events, "/delta/partial_json");
    assert!(pieces.len() > 5, "{pieces:?}");
    is_written(&pieces.concat());

    let mut body = json!({
        "input": "Write a file.", "tools": [{ "type": "function", "name": "write_file", "parameters": parameters() }],
        "tool_choice": "required", "parallel_tool_calls": false, "max_output_tokens": 400, "temperature": 0, "stream": true,
    });
    let events = server.events("/v1/responses", &body);
    let of = |events: &[Value], kind: &str| -> Vec<Value> {
        events.iter().filter(|event| event["type"] == kind).cloned().collect()
    };
    let deltas = of(&events, "response.function_call_arguments.delta");
    assert!(deltas.len() > 5, "{deltas:?}");
    let done = of(&events, "response.function_call_arguments.done");
    assert_eq!(texts(&deltas, "/delta").concat(), done[0]["arguments"].as_str().unwrap());
    is_written(done[0]["arguments"].as_str().unwrap());
    // A custom tool gets a text.
    body["tools"] = json!([{ "type": "custom", "name": "patch", "description": "Patches." }]);
    body["max_output_tokens"] = 60.into();
    let events = server.events("/v1/responses", &body);
    let item = &events.last().unwrap()["response"]["output"][0];
    let input = texts(&of(&events, "response.custom_tool_call_input.delta"), "/delta").concat();
    if item["type"] == "custom_tool_call" {
        assert_eq!(item["input"], input);
    }
}

#[test]
fn streams_are_not_held_back_by_proxies_and_ollama_gets_whole_calls() {
    let server = Server::start(&[]);
    let raw = |path: &str, body: &Value| {
        let mut text = String::new();
        server.begin("POST", path, "", &body.to_string()).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), body.to_owned())
    };
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    for (path, body) in [
        ("/v1/completions", json!({ "prompt": "x", "max_tokens": 2, "stream": true })),
        ("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 2, "stream": true })),
        ("/v1/messages", json!({ "messages": messages, "max_tokens": 2, "stream": true })),
        ("/v1/responses", json!({ "input": "x", "max_output_tokens": 2, "stream": true })),
        ("/v1/responses", json!({ "input": "", "stream": true })),
        ("/api/chat", json!({ "messages": messages, "options": { "num_predict": 2 } })),
        ("/api/generate", json!({ "prompt": "x", "options": { "num_predict": 2 } })),
    ] {
        let (head, _) = raw(path, &body);
        assert!(head.contains("x-accel-buffering: no"), "{path}: {head}");
    }
    let body =
        json!({ "messages": messages, "tools": [tool()], "options": { "num_predict": 300 } });
    let (_, lines) = raw("/api/chat", &body);
    for line in lines.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        let calls = line["message"]["tool_calls"].as_array();
        assert!(
            calls.into_iter().flatten().all(|call| call["function"]["arguments"].is_object()),
            "{line}"
        );
    }
}

/// The demo has no template of its own. The prompt ends with the assistant's text, and every answer is what follows it.
#[test]
fn a_last_message_of_the_assistant_is_continued_on_every_interface() {
    let server = Server::start(&[]);
    let messages = json!([
        { "role": "user", "content": "Tell me a story." },
        { "role": "assistant", "content": "Once upon a time there was" },
    ]);
    let rendered = server.post("/apply-template", &json!({ "messages": messages }));
    let prompt = rendered["prompt"].as_str().unwrap();
    assert!(prompt.ends_with("Once upon a time there was"), "{prompt}");
    let body = json!({ "prompt": prompt, "max_tokens": 8, "temperature": 0 });
    let expected = server.post("/v1/completions", &body);
    let expected = expected["choices"][0]["text"].as_str().unwrap();
    let check = |text: &Value| {
        let text = text.as_str().unwrap_or_else(|| panic!("{text}"));
        assert!(!text.is_empty() && expected.starts_with(text), "{expected:?}, not {text:?}");
    };
    let body = json!({ "messages": messages, "max_tokens": 8, "temperature": 0 });
    check(&server.post("/v1/chat/completions", &body)["choices"][0]["message"]["content"]);
    check(&server.post("/v1/messages", &body)["content"][0]["text"]);
    let body = json!({ "input": messages, "max_output_tokens": 8, "temperature": 0 });
    check(&server.post("/v1/responses", &body)["output"][0]["content"][0]["text"]);
    let options = json!({ "num_predict": 8, "temperature": 0, "repeat_penalty": 1 });
    let body = json!({ "messages": messages, "stream": false, "options": options });
    check(&server.post("/api/chat", &body)["message"]["content"]);
    // In parts, and as vLLM's clients ask for it.
    let body = json!({ "messages": messages, "max_tokens": 8, "temperature": 0, "stream": true,
        "continue_final_message": true, "add_generation_prompt": false });
    let parts = server.events("/v1/chat/completions", &body);
    check(&texts(&parts, "/choices/0/delta/content").concat().into());
    for (field, value) in [("continue_final_message", true), ("add_generation_prompt", true)] {
        let mut body =
            json!({ "messages": [messages[0]], "continue_final_message": true, "max_tokens": 2 });
        body[field] = value.into();
        let (status, answer) = server.ask("POST", "/v1/chat/completions", "", &body.to_string());
        assert!(status == 400 && answer.contains("continue"), "{status} {answer}");
    }
    // The text and the answer have the form together.
    let schema = json!({ "type": "object", "properties": { "n": { "type": "integer", "minimum": 1, "maximum": 99 } }, "required": ["n"] });
    let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
    let begun = json!([messages[0], { "role": "assistant", "content": "{\"n\": 4" }]);
    let body =
        json!({ "messages": begun, "response_format": format, "max_tokens": 50, "temperature": 0 });
    let answer = server.post("/v1/chat/completions", &body);
    let text =
        format!("{{\"n\": 4{}", answer["choices"][0]["message"]["content"].as_str().unwrap());
    let number = serde_json::from_str::<Value>(&text).unwrap();
    assert!(
        number["n"].as_u64().is_some_and(|number| number == 4 || (40..50).contains(&number)),
        "{text}"
    );
}

#[test]
fn odd_parts_of_schemas_are_named_and_do_not_refuse_the_request() {
    let server = Server::start(&[]);
    let ask = |path: &str, body: &Value| {
        let mut text = String::new();
        server.begin("POST", path, "", &body.to_string()).read_to_string(&mut text).unwrap();
        assert!(text.lines().next().is_some_and(|line| line.contains(" 200 ")), "{text}");
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let warning = head.lines().find_map(|line| line.strip_prefix("x-forebay-warning: "));
        (warning.unwrap_or_default().to_owned(), body.to_owned())
    };
    let schema = json!({ "type": "object", "required": ["a"], "properties": {
        "a": { "type": "string", "format": "iban", "maxLength": 3 },
        "b": { "type": "array", "uniqueItems": true, "items": { "type": "boolean" }, "maxItems": 2 },
    } });
    let messages = json!([{ "role": "user", "content": "JSON" }]);
    let expected = "a: format \"iban\" is not enforced; b: uniqueItems is not enforced";
    let format = json!({ "type": "json_schema", "json_schema": { "schema": schema } });
    for (path, body) in [
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 90, "response_format": format }),
        ),
        (
            "/v1/chat/completions",
            json!({ "messages": messages, "max_tokens": 9, "stream": true, "response_format": format }),
        ),
        (
            "/v1/messages",
            json!({ "messages": messages, "max_tokens": 9, "output_format": { "type": "json_schema", "schema": schema } }),
        ),
        (
            "/v1/responses",
            json!({ "input": "x", "max_output_tokens": 9, "text": { "format": { "type": "json_schema", "schema": schema } } }),
        ),
        (
            "/api/chat",
            json!({ "messages": messages, "format": schema, "options": { "num_predict": 9 } }),
        ),
    ] {
        assert_eq!(ask(path, &body).0, expected, "{path}");
    }
    // One odd tool takes any object, and the others keep their schemas.
    let of = |name: &str, parameters: Value| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    let tools = json!([
        of("good", json!({ "type": "object" })),
        of("odd", json!({ "type": "object", "properties": { "x": { "enum": 1 } } }))
    ]);
    let body = json!({ "messages": messages, "max_tokens": 200, "tools": tools, "tool_choice": "required" });
    let (warning, _) = ask("/v1/chat/completions", &body);
    assert!(warning.starts_with("tool odd: the schema is not enforced"), "{warning}");
    let none = ask("/v1/chat/completions", &json!({ "messages": messages, "max_tokens": 2 }));
    assert_eq!(none.0, "");
    // The form of a text does not hold for a call.
    let mut body = json!({ "messages": messages, "max_tokens": 200, "tools": [tools[0]], "tool_choice": "required",
        "parallel_tool_calls": false, "response_format": format });
    let (warning, answer) = ask("/v1/chat/completions", &body);
    assert!(warning.starts_with("response_format: a call is required"), "{warning}");
    assert!(answer.contains("\"name\":\"good\""), "{answer}");
    body["response_format"] = Value::Null;
    body["guided_regex"] = "a".into();
    let (status, answer) = server.ask("POST", "/v1/chat/completions", "", &body.to_string());
    assert!(status == 400 && answer.contains("required"), "{status} {answer}");
}

#[test]
fn the_version_is_that_of_a_recent_ollama() {
    let server = Server::start(&[]);
    let version: Value = serde_json::from_str(&server.get("/api/version").1).unwrap();
    let numbers: Vec<u32> =
        version["version"].as_str().unwrap().split('.').map(|part| part.parse().unwrap()).collect();
    assert!(numbers >= vec![0, 13, 4], "{version}");
    assert_eq!(version["forebay"], env!("CARGO_PKG_VERSION"));
}
