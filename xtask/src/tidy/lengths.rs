//! Long functions and long files: a second thought or a second subject hides in them.

use super::allow::AllowList;
use super::scan::{RustSource, matching_brace, words};
use super::{Finding, Level};

const FUNCTION_LINES_REPORTED: usize = 70;
const FUNCTION_LINES_FAIL: usize = 120;
const FILE_LINES_REPORTED: usize = 500;
const FILE_LINES_FAIL: usize = 700;

struct Function {
    name: String,
    line: usize,
    lines: usize,
}

pub fn check(source: &RustSource, allow: &mut AllowList, findings: &mut Vec<Finding>) {
    let lines = source.text.lines().count();
    if lines > FILE_LINES_REPORTED {
        let allowed = lines > FILE_LINES_FAIL && allow.permits("file-length", &source.path);
        let level = level(lines > FILE_LINES_FAIL && !allowed);
        let message = format!("{lines} lines: is there a second subject in this file?");
        findings.push(Finding { level, path: source.path.clone(), line: 0, message });
    }
    for function in functions(source) {
        if function.lines <= FUNCTION_LINES_REPORTED {
            continue;
        }
        let too_long = function.lines > FUNCTION_LINES_FAIL;
        let place = format!("{}:{}", source.path, function.name);
        let allowed = too_long && allow.permits("function-length", &place);
        let message = format!(
            "function {} has {} lines: is there a second thought in it?",
            function.name, function.lines
        );
        let level = level(too_long && !allowed);
        findings.push(Finding { level, path: source.path.clone(), line: function.line, message });
    }
}

fn level(fail: bool) -> Level {
    if fail { Level::Fail } else { Level::Report }
}

/// Every function with a body, inner functions too.
fn functions(source: &RustSource) -> Vec<Function> {
    let code = &source.code;
    let mut found = Vec::new();
    for start in words(code, "fn") {
        let rest = code[start + 2..].trim_start();
        let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        // Without a name it is a function pointer type.
        if name.is_empty() {
            continue;
        }
        let Some(open) = body(code, start) else { continue };
        let end = matching_brace(code, open);
        let line = source.line_of(start);
        let last = source.line_of(end.saturating_sub(1).max(start));
        found.push(Function { name, line, lines: last - line + 1 });
    }
    found
}

/// The offset of the brace that opens the body, or `None` for a declaration that ends with a semicolon.
fn body(code: &str, start: usize) -> Option<usize> {
    let mut depth = 0i32;
    for (at, byte) in code.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return Some(at),
            b';' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> RustSource {
        RustSource::new("a.rs", text)
    }

    #[test]
    fn lengths_count_the_signature_and_the_braces() {
        let found = functions(&source("trait T { fn a(x: [u8; 3]); }\nfn b(\n) {\n  \"}\"\n}\n"));
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].line, found[0].lines), ("b", 2, 4));
    }

    #[test]
    fn long_functions_fail_unless_allowed() {
        let text = format!("fn long() {{\n{}}}\n", "x();\n".repeat(150));
        let mut findings = Vec::new();
        check(&source(&text), &mut AllowList::default(), &mut findings);
        assert_eq!(findings.iter().filter(|f| f.level == Level::Fail).count(), 1);

        let text = format!("fn long() {{\n{}}}\n", "x();\n".repeat(80));
        findings.clear();
        check(&source(&text), &mut AllowList::default(), &mut findings);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].level, Level::Report);
    }

    #[test]
    fn long_files_fail() {
        let mut findings = Vec::new();
        check(&source(&"// x\n".repeat(701)), &mut AllowList::default(), &mut findings);
        assert_eq!(findings[0].level, Level::Fail);
        findings.clear();
        check(&source(&"// x\n".repeat(501)), &mut AllowList::default(), &mut findings);
        assert_eq!(findings[0].level, Level::Report);
    }
}
