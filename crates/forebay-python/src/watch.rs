//! Progress of long work, and its end by Ctrl-C or an exception.

use std::time::{Duration, Instant};

use forebay_store::Interrupt;
use pyo3::prelude::*;

/// Time between two looks at the signals of the interpreter, for which the GIL is taken, and between two reports of progress.
pub const LOOK: Duration = Duration::from_millis(50);

/// Time of the last look.
#[derive(Default)]
pub struct Looks(Option<Instant>);

impl Looks {
    /// Returns true if it is time for a look, which then counts. The last one of all is always due.
    pub fn is_due(&mut self, is_last: bool) -> bool {
        let is_due = is_last || self.0.is_none_or(|at| at.elapsed() >= LOOK);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// Looks at the signals of the interpreter, and calls the function for progress, while the GIL is released.
pub struct Watch<'a> {
    progress: Option<&'a Py<PyAny>>,
    /// Interrupt that ends the work.
    interrupt: Interrupt,
    looks: Looks,
    /// The exception that ends the work.
    pub stopped: Option<PyErr>,
}

impl<'a> Watch<'a> {
    pub fn new(progress: Option<&'a Py<PyAny>>, interrupt: Interrupt) -> Watch<'a> {
        Watch { progress, interrupt, looks: Looks::default(), stopped: None }
    }

    /// Takes a report of progress. It may come often. Returns false if the work should end.
    pub fn tell(&mut self, done: u64, total: u64) -> bool {
        if !self.looks.is_due(done >= total) {
            return self.stopped.is_none();
        }
        let told = Python::attach(|py| {
            py.check_signals()?;
            if let Some(progress) = self.progress {
                progress.call1(py, (done, total))?;
            }
            Ok::<(), PyErr>(())
        });
        if let Err(error) = told {
            self.stopped = Some(error);
            self.interrupt.request();
        }
        self.stopped.is_none()
    }
}
