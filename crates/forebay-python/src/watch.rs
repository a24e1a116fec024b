//! Progress of long work, and its end by Ctrl-C or an exception.

use std::time::{Duration, Instant};

use forebay_store::Interrupt;
use pyo3::prelude::*;

/// Shortest time between two looks at the signals of the interpreter, for which the GIL is taken.
const LOOK: Duration = Duration::from_millis(50);

/// Looks at the signals of the interpreter, and calls the function for progress, while the GIL is released.
pub struct Watch<'a> {
    progress: Option<&'a Py<PyAny>>,
    /// What the work looks at.
    interrupt: Interrupt,
    looked: Option<Instant>,
    /// The exception that ends the work.
    pub stopped: Option<PyErr>,
}

impl<'a> Watch<'a> {
    pub fn new(progress: Option<&'a Py<PyAny>>, interrupt: Interrupt) -> Watch<'a> {
        Watch { progress, interrupt, looked: None, stopped: None }
    }

    /// Takes a report of progress. It may come often. Returns false if the work should end.
    pub fn tell(&mut self, done: u64, total: u64) -> bool {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK) && done < total {
            return self.stopped.is_none();
        }
        self.looked = Some(Instant::now());
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
