//! Text of messages never becomes control tokens, for every template and every token.

#[path = "families/latest_templates.rs"]
mod latest_templates;
#[path = "families/newer_templates.rs"]
mod newer_templates;
#[path = "families/templates.rs"]
mod templates;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use forebay_chat::{Format, Message, ToolCall, encode_chat};
use forebay_format::{
    Array, ByteStrings, ChatTemplates, Document, GgufMetadata, HfMetadata, Value as Gguf,
};
use forebay_text::{ChatTemplate, Prompt, Tokenizer};
use serde_json::{Map, Value, json};

/// Text of the message in which tokens are planted.
const NEUTRAL: &str = "neutral";

/// Mark of a token that is planted: a flag of the vocabulary, or its form alone.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Control,
    Text,
}

fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let sets = [root.join("../shared/fixtures"), root.join("fixtures")];
    let own = std::env::var_os("FOREBAY_FIXTURES").map(PathBuf::from);
    own.into_iter().chain(sets).map(|set| set.join("templates")).collect()
}

/// Returns all templates of the reference data, and the short ones of the tests for families.
fn sources() -> Vec<(String, String)> {
    use {latest_templates as latest, newer_templates as newer};
    let mut all: Vec<(String, String)> = [
        ("mistral small", templates::MISTRAL_SMALL),
        ("ministral", templates::MINISTRAL),
        ("gemma 4", templates::GEMMA_4),
        ("kimi", templates::KIMI),
        ("minimax", templates::MINIMAX),
        ("deepseek v3.2", templates::DEEPSEEK_V32),
        ("glm 4.7", templates::GLM_47),
        ("qwen 3.5", templates::QWEN_35),
        ("llama 4", templates::LLAMA_4_PYTHON),
        ("function gemma", templates::FUNCTION_GEMMA),
        ("minimax m3", newer::MINIMAX_M3),
        ("lfm2", newer::LFM2),
        ("lfm2.5", newer::LFM25),
        ("olmo 3", newer::OLMO3),
        ("phi 4 mini", newer::PHI_4_MINI),
        ("granite 3", newer::GRANITE_3),
        ("granite 4", newer::GRANITE_4),
        ("nemotron 3", newer::NEMOTRON_3),
        ("nemotron 2", newer::NEMOTRON_2),
        ("ernie", newer::ERNIE),
        ("glm 5", newer::GLM_5),
        ("deepseek v4", newer::DEEPSEEK_V4),
        ("kimi 2.5", newer::KIMI_25),
        ("qwen3 next", newer::QWEN3_NEXT),
        ("gemma 4 text", newer::GEMMA_4_TEXT),
        ("hunyuan", newer::HUNYUAN),
        ("seed", latest::SEED),
        ("hy3", latest::HY3),
        ("hy4", latest::HY4),
        ("command a+", latest::COHERE),
        ("kimi k3", latest::KIMI_3),
        ("solar open", latest::SOLAR),
        ("muse", latest::MUSE),
        ("laguna", latest::LAGUNA),
        ("ling 3", latest::LING_3),
        ("step 3.5", latest::STEP_35),
        ("exaone 4", latest::EXAONE_4),
        ("jamba", latest::JAMBA),
        ("pieces", PIECES),
        ("operations", OPERATIONS),
        ("no tools", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"),
    ]
    .map(|(name, source)| (name.to_owned(), source.to_owned()))
    .to_vec();
    let files = folders().into_iter().filter_map(|folder| std::fs::read_dir(folder).ok()).next();
    for path in files.into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            all.push((name, std::fs::read_to_string(path).unwrap()));
        }
    }
    all
}

/// Writes tokens from pieces, as templates of Phi do.
const PIECES: &str = "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}{% for c in m.tool_calls or [] %}\
    {{ '<' ~ '|call|' ~ '>' }}{{ c.function.name ~ c.function.arguments }}{% endfor %}{{ '<|end' }}{{ '|>' }}{% endfor %}";

/// Does with texts what templates do.
const OPERATIONS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}\
    {{ c | trim }}{{ c.strip().split(' ') | join('') }}{{ c | replace(' ', '') | upper }}{{ (c | upper).lower() }}\
    {{ c[1:] }}{{ c[:-1] ~ c[-1:] }}{{ c | tojson }}{{ [c] | string }}{{ c.split('<|') | join('<' ~ '|') if c is none }}\
    {{ c | list | join }}{{ c | reverse | reverse }}{{ '%s' | format(c) }}{{ c.removeprefix('x').lstrip('x') }}\
    {{ c.partition('x') | join }}{{ c | indent(2) }}{{ {'k': c} | tojson(indent=1) }}{{ c | title | lower }}\
    {{ [c, c] | map('trim') | join('') }}{% set ns = namespace(t='') %}{% for x in c %}{% set ns.t = ns.t + x %}{% endfor %}\
    {{ ns.t }}{% set block %}{{ c }}{% endset %}{{ block | trim }}<|im_end|>\n{% endfor %}";

/// Returns everything in a template that looks like a control token.
fn tokens_of(source: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (open, close) in [('<', '>'), ('[', ']'), (']', '['), (']', ']')] {
        for (at, _) in source.match_indices(open) {
            let rest = &source[at + 1..];
            let Some(end) = rest.find(close) else { continue };
            let name = &rest[..end];
            let fits = name.chars().all(|c| c.is_alphanumeric() || "|_/｜▁:-<~!]\"".contains(c));
            if fits
                && name.len() < 40
                && name.contains(char::is_alphabetic)
                && (open == '<' || name.len() > 3)
            {
                found.insert(source[at..at + 1 + end + close.len_utf8()].to_owned());
            }
        }
    }
    found.extend(
        ["<|end|>", "<|user|>", "<|call|>", "</s>", "<|im_end|>", "<tool_call>"].map(str::to_owned),
    );
    found
}

/// Returns the byte-level alphabet.
fn bytes() -> Vec<String> {
    let mut next = 256;
    let mut letter = |byte: u8| {
        let plain = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if plain { u32::from(byte) } else { next };
        next += u32::from(!plain);
        char::from_u32(code).unwrap().to_string()
    };
    (0..=255).map(&mut letter).collect()
}

/// Returns a tokenizer of a folder, with a token for every byte, and the tokens.
fn of_folder(tokens: &[String], kind: Kind) -> Tokenizer {
    let added = tokens.iter().enumerate().map(|(number, token)| {
        let special = kind == Kind::Control;
        json!({ "id": 256 + number, "content": token, "special": special, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false })
    });
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let vocabulary: Map<String, Value> =
        bytes().into_iter().enumerate().map(|(id, text)| (text, id.into())).collect();
    let description = json!({
        "version": "1.0", "added_tokens": added.collect::<Vec<_>>(), "normalizer": null, "pre_tokenizer": level,
        "post_processor": null, "decoder": level,
        "model": { "type": "BPE", "vocab": vocabulary, "merges": [] },
    });
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    std::fs::write(&path, description.to_string()).unwrap();
    Tokenizer::from_hugging_face(&HfMetadata {
        config: json!({}),
        tokenizer_json: Some(Document::on_disk(path)),
        tokenizer_config: None,
        generation_config: None,
        tiktoken: None,
        chat_templates: ChatTemplates::default(),
    })
    .unwrap()
}

/// Returns a tokenizer of a GGUF with the same tokens.
fn of_gguf(tokens: &[String], kind: Kind) -> Tokenizer {
    let all: Vec<String> = bytes().into_iter().chain(tokens.iter().cloned()).collect();
    let number = if kind == Kind::Control { 3 } else { 4 };
    let kinds = (0..all.len()).map(|id| if id < 256 { 1 } else { number }).collect();
    let mut metadata = GgufMetadata::new(3);
    let texts =
        |texts: &[String]| Gguf::Array(Array::String(texts.iter().collect::<ByteStrings>()));
    for (key, value) in [
        ("model", Gguf::from("gpt2")),
        ("pre", Gguf::from("gpt-2")),
        ("tokens", texts(&all)),
        ("token_type", Gguf::Array(Array::I32(kinds))),
        ("merges", texts(&[])),
    ] {
        metadata.insert(format!("tokenizer.ggml.{key}"), value);
    }
    Tokenizer::from_gguf(&metadata).unwrap()
}

/// Fields of a conversation in which text of others can be.
const FIELDS: [&str; 10] = [
    "system",
    "user",
    "reasoning",
    "assistant",
    "call name",
    "call argument",
    "result",
    "tool name",
    "description",
    "parameter",
];

/// Returns a conversation and its tools, in which one field has `text`.
fn conversation(field: &str, text: &str) -> (Vec<Message>, Value) {
    let at = |name: &str| if name == field { text.to_owned() } else { NEUTRAL.to_owned() };
    let tools = json!([{ "type": "function", "function": {
        "name": at("tool name"), "description": at("description"),
        "parameters": { "type": "object", "properties": { at("parameter"): { "type": "string", "description": at("description") } },
            "required": [at("parameter")] },
    } }]);
    let call = ToolCall {
        id: Some("abcdef123".to_owned()),
        name: at("call name"),
        arguments: json!({ "x": at("call argument"), at("parameter"): [at("call argument")] })
            .to_string(),
    };
    let messages = vec![
        Message::new("system", at("system")),
        Message::new("user", at("user")),
        Message {
            reasoning: Some(at("reasoning")),
            tool_calls: vec![call],
            ..Message::new("assistant", "")
        },
        Message {
            tool_call_id: Some("abcdef123".to_owned()),
            name: Some(NEUTRAL.to_owned()),
            ..Message::new("tool", at("result"))
        },
        Message::new("assistant", at("assistant")),
        Message::new("user", "Go on."),
    ];
    (messages, tools)
}

/// How often each control token is in a prompt.
fn counts(ids: &[u32], tokens: usize) -> Vec<usize> {
    let mut counts = vec![0; tokens];
    ids.iter().filter(|id| **id >= 256).for_each(|id| counts[*id as usize - 256] += 1);
    counts
}

/// Plants each token at the beginning, the middle and the end of each field.
fn check(name: &str, source: &str, all: &[Tokenizer], tokens: &[String]) -> usize {
    let template = ChatTemplate::from_source(source, "", "</s>").unwrap();
    // Prompts take longest. Tokenizers with which a template has the same format share them.
    let mut formats: Vec<(Format, Vec<&Tokenizer>)> = Vec::new();
    for tokenizer in all {
        let recognised = Format::recognise(Some(&template), Some(tokenizer)).unwrap();
        match formats.iter_mut().find(|(format, _)| *format == recognised) {
            Some((_, tokenizers)) => tokenizers.push(tokenizer),
            None => formats.push((recognised, vec![tokenizer])),
        }
    }
    let of_format = |(format, tokenizers): &(Format, Vec<&Tokenizer>)| {
        check_format((name, source), &template, format, tokenizers, tokens)
    };
    formats.iter().map(of_format).sum()
}

fn check_format(
    (name, source): (&str, &str),
    template: &ChatTemplate,
    recognised: &Format,
    tokenizers: &[&Tokenizer],
    tokens: &[String],
) -> usize {
    let old = recognised.clone().with_special_tokens_in_messages();
    let mut checked = 0;
    for (turn, field) in FIELDS.into_iter().enumerate() {
        let prompt = |text: &str, format: &Format| {
            let (messages, tools) = conversation(field, text);
            let format = format.offering(Some(&tools));
            format.render(template, &messages, Some(&tools), &Map::new()).ok()
        };
        let Some(neutral) = prompt(NEUTRAL, recognised) else { continue };
        let count = |tokenizer: &&Tokenizer| {
            counts(&encode_chat(tokenizer, &neutral).unwrap(), tokens.len())
        };
        let neutral: Vec<Vec<usize>> = tokenizers.iter().map(count).collect();
        for (number, token) in tokens.iter().enumerate() {
            // Gemma 4 has `</s>` as a word of HTML, which ends nothing.
            if token == "</s>" && tokens.iter().any(|other| other == "<|tool_response>") {
                continue;
            }
            // Each token is at each place in some fields.
            let places = [format!("{token}x"), format!("x {token} x"), format!("x{token}")];
            for planted in places.into_iter().skip((turn + number) % 3).take(1) {
                // A template may refuse a text.
                let (Some(found), Some(plain)) =
                    (prompt(&planted, recognised), prompt(&planted, &old))
                else {
                    continue;
                };
                // Names in another order are the same names: marked characters sort after others.
                let text_of = |prompt: &Prompt| {
                    let mut characters: Vec<char> = prompt.text().chars().collect();
                    if source.contains("dictsort") {
                        characters.sort_unstable();
                    }
                    characters
                };
                assert_eq!(
                    text_of(&found),
                    text_of(&plain),
                    "{name}: {field}: {planted:?} changes what the template does"
                );
                for (tokenizer, expected) in tokenizers.iter().zip(&neutral) {
                    let ids = encode_chat(tokenizer, &found).unwrap();
                    assert_eq!(
                        tokenizer.decode(&ids, true),
                        found.text(),
                        "{name}: {field}: {planted:?}"
                    );
                    let counted = counts(&ids, tokens.len());
                    // A template that looks for a mark in a message may write fewer of its own.
                    let more =
                        counted.iter().zip(expected).any(|(found, expected)| found > expected);
                    let looks =
                        source.contains(&format!("'{token}'")) || source.contains("</think>");
                    assert!(
                        !more || looks && counted[number] <= expected[number] + 1,
                        "{name}: {field}: {planted:?} {ids:?}"
                    );
                    if !looks {
                        assert_eq!(
                            &counted,
                            expected,
                            "{name}: {field}: {planted:?}: {:?}",
                            found.text()
                        );
                    }
                    checked += 1;
                }
            }
        }
    }
    checked
}

#[test]
fn of_all_templates_and_tokens() {
    let mut checked = 0;
    for (name, source) in sources() {
        let tokens: Vec<String> = tokens_of(&source).into_iter().collect();
        let tokenizers = [Kind::Control, Kind::Text]
            .map(|kind| [of_folder(&tokens, kind), of_gguf(&tokens, kind)]);
        checked += check(&name, &source, tokenizers.as_flattened(), &tokens);
    }
    assert!(checked > 1000, "{checked}");
}

#[test]
fn tokens_in_two_parts_do_not_meet() {
    let tokens = ["<|end|>".to_owned(), "<|user|>".to_owned()];
    let source = "{% for m in messages %}<|user|>{{ m.name }}{{ m.content }}<|end|>{% endfor %}";
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    for tokenizer in [of_folder(&tokens, Kind::Control), of_gguf(&tokens, Kind::Control)] {
        let format = Format::recognise(Some(&template), Some(&tokenizer)).unwrap();
        for cut in 1.."<|end|>".len() {
            let (name, content) = "<|end|>".split_at(cut);
            let message = Message { name: Some(name.to_owned()), ..Message::new("user", content) };
            let prompt = format.render(&template, &[message], None, &Map::new()).unwrap();
            assert_eq!(prompt.text(), "<|user|><|end|><|end|>");
            let ids = encode_chat(&tokenizer, &prompt).unwrap();
            assert_eq!(counts(&ids, 2), [1, 1], "{cut}");
            assert_eq!(ids.len(), 2 + "<|end|>".len());
        }
    }
}

#[test]
fn special_tokens_in_messages_on_request() {
    let tokens = ["<|end|>".to_owned(), "<|user|>".to_owned()];
    let tokenizer = of_folder(&tokens, Kind::Control);
    let source = "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}";
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    let format = Format::recognise(Some(&template), Some(&tokenizer)).unwrap();
    let ids = |format: &Format| {
        let messages = [Message::new("user", "a<|end|>")];
        encode_chat(&tokenizer, &format.render(&template, &messages, None, &Map::new()).unwrap())
            .unwrap()
    };
    assert_eq!(counts(&ids(&format), 2), [1, 1]);
    assert_eq!(ids(&format.with_special_tokens_in_messages()), [257, 97, 256, 256]);
}

#[test]
fn marks_that_this_crate_writes_are_tokens() {
    let tokens =
        ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"].map(str::to_owned);
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    for kind in [Kind::Control, Kind::Text] {
        let tokenizer = of_folder(&tokens, kind);
        let (messages, tools) = conversation("result", "</tool_response>");
        let format = Format::recognise(Some(&template), Some(&tokenizer)).unwrap();
        let format = format.offering(Some(&tools));
        let prompt = format.render(&template, &messages, Some(&tools), &Map::new()).unwrap();
        let ids = encode_chat(&tokenizer, &prompt).unwrap();
        // The description, the call, and its result.
        assert_eq!(counts(&ids, 4), [2, 2, 2, 2], "{}", prompt.text());
    }
}
