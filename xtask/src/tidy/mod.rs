//! Project rules that no compiler checks. They scan plain text: a rule that needs a parser is too complicated to
//! remember.

mod allow;
mod command_line;
mod coverage;
mod cycles;
mod docs;
mod files;
mod layers;
mod lengths;
mod names;
mod option_names;
mod pages;
mod scan;
mod terms;
mod unsafe_code;
mod unused;
mod wording;
mod workflows;

use std::fmt;
use std::path::Path;

use anyhow::Result;

use allow::AllowList;
use command_line::CommandLine;
use files::Repository;

use crate::coverage::Families;
use crate::workspace;

/// Severity of a finding: whether it stops the build or is only reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Report,
    Fail,
}

/// One violation of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub level: Level,
    pub path: String,
    /// Line number from 1, or 0 for the whole file.
    pub line: usize,
    pub message: String,
}

impl Finding {
    fn fail(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { level: Level::Fail, path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Report => "note",
            Level::Fail => "FAIL",
        };
        write!(f, "{level} {}:{}: {}", self.path, self.line, self.message)
    }
}

/// Runs every rule over the repository at `root`, prints the findings, and returns true if none of them fails.
pub fn run(root: &Path) -> Result<bool> {
    let repository = Repository::open(root)?;
    let mut allow = AllowList::read(&repository)?;
    let mut findings = Vec::new();

    for source in repository.rust_sources() {
        lengths::check(source, &mut allow, &mut findings);
        unsafe_code::check(source, &mut findings);
        wording::check_rust(source, &mut findings);
    }
    wording::check_text(&repository, &mut findings);
    files::check_sizes(&repository, &mut findings);
    unused::check(&repository, &mut findings);
    layers::check(&repository, &mut findings);
    cycles::check(&repository, &mut findings);
    let programs = workspace::build(root)?;
    let command_line = CommandLine::ask_the_binary(&programs.join("forebay"))?;
    docs::check(&repository, &command_line, &mut findings);
    coverage::check(&repository, &Families::ask(&programs)?, &mut findings);
    pages::check(&repository, &mut findings);
    terms::check(&repository, &mut findings);
    names::check(&repository, &mut findings);
    option_names::check(&repository, &mut findings);
    workflows::check(&repository, &mut findings);
    allow.check_all_used(&mut findings);

    findings.sort_by(|a, b| {
        (a.level, &a.path, a.line, &a.message).cmp(&(b.level, &b.path, b.line, &b.message))
    });
    for finding in &findings {
        println!("{finding}");
    }
    let failed = findings.iter().filter(|finding| finding.level == Level::Fail).count();
    println!(
        "tidy: {} files, {} commands, {failed} failures, {} notes",
        repository.files().len(),
        command_line.commands().len(),
        findings.len() - failed
    );
    Ok(failed == 0)
}
