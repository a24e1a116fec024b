//! How long the work of a pass takes without its waits for weights.

use crate::device::{Device, DeviceError};
use crate::order::Unit;

/// When the modules of a pass were used.
pub struct Timing<M> {
    uses: Vec<Use<M>>,
    /// The end of the last use so far.
    end: Option<M>,
}

struct Use<M> {
    unit: Unit,
    /// When the work before was done, and when the weights were there.
    arrives: M,
    ready: M,
}

/// The modules that a pass uses, each with the seconds from the moment at which its weights are there to the next use.
pub type TimedUses = Vec<(Unit, f64)>;

impl<M> Timing<M> {
    pub fn new() -> Timing<M> {
        Timing { uses: Vec::new(), end: None }
    }

    pub fn add(&mut self, unit: Unit, arrives: M, ready: M) {
        self.uses.push(Use { unit, arrives, ready });
    }

    /// Notes that a use has ended, behind those that were added.
    pub fn end(&mut self, end: M) {
        self.end = Some(end);
    }

    /// Waits until the device is behind the pass, and returns its times.
    ///
    /// # Errors
    /// Returns an error if the device fails.
    pub fn resolve<D: Device<Moment = M>>(&self, device: &D) -> Result<TimedUses, DeviceError> {
        let next = self.uses.iter().skip(1).map(|of| &of.arrives).chain(&self.end);
        let uses = self.uses.iter().zip(next);
        uses.map(|(of, next)| Ok((of.unit, device.seconds_between(&of.ready, next)?.max(0.0))))
            .collect()
    }
}
