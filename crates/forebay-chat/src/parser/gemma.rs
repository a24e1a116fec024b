//! Calls of Gemma 4 and FunctionGemma: `call:f{key:value,...}`, in which a mark of its own quotes texts and keys have no
//! quotes.

use serde_json::{Map, Value};

use super::tools::Call;

/// Deepest nesting of lists and objects.
const DEPTH_MAX: usize = 64;

/// Parses a call. `quote` is the mark before and behind texts.
pub fn call(body: &str, quote: &'static str) -> Option<Call> {
    let rest = body.trim().strip_prefix("call:")?;
    let (name, rest) = rest.split_at(rest.find('{')?);
    let name = name.trim();
    if name.is_empty() || name.contains(char::is_whitespace) {
        return None;
    }
    let mut reader = Reader { rest, quote };
    let arguments = reader.value(0)?;
    let is_all = reader.rest.trim().is_empty();
    is_all.then(|| Call { name: name.to_owned(), arguments: arguments.to_string() })
}

/// Parses a value at the beginning of a text.
pub fn value(text: &str, quote: &'static str) -> Option<Value> {
    Reader { rest: text, quote }.value(1)
}

struct Reader<'a> {
    rest: &'a str,
    quote: &'static str,
}

impl Reader<'_> {
    /// Takes a text if it comes next.
    fn takes(&mut self, text: &str) -> bool {
        let trimmed = self.rest.trim_start();
        match trimmed.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH_MAX {
            return None;
        }
        if self.takes("{") {
            return self.object(depth).map(Value::Object);
        }
        if self.takes("[") {
            return self.list(depth).map(Value::Array);
        }
        if let Some(text) = self.quoted() {
            return text.map(Value::String);
        }
        self.scalar()
    }

    /// Reads a text between two marks, if one begins here.
    fn quoted(&mut self) -> Option<Option<String>> {
        if !self.takes(self.quote) {
            return None;
        }
        Some(self.rest.split_once(self.quote).map(|(text, rest)| {
            self.rest = rest;
            text.to_owned()
        }))
    }

    fn object(&mut self, depth: usize) -> Option<Map<String, Value>> {
        let mut object = Map::new();
        while !self.takes("}") {
            if !object.is_empty() && !self.takes(",") {
                return None;
            }
            let key = match self.quoted() {
                Some(key) => key?,
                None => {
                    let (key, rest) = self.rest.split_at(self.rest.find(':')?);
                    self.rest = rest;
                    key.trim().to_owned()
                }
            };
            if key.is_empty() || !self.takes(":") {
                return None;
            }
            let value = self.value(depth + 1)?;
            object.insert(key, value);
        }
        Some(object)
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

    /// Reads a number, a truth value, nothing, or a text that has no marks.
    fn scalar(&mut self) -> Option<Value> {
        let trimmed = self.rest.trim_start();
        if trimmed.starts_with('"') {
            let mut stream = serde_json::Deserializer::from_str(trimmed).into_iter::<Value>();
            let value = stream.next()?.ok()?;
            self.rest = &trimmed[stream.byte_offset()..];
            return Some(value);
        }
        let (word, rest) = trimmed.split_at(trimmed.find([',', '}', ']'])?);
        self.rest = rest;
        match word.trim() {
            "" => None,
            "null" | "None" | "none" => Some(Value::Null),
            word => {
                Some(serde_json::from_str(word).unwrap_or_else(|_| Value::String(word.to_owned())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(body: &str) -> Option<String> {
        let parsed = call(body, "<|\"|>")?;
        assert_eq!(parsed.name, "f");
        Some(parsed.arguments)
    }

    #[test]
    fn values() {
        let text = "call:f{city:<|\"|>Bern, {\"a\"}<|\"|>,days:3,deep:{list:[1.5,true,<|\"|>x<|\"|>],none:null}}";
        let expected = "{\"city\":\"Bern, {\\\"a\\\"}\",\"days\":3,\"deep\":{\"list\":[1.5,true,\"x\"],\"none\":null}}";
        assert_eq!(arguments(text).as_deref(), Some(expected));
        assert_eq!(arguments("call:f{}").as_deref(), Some("{}"));
        assert_eq!(arguments(" call:f { a : -2e3 } ").as_deref(), Some("{\"a\":-2000.0}"));
        assert_eq!(
            arguments("call:f{a:word,<|\"|>b c<|\"|>:\"q\"}").as_deref(),
            Some("{\"a\":\"word\",\"b c\":\"q\"}")
        );
        assert_eq!(
            call("call:f{a:<escape>1<escape>}", "<escape>").unwrap().arguments,
            "{\"a\":\"1\"}"
        );
    }

    #[test]
    fn other_texts() {
        for text in [
            "",
            "call:f",
            "f{}",
            "call:{}",
            "call:f{",
            "call:f{a}",
            "call:f{a:}",
            "call:f{a:1",
            "call:f{a:1}x",
            "call:f{a:<|\"|>x}",
            "call:two words{}",
        ] {
            assert_eq!(arguments(text), None, "{text}");
        }
        let deep = format!("call:f{{a:{}{}}}", "[".repeat(100), "]".repeat(100));
        assert_eq!(arguments(&deep), None);
    }
}
