//! The configuration file: defaults of options.
//!
//! Keys are long options without the dashes. Those at the top hold for every command that has the option, those in a table
//! for the command of this name. The command line overrides environment variables, and these the file.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use clap::{Arg, ArgAction, Command};
use serde::Serialize;
use toml::{Table, Value};

/// Variable that names the file.
pub const VARIABLE: &str = "FOREBAY_CONFIG";
/// Largest file that is read, in bytes.
const BYTES_MAX: u64 = 1 << 20;
/// Options that every use must confirm.
const NEVER: [&str; 4] = ["force", "help", "version", "json"];

/// The file's settings.
#[derive(Debug, Default)]
pub struct Settings {
    pub path: Option<PathBuf>,
    pub set: Vec<Setting>,
}

/// A default that the file gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// The command, or nothing for an option of all commands.
    pub command: Option<String>,
    pub option: String,
    pub values: Vec<String>,
    #[serde(skip)]
    id: String,
}

static LOADED: OnceLock<Settings> = OnceLock::new();

/// Returns the settings in force.
pub fn loaded() -> &'static Settings {
    LOADED.get_or_init(Settings::default)
}

/// Returns the value of an option of all commands.
pub fn global(option: &str) -> Option<&'static str> {
    let set = loaded().set.iter().find(|of| of.command.is_none() && of.option == option)?;
    set.values.first().map(String::as_str)
}

/// Returns the path of the file, and true if the user named it: `FOREBAY_CONFIG`, else `forebay/config.toml` below
/// `XDG_CONFIG_HOME`, else below `~/.config`.
pub fn path() -> Option<(PathBuf, bool)> {
    let named = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(path) = named(VARIABLE) {
        return Some((path, true));
    }
    let base = named("XDG_CONFIG_HOME").filter(|path| path.is_absolute());
    let base = base.or_else(|| Some(named("HOME")?.join(".config")))?;
    Some((base.join("forebay/config.toml"), false))
}

/// Reads the file and makes its values the defaults of a command line.
///
/// # Errors
/// Returns a message with the path if the file cannot be read, or has a key or a value that no option has.
pub fn apply(command: Command) -> Result<Command, String> {
    let Some((path, is_named)) = path() else { return Ok(command) };
    let Some(text) = read(&path, is_named)? else { return Ok(command) };
    let at = |why: String| format!("{}: {why}", path.display());
    let table: Table = text.parse().map_err(|error| at(in_one_line(&error)))?;
    let set = settings(&command, &table).map_err(at)?;
    for setting in &set {
        check(&command, setting).map_err(at)?;
    }
    let command = set.iter().fold(command, with_default);
    // Only the first of several calls counts, as in tests.
    let _ = LOADED.set(Settings { path: Some(path), set });
    Ok(command)
}

fn read(path: &Path, is_named: bool) -> Result<Option<String>, String> {
    let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !is_named => return Ok(None),
        opened => {
            opened.map_err(|error| failed(&format!("the configuration cannot be read: {error}")))?
        }
    };
    let is_file = file.metadata().is_ok_and(|found| found.is_file());
    if !is_file {
        return Err(failed(&"the configuration is not a file"));
    }
    let mut bytes = Vec::new();
    let read = file.take(BYTES_MAX + 1).read_to_end(&mut bytes);
    read.map_err(|error| failed(&format!("the configuration cannot be read: {error}")))?;
    match String::from_utf8(bytes) {
        Ok(text) if text.len() as u64 <= BYTES_MAX => Ok(Some(text)),
        Ok(_) => Err(failed(&"the configuration is larger than 1 MiB")),
        Err(_) => Err(failed(&"the configuration is not UTF-8 text")),
    }
}

fn in_one_line(error: &toml::de::Error) -> String {
    error
        .to_string()
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns the settings of a table. Those of a command come after those of all commands.
fn settings(command: &Command, table: &Table) -> Result<Vec<Setting>, String> {
    let mut set = Vec::new();
    for (key, value) in table.iter().filter(|(_, value)| !value.is_table()) {
        let values = texts(key, value)?;
        let of_all = arguments(command).find(|arg| arg.get_long() == Some(key));
        if let Some(arg) = of_all {
            set.extend(setting(None, arg, &values)?);
            continue;
        }
        let commands = command.get_subcommands();
        let with_option = commands.filter_map(|of| Some((of, option(of, key)?)));
        let found: Vec<Setting> = with_option
            .map(|(of, arg)| setting(Some(of.get_name()), arg, &values))
            .filter_map(Result::transpose)
            .collect::<Result<_, _>>()?;
        if found.is_empty() && !command.get_subcommands().any(|of| option(of, key).is_some()) {
            let known = command.get_subcommands().flat_map(arguments);
            return Err(unknown(key, "", known.chain(arguments(command))));
        }
        set.extend(found);
    }
    for (name, value) in table {
        let Value::Table(options) = value else { continue };
        let Some(of) = command.get_subcommands().find(|of| of.get_name() == name) else {
            let names: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
            return Err(format!("[{name}] is no command; there are: {}", names.join(", ")));
        };
        for (key, value) in options {
            let Some(arg) = option(of, key) else {
                return Err(unknown(key, &format!(" in [{name}]"), arguments(of)));
            };
            set.extend(setting(Some(name), arg, &texts(key, value)?)?);
        }
    }
    Ok(set)
}

/// Returns the options of a command that a file may set.
fn arguments(command: &Command) -> impl Iterator<Item = &Arg> {
    command.get_arguments().filter(|arg| arg.get_long().is_some_and(|long| !NEVER.contains(&long)))
}

fn option<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    arguments(command).find(|arg| arg.get_long() == Some(key))
}

fn unknown<'a>(key: &str, place: &str, known: impl Iterator<Item = &'a Arg>) -> String {
    let known: BTreeSet<&str> = known.filter_map(Arg::get_long).collect();
    let known: Vec<&str> = known.into_iter().collect();
    format!("unknown key '{key}'{place}; there are: {}", known.join(", "))
}

/// Returns a value as the texts that the command line would have.
fn texts(key: &str, value: &Value) -> Result<Vec<String>, String> {
    Ok(match value {
        Value::String(text) => vec![text.clone()],
        Value::Integer(number) => vec![number.to_string()],
        Value::Float(number) => vec![number.to_string()],
        Value::Boolean(flag) => vec![flag.to_string()],
        Value::Array(items) => {
            items.iter().map(|item| texts(key, item)).collect::<Result<Vec<_>, _>>()?.concat()
        }
        Value::Datetime(_) | Value::Table(_) => {
            return Err(format!("'{key}' is neither text nor a number, true, false or a list"));
        }
    })
}

/// Returns the setting of an option, or `None` for a flag that is false.
fn setting(command: Option<&str>, arg: &Arg, values: &[String]) -> Result<Option<Setting>, String> {
    let option = arg.get_long().unwrap_or_default().to_owned();
    let is_flag = matches!(arg.get_action(), ArgAction::SetTrue);
    let is_list = matches!(arg.get_action(), ArgAction::Append);
    match values {
        [flag] if is_flag && flag == "false" => return Ok(None),
        [flag] if is_flag && flag == "true" => {}
        _ if is_flag => return Err(format!("'{option}' must be true or false")),
        [_] => {}
        _ if is_list => {}
        _ => return Err(format!("'{option}' takes one value")),
    }
    let (command, id) = (command.map(str::to_owned), arg.get_id().to_string());
    Ok(Some(Setting { command, option, values: values.to_vec(), id }))
}

/// Checks that the option takes the values, as if they were typed.
fn check(command: &Command, setting: &Setting) -> Result<(), String> {
    use clap::error::ErrorKind;
    // The command without its own rules, such as those about required arguments.
    let of = match &setting.command {
        Some(name) => command.get_subcommands().find(|of| of.get_name() == name),
        None => Some(command),
    };
    let Some(arg) = of.and_then(|of| option(of, &setting.option)) else { return Ok(()) };
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return Ok(());
    }
    for value in &setting.values {
        let mut words = vec!["forebay".to_owned()];
        words.extend(setting.command.clone());
        words.push(format!("--{}={value}", setting.option));
        let Err(error) = command.clone().try_get_matches_from(words) else { continue };
        if matches!(error.kind(), ErrorKind::InvalidValue | ErrorKind::ValueValidation) {
            let text = crate::usage::line(&error);
            return Err(text.strip_prefix("error: ").unwrap_or(&text).to_owned());
        }
    }
    Ok(())
}

/// Makes a setting the default of its option. Those of all commands are read where environment variables are.
fn with_default(command: Command, setting: &Setting) -> Command {
    let Some(name) = &setting.command else { return command };
    let values: Vec<&'static str> =
        setting.values.iter().map(|value| &*Box::leak(value.clone().into_boxed_str())).collect();
    let id: &'static str = Box::leak(setting.id.clone().into_boxed_str());
    command.mut_subcommand(name, |of| of.mut_arg(id, |arg| arg.default_values(values)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;

    fn read(text: &str) -> Result<Vec<Setting>, String> {
        let table: Table = text.parse().map_err(|error| in_one_line(&error))?;
        let command = args::command();
        let set = settings(&command, &table)?;
        set.iter().try_for_each(|setting| check(&command, setting))?;
        Ok(set)
    }

    fn value(set: &[Setting], command: &str, option: &str) -> Option<Vec<String>> {
        let is = |of: &&Setting| of.command.as_deref() == Some(command) && of.option == option;
        set.iter().rev().find(is).map(|of| of.values.clone())
    }

    #[test]
    fn keys_are_options_of_all_commands_or_of_one() {
        let text = "models = '/m'\nram = '8GiB'\n[run]\nram = '4GiB'\nstop = ['a', 'b']\nstats = true\n[serve]\nport = 9000\n";
        let set = read(text).unwrap();
        assert_eq!(value(&set, "run", "ram"), Some(vec!["4GiB".into()]));
        assert_eq!(value(&set, "serve", "ram"), Some(vec!["8GiB".into()]));
        assert_eq!(value(&set, "run", "stop"), Some(vec!["a".into(), "b".into()]));
        assert_eq!(value(&set, "run", "stats"), Some(vec!["true".into()]));
        assert_eq!(value(&set, "serve", "port"), Some(vec!["9000".into()]));
        let models = set.iter().find(|of| of.option == "models").unwrap();
        assert_eq!((models.command.as_deref(), models.values[0].as_str()), (None, "/m"));
    }

    #[test]
    fn what_no_option_takes_is_refused() {
        for (text, why) in [
            ("rma = '8GiB'", "unknown key 'rma'; there are: "),
            ("[run]\nport = 1", "unknown key 'port' in [run]"),
            ("[walk]\nram = '8GiB'", "[walk] is no command"),
            ("[run]\nram = 8", "did you mean 8GiB?"),
            ("[run]\ntemperature = -1.0", "must be a number of at least 0"),
            ("[run]\nstats = 'yes'", "must be true or false"),
            ("[run]\nram = ['1GiB', '2GiB']", "takes one value"),
            ("[run]\nforce = true", "unknown key 'force'"),
            ("[run]\nram = 1979-05-27", "neither text nor a number"),
            ("log = 'loud'", "invalid value 'loud'"),
            ("ram 8GiB", "1"),
            ("[run.more]\nram = '1GiB'", "unknown key 'more' in [run]"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(why) && !said.contains('\n'), "{text}: {said}");
        }
    }

    #[test]
    fn every_option_takes_its_default() {
        let command = args::command();
        let set = Setting {
            command: Some("run".into()),
            option: "ram".into(),
            values: vec!["1GiB".into()],
            id: "ram".into(),
        };
        let command = with_default(command, &set);
        let ram = |words: &[&str]| {
            let matches = command.clone().try_get_matches_from(words).unwrap();
            matches.subcommand().unwrap().1.get_one::<u64>("ram").copied()
        };
        assert_eq!(ram(&["forebay", "run", "m"]), Some(1 << 30));
        assert_eq!(ram(&["forebay", "run", "m", "--ram", "2GiB"]), Some(2 << 30));
        assert_eq!(ram(&["forebay", "bench", "m"]), None);
    }
}
