//! Handles Ctrl-C, SIGTERM and SIGXFSZ. The first signal asks the command to stop, the second ends the program immediately.
//!
//! Commands pass [`token`] to all long work. After a signal they soon end with [`Failure::Interrupted`] and their
//! partial result. No code checks the token while a command waits for input ([`waiting_for_input`]) or if it has no
//! long work. In these cases the first signal ends the program.
//!
//! [`Failure::Interrupted`]: crate::failure::Failure::Interrupted

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use forebay_engine::Interrupt;
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::{output, unfinished};

/// Exit status of an interrupted command, as shells report SIGINT (128 + 2).
pub const INTERRUPTED: u8 = 130;

/// Longest time that the final output may take before the program exits. The reader of its output may be blocked, and a
/// busy machine may run the thread that writes it late.
const LAST_WORDS: Duration = Duration::from_secs(1);

static TOKEN: LazyLock<Interrupt> = LazyLock::new(Interrupt::new);
static COOPERATES: AtomicBool = AtomicBool::new(false);
static WAITING: AtomicUsize = AtomicUsize::new(0);
static AT_END: Mutex<Option<fn()>> = Mutex::new(None);

/// Declares what a second signal does before it ends the program.
pub fn at_end(last: fn()) {
    *AT_END.lock().unwrap_or_else(PoisonError::into_inner) = Some(last);
}

/// Installs the signal handlers. Without them (some sandboxes forbid it), the signals end the program as usual.
pub fn install() {
    // A write beyond the limit of a file's size (ulimit -f) would end the program by a signal. With a handler the write
    // fails, which is an error like any other.
    if let Err(error) = signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))) {
        tracing::warn!("a file that becomes too large ends the program at once: {error}");
    }
    let watch = |mut signals: Signals| {
        thread::Builder::new().name("signals".into()).spawn(move || {
            for _ in signals.forever() {
                on_signal();
            }
        })
    };
    if let Err(error) = Signals::new([SIGINT, SIGTERM]).and_then(watch) {
        tracing::warn!("Ctrl-C ends the program at once: no handler could be set: {error}");
    }
}

/// Returns the flag that the first signal sets.
pub fn token() -> Interrupt {
    TOKEN.clone()
}

/// Clears earlier signals, so that the next piece of work can begin. A chat calls this before each answer.
pub fn reset() {
    TOKEN.clear();
}

/// Declares that the command checks [`token`] and ends by itself from now on.
pub fn cooperate() {
    COOPERATES.store(true, Ordering::SeqCst);
}

/// Guard of a command that waits for input. While it exists, a signal ends the program immediately.
#[must_use]
pub struct Waiting(());

/// Declares that the command waits for input until the guard is dropped. Call this before blocking on standard input.
pub fn waiting_for_input() -> Waiting {
    WAITING.fetch_add(1, Ordering::SeqCst);
    Waiting(())
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITING.fetch_sub(1, Ordering::SeqCst);
    }
}

fn on_signal() {
    let waiting = WAITING.load(Ordering::SeqCst) > 0;
    let again = TOKEN.is_requested();
    if COOPERATES.load(Ordering::SeqCst) && !waiting && !again {
        TOKEN.request();
        return;
    }
    end_at_once();
}

fn end_at_once() -> ! {
    let last = *AT_END.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(last) = last {
        last();
    }
    forebay_store::remove_unfinished();
    // This runs on a separate thread, because the command may hold the lock of standard output while its reader is
    // blocked.
    let (said, heard) = mpsc::channel();
    thread::spawn(move || {
        let _ = unfinished::print();
        output::tell!();
        let _ = said.send(());
    });
    let _ = heard.recv_timeout(LAST_WORDS);
    std::process::exit(INTERRUPTED.into());
}
