//! Keeps what the user types during an answer out of the answer. It appears at the next prompt.

use std::io;
use std::sync::{Mutex, PoisonError};

use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
};

use super::input;
use crate::interrupt;
use crate::output;

/// Makes the terminal mark pasted text, so that its line breaks do not end the message.
const MARK_PASTES: &str = "\u{1b}[?2004h";
const DO_NOT_MARK_PASTES: &str = "\u{1b}[?2004l";

/// Modes of the terminal before it was made quiet.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Guard of a terminal that does not show what is typed.
#[must_use]
pub struct Quiet(());

/// Makes the terminal quiet until the guard is dropped. Keys wait for the line editor as they were typed; Ctrl-C still
/// is a signal. Does nothing if there is no line editor.
pub fn quiet() -> Quiet {
    interrupt::at_end(restore);
    let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
    if input::has_editor()
        && before.is_none()
        && let Ok(modes) = tcgetattr(io::stdin())
    {
        let mut silent = modes.clone();
        silent.local_modes.remove(LocalModes::ECHO | LocalModes::ECHONL | LocalModes::ICANON);
        // Otherwise the editor would take Enter for Ctrl-J.
        silent.input_modes.remove(InputModes::ICRNL);
        silent.special_codes[SpecialCodeIndex::VMIN] = 1;
        silent.special_codes[SpecialCodeIndex::VTIME] = 0;
        if tcsetattr(io::stdin(), OptionalActions::Now, &silent).is_ok() {
            *before = Some(modes);
            output::command_terminal(MARK_PASTES);
        }
    }
    Quiet(())
}

/// Gives the terminal back as it was. A second signal calls this before it ends the program.
pub fn restore() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(modes) = before {
        output::command_terminal(DO_NOT_MARK_PASTES);
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &modes);
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        restore();
    }
}
