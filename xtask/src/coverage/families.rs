//! The names that run here, as the model crate lists them.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use super::record::Names;
use crate::workspace::output;

/// The example of `forebay-model` that prints the names.
const PROGRAM: &str = "examples/architectures";

/// Names of families and of their files. A name has experts if a family with this name has experts.
#[derive(Debug, Default)]
pub struct Families {
    pub families: BTreeSet<String>,
    pub gguf: Names,
    pub model_types: Names,
}

impl Families {
    /// Asks the program among the `programs` of the workspace.
    pub fn ask(programs: &Path) -> Result<Self> {
        Self::parse(&output(&programs.join(PROGRAM), &[])?)
    }

    /// Parses what the program prints.
    pub fn parse(text: &str) -> Result<Self> {
        let mut all = Families::default();
        for line in text.lines() {
            let (names, name, experts) = match line.split(' ').collect::<Vec<_>>()[..] {
                ["family", name] => {
                    all.families.insert(name.to_owned());
                    continue;
                }
                ["gguf", name, experts] => (&mut all.gguf, name, experts),
                ["model_type", name, experts] => (&mut all.model_types, name, experts),
                _ => bail!("{PROGRAM}: '{line}' is no line of names"),
            };
            let experts = match experts {
                "experts" => true,
                "dense" => false,
                other => bail!("{PROGRAM}: '{other}' is neither 'experts' nor 'dense'"),
            };
            *names.entry(name.to_owned()).or_default() |= experts;
        }
        all.families.first().with_context(|| format!("{PROGRAM}: prints no families"))?;
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_two_families_has_experts_if_one_has() {
        let text = "family llama\ngguf llama dense\nmodel_type llama dense\nfamily mixtral\n\
                    gguf llama experts\nmodel_type mixtral experts\n";
        let all = Families::parse(text).unwrap();
        assert_eq!(all.families.len(), 2);
        assert_eq!(all.gguf, Names::from([("llama".to_owned(), true)]));
        assert!(!all.model_types["llama"]);
        assert!(all.model_types["mixtral"]);
        for wrong in ["", "gguf llama", "gguf llama some", "other llama dense"] {
            assert!(Families::parse(wrong).is_err(), "{wrong}");
        }
    }
}
