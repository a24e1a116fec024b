//! The command line: `forebay run`, `plan`, `bench`, `load`, `doctor`, `inspect`, `logits`, `tokenize`,
//! `render`, `synth`, `pack`, `verify`, `trace-io`, `replay`, `assess`.
//!
//! `args` is what is typed, `config` what it means, `commands` what is done about it. Results go to
//! standard output; progress, logs and statistics for people go to standard error.

mod answer;
mod args;
mod commands;
mod config;
mod conversation;
mod demo;
mod failure;
mod help;
mod interrupt;
mod open;
mod output;
mod pending;
mod progress;
mod routing_file;
mod size;
mod statistics;
mod stops;
mod tracing_file;
mod usage;

use std::process::ExitCode;

use clap::Parser as _;

use args::{Cli, Command};
use failure::Outcome;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage::report(&error),
    };
    start_log();
    interrupt::install();
    match dispatch(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Some(line) = failure.line() {
                output::tell!("error: {line}");
            }
            ExitCode::from(failure.status())
        }
    }
}

fn dispatch(command: Command) -> Outcome {
    match command {
        Command::Run(args) => commands::run::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Replay(args) => commands::replay::run(args),
        Command::Assess(args) => commands::assess::run(args),
        Command::TraceIo(args) => commands::trace_io::run(args),
        Command::Load(args) => commands::load::run(args),
        Command::Doctor(args) => commands::doctor::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Tokenize(args) => commands::tokenize::run(args),
        Command::Render(args) => commands::render::run(args),
        Command::Synth(args) => commands::synth::run(args),
        Command::Pack(args) => commands::pack::run(args),
        Command::Verify(args) => commands::verify::run(args),
        Command::Completions(args) => commands::completions::run(args),
    }
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("FOREBAY_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}
