//! Limits the size of the pages that every user reads first.

use super::Finding;
use super::files::Repository;

const README: &str = "README.md";
const README_LINES: usize = 150;
const PARAGRAPH_LINES: usize = 5;
/// Length limit of a line, without which five lines could be of any length. Lines of tables are
/// exempt.
const LINE_CHARACTERS: usize = 120;
const ARCHITECTURE: &str = "ARCHITECTURE.md";
const ARCHITECTURE_WORDS: usize = 2000;

pub fn check(repository: &Repository, findings: &mut Vec<Finding>) {
    if let Some(text) = repository.text(README) {
        check_readme(text, findings);
    }
    if let Some(text) = repository.text(ARCHITECTURE) {
        let words = text.split_whitespace().count();
        if words > ARCHITECTURE_WORDS {
            let message = format!("{words} words; at most {ARCHITECTURE_WORDS}: see docs/design/");
            findings.push(Finding::fail(ARCHITECTURE, 0, message));
        }
    }
}

fn check_readme(text: &str, findings: &mut Vec<Finding>) {
    let lines = text.lines().count();
    if lines > README_LINES {
        let message = format!("{lines} lines; at most {README_LINES}");
        findings.push(Finding::fail(README, 0, message));
    }
    let mut paragraph = 0;
    let mut in_block = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let mut fail = |message| findings.push(Finding::fail(README, index + 1, message));
        in_block ^= line.starts_with("```");
        if in_block || line.starts_with(['|', '#', '`']) || line.is_empty() {
            paragraph = 0;
            continue;
        }
        // Every item of a list is a paragraph.
        paragraph = if line.starts_with("- ") { 1 } else { paragraph + 1 };
        if paragraph == PARAGRAPH_LINES + 1 {
            fail(format!("a paragraph of more than {PARAGRAPH_LINES} lines"));
        }
        if line.chars().count() > LINE_CHARACTERS {
            fail(format!("a line of more than {LINE_CHARACTERS} characters"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<usize> {
        let mut findings = Vec::new();
        check(&Repository::from_texts(&[(path, text)]), &mut findings);
        findings.into_iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn a_long_readme_fails() {
        assert!(findings(README, &"# a\n".repeat(150)).is_empty());
        assert_eq!(findings(README, &"# a\n".repeat(151)), [0]);
    }

    #[test]
    fn a_long_paragraph_of_the_readme_fails() {
        assert!(findings(README, &"word\n".repeat(5)).is_empty());
        assert_eq!(findings(README, &"word\n".repeat(7)), [6]);
        assert!(findings(README, &"- word\nword\n".repeat(20)).is_empty());
        assert!(findings(README, &format!("```sh\n{}```\n", "ls\n".repeat(20))).is_empty());
        assert!(findings(README, &"| a | b |\n".repeat(20)).is_empty());
    }

    #[test]
    fn a_long_line_of_the_readme_fails() {
        assert_eq!(findings(README, &"word ".repeat(30)), [1]);
        assert!(findings(README, &format!("| {} |", "word ".repeat(30))).is_empty());
    }

    #[test]
    fn a_long_architecture_page_fails() {
        assert!(findings(ARCHITECTURE, &"word ".repeat(2000)).is_empty());
        assert_eq!(findings(ARCHITECTURE, &"word ".repeat(2001)), [0]);
    }
}
