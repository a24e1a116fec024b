//! Parts of grammars that all syntaxes of calls use.

use std::cell::Cell;

use forebay_grammar::Rules;
use forebay_text::Tokenizer;
use serde_json::{Map, Value, json};

use crate::offer::{referenced, target};

/// Deepest nesting of schemas that a grammar follows. Deeper values are of any form.
pub const DEPTH_MAX: usize = 8;

/// Longest text of a grammar's literals and schemas. The compiler refuses longer grammars. References can repeat a schema within
/// itself, so without this bound a short schema could become gigabytes of rules before the compiler sees them.
const BYTES_MAX: usize = 256 << 10;

/// A tool as the grammar needs it.
pub struct Tool<'a> {
    pub name: &'a str,
    /// JSON schema of the arguments.
    pub schema: Value,
}

/// Form of an answer's calls.
#[derive(Default)]
pub struct Form {
    /// Rules `call0`, `call1` and so on, one for each tool, and the rules that they use.
    pub rules: String,
    /// Text before the first call, and behind the last one.
    pub open: &'static str,
    pub close: &'static str,
    /// Text between two calls.
    pub separator: &'static str,
}

/// A parameter of a tool.
pub struct Parameter<'a> {
    pub key: &'a str,
    pub schema: &'a Value,
    pub is_required: bool,
}

impl Tool<'_> {
    /// Returns the parameters in the order of the schema.
    pub fn parameters(&self) -> Vec<Parameter<'_>> {
        parameters(&self.schema)
    }

    /// Returns the schema that a schema refers to, if it does.
    pub fn target(&self, schema: &Value) -> Option<&Value> {
        target(&self.schema, schema)
    }

    /// Returns the schema at the end of a schema's references.
    pub fn referenced<'s>(&'s self, schema: &'s Value) -> &'s Value {
        referenced(&self.schema, schema)
    }
}

/// Returns the properties of an object's schema.
pub fn parameters(schema: &Value) -> Vec<Parameter<'_>> {
    static NONE: std::sync::OnceLock<Map<String, Value>> = std::sync::OnceLock::new();
    let fields = schema.get("properties").and_then(Value::as_object);
    let fields = fields.unwrap_or_else(|| NONE.get_or_init(Map::new));
    let required = schema.get("required").and_then(Value::as_array);
    let of = |(key, schema)| Parameter {
        key,
        schema,
        is_required: required.is_some_and(|names| names.iter().any(|name| name == key)),
    };
    fields.iter().map(|(key, schema): (&String, &Value)| of((key.as_str(), schema))).collect()
}

/// Returns the texts that a schema allows, if it names them.
pub fn texts(schema: &Value) -> Option<Vec<&str>> {
    let values = schema.get("enum").and_then(Value::as_array)?;
    let texts: Option<Vec<&str>> = values.iter().map(Value::as_str).collect();
    texts.filter(|texts| !texts.is_empty())
}

/// Returns true if a schema allows any text, and nothing else.
pub fn is_text(schema: &Value) -> bool {
    schema.get("type").and_then(Value::as_str) == Some("string")
}

/// Writes rules.
pub struct Writer<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Marks that may be tokens of the vocabulary.
    pub marks: Vec<&'static str>,
    /// Bytes of the literals and schemas so far.
    written: Cell<usize>,
}

impl<'a> Writer<'a> {
    pub fn new(tokenizer: &'a Tokenizer, marks: Vec<&'static str>) -> Writer<'a> {
        Writer { tokenizer, marks, written: Cell::new(0) }
    }

    /// Returns true if the grammar is so long that the compiler refuses it, whatever follows.
    pub fn is_full(&self) -> bool {
        self.written.get() > BYTES_MAX
    }

    /// Counts a part of the grammar, and returns it.
    pub fn counted(&self, part: String) -> String {
        self.written.set(self.written.get() + part.len());
        part
    }

    /// Returns JSON by the schema of a value as a part of a rule. References are to definitions of the tool's whole schema.
    pub fn inline(&self, tool: &Tool<'_>, schema: &Value) -> String {
        if self.is_full() {
            return Rules::inline(&json!({}));
        }
        let mut schema = schema.clone();
        for place in ["$defs", "definitions"] {
            if let (Some(own), Some(all)) = (schema.as_object_mut(), tool.schema.get(place)) {
                own.entry(place).or_insert_with(|| all.clone());
            }
        }
        self.counted(Rules::inline(&schema))
    }

    /// Returns a text as a part of a rule. Marks that the vocabulary has as tokens become these tokens.
    pub fn literal(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((before, token, after)) = self.next_mark(rest) {
            parts.extend((!before.is_empty()).then(|| quoted(before)));
            parts.push(token);
            rest = after;
        }
        parts.extend((!rest.is_empty()).then(|| quoted(rest)));
        self.counted(parts.join(" "))
    }

    /// Returns the first mark in a text that is a token, as a part of a rule, with what is before and behind it.
    fn next_mark<'t>(&self, text: &'t str) -> Option<(&'t str, String, &'t str)> {
        let found = self.marks.iter().filter_map(|mark| {
            let at = text.find(mark)?;
            Some((at, mark.len(), self.tokenizer.token_id(mark)?))
        });
        let (at, length, id) = found.min()?;
        Some((&text[..at], format!("<[{id}]>"), &text[at + length..]))
    }

    /// Returns rules of any text up to `close`, and of `close` itself. `name` names the rule.
    pub fn text_until(&self, name: &str, close: &str) -> String {
        match self.next_mark(close) {
            Some((before, token, after)) => {
                let before = regex_literal(before);
                let after = self.literal(after);
                format!("{name}: {name}_text {token} {after}\n{name}_text: /(?s:.*){before}/\n")
            }
            None => format!("{name}[lazy]: /(?s:.*){}/\n", regex_literal(close)),
        }
    }

    /// Returns the rule of a call.
    pub fn rule(&self, number: usize, open: &str, middle: &str, close: &str) -> String {
        format!("call{number}: {} {middle} {}\n", self.literal(open), self.literal(close))
    }

    /// Returns the rules of calls whose arguments are one JSON object. `around` returns what is before and behind it.
    pub fn objects(
        &self,
        tools: &[Tool<'_>],
        around: impl Fn(&str) -> (String, &'static str),
    ) -> String {
        let rule = |(number, tool): (usize, &Tool<'_>)| {
            let (open, close) = around(tool.name);
            self.rule(number, &open, &Rules::inline(&tool.schema), close)
        };
        tools.iter().enumerate().map(rule).collect()
    }
}

/// Returns the rules of items with commas between them, in their order. Each item is a part of a rule, and says if it must
/// be there. `name` names the first rule.
pub fn sequence(name: &str, items: &[(String, bool)]) -> String {
    let mut rules = String::new();
    let last = items.len();
    for (index, (item, is_required)) in items.iter().enumerate() {
        let next = index + 1;
        let head = if index == 0 { name.to_owned() } else { format!("{name}_head{index}") };
        rules += &match is_required {
            true => format!(
                "{head}: {item} {name}_tail{next}\n{name}_tail{index}: \",\" space {item} {name}_tail{next}\n"
            ),
            false => format!(
                "{head}: {item} {name}_tail{next} | {name}_head{next}\n\
                 {name}_tail{index}: (\",\" space {item})? {name}_tail{next}\n"
            ),
        };
    }
    if last == 0 {
        return format!("{name}: \"\"\n");
    }
    rules + &format!("{name}_head{last}: \"\"\n{name}_tail{last}: \"\"\n")
}

/// Returns a text as a literal of a Lark grammar.
pub fn quoted(text: &str) -> String {
    json!(text).to_string()
}

/// Returns a text as a part of a regular expression between slashes.
fn regex_literal(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            c if c.is_ascii_punctuation() && c != '<' && c != '>' => {
                escaped.push('\\');
                escaped.push(c);
            }
            c => escaped.push(c),
        }
    }
    escaped
}
