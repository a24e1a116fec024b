//! Conversations that end with the assistant: the prompt ends with the assistant's text, and the answer continues it.

use forebay_chat::{
    ChatError, Event, Format, Message, Parser, PromptEnd, ToolCall, continued_text,
};
use forebay_text::ChatTemplate;
use serde_json::Map;

/// Templates as families have them, and the prompt of "Hi" and an answer "The colour is" that is continued.
const TEMPLATES: [(&str, &str); 6] = [
    (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
         {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe colour is",
    ),
    // The text is trimmed, and the template ends the answer.
    (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }}</s>\
         {% endif %}{% endfor %}",
        "[INST] Hi [/INST] The colour is",
    ),
    // An answer of the last turn has an empty thinking part.
    (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n\
         {{ m.content.split('</think>')[-1].lstrip('\\n') }}<|end|>{% else %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
         {% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}",
        "<|user|>Hi<|end|><|assistant|>\n<think>\n\n</think>\n\nThe colour is",
    ),
    (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}\
         {% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>\
         {% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>The colour is",
    ),
    // The header of an answer is written whatever the caller says.
    (
        "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}</{{ m.role }}>{% endfor %}<assistant>",
        "<user>Hi</user><assistant>The colour is",
    ),
    // Turns must alternate.
    (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}{% endif %}\
         {{ m.role }}: {{ m.content }}\n{% endfor %}",
        "user: Hi\nassistant: The colour is",
    ),
];

fn of(source: &str) -> (ChatTemplate, Format) {
    let template = ChatTemplate::from_source(source, "", "").unwrap();
    let format = Format::recognise(Some(&template), None).unwrap();
    (template, format)
}

fn answers(texts: [&str; 2]) -> Vec<Message> {
    vec![Message::new("user", texts[0]), Message::new("assistant", texts[1])]
}

fn prompt(source: &str, messages: &[Message]) -> Result<String, ChatError> {
    let (template, format) = of(source);
    format.render_to(PromptEnd::Continued, &template, messages, None, &Map::new()).map(text_of)
}

fn text_of(prompt: String) -> String {
    prompt
}

/// Returns the message of an answer that continues a text, in pieces of one character.
fn continued(source: &str, prompt: &str, text: &str, answer: &str) -> Message {
    let (_, format) = of(source);
    let mut parser = Parser::continuing(&format, prompt, text);
    let mut sum = Message::new("assistant", "");
    let mut add = |event: Event<'_>| match event {
        Event::Reasoning(text) => sum.reasoning.get_or_insert_default().push_str(text),
        Event::Content(text) => sum.content.push_str(text),
        Event::ToolCall { name, .. } => {
            sum.tool_calls.push(ToolCall { name: name.to_owned(), ..ToolCall::default() });
        }
        Event::Arguments { index, text } => sum.tool_calls[index].arguments.push_str(text),
    };
    for character in answer.chars() {
        parser.text(character.encode_utf8(&mut [0; 4]), &mut add);
    }
    let message = parser.finish(&mut add);
    assert_eq!(message, sum);
    message
}

#[test]
fn the_prompt_ends_with_the_text_that_is_continued() {
    for (source, expected) in TEMPLATES {
        let messages = answers(["Hi", "The colour is"]);
        assert_eq!(prompt(source, &messages).unwrap(), expected);
        // White space at the end stays, and the word that marks the end may be in the conversation.
        let word = "WhatIsContinuedEndsHere";
        let spaced = prompt(source, &answers([word, "The colour is \n"])).unwrap();
        assert_eq!(spaced, expected.replace("Hi", word) + " \n");
        let message = continued(source, expected, "The colour is", " red.\n");
        assert_eq!(message, Message::new("assistant", " red.\n"), "{source}");
        // What was held back is not repeated.
        let message = continued(source, &spaced, "The colour is \n", "red");
        assert_eq!(message, Message::new("assistant", "red"), "{source}");
    }
}

#[test]
fn reasoning_is_continued_if_there_is_no_content_yet() {
    let (source, _) = TEMPLATES[2];
    let mut messages = answers(["Hi", ""]);
    messages[1].reasoning = Some("The user".into());
    let text = prompt(source, &messages).unwrap();
    assert!(text.ends_with("<think>\nThe user"), "{text}");
    let message = continued(source, &text, "The user", " asks.\n</think>\n\nRed");
    let expected = Message { reasoning: Some(" asks.".into()), ..Message::new("assistant", "Red") };
    assert_eq!(message, expected);
    // Marks in the content count, too.
    let (source, _) = TEMPLATES[0];
    let source = source.to_owned() + "{# <think></think><tool_call>{\"name\" #}";
    let text = "<think>\nThe user";
    let prompt = prompt(&source, &answers(["Hi", text])).unwrap();
    assert_eq!(continued(&source, &prompt, text, " asks.\n</think>\n\nRed"), expected);
    let text = "I call.\n<tool_call>\n{\"name\": \"f\", ";
    let message = continued(&source, text, text, "\"arguments\": {\"x\": 1}}\n</tool_call>");
    assert_eq!(message.tool_calls[0].arguments, "{\"x\": 1}");
    assert_eq!(message.content, "");
}

#[test]
fn what_cannot_be_continued_is_an_error() {
    let (source, _) = TEMPLATES[0];
    let mut called = answers(["Hi", "I look."]);
    called[1].tool_calls.push(ToolCall { name: "f".into(), arguments: "{}".into(), id: None });
    for messages in [vec![Message::new("user", "Hi")], answers(["Hi", ""]), called, Vec::new()] {
        assert_eq!(continued_text(&messages), None);
        assert!(matches!(prompt(source, &messages), Err(ChatError::NothingToContinue)));
    }
    // A template that writes only what users say.
    let source = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}";
    assert!(matches!(prompt(source, &answers(["Hi", "So"])), Err(ChatError::NotContinued)));
}
