//! Arguments of calls are reported while they are generated, and add up to those of the complete call.

use forebay_chat::{Event, Format, Message, Parser, ToolCall};
use forebay_text::ChatTemplate;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// Mark of MiniMax M3 before each tag.
const M3: &str = "]<]minimax[>[";

const LLAMA: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}{\"name\": \"{{ c.function.name }}\", \
                     \"parameters\": {{ c.function.arguments | tojson }}}{% endfor %}{% endfor %}";
const PYTHON: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.function.name }}(\
                      {% for k, v in c.function.arguments | items %}{{ k }}=\"{{ v }}\"{% endfor %})]{% endfor %}{% endfor %}";

type Write = fn(&[(&str, &Map<String, Value>)]) -> String;

/// A template from which each syntax is recognised, and the way to write calls in it.
const SYNTAXES: [(&str, Write); 29] = [
    ("<tool_call>{\"name\"", |calls| {
        each(calls, |name, arguments| {
            format!("<tool_call>\n{}\n</tool_call>\n", described(name, arguments, "arguments"))
        })
    }),
    ("<tool_call><function=", |calls| {
        each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                format!("<parameter={key}>\n{}\n</parameter>\n", plain(value))
            });
            format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>\n")
        })
    }),
    ("</think><tool_call><arg_key>", |calls| {
        each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                format!("<arg_key>{key}</arg_key>\n<arg_value>{}</arg_value>\n", plain(value))
            });
            format!("<tool_call>{name}\n{parameters}</tool_call>\n")
        })
    }),
    ("</think><｜tool▁call▁begin｜>", |calls| {
        let calls = each(calls, |name, arguments| {
            format!(
                "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
                text(arguments)
            )
        });
        format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
    }),
    ("</think><｜tool▁call▁begin｜>```json", |calls| {
        let calls = each(calls, |name, arguments| {
            format!(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{}\n```<｜tool▁call▁end｜>",
                text(arguments)
            )
        });
        format!("<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
    }),
    ("｜DSML｜function_calls invoke name=", |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                let (is_text, value) = (value.is_string(), plain(value));
                format!(
                    "<｜DSML｜parameter name=\"{key}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n"
                )
            });
            format!("<｜DSML｜invoke name=\"{name}\">\n{parameters}</｜DSML｜invoke>\n")
        });
        format!("<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls>")
    }),
    ("</think><minimax:tool_call>", |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                format!("<parameter name=\"{key}\">{}</parameter>\n", plain(value))
            });
            format!("<invoke name=\"{name}\">\n{parameters}</invoke>\n")
        });
        format!("<minimax:tool_call>\n{calls}</minimax:tool_call>")
    }),
    ("</mm:think>]<]minimax[>[<tool_call>", |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, element);
            format!("{M3}<invoke name=\"{name}\">{parameters}{M3}</invoke>\n")
        });
        format!("{M3}<tool_call>\n{calls}{M3}</tool_call>")
    }),
    ("</think><|tool_call_begin|>", |calls| {
        each(calls, |name, arguments| {
            let arguments = text(arguments);
            format!(
                "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
            )
        })
    }),
    ("<channel|><|tool_call>call:", |calls| {
        each(calls, |name, arguments| {
            let members =
                joined(arguments, |key, value| format!("{key}:{}", gemma(value, "<|\"|>")));
            format!("<|tool_call>call:{name}{{{members}}}<tool_call|>")
        })
    }),
    ("<start_function_call>", |calls| {
        each(calls, |name, arguments| {
            let members =
                joined(arguments, |key, value| format!("{key}:{}", gemma(value, "<escape>")));
            format!("<start_function_call>call:{name}{{{members}}}<end_function_call>")
        })
    }),
    ("[TOOL_CALLS][ARGS]", |calls| {
        each(calls, |name, arguments| format!("[TOOL_CALLS]{name}[ARGS]{}", text(arguments)))
    }),
    ("[TOOL_CALLS][ARGS][CALL_ID]", |calls| {
        each(calls, |name, arguments| {
            format!("[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{}", text(arguments))
        })
    }),
    ("[TOOL_CALLS]", |calls| format!("[TOOL_CALLS]{}", list(calls))),
    (LLAMA, |calls| {
        let calls: Vec<String> =
            calls.iter().map(|(name, of)| described(name, of, "parameters")).collect();
        calls.join("; ")
    }),
    (PYTHON, |calls| format!("[{}]", python_calls(calls, ", "))),
    ("<|tool_call_start|>", |calls| {
        format!("<|tool_call_start|>[{}]<|tool_call_end|>", python_calls(calls, ", "))
    }),
    ("<functions></functions><function_calls>", |calls| {
        format!("<function_calls>{}</function_calls>", python_calls(calls, "\n"))
    }),
    ("<|tool_call|><|/tool_call|>", |calls| format!("functools{}", list(calls))),
    ("</think><TOOLCALL>", |calls| format!("<TOOLCALL>{}</TOOLCALL>", list(calls))),
    ("</think><|startoftext|><|extra_0|><tool_calls>[", |calls| {
        format!("<tool_calls>{}</tool_calls>", list(calls))
    }),
    ("<seed:think><seed:tool_call>", |calls| {
        each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                format!("<parameter={key}>{}</parameter>\n", plain(value))
            });
            format!(
                "<seed:tool_call>\n<function={name}>\n{parameters}</function>\n</seed:tool_call>\n"
            )
        })
    }),
    (HY, |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                let value = plain(value);
                format!("<arg_key:x>{key}</arg_key:x>\n<arg_value:x>{value}</arg_value:x>\n")
            });
            format!("<tool_call:x>{name}<tool_sep:x>\n{parameters}</tool_call:x>\n")
        });
        format!("<tool_calls:x>\n{calls}</tool_calls:x>")
    }),
    ("<|START_THINKING|><|START_TEXT|><|START_ACTION|>", |calls| {
        let described = |(name, arguments): &(&str, &Map<String, Value>)| {
            format!(
                "\n    {{\"tool_call_id\": \"0\", \"tool_name\": \"{name}\", \"parameters\": {}}}",
                text(arguments)
            )
        };
        let calls: Vec<String> = calls.iter().map(described).collect();
        format!("<|START_ACTION|>[{}\n]<|END_ACTION|>", calls.join(","))
    }),
    ("<|open|><|close|><|sep|><|end_of_msg|>", |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                let kind = if value.is_string() { "string" } else { "object" };
                let value = plain(value);
                format!(
                    "<|open|>argument key=\"{key}\" type=\"{kind}\"<|sep|>{value}<|close|>argument<|sep|>"
                )
            });
            format!(
                "<|open|>call tool=\"{name}\" index=\"1\"<|sep|>{parameters}<|close|>call<|sep|>"
            )
        });
        format!("<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>")
    }),
    ("<|think|><|tool_call:begin|>", |calls| {
        let calls = each(calls, |name, arguments| {
            let arguments = text(arguments);
            format!(
                "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>{name}<|tool_call:args|>{arguments}<|tool_call:end|>"
            )
        });
        format!("<|tool_calls|>{calls}<|calls|>")
    }),
    ("<atem:function_calls>", |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                format!("<atem:parameter name=\"{key}\">{}</atem:parameter>\n", plain(value))
            });
            format!("<atem:invoke name=\"{name}\">\n{parameters}</atem:invoke>\n")
        });
        format!("<atem:function_calls>\n{calls}</atem:function_calls>")
    }),
    ("<dots_function_call>", |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                format!("<parameter name=\"{key}\">{}</parameter>\n", plain(value))
            });
            format!("<invoke name=\"{name}\">\n{parameters}</invoke>\n")
        });
        format!("<dots_function_call>\n{calls}</dots_function_call>")
    }),
    ("｜DSML｜ calls invoke name=", |calls| {
        let calls = each(calls, |name, arguments| {
            let parameters = members(arguments, |key, value| {
                let (is_text, value) = (value.is_string(), plain(value));
                format!(
                    "<｜DSML｜ parameter name=\"{key}\" string=\"{is_text}\">{value}</｜DSML｜ parameter>\n"
                )
            });
            format!("<｜DSML｜ invoke name=\"{name}\">\n{parameters}</｜DSML｜ invoke>\n")
        });
        format!("<｜DSML｜ calls>\n{calls}</｜DSML｜ calls>")
    }),
];

/// A template with the marks of Hy3, with the suffix `:x`.
const HY: &str = "{% for m in messages %}{% for c in m.tool_calls or [] %}<tool_calls:x>\n<tool_call:x>{{ c.function.name }}<tool_sep:x>\n\
                  {% for k, v in c.function.arguments | items %}<arg_key:x>{{ k }}</arg_key:x>\n<arg_value:x>{{ v }}</arg_value:x>\n\
                  {% endfor %}</tool_call:x>\n</tool_calls:x>{% endfor %}{% endfor %}";

fn each(
    calls: &[(&str, &Map<String, Value>)],
    write: impl Fn(&str, &Map<String, Value>) -> String,
) -> String {
    calls.iter().map(|(name, arguments)| write(name, arguments)).collect()
}

fn members(arguments: &Map<String, Value>, write: impl Fn(&str, &Value) -> String) -> String {
    arguments.iter().map(|(key, value)| write(key, value)).collect()
}

fn joined(arguments: &Map<String, Value>, write: impl Fn(&str, &Value) -> String) -> String {
    let all: Vec<String> = arguments.iter().map(|(key, value)| write(key, value)).collect();
    all.join(",")
}

fn text(arguments: &Map<String, Value>) -> String {
    ToolCall::text_of(&arguments.clone().into())
}

fn described(name: &str, arguments: &Map<String, Value>, key: &str) -> String {
    format!("{{\"name\": \"{name}\", \"{key}\": {}}}", text(arguments))
}

fn list(calls: &[(&str, &Map<String, Value>)]) -> String {
    let all: Vec<String> =
        calls.iter().map(|(name, of)| described(name, of, "arguments")).collect();
    format!("[{}]", all.join(", "))
}

/// Returns a value between tags: texts have no quotation marks.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn element(name: &str, value: &Value) -> String {
    let inner = match value {
        Value::Array(items) => items.iter().map(|item| element("item", item)).collect(),
        Value::Object(fields) => fields.iter().map(|(name, value)| element(name, value)).collect(),
        other => plain(other),
    };
    format!("{M3}<{name}>{inner}{M3}</{name}>")
}

fn gemma(value: &Value, quote: &str) -> String {
    match value {
        Value::String(text) => format!("{quote}{text}{quote}"),
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(|item| gemma(item, quote)).collect();
            format!("[{}]", items.join(","))
        }
        Value::Object(fields) => {
            format!("{{{}}}", joined(fields, |key, value| format!("{key}:{}", gemma(value, quote))))
        }
        other => other.to_string(),
    }
}

fn python_calls(calls: &[(&str, &Map<String, Value>)], separator: &str) -> String {
    let call = |(name, arguments): &(&str, &Map<String, Value>)| {
        let arguments: Vec<String> =
            arguments.iter().map(|(key, value)| format!("{key}={}", python(value))).collect();
        format!("{name}({})", arguments.join(", "))
    };
    calls.iter().map(call).collect::<Vec<_>>().join(separator)
}

fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(on) => if *on { "True" } else { "False" }.to_owned(),
        Value::Array(items) => {
            format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", "))
        }
        Value::Object(fields) => {
            let field =
                |(key, value): (&String, &Value)| format!("{}: {}", json!(key), python(value));
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        other => other.to_string(),
    }
}

/// Returns a format with the tools `f` and `g`.
fn format(template: &str) -> Format {
    let template = ChatTemplate::from_source(template, "", "").unwrap();
    let parameters = json!({ "type": "object", "properties": {
        "text": { "type": "string" }, "path": { "type": "string" }, "count": { "type": "integer" },
        "ratio": { "type": "number" }, "on": { "type": "boolean" },
        "list": { "type": "array", "items": { "type": "string" } }, "deep": { "type": "object" },
    } });
    let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "parameters": parameters } });
    let tools: Value = [tool("f"), tool("g")].into_iter().collect();
    Format::recognise(Some(&template), None).unwrap().offering(Some(&tools))
}

/// Report of a parser about an answer in pieces.
#[derive(Debug, PartialEq)]
struct Reported {
    message: Message,
    /// Number of pieces that were there when each call began, and when the first of its arguments came.
    begun: Vec<usize>,
    first: Vec<usize>,
}

fn parse(parser: Parser, pieces: &[&str]) -> Reported {
    let mut parser = parser;
    let mut sum = Message::new("assistant", "");
    let (mut begun, mut first) = (Vec::new(), Vec::new());
    let mut add = |count: usize, event: Event<'_>| match event {
        Event::Reasoning(text) => sum.reasoning.get_or_insert_default().push_str(text),
        Event::Content(text) => sum.content.push_str(text),
        Event::ToolCall { index, name } => {
            assert_eq!(index, sum.tool_calls.len());
            sum.tool_calls.push(ToolCall { name: name.to_owned(), ..ToolCall::default() });
            begun.push(count);
        }
        Event::Arguments { index, text } => {
            // The arguments of a call never follow those of a later one.
            assert_eq!(index + 1, sum.tool_calls.len());
            if first.len() == index {
                first.push(count);
            }
            sum.tool_calls[index].arguments.push_str(text);
        }
    };
    for (piece, count) in pieces.iter().zip(1..) {
        parser.text(piece, &mut |event| add(count, event));
    }
    let message = parser.finish(&mut |event| add(pieces.len() + 1, event));
    assert_eq!(message, sum, "the events do not add up to the message");
    Reported { message, begun, first }
}

/// Cuts a text into pieces of these numbers of characters.
fn cut<'a>(text: &'a str, counts: &[usize]) -> Vec<&'a str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    for count in counts.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let end = rest.char_indices().nth(*count).map_or(rest.len(), |(at, _)| at);
        pieces.push(&rest[..end]);
        rest = &rest[end..];
    }
    pieces
}

/// Texts as files of programs have them, with beginnings of marks in them.
fn texts() -> impl Strategy<Value = String> {
    let parts = [
        "word ",
        "\n",
        "\n\n",
        "\"",
        "'",
        "\\",
        "\\n",
        "\t",
        "é",
        "😀",
        "<",
        "</",
        "</par",
        "</arg",
        "&quot;",
        "<|close|>",
        "<|",
        "]<",
        "{\"a\": 1}",
        "[1, 2]",
        "}",
        "]",
        ")",
        ",",
        "=",
        ":",
        "```json\n",
        "0",
        "true",
        " ",
        "\u{1}",
    ];
    prop::collection::vec(prop::sample::select(parts.to_vec()), 0..40)
        .prop_map(|parts| parts.concat())
}

/// Arguments of a call. `ratio` is left out, because the number of its digits is that of the writer.
fn arguments() -> impl Strategy<Value = Map<String, Value>> {
    let words = || prop::collection::vec("[a-z ]{0,12}x", 1..4);
    let deep = prop::collection::vec(("[a-z]{1,5}", leaves_of_words()), 1..3);
    let member = prop_oneof![
        texts().prop_map(|text| ("text", Value::from(text))),
        texts().prop_map(|text| ("path", Value::from(text))),
        any::<i32>().prop_map(|number| ("count", Value::from(number))),
        any::<bool>().prop_map(|on| ("on", Value::from(on))),
        words().prop_map(|list| ("list", Value::from(list))),
        deep.prop_map(|fields| ("deep", Value::Object(fields.into_iter().collect()))),
    ];
    prop::collection::vec(member, 0..6).prop_map(|members| {
        members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    })
}

fn leaves_of_words() -> impl Strategy<Value = Value> {
    prop_oneof!["[a-z ]{0,12}x".prop_map(Value::from), any::<i32>().prop_map(Value::from)]
}

/// Text that ends a value in some syntax and so cannot be a part of it.
fn is_writable(arguments: &Map<String, Value>) -> bool {
    // White space around a text is the family's own in some syntaxes.
    let of = |value: &Value| value.as_str().is_none_or(|text| !text.contains(M3));
    arguments.values().all(of)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// However the text of calls is cut, the reported arguments add up to those of the calls that are reported whole.
    #[test]
    fn streamed_arguments_are_those_of_whole_calls(
        first in arguments(),
        second in prop::option::of(arguments()),
        before in prop::sample::select(vec!["", "I look.\n"]),
        counts in prop::collection::vec(1..7_usize, 1..40),
    ) {
        prop_assume!(is_writable(&first) && second.as_ref().is_none_or(is_writable));
        let mut calls = vec![("f", &first)];
        calls.extend(second.as_ref().map(|second| ("g", second)));
        for (template, write) in SYNTAXES {
            let format = format(template);
            // Calls without marks must come first.
            let before = if [LLAMA, PYTHON, "<|tool_call|><|/tool_call|>"].contains(&template) { "" } else { before };
            let answer = before.to_owned() + &write(&calls);
            let new = || Parser::new(&format, "");
            let whole = parse(new().with_whole_calls(), &[&answer]);
            prop_assert_eq!(whole.message.tool_calls.len(), calls.len(), "{} {}", template, answer);
            for (call, (name, arguments)) in whole.message.tool_calls.iter().zip(&calls) {
                prop_assert_eq!(&call.name, name);
                let read: Value = serde_json::from_str(&call.arguments).unwrap();
                prop_assert_eq!(&read, &Value::Object((*arguments).clone()), "{} {}", template, answer);
            }
            let pieces = cut(&answer, &counts);
            let streamed = parse(new(), &pieces);
            prop_assert_eq!(&streamed.message, &whole.message, "{}", template);
            prop_assert_eq!(&parse(new(), &[&answer]).message, &whole.message, "{}", template);
            prop_assert_eq!(&parse(new().with_whole_calls(), &pieces).message, &whole.message, "{}", template);
        }
    }

    /// A text is reported while it is generated.
    #[test]
    fn arguments_are_reported_before_the_call_ends(word in "[a-z]{20}", count in 10..60_usize) {
        let content = format!("{word} ").repeat(count);
        let mut arguments = Map::new();
        arguments.insert("path".into(), json!("a.txt"));
        arguments.insert("text".into(), json!(content));
        for (template, write) in SYNTAXES {
            let format = format(template);
            let answer = write(&[("f", &arguments)]);
            let pieces = cut(&answer, &[3]);
            let streamed = parse(Parser::new(&format, ""), &pieces);
            prop_assert_eq!(streamed.message.tool_calls.len(), 1, "{}", template);
            // 32 bytes of arguments and what is before them.
            prop_assert!(streamed.first[0] * 3 < 200, "{template}: {} of {}", streamed.first[0], pieces.len());
        }
    }

    /// Calls that cannot be read are either text, as it was written, or a call that ends where it could be read.
    #[test]
    fn broken_calls_do_not_depend_on_the_cuts(
        first in arguments(),
        counts in prop::collection::vec(1..7_usize, 1..40),
        at in any::<prop::sample::Index>(),
        removed in 0..9_usize,
        inserted in prop::sample::select(vec!["", "}", "]", "\"", "<", "x", "\n", "</parameter>", "{"]),
        is_cut in any::<bool>(),
    ) {
        for (template, write) in SYNTAXES {
            let format = format(template);
            let answer = write(&[("f", &first), ("g", &first)]);
            let at = answer.floor_char_boundary(at.index(answer.len()));
            let behind = answer.ceil_char_boundary((at + removed).min(answer.len()));
            let rest = if is_cut { "" } else { &answer[behind..] };
            let broken = format!("{}{inserted}{rest}", &answer[..at]);
            let new = || Parser::new(&format, "");
            let whole = parse(new().with_whole_calls(), &[&broken]).message;
            let streamed = parse(new(), &[&broken]).message;
            prop_assert_eq!(&parse(new(), &cut(&broken, &counts)).message, &streamed, "{}", template);
            prop_assert_eq!(&parse(new(), &cut(&broken, &[1])).message, &streamed, "{}", template);
            if streamed != whole {
                let bytes: usize = streamed.tool_calls.iter().map(|call| call.arguments.len()).sum();
                prop_assert!(bytes >= 32, "{template}: {broken:?}\n{streamed:?}\n{whole:?}");
            }
        }
    }
}

/// Asserts that a text is parsed the same in one piece and character by character.
fn assert_independent_of_cuts(template: &str, text: &str) {
    let format = format(template);
    let new = || Parser::new(&format, "");
    let (whole, pieces) = (parse(new(), &[text]), parse(new(), &cut(text, &[1])));
    assert_eq!(whole.message, pieces.message, "{template}: {text:?}");
}

#[test]
fn the_place_that_cannot_be_read_may_be_anywhere() {
    let arguments = json!({ "path": "word \"word\" word word word word word\n", "on": false });
    for (template, write) in SYNTAXES {
        let answer = write(&[("f", arguments.as_object().unwrap())]);
        for (at, _) in answer.char_indices() {
            let (before, behind) = answer.split_at(at);
            assert_independent_of_cuts(template, before);
            assert_independent_of_cuts(template, &format!("{before}}}{behind}"));
        }
    }
    // A mark at the longest distance at which it is looked for.
    let word = "word ".repeat(10);
    for length in 1000..1050 {
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter=text>\n{word}\n</parameter>{}<parameter=path>\na.txt",
            " ".repeat(length)
        );
        assert_independent_of_cuts("<tool_call><function=", &text);
    }
}

#[test]
fn a_call_that_cannot_be_read_is_decided_by_its_length() {
    let format = format("<tool_call>{\"name\"");
    let new = || Parser::new(&format, "");
    // A short one is text.
    let short = "<tool_call>{\"name\": \"f\", \"arguments\": {\"text\": \"a\", ]}}</tool_call>";
    assert_eq!(parse(new(), &[short]).message, Message::new("assistant", short));
    // A long one was begun already. It ends where it could be read, and its arguments are not valid JSON.
    let long = short.replace("\"a\"", &format!("\"{}\"", "a".repeat(40)));
    let message = parse(new(), &cut(&long, &[2])).message;
    let arguments = format!("{{\"text\": \"{}\", ", "a".repeat(40));
    assert_eq!(
        (message.content.as_str(), message.tool_calls[0].arguments.as_str()),
        ("", arguments.as_str())
    );
    // Callers that need whole calls get the text.
    assert_eq!(
        parse(new().with_whole_calls(), &cut(&long, &[2])).message,
        Message::new("assistant", &*long)
    );
    // Only the arguments count: what is wrong behind them changes nothing.
    let behind = long.replace(", ]}}", "}");
    let message = parse(new(), &cut(&behind, &[2])).message;
    assert_eq!(message.tool_calls[0].arguments, arguments.replace(", ", "}"));
}

#[test]
fn repeated_parameters_are_valid_json() {
    let format = format("<tool_call><function=");
    let value = |text: &str| format!("<parameter=text>\n{text}\n</parameter>\n");
    let (a, b) = ("a".repeat(40), "b".repeat(40));
    let answer =
        format!("<tool_call>\n<function=f>\n{}{}</function>\n</tool_call>", value(&a), value(&b));
    let message = parse(Parser::new(&format, ""), &cut(&answer, &[2])).message;
    let read: Value = serde_json::from_str(&message.tool_calls[0].arguments).unwrap();
    assert_eq!(read, json!({ "text": b }));
}

#[test]
fn code_blocks_in_the_arguments_of_deepseek() {
    let arguments = "{\"text\": \"```json\\n{}\\n```\"}";
    let answer = format!("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>");
    let message =
        parse(Parser::new(&format("</think><｜tool▁call▁begin｜>"), ""), &[&answer]).message;
    assert_eq!(
        (message.tool_calls[0].name.as_str(), message.tool_calls[0].arguments.as_str()),
        ("f", arguments)
    );
}
