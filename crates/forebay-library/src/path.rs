//! Rules for paths that come from another machine or from a manifest.

/// Longest path inside a repository, in bytes.
const LONGEST: usize = 512;

/// Returns why a path is refused. A path that passes stays below the folder that it is joined to.
pub fn check(path: &str) -> Result<(), &'static str> {
    if path.is_empty() || path.len() > LONGEST {
        return Err("it is empty or too long");
    }
    if path.chars().any(|c| c.is_control() || c == '\\' || c == ':') {
        return Err("it holds a control character, a backslash or a colon");
    }
    for part in path.split('/') {
        match part {
            "" => return Err("it is absolute or has an empty part"),
            "." | ".." => return Err("it leads to another folder"),
            _ if part.len() > 200 => return Err("a part of it is too long"),
            _ => {}
        }
    }
    Ok(())
}

/// Encodes a path for a URL. Slashes stay if `slashes` is true.
pub fn encode(path: &str, slashes: bool) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                text.push(byte.into());
            }
            b'/' if slashes => text.push('/'),
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_out_are_refused() {
        for path in ["a", "a.gguf", "UD-Q4/a b.gguf", "ä/..b", "a/...c"] {
            assert_eq!(check(path), Ok(()), "{path}");
        }
        let long = "a/".repeat(300) + "b";
        for path in [
            "",
            "/etc/passwd",
            "../a",
            "a/../../b",
            "a/..",
            "./a",
            "a//b",
            "a/",
            "a\\b",
            "C:a",
            "a\nb",
            "a\0",
            "a\u{1b}[2J",
            &long,
        ] {
            assert!(check(path).is_err(), "{path:?}");
        }
    }

    #[test]
    fn urls_are_encoded() {
        assert_eq!(encode("a b/ü?#%.gguf", true), "a%20b/%C3%BC%3F%23%25.gguf");
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}
