//! The document that a command with `--json` prints if an interrupt ended it before it had its own document.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde::Serialize;

use crate::args::Command;
use crate::failure::Outcome;
use crate::output;

#[derive(Serialize)]
struct Document {
    end: &'static str,
    command: &'static str,
    seconds: f64,
    /// Progress of the current piece of work, if its size is known.
    progress: Option<Progress>,
}

/// Progress of a piece of work.
#[derive(Clone, Copy, Serialize)]
pub struct Progress {
    pub unit: &'static str,
    pub done: u64,
    pub total: u64,
}

/// The running command, if it prints JSON.
struct Running {
    command: &'static str,
    started: Instant,
}

static RUNNING: Mutex<Option<Running>> = Mutex::new(None);
static PROGRESS: Mutex<Option<Progress>> = Mutex::new(None);
/// True once standard output has its one document. A thread holds the lock until it has written the document, so that
/// no other thread ends the program before that.
static PRINTED: Mutex<bool> = Mutex::new(false);

/// Registers the command. Call this before it runs.
pub fn begin(command: &Command) {
    let Some(command) = in_json(command) else { return };
    if let Ok(mut running) = RUNNING.lock() {
        *running = Some(Running { command, started: Instant::now() });
    }
}

/// Stores the progress of the current piece of work.
pub fn note(progress: Progress) {
    if let Ok(mut last) = PROGRESS.lock() {
        *last = Some(progress);
    }
}

/// Returns the right to print the one document, or `None` if it is printed. Waits while another thread prints it.
pub fn claim() -> Option<MutexGuard<'static, bool>> {
    let mut printed = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_first = !std::mem::replace(&mut *printed, true);
    is_first.then_some(printed)
}

/// Prints the document, unless the command prints no JSON or has printed its own document.
pub fn print() -> Outcome {
    let Some((command, started)) = RUNNING
        .lock()
        .ok()
        .and_then(|running| running.as_ref().map(|running| (running.command, running.started)))
    else {
        return Ok(());
    };
    let progress = PROGRESS.lock().ok().and_then(|last| *last);
    let seconds = started.elapsed().as_secs_f64();
    output::json(&Document { end: "interrupted", command, seconds, progress })
}

/// Returns the name of the command if it was asked for JSON.
fn in_json(command: &Command) -> Option<&'static str> {
    let (json, name) = match command {
        Command::Run(args) => (args.json, "run"),
        Command::Plan(args) => (args.json, "plan"),
        Command::Batch(_) => (false, "batch"),
        Command::Serve(_) => (false, "serve"),
        Command::Ps(args) => (args.json, "ps"),
        Command::Pull(args) => (args.json, "pull"),
        Command::List(args) => (args.json, "list"),
        Command::Rm(_) => (false, "rm"),
        Command::Kv(args) => (args.json, "kv"),
        Command::Bench(args) => (args.json, "bench"),
        Command::Assess(args) => (args.json, "assess"),
        Command::TraceIo(args) => (args.json, "trace-io"),
        Command::Replay(args) => (args.json, "replay"),
        Command::Load(args) => (args.json, "load"),
        Command::Doctor(args) => (args.json, "doctor"),
        Command::Inspect(args) => (args.json, "inspect"),
        Command::Logits(args) => (args.json, "logits"),
        Command::Tokenize(args) => (args.json, "tokenize"),
        Command::Render(args) => (args.json, "render"),
        Command::Synth(args) => (args.json, "synth"),
        Command::Pack(args) => (args.json, "pack"),
        Command::Verify(args) => (args.json, "verify"),
        Command::Completions(_) => (false, "completions"),
        Command::Config(args) => (args.json, "config"),
        Command::Man(_) => (false, "man"),
    };
    json.then_some(name)
}
