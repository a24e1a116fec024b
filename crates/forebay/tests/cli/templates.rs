//! Tests chat templates in processes of their own: published ones give the same prompts, and hostile ones harm nobody.

use std::process::Command;

use forebay_text::{ChatTemplate, CivilTime, RenderInput, TextError};
use serde_json::{Value, json};

use crate::harness::{fixture, forebay_with_input, model_with_template};
use crate::server::Server;

/// Runs the templates of this test program in processes of the real binary.
fn isolate() {
    forebay_text::isolate_templates(|| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("template-process");
        command
    });
}

fn reason(error: TextError) -> String {
    match error {
        TextError::TemplateFailed { reason } => reason,
        other => panic!("{other}"),
    }
}

/// Renders a template without a conversation.
fn plain(source: &str) -> Result<String, TextError> {
    ChatTemplate::from_source(source, "<s>", "</s>")?.render(&RenderInput::default())
}

#[test]
fn published_templates_give_the_same_prompts() {
    isolate();
    let Some(path) = fixture("templates/cases.json") else { return };
    let all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let now = CivilTime::parse(all["now"].as_str().unwrap());
    let (mut templates, mut checked) = (std::collections::HashMap::new(), 0);
    for case in all["cases"].as_array().unwrap() {
        let name = case["template"].as_str().unwrap();
        let Some(path) = fixture(&format!("templates/{name}")) else { continue };
        let mut variables = case["variables"].as_object().unwrap().clone();
        let mut token =
            |name| variables.remove(name).and_then(|token| Some(token.as_str()?.to_owned()));
        let (bos, eos) = (token("bos_token"), token("eos_token"));
        let template = templates.entry((name, bos.clone(), eos.clone())).or_insert_with(|| {
            let source = std::fs::read_to_string(path).unwrap();
            let [bos, eos] = [bos, eos].map(Option::unwrap_or_default);
            ChatTemplate::from_source(&source, &bos, &eos).unwrap()
        });
        let input = RenderInput {
            messages: case["messages"].clone(),
            tools: Some(case["tools"].clone()).filter(|tools| !tools.is_null()),
            add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
            variables,
            now,
        };
        match (template.render(&input), &case["expected"], &case["expected_error"]) {
            (Ok(found), Value::String(expected), _) => assert_eq!(found, *expected, "{name}"),
            (Err(TextError::TemplateRefused { message }), _, Value::String(expected)) => {
                assert_eq!(message, *expected, "{name}");
            }
            (found, ..) => panic!("{name} {}: {found:?}", case["title"]),
        }
        checked += 1;
    }
    assert!(checked > 0);
}

#[test]
fn hostile_templates_fail_and_harm_nobody() {
    isolate();
    let repeated = |times: usize, work: &str| {
        format!(
            "{{% set ns = namespace(x='xy', l=[1]) %}}{{% for i in range({times}) %}}{work}{{% endfor %}}"
        )
    };
    let long = "x".repeat(20_000);
    let hostile = [
        // Operators.
        repeated(64, "{% set ns.x = ns.x ~ ns.x %}"),
        repeated(64, "{% set ns.x = ns.x + ns.x %}"),
        repeated(64, "{% set ns.l = (ns.l + ns.l) | list %}"),
        repeated(99, "{% set ns.l = ns.l + ['x' * (100000000 - i)] %}"),
        "{{ ([1] * 100000000) | list }}".to_owned(),
        "{{ ([1] * 100000000)[::-1] }}".to_owned(),
        // Lists that change.
        repeated(90_000, "{% for j in range(90000) %}{% do ns.l.append(j) %}{% endfor %}"),
        repeated(64, "{% do ns.l.extend(ns.l) %}"),
        repeated(90_000, "{% do ns.l.append('x' * 1000000 ~ i) %}"),
        repeated(64, "{% do ns.l.append([ns.l[:], ns.l[:]]) %}") + "{{ ns.l }}",
        // Captured text.
        repeated(64, "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
        format!("{{% set y %}}{}{{% endset %}}", repeated(90_000, &long)),
        repeated(90_000, &long),
        repeated(64, "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.x = m(ns.x) %}"),
        // A list that holds itself so often that printing it has no end. The limit for the processor time may come first.
        repeated(64, "{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
        // Filters and methods.
        "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}".to_owned(),
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}".to_owned(),
        "{{ ([1] * 100000) | join('b' * 100000) }}".to_owned(),
        "{{ ('b' * 100000).join(['x'] * 100000) }}".to_owned(),
        "{{ ('a\\n' * 100000) | indent(100000) }}".to_owned(),
        "{{ '%99999999999d' | format(1) }}".to_owned(),
        // Constants that are computed when the template is compiled.
        format!("{{{{ [{}] | length }}}}", "'x' * 100000000, ".repeat(2000)),
    ];
    for source in &hostile {
        let shown: String = source.chars().take(120).collect();
        let reason = reason(plain(source).err().unwrap_or_else(|| panic!("{shown} is rendered")));
        let known = ["more memory", "too long", "come to an end", "line 1", "panicked"];
        assert!(known.iter().any(|known| reason.contains(known)), "{shown}: {reason}");
    }
    // These need memory and nothing else.
    let doubled = reason(plain(&hostile[0]).unwrap_err());
    assert_eq!(doubled, "it needs more memory than a template may use");
    let appended = repeated(90_000, "{% do ns.l.append('x' * 1000000 ~ i) %}");
    assert_eq!(reason(plain(&appended).unwrap_err()), doubled);
    // A template that failed works again for others.
    let source = format!("{{% if boom %}}{}{{% endif %}}fine", hostile[0]);
    let template = ChatTemplate::from_source(&source, "", "").unwrap();
    assert_eq!(template.variables().unwrap(), ["boom"]);
    for _ in 0..2 {
        let mut input = RenderInput::default();
        assert_eq!(template.render(&input).unwrap(), "fine");
        input.variables.insert("boom".to_owned(), json!(true));
        assert_eq!(reason(template.render(&input).unwrap_err()), doubled);
    }
    // Long conversations have room.
    let message = json!({ "role": "user", "content": "word ".repeat(400) });
    let messages = Value::Array(vec![message; 5000]);
    let input = RenderInput { messages, ..RenderInput::default() };
    let all = "{% for m in messages %}<|{{ m.role }}|>{{ (m.content ~ '\n') | trim }}{% endfor %}";
    let prompt = ChatTemplate::from_source(all, "", "").unwrap().render(&input).unwrap();
    assert_eq!(prompt.len(), 5000 * (8 + 1999));
}

#[test]
fn a_server_survives_a_hostile_template() {
    let folder = tempfile::tempdir().unwrap();
    let template = "{% set ns = namespace(x='xy') %}{% for m in messages %}{% if 'boom' in m.content %}\
        {% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}{{ m.content }}{% endfor %}";
    let model = model_with_template(&folder.path().join("model"), template, 512);
    let server = Server::of(&[&model]);
    let body =
        |text: &str| json!({ "max_tokens": 2, "messages": [{ "role": "user", "content": text }] });
    for _ in 0..3 {
        let path = "/v1/chat/completions";
        let (status, answer) = server.ask("POST", path, "", &body("boom").to_string());
        assert!(status == 400 && answer.contains("more memory"), "{status} {answer}");
        server.post(path, &body("hello"));
    }
    assert_eq!(server.end(), Some(0));
    // The commands say it, too.
    let always = "{{ ([1] * 100000000) | list }}";
    let model = model_with_template(&folder.path().join("always"), always, 512);
    let messages = r#"[{"role": "user", "content": "x"}]"#;
    let error = forebay_with_input(&["render", &model], messages).failed(1);
    assert!(error.contains("more memory"), "{error}");
}
