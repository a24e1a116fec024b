//! Commands and flags that exist, read from the help of the binary.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;

use crate::workspace::output;

/// Flags by subcommand. The empty name stands for `forebay` itself.
pub struct CommandLine {
    flags: BTreeMap<String, BTreeSet<String>>,
}

impl CommandLine {
    /// Reads the `--help` of `forebay`, subcommand by subcommand.
    pub fn ask_the_binary(program: &Path) -> Result<Self> {
        let top = output(program, &["--help"])?;
        let mut flags = BTreeMap::from([(String::new(), flags_of(&top))]);
        for command in commands_of(&top) {
            let text = output(program, &[&command, "--help"])?;
            flags.insert(command, flags_of(&text));
        }
        Ok(Self { flags })
    }

    #[cfg(test)]
    pub fn from_help(top: &str, commands: &[(&str, &str)]) -> Self {
        let mut flags = BTreeMap::from([(String::new(), flags_of(top))]);
        flags.extend(commands.iter().map(|(name, text)| ((*name).to_owned(), flags_of(text))));
        Self { flags }
    }

    pub fn commands(&self) -> Vec<&str> {
        self.flags.keys().map(String::as_str).filter(|name| !name.is_empty()).collect()
    }

    pub fn has_command(&self, command: &str) -> bool {
        !command.is_empty() && self.flags.contains_key(command)
    }

    /// Returns true if `command` accepts `flag`. For the empty command, returns true if any command
    /// accepts it.
    pub fn has_flag(&self, command: &str, flag: &str) -> bool {
        if command.is_empty() {
            return self.flags.values().any(|flags| flags.contains(flag));
        }
        [command, ""]
            .iter()
            .filter_map(|name| self.flags.get(*name))
            .any(|flags| flags.contains(flag))
    }
}

/// Returns the names listed under `Commands:`.
fn commands_of(help: &str) -> Vec<String> {
    help.lines()
        .skip_while(|line| line.trim() != "Commands:")
        .skip(1)
        .take_while(|line| !line.trim().is_empty())
        // More indented lines continue a description.
        .filter(|line| line.len() - line.trim_start().len() <= 4)
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// Returns the long and short flags that begin a line.
fn flags_of(help: &str) -> BTreeSet<String> {
    let mut flags = BTreeSet::from(["--help".to_owned(), "-h".to_owned()]);
    for line in help.lines() {
        let line = line.trim_start();
        if !line.starts_with('-') {
            continue;
        }
        for word in line
            .split([' ', ',', '=', '[', '<'])
            .take_while(|word| word.is_empty() || word.starts_with('-'))
        {
            let word = word.trim_end_matches("...");
            if word.len() > 1 {
                flags.insert(word.to_owned());
            }
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOP: &str = "Usage: forebay <COMMAND>\n\nCommands:\n  run    Write\n         text\n  bench  Measure\n  help   Print\n\nOptions:\n  -h, --help     Print help\n  -V, --version  Print version\n";

    #[test]
    fn help_is_read() {
        assert_eq!(commands_of(TOP), vec!["run", "bench"]);
        let line = CommandLine::from_help(
            TOP,
            &[("run", "Options:\n  -p, --prompt <TEXT>  The --raw text\n      --ram=<SIZE>\n")],
        );
        assert!(line.has_command("run") && !line.has_command("walk"));
        assert!(line.has_flag("run", "--prompt") && line.has_flag("run", "-p"));
        assert!(line.has_flag("run", "--ram") && line.has_flag("run", "--version"));
        assert!(!line.has_flag("run", "--raw"));
        assert!(line.has_flag("", "--prompt") && !line.has_flag("", "--raw"));
    }
}
