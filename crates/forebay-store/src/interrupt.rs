//! Asking long work to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::StoreError;

/// How long a wait may last before it looks at its [`Interrupt`] again. A request to stop is noticed after this time at
/// the latest; twenty wake-ups per second of waiting cost nothing.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// How long the reads that an interrupted engine still has at the disk are waited for when it is dropped. The memory of
/// those that take longer is leaked, never reused.
pub(crate) const DRAIN: Duration = Duration::from_millis(100);

/// A request to stop, shared by those who ask and those who work. Clones share one flag.
///
/// Work that was given a clone ends soon after [`Interrupt::request`] with its error's `Interrupted` variant. It releases
/// what it holds on the way, as after any other error.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// A flag that nobody has raised.
    pub fn new() -> Interrupt {
        Interrupt::default()
    }

    /// Asks the work to stop. May be called from any thread and any number of times.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Whether the work was asked to stop.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Takes the request back, so that the next piece of work can begin. Call it only when no work that holds this flag is
    /// running: work that is about to stop might go on.
    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// # Errors
    /// [`StoreError::Interrupted`] if the work was asked to stop.
    pub fn check(&self) -> Result<(), StoreError> {
        match self.is_requested() {
            true => Err(StoreError::Interrupted),
            false => Ok(()),
        }
    }

    /// The flag itself, for crates that know nothing of this type.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_a_request_until_it_is_cleared() {
        let (asks, works) = {
            let interrupt = Interrupt::new();
            (interrupt.clone(), interrupt)
        };
        assert!(works.check().is_ok());
        asks.request();
        assert!(works.is_requested() && works.flag().load(Ordering::SeqCst));
        assert!(matches!(works.check(), Err(StoreError::Interrupted)));
        works.clear();
        assert!(asks.check().is_ok());
    }
}
