//! Ctrl-C: the first ends the answer, the second the program; outside an answer the first does.
//! Work that must clean up after itself is asked to stop, and never cut off.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::output;

/// The status of a program that SIGINT ended, as shells report it (128 + 2).
pub const INTERRUPTED: u8 = 130;

static ANSWERING: AtomicBool = AtomicBool::new(false);
static PATIENT: AtomicBool = AtomicBool::new(false);
static PRESSES: AtomicU32 = AtomicU32::new(0);
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Installs the handler. Without one (some sandboxes forbid it) Ctrl-C ends the program as usual.
pub fn install() {
    if let Err(error) = ctrlc::set_handler(on_press) {
        tracing::warn!("Ctrl-C ends the program at once: no handler could be set: {error}");
    }
}

fn on_press() {
    let first = PRESSES.fetch_add(1, Ordering::SeqCst) == 0;
    let patient = PATIENT.load(Ordering::SeqCst);
    if ANSWERING.load(Ordering::SeqCst) && (first || patient) {
        return;
    }
    if let Ok(paths) = UNFINISHED.lock() {
        for path in paths.iter() {
            let _ = std::fs::remove_file(path);
        }
    }
    output::tell!();
    std::process::exit(INTERRUPTED.into());
}

/// While it lives, the first Ctrl-C asks for the end of the answer instead of ending the program.
pub struct Answer(());

impl Answer {
    pub fn begin() -> Answer {
        PATIENT.store(false, Ordering::SeqCst);
        Answer::start()
    }

    /// As [`begin`](Answer::begin), and further presses do not end the program either: the work
    /// removes its unfinished file first, which takes a moment.
    pub fn begin_patient() -> Answer {
        PATIENT.store(true, Ordering::SeqCst);
        Answer::start()
    }

    fn start() -> Answer {
        PRESSES.store(0, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        Answer(())
    }

    /// Whether Ctrl-C was pressed since this answer began.
    pub fn interrupted(&self) -> bool {
        PRESSES.load(Ordering::SeqCst) > 0
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
    }
}

/// Names a file that must not be left behind when Ctrl-C ends the program.
pub fn watch(path: &Path) {
    if let Ok(mut paths) = UNFINISHED.lock() {
        paths.push(path.to_path_buf());
    }
}

/// The file is finished or removed.
pub fn unwatch(path: &Path) {
    if let Ok(mut paths) = UNFINISHED.lock() {
        paths.retain(|other| other != path);
    }
}
