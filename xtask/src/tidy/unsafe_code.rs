//! Checks that `unsafe` appears only where the architecture allows it, and that every unsafe function documents its
//! requirements. Clippy checks blocks and public functions, but does not tell private unsafe functions from safe ones
//! with target features.

use super::Finding;
use super::scan::{RustSource, matching_brace, words};

/// Crates that call the kernel, vector instructions, the GPU's driver, or C programs; and the task that calls NVIDIA's
/// compiler. An example counts what is allocated, and a test reads memory by the addresses that a load returns.
const HOMES: [&str; 11] = [
    "crates/forebay-store/",
    "crates/forebay-codec/",
    "crates/forebay-model/examples/fuzz_configs.rs",
    "crates/forebay-compute/",
    "crates/forebay-cuda/",
    "crates/forebay-device/",
    "crates/forebay-c/",
    "crates/forebay-dlpack/",
    "crates/forebay-engine/tests/support/loaded.rs",
    "crates/forebay-python/",
    "xtask/src/ptx/",
];

pub fn check(source: &RustSource, findings: &mut Vec<Finding>) {
    let at_home = HOMES.iter().any(|home| source.path.starts_with(home));
    let inherited = trait_implementations(&source.code);
    for offset in words(&source.code, "unsafe") {
        let line = source.line_of(offset);
        let next = source.code[offset + "unsafe".len()..].trim_start();
        if next.starts_with('(') {
            // This is an attribute such as `#[unsafe(no_mangle)]`.
            continue;
        }
        if !at_home {
            let message = format!("unsafe outside {}", HOMES.join(", "));
            findings.push(Finding::fail(&source.path, line, message));
            continue;
        }
        // The type of a function pointer makes no promise itself. For a method of a trait, the trait documents the
        // requirements.
        let is_function = next.starts_with("fn") || next.starts_with("extern");
        // A function has its name before the parenthesis, a type does not.
        let after_fn = match next.strip_prefix("extern") {
            Some(rest) => rest.split_once("fn").map(|(_, rest)| rest),
            None => next.strip_prefix("fn"),
        };
        let is_pointer_type = after_fn.is_some_and(|rest| rest.trim_start().starts_with('('));
        let is_inherited = is_function && inherited.iter().any(|range| range.contains(&offset));
        if is_function && !is_pointer_type && !is_inherited && !is_explained(source, line) {
            let message = "an unsafe function without a `# Safety` section";
            findings.push(Finding::fail(&source.path, line, message));
        }
    }
}

/// Returns the bodies of all `impl Trait for Type`.
fn trait_implementations(code: &str) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    for start in words(code, "impl") {
        let Some(open) = code[start..].find(['{', ';']).map(|length| start + length) else {
            continue;
        };
        let header = &code[start..open];
        if code[open..].starts_with('{') && header.split_whitespace().any(|word| word == "for") {
            found.push(open..matching_brace(code, open));
        }
    }
    found
}

/// Returns true if the comments on this line or directly above its statement give the reason.
fn is_explained(source: &RustSource, line: usize) -> bool {
    let comments: Vec<&str> = source.comments.lines().collect();
    let code: Vec<&str> = source.code.lines().collect();
    let mut at = line - 1;
    loop {
        let comment = comments.get(at).copied().unwrap_or_default();
        if comment.contains("SAFETY:") || comment.contains("# Safety") {
            return true;
        }
        if at == 0 {
            return false;
        }
        at -= 1;
        let above = code[at].trim();
        let is_attribute = above.starts_with("#[") || above.ends_with(")]");
        let ends_a_statement = above.ends_with([';', '{', '}', ',']);
        let has_comment = !comments[at].trim().is_empty();
        if above.is_empty() && !has_comment {
            return false;
        }
        if ends_a_statement && !is_attribute && !has_comment {
            return false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failures(path: &str, text: &str) -> usize {
        let mut findings = Vec::new();
        check(&RustSource::new(path, text), &mut findings);
        findings.len()
    }

    const STORE: &str = "crates/forebay-store/src/a.rs";

    #[test]
    fn functions_document_what_they_ask() {
        let documented =
            "/// Does.\n///\n/// # Safety\n/// Only then.\n#[inline]\npub unsafe fn f() {}\n";
        assert_eq!(failures(STORE, documented), 0);
        assert_eq!(failures(STORE, "pub unsafe fn f() {}\n"), 1);
        let implemented = "impl Device for Ring {\n    unsafe fn start(&mut self) {}\n}\n";
        assert_eq!(failures(STORE, implemented), 0);
        assert_eq!(failures(STORE, &implemented.replace("Device for ", "")), 1);
        assert_eq!(failures(STORE, "type F = unsafe fn(u32);\n"), 0);
    }

    #[test]
    fn only_its_homes_may() {
        assert_eq!(failures("crates/forebay-model/src/a.rs", "// SAFETY: no\nunsafe { g() }\n"), 1);
        assert_eq!(failures("crates/forebay-model/src/a.rs", "let x = \"unsafe\"; // unsafe\n"), 0);
    }
}
