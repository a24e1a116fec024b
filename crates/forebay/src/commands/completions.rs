//! `forebay completions` prints the completion script of a shell.

use clap::CommandFactory as _;

use crate::args::{Cli, CompletionsArgs};
use crate::failure::Outcome;
use crate::output;

pub fn run(args: CompletionsArgs) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "forebay", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}
