//! Names of models.

use std::fmt;
use std::str::FromStr;

use crate::Error;

/// Longest name. File names may have 255 bytes, and `/` and `:` take three bytes in them.
const LONGEST: usize = 200;
/// Hosts that may stand in front of a name.
const HOSTS: [&str; 4] = ["https://huggingface.co/", "huggingface.co/", "https://hf.co/", "hf.co/"];

/// A name of a model: `OWNER/REPO`, `OWNER/REPO:QUANT`, or a name without an owner that a copy was given.
///
/// `hf.co/` and `huggingface.co/` in front are dropped, and so is the tag `latest`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name {
    repository: String,
    quant: Option<String>,
}

impl Name {
    /// Returns the part before the colon.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns the part after the colon.
    pub fn quant(&self) -> Option<&str> {
        self.quant.as_deref()
    }

    /// Returns true if the name has an owner, so that it can be pulled.
    pub fn has_owner(&self) -> bool {
        self.repository.contains('/')
    }

    /// Returns the name with another quant.
    pub(crate) fn with_quant(&self, quant: Option<&str>) -> Result<Name, Error> {
        match quant {
            None => Ok(Name { quant: None, ..self.clone() }),
            Some(quant) => format!("{}:{quant}", self.repository).parse(),
        }
    }

    /// Returns the name of this name's manifest. `%` does not occur in names.
    pub(crate) fn file_name(&self) -> String {
        format!("{}.json", self.to_string().replace('/', "%2F").replace(':', "%3A"))
    }

    /// Returns the name that a manifest belongs to.
    pub(crate) fn of_file(file_name: &str) -> Option<Name> {
        let text = file_name.strip_suffix(".json")?.replace("%2F", "/").replace("%3A", ":");
        let name: Name = text.parse().ok()?;
        (name.file_name() == file_name).then_some(name)
    }

    /// Returns true if `self`, as a user wrote it, can stand for `other`. Upper and lower case are the same, and a name
    /// without quant stands for every quant.
    pub(crate) fn stands_for(&self, other: &Name) -> bool {
        let same_quant = || match (&self.quant, &other.quant) {
            (None, _) => true,
            (Some(one), Some(two)) => one.eq_ignore_ascii_case(two),
            (Some(_), None) => false,
        };
        self.repository.eq_ignore_ascii_case(&other.repository) && same_quant()
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Name, Error> {
        let bad = || Error::BadName { name: text.chars().take(LONGEST).collect() };
        let rest = HOSTS.iter().find_map(|host| text.strip_prefix(host)).unwrap_or(text);
        let (repository, quant) = match rest.split_once(':') {
            Some((repository, quant)) => (repository, Some(quant)),
            None => (rest, None),
        };
        let parts: Vec<&str> = repository.split('/').collect();
        let is_sound = parts.len() <= 2 && parts.iter().chain(&quant).all(|part| is_part(part));
        if !is_sound || rest.len() > LONGEST {
            return Err(bad());
        }
        let quant = quant.filter(|quant| *quant != "latest").map(str::to_owned);
        Ok(Name { repository: repository.to_owned(), quant })
    }
}

/// Returns true if a part of a name consists of letters, digits and `-_.`, and cannot lead out of a folder.
fn is_part(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    part.starts_with(|c: char| c.is_ascii_alphanumeric())
        && part.chars().all(allowed)
        && !part.contains("..")
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.quant {
            Some(quant) => write!(f, "{}:{quant}", self.repository),
            None => f.write_str(&self.repository),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_all_forms() {
        for (text, shown) in [
            ("unsloth/Qwen3-0.6B-GGUF", "unsloth/Qwen3-0.6B-GGUF"),
            ("hf.co/unsloth/Qwen3-0.6B-GGUF:Q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0"),
            ("https://huggingface.co/a/b", "a/b"),
            ("a/b:latest", "a/b"),
            ("mine", "mine"),
        ] {
            let name: Name = text.parse().unwrap();
            assert_eq!(name.to_string(), shown);
            assert_eq!(Name::of_file(&name.file_name()), Some(name));
        }
    }

    #[test]
    fn what_could_be_a_path_is_no_name() {
        let long = "a".repeat(201);
        for text in [
            "", "/", "a/", "/a", "a/b/c", "../a", "a/..", "a/b:", "a/b:../c", "a b", "a\\b",
            "a/b:c:d", "a%2Fb", ".a/b", "a/b\0", "a/é", &long,
        ] {
            assert!(text.parse::<Name>().is_err(), "{text}");
        }
        assert_eq!(Name::of_file("a%2fb.json"), None);
    }

    #[test]
    fn a_name_without_quant_stands_for_every_quant() {
        let name = |text: &str| text.parse::<Name>().unwrap();
        assert!(name("A/b").stands_for(&name("a/B:Q8_0")));
        assert!(name("a/b:q8_0").stands_for(&name("a/b:Q8_0")));
        assert!(!name("a/b:Q8_0").stands_for(&name("a/b")));
        assert!(!name("a/c").stands_for(&name("a/b")));
    }
}
