//! The record of the names that other programs know.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail, ensure};

/// Names, each with true if models of that name have experts.
pub type Names = BTreeMap<String, bool>;

const HEADER: &str = "# Architecture names that other programs know, written by `cargo xtask coverage --fetch`. The names are \
                      `general.architecture` of GGUF\n# files and `model_type` of Hugging Face folders.\n";

/// The names in the newest packages of a day.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Day on which the packages were fetched, as in 2026-01-31.
    pub date: String,
    /// Packages and their versions.
    pub packages: BTreeMap<String, String>,
    pub gguf: Names,
    pub model_types: Names,
}

impl Record {
    /// Returns the text of the record's file.
    pub fn to_text(&self) -> String {
        let mut text = format!("{HEADER}date {}\n", self.date);
        for (package, version) in &self.packages {
            let _ = writeln!(text, "package {package} {version}");
        }
        for (kind, names) in [("gguf", &self.gguf), ("model_type", &self.model_types)] {
            for (name, experts) in names {
                let _ = writeln!(text, "{kind} {name}{}", if *experts { " experts" } else { "" });
            }
        }
        text
    }

    /// Parses the text of the record's file.
    pub fn parse(text: &str) -> Result<Self> {
        let mut record = Record::default();
        let lines = text.lines().zip(1..).filter(|(line, _)| !line.starts_with('#'));
        for (line, number) in lines {
            let (names, name, experts) = match line.split(' ').collect::<Vec<_>>()[..] {
                ["date", date] => {
                    record.date = date.to_owned();
                    continue;
                }
                ["package", package, version] => {
                    record.packages.insert(package.to_owned(), version.to_owned());
                    continue;
                }
                ["gguf", name] => (&mut record.gguf, name, false),
                ["gguf", name, "experts"] => (&mut record.gguf, name, true),
                ["model_type", name] => (&mut record.model_types, name, false),
                ["model_type", name, "experts"] => (&mut record.model_types, name, true),
                _ => bail!("{}:{number}: '{line}' is no line of a record", super::RECORD),
            };
            let earlier = names.insert(name.to_owned(), experts);
            ensure!(earlier.is_none(), "{}:{number}: {name} comes twice", super::RECORD);
        }
        ensure!(!record.date.is_empty(), "{}: has no date", super::RECORD);
        Ok(record)
    }

    /// Returns the version of a package.
    pub fn version(&self, package: &str) -> Result<&str> {
        let version = self.packages.get(package).map(String::as_str);
        version.with_context(|| format!("{}: has no version of {package}", super::RECORD))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let names = |name: &str| Names::from([(name.to_owned(), true), ("b".to_owned(), false)]);
        let record = Record {
            date: "2026-01-31".to_owned(),
            packages: BTreeMap::from([("gguf".to_owned(), "0.1".to_owned())]),
            gguf: names("a-1"),
            model_types: names("a_1"),
        };
        let text = record.to_text();
        assert_eq!(Record::parse(&text).unwrap(), record);
        assert_eq!(record.version("gguf").unwrap(), "0.1");
        assert!(record.version("other").is_err());
        for wrong in ["", "date x\ngguf a b", "date x\ngguf a\ngguf a experts", "date x\n\n"] {
            assert!(Record::parse(wrong).is_err(), "{wrong}");
        }
    }
}
