//! Calls in the form of Python: `[f(a=1, b="x"), g()]`.

use serde_json::{Map, Number, Value};

use super::tools::{Call, typed};
use crate::offer::Offer;

/// Deepest nesting of lists and dictionaries.
const DEPTH_MAX: usize = 64;

/// Parses a list of calls with named arguments.
pub fn calls(body: &str, offer: &Offer) -> Option<Vec<Call>> {
    let mut reader = Reader { rest: body };
    let mut calls = Vec::new();
    if !reader.takes("[") {
        return None;
    }
    while !reader.takes("]") {
        if !calls.is_empty() && !reader.takes(",") {
            return None;
        }
        calls.push(reader.call(offer)?);
    }
    (!calls.is_empty() && reader.rest.trim().is_empty()).then_some(calls)
}

/// Parses calls in lines of their own, without a list around them. Commas between them do no harm.
pub fn lines(body: &str, offer: &Offer) -> Option<Vec<Call>> {
    if body.trim_start().starts_with('[') {
        return calls(body, offer);
    }
    let mut reader = Reader { rest: body };
    let mut calls = Vec::new();
    while !reader.rest.trim_start().is_empty() {
        calls.push(reader.call(offer)?);
        let behind = reader.rest.trim_start_matches([' ', '\t', '\r']);
        let ends_line = behind.is_empty() || behind.starts_with('\n');
        if !reader.takes(",") && !ends_line {
            return None;
        }
    }
    (!calls.is_empty()).then_some(calls)
}

/// Parses a value at the beginning of a text.
pub fn value(text: &str) -> Option<Value> {
    Reader { rest: text }.value(0)
}

/// Returns true if a text is the name of a function or an argument. It may have dots.
pub fn is_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(is_part_of_name)
}

fn is_part_of_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    /// Takes a text if it comes next.
    fn takes(&mut self, text: &str) -> bool {
        let found = self.rest.trim_start().strip_prefix(text);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    /// Takes a name, which may have dots.
    fn name(&mut self) -> Option<&'a str> {
        let trimmed = self.rest.trim_start();
        let end = trimmed.find(|c| !is_part_of_name(c)).unwrap_or(trimmed.len());
        let (name, rest) = trimmed.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn call(&mut self, offer: &Offer) -> Option<Call> {
        let name = self.name()?;
        if !self.takes("(") {
            return None;
        }
        let mut arguments = Map::new();
        while !self.takes(")") {
            if !arguments.is_empty() && !self.takes(",") {
                return None;
            }
            let key = self.name()?;
            if !self.takes("=") {
                return None;
            }
            let value = match (self.value(0)?, offer.is_text(name, key)) {
                // The templates of Llama 4 write every value of earlier calls in quotes.
                (Value::String(text), Some(false)) => typed(&text, Some(false)),
                (value, _) => value,
            };
            arguments.insert(key.to_owned(), value);
        }
        Some(Call { name: name.to_owned(), arguments: Value::Object(arguments).to_string() })
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        if self.takes("[") {
            return self.list(depth).map(Value::Array);
        }
        if self.takes("{") {
            return self.dictionary(depth).map(Value::Object);
        }
        for quote in ['"', '\''] {
            if self.takes(quote.encode_utf8(&mut [0; 4])) {
                return self.text(quote).map(Value::String);
            }
        }
        let trimmed = self.rest.trim_start();
        let (word, rest) = trimmed.split_at(trimmed.find([',', ')', ']', '}', ':'])?);
        self.rest = rest;
        match word.trim() {
            "True" | "true" => Some(Value::Bool(true)),
            "False" | "false" => Some(Value::Bool(false)),
            "None" | "null" => Some(Value::Null),
            word => serde_json::from_str::<Number>(word).ok().map(Value::Number),
        }
    }

    fn list(&mut self, depth: usize) -> Option<Vec<Value>> {
        let mut list = Vec::new();
        while !self.takes("]") {
            if !list.is_empty() && !self.takes(",") {
                return None;
            }
            list.push(self.value(depth + 1)?);
        }
        Some(list)
    }

    fn dictionary(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut dictionary = Map::new();
        while !self.takes("}") {
            if !dictionary.is_empty() && !self.takes(",") {
                return None;
            }
            let Value::String(key) = self.value(depth + 1)? else { return None };
            if !self.takes(":") {
                return None;
            }
            let value = self.value(depth + 1)?;
            dictionary.insert(key, value);
        }
        Some(dictionary)
    }

    /// Reads the rest of a text, and the quotation mark behind it.
    fn text(&mut self, quote: char) -> Option<String> {
        let mut text = String::new();
        loop {
            let (before, rest) = self.rest.split_at(self.rest.find([quote, '\\'])?);
            text.push_str(before);
            if let Some(rest) = rest.strip_prefix(quote) {
                self.rest = rest;
                return Some(text);
            }
            let (escaped, length) = escape(rest).ok()??;
            text.push_str(&escaped);
            self.rest = &rest[length..];
        }
    }
}

/// Reads an escape at the beginning of a text. Returns its text and the bytes that it takes, or `None` if it is not complete.
pub fn escape(text: &str) -> Result<Option<(String, usize)>, ()> {
    let Some(escape) = text.chars().nth(1) else { return Ok(None) };
    let escaped = match escape {
        'n' => "\n",
        't' => "\t",
        'r' => "\r",
        'b' => "\u{8}",
        'f' => "\u{c}",
        '\n' => "",
        '\\' | '"' | '\'' | '/' => &text[1..2],
        'x' => return code(text, 2),
        'u' => return code(text, 4),
        'U' => return code(text, 8),
        // Python keeps the backslash of an escape that it does not know.
        other => &text[..1 + other.len_utf8()],
    };
    Ok(Some((escaped.to_owned(), 1 + escape.len_utf8())))
}

/// Reads `\x41`, `\u20AC` or `\U0001F600`, or two surrogates as in JSON.
fn code(text: &str, digits: usize) -> Result<Option<(String, usize)>, ()> {
    let number = |at: usize| {
        let Some(digits) = text.get(at + 2..at + 2 + digits) else {
            return if text.len() < at + 2 + digits { Ok(None) } else { Err(()) };
        };
        u32::from_str_radix(digits, 16).map(Some).map_err(|_| ())
    };
    let length = 2 + digits;
    let Some(first) = number(0)? else { return Ok(None) };
    if let Some(c) = char::from_u32(first) {
        return Ok(Some((c.to_string(), length)));
    }
    if digits != 4 || !(0xD800..0xDC00).contains(&first) {
        return Err(());
    }
    let second = &text[length..];
    if !second.starts_with("\\u") {
        return if "\\u".starts_with(second) { Ok(None) } else { Err(()) };
    }
    let Some(low) = number(length)? else { return Ok(None) };
    let c = char::from_u32(0x10000 + ((first & 0x3FF) << 10) + (low & 0x3FF));
    match c.filter(|_| (0xDC00..0xE000).contains(&low)) {
        Some(c) => Ok(Some((c.to_string(), 2 * length))),
        None => Err(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &str) -> Option<Vec<(String, String)>> {
        let calls = calls(body, &Offer::Unknown)?;
        Some(calls.into_iter().map(|call| (call.name, call.arguments)).collect())
    }

    #[test]
    fn values() {
        let text = r#" [f(a=1, b="x\"\n", c='it\'s'), g.h(l=[1.5, True, None], d={"k": False})] "#;
        let expected = [
            ("f", r#"{"a":1,"b":"x\"\n","c":"it's"}"#),
            ("g.h", r#"{"l":[1.5,true,null],"d":{"k":false}}"#),
        ];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(parse(text), Some(expected.to_vec()));
        let text = r#"[f(a="\u20ac\x41\U0001F600\ud83d\ude00\d", b='')]"#;
        let arguments = r#"{"a":"€A😀😀\\d","b":""}"#;
        assert_eq!(parse(text), Some(vec![("f".to_owned(), arguments.to_owned())]));
        assert_eq!(parse("[f()]"), Some(vec![("f".to_owned(), "{}".to_owned())]));
    }

    #[test]
    fn calls_in_lines() {
        let parse = |body: &str| {
            let calls = lines(body, &Offer::Unknown)?;
            Some(calls.into_iter().map(|call| call.name + &call.arguments).collect::<Vec<_>>())
        };
        let text = "\nf(a=\"x\ny\", b=[1, null])\n\n g( )\r\n";
        let expected = [r#"f{"a":"x\ny","b":[1,null]}"#, "g{}"].map(str::to_owned).to_vec();
        assert_eq!(parse(text), Some(expected));
        assert_eq!(parse("f(),\ng()").map(|calls| calls.len()), Some(2));
        assert_eq!(parse("[f(), g()]").map(|calls| calls.len()), Some(2));
        for text in ["", "\n", "f", "f() g()", "f(\ng()", "f()\ntext", "f(a=1)]"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn other_texts() {
        for text in [
            "",
            "[]",
            "[1, 2]",
            "f(a=1)",
            "[f(1)]",
            "[f(a=1)",
            "[f(a=1)] x",
            "[f(a=b)]",
            "[f a=1)]",
            "[f(a='x)]",
            "[f(a=\"\\ud83d\")]",
            "[f(a={1: 2})]",
            "[f(a=1) g()]",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
        let deep = format!("[f(a={}{})]", "[".repeat(100), "]".repeat(100));
        assert_eq!(parse(&deep), None);
    }
}
