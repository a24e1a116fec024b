//! Checks documentation for commands, flags and files that do not exist.

use std::collections::BTreeSet;

use super::Finding;
use super::command_line::CommandLine;
use super::files::{Repository, folder};
use super::unused::normalise;

/// Flags of cargo that pages name without the command.
const FLAGS_OF_CARGO: [&str; 1] = ["--no-default-features"];

/// A piece of a page that is meant literally: a span in backticks or a line of a code block.
struct Literal<'a> {
    line: usize,
    text: &'a str,
}

/// Table of the options of other programs that forebay accepts or answers. Pages may name them.
const FOREIGN_FLAGS: &str = "crates/forebay/src/args/foreign/table.rs";

/// Returns the options in the table of other programs' options.
fn foreign_flags(repository: &Repository) -> BTreeSet<&str> {
    let table = repository.files().iter().find(|file| file.path == FOREIGN_FLAGS);
    let text = table.and_then(|file| file.text.as_deref()).unwrap_or_default();
    let is_flag = |word: &&str| word.starts_with("--") && !word.contains(' ');
    text.split('"').filter(is_flag).collect()
}

pub fn check(repository: &Repository, command_line: &CommandLine, findings: &mut Vec<Finding>) {
    let foreign = foreign_flags(repository);
    for file in repository.files() {
        if !file.path.ends_with(".md") || file.path.starts_with("bench/results/") {
            continue;
        }
        let text = file.text.as_deref().unwrap_or_default();
        for literal in literals(text) {
            let mut fail =
                |message| findings.push(Finding::fail(&file.path, literal.line, message));
            check_command(literal.text, command_line, &foreign, &mut fail);
            check_path(literal.text, &file.path, repository, &mut fail);
        }
        for (line, target) in links(text) {
            let target = target.split('#').next().unwrap_or_default();
            if !target.is_empty()
                && !target.contains("://")
                && !resolves(target, &file.path, repository)
            {
                findings.push(Finding::fail(
                    &file.path,
                    line,
                    format!("the link {target} leads nowhere"),
                ));
            }
        }
    }
}

fn literals(page: &str) -> Vec<Literal<'_>> {
    let mut found = Vec::new();
    let mut in_block = false;
    let mut is_shell = false;
    for (index, text) in page.lines().enumerate() {
        let line = index + 1;
        if let Some(language) = text.trim_start().strip_prefix("```") {
            in_block = !in_block;
            is_shell =
                in_block && matches!(language.trim(), "" | "sh" | "bash" | "console" | "shell");
        } else if in_block {
            // Program output and other languages contain words that are not commands of this
            // project.
            if is_shell {
                let text = text.trim().trim_start_matches("$ ");
                let text = text.split(" #").next().unwrap_or_default();
                found.push(Literal { line, text });
            }
        } else {
            found.extend(text.split('`').skip(1).step_by(2).map(|text| Literal { line, text }));
        }
    }
    found
}

fn links(page: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (index, line) in page.lines().enumerate() {
        for (at, _) in line.match_indices("](") {
            let target = line[at + 2..].split(')').next().unwrap_or_default();
            found.push((index + 1, target.trim()));
        }
    }
    found
}

fn check_command(
    text: &str,
    command_line: &CommandLine,
    foreign: &BTreeSet<&str>,
    fail: &mut dyn FnMut(String),
) {
    for segment in text.split(['|', ';']).flat_map(|part| part.split("&&")) {
        let mut words: Vec<&str> = segment.split_whitespace().collect();
        // Variables may be set before a command.
        while words.first().is_some_and(|word| word.contains('=') && !word.starts_with('-')) {
            words.remove(0);
        }
        match words.as_slice() {
            ["cargo", "xtask", name, ..] if !crate::COMMANDS.contains(name) => {
                fail(format!("`cargo xtask {name}` does not exist"));
            }
            ["cargo", "run", rest @ ..] => {
                if rest.contains(&"xtask") {
                    continue;
                }
                if let Some(split) = rest.iter().position(|word| *word == "--") {
                    check_invocation(&rest[split + 1..], command_line, fail);
                }
            }
            [program, rest @ ..] if program.rsplit('/').next() == Some("forebay") => {
                check_invocation(rest, command_line, fail);
            }
            [flag, ..] if flag.starts_with("--") && flag.len() > 2 => {
                let flag = flag.split('=').next().unwrap_or(flag);
                let is_known = command_line.has_flag("", flag) || foreign.contains(flag);
                if !is_known && !FLAGS_OF_CARGO.contains(&flag) {
                    fail(format!("no command takes {flag}"));
                }
            }
            _ => {}
        }
    }
}

fn check_invocation(words: &[&str], command_line: &CommandLine, fail: &mut dyn FnMut(String)) {
    let Some((command, arguments)) = words.split_first() else { return };
    if !command.starts_with(|c: char| c.is_ascii_lowercase()) {
        // This is `forebay --version`, or a placeholder such as `forebay COMMAND`.
        if command.starts_with("--") && !command_line.has_flag("", command) {
            fail(format!("forebay takes no {command}"));
        }
        return;
    }
    if !command_line.has_command(command) {
        fail(format!("`forebay {command}` does not exist"));
        return;
    }
    let mut quoted = false;
    for word in arguments {
        let is_flag = !quoted && word.starts_with('-') && word.len() > 1;
        quoted ^= word.matches(['"', '\'']).count() % 2 == 1;
        let flag = word.split('=').next().unwrap_or(word).trim_end_matches(']');
        let is_number = flag[1.min(flag.len())..].starts_with(|c: char| c.is_ascii_digit());
        if is_flag && !is_number && !command_line.has_flag(command, flag) {
            fail(format!("`forebay {command}` takes no {flag}"));
        }
    }
}

/// Checks that spans that can only mean a file of this repository name an existing one.
fn check_path(text: &str, page: &str, repository: &Repository, fail: &mut dyn FnMut(String)) {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    for word in text.split_whitespace() {
        let word = word.trim_end_matches([',', ':']);
        if word.is_empty()
            || !word.chars().all(plain)
            || word.starts_with(['-', '/', '.']) && !word.starts_with(".ci/")
        {
            continue;
        }
        let first = word.split('/').next().unwrap_or_default();
        let is_path = word.contains('/') && first != "target" && repository.exists(first);
        let is_source =
            [".rs", ".sh"].iter().any(|end| word.ends_with(end) && word.len() > end.len());
        let known =
            resolves(word, page, repository) || !word.contains('/') && repository.has_name(word);
        if (is_path || is_source) && !known {
            fail(format!("{word} does not exist"));
        }
    }
}

/// Returns true if a path exists relative to the page, the root or a crate.
fn resolves(target: &str, page: &str, repository: &Repository) -> bool {
    let from = |base: &str| normalise(&format!("{base}/{target}"));
    repository.exists(&from(""))
        || repository.exists(&from(folder(page)))
        || target.starts_with("src/") && repository.has_end(&from(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_page(page: &str) -> Vec<String> {
        let repository = Repository::from_texts(&[
            ("README.md", page),
            ("docs/more.md", ""),
            ("crates/a/src/lib.rs", ""),
            ("bench/compare.sh", ""),
        ]);
        let command_line = CommandLine::from_help(
            "  -V, --version\n",
            &[("run", "  --prompt <TEXT>\n  --ram <SIZE>\n"), ("bench", "  --repeat <N>\n")],
        );
        let mut findings = Vec::new();
        check(&repository, &command_line, &mut findings);
        findings.into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn commands_and_flags_must_exist() {
        assert!(
            check_page("`forebay run --prompt \"a -- b --x c\" --ram 2GiB` and `--repeat 3`")
                .is_empty()
        );
        assert_eq!(check_page("`forebay walk`").len(), 1);
        assert_eq!(check_page("`forebay run --repeat 3`").len(), 1);
        assert_eq!(check_page("`--speed`").len(), 1);
        assert!(check_page("`--no-default-features`").is_empty());
        assert_eq!(check_page("```sh\n$ cargo run --release -- bench --fast\n```").len(), 1);
        assert!(
            check_page("```sh\nX=1 cargo run --release -- bench M --repeat=3 # --fast\n```")
                .is_empty()
        );
        assert!(check_page("```text\nforebay walk\n```").is_empty());
        assert_eq!(check_page("`cargo xtask dance`").len(), 1);
        assert!(check_page("`cargo xtask tidy` and `cargo test --release --workspace`").is_empty());
    }

    #[test]
    fn files_must_exist() {
        assert!(
            check_page(
                "`crates/a`, `crates/a/src/lib.rs`, `lib.rs`, `docs/` and [more](docs/more.md#x)"
            )
            .is_empty()
        );
        assert_eq!(check_page("`crates/b/src/lib.rs`").len(), 1);
        assert_eq!(check_page("`lost.rs`").len(), 1);
        assert!(check_page("`src/lib.rs`").is_empty());
        assert_eq!(check_page("`src/lost.rs`").len(), 1);
        assert_eq!(check_page("[more](docs/less.md)").len(), 1);
        assert!(
            check_page("`config.json`, `a/b`, `target/release/forebay`, [x](https://example.org)")
                .is_empty()
        );
        assert_eq!(check_page("```sh\nbench/lost.sh M\n```").len(), 1);
    }
}
