//! Tests `tokenize` and `render` against the reference data.

use serde_json::{Value, json};

use crate::harness::{copy_folder, fixture, forebay, forebay_with_input, moe};

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
    assert_eq!(render(&["--json"], &list).json(), json!({ "prompt": "<user>Grüße<assistant>" }));
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
fn a_model_without_a_template_says_so() {
    let line = forebay_with_input(&["render", &moe()], "[]").failed(1);
    assert!(line.contains("no chat template") && line.contains("--raw"), "{line}");
}
