//! Requests to stop long work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::StoreError;

/// Longest time that a wait lasts before it checks its [`Interrupt`] again. A request to stop is noticed within this
/// time. Twenty wake-ups per second of waiting cost nothing.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Longest time that dropping an interrupted engine waits for the reads that it still has at the disk. The memory of
/// reads that take longer is leaked and never reused.
pub(crate) const DRAIN: Duration = Duration::from_millis(100);

/// Longest time that dropping an engine waits for transfers that its device has ended early. Usually they take a
/// millisecond.
pub(crate) const END_EARLY: Duration = Duration::from_secs(10);

/// A flag that asks work to stop, shared by the requester and the work. Clones share one flag.
///
/// Work that was given a clone ends soon after [`Interrupt::request`], with the `Interrupted` variant of its error. It
/// releases its resources, as after any other error.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Creates a flag without a request.
    pub fn new() -> Interrupt {
        Interrupt::default()
    }

    /// Asks the work to stop. It may be called from any thread and any number of times.
    pub fn request(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Returns true if the work was asked to stop.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Withdraws the request, so that the next piece of work can begin. Call it only when no work that holds this flag
    /// is running, because work that is about to stop might continue.
    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    /// Returns an error if the work was asked to stop.
    ///
    /// # Errors
    /// Returns [`StoreError::Interrupted`] if the work was asked to stop.
    pub fn check(&self) -> Result<(), StoreError> {
        match self.is_requested() {
            true => Err(StoreError::Interrupted),
            false => Ok(()),
        }
    }

    /// Returns the flag itself, for crates that do not know this type.
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

/// Makes an error from errors of the parts below it. Each becomes its variant, but a request to stop stays one: `Interrupted`.
#[macro_export]
macro_rules! keep_interrupts {
    ($error:ident { $($variant:ident($part:ident)),* $(,)? }) => {$(
        impl From<$part> for $error {
            fn from(error: $part) -> $error {
                match error {
                    $part::Interrupted => $error::Interrupted,
                    error => $error::$variant(error),
                }
            }
        }
    )*};
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
