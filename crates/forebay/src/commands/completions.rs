//! `forebay completions` prints the completion script of a shell. The script asks the program itself, which knows the names
//! of models.

use std::ffi::OsStr;

use clap_complete::CompletionCandidate;
use clap_complete::engine::{PathCompleter, ValueCompleter as _};
use clap_complete::env::{CompleteEnv, Shells};
use forebay_library::{Library, Others};

use crate::args::{self, CompletionsArgs};
use crate::failure::{Outcome, usage};
use crate::{library, output, settings};

/// Variable in which a script asks for completions.
const VARIABLE: &str = "FOREBAY_COMPLETE";

pub fn run(args: CompletionsArgs) -> Outcome {
    let (shells, shell) = (Shells::builtins(), args.shell.to_string());
    let Some(shell) = shells.completer(&shell) else {
        return usage(format!("there are no completions for {shell}"));
    };
    let mut script = Vec::new();
    shell.write_registration(VARIABLE, "forebay", "forebay", "forebay", &mut script)?;
    output::print(&String::from_utf8_lossy(&script))
}

/// Answers a completion script, if it asks, and ends the program.
pub fn answer_if_asked() {
    if std::env::var_os(VARIABLE).is_some() {
        // The configuration file may name the library's folder. A mistake in it is no matter here.
        let _ = settings::apply(args::command());
        CompleteEnv::with_factory(args::command).var(VARIABLE).complete();
    }
}

/// Completes a model: names that can be opened, and paths.
pub fn models(current: &OsStr) -> Vec<CompletionCandidate> {
    let mut found = names(current);
    found.extend(PathCompleter::any().complete(current));
    found
}

/// Completes a name of the library or of another program.
pub fn names(current: &OsStr) -> Vec<CompletionCandidate> {
    let Some(start) = current.to_str() else { return Vec::new() };
    let folder = library::folder(None);
    let listing = folder.and_then(|folder| Library::open(folder).list().ok()).unwrap_or_default();
    let own = listing.entries.into_iter().chain(listing.loose);
    let names = own.chain(Others::of_user().list()).map(|entry| entry.name);
    names.filter(|name| name.starts_with(start)).map(CompletionCandidate::new).collect()
}
