//! Names of limits end in `_MAX` and `_MIN`, or `_max` and `_min`: one pair of words in one place, so that a reader finds
//! every limit with one search.

use super::Finding;
use super::files::Repository;

/// Endings of the files that the rule holds for. Sources of CUDA kernels are left out: every edit makes their compiled
/// modules stale, and a name is not worth the new archive.
const SOURCES: [&str; 9] = [".rs", ".c", ".h", ".cpp", ".py", ".pyi", ".js", ".mjs", ".sh"];

/// Names that are no limits: a cache policy, and a constant of the standard library.
const OTHER_NAMES: [&str; 2] = ["LEAST_STALE", "MIN_POSITIVE"];

pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    for source in repository.rust_sources() {
        check_lines(&source.path, &source.code, findings);
    }
    for file in repository.files() {
        let has_names = SOURCES.iter().any(|end| file.path.ends_with(end));
        if has_names && !file.path.ends_with(".rs") && !file.path.starts_with("fixtures/") {
            check_lines(&file.path, file.text.as_deref().unwrap_or_default(), findings);
        }
    }
}

fn check_lines(path: &str, text: &str, findings: &mut Vec<Finding>) {
    for (index, line) in text.lines().enumerate() {
        for name in line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            if let Some(message) = complaint(name) {
                findings.push(Finding::fail(path, index + 1, message));
            }
        }
    }
}

/// Returns what is wrong with a name, or `None`.
fn complaint(name: &str) -> Option<String> {
    let is_constant = name.chars().any(|c| c.is_ascii_uppercase())
        && !name.chars().any(|c| c.is_ascii_lowercase());
    let parts: Vec<&str> = name.split('_').collect();
    let (first, last) = (*parts.first()?, *parts.last()?);
    if OTHER_NAMES.contains(&name) {
        return None;
    }
    if is_constant {
        let has_old_word = [first, last].iter().any(|part| ["MOST", "LEAST"].contains(part));
        let begins_with_limit = ["MAX", "MIN"].contains(&first) && parts.len() > 1;
        return (has_old_word || begins_with_limit)
            .then(|| format!("the name {name}: limits end in _MAX or _MIN"));
    }
    // `at_most` and `at_least` are phrases, not limits.
    let is_phrase = parts.len() > 1 && parts[parts.len() - 2] == "at";
    let has_old_word = parts.len() > 1 && ["most", "least"].contains(&last);
    (has_old_word && !is_phrase).then(|| format!("the name {name}: limits end in _max or _min"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(path: &str, text: &str) -> Vec<usize> {
        let mut findings = Vec::new();
        check(&Repository::from_texts(&[(path, text)]), &mut findings);
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn limits_with_other_words_or_in_another_order_fail() {
        let wrong = "const BYTES_MOST: u64 = 1;\nconst LEAST_ROWS: u8 = 2;\nconst MOST: u8 = 3;\n\
                     const MAX_BITS: u8 = 4;\nlet waiting_most = 5;\nfn tokens_least() {}\n";
        assert_eq!(lines("crates/a/src/lib.rs", wrong), [1, 2, 3, 4, 5, 6]);
        for path in ["python/a.py", "crates/a/page/b.js", "crates/a/b.cpp", "bench/c.sh"] {
            assert_eq!(lines(path, "ROWS = 1\nGROWTH_MOST = 2\n"), [2], "{path}");
        }
    }

    #[test]
    fn the_right_order_and_other_names_pass() {
        let right = "const BYTES_MAX: u64 = 1; const ROWS_MIN: u8 = 2; const MOSTLY: f64 = 0.9;\n\
                     let waiting_max = at_most(at_least(f64::MIN_POSITIVE)); most_frequent(most);\n\
                     fn a_test_of_three_at_most() { PolicyKind::LEAST_STALE; usize::MAX.min(MAX); }\n\
                     // BYTES_MOST in a comment, \"and in a text: waiting_most\"\n\
                     let text = \"BYTES_MOST\";\n";
        assert!(lines("crates/a/src/lib.rs", right).is_empty());
        assert!(lines("docs/a.md", "BYTES_MOST").is_empty());
        assert!(lines("fixtures/a.py", "BYTES_MOST = 1").is_empty());
    }
}
