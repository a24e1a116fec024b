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

    /// Returns true if keys and values of a sequence may still be on their way, as far as [`Runner::take_arrivals`] knows.
    pub fn is_arriving(&self, sequence: SequenceId) -> bool {
        self.arriving.iter().any(|(of, _)| *of == sequence)
    }

    /// Takes note of what has arrived.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn take_arrivals(&mut self) -> Result<(), EngineError> {
        // In the order in which copies began.
        while let Some((_, restoring)) = self.arriving.first()
            && self.decoder.backend_mut().has_restored(*restoring, false)?
        {
            self.arriving.remove(0);
        }
        Ok(())
    }

    /// Waits for the keys and values of a sequence.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn wait_for_arrival(&mut self, sequence: SequenceId) -> Result<(), EngineError> {
        let Some(at) = self.arriving.iter().position(|(of, _)| *of == sequence) else {
            return Ok(());
        };
        self.decoder.backend_mut().has_restored(self.arriving[at].1, true)?;
        self.arriving.remove(at);
        Ok(())
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
