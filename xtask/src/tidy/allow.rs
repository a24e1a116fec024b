//! The list of exceptions, `xtask/tidy-allow.txt`: one per line, `RULE PLACE REASON`.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use super::Finding;
use super::files::Repository;

const PATH: &str = "xtask/tidy-allow.txt";

struct Entry {
    line: usize,
    used: bool,
}

/// Rules and the places where they may be broken.
#[derive(Default)]
pub struct AllowList {
    entries: BTreeMap<(String, String), Entry>,
}

impl AllowList {
    pub fn read(repository: &Repository) -> Result<Self> {
        Self::parse(repository.text(PATH).unwrap_or_default())
    }

    fn parse(text: &str) -> Result<Self> {
        let mut entries = BTreeMap::new();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.splitn(3, char::is_whitespace);
            let (Some(rule), Some(place), Some(_reason)) =
                (words.next(), words.next(), words.next())
            else {
                bail!("{PATH}:{}: expected `RULE PLACE REASON`, found `{line}`", index + 1);
            };
            let entry = Entry { line: index + 1, used: false };
            entries.insert((rule.to_owned(), place.to_owned()), entry);
        }
        Ok(Self { entries })
    }

    /// Returns true if `rule` may be broken at `place`, and records that the entry was needed.
    pub fn permits(&mut self, rule: &str, place: &str) -> bool {
        match self.entries.get_mut(&(rule.to_owned(), place.to_owned())) {
            Some(entry) => {
                entry.used = true;
                true
            }
            None => false,
        }
    }

    /// Reports every exception that is no longer needed, so that the list can only shrink.
    pub fn check_all_used(&self, findings: &mut Vec<Finding>) {
        for ((rule, place), entry) in &self.entries {
            if !entry.used {
                let message = format!("the exception `{rule} {place}` is not needed any more");
                findings.push(Finding::fail(PATH, entry.line, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_needs_a_reason_and_a_use() {
        assert!(AllowList::parse("function-length a.rs:f").is_err());
        let mut allow = AllowList::parse("# why\nfunction-length a.rs:f a table\n").unwrap();
        let mut findings = Vec::new();
        allow.check_all_used(&mut findings);
        assert_eq!(findings.len(), 1);
        assert!(allow.permits("function-length", "a.rs:f"));
        assert!(!allow.permits("function-length", "a.rs:g"));
        findings.clear();
        allow.check_all_used(&mut findings);
        assert!(findings.is_empty());
    }
}
