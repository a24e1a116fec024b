//! Limits the size of the pages that every user reads first, and of the cells of tables on all pages.

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
/// Folder whose pages have tables for users.
const DOCS: &str = "docs/";
/// Length limit of a table's cell. What is longer is read as sentences after the table.
const CELL_WORDS: usize = 45;

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
    for file in repository.files() {
        let is_page = file.path.starts_with(DOCS) || !file.path.contains('/');
        if is_page && file.path.ends_with(".md") {
            check_cells(&file.path, file.text.as_deref().unwrap_or_default(), findings);
        }
    }
}

fn check_cells(path: &str, text: &str, findings: &mut Vec<Finding>) {
    let mut in_block = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        in_block ^= line.starts_with("```");
        if in_block || !line.starts_with('|') {
            continue;
        }
        // `\|` is a bar inside a cell.
        let line = line.replace("\\|", " ");
        let words = line.split('|').map(|cell| cell.split_whitespace().count()).max();
        if let Some(words) = words.filter(|words| *words > CELL_WORDS) {
            let message = format!(
                "a cell of {words} words; at most {CELL_WORDS}: write sentences after the table"
            );
            findings.push(Finding::fail(path, index + 1, message));
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

    #[test]
    fn a_long_cell_fails() {
        let row =
            |words: usize| format!("| a | b |\n| --- | --- |\n| a | {}|\n", "w ".repeat(words));
        for path in [README, "docs/a.md", "docs/design/b.md"] {
            assert!(findings(path, &row(CELL_WORDS)).is_empty(), "{path}");
            assert_eq!(findings(path, &row(CELL_WORDS + 1)), [3], "{path}");
        }
        assert!(findings("bench/results/a.md", &row(100)).is_empty());
        assert!(findings("docs/a.md", &format!("```sh\n{}```\n", row(100))).is_empty());
        assert!(findings("docs/a.md", &"w ".repeat(100)).is_empty());
        // A bar inside a cell does not end it.
        let bars = format!("| {}\\| {}|\n", "w ".repeat(30), "w ".repeat(30));
        assert_eq!(findings("docs/a.md", &bars), [1]);
    }
}
