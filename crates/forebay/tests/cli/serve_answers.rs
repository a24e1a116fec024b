//! Fields that change an answer do so, through every interface that has them.

use serde_json::{Value, json};

use crate::server::{Server, completion};

fn extended(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn text(server: &Server, more: &Value) -> String {
    let body = extended(completion("Once upon a time there was", 12), more);
    server.post("/v1/completions", &body)["choices"][0]["text"].as_str().unwrap().to_owned()
}

fn ids(server: &Server, text: &str) -> Vec<u64> {
    let answer = server.post("/tokenize", &json!({ "content": text }));
    answer["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn fields_of_other_servers_change_the_answer_as_there() {
    let server = Server::start(&["--ctx", "512"]);
    let usual = text(&server, &json!({}));
    assert_eq!(text(&server, &json!({ "user": "x" })), usual);
    assert_eq!(text(&server, &json!({ "grammar": "root ::= \"a\"{5,5}" })), "aaaaa");
    assert_ne!(text(&server, &json!({ "repeat_penalty": 5.0 })), usual);
    assert_eq!(
        text(&server, &json!({ "repeat_penalty": 5.0 })),
        text(&server, &json!({ "repetition_penalty": 5.0 }))
    );
    let body = json!({ "prompt": "Once upon a time there was", "temperature": 0, "n_predict": 3 });
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    // Words that the answer has are no longer in it, and it ends where it is told to.
    let word = usual.split_whitespace().find(|word| word.len() > 2).unwrap();
    let without = text(&server, &json!({ "bad_words": [word] }));
    assert!(!without.contains(word), "{without}");
    let stopped = text(&server, &json!({ "stop": [word] }));
    assert!(usual.starts_with(&stopped) && !stopped.contains(word));
    let kept = text(&server, &json!({ "stop": [word], "include_stop_str_in_output": true }));
    assert_eq!(kept, format!("{stopped}{word}"));
    let id = ids(&server, &usual)[4];
    let ended = text(&server, &json!({ "stop_token_ids": [id] }));
    assert!(usual.starts_with(&ended) && ended.len() < usual.len(), "{ended}");
    let later = text(&server, &json!({ "stop_token_ids": [id], "min_tokens": 12 }));
    assert_ne!(later, ended);
    assert!(ids(&server, &later).len() > ids(&server, &ended).len(), "{later}");
    // The model's own end may come late or never.
    let short = json!({ "prompt": "The end.", "temperature": 0, "max_tokens": 200 });
    let count = |more: Value| {
        let answer = server.post("/v1/completions", &extended(short.clone(), &more));
        answer["usage"]["completion_tokens"].as_u64().unwrap()
    };
    assert_eq!(count(json!({ "ignore_eos": true })), 200);
    assert!(count(json!({ "min_tokens": 150 })) >= 150);
    // llama.cpp's own path takes the same.
    let body = json!({ "prompt": "Once upon a time there was", "n_predict": 8, "temperature": 0,
        "grammar": "root ::= \"(\" root? \")\"" });
    let answer = server.post("/completion", &body);
    let text = answer["content"].as_str().unwrap();
    assert!(text.starts_with('(') && text.chars().all(|c| "()".contains(c)), "{text}");
    for (grammar, part) in [("root ::= a", "no rule `a`"), ("root ::= \"a", "line 1")] {
        let body = json!({ "prompt": "A", "grammar": grammar });
        let (status, answer) = server.ask("POST", "/v1/completions", "", &body.to_string());
        assert!(status == 400 && answer.contains(part), "{answer}");
    }
}

#[test]
fn functions_are_called_in_their_own_form() {
    let server = Server::start(&["--ctx", "512"]);
    let parameters = json!({ "type": "object", "properties": { "n": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["n"], "additionalProperties": false });
    let mut body = json!({ "messages": [{ "role": "user", "content": "Look" }], "temperature": 0, "max_tokens": 60,
        "functions": [{ "name": "look", "parameters": parameters }], "function_call": { "name": "look" } });
    let choice = server.post("/v1/chat/completions", &body)["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "function_call", "{choice}");
    let call = &choice["message"]["function_call"];
    assert_eq!(call["name"], "look");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["n"].is_u64() && choice["message"]["tool_calls"].is_null());
    body["stream"] = true.into();
    let parts = server.events("/v1/chat/completions", &body);
    let of = |name: &'static str| -> String {
        let deltas = parts.iter().filter_map(|part| part.pointer("/choices/0/delta/function_call"));
        deltas.filter_map(|call| call[name].as_str()).collect()
    };
    assert_eq!(
        (of("name"), of("arguments")),
        ("look".into(), call["arguments"].as_str().unwrap().into())
    );
    // Of the tools that a request offers, some may be allowed only.
    let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    let allowed = json!({ "type": "allowed_tools", "allowed_tools": { "mode": "required", "tools": [{ "type": "function", "function": { "name": "b" } }] } });
    let body = json!({ "messages": [{ "role": "user", "content": "Look" }], "temperature": 0, "max_tokens": 60,
        "tools": [tool("a"), tool("b")], "tool_choice": allowed });
    let choice = server.post("/v1/chat/completions", &body)["choices"][0].clone();
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "b", "{choice}");
}

#[test]
fn several_prompts_have_an_answer_each() {
    let server = Server::start(&["--ctx", "512"]);
    let prompts = ["Once upon", "The old", "A fox"];
    let of = |prompt: &str| {
        server.post("/v1/completions", &completion(prompt, 5))["choices"][0]["text"].clone()
    };
    let alone: Vec<Value> = prompts.iter().map(|prompt| of(prompt)).collect();
    let body = extended(completion("", 5), &json!({ "prompt": prompts, "n": 2 }));
    let answer = server.post("/v1/completions", &body);
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &alone[index / 2]));
    }
    let tokens: usize = prompts
        .iter()
        .map(|p| {
            let answer = server.post("/tokenize", &json!({ "content": p, "add_special": true }));
            answer["count"].as_u64().unwrap() as usize
        })
        .sum();
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    let body =
        extended(completion("", 5), &json!({ "prompt": prompts, "stream": true, "echo": true }));
    let parts = server.events("/v1/completions", &body);
    for (index, prompt) in prompts.iter().enumerate() {
        let own = parts.iter().filter(|part| part["choices"][0]["index"] == index);
        let text: String = own.filter_map(|part| part["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, format!("{prompt}{}", alone[index].as_str().unwrap()));
    }
}

#[test]
fn probabilities_of_prompts_are_those_of_answers() {
    let server = Server::start(&["--ctx", "512"]);
    // An answer that is sent as a prompt has the probabilities that it had, however long the prompt is.
    let long = "The old king had two sons, and the sun shone on the sea. ".repeat(4);
    let start = server.post("/tokenize", &json!({ "content": long, "add_special": true }));
    let start: Vec<Value> = start["tokens"].as_array().unwrap().clone();
    let body = json!({ "prompt": start, "max_tokens": 12, "temperature": 0, "logprobs": 2 });
    let answered = server.post("/v1/completions", &body)["choices"][0].clone();
    let words = &answered["logprobs"]["tokens"];
    let count = words.as_array().unwrap().len();
    let mut whole = start.clone();
    let more = server.post("/tokenize", &json!({ "content": answered["text"] }));
    whole.extend(more["tokens"].as_array().unwrap().clone());
    assert_eq!(whole.len(), start.len() + count, "the text has other tokens than the answer");
    let body = json!({ "prompt": whole, "max_tokens": 0, "echo": true, "logprobs": 2 });
    let echoed = server.post("/v1/completions", &body)["choices"][0].clone();
    let of = |value: &Value| value.as_f64().unwrap();
    let logprobs = echoed["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(logprobs.len(), whole.len());
    assert!(logprobs[0].is_null() && echoed["logprobs"]["top_logprobs"][0].is_null());
    assert!(logprobs[1..].iter().all(|logprob| of(logprob) <= 0.0));
    assert!(echoed["text"].as_str().unwrap().ends_with(answered["text"].as_str().unwrap()));
    for (own, again) in answered["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap()
        .iter()
        .zip(&logprobs[start.len()..])
    {
        assert!((of(own) - of(again)).abs() < 2e-2, "{own} {again}");
    }
    // An answer without a token has no probabilities, but is not one for which nobody asked.
    let body = json!({ "prompt": "Once", "max_tokens": 0, "logprobs": 2 });
    let empty = server.post("/v1/completions", &body)["choices"][0]["logprobs"].clone();
    assert_eq!(empty["tokens"], json!([]), "{empty}");
    let body = json!({ "prompt": "Once", "max_tokens": 0 });
    assert!(server.post("/v1/completions", &body)["choices"][0]["logprobs"].is_null());
    // vLLM's form has ids and ranks, and is there again if the prompt is known.
    for _ in 0..2 {
        let body =
            json!({ "prompt": whole, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0 });
        let choice = server.post("/v1/completions", &body)["choices"][0].clone();
        let all = choice["prompt_logprobs"].as_array().unwrap();
        assert!(all.len() == whole.len() && all[0].is_null() && choice["logprobs"].is_null());
        for (index, entries) in all.iter().enumerate().skip(1) {
            let own = &entries[whole[index].to_string()];
            assert!((of(&own["logprob"]) - of(&logprobs[index])).abs() < 1e-5, "{index}");
            assert_eq!(own["rank"] == 1, entries.as_object().unwrap().len() == 1);
        }
    }
    let body = json!({ "prompt": "A", "echo": true, "logprobs": 1, "stream": true });
    let (status, answer) = server.ask("POST", "/v1/completions", "", &body.to_string());
    assert!(status == 400 && answer.contains("echo"), "{answer}");
    // Ollama's form.
    let body = json!({ "model": "demo", "prompt": "Once", "stream": false, "logprobs": true, "top_logprobs": 2, "options": { "num_predict": 3 } });
    let answer = server.post("/api/generate", &body);
    let logprobs = answer["logprobs"].as_array().unwrap();
    assert!(
        logprobs.len() == 3
            && logprobs.iter().all(|of| of["top_logprobs"].as_array().unwrap().len() == 2),
        "{answer}"
    );
    let body = extended(body, &json!({ "stream": true }));
    let (_, answer) = server.ask("POST", "/api/generate", "", &body.to_string());
    assert_eq!(answer.matches("\"top_logprobs\"").count(), 3, "{answer}");
}

/// Returns the items of a list, in all parts of a stream.
fn items(parts: &[Value], name: &str) -> Vec<Value> {
    parts.iter().filter_map(|part| part[name].as_array()).flatten().cloned().collect()
}

#[test]
fn completions_show_tokens_and_probabilities_as_llama_cpp() {
    let server = Server::start(&["--ctx", "512"]);
    let body = json!({ "prompt": "Once upon a time there was", "n_predict": 6, "temperature": 0, "ignore_eos": true });
    let plain = server.post("/completion", &body);
    assert_eq!(plain["tokens"], json!([]));
    assert!(plain.get("completion_probabilities").is_none(), "{plain}");
    let wanted = extended(body.clone(), &json!({ "n_probs": 3, "return_tokens": true }));
    let answer = server.post("/completion", &wanted);
    assert_eq!(answer["content"], plain["content"]);
    assert_eq!(answer["generation_settings"]["n_probs"], 3);
    let tokens = answer["tokens"].as_array().unwrap();
    let entries = answer["completion_probabilities"].as_array().unwrap();
    assert_eq!((tokens.len(), entries.len()), (6, 6));
    for (token, entry) in tokens.iter().zip(entries) {
        let likeliest = entry["top_logprobs"].as_array().unwrap();
        assert_eq!((&entry["id"], likeliest.len()), (token, 3));
        // The answer is greedy.
        for name in ["id", "token", "bytes", "logprob"] {
            assert_eq!(likeliest[0][name], entry[name], "{entry}");
        }
    }
    let text = server.post("/detokenize", &json!({ "tokens": tokens }));
    assert_eq!(text["content"], answer["content"]);
    let parts = server.events("/completion", &extended(wanted, &json!({ "stream": true })));
    let text: String = parts.iter().filter_map(|part| part["content"].as_str()).collect();
    assert_eq!(json!(text), answer["content"]);
    assert_eq!(
        (&items(&parts, "tokens"), &items(&parts, "completion_probabilities")),
        (tokens, entries)
    );
    // Parts have their token ids without being asked.
    let parts = server.events("/completion", &extended(body, &json!({ "stream": true })));
    assert_eq!(&items(&parts, "tokens"), tokens);
    assert!(parts.iter().all(|part| part.get("completion_probabilities").is_none()));
}

#[test]
fn completions_of_llama_cpp_have_several_prompts() {
    let server = Server::start(&["--ctx", "512"]);
    let of = |prompt: Value, more: Value| {
        let body = json!({ "prompt": prompt, "n_predict": 4, "temperature": 0 });
        server.post("/completion", &extended(body, &more))
    };
    let content = |prompt: &str| of(json!(prompt), json!({}))["content"].clone();
    let (first, second) = (content("Once upon"), content("The old"));
    assert_eq!(of(json!({ "prompt_string": "Once upon" }), json!({}))["content"], first);
    let prompts = json!(["Once upon", ids(&server, "The old"), { "prompt_string": "The old" }]);
    let answers = of(prompts.clone(), json!({ "n_cmpl": 2 }));
    let answers = answers.as_array().unwrap();
    assert_eq!(answers.len(), 6);
    for (index, answer) in answers.iter().enumerate() {
        let expected = if index < 2 { &first } else { &second };
        assert_eq!((&answer["index"], &answer["content"]), (&json!(index), expected));
        let prompt = if index < 2 { "Once upon" } else { "The old" };
        assert_eq!(answer["prompt"], prompt);
    }
    let body = json!({ "prompt": prompts, "n_predict": 4, "temperature": 0, "stream": true });
    let parts = server.events("/completion", &body);
    for (index, expected) in [&first, &second, &second].into_iter().enumerate() {
        let own = parts.iter().filter(|part| part["index"] == index);
        let text: String = own.filter_map(|part| part["content"].as_str()).collect();
        assert_eq!(json!(text), *expected);
    }
    assert_eq!(parts.iter().filter(|part| part["stop"] == true).count(), 3);
}

#[test]
fn completions_of_llama_cpp_say_how_they_ended() {
    let server = Server::start(&["--ctx", "64"]);
    let of = |more: Value| {
        let body =
            json!({ "prompt": "Once upon a time there was", "temperature": 0, "ignore_eos": true });
        server.post("/completion", &extended(body, &more))
    };
    let number = |answer: &Value, name: &str| answer["timings"][name].as_f64().unwrap();
    // The first token takes the time of the prompt, so a rate is that of the others.
    let one = of(json!({ "n_predict": 1 }));
    assert_eq!((number(&one, "predicted_n"), number(&one, "predicted_per_second")), (1.0, 0.0));
    assert_eq!(one["truncated"], false);
    let some = of(json!({ "n_predict": 16 }));
    let expected = 15e3 / number(&some, "predicted_ms");
    assert!((number(&some, "predicted_per_second") / expected - 1.0).abs() < 1e-9, "{some}");
    let all = of(json!({}));
    assert_eq!((&all["truncated"], &all["stop_type"]), (&json!(true), &json!("limit")));
    let counted =
        all["tokens_evaluated"].as_u64().unwrap() + all["tokens_predicted"].as_u64().unwrap();
    assert!((64..=65).contains(&counted), "{all}");
    // Tokens that end an answer are forbidden, and a seed that was drawn is told.
    assert!(!all["generation_settings"]["logit_bias"].as_array().unwrap().is_empty(), "{all}");
    let drawn = of(json!({ "n_predict": 8, "temperature": 1.5 }));
    let seed = drawn["generation_settings"]["seed"].clone();
    let again = of(json!({ "n_predict": 8, "temperature": 1.5, "seed": seed }));
    assert_eq!(again["content"], drawn["content"]);
}

#[test]
fn texts_are_biased_by_their_tokens() {
    let server = Server::start(&["--ctx", "512"]);
    let usual = text(&server, &json!({}));
    let word = format!(" {}", usual.split_whitespace().next().unwrap());
    let by_ids: Value = ids(&server, &word).into_iter().map(|id| json!([id, -100])).collect();
    let expected = text(&server, &json!({ "logit_bias": by_ids }));
    assert_ne!(expected, usual);
    for bias in [json!({ &word: -100 }), json!([[&word, -100]])] {
        assert_eq!(text(&server, &json!({ "logit_bias": bias })), expected);
        let body = json!({ "prompt": "Once upon a time there was", "n_predict": 12, "temperature": 0,
            "top_k": 0, "top_p": 1, "min_p": 0, "logit_bias": bias });
        assert_eq!(server.post("/completion", &body)["content"], expected);
    }
}

#[test]
fn tokens_are_counted() {
    let server = Server::start(&["--ctx", "512"]);
    let messages = json!([{ "role": "user", "content": "What is the best book?" }]);
    let count = server.post("/chat/completions/input_tokens", &json!({ "messages": messages }));
    let body = json!({ "messages": messages, "max_tokens": 1 });
    let answer = server.post("/v1/chat/completions", &body);
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(count["input_tokens"], prompt);
    let counted = || -> u64 {
        let metrics = server.get("/metrics").1;
        let line = metrics.lines().find(|line| line.starts_with("forebay_prompt_tokens_total"));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap()
    };
    assert_eq!(counted(), prompt);
    let answer = server.post("/v1/embeddings", &json!({ "input": ["a fox", "a wolf and a fox"] }));
    let of_texts = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(counted(), prompt + of_texts);
}

/// Evaluation programs ask for one token after a prompt, and take all tokens but the last one for those of the prompt.
#[test]
fn an_end_after_an_echoed_prompt_has_its_probability() {
    let server = Server::start(&[]);
    let end = "<|endoftext|>";
    let id = ids(&server, end)[0].to_string();
    let body = json!({ "prompt": "A fox", "max_tokens": 1, "echo": true, "logprobs": 1, "temperature": 0, "logit_bias": { id: 100 } });
    let choice = server.post("/v1/completions", &body)["choices"][0].clone();
    assert_eq!(choice["text"], "A fox");
    assert_eq!(choice["finish_reason"], "stop");
    let logprobs = &choice["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), ids(&server, "A fox").len() + 1, "{choice}");
    assert_eq!(tokens.last().unwrap(), end);
    let last = logprobs["token_logprobs"].as_array().unwrap().last().unwrap();
    assert!(last.as_f64().is_some_and(|logprob| logprob < 0.0), "{choice}");
}
