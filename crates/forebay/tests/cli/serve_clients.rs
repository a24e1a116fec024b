//! Tests of what the clients of each interface rely on: tools with any model, the order of events, and blocks and fields that
//! they send back.

use serde_json::{Value, json};

use crate::server::Server;

/// A tool in the form of OpenAI's chats.
fn tool() -> Value {
    json!({ "type": "function", "function": { "name": "pick", "description": "Picks.", "parameters": parameters() } })
}

fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": { "number": { "type": "integer", "minimum": 1, "maximum": 9 } },
        "required": ["number"],
        "additionalProperties": false,
    })
}

/// Checks the arguments of a call.
fn is_picked(arguments: &Value) {
    let number = arguments["number"].as_u64();
    assert!(number.is_some_and(|number| (1..=9).contains(&number)), "{arguments}");
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

fn joined(events: &[Value], pointer: &str) -> String {
    events.iter().filter_map(|event| event.pointer(pointer)?.as_str()).collect()
}

/// The demo model has no chat template. The system message describes the tools, and a grammar makes the model call one.
#[test]
fn openai_chats_have_tools_without_a_template() {
    let server = Server::start(&[]);
    let question = json!({ "role": "user", "content": "Pick a number." });
    let mut body = json!({
        "messages": [question], "tools": [tool()], "tool_choice": "required", "parallel_tool_calls": false,
        "max_tokens": 200, "temperature": 0,
    });
    let answer = server.post("/v1/chat/completions", &body);
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    let call = choice["message"]["tool_calls"][0].clone();
    assert_eq!(call["function"]["name"], "pick");
    is_picked(&serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap());
    // In parts, the arguments are the same.
    body["stream"] = true.into();
    let parts = server.events("/v1/chat/completions", &body);
    let arguments = joined(&parts, "/choices/0/delta/tool_calls/0/function/arguments");
    assert_eq!(arguments, call["function"]["arguments"].as_str().unwrap());
    // The prompt has the tools, the call and its result.
    let messages = json!([
        question,
        { "role": "assistant", "content": null, "tool_calls": [call] },
        { "role": "tool", "tool_call_id": call["id"], "content": "It was 4." },
    ]);
    let rendered =
        server.post("/apply-template", &json!({ "messages": messages, "tools": [tool()] }));
    let prompt = rendered["prompt"].as_str().unwrap();
    for part in
        ["\"name\":\"pick\"", "<tool_call>\n{\"name\": \"pick\"", "<tool_response>\nIt was 4."]
    {
        assert!(prompt.contains(part), "{part}: {prompt}");
    }
    (body["messages"], body["tool_choice"], body["stream"]) =
        (messages, "auto".into(), false.into());
    assert_eq!(server.post("/v1/chat/completions", &body)["object"], "chat.completion");
    // No tool may be called, so what looks like a call is text.
    let text = "<tool_call>{\"name\": \"pick\", \"arguments\": {}}</tool_call>";
    let body = json!({ "messages": [question], "guided_choice": [text], "max_tokens": 100 });
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!(answer["choices"][0]["message"]["content"], text);
}

#[test]
fn anthropic_messages_have_tools_and_all_events() {
    let server = Server::start(&[]);
    let question = json!({ "role": "user", "content": "Pick a number." });
    let tools = json!([
        { "name": "pick", "description": "Picks.", "input_schema": parameters(), "cache_control": { "type": "ephemeral" } },
        { "type": "web_search_20250305", "name": "web_search", "max_uses": 5 },
    ]);
    let mut body = json!({
        "messages": [question], "tools": tools, "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
        "system": [{ "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } }],
        "metadata": { "user_id": "x" }, "service_tier": "auto", "context_management": {},
        "max_tokens": 200, "temperature": 0,
    });
    let answer = server.post("/v1/messages", &body);
    assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
    let block = answer["content"][0].clone();
    assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("pick")));
    is_picked(&block["input"]);
    body["stream"] = true.into();
    let events = server.events("/v1/messages", &body);
    let expected = [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds(&events), expected);
    let start = &events[0]["message"];
    assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
    assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 50, "{start}");
    assert_eq!(events[2]["content_block"]["input"], json!({}));
    let input: Value = serde_json::from_str(&joined(&events, "/delta/partial_json")).unwrap();
    assert_eq!(input, block["input"]);
    let end = &events[5];
    assert_eq!(end["delta"], json!({ "stop_reason": "tool_use", "stop_sequence": null }));
    assert_eq!(end["usage"]["output_tokens"], answer["usage"]["output_tokens"]);
    assert!(
        end["usage"]["input_tokens"].is_u64() && end["usage"]["cache_read_input_tokens"].is_u64()
    );

    // The conversation goes on with thinking, the call and its result, as clients send them back.
    let turns = json!([
        question,
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "Hm.", "signature": "forebay" },
            { "type": "redacted_thinking", "data": "x" },
            block,
        ] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": block["id"], "content": [{ "type": "text", "text": "It was 4." }] },
            { "type": "text", "text": "And now?", "cache_control": { "type": "ephemeral" } },
        ] },
    ]);
    let counted =
        server.post("/v1/messages/count_tokens", &json!({ "messages": turns, "tools": tools }));
    let fewer = server
        .post("/v1/messages/count_tokens", &json!({ "messages": [question], "tools": tools }));
    assert!(counted["input_tokens"].as_u64() > fewer["input_tokens"].as_u64());
    (body["messages"], body["tool_choice"]) = (turns, json!({ "type": "none" }));
    (body["stream"], body["max_tokens"]) = (false.into(), 8.into());
    let answer = server.post("/v1/messages", &body);
    assert_eq!((&answer["role"], &answer["type"]), (&json!("assistant"), &json!("message")));
}

#[test]
fn a_stop_sequence_is_named() {
    let server = Server::start(&[]);
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Tell me a story." }], "max_tokens": 24, "temperature": 0,
    });
    let free = server.post("/v1/messages", &body);
    let text = free["content"][0]["text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(text.chars().count() / 2).take(3).collect();
    body["stop_sequences"] = json!(["never seen", stop]);
    let answer = server.post("/v1/messages", &body);
    assert_eq!(
        (&answer["stop_reason"], &answer["stop_sequence"]),
        (&json!("stop_sequence"), &json!(stop))
    );
    assert_eq!(answer["content"][0]["text"], text[..text.find(&stop).unwrap()]);
    body["stream"] = true.into();
    let events = server.events("/v1/messages", &body);
    let delta = events.iter().find(|event| event["type"] == "message_delta").unwrap();
    assert_eq!(delta["delta"], json!({ "stop_reason": "stop_sequence", "stop_sequence": stop }));
}

#[test]
fn responses_have_tools_and_end_with_usage() {
    let server = Server::start(&[]);
    let mut body = json!({
        "instructions": "You are terse.",
        "input": [
            { "type": "message", "role": "developer", "content": [{ "type": "input_text", "text": "Be brief." }] },
            { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "Pick a number." }] },
        ],
        "tools": [
            { "type": "function", "name": "pick", "description": "Picks.", "parameters": parameters(), "strict": true },
            { "type": "web_search" }, { "type": "local_shell" },
            { "type": "custom", "name": "apply_patch", "format": { "type": "grammar" } },
            { "type": "a_tool_of_tomorrow", "nested": { "type": "function" } },
        ],
        "tool_choice": { "type": "function", "name": "pick" }, "parallel_tool_calls": false, "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x", "client_metadata": {}, "store": false, "stream": true, "temperature": 0,
        "max_output_tokens": 200,
    });
    let events = server.events("/v1/responses", &body);
    assert_eq!(
        kinds(&events)[..3],
        ["response.created", "response.in_progress", "response.output_item.added"]
    );
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed", "{last}");
    let item = last["response"]["output"][0].clone();
    assert_eq!((&item["type"], &item["name"]), (&json!("function_call"), &json!("pick")));
    is_picked(&serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap());
    let usage = &last["response"]["usage"];
    assert!(
        usage["input_tokens"].as_u64().unwrap() > 50
            && usage["output_tokens"].as_u64().unwrap() > 5
    );
    let done = events
        .iter()
        .find(|event| event["type"] == "response.function_call_arguments.done")
        .unwrap();
    assert_eq!(done["arguments"], item["arguments"]);

    // The result, as Codex sends it back, with items of tools that the server does not run.
    let call_id = &item["call_id"];
    let more = [
        json!({ "type": "reasoning", "summary": [], "content": [{ "type": "reasoning_text", "text": "Hm." }], "encrypted_content": "x" }),
        item.clone(),
        json!({ "type": "web_search_call", "id": "ws_1", "status": "completed" }),
        json!({ "type": "function_call_output", "call_id": call_id, "output": "It was 4." }),
    ];
    body["input"].as_array_mut().unwrap().extend(more);
    (body["tool_choice"], body["max_output_tokens"]) = ("auto".into(), 8.into());
    let events = server.events("/v1/responses", &body);
    let last = events.last().unwrap();
    let ends = ["response.completed", "response.incomplete"];
    assert!(ends.contains(&last["type"].as_str().unwrap()), "{last}");
    assert!(last["response"]["usage"]["total_tokens"].as_u64().unwrap() > 50);

    // Clients probe the endpoint with empty requests.
    for probe in [json!({}), json!({ "input": "" }), json!({ "input": [], "stream": true })] {
        let (status, answer) = server.ask("POST", "/v1/responses", "", &probe.to_string());
        assert_eq!(status, 200, "{answer}");
        let ends =
            answer.contains("response.completed") || answer.contains("\"status\":\"completed\"");
        assert!(ends && answer.contains("\"total_tokens\":0"), "{answer}");
    }
}

#[test]
fn images_are_refused_in_words() {
    let server = Server::start(&[]);
    let image =
        json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AA==" } });
    let own = json!({ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "AA==" } });
    let result = json!({ "type": "tool_result", "tool_use_id": "t", "content": [own] });
    let turn = |content: Value| json!([{ "role": "user", "content": [content] }]);
    for (path, body) in [
        ("/v1/chat/completions", json!({ "messages": turn(image) })),
        (
            "/v1/responses",
            json!({ "input": turn(json!({ "type": "input_image", "image_url": "x" })) }),
        ),
        ("/v1/messages", json!({ "max_tokens": 4, "messages": turn(own) })),
        ("/v1/messages", json!({ "max_tokens": 4, "messages": turn(result) })),
        (
            "/v1/messages/count_tokens",
            json!({ "messages": turn(json!({ "type": "document", "source": {} })) }),
        ),
        (
            "/api/chat",
            json!({ "messages": [{ "role": "user", "content": "x", "images": ["AA=="] }] }),
        ),
        ("/api/generate", json!({ "prompt": "x", "images": ["AA=="] })),
    ] {
        let (status, answer) = server.ask("POST", path, "", &body.to_string());
        assert!(status == 400 && answer.contains("images"), "{path}: {status} {answer}");
        assert!(answer.contains("not supported"), "{path}: {answer}");
    }
}

#[test]
fn ollama_chats_have_tools() {
    let server = Server::start(&[]);
    // Ollama's clients send arguments as an object, and results without an id.
    let messages = json!([
        { "role": "user", "content": "Pick a number." },
        { "role": "assistant", "content": "", "tool_calls": [{ "function": { "name": "pick", "arguments": { "number": 4 } } }] },
        { "role": "tool", "content": "It was 4.", "tool_name": "pick" },
    ]);
    let options = json!({ "num_predict": 8, "temperature": 0 });
    let body = json!({ "model": "demo", "messages": messages, "tools": [tool()], "stream": false, "options": options });
    let answer = server.post("/api/chat", &body);
    assert_eq!(answer["message"]["role"], "assistant");
    assert!(answer["prompt_eval_count"].as_u64().unwrap() > 50, "{answer}");
}
