//! Options and commands of llama.cpp, Ollama and vLLM. One that means the same is translated; every other one is
//! refused with a sentence that says what there is instead.
//!
//! clap would misread some of them: `-ngl 99` as `-n gl`, and `-hf MODEL` as `-h`.

mod table;

use std::ffi::OsString;

use clap::Command;

use table::{COMMANDS, Meaning, OPTIONS, Row, VALUES};

/// Returns the sentence about a command of another program.
pub fn command(word: &str) -> Option<&'static str> {
    COMMANDS.iter().find(|(words, _)| words.contains(&word)).map(|(_, sentence)| *sentence)
}

/// Translates the arguments of the program, of which the first is its name.
///
/// # Errors
/// Returns a sentence for an option that has no equal here.
pub fn translate(known: &Command, arguments: Vec<OsString>) -> Result<Vec<OsString>, String> {
    let Some(first) = arguments.get(1).and_then(|word| word.to_str()) else {
        return Ok(arguments);
    };
    if let Some(command) = known.find_subcommand(first) {
        return Translation::new(command).all(&arguments, 2);
    }
    // llama-cli and llama-server have no commands.
    if let Some(row) = first.starts_with('-').then(|| row(split(first).0)).flatten()
        && let Some(run) = known.find_subcommand("run")
        && !is_own(known, split(first).0)
    {
        let name = split(first).0;
        return match row.meaning {
            Meaning::Model => {
                let mut with_command = arguments;
                with_command.insert(1, "run".into());
                Translation::new(run).all(&with_command, 2)
            }
            Meaning::Instead(sentence) => Err(format!("{name}: {sentence}")),
            _ => Err(format!(
                "{name} needs a command before it, as in: forebay run MODEL {name} ..."
            )),
        };
    }
    Ok(arguments)
}

/// Returns the row of an option of another program.
fn row(name: &str) -> Option<&'static Row> {
    OPTIONS.iter().find(|row| row.names.contains(&name))
}

/// Splits `--name=value`.
fn split(word: &str) -> (&str, Option<&str>) {
    match word.split_once('=') {
        Some((name, value)) if name.starts_with('-') => (name, Some(value)),
        _ => (word, None),
    }
}

/// Returns true if this is exactly an option of the command itself.
fn is_own(command: &Command, name: &str) -> bool {
    own(command, name).is_some()
}

fn own<'a>(command: &'a Command, name: &str) -> Option<&'a clap::Arg> {
    let short = name.strip_prefix('-').and_then(|rest| {
        let mut letters = rest.chars();
        letters.next().filter(|_| letters.next().is_none())
    });
    let long = name.strip_prefix("--");
    command.get_arguments().find(|argument| {
        (long.is_some() && argument.get_long() == long)
            || (short.is_some() && argument.get_short() == short)
    })
}

/// The translation of one command line.
struct Translation<'a> {
    command: &'a Command,
    /// Models, which are positional arguments here.
    models: Vec<OsString>,
    rest: Vec<OsString>,
    /// Types of keys and of values, which llama.cpp sets apart.
    cache_types: [Option<String>; 2],
}

impl<'a> Translation<'a> {
    fn new(command: &'a Command) -> Translation<'a> {
        Translation { command, models: Vec::new(), rest: Vec::new(), cache_types: [None, None] }
    }

    /// Translates the arguments from `start` on.
    fn all(mut self, arguments: &[OsString], start: usize) -> Result<Vec<OsString>, String> {
        let mut words = arguments[start..].iter();
        while let Some(word) = words.next() {
            let text = word.to_str().unwrap_or_default();
            if text == "--" {
                self.rest.push(word.clone());
                self.rest.extend(words.cloned());
                break;
            }
            let (name, attached) = split(text);
            if let Some(argument) = own(self.command, name) {
                let takes_value = argument.get_action().takes_values() && attached.is_none();
                let value = if takes_value { words.next() } else { None };
                self.own(name, word, attached, value);
                continue;
            }
            let found = row(name).filter(|row| row.is_for(self.command));
            let Some(row) = found.filter(|_| text.starts_with('-')) else {
                self.rest.push(word.clone());
                continue;
            };
            let value = match (row.has_value(), attached) {
                (_, Some(value)) => Some(OsString::from(value)),
                (Arity::One, None) => {
                    Some(words.next().cloned().ok_or_else(|| format!("{name} needs a value"))?)
                }
                (Arity::Optional, None) => {
                    let next = words.clone().next().and_then(|next| next.to_str());
                    let is_value = next.is_some_and(|next| row.optional().contains(&next));
                    is_value.then(|| words.next().cloned()).flatten()
                }
                (Arity::None, None) => None,
            };
            self.one(name, row, value)?;
        }
        self.finish(&arguments[..start])
    }

    /// Passes on an option of this program. Some values of it have the form of another program.
    fn own(
        &mut self,
        name: &str,
        word: &OsString,
        attached: Option<&str>,
        value: Option<&OsString>,
    ) {
        let text = attached.or_else(|| value.and_then(|value| value.to_str())).unwrap_or_default();
        let is_theirs = |(names, theirs, _): &&(&[&str], &str, &[&str])| {
            names.contains(&name) && *theirs == text
        };
        match VALUES.iter().find(is_theirs) {
            Some((.., words)) => self.rest.extend(words.iter().map(OsString::from)),
            None => self.rest.extend([Some(word), value].into_iter().flatten().cloned()),
        }
    }

    /// Translates one option.
    fn one(&mut self, name: &str, row: &Row, value: Option<OsString>) -> Result<(), String> {
        let text = value.as_ref().and_then(|value| value.to_str()).unwrap_or_default();
        let put = |to: &mut Vec<OsString>, option: &str, value: OsString| {
            to.extend([option.into(), value]);
        };
        match row.meaning {
            Meaning::Model => self.models.extend(value),
            Meaning::Same(option) => put(&mut self.rest, option, value.unwrap_or_default()),
            // Such a value is what happens without the option.
            Meaning::SameUnless(values, _) if values.contains(&text) => {}
            Meaning::SameUnless(_, option) => {
                put(&mut self.rest, option, value.unwrap_or_default());
            }
            Meaning::Flag(option) => self.rest.push(option.into()),
            Meaning::Values(meanings, sentence) => {
                let found = meanings.iter().find(|(value, _)| *value == text);
                let Some((_, words)) = found else {
                    return Err(format!("{name} {text}: {sentence}"));
                };
                self.rest.extend(words.iter().map(OsString::from));
            }
            Meaning::CacheType(which) => self.cache_types[which] = Some(text.to_owned()),
            Meaning::Always | Meaning::AlwaysWith(_) => {}
            Meaning::Instead(sentence) => return Err(format!("{name}: {sentence}")),
        }
        Ok(())
    }

    fn finish(mut self, before: &[OsString]) -> Result<Vec<OsString>, String> {
        match &self.cache_types {
            [None, None] => {}
            [Some(keys), Some(values)] if keys == values => {
                self.rest.extend(["--kv-type".into(), OsString::from(keys)]);
            }
            _ => {
                return Err(
                    "keys and values have one type here: give both the same, or --kv-type TYPE"
                        .into(),
                );
            }
        }
        let mut all = before.to_vec();
        // A model stands before a text that `run` takes as the prompt.
        all.extend(self.models);
        all.extend(self.rest);
        Ok(all)
    }
}

/// Number of values of an option.
enum Arity {
    None,
    One,
    /// A value follows if it is one of a few.
    Optional,
}

impl Row {
    /// Returns true if the command has what the row translates to.
    fn is_for(&self, command: &Command) -> bool {
        let has = |option: &str| is_own(command, option);
        match self.meaning {
            Meaning::Model => {
                command.get_positionals().any(|argument| argument.get_id() == "model")
            }
            Meaning::Same(option) | Meaning::SameUnless(_, option) | Meaning::Flag(option) => {
                has(option)
            }
            Meaning::Values(values, _) => {
                values.iter().filter_map(|(_, words)| words.first()).all(|option| has(option))
            }
            Meaning::CacheType(_) => has("--kv-type"),
            Meaning::Always | Meaning::AlwaysWith(_) | Meaning::Instead(_) => has("--device"),
        }
    }

    fn has_value(&self) -> Arity {
        match self.meaning {
            Meaning::Model
            | Meaning::Same(_)
            | Meaning::SameUnless(..)
            | Meaning::Values(..)
            | Meaning::CacheType(_) => Arity::One,
            Meaning::AlwaysWith(_) => Arity::Optional,
            Meaning::Flag(_) | Meaning::Always | Meaning::Instead(_) => Arity::None,
        }
    }

    fn optional(&self) -> &'static [&'static str] {
        match self.meaning {
            Meaning::AlwaysWith(values) => values,
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests;
