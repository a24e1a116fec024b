//! Where weights are outside of the device.

use crate::device::DeviceError;
use crate::room::Group;

/// Weights outside of the device: in RAM, or in files, from which they are read ahead of their use.
pub trait WeightSource<W>: Send + Sync + 'static {
    /// Returns the weights of a group, which may be on their way from the disk.
    ///
    /// # Errors
    /// Returns an error if they cannot be read.
    fn take(&self, group: Group) -> Result<W, DeviceError>;

    /// Returns for how many groups ahead [`WeightSource::expect`] wants to know them.
    fn expects_max(&self) -> usize {
        0
    }

    /// Tells which groups will be taken, the next one first.
    fn expect(&self, groups: &[Group]) {
        let _ = groups;
    }

    /// Tells which groups are taken in each pass, in the order of their first use, because they do not stay in the device.
    fn plan(&self, groups: &[Group]) {
        let _ = groups;
    }

    /// Stops reading. What is taken from now on may fail.
    fn close(&self) {}
}
