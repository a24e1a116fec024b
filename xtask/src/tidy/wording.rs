//! Checks for text that only its author can follow: paths of one machine, and unfinished passages.

use super::Finding;
use super::files::Repository;
use super::scan::{RustSource, words};

/// First folders of absolute paths that differ from machine to machine.
const PERSONAL_ROOTS: [&str; 12] = [
    "Users",
    "data",
    "home",
    "media",
    "mnt",
    "nfs",
    "private",
    "root",
    "scratch",
    "volumes",
    "work",
    "workspace",
];

pub fn check_rust(source: &RustSource, findings: &mut Vec<Finding>) {
    for (index, line) in source.text.lines().enumerate() {
        check_paths(&source.path, index + 1, line, findings);
    }
    for marker in ["FIXME", "XXX"] {
        for offset in words(&source.comments, marker) {
            let line = source.line_of(offset);
            findings.push(Finding::fail(&source.path, line, format!("{marker} left behind")));
        }
    }
    for (offset, _) in source.text.match_indices("eprintln!(\"SKIPPED") {
        let line = source.line_of(offset);
        let message =
            "the test harness hides this from the user who runs the tests: write to stderr()";
        findings.push(Finding::fail(&source.path, line, message));
    }
}

pub fn check_text(repository: &Repository, findings: &mut Vec<Finding>) {
    for file in repository.files() {
        let is_prose =
            [".md", ".sh", ".toml", ".txt", ".py"].iter().any(|end| file.path.ends_with(end))
                || file.path.starts_with(".ci/");
        if !is_prose || file.path.starts_with("fixtures/vocab") {
            continue;
        }
        for (index, line) in file.text.as_deref().unwrap_or_default().lines().enumerate() {
            check_paths(&file.path, index + 1, line, findings);
        }
    }
}

/// Reports absolute paths whose first folder exists on one machine only.
fn check_paths(path: &str, line: usize, text: &str, findings: &mut Vec<Finding>) {
    for (at, _) in text.match_indices('/') {
        let before = text[..at].chars().next_back();
        if !before.is_none_or(|c| c.is_whitespace() || "\"'`(=:<>".contains(c)) {
            continue;
        }
        let rest = &text[at + 1..];
        let name: String =
            rest.chars().take_while(|c| c.is_alphanumeric() || "-_.".contains(*c)).collect();
        let has_more = rest[name.len()..].starts_with('/')
            && rest[name.len() + 1..].starts_with(|c: char| c.is_alphanumeric());
        if has_more && PERSONAL_ROOTS.contains(&name.as_str()) {
            let message = format!("the absolute path /{name}/... exists on one machine only");
            findings.push(Finding::fail(path, line, message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rust(text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check_rust(&RustSource::new("a.rs", text), &mut findings);
        findings.into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn machine_paths_fail() {
        let home = format!("// see {}home/someone/notes", '/');
        assert_eq!(rust(&home).len(), 1);
        assert!(
            rust("// see /dev/null, /proc/self/status, /a/json/pointer, and/or a/b/c, x / y / z")
                .is_empty()
        );
        assert!(rust("// https://example.org/a/b").is_empty());
    }

    #[test]
    fn unfinished_places_fail() {
        let unfinished = format!("// {}: later", "FIXME");
        assert_eq!(rust(&unfinished).len(), 1);
        assert!(rust("fn f() { let s = \"later\"; }").is_empty());
    }

    #[test]
    fn skipping_is_said_aloud() {
        let silent = format!("fn f() {{ {}!(\"SKIPPED: no data\"); }}", "eprintln");
        assert_eq!(rust(&silent).len(), 1);
    }
}
