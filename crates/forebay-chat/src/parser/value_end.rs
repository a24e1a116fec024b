//! Search for the end of a value in brackets, in text that arrives in pieces.

/// Finds where the first value in brackets ends, and looks at each byte once.
pub struct ValueEnd {
    /// Bytes that were looked at.
    at: usize,
    depth: usize,
    quote: Option<u8>,
    is_escaped: bool,
    /// Bytes that quote texts within the value.
    quotes: &'static [u8],
    /// Mark that the value comes after, unless it begins before that.
    behind: Option<&'static str>,
}

impl ValueEnd {
    /// Creates the search. `quotes` are the quotation marks of the value's texts. If `behind` is set, brackets before that
    /// mark do not count, except a list at the very beginning or an object.
    pub fn new(quotes: &'static [u8], behind: Option<&'static str>) -> ValueEnd {
        ValueEnd { at: 0, depth: 0, quote: None, is_escaped: false, quotes, behind }
    }

    /// Looks for the end. `text` is that of the last call with more at its end.
    pub fn find(&mut self, text: &str) -> Option<usize> {
        if let Some(mark) = self.behind {
            self.at = begin(text, mark)?;
            self.behind = None;
        }
        for (at, byte) in text.bytes().enumerate().skip(self.at) {
            self.at = at + 1;
            match (self.quote, byte) {
                (Some(_), _) if self.is_escaped => self.is_escaped = false,
                (Some(_), b'\\') => self.is_escaped = true,
                (Some(quote), _) if byte == quote => self.quote = None,
                (Some(_), _) => {}
                (None, b'[' | b'{' | b'(') => self.depth += 1,
                (None, b']' | b'}' | b')') if self.depth > 0 => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(self.at);
                    }
                }
                (None, _) if self.depth > 0 && self.quotes.contains(&byte) => {
                    self.quote = Some(byte);
                }
                (None, _) => {}
            }
        }
        None
    }
}

/// Returns where the value begins, or `None` if that is not decided yet.
fn begin(text: &str, mark: &str) -> Option<usize> {
    let trimmed = text.trim_start();
    if let Some(list) = trimmed.strip_prefix('[') {
        match list.trim_start().chars().next()? {
            // A list of calls begins with an object.
            '{' | ']' => return Some(text.len() - trimmed.len()),
            _ => {}
        }
    }
    behind(text, mark)
}

/// Returns where the value begins behind a name.
fn behind(text: &str, mark: &str) -> Option<usize> {
    let object = text.find('{');
    match text.find(mark) {
        Some(at) if object.is_none_or(|object| at < object) => Some(at + mark.len()),
        _ => object,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is behind the value, for a text that comes byte by byte.
    fn rest(text: &str, quotes: &'static [u8], behind: Option<&'static str>) -> Option<String> {
        let mut end = ValueEnd::new(quotes, behind);
        let cuts = (1..=text.len()).filter(|at| text.is_char_boundary(*at));
        let mut found = cuts.filter_map(|at| end.find(&text[..at]));
        found.next().map(|at| text[at..].to_owned())
    }

    #[test]
    fn values_end_with_their_last_bracket() {
        for (text, expected) in [
            ("{\"a\": [1, {}]} x", Some(" x")),
            ("{\"a\": \"}\\\"}é\"};", Some(";")),
            ("{\"a\": \"}", None),
            ("[{}, {}]", Some("")),
        ] {
            assert_eq!(rest(text, b"\"", None).as_deref(), expected, "{text}");
        }
        assert_eq!(rest("[f(x='a)]\"', y=\"'\")] z", b"\"'", None).as_deref(), Some(" z"));
        for (text, expected) in [
            ("f[ARGS]{\"a\": 1}[", Some("[")),
            ("f[CALL_ID]abc[ARGS]{}", Some("")),
            (" [{\"a\": 1}] x", Some(" x")),
            ("[]x", Some("x")),
            ("f{\"a\": \"[ARGS]{\"}", Some("")),
            ("f[ARGS]", None),
        ] {
            assert_eq!(rest(text, b"\"", Some("[ARGS]")).as_deref(), expected, "{text}");
        }
    }
}
