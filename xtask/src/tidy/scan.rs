//! Separates comments and literals of Rust text from its code without parsing it.

/// A Rust file in three views of equal length and equal line breaks.
pub struct RustSource {
    pub path: String,
    /// The unchanged text.
    pub text: String,
    /// The text with blanks in place of comments and of the contents of string and character
    /// literals.
    pub code: String,
    /// The text with blanks in place of everything but comments.
    pub comments: String,
}

impl RustSource {
    pub fn new(path: &str, text: &str) -> Self {
        let (code, comments) = separate(text);
        Self { path: path.to_owned(), text: text.to_owned(), code, comments }
    }

    /// Returns the line number, from 1, of a byte offset.
    pub fn line_of(&self, offset: usize) -> usize {
        1 + self.code.as_bytes()[..offset].iter().filter(|byte| **byte == b'\n').count()
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Code,
    Comment,
    Literal,
}

/// Splits `text` into its code and its comments, both as long as `text` in bytes.
fn separate(text: &str) -> (String, String) {
    let bytes = text.as_bytes();
    let mut code = vec![b' '; bytes.len()];
    let mut comments = code.clone();
    let mut at = 0;
    while at < bytes.len() {
        let (kind, end) = next_piece(bytes, at);
        let target = match kind {
            Kind::Code => Some(&mut code),
            Kind::Comment => Some(&mut comments),
            Kind::Literal => None,
        };
        if let Some(target) = target {
            target[at..end].copy_from_slice(&bytes[at..end]);
        }
        at = end;
    }
    for (index, byte) in bytes.iter().enumerate() {
        if *byte == b'\n' {
            code[index] = b'\n';
            comments[index] = b'\n';
        }
    }
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (text(code), text(comments))
}

/// Returns the kind of the piece that begins at `at`, and the offset at which it ends.
fn next_piece(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at..];
    if rest.starts_with(b"//") {
        let length = rest.iter().position(|byte| *byte == b'\n').unwrap_or(rest.len());
        return (Kind::Comment, at + length);
    }
    if rest.starts_with(b"/*") {
        return (Kind::Comment, at + block_comment_length(rest));
    }
    let after_identifier = at > 0 && is_identifier(bytes[at - 1]);
    if !after_identifier && let Some(length) = raw_string_length(rest) {
        return (Kind::Literal, at + length);
    }
    match rest[0] {
        b'"' => (Kind::Literal, at + quoted_length(rest, b'"')),
        b'\'' => match character_length(rest) {
            Some(length) => (Kind::Literal, at + length),
            None => (Kind::Code, at + 1),
        },
        _ => {
            // Whole characters are taken, so that every view stays valid UTF-8.
            let length =
                1 + rest[1..].iter().take_while(|byte| (0x80..0xC0).contains(*byte)).count();
            (Kind::Code, at + length)
        }
    }
}

fn block_comment_length(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Returns the length of `r"..."`, `br#"..."#` or a similar literal, if one begins here.
fn raw_string_length(rest: &[u8]) -> Option<usize> {
    let prefix = rest.iter().take(2).take_while(|byte| matches!(byte, b'b' | b'c' | b'r')).count();
    if prefix == 0 || rest[prefix - 1] != b'r' {
        return None;
    }
    let hashes = rest[prefix..].iter().take_while(|byte| **byte == b'#').count();
    let open = prefix + hashes;
    if rest.get(open) != Some(&b'"') {
        return None;
    }
    let mut close = vec![b'"'];
    close.extend(std::iter::repeat_n(b'#', hashes));
    let body = &rest[open + 1..];
    let inside = body.windows(close.len()).position(|window| window == close);
    Some(inside.map_or(rest.len(), |inside| open + 1 + inside + close.len()))
}

fn quoted_length(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Returns the length of a character literal, or `None` for a lifetime.
fn character_length(rest: &[u8]) -> Option<usize> {
    match rest.get(1)? {
        b'\\' => Some(quoted_length(rest, b'\'')),
        _ => {
            let mut characters = std::str::from_utf8(&rest[1..rest.len().min(6)])
                .or_else(|error| std::str::from_utf8(&rest[1..1 + error.valid_up_to()]))
                .ok()?
                .chars();
            let length = 1 + characters.next()?.len_utf8();
            (rest.get(length) == Some(&b'\'')).then_some(length + 1)
        }
    }
}

fn is_identifier(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Returns the byte offsets at which `word` occurs as a whole word in `code`.
pub fn words(code: &str, word: &str) -> Vec<usize> {
    let bytes = code.as_bytes();
    code.match_indices(word)
        .map(|(at, _)| at)
        .filter(|at| {
            let before = at.checked_sub(1).is_some_and(|before| is_identifier(bytes[before]));
            let after = bytes.get(at + word.len()).is_some_and(|byte| is_identifier(*byte));
            !before && !after
        })
        .collect()
}

/// Returns the offset after the brace that closes the one at `open`.
pub fn matching_brace(code: &str, open: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth = depth.saturating_sub(1),
            _ => continue,
        }
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_and_comments_leave_the_code() {
        let source = RustSource::new(
            "x.rs",
            "let a = \"fn x() { // no\"; // fn y\nlet b = r#\"unsafe \" {\"#; /* a /* b */ fn */ let c = '{';",
        );
        assert!(!source.code.contains("fn"));
        assert!(!source.code.contains("unsafe"));
        assert!(!source.code.contains('{'));
        assert!(source.code.contains("let c"));
        assert!(source.comments.contains("fn y"));
        assert!(!source.comments.contains("no"));
        assert_eq!(source.code.len(), source.text.len());
        assert_eq!(source.line_of(source.text.find("let b").unwrap()), 2);
    }

    #[test]
    fn lifetimes_are_code_and_escapes_are_not() {
        let source =
            RustSource::new("x.rs", "fn f<'a>(x: &'a str) { let q = '\\''; let e = 'é'; }");
        assert!(source.code.contains("<'a>"));
        assert!(source.code.ends_with("let e =    ; }") || source.code.contains("let e ="));
        assert_eq!(matching_brace(&source.code, source.code.find('{').unwrap()), source.code.len());
    }

    #[test]
    fn words_stand_alone() {
        assert_eq!(words("unsafe not_unsafe unsafely (unsafe)", "unsafe"), vec![0, 28]);
    }
}
