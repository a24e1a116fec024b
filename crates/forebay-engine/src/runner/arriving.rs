//! Sequences whose keys and values are still being copied from host memory. They run no pass before these have arrived, while
//! other sequences do.

use super::Runner;
use crate::EngineError;
use crate::kv::SequenceId;

impl Runner {
    /// Notes that a sequence has begun whose rows may be in blocks for which copies are under way: its own, or those of others that
    /// began before it.
    pub(super) fn note_arriving(&mut self, sequence: SequenceId) -> Result<(), EngineError> {
        let last = self.last_restoring;
        if !self.decoder.backend_mut().has_restored(last, false)? {
            self.arriving.push((sequence, last));
        }
        Ok(())
    }

    /// Returns true if all keys and values of a sequence are there. Waits for them if `waits`.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn has_arrived(&mut self, sequence: SequenceId, waits: bool) -> Result<bool, EngineError> {
        let Some(at) = self.arriving.iter().position(|(of, _)| *of == sequence) else {
            return Ok(true);
        };
        let has_arrived = self.decoder.backend_mut().has_restored(self.arriving[at].1, waits)?;
        if has_arrived {
            self.arriving.swap_remove(at);
        }
        Ok(has_arrived)
    }

    /// Waits for all keys and values that are being copied.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub(super) fn wait_for_arrivals(&mut self) -> Result<(), EngineError> {
        self.decoder.backend_mut().has_restored(self.last_restoring, true)?;
        self.arriving.clear();
        Ok(())
    }
}
