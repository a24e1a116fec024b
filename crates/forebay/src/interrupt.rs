//! Ctrl-C and SIGTERM. The first asks the command to stop, the second ends the program at once.
//!
//! Commands hand [`token`] to all long work and end with [`Failure::Interrupted`] soon after a press, with what they have.
//! Nothing looks at the token while a command waits for input ([`waiting_for_input`]) or has no long work at all, so there
//! the first press ends the program.
//!
//! [`Failure::Interrupted`]: crate::failure::Failure::Interrupted

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{LazyLock, mpsc};
use std::thread;
use std::time::Duration;

use forebay_engine::Interrupt;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::{output, unfinished};

/// The exit status of a command that did not end by itself, as shells report SIGINT (128 + 2).
pub const INTERRUPTED: u8 = 130;

/// How long a program that ends at once waits for its last words, which nobody may be reading.
const LAST_WORDS: Duration = Duration::from_millis(200);

static TOKEN: LazyLock<Interrupt> = LazyLock::new(Interrupt::new);
static COOPERATES: AtomicBool = AtomicBool::new(false);
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Installs the handler. Without one (some sandboxes forbid it) the signals end the program as usual.
pub fn install() {
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

/// The flag that the first press raises.
pub fn token() -> Interrupt {
    TOKEN.clone()
}

/// Forgets presses, so that the next piece of work can begin: before each answer of a chat.
pub fn reset() {
    TOKEN.clear();
}

/// From now on, the command looks at [`token`] and ends by itself.
pub fn cooperate() {
    COOPERATES.store(true, Ordering::SeqCst);
}

/// While it lives, the command waits for input, and a press ends the program at once.
#[must_use]
pub struct Waiting(());

/// Call this before blocking on standard input.
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
    forebay_store::remove_unfinished();
    // A thread of its own: the command may hold standard output for as long as its reader sleeps.
    let (said, heard) = mpsc::channel();
    thread::spawn(move || {
        let _ = unfinished::print();
        output::tell!();
        let _ = said.send(());
    });
    let _ = heard.recv_timeout(LAST_WORDS);
    std::process::exit(INTERRUPTED.into());
}
