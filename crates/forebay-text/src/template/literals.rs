//! Escapes in the texts of a template, which Jinja reads as Python does.
//!
//! The engine knows the escapes of JSON. The others are replaced before it sees the template.

/// Returns the source with the escapes that only Python knows replaced by what they stand for.
pub fn with_known_escapes(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map(|end| end + 2),
            Some(b'%') if is_raw(tag) => tag.find("endraw"),
            Some(b'%' | b'{') => {
                let (length, code) = code(tag);
                out.push_str(&code);
                rest = &tag[length..];
                continue;
            }
            _ => Some(1),
        };
        let (kept, behind) = tag.split_at(end.unwrap_or(tag.len()));
        out.push_str(kept);
        rest = behind;
    }
    out + rest
}

/// Returns true for the tag of a part that the engine prints as it is.
fn is_raw(tag: &str) -> bool {
    let inside = tag.trim_start_matches("{%").trim_start_matches(['-', '+']).trim_start();
    inside
        .strip_prefix("raw")
        .is_some_and(|rest| rest.starts_with([' ', '-', '+', '%', '\n', '\t']))
}

/// Returns the length of a tag and its code with known escapes.
fn code(tag: &str) -> (usize, String) {
    let close = if tag.starts_with("{{") { "}}" } else { "%}" };
    let mut out = tag[..2].to_owned();
    let (mut at, mut quote) = (2, None);
    while let Some(character) = tag[at..].chars().next() {
        match (quote, character) {
            (None, '\'' | '"') => quote = Some(character),
            (None, _) if tag[at..].starts_with(close) => break,
            (Some(open), _) if open == character => quote = None,
            (Some(_), '\\') => {
                let (length, text) = escape(&tag[at..]);
                out.push_str(&text);
                at += length;
                continue;
            }
            _ => {}
        }
        out.push(character);
        at += character.len_utf8();
    }
    (at, out)
}

/// Returns the length of an escape and what the engine reads as the same.
fn escape(text: &str) -> (usize, String) {
    let Some(kind) = text[1..].chars().next() else { return (1, "\\".to_owned()) };
    let (length, character) = match kind {
        'U' => (10, text.get(2..10).and_then(character)),
        'a' => (2, Some('\u{7}')),
        'v' => (2, Some('\u{b}')),
        // The line goes on in the next one.
        '\n' => return (2, String::new()),
        // Python knows no such escape, so both characters are text.
        '/' => return (2, "\\\\/".to_owned()),
        _ => (2, None),
    };
    match character {
        Some(quote @ ('\'' | '"' | '\\')) => (length, format!("\\{quote}")),
        Some(character) => (length, character.to_string()),
        None => (1 + kind.len_utf8(), format!("\\{kind}")),
    }
}

/// Returns the character of a hexadecimal number.
fn character(digits: &str) -> Option<char> {
    let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    char::from_u32(u32::from_str_radix(Some(digits).filter(|_| is_hex)?, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_of_python() {
        for (source, expected) in [
            (r"{{ '\U0001F600\u00e9\n' }}", r"{{ '😀\u00e9\n' }}"),
            (r"{% set x = '\U00000027\U0000005c\/\x41' ~ a %}", r"{% set x = '\'\\\\/\x41' ~ a %}"),
            (r#"{{ "\'" }}\U00000041{{ '}}\U00000041' }}"#, r#"{{ "\'" }}\U00000041{{ '}}A' }}"#),
            ("{{ 'a\\\nb' }}", "{{ 'ab' }}"),
        ] {
            assert_eq!(with_known_escapes(source), expected);
        }
        for source in [
            r"{# '\U00000041' #}\U00000041 { '\U00000041' {",
            r"{%- raw %}{{ '\U00000041' }}{% endraw %}",
            r"{{ 'a\n\\U00000041\q\UFFFFFFFF\U+0000041' }}",
            r"{{ '\u00e9",
            r"{{ '\",
            "{",
            "{{",
        ] {
            assert_eq!(with_known_escapes(source), source);
        }
    }
}
