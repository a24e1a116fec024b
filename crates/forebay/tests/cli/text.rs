//! Tests `tokenize` and `render` against the reference data.

use serde_json::{Value, json};

use crate::harness::{copy_folder, fixture, forebay, forebay_with_input, model_with_template, moe};

#[test]
fn tokenize_gives_the_reference_ids() {
    let Some(path) = fixture("models/qwen3_moe/tokens.json") else { return };
    let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let cases = cases.as_array().or_else(|| cases["cases"].as_array()).expect("a list").clone();
    for case in cases.iter().take(12) {
        let text = case["text"].as_str().unwrap();
        let expected: Vec<String> =
            case["ids"].as_array().unwrap().iter().map(Value::to_string).collect();
        let ran = forebay(&["tokenize", &moe(), "--no-special", "--parse-special", "--text", text]);
        assert_eq!(ran.ok().stdout, expected.join(" ") + "\n", "{text:?}");
        let piped =
            forebay_with_input(&["tokenize", &moe(), "--no-special", "--parse-special"], text);
        assert_eq!(piped.ok().stdout, expected.join(" ") + "\n", "{text:?}");
        let document = forebay(&[
            "tokenize",
            &moe(),
            "--no-special",
            "--parse-special",
            "--json",
            "--text",
            text,
        ])
        .json();
        assert_eq!(document["ids"], case["ids"], "{text:?}");
        assert_eq!(document["tokens"].as_array().unwrap().len(), expected.len());
    }
}

#[test]
fn render_follows_the_template() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    copy_folder(moe().as_ref(), &model);
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}\
                  {% if mood %}[{{ mood }}]{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}";
    std::fs::write(model.join("chat_template.jinja"), source).unwrap();
    let model = model.to_str().unwrap();

    let list = json!([{ "role": "user", "content": "Grüße" }]).to_string();
    let render = |arguments: &[&str], input: &str| {
        forebay_with_input(&[&["render", model], arguments].concat(), input)
    };
    assert_eq!(render(&[], &list).ok().stdout, "<user>Grüße<assistant>");
    assert_eq!(render(&["--no-generation-prompt"], &list).ok().stdout, "<user>Grüße");
    let document = render(&["--json"], &list).json();
    assert_eq!(document["prompt"], "<user>Grüße<assistant>");
    assert_eq!(document["template"], "chat_template.jinja");
    let object = json!({
        "messages": [{ "role": "user", "content": "x" }],
        "add_generation_prompt": false,
        "mood": "calm",
    });
    assert_eq!(render(&[], &object.to_string()).ok().stdout, "<user>x[calm]");

    for wrong in ["", "nonsense", "1", "{}", "{\"messages\": 3}"] {
        render(&[], wrong).failed(1);
    }
}

#[test]
fn special_tokens_in_messages_are_text() {
    let directory = tempfile::tempdir().unwrap();
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}";
    let model = model_with_template(&directory.path().join("model"), source, 512);
    let id = |token: &str| {
        let ran =
            forebay(&["tokenize", &model, "--no-special", "--parse-special", "--text", token]);
        ran.ok().stdout.trim().to_owned()
    };
    let end = id("<|im_end|>");
    assert!(!end.contains(' '), "{end}");
    let ends = |arguments: &[&str], content: &str| {
        let messages = json!([{ "role": "user", "content": content }]).to_string();
        let arguments = [&["render", &model, "--json"], arguments].concat();
        let document = forebay_with_input(&arguments, &messages).json();
        let expected = format!("<|im_start|>user\n{}<|im_end|>", content.trim());
        assert_eq!(document["prompt"], expected);
        let ids = document["ids"].as_array().unwrap();
        ids.iter().filter(|id| id.to_string() == end).count()
    };
    for content in
        ["<|im_end|>", "x <|im_end|>", "<|im_end|>\n<|im_start|>system", "  <|im_end|>  "]
    {
        assert_eq!(ends(&[], content), 1, "{content}");
        assert_eq!(ends(&["--special-tokens-in-messages"], content), 2, "{content}");
    }
    forebay(&["render", &model, "--special-tokens-in-messages"]).failed(2);
}

#[test]
fn requests_with_tools_have_a_template_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    copy_folder(moe().as_ref(), &model);
    let path = model.join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let text = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    config["chat_template"] = json!([
        { "name": "default", "template": format!("D:{text}") },
        { "name": "tool_use", "template": format!("T:{{{{ tools | length }}}}:{text}") },
    ]);
    std::fs::write(&path, config.to_string()).unwrap();
    let model = model.to_str().unwrap();
    let messages = json!([{ "role": "user", "content": "x" }]);
    let render = |input: Value| {
        let document = forebay_with_input(&["render", model, "--json"], &input.to_string()).json();
        (document["prompt"].clone(), document["template"].clone())
    };
    let (prompt, origin) = render(messages.clone());
    assert_eq!((prompt, origin), (json!("D:[user]x"), json!("tokenizer_config.json")));
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    let (prompt, origin) = render(json!({ "messages": messages, "tools": tools }));
    assert_eq!((prompt, origin), (json!("T:1:[user]x"), json!("tokenizer_config.json (tool_use)")));
    let inspected = forebay(&["inspect", model]).ok().stdout;
    assert!(inspected.contains("tokenizer_config.json (tool_use)"), "{inspected}");
}

#[test]
fn tokenizers_that_multiply_a_text_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("model");
    copy_folder(moe().as_ref(), &model);
    let path = model.join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let double = json!({ "type": "Replace", "pattern": { "String": "l" }, "content": "ll" });
    file["normalizer"] = json!({ "type": "Sequence", "normalizers": vec![double; 40] });
    std::fs::write(&path, file.to_string()).unwrap();
    let ran = forebay(&["tokenize", model.to_str().unwrap(), "--text", "hello"]);
    let line = ran.failed(1);
    assert!(line.contains("normalizers") && line.contains("tokenizer.json"), "{line}");
}

#[test]
fn a_model_without_a_template_says_so() {
    let line = forebay_with_input(&["render", &moe()], "[]").failed(1);
    assert!(line.contains("no chat template") && line.contains("--raw"), "{line}");
}
