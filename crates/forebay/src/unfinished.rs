//! What a command with `--json` prints when an interrupt ended it before it had its own document.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// The work that was under way, as far as its size is known.
    progress: Option<Progress>,
}

/// How far a piece of work is.
#[derive(Clone, Copy, Serialize)]
pub struct Progress {
    pub unit: &'static str,
    pub done: u64,
    pub total: u64,
}

/// The command that runs, if it prints JSON.
struct Running {
    command: &'static str,
    started: Instant,
}

static RUNNING: Mutex<Option<Running>> = Mutex::new(None);
static PROGRESS: Mutex<Option<Progress>> = Mutex::new(None);
/// Whether standard output has its one document.
static PRINTED: AtomicBool = AtomicBool::new(false);

/// Call this before the command runs.
pub fn begin(command: &Command) {
    let Some(command) = in_json(command) else { return };
    if let Ok(mut running) = RUNNING.lock() {
        *running = Some(Running { command, started: Instant::now() });
    }
}

/// Notes how far the present piece of work is.
pub fn note(progress: Progress) {
    if let Ok(mut last) = PROGRESS.lock() {
        *last = Some(progress);
    }
}

/// Says that a document is about to be printed. `false` if there was one already.
pub fn claim() -> bool {
    !PRINTED.swap(true, Ordering::SeqCst)
}

/// Prints the document, unless the command prints no JSON or has printed its own.
pub fn print() -> Outcome {
    let Some((command, started)) = RUNNING
        .lock()
        .ok()
        .and_then(|running| running.as_ref().map(|running| (running.command, running.started)))
    else {
        return Ok(());
    };
    // Two threads may come here when a second press meets the end of the command.
    if !claim() {
        return Ok(());
    }
    let progress = PROGRESS.lock().ok().and_then(|last| *last);
    let seconds = started.elapsed().as_secs_f64();
    output::json(&Document { end: "interrupted", command, seconds, progress })
}

/// The name of a command that was asked for JSON.
fn in_json(command: &Command) -> Option<&'static str> {
    let (json, name) = match command {
        Command::Run(args) => (args.json, "run"),
        Command::Plan(args) => (args.json, "plan"),
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
    };
    json.then_some(name)
}
