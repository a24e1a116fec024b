//! Libraries name no flags of the command line: their messages say which option is meant, and each program gives it a name.

use super::Finding;
use super::cycles::without_tests;
use super::files::Repository;
use super::scan::RustSource;

/// Programs, which have flags.
const PROGRAMS: [&str; 2] = ["crates/forebay/", "crates/forebay-gpu-check/"];

pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    for source in repository.rust_sources() {
        let is_library = source.path.starts_with("crates/") && source.path.contains("/src/");
        let is_test = source.path.contains("/tests");
        if !is_library || is_test || PROGRAMS.iter().any(|program| source.path.starts_with(program))
        {
            continue;
        }
        for (line, flag) in flags(source) {
            let message = format!("{flag:?} is a name of the command line: use forebay_options");
            findings.push(Finding::fail(&source.path, line, message));
        }
    }
}

/// Returns the flags in literals outside of tests, with their lines.
fn flags(source: &RustSource) -> Vec<(usize, String)> {
    let code = without_tests(&source.code);
    let mut found = Vec::new();
    for (at, _) in source.text.match_indices("--") {
        // A literal has blanks in both other views. Tests have blanks in this view of the code, too.
        let is = |view: &str| view.as_bytes()[at..at + 2].iter().any(|byte| *byte != b' ');
        if is(&source.code) || is(&source.comments) || is_in_tests(source, &code, at) {
            continue;
        }
        let before = source.text[..at].chars().next_back();
        let flag: String = source.text[at + 2..]
            .chars()
            .take_while(|c| c.is_ascii_lowercase() || *c == '-')
            .collect();
        let is_alone = before.is_none_or(|c| !c.is_alphanumeric() && !"-_(".contains(c));
        if is_alone && flag.len() > 1 && !flag.starts_with('-') {
            found.push((source.line_of(at), format!("--{flag}")));
        }
    }
    found
}

/// Returns true if a place is in code of tests: its line has code that the view without tests lacks, or follows such a line.
fn is_in_tests(source: &RustSource, code: &str, at: usize) -> bool {
    let lines = |text: &str| text[..at].rfind(|c: char| !c.is_whitespace());
    lines(&source.code) != lines(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_in_messages_are_found() {
        let text = "//! --ram\nfn a() { b(\"give --ram or --kv-ram, a--b, var(--grid), ---- or -- x\"); }\n\
                    #[cfg(test)]\nmod tests {\n    fn c() { d(\"--vram\"); }\n}\n";
        let found = flags(&RustSource::new("crates/forebay-engine/src/a.rs", text));
        assert_eq!(found, [(2, "--ram".to_owned()), (2, "--kv-ram".to_owned())]);
    }
}
