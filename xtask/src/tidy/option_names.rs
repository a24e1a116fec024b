//! Libraries name no flags of the command line: their messages say which option is meant, and each program gives it a name.

use super::Finding;
use super::cycles::tests_of;
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
    let tests = tests_of(&source.code);
    let mut found = Vec::new();
    for (at, _) in source.text.match_indices("--") {
        // A literal has blanks in both other views.
        let is = |view: &str| view.as_bytes()[at..at + 2].iter().any(|byte| *byte != b' ');
        if is(&source.code) || is(&source.comments) || tests.iter().any(|test| test.contains(&at)) {
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
