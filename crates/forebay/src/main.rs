//! The command line: `forebay run`, `serve`, `ps`, `pull`, `list`, `rm`, `plan`, `bench`, `load`, `doctor`, `inspect`,
//! `logits`, `tokenize`, `render`, `synth`, `pack`, `verify`, `trace-io`, `replay`, `assess`, `completions`, `config`.
//!
//! `args` defines the arguments, `config` resolves them, and `commands` runs the commands. Results go to standard
//! output. Progress, logs and statistics for people go to standard error.

mod args;
mod chat;
mod commands;
mod config;
mod demo;
mod failure;
mod help;
mod interrupt;
mod kv_disk;
mod library;
mod log;
mod open;
mod option_names;
mod output;
mod outputs;
mod progress;
mod requests;
mod routing_file;
mod session_plan;
mod settings;
mod size;
mod state;
mod statistics;
mod template_process;
mod text_input;
mod tracing_file;
mod unfinished;
mod usage;

use std::path::PathBuf;
use std::process::ExitCode;

use args::{Cli, Command};
use failure::{Failure, Outcome};

fn main() -> ExitCode {
    option_names::use_flags();
    if let Some(status) = template_process::run_if_asked() {
        return status;
    }
    template_process::isolate();
    commands::completions::answer_if_asked();
    let command = match settings::apply(args::command()) {
        Ok(command) => command,
        Err(why) => {
            output::tell!("error: {why}");
            return ExitCode::from(2);
        }
    };
    let arguments = match args::foreign::translate(&command, std::env::args_os().collect()) {
        Ok(arguments) => arguments,
        Err(sentence) => return usage::refuse(&sentence),
    };
    let cli = match args::parse_with(command, arguments) {
        Ok(cli) => cli,
        Err(error) => return usage::report(&error),
    };
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if let Failure::Interrupted = failure {
                // A failed write can be ignored: the exit status reports the interrupt, too.
                let _ = unfinished::print();
                output::tell!("interrupted");
            } else if let Some(line) = failure.line() {
                output::tell!("error: {line}");
            }
            ExitCode::from(failure.status())
        }
    }
}

fn run(mut cli: Cli) -> Outcome {
    log::start(cli.log)?;
    interrupt::install();
    unfinished::begin(&cli.command);
    library::resolve(&mut cli.command, cli.models.as_deref())?;
    if let Command::Run(args) = &mut cli.command {
        library::pull_if_asked(args, cli.models.as_deref())?;
    }
    dispatch(cli.command, cli.models)
}

/// Runs a command. `models` is the folder of the library, if the user named it.
fn dispatch(command: Command, models: Option<PathBuf>) -> Outcome {
    if has_long_work(&command) {
        interrupt::cooperate();
    }
    match command {
        Command::Run(args) => commands::run::run(args),
        Command::Plan(args) => commands::plan::run(args, models),
        Command::Batch(args) => commands::batch::run(args),
        Command::Serve(args) => commands::serve::run(args, models),
        Command::Ps(args) => commands::ps::run(args),
        Command::Pull(args) => commands::pull::run(args, models),
        Command::List(args) => commands::list::run(args, models),
        Command::Rm(args) => commands::rm::run(args, models),
        Command::Kv(args) => commands::kv::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Replay(args) => commands::replay::run(args),
        Command::Assess(args) => commands::assess::run(args),
        Command::TraceIo(args) => commands::trace_io::run(args),
        Command::Load(args) => commands::load::run(args),
        Command::Doctor(args) => commands::doctor::run(args, models),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Tokenize(args) => commands::tokenize::run(args),
        Command::Render(args) => commands::render::run(args),
        Command::Synth(args) => commands::synth::run(args),
        Command::Pack(args) => commands::pack::run(args),
        Command::Verify(args) => commands::verify::run(args),
        Command::Completions(args) => commands::completions::run(args),
        Command::Config(args) => commands::config::run(args, models),
        Command::Man(args) => commands::man::run(args),
    }
}

/// Returns true if a command passes the interrupt token to its work. The other commands take only moments.
fn has_long_work(command: &Command) -> bool {
    match command {
        Command::Run(_)
        | Command::Batch(_)
        | Command::Serve(_)
        | Command::Pull(_)
        | Command::Plan(_)
        | Command::Bench(_)
        | Command::Replay(_)
        | Command::Assess(_)
        | Command::Load(_)
        | Command::Doctor(_)
        | Command::Logits(_)
        | Command::Synth(_)
        | Command::Pack(_)
        | Command::Kv(_)
        | Command::Verify(_) => true,
        Command::Ps(_)
        | Command::List(_)
        | Command::Rm(_)
        | Command::TraceIo(_)
        | Command::Inspect(_)
        | Command::Tokenize(_)
        | Command::Render(_)
        | Command::Completions(_)
        | Command::Config(_)
        | Command::Man(_) => false,
    }
}
