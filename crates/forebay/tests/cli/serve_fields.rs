//! Sends every field of the table of fields to a server.

use forebay_requests::fields::{FORMS, Field, Form, Kind, Rule, Tagged, Variant};
use serde_json::{Map, Value, json};

use crate::server::Server;

/// Words of errors about fields that are not in the table, or that the server does not read.
const OF_THE_TABLE: [&str; 4] = [
    "is not a field that this server knows",
    "is not supported",
    "unknown field",
    "is not a request",
];

/// A request with a field, and what should come of it.
struct Case {
    path: &'static str,
    field: &'static str,
    body: Value,
    rule: Rule,
    /// True if the field is one of the request itself.
    is_own: bool,
    /// True if the field is not there, and the request may need it.
    lacks_it: bool,
}

fn example(field: &Field) -> Value {
    serde_json::from_str(field.example)
        .unwrap_or_else(|why| panic!("{}: {}: {why}", field.name, field.example))
}

/// Returns an object with all fields that must be there.
fn required(form: &Form) -> Map<String, Value> {
    let is_required = |field: &&Field| matches!(field.rule, Rule::Required);
    form.fields().filter(is_required).map(|field| (field.name.to_owned(), example(field))).collect()
}

/// Returns the least request of a form, whose answer has few tokens.
fn least(form: &Form) -> Map<String, Value> {
    let mut body = required(form);
    let more = match form.name {
        "ChatRequest" | "CompletionsRequest" | "AnthropicRequest" => json!({ "max_tokens": 2 }),
        "ResponsesRequest" => json!({ "input": "A", "max_output_tokens": 2 }),
        "OllamaChatRequest" => {
            json!({ "model": "demo", "messages": [{ "role": "user", "content": "A" }],
            "stream": false, "options": { "num_predict": 2 } })
        }
        "OllamaGenerateRequest" => {
            json!({ "model": "demo", "prompt": "A", "stream": false, "options": { "num_predict": 2 } })
        }
        "LlamaCompletionRequest" | "InfillRequest" => json!({ "n_predict": 2 }),
        "OllamaEmbedRequest" => json!({ "input": "A" }),
        "TokenizeRequest" => json!({ "content": "A" }),
        _ => json!({}),
    };
    body.extend(more.as_object().unwrap().clone());
    body
}

/// Adds the cases of a form whose objects `wrap` puts into a request.
fn add(
    form: &'static Form,
    path: &'static str,
    base: &Map<String, Value>,
    wrap: &dyn Fn(Value) -> Value,
    known: &mut Vec<&'static str>,
    cases: &mut Vec<Case>,
) {
    if known.contains(&form.name) {
        return;
    }
    known.push(form.name);
    let is_own = !form.paths.is_empty();
    for field in form.fields() {
        let with = |value: Value| {
            let mut object = base.clone();
            if let Rule::Alias(of) = field.rule {
                object.remove(of);
            }
            object.insert(field.name.to_owned(), value);
            wrap(object.into())
        };
        let case = |value| {
            let (field, rule, body) = (field.name, field.rule, with(value));
            Case { path, field, body, rule, is_own, lacks_it: false }
        };
        cases.push(case(example(field)));
        if !matches!(field.rule, Rule::Required) {
            let nothing = Case { rule: Rule::Honoured, lacks_it: true, ..case(Value::Null) };
            cases.push(nothing);
        }
        add_kind(&field.kind, path, &with, known, cases);
    }
}

fn add_kind(
    kind: &'static Kind,
    path: &'static str,
    wrap: &dyn Fn(Value) -> Value,
    known: &mut Vec<&'static str>,
    cases: &mut Vec<Case>,
) {
    match kind {
        Kind::Object(form) => add(form, path, &required(form), wrap, known, cases),
        Kind::List(of) => add_kind(of, path, &|value| wrap(json!([value])), known, cases),
        Kind::Map(of) => add_kind(of, path, &|value| wrap(json!({ "7": value })), known, cases),
        Kind::OneOf(kinds) => {
            kinds.iter().for_each(|kind| add_kind(kind, path, wrap, known, cases))
        }
        Kind::Tagged(of) => add_tagged(of, path, wrap, known, cases),
        _ => {}
    }
}

fn add_tagged(
    of: &'static Tagged,
    path: &'static str,
    wrap: &dyn Fn(Value) -> Value,
    known: &mut Vec<&'static str>,
    cases: &mut Vec<Case>,
) {
    if known.contains(&of.name) {
        return;
    }
    known.push(of.name);
    for (tag, variant) in of.variants {
        let tagged = |mut value: Value| {
            value[of.tag] = (*tag).into();
            wrap(value)
        };
        let (rule, object) = match variant {
            Variant::Form(form) => {
                add(form, path, &required(form), &tagged, known, cases);
                (Rule::Honoured, required(form))
            }
            Variant::LeftOut(why) => (Rule::Harmless(why), Map::new()),
            Variant::Refused(why) => (Rule::Refused { off: &[], why }, Map::new()),
        };
        let (field, body) = (of.tag, tagged(object.into()));
        cases.push(Case { path, field, body, rule, is_own: false, lacks_it: false });
    }
}

/// Returns the cases of all requests that one server answers.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for form in FORMS {
        let path = match form.name {
            // These are about models of a library and files.
            "BatchRequest" | "OllamaCopyRequest" => continue,
            _ => form.paths[0],
        };
        add(form, path, &least(form), &|body| body, &mut Vec::new(), &mut cases);
    }
    cases
}

#[test]
fn every_field_is_followed_or_harmless_or_refused_by_name() {
    let server = Server::start(&["--ctx", "512"]);
    let mut wrong = Vec::new();
    let all = cases();
    for Case { path, field, body, rule, is_own, lacks_it } in &all {
        let (status, answer) = server.ask("POST", path, "", &body.to_string());
        let is_right = match rule {
            Rule::Refused { .. } => status == 400 && answer.contains(field),
            // The model has no tokens for filling in the middle.
            _ if *path == "/infill" => {
                status == 400 && !OF_THE_TABLE[..3].iter().any(|words| answer.contains(words))
                    || answer.contains("suffix")
            }
            _ if *lacks_it && answer.contains("is missing") => true,
            _ if *is_own && status != 200 => answer.contains("exclude") || answer.contains("needs"),
            _ => {
                status == 200
                    || status == 400 && !OF_THE_TABLE.iter().any(|words| answer.contains(words))
            }
        };
        if !is_right {
            wrong.push(format!("{path} {field} {rule:?}: {body}\n  {status} {answer}"));
        }
    }
    assert!(all.len() > 900, "{}", all.len());
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), all.len(), wrong.join("\n"));
}

#[test]
fn other_fields_and_wrong_kinds_are_refused_by_name() {
    let server = Server::start(&["--ctx", "512"]);
    for form in FORMS {
        let path = form.paths[0];
        let ask = |field: &str, value: Value| {
            let mut body = least(form);
            body.insert(field.to_owned(), value);
            server.ask("POST", path, "", &Value::from(body).to_string())
        };
        let (status, answer) = ask("heat", json!(1));
        assert!(status == 400 && answer.contains("heat"), "{path}: {status} {answer}");
        for field in form.fields() {
            let is_followed =
                matches!(field.rule, Rule::Honoured | Rule::Required | Rule::Alias(_));
            let value = match field.kind {
                Kind::Any => continue,
                Kind::Flag => json!("yes"),
                Kind::Natural => json!(-1),
                Kind::Integer | Kind::Limit | Kind::Count => json!(1.5),
                Kind::Word(_) => json!("king"),
                Kind::Text | Kind::Number => json!([1]),
                _ => json!(true),
            };
            if is_followed && !(matches!(field.kind, Kind::OneOf(_)) && value == true) {
                let (status, answer) = ask(field.name, value);
                assert!(
                    status == 400 && answer.contains(field.name),
                    "{path} {}: {status} {answer}",
                    field.name
                );
            }
        }
    }
    // Errors say where in the request the field is.
    let body = json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "A", "heat": 1 }] }] });
    let (_, answer) = server.ask("POST", "/v1/chat/completions", "", &body.to_string());
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(answer["error"]["param"], "messages[0].content[0].heat");
}

#[test]
fn numbers_words_and_nulls_are_read_as_they_are_meant() {
    let server = Server::start(&["--ctx", "512"]);
    let messages = json!([{ "role": "User", "content": "A fox" }]);
    for (path, more) in [
        ("/v1/chat/completions", json!({ "max_tokens": 3.0, "top_k": -1, "seed": 7.0 })),
        ("/v1/chat/completions", json!({ "max_tokens": 3, "logit_bias": [[7, -1], [8, false]] })),
        (
            "/v1/chat/completions",
            json!({ "max_tokens": 3, "stop": null, "tools": null, "stream": null }),
        ),
        (
            "/v1/chat/completions",
            json!({ "max_tokens": 3, "chat_template_kwargs": { "enable_thinking": false, "x": 1 } }),
        ),
        (
            "/v1/messages",
            json!({ "max_tokens": 3, "stop_sequences": null, "stream": null, "tools": null }),
        ),
        (
            "/api/chat",
            json!({ "stream": false, "think": "max", "options": { "num_predict": 3.0, "top_k": -1 } }),
        ),
        (
            "/api/chat",
            json!({ "stream": false, "options": null, "keep_alive": null, "format": null, "messages": [] }),
        ),
    ] {
        let mut body = json!({ "model": "demo", "messages": messages });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = server.ask("POST", path, "", &body.to_string());
        assert_eq!(status, 200, "{path} {more}: {answer}");
    }
    // A negative limit is none: the answer goes on to the end of the context.
    let body = json!({ "model": "demo", "messages": messages, "max_tokens": -1, "temperature": 0 });
    let answer = server.post("/v1/chat/completions", &body);
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() > 16, "{answer}");
    for more in [
        json!({ "encoding_format": null, "dimensions": null, "user": null }),
        json!({ "dimensions": 8.0 }),
    ] {
        let mut body = json!({ "model": "demo", "input": ["a"] });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(server.ask("POST", "/v1/embeddings", "", &body.to_string()).0, 200, "{more}");
    }
}
