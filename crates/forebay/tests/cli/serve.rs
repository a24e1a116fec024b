//! Tests `forebay serve` over real connections: the interfaces agree, answers do not depend on others, and no client can
//! disturb another.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{demo, forebay};
use crate::server::{Server, completion};

#[test]
fn answers_have_the_form_that_is_asked_for() {
    let server = Server::start(&[]);
    let messages = json!([{ "role": "user", "content": "A fox" }]);
    let schema = json!({
        "type": "object",
        "properties": { "number_of_legs": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["number_of_legs"],
        "additionalProperties": false,
    });
    let is_valid = |text: &str| {
        let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
        let legs = value["number_of_legs"].as_u64();
        assert!(legs.is_some_and(|legs| legs <= 9), "{text}");
    };
    // OpenAI, with two choices and in parts.
    let format =
        json!({ "type": "json_schema", "json_schema": { "name": "fox", "schema": schema } });
    let mut body =
        json!({ "messages": messages, "response_format": format, "n": 2, "max_tokens": 100 });
    let answer = server.post("/v1/chat/completions", &body);
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["finish_reason"], "stop");
        is_valid(choice["message"]["content"].as_str().unwrap());
    }
    (body["n"], body["stream"]) = (1.into(), true.into());
    let parts = server.events("/v1/chat/completions", &body);
    let pieces = parts.iter().filter_map(|part| part["choices"][0]["delta"]["content"].as_str());
    is_valid(&pieces.collect::<String>());
    // Other fields for the form of an answer.
    for (field, value, expected) in [
        ("structured_outputs", json!({ "choice": ["red fox"] }), "red fox"),
        ("guided_regex", json!("a{3}b"), "aaab"),
        ("guided_grammar", json!("start: \"x\" | \"x\" \"y\" \"z\"\nextra: \"x\""), "x"),
    ] {
        let mut body = json!({ "prompt": "A", "max_tokens": 50, "temperature": 0 });
        body[field] = value;
        let text = server.post("/v1/completions", &body)["choices"][0]["text"].clone();
        assert!(text.as_str().unwrap().starts_with(expected), "{field}: {text}");
    }
    // Ollama and Anthropic.
    let body = json!({ "model": "demo", "messages": messages, "format": schema, "stream": false, "options": { "num_predict": 100 } });
    is_valid(server.post("/api/chat", &body)["message"]["content"].as_str().unwrap());
    let body = json!({ "model": "demo", "prompt": "A fox", "format": "json", "stream": false,
        "options": { "num_predict": 200, "temperature": 0 } });
    let answer = server.post("/api/generate", &body);
    if answer["done_reason"] == "stop" {
        let text = answer["response"].as_str().unwrap();
        assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
    }
    let format = json!({ "format": { "type": "json_schema", "schema": schema } });
    let body = json!({ "model": "demo", "max_tokens": 100, "messages": messages, "output_config": format });
    is_valid(server.post("/v1/messages", &body)["content"][0]["text"].as_str().unwrap());
    // What cannot be followed is refused, each in its own form.
    let refuse = |path: &str, body: Value, part: &str| {
        let (status, answer) = server.ask("POST", path, "", &body.to_string());
        assert!(status == 400 && answer.contains(part), "{status} {answer}");
    };
    let chat = "/v1/chat/completions";
    let wrong =
        json!({ "type": "json_schema", "json_schema": { "schema": { "enum": "nothing" } } });
    refuse(chat, json!({ "messages": messages, "response_format": wrong }), "response_format");
    let tools = json!([{ "type": "function", "function": { "name": "f", "parameters": {} } }]);
    refuse(
        chat,
        json!({ "messages": messages, "tools": tools, "tool_choice": { "type": "function", "function": { "name": "g" } } }),
        "no tool `g`",
    );
    refuse(
        "/api/chat",
        json!({ "model": "demo", "messages": messages, "format": "xml" }),
        "format",
    );
    let both = json!({ "prompt": "A", "guided_regex": "a", "guided_choice": ["a"] });
    refuse("/v1/completions", both, "exclude each other");
}

#[test]
fn responses_continue_each_other_and_end_with_usage() {
    let server = Server::start(&["--ctx", "512"]);
    let ask = |body: Value| server.post("/v1/responses", &body);
    let first = ask(json!({ "input": "A fox", "max_output_tokens": 12, "temperature": 0 }));
    assert_eq!((&first["status"], &first["object"]), (&json!("incomplete"), &json!("response")));
    assert_eq!(first["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(first["usage"]["output_tokens"], 12);
    let text = first["output"][0]["content"][0]["text"].as_str().unwrap();

    // The same in events: the deltas add up, every event is numbered, and the last one has the response.
    let body =
        json!({ "input": "A fox", "max_output_tokens": 12, "temperature": 0, "stream": true });
    let events = server.events("/v1/responses", &body);
    let numbers: Vec<u64> = events.iter().map(|e| e["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let of = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let deltas = of("response.output_text.delta").map(|event| event["delta"].as_str().unwrap());
    assert_eq!(deltas.collect::<String>(), text);
    assert_eq!(events[0]["type"], "response.created");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    let item = &last["response"]["output"][0];
    assert_eq!(of("response.output_item.done").next().unwrap()["item"], *item);
    assert_eq!(item["content"][0]["text"], text);

    // A conversation goes on as if all of it were sent, in the sight of its own key alone.
    let next = json!({ "input": "And then?", "max_output_tokens": 8, "temperature": 0, "previous_response_id": first["id"] });
    let turns = json!([
        { "role": "user", "content": "A fox" },
        { "role": "assistant", "content": text },
        { "role": "user", "content": "And then?" },
    ]);
    let whole = json!({ "input": turns, "max_output_tokens": 8, "temperature": 0, "store": false });
    let (continued, whole) = (ask(next.clone()), ask(whole));
    assert_eq!(continued["output"][0]["content"], whole["output"][0]["content"]);
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(server.get(&path).0, 200);
    let key = "X-Api-Key: other\r\n";
    assert_eq!(server.ask("GET", &path, key, "").0, 404);
    assert_eq!(server.ask("POST", "/v1/responses", key, &next.to_string()).0, 404);
    let unstored = format!("/v1/responses/{}", whole["id"].as_str().unwrap());
    assert_eq!(server.get(&unstored).0, 404);
    assert_eq!(server.ask("DELETE", &path, "", "").0, 200);
    assert_eq!(server.ask("POST", "/v1/responses", "", &next.to_string()).0, 404);

    // Unknown tools are left out, the form of the answer is followed, and a request without input is answered.
    let schema = json!({ "type": "object", "properties": { "n": { "type": "integer", "maximum": 9, "minimum": 0 } },
        "required": ["n"], "additionalProperties": false });
    let format = json!({ "format": { "type": "json_schema", "name": "n", "schema": schema } });
    let shaped =
        ask(json!({ "input": "A fox", "text": format, "tools": [{ "type": "web_search" }] }));
    let shaped: Value =
        serde_json::from_str(shaped["output"][0]["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(shaped["n"].as_u64().is_some_and(|n| n <= 9));
    let probe = server.events("/v1/responses", &json!({ "input": [], "stream": true }));
    let last = probe.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"]["usage"]["total_tokens"], 0);
    for (body, part) in [
        (json!({ "input": "x", "background": true }), "background"),
        (json!({ "input": "x", "temperature": 3 }), "temperature"),
        (
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_image" }] }] }),
            "images",
        ),
        (json!({ "input": [{ "type": "item_reference", "id": "x" }] }), "item_reference"),
    ] {
        let (status, answer) = server.ask("POST", "/v1/responses", "", &body.to_string());
        assert!(status == 400 && answer.contains(part), "{status} {answer}");
    }
}

#[test]
fn embeddings_in_all_forms() {
    let server = Server::start(&["--ctx", "64"]);
    let ask = |body: Value| server.post("/v1/embeddings", &body);
    let vector = |answer: &Value, index: usize| -> Vec<f64> {
        let numbers = answer["data"][index]["embedding"].as_array().unwrap();
        numbers.iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let long = "A fox ran through the snow and over the hill to its den. ".repeat(20);
    let huge = long.repeat(1000);
    let both = ask(json!({ "input": ["The sea", "A fox"] }));
    let sea = vector(&both, 0);
    assert!((sea.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    assert_eq!(vector(&ask(json!({ "input": "The sea" })), 0), sea);
    assert_ne!(vector(&both, 1), sea);
    let tokens = server.post("/tokenize", &json!({ "content": "The sea", "add_special": true }));
    let by_tokens = ask(json!({ "input": [tokens["tokens"]] }));
    assert_eq!(vector(&by_tokens, 0), sea);
    assert_eq!(by_tokens["usage"]["prompt_tokens"], tokens["tokens"].as_array().unwrap().len());
    assert_ne!(vector(&ask(json!({ "input": "The sea", "pooling": "last" })), 0), sea);

    // The first dimensions, with the length 1 again, as text.
    let short = vector(&ask(json!({ "input": "The sea", "dimensions": 8 })), 0);
    let scale = sea[..8].iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!(short.iter().zip(&sea).all(|(short, x)| (short - x / scale).abs() < 1e-6));
    let body = json!({ "input": "The sea", "dimensions": 8, "encoding_format": "base64" });
    assert_eq!(ask(body)["data"][0]["embedding"].as_str().unwrap().len(), 44);

    let answer = server.post("/api/embed", &json!({ "input": ["The sea", long, huge] }));
    assert_eq!(answer["embeddings"][0], json!(sea));
    assert_eq!(answer["embeddings"][1], answer["embeddings"][2]);
    let older = server.post("/api/embeddings", &json!({ "prompt": "The sea" }));
    assert_eq!(older["embedding"], answer["embeddings"][0]);
    for (body, part) in [
        (json!({ "input": [] }), "no text"),
        (json!({ "input": [[]] }), "empty"),
        (json!({ "input": long }), "context"),
        (json!({ "input": huge }), "at least"),
        (json!({ "input": "x", "dimensions": 0 }), "dimensions"),
        (json!({ "input": [999_999] }), "vocabulary"),
        (json!({ "input": 5 }), "request"),
    ] {
        let (status, answer) = server.ask("POST", "/v1/embeddings", "", &body.to_string());
        assert!(status == 400 && answer.contains(part), "{part}: {status} {answer}");
    }
}

fn with(mut body: Value, name: &str, value: Value) -> Value {
    body[name] = value;
    body
}

fn text_of(parts: &[Value], pointer: &str) -> String {
    parts.iter().filter_map(|part| part.pointer(pointer)?.as_str()).collect()
}

#[test]
fn all_interfaces_give_the_same_answer_whole_and_in_parts() {
    let server = Server::start(&[]);
    let messages = json!([{ "role": "user", "content": "Tell me a story." }]);
    let chat = json!({ "messages": messages, "max_tokens": 20, "temperature": 0 });

    let whole = server.post("/v1/chat/completions", &chat);
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(!text.is_empty());
    assert_eq!(whole["usage"]["completion_tokens"], 20);
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    let usage = json!({ "include_usage": true });
    let streamed = with(with(chat.clone(), "stream", true.into()), "stream_options", usage);
    let parts = server.events("/v1/chat/completions", &streamed);
    assert_eq!(text_of(&parts, "/choices/0/delta/content"), text);
    assert_eq!(parts.last().unwrap()["usage"]["completion_tokens"], 20);
    assert_eq!(parts[0]["choices"][0]["delta"]["role"], "assistant");

    let whole = server.post("/v1/messages", &chat);
    assert_eq!(whole["content"], json!([{ "type": "text", "text": text }]));
    assert_eq!(
        (&whole["stop_reason"], &whole["usage"]["output_tokens"]),
        (&"max_tokens".into(), &20.into())
    );
    let parts = server.events("/v1/messages", &with(chat.clone(), "stream", true.into()));
    assert_eq!(text_of(&parts, "/delta/text"), text);
    let kinds: Vec<&str> = parts.iter().filter_map(|part| part["type"].as_str()).collect();
    assert_eq!((kinds[0], *kinds.last().unwrap()), ("message_start", "message_stop"));
    let counted = server.post("/v1/messages/count_tokens", &json!({ "messages": messages }));
    let input: Vec<u64> = ["input_tokens", "cache_read_input_tokens"]
        .iter()
        .map(|name| whole["usage"][*name].as_u64().unwrap())
        .collect();
    assert_eq!(counted["input_tokens"], input.iter().sum::<u64>());

    // The defaults of Ollama are others.
    let options = json!({ "temperature": 0, "num_predict": 20, "repeat_penalty": 1.0 });
    let ollama = json!({ "model": "demo:latest", "messages": messages, "options": options });
    let (status, lines) = server.ask("POST", "/api/chat", "", &ollama.to_string());
    assert_eq!(status, 200);
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(text_of(&lines, "/message/content"), text);
    let last = lines.last().unwrap();
    assert_eq!((&last["done"], &last["eval_count"]), (&true.into(), &20.into()));
    let whole = server.post("/api/chat", &with(ollama, "stream", false.into()));
    assert_eq!(whole["message"]["content"], text);

    let prompt = completion("Once upon a time", 16);
    let whole = server.post("/v1/completions", &prompt);
    let raw = json!({ "prompt": "Once upon a time", "raw": true, "stream": false, "options":
        { "temperature": 0, "num_predict": 16, "repeat_penalty": 1.0 } });
    assert_eq!(server.post("/api/generate", &raw)["response"], whole["choices"][0]["text"]);
    assert_eq!(server.end(), Some(0));
}

#[test]
fn answers_do_not_depend_on_others_and_equal_those_of_a_batch() {
    let server = Server::start(&["--parallel", "4"]);
    let requests: Vec<Value> = (0..8usize)
        .map(|number| {
            let prompt = "The fox and the bear ".repeat(1 + number * 3);
            let request = with(completion(&prompt, 8 + number), "seed", number.into());
            with(request, "temperature", json!(if number % 2 == 0 { 0.0 } else { 0.9 }))
        })
        .collect();
    let ask =
        |request: &Value| server.post("/v1/completions", request)["choices"][0]["text"].clone();
    let alone: Vec<Value> = requests.iter().map(ask).collect();
    let together: Vec<Value> = thread::scope(|scope| {
        let threads: Vec<_> =
            requests.iter().map(|request| scope.spawn(move || ask(request))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(together, alone);

    let folder = tempfile::tempdir().unwrap();
    let [input, output] =
        ["in.jsonl", "out.jsonl"].map(|name| folder.path().join(name).to_str().unwrap().to_owned());
    let line = |(number, body)| {
        format!(
            "{}\n",
            json!({ "custom_id": format!("{number}"), "url": "/v1/completions", "body": body })
        )
    };
    std::fs::write(&input, requests.iter().enumerate().map(line).collect::<String>()).unwrap();
    forebay(&["batch", &demo(), &input, "-o", &output, "--device", "cpu"]).ok();
    let lines = std::fs::read_to_string(&output).unwrap();
    let batch: Vec<Value> = lines
        .lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            line["response"]["body"]["choices"][0]["text"].clone()
        })
        .collect();
    assert_eq!(batch, alone);
}

#[test]
fn stops_choices_and_probabilities() {
    let server = Server::start(&[]);
    let free = server.post("/v1/completions", &completion("Once upon a time", 24));
    let text = free["choices"][0]["text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(text.chars().count() / 2).take(3).collect();
    let before = &text[..text.find(&stop).unwrap()];
    let stopped = with(completion("Once upon a time", 24), "stop", json!([stop, "never"]));
    let answer = server.post("/v1/completions", &stopped);
    assert_eq!(answer["choices"][0]["text"], before);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let parts = server.events("/v1/completions", &with(stopped, "stream", true.into()));
    assert_eq!(text_of(&parts, "/choices/0/text"), before);

    let three = with(with(completion("A", 6), "n", 3.into()), "temperature", json!(1.2));
    let three = with(three, "seed", 5.into());
    let whole = server.post("/v1/completions", &three);
    assert_eq!(whole["choices"].as_array().unwrap().len(), 3);
    assert_eq!(whole["usage"]["completion_tokens"], 18);
    let parts = server.events("/v1/completions", &with(three, "stream", true.into()));
    for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
        let own: Vec<Value> =
            parts.iter().filter(|part| part["choices"][0]["index"] == index).cloned().collect();
        assert_eq!(text_of(&own, "/choices/0/text"), choice["text"].as_str().unwrap());
    }

    let likely = with(completion("Once upon a time", 4), "logprobs", 3.into());
    let logprobs = &server.post("/v1/completions", &likely)["choices"][0]["logprobs"];
    let tokens: String = text_of(logprobs["tokens"].as_array().unwrap(), "");
    assert!(text.starts_with(&tokens), "{tokens:?} {text:?}");
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 3);
    let chosen = logprobs["token_logprobs"][0].as_f64().unwrap();
    let best = logprobs["top_logprobs"][0].as_object().unwrap().values();
    assert_eq!(chosen, best.filter_map(Value::as_f64).fold(f64::MIN, f64::max));

    // A bias that is large enough decides.
    let ids = server.post("/tokenize", &json!({ "content": " the" }));
    let id = ids["tokens"][0].to_string();
    let biased = with(completion("Once upon a time", 3), "logit_bias", json!({ id: 100 }));
    assert_eq!(server.post("/v1/completions", &biased)["choices"][0]["text"], " the the the");
    let back = server.post("/detokenize", &json!({ "tokens": ids["tokens"] }));
    assert_eq!(back["content"], " the");
}

#[test]
fn wrong_requests_get_errors_in_the_form_of_their_interface() {
    let server = Server::start(&["--max-body", "100KiB", "--ctx", "256"]);
    let long = completion(&"word ".repeat(2000), 4);
    let image = json!([{ "role": "user", "content": [{ "type": "image", "source": {} }] }]);
    for (path, body, status, words) in [
        ("/v1/completions", json!({ "prompt": "x", "model": "other" }), 404, "demo"),
        ("/v1/completions", json!({ "prompt": "x", "temperature": -1 }), 400, "temperature"),
        ("/v1/completions", json!({ "prompt": [999_999_999] }), 400, "vocabulary"),
        ("/v1/completions", json!({ "prompt": "x", "suffix": "y" }), 400, "suffix"),
        ("/v1/completions", long, 400, "context"),
        ("/v1/chat/completions", json!({ "messages": [] }), 400, "no message"),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "king" }] }), 400, "role"),
        ("/v1/messages", json!({ "max_tokens": 5, "messages": image }), 400, "images"),
        (
            "/v1/messages",
            json!({ "messages": [{ "role": "user", "content": "x" }] }),
            400,
            "max_tokens",
        ),
        (
            "/api/chat",
            json!({ "messages": [{ "role": "user", "content": "x", "images": ["x"] }] }),
            400,
            "images",
        ),
        ("/api/generate", json!({ "prompt": "x", "format": "xml" }), 400, "format"),
        ("/api/push", json!({}), 501, "models"),
        ("/v1/rerank", json!({ "query": "x", "documents": ["y"] }), 501, "ranks"),
        ("/v1/nothing", json!({}), 404, "/v1/nothing"),
        ("/health", json!({}), 405, "POST"),
        ("/detokenize", json!({ "tokens": [999_999_999] }), 400, "vocabulary"),
    ] {
        let (found, answer) = server.ask("POST", path, "", &body.to_string());
        assert_eq!(found, status, "{path}: {answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let message = match path {
            "/v1/messages" => {
                assert_eq!(answer["type"], "error");
                &answer["error"]["message"]
            }
            _ if path.starts_with("/api/") => &answer["error"],
            _ => &answer["error"]["message"],
        };
        assert!(message.as_str().is_some_and(|text| text.contains(words)), "{path}: {answer}");
    }
    for body in ["", "{", "[]", "null", "\u{1}", "{\"prompt\": 1e999}"] {
        assert_eq!(server.ask("POST", "/v1/completions", "", body).0, 400, "{body}");
        assert_eq!(server.ask("POST", "/v1/messages", "", body).0, 400, "{body}");
        assert_eq!(server.ask("POST", "/api/chat", "", body).0, 400, "{body}");
    }
    let large = completion(&"x".repeat(200 << 10), 1).to_string();
    assert_eq!(server.ask("POST", "/v1/completions", "", &large).0, 413);
    let nested = format!("{{\"messages\": {}{}}}", "[".repeat(40_000), "]".repeat(40_000));
    assert_eq!(server.ask("POST", "/v1/chat/completions", "", &nested).0, 400);
    for (headers, status) in
        [("Host: example.com\r\n", 403), ("Origin: https://example.com\r\n", 403), ("", 200)]
    {
        assert_eq!(server.ask("GET", "/v1/models", headers, "").0, status, "{headers}");
    }
    assert_eq!(server.get("/"), (200, "Ollama is running".to_owned()));
    assert_eq!(server.end(), Some(0));
}

#[test]
fn keys_and_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "secret\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    assert_eq!(server.get("/health").0, 200);
    for (headers, status) in [
        ("", 401),
        ("Authorization: Bearer wrong\r\n", 401),
        ("Authorization: Bearer secret\r\n", 200),
        ("X-Api-Key: secret\r\n", 200),
    ] {
        assert_eq!(server.ask("GET", "/v1/models", headers, "").0, status, "{headers}");
    }
    let port = server.address.rsplit(':').next().unwrap();
    let serve = |more: &[&str]| {
        let demo = demo();
        let mut arguments = vec!["serve", &demo, "--device", "cpu"];
        arguments.extend(more);
        forebay(&arguments)
    };
    assert!(serve(&["--port", port]).failed(1).contains("cannot listen"));
    assert!(serve(&["--host", "0.0.0.0", "--port", "0"]).failed(2).contains("--api-key-file"));
    std::fs::write(&keys, "\n# nothing\n").unwrap();
    let keys = ["--api-key-file", keys.to_str().unwrap()];
    assert!(serve(&keys).failed(1).contains("no key"));
    assert!(serve(&["--cors", "example.com"]).failed(2).contains("origin"));
}

#[test]
fn browsers_get_the_page_and_others_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "secret\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    assert_eq!(server.get("/"), (200, "Ollama is running".to_owned()));
    let mut stream = server.begin("GET", "/", "Accept: text/html,*/*;q=0.8\r\n", "");
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("default-src 'none'") && head.contains("nosniff"), "{head}");
    // Every file that the page or its modules name is there, without a key, and no address is of another host.
    let mut names: Vec<String> = Vec::new();
    let mut texts = vec![body.to_owned()];
    while let Some(text) = texts.pop() {
        assert!(!text.contains("src=\"http") && !text.contains("href=\"http"), "{text}");
        let found = text.split('"').filter_map(|part| {
            part.strip_prefix("/page/").or_else(|| part.strip_prefix("./")).map(str::to_owned)
        });
        for name in found.collect::<Vec<_>>() {
            if !names.contains(&name) {
                let (status, text) = server.get(&format!("/page/{name}"));
                assert_eq!(status, 200, "{name}");
                texts.push(text);
                names.push(name);
            }
        }
    }
    assert!(names.len() >= 7, "{names:?}");
    for path in ["/page/nothing", "/page/..%2Findex.html"] {
        assert_eq!(server.get(path).0, 404, "{path}");
    }
    // A slash at the end means nothing, so this is no file of the page.
    assert_eq!(server.get("/page/").0, 401);
    assert_eq!(server.get("/live").0, 401);
    assert_eq!(server.ask("GET", "/live", "X-Api-Key: secret\r\n", "").0, 200);
}

#[test]
fn the_live_view_counts_what_the_cache_does() {
    let server = Server::start(&["--ram", "18MiB"]);
    let live = || {
        let live: Value = serde_json::from_str(&server.get("/live").1).unwrap();
        assert_eq!(live["models"].as_array().unwrap().len(), 1);
        live["models"][0].clone()
    };
    let before = live();
    assert_eq!((&before["name"], &before["limited_by"]), (&json!("demo"), &Value::Null));
    let request = with(completion("Once upon a time", 200), "ignore_eos", true.into());
    server.post("/v1/completions", &request);
    // The engine's thread collects when it has no more work, shortly after the answer.
    let started = Instant::now();
    let after = loop {
        let now = live();
        if now["queue"]["running"] == 0 && now["totals"]["generated_tokens"] != 0 {
            break now;
        }
        assert!(started.elapsed() < Duration::from_secs(30), "{now}");
        thread::sleep(Duration::from_millis(10));
    };
    assert!(after["rates"]["generated_tokens"].as_f64().unwrap() > 0.0, "{}", after["rates"]);
    assert!(after["rates"]["disk_bytes"].as_f64().unwrap() > 0.0, "{}", after["rates"]);
    assert!(after["limited_by"] == "CPU" || after["limited_by"] == "disk");
    // Each expert's counts add up to those of the cache, which evicts, and memory does not hold all.
    let layers = after["experts"].as_array().unwrap();
    let sum = |name: &str| -> u64 {
        let lists = layers.iter().flat_map(|layer| layer[name].as_array().unwrap());
        lists.map(|count| count.as_u64().unwrap()).sum()
    };
    let stream = &after["totals"]["stream"];
    for name in ["lookups", "hits", "evictions"] {
        assert!(sum(name) > 0, "{name}");
        assert_eq!(stream[name], sum(name), "{name}");
    }
    assert!(sum("hits") < sum("lookups"));
    let resident = layers.iter().flat_map(|layer| layer["resident"].as_array().unwrap());
    let resident: Vec<bool> = resident.map(|is| is.as_bool().unwrap()).collect();
    assert!(resident.contains(&true) && resident.contains(&false));
    let memory = &after["memory"];
    assert!(
        memory["ram"]["weights_used_bytes"].as_u64() < memory["disk"]["weights_bytes"].as_u64()
    );
}

#[test]
fn clients_that_go_or_stall_disturb_nobody() {
    let server = Server::start(&["--parallel", "2"]);
    let long =
        with(with(completion("Once", 900), "stream", true.into()), "ignore_eos", true.into());
    // Four clients go after the first part: two that run and two that wait.
    for _ in 0..4 {
        let mut stream = server.begin("POST", "/v1/completions", "", &long.to_string());
        let _ = stream.read(&mut [0; 256]).unwrap();
    }
    let stalled: Vec<TcpStream> = (0..200)
        .map(|_| {
            let mut stream = TcpStream::connect(&server.address).unwrap();
            stream
                .write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
                .unwrap();
            stream
        })
        .collect();
    assert_eq!(server.get("/health").0, 200);
    let started = Instant::now();
    while server.running() != (0.into(), 0.into()) {
        assert!(started.elapsed() < Duration::from_secs(30), "{:?}", server.running());
        thread::sleep(Duration::from_millis(20));
    }
    let answer = server.post("/v1/completions", &completion("Once", 4));
    assert_eq!(answer["usage"]["completion_tokens"], 4);
    drop(stalled);
    let (status, metrics) = server.get("/metrics");
    assert_eq!(status, 200);
    assert!(metrics.contains("forebay_requests_total"), "{metrics}");
}

#[test]
fn a_signal_lets_answers_finish() {
    let server = Server::start(&[]);
    let request = with(completion("Once upon a time", 300), "stream", true.into());
    let mut stream = server.begin("POST", "/v1/completions", "", &request.to_string());
    let mut text = vec![0; 300];
    stream.read_exact(&mut text).unwrap();
    server.signal();
    stream.read_to_end(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
    assert_eq!(server.wait(), Some(0));
}
