//! Named points of the program at which a test can send a signal to the process. Tests of kills and interrupts then do
//! not depend on time.

use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::process::{Signal, getpid, kill_process};

/// The variable that names a point: `SIGNAL:COUNT:POINT`, such as `KILL:3:answer added`. The process gets the signal when it
/// reaches the point for the third time. Only tests set it.
const VARIABLE: &str = "FOREBAY_SIGNAL_AT";

struct Wanted {
    signal: Signal,
    count: usize,
    point: String,
    reached: Mutex<usize>,
}

/// Tells tests that the program is at this point. Without the variable, this does nothing.
///
/// # Panics
/// Panics if the variable is set to something else, because a test would then test nothing.
pub fn reached(point: &str) {
    static WANTED: OnceLock<Option<Wanted>> = OnceLock::new();
    let wanted = WANTED.get_or_init(|| {
        let text = std::env::var(VARIABLE).ok()?;
        let wanted = parse(&text);
        assert!(wanted.is_some(), "{VARIABLE} must be SIGNAL:COUNT:POINT, not {text:?}");
        wanted
    });
    let Some(wanted) = wanted.as_ref().filter(|wanted| wanted.point == point) else { return };
    // Another thread that reaches the point waits until the signal is sent, so it does nothing more before it arrives.
    let mut reached = wanted.reached.lock().unwrap_or_else(PoisonError::into_inner);
    *reached += 1;
    if *reached == wanted.count {
        // A process may always send itself a signal.
        let _ = kill_process(getpid(), wanted.signal);
    }
}

fn parse(text: &str) -> Option<Wanted> {
    let mut parts = text.splitn(3, ':');
    let signal = match parts.next()? {
        "INT" => Signal::INT,
        "KILL" => Signal::KILL,
        "STOP" => Signal::STOP,
        "TERM" => Signal::TERM,
        _ => return None,
    };
    let count = parts.next()?.parse().ok().filter(|count| *count > 0)?;
    let point = parts.next()?.to_owned();
    Some(Wanted { signal, count, point, reached: Mutex::new(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_has_a_signal_a_count_and_a_name() {
        let wanted = parse("KILL:3:answer added: all").unwrap();
        assert_eq!((wanted.signal, wanted.count), (Signal::KILL, 3));
        assert_eq!(wanted.point, "answer added: all");
        for text in ["", "KILL", "KILL:0:x", "HUP:1:x", "KILL:x:x", "KILL:1"] {
            assert!(parse(text).is_none(), "{text}");
        }
    }
}
